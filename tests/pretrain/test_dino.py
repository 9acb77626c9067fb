"""Loss, head, schedules, parameter groups: against the reference's numbers and slow loops."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from selfvitmil.errors import ConfigError
from selfvitmil.pretrain.loss import (
    collapse_reason,
    dino_loss,
    koleo_loss,
    nearest_neighbours,
    sinkhorn_knopp,
    teacher_entropy,
    teacher_probabilities,
    teacher_student_kl,
    update_center,
)
from selfvitmil.pretrain.objectives import Objective, make_objective
from selfvitmil.pretrain.objectives.dino import DINOHead, WeightNormLinear
from selfvitmil.pretrain.objectives.simclr import SimCLRHead, nt_xent_loss
from selfvitmil.pretrain.optim import (
    ConstantSchedule,
    TeacherTemperature,
    cancel_gradients,
    clip_each_gradient,
    resolve_hyperparameters,
    scaled_learning_rate,
    suggested_freeze_steps,
    suggested_momentum,
    suggested_out_dim,
    update_teacher,
)
from selfvitmil.pretrain.quality import effective_rank, feature_std
from selfvitmil.runtime.training import CosineSchedule, parameter_groups, suggested_warmup_steps
from selfvitmil.settings import PretrainSettings

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


# ---- DINO's loss ---------------------------------------------------------------------------------------------------


def slow_dino_loss(student, teacher, center, student_temp, teacher_temp, num_views):
    """Pair by pair, tile by tile, as the paper writes it."""
    tiles = len(teacher) // 2
    total, pairs = 0.0, 0
    for g in range(2):
        for v in range(num_views):
            if v != g:
                for b in range(tiles):
                    q = torch.softmax((teacher[g * tiles + b] - center.flatten()) / teacher_temp, dim=0)
                    total -= (q * torch.log_softmax(student[v * tiles + b] / student_temp, dim=0)).sum() / tiles
                pairs += 1
    return total / pairs


def test_dino_loss_equals_the_reference():
    ref = golden("dino_loss")
    center = torch.zeros(1, 48, dtype=torch.float64)
    for call in range(4):
        student = torch.from_numpy(ref[f"s{call}"]).requires_grad_()
        teacher = torch.from_numpy(ref[f"t{call}"])
        temp = ref["teacher_temp_schedule"][ref[f"epoch{call}"]]
        loss = dino_loss(student, teacher, center, float(ref["student_temp"]), float(temp), num_views=6)
        loss.backward()
        center = update_center(center, teacher, float(ref["center_momentum"]))
        assert abs(loss.item() - ref[f"loss{call}"]) < 1e-9
        np.testing.assert_allclose(student.grad, ref[f"grad{call}"], atol=1e-9, rtol=0)
        np.testing.assert_allclose(center, ref[f"center{call}"], atol=1e-12, rtol=0)


@settings(max_examples=30, deadline=None)
@given(
    tiles=st.integers(1, 4),
    views=st.integers(2, 5),
    outputs=st.integers(1, 7),
    student_temp=st.floats(0.05, 1),
    teacher_temp=st.floats(0.01, 1),
    seed=st.integers(0, 999),
)
def test_dino_loss_equals_a_slow_loop(tiles, views, outputs, student_temp, teacher_temp, seed):
    rng = torch.Generator().manual_seed(seed)
    student = torch.randn(views * tiles, outputs, dtype=torch.float64, generator=rng).requires_grad_()
    teacher = torch.randn(2 * tiles, outputs, dtype=torch.float64, generator=rng)
    center = torch.randn(outputs, dtype=torch.float64, generator=rng)
    fast = dino_loss(student, teacher, center, student_temp, teacher_temp, views)
    slow = slow_dino_loss(student, teacher, center, student_temp, teacher_temp, views)
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)
    (fast_grad,) = torch.autograd.grad(3 * fast, student)
    (slow_grad,) = torch.autograd.grad(3 * slow, student)
    torch.testing.assert_close(fast_grad, slow_grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dino_loss_of_low_precision_logits_is_computed_in_float32(dtype):
    rng = torch.Generator().manual_seed(0)
    # Logits this large would overflow float16 once divided by the temperature.
    student = (5000 * torch.randn(12, 64, generator=rng)).to(dtype).requires_grad_()
    teacher = (3000 * torch.randn(6, 64, generator=rng)).to(dtype)
    loss = dino_loss(student, teacher, torch.zeros(64), 0.1, 0.04, num_views=4)
    exact = dino_loss(student.double(), teacher.double(), torch.zeros(64), 0.1, 0.04, num_views=4)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0)
    loss.backward()
    assert student.grad is not None
    assert student.grad.dtype == dtype


def test_loss_scaling_saves_small_gradients_in_float16():
    student = torch.zeros(4, 4096, dtype=torch.float16, requires_grad=True)
    teacher = torch.zeros(4, 4096)
    teacher[:, 0] = 1
    # Unscaled, most entries are 1 / (4096 * 2 * 2 * temp) and below what float16 can hold.
    (dino_loss(student, teacher, torch.zeros(4096), 1e4, 0.04, num_views=2) * 2**16).backward()
    assert student.grad is not None
    expected = 2**16 / (4096 * 4 * 1e4)
    torch.testing.assert_close(student.grad[:, 1:].float(), torch.full((4, 4095), expected), rtol=1e-2, atol=0)


def test_teacher_and_centre_get_no_gradient():
    teacher, center = torch.randn(4, 8, requires_grad=True), torch.zeros(8, requires_grad=True)
    dino_loss(torch.randn(6, 8, requires_grad=True), teacher, center, 0.1, 0.04, num_views=3).backward()
    assert teacher.grad is None
    assert center.grad is None


def test_dino_loss_refuses_rows_that_are_no_views():
    rows = torch.zeros(5, 8)
    with pytest.raises(ConfigError, match=r"\(5, 8\).*3 views"):
        dino_loss(rows, torch.zeros(4, 8), torch.zeros(8), 0.1, 0.04, num_views=3)


def test_diagnostics_add_up_to_the_loss_of_the_global_views():
    rng = torch.Generator().manual_seed(1)
    student, teacher = torch.randn(15, 9, generator=rng), torch.randn(6, 9, generator=rng)
    center = torch.randn(1, 9, generator=rng)
    targets = teacher_probabilities(teacher, center, 0.5)
    entropy, kl = teacher_entropy(targets), teacher_student_kl(student, targets, 0.7)
    torch.testing.assert_close(entropy + kl, dino_loss(student[:6], teacher, center, 0.7, 0.5, num_views=2))
    assert abs(teacher_entropy(torch.full((2, 9), 1 / 9)).item() - math.log(9)) < 1e-6


def slow_balanced(logits, temp, rounds):
    """Sinkhorn and Knopp entry by entry."""
    shares = [[math.exp(value / temp) for value in row] for row in logits.tolist()]
    for _ in range(rounds):
        for k in range(len(shares[0])):
            column = sum(row[k] for row in shares)
            for row in shares:
                row[k] /= column
        for row in shares:
            whole = sum(row)
            row[:] = [value / whole for value in row]
    return torch.tensor(shares, dtype=torch.float64)


def test_balanced_probabilities_equal_the_slow_iteration():
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(7, 5, generator=rng, dtype=torch.float64)
    # The first scaling of rows, which only guards against overflow, changes nothing after the columns were scaled by
    # the same number of rows: it is one more half round.
    shares = torch.softmax(logits / 0.5, dim=1)
    torch.testing.assert_close(sinkhorn_knopp(logits, 0.5), slow_balanced(shares.log(), 1.0, 3))


def test_balancing_ends_neither_in_one_output_nor_in_none():
    """A teacher that says nearly the same of all tiles, which a centre of the past would not undo at once."""
    rng = torch.Generator().manual_seed(4)
    logits = 0.3 * torch.randn(1, 16, generator=rng) + 0.02 * torch.randn(64, 16, generator=rng)
    plain = teacher_probabilities(logits, torch.zeros(16), 0.04)
    balanced = sinkhorn_knopp(logits, 0.04, rounds=20)
    torch.testing.assert_close(balanced.sum(1), torch.ones(64))
    torch.testing.assert_close(balanced.mean(0), torch.full((16,), 1 / 16), atol=2e-3, rtol=0)
    assert plain.mean(0).max() > 0.5
    assert teacher_entropy(balanced) < math.log(16) - 0.05


def test_effective_rank_counts_directions():
    rng = torch.Generator().manual_seed(2)
    basis = torch.linalg.qr(torch.randn(32, 32, generator=rng)).Q
    assert effective_rank(basis[:5]).item() == pytest.approx(5, abs=1e-4)
    assert effective_rank(torch.ones(16, 8)).item() == pytest.approx(1, abs=1e-3)
    # 3 and 1: shares 3/4 and 1/4
    expected = math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert effective_rank(basis[:2] * torch.tensor([[3.0], [1.0]])).item() == pytest.approx(expected, abs=1e-4)


def test_feature_std_is_one_on_the_sphere_and_zero_for_equal_embeddings():
    rng = torch.Generator().manual_seed(3)
    assert feature_std(torch.randn(4000, 16, generator=rng)).item() == pytest.approx(1, abs=0.02)
    assert feature_std(torch.ones(10, 16)).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("entropy", "kl", "words"),
    [
        (0.001, 0.002, "one output"),
        (math.log(4096) - 0.01, 0.001, "uniform"),
        (5.0, math.log(4096) - 5.0, "does not learn"),
        (float("nan"), 1.0, "not finite"),
        (0.01, 3.0, None),
        (4.0, 1.5, None),
    ],
)
def test_collapse_is_named(entropy, kl, words):
    reason = collapse_reason(entropy, kl, 4096)
    assert (reason is None) if words is None else (reason is not None and words in reason)


def test_collapses_are_seen_from_logits():
    """The planted collapse goes through the diagnostics, not just hand-made numbers."""
    outputs, zero = 512, torch.zeros(512)
    one_wins = torch.zeros(8, outputs)
    one_wins[:, 3] = 1.0
    for logits, temp, words in [(one_wins, 0.02, "one output"), (torch.zeros(8, outputs), 0.04, "uniform")]:
        targets = teacher_probabilities(logits, zero, temp)
        entropy, kl = teacher_entropy(targets).item(), teacher_student_kl(logits, targets, temp).item()
        assert words in (collapse_reason(entropy, kl, outputs) or "")


def course_of(entropies: np.ndarray, ranks: np.ndarray, seed: int = 0) -> list[dict[str, float]]:
    """Lines of metrics with noise as a batch has it."""
    rng = np.random.default_rng(seed)
    noisy = zip(entropies + rng.normal(0, 0.1, len(entropies)), ranks + rng.normal(0, 5, len(ranks)), strict=True)
    return [{"teacher_entropy": entropy, "kl": 0.2, "feature_rank": rank} for entropy, rank in noisy]


def dino_of(outputs: int) -> Objective:
    return make_objective(PretrainSettings(method="dino"), out_dim=outputs, freeze_steps=0)


def test_a_teacher_on_its_way_to_uniform_outputs_raises_an_alarm_before_it_is_there():
    """Preset `quick`, 80 slides, 3,400 steps: from step 1,000 on the entropy rose from 3.0 to 6.4 of 6.93 nats, while
    the rank fell from 160 to 83."""
    lines = course_of(
        np.concatenate([np.full(50, 3.0), np.linspace(3.0, 6.4, 240)]),
        np.concatenate([np.linspace(100, 160, 50), np.linspace(160, 83, 240)]),
    )
    dino = dino_of(1024)
    told = [dino.collapse_advice(lines[:count]) for count in range(10, len(lines) + 1)]
    first = next(place for place, advice in enumerate(told) if advice) + 10
    assert 50 < first < 240, "after the decline began, well before its end"
    assert all(told[-30:])
    assert "its entropy rose from 3." in (told[-1] or "")
    assert "of log(1024) = 6.9, while the feature rank fell from 1" in (told[-1] or "")
    assert "--pretrain.method lejepa" in (told[-1] or "")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("entropies", "ranks"),
    [
        pytest.param(np.linspace(1.0, 5.0, 290), np.linspace(54, 185, 290), id="both rise"),
        pytest.param(np.full(290, 3.0), np.full(290, 120.0), id="noise"),
        pytest.param(np.full(290, 3.0), np.linspace(160, 83, 290), id="rank falls alone"),
        pytest.param(np.linspace(3.0, 6.4, 290), np.linspace(160, 120, 290), id="rank falls by a quarter"),
        pytest.param(np.linspace(5.0, 3.0, 290), np.linspace(160, 83, 290), id="entropy falls"),
    ],
)
def test_a_sound_run_raises_no_alarm(entropies: np.ndarray, ranks: np.ndarray, seed: int):
    lines, dino = course_of(entropies, ranks, seed), dino_of(1024)
    assert not any(dino.collapse_advice(lines[:count]) for count in range(10, len(lines) + 1, 7))


# ---- several processes ---------------------------------------------------------------------------------------------

PROCESS = """
import sys, torch, torch.distributed as dist
from selfvitmil.pretrain.objectives import JointBatch
from selfvitmil.pretrain.loss import update_center
from selfvitmil.pretrain.objectives.simclr import nt_xent_loss
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
data = torch.load(f"{folder}/data.pt")
rows = [slice(0, 3), slice(3, 10)][rank]  # processes with different numbers of rows
center = update_center(data["center"], data["teacher"][rows], 0.9)
z = data["z"][:, 3 * rank : 3 * rank + 3].clone().requires_grad_()
loss = nt_xent_loss(JointBatch().join(z).flatten(0, 1), 0.5)
loss.backward()
torch.save({"center": center, "loss": loss.detach(), "grad": z.grad}, f"{folder}/out{rank}.pt")
dist.destroy_process_group()  # or its threads may outlive what they use, and abort the process at its end
"""


def test_two_processes_equal_one_with_the_joint_batch(tmp_path: Path):
    rng = torch.Generator().manual_seed(4)
    teacher, center = torch.randn(10, 5, generator=rng).double(), torch.randn(1, 5, generator=rng).double()
    z = torch.randn(2, 6, 4, generator=rng).double()  # views, tiles
    torch.save({"teacher": teacher, "center": center, "z": z}, tmp_path / "data.pt")
    commands = [[sys.executable, "-c", PROCESS, str(rank), str(tmp_path)] for rank in range(2)]
    for process in [subprocess.Popen(command) for command in commands]:
        assert process.wait(timeout=60) == 0
    out = [torch.load(tmp_path / f"out{rank}.pt") for rank in range(2)]
    joint = z.reshape(12, -1).clone().requires_grad_()
    loss = nt_xent_loss(joint, 0.5)
    loss.backward()
    assert joint.grad is not None
    for result in out:
        torch.testing.assert_close(result["center"], update_center(center, teacher, 0.9))
    torch.testing.assert_close((out[0]["loss"] + out[1]["loss"]) / 2, loss.detach())
    # DDP averages what the processes sum up.
    torch.testing.assert_close(torch.cat([result["grad"] for result in out], dim=1) / 2, joint.grad.view(2, 6, -1))


# ---- SimCLR --------------------------------------------------------------------------------------------------------


def slow_nt_xent(z, temperature):
    rows, total = len(z), 0.0
    for i in range(rows):
        similar = [torch.cosine_similarity(z[i], z[k], dim=0) / temperature for k in range(rows)]
        others = torch.stack([torch.exp(similar[k]) for k in range(rows) if k != i]).sum()
        total -= torch.log(torch.exp(similar[(i + rows // 2) % rows]) / others)
    return total / rows


@pytest.mark.parametrize(("tiles", "temperature"), [(2, 0.5), (5, 0.1)])
def test_nt_xent_equals_a_slow_loop(tiles, temperature):
    rng = torch.Generator().manual_seed(tiles)
    z = torch.randn(2 * tiles, 6, dtype=torch.float64, generator=rng).requires_grad_()
    fast, slow = nt_xent_loss(z, temperature), slow_nt_xent(z, temperature)
    torch.testing.assert_close(fast, slow)
    torch.testing.assert_close(torch.autograd.grad(fast, z), torch.autograd.grad(slow, z))


def test_nt_xent_needs_something_to_contrast():
    for rows in (2, 5):
        with pytest.raises(ConfigError, match="cannot be contrasted"):
            nt_xent_loss(torch.randn(rows, 4))


def test_simclr_head_is_two_linear_layers():
    head = SimCLRHead(8, 3).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    first, _, second = head
    expected = (x @ first.weight.T + first.bias).clamp_min(0) @ second.weight.T + second.bias
    torch.testing.assert_close(head(x), expected)


# ---- head ----------------------------------------------------------------------------------------------------------


def golden_head() -> tuple[DINOHead, dict[str, np.ndarray]]:
    ref = golden("dino_head")
    head = DINOHead(16, 40, hidden_dim=24, bottleneck_dim=12).double()
    head.load_state_dict({name[2:]: torch.from_numpy(value) for name, value in ref.items() if name.startswith("w:")})
    return head, ref


def test_head_equals_the_reference():
    head, ref = golden_head()
    np.testing.assert_allclose(head(torch.from_numpy(ref["x"])).detach(), ref["y"], atol=1e-12, rtol=0)


def test_weight_norm_and_its_gradients_equal_torch():
    torch.manual_seed(0)
    ours = WeightNormLinear(6, 9, train_lengths=True).double()
    theirs = nn.utils.parametrizations.weight_norm(nn.Linear(6, 9, bias=False)).double()
    with torch.no_grad():
        ours.weight_g.uniform_(0.5, 2)
    theirs.load_state_dict(
        {"parametrizations.weight.original0": ours.weight_g, "parametrizations.weight.original1": ours.weight_v}
    )
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))
    for layer in (ours, theirs):
        (layer(x) ** 3).sum().backward()
    original = theirs.parametrizations.weight  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(ours.weight_g.grad, original.original0.grad)  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(ours.weight_v.grad, original.original1.grad)  # pyright: ignore[reportAttributeAccessIssue]


def test_head_starts_as_dino_does():
    torch.manual_seed(0)
    head = DINOHead(64, 512, hidden_dim=256, bottleneck_dim=32)
    for index in (0, 2, 4):
        layer = head.mlp[index]
        assert isinstance(layer, nn.Linear)
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert layer.bias.abs().max() == 0
    assert not head.last_layer.weight_g.requires_grad
    assert (head.last_layer.weight_g == 1).all()
    assert head.last_layer.weight_v.abs().max().item() == pytest.approx(32**-0.5, rel=0.01)
    assert head(torch.randn(50, 64)).abs().max() <= 1 + 1e-6
    assert DINOHead(8, 16, 8, 4, norm_last_layer=False).last_layer.weight_g.requires_grad


def test_head_in_half_precision_does_not_overflow():
    torch.manual_seed(0)
    head = DINOHead(16, 32, 24, 8)
    with torch.no_grad():
        head.mlp[4].weight.mul_(1e6)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    x = torch.randn(5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        low, hidden = head(x), head.mlp(x)
    assert hidden.dtype == torch.bfloat16
    torch.testing.assert_close(low, head(x), atol=0.03, rtol=0)
    # The cosines themselves are exact: they are divided by a small temperature.
    torch.testing.assert_close(
        low, nn.functional.cosine_similarity(hidden.float()[:, None], head.last_layer.weight()[None], -1)
    )


def test_head_of_one_layer():
    single = DINOHead(8, 16, 12, 4, num_layers=1)
    assert [tuple(p.shape) for p in single.mlp.parameters()] == [(4, 8), (4,)]


# ---- schedules -----------------------------------------------------------------------------------------------------


def test_schedules_equal_the_reference():
    """The golden run: 10 epochs of 7 steps, learning rate 5e-4 to 1e-6 with 2 epochs of warm-up."""
    ref = golden("dino_schedules")
    warm = {"base": 5e-4, "final": 1e-6, "total_steps": 70, "warmup_steps": 14}
    made = {
        "lr": CosineSchedule(**warm, warmup_start=1e-6),
        "lr_from_zero": CosineSchedule(**warm),
        "momentum": CosineSchedule(0.9995, 1.0, 70),
        "wd": CosineSchedule(0.04, 0.4, 70),
    }
    assert made.keys() == ref.keys()
    for name, schedule in made.items():
        values = [schedule.value_at(step) for step in range(70)]
        np.testing.assert_allclose(values, ref[name], rtol=0, atol=1e-12)


def test_schedule_ends_and_stays_at_its_final_value():
    schedule = CosineSchedule(1.0, 0.25, 10, warmup_steps=3, warmup_start=0.4)
    assert [schedule.value_at(step) for step in range(3)] == pytest.approx([0.4, 0.7, 1.0])
    assert schedule.value_at(3) == 1.0
    assert schedule.value_at(10) == schedule.value_at(99) == pytest.approx(0.25)
    assert CosineSchedule(1.0, 0.0, 5, warmup_steps=1, warmup_start=0.1).value_at(0) == 0.1  # as numpy's linspace


@given(
    total=st.integers(1, 60),
    warmup=st.integers(0, 20),
    share=st.floats(0, 0.99),
    base=st.floats(1e-4, 1.0),
    ends=st.floats(0, 0.9),
)
def test_constant_schedule_equals_the_slow_formula(total, warmup, share, base, ends):
    """Warm-up as numpy's linspace, then the same value, then a straight line whose end lies just behind the run."""
    decay = round(share * total)
    schedule = ConstantSchedule(base, total, warmup, ends * base, decay, 0.5 * base)
    slow = np.full(total + 5, base)
    for number in range(decay):
        slow[total - decay + number] = base - 0.5 * base * number / decay
    if decay:
        slow[total:] = 0.5 * base
    slow[:warmup] = np.linspace(ends * base, base, warmup)[: total + 5]
    np.testing.assert_allclose([schedule.value_at(step) for step in range(total + 5)], slow, rtol=1e-12)


