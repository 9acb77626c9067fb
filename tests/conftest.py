"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """Reference material that lies beside the checkout on developers' machines; users have none of it."""
    folder = Path(__file__).parents[2] / "shared"
    if not (folder / "golden").is_dir():
        pytest.skip("no shared/ folder with reference material beside the checkout")
    return folder
