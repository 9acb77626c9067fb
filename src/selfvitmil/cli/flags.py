"""Flags that several commands share, and what they mean for a study.

A group of flags is a frozen dataclass that commands take as one argument; settings are the models of `settings`. Values
of list options may be separated: `--compare.methods a b c`, `--compare.methods a,b,c` and the repeated flag mean the
same (`split_lists`). The last part says which flags the help of a command shows first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from cyclopts import Parameter
from cyclopts.help import DefaultFormatter
from pydantic import BaseModel

from selfvitmil.errors import ConfigError
from selfvitmil.settings import (
    CompareSettings,
    EmbedSettings,
    EngineSettings,
    EvaluateSettings,
    LocalizeSettings,
    Preset,
    PretrainSettings,
    SlideSettings,
    StainSettings,
    StudySettings,
    SupervisedSettings,
    TileSettings,
    TissueSettings,
    TrainSettings,
)

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

Flat = Parameter(name="*")
EngineOption = Annotated[EngineSettings, Flat]
Study = Annotated[Path, Parameter(help="Folder of the study; created if it does not exist.")]
LabelsOption = Annotated[
    Path | None,
    Parameter(
        help="Table (csv or xlsx) with labels for the slides of --cohort, or for those of the study that have none."
    ),
]
LabelColumnOption = Annotated[
    str | None, Parameter(help="Column of --labels that holds the label, if it is not `label`.")
]
ReplaceLabelsOption = Annotated[
    bool,
    Parameter(help="Labels of --labels replace those that the study has, instead of contradicting them.", negative=""),
]
ResultsOption = Annotated[str | None, Parameter(help="Name of the results folder.")]
LesionsOption = Annotated[
    bool,
    Parameter(help="Also score the heatmaps against annotated lesions: FROC, coverage, false positives.", negative=""),
]
ENCODER_HELP = (
    "An encoder of the study by name, a folder, a checkpoint, or a timm or hub name (only these two use the network); "
    "repeat the flag for several."
)
JsonOption = Annotated[bool, Parameter(help="Print JSON instead of a table.", negative="")]
STUDY_FOLDER_HELP = "Also check the folder of this study, which need not exist yet."
PresetOption = Annotated[
    Preset | None,
    Parameter(
        help="`quick` trains an encoder in minutes; `paper` follows the text of Self-ViT-MIL, `authors-code` its code."
    ),
]


@Flat
@dataclass(frozen=True)
class SlideFlags:
    """Where a study's slides and labels come from."""

    cohort: Annotated[
        Path | None,
        Parameter(help="Folder of slides, or a table of them; needed once, then the study's own cohort.csv is used."),
    ] = None
    labels: LabelsOption = None
    label_column: LabelColumnOption = None
    slides_folder: Annotated[Path | None, Parameter(help="Where the slides lie that a table names without a path.")] = (
        None
    )
    replace_labels: ReplaceLabelsOption = False

    def source(self) -> Any:
        from selfvitmil.study import CohortSource

        return CohortSource(
            self.cohort, self.labels, self.label_column, self.slides_folder, replace_labels=self.replace_labels
        )


@Flat
@dataclass(frozen=True)
class LabelFlags:
    """The labels of commands that need no slides."""

    cohort: Annotated[
        Path | None, Parameter(help="Table of slides and labels, where the study has no cohort.csv yet.")
    ] = None
    labels: LabelsOption = None
    label_column: LabelColumnOption = None
    replace_labels: ReplaceLabelsOption = False


@Flat
@dataclass(frozen=True)
class OneScaleFlags:
    """Which features are used."""

    encoder: Annotated[
        str | None,
        Parameter(help="Encoder whose features are used; required if the study has features of several."),
    ] = None
    features: Annotated[
        Path | None,
        Parameter(
            help="Use a folder of feature files instead: those of TRIDENT, CLAM, STAMP or selfvitmil, unchanged."
        ),
    ] = None


@Flat
@dataclass(frozen=True)
class FeatureFlags(OneScaleFlags):
    """Which features are learned from."""

    coarse_encoder: Annotated[
        str | None, Parameter(help="Encoder of the coarser scale, if it differs from the other one.")
    ] = None


@Flat
@dataclass(frozen=True)
class ScaledFeatureFlags(FeatureFlags):
    """The same for commands that train one method; a comparison has two scales as one of its methods."""

    two_scales: Annotated[
        bool,
        Parameter(
            help="Concatenate each embedding with that of the coarser tile around it (tile.parent_mpp).", negative=""
        ),
    ] = False