@given(steps=st.integers(300, 5000), factor=st.integers(1, 8), batch=st.sampled_from([48, 256, 1024]))
def test_no_number_of_a_constant_run_depends_on_its_length(steps, factor, batch):
    numbers = [
        resolve_hyperparameters(PretrainSettings(schedule="constant", batch=batch, steps=length), 10_000, 39)
        for length in (steps, factor * steps)
    ]
    short, long = (asdict(each) | {"total_steps": 0} for each in numbers)
    assert short == long
    asked = PretrainSettings(schedule="constant", batch=batch)
    for step in (0, 7, 149, 150, steps - 1):
        assert numbers[0].schedules(asked).at(step) == numbers[1].schedules(asked).at(step)


def test_teacher_temperature_equals_the_reference_and_steps_on_request():
    ref = golden("dino_loss")["teacher_temp_schedule"]
    linear = TeacherTemperature(0.01, 0.04, warmup_epochs=3, steps_per_epoch=5)
    np.testing.assert_allclose([linear.value_at(k) for k in range(30)], np.repeat(ref, 5), atol=1e-15)
    step = TeacherTemperature(0.01, 0.04, warmup_epochs=3, steps_per_epoch=5, ramp="step")
    np.testing.assert_array_equal([step.value_at(k) for k in range(30)], np.repeat([0.01, 0.04], [15, 15]))


