"""The public namespace of aggregators: constructors against `build`, their documentation, their output."""

from __future__ import annotations

import inspect

import pytest
import torch

import selfvitmil
from selfvitmil import aggregate, aggregators
from selfvitmil.errors import ConfigError

CLASS_OF = {
    "self-vit-mil": "SelfViTMIL",
    "dsmil": "DSMIL",
    "dsmil-lc": "DSMIL_LC",
    "abmil": "ABMIL",
    "abmil-gated": "GatedABMIL",
    "chowder": "CHOWDER",
    "transmil": "TransMIL",
    "mil-rnn": "MILRNN",
    "clam-sb": "CLAM_SB",
    "mean": "MeanPooling",
    "max": "MaxPooling",
    "topk": "TopKPooling",
}
UNPUBLISHED = ("mean", "topk")


def test_every_aggregator_has_a_public_class():
    assert set(CLASS_OF) == set(aggregate.NAMES)
    assert {*CLASS_OF.values(), "Aggregator", "AggregatorOutput"} == set(aggregators.__all__)


@pytest.mark.parametrize("num_classes", [1, 3])
@pytest.mark.parametrize("name", aggregate.NAMES)
def test_constructor_equals_build(name, num_classes):
    torch.manual_seed(5)
    expected = aggregate.build(name, 16, num_classes)
    torch.manual_seed(5)
    found = getattr(aggregators, CLASS_OF[name])(dim=16, num_classes=num_classes)
    assert type(found) is type(expected)
    assert list(found.config.items()) == list(expected.config.items())  # in the same order: it is written to files
    assert found.state_dict().keys() == expected.state_dict().keys()
    for weight, twin in zip(found.state_dict().values(), expected.state_dict().values(), strict=True):
        assert torch.equal(weight, twin)
    bag_ND = torch.randn(9, 16)
    assert torch.equal(found.eval()(bag_ND).logits, expected.eval()(bag_ND).logits)


def test_config_records_positional_and_keyword_arguments():
    module = aggregators.DSMIL_LC(8, 2, top=3)
    assert module.config == {
        "name": "dsmil-lc",
        "dim": 8,
        "num_classes": 2,
        **aggregate.settings_of("dsmil-lc"),
        "top": 3,
    }
    assert module.config["v"] == "bottleneck"
    assert aggregators.GatedABMIL(8, 1).attention_u is not None
    assert aggregators.ABMIL(8, 1, gated=True).config["name"] == "abmil"


@pytest.mark.parametrize("name", aggregate.NAMES)
def test_arguments_and_paper_are_documented(name):
    method = getattr(aggregators, CLASS_OF[name])
    parameters = inspect.signature(method).parameters
    assert list(parameters)[:2] == ["dim", "num_classes"]
    assert {key: each.default for key, each in parameters.items() if key not in ("dim", "num_classes")} == (
        aggregate.settings_of(name)
    )
    described = inspect.getdoc(method) or ""
    for key in parameters:
        assert f"\n    {key}: " in described, f"{method.__name__} does not describe {key}"
    assert name in UNPUBLISHED or any(year in described for year in ("1997", "2018", "2019", "2021", "2022"))


@pytest.mark.parametrize("name", aggregate.NAMES)
def test_readable_output_fields(name):
    out = getattr(aggregators, CLASS_OF[name])(dim=16, num_classes=2)(torch.randn(7, 16))
    assert out.logits is out.logits_C
    assert out.attention is out.attention_NC
    assert out.instance_logits is out.instance_logits_NC
    assert out.attention is not None or out.instance_logits is not None
    assert (out.stream_logits is not None) == ("dsmil" in name or name == "self-vit-mil")


@pytest.mark.parametrize("wrong", [{"dim": 0}, {"dim": 16.0}, {"num_classes": True}, {"num_classes": -1}])
def test_invalid_sizes_are_refused(wrong):
    with pytest.raises(ConfigError, match="positive integer"):
        aggregators.ABMIL(**{"dim": 16, "num_classes": 1, **wrong})


def test_namespace_is_reachable_from_the_package():
    assert selfvitmil.aggregators is aggregators
