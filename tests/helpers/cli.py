"""Run commands in this process, and read what they wrote."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from selfvitmil.cli import main, parser


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str
    code: str = ""
    """Of the error that ended the command; `usage` for arguments that it does not take."""


def selfvitmil(*arguments: object) -> Done:
    """Run a command in this process; what it does not raise on purpose fails the test with its traceback."""
    out, err = io.StringIO(), io.StringIO()
    codes: list[str] = []

    def noted(given: Sequence[str]) -> tuple[int, dict[str, str] | None]:
        status, error = run_command(given)
        codes.extend([] if error is None else [error["code"]])
        return status, error

    run_command = parser.run_command
    patched = mock.patch.object(parser, "run_command", noted)
    with redirect_stdout(out), redirect_stderr(err), patched, pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return Done(int(end.value.code or 0), out.getvalue(), err.getvalue(), "".join(codes))


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
