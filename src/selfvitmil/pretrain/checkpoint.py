"""What a training run leaves on disk while it runs: `state.pt` to go on from, `metrics.jsonl` to look at.

`state.pt` is replaced as a whole, so there is always one that works, and is read without running anything it holds.
`metrics.jsonl` grows by a line every few steps; a resumed run first takes back the lines of steps that are done again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from selfvitmil import artefact
from selfvitmil.errors import ArtefactError

FORMAT_VERSION = 1
STATE_FILE = "state.pt"
METRICS_FILE = "metrics.jsonl"


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Replace `state.pt`: mappings and lists of tensors, numbers and strings."""
    with artefact.atomic_path(folder / STATE_FILE) as temporary:
        torch.save({"format_version": FORMAT_VERSION, **state}, temporary)


def read_state(folder: Path) -> dict[str, Any] | None:
    """What `write_state` wrote, on the CPU; None when there is none."""
    path = folder / STATE_FILE
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        version = state["format_version"]
    except Exception as error:  # bytes of any kind make the parser fail in any way
        raise ArtefactError(
            f"{path.name} of {folder.name} cannot be read",
            "it is damaged, or holds more than numbers; nothing in it was run",
            "Remove the folder of this encoder to train it from the start",
        ) from error
    if version != FORMAT_VERSION:
        raise ArtefactError(
            f"{path.name} of {folder.name} has format version {version}",
            f"this version of selfvitmil goes on from version {FORMAT_VERSION}",
            "Use the version that wrote it, or train under another name",
        )
    return state


class Metrics:
    """`metrics.jsonl`: one JSON object a line, in rising order of `step`."""

    def __init__(self, folder: Path, first_step: int):
        self.path = folder / METRICS_FILE
        self.lines = [line for line in read_metrics(folder) if line["step"] < first_step]
        """All lines so far."""
        artefact.write_text(self.path, "".join(_as_line(line) for line in self.lines))

    def add(self, line: dict[str, Any]) -> None:
        """Append a line; it is in the file when this returns."""
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_as_line(line))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`; a last one that was cut short by a crash does not count."""
    path = folder / METRICS_FILE
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def _as_line(line: Mapping[str, Any]) -> str:
    return json.dumps(line) + "\n"
