"""Bags as tensors: on the training device, and read in chunks.

`BagStore` holds bags on one device. On a CPU nothing is copied: a bag is a tensor on the memory-mapped file. On a GPU
bags are uploaded in their own dtype (float16 for ours) and kept until `cache_gb` is full; further bags are uploaded on
each request, through pinned memory, the next one (`prefetch`) during the computation on the current one. One store
serves many training runs (folds, seeds, methods): each bag is uploaded, checked and measured once. Bags are keyed by
identity, not by name: the same slide may come with other embeddings.

`ChunkedBag` offers the few operations that aggregators use on the instances of a bag: a linear layer, a weighted sum of
instances or of a function of them, selection of some instances, and softmax attention that is linear before and after
the softmax. Each is exact, differentiable (once), computes in the module's own dtype, and needs memory for its result
and one chunk, so that training on a bag of 200,000 x 3840 float16 needs little beyond the bag's own 1.5 GB. A chunk
fits into the CPU cache, so that `attend` reads the bag once for attention, score and the gradient of the score.

N instances, D dimensions, C classes (or any few outputs), K selected instances, P parts (chunks of a bag, or bags).
"""

from __future__ import annotations

import queue
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from selfvitmil.bags import Bag, check_bag
from selfvitmil.errors import BagError
from selfvitmil.runtime.device import choose_device, cpu_threads
from selfvitmil.settings import TrainSettings

ONE_THREAD_ELEMENTS = 1 << 22
"""Number of values of the largest bag below which one CPU thread is faster than several."""
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Values converted to float64 at a time: what fits into a CPU cache, what keeps a GPU busy."""
STAGING_BYTES = 4 << 20
"""Size of one pinned staging buffer."""
STAGING_THREADS = 4
"""Copy threads: one copies a few GB/s from a mapped file, and a GPU accepts several times that."""


@contextmanager
def few_threads(bags: Sequence[Bag], device: torch.device) -> Iterator[None]:
    """Use one CPU thread where bags are small: several threads spend more time synchronizing than computing.

    On a shared machine that overhead is 50 times the work: threads spin at barriers for one that is not scheduled. The
    number of threads depends on the bags alone, so results stay bit-identical.
    """
    with cpu_threads(1 if one_thread_does(bags, device) else None):
        yield


def one_thread_does(bags: Iterable[Bag], device: torch.device) -> bool:
    """Whether one CPU thread is enough for the largest of these bags."""
    return device.type == "cpu" and are_small(bags)


def are_small(bags: Iterable[Bag]) -> bool:
    """Whether a training on these bags leaves most of a machine idle."""
    return max((bag.features_ND.size for bag in bags), default=0) < ONE_THREAD_ELEMENTS


class BagStore:
    """Bags as tensors on one device."""

    def __init__(self, device: str | torch.device = "auto", cache_gb: float | None = None):
        """`cache_gb`: GPU memory for bags; None means three quarters of what is free now."""
        self.device = choose_device(device)
        self._room_bytes = 0
        self._staging: _Staging | None = None
        if self.device.type == "cuda":
            free_bytes = torch.cuda.mem_get_info(self.device)[0]
            self._room_bytes = round(0.75 * free_bytes) if cache_gb is None else round(cache_gb * 1e9)
            self._staging = _Staging(self.device)
        self._kept: dict[Bag, Tensor] = {}
        self._coming: dict[Bag, Future[_Upload]] = {}
        self._coords: dict[Bag, Tensor] = {}
        self._moments: dict[Bag, Moments] = {}
        self._checked: set[Bag] = set()
        self.evidence_choices: dict[Any, Any] = {}
        """Choices of the kind of evidence on these bags, reused by training runs with other seeds."""

    @classmethod
    def of(cls, settings: TrainSettings) -> BagStore:
        """Return a store with the device and cache size of the settings."""
        return cls(settings.device, settings.cache_gb)

    def features(self, bag: Bag) -> Tensor:
        """Return the bag's embeddings (N, D) on the device."""
        kept = self._kept.get(bag)
        if kept is not None:
            return kept
        host_ND = _on_host(bag)
        if self._staging is None:
            self._kept[bag] = host_ND
            return host_ND
        coming = self._coming.pop(bag, None)
        features_ND = (self._staging.upload(host_ND) if coming is None else coming.result()).received()
        if host_ND.nbytes <= self._room_bytes:
            self._room_bytes -= host_ND.nbytes
            self._kept[bag] = features_ND
        return features_ND

    def prefetch(self, bag: Bag) -> None:
        """Start uploading a bag that is not cached and will be requested next."""
        if self._staging is not None and bag not in self._kept and bag not in self._coming:
            self._coming[bag] = self._staging.upload_later(_on_host(bag))

    def holds(self, bags: Sequence[Bag]) -> bool:
        """Whether all these bags stay cached at a fixed address on the device."""
        return all(bag in self._kept for bag in bags)

    def coords(self, bag: Bag) -> Tensor:
        """Return the tile corners (N, 2) on the device; raise BagError where the bag has none."""
        if bag not in self._coords:
            if bag.coords is None:
                why, how = "this aggregator was built with coordinates=True", "Build it with coordinates=False"
                raise BagError(f"{bag.slide}: its feature file has no coordinates", why, how, code="bag-without-coords")
            self._coords[bag] = torch.from_numpy(np.array(bag.coords)).to(self.device)
        return self._coords[bag]

    def check(self, bags: Sequence[Bag]) -> None:
        """Raise BagError for the first bag that is empty or contains NaN or infinity; each is looked at once."""
        bags = [bag for bag in bags if bag not in self._checked]
        for bag in bags:
            if len(bag) == 0:
                check_bag(bag)
        deviations = []
        for bag, following in zip(bags, [*bags[1:], None], strict=False):
            if following is not None and following not in self._moments:
                self.prefetch(following)
            deviations.append(self.moments(bag).squares_D.sum())
        finite = torch.stack(deviations).isfinite().tolist() if deviations else []
        for bag, is_finite in zip(bags, finite, strict=True):
            if not is_finite:
                check_bag(bag)  # its message names the row
                raise BagError(
                    f"{bag.slide}: its values are too large", "their variance overflows", code="value-overflow"
                )
        self._checked.update(bags)

    def moments(self, bag: Bag) -> Moments:
        """Return mean and sum of squared deviations of the bag's embeddings."""
        if bag not in self._moments:
            self._moments[bag] = measure(self.features(bag))
        return self._moments[bag]

    def standardization(self, bags: Sequence[Bag]) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation (D,) over all instances of these bags, float64 on the CPU."""
        whole = merge([self.moments(bag) for bag in bags])
        return whole.mean_D.cpu(), (whole.squares_D / whole.count).sqrt().cpu()


def _on_host(bag: Bag) -> Tensor:
    """Return a tensor that shares the bag's memory."""
    with warnings.catch_warnings():
        # Mapped files are read-only, which torch tensors cannot express; nothing here writes into a bag.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(bag.features_ND)


