"""DSMIL, dual-stream MIL, with the options of its two published heads; also the aggregator of Self-ViT-MIL.

B. Li, Y. Li and K. W. Eliceiri, "Dual-stream Multiple Instance Learning Network for Whole Slide Image Classification
with Self-supervised Contrastive Learning", CVPR 2021, arXiv:2011.08939. A. G. Gul, O. Cetin, C. Reich, N. Flinner,
T. Prangemeier and H. Koeppl, "Histopathological Image Classification based on Self-Supervised Vision Transformer and
Weak Labels", SPIE Medical Imaging 2022, arXiv:2210.09021.

A bag is classified by two streams. The instance stream scores every instance, p_i = W_p h_i + b_p; the highest-scoring
instance of a class is its critical instance m, and its score is the stream's logit. The attention stream compares all
instances with the critical one:

    s_i = softmax_i( q(h_i) . q(h_m) / sqrt(L) )        b_c = sum_i s_i v(h_i)        bag logit = head(b)

The loss is half the cross-entropy of each stream, with one sigmoid per class; in training `attention_guidance` may be
added. Parameters carry DSMIL's own names, so that published checkpoints load directly (`load_dsmil`), and ours load in
DSMIL's code.

With linear q, the queries of all instances are never materialized: q(h_i) . q(h_m) = h_i . (W_q^T q(h_m)) + a constant
that cancels in the softmax. The same holds for linear v: sum_i s_i (W_v h_i + b_v) = W_v (sum_i s_i h_i) + b_v. With
both, v and a per-class head fold into one direction, W_v^T w. All of this is exact; the cost of a step is then that of
reading the bag twice and updating the weights.

N instances, D dimensions, C classes, L query dimensions, V dimensions of a bag embedding, K critical instances per
class.
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

from selfvitmil.aggregate.bag_tensors import ChunkedBag, fold
from selfvitmil.aggregate.base import Aggregator, AggregatorOutput, build, check_choice, check_range, register
from selfvitmil.aggregate.pooling import top_instances
from selfvitmil.errors import ConfigError
from selfvitmil.outcomes import Outcome
from selfvitmil.store.files import load_torch

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

`positive` and `negative` add a third term to the training loss: attention is pulled towards the instances with the
highest instance-stream scores for that class (`attention_guidance`), where free attention can overfit to single slides.
`negative` is `positive` with the classes exchanged. Both need a binary label. `average` uses uniform attention, and the
instance stream averages all scores instead of the highest, so that both streams classify the mean embedding.
"""
AUTO = "auto"
SHARPNESS = 2.5
"""Of guided attention: one standard deviation more in score multiplies the target attention by e^2.5."""
LEAST_ATTENTION = 1e-30
"""Lower bound of attention in the guidance term, so that its logarithm stays within float32."""


@dataclass(frozen=True, eq=False)
class DSMILOutput(AggregatorOutput):
    """Adds the logits of both streams and the critical instances."""

    bag_logits_C: Tensor
    """Logits of the attention stream."""
    max_logits_C: Tensor
    """Logits of the instance stream: those of the critical instances."""
    critical_KC: Tensor
    """Indices of the critical instances of each class, highest score first."""

    @property
    def stream_logits(self) -> tuple[Tensor, Tensor]:
        """Slide logits (C,) of the instance stream and of the attention stream."""
        return self.max_logits_C, self.bag_logits_C


