"""Whether an encoder gets better with time: the same configuration with 1, 2, 4 times the steps, over several seeds.

    python benchmarks/pretrain_budget.py --data FOLDER --steps 500 [--budgets 1 2 4] [--seeds 0 1 2] [--preset quick]
        [--set method="lejepa" --set lr=1e-3 ...] [--methods mean abmil-gated self-vit-mil] [--out RESULTS.jsonl]

FOLDER/tiles.csv lists tiles with patient, field of view and class. Two layouts are known: LungHist700 (columns file,
class, tumour, group, field) and BreakHis (tile, image, patient, label, subtype; tiles in FOLDER/tiles/). Patients are
divided once, 60 : 40; those with normal tissue and those without each for themselves. Self-supervision sees the tiles
of the training patients and no label.

Every run is assessed on tiles and on slides of the other patients:

    knn20, linear   mean accuracy over the classes of 20 nearest neighbours and of a linear classifier
    AUC, hits       synthetic slides: whole fields of one patient's normal tissue; in positive slides some fields are
                    tumour (of the same patient where there is any, else of another), in negative ones they are normal
                    tissue of another patient, so that two patients in one slide say nothing. Aggregators are trained on
                    slides of training patients; AUC on slides of test patients, and the share of positive test slides
                    whose most suspicious tile lies in the lesion

Slides are the same for all runs, so that runs can be compared in pairs. Budget 0 is the untrained network. Printed is a
line per run, then the means with their standard deviation over seeds. `falls` lists budgets whose mean slide AUC lies
below that of the budget before by more than the standard deviation over seeds. The last line is JSON. With --out, each
run is appended to a file as soon as it is done; runs that stand there are not repeated.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from pretrain_quality import values_of
from selfvitmil import metrics
from selfvitmil.aggregate.train import LabelledBag, score, train
from selfvitmil.bags import Bag
from selfvitmil.encoder import Encoder, load_encoder
from selfvitmil.errors import ConfigError
from selfvitmil.pretrain.learner import start_encoder
from selfvitmil.pretrain.probe import embed_tiles, knn_accuracy, linear_accuracy
from selfvitmil.pretrain.sources import TensorTiles
from selfvitmil.pretrain.surroundings import choose_precision
from selfvitmil.pretrain.train import Origin, pretrain
from selfvitmil.settings import PretrainSettings, TrainSettings, parse, resolve_settings

SAME_PATIENT = {"P31": "P07"}
"""Groups of LungHist700 that belong in one fold, as its description asks."""
TRAIN_SHARE = 0.6
SPLIT_SEED = 0
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Tiles:
    """The tiles of a set, and what is known of each."""

    paths: tuple[Path, ...]
    classes: NDArray[np.str_]
    patients: NDArray[np.str_]
    fields: NDArray[np.str_]
    is_tumour: NDArray[np.bool_]


def read_table(folder: Path) -> Tiles:
    """`tiles.csv` in one of the two layouts."""
    with (folder / "tiles.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = set(rows[0]) if rows else set[str]()
    if {"file", "class", "tumour", "group", "field"} <= columns:
        paths = [folder / row["file"] for row in rows]
        names, tumour = [row["class"] for row in rows], [row["tumour"] == "1" for row in rows]
        patients = [SAME_PATIENT.get(row["group"], row["group"]) for row in rows]
        fields = [row["field"] for row in rows]
    elif {"tile", "image", "patient", "label", "subtype"} <= columns:
        paths = [folder / "tiles" / row["tile"] for row in rows]
        names, tumour = [row["subtype"] for row in rows], [row["label"] == "malignant" for row in rows]
        patients, fields = [row["patient"] for row in rows], [row["image"] for row in rows]
    else:
        raise ConfigError(
            f"{folder.name}/tiles.csv: has the columns {', '.join(sorted(columns))}",
            "neither the layout of LungHist700 nor that of BreakHis",
            "See the head of this script",
        )
    joined = [f"{patient}/{field}" for patient, field in zip(patients, fields, strict=True)]
    return Tiles(tuple(paths), np.array(names), np.array(patients), np.array(joined), np.array(tumour))


def load_tiles(paths: Sequence[Path]) -> torch.Tensor:
    """All tiles (N, 3, H, W) as uint8."""

    def load(path: Path) -> torch.Tensor:
        with Image.open(path) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)

    with ThreadPoolExecutor(8) as pool:
        return torch.stack(list(pool.map(load, paths)))


def train_patients(tiles: Tiles) -> set[str]:
    """Patients for training: the same share of those with normal tissue as of the others."""
    rng = np.random.default_rng(SPLIT_SEED)
    with_normal = np.unique(tiles.patients[~tiles.is_tumour])
    others = np.setdiff1d(np.unique(tiles.patients), with_normal)
    parts = [rng.permutation(each) for each in (with_normal, others)]
    return {str(name) for part in parts for name in part[: round(TRAIN_SHARE * len(part))]}


# ---------------------------------------------------------------------------------------------------- slides


@dataclass(frozen=True)
class Slide:
    """Which tiles a synthetic slide is made of, and which of them lie in its lesion."""

    rows: Indices
    in_lesion: NDArray[np.bool_]

    @property
    def label(self) -> int:
        return int(self.in_lesion.any())


def make_slides(tiles: Tiles, rows: Indices, count: int, num_tiles: int, lesion_tiles: int, seed: int) -> list[Slide]:
    """Synthetic slides of these tiles, positive and negative in turn."""
    rng = np.random.default_rng(seed)
    normal, tumour = (rows[tiles.is_tumour[rows] == kind] for kind in (False, True))
    hosts = np.unique(tiles.patients[normal])
    slides: list[Slide] = []
    for number in range(count):
        host = rng.choice(hosts)
        if number % 2:
            pool = tumour[tiles.patients[tumour] == host]
            pool = pool if len(pool) else tumour[tiles.patients[tumour] == rng.choice(tiles.patients[tumour])]
        else:
            pool = normal[tiles.patients[normal] == rng.choice(hosts[hosts != host])]
        guests = _draw_fields(tiles, pool, lesion_tiles, rng)
        own = _draw_fields(tiles, normal[tiles.patients[normal] == host], num_tiles - lesion_tiles, rng)
        in_lesion = np.repeat([False, bool(number % 2)], [len(own), len(guests)])
        slides.append(Slide(np.concatenate([own, guests]), in_lesion))
    return slides


def _draw_fields(tiles: Tiles, rows: Indices, wanted: int, rng: np.random.Generator) -> Indices:
    """Tiles of whole fields in random order, `wanted` of them; all fields once before any comes again."""
    fields = np.unique(tiles.fields[rows])
    drawn: list[Indices] = []
    while sum(map(len, drawn)) < wanted:
        drawn += [rows[tiles.fields[rows] == field] for field in rng.permutation(fields)]
    return np.concatenate(drawn)[:wanted]


# ---------------------------------------------------------------------------------------------------- one run


def assess_tiles(vectors_ND: torch.Tensor, tiles: Tiles, is_train: NDArray[np.bool_]) -> dict[str, float]:
    """Probes on the tiles of the test patients, for classes that occur on both sides."""
    names = sorted(set(tiles.classes[is_train]) & set(tiles.classes[~is_train]))
    known = np.isin(tiles.classes, names)
    labels = np.searchsorted(names, tiles.classes)
    first, second = np.flatnonzero(is_train & known), np.flatnonzero(~is_train & known)
    parts = vectors_ND[torch.from_numpy(first)], labels[first], vectors_ND[torch.from_numpy(second)], labels[second]
    groups = [str(name) for name in tiles.patients[first]]
    return {"knn20": knn_accuracy(*parts).balanced, "linear": linear_accuracy(*parts, groups).balanced}


def assess_slides(
    method: str,
    vectors_ND: NDArray[np.float32],
    training: Sequence[Slide],
    test: Sequence[Slide],
    seed: int,
    device: str,
) -> dict[str, float]:
    """AUC and hits of an aggregator on the test slides; every fifth pair of training slides is for validation."""
    settings = TrainSettings.model_validate({"aggregator": method, "device": device})
    kept: list[LabelledBag] = []
    held: list[LabelledBag] = []
    for number, slide in enumerate(training):
        bag = Bag(f"train{number}", vectors_ND[slide.rows], None)
        (held if number // 2 % 5 == 0 else kept).append(LabelledBag(bag.slide, bag, slide.label))
    trained = train(method, kept, held, 1, settings, seed)
    found = score(trained.module, [Bag(f"test{k}", vectors_ND[slide.rows], None) for k, slide in enumerate(test)])
    auc = metrics.auc(np.array([slide.label for slide in test]), np.array([each.probabilities[0] for each in found]))
    hits = [slide.in_lesion[each.critical] for slide, each in zip(test, found, strict=True) if slide.label]
    return {f"auc_{method}": auc, f"hits_{method}": float(np.mean(hits))}


def settings_from(arguments: argparse.Namespace, steps: int, seed: int) -> PretrainSettings:
    """Those of the preset, then of `--set`, then of this run."""
    values = resolve_settings(flags={"preset": arguments.preset}).pretrain.model_dump(exclude_unset=True)
    values |= values_of(arguments.set)
    values |= {"workers": 0, "log_steps": 50, "checkpoint_minutes": 600.0, "steps": max(steps, 1), "seed": seed}
    return parse({"pretrain": values}, source="--set").pretrain


def make_encoder(
    source: TensorTiles, settings: PretrainSettings, untrained: bool, device: str
) -> tuple[Encoder, float]:
    """The encoder of a run, and its loss at the end."""
    if untrained:
        return start_encoder(settings, source.size_px, settings.seed), float("nan")
    with tempfile.TemporaryDirectory() as folder:
        result = pretrain(source, Path(folder) / "run", settings, Origin("tiles of a benchmark"), device=device)
        encoder = load_encoder(Path(folder) / "run")
    if encoder.config.size_px != source.size_px:
        raise ConfigError(
            f"these settings make an encoder for tiles of {encoder.config.size_px} px",
            f"the tiles have {source.size_px}",
            "Choose pretrain.global_px and pretrain.global_scale that leave tiles at their scale",
        )
    return encoder, result.metrics["loss"]


def summarize(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over seeds of every number, by budget; and where the slide AUC falls."""
    by_budget: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        by_budget[run["budget"]].append(run)
    names = [name for name in runs[0] if name.startswith(("knn20", "linear", "auc_", "hits_"))]
    table = {
        budget: {name: _mean_sd([run[name] for run in of_budget]) for name in names}
        for budget, of_budget in sorted(by_budget.items())
    }
    trained = [budget for budget in table if budget]
    falls = [
        f"{name.removeprefix('auc_')} at {longer}"
        for name in names
        if name.startswith("auc_")
        for shorter, longer in pairwise(trained)
        if table[longer][name][0] < table[shorter][name][0] - max(table[shorter][name][1], table[longer][name][1])
    ]
    return {"budgets": table, "falls": falls}


