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
from selfvitmil.errors import SelfVitMilError
from selfvitmil.settings import (
    EmbedSettings,
    EngineSettings,
    PretrainSettings,
    SlideSettings,
    StainSettings,
    SynthSettings,
    TileSettings,
    TissueSettings,
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
