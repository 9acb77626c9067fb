"""The command line. Each command parses its flags, calls one function of `stages` or `commands` and prints its result.

Exit status: 0 everything asked for exists; 2 the command or a setting is wrong; 3 some slides, or all, could not be
done (see `failures.csv`); 130 interrupted. Stages are imported when their command runs, so that `--help` stays quick.
"""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
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
    LocalizeSettings,
    Preset,
    PretrainSettings,
    SlideSettings,
    StainSettings,
    StudySettings,
    SupervisedSettings,
    SynthSettings,
    TileSettings,
    TissueSettings,
    TrainSettings,
    describe,
)

if TYPE_CHECKING:
    from selfvitmil.stages.base import StageResult

app = App(
    name="selfvitmil",
    version=__version__,
    help="Whole-slide images and slide labels to a classifier, an honest evaluation and heatmaps of the evidence.",
    help_format="markdown",
)

MAX_ROWS = 40
"""Rows of a table that are printed; files have all of them."""

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

    def source(self) -> Any:
        from selfvitmil.study import CohortSource

        return CohortSource(self.cohort, self.labels, self.label_column, self.slides_folder)


@Flat
@dataclass(frozen=True)
class LabelFlags:
    """The labels of commands that need no slides."""

    cohort: Annotated[
        Path | None, Parameter(help="Table of slides and labels, where the study has no cohort.csv yet.")
    ] = None
    labels: LabelsOption = None
    label_column: LabelColumnOption = None


@Flat
@dataclass(frozen=True)
class FeatureFlags:
    """Which features are learned from."""

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


NO_SLIDES, NO_LABELS, ANY_FEATURES, ANY_SCALED_FEATURES = (
    SlideFlags(),
    LabelFlags(),
    FeatureFlags(),
    ScaledFeatureFlags(),
)


@app.command
def synth(
    folder: Path,
    /,
    *,
    settings: Annotated[SynthSettings, Flat] = SynthSettings(),
    engine: EngineOption = EngineSettings(),
):
    """Write a cohort of synthetic slides with annotated lesions, for trying things out.

    Parameters
    ----------
    folder
        Where to write; must be new or empty.
    """
    from selfvitmil.commands import synth as synth_command
    from selfvitmil.engine import Engine

    with Engine(engine) as workers:
        return _end([synth_command.synth(folder, settings, workers)])


@app.command
def check(
    study: Study,
    /,
    *,
    slides: SlideFlags = NO_SLIDES,
    slide: SlideSettings = SlideSettings(),
    engine: EngineOption = EngineSettings(),
):
    """Open every slide, read some of it, and report what will cause problems."""
    from selfvitmil.stages.check import check as check_slides

    opened = _open(study, slides.source(), slide=slide, engine=engine)
    with _workers(opened) as workers:
        return _end([check_slides(opened, workers)])


@app.command
def split(
    study: Study,
    /,
    *,
    slides: SlideFlags = NO_SLIDES,
    test: Annotated[float, Parameter(help="Fraction of the patients of every class for the test set.")] = 0.3,
    seed: Annotated[int, Parameter(help="Random seed of the draw.")] = 0,
    overwrite: Annotated[bool, Parameter(help="Replace an existing split.", negative="")] = False,
):
    """Hold out a test set by patient, stratified by label; writes the column split of the study's cohort.csv."""
    from selfvitmil.commands import split as split_command

    return _end([split_command.split(_open(study, slides.source()), test, seed, overwrite=overwrite)])


@app.command
def tile(
    study: Study,
    /,
    *,
    slides: SlideFlags = NO_SLIDES,
    preset: PresetOption = None,
    tile: TileSettings = TileSettings(),
    tissue: TissueSettings = TissueSettings(),
    stain: StainSettings = StainSettings(),
    slide: SlideSettings = SlideSettings(),
    engine: EngineOption = EngineSettings(),
):
    """Segment tissue, cut it into tiles at an exact resolution, and fit the stains."""
    from selfvitmil.stages.tile import tile as tile_slides

    flags = {"preset": preset, "tile": tile, "tissue": tissue, "stain": stain, "slide": slide, "engine": engine}
    opened = _open(study, slides.source(), **flags)
    with _workers(opened) as workers:
        return _end([tile_slides(opened, workers)])


