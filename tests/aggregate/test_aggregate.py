"""The contract that all aggregators keep, and each method's formula as a slow loop.

Where a number is compared with another, the other comes from plain loops over instances written here, or from a
property that must hold (order, duplicates, scaling).
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selfvitmil import aggregate
from selfvitmil.aggregate import attention as attention_module
from selfvitmil.aggregate import bag_tensors, base
from selfvitmil.aggregate.attention import CLAMOutput
from selfvitmil.aggregate.pooling import MILRNN, MILRNNOutput
from selfvitmil.errors import BagError, ConfigError

DIM = 12
SMALL = {
    "self-vit-mil": {"query_dim": 6},
    "dsmil": {"query_dim": 6},
    "dsmil-lc": {"query_dim": 6, "bottleneck": 5},
    "abmil": {"hidden": 10, "attention_dim": 6},
    "abmil-gated": {"hidden": 10, "attention_dim": 6},
    "chowder": {"top": 3, "bottom": 2, "scorer_hidden": 7, "slide_hidden": (6, 5)},
    "transmil": {"hidden": 8, "heads": 2, "landmarks": 4},
    "mil-rnn": {"s": 4, "hidden": 9},
    "clam-sb": {"hidden": 10, "attention_dim": 6, "k": 3},
    "mean": {},
    "max": {},
    "topk": {"k": 3},
}
CASES = [(name, SMALL[name]) for name in aggregate.NAMES]
CASES += [
    ("self-vit-mil", {"query_dim": 6, "head": "conv1d", "scale": "none", "top": 2, "score": "mean_logit"}),
    ("dsmil", {"query_dim": 6, "v": "linear_relu", "q": "linear", "init": "default", "score": "bag"}),
    ("dsmil", {"query_dim": 6, "v": "linear", "score": "max"}),
    ("self-vit-mil", {"query_dim": 6, "evidence": "average", "top": 3}),
    ("abmil", {"hidden": 0, "attention_dim": 6}),
    ("chowder", {"form": "original"}),
    ("transmil", {"hidden": 8, "heads": 2, "landmarks": 4, "coordinates": True}),
    ("clam-sb", {"hidden": 0, "attention_dim": 6, "k": 2, "subtyping": True, "instance_loss": "ce"}),
]
ALL = pytest.mark.parametrize(
    ("name", "chosen"),
    CASES,
    ids=[" ".join([name, *(f"{k}={v}" for k, v in chosen.items())]) for name, chosen in CASES],
)
CLASSES = pytest.mark.parametrize("num_classes", [1, 2, 3])


def made(name: str, num_classes: int, chosen: dict, seed: int = 0, dtype=torch.float64) -> aggregate.Aggregator:
    torch.manual_seed(seed)
    return aggregate.build(name, DIM, num_classes, **chosen).to(dtype).eval()


def bag_of(n: int, seed: int = 1, dtype=torch.float64) -> Tensor:
    return torch.randn(n, DIM, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def corners_of(n: int, seed: int = 2) -> Tensor:
    """Distinct places on a grid of 7 columns, 224 apart."""
    place = torch.randperm(7 * n, generator=torch.Generator().manual_seed(seed))[:n]
    return torch.stack([place % 7, place // 7], dim=1) * 224


# ---------------------------------------------------------------------------------------------------- the contract


def test_names_are_what_can_be_built():
    assert set(aggregate.NAMES) == set(base.CLASSES)


@ALL
@CLASSES
@pytest.mark.parametrize("n", [1, 2, 9, 40])
def test_output_has_the_fields_of_the_contract(name, chosen, num_classes, n):
    module = made(name, num_classes, chosen)
    out = module(bag_of(n), corners_of(n))
    assert out.logits_C.shape == (num_classes,)
    assert out.logits_C.isfinite().all()
    probabilities = module.probabilities(out)
    if num_classes == 1 or module.one_sigmoid_per_class:
        torch.testing.assert_close(probabilities, 1 / (1 + (-out.logits_C).exp()))
    else:
        torch.testing.assert_close(probabilities, out.logits_C.exp() / out.logits_C.exp().sum())
    if out.instance_logits_NC is not None:
        assert out.instance_logits_NC.shape == (n, num_classes)
    if out.attention_NC is not None:
        assert out.attention_NC.shape == (n, num_classes)
        assert (out.attention_NC >= 0).all()
        torch.testing.assert_close(out.attention_NC.sum(0), torch.ones(num_classes, dtype=torch.float64))


def test_which_methods_have_what():
    have = {"attention": set(), "instance": set(), "order": set()}
    for name in aggregate.NAMES:
        module = made(name, 2, SMALL[name])
        out = module(bag_of(9))
        have["attention"] |= {name} if out.attention_NC is not None else set()
        have["instance"] |= {name} if out.instance_logits_NC is not None else set()
        have["order"] |= {name} if module.is_order_dependent else set()
    dsmil = {"self-vit-mil", "dsmil", "dsmil-lc"}
    assert have["attention"] == dsmil | {"abmil", "abmil-gated", "clam-sb", "transmil"}
    assert have["instance"] == dsmil | {"chowder", "mil-rnn", "clam-sb", "mean", "max", "topk"}
    assert have["order"] == {"transmil"}
    assert not made("transmil", 1, {**SMALL["transmil"], "coordinates": True}).is_order_dependent


@ALL
@CLASSES
def test_order_does_not_matter_unless_the_method_says_so(name, chosen, num_classes):
    module = made(name, num_classes, chosen)
    bag_ND, corners_N2 = bag_of(23), corners_of(23)
    order = torch.randperm(23, generator=torch.Generator().manual_seed(3))
    out, again = module(bag_ND, corners_N2), module(bag_ND[order], corners_N2[order])
    if module.is_order_dependent:
        assert not torch.allclose(again.logits_C, out.logits_C)
        return
    torch.testing.assert_close(again.logits_C, out.logits_C)
    for found, expected in ((again.attention_NC, out.attention_NC), (again.instance_logits_NC, out.instance_logits_NC)):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            torch.testing.assert_close(found, expected[order])
    torch.testing.assert_close(module.loss(again, 0), module.loss(out, 0))


@ALL
@CLASSES
def test_equal_instances_share_attention_equally(name, chosen, num_classes):
    module = made(name, num_classes, chosen)
    out = module(bag_of(1).expand(6, -1), torch.arange(12).reshape(6, 2) if module.needs_coordinates else None)
    assert out.logits_C.isfinite().all()
    if module.is_order_dependent or module.needs_coordinates:
        assert out.logits_C.shape == (num_classes,)  # its tokens see their places, so shares may differ
        return
    if out.attention_NC is not None:
        torch.testing.assert_close(out.attention_NC, torch.full((6, num_classes), 1 / 6, dtype=torch.float64))
    if out.instance_logits_NC is not None:
        torch.testing.assert_close(out.instance_logits_NC, out.instance_logits_NC[:1].expand(6, -1))


@pytest.mark.parametrize(
    "name", ["self-vit-mil", "dsmil", "dsmil-lc", "abmil", "abmil-gated", "clam-sb", "mean", "max"]
)
def test_a_bag_twice_is_the_same_slide(name):
    module = made(name, 2, SMALL[name])
    bag_ND = bag_of(8)
    once, twice = module(bag_ND), module(bag_ND.repeat(2, 1))
    torch.testing.assert_close(twice.logits_C, once.logits_C)
    if once.attention_NC is not None and twice.attention_NC is not None:
        torch.testing.assert_close(twice.attention_NC[:8] + twice.attention_NC[8:], once.attention_NC)


@ALL
@CLASSES
def test_gradients_are_finite_and_reach_every_parameter(name, chosen, num_classes):
    module = made(name, num_classes, chosen, seed=5)
    reached: dict[str, float] = {}
    for seed in range(6):
        for label in range(max(2, num_classes)):
            module.zero_grad()
            module.loss(module(bag_of(17, seed) + label, corners_of(17, seed)), label).backward()
            for key, parameter in module.named_parameters():
                if not parameter.requires_grad:  # says that it takes no part
                    continue
                assert parameter.grad is not None, key
                assert parameter.grad.isfinite().all(), key
                reached[key] = max(reached.get(key, 0.0), float(parameter.grad.abs().max()))
    no_effect = {"attention_w.bias"}  # the same for all instances: softmax drops it
    if num_classes > 1:
        no_effect |= {"slide.6.bias"}  # the same for all classes
    assert [key for key, size in reached.items() if size < 1e-14 and key not in no_effect] == []


@ALL
@CLASSES
@pytest.mark.parametrize("n", [1, 2, 3])
def test_tiny_bags_train(name, chosen, num_classes, n):
    module = made(name, num_classes, chosen, dtype=torch.float32).train()
    loss = module.loss(module(bag_of(n, dtype=torch.float32), corners_of(n)), num_classes - 1)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


@ALL
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_module_computes_in_its_own_dtype(name, chosen, dtype):
    module = made(name, 2, chosen, dtype=torch.float32)
    bag_ND = bag_of(21).to(dtype)
    found, expected = module(bag_ND, corners_of(21)), module(bag_ND.float(), corners_of(21))
    assert found.logits_C.dtype == torch.float32
    torch.testing.assert_close(found.logits_C, expected.logits_C, rtol=1e-4, atol=1e-5)
    module.loss(found, 1).backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module.loss(expected, 1).backward()
    for found_grad, parameter in zip(gradients, module.parameters(), strict=True):
        torch.testing.assert_close(found_grad, parameter.grad, rtol=1e-3, atol=1e-5)


@ALL
@CLASSES
def test_huge_values_stay_finite(name, chosen, num_classes):
    module = made(name, num_classes, chosen, dtype=torch.float32)
    for label in range(max(2, num_classes)):
        module.zero_grad()
        out = module(bag_of(15, dtype=torch.float32) * 1e4, corners_of(15))
        loss = module.loss(out, label)
        loss.backward()
        assert loss.isfinite()
        assert out.logits_C.isfinite().all()
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        assert all(each.grad is not None and each.grad.isfinite().all() for each in trained)


@ALL
def test_an_instance_that_is_not_a_number_is_not_passed_over(name, chosen):
    bag_ND = bag_of(11)
    bag_ND[4, 3] = torch.nan
    assert made(name, 2, chosen)(bag_ND, corners_of(11)).logits_C.isnan().any()


@ALL
def test_same_seed_same_module_and_config_rebuilds_it(name, chosen):
    module, again = made(name, 3, chosen, seed=8), made(name, 3, chosen, seed=8)
    assert module.config == again.config
    rebuilt = aggregate.build(**module.config).double().eval()
    for one, two in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    rebuilt.load_state_dict(module.state_dict())
    bag_ND, corners_N2 = bag_of(9), corners_of(9)
    assert torch.equal(rebuilt(bag_ND, corners_N2).logits_C, module(bag_ND, corners_N2).logits_C)
    assert torch.equal(copy.deepcopy(module)(bag_ND, corners_N2).logits_C, module(bag_ND, corners_N2).logits_C)


@ALL
def test_standardization_equals_standardized_input(name, chosen):
    plain = made(name, 2, chosen)
    inside = made(name, 2, {**chosen, "standardize": True})
    mean_D, std_D = bag_of(1, seed=9)[0], bag_of(1, seed=10)[0].exp()
    std_D[0] = 0  # a dimension that never varies
    inside.set_standardization(mean_D, std_D)
    bag_ND, corners_N2 = bag_of(13), corners_of(13)
    expected = plain((bag_ND - mean_D) / torch.where(std_D > 0, std_D, 1.0), corners_N2)
    found = inside(bag_ND, corners_N2)
    torch.testing.assert_close(found.logits_C, expected.logits_C)
    torch.testing.assert_close(found.attention_NC, expected.attention_NC)
    plain.loss(expected, 1).backward()
    inside.loss(found, 1).backward()
    for one, two in zip(inside.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


@pytest.mark.parametrize("name", [name for name in aggregate.NAMES if name != "transmil"])
def test_many_instances(name):
    module = made(name, 1, SMALL[name], dtype=torch.float32)
    bag_ND = torch.zeros(500_000, DIM, dtype=torch.float16)
    bag_ND[400_000] = 1
    out = module(bag_ND)
    module.loss(out, 1).backward()
    assert out.logits_C.isfinite().all()


def test_many_instances_transmil():
    module = made("transmil", 1, SMALL["transmil"], dtype=torch.float32)
    out = module(bag_of(30_000, dtype=torch.float32).half())
    module.loss(out, 1).backward()
    assert out.logits_C.isfinite().all()


# ---------------------------------------------------------------------------------------------------- labels, errors


@CLASSES
def test_labels_may_be_numbers_or_vectors(num_classes):
    module = made("abmil", num_classes, SMALL["abmil"])
    out = module(bag_of(5))
    for label in range(max(2, num_classes)):
        vector = torch.tensor([float(label)]) if num_classes == 1 else torch.eye(num_classes)[label]
        expected = module.loss(out, label)
        torch.testing.assert_close(module.loss(out, torch.tensor(label)), expected)
        torch.testing.assert_close(module.loss(out, vector), expected)
        logits = out.logits_C.tolist()
        if num_classes == 1:
            by_hand = math.log1p(math.exp(-logits[0] if label else logits[0]))
        else:
            by_hand = math.log(sum(math.exp(each) for each in logits)) - logits[label]
        assert math.isclose(expected.item(), by_hand, rel_tol=1e-9)


@pytest.mark.parametrize("label", [3, -1, 1.5, torch.zeros(2)])
def test_labels_out_of_range_are_refused(label):
    module = made("mean", 3, {})
    with pytest.raises(ConfigError):
        module.loss(module(bag_of(2)), label)


@pytest.mark.parametrize(
    ("name", "chosen", "message"),
    [
        ("dsmill", {}, "did you mean 'dsmil'"),
        ("dsmil", {"quey_dim": 3}, "did you mean 'query_dim'"),
        ("dsmil", {"v": "identty"}, "did you mean 'identity'"),
        ("dsmil", {"dropout": 1.5}, "from 0 to 0.99"),
        ("dsmil", {"dropout": 0.5}, "dropout.*identity"),
        ("dsmil", {"scale": "sqr"}, "did you mean 'sqrt'"),
        ("dsmil", {"top": 0}, "at least 1"),
        ("dsmil", {"top": 1.5}, "integer"),
        ("transmil", {"hidden": 10, "heads": 4}, "heads"),
        ("chowder", {"form": "orignal"}, "did you mean 'original'"),
        ("chowder", {"slide_hidden": (0,)}, "at least 1"),
        ("topk", {"k": 0}, "at least 1"),
        ("max", {"k": 3}, "unknown setting 'k'"),
        ("clam-sb", {"gated": False}, "unknown setting 'gated'"),
        ("mil-rnn", {"shuffle": "yes"}, "Choose one of"),
    ],
)
def test_settings_that_make_no_sense(name, chosen, message):
    with pytest.raises(ConfigError, match=message):
        aggregate.build(name, DIM, 2, **chosen)


@pytest.mark.parametrize(("dim", "num_classes"), [(0, 1), (4, 0), (4, True), (4.0, 1)])
def test_sizes_that_make_no_sense(dim, num_classes):
    with pytest.raises(ConfigError, match="positive integer"):
        aggregate.build("mean", dim, num_classes)


def test_bags_that_do_not_fit():
    module = made("mean", 1, {})
    with pytest.raises(BagError, match="without instances"):
        module(torch.zeros(0, DIM))
    with pytest.raises(BagError, match="built for 12"):
        module(torch.zeros(3, 5))
    with pytest.raises(BagError, match="one bag is"):
        module(torch.zeros(1, 3, DIM))
    with pytest.raises(BagError, match="one bag is"):
        module(torch.zeros(3, DIM, dtype=torch.int64))
    with pytest.raises(BagError, match="need one"):
        module(bag_of(3), corners_of(4))
    with pytest.raises(BagError, match="without coordinates"):
        made("transmil", 1, {**SMALL["transmil"], "coordinates": True})(bag_of(3))
    with pytest.raises(ConfigError, match="standardize=True"):
        module.set_standardization(torch.zeros(DIM), torch.ones(DIM))


# ---------------------------------------------------------------------------------------------------- reading in chunks


@given(n=st.integers(1, 11), dim=st.integers(1, 5), few=st.integers(1, 10), chunk_rows=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_rows_equal_the_dense_formula(n, dim, few, chunk_rows):
    generator = torch.Generator().manual_seed(n * 1000 + dim * 100 + few * 10 + chunk_rows)
    bag_ND = torch.randn(n, dim, dtype=torch.float64, generator=generator, requires_grad=True)
    query_CD = torch.randn(few, dim, dtype=torch.float64, generator=generator, requires_grad=True)
    weights_NC = torch.rand(n, few, dtype=torch.float64, generator=generator, requires_grad=True)
    direction_CD = torch.randn(few, dim, dtype=torch.float64, generator=generator, requires_grad=True)
    head = torch.randn(few, dim, dtype=torch.float64, generator=generator)
    mix = torch.randn(n, few, dtype=torch.float64, generator=generator)
    leaves = (bag_ND, query_CD, direction_CD, weights_NC)

    def total(seen: bag_tensors.ChunkedBag | None) -> Tensor:
        if seen is None:
            attention_NC = (bag_ND @ query_CD.T).softmax(0)
            score_C = ((attention_NC.T @ bag_ND) * direction_CD).sum(1)
            summed_CD, mapped_CD = weights_NC.T @ bag_ND, weights_NC.T @ bag_ND.tanh()
            logits_NC = bag_ND @ query_CD.T
        else:
            attention_NC, score_C = seen.attend(query_CD, direction_CD)
            summed_CD, mapped_CD = seen.pool(weights_NC), seen.pool_mapped(weights_NC, torch.tanh)
            logits_NC = seen.dot(query_CD)
        parts = [(head[:, 0] * score_C.sin()).sum(), (mix * attention_NC.sin()).sum(), (head * summed_CD.sin()).sum()]
        return torch.stack([*parts, (head * mapped_CD).sum(), (mix * logits_NC.cos()).sum()])

    expected = total(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bag_tensors.CHUNK_BYTES, "cpu", chunk_rows * dim * 8)
        found = total(bag_tensors.ChunkedBag(bag_ND, torch.float64))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        for one, two in zip(found, expected, strict=True):
            pairs = (torch.autograd.grad(each, leaves, retain_graph=True, allow_unused=True) for each in (one, two))
            for found_grad, expected_grad in zip(*pairs, strict=True):
                torch.testing.assert_close(found_grad, expected_grad, rtol=1e-11, atol=1e-11)


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the largest result of any operation that is not a view of the bag."""

    def __init__(self, bag_ND: Tensor):
        super().__init__()
        self.bag_pointer = bag_ND.untyped_storage().data_ptr()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() != self.bag_pointer:
                self.numel = max(self.numel, each.numel())
        return result


