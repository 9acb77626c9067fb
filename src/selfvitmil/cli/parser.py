"""The commands: each parses its flags, calls one function of `stages` or `commands` and prints its result.

Stages are imported when their command runs, so that a command's `--help` and its errors stay quick.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import cyclopts
from cyclopts import App, Parameter
from pydantic import ValidationError

from selfvitmil import __version__
from selfvitmil.cli.flags import (
    ANY_FEATURES,
    ANY_SCALED_FEATURES,
    ENCODER_HELP,
    NO_LABELS,
    NO_SLIDES,
    NOTHING_TYPED,
    ONE_SCALE,
    STUDY_FOLDER_HELP,
    EngineOption,
    FeatureFlags,
    Flat,
    JsonOption,
    LabelColumnOption,
    LabelFlags,
    LesionsOption,
    OneScaleFlags,
    PresetOption,
    ResultsOption,
    ScaledFeatureFlags,
    SlideFlags,
    Study,
    WholeWay,
    asked_for,
    formatter,
    split_lists,
    to_learn_from,
    typed,
)
from selfvitmil.cli.output import complain, end, print_json, print_results, printing, say, show
from selfvitmil.cli.overview import COMMANDS, SUMMARY
from selfvitmil.errors import ArtefactError, ConfigError, SelfVitMilError
from selfvitmil.settings import (
    CompareSettings,
    EmbedSettings,
    EngineSettings,
    EvaluateSettings,
    LocalizeSettings,
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
    from selfvitmil.stages.base import StageResult

app = App(
    name="selfvitmil",
    version=__version__,
    help=SUMMARY,
    help_format="markdown",
    help_formatter=formatter,
    default_parameter=Parameter(consume_multiple=True),
    suppress_keyboard_interrupt=False,  # `_run` says what is kept
)


def command(function: Callable[..., int]) -> Callable[..., int]:
    """Register a command under the function's name; its help is its sentence in `COMMANDS` and its docstring."""
    name = function.__name__.replace("_", "-")
    app.command(function, name=name, help="\n\n".join(filter(None, (COMMANDS[name], inspect.getdoc(function)))))
    return function


@command
def synth(
    folder: Annotated[Path, Parameter(help="Where to write; must be new or empty.")],
    /,
    *,
    settings: Annotated[SynthSettings, Flat] = SynthSettings(),
    engine: EngineOption = EngineSettings(),
):
    from selfvitmil.commands import synth as synth_command
    from selfvitmil.engine import Engine

    with Engine(engine) as workers:
        return end([synth_command.synth(folder, settings, workers)])


@command
def check(
    study: Study,
    /,
    *,
    slides: SlideFlags = NO_SLIDES,
    slide: SlideSettings = SlideSettings(),
    engine: EngineOption = EngineSettings(),
):
    from selfvitmil.stages.check import check as check_slides

    opened = _open(study, slides.source(), slide=slide, engine=engine)
    with _workers(opened) as workers:
        return end([check_slides(opened, workers)])


@command
def split(
    study: Study,
    /,
    *,
    slides: SlideFlags = NO_SLIDES,
    test: Annotated[float, Parameter(help="Fraction of the patients of every class for the test set.")] = 0.3,
    seed: Annotated[int, Parameter(help="Random seed of the draw.")] = 0,
    overwrite: Annotated[bool, Parameter(help="Replace an existing split.", negative="")] = False,
):
    from selfvitmil.commands import split as split_command

    return end([split_command.split(_open(study, slides.source()), test, seed, overwrite=overwrite)])


@command
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
    from selfvitmil.stages.tile import tile as tile_slides

    flags = {"preset": preset, "tile": tile, "tissue": tissue, "stain": stain, "slide": slide, "engine": engine}
    opened = _open(study, slides.source(), **flags)
    with _workers(opened) as workers:
        return end([tile_slides(opened, workers)])


