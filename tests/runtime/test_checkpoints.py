"""Checkpoints of trainings."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.error_codes import has_code
from selfvitmil.errors import ArtefactError
from selfvitmil.runtime.training import CHECKPOINT_FILE, MetricsLog, read_checkpoint, write_checkpoint


@pytest.mark.parametrize("fails_at", [1, 2, 5])
def test_a_disk_that_fails_while_a_checkpoint_is_written_is_named(
    fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """torch then complains of the length of its archive, which says nothing to anybody."""
    write_checkpoint(tmp_path, {"step": 1})
    before = (tmp_path / CHECKPOINT_FILE).read_bytes()
    whole, calls = Path.open, iter(range(1, 1000))

    class Full(io.FileIO):
        def write(self, content: Any, /) -> int:
            if next(calls) == fails_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.name)
            return super().write(content)

    def full(path: Path, mode: str = "r", **named: Any) -> Any:
        return Full(os.fspath(path), "w") if mode == "wb" else whole(path, mode, **named)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(ArtefactError, match="no space left", check=has_code("not-writable")):
        write_checkpoint(tmp_path, {"step": 2, "weights": {str(k): torch.ones(100, 100) for k in range(5)}})
    monkeypatch.setattr(Path, "open", whole)
    assert os.listdir(tmp_path) == [CHECKPOINT_FILE]
    assert (tmp_path / CHECKPOINT_FILE).read_bytes() == before
    state = read_checkpoint(tmp_path)
    assert state is not None
    assert state["step"] == 1


DAMAGE = {"torn": b'{"step": 2, "lo\n', "zeros": b"\0" * 40 + b"\n", "a number": b"7\n", "no step": b'{"loss": 1.0}\n'}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_resumed_log_keeps_every_whole_line_before_its_checkpoint(damage: bytes, tmp_path: Path):
    before, after = ([json.dumps({"step": step}) + "\n" for step in steps] for steps in (range(2), range(3, 6)))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes("".join(before).encode() + damage + "".join(after).encode() + b'{"step": 6, "l')
    with MetricsLog(tmp_path, 5) as log:
        assert log.damaged == 2
        log.add({"step": 5, "again": True})
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == [0, 1, 3, 4, 5]