@dataclass(frozen=True, eq=False)
class LabelledBag:
    """A bag with the label of its slide."""

    slide: str
    bag: Bag
    label: Any
    """Class index; 0 or 1 for a binary label. With another outcome than classes its target, a tuple of numbers."""
    of_patient: str = ""
    """Patient identifier; empty where every slide counts as its own patient."""

    @property
    def patient(self) -> str:
        return self.of_patient or self.slide


def draw(num_instances: int, num_drawn: int, device: torch.device) -> Tensor:
    """Return indices of instances drawn without replacement, in their original order.

    Their number is fixed, so that the device need not be synchronized.
    """
    return torch.rand(num_instances, device=device).topk(num_drawn, sorted=False).indices.sort().values


# ---------------------------------------------------------------------------------------------------- moments


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, mean and sum of squared deviations of some instances, in float64."""

    count: int
    mean_D: Tensor
    squares_D: Tensor


def measure(bag_ND: Tensor) -> Moments:
    """Return the moments of a bag, computed chunk by chunk."""
    num_rows = max(1, CHUNK_ELEMENTS.get(bag_ND.device.type, 1 << 20) // bag_ND.shape[1])
    # Reused: allocating memory for every chunk costs a CPU more than the arithmetic.
    buffer = torch.empty(min(num_rows, len(bag_ND)), bag_ND.shape[1], dtype=torch.float64, device=bag_ND.device)
    parts = []
    for chunk in bag_ND.split(num_rows):
        values = buffer[: len(chunk)].copy_(chunk)
        mean_D = values.mean(0)
        parts.append(Moments(len(chunk), mean_D, values.sub_(mean_D).square_().sum(0)))
    return merge(parts)


def merge(parts: Sequence[Moments]) -> Moments:
    """Return the moments of all parts combined."""
    means_PD = torch.stack([part.mean_D for part in parts])
    counts_P1 = torch.tensor([[float(part.count)] for part in parts], device=means_PD.device, dtype=torch.float64)
    count = sum(part.count for part in parts)
    mean_D = (counts_P1 * means_PD).sum(0) / count
    within_D = torch.stack([part.squares_D for part in parts]).sum(0)
    return Moments(count, mean_D, within_D + (counts_P1 * (means_PD - mean_D).square()).sum(0))


# ---------------------------------------------------------------------------------------------------- uploading


@dataclass(frozen=True, eq=False)
class _Upload:
    """A tensor that is being copied to the device."""

    features_ND: Tensor
    arrived: torch.cuda.Event

    def received(self) -> Tensor:
        """Return the tensor for use in the current stream, which waits for the copy and keeps the memory alive."""
        current = torch.cuda.current_stream(self.features_ND.device)
        current.wait_event(self.arrived)
        self.features_ND.record_stream(current)
        return self.features_ND


class _Staging:
    """Uploads of memory-mapped bags: threads copy pieces to pinned memory, from which the device fetches them."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._free: queue.SimpleQueue[tuple[Tensor, torch.cuda.Event]] = queue.SimpleQueue()
        for _ in range(4 * STAGING_THREADS):
            piece = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
            self._free.put((piece, torch.cuda.Event()))
        self._copiers = ThreadPoolExecutor(STAGING_THREADS)
        self._ahead = ThreadPoolExecutor(1)

    def upload(self, host_ND: Tensor) -> _Upload:
        """Copy to the device; return when the host tensor has been read completely."""
        with torch.cuda.stream(self._stream):
            target_ND = torch.empty(host_ND.shape, dtype=host_ND.dtype, device=self._device)
        source, target = host_ND.flatten(), target_ND.flatten()
        size = STAGING_BYTES // host_ND.element_size()
        pieces = zip(source.split(size), target.split(size), strict=True)
        for done in [self._copiers.submit(self._copy, *piece) for piece in pieces]:
            done.result()
        arrived = torch.cuda.Event()
        arrived.record(self._stream)
        return _Upload(target_ND, arrived)

    def upload_later(self, host_ND: Tensor) -> Future[_Upload]:
        """Upload in the background."""
        return self._ahead.submit(self.upload, host_ND)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        piece, fetched = self._free.get()
        fetched.synchronize()
        pinned = piece[: source.nbytes].view(source.dtype).copy_(source)
        with torch.cuda.stream(self._stream):
            target.copy_(pinned, non_blocking=True)
            fetched.record(self._stream)
        self._free.put((piece, fetched))


