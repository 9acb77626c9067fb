"""One training step: views, forward and backward passes over the parts of a batch, the optimizer, the averaged teacher.

A batch is worked through in the parts of `pretrain.accumulate`: one after the other, or side by side in CPU threads.
Random numbers depend on (seed, step, process, part), so a step needs no generator state.
"""

from __future__ import annotations

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

from selfvitmil.data.loader import Batch
from selfvitmil.data.views import ViewRecipe, make_views, render_view
from selfvitmil.errors import ConfigError, EngineError
from selfvitmil.pretrain import learner as learning
from selfvitmil.pretrain.learner import Branch, Learner
from selfvitmil.pretrain.objectives import JointBatch, LossOutput, Part
from selfvitmil.pretrain.optim import Hyperparameters, all_finite, clip_each_gradient, layered_groups
from selfvitmil.runtime.device import AsyncValues, PhaseTimer, Worker, choose_precision
from selfvitmil.settings import PretrainSettings

OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
COMPILE_FROM_STEPS = 3000
"""Steps from which compiling, which takes minutes and saves a quarter of a step's time, is worth it."""


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

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of learner, optimizer and loss scaler."""
        parts = {"learner": self.learner, "optimizer": self.optimizer, "scaler": self.scaler}
        return {name: part.state_dict() for name, part in parts.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave."""
        self.learner.load_state_dict(state["learner"])
        self.optimizer.load_state_dict(state["optimizer"])
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
                branch.embed = torch.compile(branch.embed, dynamic=False)
            self.render = torch.compile(render_view, dynamic=False)

    def try_compiled(self, batch: Batch, values: Mapping[str, float]) -> str | None:
        """Compute a first part without an update; if that fails in any process, all continue uncompiled.

        Returns a warning in that case, or raises EngineError with `pretrain.compile on`. Nothing here waits for other
        processes, so that one whose compiler fails leaves none of them waiting.
        """
        failure: Exception | None = None
        buffers = [buffer.clone() for buffer in self.learner.buffers()]
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
            branch.embed = learning.embedding_of(branch.backbone)
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
        total = torch.zeros((), device=self.worker.device)
        states: list[torch.Tensor] = []
        last: LossOutput | None = None
        outcomes = self._one_by_one(batch, values) if self.threads is None else self._side_by_side(batch, values)
        for number, outcome in enumerate(outcomes, start=1):
            total += outcome.loss.detach() / parts
            if outcome.state is not None:
                states.append(outcome.state)
            last = outcome if number == parts else None
            del outcome  # frees its logits before the next part begins
        assert last is not None
        self.update(values, states)
        self.timer("update")
        # A gradient that is not finite shows in the weights, a step that the loss scale of fp16 skips does not.
        broken = (~all_finite(self.learner.student.parameters())).to(total.dtype)
        checked = torch.stack([total, torch.full_like(total, float(stop)), broken])
        if self.worker.world_size > 1:
            dist.all_reduce(checked)
            checked /= self.worker.world_size
        return last, AsyncValues(checked)

    def update(self, values: Mapping[str, float], states: Sequence[torch.Tensor]) -> None:
        """Do the optimizer's step with these scheduled values, then update the average and the objective's state."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = values["lr"] * rate.lr_scale
            group["weight_decay"] = values["weight_decay"] if rate.decayed else 0.0
        self.scaler.unscale_(self.optimizer)
        if self.clip_grad:
            clip_each_gradient(self.learner.student.parameters(), self.clip_grad)
        self.learner.objective.before_update(self.learner.student.head, self.step)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.learner.finish_step(values["momentum"], states)

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

    def _seed_part(self, number: int) -> None:
        """Seed drop path by step, process and part, so that there is no generator state to save."""
        seed = (self.settings.seed * 1_000_003 + self.step) * 1_009
        torch.manual_seed(seed + self.worker.rank + self.worker.world_size * number)

    def _one_by_one(self, batch: Batch, values: Mapping[str, float]) -> Iterator[LossOutput]:
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
            self._seed_part(number)
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
                    self._seed_part(number)
                    embeddings.append(learner.look_ahead(views))
                ahead.joint.look_ahead(embeddings)
                self.timer("student")
        return ahead

    def _side_by_side(self, batch: Batch, values: Mapping[str, float]) -> list[LossOutput]:
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
        self, views: list[torch.Tensor], values: Mapping[str, float], part: Part, student: nn.Module | None = None
    ) -> LossOutput:
        outcome = self._forward(views, values, part, self.timer, student)
        self.scaler.scale(outcome.loss / part.joint.parts).backward()
        self.timer("backward")
        return outcome

    def _try_part(self, views: list[torch.Tensor], values: Mapping[str, float]) -> None:
        """Do a forward and backward pass in this process only, without waiting for others."""
        with learning.alone(self.learner):
            self._forward_backward(views, values, Part(JointBatch(alone=True)), self.learner.student)

    def _forward(
        self,
        views: list[torch.Tensor],
        values: Mapping[str, float],
        part: Part,
        mark: Callable[[str], None],
        student: nn.Module | None = None,
    ) -> LossOutput:
        with self._autocast():
            chosen = self.student if student is None else student
            return learning.compute_loss(self.learner, chosen, views, self.step, values["teacher_temp"], mark, part)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.worker.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def _make_views(self, batch: Batch, part: slice) -> list[torch.Tensor]:
        """Return views of stain-normalized tiles on the device."""
        device = self.worker.device
        return make_views(
            batch.tiles_B3HW[part].to(device, non_blocking=True),
            batch.view_ids_B[part].to(device, non_blocking=True),
            self.step,
            self.views.recipes,
            self.views.mean,
            self.views.std,
            seed=self.settings.seed,
            transforms_B33=None if batch.transforms_B33 is None else batch.transforms_B33[part],
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
