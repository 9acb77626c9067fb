"""Which kind of evidence an aggregator looks for, on bags with planted evidence of each kind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from selfvitmil import metrics
from selfvitmil.aggregate import build
from selfvitmil.aggregate.base import score_tiles
from selfvitmil.aggregate.selection import BINARY_KINDS, EvidenceChoice, assign_folds, evidence_words
from selfvitmil.aggregate.train import BagStore, LabelledBag, load_model, save_model, score, train
from selfvitmil.bags import Bag
from selfvitmil.settings import TrainSettings

DIM, TILES = 16, 40
SHARE = {"few": (0, 0.1), "absence": (0.2, 0), "proportion": (0.1, 0.5), "diffuse": (0, 0)}
"""Of tiles with the pattern in a negative and in a positive slide."""
EXPECTED = {"few": "positive", "absence": "negative", "proportion": "average", "diffuse": "average"}
QUICK = TrainSettings(aggregator="dsmil", device="cpu", epochs=15, min_epochs=15)


def planted(kind: str, slides: int, seed: int, exchanged: bool = False) -> list[LabelledBag]:
    rng = np.random.default_rng(seed)
    found = []
    for k in range(slides):
        label = k % 2
        features = rng.normal(size=(TILES, DIM))
        count = round(SHARE[kind][label] * TILES)
        features[rng.choice(TILES, count, replace=False), 0] += 5
        features[:, 1] += 0.8 * label * (kind == "diffuse")
        bag = Bag(f"{kind}{k}", features.astype(np.float32), None)
        found.append(LabelledBag(bag.slide, bag, 1 - label if exchanged else label))
    return found


@pytest.mark.parametrize("kind", SHARE)
def test_the_planted_kind_of_evidence_is_chosen_and_learned(kind: str):
    bags, test = planted(kind, 40, 1), planted(kind, 60, 2)
    trained = train("dsmil", bags[:30], bags[30:], 1, QUICK, seed=0)
    assert trained.evidence is not None
    assert trained.evidence.evidence == EXPECTED[kind]
    assert trained.module.config["evidence"] == trained.recipe.options["evidence"] == EXPECTED[kind]
    assert trained.evidence.slides == 40
    assert max(trained.evidence.auc, key=trained.evidence.auc.__getitem__) == EXPECTED[kind]
    scores = [each.probabilities[0] for each in score(trained.module, [each.bag for each in test])]
    assert metrics.auc([each.label for each in test], scores) > 0.95


@pytest.mark.slow
def test_the_order_of_the_classes_does_not_matter():
    """Few tiles show one class; whether that is called positive or negative, the slides are told apart alike."""
    for exchanged in (False, True):
        bags, test = planted("few", 40, 1, exchanged), planted("few", 60, 2, exchanged)
        trained = train("self-vit-mil", bags[:30], bags[30:], 1, QUICK, seed=0)
        assert trained.module.config["evidence"] == ("negative" if exchanged else "positive")
        scores = [each.probabilities[0] for each in score(trained.module, [each.bag for each in test])]
        assert metrics.auc([each.label for each in test], scores) > 0.95


def test_the_choice_is_the_same_for_all_seeds_and_is_made_once_for_a_store(monkeypatch: pytest.MonkeyPatch):
    bags, calls = planted("few", 20, 3), []
    from selfvitmil.aggregate import train as module

    real = module.choose_evidence
    monkeypatch.setattr(module, "choose_evidence", lambda *given: calls.append(1) or real(*given))
    store = BagStore("cpu")
    first, second = (train("dsmil", bags[:14], bags[14:], 1, QUICK, seed, store=store) for seed in (0, 1))
    assert len(calls) == 1
    alone = train("dsmil", bags[:14], bags[14:], 1, QUICK, 1)
    assert alone.evidence == second.evidence == first.evidence
    for name, weight in alone.module.state_dict().items():
        assert torch.equal(weight, second.module.state_dict()[name])


def test_another_learning_rate_has_a_choice_of_its_own():
    """The choice is made with the recipe's numbers: one store may not hand it to a method that has others."""
    bags, store = planted("proportion", 20, 3), BagStore("cpu")
    faster = QUICK.model_copy(update={"lr": 0.05})
    train("dsmil", bags[:14], bags[14:], 1, QUICK, 0, store=store)
    second = train("dsmil", bags[:14], bags[14:], 1, faster, 0, store=store)
    alone = train("dsmil", bags[:14], bags[14:], 1, faster, 0)
    assert len(store.evidence_choices) == 2
    assert second.evidence == alone.evidence
    train("self-vit-mil", bags[:14], bags[14:], 1, QUICK, 0, store=store)  # the same numbers, another method
    assert len(store.evidence_choices) == 2


