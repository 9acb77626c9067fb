"""Self-supervised training of an encoder: from tile tables (or a folder of images) to the folder of an encoder.

Now and then the quality of the embeddings is measured without labels (`quality`); the weights with the best quality
become the encoder, and a run whose quality fell ends early.

The loop is plain PyTorch. Under `torchrun` every process takes an equal part of each batch; `batch` is the size over
all processes, so more GPUs make a run faster and do not change it (up to rounding; which paths are dropped differs).
Batch norms of a ResNet see the tiles of all processes, but each part of `accumulate` by itself. Everything random
depends on (seed, step, tile) or (seed, step, process), so a checkpoint holds weights, optimizer, centre and step, and
no state of any generator.

Resuming: when the folder holds a checkpoint `state.pt` of the same settings and tiles, the run continues from it; on a
CPU with the same number of threads the weights are bit-identical to those of an uninterrupted run. A finished run is
left alone. Where settings or tiles are others, the error names every change.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from selfvitmil.data.loader import (
    TileLoader,
    channel_statistics,
    default_workers,
    order_of,
    read_plain_sample,
)
from selfvitmil.data.sources import TileSource
from selfvitmil.data.views import encoder_tile_px, view_recipes
from selfvitmil.encoder import Encoder, EncoderConfig, load_encoder, save_encoder
from selfvitmil.errors import ConfigError, EncoderError
from selfvitmil.pretrain import learner as learning
from selfvitmil.pretrain.learner import Learner
from selfvitmil.pretrain.objectives import RECENT_LINES, LossOutput
from selfvitmil.pretrain.optim import Hyperparameters, merged, resolve_hyperparameters
from selfvitmil.pretrain.quality import (
    CHANCE_WITHIN,
    Ending,
    QualityHistory,
    QualityMonitor,
    plan_evaluations,
    read_sample,
)
from selfvitmil.pretrain.step import TrainingStep, ViewOptions
from selfvitmil.runtime.device import AsyncValues, Worker, arithmetic, distributed, peak_tflops, stop_on_signal
from selfvitmil.runtime.training import (
    MetricsLog,
    read_checkpoint,
    read_metrics_and_damage,
    tensorboard_writer,
    write_checkpoint,
)
from selfvitmil.settings import PretrainSettings
from selfvitmil.store.files import hash_of
from selfvitmil.store.provenance import Change, Freshness, Provenance, compare_digests, describe_changes

if TYPE_CHECKING:
    from selfvitmil.pretrain.probe import ProbeTable

STAGE_VERSION = 3
"""Part of the provenance of a run: raised when the same settings come to mean something else."""
ALARM_FROM_STEP = 500
"""No alarm before: in its first hundreds of steps a healthy run cannot be distinguished from a collapsed one."""
PROBES = 10
"""Probes of a run, where `probe_epochs` does not say how many."""
WAIT_FOR_FIRST = timedelta(days=1)
"""How long other processes wait while the first one probes or measures; those that wait for a gradient give up in
minutes."""
MOST_CHANGES = 4
"""Changes that an error names; it counts the others."""
NOT_IN_HASH = {
    "per_split",
    "workers",
    "keep_gb",
    "checkpoint_minutes",
    "log_steps",
    "tensorboard",
    "probe_table",
    "probe_epochs",
    "compile",
    "init",
}
"""Settings that change neither which weights come out nor what they mean (`init` counts by its weights,
`per_split` by its slides)."""


@dataclass(frozen=True)
class Origin:
    """What only the caller knows of an encoder's training, for its config."""

    trained_on: str
    """For instance `train split of camelyon16` or `transductive`."""
    preset: str = "default"


@dataclass(frozen=True)
class TrainedEncoder:
    """Result of a pretraining run."""

    folder: Path
    step: int
    total_steps: int
    finished: bool
    """False when a signal stopped the run; the same call resumes from its checkpoint."""
    note: str
    """`built`, `up to date`, `resumed from step ...` or `stopped by a signal at step ...`."""
    metrics: dict[str, Any]
    """The last line of metrics.jsonl."""
    warnings: tuple[str, ...]
    ending: Ending | None = None
    """Which weights became the encoder, and whether the run was stopped early; None while it is not finished."""