@app.command
def pretrain(
    study: Study,
    /,
    *,
    name: Annotated[
        str | None, Parameter(help="What to call the encoder in the study; none means pretrain.method.")
    ] = None,
    images: Annotated[
        Path | None, Parameter(help="Train on a folder of tile images instead of the study's slides.")
    ] = None,
    preset: PresetOption = None,
    pretrain: PretrainSettings = PretrainSettings(),
    train: TrainSettings = TrainSettings(),
    tile: TileSettings = TileSettings(),
    stain: StainSettings = StainSettings(),
    slide: SlideSettings = SlideSettings(),
):
    """Pretrain an encoder on the tiles of the training set, without labels. Resumes from its checkpoint.

    With `--pretrain.per-split` one encoder for every split (`--train.split`, `--train.folds`).
    For several GPUs: `torchrun --nproc-per-node 4 -m selfvitmil pretrain STUDY`.
    """
    from selfvitmil.stages.pretrain import pretrain as train_encoder

    opened = _open(study, preset=preset, pretrain=pretrain, train=train, tile=tile, stain=stain, slide=slide)
    return _end([train_encoder(opened, name or opened.settings.pretrain.method, images)])


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
    """Embed every tile; writes one feature file per slide, which other tools can read."""
    from selfvitmil.stages.embed import embed as embed_slides

    opened = _open(study, preset=preset, embed=embed, tile=tile, stain=stain, slide=slide, engine=engine)
    with _workers(opened, with_encoder=True) as workers:
        return _end([embed_slides(opened, encoder, workers)])


@app.command
def export(
    study: Study,
    /,
    *,
    encoder: Annotated[str, Parameter(help="Encoder whose features are written.")],
    to: Annotated[Literal["clam", "stamp", "anndata", "trident"], Parameter(help="Tool that will read them.")],
    out: Annotated[Path, Parameter(help="Folder to write to.")],
    dtype: Annotated[
        Literal["float16", "float32"] | None,
        Parameter(help="Floating-point type; by default the one that the tool expects."),
    ] = None,
    tile: TileSettings = TileSettings(),
    engine: EngineOption = EngineSettings(),
):
    """Write feature files in the format of another tool. Readers of TRIDENT files need no export."""
    from selfvitmil.commands import export as export_command

    opened = _open(study, tile=tile, engine=engine)
    with _workers(opened) as workers:
        return _end([export_command.export(opened, encoder, out, to, workers, dtype)])


@app.command
def train(
    study: Study,
    /,
    *,
    inputs: ScaledFeatureFlags = ANY_SCALED_FEATURES,
    labels: LabelFlags = NO_LABELS,
    preset: PresetOption = None,
    train: TrainSettings = TrainSettings(),
    evaluate: EvaluateSettings = EvaluateSettings(),
    tile: TileSettings = TileSettings(),
    engine: EngineOption = EngineSettings(),
):
    """Train an aggregator on slide labels with several seeds; the test set is not touched."""
    from selfvitmil.stages.train import train as train_models

    source, choice = _to_learn_from(inputs, labels)
    opened = _open(study, source, preset=preset, train=train, evaluate=evaluate, tile=tile, engine=engine)
    with _workers(opened) as workers:
        return _end([train_models(opened, choice, workers)])