@Flat
@dataclass(frozen=True)
class WholeWay(SlideFlags):
    """Flags of `run` and `plan`."""

    encoder: Annotated[
        str | None,
        Parameter(
            help="`pretrain` trains one on the slides; or an encoder of the study, a folder, a checkpoint, a timm or "
            "hub name. None means as in the last run, else `pretrain`."
        ),
    ] = None
    name: Annotated[
        str | None, Parameter(help="What to call an encoder that is trained here; none means pretrain.method.")
    ] = None
    one_method: Annotated[
        bool, Parameter(help="Evaluate train.aggregator alone and skip the comparison of all methods.", negative="")
    ] = False
    until: Annotated[
        str | None, Parameter(help="Last stage to run, for instance `embed`; `plan` lists the stages.")
    ] = None
    preset: PresetOption = None
    slide: SlideSettings = SlideSettings()
    tissue: TissueSettings = TissueSettings()
    stain: StainSettings = StainSettings()
    tile: TileSettings = TileSettings()
    pretrain: PretrainSettings = PretrainSettings()
    embed: EmbedSettings = EmbedSettings()
    train: TrainSettings = TrainSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    compare: CompareSettings = CompareSettings()
    supervised: SupervisedSettings = SupervisedSettings()
    localize: LocalizeSettings = LocalizeSettings()
    engine: EngineOption = EngineSettings()

    def request(self) -> Any:
        from selfvitmil.commands.run import Request

        return Request(self.encoder, self.name, self.one_method, self.until)

    def flags(self) -> dict[str, Any]:
        return typed(**{name: getattr(self, name) for name in StudySettings.model_fields})


NO_SLIDES, NO_LABELS, ONE_SCALE, ANY_FEATURES, ANY_SCALED_FEATURES = (
    SlideFlags(),
    LabelFlags(),
    OneScaleFlags(),
    FeatureFlags(),
    ScaledFeatureFlags(),
)
NOTHING_TYPED = WholeWay()


def to_learn_from(inputs: OneScaleFlags, given: LabelFlags = NO_LABELS) -> Any:
    """Return where labels come from and which features are used, from the flags."""
    from selfvitmil.study import CohortSource, FeatureChoice

    two_scales = isinstance(inputs, ScaledFeatureFlags) and inputs.two_scales
    if inputs.features is not None and (inputs.encoder is not None or two_scales):
        raise ConfigError(
            "--features goes neither with --encoder nor with --two-scales",
            "it names the features already",
            code="conflicting-flags",
        )
    cohort, labels = given.cohort, given.labels
    if inputs.features is not None and cohort is None:
        cohort, labels = labels, None  # the table of labels is then all there is
    source = CohortSource(cohort, labels, given.label_column, None, inputs.features, given.replace_labels)
    coarse = inputs.coarse_encoder if isinstance(inputs, FeatureFlags) else None
    return source, FeatureChoice(inputs.encoder, inputs.features, coarse, two_scales)


def typed(**sections: Any) -> dict[str, Any]:
    """Return the flags that were given and nothing else: defaults must not override the study's file."""
    given = {
        name: value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        for name, value in sections.items()
    }
    return {name: value for name, value in given.items() if value not in (None, {})}


VERBATIM = ("batch",)
"""Sections whose texts may have commas."""
OTHERS = ("--by",)
"""List options of commands that take commas too; names of slides and folders may have some."""
SHORT = {"--tune": "--train.tune", "--no-tune": "--train.no-tune"}
"""Short names of flags."""


@cache
def list_options() -> frozenset[str]:
    """Return the flags whose values are lists of any length."""
    found = [*_of(StudySettings, ""), *_of(EngineSettings, "")]
    return frozenset((*found, *OTHERS))


def _of(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in model.model_fields.items():
        flag = f"{prefix}{name.replace('_', '-')}"
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if name not in VERBATIM:
                yield from _of(kind, f"{flag}.")
        elif get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis:
            yield f"--{flag}"


def split_lists(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with short names of flags written out, and with values of list options that are separated by
    commas as values of their own."""
    found: list[str] = []
    inside = False
    for each in (SHORT.get(given, given) for given in arguments):
        if each.startswith("--"):
            name, joined, value = each.partition("=")
            inside = name in list_options()
            if inside and joined:
                found += [name, *_parts(value)]
            else:
                found.append(each)
        else:
            found += _parts(each) if inside else [each]
    return found


def _parts(value: str) -> list[str]:
    parts = [part.strip() for part in value.split(",")]
    return [part for part in parts if part] or [value]


# ---------------------------------------------------------------------------------------------------- help
# Every setting is a flag, so that a command like `run` has hundreds. Its `--help` shows those in `FIRST`, `--help-all`
# the rest too. Commands that are not in `FIRST` have few and show them all.

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
