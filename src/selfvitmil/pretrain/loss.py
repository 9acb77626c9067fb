"""Losses of DINO: cross-entropy with its centre, Sinkhorn-Knopp, KoLeo, KDE; and metrics that detect its collapse.

A student sees V views of every tile, a teacher the first two (the global ones). Both give K logits a view; the student
learns to predict the teacher's distribution of one view from every *other* view of the same tile. Rows are grouped by
view: all tiles of view 0, then all of view 1, and so on. Logits come in any floating type; everything is computed in
float32 (float64 stays float64).

What is unusual: with student logits s and teacher probabilities q, -sum_k q_k log_softmax(s)_k = logsumexp(s) - q . s.
Summed over the pairs of a view this needs one number a row and one dot product, so log-probabilities of all views never
exist at once: beyond the logits, the loss holds the teacher's probabilities and one view in float32. Its gradient,
softmax(s) - q, is worked out view by view as well.

Axes in names: V views, B tiles, K outputs, D dimensions, R rows (views times tiles). Caron et al., ICCV 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from selfvitmil.errors import ConfigError
from selfvitmil.pretrain.objectives import NUM_GLOBAL, at_least_float32


def teacher_probabilities(
    teacher_RK: torch.Tensor, center: torch.Tensor, teacher_temp: float | torch.Tensor
) -> torch.Tensor:
    """Centred and sharpened softmax of the teacher's logits, without gradient."""
    logits_RK = at_least_float32(teacher_RK.detach())
    return torch.softmax((logits_RK - center.detach().to(logits_RK.dtype).view(1, -1)) / teacher_temp, dim=-1)


@torch.no_grad()
def sinkhorn_knopp(
    teacher_RK: torch.Tensor, teacher_temp: float | torch.Tensor, rounds: int = 3, *, alone: bool = False
) -> torch.Tensor:
    """Return the teacher's distributions, sharpened and balanced: over all rows, outputs get nearly equal shares.

    The Sinkhorn-Knopp iteration replaces the centre (SwAV, arXiv 2006.09882; DINOv2, arXiv 2304.07193): scale columns
    to equal sums, then rows to one, and again. The rows of all processes count, unless `alone`. Unlike with a centre,
    the result can be neither one output for all nor uniform rows, as long as the logits differ: scaling removes what
    all rows have in common at once.
    """
    logits_RK = at_least_float32(teacher_RK.detach()) / teacher_temp
    shares_RK = torch.exp(logits_RK - logits_RK.amax(dim=1, keepdim=True))
    shares_RK /= shares_RK.sum(dim=1, keepdim=True)
    for _ in range(rounds):
        columns_K = shares_RK.sum(dim=0)
        if not alone and dist.is_available() and dist.is_initialized():
            dist.all_reduce(columns_K)
        shares_RK /= columns_K.clamp_min(torch.finfo(columns_K.dtype).tiny)
        shares_RK /= shares_RK.sum(dim=1, keepdim=True)
    return shares_RK


def dino_loss(
    student: torch.Tensor,
    teacher: torch.Tensor,
    center: torch.Tensor,
    student_temp: float,
    teacher_temp: float,
    num_views: int,
) -> torch.Tensor:
    """Mean cross-entropy over tiles and over all pairs of (teacher's global view, another view of the student).

    `student` (num_views * B, K) and `teacher` (2 * B, K) are logits grouped by view; `center` has K numbers. It equals

        for g in (0, 1):
            for v in range(num_views):
                if v != g:
                    total += mean_over_tiles(-sum_over_K(q[g] * log_softmax(student[v] / student_temp)))
        loss = total / (2 * num_views - 2)
    """
    _check_shapes(student, teacher, center, num_views)
    return crossed_cross_entropy(student, teacher_probabilities(teacher, center, teacher_temp), student_temp, num_views)


def crossed_cross_entropy(
    student: torch.Tensor, targets_RK: torch.Tensor, student_temp: float, num_views: int
) -> torch.Tensor:
    """`dino_loss` with the teacher's distributions (2 * B, K) given."""
    tiles = len(targets_RK) // NUM_GLOBAL
    targets_2BK = targets_RK.view(NUM_GLOBAL, tiles, -1)
    student_VBK = student.view(num_views, tiles, -1)
    return _CrossedCrossEntropy.apply(student_VBK, targets_2BK, student_temp)  # pyright: ignore[reportReturnType]


def _check_shapes(student: torch.Tensor, teacher: torch.Tensor, center: torch.Tensor, num_views: int) -> None:
    tiles, rest = divmod(len(teacher), NUM_GLOBAL)
    fits = student.ndim == teacher.ndim == 2 and student.shape[1] == teacher.shape[1] == center.numel()
    if num_views < NUM_GLOBAL or rest or not tiles or len(student) != num_views * tiles or not fits:
        raise ConfigError(
            f"logits of shape {tuple(student.shape)} (student) and {tuple(teacher.shape)} (teacher) with "
            f"{center.numel()} numbers of centre do not make {num_views} views",
            "the student needs one row for every view of every tile, the teacher two rows a tile, and all of them "
            "the same number of outputs",
            "Check num_views and that the last batch is whole",
            code="view-shape-mismatch",
        )