def pretrain(
    source: TileSource,
    out: Path,
    settings: PretrainSettings,
    origin: Origin,
    *,
    device: str | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
    snapshots: Mapping[int, Path] | None = None,
) -> TrainedEncoder:
    """Train an encoder and write its folder `out`, or resume a run that was begun there.

    `source` is `sources.SlideTiles(...)` or `sources.ImageTiles(...)`; `report` gets every line of metrics when it is
    written. `snapshots` are folders by number of steps: after so many of them the encoder is written there too. Under
    torchrun every process calls this with the same arguments; the first writes. Raises ConfigError where the folder
    holds an encoder or a checkpoint of other settings or tiles.
    """
    with ExitStack() as stack:
        worker = stack.enter_context(distributed(device))
        stack.enter_context(
            arithmetic(worker.device, precision=settings.precision, deterministic=settings.deterministic)
        )
        devices = [worker.device] if worker.device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices))
        stop = stack.enter_context(stop_on_signal())
        run = PretrainRun(source, out, settings, origin, worker, stop)
        if run.is_finished():
            lines, damaged = read_metrics_and_damage(out)
            if damaged:
                run.warnings.append(f"{_damaged_lines(damaged)} left out of the report's curves; the encoder is whole")
            if settings.probe_table is not None and not any("knn20" in line for line in lines):
                run.warnings.append(
                    f"{settings.probe_table.name} was not looked at: labelled tiles are tried out while an encoder is "
                    "trained, and this one is finished. Give --name with a new name to train another"
                )
            return run.result("up to date", True, lines[-1] if lines else {})
        note = run.prepare()
        finished = run.train(report or (lambda line: None), snapshots or {})
        last = run.metrics.lines[-1] if run.metrics is not None and run.metrics.lines else {}
        if finished:
            run.finish()
        else:
            note = f"stopped by a signal at step {run.step} of {run.hyperparameters.total_steps}"
        if worker.world_size > 1:
            dist.barrier()
        return run.result(note, finished, last)


def run_freshness(
    source: TileSource, settings: PretrainSettings, origin: Origin, stored: Mapping[str, Any]
) -> Freshness:
    """Return whether an encoder or a checkpoint is the one that this run would train, and what changed if not.

    `stored` is the checkpoint, or the `provenance` of the encoder's config.
    """
    worker = Worker(torch.device("cpu"))
    return PretrainRun(source, Path(), settings, origin, worker, threading.Event()).freshness(stored)


# ---------------------------------------------------------------------------------------------------- the run


def _damaged_lines(number: int) -> str:
    lines, are = ("line", "is") if number == 1 else ("lines", "are")
    return f"{number} {lines} of metrics.jsonl cannot be read, as after a power failure, and {are}"