def test_rules_pass_through_the_published_points():
    assert scaled_learning_rate(5e-4, 256) == 5e-4
    assert scaled_learning_rate(5e-4, 1024) == 2e-3
    assert suggested_momentum(1024, 125_000) == pytest.approx(0.996)
    assert suggested_momentum(256, 108_000) == pytest.approx(0.9995)
    assert suggested_out_dim(1_281_167) == suggested_out_dim(1_235_428) == 65_536
    assert suggested_out_dim(12_881) == suggested_out_dim(50) == 1_024
    assert suggested_warmup_steps(108_000) == 10_800
    assert suggested_freeze_steps(108_000) == 1_080


@given(batch=st.integers(1, 8192), steps=st.integers(1, 500_000))
def test_teacher_forgets_its_start_within_the_run(batch, steps):
    momentum = suggested_momentum(batch, steps)
    assert 0.99 <= momentum < 1
    half_life = math.log(0.5) / math.log(momentum)
    assert half_life <= max(steps / 10, 70) * (1 + 1e-6)
    assert suggested_momentum(2 * batch, steps) <= momentum


# ---- moving the weights --------------------------------------------------------------------------------------------


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def test_biases_and_vectors_do_not_decay():
    head = DINOHead(6, 8, 5, 4)
    decayed, others = parameter_groups(small_net(), head)
    assert sorted(p.ndim for p in decayed["params"]) == [2] * 6
    assert sorted(p.ndim for p in others["params"]) == [1] * 7
    assert "weight_decay" not in decayed
    assert others["weight_decay"] == 0
    assert all(p is not head.last_layer.weight_g for group in (decayed, others) for p in group["params"])


