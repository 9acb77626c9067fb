"""Splits by site (hospital, scanner, any column), and whether the label goes with the site.

A network recognizes where a slide was stained and scanned. Where labels differ between sites, slides of one site in
training and test sets make a model look better than it is (Howard et al. 2021). `leave_one_site_out` tests every site
on models that never saw it; `site_folds` keeps sites whole and makes folds as alike in classes as whole sites allow.
`label_by_site` says whether there is anything to worry about.

All slides of a patient must be of one site. Training slides are divided into training and validation by patient.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from selfvitmil.cohort.splits import Split, carve_validation, rarest_class
from selfvitmil.cohort.table import Cohort, listing
from selfvitmil.errors import CohortError, ConfigError

Counts = NDArray[np.int64]

RESTARTS = 20
PERMUTATIONS = 1000
ASSOCIATED, SIGNIFICANT = 0.3, 0.05
"""Cramér's V and p-value from which label and site are said to go together."""


def leave_one_site_out(cohort: Cohort, column: str, *, val: float = 0.0, seed: int = 0) -> tuple[Split, ...]:
    """Return a split for every site, whose slides are its test set; named `site_<name>`."""
    sites = sites_of(cohort, column)
    names = sorted(set(sites.values()))
    _check_number(column, names, 2)
    slugs = {name: "".join(char if char.isalnum() or char in "-." else "-" for char in name) for name in names}
    if doubles := [name for name in names if list(slugs.values()).count(slugs[name]) > 1]:
        raise CohortError(
            f"column {column!r}: sites whose names differ in signs alone: {listing(doubles)}",
            "splits and folders are named after them",
            "Rename one of them",
            code="ambiguous-sites",
        )
    return tuple(_split(cohort, f"site_{slugs[name]}", {name}, sites, val, seed) for name in names)


def site_folds(cohort: Cohort, column: str, k: int, *, val: float = 0.0, seed: int = 0) -> tuple[Split, ...]:
    """Return `k` splits whose test sets partition the slides and have whole sites."""
    sites = sites_of(cohort, column)
    names = sorted(set(sites.values()))
    _check_number(column, names, k)
    fold_of = balanced_folds(_class_counts(cohort, sites, names), k, seed)
    parts = [{name for name, fold in zip(names, fold_of, strict=True) if fold == number} for number in range(k)]
    return tuple(_split(cohort, f"fold{number}", part, sites, val, seed) for number, part in enumerate(parts))


def sites_of(cohort: Cohort, column: str) -> dict[str, str]:
    """Return patient -> site of all labelled slides; raise where one has none, or a patient has several."""
    if not cohort.has_column(column):
        raise ConfigError(
            f"train.site {column!r}: the cohort has no such column",
            f"its further columns are {listing(cohort.extra_columns) or 'none'}",
            "Add the column to the table of slides, or name another with train.site",
            code="unknown-site-column",
        )
    rows = [row for row in cohort.rows if row.label is not None]
    if bare := [row.slide for row in rows if row.value(column) is None]:
        raise CohortError(
            f"column {column!r}: empty for the labelled slides {listing(bare)}",
            "a split by site needs the site of every slide",
            "Fill it",
            code="missing-site",
        )
    found: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        found[row.patient].add(row.value(column) or "")
    if several := [patient for patient, own in found.items() if len(own) > 1]:
        raise CohortError(
            f"column {column!r}: patients at several sites: {listing(sorted(several))}",
            "their slides would be in training and test set",
            "Give all slides of a patient one site",
            code="patient-at-several-sites",
        )
    return {patient: next(iter(own)) for patient, own in found.items()}


def balanced_folds(counts_SC: Counts, k: int, seed: int = 0) -> list[int]:
    """Return the fold of every site, from the patients of each class per site.

    The deviation of folds from equal shares of every class, squared, is made small: the largest site first into the
    fold where it does least harm, then single moves and swaps while they help, from several random orders.
    """
    generator = np.random.default_rng([seed, 7])
    share_SC = counts_SC / np.maximum(counts_SC.sum(axis=0), 1)
    best: tuple[float, list[int]] | None = None
    for _ in range(RESTARTS):
        order = sorted(generator.permutation(len(counts_SC)).tolist(), key=lambda site: -counts_SC[site].sum())
        fold_of = _improved(_greedy(share_SC, order, k), share_SC, k)
        cost = _cost(fold_of, share_SC, k)
        if best is None or cost < best[0] - 1e-12:
            best = cost, fold_of
    assert best is not None
    return best[1]


def _greedy(share_SC: NDArray[np.float64], order: Sequence[int], k: int) -> list[int]:
    filled_KC, fold_of = np.zeros((k, share_SC.shape[1])), [0] * len(share_SC)
    for place, site in enumerate(order):
        empty = [fold for fold in range(k) if not filled_KC[fold].any()]
        must = empty if len(order) - place <= len(empty) else range(k)
        costs = {fold: float(((filled_KC[fold] + share_SC[site] - 1 / k) ** 2 - (filled_KC[fold] - 1 / k) ** 2).sum())
                 for fold in must}  # fmt: skip
        fold_of[site] = min(costs, key=lambda fold: (costs[fold], fold))
        filled_KC[fold_of[site]] += share_SC[site]
    return fold_of