def _mean_sd(values: Sequence[float]) -> tuple[float, float]:
    return round(statistics.fmean(values), 4), round(statistics.stdev(values), 4) if len(values) > 1 else 0.0


# ---------------------------------------------------------------------------------------------------- all of it


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps of budget 1")
    parser.add_argument("--budgets", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of pretrain")
    parser.add_argument("--methods", nargs="+", default=["mean", "abmil-gated", "self-vit-mil"])
    parser.add_argument("--slides", type=int, default=60, help="training slides")
    parser.add_argument("--test-slides", type=int, default=60)
    parser.add_argument("--slide-tiles", type=int, default=120)
    parser.add_argument("--lesion-tiles", type=int, default=12)
    parser.add_argument("--untrained", action="store_true", help="also budget 0")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(given)
    device, budgets = arguments.device, [0] * arguments.untrained + arguments.budgets
    settings_from(arguments, 1, 0)  # a wrong setting shows before anything is read

    tiles = read_table(arguments.data)
    is_train = np.isin(tiles.patients, sorted(train_patients(tiles)))
    pixels_N3HW = load_tiles(tiles.paths)
    source = TensorTiles(pixels_N3HW[torch.from_numpy(is_train)])
    sizes = arguments.slide_tiles, arguments.lesion_tiles
    training = make_slides(tiles, np.flatnonzero(is_train), arguments.slides, *sizes, seed=1)
    test = make_slides(tiles, np.flatnonzero(~is_train), arguments.test_slides, *sizes, seed=2)
    print(
        f"{is_train.sum()} tiles of {len(np.unique(tiles.patients[is_train]))} training patients, "
        f"{(~is_train).sum()} of {len(np.unique(tiles.patients[~is_train]))} test patients; "
        f"{len(training)} and {len(test)} slides",
        flush=True,
    )

    done: list[dict[str, Any]] = []
    if arguments.out is not None and arguments.out.exists():
        done = [json.loads(line) for line in arguments.out.read_text(encoding="utf-8").splitlines()]
    runs: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        for budget in budgets:
            settings = settings_from(arguments, budget * arguments.steps, seed)
            key = {
                "data": arguments.data.name,
                "slides": [arguments.slides, arguments.test_slides, *sizes],
                "methods": arguments.methods,
                "budget": budget,
                "settings": settings.model_dump(mode="json", exclude_unset=True),
            }
            known = next((run for run in done if {name: run.get(name) for name in key} == key), None)
            if known is None:
                start = time.perf_counter()
                encoder, loss = make_encoder(source, settings, not budget, device)
                spent = time.perf_counter() - start
                dtype = choose_precision("auto", torch.device(device))
                vectors_ND = embed_tiles(encoder.to(device), pixels_N3HW.split(256), dtype)
                assert vectors_ND is not None
                known = key | {"seed": seed, "loss": loss, "seconds": round(spent, 1)}
                known |= assess_tiles(vectors_ND, tiles, is_train)
                features_ND = vectors_ND.cpu().numpy()
                for method in arguments.methods:
                    known |= assess_slides(method, features_ND, training, test, seed, device)
                if arguments.out is not None:
                    with arguments.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(known) + "\n")
            runs.append(known)
            shown = ", ".join(f"{name} {value:.3f}" for name, value in known.items() if isinstance(value, float))
            print(f"seed {seed}, budget {budget} ({budget * arguments.steps} steps): {shown}", flush=True)
    found = summarize(runs)
    for budget, of_budget in found["budgets"].items():
        shown = ", ".join(f"{name} {mean:.3f} +- {sd:.3f}" for name, (mean, sd) in of_budget.items())
        print(f"budget {budget}: {shown}", flush=True)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
