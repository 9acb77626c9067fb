"""Texts and names use the field's terms: words of the project's first, private dialect must not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {
    r"\bjudg": "evaluate, score, assess",
    r"made slide": "synthetic slide",
    r"told apart": "distinguished, separated",
    r"by heart\b": "overfit",
    r"\bmend(s|ed|ing)?\b": "fix, remedy",
    r"heat-map": "heatmap",
    r"whole or not there": "atomic write",
    r"leaves no way forward": "must be positive, must be smaller",
    r"comes? to life": "failed to start",
    r"\bflatters?\b": "optimistic; data leakage",
    r"closed slides|stays? closed\b": "held-out test set",
    r"\btold\b": "stored, reported, stated; `info` as a name",
    r"verdict": "prediction, decision",
    r"hottest": "highest-scoring tile",
    r"\breckon": "derived, estimated",
    r"slide_?map|read_map\b": "heatmap, read_heatmap",
    r"(no|needs|into|encoder's) vectors": "embeddings, features",
    r"outlined": "annotated",
}
"""Pattern -> what to write instead."""
ALLOWED = {
    ("src/selfvitmil/commands/predict.py", r"\bjudg"): 1,  # a stage's name in failures.csv of earlier versions
    ("src/selfvitmil/localize/export.py", r"heat-map"): 1,  # stored in exported TIFF files
    ("src/selfvitmil/localize/heatmap.py", r"\btold\b"): 3,  # an attribute of heatmap files
    ("src/selfvitmil/localize/heatmap.py", r"verdict"): 3,  # a key of theirs
    ("src/selfvitmil/localize/lesion_metrics.py", r"hottest"): 2,  # columns of lesion_slides.csv
    ("src/selfvitmil/localize/lesion_results.py", r"hottest"): 2,
    ("docs/reference/files.md", r"hottest"): 1,
    ("docs/reference/files.md", r"\btold\b"): 1,
    ("docs/reference/files.md", r"verdict"): 1,
    ("src/selfvitmil/view/study.py", r"\btold\b"): 1,
    ("src/selfvitmil/view/study.py", r"verdict"): 1,
    ("src/selfvitmil/slides/synthetic/pyramid.py", r"made slide"): 2,  # stored in synthetic slides
}
"""(file, pattern) -> lines that may have it."""


def texts() -> list[Path]:
    kinds = (
        "src/**/*.py",
        "src/**/*.toml",
        "src/**/*.html",
        "src/**/*.j2",
        "src/**/*.js",
        "src/**/*.css",
        "docs/**/*.md",
        "*.md",
    )
    found = [path for kind in kinds for path in ROOT.glob(kind)]
    log = {ROOT / "LOG.md", ROOT / "CHANGELOG.md"}  # history keeps its words
    return [path for path in found if path not in log and "vendor" not in path.parts]


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_words_of_the_former_dialect_are_not_used(pattern: str):
    paths = texts()
    assert len(paths) > 200
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if re.search(pattern, line, re.I)]
        extra = lines[ALLOWED.get((name, pattern), 0) :]
        assert not extra, f"{name}: write {FORBIDDEN[pattern]!r} in {extra[0].strip()!r}"


def test_the_patterns_find_what_they_are_for():
    seen = (
        "They judge made slides that are told apart by heart, mended heat-maps, whole or not there; it leaves no way "
    )
    seen += (
        "forward, does not come to life, flatters, stays closed; told by the verdict of a SlideMap, we reckon that no "
    )
    seen += "vectors of the hottest tile are outlined"
    assert [pattern for pattern in FORBIDDEN if not re.search(pattern, seen, re.I)] == []
