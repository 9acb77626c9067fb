"""Whether an encoder gets better with time: the same configuration with 1, 2, 4, 8 times the steps, over several seeds.

    python benchmarks/pretrain_budget.py --data FOLDER --steps 500 [--budgets 1 2 4 8] [--seeds 0 1 2] [--preset quick]
        [--set method="dino" --set lr=1e-3 ...] [--methods mean abmil-gated self-vit-mil] [--downscale 2]
        [--untrained] [--out RESULTS.jsonl]

FOLDER holds the tiles of LungHist700 or BreakHis (see tile_cohorts.py). Patients are divided once, 60 : 40; those with
normal tissue and those without each for themselves. Self-supervision sees the tiles of the training patients and no
label. Every encoder is assessed on tiles and on synthetic slides of the other patients (see encoder_worth.py). Slides
are the same for all runs, so that runs can be compared in pairs. Few patients have normal tissue, so slides share
tiles: differences between runs count, not the AUC by itself.

With a constant schedule one run per seed serves all budgets: its weights at step n are those of a run of n steps. With
a cosine, or a decay at the end, every budget is a run of its own. Assessed are the weights of that very step, not the
best ones before it, and no run ends early. Budget 0 (--untrained) is the network before training.

Printed are what colours alone tell, a line per encoder, then means with their standard deviation over seeds. `falls`
lists what is worse at a budget than at half of it by more than that standard deviation (the larger of the two);
`dependable` says that nothing is. Where metrics.jsonl has the label-free `quality`, `spearman` is its rank correlation
with each measure over all encoders. The last line is JSON. With --out, each encoder's line is appended to a file as
soon as it is assessed; those that stand there are not trained again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata

from encoder_worth import assess_slides, assess_tiles
from pretrain_quality import values_of
from selfvitmil.data.sources import TensorTiles
from selfvitmil.encoder import Encoder, load_encoder
from selfvitmil.errors import ConfigError
from selfvitmil.pretrain.learner import start_encoder
from selfvitmil.pretrain.quality import embed_tiles
from selfvitmil.pretrain.train import Origin, pretrain
from selfvitmil.runtime.device import choose_precision
from selfvitmil.runtime.training import read_metrics
from selfvitmil.settings import PretrainSettings, parse, resolve_settings
from tile_cohorts import Slide, SlideShape, Tiles, load_tiles, make_slides, read_table, train_patients

MEASURES = ("knn20", "linear", "tile_auc_", "auc_", "froc_", "hits_")
"""How names of measures begin."""
MUST_NOT_FALL = ("tile_auc_", "auc_", "froc_")


# ---------------------------------------------------------------------------------------------------- runs


def settings_from(arguments: argparse.Namespace, steps: int, seed: int) -> PretrainSettings:
    """Those of the preset, then of `--set`, then of this run."""
    values = resolve_settings(flags={"preset": arguments.preset}).pretrain.model_dump(exclude_unset=True)
    values |= values_of(arguments.set)
    values |= {"workers": 0, "checkpoint_minutes": 600.0, "steps": max(steps, 1), "seed": seed, "stop_early": False}
    return parse({"pretrain": values}, source="--set").pretrain


@dataclass(frozen=True)
class Snapshot:
    """An encoder after so many steps, and what its run says of it."""

    steps: int
    encoder: Encoder
    facts: dict[str, float]
    """Loss, seconds since the start and, where the run measures it, the label-free quality."""


def train_snapshots(
    source: TensorTiles, settings: PretrainSettings, steps: Sequence[int], device: str
) -> Iterator[Snapshot]:
    """The encoders of one run after each of these numbers of steps; the last number is the run's length."""
    settings = settings.model_copy(update={"stop_early": False})  # all budgets are to be reached
    start = time.perf_counter()
    reached: dict[int, float] = {}

    def report(line: dict[str, Any]) -> None:
        reached[line["step"] + 1] = time.perf_counter() - start

    with tempfile.TemporaryDirectory() as folder:
        places = {number: Path(folder) / f"after{number}" for number in steps}
        origin = Origin("tiles of a benchmark")
        pretrain(source, Path(folder) / "run", settings, origin, device=device, report=report, snapshots=places)
        lines = read_metrics(Path(folder) / "run")
        for number in steps:
            encoder = load_encoder(places[number])
            if encoder.config.size_px != source.size_px:
                raise ConfigError(
                    f"these settings make an encoder for tiles of {encoder.config.size_px} px",
                    f"the tiles have {source.size_px}",
                    "Choose pretrain.global_px and pretrain.global_scale that leave tiles at their scale",
                )
            seconds = max((spent for step, spent in reached.items() if step <= number), default=0.0)
            yield Snapshot(number, encoder, {"seconds": round(seconds, 1)} | facts_at(lines, number))