@app.command
def evaluate(
    study: Study,
    /,
    *,
    inputs: ScaledFeatureFlags = ANY_SCALED_FEATURES,
    labels: LabelFlags = NO_LABELS,
    name: ResultsOption = None,
    lesions: LesionsOption = False,
    preset: PresetOption = None,
    train: TrainSettings = TrainSettings(),
    evaluate: EvaluateSettings = EvaluateSettings(),
    localize: LocalizeSettings = LocalizeSettings(),
    tile: TileSettings = TileSettings(),
    engine: EngineOption = EngineSettings(),
):
    """Evaluate an aggregator on the test set: metrics with confidence intervals, predictions, ROC curves.

    Models that are missing or stale are trained first.
    """
    from selfvitmil.stages.evaluate import evaluate as evaluate_models
    from selfvitmil.stages.lesions import evaluate_lesions

    source, choice = _to_learn_from(inputs, labels)
    flags = {"train": train, "evaluate": evaluate, "localize": localize, "tile": tile, "engine": engine}
    opened = _open(study, source, preset=preset, **flags)
    with _workers(opened) as workers:
        steps: list[Callable[[], StageResult]] = [lambda: evaluate_models(opened, choice, workers, name)]
        if lesions:
            steps.append(lambda: evaluate_lesions(opened, choice, name))
        return _end(step() for step in steps)


@app.command
def compare(
    study: Study,
    /,
    *,
    inputs: FeatureFlags = ANY_FEATURES,
    labels: LabelFlags = NO_LABELS,
    name: ResultsOption = None,
    lesions: LesionsOption = False,
    preset: PresetOption = None,
    compare: CompareSettings = CompareSettings(),
    train: TrainSettings = TrainSettings(),
    evaluate: EvaluateSettings = EvaluateSettings(),
    localize: LocalizeSettings = LocalizeSettings(),
    supervised: SupervisedSettings = SupervisedSettings(),
    embed: EmbedSettings = EmbedSettings(),
    tile: TileSettings = TileSettings(),
    stain: StainSettings = StainSettings(),
    slide: SlideSettings = SlideSettings(),
    engine: EngineOption = EngineSettings(),
):
    """Compare all methods on the same slides, splits and seeds, in one table with the published results."""
    from selfvitmil.stages.compare import compare as compare_methods
    from selfvitmil.stages.lesions import compare_lesions

    source, choice = _to_learn_from(inputs, labels)
    opened = _open(
        study, source,
        preset=preset, compare=compare, train=train, evaluate=evaluate, supervised=supervised, embed=embed,
        localize=localize, tile=tile, stain=stain, slide=slide, engine=engine,
    )  # fmt: skip
    with _workers(opened, with_encoder=True) as workers:
        steps: list[Callable[[], StageResult]] = [lambda: compare_methods(opened, choice, workers, name)]
        if lesions:
            steps.append(lambda: compare_lesions(opened, choice, name))
        return _end(step() for step in steps)


@app.command
def localize(
    study: Study,
    /,
    *,
    inputs: ScaledFeatureFlags = ANY_SCALED_FEATURES,
    labels: LabelFlags = NO_LABELS,
    slides: Annotated[
        list[str] | None, Parameter(help="Draw heatmaps of these slides, by name; by default those of localize.parts.")
    ] = None,
    name: Annotated[str | None, Parameter(help="Name of the folder of heatmaps.")] = None,
    preset: PresetOption = None,
    train: TrainSettings = TrainSettings(),
    evaluate: EvaluateSettings = EvaluateSettings(),
    localize: LocalizeSettings = LocalizeSettings(),
    tile: TileSettings = TileSettings(),
    slide: SlideSettings = SlideSettings(),
    engine: EngineOption = EngineSettings(),
):
    """Draw heatmaps by trained models: scores per tile, lesions, pictures, files for QuPath and ASAP."""
    from selfvitmil.stages.localize import localize as draw_heatmaps

    source, choice = _to_learn_from(inputs, labels)
    flags = {"train": train, "evaluate": evaluate, "localize": localize, "tile": tile, "slide": slide, "engine": engine}
    opened = _open(study, source, preset=preset, **flags)
    with _workers(opened) as workers:
        return _end([draw_heatmaps(opened, choice, workers, name, slides or ())])


