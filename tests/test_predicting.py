"""`predict`, before any model is asked: which slides are meant, and where answers cannot go."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from selfvitmil.errors import ConfigError
from selfvitmil.pipeline.predicting import find_new_slides, predict
from selfvitmil.settings import StudySettings


def slides_in(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    return folder


def test_a_slide_that_is_named_twice_is_one_slide(tmp_path: Path):
    folder = slides_in(tmp_path / "slides", "a.svs", "b.svs")
    cohort = find_new_slides([folder / "b.svs", folder, folder / ".." / "slides" / "a.svs"])
    assert sorted(cohort.slides) == ["a", "b"]


def test_two_slides_of_one_name_are_refused(tmp_path: Path):
    first, second = slides_in(tmp_path / "first", "a.svs"), slides_in(tmp_path / "second", "A.svs")
    with pytest.raises(ConfigError, match=r"same name: first/a\.svs = second/A\.svs"):
        find_new_slides([first, second])


@pytest.mark.parametrize(("out", "says"), [("model", "folder of the model"), ("file", "this is a file")])
def test_places_where_answers_cannot_go(tmp_path: Path, out: str, says: str):
    folder = slides_in(tmp_path / "slides", "a.svs")
    (tmp_path / "file").write_text("mine")
    model: Any = SimpleNamespace(folder=tmp_path / "model")
    nobody: Any = None
    with pytest.raises(ConfigError, match=says):
        predict(model, [folder], tmp_path / out, StudySettings(), nobody)
    assert (tmp_path / "file").read_text() == "mine"
