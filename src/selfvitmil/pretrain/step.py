"""One training step: views, forward and backward passes over the parts of a batch, the optimizer, the averaged teacher.

A batch is worked through in the parts of `pretrain.accumulate`: one after the other, or side by side in CPU threads.
Random numbers depend on (seed, step, process, part), so a step needs no generator state.

On one GPU, steps of a whole batch are recorded as a CUDA graph and repeated (`RecordedStep`): a small network has
thousands of kernels in a step, and starting them one by one takes ten times longer than they run.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from selfvitmil import stain
from selfvitmil.data.loader import Batch
from selfvitmil.data.views import ViewRecipe, make_views, render_view
from selfvitmil.errors import ConfigError, EngineError
from selfvitmil.pretrain import learner as learning
from selfvitmil.pretrain.learner import Branch, Learner
from selfvitmil.pretrain.objectives import JointBatch, LossOutput, Part
from selfvitmil.pretrain.optim import Hyperparameters, all_finite, clip_each_gradient, layered_groups
from selfvitmil.pretrain.vit import compiled_embedding_of, embedding_of, has_shortcut, try_kernels
from selfvitmil.runtime.device import AsyncValues, PhaseTimer, Worker, choose_precision
from selfvitmil.settings import PretrainSettings

OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
COMPILE_FROM_STEPS = 500
"""Steps from which compiling, which takes half a minute, is worth it."""
UNRECORDED_STEPS = 3
"""Steps before one is recorded: in them libraries choose their kernels, and the optimizer makes its state."""

Values = Mapping[str, "float | torch.Tensor"]
"""Scheduled values of a step by name: numbers, or tensors on the device in steps that are recorded."""


@dataclass(frozen=True)
class ViewOptions:
    """How views are rendered from tiles."""

    recipes: Sequence[ViewRecipe]
    mean: Sequence[float]
    std: Sequence[float]


@dataclass
class _Precomputed:
    """What was computed before the parts of a batch; None where a part computes it itself."""

    joint: JointBatch
    views: list[list[torch.Tensor] | None]
    taught: list[Any]


class TrainingStep:
    """Runs optimizer steps of a learner. Call it once per step; `step` is the number of the current one."""

    def __init__(
        self,
        learner: Learner,
        settings: PretrainSettings,
        hyperparameters: Hyperparameters,
        worker: Worker,
        views: ViewOptions,
    ):
        self.learner, self.settings, self.worker, self.views = learner, settings, worker, views
        self.clip_grad = hyperparameters.clip_grad
        self.step = 0
        self.threads: ThreadPoolExecutor | None = None
        self.compiled = False
        device = worker.device
        groups, self.rates = layered_groups(
            learner.student.backbone, learner.student.head, settings.chosen("layer_decay")
        )
        # Fused only on a GPU: on a CPU it is no faster.
        fused = True if device.type == "cuda" else None
        self.optimizer = OPTIMIZERS[hyperparameters.optimizer](groups, lr=0.0, fused=fused)
        self.dtype = choose_precision(settings.precision, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)
        self.render: Callable[..., torch.Tensor] = render_view
        self.student: nn.Module = learner.student
        self.timer = PhaseTimer(device)
        self.warnings: list[str] = []
        self._try_attention()
        self.recorded: RecordedStep | None = None
        if self._can_record():
            self.recorded = RecordedStep(self)
        for group in self.optimizer.param_groups:  # keeps its state where a recorded step can use it
            group["capturable"] = self.recorded is not None

    def _try_attention(self) -> None:
        """Find out before the first step whether the kernels for short sequences run on this GPU."""
        backbone: Any = self.learner.student.backbone
        if self.worker.device.type != "cuda" or self.dtype == torch.float32 or not has_shortcut(backbone):
            return
        reason = try_kernels(self.worker.device, self.dtype, backbone.blocks[0].attn.head_dim)
        if reason:
            self.warnings.append(f"attention of small views is that of torch, slower: Triton failed ({reason})")

    def _can_record(self) -> bool:
        settings, worker = self.settings, self.worker
        alone = worker.device.type == "cuda" and worker.world_size == 1 and settings.accumulate == 1
        plain = isinstance(self.optimizer, torch.optim.AdamW) and not self.scaler.is_enabled()
        return alone and plain and settings.compile != "off"

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of learner, optimizer and loss scaler."""
        parts = {"learner": self.learner, "optimizer": self.optimizer, "scaler": self.scaler}
        return {name: part.state_dict() for name, part in parts.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave, on whatever device it was."""
        self.learner.load_state_dict(state["learner"])
        # How the optimizer computes, and so where it counts its steps, is this device's matter, not the checkpoint's.
        pairs = zip(state["optimizer"]["param_groups"], self.optimizer.param_groups, strict=True)
        groups = [saved | {name: own[name] for name in ("fused", "capturable")} for saved, own in pairs]
        self.optimizer.load_state_dict({**state["optimizer"], "param_groups": groups})
        self.scaler.load_state_dict(state["scaler"])

    def _branches(self) -> list[Branch]:
        return [branch for branch in (self.learner.student, self.learner.teacher) if branch is not None]

    def distribute(self) -> None:
        """Wrap the student for several processes; batch norms of backbones see the batch of all of them."""
        if self.worker.world_size == 1:
            return
        for branch in self._branches():  # heads see the rows of all processes where their batch norms need them
            learning.join_processes(branch.backbone)
        on = [self.worker.device] if self.worker.device.type == "cuda" else None
        self.student = DistributedDataParallel(self.learner.student, device_ids=on, gradient_as_bucket_view=True)

    # ------------------------------------------------------------------------------------------------ compiling

    def compile(self, steps_left: int) -> None:
        """Compile networks and views where it pays. A failure shows in the first step (see `try_compiled`)."""
        worth_it = self.worker.device.type == "cuda" and steps_left >= COMPILE_FROM_STEPS
        self.compiled = self.settings.compile == "on" or (self.settings.compile == "auto" and worth_it)
        if self.compiled:
            for branch in self._branches():
                branch.embed = compiled_embedding_of(branch.backbone)
            self.render = torch.compile(render_view, dynamic=False)

    def try_compiled(self, batch: Batch, values: Mapping[str, float]) -> str | None:
        """Compute a first part without an update; if that fails in any process, all continue uncompiled.

        Returns a warning in that case, or raises EngineError with `pretrain.compile on`. Nothing here waits for other
        processes, so that one whose compiler fails leaves none of them waiting.
        """
        failure: Exception | None = None
        buffers = [buffer.clone() for buffer in self.learner.buffers()]
        self.learner.objective.begin_step(self.step)
        try:
            views = self._make_views(batch, self._part(batch, 0))
            if self.settings.accumulate > 1 and self.learner.objective.joins != "nothing":
                with torch.no_grad(), self._autocast(), learning.alone(self.learner):
                    self.learner.look_ahead(views)
            self._try_part(views, values)
        except torch.OutOfMemoryError:
            pass  # no fault of the compiler's: the step itself says what would fit
        except Exception as error:
            failure = error
        self.optimizer.zero_grad(set_to_none=True)
        for buffer, before in zip(self.learner.buffers(), buffers, strict=True):
            buffer.copy_(before)
        failed = torch.tensor(float(failure is not None), device=self.worker.device)
        if self.worker.world_size > 1:
            dist.all_reduce(failed)
        if not failed.item():
            return None
        kind = type(failure).__name__ if failure else "in another process"
        if self.settings.compile == "on":
            raise EngineError(
                f"compiling the networks failed in {failed.item():.0f} of {self.worker.world_size} processes",
                kind if failure is None else f"{kind}: {str(failure).split(chr(10))[0]}",
                "Use --pretrain.compile off, or auto, which continues without compiling",
                code="compile-failed",
            ) from failure
        self.compiled, self.render = False, render_view
        for branch in self._branches():
            branch.embed = embedding_of(branch.backbone)
        return f"compiling failed ({kind}); training continues without it"

    # ------------------------------------------------------------------------------------------------ a step

    def __call__(
        self, batch: Batch, values: Mapping[str, float], *, stop: bool = False
    ) -> tuple[LossOutput, AsyncValues]:
        """Do one optimizer step with these scheduled values.

        Returns the outcome of the last part, and for later the mean over all processes of: loss, whether `stop` was
        set, whether a weight is not finite. Raises ConfigError where the GPU's memory does not suffice.
        """
        try:
            return self._do_step(batch, values, stop)
        except torch.OutOfMemoryError:
            pass  # handled below, when the frames that hold the memory are gone
        raise self._out_of_memory(batch, values)

    def _do_step(self, batch: Batch, values: Mapping[str, float], stop: bool) -> tuple[LossOutput, AsyncValues]:
        parts = self.settings.accumulate
        self.timer.start()
        self.learner.objective.begin_step(self.step)
        if self.recorded is not None:
            return self.recorded(batch, values, stop)
        losses: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        last: LossOutput | None = None
        outcomes = self._one_by_one(batch, values) if self.threads is None else self._side_by_side(batch, values)
        for number, outcome in enumerate(outcomes, start=1):
            losses.append(outcome.loss.detach() / parts)
            if outcome.state is not None:
                states.append(outcome.state)
            last = outcome if number == parts else None
            del outcome  # frees its logits before the next part begins
        assert last is not None
        self.update(values, states)
        self.timer("update")
        checked = self.check(sum(losses, start=torch.zeros_like(losses[0])), torch.full_like(losses[0], float(stop)))
        if self.worker.world_size > 1:
            dist.all_reduce(checked)
            checked /= self.worker.world_size
        return last, AsyncValues(checked)

    def check(self, loss: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
        """Return what is checked after a step: the loss, whether to stop, whether a weight is not finite."""
        # A gradient that is not finite shows in the weights, a step that the loss scale of fp16 skips does not.
        broken = (~all_finite(self.learner.student.parameters())).to(loss.dtype)
        return torch.stack([loss, stop, broken])

    def compute(self, tiles_B3HW: torch.Tensor, view_ids_B: torch.Tensor, step: torch.Tensor, values: Values):
        """Do a step of the whole batch in one part, all of it on the device; return its outcome.

        Nothing here may depend on Python's values of the step, for it is recorded once and repeated.
        """
        views = self._render_views(tiles_B3HW, view_ids_B, step)
        outcome = self._forward(views, values, Part(JointBatch()), lambda phase: None)
        outcome.loss.backward()
        self.update(values, [] if outcome.state is None else [outcome.state])
        return outcome

    def update(self, values: Values, states: Sequence[torch.Tensor]) -> None:
        """Do the optimizer's step with these scheduled values, then update the average and the objective's state."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            self._set_rates(group, values["lr"] * rate.lr_scale, values["weight_decay"] if rate.decayed else 0.0)
        self.scaler.unscale_(self.optimizer)
        if self.clip_grad:
            clip_each_gradient(self.learner.student.parameters(), self.clip_grad)
        self.learner.objective.before_update(self.learner.student.head, self.step)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.learner.finish_step(values["momentum"], states)

    def _set_rates(self, group: dict[str, Any], lr: float | torch.Tensor, weight_decay: float | torch.Tensor) -> None:
        group["lr"], group["weight_decay"] = lr, weight_decay
        if isinstance(lr, torch.Tensor):  # the optimizer takes its learning rate from the device, but not its decay
            group["weight_decay"] = 0.0
            moving = [weight for weight in group["params"] if weight.grad is not None]
            if isinstance(weight_decay, torch.Tensor) and moving:
                with torch.no_grad():
                    torch._foreach_mul_(moving, 1 - lr * weight_decay)  # pyright: ignore[reportPrivateImportUsage]

    # ------------------------------------------------------------------------------------------------ parts

    @contextmanager
    def part_threads(self) -> Iterator[None]:
        """Compute the parts of a batch in threads within the block, where that gives the same result."""
        settings, worker, cores = self.settings, self.worker, torch.get_num_threads()
        together = min(settings.accumulate, cores)
        alone_on_cpu = worker.device.type == "cpu" and worker.world_size == 1
        plain = not self.compiled and not self.scaler.is_enabled()
        # What depends on the order of the parts: random numbers, and running statistics of batch norms.
        norms = any(
            isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and module.track_running_stats
            for module in self.learner.modules()
        )
        deadlock = self.learner.joins and together < settings.accumulate
        if together == 1 or not alone_on_cpu or not plain or settings.drop_path or norms or deadlock:
            yield
            return
        with ThreadPoolExecutor(together, initializer=torch.set_num_threads, initargs=(cores // together,)) as threads:
            self.threads = threads
            try:
                yield
            finally:
                self.threads = None
                torch.set_num_threads(cores)

    def _part(self, batch: Batch, number: int) -> slice:
        size = len(batch.tiles_B3HW) // self.settings.accumulate
        return slice(number * size, (number + 1) * size)

    def seed_part(self, number: int) -> None:
        """Seed drop path by step, process and part, so that there is no generator state to save."""
        seed = (self.settings.seed * 1_000_003 + self.step) * 1_009
        torch.manual_seed(seed + self.worker.rank + self.worker.world_size * number)

    def _one_by_one(self, batch: Batch, values: Values) -> Iterator[LossOutput]:
        """Compute part after part of the batch; gradients add up in the weights."""
        parts = self.settings.accumulate
        ahead = self._look_ahead(batch)
        for number in range(parts):
            synchronizes = number == parts - 1 or not isinstance(self.student, DistributedDataParallel)
            views, taught = ahead.views[number], ahead.taught[number]
            ahead.views[number] = ahead.taught[number] = None
            if views is None:
                views = self._make_views(batch, self._part(batch, number))
                self.timer("views")
            self.seed_part(number)
            with nullcontext() if synchronizes else self.student.no_sync():  # pyright: ignore[reportCallIssue]
                yield self._forward_backward(views, values, Part(ahead.joint, number, taught))
            del views, taught

    def _look_ahead(self, batch: Batch) -> _Precomputed:
        """Compute what sequential parts must know of each other, where the loss compares their tiles."""
        parts, learner = self.settings.accumulate, self.learner
        ahead = _Precomputed(JointBatch(parts), [None] * parts, [None] * parts)
        if parts == 1 or not learner.joins:
            return ahead
        views_of = [self._make_views(batch, self._part(batch, number)) for number in range(parts)]
        ahead.views = list(views_of)
        self.timer("views")
        with torch.no_grad(), self._autocast():
            if learner.objective.joins_teacher:
                ahead.taught = [learner.teach(views) for views in views_of]
                ahead.joint.look_ahead_teacher([taught[0] for taught in ahead.taught])
                self.timer("teacher")
            if learner.objective.joins != "nothing":
                embeddings: list[torch.Tensor] = []
                for number, views in enumerate(views_of):
                    self.seed_part(number)
                    embeddings.append(learner.look_ahead(views))
                ahead.joint.look_ahead(embeddings)
                self.timer("student")
        return ahead

    def _side_by_side(self, batch: Batch, values: Values) -> list[LossOutput]:
        """Compute the parts in CPU threads, which wait for each other once a step instead of in every operation."""
        assert self.threads is not None
        parts, learner = self.settings.accumulate, self.learner
        weights = [weight for weight in learner.student.parameters() if weight.requires_grad]
        joint = JointBatch(parts, in_threads=learner.joins)

        def compute(number: int) -> tuple[LossOutput, tuple[torch.Tensor, ...]]:
            mark = self.timer if number == 0 else lambda phase: None
            try:
                views = self._make_views(batch, self._part(batch, number))
                mark("views")
                outcome = self._forward(views, values, Part(joint, number), mark)
                gradients = torch.autograd.grad(outcome.loss / parts, weights)
            except BaseException:
                joint.give_up()
                raise
            mark("backward")
            return outcome, gradients

        futures = [self.threads.submit(compute, number) for number in range(parts)]
        failures = [failure for future in futures if (failure := future.exception()) is not None]
        if failures:  # that of a part that waited for another one is not the cause
            raise next((each for each in failures if not isinstance(each, threading.BrokenBarrierError)), failures[0])
        outcomes = []
        for outcome, gradients in (future.result() for future in futures):
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
            outcomes.append(outcome)
        return outcomes

    def _forward_backward(
        self, views: list[torch.Tensor], values: Values, part: Part, student: nn.Module | None = None
    ) -> LossOutput:
        outcome = self._forward(views, values, part, self.timer, student)
        self.scaler.scale(outcome.loss / part.joint.parts).backward()
        self.timer("backward")
        return outcome

    def _try_part(self, views: list[torch.Tensor], values: Values) -> None:
        """Do a forward and backward pass in this process only, without waiting for others."""
        with learning.alone(self.learner):
            self._forward_backward(views, values, Part(JointBatch(alone=True)), self.learner.student)

    def _forward(
        self,
        views: list[torch.Tensor],
        values: Values,
        part: Part,
        mark: Callable[[str], None],
        student: nn.Module | None = None,
    ) -> LossOutput:
        with self._autocast():
            chosen = self.student if student is None else student
            return learning.compute_loss(self.learner, chosen, views, values["teacher_temp"], mark, part)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.worker.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def _make_views(self, batch: Batch, part: slice) -> list[torch.Tensor]:
        """Return views of stain-normalized tiles on the device."""
        return self._render_views(*self.to_device(batch, part), self.step)

    def to_device(self, batch: Batch, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return stain-normalized tiles and the seeds of their views on the device."""
        tiles_B3HW = batch.tiles_B3HW[part].to(self.worker.device, non_blocking=True)
        if batch.transforms_B33 is not None:
            tiles_B3HW = stain.apply_transforms(tiles_B3HW, batch.transforms_B33[part])
        return tiles_B3HW, batch.view_ids_B[part].to(self.worker.device, non_blocking=True)

    def _render_views(
        self, tiles_B3HW: torch.Tensor, view_ids_B: torch.Tensor, step: int | torch.Tensor
    ) -> list[torch.Tensor]:
        return make_views(
            tiles_B3HW,
            view_ids_B,
            step,
            self.views.recipes,
            self.views.mean,
            self.views.std,
            seed=self.settings.seed,
            dtype=self.dtype,
            render=self.render,
        )

    def _out_of_memory(self, batch: Batch, values: Mapping[str, float]) -> ConfigError:
        """Return the error to raise, after trying which part of the batch fits."""
        self.optimizer.zero_grad(set_to_none=True)
        size = len(batch.tiles_B3HW) // self.settings.accumulate
        fitting = 0
        trial = size // 2
        while trial >= 2 and not fitting:
            torch.cuda.empty_cache()
            try:
                self._try_part(self._make_views(batch, slice(0, trial)), values)
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
            code="out-of-gpu-memory",
        )


class RecordedStep:
    """Steps of a whole batch on one GPU: the first few are computed, then one is recorded and all later ones repeat it.

    A recorded step is the same arithmetic on the same memory. What changes from step to step is copied there before:
    tiles, the seeds of their views, the number of the step and the scheduled values. Random numbers of dropped paths
    come from torch's generator, which is seeded before every step as ever. So a run gives the same numbers with and
    without recording. Where recording fails, the steps go on being computed one kernel at a time.
    """

    def __init__(self, step: TrainingStep):
        self.step, device = step, step.worker.device
        self.number = torch.zeros((), dtype=torch.int64, device=device)
        self.stop = torch.zeros((), device=device)
        self.values: dict[str, torch.Tensor] = {}
        self.inputs: tuple[torch.Tensor, torch.Tensor] | None = None
        self.stream = torch.cuda.Stream(device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.found: tuple[LossOutput, torch.Tensor] | None = None
        self.computed = 0
        self.failed = False

    def __call__(self, batch: Batch, values: Mapping[str, float], stop: bool) -> tuple[LossOutput, AsyncValues]:
        """Do one step; see `TrainingStep.__call__`."""
        self._set_inputs(batch, values, stop)
        self.step.timer("tiles")
        if self.graph is None and not self.failed and self.computed >= UNRECORDED_STEPS:
            self._record()
        self.step.seed_part(0)
        if self.graph is None:
            self._compute_aside()
        else:
            self.graph.replay()
        self.step.timer("step")
        assert self.found is not None
        outcome, checked = self.found
        return outcome, AsyncValues(checked)

    def _set_inputs(self, batch: Batch, values: Mapping[str, float], stop: bool) -> None:
        given = self.step.to_device(batch, slice(None))
        if self.inputs is None:
            self.inputs = (torch.empty_like(given[0]), torch.empty_like(given[1]))
            self.values = {name: torch.zeros((), device=self.number.device) for name in values}
        for place, value in zip(self.inputs, given, strict=True):
            place.copy_(value)
        for name, value in values.items():
            self.values[name].fill_(value)
        self.number.fill_(self.step.step)
        self.stop.fill_(float(stop))

    def _compute(self) -> None:
        assert self.inputs is not None
        self.found = None  # of the step before; frees its memory
        outcome = self.step.compute(*self.inputs, self.number, self.values)
        self.found = outcome, self.step.check(outcome.loss.detach(), self.stop)

    def _compute_aside(self) -> None:
        """Compute on the stream that recording uses, where autograd must not know another one."""
        main = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            self._compute()
        main.wait_stream(self.stream)
        self.computed += self.step.learner.objective.is_settled(self.step.step)

    def _record(self) -> None:
        device = self.stream.device
        main = torch.cuda.current_stream(device)
        graph = torch.cuda.CUDAGraph()
        self.found = None
        gc.collect()
        torch.cuda.synchronize(device)
        try:
            # Other threads (the one that brings tiles) may use the device meanwhile.
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self._compute()
        except RuntimeError as error:  # also where memory does not suffice: steps that are not recorded fit
            self.failed = True
            reason = str(error).splitlines()[0]
            self.step.warnings.append(f"a step could not be recorded ({reason}); training continues without, slower")
            self._clean_up(main)
            return
        self.graph = graph

    def _clean_up(self, main: torch.cuda.Stream) -> None:
        """Undo what a failed recording leaves behind: gradients, its stream, a random generator that still records."""
        self.found = None
        self.step.optimizer.zero_grad(set_to_none=True)
        torch.cuda.set_stream(main)
        fresh = torch.Generator(self.stream.device)  # seeded before every step
        torch.cuda.default_generators[self.stream.device.index].graphsafe_set_state(fresh.graphsafe_get_state())
        torch.cuda.synchronize(self.stream.device)