def facts_at(lines: Sequence[Mapping[str, Any]], steps: int) -> dict[str, float]:
    """The last loss and quality that the run wrote within so many steps."""
    before = [line for line in lines if line["step"] < steps]
    return {
        name: found[-1] for name in ("loss", "quality") if (found := [line[name] for line in before if name in line])
    }


@dataclass(frozen=True)
class Cohort:
    """Tiles of both sides, and the slides made of them."""

    tiles: Tiles
    pixels_N3HW: torch.Tensor
    is_train: NDArray[np.bool_]
    training: Sequence[Slide]
    test: Sequence[Slide]

    @classmethod
    @lru_cache(maxsize=2)  # a process may do several runs with it
    def read(cls, data: Path, downscale: int, slides: tuple[int, int], shape: SlideShape) -> Cohort:
        """`slides` are those for training and for testing."""
        tiles = read_table(data)
        is_train = np.isin(tiles.patients, sorted(train_patients(tiles)))
        training = make_slides(tiles, np.flatnonzero(is_train), slides[0], shape, seed=1)
        test = make_slides(tiles, np.flatnonzero(~is_train), slides[1], shape, seed=2)
        return cls(tiles, load_tiles(tiles.paths, downscale), is_train, training, test)

    @property
    def source(self) -> TensorTiles:
        """What self-supervision sees."""
        return TensorTiles(self.pixels_N3HW[torch.from_numpy(self.is_train)])

    def assess(self, encoder: Encoder, methods: Sequence[str], seed: int, device: str) -> dict[str, float]:
        """All measures of an encoder."""
        dtype = choose_precision("auto", torch.device(device))
        vectors_ND = embed_tiles(encoder.to(device), self.pixels_N3HW.split(256), dtype)
        assert vectors_ND is not None
        found = assess_tiles(vectors_ND, self.tiles, self.is_train)
        features_ND = vectors_ND.cpu().numpy()
        for method in methods:
            found |= assess_slides(method, features_ND, self.training, self.test, seed, device)
        return found

    def assess_colours(self) -> dict[str, float]:
        """Probes of the mean and spread of each tile's colours, which need no encoder."""
        pixels_N3X = self.pixels_N3HW.flatten(2)
        parts = [part_N3X.float() for part_N3X in pixels_N3X.split(256)]
        colours_N6 = torch.cat([torch.cat([part.mean(dim=2), part.std(dim=2)], dim=1) for part in parts])
        own = colours_N6[torch.from_numpy(self.is_train)]
        return assess_tiles((colours_N6 - own.mean(dim=0)) / own.std(dim=0), self.tiles, self.is_train)

    def __str__(self) -> str:
        sides = (
            f"{side.sum()} tiles of {len(np.unique(self.tiles.patients[side]))} {name} patients"
            for name, side in (("training", self.is_train), ("test", ~self.is_train))
        )
        return f"{', '.join(sides)}; {len(self.training)} and {len(self.test)} slides"


# ---------------------------------------------------------------------------------------------------- summary


