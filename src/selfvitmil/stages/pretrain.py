"""The stage `pretrain`: train an encoder without labels, on slides that no classifier is tested on later.

A classifier that is tested on slides which its encoder was trained on is transductive, though no label was seen. So an
encoder is trained on the slides of the split `train`; where the splits are others (k-fold, Monte-Carlo, files), one
encoder is trained for every split on its training slides (`pretrain.per_split`), named `<name>_<split>`, and learning
takes for every split the features of its own. One encoder on all slides must be asked for (`pretrain.transductive`).
Where the cohort has no split, a held-out test set is proposed (`propose_split`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil.cohort import Cohort, SlideRow, Split, hold_out
from selfvitmil.cohort.splits import patients_by_class, split_table
from selfvitmil.cohort.table import listing
from selfvitmil.engine import announce, show_progress
from selfvitmil.errors import CohortError, ConfigError, EncoderError
from selfvitmil.settings import PretrainSettings, StudySettings, pretrain_defaults, read_toml, to_toml
from selfvitmil.stages.base import (
    Basis,
    CheckStatus,
    Engines,
    Estimate,
    MachineCheck,
    Pending,
    Progress,
    Snapshot,
    Stage,
    StageResult,
    passed,
    unknown,
)
from selfvitmil.store.files import read_json, read_json_lines, write_text
from selfvitmil.store.layout import SLIDES_FILE, StudyLayout
from selfvitmil.store.provenance import Freshness
from selfvitmil.study import Study, encoder_name, slides_of, split_encoders

if TYPE_CHECKING:
    from selfvitmil.commands.run import RunPlan
    from selfvitmil.encoder import Encoder
    from selfvitmil.pretrain.train import TrainedEncoder
    from selfvitmil.stages.measure import Measures


@dataclass(frozen=True)
class PretrainResult(StageResult):
    """What `pretrain` did."""

    encoders: Mapping[str, TrainedEncoder] = field(default_factory=dict[str, "TrainedEncoder"])
    """By name, in the order of training; empty in all but the first process under torchrun."""
    split_table: tuple[tuple[str, ...], ...] = ()
    """Slides and patients of a split that was proposed and stored, header first."""


@dataclass(frozen=True)
class SplitResult(StageResult):
    """A held-out test set."""

    table: tuple[tuple[str, ...], ...]
    """Slides and patients of every class in each split, header first."""


def pretrain(study: Study, name: str, images: Path | None = None) -> PretrainResult:
    """Train an encoder on the tiles of the training split (or on a folder of images); writes `encoders/<name>/`.

    Where one encoder would see test slides, or with `pretrain.per_split`, one is trained for every split
    (`encoders/<name>_<split>/`). Under torchrun every process calls this; the first one holds the lock and writes.
    """
    from selfvitmil.data.sources import ImageTiles

    if encoder_name(name) != name:
        raise ConfigError(
            f"encoder name {name!r} does not do as a folder's name",
            how=f"Try {encoder_name(name)!r}",
            code="invalid-name",
        )
    first = os.environ.get("RANK", "0") == "0"
    with study.lock("pretrain") if first else nullcontext():
        if images is not None:
            trained = _train(ImageTiles(images), study, name, f"images of {images.name}")
            return PretrainResult({name: trained} if first else {}, interrupted=not trained.finished)
        notes, table = propose_split(study, name)
        if first:
            study.store_cohort()
        settings, info = settle_scope(study.root, name, study.cohort, study.settings)
        study, notes = study.with_settings(settings), [*notes, *info]
        if first:
            announce(*notes)  # before hours of training
        encoders: dict[str, TrainedEncoder] = {}
        for run in encoder_runs(study.cohort, name, settings):
            source, without_tiles, trained_on = training_tiles(study, run)
            notes += without_tiles
            encoders[run.name] = _train(source, study, run.name, trained_on)
            if not encoders[run.name].finished:
                break
    interrupted = not all(trained.finished for trained in encoders.values())
    if not first:
        return PretrainResult(interrupted=interrupted)
    return PretrainResult(encoders, table, notes=tuple(notes), interrupted=interrupted)


def _train(source: Any, study: Study, name: str, trained_on: str) -> TrainedEncoder:
    """Train one encoder and write beside it which slides it has seen."""
    from selfvitmil.pretrain.train import Origin
    from selfvitmil.pretrain.train import pretrain as train

    first, settings = os.environ.get("RANK", "0") == "0", study.settings
    out = study.layout.encoder(name)
    origin = Origin(trained_on, settings.preset)
    with _watched(source, out, settings.pretrain) if first else nullcontext() as show:
        trained = train(source, out, settings.pretrain, origin, report=show)
    if first:
        # The encoder whose weights it started from may have seen others.
        seen = {*source.names, *slides_of(Path(settings.pretrain.init) / SLIDES_FILE)}
        write_text(out / SLIDES_FILE, "".join(f"{slide}\n" for slide in sorted(seen)))
        write_text(out / "settings.toml", to_toml(settings, {"preset", "slide", "stain", "tile", "pretrain"}))
    return trained


def training_tiles(study: Study, run: EncoderRun) -> tuple[Any, list[str], str]:
    """Return the tiles that an encoder may see, a note on slides that have none, and the words for its config."""
    from selfvitmil.data.sources import SlideTiles, TrainSlide
    from selfvitmil.slides import SlideRef

    settings = study.settings
    tables = {row.slide: study.layout.tile_table(study.tiling, row.slide) for row in run.rows}
    found = [row for row in run.rows if tables[row.slide].exists()]
    slides = [TrainSlide(SlideRef.of(row, settings.slide), tables[row.slide]) for row in found]
    missing = [row.slide for row in run.rows if row not in found]
    lines = [f"note: {len(missing)} slides have no tiles and are left out: {', '.join(missing)}"] if missing else []
    source = SlideTiles(slides, stain_method=settings.stain.method)
    return source, lines, f"{run.words}, {len(slides)} slides"


@contextmanager
def _watched(source: Any, out: Path, settings: PretrainSettings) -> Generator[Callable[[dict[str, Any]], None]]:
    """Yield a function that shows each line of metrics: steps of how many, tiles per second, time left, loss.

    The first alarm is printed at once, so that whoever watches can end a run that gets worse.
    """
    begun, alarmed = last_metrics(out).get("step", -1) + 1, False
    with show_progress("pretrain", "tiles", total_steps(source, settings), "steps", begun=begun) as progress:
        reached = begun

        def show(line: dict[str, Any]) -> None:
            nonlocal alarmed, reached
            if "alarm" in line and not alarmed:
                alarmed = True
                announce(f"pretrain: step {line['step']}, warning: {line['alarm']}")
            parts = [f"{key.replace('_', ' ')} {line[key]:.3g}" for key in SHOWN_METRICS if key in line]
            amount = (line["step"] + 1 - reached) * settings.batch
            reached = line["step"] + 1
            progress.reach(reached, amount, ", ".join(parts))

        yield show


def total_steps(source: Any, settings: PretrainSettings) -> int:
    """Return the length of a run in steps; a fall of the encoder's quality may end it sooner."""
    from selfvitmil.data.loader import order_of

    return settings.steps or settings.epochs * order_of(source, settings).steps_per_epoch


