"""Splits by patient: what must hold for every cohort, the errors, and CLAM's files."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.error_codes import has_code
from selfvitmil import cohort as co
from selfvitmil.cohort import Cohort, SlideRow, Split
from selfvitmil.cohort.splits import all_labelled
from selfvitmil.errors import CohortError, ConfigError


def cohort_of(*slides: tuple[str, str | None, str], split: str | None = None) -> Cohort:
    """From (slide, label, patient)."""
    return Cohort(tuple(SlideRow(s, Path("/s", s), label, patient, split) for s, label, patient in slides))


def simple(**counts: int) -> Cohort:
    """One slide a patient, so many of each class."""
    return cohort_of(*((f"{label}{k}", label, f"p_{label}{k}") for label, n in counts.items() for k in range(n)))


@st.composite
def cohorts(draw, least: int = 4) -> Cohort:
    """Patients with one to four slides of mixed labels, some without; `least` patients of pure labels per class."""
    classes = draw(st.sampled_from([("0", "1"), ("a", "b", "c")]))
    patients = [(label, [label]) for label in classes for _ in range(least)]
    extra = st.lists(st.sampled_from([*classes, None]), min_size=1, max_size=4)
    patients += [("mixed", draw(extra)) for _ in range(draw(st.integers(0, 25)))]
    slides = [
        (f"s{number}_{k}", label, f"p{number}")
        for number, (_, labels) in enumerate(patients)
        for k, label in enumerate(labels)
    ]
    return cohort_of(*slides)


def sides_of_patients(cohort: Cohort, split: Split) -> dict[str, set[str]]:
    sides: dict[str, set[str]] = {}
    for side in ("train", "val", "test"):
        for slide in getattr(split, side):
            sides.setdefault(cohort[slide].patient, set()).add(side)
    return sides


def hold_out(cohort: Cohort, **arguments: float) -> Split:
    (split,) = co.monte_carlo(cohort, 1, **arguments)  # pyright: ignore[reportArgumentType]
    return split


def all_splits(cohort: Cohort, val: float, seed: int) -> list[Split]:
    return [
        *co.k_fold(cohort, 3, val=val, seed=seed),
        *co.monte_carlo(cohort, 2, test=0.4, val=val, seed=seed),
    ]


@settings(max_examples=60)
@given(cohort=cohorts(), val=st.sampled_from([0.0, 0.25]), seed=st.integers(0, 2**40))
def test_no_patient_straddles_and_all_labelled_slides_are_covered(cohort: Cohort, val: float, seed: int):
    labelled = sorted(row.slide for row in cohort.rows if row.label is not None)
    for split in all_splits(cohort, val, seed):
        assert sorted([*split.train, *split.val, *split.test]) == labelled
        assert all(len(sides) == 1 for sides in sides_of_patients(cohort, split).values())
        for side in ("train", "test", *(("val",) if val else ())):
            assert {cohort[slide].label for slide in getattr(split, side)} == set(cohort.classes)
        assert bool(split.val) == bool(val)


@settings(max_examples=60)
@given(cohort=cohorts(least=5), k=st.integers(2, 5), seed=st.integers(0, 100))
def test_folds_partition_the_slides(cohort: Cohort, k: int, seed: int):
    splits = co.k_fold(cohort, k, seed=seed)
    assert [split.name for split in splits] == [f"fold{i}" for i in range(k)]
    tested = Counter(slide for split in splits for slide in split.test)
    assert tested == {row.slide: 1 for row in cohort.rows if row.label is not None}


@settings(max_examples=60)
@given(
    counts=st.lists(st.integers(5, 60), min_size=2, max_size=4),
    k=st.integers(2, 5),
    test=st.floats(0.1, 0.6),
    val=st.floats(0.2, 0.6),
    seed=st.integers(0, 1000),
)
def test_classes_are_within_one_patient_of_their_share(counts: list[int], k: int, test: float, val: float, seed: int):
    cohort = simple(**{f"c{i}": n for i, n in enumerate(counts)})
    for split in co.k_fold(cohort, k, seed=seed):
        tested = Counter(cohort[slide].label for slide in split.test)
        assert all(abs(tested[f"c{i}"] - n / k) < 1 for i, n in enumerate(counts))
        assert abs(len(split.test) - sum(counts) / k) < 1
    split = hold_out(cohort, test=test, val=val, seed=seed)
    tested, held, trained = (
        Counter(cohort[slide].label for slide in side) for side in (split.test, split.val, split.train)
    )
    for i, n in enumerate(counts):
        assert abs(tested[f"c{i}"] - test * n) <= 1
        assert abs(held[f"c{i}"] - val * (n - tested[f"c{i}"])) <= 1
        assert trained[f"c{i}"] >= 1
    if min(counts) * test >= 1:  # else a class may have got a patient beyond its share
        assert abs(len(split.test) - test * sum(counts)) <= 0.5


@settings(max_examples=40)
@given(cohort=cohorts(), seed=st.integers(0, 100), order=st.integers())
def test_order_of_rows_does_not_matter(cohort: Cohort, seed: int, order: int):
    rows = list(cohort.rows)
    Random(order).shuffle(rows)
    assert all_splits(Cohort(tuple(rows)), 0.25, seed) == all_splits(cohort, 0.25, seed)


def test_seeds_and_repeats_differ_and_repeat_themselves():
    cohort = simple(a=20, b=20)
    drawn = [hold_out(cohort, seed=seed).test for seed in range(20)]
    assert len(set(drawn)) == 20
    assert len({split.test for split in co.monte_carlo(cohort, 20, seed=0)}) == 20
    assert len({co.k_fold(cohort, 2, seed=seed)[0].test for seed in range(20)}) == 20
    # every patient gets into the test set about as often as any other: 20 % of 400 draws is 80 +- 8
    often = Counter(slide for split in co.monte_carlo(cohort, 400, seed=1) for slide in split.test)
    assert len(often) == 40
    assert all(40 < count < 120 for count in often.values())


def test_a_patient_counts_under_its_rarest_label():
    # 3 patients with a rare b among their a: if they counted as a, some fold of three would get no b
    mixed = [(f"m{k}_{label}", label, f"m{k}") for k in range(3) for label in ("a", "b")]
    cohort = cohort_of(*mixed, *((f"a{k}", "a", f"a{k}") for k in range(9)))
    for seed in range(10):
        for split in co.k_fold(cohort, 3, seed=seed):
            assert sum(cohort[slide].label == "b" for slide in split.test) == 1


def test_unlabelled_slides_take_no_part():
    cohort = cohort_of(("a", "0", "p"), ("b", "0", "q"), ("c", "1", "r"), ("d", "1", "s"), ("e", None, "p"))
    split = hold_out(cohort, test=0.5)
    assert "e" not in {*split.train, *split.test}
    assert cohort.unlabelled == ("e",)


def test_cohorts_that_cannot_be_split():
    with pytest.raises(
        CohortError, match=r"5 folds, but fewer patients of the classes b \(4\)", check=has_code("too-few-patients")
    ):
        co.k_fold(simple(a=9, b=4), 5)
    many_slides = cohort_of(*((f"b{k}", "b", "p") for k in range(9)), *((f"a{k}", "a", f"a{k}") for k in range(9)))
    with pytest.raises(
        CohortError, match=r"classes b \(1\)", check=has_code("too-few-patients")
    ):  # nine slides, but of one patient
        co.k_fold(many_slides, 2)
    with pytest.raises(CohortError, match="only one patient of the classes b", check=has_code("too-few-patients")):
        hold_out(many_slides)
    with pytest.raises(CohortError, match=r"one class only \(a\)", check=has_code("one-class")):
        hold_out(simple(a=9))
    with pytest.raises(CohortError, check=has_code("one-class")):
        co.k_fold(cohort_of(("a", None, "p")), 2)
    with pytest.raises(
        CohortError, match=r"0\.01 of 18 patients for test leaves an empty set", check=has_code("empty-split")
    ):
        hold_out(simple(a=9, b=9), test=0.01)
    with pytest.raises(
        CohortError, match=r"0\.99 of 18 patients for test leaves no training patients", check=has_code("empty-split")
    ):
        hold_out(simple(a=9, b=9), test=0.99)
    with pytest.raises(CohortError, check=has_code("empty-split")):
        co.k_fold(simple(a=9, b=9), 3, val=0.02)
    with pytest.raises(
        CohortError,
        match="only one patient of the classes a, b for validation and training",
        check=has_code("too-few-patients"),
    ):
        co.k_fold(simple(a=2, b=2), 2, val=0.5)


@pytest.mark.parametrize("arguments", [{"test": 0.0}, {"test": 1.0}, {"val": -0.1}, {"val": 1.0}, {"seed": -1}])
def test_arguments_that_cannot_be_meant(arguments: dict[str, float]):
    with pytest.raises(ConfigError):
        hold_out(simple(a=9, b=9), **arguments)
    with pytest.raises(ConfigError, check=has_code("value-too-small")):
        co.k_fold(simple(a=9, b=9), 1)
    with pytest.raises(ConfigError, check=has_code("value-too-small")):
        co.monte_carlo(simple(a=9, b=9), 0)


# ---------------------------------------------------------------------------------------------------- given


def with_column(**sides: str) -> Cohort:
    """Slides named by their label and a number, with their split."""
    return Cohort(tuple(SlideRow(s, Path("/s", s), s[0], f"p_{s}", side or None) for s, side in sides.items()))


def test_split_from_column_uses_the_column():
    cohort = with_column(a1="train", b1="train", a2="val", b2="test", a3="test", b9="external")
    assert co.split_from_column(cohort, val=0.5) == Split("given", ("a1", "b1"), ("a2",), ("a3", "b2"))


def test_split_from_column_carves_validation_from_train_only():
    train = {f"{label}{k}": "train" for label in "ab" for k in range(10)}
    cohort = with_column(**train, a98="test", b98="test")
    split = co.split_from_column(cohort, val=0.2, seed=3)
    assert split.test == ("a98", "b98")
    assert sorted((*split.train, *split.val)) == sorted(train)
    assert Counter(slide[0] for slide in split.val) == {"a": 2, "b": 2}
    assert co.split_from_column(cohort).val == ()
    assert co.carve_validation(cohort, co.split_from_column(cohort), 0.2, seed=3) == split


def test_split_from_column_refuses_columns_with_gaps():
    with pytest.raises(CohortError, match=r"b2 \(empty\)", check=has_code("missing-split")):
        co.split_from_column(with_column(a1="train", b1="train", a2="test", b2=""))
    with pytest.raises(CohortError, match=r"b2 \(tset\)", check=has_code("missing-split")):
        co.split_from_column(with_column(a1="train", b1="train", a2="test", b2="tset"))
    with pytest.raises(CohortError, check=has_code("empty-split")):
        co.split_from_column(with_column(a1="train", b1="train"))
    with pytest.raises(CohortError, check=has_code("empty-split")):
        co.split_from_column(with_column(a1="test", b1="test"))
    with pytest.raises(CohortError, check=has_code("one-class")):
        co.split_from_column(with_column(a1="train", a2="train", b1="test"))


# ---------------------------------------------------------------------------------------------------- CLAM


def write_lists(folder: Path, k: int, split: Split) -> None:
    rows = itertools.zip_longest(itertools.count(), split.train, split.val, split.test, fillvalue="")
    depth = max(map(len, (split.train, split.val, split.test)))
    lines = [",".join(map(str, row)) for row in itertools.islice(rows, depth)]
    (folder / f"splits_{k}.csv").write_text("\n".join([",train,val,test", *lines, ""]))


def test_more_than_ten_splits_keep_their_order(tmp_path: Path):
    cohort = simple(a=12, b=12)
    splits = co.k_fold(cohort, 12)
    for k, split in enumerate(splits):
        write_lists(tmp_path, k, split)
    assert co.read_splits(tmp_path, cohort) == splits


def test_clams_own_files_are_read(tmp_path: Path):
    cohort = simple(normal=3, tumor=2)
    text = ",train,val,test\n0,tumor0,normal1,normal2\n1,normal0,,tumor1\n"
    (tmp_path / "splits_0.csv").write_text(text)
    (tmp_path / "splits_0_descriptor.csv").write_text(",train,val,test\nnormal,1,1,1\ntumor,1,0,1\n")
    flags = ",train,val,test\nnormal0,True,False,False\ntumor0,False,False,True\n"
    (tmp_path / "splits_0_bool.csv").write_text(flags)  # the lists count
    (tmp_path / "splits_3_bool.csv").write_text(flags)
    assert co.read_splits(tmp_path, cohort) == (
        Split("fold0", ("tumor0", "normal0"), ("normal1",), ("normal2", "tumor1")),
        Split("fold3", ("normal0",), (), ("tumor0",)),
    )


def test_splits_that_do_not_fit_the_cohort(tmp_path: Path):
    cohort = cohort_of(("a", "0", "p"), ("b", "1", "p"), ("c", "1", "q"), ("u", None, "r"))
    with pytest.raises(CohortError, check=has_code("no-split-files")):
        co.read_splits(tmp_path, cohort)
    for rows, reason in (
        ("0,a,,x\n", r"splits_0\.csv: slides that are not in the cohort: x"),
        ("0,a,,b\n", r"patients in more than one set: p \(test, train\)"),
        ("0,a,,c\n1,a,,\n", "occur twice: a"),
        ("0,a,,u\n", "without a label: u"),
    ):
        (tmp_path / "splits_0.csv").write_text(f",train,val,test\n{rows}")
        with pytest.raises(CohortError, match=reason):
            co.read_splits(tmp_path, cohort)
    (tmp_path / "splits_0.csv").write_text(",train,test\n0,a,c\n")
    with pytest.raises(CohortError, check=has_code("missing-column")):
        co.read_splits(tmp_path, cohort)


@given(cohorts(), st.floats(0.2, 0.5), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_a_final_fit_has_all_labelled_slides_and_no_test_set(cohort: Cohort, val: float, seed: int):
    out = next(row.slide for row in cohort.rows if row.label is not None)
    rows = [replace(row, split="external" if row.slide == out else row.split) for row in cohort.rows]
    split = all_labelled(Cohort(tuple(rows), ()), val=val, seed=seed)
    labelled = {row.slide for row in rows if row.label is not None} - {out}
    assert {*split.train, *split.val} == labelled
    assert split.val
    assert split.test == ()
    assert not {cohort[slide].patient for slide in split.train} & {cohort[slide].patient for slide in split.val}
