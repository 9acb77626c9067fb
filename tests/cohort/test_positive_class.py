"""The positive class of two is the disease, by the meaning of the names, in any alphabetical order."""

from __future__ import annotations

import pytest

from helpers.error_codes import has_code
from selfvitmil.cohort.table import is_negative_name, order_classes
from selfvitmil.errors import ConfigError

PAIRS = [
    ("normal", "metastasis"), ("normal", "tumor"), ("healthy", "cancer"), ("normal", "malignant"), ("MSS", "MSI"),
    ("wildtype", "mutant"), ("wild-type", "mutated"), ("WT", "MUT"), ("KRAS wt", "KRAS mut"), ("control", "carcinoma"),
    ("none", "disease"), ("no", "yes"), ("false", "true"), ("0", "1"), ("Negative", "Positive"), ("neg", "pos"),
    ("benign", "malignant"), ("Benign tissue", "Adenocarcinoma"), ("non-tumor", "tumor"), ("nontumor", "tumor"),
    ("no metastasis", "metastasis"), ("tumor-free", "tumor"), ("low grade", "high grade"), ("ER-", "ER+"),
    ("HER2 negative", "HER2 positive"), ("pMMR", "dMMR"), ("N0", "N1"), ("n", "y"), ("absent", "present"),
    ("gesund", "krank"), ("kein Tumor", "Tumor"), ("unauffällig", "Karzinom"), ("bénin", "malin"), ("sain", "malade"),
    ("négatif", "positif"), ("sano", "enfermo"), ("benigno", "maligno"), ("saudável", "doente"),
    ("goedaardig", "kwaadaardig"),
    ("здоровый", "больной"), ("норма", "опухоль"), ("正常", "癌"), ("阴性", "阳性"), ("NORMAL", "Tumour"),
    ("pN0", "pN+"), ("pN0(i-)", "pN1a"), ("pT0", "pT2b"), ("M0", "M1"), ("other", "EBV"), ("Rest", "GS"),
    ("normal", "other"), ("HER2neg", "HER2pos"), ("KRASwt", "KRASmut"), ("MSS/MSI-L", "MSI-H"), ("0", "2+"),
]  # fmt: skip


@pytest.mark.parametrize(("negative", "positive"), PAIRS, ids=map("-".join, PAIRS))
def test_meaning_finds_the_positive_class_in_either_order(negative: str, positive: str):
    for classes in ((negative, positive), (positive, negative)):
        order = order_classes(classes, None)
        assert order.names == (negative, positive)
        assert order.source == "meaning"


@pytest.mark.parametrize(
    "classes",
    [("luad", "lusc"), ("benign", "normal"), ("F", "M"), ("clear cell", "papillary"), ("responder", "progressor"),
     ("carcinoma of no special type", "lobular carcinoma"), ("A", "B"), ("2", "3"),
     ("other", "rest"), ("1", "10"), ("grade 1", "grade 2")],
)  # fmt: skip
def test_names_that_do_not_tell_keep_their_order_and_say_that_it_is_a_guess(classes: tuple[str, str]):
    order = order_classes(classes, None)
    assert order.names == classes
    assert order.source == "order"
    assert "GUESSED" in order.reason
    assert f"--train.positive {classes[0]!r}" in order.reason


def test_a_given_positive_class_wins_over_the_meaning():
    order = order_classes(("normal", "tumor"), "normal")
    assert (order.names, order.source) == (("tumor", "normal"), "setting")
    with pytest.raises(ConfigError, check=has_code("unknown-positive-class")):
        order_classes(("normal", "tumor"), "cancer")


def test_several_classes_stay_in_order():
    assert order_classes(("luad", "lusc", "normal"), None).names == ("luad", "lusc", "normal")
    with pytest.raises(ConfigError, check=has_code("unknown-positive-class")):
        order_classes(("luad", "lusc", "normal"), "luad")


def test_words_that_both_names_share_do_not_count():
    assert is_negative_name("low grade", "high grade")
    assert not is_negative_name("benign adenoma", "benign naevus")