def _views_and_targets(targets_2BK: torch.Tensor, num_views: int):
    """(view, sum of the distributions it has to predict, how many these are) for every view."""
    yield 0, targets_2BK[1], 1
    yield 1, targets_2BK[0], 1
    if num_views > NUM_GLOBAL:
        both_BK = targets_2BK[0] + targets_2BK[1]
        for view in range(NUM_GLOBAL, num_views):
            yield view, both_BK, 2


class _CrossedCrossEntropy(torch.autograd.Function):
    """The loss and its gradient, one view at a time."""

    @staticmethod
    def forward(ctx: Any, student_VBK: torch.Tensor, targets_2BK: torch.Tensor, temp: float) -> torch.Tensor:
        num_views, tiles, _ = student_VBK.shape
        total = targets_2BK.new_zeros(())
        normalizers: list[torch.Tensor] = []
        for view, target_BK, pairs in _views_and_targets(targets_2BK, num_views):
            logits_BK = student_VBK[view].to(targets_2BK.dtype) / temp
            normalizers.append(torch.logsumexp(logits_BK, dim=-1))
            total += pairs * normalizers[-1].sum() - torch.linalg.vecdot(target_BK, logits_BK).sum()
        ctx.save_for_backward(student_VBK, targets_2BK, torch.stack(normalizers))
        ctx.temp, ctx.terms = temp, tiles * (NUM_GLOBAL * num_views - NUM_GLOBAL)
        return total / ctx.terms

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        student_VBK, targets_2BK, normalizers_VB = ctx.saved_tensors
        # The loss scaling of fp16 arrives here and must act before the cast: unscaled, most entries would vanish.
        scale = grad_outputs[0] / (ctx.temp * ctx.terms)
        grad_VBK = torch.empty_like(student_VBK)
        for view, target_BK, pairs in _views_and_targets(targets_2BK, len(student_VBK)):
            logits_BK = student_VBK[view].to(targets_2BK.dtype) / ctx.temp
            probabilities_BK = logits_BK.sub_(normalizers_VB[view][:, None]).exp_()
            grad_VBK[view] = probabilities_BK.mul_(pairs).sub_(target_BK).mul_(scale)
        return grad_VBK, None, None


@torch.no_grad()
def update_center(center: torch.Tensor, teacher: torch.Tensor, momentum: float) -> torch.Tensor:
    """The centre moved towards the mean of the teacher's logits (R, K), over all processes when there are several.

    Rows are counted, so processes may hold different numbers of them. With gradient accumulation, pass the means of
    equally large micro-batches as rows.
    """
    sums_K = teacher.sum(dim=0, dtype=center.dtype)
    sums_and_count = torch.cat([sums_K, sums_K.new_full((1,), len(teacher))])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(sums_and_count)
    mean_K = sums_and_count[:-1] / sums_and_count[-1]
    return center * momentum + mean_K.view_as(center) * (1 - momentum)


# ---- collapse and regularizers ---------------------------------------------------------------------------------------


@torch.no_grad()
def teacher_entropy(targets_RK: torch.Tensor) -> torch.Tensor:
    """Return the mean entropy of the teacher's distributions in nats: 0 for one-hot, log K for uniform ones."""
    return torch.special.entr(targets_RK).sum(dim=-1).mean()