def test_clipping_equals_a_loop_over_tensors():
    fast, slow = small_net(), small_net()
    for net in (fast, slow):
        (net(torch.arange(10.0).view(2, 5)) ** 2).sum().backward()
    fast[2].bias.grad = slow[2].bias.grad = None  # pyright: ignore[reportAttributeAccessIssue]
    norms = clip_each_gradient(fast.parameters(), 0.5)
    expected = []
    for parameter in slow.parameters():
        if parameter.grad is not None:
            expected.append(parameter.grad.norm().item())
            parameter.grad *= min(0.5 / (expected[-1] + 1e-6), 1)
    assert norms.tolist() == pytest.approx(expected)
    assert min(expected) < 0.5 < max(expected)
    for ours, theirs in zip(fast.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert len(clip_each_gradient(small_net().parameters(), 0.5)) == 0


def test_frozen_last_layer_does_not_move():
    head = DINOHead(6, 8, 5, 4)
    optimizer = torch.optim.AdamW(parameter_groups(head), lr=0.1, weight_decay=0.4)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    head(torch.randn(3, 6)).square().sum().backward()
    cancel_gradients(head.last_layer)
    optimizer.step()
    moved = {name for name, value in head.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {f"mlp.{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")}


def test_teacher_moves_towards_the_student():
    teacher, student = small_net().double(), nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).double()
    expected = [
        0.9 * t.detach() + 0.1 * s.detach() for t, s in zip(teacher.parameters(), student.parameters(), strict=True)
    ]
    update_teacher(teacher, student, 0.9)
    for mine, wanted in zip(teacher.parameters(), expected, strict=True):
        torch.testing.assert_close(mine.detach(), wanted)


