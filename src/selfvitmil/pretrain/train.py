"""Training an encoder on tiles without labels: from tile tables (or a folder of images) to the folder of an encoder.

Now and then the quality of the embeddings is measured without labels (`quality`); the weights with the best one become
the encoder, and a run whose quality fell ends early (`watch`).

The loop is plain PyTorch. Under `torchrun` every process takes an equal part of each batch; `batch` stays what it is,
so more GPUs make a run faster and do not change it (to rounding; which paths are dropped differs). Batch norms of a
ResNet see the tiles of all processes, but each part of `accumulate` by itself. All that is random depends on (seed,
step, tile) or (seed, step, process), so a checkpoint holds weights, optimizer, centre and step, and no state of any
generator.

Going on: when the folder holds a `state.pt` of the same settings and tiles, the run continues from it; on a CPU with
the same number of threads the weights come out as if it had never stopped, to the bit. A finished run is left alone.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from selfvitmil.data.loader import Batch, TileLoader, channel_statistics, default_workers, order_of, read_plain_sample
from selfvitmil.data.sources import TileSource
from selfvitmil.data.views import make_views, render_view
from selfvitmil.encoder import Encoder, EncoderConfig, load_encoder, save_encoder
from selfvitmil.errors import ConfigError, EncoderError, EngineError
from selfvitmil.pretrain import batch_norm
from selfvitmil.pretrain import learner as learning
from selfvitmil.pretrain.joint import JointBatch
from selfvitmil.pretrain.learner import Learner, Numbers
from selfvitmil.pretrain.lora import merged
from selfvitmil.pretrain.objectives.contract import RECENT_LINES, Outcome, Part
from selfvitmil.pretrain.optim import all_finite, clip_each_gradient, layered_groups
from selfvitmil.pretrain.probe import ProbeTable, probe_encoder, read_probe_table
from selfvitmil.pretrain.quality import plan_evaluations, read_sample
from selfvitmil.pretrain.recipes import made_for_px, recipes_of
from selfvitmil.pretrain.watch import Course, Ending, Watch, patience_of
from selfvitmil.runtime.device import AsyncValues, PhaseTimer, arithmetic, choose_precision, peak_tflops
from selfvitmil.runtime.distributed import Worker, distributed, stop_on_signal
from selfvitmil.runtime.training import MetricsLog, read_checkpoint, read_metrics, tensorboard_writer, write_checkpoint
from selfvitmil.settings import PretrainSettings
from selfvitmil.store.files import hash_of

STAGE_VERSION = 3
"""Part of the hash of a run: raised when the same settings come to mean something else."""
OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
ALARM_FROM_STEP = 500
"""No alarm before: in its first hundreds of steps a sound run cannot be told from a collapsed one."""
COMPILE_FROM_STEPS = 3000
"""Steps from which compiling, which takes minutes and saves a quarter of a step's time, is worth it."""
PROBES = 10
"""Probes of a run, where `probe_epochs` does not say how many."""
WAIT_FOR_FIRST = timedelta(days=1)
"""How long other processes wait while the first one probes or measures; those that wait for a gradient give up in
minutes."""
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
    """Words for the encoder's config that only the caller knows."""

    trained_on: str
    """For instance `train split of camelyon16` or `transductive`."""
    preset: str = "default"


@dataclass(frozen=True)
class TrainedEncoder:
    """What became of a run."""

    folder: Path
    step: int
    total_steps: int
    finished: bool
    """False when a signal stopped the run; the same call goes on from its checkpoint."""
    note: str
    """`made`, `current`, `continued from step ...` or `stopped by a signal at step ...`."""
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
    """Train an encoder and write its folder `out`, or go on with one that was begun there.

    `source` is `sources.SlideTiles(...)` or `sources.ImageTiles(...)`; `report` gets every line of metrics when it is
    written. `snapshots` are folders by number of steps: after so many of them the encoder is written there too. Under
    torchrun every process calls this with the same arguments; the first writes.
    """
    with ExitStack() as stack:
        worker = stack.enter_context(distributed(device))
        stack.enter_context(
            arithmetic(worker.device, precision=settings.precision, deterministic=settings.deterministic)
        )
        devices = [worker.device] if worker.device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices))
        stop = stack.enter_context(stop_on_signal())
        run = _Run(source, out, settings, origin, worker, stop)
        if run.is_finished():
            lines = read_metrics(out)
            return run.result("current", True, lines[-1] if lines else {})
        note = run.prepare()
        finished = run.train(report or (lambda line: None), snapshots or {})
        last = run.metrics.lines[-1] if run.metrics is not None and run.metrics.lines else {}
        if finished:
            run.finish()
        else:
            note = f"stopped by a signal at step {run.step} of {run.numbers.total_steps}"
        if worker.world_size > 1:
            dist.barrier()
        return run.result(note, finished, last)