def summarize(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over seeds of every measure, by budget; where they fall; what quality tells."""
    by_budget: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        by_budget[run["budget"]].append(run)
    names = [name for name in runs[0] if name.startswith(MEASURES)]
    table = {
        budget: {name: _mean_sd([run[name] for run in of_budget]) for name in names}
        for budget, of_budget in sorted(by_budget.items())
    }
    falls = [
        f"{name} at {budget}"
        for budget in table
        if budget and budget % 2 == 0 and budget // 2 in table
        for name in names
        if name.startswith(MUST_NOT_FALL) and _falls(table[budget // 2][name], table[budget][name])
    ]
    summary = {"budgets": table, "falls": falls, "dependable": not falls}
    trained = [run for run in runs if run["budget"] and "quality" in run]
    if len(trained) > 2:
        quality = rankdata([run["quality"] for run in trained])
        ranks = {name: rankdata([run[name] for run in trained]) for name in names}
        summary["spearman"] = {
            name: round(float(np.corrcoef(quality, own)[0, 1]), 3) for name, own in ranks.items() if np.ptp(own)
        }
    return summary


def _falls(half: tuple[float, float], whole: tuple[float, float]) -> bool:
    return whole[0] < half[0] - max(half[1], whole[1])


def _mean_sd(values: Sequence[float]) -> tuple[float, float]:
    return round(statistics.fmean(values), 4), round(statistics.stdev(values), 4) if len(values) > 1 else 0.0


# ---------------------------------------------------------------------------------------------------- all of it


def key_of(arguments: argparse.Namespace, budget: int, seed: int) -> dict[str, Any]:
    """What tells a result from others: all that it depends on."""
    steps = budget * arguments.steps
    chosen = settings_from(arguments, steps, seed).model_dump(mode="json", exclude_unset=True)
    return {
        "data": arguments.data.name,
        "downscale": arguments.downscale,
        "slides": [arguments.slides, arguments.test_slides],
        "shape": asdict(shape_of(arguments)),
        "methods": arguments.methods,
        "budget": budget,
        "steps": steps,
        "seed": seed,
        "settings": {name: value for name, value in chosen.items() if name != "steps"},
    }


def shape_of(arguments: argparse.Namespace) -> SlideShape:
    return SlideShape(arguments.slide_tiles, arguments.lesion_tiles, arguments.hosts)


def read_results(path: Path | None) -> list[dict[str, Any]]:
    """All lines of a file of results; a line that was cut off when its writer was ended does not count."""
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []:
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def find(results: Sequence[dict[str, Any]], arguments: argparse.Namespace, budget: int, seed: int):
    """The result of one encoder among others, or None."""
    key = key_of(arguments, budget, seed)
    return next((run for run in results if {name: run.get(name) for name in key} == key), None)


def one_run_serves_all(settings: PretrainSettings) -> bool:
    """Whether the weights of a run after n steps are those of a run of n steps."""
    return settings.chosen("schedule") == "constant" and not settings.decay_share


class Benchmark:
    """The encoders that were asked for, and those that are done already."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        slides = arguments.slides, arguments.test_slides
        self.cohort = Cohort.read(arguments.data, arguments.downscale, slides, shape_of(arguments))
        self.source = self.cohort.source
        self.done = read_results(arguments.out)

    def found(self, budget: int, seed: int) -> dict[str, Any] | None:
        return find(self.done, self.arguments, budget, seed)

    def snapshots(self, budgets: Sequence[int], seed: int) -> Iterator[tuple[int, Snapshot]]:
        """Train what is needed for these budgets: one run where the schedule is constant, else one for each."""
        arguments, device = self.arguments, self.arguments.device
        if 0 in budgets:
            settings = settings_from(arguments, 1, seed)
            yield 0, Snapshot(0, start_encoder(settings, self.source.size_px, seed).eval(), {})
        trained = sorted(budget for budget in budgets if budget)
        together = one_run_serves_all(settings_from(arguments, 1, seed))
        for group in [trained] if together and trained else [[budget] for budget in trained]:
            settings = settings_from(arguments, group[-1] * arguments.steps, seed)
            steps = [budget * arguments.steps for budget in group]
            yield from zip(group, train_snapshots(self.source, settings, steps, device), strict=True)

    def run(self, budgets: Sequence[int], seed: int) -> Iterator[dict[str, Any]]:
        """A line per budget."""
        missing = [budget for budget in budgets if self.found(budget, seed) is None]
        for budget, snapshot in self.snapshots(missing, seed):
            line = key_of(self.arguments, budget, seed) | snapshot.facts
            line |= self.cohort.assess(snapshot.encoder, self.arguments.methods, seed, self.arguments.device)
            self.done.append(line)
            if self.arguments.out is not None:
                with self.arguments.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
        for budget in budgets:
            line = self.found(budget, seed)
            assert line is not None
            yield line


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = SlideShape()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps of budget 1")
    parser.add_argument("--budgets", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of pretrain")
    parser.add_argument("--methods", nargs="+", default=["mean", "abmil-gated", "self-vit-mil"])
    parser.add_argument("--slides", type=int, default=60, help="training slides")
    parser.add_argument("--test-slides", type=int, default=60)
    parser.add_argument("--slide-tiles", type=int, default=shape.tiles)
    parser.add_argument("--lesion-tiles", type=int, default=shape.lesion_tiles)
    parser.add_argument("--hosts", type=int, default=shape.hosts, help="patients in the background of a slide")
    parser.add_argument("--downscale", type=int, default=1, help="shrink tiles by this factor")
    parser.add_argument("--untrained", action="store_true", help="also budget 0")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(given)
    settings_from(arguments, 1, 0)  # a wrong setting shows before anything is read
    return arguments


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(given)
    benchmark = Benchmark(arguments)
    print(benchmark.cohort, flush=True)
    colours = ", ".join(f"{name} {value:.3f}" for name, value in benchmark.cohort.assess_colours().items())
    print(f"mean and spread of the colours alone: {colours}", flush=True)

    lines: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        for line in benchmark.run([0] * arguments.untrained + arguments.budgets, seed):
            lines.append(line)
            shown = ", ".join(f"{name} {value:.3f}" for name, value in line.items() if isinstance(value, float))
            print(f"seed {seed}, budget {line['budget']} ({line['steps']} steps): {shown}", flush=True)
    summary = summarize(lines)
    for budget, measures in summary["budgets"].items():
        shown = ", ".join(f"{name} {mean:.3f} +- {sd:.3f}" for name, (mean, sd) in measures.items())
        print(f"budget {budget}: {shown}", flush=True)
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
