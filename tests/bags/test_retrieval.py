"""Retrieval: neighbours and agreement of labels against slow loops, and what they are worth on planted slides."""

from __future__ import annotations

import math

import numpy as np
import pytest

from helpers.error_codes import has_code
from selfvitmil.bags.retrieval import label_agreement, nearest, numbered, unit_rows
from selfvitmil.errors import MetricError


def slides(shift: float, seed: int = 0) -> tuple[np.ndarray, list[str], list[str | None]]:
    """Two slides of each of 15 patients, some without a label; slides of a patient are nearly the same."""
    generator = np.random.default_rng(seed)
    patients = [f"p{k // 2}" for k in range(30)]
    labels: list[str | None] = [None if k in (4, 5) else ("a", "b", "b")[k // 2 % 3] for k in range(30)]
    of_patient = generator.normal(size=(15, 6))
    values = of_patient[np.arange(30) // 2] + 0.01 * generator.normal(size=(30, 6))
    values[[label == "b" for label in labels], 0] += shift
    return values, patients, labels


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True)) / math.sqrt(sum(one**2) * sum(other**2))


def slow_neighbours(values: np.ndarray, patients: list[str], query: int, among: list[int]) -> list[int]:
    others = [row for row in among if patients[row] != patients[query]]
    return sorted(others, key=lambda row: -cosine(values[query], values[row]))


def test_nearest_equals_a_loop_over_slides_of_other_patients():
    values, patients, _ = slides(0.0)
    unit = unit_rows(values)
    for query in (0, 7, 29):
        found = nearest(unit, numbered(patients), query, 4)
        expected = slow_neighbours(values, patients, query, list(range(30)))[:4]
        assert found.rows.tolist() == expected
        assert found.similarity == pytest.approx([cosine(values[query], values[row]) for row in expected], abs=1e-5)


@pytest.mark.parametrize("asked", ["all", "some"])
def test_agreement_equals_a_loop_that_leaves_the_patient_out(asked: str):
    values, patients, labels = slides(1.0)
    queries = None if asked == "all" else [k >= 10 for k in range(30)]
    labelled = [k for k in range(30) if labels[k] is not None]
    shares, chances = [], []
    for query in labelled:
        if queries is None or queries[query]:
            rows = slow_neighbours(values, patients, query, labelled)
            shares.append(np.mean([labels[row] == labels[query] for row in rows[:3]]))
            chances.append(np.mean([labels[row] == labels[query] for row in rows]))
    found = label_agreement(unit_rows(values), patients, labels, k=3, queries=queries)
    assert found is not None
    assert (found.share.value, found.chance) == pytest.approx((np.mean(shares), np.mean(chances)))
    assert found.share.low <= found.share.value <= found.share.high
    assert (found.num_queries, found.num_patients) == ((28, 14) if asked == "all" else (20, 10))


def test_slides_of_the_same_patient_do_not_make_agreement():
    """The other slide of the patient is by far the nearest, with the same label: it must not count."""
    planted = [slides(0.0, seed) for seed in range(20)]
    agreement = [label_agreement(unit_rows(values), patients, labels) for values, patients, labels in planted]
    difference = np.mean([found.share.value - found.chance for found in agreement if found is not None])
    assert abs(difference) < 0.06
    found = label_agreement(unit_rows(slides(20.0)[0]), *slides(20.0)[1:])
    assert found is not None
    assert found.share.value > 0.9


def test_agreement_needs_two_labels_of_two_patients():
    unit = unit_rows(np.eye(3))
    assert label_agreement(unit, ["p", "q", "r"], ["a", "a", "a"]) is None
    assert label_agreement(unit, ["p", "p", "r"], ["a", "b", None]) is None
    assert label_agreement(unit, ["p", "q", "r"], ["a", "b", "b"], queries=[False] * 3) is None


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_embeddings_without_direction_are_refused(value: float):
    with pytest.raises(MetricError, check=has_code("embedding-without-direction")):
        unit_rows(np.array([[1.0, 1.0], [value, value]]))