@command
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
    """With `--pretrain.per-split` there is one encoder for every split (`--train.split`, `--train.folds`).

    For several GPUs: `torchrun --nproc-per-node 4 -m selfvitmil pretrain STUDY`.
    """
    from selfvitmil.stages.pretrain import pretrain as train_encoder

    opened = _open(study, preset=preset, pretrain=pretrain, train=train, tile=tile, stain=stain, slide=slide)
    return end([train_encoder(opened, name or opened.settings.pretrain.method, images)])


@command
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
    from selfvitmil.stages.embed import embed as embed_slides

    opened = _open(study, preset=preset, embed=embed, tile=tile, stain=stain, slide=slide, engine=engine)
    with _workers(opened, with_encoder=True) as workers:
        return end([embed_slides(opened, encoder, workers)])


@command
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
    embed: EmbedSettings = EmbedSettings(),
    train: TrainSettings = TrainSettings(),
    tile: TileSettings = TileSettings(),
    engine: EngineOption = EngineSettings(),
):
    """Labels, patients and splits (`--train.split`) go with them as the tables that the tool reads."""
    from selfvitmil.commands import export as export_command

    opened = _open(study, embed=embed, train=train, tile=tile, engine=engine)
    with _workers(opened) as workers:
        return end([export_command.export(opened, encoder, out, to, workers, dtype)])


@command
def slide_embeddings(
    study: Study,
    /,
    *,
    inputs: OneScaleFlags = ONE_SCALE,
    labels: LabelFlags = NO_LABELS,
    pooling: Annotated[
        Literal["mean", "max"], Parameter(help="How tile embeddings become one, without --model.")
    ] = "mean",
    model: Annotated[
        Path | None,
        Parameter(
            help="Let a trained aggregator pool: a folder that `package` wrote, or one of models/. The embedding is "
            "what its slide classifier sees."
        ),
    ] = None,
    neighbors: Annotated[int, Parameter(help="Most similar slides of other patients to find for each slide.")] = 5,
    similar_to: Annotated[str | None, Parameter(help="Print the slides most like this one.")] = None,
    out: Annotated[
        Path | None, Parameter(help="Also write one table of all slides: a .csv, or an .h5ad for AnnData.")
    ] = None,
    pseudonyms: Annotated[
        bool, Parameter(help="Replace names of slides and patients in the table of --out.", negative="")
    ] = False,
    embed: EmbedSettings = EmbedSettings(),
    tile: TileSettings = TileSettings(),
    engine: EngineOption = EngineSettings(),
):
    """Report and viewer then show slides that are alike.

    For a linear probe: `selfvitmil compare STUDY --features FOLDER --compare.methods mean` with the folder it names.
    """
    from selfvitmil.commands import slide_embeddings as embeddings_command

    source, choice = to_learn_from(inputs, labels)
    opened = _open(study, source, embed=embed, tile=tile, engine=engine)
    asked: dict[str, Any] = {"pooling": pooling, "model": model, "neighbors": neighbors, "query": similar_to}
    with _workers(opened) as workers:
        found = embeddings_command.slide_embeddings(opened, choice, workers, **asked, out=out, pseudonyms=pseudonyms)
        return end([found])


@command
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
    from selfvitmil.stages.train import train as train_models

    source, choice = to_learn_from(inputs, labels)
    flags = {"train": train, "evaluate": evaluate, "tile": tile, "engine": engine}
    opened = _open(study, source, preset=preset, **flags)
    with _workers(opened) as workers:
        return end([train_models(opened, choice, workers)])


@command
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
    """Models that are missing or stale are trained first."""
    from selfvitmil.stages.evaluate import evaluate as evaluate_models
    from selfvitmil.stages.lesions import evaluate_lesions

    source, choice = to_learn_from(inputs, labels)
    flags = {"train": train, "evaluate": evaluate, "localize": localize, "tile": tile, "engine": engine}
    opened = _open(study, source, preset=preset, **flags)
    with _workers(opened) as workers:
        steps: list[Callable[[], StageResult]] = []
        for own, folder in opened.targets(name):
            steps.append(partial(evaluate_models, own, choice, workers, folder))
            steps += [partial(evaluate_lesions, own, choice, folder)] if lesions else []
        return end(step() for step in steps)


