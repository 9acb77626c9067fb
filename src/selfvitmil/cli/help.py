"""The help of commands: first the options that people use first, all of them with `--help-all`.

Every setting is a flag, so that a command like `run` has hundreds. Its `--help` shows those in `FIRST`, `--help-all`
the rest too. Commands that are not in `FIRST` have few and show them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cyclopts.help import DefaultFormatter

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

HELP, HELP_ALL = "--help", "--help-all"

_FIRST = {
    "run": "cohort labels label-column encoder preset until one-method dry-run tile.mpp workers",
    "plan": "cohort labels label-column encoder preset until one-method power tile.mpp workers",
    "check": "cohort labels label-column slides-folder slide.mpp slide.reader workers",
    "tile": "cohort labels label-column slides-folder tile.mpp tile.size-px tile.min-tissue slide.mpp workers",
    "pretrain": "name preset pretrain.method pretrain.init pretrain.epochs pretrain.batch pretrain.steps "
    "pretrain.transductive pretrain.per-split images",
    "embed": "encoder embed.layout embed.batch embed.device tile.mpp workers",
    "export": "encoder to out dtype embed.layout train.split tile.mpp workers",
    "slide-embeddings": "cohort labels encoder features pooling model neighbors similar-to out pseudonyms",
    "train": "labels label-column encoder features train.aggregator train.seeds train.folds train.epochs "
    "train.positive train.device",
    "evaluate": "labels label-column encoder features train.aggregator train.folds lesions name evaluate.threshold "
    "evaluate.calibration",
    "compare": "labels label-column encoder features compare.methods compare.baseline train.folds train.seeds lesions "
    "name",
    "localize": "encoder slides train.aggregator localize.score localize.parts localize.colors localize.picture-px "
    "localize.geojson name workers",
    "package": "out split results encoder features train.aggregator",
    "predict": "out labels label-column label-map by against maps json slide.mpp workers",
}
FIRST = {command: tuple(f"--{name}" for name in names.split()) for command, names in _FIRST.items()}
"""Command -> its options that `--help` shows, most used first; arguments without a flag are always shown."""


class FirstOptions(DefaultFormatter):
    """Renders the help of a command with its first options, and says how many others there are."""

    def __init__(self) -> None:
        super().__init__()
        self.command = ""
        """Command whose help is shown; empty where all options are."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        first = FIRST.get(self.command)
        if first is None or panel.format != "parameter":
            super().__call__(console, options, panel)
            return
        shown = [entry for entry in panel.entries if entry.positional_label is not None or _place(entry, first) >= 0]
        shown.sort(key=lambda entry: _place(entry, first))
        left = len(panel.entries) - len(shown)
        if shown:
            super().__call__(console, options, panel.copy(entries=shown))
        if left:
            console.print(f"{left} more options and settings: selfvitmil {self.command} {HELP_ALL}")


def _place(entry: Any, first: Sequence[str]) -> int:
    """Return the place of an option among the first ones; -1 where it is none of them."""
    names = {*entry.positive_names, *entry.positive_shorts}
    return next((place for place, name in enumerate(first) if name in names), -1)


formatter = FirstOptions()


def asked_for(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without `--help-all`, which becomes `--help` of all options; notes whose help it is."""
    formatter.command = "" if HELP_ALL in arguments else next(iter(arguments), "")
    return [HELP if each == HELP_ALL else each for each in arguments]
