"""What tests of the viewer share."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.viewer import make_slide_file
from selfvitmil.view import server


@pytest.fixture(scope="module")
def slide_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_slide_file(tmp_path_factory.mktemp("slide") / "made.svs")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed files are noticed at once."""
    monkeypatch.setattr(server, "LOOK_AGAIN_S", 0.0)
