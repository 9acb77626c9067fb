"""Splits by site against brute force, and the association of label and site against scipy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from helpers.cli import selfvitmil
from helpers.error_codes import has_code
from helpers.planted import DIM, write_features
from selfvitmil.cohort import Cohort, SlideRow
from selfvitmil.cohort.sites import balanced_folds, label_by_site, leave_one_site_out, site_folds
from selfvitmil.errors import CohortError, ConfigError


def cohort_of(rows: Sequence[tuple[str, str, str, str | None]]) -> Cohort:
    """(slide, patient, label, site) of every slide."""
    return Cohort(
        tuple(
            SlideRow(
                slide, Path("/slides", f"{slide}.svs"), label, patient, None, extra=(("site", site),) if site else ()
            )
            for slide, patient, label, site in rows
        )
    )


def mixed(sites: int = 6, each: int = 8, seed: int = 0) -> Cohort:
    generator = np.random.default_rng(seed)
    return cohort_of(
        [
            (f"s{site}_{k}", f"p{site}_{k // 2}", "tumor" if generator.uniform() < 0.5 else "normal", f"Clinic {site}")
            for site in range(sites)
            for k in range(each)
        ]
    )


def test_every_site_is_tested_once_and_never_trained_on():
    cohort = mixed()
    splits = leave_one_site_out(cohort, "site", val=0.25)
    assert [split.name for split in splits] == [f"site_Clinic-{k}" for k in range(6)]
    for number, split in enumerate(splits):
        assert {cohort[slide].value("site") for slide in split.test} == {f"Clinic {number}"}
        others = {cohort[slide].value("site") for slide in (*split.train, *split.val)}
        assert f"Clinic {number}" not in others
        assert len(others) == 5
        assert split.val
    assert sorted(slide for split in splits for slide in split.test) == sorted(cohort.slides)


def test_folds_of_whole_sites_partition_the_slides():
    cohort = mixed(9)
    splits = site_folds(cohort, "site", 3, val=0.2)
    assert sorted(slide for split in splits for slide in split.test) == sorted(cohort.slides)
    for split in splits:
        tested = {cohort[slide].value("site") for slide in split.test}
        assert not tested & {cohort[slide].value("site") for slide in (*split.train, *split.val)}
    assert site_folds(cohort, "site", 3, val=0.2) == splits


@pytest.mark.parametrize("seed", range(6))
def test_folds_are_as_balanced_as_the_best_of_all_assignments(seed: int):
    counts = np.random.default_rng(seed).integers(0, 12, (7, 2)) + 1
    share = counts / counts.sum(axis=0)

    def cost(fold_of: Sequence[int]) -> float:
        return sum(
            float(((share[[s for s in range(7) if fold_of[s] == fold]].sum(axis=0) - 1 / 3) ** 2).sum())
            for fold in range(3)
        )

    best = min(cost(fold_of) for fold_of in product(range(3), repeat=7) if len(set(fold_of)) == 3)
    assert cost(balanced_folds(counts, 3)) == pytest.approx(best, rel=0.05, abs=1e-4)


def test_no_fold_is_empty_where_one_site_has_nearly_all():
    assert sorted(set(balanced_folds(np.array([[50, 50], [1, 0], [0, 1]]), 3))) == [0, 1, 2]


def test_association_is_that_of_scipy_and_chance_is_not_told():
    generator = np.random.default_rng(1)
    site = generator.integers(0, 3, 60)
    label = (generator.uniform(size=60) < np.array([0.1, 0.5, 0.9])[site]).astype(int)
    rows = [(f"s{k}", f"p{k}", ("normal", "tumor")[label[k]], f"site{site[k]}") for k in range(60)]
    cohort = cohort_of(rows)
    found = label_by_site(cohort, "site", cohort.slides)
    assert found is not None
    table = np.array([[((label == a) & (site == b)).sum() for b in range(3)] for a in range(2)])
    expected = chi2_contingency(table, correction=False)
    assert found.cramers_v == pytest.approx((expected.statistic / 60) ** 0.5)  # pyright: ignore
    assert found.p_value < 0.01
    assert found.is_associated
    free = cohort_of([(*row[:3], f"site{k % 3}") for k, row in enumerate(rows)])
    other = label_by_site(free, "site", free.slides)
    assert other is not None
    assert not other.is_associated
    assert label_by_site(cohort, "scanner", cohort.slides) is None


def test_false_alarms_are_as_rare_as_promised():
    generator, alarms = np.random.default_rng(2), 0
    for _ in range(40):
        rows = [(f"s{k}", f"p{k}", "ab"[generator.integers(2)], "xyz"[generator.integers(3)]) for k in range(40)]
        found = label_by_site(cohort_of(rows), "site", [row[0] for row in rows])
        alarms += found is not None and found.p_value < 0.05
    assert alarms <= 6  # of 40 at 5 %: more has a probability of 0.3 %


def test_what_cannot_be_split_by_site_is_refused():
    rows = [("a", "p", "normal", "x"), ("b", "p", "tumor", "y"), ("c", "q", "tumor", "x"), ("d", "r", "normal", "y")]
    with pytest.raises(CohortError, check=has_code("patient-at-several-sites")):
        leave_one_site_out(cohort_of(rows), "site")
    with pytest.raises(CohortError, check=has_code("missing-site")):
        leave_one_site_out(cohort_of([*rows[2:], ("e", "s", "tumor", None)]), "site")
    with pytest.raises(ConfigError, check=has_code("unknown-site-column")):
        leave_one_site_out(cohort_of(rows), "hospital")
    with pytest.raises(CohortError, check=has_code("too-few-sites")):
        site_folds(cohort_of(rows[2:]), "site", 3)
    with pytest.raises(CohortError, check=has_code("one-class")):
        leave_one_site_out(cohort_of([("a", "p", "normal", "x"), ("b", "q", "tumor", "y")]), "site")
    same = [
        ("a", "p", "normal", "x y"),
        ("b", "q", "tumor", "x/y"),
        ("c", "r", "tumor", "x y"),
        ("d", "t", "normal", "x/y"),
    ]
    with pytest.raises(CohortError, check=has_code("ambiguous-sites")):
        leave_one_site_out(cohort_of(same), "site")


@pytest.mark.slow
def test_a_shortcut_by_site_is_warned_of_and_leaving_sites_out_reveals_it(tmp_path: Path):
    """Tiles show the site alone, and labels go with it: mixed folds look good, unseen sites do not."""
    generator, lines = np.random.default_rng(0), ["slide,patient,label,site"]
    for site in range(4):
        for k in range(12):
            tumour = (k < 10) == (site % 2 == 0)
            features = generator.normal(size=(8, DIM))
            features[:, site] += 4.0
            write_features(tmp_path, f"s{site}_{k}", features)
            lines.append(f"s{site}_{k},p{site}_{k},{'tumor' if tumour else 'normal'},site{site}")
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    given = ("--features", tmp_path / "features_vit", "--labels", tmp_path / "table.csv", "--train.aggregator", "mean")
    quick = ("--train.seeds", 1, "--train.epochs", 15, "--evaluate.bootstrap", 100)
    done = selfvitmil("evaluate", tmp_path / "mixed", *given, *quick, "--train.split", "k-fold", "--train.folds", 4)
    assert done.returncode == 0, done.stderr
    assert "labels go with site" in done.stdout + done.stderr
    other = selfvitmil("evaluate", tmp_path / "sites", *given, *quick, "--train.split", "leave-site-out")
    assert other.returncode == 0, other.stderr
    assert auc_of(tmp_path / "mixed") > 0.75
    assert auc_of(tmp_path / "sites") < 0.65


def auc_of(study: Path) -> float:
    import json

    (file,) = study.glob("results/*/metrics.json")
    return json.loads(file.read_text())["methods"][0]["slide"]["ensemble"]["auc"]["value"]