@register("dsmil")
class DSMIL(Aggregator):
    """Dual-stream MIL (Li et al., CVPR 2021, arXiv:2011.08939), with the head of its 2024 code by default.

    Args:
        dim: Feature dimension D of the embeddings.
        num_classes: Number of classes C; 1 means a binary label with a single logit.
        q: Query network: "linear" (2021, the paper) or "mlp" (2024: linear, ReLU, linear, tanh).
        v: Value network: "linear" (the paper, D x D), "identity" (2024), "linear_relu" or "bottleneck" (D to
            `bottleneck`).
        head: "per_class" (each class sees its own bag embedding: the paper's W_b) or "conv1d" (every class sees all).
        scale: Divisor of the attention logits: "sqrt" of `query_dim`, "none" (the paper's equation) or a number.
        init: "orthogonal" (zero biases), "default" (torch's), or "quiet" (orthogonal, with the output layers of both
            streams scaled by 0.01; see `_quiet`).
        dropout: Dropout rate on the input of v.
        top: Critical instances per class; their queries and logits are averaged. 1 in both papers.
        score: Combination of the streams in `logits_C`: "mean_prob" (logit of the mean probability), "mean_logit",
            "bag" or "max".
        query_dim: Query dimension L.
        bottleneck: Output dimension of v = "bottleneck".
        evidence: Kind of evidence to look for (`EVIDENCE`); "free" in both papers, and the trainer resolves "auto".
        standardize: Standardize each input dimension; statistics are set by `set_standardization`.

    The output has `attention` (N, C), `instance_logits` (N, C), `bag_logits_C`, `max_logits_C` and `critical_KC`.
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
            why = "there is no single positive class: some classes may not appear in any tile"
            raise ConfigError(
                f"evidence={evidence!r} with {num_classes} classes",
                why,
                "Choose 'free' or 'average'",
                code="invalid-evidence",
            )
        if dropout and v == "identity":
            raise ConfigError(
                f"dropout={dropout} with v='identity'",
                "dropout acts on the input of v",
                "Choose another v",
                code="invalid-dropout",
            )
        self.top = top
        self.score = score
        self.evidence = evidence
        # With `negative` attention highlights tiles of the negative class, with `average` it is uniform.
        self.attention_is_evidence = evidence in ("free", "positive")
        self.sign = -1.0 if evidence == "negative" else 1.0
        """Sign of the logits: with `negative` the streams score the negative class."""
        self.divisor = _divisor(scale, query_dim)
        self.waits_for_device = v == "linear_relu" or dropout > 0  # checkpointing reads random states
        self.i_classifier = _InstanceStream(dim, num_classes)
        self.b_classifier = _BagStream(dim, num_classes, q, v, head, dropout, query_dim, bottleneck)
        if evidence == "average":
            self.b_classifier.q.requires_grad_(False)  # attention is uniform, queries are unused
        if init != "default":
            self.apply(_orthogonal)
        if init == "quiet":
            _quiet(self.i_classifier.fc[0], self.b_classifier.fcc)

    def aggregate(self, bag: ChunkedBag, coords_N2: Tensor | None) -> DSMILOutput:
        scorer = _linear(self.i_classifier.fc[0])
        instance_logits_NC = bag.project(scorer)
        critical_KC, critical_logits_KC = top_instances(bag, instance_logits_NC, scorer, self.top)
        if self.evidence == "average":
            max_logits_C = instance_logits_NC.mean(0)
            attention_NC, bag_logits_C = self.b_classifier.average(bag)
        else:
            max_logits_C = _mean_of_first_axis(critical_logits_KC)
            attention_NC, bag_logits_C = self.b_classifier(bag, critical_KC, self.divisor)
        if self.sign < 0:
            instance_logits_NC, bag_logits_C, max_logits_C = -instance_logits_NC, -bag_logits_C, -max_logits_C
        logits_C = combine(bag_logits_C, max_logits_C, self.score)
        return DSMILOutput(logits_C, attention_NC, instance_logits_NC, bag_logits_C, max_logits_C, critical_KC)

    def predict(self, outcome: Outcome) -> None:
        """Predict another outcome; the mean of the two streams' raw outputs takes the place of mean probabilities."""
        super().predict(outcome)
        if self.score == "mean_prob":
            self.score = "mean_logit"

    def trained_logits(self, output: AggregatorOutput) -> tuple[Tensor, ...]:
        assert isinstance(output, DSMILOutput)
        return output.bag_logits_C, output.max_logits_C

    def penalty(self, output: AggregatorOutput) -> Tensor | None:
        """Return the attention guidance in training, where it is used."""
        if self.evidence not in ("positive", "negative") or not self.training:
            return None
        assert output.attention_NC is not None
        assert output.instance_logits_NC is not None
        return attention_guidance(output.attention_NC, self.sign * output.instance_logits_NC)

    def loss(self, output: AggregatorOutput, label: Tensor | float) -> Tensor:
        """Return half the cross-entropy of each stream, plus in training the attention guidance where it is used."""
        assert isinstance(output, DSMILOutput)
        logits_2C = torch.stack([output.bag_logits_C, output.max_logits_C])
        target_C = self.target(label, logits_2C)
        streams = F.binary_cross_entropy_with_logits(logits_2C, target_C.expand_as(logits_2C))
        guidance = self.penalty(output)
        return streams if guidance is None else streams + guidance

    def slide_embedding(self, bag_ND: Tensor, coords_N2: Tensor | None = None) -> Tensor:
        """Return the bag embeddings of all classes side by side (C * V,), which the head of the bag stream sees."""
        attention_NC = self(bag_ND, coords_N2).attention_NC
        dtype = next(self.parameters()).dtype
        standardized = (self.input_mean_D, self.input_std_D) if self.standardize else ()
        return self.b_classifier.bag_embeddings(ChunkedBag(bag_ND, dtype, *standardized), attention_NC).flatten()

    def critical_evidence(self, output: AggregatorOutput) -> Tensor:
        """Return the instance logits (N, C), by which the critical instances are selected."""
        assert output.instance_logits_NC is not None
        return output.instance_logits_NC