@ALL
def test_a_bag_is_never_copied_whole(name, chosen, monkeypatch):
    monkeypatch.setitem(bag_tensors.CHUNK_BYTES, "cpu", 1 << 16)
    torch.manual_seed(0)
    module = aggregate.build(name, 256, 1, **chosen)
    bag_ND = torch.randn(1000, 256).half()
    module.loss(module(bag_ND[:3], corners_of(3)), 1).backward()
    with LargestTensor(bag_ND) as largest:
        module.loss(module(bag_ND, corners_of(1000)), 1).backward()
    assert largest.numel < bag_ND.numel() / 2


# ---------------------------------------------------------------------------------------------------- slow loops


def layer(module: torch.nn.Module, name: str):
    """Weight and bias as nested lists."""
    part = module.get_submodule(name)
    return part.weight.tolist(), part.bias.tolist()


def affine(pair, vector):
    weight, bias = pair
    return [sum(w * x for w, x in zip(row, vector, strict=True)) + b for row, b in zip(weight, bias, strict=True)]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def softplus(x):
    return math.log1p(math.exp(x))


def softmax(values):
    exps = [math.exp(value - max(values)) for value in values]
    return [each / sum(exps) for each in exps]


def weighted_mean(weights, vectors):
    return [sum(w * vector[d] for w, vector in zip(weights, vectors, strict=True)) for d in range(len(vectors[0]))]


