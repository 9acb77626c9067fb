"""The tutorial on outcomes runs as it stands, and finds what is planted."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from helpers.cli import selfvitmil

PAGE = Path(__file__).parents[1] / "docs" / "tutorial" / "outcomes.md"
LEAST = {
    "lejepa_self-vit-mil": ("auc", 0.65),
    "lejepa_self-vit-mil_grade": ("auc", 0.6),
    "grade_ordinal": ("kappa", 0.3),
    "lejepa_self-vit-mil_tumor_percent": ("pearson", 0.5),
    "lejepa_self-vit-mil_metastasis-fibrosis": ("auc metastasis", 0.65),
    "lejepa_self-vit-mil_survival": ("c_index", 0.6),
    "lejepa_self-vit-mil_survival-discrete": ("c_index", 0.6),
}
"""Folder of results -> metric of the ensemble by slide, and what it must reach: chance is far below."""


def commands() -> list[list[str]]:
    blocks = re.findall(r"```\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.strip().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_finds_every_planted_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    asked = commands()
    assert len(asked) > 12
    for program, *arguments in asked:
        assert program == "selfvitmil"
        if arguments[0] == "run" and "--one-method" in arguments:
            continue  # the same stages again, in a study of their own
        done = selfvitmil(*arguments)
        assert done.returncode == 0, (arguments, done.stderr)
    for name, (metric, least) in LEAST.items():
        found = json.loads((tmp_path / "study" / "results" / name / "metrics.json").read_text())
        assert found["methods"][0]["slide"]["ensemble"][metric]["value"] > least, name
    (validated,) = (tmp_path / "predictions" / "validation").glob("*/metrics.json")
    assert json.loads(validated.read_text())["slide"]["c_index"]["value"] > 0.6
