"""The command line. Each command parses its flags, calls one function of `pipeline` and prints its summary.

Exit status: 0 everything asked for exists; 2 the command or a setting is wrong; 3 some slides, or all, could not be
done (see `failures.csv`); 130 interrupted. Stages are imported when their command runs, so that `--help` stays quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import cyclopts
from cyclopts import App, Parameter
from pydantic import BaseModel, ValidationError

from selfvitmil import __version__
from selfvitmil.errors import ConfigError, SelfVitMilError
from selfvitmil.settings import (
    CompareSettings,
    EmbedSettings,
    EngineSettings,
    EvaluateSettings,
    PretrainSettings,
    SlideSettings,
    StainSettings,
    SupervisedSettings,
    SynthSettings,
    TileSettings,
    TissueSettings,
    TrainSettings,
    describe,
)

if TYPE_CHECKING:
    from selfvitmil.pipeline import Summary

app = App(
    name="selfvitmil",
    version=__version__,
    help="From a folder of slides and their labels to a classifier, an honest evaluation and maps of the evidence.",
    help_format="markdown",
)

MAX_ROWS = 40
"""Rows of a table that are shown; files have them all."""

Flat = Parameter(name="*")
EngineOption = Annotated[EngineSettings, Flat]
Study = Annotated[Path, Parameter(help="Folder of the study; made if it is not there.")]
CohortOption = Annotated[
    Path | None,
    Parameter(help="Folder of slides, or a table of them; needed once, then the study's own cohort.csv is used."),
]
LabelsOption = Annotated[
    Path | None, Parameter(help="Table of labels (csv or xlsx) for a folder, or STAMP's clini table.")
]
LabelColumnOption = Annotated[str | None, Parameter(help="Column of the label in that table, where it is not `label`.")]
SlidesFolderOption = Annotated[Path | None, Parameter(help="Where the slides lie that a table names without a path.")]
LearnFromOption = Annotated[
    str | None, Parameter(help="Learn from the vectors of this encoder; needed where the study has those of several.")
]
CoarseEncoderOption = Annotated[
    str | None, Parameter(help="Encoder of the coarser scale, for vectors of two scales, where it is another one.")
]
TwoScalesOption = Annotated[
    bool, Parameter(help="Append to every vector that of the coarser tile around it (tile.parent_mpp).", negative="")
]
FeaturesOption = Annotated[
    Path | None,
    Parameter(help="Learn from a folder of feature files instead: TRIDENT's, CLAM's, STAMP's or ours, as they are."),
]
TableOption = Annotated[
    Path | None, Parameter(help="Table of slides and labels, where the study has no cohort.csv yet.")
]
ResultsOption = Annotated[str | None, Parameter(help="What to call the folder of results.")]
ENCODER_HELP = (
    "An encoder of the study by name, a folder, a checkpoint, or a timm or hub name (only these two use the network); "
    "several may be given."
)
PresetOption = Annotated[
    Literal["default", "paper", "authors-code"] | None,
    Parameter(help="`paper` follows the text of Self-ViT-MIL, `authors-code` its released code."),
]


@app.command
def synth(
    folder: Path,
    /,
    *,
    settings: Annotated[SynthSettings, Flat] = SynthSettings(),
    engine: EngineOption = EngineSettings(),
):
    """Make a cohort of slides with known truth, to try things on.

    Parameters
    ----------
    folder
        Where to write; must be new or empty.
    """
    from selfvitmil import pipeline
    from selfvitmil.engine import Engine

    with Engine(engine) as workers:
        return _end([pipeline.synth(folder, settings, workers)])


@app.command
def check(
    study: Study,
    /,
    *,
    cohort: CohortOption = None,
    labels: LabelsOption = None,
    label_column: LabelColumnOption = None,
    slides_folder: SlidesFolderOption = None,
    slide: SlideSettings = SlideSettings(),
    engine: EngineOption = EngineSettings(),
):
    """Open every slide, read some of it, and say what will make trouble."""
    from selfvitmil import pipeline
    from selfvitmil.engine import Engine

    source = pipeline.CohortSource(cohort, labels, label_column, slides_folder)
    settings = pipeline.study_settings(study, _typed(slide=slide, engine=engine))
    with Engine(settings.engine) as workers:
        return _end([pipeline.check(study, source, settings, workers)])


@app.command
def tile(
    study: Study,
    /,
    *,
    cohort: CohortOption = None,
    labels: LabelsOption = None,
    label_column: LabelColumnOption = None,
    slides_folder: SlidesFolderOption = None,
    preset: PresetOption = None,
    tile: TileSettings = TileSettings(),
    tissue: TissueSettings = TissueSettings(),
    stain: StainSettings = StainSettings(),
    slide: SlideSettings = SlideSettings(),
    engine: EngineOption = EngineSettings(),
):
    """Find tissue, cut it into tiles at an exact resolution, fit the stains."""
    from selfvitmil import pipeline
    from selfvitmil.engine import Engine

    source = pipeline.CohortSource(cohort, labels, label_column, slides_folder)
    flags = _typed(preset=preset, tile=tile, tissue=tissue, stain=stain, slide=slide, engine=engine)
    settings = pipeline.study_settings(study, flags)
    with Engine(settings.engine) as workers:
        return _end([pipeline.tile(study, source, settings, workers)])


@app.command
def pretrain(
    study: Study,
    /,
    *,
    name: Annotated[str, Parameter(help="What to call the encoder in the study.")] = "dino",
    images: Annotated[
        Path | None, Parameter(help="Train on a folder of tile images instead of the study's slides.")
    ] = None,
    preset: PresetOption = None,
    pretrain: PretrainSettings = PretrainSettings(),
    tile: TileSettings = TileSettings(),
    stain: StainSettings = StainSettings(),
    slide: SlideSettings = SlideSettings(),
):
    """Train an encoder on the tiles of the training split, without labels; goes on where it was stopped.

    For several GPUs: `torchrun --nproc-per-node 4 -m selfvitmil pretrain STUDY`.
    """
    from selfvitmil import pipeline

    flags = _typed(preset=preset, pretrain=pretrain, tile=tile, stain=stain, slide=slide)
    return _end([pipeline.pretrain(study, name, pipeline.study_settings(study, flags), images)])


@app.command
def embed(
    study: Study,
    /,
    *,
    encoder: Annotated[list[str], Parameter(help=ENCODER_HELP)],
    preset: PresetOption = None,
    embed: EmbedSettings = EmbedSettings(),
    tile: TileSettings = TileSettings(),
    stain: StainSettings = StainSettings(),
    slide: SlideSettings = SlideSettings(),
    engine: EngineOption = EngineSettings(),
):
    """Turn every tile into a vector; one feature file per slide, which other tools open too."""
    from selfvitmil import pipeline
    from selfvitmil.embed import workers_for
    from selfvitmil.engine import Engine

    flags = _typed(preset=preset, embed=embed, tile=tile, stain=stain, slide=slide, engine=engine)
    settings = pipeline.study_settings(study, flags)
    with Engine(workers_for(settings.engine, settings.embed.device)) as workers:
        return _end([pipeline.embed(study, encoder, settings, workers)])


@app.command
def export(
    study: Study,
    /,
    *,
    encoder: Annotated[str, Parameter(help="Whose vectors to write.")],
    to: Annotated[Literal["clam", "stamp", "anndata", "trident"], Parameter(help="The tool that shall read them.")],
    out: Annotated[Path, Parameter(help="Folder to write to.")],
    dtype: Annotated[
        Literal["float16", "float32"] | None, Parameter(help="Type of the numbers; none means what the tool expects.")
    ] = None,
    tile: TileSettings = TileSettings(),
    engine: EngineOption = EngineSettings(),
):
    """Write feature files for another tool (TRIDENT's readers open ours as they are)."""
    from selfvitmil import pipeline
    from selfvitmil.engine import Engine

    settings = pipeline.study_settings(study, _typed(tile=tile, engine=engine))
    with Engine(settings.engine) as workers:
        return _end([pipeline.export(study, encoder, out, to, settings, workers, dtype)])


@app.command
def train(
    study: Study,
    /,
    *,
    encoder: LearnFromOption = None,
    features: FeaturesOption = None,
    cohort: TableOption = None,
    labels: LabelsOption = None,
    label_column: LabelColumnOption = None,
    two_scales: TwoScalesOption = False,
    coarse_encoder: CoarseEncoderOption = None,
    preset: PresetOption = None,
    train: TrainSettings = TrainSettings(),
    evaluate: EvaluateSettings = EvaluateSettings(),
    tile: TileSettings = TileSettings(),
):
    """Train an aggregator on slide labels, with several seeds; the test slides stay closed."""
    from selfvitmil import pipeline

    source, choice = _to_learn_from(encoder, features, cohort, labels, label_column, two_scales, coarse_encoder)
    flags = _typed(preset=preset, train=train, evaluate=evaluate, tile=tile)
    return _end([pipeline.train(study, source, choice, pipeline.study_settings(study, flags))])


@app.command
def evaluate(
    study: Study,
    /,
    *,
    encoder: LearnFromOption = None,
    features: FeaturesOption = None,
    cohort: TableOption = None,
    labels: LabelsOption = None,
    label_column: LabelColumnOption = None,
    two_scales: TwoScalesOption = False,
    coarse_encoder: CoarseEncoderOption = None,
    name: ResultsOption = None,
    preset: PresetOption = None,
    train: TrainSettings = TrainSettings(),
    evaluate: EvaluateSettings = EvaluateSettings(),
    tile: TileSettings = TileSettings(),
):
    """Judge an aggregator on the test slides: figures with intervals, predictions, curves. Trains what is missing."""
    from selfvitmil import pipeline

    source, choice = _to_learn_from(encoder, features, cohort, labels, label_column, two_scales, coarse_encoder)
    flags = _typed(preset=preset, train=train, evaluate=evaluate, tile=tile)
    return _end([pipeline.evaluate(study, source, choice, pipeline.study_settings(study, flags), name)])


@app.command
def compare(
    study: Study,
    /,
    *,
    encoder: LearnFromOption = None,
    features: FeaturesOption = None,
    cohort: TableOption = None,
    labels: LabelsOption = None,
    label_column: LabelColumnOption = None,
    coarse_encoder: CoarseEncoderOption = None,
    name: ResultsOption = None,
    preset: PresetOption = None,
    compare: CompareSettings = CompareSettings(),
    train: TrainSettings = TrainSettings(),
    evaluate: EvaluateSettings = EvaluateSettings(),
    supervised: SupervisedSettings = SupervisedSettings(),
    embed: EmbedSettings = EmbedSettings(),
    tile: TileSettings = TileSettings(),
    stain: StainSettings = StainSettings(),
    slide: SlideSettings = SlideSettings(),
    engine: EngineOption = EngineSettings(),
):
    """Every method on the same slides, splits and seeds, in one table beside the published figures."""
    from selfvitmil import pipeline
    from selfvitmil.embed import workers_for
    from selfvitmil.engine import Engine

    source, choice = _to_learn_from(encoder, features, cohort, labels, label_column, False, coarse_encoder)
    flags = _typed(
        preset=preset, compare=compare, train=train, evaluate=evaluate, supervised=supervised, embed=embed,
        tile=tile, stain=stain, slide=slide, engine=engine,
    )  # fmt: skip
    settings = pipeline.study_settings(study, flags)
    with Engine(workers_for(settings.engine, settings.embed.device)) as workers:
        return _end([pipeline.compare(study, source, choice, settings, workers, name)])


def _to_learn_from(
    encoder: str | None,
    features: Path | None,
    cohort: Path | None,
    labels: Path | None,
    label_column: str | None,
    two_scales: bool,
    coarse_encoder: str | None,
) -> Any:
    """Source of the labels and choice of the vectors, from what was typed."""
    from selfvitmil import pipeline

    if features is not None and (encoder is not None or two_scales):
        raise ConfigError(
            "--features goes neither with --encoder nor with --two-scales", "it names the vectors already"
        )
    if features is not None and cohort is None:
        cohort, labels = labels, None  # the table of labels is then all there is
    source = pipeline.CohortSource(cohort, labels, label_column, None, features)
    return source, pipeline.FeatureChoice(encoder, features, coarse_encoder, two_scales)


@app.command
def demo(study: Study, /, *, engine: EngineOption = EngineSettings()):
    """The whole way on made slides, without any data of your own."""
    from selfvitmil import pipeline
    from selfvitmil.engine import Engine

    pipeline.start_demo(study)
    settings = pipeline.study_settings(study, _typed(engine=engine))
    with Engine(settings.engine) as workers:
        return _end(pipeline.demo(study, settings, workers))


def _typed(**sections: Any) -> dict[str, Any]:
    """What was typed, and nothing else: defaults must not outweigh the study's file."""
    typed = {
        name: value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        for name, value in sections.items()
    }
    return {name: value for name, value in typed.items() if value not in (None, {})}


def _end(summaries: Any) -> int:
    """Print what was done; the exit status."""
    status = 0
    for summary in summaries:
        _show(summary)
        status = 130 if summary.interrupted else 3 if summary.failures else status
    return status


def _show(summary: Summary) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 160)
    if summary.table:
        header, *rows = summary.table
        table = Table(*header, box=None, pad_edge=False)
        for row in rows[:MAX_ROWS]:
            table.add_row(*row)
        console.print(table)
        if len(rows) > MAX_ROWS:
            console.print(f"... and {len(rows) - MAX_ROWS} more")
    for line in summary.lines:
        console.print(line, markup=False)
    for failure in summary.failures[:MAX_ROWS]:
        console.print(f"FAILED {failure.slide} ({failure.stage}): {failure.reason}. {failure.remedy}", markup=False)
    if summary.failures:
        console.print(f"{len(summary.failures)} failed; see failures.csv", markup=False)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the `selfvitmil` command; `arguments` default to those of the process."""
    try:
        status = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except cyclopts.CycloptsError as error:
        cause = error.__cause__
        _complain(describe(cause) if isinstance(cause, ValidationError) else str(error))
        status = 2
    except SelfVitMilError as error:
        _complain(str(error))
        status = error.exit_status
    except KeyboardInterrupt:
        _complain("interrupted; what is finished stays, the same command goes on from there")
        status = 130
    sys.exit(status if isinstance(status, int) else 0)


def _complain(message: str) -> None:
    print(f"selfvitmil: {message}", file=sys.stderr)


if __name__ == "__main__":
    main()