@command
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
    from selfvitmil.stages.compare import compare as compare_methods
    from selfvitmil.stages.lesions import compare_lesions

    source, choice = to_learn_from(inputs, labels)
    flags = {
        "compare": compare, "train": train, "evaluate": evaluate, "supervised": supervised, "embed": embed,
        "localize": localize, "tile": tile, "stain": stain, "slide": slide, "engine": engine,
    }  # fmt: skip
    opened = _open(study, source, preset=preset, **flags)
    with _workers(opened, with_encoder=True) as workers:
        steps: list[Callable[[], StageResult]] = []
        for own, folder in opened.targets(name):
            steps.append(partial(compare_methods, own, choice, workers, folder))
            steps += [partial(compare_lesions, own, choice, folder)] if lesions else []
        return end(_keeping(opened, steps, {"preset": preset, **flags}))


@command
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
    from selfvitmil.stages.localize import localize as draw_heatmaps

    source, choice = to_learn_from(inputs, labels)
    flags = {"train": train, "evaluate": evaluate, "localize": localize, "tile": tile, "slide": slide, "engine": engine}
    opened = _open(study, source, preset=preset, **flags)
    with _workers(opened) as workers:
        targets = opened.targets(name)
        return end(draw_heatmaps(own, choice, workers, folder, slides or ()) for own, folder in targets)


@command
def init(study: Study, /, *, preset: PresetOption = None):
    from selfvitmil.commands import init as init_command

    return end([init_command.init(study, preset or "default")])


@command
def run(
    study: Study,
    /,
    *,
    way: WholeWay = NOTHING_TYPED,
    dry_run: Annotated[
        bool, Parameter(help="Only print what would be done and what it takes, like `plan`.", negative="")
    ] = False,
    shard: Annotated[
        str | None,
        Parameter(
            help="`3/40`: be the third of forty processes, on any machines that see the folder, that share the slides. "
            "Does check, tile, and embed where the encoder exists; the last one writes the tables."
        ),
    ] = None,
    shard_expiry: Annotated[
        float, Parameter(help="With --shard: seconds without a sign of life after which a shard counts as dead.")
    ] = 300.0,
):
    from selfvitmil.commands import run as run_command
    from selfvitmil.study import open_study

    if dry_run:
        return plan(study, way=way)
    if shard is not None:
        return _run_shard(study, way, shard, shard_expiry)
    opened = open_study(study, way.flags(), way.source())
    with _workers(opened) as workers:
        return end(run_command.run(opened, way.request(), workers, way.flags()))


def _run_shard(study: Path, way: WholeWay, shard: str, expiry_s: float) -> int:
    from selfvitmil.commands.shards import Shard, run_shard
    from selfvitmil.study import open_study

    which = Shard.parse(shard, expiry_s)
    opened = open_study(study, way.flags(), way.source())
    with _workers(opened) as workers:
        return end(run_shard(opened, way.request(), which, workers, way.flags()))


@command
def sbatch(
    study: Study,
    /,
    *,
    way: WholeWay = NOTHING_TYPED,
    shards: Annotated[int, Parameter(help="Jobs of the array that tiles.")] = 10,
    embed_shards: Annotated[int, Parameter(help="Jobs of the array that embeds, each with one GPU.")] = 1,
    gpus: Annotated[int, Parameter(help="GPUs of the job that pretrains the encoder.")] = 1,
    cpus: Annotated[int, Parameter(help="CPUs of each job, for pretraining of each GPU.")] = 4,
    gpu: Annotated[str, Parameter(help="What Slurm calls a GPU: `gpu`, or with its kind `gpu:a100`.")] = "gpu",
):
    """Partition, account, memory, time limit, further directives and prologue are those of `--batch` (engine.toml)."""
    from selfvitmil.commands.sbatch import Jobs
    from selfvitmil.commands.sbatch import sbatch as write_script
    from selfvitmil.study import open_study

    opened = open_study(study, way.flags(), way.source())
    jobs = Jobs(shards, embed_shards, gpus, cpus, gpu)
    return end([write_script(opened, way.request(), jobs, way.flags())])


