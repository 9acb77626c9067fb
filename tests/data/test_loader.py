"""Reading tiles ahead in other processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

UNGUARDED = """
from pathlib import Path

from selfvitmil.data.loader import TileLoader, TileOrder
from selfvitmil.data.sources import ImageTiles

with Path("runs").open("a") as file:
    file.write("once ")
source = ImageTiles(Path("tiles"))
with TileLoader(source, TileOrder(source.counts, batch=4), 0, 2, workers=1) as loader:
    print(sorted(int(value) for batch in loader for value in batch.tiles_B3HW[:, 0, 0, 0]))
"""


@pytest.mark.slow
def test_script_without_a_main_guard_reads_tiles_in_workers(tmp_path: Path) -> None:
    (tmp_path / "tiles").mkdir()
    for value in range(8):
        Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(tmp_path / "tiles" / f"{value}.png")
    (tmp_path / "script.py").write_text(UNGUARDED)
    answer = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, cwd=tmp_path)
    assert answer.stdout == f"{list(range(8))}\n", answer
    assert (tmp_path / "runs").read_text() == "once "