def same(found: Tensor | None, expected) -> None:
    assert found is not None
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-10)


@CLASSES
@pytest.mark.parametrize("n", [1, 2, 7])
def test_slow_loop_pooling(num_classes, n):
    bag_ND = bag_of(n)
    for name, chosen in (("mean", {}), ("max", {}), ("topk", {"k": 3})):
        module = made(name, num_classes, chosen)
        scores = [affine(layer(module, "scorer"), vector) for vector in bag_ND.tolist()]
        by_class = [sorted((score[c] for score in scores), reverse=True) for c in range(num_classes)]
        count = {"mean": n, "max": 1, "topk": min(3, n)}[name]
        out = module(bag_ND)
        same(out.logits_C, [sum(column[:count]) / count for column in by_class])
        same(out.instance_logits_NC, scores)


@CLASSES
@pytest.mark.parametrize(("gated", "hidden"), [(False, 10), (True, 10), (False, 0), (True, 0)])
def test_slow_loop_abmil(num_classes, gated, hidden):
    module = made("abmil", num_classes, {"gated": gated, "hidden": hidden, "attention_dim": 4})
    vectors = bag_of(6).tolist()
    if hidden:
        vectors = [[max(0.0, x) for x in affine(layer(module, "project"), vector)] for vector in vectors]
    logits = []
    for vector in vectors:
        inner = [math.tanh(x) for x in affine(layer(module, "attention_v"), vector)]
        if gated:
            gate = [sigmoid(x) for x in affine(layer(module, "attention_u"), vector)]
            inner = [x * g for x, g in zip(inner, gate, strict=True)]
        logits += affine(layer(module, "attention_w"), inner)
    attention = softmax(logits)
    out = module(bag_of(6))
    same(out.attention_NC, [[a] * num_classes for a in attention])
    same(out.logits_C, affine(layer(module, "classifier"), weighted_mean(attention, vectors)))