SHOWN_METRICS = (
    "loss",
    "teacher_entropy",
    "feature_rank",
    "quality",
    "knn20",
    "linear",
    "data_wait_share",
)
"""Metrics beside the counts, the most telling ones."""


def check_encoder(folder: Path, seen: Collection[str], settings: StudySettings) -> None:
    """ConfigError where a finished encoder of the study is not the one that the settings ask for.

    `seen` are the test slides that it, or of whose patients it, has seen.
    """
    name = folder.name
    if changed := changed_settings(folder, settings):
        raise ConfigError(
            f"encoders/{name} was made with other settings ({listing(changed, 4)})",
            "hours of training are not thrown away, so nothing was done",
            f"Give --name with a new name to train another one, --encoder {name} to go on with it as it is, or remove "
            "its folder",
            code="encoder-of-other-run",
        )
    if seen and not settings.pretrain.transductive:
        raise ConfigError(
            f"encoders/{name} was trained on slides of patients that are tested on now ({listing(seen, 4)})",
            "metrics on them could be too good, so nothing was done",
            "Give --name with a new name to train another encoder, or one for every split; or --encoder with this name "
            "to use it all the same: then all results are labelled transductive",
            code="encoder-saw-test-patients",
        )


def _method_defaults(pretrain: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON has them."""
    info = {key: pretrain[key] for key in ("init", "lora") if key in pretrain}
    return json.loads(json.dumps(pretrain_defaults(pretrain.get("method", PretrainSettings().method), **info)))


def changed_settings(folder: Path, settings: StudySettings) -> list[str]:
    """Settings of a finished encoder that are others now, as `pretrain.epochs 100 -> 50`."""
    from selfvitmil.pretrain.train import NOT_IN_HASH

    if not (folder / "settings.toml").exists():
        return []
    before, now = read_toml(folder / "settings.toml"), json.loads(settings.model_dump_json(exclude_none=True))
    defaults = json.loads(PretrainSettings().model_dump_json(exclude_none=True))
    for info in (before.setdefault("pretrain", {}), now["pretrain"]):  # older versions wrote defaults of the method
        info |= {key: value for key, value in _method_defaults(info).items() if key not in info}
    changed: list[str] = []
    for section, keys in (
        ("pretrain", set(PretrainSettings.model_fields) - NOT_IN_HASH | {"init"}),
        ("tile", {"mpp", "size_px"}),
        ("stain", {"method"}),
    ):
        old, new = before.get(section, {}), now[section]
        if section == "pretrain":  # a setting that an older version did not have was at its default
            old = {key: value for key, value in defaults.items() if key not in old and key in new} | old
        changed += [
            f"{section}.{key} {old.get(key)} -> {new.get(key)}" for key in sorted(keys) if old.get(key) != new.get(key)
        ]
    return changed


# ---------------------------------------------------------------------------------------------------- which slides


@dataclass(frozen=True)
class EncoderRun:
    """One encoder to train."""

    name: str
    """Its folder below encoders/."""
    rows: tuple[SlideRow, ...]
    """The slides that it may see."""
    words: str
    """Which these are, for the encoder's config."""


def encoder_runs(cohort: Cohort, name: str, settings: StudySettings) -> tuple[EncoderRun, ...]:
    """The encoders to train: one, or one for every split; ConfigError where there is no slide that one may see."""
    if settings.pretrain.transductive:
        return (EncoderRun(name, cohort.rows, "all slides of the cohort (transductive)"),)
    if settings.pretrain.per_split:
        return tuple(_run_of(split, cohort, name) for split in _draw(cohort, settings))
    rows = cohort.select(split="train").rows
    if not rows:
        raise ConfigError(
            "no slide of the cohort is in the split `train`",
            "self-supervision must not see slides that a classifier is tested on later",
            "Fill the column split of cohort.csv, add --pretrain.per-split for an encoder per split (it needs labels), "
            "--pretrain.transductive to use all slides, or give --encoder with one that is trained already",
            code="no-training-slides",
        )
    return (EncoderRun(name, rows, "train split"),)


def _run_of(split: Split, cohort: Cohort, name: str) -> EncoderRun:
    """The slides of all patients that the split trains on; slides without label and split too, if not of others."""
    train = set(split.train)
    others = {cohort[slide].patient for slide in (*split.val, *split.test)}
    free = {row.slide for row in cohort.rows if row.label is None and row.split is None and row.patient not in others}
    rows = tuple(row for row in cohort.rows if row.slide in train | free)
    return EncoderRun(f"{name}_{split.name}", rows, f"training slides of {split.name}")


def settle_scope(study: Path, name: str, cohort: Cohort, settings: StudySettings) -> tuple[StudySettings, list[str]]:
    """The settings with an encoder per split where one encoder would see test slides unasked; and a line that says so.

    An encoder of that name which is there already is left to `check_encoder`.
    """
    own = settings.pretrain
    rows = cohort.select(split="train").rows
    if own.transductive or own.per_split or StudyLayout(study).encoder_config(name).exists():
        return settings, []
    splits = tested_splits(cohort, settings)
    seen = any(_seen(split, [row.slide for row in rows], cohort) for split in splits)
    if not splits or (rows and not seen):
        return settings, []
    why = "the column split of cohort.csv names no training slides"
    if rows:
        why = "slides of the split `train` are test slides of these splits"
    line = (
        f"note: {why}, so an encoder is trained for each of {len(splits)} splits, on its training slides alone: "
        f"encoders/{name}_{splits[0].name} and so on. --pretrain.transductive trains one on all slides instead, and "
        "its results are labelled transductive"
    )
    return settings.model_copy(update={"pretrain": own.model_copy(update={"per_split": True})}), [line]


def tested_splits(cohort: Cohort, settings: StudySettings) -> tuple[Split, ...]:
    """The splits that learning will use, as far as the cohort's labels allow to draw them; else none."""
    try:
        return _draw(cohort, settings)
    except (CohortError, ConfigError):  # learning says what is wrong; self-supervision needs no labels
        return ()


def _draw(cohort: Cohort, settings: StudySettings) -> tuple[Split, ...]:
    from selfvitmil.evaluate.dataset import draw_splits

    return draw_splits(cohort, settings.train, 0.0)


def seen_test_slides(
    encoders: Mapping[str, Path], cohort: Cohort, splits: Sequence[Split]
) -> dict[str, tuple[str, ...]]:
    """Encoder -> test slides that it, or of whose patients it, has seen; `encoders` are folders by their names.

    An encoder `<name>_<split>` of several counts for its split alone. Without splits the column of the cohort counts.
    """
    test = tuple(row.slide for row in cohort.select(split="test").rows)
    seen: dict[str, tuple[str, ...]] = {}
    for name, folder in encoders.items():
        slides = slides_of(folder / SLIDES_FILE)
        own = [split for split in splits if len(encoders) == 1 or name.endswith(f"_{split.name}")]
        found = [slide for split in own or [Split("given", (), (), test)] for slide in _seen(split, slides, cohort)]
        if found:
            seen[name] = tuple(dict.fromkeys(found))
    return seen


def _seen(split: Split, slides: Sequence[str] | frozenset[str], cohort: Cohort) -> tuple[str, ...]:
    from selfvitmil.evaluate.dataset import seen_slides

    return seen_slides(split, frozenset(slides), cohort)


# ---------------------------------------------------------------------------------------------------- proposed split


TEST_FRACTION = 0.3


MIN_PATIENTS = 10
"""Of the rarest class for a proposal: fewer would leave a test set of one or two of its patients."""


def propose_split(study: Study, name: str) -> tuple[list[str], tuple[tuple[str, ...], ...]]:
    """Change the study's cohort to one with a proposed split, where the encoder `name` needs one and none is given.

    Returns notes and a table on it. The cohort stays as it is, with a note that says why, where a class has too few
    patients for a test set of its own. Nothing is written.
    """
    cohort, settings = study.cohort, study.settings
    own = settings.pretrain
    asked = own.transductive or own.per_split or settings.train.split != "auto"
    there = study.layout.encoder_config(name).exists() or bool(split_encoders(study.root, name))
    if asked or there or len(cohort.classes) < 2 or any(row.split for row in cohort.rows):
        return [], ()
    patients = patients_by_class(cohort)
    few = [f"{label} ({number})" for label, number in patients.items() if number < MIN_PATIENTS]
    if few:
        line = (
            f"note: there is no column split, and fewer than {MIN_PATIENTS} patients of {', '.join(few)}: too few for "
            "a held-out test set, so all are tested on in turn (k-fold). `selfvitmil split STUDY` holds some out anyway"
        )
        return [line], ()
    try:
        drawn = hold_out(cohort, test=TEST_FRACTION, seed=settings.train.seed)
    except CohortError:  # what is wrong with the labels is said where splits are made
        return [], ()
    how = (
        "the column split of cohort.csv holds it once `run` has begun. Change it there or with `selfvitmil split STUDY "
        "--overwrite --test 0.2 --seed 1`; --train.split k-fold cross-validates instead, with an encoder per fold"
    )
    words = (
        f"no column split was given, so one is proposed: {describe_split(drawn, TEST_FRACTION, settings.train.seed)}"
    )
    study.change_cohort(drawn)
    return [words, how], split_table(drawn)


def describe_split(cohort: Cohort, test: float, seed: int) -> str:
    number = {name: len({row.patient for row in cohort.select(split=name).rows}) for name in ("train", "test")}
    return (
        f"test set: {number['test']} of {sum(number.values())} patients ({test:.0%}), drawn by patient and stratified "
        f"by label, seed {seed}; {number['train']} patients to train on"
    )


# ---------------------------------------------------------------------------------------------------- stage


ACTIVATION_BYTES = 34
"""What a ViT keeps for the backward pass, for each token, width and block, in half precision."""


TRAINING_EFFICIENCY = 0.85
"""Share of the encoder's rate of operations that training with it reaches (0.47 against 0.55 of an H200's peak)."""


class Pretrain(Stage):
    """Train the study's own encoder, or one for every split."""

    name = "pretrain"
    runs_encoder = True
    done_when_nothing_pending = True

    def pending(self, plan: RunPlan) -> Pending:
        parts = [self._pending_run(plan, run) for run in plan.runs]
        todo = {name: why for part in parts for name, why in part.todo.items()}
        return Pending(todo, words="; ".join(part.words for part in parts))

    def _pending_run(self, plan: RunPlan, run: EncoderRun) -> Pending:
        name, folder = run.name, plan.layout.encoder(run.name)
        if not (folder / "config.json").exists():
            return self._pending_unfinished(plan, folder, run)
        check_encoder(folder, plan.seen.get(name, ()), plan.settings)
        stored = _stored_provenance(folder)
        if not _training_tiles_change(plan, run) and _freshness(plan, run, stored).is_up_to_date:
            return Pending(words=f"up to date (encoders/{name})")
        kept = (
            f"encoders/{name} is kept, though its tiles have changed since it was trained or another version of "
            "selfvitmil trained it; --name NEW trains another"
        )
        return Pending(words=kept)

    def _pending_unfinished(self, plan: RunPlan, folder: Path, run: EncoderRun) -> Pending:
        from selfvitmil.pretrain.train import changes_in_words
        from selfvitmil.runtime.training import read_checkpoint, read_metrics

        pretrain, todo = plan.settings.pretrain, {folder.name: "new"}
        length = f"{pretrain.steps} steps" if pretrain.steps else f"{pretrain.epochs} epochs"
        state = read_checkpoint(folder)
        if state is None:
            return Pending(todo, words=f"train encoders/{folder.name}, {length}")
        changes = "its tiles are rebuilt first"
        if not _training_tiles_change(plan, run):
            freshness = _freshness(plan, run, state)
            changes = "" if freshness.is_up_to_date else changes_in_words(freshness)
        if changes:
            raise ConfigError(
                f"encoders/{folder.name} was begun with other settings, other tiles or by another version: {changes}",
                f"its checkpoint of step {state['step']} does not belong to this run, and nothing was done",
                "Give --name with a new name, take the change back, or remove its folder to start again",
                code="checkpoint-of-other-run",
            )
        lines = read_metrics(folder)
        step = max(state["step"], lines[-1]["step"] + 1 if lines else 0)
        return Pending(todo, words=f"resume encoders/{folder.name} from step {step}, of {length}")

    def doctor(self) -> Iterable[MachineCheck]:
        return check_gpus()

    def estimate(self, plan: RunPlan, measures: Measures) -> Estimate:
        """All encoders that are still to be trained, one after the other."""
        todo = plan.pending(self.name).todo
        each = [_estimate_encoder(plan, measures, run) for run in plan.runs if run.name in todo]
        seconds, disk = sum(one.seconds for one in each), sum(one.disk for one in each)
        return replace(each[0], seconds=seconds, disk=disk, memory=max(one.memory for one in each))

    def run(self, plan: RunPlan, engines: Engines) -> PretrainResult:
        return pretrain(plan.study, plan.encoder)

    def status(self, snapshot: Snapshot) -> Iterable[Progress]:
        """Finished encoders, and how far training is by the last line of its metrics."""
        for folder in snapshot.layout.all_encoders():
            finished, last = (folder / "config.json").exists(), last_metrics(folder)
            info = [f"loss {last['loss']:.3f}"] if "loss" in last else []
            info += [f"{last['tiles_per_s']:.0f} tiles/s"] if "tiles_per_s" in last else []
            info += ["ALARM"] if "alarm" in last else []
            words = ["finished", *info]
            if not finished:
                kept = "with a checkpoint" if (folder / "state.pt").exists() else "no checkpoint yet"
                words = [f"not finished, step {int(last.get('step', -1)) + 1}", *info, kept]
            files = [folder / name for name in ("metrics.jsonl", "config.json", "state.pt")]
            yield snapshot.progress(self.name, folder, files, 1, done=int(finished), words=", ".join(words))


def _stored_provenance(folder: Path) -> dict[str, Any]:
    """Return what a finished encoder was built from; EncoderError where its config is damaged."""
    try:
        return read_json(folder / "config.json").get("selfvitmil", {}).get("provenance", {})
    except (OSError, ValueError, AttributeError) as error:
        raise EncoderError(
            f"{folder.name}: config.json cannot be read",
            str(error),
            "Copy the folder again, or remove it to train the encoder again",
            code="unreadable-encoder-config",
        ) from None


def _freshness(plan: RunPlan, run: EncoderRun, stored: Mapping[str, Any]) -> Freshness:
    """Return whether a stored encoder or checkpoint is the one that training would build now."""
    from selfvitmil.pretrain.train import Origin, run_freshness

    source, _, trained_on = training_tiles(plan.study, run)
    return run_freshness(source, plan.settings.pretrain, Origin(trained_on, plan.settings.preset), stored)


def _training_tiles_change(plan: RunPlan, run: EncoderRun) -> bool:
    changing = plan.pending("tile").changing
    return any(row.slide in changing for row in run.rows)


def untrained_network(settings: StudySettings) -> Encoder:
    """Return the network that would be pretrained; from scratch where its initial weights are not on this disk."""
    from selfvitmil.pretrain.learner import start_encoder

    own = settings.pretrain
    if own.init != "scratch" and not Path(own.init).exists():
        own = own.model_copy(update={"init": "scratch"})
    return start_encoder(own, settings.tile.size_px, 0)


LOW_GPU_GB = 8
"""Free GPU memory below which pretraining and embedding of a real study are likely to run out of it."""


def check_gpus() -> Iterable[MachineCheck]:
    """Multiply matrices on every GPU."""
    import torch

    yield passed("torch", torch.__version__)
    if torch.cuda.is_available():
        yield from (_check_gpu(index) for index in range(torch.cuda.device_count()))
        return
    why = "this torch is built without CUDA" if torch.version.cuda is None else "CUDA finds none"
    remedy = (
        "For an NVIDIA GPU: nvidia-smi must list it, and torch must be a CUDA build (see pytorch.org); without one, "
        "use a small encoder"
    )
    found = f"none ({why}): pretraining and embedding run on the CPU"
    yield MachineCheck("GPU", CheckStatus.WARN, found, "no-gpu", remedy)


def _check_gpu(index: int) -> MachineCheck:
    import torch

    name = f"GPU {index}"
    try:
        free, total = torch.cuda.mem_get_info(index)
        ones = torch.ones(64, 64, device=f"cuda:{index}")
        is_right = bool((ones @ ones == 64).all())
    except RuntimeError as error:
        found, remedy = f"unusable: {str(error).splitlines()[0]}", "Restart the machine or its driver; see nvidia-smi"
        return MachineCheck(name, CheckStatus.FAIL, found, "gpu-unusable", remedy)
    half = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bf16, fp16 is used"
    found = f"{torch.cuda.get_device_name(index)}, {total / 1e9:.0f} GB ({free / 1e9:.0f} free), {half}"
    if not is_right:
        found, remedy = f"{found}: a matrix product is wrong", "The device is defective: choose another one"
        return MachineCheck(name, CheckStatus.FAIL, found, "gpu-wrong-result", remedy)
    if free / 1e9 < LOW_GPU_GB:
        remedy = "Other processes use it, or it is small: lower --embed.batch, raise --pretrain.accumulate"
        return MachineCheck(name, CheckStatus.WARN, found, "low-gpu-memory", remedy)
    return passed(name, found)


def _estimate_encoder(plan: RunPlan, measures: Measures, run: EncoderRun) -> Estimate:
    from selfvitmil.data.loader import TileOrder
    from selfvitmil.data.views import view_recipes
    from selfvitmil.pretrain.learner import gflop_per_tile, patch_px_of
    from selfvitmil.pretrain.optim import resolve_hyperparameters
    from selfvitmil.runtime.training import read_metrics

    settings, own, encoder, gpu = plan.settings, plan.settings.pretrain, measures.encoder, measures.gpu
    counts = tuple(count for row in run.rows if (count := measures.tiles_of([row.slide])))
    if encoder is None or not counts:
        return unknown(on_gpu=gpu)
    order = TileOrder(counts, own.batch, own.seed, own.sampler, own.tiles_per_slide, own.resample)
    numbers = resolve_hyperparameters(own, sum(counts), max(order.steps_per_epoch, 1))
    done = read_metrics(Path(plan.sources[run.name]))
    steps = max(numbers.total_steps - (done[-1]["step"] + 1 if done else 0), 0)
    recipes = view_recipes(own, settings.tile.size_px, patch_px_of(encoder.network.backbone))
    # Encoders of other splits are trained under the same settings.
    logged = done or next(filter(None, (read_metrics(Path(plan.sources[each.name])) for each in plan.runs)), None)
    if logged:
        rate, basis = float(logged[-1]["tiles_per_s"]), Basis.RECORDED
    else:
        gflop = gflop_per_tile(encoder.network, own, recipes, numbers.out_dim)
        rate, basis = measures.with_reading(TRAINING_EFFICIENCY * encoder.gflop_per_s / gflop), Basis.DERIVED
    # Of every weight: itself, its gradient, Adam's two averages and the teacher's, 4 bytes each.
    weights = encoder.num_weights + 3 * own.head_width**2 + own.chosen("bottleneck") * numbers.out_dim
    at_once = own.batch / own.accumulate if gpu else own.batch  # a CPU may take the parts side by side
    kept = at_once * encoder.activations([recipe.size_px for recipe in recipes])
    memory = 20 * weights + kept * ACTIVATION_BYTES * (1 if gpu else 2)
    tile_bytes = 3 * sum(counts) * settings.tile.size_px**2
    memory += tile_bytes if tile_bytes <= own.keep_gb * 1e9 and not gpu else 0
    disk = 4 * encoder.num_weights + 16 * weights
    return Estimate(steps * own.batch / rate, disk, memory, basis, gpu)


def last_metrics(folder: Path) -> dict[str, Any]:
    """The last whole line of an encoder's metrics.jsonl; empty where there is none. Loads no torch."""
    lines, _ = read_json_lines(folder / "metrics.jsonl")
    return lines[-1] if lines else {}
