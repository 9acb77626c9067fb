"""The command line.

    overview.py   the commands and what each does, in one table
    parser.py     the commands with their flags
    flags.py      flags that several commands share; list options by spaces and commas; which of them help shows first
    output.py     what is printed

Exit status: 0 everything asked for exists; 2 the command, a setting or the cohort is wrong; 3 some slides, or all,
could not be done (see `failures.csv`); 130 interrupted.

`main` answers `--help` and `--version` itself and loads the parser for everything else. Libraries that take seconds to
load are imported by the commands that need them, when they need them; PyTorch is announced.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from selfvitmil import __version__
from selfvitmil.cli.overview import overview, terminal_width


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the `selfvitmil` command; `arguments` default to those of the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        print(__version__)
        sys.exit(0)
    if given in ([], ["-h"], ["--help"]):
        coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        print(overview(terminal_width(), colour=coloured))
        sys.exit(0)
    from selfvitmil.cli import output, parser

    with output.torch_announced():
        status = parser.call(given)
    sys.exit(status)