def _to_learn_from(inputs: FeatureFlags, given: LabelFlags = NO_LABELS) -> Any:
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
    source = CohortSource(cohort, labels, given.label_column, None, inputs.features)
    return source, FeatureChoice(inputs.encoder, inputs.features, inputs.coarse_encoder, two_scales)


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
        return _typed(**{name: getattr(self, name) for name in StudySettings.model_fields})


NOTHING_TYPED = WholeWay()


@app.command
def init(study: Study, /, *, preset: PresetOption = None):
    """Write a commented study.toml with every setting, its meaning and its value."""
    from selfvitmil.commands import init as init_command

    return _end([init_command.init(study, preset or "default")])


@app.command
def run(
    study: Study,
    /,
    *,
    way: WholeWay = NOTHING_TYPED,
    dry_run: Annotated[
        bool, Parameter(help="Only print what would be done and what it takes, like `plan`.", negative="")
    ] = False,
):
    """Run all stages from slides to the report, skipping what is up to date. The same command resumes a stopped run."""
    from selfvitmil.commands import run as run_command
    from selfvitmil.study import open_study

    if dry_run:
        return plan(study, way=way)
    opened = open_study(study, way.flags(), way.source())
    with _workers(opened) as workers:
        return _end(run_command.run(opened, way.request(), workers, way.flags()))


@app.command
def plan(study: Study, /, *, way: WholeWay = NOTHING_TYPED):
    """Print what `run` would do: slides, tiles, disk, memory and time per stage on this machine. Writes nothing."""
    from selfvitmil.commands import plan as plan_command
    from selfvitmil.study import open_study

    return _end([plan_command.plan(open_study(study, way.flags(), way.source()), way.request())])


@app.command
def status(study: Study, /, *, json: JsonOption = False):
    """Print what a study has done, what failed and what is next; also while another process works on it."""
    from selfvitmil.commands import status as status_command

    found = status_command.status(study)
    if json:
        return _print_json(found.to_json())
    return _end([found])


@app.command
def doctor(study: Annotated[Path | None, Parameter(help=STUDY_FOLDER_HELP)] = None, /, *, json: JsonOption = False):
    """Check whether this machine and a study folder have what is needed; print a remedy for each problem."""
    from selfvitmil.commands import doctor as doctor_command

    result = doctor_command.doctor(study)
    if json:
        _print_json([asdict(check) for check in result.checks])
    else:
        _show(result)
    return 3 if result.status == "FAIL" else 0


def _print_json(value: Any) -> int:
    print(jsonlib.dumps(value, indent=1))
    return 0


@app.command
def view(
    study: Annotated[Path, Parameter(help="Folder of the study.")],
    /,
    *,
    export: Annotated[
        Path | None,
        Parameter(help="Write a folder that opens from disk and can be mailed, instead of starting a server."),
    ] = None,
    slides: Annotated[
        list[str] | None, Parameter(help="Slides to export; by default those with heatmaps, at most 20.")
    ] = None,
    export_mpp: Annotated[float, Parameter(help="Finest exported resolution, in microns per pixel.")] = 2.0,
    pseudonyms: Annotated[bool, Parameter(help="Replace names of slides and patients.", negative="")] = False,
    host: Annotated[
        str, Parameter(help="Address to listen on; any other than the loopback address requires a token.")
    ] = "127.0.0.1",
    port: Annotated[int, Parameter(help="Port to listen on; 0 takes any free one.")] = 8000,
    require_token: Annotated[
        bool,
        Parameter(
            help="Require a token on the loopback address too, for machines that several people use.", negative=""
        ),
    ] = False,
    browser: Annotated[bool, Parameter(help="Open a browser.")] = True,
    slide: SlideSettings = SlideSettings(),
):
    """Show slides and heatmaps in a browser."""
    from selfvitmil.commands import view as view_command

    opened = _open(study, slide=slide)
    if export is not None:
        folder = {"slides": slides or (), "top_mpp": export_mpp}
        return _end([view_command.export_view(opened, export, **folder, pseudonyms=pseudonyms, say=_say)])
    if slides:
        raise ConfigError("--slides goes with --export only", "the viewer shows all slides", code="conflicting-flags")
    place = {"host": host, "port": port, "require_token": require_token}
    return _end([view_command.view(opened, **place, browser=browser, pseudonyms=pseudonyms, say=_say)])