def test_koleo_is_the_mean_log_distance_to_the_nearest():
    embeddings = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = (embeddings / embeddings.norm(dim=1, keepdim=True)).tolist()
    nearest = [min(math.dist(a, b) for j, b in enumerate(rows) if j != i) for i, a in enumerate(rows)]
    expected = -sum(map(math.log, nearest)) / len(nearest)
    assert koleo_loss(embeddings).item() == pytest.approx(expected, abs=1e-6)


def test_koleo_spreads_embeddings_apart():
    embeddings = torch.ones(6, 3, dtype=torch.float64) + 0.01 * torch.randn(
        6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    embeddings.requires_grad_()
    before = koleo_loss(embeddings)
    before.backward()
    assert embeddings.grad is not None
    with torch.no_grad():
        moved = embeddings - 1e-4 * embeddings.grad
    assert koleo_loss(moved) < before
    assert torch.isfinite(koleo_loss(torch.ones(4, 3))), "equal embeddings"


def test_koleo_under_autocast_is_that_of_float32():
    """Embeddings as early in training, with a mean cosine of 0.997, whose cosines bfloat16 cannot tell apart."""
    rng = torch.Generator().manual_seed(0)
    embeddings = torch.randn(1, 384, generator=rng) + 0.055 * torch.randn(128, 384, generator=rng)
    cosines = torch.corrcoef(embeddings.double())
    assert 0.996 < cosines[~torch.eye(128, dtype=torch.bool)].mean() < 0.998
    directions = nn.functional.normalize(embeddings.double(), dim=1)
    distances = torch.tensor([[math.dist(a, b) for b in directions.tolist()] for a in directions.tolist()])
    nearest = distances.fill_diagonal_(math.inf).argmin(dim=1)
    exact = embeddings.double().requires_grad_()
    pairs = nn.functional.normalize(exact, dim=1)
    (-(pairs - pairs[nearest]).norm(dim=1).log().mean()).backward()
    ours = embeddings.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(nearest_neighbours(directions.float()), nearest)
        koleo_loss(ours).backward()
    torch.testing.assert_close(ours.grad, exact.grad.float(), rtol=1e-3, atol=1e-7)  # pyright: ignore[reportOptionalMemberAccess]
