"""What the embeddings of an encoder are worth, on tiles and on slides of other patients; used by `pretrain_budget.py`.

knn20, linear           mean accuracy over the classes of 20 nearest neighbours and of a linear classifier
tile_auc_knn, _linear   AUC of tumour against normal tiles, by the same two
auc_METHOD              AUC of an aggregator that was trained on slides of training patients, on slides of test patients
froc_METHOD             mean sensitivity for lesions at 1/4, 1/2, 1, 2, 4 and 8 false-positive tiles per slide
hits_METHOD             share of positive slides whose most suspicious tile lies in a lesion
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from selfvitmil import metrics
from selfvitmil.aggregate.base import TileScores, score_tiles
from selfvitmil.aggregate.train import LabelledBag, train
from selfvitmil.bags import Bag
from selfvitmil.metrics.detection import FPS
from selfvitmil.pretrain.probe import NEIGHBOURS, TEMPERATURE, fit_linear, knn_accuracy, linear_accuracy
from selfvitmil.settings import TrainSettings
from tile_cohorts import Slide, Tiles

Floats = NDArray[np.floating]


# ---------------------------------------------------------------------------------------------------- tiles


def assess_tiles(vectors_ND: torch.Tensor, tiles: Tiles, is_train: NDArray[np.bool_]) -> dict[str, float]:
    """Probes on the tiles of the test patients; classes count that occur on both sides."""
    names = sorted(set(tiles.classes[is_train]) & set(tiles.classes[~is_train]))
    known = np.isin(tiles.classes, names)
    labels = np.searchsorted(names, tiles.classes)
    sides = [torch.from_numpy(np.flatnonzero(side & known)) for side in (is_train, ~is_train)]
    parts = vectors_ND[sides[0]], labels[sides[0]], vectors_ND[sides[1]], labels[sides[1]]
    groups = [str(name) for name in tiles.patients[sides[0]]]
    found = {"knn20": knn_accuracy(*parts).balanced, "linear": linear_accuracy(*parts, groups).balanced}
    return found | _tumour_aucs(vectors_ND, tiles, is_train)


def _tumour_aucs(vectors_ND: torch.Tensor, tiles: Tiles, is_train: NDArray[np.bool_]) -> dict[str, float]:
    train_ND, test_MD = vectors_ND[torch.from_numpy(is_train)], vectors_ND[torch.from_numpy(~is_train)]
    train_labels, test_labels = (tiles.is_tumour[side].astype(np.int64) for side in (is_train, ~is_train))
    groups = [str(name) for name in tiles.patients[is_train]]
    strength = linear_accuracy(train_ND, train_labels, test_MD, test_labels, groups).strength
    scores = {
        "tile_auc_knn": neighbour_scores(train_ND, train_labels, test_MD),
        "tile_auc_linear": linear_scores(train_ND, train_labels, test_MD, strength),
    }
    return {name: metrics.auc(test_labels, values) for name, values in scores.items()}


def neighbour_scores(train_ND: torch.Tensor, labels_N: NDArray[np.int64], test_MD: torch.Tensor) -> Floats:
    """Share of tumour in the votes of the nearest training tiles, which are weighted as in `knn_accuracy`."""
    similar_MN = functional.normalize(test_MD.float(), dim=1) @ functional.normalize(train_ND.float(), dim=1).T
    nearest = similar_MN.topk(min(NEIGHBOURS, len(train_ND)), dim=1)
    votes_MK = ((nearest.values - 1) / TEMPERATURE).exp()
    is_tumour_MK = torch.from_numpy(labels_N).to(votes_MK)[nearest.indices]
    return ((votes_MK * is_tumour_MK).sum(dim=1) / votes_MK.sum(dim=1)).cpu().numpy()


def linear_scores(
    train_ND: torch.Tensor, labels_N: NDArray[np.int64], test_MD: torch.Tensor, strength: float
) -> Floats:
    """Logit of tumour by logistic regression on standardized embeddings."""
    mean_D, std_D = train_ND.mean(dim=0), train_ND.std(dim=0, correction=0).clamp_min(1e-6)
    target_NC = functional.one_hot(torch.from_numpy(labels_N), 2).to(train_ND)
    everything_N1 = torch.ones(len(train_ND), 1, device=train_ND.device)
    fitted = fit_linear((train_ND - mean_D) / std_D, target_NC, everything_N1, strength)
    logits_M2 = fitted.logits((test_MD - mean_D) / std_D)[:, 0]
    return (logits_M2[:, 1] - logits_M2[:, 0]).detach().cpu().numpy()


# ---------------------------------------------------------------------------------------------------- slides


def assess_slides(
    method: str,
    vectors_ND: NDArray[np.float32],
    training: Sequence[Slide],
    test: Sequence[Slide],
    seed: int,
    device: str,
) -> dict[str, float]:
    """AUC, FROC and hits of an aggregator on the test slides; every fifth pair of training slides is for validation."""
    settings = TrainSettings.model_validate({"aggregator": method, "device": device})
    kept: list[LabelledBag] = []
    held: list[LabelledBag] = []
    for number, slide in enumerate(training):
        bag = Bag(f"train{number}", vectors_ND[slide.rows], None)
        (held if number // 2 % 5 == 0 else kept).append(LabelledBag(bag.slide, bag, slide.label))
    module = train(method, kept, held, 1, settings, seed).module
    bags = [Bag(f"test{number}", vectors_ND[slide.rows], None) for number, slide in enumerate(test)]
    found = list(score_tiles(module, bags))
    probabilities = np.array([each.bag.probabilities[0] for each in found])
    evidence = [tile_evidence(each) for each in found]
    hits = [
        bool(slide.lesions[int(scores_N.argmax())])
        for slide, scores_N in zip(test, evidence, strict=True)
        if slide.label
    ]
    return {
        f"auc_{method}": metrics.auc(np.array([slide.label for slide in test]), probabilities),
        f"froc_{method}": lesion_froc(test, evidence),
        f"hits_{method}": float(np.mean(hits)),
    }


def tile_evidence(scores: TileScores) -> Floats:
    """Of each tile for the positive class, comparable across slides.

    The tile's own probability where the method has it, else its attention times the slide's probability.
    """
    if scores.instance_NC is not None:
        return scores.instance_NC[:, -1]
    assert scores.attention_NC is not None
    return scores.attention_NC[:, -1] * len(scores.attention_NC) * scores.bag.probabilities[0]


def lesion_froc(slides: Sequence[Slide], evidence: Sequence[Floats]) -> float:
    """Mean sensitivity at the false-positive rates of Camelyon16; a lesion has the score of its most suspicious tile.

    Every tile outside of lesions counts as a false positive by itself, in positive and negative slides.
    """
    false: list[float] = []
    lesions: list[float] = []
    for slide, scores_N in zip(slides, evidence, strict=True):
        false += scores_N[slide.lesions == 0].tolist()
        lesions += [scores_N[slide.lesions == number].max() for number in range(1, int(slide.lesions.max()) + 1)]
    falling = np.sort(false)[::-1]
    # At most so many false positives: a lesion is found where it scores above the next one.
    limits = [falling[min(int(rate * len(slides)), len(falling) - 1)] for rate in FPS]
    return float(np.mean([np.mean(np.array(lesions) > limit) for limit in limits]))