def identity_of(source: TileSource, out: Path, settings: PretrainSettings, origin: Origin) -> str:
    """Hash of all that the weights of this run depend on, without doing it: `made_from` of the encoder it makes."""
    return _Run(source, out, settings, origin, Worker(torch.device("cpu")), threading.Event()).made_from


# ---------------------------------------------------------------------------------------------------- the run


@dataclass
class _Ahead:
    """What was computed before the parts of a batch; None where a part makes it itself."""

    joint: JointBatch
    views: list[list[torch.Tensor] | None]
    taught: list[Any]


class _Checked(NamedTuple):
    """What is looked at after every step, as the mean over all processes."""

    loss: float
    stop: float
    """Above 0 where a process was asked to stop."""
    broken: float
    """Above 0 where a weight is not finite."""

    @property
    def is_sound(self) -> bool:
        return math.isfinite(self.loss) and not self.broken


class _Run:
    """One training run: what it is made of, and the steps it goes through."""

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
        self.threads: ThreadPoolExecutor | None = None
        self.plain_tiles: tuple[torch.Tensor, ...] | None = None
        self.order = order_of(source, settings)
        self._check_size()
        self.numbers: Numbers = learning.settle_numbers(settings, sum(source.counts), self.order.steps_per_epoch)
        self.workers = default_workers() if settings.workers is None else settings.workers
        self.encoder = learning.start_encoder(settings, source.size_px, settings.seed)
        self.warnings += self.encoder.warnings
        self.made_from = self._identity()

    def _check_size(self) -> None:
        settings, world = self.settings, self.worker.world_size
        if settings.batch % (world * settings.accumulate):
            raise ConfigError(
                f"pretrain.batch {settings.batch} does not divide among {world} processes "
                f"with {settings.accumulate} parts each",
                "every process takes an equal part",
                f"Use a multiple of {world * settings.accumulate}",
            )
        if settings.batch // (world * settings.accumulate) < 2:
            raise ConfigError(
                f"pretrain.batch {settings.batch} leaves one tile for each part",
                "the rank and spread of embeddings are measured within a part",
                f"Use at least {2 * world * settings.accumulate}",
            )
        if self.order.steps_per_epoch < 1:
            raise ConfigError(
                f"there are {self.order.tiles_per_epoch} tiles to train on, and a batch takes {settings.batch}",
                "not even one batch can be filled",
                "Tile more slides, or lower pretrain.batch",
            )
        if len(self.source.counts) == 1 and self.source.run > 1:
            self.warnings.append(
                f"all tiles come from one slide, {self.source.names[0]}: the encoder may learn its peculiarities"
            )
        if self.order.steps_per_epoch < 10:
            self.warnings.append(
                f"an epoch has {self.order.steps_per_epoch} steps: {self.order.tiles_per_epoch} tiles are few "
                f"for a batch of {settings.batch}"
            )

    def _identity(self) -> str:
        """Hash of all that the weights depend on."""
        told = self.settings.model_dump(mode="json", exclude=NOT_IN_HASH)
        data = [*self.source.identity(), list(self.source.shape_px), list(self.source.counts), self.source.stain_method]
        return hash_of(told, self.encoder.identity(), data, asdict(self.origin), STAGE_VERSION)

    def is_finished(self) -> bool:
        """Whether the folder holds the encoder that this run would make. Raises when it holds another one."""
        if not (self.out / "config.json").exists():
            return False
        provenance: dict[str, Any] = load_encoder(self.out).config.provenance
        if provenance.get("made_from") == self.made_from:
            self.ending = Ending(**{each.name: provenance[each.name] for each in fields(Ending)})
            self.step = self.ending.ended_step
            return True
        raise ConfigError(
            f"{self.out.name}: this encoder was made with other settings, other tiles or by another version",
            "training does not overwrite it",
            "Choose another name, or remove its folder to train it again",
        )

    def result(self, note: str, finished: bool, last: dict[str, Any]) -> TrainedEncoder:
        total = self.numbers.total_steps
        ending = self.ending if finished else None
        return TrainedEncoder(self.out, self.step, total, finished, note, last, tuple(self.warnings), ending)

    # ------------------------------------------------------------------------------------------------ before

    def prepare(self) -> str:
        """Build everything, and load the checkpoint when there is one."""
        settings, device = self.settings, self.worker.device
        if settings.tensorboard:
            tensorboard_writer()  # or its absence would show when colours have been measured
        state = read_checkpoint(self.out)
        if state is not None and state["made_from"] != self.made_from:
            raise ConfigError(
                f"{self.out.name}: was begun with other settings, other tiles or by another version",
                f"its state.pt of step {state['step']} does not belong to this run",
                "Choose another name, or remove its folder to start again",
            )
        patch_px = learning.patch_px_of(self.encoder.backbone)
        self.recipes = recipes_of(settings, self.source.size_px, patch_px)
        self.made_for_px = made_for_px(self.recipes[0], self.source.size_px)
        if self.made_for_px != self.source.size_px and self.source.mpp is not None:
            self.warnings.append(
                f"large views have {self.made_for_px} px and tiles {self.source.size_px}: the encoder is for "
                f"tiles of {self.made_for_px} px at {self._made_for_mpp():g} microns per pixel"
            )
        if self.worker.world_size > 1:
            self.waiting_group: Any = dist.new_group(backend="gloo", timeout=WAIT_FOR_FIRST)
        self._prepare_probes()
        self.mean, self.std = self._colours(state)
        self.schedules = self.numbers.schedules(settings)
        self.learner = Learner(self.encoder, settings, self.numbers, settings.seed).to(device)
        # Fused only on a GPU: on a CPU it is no faster.
        student = self.learner.student
        groups, self.rates = layered_groups(student.backbone, student.head, settings.chosen("layer_decay"))
        self.optimizer = OPTIMIZERS[self.numbers.optimizer](
            groups, lr=0.0, fused=True if device.type == "cuda" else None
        )
        self.dtype = choose_precision(settings.precision, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)
        self.render: Callable[..., torch.Tensor] = render_view
        if state is not None:
            self._load(state)
        self.student: nn.Module = self.learner.student
        if self.worker.world_size > 1:
            for branch in (self.learner.student, self.learner.teacher):
                if branch is not None:  # heads see the rows of all processes where their batch norms need them
                    batch_norm.join_processes(branch.backbone)
            on = [device] if device.type == "cuda" else None
            self.student = DistributedDataParallel(self.learner.student, device_ids=on, gradient_as_bucket_view=True)
        self._compile()
        self.watch = PhaseTimer(device)
        out_dim = self.numbers.out_dim
        self.gflop = learning.gflop_per_tile(self.encoder, settings, self.recipes, out_dim)
        self.peak = peak_tflops(device, self.dtype)
        self._prepare_quality(state)
        return "made" if state is None else f"continued from step {self.step}"

    def _colours(self, state: dict[str, Any] | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
        settings = self.settings
        if state is not None:
            return tuple(state["mean"]), tuple(state["std"])
        if settings.mean is not None and settings.std is not None:
            return settings.mean, settings.std
        if settings.init != "scratch":  # weights know the colours they were trained with
            return self.encoder.config.mean, self.encoder.config.std
        values: list[Any] = [None]
        if self.worker.rank == 0:
            values = [channel_statistics(self.source, settings.measure_tiles, settings.seed, self.workers)]
        if self.worker.world_size > 1:
            dist.broadcast_object_list(values, device=self.worker.device)
        return values[0]

    def _prepare_probes(self) -> None:
        """Read the labelled tiles, in the process that will probe, and say at which steps."""
        settings, numbers = self.settings, self.numbers
        self.probe_table: ProbeTable | None = None
        self.probe_steps = -(-numbers.total_steps // PROBES)
        if settings.probe_epochs is not None:
            self.probe_steps = settings.probe_epochs * numbers.steps_per_epoch
        if settings.probe_table is None:
            return
        if self.worker.rank == 0:
            self.probe_table = table = read_probe_table(settings.probe_table)
            size = self.made_for_px
            if table.shape_px != (size, size):
                raise ConfigError(
                    f"{settings.probe_table.name}: its tiles have {table.shape_px[1]} x {table.shape_px[0]} px",
                    f"this encoder is for tiles of {size} x {size} px",
                    "Cut or resize them to that",
                )
            self.warnings += table.warnings
            if self.source.stain_method != "none":
                self.warnings.append(
                    f"{settings.probe_table.name}: its tiles are taken with the colours they have, while the stains of "
                    "the training tiles are normalized"
                )

    def _prepare_quality(self, state: dict[str, Any] | None) -> None:
        """Plan when the quality is measured, and make the views for it in the process that will measure."""
        settings, numbers, recipe = self.settings, self.numbers, self.recipes[0]
        training = numbers.total_steps * settings.batch * self.gflop
        view = learning.forward_gflop(self.encoder, recipe.size_px)
        plan = plan_evaluations(numbers.total_steps, training, view, sum(self.source.counts))
        course = Course(patience_of(plan) if plan else 0, first_step=numbers.warmup_steps)
        self.quality = Watch(
            plan, course, self.learner.objective.remedy, keeps=settings.keep == "best", stops=settings.stop_early
        )
        if self.worker.world_size > 1:
            self.quality.group = self.waiting_group
        if state is not None:
            self.quality.load(state["quality"])
        if plan is not None and self.worker.rank == 0:
            self.quality.sample = read_sample(self.source, recipe, plan.tiles, settings.seed, self.workers)

    def _compile(self) -> None:
        """Compile what is worth it. Where that fails, the first step tells (see `_try_compiled`)."""
        worth_it = self.worker.device.type == "cuda" and self.numbers.total_steps - self.step >= COMPILE_FROM_STEPS
        self.compiled = self.settings.compile == "on" or (self.settings.compile == "auto" and worth_it)
        if self.compiled:
            for branch in (self.learner.student, self.learner.teacher):
                if branch is not None:
                    branch.embed = torch.compile(branch.embed, dynamic=False)
            self.render = torch.compile(render_view, dynamic=False)

    def _uncompile(self) -> None:
        self.compiled = False
        self.render = render_view
        for branch in (self.learner.student, self.learner.teacher):
            if branch is not None:
                branch.embed = learning.embedding_of(branch.backbone)

    def _state(self) -> dict[str, Any]:
        return {
            "made_from": self.made_from,
            "step": self.step,
            "mean": list(self.mean),
            "std": list(self.std),
            "learner": self.learner.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "quality": self.quality.state(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state["learner"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.step = state["step"]

    # ------------------------------------------------------------------------------------------------ steps

    def train(self, report: Callable[[dict[str, Any]], None], snapshots: Mapping[int, Path]) -> bool:
        """All steps that are left; False where a signal ended them. A checkpoint is written in either case."""
        worker, total = self.worker, self.numbers.total_steps
        if worker.rank == 0:
            self.metrics = MetricsLog(self.out, self.step, tensorboard=self.settings.tensorboard)
        if self.quality.ends:  # killed after the checkpoint of its early end
            return True
        loader = TileLoader(
            self.source,
            self.order,
            self.step,
            total,
            rank=worker.rank,
            world=worker.world_size,
            workers=self.workers,
            pin=worker.device.type == "cuda",
            most_kept_bytes=int(self.settings.keep_gb * 1e9),
        )
        self.pace = _Pace(self.step)
        self.unfitted = 0
        pending: AsyncValues | None = None
        asked = False
        with loader, self.metrics or nullcontext(), self._part_threads() as self.threads:
            untried = self.compiled
            for batch in loader:
                numbers = self.schedules.at(self.step)
                if untried:
                    self._try_compiled(batch, numbers)
                    untried = False
                outcome, checked = self._guarded_step(batch, numbers)
                # The loss of the step before is looked at now: the device has work and nobody waits.
                asked = self._check(pending, self.step - 1) or asked
                pending = checked
                self.step += 1
                probing, measuring = self._probe_is_due(), self.quality.is_due(self.step)
                if (self.step - 1) % self.settings.log_steps == 0 or self.step == total or probing or measuring:
                    asked = self._check(pending, self.step - 1) or asked
                    pending = None
                    found = self._probe() if probing else {}
                    found |= self._measure_quality() if measuring else {}
                    self._log(outcome, numbers, checked, loader, report, found)
                due = time.monotonic() - self.pace.saved > self.settings.checkpoint_minutes * 60
                ends = asked or self.step == total or self.quality.ends
                if ends:
                    self._check(pending, self.step - 1)
                # A broken step is never saved. The error comes at the next look, which all processes take at the same
                # step: their clocks, and so their `due`, differ.
                if ends or (due and (pending is None or _Checked(*pending.get()).is_sound)):
                    self._save()
                if self.step in snapshots:
                    self.save_encoder(snapshots[self.step], Ending(total, self.step, self.step))
                if asked or self.quality.ends:
                    break
        if self.unfitted:
            self.warnings.append(f"the stains of {self.unfitted} tiles could not be found: they kept their colours")
        return self.step == total or self.quality.ends

    @contextmanager
    def _part_threads(self) -> Iterator[ThreadPoolExecutor | None]:
        """Threads for the parts of a batch where several can work at a time."""
        settings, worker, cores = self.settings, self.worker, torch.get_num_threads()
        together = min(settings.accumulate, cores)
        alone_on_cpu = worker.device.type == "cpu" and worker.world_size == 1
        plain = not self.compiled and not self.scaler.is_enabled()
        # What depends on the order of the parts: random numbers, and means that batch norms keep.
        norms = any(
            isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and module.track_running_stats
            for module in self.learner.modules()
        )
        waits_in_vain = self.learner.joins and together < settings.accumulate
        if together == 1 or not alone_on_cpu or not plain or settings.drop_path or norms or waits_in_vain:
            yield None
            return
        with ThreadPoolExecutor(together, initializer=torch.set_num_threads, initargs=(cores // together,)) as threads:
            try:
                yield threads
            finally:
                torch.set_num_threads(cores)

    def _guarded_step(self, batch: Batch, numbers: dict[str, float]) -> tuple[Outcome, AsyncValues]:
        try:
            return self._do_step(batch, numbers)
        except torch.OutOfMemoryError:
            pass  # handled below, when the frames that hold the memory are gone
        raise self._out_of_memory(batch, numbers)

    def _try_compiled(self, batch: Batch, numbers: dict[str, float]) -> None:
        """Compute a first part without moving anything; where that fails in any process, all go on uncompiled.

        Nothing here waits for other processes, so that one whose compiler fails leaves none of them waiting.
        """
        failure: Exception | None = None
        buffers = [buffer.clone() for buffer in self.learner.buffers()]
        try:
            views = self._make_views(batch, self._part(batch, 0))
            if self.settings.accumulate > 1 and self.learner.objective.joins != "nothing":
                with torch.no_grad(), self._autocast(), batch_norm.alone(self.learner):
                    self.learner.look_ahead(views)
            self._try_part(views, numbers)
        except torch.OutOfMemoryError:
            pass  # no fault of the compiler's: the step itself tells what would fit
        except Exception as error:
            failure = error
        self.optimizer.zero_grad(set_to_none=True)
        for buffer, before in zip(self.learner.buffers(), buffers, strict=True):
            buffer.copy_(before)
        failed = torch.tensor(float(failure is not None), device=self.worker.device)
        if self.worker.world_size > 1:
            dist.all_reduce(failed)
        if not failed.item():
            return
        kind = type(failure).__name__ if failure else "in another process"
        if self.settings.compile == "on":
            raise EngineError(
                f"compiling the networks failed in {failed.item():.0f} of {self.worker.world_size} processes",
                kind if failure is None else f"{kind}: {str(failure).split(chr(10))[0]}",
                "Use --pretrain.compile off, or auto, which goes on without compiling",
            ) from failure
        self.warnings.append(f"compiling failed ({kind}), training goes on without")
        self._uncompile()

    def _do_step(self, batch: Batch, numbers: dict[str, float]) -> tuple[Outcome, AsyncValues]:
        """One step of the optimizer; the outcome of its last part, and the numbers of `_Checked` for later."""
        settings, mark = self.settings, self.watch
        self.unfitted += batch.unfitted
        mark.start()
        total = torch.zeros((), device=self.worker.device)
        states: list[torch.Tensor] = []
        last: Outcome | None = None
        outcomes = self._one_by_one(batch, numbers) if self.threads is None else self._side_by_side(batch, numbers)
        for number, outcome in enumerate(outcomes, start=1):
            total += outcome.loss.detach() / settings.accumulate
            if outcome.state is not None:
                states.append(outcome.state)
            last = outcome if number == settings.accumulate else None
            del outcome  # frees its logits before the next part begins
        assert last is not None
        self._move(numbers, states)
        mark("update")
        # A gradient that is not finite shows in the weights, a step that the loss scale of fp16 skips does not.
        broken = (~all_finite(self.learner.student.parameters())).to(total.dtype)
        checked = torch.stack([total, torch.full_like(total, float(self.stop.is_set())), broken])
        if self.worker.world_size > 1:
            dist.all_reduce(checked)
            checked /= self.worker.world_size
        return last, AsyncValues(checked)

    def _part(self, batch: Batch, number: int) -> slice:
        size = len(batch.tiles_B3HW) // self.settings.accumulate
        return slice(number * size, (number + 1) * size)

    def _seed_part(self, number: int) -> None:
        """Paths that are dropped: by step, process and part, so that nothing has to be remembered."""
        seed = (self.settings.seed * 1_000_003 + self.step) * 1_009
        torch.manual_seed(seed + self.worker.rank + self.worker.world_size * number)

    def _one_by_one(self, batch: Batch, numbers: dict[str, float]) -> Iterator[Outcome]:
        """Part after part of the batch; gradients add up in the weights."""
        parts = self.settings.accumulate
        ahead = self._look_ahead(batch)
        for number in range(parts):
            joint = number == parts - 1 or not isinstance(self.student, DistributedDataParallel)
            views, taught = ahead.views[number], ahead.taught[number]
            ahead.views[number] = ahead.taught[number] = None
            if views is None:
                views = self._make_views(batch, self._part(batch, number))
                self.watch("views")
            self._seed_part(number)
            with nullcontext() if joint else self.student.no_sync():  # pyright: ignore[reportCallIssue]
                yield self._forward_backward(views, numbers, Part(ahead.joint, number, taught))
            del views, taught

    def _look_ahead(self, batch: Batch) -> _Ahead:
        """What parts that come one after the other must know of each other, where the loss compares their tiles."""
        parts, learner = self.settings.accumulate, self.learner
        ahead = _Ahead(JointBatch(parts), [None] * parts, [None] * parts)
        if parts == 1 or not learner.joins:
            return ahead
        views_of = [self._make_views(batch, self._part(batch, number)) for number in range(parts)]
        ahead.views = list(views_of)
        self.watch("views")
        with torch.no_grad(), self._autocast():
            if learner.objective.joins_teacher:
                ahead.taught = [learner.teach(views) for views in views_of]
                ahead.joint.look_ahead_teacher([taught[0] for taught in ahead.taught])
                self.watch("teacher")
            if learner.objective.joins != "nothing":
                embeddings: list[torch.Tensor] = []
                for number, views in enumerate(views_of):
                    self._seed_part(number)
                    embeddings.append(learner.look_ahead(views))
                ahead.joint.look_ahead(embeddings)
                self.watch("student")
        return ahead

    def _side_by_side(self, batch: Batch, numbers: dict[str, float]) -> list[Outcome]:
        """The same on a CPU, a part a thread. They wait for each other once a step instead of in every operation."""
        assert self.threads is not None
        parts, learner = self.settings.accumulate, self.learner
        weights = [weight for weight in learner.student.parameters() if weight.requires_grad]
        joint = JointBatch(parts, in_threads=learner.joins)

        def compute(number: int) -> tuple[Outcome, tuple[torch.Tensor, ...]]:
            mark = self.watch if number == 0 else lambda phase: None
            try:
                views = self._make_views(batch, self._part(batch, number))
                mark("views")
                outcome = self._forward(views, numbers, Part(joint, number), mark)
                gradients = torch.autograd.grad(outcome.loss / parts, weights)
            except BaseException:
                joint.give_up()
                raise
            mark("backward")
            return outcome, gradients

        futures = [self.threads.submit(compute, number) for number in range(parts)]
        failures = [failure for future in futures if (failure := future.exception()) is not None]
        if failures:  # that of a part that waited in vain says nothing
            raise next((each for each in failures if not isinstance(each, threading.BrokenBarrierError)), failures[0])
        outcomes = []
        for outcome, gradients in (future.result() for future in futures):
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
            outcomes.append(outcome)
        return outcomes

    def _forward_backward(
        self, views: list[torch.Tensor], numbers: dict[str, float], part: Part, student: nn.Module | None = None
    ) -> Outcome:
        outcome = self._forward(views, numbers, part, self.watch, student)
        self.scaler.scale(outcome.loss / part.joint.parts).backward()
        self.watch("backward")
        return outcome

    def _try_part(self, views: list[torch.Tensor], numbers: dict[str, float]) -> None:
        """`_forward_backward` of what no other process computes, and without waiting for any."""
        with batch_norm.alone(self.learner):
            self._forward_backward(views, numbers, Part(JointBatch(alone=True)), self.learner.student)

    def _forward(
        self,
        views: list[torch.Tensor],
        numbers: dict[str, float],
        part: Part,
        mark: Callable[[str], None],
        student: nn.Module | None = None,
    ) -> Outcome:
        with self._autocast():
            chosen = self.student if student is None else student
            return learning.compute_loss(self.learner, chosen, views, self.step, numbers["teacher_temp"], mark, part)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.worker.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def _make_views(self, batch: Batch, part: slice) -> list[torch.Tensor]:
        """Views of normalized tiles on the device."""
        device = self.worker.device
        return make_views(
            batch.tiles_B3HW[part].to(device, non_blocking=True),
            batch.view_ids_B[part].to(device, non_blocking=True),
            self.step,
            self.recipes,
            self.mean,
            self.std,
            seed=self.settings.seed,
            maps_B33=None if batch.maps_B33 is None else batch.maps_B33[part],
            dtype=self.dtype,
            render=self.render,
        )

    def _move(self, numbers: dict[str, float], states: list[torch.Tensor]) -> None:
        """The optimizer's step with this step's numbers, then the average and what the objective moves itself."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = numbers["lr"] * rate.lr_scale
            group["weight_decay"] = numbers["weight_decay"] if rate.decayed else 0.0
        self.scaler.unscale_(self.optimizer)
        if self.numbers.clip_grad:
            clip_each_gradient(self.learner.student.parameters(), self.numbers.clip_grad)
        self.learner.objective.before_update(self.learner.student.head, self.step)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.learner.finish_step(numbers["momentum"], states)

    def _check(self, checked: AsyncValues | None, step: int) -> bool:
        """Raise when the loss or the weights of a step were not finite; else whether any process was asked to stop."""
        if checked is None:
            return False
        found = _Checked(*checked.get())
        if not found.is_sound:
            kept = read_checkpoint(self.out) if self.worker.rank == 0 else None
            good = f"state.pt of step {kept['step']} is kept" if kept else "no checkpoint was written yet"
            what = f"the loss at step {step} is not a number ({found.loss})"
            if math.isfinite(found.loss):
                what = f"the weights are not finite after step {step}, though its loss is ({found.loss:.4g})"
            raise EncoderError(
                f"{self.out.name}: {what}",
                f"training from here on would be in vain; {good}",
                "Lower pretrain.lr or raise its warm-up; with fp16 use --pretrain.precision bf16 or fp32",
            )
        return found.stop > 0

    def _out_of_memory(self, batch: Batch, numbers: dict[str, float]) -> ConfigError:
        """The error to raise, after trying which part of the batch does fit."""
        self.optimizer.zero_grad(set_to_none=True)
        size = len(batch.tiles_B3HW) // self.settings.accumulate
        fitting = 0
        trial = size // 2
        while trial >= 2 and not fitting:
            torch.cuda.empty_cache()
            try:
                views = self._make_views(batch, slice(0, trial))
                self._try_part(views, numbers)
                fitting = trial
            except torch.OutOfMemoryError:
                trial //= 2
            self.optimizer.zero_grad(set_to_none=True)
        how = "Choose a smaller pretrain.architecture or fewer pretrain.num_local"
        if fitting:
            parts = self.settings.accumulate * -(-size // fitting)
            how = f"{fitting} tiles at a time fit: use --pretrain.accumulate {parts} (the same result, slower)"
        return ConfigError(
            f"the GPU's memory does not hold {size} tiles at a time",
            f"that is pretrain.batch {self.settings.batch} over {self.worker.world_size} processes "
            f"and pretrain.accumulate {self.settings.accumulate}",
            how,
        )

    # ------------------------------------------------------------------------------------------------ telling

    def _log(
        self,
        outcome: Outcome,
        numbers: dict[str, float],
        checked: AsyncValues,
        loader: TileLoader,
        report: Callable[[dict[str, Any]], None],
        measured: dict[str, Any],
    ) -> None:
        if self.metrics is None:
            return
        pace = self.pace.lap(self.step, loader.waited_s, self.settings.batch)
        line: dict[str, Any] = {"step": self.step - 1, "epoch": (self.step - 1) // self.numbers.steps_per_epoch}
        line |= {"loss": checked.get()[0], **numbers}
        line |= learning.diagnose(outcome)
        line["tiles_per_s"] = round(pace.tiles_per_s, 2)
        line["data_wait_share"] = round(pace.data_wait_share, 4)
        line["mfu"] = round(pace.tiles_per_s * self.gflop / 1000 / self.peak / self.worker.world_size, 4)
        line["phase_s"] = self.watch.last_step()
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
        """What the objective says of the lines of metrics, as soon as these can tell anything."""
        assert self.metrics is not None
        first = max(self.numbers.warmup_steps, ALARM_FROM_STEP)
        lines = [each for each in (*self.metrics.lines, line) if each["step"] >= first]
        return self.learner.objective.collapse_advice(lines) if len(lines) >= RECENT_LINES else None

    def _probe_is_due(self) -> bool:
        """After every so many steps and after the last one, counted from the start of the run, whoever resumed it."""
        if self.settings.probe_table is None:
            return False
        return self.step % self.probe_steps == 0 or self.step == self.numbers.total_steps

    def _probe(self) -> dict[str, float]:
        """What the weights so far are worth on labelled tiles, and the seconds that took, which no pace counts.

        Only the first process probes and others wait. The training takes nothing from it but the time; when a signal
        asks for its end, the probe ends early, with nothing to tell, so that the checkpoint is not late.
        """
        start = time.perf_counter()
        found: dict[str, float] = {}
        if self.probe_table is not None:
            with self._kept_encoder() as encoder:
                found = probe_encoder(
                    encoder,
                    self.probe_table,
                    batch=self.settings.batch // self.worker.world_size // self.settings.accumulate,
                    dtype=self.dtype,
                    threads=max(self.workers, 1),
                    stop=self.stop.is_set,
                )
        if self.worker.world_size > 1:
            dist.barrier(self.waiting_group)
        seconds = time.perf_counter() - start
        self.pace.leave_out(seconds)
        return found | {"probe_s": round(seconds, 3)} if found else {}

    def _measure_quality(self) -> dict[str, Any]:
        """The quality of the weights so far, without labels, and the seconds that took, which no pace counts.

        A signal does not cut it short: which weights are kept must not depend on when a run was interrupted.
        """
        start = time.perf_counter()
        with self._kept_encoder() as encoder:
            found = self.quality.look(encoder, self.step)
        seconds = time.perf_counter() - start
        self.pace.leave_out(seconds)
        return found | {"quality_s": round(seconds, 3)} if found else {}

    def _save(self) -> None:
        if self.worker.rank == 0:
            write_checkpoint(self.out, self._state())
        self.pace.saved = time.monotonic()

    def _made_for_mpp(self) -> float | None:
        """Microns per pixel of the tiles that the encoder is for."""
        return None if self.source.mpp is None else self.source.mpp * self.source.size_px / self.made_for_px

    def finish(self) -> None:
        """Write the encoder of this run: the weights worth keeping."""
        self.ending = self.quality.ending(self.step, self.numbers.total_steps)
        if self.worker.rank == 0 and self.ending.kept_step < self.step:
            self.learner.result.load_state_dict(self.quality.kept)
        self.save_encoder(self.out, self.ending)

    def save_encoder(self, folder: Path, ending: Ending) -> None:
        """Write an encoder's folder: the weights as they are and what they were made from."""
        if self.worker.rank != 0:
            return
        provenance = {
            "method": self.settings.method,
            "preset": self.origin.preset,
            "source": self.settings.init
            if "/" not in self.settings.init
            else self.settings.init.rstrip("/").split("/")[-1],
            "slides": len(self.source.counts),
            "tiles": sum(self.source.counts),
            "gflop_per_tile": round(self.gflop, 2),
            **asdict(self.numbers),
            **asdict(ending),
            "made_from": self.made_from,
        }
        if self.settings.init != "scratch":
            provenance |= {"layer_decay": self.settings.chosen("layer_decay"), "lora": self.settings.lora}
        with self._kept_encoder(provenance) as encoder:
            save_encoder(folder, Encoder(merged(encoder.backbone), encoder.config))

    @contextmanager
    def _kept_encoder(self, provenance: dict[str, Any] | None = None) -> Iterator[Encoder]:
        """The encoder that the weights so far make, for the first process to assess or save in a `with` block.

        Its batch norms have statistics of plain tiles meanwhile, computed with these very weights; afterwards those of
        the training are back. Other processes get it as it is.
        """
        network, device = self.learner.result, self.worker.device
        encoder = Encoder(network, self._config(provenance)).to(device)
        if self.worker.rank > 0:
            yield encoder
            return
        if self.plain_tiles is None and batch_norm.batch_norms_of(network):
            told = (batch_norm.NUM_TILES, self.made_for_px, self.settings.seed, self.workers)
            self.plain_tiles = batch_norm.passes_of(read_plain_sample(self.source, *told))
        images = (encoder.normalize(tiles_B3SS.to(device)) for tiles_B3SS in self.plain_tiles or ())
        with batch_norm.statistics_of(network, images):
            yield encoder

    def _config(self, provenance: dict[str, Any] | None = None) -> EncoderConfig:
        """What the encoder is made for, with the layout that it starts with."""
        return self.encoder.config.model_copy(
            update={
                "mean": self.mean,
                "std": self.std,
                "mpp": self._made_for_mpp(),
                "size_px": self.made_for_px,
                "stain": self.source.stain_method,
                "trained_on": self.origin.trained_on,
                "provenance": provenance or {},
            }
        )


@dataclass(frozen=True)
class Pace:
    """How fast the last steps were."""

    tiles_per_s: float
    data_wait_share: float


class _Pace:
    """Time, steps and waiting since the last line of metrics, and since the last checkpoint."""

    def __init__(self, step: int):
        self.saved = time.monotonic()
        self._step, self._time, self._waited = step, time.perf_counter(), 0.0

    def leave_out(self, seconds: float) -> None:
        """These seconds were no training."""
        self._time += seconds

    def lap(self, step: int, waited_s: float, batch: int) -> Pace:
        now = time.perf_counter()
        span = max(now - self._time, 1e-9)
        pace = Pace((step - self._step) * batch / span, min((waited_s - self._waited) / span, 1.0))
        self._step, self._time, self._waited = step, now, waited_s
        return pace
