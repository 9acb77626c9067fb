"""Objectives of pretraining beside DINO's and SimCLR's losses (test_dino): against slow loops, and their contract."""

from __future__ import annotations

import cmath
import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn

from helpers.waves import wave_tiles
from selfvitmil.data.sources import ImageTiles
from selfvitmil.encoder import load_encoder
from selfvitmil.pretrain import learner as learning
from selfvitmil.pretrain.loss import kde_loss
from selfvitmil.pretrain.objectives import JointBatch, NetworkOutputs, Part, make_objective
from selfvitmil.pretrain.objectives.lejepa import invariance_loss, random_directions, sigreg_loss
from selfvitmil.pretrain.objectives.simdino import SimDINOHead, coding_rate, crossed_cosine
from selfvitmil.pretrain.optim import update_teacher
from selfvitmil.pretrain.train import Origin, pretrain
from selfvitmil.runtime.training import read_metrics
from selfvitmil.settings import METHOD_DEFAULTS, PretrainSettings

pytestmark = pytest.mark.usefixtures("one_thread")

METHODS = get_args(PretrainSettings.model_fields["method"].annotation)
TINY: dict[str, Any] = {
    "architecture": "vit_tiny_patch16_224",
    "width": 32,
    "depth": 2,
    "heads": 2,
    "patch_px": 8,
    "batch": 16,
    "steps": 6,
    "num_local": 2,
    "local_px": 16,
    "out_dim": 32,
    "head_width": 32,
    "bottleneck": 8,
    "directions": 32,
    "workers": 0,
    "log_steps": 1,
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 tiles of four kinds."""
    folder = tmp_path_factory.mktemp("images")
    for k, tile in enumerate(wave_tiles(48, 32)):
        tile.save(folder / f"{k:02}.png")
    return folder


def random_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seen_of(student_VBK: torch.Tensor, teacher_2BK: torch.Tensor | None = None) -> NetworkOutputs:
    return NetworkOutputs(student_VBK, student_VBK, teacher_2BK, Part(JointBatch()), teacher_temp=0.04)


# ---------------------------------------------------------------------------------------------------- LeJEPA


def slow_sigreg(outputs: torch.Tensor, directions: torch.Tensor) -> float:
    """The integral from -3 to 3 by the trapezoid rule, point by point, sample by sample."""
    values: list[float] = []
    gap = 3 / 16
    for view in outputs:
        for direction in directions.T:
            samples = [float(row @ direction) for row in view]
            integrand: list[float] = []
            for k in range(-16, 17):
                t = k * gap
                empirical = sum(cmath.exp(1j * t * x) for x in samples) / len(samples)
                integrand.append(math.exp(-t * t / 2) * abs(empirical - math.exp(-t * t / 2)) ** 2)
            values.append(len(samples) * gap * (sum(integrand) - (integrand[0] + integrand[-1]) / 2))
    return sum(values) / len(values)


def test_sigreg_equals_the_integral_written_out():
    outputs, directions = random_rows(3, 5, 4), random_directions(4, 6, seed=1, step=2).double()
    assert sigreg_loss(outputs, directions).item() == pytest.approx(slow_sigreg(outputs, directions), rel=1e-6)


def test_sigreg_is_least_for_a_standard_normal_distribution():
    directions = random_directions(8, 64, seed=0, step=0).double()
    normal = random_rows(1, 2000, 8)
    values = {
        "normal": normal,
        "shifted": normal + 0.3,
        "narrow": 0.5 * normal,
        "wide": 2 * normal,
        "flat": normal * torch.tensor([1.0] * 4 + [0.0] * 4),
        "collapsed": torch.zeros(1, 2000, 8, dtype=torch.float64),
    }
    found = {name: sigreg_loss(each, directions).item() for name, each in values.items()}
    assert all(found[name] > 20 * found["normal"] for name in values if name != "normal"), found


def test_directions_are_fresh_every_step_and_of_length_one():
    first, second = (random_directions(16, 9, seed=0, step=step) for step in (0, 1))
    torch.testing.assert_close(first.norm(dim=0), torch.ones(9))
    assert not torch.allclose(first, second)
    assert torch.equal(first, random_directions(16, 9, seed=0, step=0))


def test_invariance_is_the_spread_of_the_views_of_a_tile():
    outputs = random_rows(3, 4, 2)
    total = 0.0
    for b in range(4):
        for k in range(2):
            mean = sum(outputs[v, b, k].item() for v in range(3)) / 3
            total += sum((outputs[v, b, k].item() - mean) ** 2 for v in range(3))
    assert invariance_loss(outputs).item() == pytest.approx(total / (3 * 4 * 2))


def test_lejepa_weighs_both_terms():
    settings = PretrainSettings(method="lejepa", sigreg=0.2, directions=10, bottleneck=4, seed=3)
    outputs = random_rows(3, 6, 4)
    objective = make_objective(settings, 0, 0)
    objective.begin_step(7)
    outcome = objective(seen_of(outputs))
    directions = random_directions(4, 10, seed=3, step=7).double()
    expected = 0.8 * invariance_loss(outputs) + 0.2 * slow_sigreg(outputs, directions)
    torch.testing.assert_close(outcome.loss, expected)
    assert outcome.metrics()["invariance"] == invariance_loss(outputs)


def test_the_head_of_lejepa_has_batch_norms():
    head = make_objective(PretrainSettings(method="lejepa"), 0, 0).make_head(384)
    kinds = [type(layer).__name__ for layer in head]  # pyright: ignore[reportArgumentType]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d", "ReLU", "Linear"]
    assert [tuple(weight.shape) for weight in head.parameters() if weight.ndim == 2] == [
        (2048, 384),
        (2048, 2048),
        (64, 2048),
    ]


# ---------------------------------------------------------------------------------------------------- SimDINO


def test_coding_rate_equals_the_sum_over_eigenvalues():
    outputs, eps = random_rows(7, 4), 0.05
    rows = [row / row.norm() for row in outputs]
    gram = sum(torch.outer(row, row) for row in rows)
    eigenvalues = np.linalg.eigvalsh(gram.numpy())  # pyright: ignore[reportAttributeAccessIssue]
    expected = 0.5 * sum(math.log(1 + 4 / (7 * eps) * value) for value in eigenvalues)
    assert coding_rate(outputs, eps).item() == pytest.approx(expected)
    assert coding_rate(torch.ones(7, 4, dtype=torch.float64), eps) < coding_rate(outputs, eps)


def test_simdino_equals_a_slow_loop():
    student, teacher = random_rows(4, 5, 3), random_rows(2, 5, 3, seed=1)
    total, pairs = 0.0, 0
    for g in range(2):
        for v in range(4):
            if v != g:
                cosines = [nn.functional.cosine_similarity(student[v, b], teacher[g, b], dim=0) for b in range(5)]
                total += sum(cosines).item() / 5  # pyright: ignore[reportAttributeAccessIssue]
                pairs += 1
    assert crossed_cosine(student, teacher).item() == pytest.approx(total / pairs)
    objective = make_objective(PretrainSettings(method="simdino", bottleneck=3, coding_eps=0.1), 0, 0)
    rate = sum(coding_rate(student[g], 0.1).item() for g in range(2)) / 2
    outcome = objective(seen_of(student, teacher))
    assert outcome.loss.item() == pytest.approx(-total / pairs - (3 + 5) / (3 * 5) * rate)


def test_outputs_of_simdino_have_length_one():
    head = SimDINOHead(8, 6, 16)
    torch.testing.assert_close(head(torch.randn(5, 8)).norm(dim=1), torch.ones(5))


# ---------------------------------------------------------------------------------------------------- KDE


def test_kde_equals_a_slow_loop_and_pushes_apart():
    embeddings, kappa = random_rows(6, 4).requires_grad_(), 5.0
    rows = [row / row.norm() for row in embeddings.detach()]
    total = 0.0
    for i in range(6):
        total += math.log(sum(math.exp(kappa * float(rows[i] @ rows[j])) for j in range(6) if j != i) / 5)
    before = kde_loss(embeddings, kappa)
    assert before.item() == pytest.approx(total / 6)
    before.backward()
    assert embeddings.grad is not None
    moved = nn.functional.normalize(embeddings.detach() - 0.01 * embeddings.grad, dim=1)
    rows_BD = torch.stack(rows)
    assert (moved @ moved.T).mean() < (rows_BD @ rows_BD.T).mean(), "less of it means farther apart"


# ---------------------------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_all_defaults(method: str):
    assert METHOD_DEFAULTS[method].keys() == METHOD_DEFAULTS["dino"].keys()
    assert all(PretrainSettings.model_fields[name].default is None for name in METHOD_DEFAULTS[method])


@pytest.mark.parametrize("method", METHODS)
def test_every_objective_trains_an_encoder_and_goes_on_after_a_kill(images: Path, tmp_path: Path, method: str):
    """The same weights, to the bit, as without a stop: all that an objective remembers is in the checkpoint."""

    class Killed(Exception):
        pass

    def die(line: dict[str, Any]) -> None:
        if line["step"] == 3:
            raise Killed

    settings = PretrainSettings(**TINY, method=method, checkpoint_minutes=1e-9)  # pyright: ignore[reportArgumentType]
    pretrain(ImageTiles(images), tmp_path / "whole", settings, Origin("x"), device="cpu")
    with pytest.raises(Killed):
        pretrain(ImageTiles(images), tmp_path / "cut", settings, Origin("x"), device="cpu", report=die)
    pretrain(ImageTiles(images), tmp_path / "cut", settings, Origin("x"), device="cpu")
    whole, cut = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == cut
    assert {"loss", "feature_rank", "feature_std"} <= read_metrics(tmp_path / "cut")[-1].keys()


@pytest.mark.parametrize(("method", "by"), [("lejepa", 0.03), ("simdino", 0.1)])
def test_the_loss_falls(images: Path, tmp_path: Path, method: str, by: float):
    settings = PretrainSettings(**TINY | {"steps": 40, "lr": 2e-2}, method=method)  # pyright: ignore[reportArgumentType]
    pretrain(ImageTiles(images), tmp_path / "run", settings, Origin("x"), device="cpu")
    losses = [line["loss"] for line in read_metrics(tmp_path / "run")]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - by


def test_a_longer_constant_run_passes_through_the_end_of_a_shorter_one(images: Path, tmp_path: Path):
    """With the same weights to the bit: one run serves all budgets, and more steps go on from there."""
    own: dict[str, Any] = TINY | {"warmup_steps": 3, "momentum": None, "lr": 1e-2, "keep": "last"}
    short, long = (PretrainSettings.model_validate(own | {"steps": steps, "method": "lejepa"}) for steps in (6, 12))
    pretrain(ImageTiles(images), tmp_path / "short", short, Origin("x"), device="cpu")
    pretrain(ImageTiles(images), tmp_path / "long", long, Origin("x"), device="cpu", snapshots={6: tmp_path / "half"})
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("short", "half", "long")}
    assert weights["short"] == weights["half"] != weights["long"]
    rates = [[line["lr"] for line in read_metrics(tmp_path / name)] for name in ("short", "long")]
    assert rates[0] == rates[1][:6]
    assert rates[1][2:] == [1e-2 * 16 / 256] * 10


def test_lejepa_keeps_an_average_that_no_view_passes(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def never(*given: Any) -> Any:
        raise AssertionError("lejepa has no teacher")

    monkeypatch.setattr(learning.Learner, "teach", never)
    settings = PretrainSettings(**TINY | {"steps": 1, "warmup_lr": 1e-2, "momentum": 0.75}, method="lejepa")
    start = learning.start_encoder(settings, 32, settings.seed).backbone.state_dict()
    pretrain(ImageTiles(images), tmp_path / "run", settings, Origin("x"), device="cpu")
    kept = load_encoder(tmp_path / "run").backbone.state_dict()
    state = torch.load(tmp_path / "run" / "state.pt", weights_only=True)["learner"]
    for name, value in kept.items():
        student = state[f"student.backbone.{name}"]
        torch.testing.assert_close(value, 0.75 * start[name] + 0.25 * student)
    assert not torch.equal(kept["cls_token"], start["cls_token"])


def test_running_means_of_batch_norms_reach_the_average():
    teacher, student = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    student(torch.randn(8, 3) + 5)
    update_teacher(teacher, student, 0.9)
    assert torch.equal(teacher.running_mean, student.running_mean)  # pyright: ignore[reportArgumentType]
