"""Slide embeddings: pooling against numpy, and that an aggregator's is what its classifier turns into the logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from helpers.error_codes import has_code
from selfvitmil.aggregate import NAMES, build
from selfvitmil.aggregate.slide_embedding import CHUNK_ROWS, pool, pool_by_model
from selfvitmil.bags import Bag
from selfvitmil.errors import BagError, ConfigError

WITHOUT = ("mean", "max", "topk", "chowder")
SMALL: dict[str, dict[str, Any]] = {
    "abmil": {"hidden": 16},
    "transmil": {"hidden": 16, "heads": 2},
    "clam-sb": {"hidden": 16},
}


def bag(number: int = 9, dim: int = 12) -> Bag:
    values = np.random.default_rng(0).normal(size=(number, dim)).astype(np.float16)
    return Bag("s", values, np.arange(2 * number).reshape(-1, 2) * 448)


@pytest.mark.parametrize("number", [1, CHUNK_ROWS + 3])
def test_pooling_equals_numpy(number: int):
    values = bag(number).features_ND
    assert pool(values, "mean") == pytest.approx(values.astype(np.float64).mean(axis=0), abs=1e-6)
    assert np.array_equal(pool(values, "max"), values.max(axis=0))
    assert pool(values, "max").dtype == pool(values, "mean").dtype == np.float32
    with pytest.raises(ConfigError, check=has_code("unknown-pooling")):
        pool(values, "median")


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT])
def test_the_classifier_turns_the_embedding_into_the_logits(name: str, classes: int):
    torch.manual_seed(0)
    module: Any = build(name, 12, classes, standardize=True, **SMALL.get(name, {})).eval()
    module.set_standardization(torch.randn(12), torch.rand(12) + 0.5)
    own = bag()
    embedding = torch.from_numpy(pool_by_model(module, own))
    with torch.no_grad():
        output = module(torch.from_numpy(own.features_ND))
        if "mil" in name and hasattr(output, "bag_logits_C"):  # DSMIL and its kin: one embedding per class
            head = module.b_classifier.fcc
            expected, found = output.bag_logits_C, head(embedding.reshape(classes, -1))
        else:
            expected, found = output.logits_C, module.classifier(embedding)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert embedding.ndim == 1
    assert not module.training


@pytest.mark.parametrize("name", WITHOUT)
def test_methods_that_pool_scores_have_none(name: str):
    with pytest.raises(ConfigError, check=has_code("no-slide-embedding")):
        pool_by_model(build(name, 12, 1).eval(), bag())


def test_embeddings_of_another_encoder_are_refused():
    with pytest.raises(BagError, check=has_code("dimension-mismatch")):
        pool_by_model(build("abmil", 8, 1).eval(), bag())
