"""One training step of the paper's DSMIL head on one bag: the exact fast form against the dense formulation.

    python benchmarks/aggregate.py [--instances 4576] [--dim 3840] [--threads 2] [--rounds 7] [--large]

A step is forward, backward and fused AdamW on a float32 bag, one logit. `dense` is the formula written plainly: Q and V
are made for every instance. Contenders take turns in one process; a contender's time is its best round. Before that the
two are held against each other: outputs and all gradients in float64 on a small bag (to 1e-12) and in float32 on this
one. `ratio_torchmil` compares the 2024 head (MLP queries, no v), which torchmil's DSMIL has in the same form, where
torchmil is installed. `ms_step_guided` is the step of the default recipe, whose guided attention reads the bag once
more in the backward pass. `--large` also trains on 200,000 x 3840 float16 and reports what memory that takes beyond the
features. The last line is JSON.

`ms_copy` is the byte limit: the time to copy, at this machine's rate, what a step cannot do without. That is reading
the bag twice and the D x D weight of v twice, writing its gradient, and AdamW's four reads and three writes. Between
the two stand matrix-vector products, which MKL runs on one core.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfvitmil import aggregate
from selfvitmil.aggregate.dsmil import DSMILOutput


class DenseDsmil(nn.Module):
    """Linear q and v as the paper writes them, with a query and a value of every instance."""

    def __init__(self, dim: int, query_dim: int = 128):
        super().__init__()
        self.score = nn.Linear(dim, 1)
        self.q = nn.Linear(dim, query_dim)
        self.v = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, 1)

    def forward(self, bag_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Attention, bag logit, max logit."""
        scores_N1 = self.score(bag_ND)
        values_ND, queries_NL = self.v(bag_ND), self.q(bag_ND)
        critical = scores_N1[:, 0].argmax()
        attention_N = (queries_NL @ queries_NL[critical] / queries_NL.shape[1] ** 0.5).softmax(0)
        return attention_N, self.head(attention_N @ values_ND), scores_N1[critical]


NAMES = {"score": "i_classifier.fc.0", "q": "b_classifier.q", "v": "b_classifier.v.1", "head": "b_classifier.fcc"}


def as_dense(ours: nn.Module, dim: int) -> DenseDsmil:
    """The dense module with our weights."""
    dense = DenseDsmil(dim)
    weights = ours.state_dict()
    state = {f"{mine}.{kind}": weights[f"{his}.{kind}"] for mine, his in NAMES.items() for kind in ("weight", "bias")}
    dense.load_state_dict(state)
    return dense.to(next(ours.parameters()).dtype)


def dense_loss(dense: DenseDsmil, bag_ND: Tensor) -> Tensor:
    _, bag_logit, max_logit = dense(bag_ND)
    one = torch.ones_like(bag_logit)
    bag, top = (F.binary_cross_entropy_with_logits(logit, one) for logit in (bag_logit, max_logit))
    return 0.5 * bag + 0.5 * top


def difference(bag_ND: Tensor) -> float:
    """Largest relative difference of attention, logits and gradients between the two forms on this bag."""
    dim = bag_ND.shape[1]
    ours = aggregate.build("self-vit-mil", dim, 1).to(bag_ND.dtype)
    dense = as_dense(ours, dim)
    output = ours(bag_ND)
    assert isinstance(output, DSMILOutput)
    assert output.attention_NC is not None
    attention_N, bag_logit, max_logit = dense(bag_ND)
    pairs = [(output.attention_NC[:, 0], attention_N)]
    pairs += [(output.bag_logits_C, bag_logit), (output.max_logits_C, max_logit)]
    ours.loss(output, 1).backward()
    dense_loss(dense, bag_ND).backward()
    gradients = {name: weight.grad for name, weight in ours.named_parameters()}
    for mine, his in NAMES.items():
        for kind in ("weight", "bias"):
            expected = dense.get_parameter(f"{mine}.{kind}").grad
            found = gradients[f"{his}.{kind}"]
            assert expected is not None
            assert found is not None
            pairs.append((found.reshape(expected.shape), expected))
    with torch.no_grad():
        return max(float((found - expected).abs().max() / expected.abs().max()) for found, expected in pairs)