@register("self-vit-mil", q="linear", v="linear", init="default")
class SelfViTMIL(DSMIL):
    """Aggregator of Self-ViT-MIL (Gul, Cetin et al., SPIE Medical Imaging 2022, arXiv:2210.09021).

    `DSMIL` with linear queries and values and torch's default initialization, as in the paper.
    """


@register("dsmil-lc", v="bottleneck")
class DSMIL_LC(DSMIL):
    """DSMIL for multi-scale embeddings (DSMIL-LC; Li et al., CVPR 2021, arXiv:2011.08939).

    `DSMIL` for bags whose embeddings of several scales are concatenated, finest first (`bags.concat_scales`). Values
    have a bottleneck by default: a D x D layer would be too large.
    """


def attention_guidance(attention_NC: Tensor, instance_logits_NC: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of attention from the instance scores' softmax, averaged over classes.

    The target is the softmax of the instance-stream scores, without gradient, standardized within the bag so that its
    sharpness stays the same throughout training.
    """
    scores_NC = instance_logits_NC.detach()
    spread_C = scores_NC.std(0, correction=0).clamp_min(LEAST_ATTENTION)
    wanted_NC = (SHARPNESS * (scores_NC - scores_NC.mean(0)) / spread_C).log_softmax(0)
    missing_NC = wanted_NC - attention_NC.clamp_min(LEAST_ATTENTION).log()
    return (wanted_NC.exp() * missing_NC).sum(0).mean()


def combine(bag_logits_C: Tensor, max_logits_C: Tensor, score: str = "mean_prob") -> Tensor:
    """Return one logit per class from those of the two streams; also works on stored stream logits."""
    check_choice("score", score, SCORES)
    if score == "bag":
        return bag_logits_C
    if score == "max":
        return max_logits_C
    if score == "mean_logit":
        return 0.5 * (bag_logits_C + max_logits_C)
    # logit((p + q) / 2) = log(p + q) - log((1 - p) + (1 - q)), in logarithms so that saturated streams stay finite;
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

    def forward(self, bag: ChunkedBag, critical_KC: Tensor, divisor: float) -> tuple[Tensor, Tensor]:
        """Return attention (N, C) and bag logits (C,)."""
        query_CL = _mean_of_first_axis(self.q(bag.take(critical_KC))) / divisor
        if isinstance(self.q, nn.Linear) and self._folds():
            direction_CD, constant_C = self._folded_head()
            attention_NC, score_C = bag.attend(query_CL @ self.q.weight, direction_CD)
            return attention_NC, score_C + constant_C
        attention_NC = self._attention_logits(bag, query_CL).softmax(0)
        return attention_NC, self.fcc(self.bag_embeddings(bag, attention_NC))

    def average(self, bag: ChunkedBag) -> tuple[Tensor, Tensor]:
        """Return uniform attention (N, C) and its bag logits (C,)."""
        attention_NC = self.fcc.weight.new_full((len(bag), len(self.fcc.bias)), 1 / len(bag))
        return attention_NC, self.fcc(self.bag_embeddings(bag, attention_NC))

    def _folds(self) -> bool:
        """Whether v and head currently fold into one linear function of a class's mean instance."""
        return self.v_is_linear and not (self.dropout and self.training) and self.fcc.is_per_class

    def _folded_head(self) -> tuple[Tensor, Tensor]:
        """Return its direction (C, D) and constant (C,): w . (W_v z + b_v) + b = (W_v^T w) . z + w . b_v + b."""
        head_CV = self.fcc.weight.flatten(1)
        if self.v is None:
            return head_CV, self.fcc.bias
        linear = _linear(self.v[1])
        return fold(head_CV, linear.weight), head_CV @ linear.bias + self.fcc.bias

    def _attention_logits(self, bag: ChunkedBag, query_CL: Tensor) -> Tensor:
        if isinstance(self.q, nn.Linear):
            return bag.dot(query_CL @ self.q.weight)
        first, *rest = self.q
        return nn.Sequential(*rest)(bag.project(_linear(first))) @ query_CL.T

    def bag_embeddings(self, bag: ChunkedBag, attention_NC: Tensor) -> Tensor:
        """Return sum_i s_i v(h_i) of every class: (C, V)."""
        if self.v is None:
            return bag.pool(attention_NC)
        if self.v_is_linear and not (self.dropout and self.training):
            return self.v(bag.pool(attention_NC))
        return bag.pool_mapped(attention_NC, self.v)


class _Head(nn.Module):
    """Linear head on the bag embeddings; weight (C, V), or (C, C, V) where each class sees all embeddings."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        bound = 1 / math.sqrt(math.prod(shape[1:]))  # as torch's layers do
        self.weight = nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(shape[0]).uniform_(-bound, bound))

    @property
    def is_per_class(self) -> bool:
        return self.weight.ndim == 2 or len(self.weight) == 1

    def forward(self, bag_CV: Tensor) -> Tensor:
        if self.weight.ndim == 3:
            return self.weight.flatten(1) @ bag_CV.flatten() + self.bias
        return (bag_CV * self.weight).sum(1) + self.bias


def _mean_of_first_axis(values: Tensor) -> Tensor:
    """Return the mean over the critical instances; a single one is returned without a reduction kernel."""
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
    """Scale the initial weights of scorer and head by 0.01, so that initial logits are close to 0.

    The critical instance is an argmax: with full-size random weights the scorer first selects instances by noise and
    reinforces that selection, which small cohorts do not unlearn completely. Not zero, where all instances would tie
    and their order would decide.
    """
    for layer in layers:
        for parameter in layer.parameters():
            parameter.mul_(0.01)


# ---------------------------------------------------------------------------------------------------- checkpoints


def load_dsmil(source: Mapping[str, Any] | str | Path, **settings: Any) -> Aggregator:
    """Return a DSMIL module from a checkpoint of DSMIL's code: a state dict, or a file of one.

    The head is inferred from the parameter names: linear or MLP queries; v linear (2021) or identity (2024), or with
    MLP queries linear and ReLU; `settings` override that. As in DSMIL's code the divisor is the square root of 128
    rounded to float32. The module has the dtype of the weights. Raises ConfigError where names or shapes do not match.
    """
    state = _read_state(source)
    mlp, v = "b_classifier.q.0.weight" in state, "identity"
    for name in ("i_classifier.fc.0.weight", f"b_classifier.q.{'0.' if mlp else ''}weight", "b_classifier.fcc.weight"):
        if name not in state:
            why = f"it has no {name}, but {', '.join(sorted(state)[:4]) or 'nothing'} ..."
            raise ConfigError(
                "not a DSMIL checkpoint",
                why,
                "Pass the aggregator's weights, not the embedder's",
                code="not-a-dsmil-checkpoint",
            )
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
        raise ConfigError(
            "the DSMIL checkpoint has inconsistent shapes", " ".join(str(error).split()), code="inconsistent-checkpoint"
        ) from None
    return module


def _read_state(source: Mapping[str, Any] | str | Path) -> dict[str, Tensor]:
    if not isinstance(source, Mapping):
        try:
            source = load_torch(Path(source))
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"{Path(str(source)).name}: the weights cannot be read", first_line, code="unreadable-weights"
            ) from None
        if not isinstance(source, Mapping):
            raise ConfigError(
                "not a DSMIL checkpoint", f"the file holds a {type(source).__name__}", code="not-a-dsmil-checkpoint"
            )
    return {str(name).removeprefix("module."): torch.as_tensor(value) for name, value in source.items()}