class _Checked(NamedTuple):
    """What is checked after every step, as the mean over all processes."""

    loss: float
    stop: float
    """Above 0 where a process was asked to stop."""
    broken: float
    """Above 0 where a weight is not finite."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and not self.broken


class PretrainRun:
    """One training run: its parts, and the phases it goes through."""

    def __init__(
        self,
        source: TileSource,
        out: Path,
        settings: PretrainSettings,
        origin: Origin,
        worker: Worker,
        stop: threading.Event,
    ):
        self.source, self.out, self.settings, self.origin, self.worker = source, out, settings, origin, worker
        self.stop = stop
        self.step = 0
        self.warnings: list[str] = []
        self.metrics: MetricsLog | None = None
        self.ending: Ending | None = None
        self.plain_tiles: tuple[torch.Tensor, ...] | None = None
        self.order = order_of(source, settings)
        self._check_size()
        self.hyperparameters: Hyperparameters = resolve_hyperparameters(
            settings, sum(source.counts), self.order.steps_per_epoch
        )
        self.workers = default_workers() if settings.workers is None else settings.workers
        self.encoder = learning.start_encoder(settings, source.size_px, settings.seed)
        self.warnings += self.encoder.warnings
        self.provenance = self._provenance()
        self.made_from = self._digest()

    def _check_size(self) -> None:
        settings, world_size = self.settings, self.worker.world_size
        if settings.batch % (world_size * settings.accumulate):
            raise ConfigError(
                f"pretrain.batch {settings.batch} does not divide among {world_size} processes "
                f"with {settings.accumulate} parts each",
                "every process takes an equal part",
                f"Use a multiple of {world_size * settings.accumulate}",
                code="batch-indivisible",
            )
        if settings.batch // (world_size * settings.accumulate) < 2:
            raise ConfigError(
                f"pretrain.batch {settings.batch} leaves one tile for each part",
                "the rank and spread of embeddings are measured within a part",
                f"Use at least {2 * world_size * settings.accumulate}",
                code="batch-too-small",
            )
        if self.order.steps_per_epoch < 1:
            raise ConfigError(
                f"there are {self.order.tiles_per_epoch} tiles to train on, and a batch takes {settings.batch}",
                "not even one batch can be filled",
                "Tile more slides, or lower pretrain.batch",
                code="too-few-tiles",
            )
        if len(self.source.counts) == 1 and self.source.run > 1:
            self.warnings.append(
                f"all tiles come from one slide, {self.source.names[0]}: the encoder may overfit to it"
            )
        if self.order.steps_per_epoch < 10:
            self.warnings.append(
                f"an epoch has {self.order.steps_per_epoch} steps: {self.order.tiles_per_epoch} tiles are few "
                f"for a batch of {settings.batch}"
            )

    def result(self, note: str, finished: bool, last: dict[str, Any]) -> TrainedEncoder:
        total = self.hyperparameters.total_steps
        ending = self.ending if finished else None
        return TrainedEncoder(self.out, self.step, total, finished, note, last, tuple(self.warnings), ending)

    # ------------------------------------------------------------------------------------------------ provenance

    def _provenance(self) -> Provenance:
        """Return everything that the weights depend on, by name."""
        source = self.source
        inputs = {
            "starting weights": self.encoder.identity(),
            **source.inputs(),
            "tile height": source.shape_px[0],
            "tile width": source.shape_px[1],
            "number of tiles": sum(source.counts),
            "stain normalization": source.stain_method,
            "training slides": self.origin.trained_on,
            "preset": self.origin.preset,
        }
        settings = self.settings.model_dump(mode="json", exclude=NOT_IN_HASH)
        return Provenance("pretrain", STAGE_VERSION, {"pretrain": settings}, inputs)

    def _digest(self) -> str:
        """Return one hash of the same, in the form that encoders and checkpoints have stored since version 0.1."""
        source = self.source
        data = [*source.inputs().values(), list(source.shape_px), list(source.counts), source.stain_method]
        settings = self.provenance.settings["pretrain"]
        return hash_of(settings, self.provenance.inputs["starting weights"], data, asdict(self.origin), STAGE_VERSION)

    def freshness(self, stored: Mapping[str, Any]) -> Freshness:
        """Return whether a checkpoint or an encoder's stored provenance is of this run, and what changed if not.

        Those that store one hash only cannot name the change.
        """
        named: tuple[Change, ...] = ()
        if "provenance" in stored:
            named = self.provenance.compare(Provenance("pretrain", **stored["provenance"])).changes
        return compare_digests(stored.get("made_from"), self.made_from, named)

    def is_finished(self) -> bool:
        """Whether the folder holds the encoder of this run. Raises ConfigError when it holds another one."""
        if not (self.out / "config.json").exists():
            return False
        stored: dict[str, Any] = load_encoder(self.out).config.provenance
        freshness = self.freshness(stored)
        if freshness.is_up_to_date:
            self.ending = Ending(**{each.name: stored[each.name] for each in fields(Ending)})
            self.step = self.ending.ended_step
            return True
        state = read_checkpoint(self.out)  # its last checkpoint names the changes
        if state is not None and state["made_from"] == stored.get("made_from"):
            freshness = self.freshness(state)
        raise ConfigError(
            f"{self.out.name}: this encoder was trained with other settings, other tiles or by another version: "
            f"{changes_in_words(freshness)}",
            "training does not overwrite it",
            "Choose another name, or remove its folder to train it again",
            code="encoder-of-other-run",
        )

    def _read_state(self) -> dict[str, Any] | None:
        state = read_checkpoint(self.out)
        if state is None:
            return None
        freshness = self.freshness(state)
        if not freshness.is_up_to_date:
            raise ConfigError(
                f"{self.out.name}: training was begun with other settings, other tiles or by another version: "
                f"{changes_in_words(freshness)}",
                f"its state.pt of step {state['step']} does not belong to this run",
                "Choose another name, or remove its folder to start again",
                code="checkpoint-of-other-run",
            )
        return state

    # ------------------------------------------------------------------------------------------------ before

    def prepare(self) -> str:
        """Build everything, and load the checkpoint if there is one."""
        settings, device = self.settings, self.worker.device
        if settings.tensorboard:
            tensorboard_writer()  # fails now rather than after the channel statistics
        state = self._read_state()
        recipes = view_recipes(settings, self.source.size_px, learning.patch_px_of(self.encoder.backbone))
        self.tile_px = encoder_tile_px(recipes[0], self.source.size_px)
        if self.tile_px != self.source.size_px and self.source.mpp is not None:
            self.warnings.append(
                f"large views have {self.tile_px} px and tiles {self.source.size_px}: the encoder is for "
                f"tiles of {self.tile_px} px at {self._tile_mpp():g} microns per pixel"
            )
        if self.worker.world_size > 1:
            self.waiting_group: Any = dist.new_group(backend="gloo", timeout=WAIT_FOR_FIRST)
        self._prepare_probes()
        self.views = ViewOptions(recipes, *self._channel_statistics(state))
        self.schedules = self.hyperparameters.schedules(settings)
        self.learner = Learner(self.encoder, settings, self.hyperparameters, settings.seed).to(device)
        self.do_step = TrainingStep(self.learner, settings, self.hyperparameters, self.worker, self.views)
        if state is not None:
            self.do_step.load(state)
            self.step = state["step"]
        self.do_step.distribute()
        self.do_step.compile(self.hyperparameters.total_steps - self.step)
        self.gflop = learning.gflop_per_tile(self.encoder, settings, recipes, self.hyperparameters.out_dim)
        self.peak = peak_tflops(device, self.do_step.dtype)
        self._prepare_quality(state)
        return "built" if state is None else f"resumed from step {self.step}"

    def _channel_statistics(self, state: dict[str, Any] | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
        settings = self.settings
        if state is not None:
            return tuple(state["mean"]), tuple(state["std"])
        if settings.mean is not None and settings.std is not None:
            return settings.mean, settings.std
        if settings.init != "scratch":  # weights know the colours they were trained with
            return self.encoder.config.mean, self.encoder.config.std
        values: list[Any] = [None]
        if self.worker.is_first:
            values = [channel_statistics(self.source, settings.measure_tiles, settings.seed, self.workers)]
        if self.worker.world_size > 1:
            dist.broadcast_object_list(values, device=self.worker.device)
        return values[0]

    def _prepare_probes(self) -> None:
        """Read the labelled tiles, in the process that will probe, and set the steps of the probes."""
        settings, hyperparameters = self.settings, self.hyperparameters
        self.probe_table: ProbeTable | None = None
        self.probe_steps = -(-hyperparameters.total_steps // PROBES)
        if settings.probe_epochs is not None:
            self.probe_steps = settings.probe_epochs * hyperparameters.steps_per_epoch
        if settings.probe_table is None or not self.worker.is_first:
            return
        from selfvitmil.pretrain.probe import read_probe_table

        self.probe_table = table = read_probe_table(settings.probe_table)
        size = self.tile_px
        if table.shape_px != (size, size):
            raise ConfigError(
                f"{settings.probe_table.name}: its tiles have {table.shape_px[1]} x {table.shape_px[0]} px",
                f"this encoder is for tiles of {size} x {size} px",
                "Crop or resize them to that size",
                code="image-size-mismatch",
            )
        self.warnings += table.warnings
        if self.source.stain_method != "none":
            self.warnings.append(
                f"{settings.probe_table.name}: its tiles are used with their own colours, while the training tiles are "
                "stain-normalized"
            )

    def _prepare_quality(self, state: dict[str, Any] | None) -> None:
        """Plan when the quality is measured, and make the views for it in the process that will measure."""
        settings, total, recipe = self.settings, self.hyperparameters.total_steps, self.views.recipes[0]
        view = learning.forward_gflop(self.encoder, recipe.size_px)
        plan = plan_evaluations(total, total * settings.batch * self.gflop, view, sum(self.source.counts))
        history = QualityHistory(plan.patience if plan else 0, first_step=self.hyperparameters.warmup_steps)
        remedy = self.learner.objective.remedy
        keeps = settings.keep == "best"
        self.quality = QualityMonitor(plan, history, remedy, keeps=keeps, stops=settings.stop_early)
        if self.worker.world_size > 1:
            self.quality.group = self.waiting_group
        if state is not None:
            self.quality.load(state["quality"])
        if plan is not None and self.worker.is_first:
            self.quality.sample = read_sample(self.source, recipe, plan.tiles, settings.seed, self.workers)

    # ------------------------------------------------------------------------------------------------ steps

    def train(self, report: Callable[[dict[str, Any]], None], snapshots: Mapping[int, Path]) -> bool:
        """Do all remaining steps; False if a signal ended them. A checkpoint is written in either case."""
        worker, total = self.worker, self.hyperparameters.total_steps
        if worker.is_first:
            self.metrics = MetricsLog(self.out, self.step, tensorboard=self.settings.tensorboard)
            if self.metrics.damaged:
                self.warnings.append(
                    f"{_damaged_lines(self.metrics.damaged)} removed; lines from step {self.step} on are written again"
                )
        if self.quality.ends:  # killed after the checkpoint of its early end
            return True
        loader = TileLoader(
            self.source,
            self.order,
            self.step,
            total,
            rank=worker.rank,
            world_size=worker.world_size,
            workers=self.workers,
            device=worker.device,
            most_kept_bytes=int(self.settings.keep_gb * 1e9),
        )
        self.throughput = _Throughput(self.step)
        unfitted, pending, stopping = 0, None, False
        with loader, self.metrics or nullcontext(), self.do_step.part_threads():
            untried = self.do_step.compiled
            for batch in loader:
                self.do_step.step = self.step
                values = self.schedules.at(self.step)
                if untried and (warning := self.do_step.try_compiled(batch, values)):
                    self.warnings.append(warning)
                untried = False
                unfitted += batch.unfitted
                outcome, checked = self.do_step(batch, values, stop=self.stop.is_set())
                # The loss of the step before is read now: the device has work and nothing waits.
                stopping = self._check(pending, self.step - 1) or stopping
                pending = checked
                self.step += 1
                probing, measuring = self._probe_is_due(), self.quality.is_due(self.step)
                leaving = self.step == total or self.step in snapshots  # weights leave the run here
                if (self.step - 1) % self.settings.log_steps == 0 or leaving or probing or measuring:
                    stopping = self._check(pending, self.step - 1) or stopping
                    pending = None
                    measured = self._probe() if probing else {}
                    measured |= self._measure_quality() if measuring else {}
                    self._log(outcome, values, checked, loader.waited_s, report, measured)
                due = time.monotonic() - self.throughput.saved > self.settings.checkpoint_minutes * 60
                ends = stopping or self.step == total or self.quality.ends
                if ends:
                    self._check(pending, self.step - 1)
                # A broken step is never saved. The error comes at the next check, which all processes make at the same
                # step: their clocks, and so their `due`, differ.
                if ends or (due and (pending is None or _Checked(*pending.get()).is_finite)):
                    self._save()
                if self.step in snapshots:
                    self.save_encoder(snapshots[self.step], Ending(total, self.step, self.step))
                if stopping or self.quality.ends:
                    break
        self.warnings += self.do_step.warnings
        if unfitted:
            self.warnings.append(f"the stains of {unfitted} tiles could not be fitted: they kept their colours")
        return self.step == total or self.quality.ends

    def _check(self, checked: AsyncValues | None, step: int) -> bool:
        """Raise if the loss or the weights of a step were not finite; else return whether a process is to stop."""
        if checked is None:
            return False
        found = _Checked(*checked.get())
        if not found.is_finite:
            kept = read_checkpoint(self.out) if self.worker.is_first else None
            good = f"state.pt of step {kept['step']} is kept" if kept else "no checkpoint was written yet"
            what = f"the loss at step {step} is not a number ({found.loss})"
            if math.isfinite(found.loss):
                what = f"the weights are not finite after step {step}, though its loss is ({found.loss:.4g})"
            raise EncoderError(
                f"{self.out.name}: {what}",
                f"training cannot recover from that; {good}",
                "Lower pretrain.lr or raise its warm-up; with fp16 use --pretrain.precision bf16 or fp32",
                code="training-diverged",
            )
        return found.stop > 0

    # ------------------------------------------------------------------------------------------------ metrics

    def _log(
        self,
        outcome: LossOutput,
        values: dict[str, float],
        checked: AsyncValues,
        waited_s: float,
        report: Callable[[dict[str, Any]], None],
        measured: dict[str, Any],
    ) -> None:
        if self.metrics is None:
            return
        tiles_per_s, data_wait_share = self.throughput.lap(self.step, waited_s, self.settings.batch)
        line: dict[str, Any] = {"step": self.step - 1, "epoch": (self.step - 1) // self.hyperparameters.steps_per_epoch}
        line |= {"loss": checked.get()[0], **values}
        line |= learning.diagnose(outcome)
        line["tiles_per_s"] = round(tiles_per_s, 2)
        line["data_wait_share"] = round(data_wait_share, 4)
        line["mfu"] = round(tiles_per_s * self.gflop / 1000 / self.peak / self.worker.world_size, 4)
        line["phase_s"] = self.do_step.timer.last_step()
        line |= measured
        alarms = [measured["alarm"]] if "alarm" in measured else []
        advice = self._collapse_advice(line)
        alarms += [advice] if advice else []
        if alarms:
            line["alarm"] = "; ".join(alarms)
            if not any("alarm" in before for before in self.metrics.lines):
                self.warnings.append(f"at step {self.step - 1}: {line['alarm']}")
        self.metrics.add(line)
        report(line)

    def _collapse_advice(self, line: dict[str, Any]) -> str | None:
        """Return what the objective says of the metrics since the warm-up, once there are enough of them."""
        assert self.metrics is not None
        first = max(self.hyperparameters.warmup_steps, ALARM_FROM_STEP)
        lines = [each for each in (*self.metrics.lines, line) if each["step"] >= first]
        return self.learner.objective.collapse_advice(lines) if len(lines) >= RECENT_LINES else None

    def _probe_is_due(self) -> bool:
        """Whether the weights after this step are probed; counted from the start of the run, also when resumed."""
        if self.settings.probe_table is None:
            return False
        return self.step % self.probe_steps == 0 or self.step == self.hyperparameters.total_steps

    def _probe(self) -> dict[str, float]:
        """Return the accuracy of the current weights on labelled tiles, and the seconds that took.

        Only the first process probes, others wait. A signal ends the probe early, without a result, so that the
        checkpoint is not late.
        """
        start = time.perf_counter()
        found: dict[str, float] = {}
        if self.probe_table is not None:
            from selfvitmil.pretrain.probe import probe_encoder

            with self._current_encoder() as encoder:
                found = probe_encoder(
                    encoder,
                    self.probe_table,
                    batch=self.settings.batch // self.worker.world_size // self.settings.accumulate,
                    dtype=self.do_step.dtype,
                    threads=max(self.workers, 1),
                    stop=self.stop.is_set,
                )
        if self.worker.world_size > 1:
            dist.barrier(self.waiting_group)
        seconds = time.perf_counter() - start
        self.throughput.leave_out(seconds)
        return found | {"probe_s": round(seconds, 3)} if found else {}

    def _measure_quality(self) -> dict[str, Any]:
        """Return the quality of the current weights, without labels, and the seconds that took.

        A signal does not end it early: which weights are kept must not depend on when a run was interrupted.
        """
        start = time.perf_counter()
        with self._current_encoder() as encoder:
            found = self.quality.evaluate(encoder, self.step)
        seconds = time.perf_counter() - start
        self.throughput.leave_out(seconds)
        return found | {"quality_s": round(seconds, 3)} if found else {}

    # ------------------------------------------------------------------------------------------------ files

    def _save(self) -> None:
        """Write the checkpoint."""
        if self.worker.is_first:
            assert self.metrics is not None
            self.metrics.sync()  # first: a resumed run writes no line from before its checkpoint again
            own = self.provenance
            state = {
                "made_from": self.made_from,
                "provenance": {"version": own.version, "settings": own.settings, "inputs": own.inputs},
                "step": self.step,
                "mean": list(self.views.mean),
                "std": list(self.views.std),
                **self.do_step.state(),
                "quality": self.quality.state(),
            }
            write_checkpoint(self.out, state)
        self.throughput.saved = time.monotonic()

    def _tile_mpp(self) -> float | None:
        """Microns per pixel of the tiles that the encoder is for."""
        return None if self.source.mpp is None else self.source.mpp * self.source.size_px / self.tile_px

    def finish(self) -> None:
        """Write the encoder of this run: the weights with the best quality."""
        self.ending = self.quality.ending(self.step, self.hyperparameters.total_steps)
        self._warn_of_chance(self.ending.kept_step)
        if self.worker.is_first and self.ending.kept_step < self.step:
            self.learner.result.load_state_dict(self.quality.kept)
        self.save_encoder(self.out, self.ending)

    def _warn_of_chance(self, kept_step: int) -> None:
        """Warn where the kept weights find the same neighbours by two views no more often than chance does."""
        lines = self.metrics.lines if self.metrics is not None else []
        for line in lines:
            if line["step"] + 1 != kept_step or "quality" not in line:
                continue
            if line["quality"] <= CHANCE_WITHIN * line["quality_se"]:
                self.warnings.append(
                    f"the quality of the encoder is no better than chance ({line['quality']:.3f}, standard error "
                    f"{line['quality_se']:.3f}): too few steps, a wrong pretrain.lr, or too few tiles to tell"
                )

    def save_encoder(self, folder: Path, ending: Ending) -> None:
        """Write an encoder's folder: the current weights and their provenance."""
        if not self.worker.is_first:
            return
        init = self.settings.init
        provenance = {
            "method": self.settings.method,
            "preset": self.origin.preset,
            "source": init.rstrip("/").split("/")[-1],
            "slides": len(self.source.counts),
            "tiles": sum(self.source.counts),
            "gflop_per_tile": round(self.gflop, 2),
            **asdict(self.hyperparameters),
            **asdict(ending),
            "made_from": self.made_from,
        }
        if init != "scratch":
            provenance |= {"layer_decay": self.settings.chosen("layer_decay"), "lora": self.settings.lora}
        with self._current_encoder(provenance) as encoder:
            save_encoder(folder, Encoder(merged(encoder.backbone), encoder.config))

    @contextmanager
    def _current_encoder(self, provenance: dict[str, Any] | None = None) -> Iterator[Encoder]:
        """Yield the encoder of the current weights, for the first process to evaluate or save.

        Within the block its batch norms have the statistics of plain tiles under these weights; afterwards those of the
        training are restored. Other processes get it as it is.
        """
        network, device = self.learner.result, self.worker.device
        encoder = Encoder(network, self._config(provenance)).to(device)
        if not self.worker.is_first:
            yield encoder
            return
        if self.plain_tiles is None and learning.batch_norms_of(network):
            sample = (learning.STATISTICS_TILES, self.tile_px, self.settings.seed, self.workers)
            self.plain_tiles = learning.passes_of(read_plain_sample(self.source, *sample))
        images = (encoder.normalize(tiles_B3SS.to(device)) for tiles_B3SS in self.plain_tiles or ())
        with learning.statistics_of(network, images):
            yield encoder

    def _config(self, provenance: dict[str, Any] | None = None) -> EncoderConfig:
        """Return the config of the encoder; its layout is that of the starting weights."""
        return self.encoder.config.model_copy(
            update={
                "mean": tuple(self.views.mean),
                "std": tuple(self.views.std),
                "mpp": self._tile_mpp(),
                "size_px": self.tile_px,
                "stain": self.source.stain_method,
                "trained_on": self.origin.trained_on,
                "provenance": provenance or {},
            }
        )


def changes_in_words(freshness: Freshness) -> str:
    """Return the first few changes of a stale encoder or checkpoint, and the number of others."""
    shown, others = freshness.changes[:MOST_CHANGES], freshness.changes[MOST_CHANGES:]
    return describe_changes(shown) + (f" and {len(others)} more" if others else "")


class _Throughput:
    """Time, steps and waiting since the last line of metrics, and since the last checkpoint."""

    def __init__(self, step: int):
        self.saved = time.monotonic()
        self._step, self._time, self._waited = step, time.perf_counter(), 0.0

    def leave_out(self, seconds: float) -> None:
        """Exclude seconds that were not training."""
        self._time += seconds

    def lap(self, step: int, waited_s: float, batch: int) -> tuple[float, float]:
        """Return tiles per second and the fraction of the time spent waiting for tiles, since the last call."""
        now = time.perf_counter()
        span = max(now - self._time, 1e-9)
        tiles_per_s, wait_share = (step - self._step) * batch / span, min((waited_s - self._waited) / span, 1.0)
        self._step, self._time, self._waited = step, now, waited_s
        return tiles_per_s, wait_share