@command
def plan(
    study: Study,
    /,
    *,
    way: WholeWay = NOTHING_TYPED,
    power: Annotated[
        bool,
        Parameter(
            help="Show how wide confidence intervals will be with the patients of this cohort, and with more.",
            negative="",
        ),
    ] = False,
    width: Annotated[
        float, Parameter(help="With --power: width of the interval that the needed patients are counted for.")
    ] = 0.1,
):
    from selfvitmil.commands import plan as plan_command
    from selfvitmil.study import open_study

    if power:
        from selfvitmil.commands.power import power as power_command

        return end([power_command(open_study(study, way.flags(), way.source()), width)])
    return end([plan_command.plan(open_study(study, way.flags(), way.source()), way.request())])


@command
def status(study: Study, /, *, json: JsonOption = False):
    from selfvitmil.commands import status as status_command

    found = status_command.status(study)
    if json:
        return print_json(found.to_json())
    return end([found])


@command
def doctor(study: Annotated[Path | None, Parameter(help=STUDY_FOLDER_HELP)] = None, /, *, json: JsonOption = False):
    from selfvitmil.commands import doctor as doctor_command

    result = doctor_command.doctor(study)
    if json:
        print_json([asdict(check) for check in result.checks])
    else:
        show(result)
    return 3 if result.status == "FAIL" else 0


