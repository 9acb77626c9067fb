"""Run commands in this process, and read what they wrote."""

from __future__ import annotations

import csv
import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from selfvitmil.cli import main


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def selfvitmil(*arguments: object) -> Done:
    """Run a command in this process; what it does not raise on purpose fails the test with its traceback."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return Done(int(end.value.code or 0), out.getvalue(), err.getvalue())


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
