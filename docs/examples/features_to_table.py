"""From a folder of features to a table, and to what the aggregators looked at; in cells, to be run one by one.

    python docs/examples/features_to_table.py [FOLDER]

Runs as it stands, in under a minute on two cores, on 48 slides whose features are made up: 16 numbers a tile, and on
tumour slides a few tiles that differ in two of them. For your own features replace the second cell by the folder that
TRIDENT, CLAM, STAMP or `selfvitmil embed` filled, and a table with the columns slide and label.
"""

# %% What is needed
from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

from selfvitmil.aggregate.base import score_tiles
from selfvitmil.aggregate.train import load_model
from selfvitmil.bags import read_bag
from selfvitmil.engine import Engine
from selfvitmil.settings import EngineSettings
from selfvitmil.stages.compare import compare
from selfvitmil.study import CohortSource, FeatureChoice, open_study

# %% A folder of feature files and a table of labels
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
features = folder / "features_made"
features.mkdir(parents=True)
rng = np.random.default_rng(0)
planted: dict[str, int] = {}  # slide -> how many of its first tiles are the lesion

with (folder / "labels.csv").open("w", newline="") as file:
    table = csv.writer(file)
    table.writerow(["slide", "patient", "label"])
    for k in range(48):
        slide, label = f"case_{k:02d}", "tumor" if k % 2 else "normal"
        vectors = rng.normal(size=(int(rng.integers(80, 160)), 16))
        planted[slide] = int(rng.integers(6, 13)) if label == "tumor" else 0
        vectors[: planted[slide], :2] += 2.5
        with h5py.File(features / f"{slide}.h5", "w") as h5:  # as TRIDENT writes it
            h5["features"] = vectors.astype(np.float32)
            h5["coords"] = np.stack([np.arange(len(vectors)) * 448, np.zeros(len(vectors))], axis=1).astype(np.int64)
            h5["coords"].attrs["patch_size_level0"] = 448
        table.writerow([slide, f"patient_{k:02d}", label])

# %% Train and evaluate several methods on the same slides, splits and seeds
settings = {
    "train": {"split": "k-fold", "folds": 3, "seeds": 2, "epochs": 20},
    "compare": {"methods": ("mean", "max", "dsmil")},
    "evaluate": {"bootstrap": 500},
}
study = open_study(folder / "study", settings, CohortSource(cohort=folder / "labels.csv", features=features))
with Engine(EngineSettings(workers=0)) as workers:
    compared = compare(study, FeatureChoice(folder=features), workers)
print({method: compared.auc(method) for method in compared.methods})

# %% The table: AUC with its interval, and p-values against the mean of all tiles
print((study.root / "results" / "compare" / "table.md").read_text(encoding="utf-8"))

# %% What one of the models looked at, on a slide that it was not trained on
folder_of_model = study.root / "models" / "external" / "features_made" / "dsmil" / "fold0" / "seed0"
module, config = load_model(folder_of_model)
seen = {*config["trained_on"], *config["chosen_on"]}
for slide in [name for name, number in planted.items() if number and name not in seen][:3]:
    (scores,) = score_tiles(module, [read_bag(features / f"{slide}.h5")])
    assert scores.attention_NC is not None  # some aggregators have none; this one has
    weights = scores.attention_NC[:, 0]  # they sum to 1
    hottest = np.argsort(-weights)[: planted[slide]]
    share = weights[: planted[slide]].sum()
    print(
        f"{slide}: probability {scores.bag.probabilities[0]:.3f}; {share:.0%} of the attention is on the lesion's tiles"
    )
    print(f"   of the {planted[slide]} hottest tiles {np.sum(hottest < planted[slide])} are the lesion's")
