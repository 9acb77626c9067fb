"""DSMIL (Li et al. 2021) with every option of its two published heads; also the aggregator of Self-ViT-MIL.

Two streams judge a bag. The first scores every instance, p_i = W_p h_i + b_p; the best of a class is its critical
instance m, and its score is the stream's logit. The second compares all instances with the critical one:

    s_i = softmax_i( q(h_i) . q(h_m) / sqrt(L) )        vector_c = sum_i s_i v(h_i)        bag logit = head(vectors)

    setting        values (meaning)
    q              "linear" (2021, the paper), "mlp" (2024: linear, ReLU, linear, tanh); L = query_dim = 128
    v              "linear" (the paper, D x D), "identity" (2024), "linear_relu", "bottleneck" (linear, D to fewer)
    head           "per_class" (each class sees its own vector: the paper's W_b), "conv1d" (every class sees them all)
    scale          "sqrt", "none" (no division: the paper's equation), or the divisor itself
    init           "orthogonal" (with zero biases), "default" (torch's), "quiet" (orthogonal, but what gives the logits
                   of both streams begins 100 times smaller: see `_quiet`)
    dropout        share of a vector's entries that v does not see in training
    top            critical instances per class: their queries and logits are averaged; 1 in both papers
    evidence       which instances decide (`EVIDENCE`): "free" in both papers; `aggregate.train` resolves "auto"
    score          how the streams make `logits_C`: "mean_prob" (logit of the mean probability), "mean_logit", "bag" or
                   "max"

The loss is half the cross-entropy of each stream, one sigmoid per class; in training `guidance` may add to it.
Parameters carry DSMIL's own names, so that its checkpoints load as they are (`load_dsmil`), and ours load there.

With linear q, Q is never made: q(h_i) . q(h_m) = h_i . (W_q^T q(h_m)) + a constant that the softmax drops. With linear
v neither is V: sum_i s_i (W_v h_i + b_v) = W_v (sum_i s_i h_i) + b_v. With both, v and a head per class are one vector,
W_v^T w. All of this is exact; a step then costs what reading the bag twice and updating the weights costs.

N instances, D dimensions, C classes, L query dimensions, V entries of a bag vector, K critical instances per class.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfvitmil.aggregate.contract import Aggregator, AggregatorOutput, build, check_choice, check_range, register
from selfvitmil.aggregate.pooling import top_instances
from selfvitmil.aggregate.rows import Memory, Rows, fold
from selfvitmil.errors import ConfigError
from selfvitmil.untrusted import load_torch

QUERIES = ("linear", "mlp")
VALUES = ("linear", "identity", "linear_relu", "bottleneck")
HEADS = ("per_class", "conv1d")
INITS = ("orthogonal", "default", "quiet")
SCORES = ("mean_prob", "bag", "max", "mean_logit")
EVIDENCE = {
    "free": "any tiles: attention is learned freely",
    "positive": "few tiles that show the positive class",
    "negative": "few tiles that show the negative class, absent from positive slides",
    "average": "the average tile: many tiles differ a little, or their proportions do",
}
"""Kinds of evidence that an aggregator may look for.