def _say(line: str) -> None:
    """Print at once: what comes next takes its time."""
    print(line, flush=True)


@app.command
def package(
    study: Annotated[Path, Parameter(help="Folder of the study.")],
    /,
    *,
    out: Annotated[Path, Parameter(help="Folder of the package; must be new or empty.")],
    split: Annotated[
        str | None, Parameter(help="Split whose models are packaged; required if there are several.")
    ] = None,
    results: Annotated[
        str | None, Parameter(help="Results folder that the model card quotes, if it has a name of its own.")
    ] = None,
    inputs: ScaledFeatureFlags = ANY_SCALED_FEATURES,
    preset: PresetOption = None,
    train: TrainSettings = TrainSettings(),
    evaluate: EvaluateSettings = EvaluateSettings(),
    localize: LocalizeSettings = LocalizeSettings(),
    tile: TileSettings = TileSettings(),
):
    """Package a trained model as one portable folder: encoder, aggregators, threshold, model card."""
    from selfvitmil.commands import package as package_command

    source, choice = _to_learn_from(inputs)
    opened = _open(study, source, preset=preset, train=train, evaluate=evaluate, localize=localize, tile=tile)
    return _end([package_command.package(opened, out, choice, split, results)])


@app.command
def predict(
    model: Annotated[Path, Parameter(help="Folder that `package` wrote.")],
    /,
    *slides: Annotated[Path, Parameter(help="Slide files, or folders of slides.")],
    out: Annotated[Path, Parameter(help="Folder for predictions; those of earlier calls are kept.")],
    maps: Annotated[bool, Parameter(help="Write heatmaps, pictures and files for QuPath.")] = True,
    json: Annotated[
        bool, Parameter(help="Print the predictions of this call as JSON instead of a table.", negative="")
    ] = False,
    slide: SlideSettings = SlideSettings(),
    embed: EmbedSettings = EmbedSettings(),
    localize: LocalizeSettings = LocalizeSettings(),
    engine: EngineOption = EngineSettings(),
):
    """Predict new slides with a packaged model; warns about out-of-distribution slides."""
    from selfvitmil.commands import predict as predict_command
    from selfvitmil.package import open_package

    packaged = open_package(model)  # before torch is loaded: a wrong folder is said at once
    from selfvitmil.embed import workers_for
    from selfvitmil.engine import Engine

    flags = _typed(slide=slide, embed=embed, localize=localize, engine=engine)
    settings = predict_command.predict_settings(packaged, flags)
    with Engine(workers_for(settings.engine, settings.embed.device)) as workers:
        result = predict_command.predict(packaged, slides, out, settings, workers, maps=maps)
    if json:
        print(result.json, end="")
        return 3 if result.failures else 0
    return _end([result])


@app.command
def report(
    study: Study,
    /,
    *,
    out: Annotated[
        Path | None, Parameter(help="File or folder to write to; default report/index.html in the study.")
    ] = None,
    pseudonyms: Annotated[
        bool,
        Parameter(
            help="Replace names of slides and patients; the key stays in pseudonyms.csv of the study.", negative=""
        ),
    ] = False,
    results: Annotated[list[str] | None, Parameter(help="Names of the results to show; default all.")] = None,
    slides: Annotated[
        int | None, Parameter(help="Largest number of slides with their own section; default 40.")
    ] = None,
):
    """Write a self-contained HTML report: cohort, settings, metrics, heatmaps."""
    from selfvitmil.stages.report import report as write_page

    asked = {"out": out, "pseudonyms": pseudonyms, "results": results or (), "slides": slides}
    return _end([write_page(_open(study), **asked)])


