"""Texts lose absolute paths and keep everything else."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfvitmil.store.redact import without_folders

PLAIN_TEXTS = [
    "1/2 of 3/4, and/or, either/or, n/a, w/o, I/O, 0.5 um/px, 30 tiles/s, input/output error",
    "a / b / c, 05/03/2024, f(x)/2/3, 50%/40%, </p> and <a/b/c>",
    "https://example.org/a/b.html?c=/d/e, tls://host:1/x/y, s3://bucket/a/b.svs",
    "no tile table in tiles/0.5mpp_224px_0px/s1.h5, see results/<name>/x/y and ~/.cache/selfvitmil/jobs",
]


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_what_is_no_absolute_path_stays(text: str):
    assert without_folders(text) == text
    assert without_folders(text, ["/data/slides", "/"]) == text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/data/Smith John/1962/slide 1.svs", "slide 1.svs"),
        ("/data/Doe, Jane/s 1.svs: no such file", "s 1.svs: no such file"),
        ("/data/Dr. Smith/Smith 1/2.svs", "2.svs"),
        ("error:/data/smith/x.svs", "error:x.svs"),
        ("(name=/data/smith/x.svs)", "(name=x.svs)"),
        ("host:/export/smith/x.svs and //server/smith/x.svs", "host:x.svs and x.svs"),
        ("file:///home/smith/x.svs", "x.svs"),
        ("cannot open '/home/O'Brien/a b/s.h5', /home/O'Brien/s.h5", "cannot open 's.h5', s.h5"),
        ('"/home/O\'Brien/a, b/s.h5"', '"s.h5"'),
        ("C:\\Users\\John Smith\\x.svs or \\\\server\\smith\\x.svs", "x.svs or x.svs"),
        ("/data/a/x.svs or tiles/a.h5, 1/2", "x.svs or tiles/a.h5, 1/2"),
        ("/data/my slides has 1/2 of them and/or 0.5 um/px", "my slides has 1/2 of them and/or 0.5 um/px"),
        ("/data/x.svs: Input/output error", "x.svs: Input/output error"),
        ("in /data/smith/ and /home", "in smith/ and "),
    ],
)
def test_folders_are_cut(text: str, told: str):
    assert without_folders(text) == told


def test_known_folders_are_cut_at_their_end_and_nowhere_else():
    known = ["/data/slides", Path("/data/Meyer; Uwe: 2 of them and more of it/"), "/"]
    for text, told in {
        "/data/slides/a b; c/x.svs is gone": "a b; c/x.svs is gone",  # nobody can tell whether that is a sentence
        "/data/slides/Smith John/x.svs is gone": "x.svs is gone",
        "/data/slides2/Smith/x.svs is gone": "x.svs is gone",
        "/data/slides old/x.svs is gone": "x.svs is gone",
        "/mnt/data/slides/x.svs is gone": "x.svs is gone",
        "/data/Meyer; Uwe: 2 of them and more of it/x.svs": "x.svs",
        "file:///data/Meyer; Uwe: 2 of them and more of it/x.svs": "x.svs",
        "in /data/slides: none, in /data/slides.": "in : none, in .",
    }.items():
        assert without_folders(text, known) == told
    accents = "/data/M\u00fcller; Bj\u00f6rn"
    assert without_folders(f"{unicodedata.normalize('NFD', accents)}/x.svs", [accents]) == "x.svs"


WORDS = st.sampled_from(["Smith", "O'Brien", "Dr.", "Doe,", "1962", "Müller-Ä", "a_b", "0.5mpp", "2", "(old)", "s.1"])
FOLDERS = st.lists(st.lists(WORDS, min_size=1, max_size=5).map(" ".join), min_size=1, max_size=4)


@given(FOLDERS, st.sampled_from(["{}", "bad {}: gone", "'{}' is 1/2", 'of "{}"', "(x={})", "see:{}, a/b"]))
def test_of_any_absolute_path_the_name_is_left(folders: list[str], sentence: str):
    path = "/".join(["", *folders, "s 1.svs"])
    assert without_folders(sentence.format(path)) == sentence.format("s 1.svs")