@command
def view(
    study: Annotated[Path, Parameter(help="Folder of the study, or the --out folder of `predict`.")],
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
    tokens: Annotated[
        Path | None,
        Parameter(help="File with a line `NAME TOKEN` for every user who may look; instead of one token for all."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        Parameter(
            help="Further names under which browsers reach the viewer, for instance that of a reverse proxy; these "
            "need a token."
        ),
    ] = None,
    base_path: Annotated[
        str, Parameter(help="Path below which a reverse proxy offers the viewer, for instance /viewer.")
    ] = "/",
    browser: Annotated[bool, Parameter(help="Open a browser.")] = True,
    slide: SlideSettings = SlideSettings(),
):
    from selfvitmil.commands import view as view_command

    opened = _open(study, slide=slide)
    if export is not None:
        shown, hidden = slides or (), pseudonyms
        found = view_command.export_view(opened, export, slides=shown, top_mpp=export_mpp, pseudonyms=hidden, say=say)
        return end([found])
    if slides:
        raise ConfigError("--slides goes with --export only", "the viewer shows all slides", code="conflicting-flags")
    place: dict[str, Any] = {"host": host, "port": port, "require_token": require_token, "base_path": base_path}
    place |= {"allowed_hosts": allowed_host or (), "tokens": tokens, "browser": browser, "pseudonyms": pseudonyms}
    return end([view_command.view(opened, **place, say=say)])


@command
def package(
    study: Annotated[Path, Parameter(help="Folder of the study.")],
    /,
    *,
    out: Annotated[Path, Parameter(help="Folder of the package; must be new or empty.")],
    split: Annotated[
        str | None,
        Parameter(help="Split whose models are packaged, or `ensemble` for all; needed if there are several."),
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
    from selfvitmil.commands import package as package_command

    source, choice = to_learn_from(inputs)
    opened = _open(study, source, preset=preset, train=train, evaluate=evaluate, localize=localize, tile=tile)
    return end([package_command.package(opened, out, choice, split, results)])


@command
def predict(
    model: Annotated[Path, Parameter(help="Folder that `package` wrote.")],
    /,
    *slides: Annotated[Path, Parameter(help="Slide files, or folders of slides.")],
    out: Annotated[Path, Parameter(help="Folder for predictions; those of earlier calls are kept.")],
    labels: Annotated[
        Path | None,
        Parameter(
            help="Table (csv or xlsx) with labels of the slides: evaluate the model on them, in validation/ of --out. "
            "Labels change no prediction."
        ),
    ] = None,
    label_column: LabelColumnOption = None,
    label_map: Annotated[
        list[str] | None,
        Parameter(
            help="What a label of the table means in the model's classes, as LABEL=CLASS, for instance "
            "malignant=tumor; without a class its slides are left out. Repeat the flag for several."
        ),
    ] = None,
    by: Annotated[
        list[str] | None,
        Parameter(help="Columns of --labels by whose values subgroups are evaluated, for instance site,scanner."),
    ] = None,
    against: Annotated[
        Path | None, Parameter(help="Another package to compare with on the same slides (paired DeLong test).")
    ] = None,
    maps: Annotated[bool, Parameter(help="Write heatmaps, pictures and files for QuPath.")] = True,
    watch: Annotated[
        float | None,
        Parameter(help="Look into the folders every so many seconds and predict new slides, until interrupted."),
    ] = None,
    json: Annotated[
        bool, Parameter(help="Print the predictions of this call as JSON instead of a table.", negative="")
    ] = False,
    slide: SlideSettings = SlideSettings(),
    embed: EmbedSettings = EmbedSettings(),
    localize: LocalizeSettings = LocalizeSettings(),
    engine: EngineOption = EngineSettings(),
):
    from selfvitmil.commands import predict as predict_command
    from selfvitmil.commands.validate import external_labels, validate
    from selfvitmil.package import open_package

    packaged = open_package(model)  # before torch is loaded: a wrong folder is said at once
    other = None if against is None else open_package(against)
    truth = external_labels(
        packaged, slides, labels, label_column=label_column, label_map=label_map or (), by=by or (), other=other
    )
    from selfvitmil.engine import Engine
    from selfvitmil.runtime.device import workers_for

    flags = typed(slide=slide, embed=embed, localize=localize, engine=engine)
    settings = predict_command.predict_settings(packaged, flags)
    if watch is not None:
        from selfvitmil.commands.watch import watch as watch_folders

        if json or labels is not None or other is not None:
            why = "a watcher only predicts"
            raise ConfigError(
                "--watch with --json, --labels or --against", why, "Leave these out", code="conflicting-flags"
            )
        with Engine(workers_for(settings.engine, settings.embed.device)) as workers:
            return end(watch_folders(packaged, slides, out, settings, workers, watch, maps=maps))
    with Engine(workers_for(settings.engine, settings.embed.device)) as workers:
        results: list[Any] = [predict_command.predict(packaged, slides, out, settings, workers, maps=maps)]
        if other is not None:
            own = predict_command.predict_settings(other, flags)
            results.append(predict_command.predict(other, slides, out, own, workers, maps=maps))
    failed = any(result.failures for result in results)
    if truth is not None:
        results.append(validate(packaged, out, truth, other))
    if json:
        say(results[0].json.rstrip("\n"))
        return 3 if failed else 0
    return end(results)


@command
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
    from selfvitmil.stages.report import report as write_page

    asked: dict[str, Any] = {"out": out, "pseudonyms": pseudonyms, "results": results or (), "slides": slides}
    opened = _open(study)
    with _workers(opened) as workers:
        return end([write_page(opened, **asked, engine=workers)])


@command
def demo(study: Study, /, *, engine: EngineOption = EngineSettings()):
    from selfvitmil.commands import demo as demo_command

    demo_command.start_demo(study)
    opened = _open(study, engine=engine)
    with _workers(opened) as workers:
        return end(demo_command.demo(study, opened.settings, workers))


def _open(root: Path, source: Any = None, **sections: Any) -> Any:
    """Return the study with the settings that were given as flags, and where its slides and labels come from."""
    from selfvitmil.study import open_study

    return open_study(root, typed(**sections), source)


KEPT = ("preset", "train", "evaluate", "tile", "stain", "slide")
"""Sections that a comparison shares with the commands after it: with other values these would not find its models."""
ONE_COMMAND = ("aggregator", "options")
"""Training settings that choose a method, so that they are for one command."""


def _keeping(study: Any, steps: Iterable[Callable[[], StageResult]], flags: dict[str, Any]) -> Iterator[StageResult]:
    """Yield the results of steps; what was given as flags is kept in the study once the first step was done."""
    from selfvitmil.stages.base import StageResult
    from selfvitmil.study import remember_settings

    given = {key: value for key, value in typed(**flags).items() if key in KEPT}
    if "train" in given:
        given["train"] = {key: value for key, value in given["train"].items() if key not in ONE_COMMAND}
    kept = {key: value for key, value in given.items() if value}
    for number, step in enumerate(steps):
        yield step()
        if number == 0:
            yield from (StageResult(notes=(note,)) for note in remember_settings(study.root, kept))


def _workers(study: Any, *, with_encoder: bool = False) -> Any:
    """Return the workers of a study, for a `with` statement: fewer where each needs a GPU for its encoder."""
    from selfvitmil.engine import Engine

    settings = study.settings
    if not with_encoder:
        return Engine(settings.engine)
    from selfvitmil.runtime.device import workers_for

    return Engine(workers_for(settings.engine, settings.embed.device))


OWN_JSON = ("status", "doctor", "predict")
"""Commands whose `--json` prints data of their own."""


def call(arguments: Sequence[str]) -> int:
    """Run the command that the arguments ask for; return the exit status."""
    try:
        given, how = output_flags(asked_for(split_lists(arguments)))
        with printing(**how):
            status, error = run_command(given)
            if how["as_json"]:
                print_results(next(iter(given), ""), status, error)
    except SelfVitMilError as error:
        complain(str(error))
        status = error.exit_status
    return status


def run_command(arguments: Sequence[str]) -> tuple[int, dict[str, str] | None]:
    """Run a command; return the exit status, and the error that ended it."""
    # Messages name folders, and `.` is no name.
    given = [str(Path(each).resolve()) if each.rstrip("/") in (".", "..") else each for each in arguments]
    try:
        status = app(given, exit_on_error=False, print_error=False, result_action="return_value")
    except cyclopts.CycloptsError as error:
        complain(message := _usage(error))
        return 2, {"what": message, "code": "usage"}
    except SelfVitMilError as error:
        complain(str(error))
        parts = {"what": error.what, "why": error.why, "how": error.how, "code": error.code}
        return error.exit_status, parts
    except KeyboardInterrupt:
        complain(INTERRUPTED)
        return 130, None
    except OSError as error:
        if error.filename is None:  # of a socket or a pipe
            raise
        complain(str(own := _of_drive(error)))
        return own.exit_status, {"what": own.what, "why": own.why, "how": own.how, "code": own.code}
    status = status if isinstance(status, int) else 0
    if status == 130:
        complain(INTERRUPTED)
    return status, None


def _of_drive(error: OSError) -> ArtefactError:
    """Return the error of a drive or a file that no reader made its own, such as an I/O error in mid-file."""
    from selfvitmil.store.failures import Failure

    failure = Failure.of("", "", error)
    return ArtefactError(failure.reason, how=failure.remedy, code="file-not-accessible")


INTERRUPTED = "interrupted; finished work is kept, and the same command resumes"


def output_flags(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the arguments without the flags that every command has, and what these say."""
    how: dict[str, Any] = {"quiet": False, "as_json": False, "log_file": None}
    rest: list[str] = []
    given = iter(arguments)
    command = next(iter(arguments), "")
    for each in given:
        name, _, value = each.partition("=")
        if each == "--quiet":
            how["quiet"] = True
        elif each == "--json" and command not in OWN_JSON:
            how["as_json"] = True
        elif name == "--log-file":
            value = value or next(given, "")
            if not value:
                raise ConfigError("--log-file needs the name of a file", code="log-file")
            how["log_file"] = Path(value)
        else:
            rest.append(each)
    return rest, how


def _usage(error: cyclopts.CycloptsError) -> str:
    """Return what is wrong with the arguments, in words."""
    if isinstance(error, cyclopts.UnusedCliTokensError):
        return f"{' '.join(error.unused_tokens or ())}: more than this command takes. See its --help"
    if not isinstance(error.__cause__, ValidationError):
        return str(error)
    section = error.argument.name if error.argument is not None else "*"
    return f"{'--' if section == '*' else f'{section}.'}{describe(error.__cause__)}"