@CLASSES
@pytest.mark.parametrize("n", [1, 2, 5, 9])
@pytest.mark.parametrize(("instance_loss", "subtyping"), [("svm", False), ("ce", False), ("svm", True)])
def test_slow_loop_clam(num_classes, n, instance_loss, subtyping):
    chosen = {**SMALL["clam-sb"], "instance_loss": instance_loss, "subtyping": subtyping, "bag_weight": 0.6}
    module = made("clam-sb", num_classes, chosen)
    out = module(bag_of(n))
    assert isinstance(out, CLAMOutput)
    assert out.attention_NC is not None
    hidden = [[max(0.0, x) for x in affine(layer(module, "project"), vector)] for vector in bag_of(n).tolist()]
    attention = out.attention_NC[:, 0].tolist()
    same(out.logits_C, affine(layer(module, "classifier"), weighted_mean(attention, hidden)))
    two_way = [affine(layer(module, "instance_classifiers"), vector) for vector in hidden]
    order = sorted(range(n), key=lambda i: -attention[i])
    k = min(3, n // 2)
    margin = {"svm": 1.0, "ce": 0.0}[instance_loss]
    for label in range(max(2, num_classes)):
        parts = []
        for c in range(max(2, num_classes)):
            inside = [(i, 1) for i in order[:k]] + [(i, 0) for i in order[n - k :]]
            asked = inside if c == label else [(i, 0) for i in order[:k]] if subtyping else []
            losses = []
            for i, truth in asked:
                right, wrong = two_way[i][2 * c + truth], two_way[i][2 * c + 1 - truth]
                losses.append(softplus(margin + wrong - right))  # two classes: log(e^0 + e^(margin + wrong - right))
            parts.append(sum(losses) / len(losses) if losses else 0.0)
        instance = sum(parts) / (len(parts) if subtyping else 1)
        same(module.loss(out, label), 0.6 * module.bag_loss(out.logits_C, label).item() + 0.4 * instance)
    first = 1 if num_classes == 1 else 0
    same(
        out.instance_logits_NC,
        [[row[2 * c + 1] - row[2 * c] for c in range(first, first + num_classes)] for row in two_way],
    )


@CLASSES
@pytest.mark.parametrize("n", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("form", ["current", "original"])
def test_slow_loop_chowder(num_classes, n, form):
    module = made("chowder", num_classes, {"form": form, "top": 3, "bottom": 2})
    scores = []
    for vector in bag_of(n).tolist():
        score = affine(layer(module, "scorer"), vector)
        if form == "current":
            score = affine(layer(module, "scorer_out"), [sigmoid(x) for x in score])
        scores.append(score)
    logits = []
    for c in range(num_classes):
        column = sorted((score[c] for score in scores), reverse=True)
        state = column[:3] + column[-2:] if n >= 5 else [column[j * n // 5] for j in range(5)]
        for number in (0, 3):
            state = [sigmoid(x) for x in affine(layer(module, f"slide.{number}"), state)]
        logits += affine(layer(module, "slide.6"), state)
    out = module(bag_of(n))
    same(out.logits_C, logits)
    same(out.instance_logits_NC, scores)
    penalty = 0.5 * sum(w * w for row in layer(module, "scorer")[0] for w in row) if form == "original" else 0.0
    same(module.loss(out, 1), module.bag_loss(out.logits_C, 1).item() + penalty)


@CLASSES
@pytest.mark.parametrize("n", [1, 3, 9])
def test_slow_loop_mil_rnn(num_classes, n):
    module = made("mil-rnn", num_classes, SMALL["mil-rnn"])
    assert isinstance(module, MILRNN)
    vectors = bag_of(n).tolist()
    scores = [affine(layer(module, "scorer"), vector) for vector in vectors]
    suspicion = [score[0] if num_classes == 1 else max(softmax(score)[1:]) for score in scores]
    order = sorted(range(n), key=lambda i: -suspicion[i])[:4]
    state = [0.0] * 9
    for i in order:
        moved = affine(layer(module, "state"), state)
        state = [max(0.0, x + y) for x, y in zip(affine(layer(module, "input"), vectors[i]), moved, strict=True)]
    out = module(bag_of(n))
    assert isinstance(out, MILRNNOutput)
    same(out.logits_C, affine(layer(module, "classifier"), state))
    same(out.top_logits_C, scores[order[0]])
    same(out.instance_logits_NC, scores)
    module.mining_loss(out, 1).backward(retain_graph=True)
    assert module.classifier.weight.grad is None
    module.zero_grad()
    module.sequence_loss(out, 1).backward()
    assert module.scorer.weight.grad is None


# ---------------------------------------------------------------------------------------------------- TransMIL


def slow_layer(part: attention_module._Layer, tokens_TH: Tensor) -> tuple[Tensor, Tensor]:
    """A layer head by head with all matrices made; also the approximate attention of each head."""
    num_tokens, width = tokens_TH.shape
    size = width // part.heads
    padded = torch.cat([torch.zeros(-num_tokens % part.landmarks, width, dtype=torch.float64), part.norm(tokens_TH)])
    length = len(padded) // part.landmarks
    qkv = padded @ part.qkv.weight.T
    matrices, few = [], []
    for head in range(part.heads):
        q, k, v = (qkv[:, kind * width + head * size :][:, :size] for kind in range(3))
        q = q / size**0.5
        q_few = torch.stack([q[i * length : (i + 1) * length].mean(0) for i in range(part.landmarks)])
        k_few = torch.stack([k[i * length : (i + 1) * length].mean(0) for i in range(part.landmarks)])
        matrices.append(((q @ k_few.T).softmax(1), (q_few @ k_few.T).softmax(1), (q_few @ k.T).softmax(1)))
        few.append(v)
    largest = max(float(a.sum(0).max()) for _, a, _ in matrices) * max(float(a.sum(1).max()) for _, a, _ in matrices)
    mixed, attention = [], []
    for head, ((left, middle, right), v) in enumerate(zip(matrices, few, strict=True)):
        z, unit = middle.T / largest, torch.eye(part.landmarks, dtype=torch.float64)
        for _ in range(6):
            az = middle @ z
            z = z @ (13 * unit - az @ (15 * unit - az @ (7 * unit - az))) / 4
        full = left @ z @ right
        kernel = part.value_kernel.weight[head, 0]
        out = full @ v
        for t in range(len(v)):
            for offset in range(-16, 17):
                if 0 <= t + offset < len(v):
                    out[t] = out[t] + kernel[offset + 16] * v[t + offset]
        mixed.append(out)
        attention.append(full[-num_tokens, -num_tokens:])
    out = torch.cat(mixed, dim=1)[-num_tokens:] @ part.out.weight.T + part.out.bias
    return tokens_TH + out, torch.stack(attention)


def slow_position(part: attention_module._Position, tokens_TH: Tensor, cells: list[tuple[int, int]]) -> Tensor:
    at = {cell: i for i, cell in enumerate(cells)}
    out = tokens_TH.clone()
    for i, (x, y) in enumerate(cells):
        for kernel in part.kernels:
            reach = kernel.weight.shape[-1] // 2
            out[i] += kernel.bias
            for dy in range(-reach, reach + 1):
                for dx in range(-reach, reach + 1):
                    if (x + dx, y + dy) in at:
                        out[i] += kernel.weight[:, 0, dy + reach, dx + reach] * tokens_TH[at[x + dx, y + dy]]
    return out


@torch.no_grad()
@pytest.mark.parametrize("coordinates", [False, True])
@pytest.mark.parametrize("n", [1, 2, 6, 11])
def test_slow_loop_transmil(coordinates, n):
    module = made("transmil", 2, {**SMALL["transmil"], "coordinates": coordinates})
    assert isinstance(module, attention_module.TransMIL)
    corners_N2 = corners_of(n)
    if coordinates:
        order = sorted(range(n), key=lambda i: (int(corners_N2[i, 1]), int(corners_N2[i, 0])))
        cells = [(int(corners_N2[i, 0]) // 224, int(corners_N2[i, 1]) // 224) for i in order]
    else:
        side = math.ceil(math.sqrt(n))
        order = [i % n for i in range(side * side)]
        cells = [(i % side, i // side) for i in range(side * side)]
    tiles = (bag_of(n) @ module.project.weight.T + module.project.bias).relu()
    tokens, _ = slow_layer(module.layer1, torch.cat([module.cls_token, tiles[order]]))
    tokens = torch.cat([tokens[:1], slow_position(module.position, tokens[1:], cells)])
    tokens, heads_AT = slow_layer(module.layer2, tokens)
    out = module(bag_of(n), corners_N2)
    torch.testing.assert_close(out.logits_C, module.classifier(module.norm(tokens[0])), rtol=1e-9, atol=1e-9)
    attention = [0.0] * n
    for i, value in zip(order, heads_AT.mean(0).clamp(min=0)[1:].tolist(), strict=True):
        attention[i] += value
    same(out.attention_NC, [[value / sum(attention)] * 2 for value in attention])


def test_iterative_pinv_is_a_pseudo_inverse():
    matrix = (bag_of(10, seed=4)[:, :10] + 6 * torch.eye(10, dtype=torch.float64)).softmax(-1)[None]
    torch.testing.assert_close(attention_module.iterative_pinv(matrix), torch.linalg.pinv(matrix), rtol=1e-6, atol=1e-6)


def test_with_a_landmark_per_token_attention_is_exact():
    part = attention_module._Layer(8, 2, 5, 0.0).double()
    tokens_TH = bag_of(5, seed=6)[:, :8]
    factors = part.factors(tokens_TH)
    matrix_ATT = (factors.query_ATE @ factors.key_ATE.transpose(1, 2)).softmax(-1)
    inverse = torch.linalg.pinv(matrix_ATT)
    factors = factors._replace(pinv_AMM=inverse)
    expected = (matrix_ATT @ factors.value_ATE + part._convolve(factors.value_ATE)).transpose(0, 1).flatten(1)
    torch.testing.assert_close(part(tokens_TH, factors), tokens_TH + part.out(expected))
    torch.testing.assert_close(attention_module.cls_attention(factors, 5), matrix_ATT[:, 0].mean(0))


def test_grid_cells_of_rounded_corners_with_gaps():
    columns, lines = torch.tensor([0, 1, 2, 3, 40, 41, 43]), torch.tensor([5, 5, 6, 7, 7, 5, 6])
    corners_N2 = torch.stack([(1000 + columns * 460.8).round(), (lines * 460.8).round()], dim=1)
    cells_N2 = attention_module.grid_cells(corners_N2)
    assert cells_N2[:, 0].tolist() == [0, 1, 2, 3, 7, 8, 10]  # a gap of 37 is as good as one of 4: kernels reach 3
    assert cells_N2[:, 1].tolist() == [0, 0, 1, 2, 2, 0, 1]


def test_corners_without_a_grid_are_refused():
    corners_N2 = torch.rand(4000, 2, generator=torch.Generator().manual_seed(0)) * 1e5
    module = made("transmil", 1, {**SMALL["transmil"], "coordinates": True})
    with pytest.raises(BagError, match="regular grid"):
        module(bag_of(4000), corners_N2)


def test_tiles_of_one_place_count_as_their_mean():
    part = attention_module._Position(DIM).double()
    tokens_TH = bag_of(3)
    grid = attention_module.Grid(torch.arange(3), torch.tensor([0, 0, 1]), 2, 1)
    mean = torch.stack([tokens_TH[:2].mean(0), tokens_TH[2]])
    moved = slow_position(part, mean, [(0, 0), (1, 0)]) - mean
    torch.testing.assert_close(part(tokens_TH, grid), tokens_TH + moved[[0, 0, 1]])


# ---------------------------------------------------------------------------------------------------- randomness


@pytest.mark.parametrize("name", ["abmil", "clam-sb", "transmil"])
def test_dropout_acts_in_training_only(name):
    module = made(name, 1, {**SMALL[name], "dropout": 0.5})
    bag_ND = bag_of(9)
    assert torch.equal(module(bag_ND).logits_C, module(bag_ND).logits_C)
    module.train()
    assert not torch.equal(module(bag_ND).logits_C, module(bag_ND).logits_C)


def test_mil_rnn_shuffles_its_sequence_in_training_only():
    module = made("mil-rnn", 1, {**SMALL["mil-rnn"], "shuffle": True})
    bag_ND = bag_of(9)
    assert torch.equal(module(bag_ND).logits_C, module(bag_ND).logits_C)
    module.train()
    seen = {module(bag_ND).logits_C.item() for _ in range(20)}
    assert 1 < len(seen) <= math.factorial(4)


@ALL
def test_autocast_is_allowed_and_leaves_sums_over_bags_alone(name, chosen):
    module = made(name, 2, chosen, dtype=torch.float32)
    bag_ND, corners_N2 = bag_of(30, dtype=torch.float32), corners_of(30)
    expected = module(bag_ND, corners_N2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = module(bag_ND, corners_N2)
        module.loss(found, 1).backward()
    torch.testing.assert_close(found.logits_C.float(), expected.logits_C, rtol=0.1, atol=0.1)
    if name in ("self-vit-mil", "mean", "max", "topk"):
        torch.testing.assert_close(found.instance_logits_NC, expected.instance_logits_NC)
