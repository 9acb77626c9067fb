"""Training of Self-ViT-MIL's aggregator over a whole cohort: 50 epochs over 270 bags of 4576 x 3840 float16.

    python benchmarks/mil_epoch.py [--bags 270] [--instances 4576] [--dim 3840] [--epochs 50] [--mapped] [--threads 2]

It runs the command's own trainer with the paper's recipe (AdamW, one bag a step, no early stop) on made bags, all of
the same size; positive ones have a few shifted instances. `seconds` is everything: checking and uploading the bags, all
training steps, and after every epoch validation on a further fifth as many bags, which are not among the 270; only the
loading of libraries and the start of the GPU come before the clock. Without a GPU it takes 8 bags and 2 epochs unless
told otherwise; `seconds_per_epoch` is then that of the last epoch scaled to 270 bags, and peak memory is that of the
process beyond what it had with the bags made. `--mapped` puts the bags into files of a temporary folder, as they are in
a study, instead of memory. The last line is JSON.

The byte limit of a step: the bag is read twice (35 MB each), AdamW reads four and writes three times the D x D weight
of v (59 MB), the steps before it read it twice and write its gradient. That is 0.66 GB, or 0.14 ms at the 4.8 TB/s of
an H200.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from selfvitmil.aggregate.train import BagStore, LabelledBag, Trained, train
from selfvitmil.bags import Bag
from selfvitmil.settings import TrainSettings

PAPER_BAGS = 270
PAPER_SECONDS = 50 * 27 * 60
"""50 epochs of about 27 minutes, on a V100."""


def make_bags(number: int, instances: int, dim: int, folder: Path | None) -> list[LabelledBag]:
    """Every second bag is positive: 2 % of its instances are shifted along one direction."""
    generator = np.random.default_rng(0)
    noise = generator.standard_normal((2 * instances, dim), dtype=np.float32).astype(np.float16)
    direction = generator.standard_normal(dim).astype(np.float16)
    bags = []
    for place in range(number):
        start = int(generator.integers(0, instances + 1))
        features_ND = noise[start : start + instances].copy()
        if place % 2:
            features_ND[generator.choice(instances, max(1, instances // 50), replace=False)] += direction
        if folder is not None:
            path = folder / f"slide{place}"
            features_ND.tofile(path)
            features_ND = np.memmap(path, dtype=np.float16, mode="r", shape=(instances, dim))
        slide = f"slide{place}"
        bags.append(LabelledBag(slide, Bag(slide, features_ND, None), place % 2))
    return bags


def measure(training: list[LabelledBag], validation: list[LabelledBag], settings: TrainSettings) -> dict[str, Any]:
    """Train once, and say where the time went."""
    began, ended = time.perf_counter(), []

    def report(line: dict[str, Any]) -> None:
        ended.append(time.perf_counter())
        if line["epoch"] in (1, 2) or line["epoch"] % 10 == 0:
            print(f"epoch {line['epoch']}: loss {line['train_loss']:.4f}, AUC {line['val_auc']:.3f}", flush=True)

    store = BagStore.of(settings)
    trained: Trained = train("self-vit-mil", training, validation, 1, settings, 0, store=store, report=report)
    seconds = time.perf_counter() - began
    first = trained.history[0]["seconds"]
    later = [line["seconds"] for line in trained.history[1:]] or [first]
    return {
        "seconds": round(seconds, 2),
        "seconds_before_epochs": round(ended[0] - began - first, 2),
        "seconds_first_epoch": round(first, 2),
        "seconds_later_epoch": round(float(np.median(later)), 4),
        "ms_step": round(1e3 * float(np.median(later)) / len(training), 3),
        "val_auc": trained.history[-1]["val_auc"],
        "warnings": list(trained.warnings),
    }


def load_libraries() -> None:
    """A training of a few numbers: torch loads much of itself when the first optimizer is made."""
    bags = make_bags(8, 16, 8, None)
    train("self-vit-mil", bags[:4], bags[4:], 1, TrainSettings(epochs=5), 0)


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bags", type=int, default=PAPER_BAGS if on_gpu else 8)
    parser.add_argument("--instances", type=int, default=4576)
    parser.add_argument("--dim", type=int, default=3840)
    parser.add_argument("--epochs", type=int, default=50 if on_gpu else 2)
    parser.add_argument("--mapped", action="store_true", help="bags in files instead of memory")
    parser.add_argument("--threads", type=int, default=2, help="of a CPU")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = TrainSettings(recipe="published", epochs=arguments.epochs, patience=0)
    num_validation = max(2, round(arguments.bags / 5))
    facts: dict[str, Any] = {"bags": arguments.bags, "validation_bags": num_validation}
    facts |= {"instances": arguments.instances, "dim": arguments.dim, "epochs": arguments.epochs}
    facts |= {"device": torch.cuda.get_device_name() if on_gpu else "cpu", "torch": torch.__version__}
    facts |= {"threads": None if on_gpu else arguments.threads, "mapped": arguments.mapped}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) if arguments.mapped else None
        bags = make_bags(arguments.bags + num_validation, arguments.instances, arguments.dim, folder)
        load_libraries()
        before_mb = resident_mb()
        found = measure(bags[: arguments.bags], bags[arguments.bags :], settings)
    if on_gpu:
        found["peak_gpu_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        found["times_faster_than_paper"] = round(PAPER_SECONDS / found["seconds"])
    else:
        found["seconds_per_epoch"] = round(found["seconds_later_epoch"] * PAPER_BAGS / arguments.bags, 1)
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        found["peak_mb_beyond_bags"] = round(peak_mb - before_mb)
    print(json.dumps(found | facts))


if __name__ == "__main__":
    main()
