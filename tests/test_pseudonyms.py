"""No name of a slide or patient in a text that was made fit to be mailed, however the name is written there."""

from __future__ import annotations

import unicodedata
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfvitmil.pseudonyms import Names

CASES = (str, str.upper, str.lower, str.title, str.casefold)


def names_for(slide: str, patient: str = "nobody at all") -> Names:
    return Names({slide: "slide-001"}, {patient: "patient-001"}, folders=("/data/slides",))


def test_letters_that_change_with_their_case_are_found():
    names = Names({"Weiß_2021_07": "slide-001"}, {"Strauß": "patient-001", "İnan Ö": "patient-002"})
    text = "Weiß_2021_07.svs: no tissue; patient Strauß (İnan Ö)"
    assert names.text(text) == "slide-001.svs: no tissue; patient patient-001 (patient-002)"
    assert names.text(text.upper()) == "slide-001.SVS: NO TISSUE; PATIENT patient-001 (patient-002)"
    assert names.text("by STRAUSS, strauss, Strausser and inan ö") == (
        "by patient-001, patient-001, Strausser and patient-002"
    )


@pytest.mark.parametrize(
    "name", ["Weiß", "İnan Öz", "Müller-Lüdenscheidt", "Žižek", "ﬁnn", "ΣΊΣΥΦΟΣ", "ǅuro Ñ", "Ünal ı"]
)
def test_a_name_is_found_in_every_case_and_encoding(name: str):
    for kept in (unicodedata.normalize("NFC", name), unicodedata.normalize("NFD", name)):
        for spelt in (unicodedata.normalize("NFC", name), unicodedata.normalize("NFD", name)):
            for case in CASES:
                assert names_for(kept).text(f"({case(spelt)}) ß İ") == "(slide-001) ß İ"


@given(
    st.text(st.characters(categories=("Lu", "Ll", "Lt", "Lo")), min_size=4, max_size=8),
    st.sampled_from(["NFC", "NFD"]),
    st.text(st.sampled_from("ß İıﬁ.-ẞ"), max_size=3),
)
def test_what_stands_around_a_name_stays(name: str, form: Literal["NFC", "NFD"], around: str):
    text = unicodedata.normalize(form, f"{around} {name} {around}")
    assert names_for(name).text(text) == unicodedata.normalize("NFC", f"{around} slide-001 {around}")


def test_a_folder_that_begins_like_a_known_one_is_no_part_of_it():
    assert names_for("s1").text("/data/slides2/Smith/x.svs is gone") == "x.svs is gone"
    assert names_for("s1").text("/data/slides/Smith/x.svs is gone") == "x.svs is gone"


def test_a_figure_that_shows_a_name_in_other_letters_is_left_out():
    names = names_for("Weiß Ärztin")
    decomposed = unicodedata.normalize("NFD", "WEISS Ärztin")
    assert names.svg(f"<svg><text>{decomposed}</text></svg>") == "<svg><text>slide-001</text></svg>"
    assert names.svg("<svg><text>weiss</text><text>Ärztin</text></svg>") is None


def test_without_pseudonyms_names_stay():
    assert Names().text("Weiß in '/data/a b/Weiß.svs'") == "Weiß in 'Weiß.svs'"