@torch.no_grad()
def teacher_student_kl(student: torch.Tensor, targets_RK: torch.Tensor, student_temp: float) -> torch.Tensor:
    """Mean KL divergence in nats from the teacher's distributions to the student's of the other global view.

    Of `student` only the first 2 * B rows are read. Entropy plus this is the cross-entropy of the crossed global views.
    It vanishes when student and teacher say the same for every view, which a collapsed pair does.
    """
    logits_RK = at_least_float32(student[: len(targets_RK)]) / student_temp
    crossed_RK = torch.log_softmax(logits_RK, dim=-1).roll(len(targets_RK) // NUM_GLOBAL, dims=0)
    return functional.kl_div(crossed_RK, targets_RK, reduction="batchmean")


def koleo_loss(embeddings_BD: torch.Tensor) -> torch.Tensor:
    """Mean of -log of each embedding's distance to its nearest neighbour in the batch, all brought to length one.

    The entropy estimate of Kozachenko and Leonenko up to constants (Sablayrolles et al. 2019; in DINOv2 of each large
    view by itself): least where embeddings are spread evenly over the sphere.

    Autocast is off here, and neighbours are found by differences instead of products: early in training all cosines
    are about 0.997, and products rounded to bfloat16 or TF32 would find the wrong neighbour for most embeddings.
    """
    with torch.autocast(embeddings_BD.device.type, enabled=False):
        directions_BD = functional.normalize(at_least_float32(embeddings_BD), dim=-1, eps=1e-8)
        nearest_B = nearest_neighbours(directions_BD)
        distance_B = functional.pairwise_distance(directions_BD, directions_BD[nearest_B], eps=1e-8)
        return -(distance_B + 1e-8).log().mean()


def kde_loss(embeddings_BD: torch.Tensor, concentration: float) -> torch.Tensor:
    """Mean log of the kernel density at each embedding, from the others of the batch, all brought to length one.

    mean_i log(sum over j != i of exp(concentration * cos(i, j)) / (n - 1)): the uniformity loss of Wang and Isola
    (2020) with the log inside the mean, as in kaiko's Midnight (2025). It is least, and so to be *added* to a loss,
    where embeddings are spread evenly over the sphere; unlike with KoLeo, every other embedding pushes.
    """
    with torch.autocast(embeddings_BD.device.type, enabled=False):
        directions_BD = functional.normalize(at_least_float32(embeddings_BD), dim=-1, eps=1e-8)
        logits_BB = (concentration * directions_BD @ directions_BD.T).fill_diagonal_(-torch.inf)
        return torch.logsumexp(logits_BB, dim=1).mean() - math.log(len(directions_BD) - 1)


@torch.no_grad()
def nearest_neighbours(rows_BD: torch.Tensor) -> torch.Tensor:
    """Index of the nearest other row, by Euclidean distance computed from differences in the rows' own precision."""
    distance_BB = torch.cdist(rows_BD, rows_BD, compute_mode="donot_use_mm_for_euclid_dist")
    return distance_BB.fill_diagonal_(torch.inf).argmin(dim=1)


NEAR = 0.01
"""Share of log K within which an entropy or a loss counts as having reached 0 or log K."""


def collapse_reason(entropy: float, kl: float, num_outputs: int) -> str | None:
    """What went wrong, with advice, by the teacher's entropy and the KL divergence; None while all is well.

    Both should be averages over many steps, after the warm-up: an untrained student starts at a loss of log K. A low
    entropy alone is no collapse, as a sharp teacher is low on purpose; it is one when the student agrees everywhere.
    """
    most = math.log(num_outputs)
    near = NEAR * most
    if not math.isfinite(entropy + kl):
        return "teacher or student gave numbers that are not finite: lower the learning rate, and prefer bf16 to fp16"
    if entropy < near and kl < near:
        return (
            f"collapse to one output: teacher entropy {entropy:.3f} of at most {most:.2f}, and the student agrees for "
            "every tile. Raise the teacher's temperature or its warm-up, lower the momentum of the centre, and check "
            "that batches mix slides"
        )
    if entropy > most - near:
        return (
            f"collapse to uniform outputs: teacher entropy {entropy:.3f} has reached log({num_outputs}) = {most:.3f}. "
            "Lower the teacher's temperature or the learning rate, and use fewer outputs when there are few tiles"
        )
    if abs(entropy + kl - most) < near:
        return (
            f"the student does not learn: loss {entropy + kl:.3f} is stuck at log({num_outputs}) = {most:.3f}. Use "
            "fewer outputs, a longer warm-up or a higher momentum of the teacher, and check that the learning rate "
            "is scaled to the batch"
        )
    return None


DRIFT_PARTS = 5
"""Parts of the time since the rank was highest; the entropy must be higher in each than in the one before."""
DRIFT_WAY = 1 / 3
"""Share of the way to log K that the entropy must have gone in that time."""
DRIFT_RANK = 2 / 3
"""Share of its highest value below which the rank must have fallen."""


def drift_reason(entropies: Sequence[float], ranks: Sequence[float], num_outputs: int, window: int = 10) -> str | None:
    """Whether a run is on its way to uniform outputs, long before it is there; None while all is well.

    `entropies` of the teacher and `ranks` of the features come from the lines of metrics since the warm-up. While a
    sound run learns its entropy may rise, but its rank rises too or stays. Here the entropy has risen steadily since
    the rank (averaged over `window` lines) was highest, and the rank has fallen by a third and more.
    """
    if len(ranks) < 2 * window:
        return None
    smooth = np.convolve(ranks, np.full(window, 1 / window), mode="valid")
    highest = int(smooth.argmax())
    since = np.asarray(entropies[highest:])
    if smooth[-1] > DRIFT_RANK * smooth[highest] or len(since) < 2 * max(DRIFT_PARTS, window):
        return None
    means = [part.mean() for part in np.array_split(since, DRIFT_PARTS)]
    before, now, most = since[:window].mean(), since[-window:].mean(), math.log(num_outputs)
    is_steady = all(earlier < later for earlier, later in pairwise(means))
    if not is_steady or now - before < DRIFT_WAY * (most - before):
        return None
    return (
        f"the teacher drifts to uniform outputs: its entropy rose from {before:.1f} to {now:.1f} of "
        f"log({num_outputs}) = {most:.1f}, while the feature rank fell from {smooth[highest]:.0f} to {smooth[-1]:.0f}"
    )
