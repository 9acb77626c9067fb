"""Quality of an encoder's embeddings on labelled tiles: k-nearest-neighbour and linear-probe accuracy.

A table of labelled tiles comes in (`read_probe_table`), numbers between 0 and 1 go out (`probe_encoder`): `knn20` and
`linear`, the accuracies on the table's test tiles, and the same with `_balanced`, the mean over classes. The training
itself does not use the labels; the two classifiers here do, and are discarded.

Everything is deterministic and uses no generator of torch, so that a run gives the same weights with and without
probes. Tiles keep their colours; stains are not normalized.

Axes in names: N tiles to learn from, M test tiles, D length of an embedding, C classes, F fits, B images.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from selfvitmil.cohort.files import Sheet, read_sheet, split_name, whole_number
from selfvitmil.cohort.table import listing
from selfvitmil.data.sources import read_image
from selfvitmil.encoder import Encoder
from selfvitmil.errors import CohortError, EncoderError
from selfvitmil.pretrain.quality import embed_tiles
from selfvitmil.runtime.device import full_float32

NEIGHBOURS = 20
TEMPERATURE = 0.07
STRENGTHS = (100.0, 30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.01)
"""Weights of the squared coefficients against the mean loss of a tile that are tried, the strongest first."""
HELD_OUT = 0.25
"""Share that is set aside where no split is given, and on which the strength is chosen."""
TURNS = 4
"""How often tiles are held out to choose the strength."""
MAX_ITERATIONS = 100
"""Of L-BFGS for each strength; each starts from the coefficients of the one before."""
CHUNK = 2**24
"""Similarities that are in memory at once."""

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


# ---------------------------------------------------------------------------------------------------- accuracies


class Accuracy(NamedTuple):
    """Share of the test tiles that are classified correctly."""

    plain: float
    balanced: float
    """Mean over the classes that occur among them."""
    strength: float = 0.0
    """Strength of the penalty that was chosen for the linear classifier."""


def knn_accuracy(
    train_ND: Tensor,
    train_labels: Ints,
    test_MD: Tensor,
    test_labels: Ints,
    k: int = NEIGHBOURS,
    temperature: float = TEMPERATURE,
) -> Accuracy:
    """Accuracy of a vote among the `k` tiles with the largest cosine similarity, as DINO is evaluated.

    A neighbour of similarity s votes with weight exp(s / temperature). Of equally similar tiles those that come first
    are neighbours, of classes with equal votes the one with the lowest number wins. Labels are 0 ... C - 1.
    """
    k = min(k, len(train_ND))
    unit_ND = functional.normalize(train_ND.float(), dim=1)
    target_NC = _one_hot(train_labels, test_labels, unit_ND)
    guesses: list[Tensor] = []
    with full_float32():
        for part_MD in test_MD.split(max(CHUNK // len(unit_ND), 1)):
            similar_MN = functional.normalize(part_MD.float(), dim=1) @ unit_ND.T
            least_M1 = similar_MN.topk(k, dim=1).values[:, -1:]
            nearer_MN, equal_MN = similar_MN > least_M1, similar_MN == least_M1
            left_M1 = k - nearer_MN.sum(dim=1, keepdim=True)
            chosen_MN = nearer_MN | (equal_MN & (equal_MN.cumsum(dim=1, dtype=torch.int32) <= left_M1))
            # Less 1, so that no weight overflows; votes are compared only with each other.
            votes_MC = (((similar_MN - 1) / temperature).exp() * chosen_MN) @ target_NC
            guesses.append(votes_MC.argmax(dim=1))
    return _accuracy(torch.cat(guesses), test_labels)


def linear_accuracy(
    train_ND: Tensor,
    train_labels: Ints,
    test_MD: Tensor,
    test_labels: Ints,
    groups: Sequence[str] | None = None,
    strengths: Sequence[float] = STRENGTHS,
    seed: int = 0,
) -> Accuracy:
    """Accuracy of multinomial logistic regression on embeddings standardized over the training tiles.

    The strength of the L2 penalty is the one with the best accuracy on parts of the training tiles that are held out in
    turn; the test tiles have no say. `groups` are the patients of the training tiles, which are held out as a whole.
    Runs on the device of the embeddings; one copy of the training embeddings is in memory besides them.
    """
    mean_D = train_ND.mean(dim=0, dtype=torch.float32)
    # A dimension that never varies says nothing: it becomes 0, whatever it is divided by.
    std_D = train_ND.float().std(dim=0, correction=0)
    std_D = torch.where(std_D > 1e-6 * mean_D.abs() + 1e-12, std_D, torch.inf)
    x_ND = (train_ND - mean_D) / std_D
    target_NC = _one_hot(train_labels, test_labels, x_ND)
    held_NF = torch.from_numpy(_held_out_in_turn(train_labels, groups, seed)).to(x_ND.device)
    with full_float32():
        strength, weights = _choose_strength(x_ND, target_NC, held_NF, sorted(strengths, reverse=True))
        guesses = [weights.logits((part - mean_D) / std_D)[:, -1].argmax(dim=1) for part in test_MD.split(4096)]
    return _accuracy(torch.cat(guesses), test_labels)._replace(strength=strength)


class LinearWeights(NamedTuple):
    """Coefficients of several linear classifiers of the same embeddings."""

    weight_DFC: Tensor
    bias_FC: Tensor

    def logits(self, x_ND: Tensor) -> Tensor:
        """(N, F, C)"""
        return (x_ND @ self.weight_DFC.flatten(1)).unflatten(1, self.bias_FC.shape) + self.bias_FC


def fit_linear(
    x_ND: Tensor, target_NC: Tensor, used_NF: Tensor, strength: float, start: LinearWeights | None = None
) -> LinearWeights:
    """Classifiers with the least mean loss over the rows in `used_NF` plus strength / 2 times their squared weights.

    Each is fitted to rows of its own, all at once, since reading embeddings takes longest. Biases are not penalized.
    Without `start` all coefficients begin at 0; the optimum is the same.
    """
    shape = (used_NF.shape[1], target_NC.shape[1])
    start = start or LinearWeights(x_ND.new_zeros(x_ND.shape[1], *shape), x_ND.new_zeros(shape))
    weight_DFC, bias_FC = (nn.Parameter(part.clone()) for part in start)
    weights = LinearWeights(weight_DFC, bias_FC)
    target_N1C = target_NC.unsqueeze(1)
    share_NF1 = (used_NF.to(x_ND.dtype) / used_NF.sum(dim=0)).unsqueeze(2)
    optimizer = torch.optim.LBFGS(
        [weight_DFC, bias_FC],
        max_iter=MAX_ITERATIONS,
        history_size=10,
        tolerance_grad=1e-5,
        tolerance_change=1e-7,
        line_search_fn="strong_wolfe",
    )

    @torch.no_grad()
    def closure() -> Tensor:
        log_NFC = torch.log_softmax(weights.logits(x_ND), dim=2)
        away_NFC = (log_NFC.exp() - target_N1C) * share_NF1
        weight_DFC.grad = (x_ND.T @ away_NFC.flatten(1)).view_as(weight_DFC) + strength * weight_DFC
        bias_FC.grad = away_NFC.sum(dim=0)
        return -(log_NFC * target_N1C * share_NF1).sum() + strength / 2 * weight_DFC.square().sum()

    optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    return LinearWeights(weight_DFC.detach(), bias_FC.detach())


def _choose_strength(
    x_ND: Tensor, target_NC: Tensor, held_NF: Tensor, strengths: Sequence[float]
) -> tuple[float, LinearWeights]:
    """Return the strength with the best held-out accuracy, given the strongest first, and its classifiers.

    The last of these has seen all rows. Accuracy decides and not the loss, which punishes confidence and so prefers
    penalties that are too strong for the accuracy. As the penalty weakens fits take longer: the search ends when two
    strengths in a row are worse than the best so far.
    """
    used_NF = ~functional.pad(held_NF, (0, 1))
    best, chosen, worse, weights = -1.0, None, 0, None
    for strength in strengths:
        weights = fit_linear(x_ND, target_NC, used_NF, strength, weights)
        right_NF = weights.logits(x_ND).argmax(dim=2) == target_NC.argmax(dim=1, keepdim=True)
        share = float(right_NF[~used_NF].double().mean()) if held_NF.any() else 0.0
        worse = worse + 1 if share < best else 0
        if share > best:
            best, chosen = share, (strength, weights)
        if worse == 2:
            break
    assert chosen is not None
    return chosen


def _one_hot(labels: Ints, test_labels: Ints, like_ND: Tensor) -> Tensor:
    """(N, C): the class of each training tile, with a column for each class of training and test tiles."""
    num_classes = int(max(labels.max(), test_labels.max())) + 1
    return functional.one_hot(torch.from_numpy(labels).to(like_ND.device), num_classes).to(like_ND.dtype)


def _accuracy(guesses_M: Tensor, labels_M: Ints) -> Accuracy:
    right = guesses_M.cpu().numpy() == labels_M
    return Accuracy(float(right.mean()), float(np.mean([right[labels_M == c].mean() for c in np.unique(labels_M)])))


# ---------------------------------------------------------------------------------------------------- holding out


def hold_out(labels: Ints, groups: Sequence[str] | None, fraction: float, seed: int | Sequence[int]) -> Mask:
    """Which tiles to set aside: about this fraction of the groups of every class, whole groups, at random by the seed.

    A group with several labels counts under the rarest of them. At least one group of a class is set aside and at
    least one stays, where the class has two. Without `groups` every tile is one.
    """
    names = [str(row) for row in range(len(labels))] if groups is None else list(groups)
    found: dict[str, set[int]] = defaultdict(set)
    for name, label in zip(names, labels.tolist(), strict=True):
        found[name].add(label)
    sizes = Counter(labels.tolist())
    by_class: dict[int, list[str]] = defaultdict(list)
    for name in sorted(found):
        by_class[min(found[name], key=lambda label: (sizes[label], label))].append(name)
    generator = np.random.default_rng(seed)
    chosen: set[str] = set()
    for label in sorted(by_class):
        members = by_class[label]
        number = min(max(round(fraction * len(members)), 1), len(members) - 1)
        chosen.update(members[place] for place in generator.permutation(len(members))[:number])
    return np.array([name in chosen for name in names])


def _held_out_in_turn(labels: Ints, groups: Sequence[str] | None, seed: int) -> Mask:
    """(N, F) tiles to choose the strength on, whole groups; single tiles where no class has a second group.

    No class is held out altogether: a classifier that has never seen it could not be compared with others.
    """
    columns: list[Mask] = []
    for turn in range(TURNS):
        held = hold_out(labels, groups, HELD_OUT, [seed, turn])
        held = held if held.any() else hold_out(labels, None, HELD_OUT, [seed, turn])
        columns.append(held & np.isin(labels, labels[~held]))
    return np.stack(columns, axis=1)


# ---------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class ProbeTable:
    """Labelled tiles, in the order of their table."""

    paths: tuple[Path, ...]
    labels: Ints
    """Numbers of `classes`."""
    classes: tuple[str, ...]
    test: Mask
    """Which tiles are test tiles; the others are training tiles."""
    patients: tuple[str, ...] | None
    shape_px: tuple[int, int]
    """(height, width) of every tile."""
    warnings: tuple[str, ...] = ()

    def batches(self, size: int, threads: int = 1) -> Iterator[Tensor]:
        """All tiles as uint8 (B, 3, H, W), in order, read by so many threads."""
        with ThreadPoolExecutor(threads) as pool:
            for start in range(0, len(self.paths), size):
                part = self.paths[start : start + size]
                pixels = np.stack(list(pool.map(lambda path: read_image(path, self.shape_px), part)))
                yield torch.from_numpy(pixels.transpose(0, 3, 1, 2))


def read_probe_table(path: Path, seed: int = 0) -> ProbeTable:
    """Read and check a table with the columns `tile` (a path that starts where the table lies) and `label`.

    `split` says `train` or `test`; without that column a quarter is drawn for the test, by patient where there is a
    column `patient`. Other columns are ignored. Raises CohortError.
    """
    sheet = read_sheet(path)
    tiles = _filled(sheet, sheet.named("tile"))
    names = [whole_number(label) for label in _filled(sheet, sheet.named("label"))]
    paths = _existing(sheet, tiles)
    classes = tuple(sorted(set(names)))
    if len(classes) < 2:
        raise CohortError(
            f"{sheet.name}: has {f'one class only ({classes[0]})' if classes else 'no tiles'}",
            "a probe needs at least two classes",
            "Add tiles of another class",
            code="one-class",
        )
    labels = np.array([classes.index(name) for name in names])
    column = sheet.find("patient")
    patients = None if column is None else tuple(_filled(sheet, column))
    test, warnings = _sides(sheet, labels, patients, seed)
    _check_classes(sheet, labels, classes, test)
    return ProbeTable(paths, labels, classes, test, patients, _common_shape(sheet, paths), sheet.warnings + warnings)


def _filled(sheet: Sheet, column: int) -> list[str]:
    cells = sheet.cells(column)
    empty = [where for where, cell in zip(sheet.where, cells, strict=True) if not cell]
    if empty:
        raise CohortError(
            f"{sheet.name}: no {sheet.columns[column]} in {listing(empty)}",
            "a probe needs it of every tile",
            "Fill the cells, or remove these rows",
            code="empty-cells",
        )
    return cells


def _existing(sheet: Sheet, tiles: Sequence[str]) -> tuple[Path, ...]:
    twice = [tile for tile, count in Counter(tiles).items() if count > 1]
    if twice:
        raise CohortError(
            f"{sheet.name}: tiles that occur twice: {listing(twice)}", how="Keep each tile once", code="repeated-tiles"
        )
    missing = [tile for tile in tiles if not (sheet.folder / tile).is_file()]
    if missing:
        raise CohortError(
            f"{sheet.name}: {len(missing)} of {len(tiles)} tiles are not there: {listing(missing, limit=3)}",
            "paths in the table start at the folder it lies in",
            "Correct the column tile, or move the table",
            code="missing-files",
        )
    return tuple(sheet.folder / tile for tile in tiles)


def _sides(sheet: Sheet, labels: Ints, patients: tuple[str, ...] | None, seed: int) -> tuple[Mask, tuple[str, ...]]:
    """Which tiles are test tiles, and warnings about that."""
    column = sheet.find("split")
    if column is None:
        by = (
            "by patient" if patients is not None else "tile by tile: neighbours on both sides make its numbers too good"
        )
        return hold_out(labels, patients, HELD_OUT, seed), (f"{sheet.name}: has no split, so one was drawn {by}",)
    sides = [split_name(cell) or "" for cell in _filled(sheet, column)]
    odd = [f"{where} ({side})" for where, side in zip(sheet.where, sides, strict=True) if side not in ("train", "test")]
    if odd:
        raise CohortError(
            f"{sheet.name}: neither train nor test: {listing(odd)}",
            "a probe learns from the one and is tested on the other",
            "Correct the column split, or remove these rows",
            code="unknown-split",
        )
    test = np.array([side == "test" for side in sides])
    learned, tested = ({p for p, t in zip(patients or (), test, strict=False) if t == side} for side in (False, True))
    both = sorted(learned & tested)
    torn = f"{sheet.name}: patients with tiles in both splits make its numbers too good: {listing(both)}"
    return test, (torn,) if both else ()


def _check_classes(sheet: Sheet, labels: Ints, classes: Sequence[str], test: Mask) -> None:
    for side, mask in (("train", ~test), ("test", test)):
        present = set(labels[mask].tolist())
        absent = [name for number, name in enumerate(classes) if number not in present]
        if absent:
            raise CohortError(
                f"{sheet.name}: no {side} tile of {listing(absent)}",
                "a class is learned from train tiles and tested on test tiles",
                "Move some of its tiles, or patients, to the other split, or remove the class",
                code="missing-class",
            )


def _common_shape(sheet: Sheet, paths: Sequence[Path]) -> tuple[int, int]:
    shapes: dict[tuple[int, int], Path] = {}
    for path in paths:
        try:
            with Image.open(path) as image:
                shapes.setdefault((image.height, image.width), path)
        except OSError:
            raise CohortError(
                f"{sheet.name}: {path.name} cannot be read as an image", how="Replace it", code="unreadable-image"
            ) from None
    if len(shapes) > 1:
        info = [f"{path.name} has {width} x {height} px" for (height, width), path in shapes.items()]
        raise CohortError(
            f"{sheet.name}: tiles differ in size: {listing(info, limit=3)}",
            "an encoder is for tiles of one size",
            "Bring them to one size",
            code="mixed-image-sizes",
        )
    return next(iter(shapes))


# ---------------------------------------------------------------------------------------------------- the encoder


def probe_encoder(
    encoder: Encoder,
    table: ProbeTable,
    *,
    batch: int = 256,
    dtype: torch.dtype = torch.float32,
    threads: int = 1,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """`knn20`, `linear` and their balanced forms for the encoder's embeddings of the table's tiles.

    The encoder computes in `dtype`, in eval mode, and is left as it was. When `stop` says so, nothing comes out.
    """
    embeddings_ND = embed_tiles(encoder, table.batches(batch, threads), dtype, stop)
    if embeddings_ND is None:
        return {}
    return probe_embeddings(embeddings_ND, table.labels, table.test, table.patients)


def probe_embeddings(
    embeddings_ND: Tensor, labels: Ints, test: Mask, patients: Sequence[str] | None = None
) -> dict[str, float]:
    """Return the metrics of `probe_encoder` for given embeddings (N, D)."""
    if not embeddings_ND.isfinite().all():
        raise EncoderError(
            "the encoder returned NaN or infinite embeddings",
            "they cannot be compared",
            "Use --pretrain.precision fp32",
            code="non-finite-embeddings",
        )
    test_N = torch.from_numpy(test).to(embeddings_ND.device)
    parts = embeddings_ND[~test_N], labels[~test], embeddings_ND[test_N], labels[test]
    groups = None if patients is None else [patient for patient, side in zip(patients, test, strict=True) if not side]
    knn, linear = knn_accuracy(*parts), linear_accuracy(*parts, groups)
    return {
        "knn20": knn.plain,
        "knn20_balanced": knn.balanced,
        "linear": linear.plain,
        "linear_balanced": linear.balanced,
    }