@app.command
def demo(study: Study, /, *, engine: EngineOption = EngineSettings()):
    """Run the full pipeline on synthetic slides; no data needed."""
    from selfvitmil.commands import demo as demo_command

    demo_command.start_demo(study)
    opened = _open(study, engine=engine)
    with _workers(opened) as workers:
        return _end(demo_command.demo(study, opened.settings, workers))


def _open(root: Path, source: Any = None, **sections: Any) -> Any:
    """Return the study with the settings that were given as flags, and where its slides and labels come from."""
    from selfvitmil.study import open_study

    return open_study(root, _typed(**sections), source)


def _workers(study: Any, *, with_encoder: bool = False) -> Any:
    """Return the workers of a study, for a `with` statement: fewer where each needs a GPU for its encoder."""
    from selfvitmil.engine import Engine

    settings = study.settings
    if not with_encoder:
        return Engine(settings.engine)
    from selfvitmil.embed import workers_for

    return Engine(workers_for(settings.engine, settings.embed.device))


def _typed(**sections: Any) -> dict[str, Any]:
    """Return the flags that were given and nothing else: defaults must not override the study's file."""
    typed = {
        name: value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        for name, value in sections.items()
    }
    return {name: value for name, value in typed.items() if value not in (None, {})}


def _end(results: Iterable[StageResult]) -> int:
    """Print what was done; return the exit status."""
    status = 0
    for result in results:
        _show(result)
        status = 130 if result.interrupted else 3 if result.failures else status
    return status


def _show(result: StageResult) -> None:
    from rich.console import Console
    from rich.table import Table

    from selfvitmil.rendering import failure_line, render

    # Names of slides and figures in brackets are no markup, and `:x:` in a name is no picture.
    width = None if sys.stdout.isatty() else 160
    console = Console(soft_wrap=True, markup=False, emoji=False, highlight=False, width=width)
    words = render(result)
    if words.table:
        header, *rows = words.table
        table = Table(*header, box=None, pad_edge=False)
        for row in rows[:MAX_ROWS]:
            table.add_row(*row)
        console.print(table)
        if len(rows) > MAX_ROWS:
            console.print(f"... and {len(rows) - MAX_ROWS} more")
    for line in (*words.lines, *map(failure_line, result.failures[:MAX_ROWS])):
        console.print(line)
    if result.failures:
        console.print(f"{len(result.failures)} failed; see failures.csv")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the `selfvitmil` command; `arguments` default to those of the process."""
    given = sys.argv[1:] if arguments is None else arguments
    # Messages name folders, and `.` is no name.
    given = [str(Path(each).resolve()) if each.rstrip("/") in (".", "..") else each for each in given]
    try:
        status = app(given, exit_on_error=False, print_error=False, result_action="return_value")
    except cyclopts.CycloptsError as error:
        _complain(_usage(error))
        status = 2
    except SelfVitMilError as error:
        _complain(str(error))
        status = error.exit_status
    except KeyboardInterrupt:
        _complain("interrupted; finished work is kept, and the same command resumes")
        status = 130
    sys.exit(status if isinstance(status, int) else 0)


def _usage(error: cyclopts.CycloptsError) -> str:
    """Return what is wrong with the arguments, in words."""
    if isinstance(error, cyclopts.UnusedCliTokensError):
        return f"{' '.join(error.unused_tokens or ())}: more than this command takes. See its --help"
    if not isinstance(error.__cause__, ValidationError):
        return str(error)
    section = error.argument.name if error.argument is not None else "*"
    return f"{'--' if section == '*' else f'{section}.'}{describe(error.__cause__)}"


def _complain(message: str) -> None:
    print(f"selfvitmil: {message}", file=sys.stderr)


if __name__ == "__main__":
    main()