`positive` and `negative` add a third term to the training loss: attention learns to look where the first stream sees
most evidence for that class (`guidance`), where free attention can overfit to single slides. `negative` is `positive`
with the classes exchanged. Both need a binary label. `average` gives all instances the same attention, and the first
stream averages all scores instead of the highest, so that both streams classify the mean embedding.
"""
AUTO = "auto"
SHARPNESS = 2.5
"""Of guided attention: an instance with a score higher by one standard deviation is wanted e^2.5 times as attended."""
LEAST_ATTENTION = 1e-30
"""Below it attention is not guided: its logarithm would leave float32."""


@dataclass(frozen=True, eq=False)
class DsmilOutput(AggregatorOutput):
    """Adds both streams."""

    bag_logits_C: Tensor
    """Of the attention stream."""
    max_logits_C: Tensor
    """Of the critical instances."""
    critical_KC: Tensor
    """Which instances those are, best first."""


@register("dsmil")
@register("dsmil-lc", v="bottleneck")
@register("self-vit-mil", q="linear", v="linear", init="default")
class Dsmil(Aggregator):
    """Dual-stream MIL.

    `dsmil` is the head of 2024, `self-vit-mil` the paper's, `dsmil-lc` the one for bags of several scales whose vectors
    are concatenated, finest first (`bags.concat_scales`); there `v="linear"` would be too large.
    """

    one_sigmoid_per_class = True

    def __init__(
        self,
        dim: int,
        num_classes: int,
        *,
        q: str = "mlp",
        v: str = "identity",
        head: str = "per_class",
        scale: str | float = "sqrt",
        init: str = "orthogonal",
        dropout: float = 0.0,
        top: int = 1,
        score: str = "mean_prob",
        query_dim: int = 128,
        bottleneck: int = 512,
        evidence: str = "free",
        standardize: bool = False,
    ):
        super().__init__(dim, num_classes, standardize)
        check_choice("q", q, QUERIES)
        check_choice("v", v, VALUES)
        check_choice("head", head, HEADS)
        check_choice("init", init, INITS)
        check_range("dropout", dropout, 0, 0.99)
        check_range("top", top, 1, whole=True)
        check_choice("score", score, SCORES)
        check_range("query_dim", query_dim, 1, whole=True)
        check_range("bottleneck", bottleneck, 1, whole=True)
        check_choice("evidence", evidence, tuple(EVIDENCE))
        if num_classes > 1 and evidence in ("positive", "negative"):
            why = "there is no one positive class: some classes may show in no tile at all"
            raise ConfigError(f"evidence={evidence!r} with {num_classes} classes", why, "Choose 'free' or 'average'")
        if dropout and v == "identity":
            raise ConfigError(f"dropout={dropout} with v='identity'", "dropout acts on what v sees", "Choose another v")
        self.top = top
        self.score = score
        self.evidence = evidence
        # With `negative` it points at tiles of the negative class, with `average` at all alike.
        self.attention_is_evidence = evidence in ("free", "positive")
        self.sign = -1.0 if evidence == "negative" else 1.0
        """Of the logits: with `negative` the streams score the negative class."""
        self.divisor = _divisor(scale, query_dim)
        self.waits_for_device = v == "linear_relu" or dropout > 0  # checkpointing looks at random states
        self.i_classifier = _InstanceStream(dim, num_classes)
        self.b_classifier = _BagStream(dim, num_classes, q, v, head, dropout, query_dim, bottleneck)
        if evidence == "average":
            self.b_classifier.q.requires_grad_(False)  # attention is the same for all, nothing is compared
        if init != "default":
            self.apply(_orthogonal)
        if init == "quiet":
            _quiet(self.i_classifier.fc[0], self.b_classifier.fcc)

    def aggregate(self, rows: Rows, coords_N2: Tensor | None) -> DsmilOutput:
        scorer = _linear(self.i_classifier.fc[0])
        instance_logits_NC = rows.project(scorer)
        critical_KC, critical_logits_KC = top_instances(rows, instance_logits_NC, scorer, self.top)
        if self.evidence == "average":
            max_logits_C = instance_logits_NC.mean(0)
            attention_NC, bag_logits_C = self.b_classifier.average(rows)
        else:
            max_logits_C = _mean_of_first_axis(critical_logits_KC)
            attention_NC, bag_logits_C = self.b_classifier(rows, critical_KC, self.divisor)
        if self.sign < 0:
            instance_logits_NC, bag_logits_C, max_logits_C = -instance_logits_NC, -bag_logits_C, -max_logits_C
        logits_C = combine(bag_logits_C, max_logits_C, self.score)
        return DsmilOutput(logits_C, attention_NC, instance_logits_NC, bag_logits_C, max_logits_C, critical_KC)

    def loss(self, output: AggregatorOutput, label: Tensor | float) -> Tensor:
        """Half the cross-entropy of each stream, and in training the guidance of attention."""
        assert isinstance(output, DsmilOutput)
        logits_2C = torch.stack([output.bag_logits_C, output.max_logits_C])
        target_C = self.target(label, logits_2C)
        streams = F.binary_cross_entropy_with_logits(logits_2C, target_C.expand_as(logits_2C))
        if self.evidence not in ("positive", "negative") or not self.training:
            return streams
        assert output.attention_NC is not None
        assert output.instance_logits_NC is not None
        return streams + guidance(output.attention_NC, self.sign * output.instance_logits_NC)


def guidance(attention_NC: Tensor, instance_logits_NC: Tensor) -> Tensor:
    """How far attention is from where the first stream sees most evidence, which learns nothing from this.

    Wanted is the softmax of the scores, standardized within the bag so that it is as sharp on the first day as on the
    last; the distance is the Kullback-Leibler divergence from it, averaged over the classes.
    """
    scores_NC = instance_logits_NC.detach()
    spread_C = scores_NC.std(0, correction=0).clamp_min(LEAST_ATTENTION)
    wanted_NC = (SHARPNESS * (scores_NC - scores_NC.mean(0)) / spread_C).log_softmax(0)
    missing_NC = wanted_NC - attention_NC.clamp_min(LEAST_ATTENTION).log()
    return (wanted_NC.exp() * missing_NC).sum(0).mean()


def combine(bag_logits_C: Tensor, max_logits_C: Tensor, score: str = "mean_prob") -> Tensor:
    """One logit per class from those of the two streams; works as well on stored scores, to score anew."""
    check_choice("score", score, SCORES)
    if score == "bag":
        return bag_logits_C
    if score == "max":
        return max_logits_C
    if score == "mean_logit":
        return 0.5 * (bag_logits_C + max_logits_C)
    # logit((p + q) / 2) = log(p + q) - log((1 - p) + (1 - q)), in logarithms so that sure streams stay finite;
    # log p = -softplus(-logit) and log(1 - p) = -softplus(logit)
    positive_C = torch.logaddexp(-F.softplus(-bag_logits_C), -F.softplus(-max_logits_C))
    return positive_C - torch.logaddexp(-F.softplus(bag_logits_C), -F.softplus(max_logits_C))


class _InstanceStream(nn.Module):
    def __init__(self, dim: int, num_classes: int):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(dim, num_classes))


class _BagStream(nn.Module):
    def __init__(
        self, dim: int, num_classes: int, q: str, v: str, head: str, dropout: float, query_dim: int, bottleneck: int
    ):
        super().__init__()
        first = nn.Linear(dim, query_dim)
        mlp = nn.Sequential(first, nn.ReLU(), nn.Linear(query_dim, query_dim), nn.Tanh())
        self.q = first if q == "linear" else mlp
        width = bottleneck if v == "bottleneck" else dim
        relu = [nn.ReLU()] if v == "linear_relu" else []
        self.v = None if v == "identity" else nn.Sequential(nn.Dropout(dropout), nn.Linear(dim, width), *relu)
        self.fcc = _Head((num_classes, num_classes, width) if head == "conv1d" else (num_classes, width))
        self.dropout = dropout
        self.v_is_linear = not relu
        self._memory = Memory()

    def forward(self, rows: Rows, critical_KC: Tensor, divisor: float) -> tuple[Tensor, Tensor]:
        """Attention (N, C) and bag logits (C,)."""
        query_CL = _mean_of_first_axis(self.q(rows.take(critical_KC))) / divisor
        if isinstance(self.q, nn.Linear) and self._folds():
            direction_CD, constant_C = self._folded_head()
            attention_NC, score_C = rows.attend(query_CL @ self.q.weight, direction_CD)
            return attention_NC, score_C + constant_C
        attention_NC = self._attention_logits(rows, query_CL).softmax(0)
        return attention_NC, self.fcc(self._vectors(rows, attention_NC))

    def average(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """The same attention for all instances (N, C), and the bag logits (C,) that go with it."""
        attention_NC = self.fcc.weight.new_full((len(rows), len(self.fcc.bias)), 1 / len(rows))
        return attention_NC, self.fcc(self._vectors(rows, attention_NC))

    def _folds(self) -> bool:
        """Whether v and head are one linear map of a class's mean instance now."""
        return self.v_is_linear and not (self.dropout and self.training) and self.fcc.is_per_class

    def _folded_head(self) -> tuple[Tensor, Tensor]:
        """Direction (C, D) and constant (C,) of that map: w . (W_v z + b_v) + b = (W_v^T w) . z + w . b_v + b."""
        head_CV = self.fcc.weight.flatten(1)
        if self.v is None:
            return head_CV, self.fcc.bias
        linear = _linear(self.v[1])
        return fold(head_CV, linear.weight, self._memory), head_CV @ linear.bias + self.fcc.bias

    def _attention_logits(self, rows: Rows, query_CL: Tensor) -> Tensor:
        if isinstance(self.q, nn.Linear):
            return rows.dot(query_CL @ self.q.weight)
        first, *rest = self.q
        return nn.Sequential(*rest)(rows.project(_linear(first))) @ query_CL.T

    def _vectors(self, rows: Rows, attention_NC: Tensor) -> Tensor:
        """sum_i s_i v(h_i) of every class: (C, V)."""
        if self.v is None:
            return rows.pool(attention_NC)
        if self.v_is_linear and not (self.dropout and self.training):
            return self.v(rows.pool(attention_NC))
        return rows.pool_mapped(attention_NC, self.v)