def test_a_given_kind_is_taken_without_a_choice():
    bags = planted("few", 20, 3)
    settings = QUICK.model_copy(update={"options": {"evidence": "average"}})
    trained = train("dsmil", bags[:14], bags[14:], 1, settings, 0)
    assert trained.evidence is None
    assert trained.module.config["evidence"] == "average"
    published = train("dsmil", bags[:14], bags[14:], 1, TrainSettings(recipe="published", device="cpu", epochs=2), 0)
    assert published.module.config["evidence"] == "free"


@pytest.mark.slow
def test_with_several_classes_a_class_without_tiles_of_its_own_is_learned():
    rng = np.random.default_rng(0)

    def slide(k: int) -> LabelledBag:
        features = rng.normal(size=(TILES, DIM))
        if k % 3:
            features[:8, k % 3] += 6
        bag = Bag(f"s{k}", features.astype(np.float32), None)
        return LabelledBag(bag.slide, bag, k % 3)

    bags, test = [slide(k) for k in range(60)], [slide(k) for k in range(60)]
    longer = QUICK.model_copy(update={"epochs": 30, "min_epochs": 30})
    trained = train("dsmil", bags[:45], bags[45:], 3, longer, seed=0)
    assert trained.evidence is not None
    assert set(trained.evidence.auc) == {"free", "average"}
    found = np.array([each.probabilities for each in score(trained.module, [each.bag for each in test])])
    assert (found.argmax(1) == [each.label for each in test]).mean() > 0.9


def test_folds_keep_patients_whole_and_classes_balanced():
    bag = Bag("s", np.zeros((2, 2), np.float32), None)
    bags = [LabelledBag(f"s{k}", bag, k % 2, f"p{k // 4}_{k % 2}") for k in range(48)]
    folds = assign_folds(bags)
    assert folds is not None
    of_patient = {each.patient: set() for each in bags}
    for each, fold in zip(bags, folds, strict=True):
        of_patient[each.patient].add(fold)
    assert {len(found) for found in of_patient.values()} == {1}
    for fold in range(5):
        assert {each.label for each, own in zip(bags, folds, strict=True) if own == fold} == {0, 1}


def test_one_patient_of_a_class_is_too_few_to_choose():
    bags = planted("few", 12, 0)
    same = [LabelledBag(each.slide, each.bag, each.label, "same" * each.label) for each in bags]
    assert assign_folds(same) is None
    trained = train("dsmil", same[:8], same[8:], 1, QUICK, 0)
    assert trained.evidence is not None
    assert trained.evidence.evidence == BINARY_KINDS[0]
    assert not trained.evidence.folds


def test_choices_of_several_splits_are_told_together():
    first = EvidenceChoice("positive", 40, 5, {"positive": 0.1, "average": 0.2}, {"positive": 1.0, "average": 0.6})
    second = replace(first, auc={"positive": 0.9, "average": 0.8})
    third = replace(first, evidence="average", auc={"positive": 0.5, "average": 0.7})
    words = evidence_words([first, second, third])
    assert [text.partition(";")[0].rpartition("(")[2] for text in words] == ["2 of 3 splits", "1 of 3 splits"]
    assert "positive 0.950, average 0.700" in words[0]
    assert evidence_words([first]) == (first.reason,)


def test_a_stored_model_tells_the_choice(tmp_path):
    bags = planted("absence", 20, 3)
    trained = train("dsmil", bags[:14], bags[14:], 1, QUICK, 0)
    assert trained.evidence is not None
    save_model(tmp_path / "model", trained, {})
    module, config = load_model(tmp_path / "model")
    assert config["evidence"]["evidence"] == module.config["evidence"] == "negative"
    assert set(config["evidence"]["brier"]) == set(BINARY_KINDS)
    stored = EvidenceChoice(**config["evidence"])
    assert stored == trained.evidence
    assert stored.reason == trained.evidence.reason
    assert tuple(stored.brier) == tuple(trained.evidence.brier) == BINARY_KINDS


@pytest.mark.parametrize(
    ("kind", "is_shown"), [("free", True), ("positive", True), ("negative", False), ("average", False)]
)
def test_attention_that_shows_no_evidence_for_the_class_is_no_heatmap(kind: str, is_shown: bool):
    module = build("dsmil", DIM, 1, evidence=kind)
    (told,) = score_tiles(module, [planted("few", 1, 0)[0].bag])
    assert (told.attention_NC is not None) == is_shown
    assert told.instance_NC is not None