def stepper(module: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """A function that makes one training step."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-5, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def torchmil_steps(bag_ND: Tensor) -> dict[str, Callable[[], None]]:
    """The 2024 head, torchmil's and ours with the same weights; empty where torchmil is not installed."""
    try:
        from torchmil.models import DSMIL  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}
    dim = bag_ND.shape[1]
    ours = aggregate.build("dsmil", dim, 1)
    theirs = DSMIL(in_shape=(dim,), nonlinear_q=True)
    names = {"inst_classifier": "i_classifier.fc.0", "q_nn": "b_classifier.q", "bag_classifier": "b_classifier.fcc"}
    weights = ours.state_dict()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            start = name.split(".")[0]
            weight.copy_(weights[name.replace(start, names[start], 1)].reshape(weight.shape))
    output = ours(bag_ND)
    assert isinstance(output, DSMILOutput)
    torch.testing.assert_close(theirs(bag_ND[None]), output.bag_logits_C, rtol=1e-4, atol=1e-4)

    def their_loss() -> Tensor:
        return 0.5 * torch.stack(list(theirs.compute_loss(torch.ones(1), bag_ND[None])[1].values())).sum()

    return {
        "torchmil_2024": stepper(theirs, their_loss),
        "ours_2024": stepper(ours, lambda: ours.loss(ours(bag_ND), 1)),
    }


def best_milliseconds(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Best wall time of each over `rounds`, taking turns."""
    best = dict.fromkeys(runs, float("inf"))
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if number > 0:  # the first round warms up
                best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
    return best


def resident_mb() -> float:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize() / 2**20


def large_bag_peak_mb(instances: int, dim: int) -> float:
    """Peak resident memory of training steps on a large float16 bag, beyond that bag (and Python with torch)."""
    before = resident_mb()
    bag_ND = torch.empty(instances, dim, dtype=torch.float16)
    for chunk in bag_ND.split(4096):
        chunk.copy_(torch.randn(chunk.shape))
    features_mb = bag_ND.numel() * bag_ND.element_size() / 2**20
    module = aggregate.build("self-vit-mil", dim, 1)
    step = stepper(module, lambda: module.loss(module(bag_ND), 1))
    peak, done = 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, resident_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(2):
        step()
    done.set()
    watcher.join()
    return peak - before - features_mb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=4576)
    parser.add_argument("--dim", type=int, default=3840)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--large", action="store_true", help="also measure the memory of a bag of 200,000 instances")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    dim = arguments.dim

    peak_mb = large_bag_peak_mb(200_000, dim) if arguments.large else None
    differs = difference(torch.randn(300, 256, dtype=torch.float64))
    bag_ND = torch.randn(arguments.instances, dim) * 0.1
    differs_float32 = difference(bag_ND)
    if differs > 1e-12 or differs_float32 > 1e-3:
        sys.exit(
            f"the fast form differs from the dense one by {differs:.1e} in float64, {differs_float32:.1e} in float32"
        )

    ours = aggregate.build("self-vit-mil", dim, 1)
    guided = aggregate.build("self-vit-mil", dim, 1, evidence="positive", top=3)
    dense = as_dense(ours, dim)
    moved_floats = 2 * bag_ND.numel() + (2 + 1 + 7) * dim * dim
    source, target = torch.ones(moved_floats // 2), torch.ones(moved_floats // 2)
    runs: dict[str, Callable[[], None]] = {
        "ours": stepper(ours, lambda: ours.loss(ours(bag_ND), 1)),
        "guided": stepper(guided, lambda: guided.loss(guided(bag_ND), 1)),
        "dense": stepper(dense, lambda: dense_loss(dense, bag_ND)),
        "copy": lambda: void(target.copy_(source)),
        **torchmil_steps(bag_ND),
    }
    best = best_milliseconds(runs, arguments.rounds)
    for name, value in best.items():
        print(f"{name:14} {value:9.1f} ms")
    torchmil = best["torchmil_2024"] / best["ours_2024"] if "torchmil_2024" in best else None
    result = {
        "ratio_dense": round(best["dense"] / best["ours"], 1),
        "ms_step": round(best["ours"], 1),
        "ms_step_guided": round(best["guided"], 1),
        "ms_dense": round(best["dense"], 1),
        "ms_copy": round(best["copy"], 1),
        "ratio_torchmil": None if torchmil is None else round(torchmil, 2),
        "ms_torchmil": None if torchmil is None else round(best["torchmil_2024"], 1),
        "peak_mb_beyond_features": None if peak_mb is None else round(peak_mb),
        "difference_float64": differs,
        "difference_float32": differs_float32,
        "instances": arguments.instances,
        "dim": dim,
        "threads": arguments.threads,
    }
    print(json.dumps(result))


def void(_: object) -> None:
    """Drop a result."""


if __name__ == "__main__":
    main()
