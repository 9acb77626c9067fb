"""What training loops share: parameter groups, the cosine schedule, and the files of a run.

`state.pt` is the checkpoint. It is replaced atomically, so there is always a valid one, and read without running
anything it holds. `metrics.jsonl` grows by a line every few steps and is synced before each checkpoint, so that a
crash loses only lines of steps that are repeated; a resumed run first removes those, and damaged ones. The same values
go to `tensorboard/` on request: one event file per start of the run, each of which tells TensorBoard from which step on
earlier events are void.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from selfvitmil.errors import ArtefactError, ConfigError
from selfvitmil.store.files import atomic_path, load_torch, read_json_lines, sync, write_error, write_text

FORMAT_VERSION = 1
CHECKPOINT_FILE = "state.pt"
METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


# ---------------------------------------------------------------------------------------------------- optimizer


def parameter_groups(*modules: nn.Module) -> list[dict[str, Any]]:
    """Return two groups of trainable parameters: with weight decay, and (biases and all 1-D tensors) without.

    A schedule of the weight decay must change the first group only; the second has `weight_decay` 0.
    """
    return split_by_decay(chain.from_iterable(module.named_parameters() for module in modules))


def split_by_decay(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Return the two groups of `parameter_groups` for named parameters."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in named:
        if parameter.requires_grad:
            (others if name.endswith("bias") or parameter.ndim <= 1 else decayed).append(parameter)
    return [{"params": decayed}, {"params": others, "weight_decay": 0.0}]


@dataclass(frozen=True)
class CosineSchedule:
    """Half a cosine from `base` to `final` over `total_steps`, after a linear warm-up from `warmup_start`.

    As in DINO's code, the last warm-up step already has `base`, and the very last step is just short of `final`, which
    later steps have. A schedule is a function of the step and has no state.
    """

    base: float
    final: float
    total_steps: int
    warmup_steps: int = 0
    warmup_start: float = 0.0

    def value_at(self, step: int) -> float:
        """Return the value for step 0, 1, 2, ..."""
        if step < self.warmup_steps:
            return self.warmup_start + (self.base - self.warmup_start) * step / max(self.warmup_steps - 1, 1)
        done = min((step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1), 1.0)
        return self.final + 0.5 * (self.base - self.final) * (1 + math.cos(math.pi * done))


def suggested_warmup_steps(total_steps: int) -> int:
    """Return the steps of warm-up of learning rate and teacher temperature: a tenth of the run, as in the paper.

    Never more than 12,500, DINO's ten epochs on ImageNet: a longer run does not need a slower start.
    """
    return min(round(total_steps / 10), 12_500)


# ---------------------------------------------------------------------------------------------------- checkpoint


def write_checkpoint(folder: Path, state: Mapping[str, Any]) -> None:
    """Replace `state.pt` atomically by mappings and lists of tensors, numbers and strings."""
    # To an open file: given a path, torch stores the temporary name, which has the process id, in the archive.
    with atomic_path(folder / CHECKPOINT_FILE) as temporary, temporary.open("wb") as file:
        try:
            torch.save({"format_version": FORMAT_VERSION, **state}, file)
        except RuntimeError as error:  # torch ends its archive after a failed write, and complains about its length
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def read_checkpoint(folder: Path) -> dict[str, Any] | None:
    """Return what `write_checkpoint` wrote, on the CPU; None when there is none. Raises ArtefactError."""
    path = folder / CHECKPOINT_FILE
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
            code="unreadable-checkpoint",
        ) from error
    if version != FORMAT_VERSION:
        raise ArtefactError(
            f"{path.name} of {folder.name} has format version {version}",
            f"this version of selfvitmil resumes from version {FORMAT_VERSION}",
            "Use the version that wrote it, or train under another name",
            code="other-format-version",
        )
    return state


# ---------------------------------------------------------------------------------------------------- metrics


class MetricsLog:
    """`metrics.jsonl`: one JSON object per line, in rising order of `step`. Use it in a `with` block."""

    def __init__(self, folder: Path, first_step: int, *, tensorboard: bool = False):
        self.path = folder / METRICS_FILE
        lines, self.damaged = read_metrics_and_damage(folder)
        """The second: how many lines could not be read and were removed."""
        self.lines = [line for line in lines if line["step"] < first_step]
        """All lines so far."""
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in self.lines))
        self._board: Any = None
        if tensorboard:
            self._board = tensorboard_writer()(str(folder / TENSORBOARD_FOLDER), purge_step=first_step)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._board is not None:
            self._board.close()

    def add(self, line: dict[str, Any]) -> None:
        """Append a line; it is in the file when this returns."""
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self._board is not None:
            for name, value in scalars_of(line).items():
                self._board.add_scalar(name, value, line["step"])
            self._board.flush()

    def sync(self) -> None:
        """Return when all lines are on the disk."""
        try:
            sync(self.path)
        except OSError as error:
            raise write_error(self.path, error) from error


def tensorboard_writer() -> Any:
    """Return TensorBoard's SummaryWriter class; raises ConfigError where the package is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "pretrain.tensorboard is on, but TensorBoard is not installed",
            "it comes as an extra",
            'Run pip install "selfvitmil[tensorboard]", or leave the setting out: metrics.jsonl has the same numbers',
            code="missing-package",
        ) from None
    return SummaryWriter


def scalars_of(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return every number of a line of metrics except its step; those of inner mappings as `phase_s/views`."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            found |= scalars_of(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and prefix + name != "step":
            found[prefix + name] = value
    return found


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl`, without damaged ones."""
    return read_metrics_and_damage(folder)[0]


def read_metrics_and_damage(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of `metrics.jsonl` that can be read, and the number of others."""
    objects, damaged = read_json_lines(folder / METRICS_FILE)
    lines = [line for line in objects if isinstance(line.get("step"), int)]
    return lines, damaged + len(objects) - len(lines)