# ---------------------------------------------------------------------------------------------------- chunks


CHUNK_BYTES = {"cpu": 4 << 20}
"""Bytes of a chunk in the module's dtype: on a CPU what fits into its cache ..."""
CHUNK_BYTES_ELSEWHERE = 512 << 20
"""... and on other devices enough to keep them busy."""
FEW = 8
"""Up to this many outputs, matrix-vector products are faster on a CPU than a thin matrix product (6 times)."""


class ChunkedBag:
    """The instances (h_i - mean) / std of a bag, in `dtype`; `mean_D` and `std_D` may both be None."""

    def __init__(self, bag_ND: Tensor, dtype: torch.dtype, mean_D: Tensor | None = None, std_D: Tensor | None = None):
        self.bag_ND = bag_ND
        self.dtype = dtype
        self.mean_D = mean_D
        self.std_D = std_D

    def __len__(self) -> int:
        return self.bag_ND.shape[0]

    @property
    def dim(self) -> int:
        return self.bag_ND.shape[1]

    def project(self, layer: nn.Linear) -> Tensor:
        """Return `layer(h_i)` for every instance: (N, H)."""
        weight_HD, bias_H = layer.weight, layer.bias
        if self.mean_D is not None and self.std_D is not None:
            weight_HD = weight_HD / self.std_D
            bias_H = bias_H - weight_HD @ self.mean_D
        if self.bag_ND.dtype == self.dtype and weight_HD.shape[0] > FEW:
            return F.linear(self.bag_ND, weight_HD, bias_H)  # no conversion needed, and efficient in BLAS
        return _apply(_Project, self.bag_ND, weight_HD, bias_H)

    def dot(self, weight_CD: Tensor) -> Tensor:
        """Return `weight_c . h_i` for every instance, up to a constant per class: (N, C)."""
        if self.std_D is not None:
            weight_CD = weight_CD / self.std_D
        return _apply(_Project, self.bag_ND, weight_CD.to(self.dtype), weight_CD.new_zeros(len(weight_CD)))

    def attend(self, query_CD: Tensor, direction_CD: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention a_ic = softmax over i of h_i . query_c (N, C) and score sum_i a_ic h_i . direction_c (C,).

        Equivalent loop: s = softmax([h_i @ query_c for h_i]); score_c = sum(s_i * h_i) @ direction_c.
        """
        query_CD, direction_CD = query_CD.to(self.dtype), direction_CD.to(self.dtype)
        if self.mean_D is None or self.std_D is None:
            return _apply(_Attend, self.bag_ND, query_CD, direction_CD, torch.is_grad_enabled())
        query_CD, direction_CD = query_CD / self.std_D, direction_CD / self.std_D
        attention_NC, score_C = _apply(_Attend, self.bag_ND, query_CD, direction_CD, torch.is_grad_enabled())
        return attention_NC, score_C - direction_CD @ self.mean_D

    def pool(self, weights_NC: Tensor) -> Tensor:
        """Return `sum_i weights_ic * h_i`: (C, D)."""
        return self._standardized_sum(_apply(_Pool, self.bag_ND, weights_NC.to(self.dtype)), weights_NC)

    def pool_mapped(self, weights_NC: Tensor, map_rows: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `sum_i weights_ic * map_rows(h_i)`; `map_rows` is recomputed in the backward pass (checkpointing)."""

        def of_chunk(chunk: Tensor, weights: Tensor) -> Tensor:
            return weights.T @ map_rows(self._standardized(chunk.to(self.dtype)))

        total_CV: Any = 0
        for start, stop in _spans(self.bag_ND, self.dtype):
            pieces = self.bag_ND[start:stop], weights_NC[start:stop]
            if torch.is_grad_enabled():
                total_CV = total_CV + checkpoint(of_chunk, *pieces, use_reentrant=False)
            else:
                total_CV = total_CV + of_chunk(*pieces)
        return total_CV

    def take(self, index: Tensor) -> Tensor:
        """Return the instances at `index` (any shape): (*index.shape, D)."""
        rows = self.bag_ND.index_select(0, index.flatten()).to(self.dtype)
        return self._standardized(rows).view(*index.shape, self.dim)

    def _standardized(self, rows: Tensor) -> Tensor:
        return rows if self.mean_D is None or self.std_D is None else (rows - self.mean_D) / self.std_D

    def _standardized_sum(self, pooled_CD: Tensor, weights_NC: Tensor) -> Tensor:
        if self.mean_D is None or self.std_D is None:
            return pooled_CD
        return (pooled_CD - weights_NC.sum(0)[:, None] * self.mean_D) / self.std_D


def fold(head_CV: Tensor, weight_VD: Tensor) -> Tensor:
    """Return `head @ weight` for few rows and a large weight, whose gradient is a sum of outer products."""
    return _apply(_Fold, head_CV.to(weight_VD.dtype), weight_VD)


# ---------------------------------------------------------------------------------------------------- autograd


def _apply(function: type[Function], bag_ND: Tensor, *arguments: Any) -> Any:
    # These sums run over whole bags: they stay in the module's dtype even under autocast.
    with torch.autocast(bag_ND.device.type, enabled=False):
        return function.apply(bag_ND, *arguments)


def _spans(bag_ND: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    num_bytes = CHUNK_BYTES.get(bag_ND.device.type, CHUNK_BYTES_ELSEWHERE)
    size = max(1, num_bytes // (bag_ND.shape[1] * dtype.itemsize))
    for start in range(0, bag_ND.shape[0], size):
        yield start, min(start + size, bag_ND.shape[0])


def _chunks(bag_ND: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of the bag in `dtype`, each valid until the next: converted chunks share one buffer."""
    buffer: Tensor | None = None
    for start, stop in _spans(bag_ND, dtype):
        chunk = bag_ND[start:stop]
        if bag_ND.dtype != dtype:
            if buffer is None:
                buffer = torch.empty_like(chunk, dtype=dtype)
            chunk = buffer[: stop - start].copy_(chunk)
        yield slice(start, stop), chunk


def _dot(weight_CD: Tensor, rows_ND: Tensor) -> Tensor:
    """Return `weight @ rows.T`, (C, N), by the faster way."""
    if rows_ND.device.type != "cpu" or weight_CD.shape[0] > FEW:
        return weight_CD @ rows_ND.T
    return torch.stack([rows_ND.mv(weight_D) for weight_D in weight_CD])


def _weighted(weights_CN: Tensor, rows_ND: Tensor) -> Tensor:
    """Return `weights @ rows`, (C, D), by the faster way."""
    if rows_ND.device.type != "cpu" or weights_CN.shape[0] > FEW:
        return weights_CN @ rows_ND
    return torch.stack([rows_ND.T.mv(weights_N) for weights_N in weights_CN])


def _softmax(logits_CN: Tensor) -> Tensor:
    """Return the softmax over instances; on a CPU class by class, which avoids a barrier of all threads."""
    if logits_CN.device.type != "cpu" or logits_CN.shape[0] > FEW:
        return logits_CN.softmax(1)
    return torch.stack([logits_N.softmax(0) for logits_N in logits_CN])


class _Project(Function):
    @staticmethod
    def forward(ctx: Any, bag_ND: Tensor, weight_HD: Tensor, bias_H: Tensor) -> Tensor:
        ctx.save_for_backward(bag_ND, weight_HD)
        ctx.set_materialize_grads(False)
        out_NH = weight_HD.new_empty(bag_ND.shape[0], weight_HD.shape[0])
        for part, chunk in _chunks(bag_ND, weight_HD.dtype):
            torch.add(_dot(weight_HD, chunk).T, bias_H, out=out_NH[part])
        return out_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_NH,) = grads
        if grad_NH is None:
            return None, None, None
        bag_ND, weight_HD = ctx.saved_tensors
        grad_weight_HD = torch.zeros_like(weight_HD)
        grad_bag_ND = torch.empty_like(bag_ND) if ctx.needs_input_grad[0] else None
        for part, chunk in _chunks(bag_ND, weight_HD.dtype):
            grad_weight_HD += _weighted(grad_NH[part].T, chunk)
            if grad_bag_ND is not None:
                grad_bag_ND[part] = grad_NH[part] @ weight_HD
        return grad_bag_ND, grad_weight_HD, grad_NH.sum(0)


class _Group(NamedTuple):
    """Attention statistics of some rows, with t_i = h_i . direction: mean of h_i and its covariance with t_i."""

    logits_CN: Tensor
    weights_CN: Tensor
    """Softmax over these rows alone: s_i."""
    total_C1: Tensor
    """Logsumexp of the logits."""
    score_C1: Tensor
    """sum_i s_i t_i"""
    pooled_CD: Tensor
    """sum_i s_i h_i"""
    slope_CD: Tensor
    """sum_i s_i (t_i - score) h_i; this and `pooled_CD` are empty where no gradient is needed."""

    @classmethod
    def of(cls, rows_ND: Tensor, query_CD: Tensor, direction_CD: Tensor, learns: bool) -> _Group:
        logits_CN, along_CN = _dot(query_CD, rows_ND), _dot(direction_CD, rows_ND)
        weights_CN = _softmax(logits_CN)
        total_C1 = logits_CN.amax(1, keepdim=True) - weights_CN.amax(1, keepdim=True).log()
        score_C1 = (weights_CN * along_CN).sum(1, keepdim=True)
        pooled_CD = slope_CD = query_CD.new_empty(0)
        if learns:
            pooled_CD = _weighted(weights_CN, rows_ND)
            slope_CD = _weighted(weights_CN * (along_CN - score_C1), rows_ND)
        return cls(logits_CN, weights_CN, total_C1, score_C1, pooled_CD, slope_CD)

    def merge(self, other: _Group, learns: bool) -> _Group:
        """Return both groups merged, except for logits and weights; overwrites its inputs."""
        share_C1 = (other.total_C1 - self.total_C1).sigmoid()
        score_C1 = self.score_C1 + share_C1 * (other.score_C1 - self.score_C1)
        if learns:
            self.slope_CD.add_((self.score_C1 - score_C1) * self.pooled_CD)
            other.slope_CD.add_((other.score_C1 - score_C1) * other.pooled_CD)
            self.slope_CD.add_(share_C1 * (other.slope_CD - self.slope_CD))
            self.pooled_CD.add_(share_C1 * (other.pooled_CD - self.pooled_CD))
        return self._replace(total_C1=torch.logaddexp(self.total_C1, other.total_C1), score_C1=score_C1)


class _Attend(Function):
    """Attention chunk by chunk: the rows so far and the next chunk are merged by their shares of the softmax.

    The gradient of score = sum_i s_i t_i for the query is sum_i s_i (t_i - score) h_i. It is accumulated like a
    covariance: deviations from the group's own mean, corrected when groups merge.
    """

    @staticmethod
    def forward(
        ctx: Any, bag_ND: Tensor, query_CD: Tensor, direction_CD: Tensor, learns: bool
    ) -> tuple[Tensor, Tensor]:
        logits: list[Tensor] = []
        whole: _Group | None = None
        for _, chunk in _chunks(bag_ND, query_CD.dtype):
            here = _Group.of(chunk, query_CD, direction_CD, learns)
            logits.append(here.logits_CN)
            whole = here if whole is None else whole.merge(here, learns)
        assert whole is not None  # a bag has rows
        attention_CN = whole.weights_CN if len(logits) == 1 else _softmax(torch.cat(logits, dim=1))
        _, _, _, score_C1, pooled_CD, slope_CD = whole
        ctx.save_for_backward(bag_ND, query_CD, direction_CD, attention_CN, pooled_CD, slope_CD)
        ctx.set_materialize_grads(False)
        return attention_CN.T, score_C1[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_attention_NC, grad_score_C = grads
        bag_ND, query_CD, direction_CD, attention_CN, pooled_CD, slope_CD = ctx.saved_tensors
        if grad_score_C is None:
            grad_score_C = attention_CN.new_zeros(attention_CN.shape[0])
        grad_score_C1 = grad_score_C[:, None]
        grad_direction_CD = grad_score_C1 * pooled_CD
        grad_query_CD = grad_score_C1 * slope_CD
        if grad_attention_NC is None and not ctx.needs_input_grad[0]:
            return None, grad_query_CD, grad_direction_CD, None

        grad_attention_CN = torch.zeros_like(attention_CN) if grad_attention_NC is None else grad_attention_NC.T
        grad_mean_C1 = (grad_attention_CN * attention_CN).sum(1, keepdim=True)
        grad_logits_CN = attention_CN * (grad_attention_CN - grad_mean_C1)
        score_C1 = (pooled_CD * direction_CD).sum(1, keepdim=True)
        grad_bag_ND = torch.empty_like(bag_ND) if ctx.needs_input_grad[0] else None
        for part, chunk in _chunks(bag_ND, query_CD.dtype):
            grad_query_CD += _weighted(grad_logits_CN[:, part], chunk)
            if grad_bag_ND is not None:
                share = attention_CN[:, part] * grad_score_C1
                grad_logits = grad_logits_CN[:, part] + share * (_dot(direction_CD, chunk) - score_C1)
                grad_bag_ND[part] = grad_logits.T @ query_CD + share.T @ direction_CD
        return grad_bag_ND, grad_query_CD, grad_direction_CD, None


class _Pool(Function):
    @staticmethod
    def forward(ctx: Any, bag_ND: Tensor, weights_NC: Tensor) -> Tensor:
        ctx.save_for_backward(bag_ND, weights_NC)
        pooled_CD = weights_NC.new_zeros(weights_NC.shape[1], bag_ND.shape[1])
        for part, chunk in _chunks(bag_ND, weights_NC.dtype):
            pooled_CD += _weighted(weights_NC[part].T, chunk)
        return pooled_CD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_CD,) = grads
        bag_ND, weights_NC = ctx.saved_tensors
        grad_weights_NC = torch.empty_like(weights_NC)
        for part, chunk in _chunks(bag_ND, weights_NC.dtype):
            grad_weights_NC[part] = _dot(grad_CD, chunk).T
        grad_bag_ND = (weights_NC @ grad_CD).to(bag_ND.dtype) if ctx.needs_input_grad[0] else None
        return grad_bag_ND, grad_weights_NC


class _Fold(Function):
    @staticmethod
    def forward(ctx: Any, head_CV: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(head_CV, weight_VD)
        return _weighted(head_CV, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_CD,) = grads
        head_CV, weight_VD = ctx.saved_tensors
        grad_weight_VD = torch.outer(head_CV[0], grad_CD[0])
        for head_V, grad_D in zip(head_CV[1:], grad_CD[1:], strict=True):
            grad_weight_VD.addr_(head_V, grad_D)
        return _dot(grad_CD, weight_VD), grad_weight_VD