def _improved(fold_of: list[int], share_SC: NDArray[np.float64], k: int) -> list[int]:
    """Return the folds after single moves and swaps that lower the cost; no fold becomes empty."""
    best = _cost(fold_of, share_SC, k)
    found = True
    while found:
        found = False
        for changed in _neighbours(fold_of, k):
            cost = _cost(changed, share_SC, k)
            if cost < best - 1e-12:
                best, fold_of, found = cost, changed, True
                break
    return fold_of


def _neighbours(fold_of: list[int], k: int) -> Iterable[list[int]]:
    sizes = Counter(fold_of)
    for site, own in enumerate(fold_of):
        if sizes[own] > 1:
            for fold in set(range(k)) - {own}:
                yield [*fold_of[:site], fold, *fold_of[site + 1 :]]
        for other in range(site + 1, len(fold_of)):
            if fold_of[other] != own:
                swapped = list(fold_of)
                swapped[site], swapped[other] = fold_of[other], own
                yield swapped


def _cost(fold_of: Sequence[int], share_SC: NDArray[np.float64], k: int) -> float:
    filled_KC = np.zeros((k, share_SC.shape[1]))
    np.add.at(filled_KC, list(fold_of), share_SC)
    return float(((filled_KC - 1 / k) ** 2).sum())


def _split(cohort: Cohort, name: str, test: set[str], sites: dict[str, str], val: float, seed: int) -> Split:
    rows = [row for row in cohort.rows if row.label is not None]
    inside = sorted(row.slide for row in rows if sites[row.patient] in test)
    outside = sorted(row.slide for row in rows if sites[row.patient] not in test)
    if len({cohort[slide].label for slide in outside}) < 2:
        raise CohortError(
            f"{name}: the slides of all other sites have one class only",
            "nothing can be learned from them",
            "Use a split that mixes sites, or add slides",
            code="one-class",
        )
    return carve_validation(cohort, Split(name, tuple(outside), (), tuple(inside)), val, seed=seed)


def _class_counts(cohort: Cohort, sites: dict[str, str], names: Sequence[str]) -> Counts:
    """Return (S, C) patients of each site and class; a patient with several classes counts as the rarest."""
    classes = list(cohort.classes)
    counts = np.zeros((len(names), len(classes)), dtype=np.int64)
    for patient, label in rarest_class(cohort).items():
        counts[names.index(sites[patient]), classes.index(label)] += 1
    return counts


def _check_number(column: str, names: Sequence[str], least: int) -> None:
    if len(names) < least:
        raise CohortError(
            f"column {column!r}: {len(names)} sites ({listing(names)})",
            f"at least {least} are needed for this split",
            "Use fewer train.folds, or another split",
            code="too-few-sites",
        )


# ---------------------------------------------------------------------------------------------------- association


@dataclass(frozen=True)
class LabelBySite:
    """How strongly the label goes with the site."""

    column: str
    cramers_v: float
    """0 is independent, 1 means that the site tells the label."""
    p_value: float
    """Share of random permutations of the labels with an association as strong."""
    num_patients: int

    @property
    def is_associated(self) -> bool:
        return self.cramers_v >= ASSOCIATED and self.p_value < SIGNIFICANT

    @property
    def words(self) -> str:
        return (
            f"labels go with {self.column}: Cramér's V {self.cramers_v:.2f}, p {self.p_value:.3f} by permutation of "
            f"{self.num_patients} training patients. A model may recognize the {self.column} in place of the tissue; "
            "train.split leave-site-out tests every site on models that never saw it"
        )


def label_by_site(cohort: Cohort, column: str, slides: Iterable[str], seed: int = 0) -> LabelBySite | None:
    """Return the association of label and site over the patients of these slides.

    None where there is nothing to associate. Only slides whose labels may be seen belong here.
    """
    rows = [row for slide in slides if (row := cohort[slide]).label is not None and row.value(column) is not None]
    label_of = rarest_class(Cohort(tuple(rows)))
    site_of = {row.patient: row.value(column) or "" for row in rows}
    labels = np.unique([label_of[patient] for patient in site_of], return_inverse=True)[1]
    sites = np.unique(list(site_of.values()), return_inverse=True)[1]
    if not len(labels) or labels.max() == 0 or sites.max() == 0:
        return None
    observed = chi_squared(labels, sites)
    generator = np.random.default_rng([seed, 11])
    drawn = [chi_squared(generator.permutation(labels), sites) for _ in range(PERMUTATIONS)]
    p_value = (1 + sum(each >= observed - 1e-9 for each in drawn)) / (1 + PERMUTATIONS)
    v = (observed / (len(labels) * min(labels.max(), sites.max()))) ** 0.5
    return LabelBySite(column, float(v), float(p_value), len(labels))


def chi_squared(labels_N: NDArray[np.intp], sites_N: NDArray[np.intp]) -> float:
    """Return Pearson's chi-squared of the table of labels and sites."""
    table = np.zeros((labels_N.max() + 1, sites_N.max() + 1))
    np.add.at(table, (labels_N, sites_N), 1)
    expected = np.outer(table.sum(axis=1), table.sum(axis=0)) / len(labels_N)
    return float(((table - expected) ** 2 / expected).sum())
