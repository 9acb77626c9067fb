"""Whether the demo learns, whatever the seed: the whole demo over several seeds, slides and all.

    python benchmarks/demo_seeds.py [--first 2] [--seeds 5] [--folder FOLDER]

Every seed makes other slides, trains another encoder and other aggregators. Printed are the test AUC of every row and
the share of positive test slides whose highest-scoring tile lies in the lesion; the limits are 0.95 and 0.9 on average,
for the study's own method. The demo's settings were chosen on seeds 0 and 1, so that the first is 2. The last line
is JSON. Takes two minutes a seed.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
import time
from pathlib import Path

from selfvitmil.commands import demo as demo_command
from selfvitmil.commands.demo import SLIDES, start_demo
from selfvitmil.commands.synth import synth
from selfvitmil.engine import Engine
from selfvitmil.study import study_settings

ROWS = ("untrained encoder", "mean colour", "supervised probe")


def demo(study: Path, seed: int) -> dict[str, float]:
    """One whole demo; AUC of the rows, share of hits and seconds."""
    begin = time.perf_counter()
    start_demo(study)
    settings = study_settings(study, {"pretrain": {"seed": seed}, "train": {"seed": seed}})
    with Engine(settings.engine) as engine:
        synth(study / "slides", SLIDES.model_copy(update={"seed": seed}), engine)
        for _ in demo_command.demo(study, settings, engine):
            pass
    method = settings.train.aggregator
    with (study / "results" / "compare" / "table.csv").open(newline="", encoding="utf-8") as file:
        aucs = {row["display_name"]: float(row["auc"]) for row in csv.DictReader(file)}
    scored = json.loads((study / "results" / f"demo_{method}" / "lesions.json").read_text(encoding="utf-8"))
    hits = scored["scores"]["hit_rate"]["value"]
    found = {name: auc for name, auc in aucs.items() if name in (method, "dsmil", *ROWS)}
    return {**found, "hits": hits, "froc": scored["scores"]["froc"]["value"], "seconds": time.perf_counter() - begin}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to keep the studies; by default they are thrown away")
    chosen = parser.parse_args()
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(chosen.first, chosen.first + chosen.seeds):
            found.append(demo((chosen.folder or Path(temporary)) / f"seed{seed}", seed))
            print(f"seed {seed}: " + ", ".join(f"{name} {value:.3f}" for name, value in found[-1].items()), flush=True)
    names = list(found[0])
    print(json.dumps({name: round(sum(each[name] for each in found) / len(found), 4) for name in names}))


if __name__ == "__main__":
    main()
