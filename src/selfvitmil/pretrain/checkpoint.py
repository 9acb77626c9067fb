"""What a training run leaves on disk while it runs: `state.pt` to go on from, `metrics.jsonl` to look at.

`state.pt` is replaced as a whole, so there is always one that works, and is read without running anything it holds.
`metrics.jsonl` grows by a line every few steps; a resumed run first takes back the lines of steps that are done again.
The same numbers go to `tensorboard/` when asked for: a file of events per start of the run, each of which tells
TensorBoard from which step on the events of those before are void.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from selfvitmil.errors import ArtefactError, ConfigError
from selfvitmil.store.files import atomic_path, write_text
from selfvitmil.untrusted import load_torch

FORMAT_VERSION = 1
STATE_FILE = "state.pt"
METRICS_FILE = "metrics.jsonl"
BOARD_FOLDER = "tensorboard"


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Replace `state.pt`: mappings and lists of tensors, numbers and strings."""
    with atomic_path(folder / STATE_FILE) as temporary:
        torch.save({"format_version": FORMAT_VERSION, **state}, temporary)


def read_state(folder: Path) -> dict[str, Any] | None:
    """What `write_state` wrote, on the CPU; None when there is none."""
    path = folder / STATE_FILE
    if not path.exists():
        return None
    try:
        state = load_torch(path)
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
    """`metrics.jsonl`: one JSON object a line, in rising order of `step`. Use it in a `with` block."""

    def __init__(self, folder: Path, first_step: int, *, tensorboard: bool = False):
        self.path = folder / METRICS_FILE
        self.lines = [line for line in read_metrics(folder) if line["step"] < first_step]
        """All lines so far."""
        write_text(self.path, "".join(_as_line(line) for line in self.lines))
        self._board: Any = None
        if tensorboard:
            self._board = board_writer()(str(folder / BOARD_FOLDER), purge_step=first_step)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._board is not None:
            self._board.close()

    def add(self, line: dict[str, Any]) -> None:
        """Append a line; it is in the file when this returns."""
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_as_line(line))
        if self._board is not None:
            for name, value in numbers_of(line).items():
                self._board.add_scalar(name, value, line["step"])
            self._board.flush()


def board_writer() -> Any:
    """TensorBoard's class that writes events; raises ConfigError where the package is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "pretrain.tensorboard is on, but TensorBoard is not installed",
            "it comes as an extra",
            'Run pip install "selfvitmil[tensorboard]", or leave the setting out: metrics.jsonl has the same numbers',
        ) from None
    return SummaryWriter


def numbers_of(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Every number of a line of metrics but its step, by name; those of inner mappings as `phase_s/views`."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            found |= numbers_of(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and prefix + name != "step":
            found[prefix + name] = value
    return found


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