class _Head(nn.Module):
    """From the classes' vectors to their logits; weight (C, V), or (C, C, V) where each class sees all vectors."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        bound = 1 / math.sqrt(math.prod(shape[1:]))  # as torch's layers do
        self.weight = nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(shape[0]).uniform_(-bound, bound))

    @property
    def is_per_class(self) -> bool:
        return self.weight.ndim == 2 or len(self.weight) == 1

    def forward(self, vectors_CV: Tensor) -> Tensor:
        if self.weight.ndim == 3:
            return self.weight.flatten(1) @ vectors_CV.flatten() + self.bias
        return (vectors_CV * self.weight).sum(1) + self.bias


def _mean_of_first_axis(values: Tensor) -> Tensor:
    """Mean over the critical instances; of one it is that one, for which a GPU need not be asked."""
    return values.squeeze(0) if len(values) == 1 else values.mean(0)


def _linear(layer: nn.Module) -> nn.Linear:
    assert isinstance(layer, nn.Linear)
    return layer


def _divisor(scale: str | float, query_dim: int) -> float:
    if isinstance(scale, str):
        check_choice("scale", scale, ("sqrt", "none"))
        return math.sqrt(query_dim) if scale == "sqrt" else 1.0
    check_range("scale", scale, 1e-6)
    return float(scale)


def _orthogonal(layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear | _Head):
        nn.init.orthogonal_(layer.weight)
        nn.init.zeros_(layer.bias)


@torch.no_grad()
def _quiet(*layers: nn.Module) -> None:
    """Let scorer and head begin with next to no opinion.

    The critical instance is an argmax: a scorer of random weights picks instances by noise, learns from what it picked
    and has to unlearn the noise first, for which a small cohort is too short and which never leaves the weights wholly.
    Not zero, where all instances would tie and their order decide.
    """
    for layer in layers:
        for parameter in layer.parameters():
            parameter.mul_(0.01)


# ---------------------------------------------------------------------------------------------------- checkpoints


def load_dsmil(source: Mapping[str, Any] | str | Path, **settings: Any) -> Aggregator:
    """A DSMIL module from a checkpoint with DSMIL's own names: a state dict, or a file of one.

    The head is told from the names: linear or MLP queries; v linear (2021) or identity (2024), or with MLP queries
    linear and ReLU; `settings` overrule that. As in DSMIL's code the divisor is the square root of 128 rounded to
    float32. The module has the dtype of the weights. ConfigError where the names or shapes are none of DSMIL's.
    """
    state = _read_state(source)
    mlp, v = "b_classifier.q.0.weight" in state, "identity"
    for name in ("i_classifier.fc.0.weight", f"b_classifier.q.{'0.' if mlp else ''}weight", "b_classifier.fcc.weight"):
        if name not in state:
            why = f"it has no {name}, but {', '.join(sorted(state)[:4]) or 'nothing'} ..."
            raise ConfigError("this is no DSMIL checkpoint", why, "Give the aggregator's weights, not the embedder's")
    num_classes, dim = state["i_classifier.fc.0.weight"].shape
    query_dim = len(state["b_classifier.q.0.weight" if mlp else "b_classifier.q.weight"])
    width = state["b_classifier.fcc.weight"].shape[-1]
    if "b_classifier.v.1.weight" in state:
        v = "bottleneck" if width != dim else "linear_relu" if mlp else "linear"
    found = {
        "q": "mlp" if mlp else "linear",
        "v": v,
        "head": "conv1d" if state["b_classifier.fcc.weight"].ndim == 3 else "per_class",
        "scale": float(np.sqrt(np.float32(query_dim))),
        "init": "default",
        "query_dim": query_dim,
        "bottleneck": width,
        "standardize": "input_mean_D" in state,
    }
    module = build("dsmil", dim, num_classes, **{**found, **settings})
    module.to(state["i_classifier.fc.0.weight"].dtype)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError("this DSMIL checkpoint does not fit its own head", " ".join(str(error).split())) from None
    return module


def _read_state(source: Mapping[str, Any] | str | Path) -> dict[str, Tensor]:
    if not isinstance(source, Mapping):
        try:
            source = load_torch(Path(source))
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"{Path(str(source)).name}: no weights can be read from it", first_line) from None
        if not isinstance(source, Mapping):
            raise ConfigError("this is no DSMIL checkpoint", f"the file holds a {type(source).__name__}")
    return {str(name).removeprefix("module."): torch.as_tensor(value) for name, value in source.items()}
