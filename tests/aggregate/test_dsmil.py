"""DSMIL: against numbers of the reference implementation, against the dense formula, against a slow loop."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from selfvitmil import aggregate
from selfvitmil.aggregate import bag_tensors
from selfvitmil.aggregate.dsmil import DSMIL, HEADS, QUERIES, SCORES, VALUES, DSMILOutput, attention_guidance, combine
from selfvitmil.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden"
DIM = 10
CLASSES = pytest.mark.parametrize("num_classes", [1, 2, 3])


def made(num_classes: int, seed: int = 0, dtype=torch.float64, name: str = "dsmil", **settings) -> DSMIL:
    torch.manual_seed(seed)
    module = aggregate.build(name, DIM, num_classes, **{"query_dim": 6, **settings}).to(dtype)
    assert isinstance(module, DSMIL)
    with torch.no_grad():
        for parameter in module.parameters():  # zero biases would hide mistakes
            parameter.add_(0.1 * torch.randn(parameter.shape, dtype=dtype))
    return module


def bag_of(n: int, seed: int = 1) -> Tensor:
    return torch.randn(n, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run(module: DSMIL, bag_ND: Tensor) -> DSMILOutput:
    out = module(bag_ND)
    assert isinstance(out, DSMILOutput)
    return out


def golden(name: str) -> tuple[dict[str, np.ndarray], dict[str, Tensor]]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        stored = dict(file)
    return stored, {key[2:]: torch.from_numpy(stored[key]) for key in stored if key.startswith("w:")}


# ---------------------------------------------------------------------------------------------------- golden numbers


@pytest.mark.parametrize("year", [2021, 2024])
@CLASSES
@pytest.mark.parametrize("chunk_bytes", [4 << 20, 1000])
def test_golden_numbers_and_gradients(year, num_classes, chunk_bytes, monkeypatch):
    monkeypatch.setitem(bag_tensors.CHUNK_BYTES, "cpu", chunk_bytes)
    stored, weights = golden(f"dsmil{year}_c{num_classes}")
    module = aggregate.load_dsmil(weights)
    assert isinstance(module, DSMIL)
    out = run(module, torch.from_numpy(stored["bag"]))
    loss = module.loss(out, torch.from_numpy(stored["label"]))
    loss.backward()
    assert out.attention_NC is not None
    assert out.instance_logits_NC is not None
    pairs = {
        "instance_logits": out.instance_logits_NC,
        "max_logit": out.max_logits_C,
        "attention": out.attention_NC,
        "bag_logit": out.bag_logits_C,
        "loss": loss,
    }
    for key, found in pairs.items():
        np.testing.assert_allclose(found.detach().numpy(), stored[key], rtol=1e-9, atol=1e-9, err_msg=key)
    assert out.critical_KC[0].tolist() == stored["critical_instance"].tolist()
    gradients = dict(module.named_parameters())
    assert {f"g:{key}" for key in gradients} == {key for key in stored if key.startswith("g:")}
    for key, parameter in gradients.items():
        assert parameter.grad is not None
        np.testing.assert_allclose(parameter.grad.numpy(), stored[f"g:{key}"], rtol=1e-9, atol=1e-9, err_msg=key)


# ---------------------------------------------------------------------------------------------------- dense formula


def dense(module: DSMIL, bag_ND: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q and V of every instance, then plain matrix products: instance logits, attention, bag and max logits."""
    stream = module.b_classifier
    instance_NC = module.i_classifier.fc(bag_ND)
    queries_NL = stream.q(bag_ND)
    values_NV = bag_ND if stream.v is None else stream.v(bag_ND)
    top_KC = instance_NC.topk(min(module.top, len(bag_ND)), dim=0).indices
    columns = range(instance_NC.shape[1])
    query_CL = torch.stack([queries_NL[top_KC[:, c]].mean(0) for c in columns])
    attention_NC = (queries_NL @ query_CL.T / module.divisor).softmax(0)
    vectors_CV = attention_NC.T @ values_NV
    weight, bias = stream.fcc.weight, stream.fcc.bias
    if weight.ndim == 3:
        bag_C = F.conv1d(vectors_CV[None], weight, bias)[0, :, 0]
    else:
        bag_C = torch.stack([weight[c] @ vectors_CV[c] + bias[c] for c in columns])
    return instance_NC, attention_NC, bag_C, torch.stack([instance_NC[top_KC[:, c], c].mean() for c in columns])


@pytest.mark.parametrize(("q", "v", "head"), list(itertools.product(QUERIES, VALUES, HEADS)))
@pytest.mark.parametrize(("num_classes", "top", "scale"), [(1, 1, "sqrt"), (2, 3, "none"), (3, 1, 2.5)])
def test_fast_form_equals_the_dense_formula(q, v, head, num_classes, top, scale, monkeypatch):
    monkeypatch.setitem(bag_tensors.CHUNK_BYTES, "cpu", 4 * DIM * 8)
    module = made(num_classes, q=q, v=v, head=head, top=top, scale=scale, bottleneck=4)
    bag_ND = bag_of(19)
    out = run(module, bag_ND)
    expected = dense(module, bag_ND)
    found = (out.instance_logits_NC, out.attention_NC, out.bag_logits_C, out.max_logits_C)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    target = torch.eye(num_classes, dtype=torch.float64)[-1]
    module.loss(out, target).backward()
    gradients = {key: parameter.grad for key, parameter in module.named_parameters()}
    slow = 0.5 * F.binary_cross_entropy_with_logits(expected[2], target)
    slow = slow + 0.5 * F.binary_cross_entropy_with_logits(expected[3], target)
    for key, expected_grad in zip(gradients, torch.autograd.grad(slow, list(module.parameters())), strict=True):
        torch.testing.assert_close(gradients[key], expected_grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["dsmil", "self-vit-mil"])
def test_losses_on_attention_and_instances_have_gradients_too(name):
    module = made(2, name=name, init="default")
    bag_ND = bag_of(9).requires_grad_()
    weight_NC = bag_of(9, seed=3)[:, :2]

    def total(instance_NC: Tensor, attention_NC: Tensor, bag_C: Tensor, max_C: Tensor) -> Tensor:
        return (weight_NC * (attention_NC.log() + instance_NC.sin())).sum() + (bag_C * max_C).sum()

    out = run(module, bag_ND)
    assert out.instance_logits_NC is not None
    assert out.attention_NC is not None
    found = total(out.instance_logits_NC, out.attention_NC, out.bag_logits_C, out.max_logits_C)
    leaves = [bag_ND, *module.parameters()]
    pairs = zip(
        torch.autograd.grad(found, leaves), torch.autograd.grad(total(*dense(module, bag_ND)), leaves), strict=True
    )
    for found_grad, expected_grad in pairs:
        torch.testing.assert_close(found_grad, expected_grad, rtol=1e-11, atol=1e-11)


def test_dropout_of_values_equals_the_dense_formula_with_the_same_mask():
    for v in ("linear", "linear_relu", "bottleneck"):
        module = made(1, q="linear", v=v, dropout=0.4, bottleneck=4).train()
        torch.manual_seed(3)
        out = run(module, bag_of(8))
        torch.manual_seed(3)
        _, _, bag_C, max_C = dense(module, bag_of(8))
        torch.testing.assert_close(out.bag_logits_C, bag_C)
        module.loss(out, 1).backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        slow = -0.5 * F.logsigmoid(bag_C) - 0.5 * F.logsigmoid(max_C)
        for found, expected in zip(gradients, torch.autograd.grad(slow.sum(), list(module.parameters())), strict=True):
            torch.testing.assert_close(found, expected)
        module.eval()
        assert torch.equal(run(module, bag_of(8)).logits_C, run(module, bag_of(8)).logits_C)


# ---------------------------------------------------------------------------------------------------- slow loop


@CLASSES
def test_slow_loop_of_the_paper(num_classes):
    """Self-ViT-MIL with numbers and loops only."""
    module = made(num_classes, name="self-vit-mil")
    weights = {key: value.tolist() for key, value in module.state_dict().items()}
    bag = bag_of(5).tolist()

    def affine(name, vector):
        pairs = zip(weights[f"{name}.weight"], weights[f"{name}.bias"], strict=True)
        return [sum(w * x for w, x in zip(row, vector, strict=True)) + bias for row, bias in pairs]

    scores = [affine("i_classifier.fc.0", h) for h in bag]
    queries, values = [affine("b_classifier.q", h) for h in bag], [affine("b_classifier.v.1", h) for h in bag]
    out = run(module, bag_of(5))
    for c in range(num_classes):
        critical = max(range(5), key=lambda i: scores[i][c])
        alike = [
            math.exp(sum(a * b for a, b in zip(q, queries[critical], strict=True)) / math.sqrt(6)) for q in queries
        ]
        attention = [a / sum(alike) for a in alike]
        vector = [sum(a * value[d] for a, value in zip(attention, values, strict=True)) for d in range(DIM)]
        head = weights["b_classifier.fcc.weight"][c]
        bag_logit = sum(w * x for w, x in zip(head, vector, strict=True)) + weights["b_classifier.fcc.bias"][c]
        assert out.critical_KC[0, c] == critical
        assert math.isclose(out.max_logits_C[c].item(), scores[critical][c], rel_tol=1e-10)
        assert math.isclose(out.bag_logits_C[c].item(), bag_logit, rel_tol=1e-10)
        mean = 0.5 / (1 + math.exp(-bag_logit)) + 0.5 / (1 + math.exp(-scores[critical][c]))
        assert math.isclose(module.probabilities(out)[c].item(), mean, rel_tol=1e-10)
        assert out.attention_NC is not None
        np.testing.assert_allclose(out.attention_NC[:, c].tolist(), attention, rtol=1e-10)


@pytest.mark.parametrize("n", [1, 2, 7])
@CLASSES
def test_slow_loop_of_guided_attention(num_classes, n):
    """Kullback and Leibler's divergence from the softmax of 2.5 times the standardized scores."""
    evidence = "positive" if num_classes == 1 else "free"
    module = made(num_classes, name="self-vit-mil", evidence=evidence).train()
    out = run(module, bag_of(n))
    assert out.attention_NC is not None
    assert out.instance_logits_NC is not None
    divergence = 0.0
    for c in range(num_classes):
        scores, attention = out.instance_logits_NC[:, c].tolist(), out.attention_NC[:, c].tolist()
        mean = sum(scores) / n
        spread = math.sqrt(sum((score - mean) ** 2 for score in scores) / n)
        wanted = [math.exp(2.5 * (score - mean) / spread) if spread else 1.0 for score in scores]
        shares = [each / sum(wanted) for each in wanted]
        divergence += sum(w * math.log(w / s) for w, s in zip(shares, attention, strict=True)) / num_classes
    assert math.isclose(
        attention_guidance(out.attention_NC, out.instance_logits_NC).item(), divergence, rel_tol=1e-9, abs_tol=1e-12
    )
    assert (n == 1) == (divergence < 1e-12)
    added = module.loss(out, 1).item() - module.eval().loss(out, 1).item()
    assert math.isclose(added, divergence if num_classes == 1 else 0.0, rel_tol=1e-9, abs_tol=1e-12)


def test_evidence_of_the_negative_class_is_that_of_the_positive_class_with_labels_exchanged():
    bag_ND, label = bag_of(9), 1.0
    forth, back = (made(1, name="dsmil", evidence=kind, top=2).train() for kind in ("positive", "negative"))
    back.load_state_dict(forth.state_dict())
    a, b = run(forth, bag_ND), run(back, bag_ND)
    for name in ("logits_C", "instance_logits_NC", "bag_logits_C", "max_logits_C"):
        torch.testing.assert_close(getattr(b, name), -getattr(a, name))
    torch.testing.assert_close(b.attention_NC, a.attention_NC)
    torch.testing.assert_close(back.loss(b, 1 - label), forth.loss(a, label))


@CLASSES
@pytest.mark.parametrize("name", ["dsmil", "self-vit-mil"])
def test_evidence_of_the_average_tile_is_mean_pooling_in_both_streams(name, num_classes):
    """Both logits equal a linear map of the mean instance, computed here from the weights one by one."""
    module = made(num_classes, name=name, evidence="average", top=3)
    bag_ND = bag_of(9)
    out, mean_D = run(module, bag_ND), bag_ND.mean(0)
    weights = dict(module.named_parameters())
    first = weights["i_classifier.fc.0.weight"] @ mean_D + weights["i_classifier.fc.0.bias"]
    torch.testing.assert_close(out.max_logits_C, first)
    vector = mean_D
    if "b_classifier.v.1.weight" in weights:
        vector = weights["b_classifier.v.1.weight"] @ mean_D + weights["b_classifier.v.1.bias"]
    second = weights["b_classifier.fcc.weight"] @ vector + weights["b_classifier.fcc.bias"]
    torch.testing.assert_close(out.bag_logits_C, second)
    assert out.attention_NC is not None
    assert out.attention_NC.tolist() == [[pytest.approx(1 / 9)] * num_classes] * 9


@pytest.mark.parametrize("kind", ["positive", "negative"])
def test_evidence_of_one_class_needs_a_binary_label(kind):
    with pytest.raises(ConfigError, match="evidence"):
        aggregate.build("dsmil", 8, 3, evidence=kind)


def test_guidance_moves_attention_alone():
    module = made(1, name="self-vit-mil", evidence="positive").train()
    out = run(module, bag_of(9))
    assert out.attention_NC is not None
    assert out.instance_logits_NC is not None
    attention_guidance(out.attention_NC, out.instance_logits_NC).backward()
    moved = {name for name, each in module.named_parameters() if each.grad is not None and each.grad.abs().max() > 1e-9}
    assert moved == {"b_classifier.q.weight", "b_classifier.q.bias"}


def test_guidance_of_attention_that_is_all_on_one_instance_is_finite():
    attention_NC = torch.tensor([[1.0], [0.0], [1e-42]], requires_grad=True)
    far = attention_guidance(attention_NC, torch.tensor([[-2.0], [5.0], [0.1]]))
    far.backward()
    assert attention_NC.grad is not None
    assert 60 < far.item() < 70  # 1e-30 where almost all is wanted: 69, less what is wanted elsewhere
    assert attention_NC.grad.isfinite().all()


def test_presets():
    assert aggregate.settings_of("dsmil")["q"] == "mlp"
    assert aggregate.settings_of("dsmil")["v"] == "identity"
    assert aggregate.settings_of("self-vit-mil")["q"] == "linear"
    assert aggregate.settings_of("self-vit-mil")["v"] == "linear"
    assert aggregate.settings_of("dsmil-lc")["v"] == "bottleneck"
    paper = aggregate.build("self-vit-mil", 3840, 1)
    assert sum(parameter.numel() for parameter in paper.parameters()) == 3841 + 128 * 3841 + 3840 * 3841 + 3841


# ---------------------------------------------------------------------------------------------------- scores


def test_combined_scores():
    bag_C, max_C = torch.tensor([0.3, -2.0]), torch.tensor([1.5, 4.0])
    mean = (bag_C.sigmoid() + max_C.sigmoid()) / 2
    torch.testing.assert_close(combine(bag_C, max_C), mean.logit())
    torch.testing.assert_close(combine(bag_C, max_C, "bag"), bag_C)
    torch.testing.assert_close(combine(bag_C, max_C, "max"), max_C)
    torch.testing.assert_close(combine(bag_C, max_C, "mean_logit"), torch.tensor([0.9, 1.0]))
    with pytest.raises(ConfigError, match="did you mean 'mean_prob'"):
        combine(bag_C, max_C, "mean_probs")


def test_combined_scores_of_sure_streams():
    far = torch.tensor([200.0, -200.0, 200.0])
    near = torch.tensor([300.0, -300.0, -200.0])
    expected = torch.tensor([200 + math.log(2), -200 - math.log(2), 0.0])  # where plain probabilities are 0 or 1
    torch.testing.assert_close(combine(far, near), expected)


@pytest.mark.parametrize("score", SCORES)
def test_module_uses_its_score(score):
    module = made(2, score=score)
    out = run(module, bag_of(5))
    torch.testing.assert_close(out.logits_C, combine(out.bag_logits_C, out.max_logits_C, score))


# ---------------------------------------------------------------------------------------------------- init, memory


def test_orthogonal_init():
    torch.manual_seed(0)
    module = aggregate.build("dsmil", 32, 2, v="linear", init="orthogonal")
    assert isinstance(module, DSMIL)
    for key, parameter in module.named_parameters():
        if key.endswith("bias"):
            assert not parameter.any()
        elif parameter.shape[0] > parameter.shape[1]:
            torch.testing.assert_close(parameter.T @ parameter, torch.eye(parameter.shape[1]), atol=1e-5, rtol=0)
        else:
            torch.testing.assert_close(parameter @ parameter.T, torch.eye(parameter.shape[0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("head", HEADS)
def test_quiet_init_is_the_orthogonal_one_with_a_hundredth_of_the_opinion(head):
    quiet, loud = (made_plain(2, v="linear", head=head, init=init) for init in ("quiet", "orthogonal"))
    for key, parameter in quiet.named_parameters():
        factor = 0.01 if key.startswith(("i_classifier.fc", "b_classifier.fcc")) else 1
        torch.testing.assert_close(parameter, factor * loud.get_parameter(key))
    bag_ND = bag_of(9)
    one, two = run(quiet, bag_ND), run(loud, bag_ND)
    assert two.instance_logits_NC is not None
    torch.testing.assert_close(one.instance_logits_NC, 0.01 * two.instance_logits_NC)
    torch.testing.assert_close(one.bag_logits_C, 0.01 * two.bag_logits_C)
    assert torch.equal(one.critical_KC, two.critical_KC), "no ties: the pick does not depend on the order"


def made_plain(num_classes: int, **settings) -> DSMIL:
    torch.manual_seed(0)
    module = aggregate.build("dsmil", DIM, num_classes, **settings).double()
    assert isinstance(module, DSMIL)
    return module


def v_gradient(module: DSMIL) -> Tensor:
    gradient = module.get_parameter("b_classifier.v.1.weight").grad
    assert gradient is not None
    return gradient


def test_modules_can_be_copied_and_pickled():
    module = made(1, name="self-vit-mil")
    module.loss(module(bag_of(7)), 1).backward()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(bag_of(7)).logits_C, module(bag_of(7)).logits_C)
        other.zero_grad()
        before = v_gradient(module).clone()
        other.loss(other(bag_of(9)), 0).backward()
        assert torch.equal(v_gradient(module), before)


# ---------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(("q", "v"), [("linear", "linear"), ("mlp", "identity"), ("mlp", "linear_relu")])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_heads_are_told_from_the_names(q, v, prefix):
    module = made(2, q=q, v=v, head="conv1d", dtype=torch.float32)
    loaded = aggregate.load_dsmil({prefix + key: value for key, value in module.state_dict().items()})
    assert (loaded.config["q"], loaded.config["v"], loaded.config["head"]) == (q, v, "conv1d")
    bag_ND = bag_of(6).float()
    torch.testing.assert_close(loaded(bag_ND).logits_C, module(bag_ND).logits_C)


def test_what_names_cannot_tell_is_given():
    module = made(2, q="linear", v="linear_relu", score="bag", dtype=torch.float32)
    loaded = aggregate.load_dsmil(module.state_dict(), v="linear_relu", score="bag")
    torch.testing.assert_close(loaded(bag_of(6).float()).logits_C, module(bag_of(6).float()).logits_C)


def test_file_of_weights(tmp_path: Path):
    module = made(1, dtype=torch.float32)
    torch.save(module.state_dict(), tmp_path / "a.pth")
    loaded = aggregate.load_dsmil(tmp_path / "a.pth")
    torch.testing.assert_close(loaded(bag_of(6).float()).logits_C, module(bag_of(6).float()).logits_C)


def test_published_camelyon16_weights(shared: Path):
    file = shared / "data" / "weights" / "c16_aggregator.pth"
    module = aggregate.load_dsmil(str(file))
    assert module.config["dim"] == 512
    assert (module.config["q"], module.config["v"], module.num_classes) == ("mlp", "identity", 1)
    assert isinstance(module, DSMIL)
    bag_ND = torch.randn(50, 512, generator=torch.Generator().manual_seed(0))
    out = run(module, bag_ND)
    for found, expected in zip((out.attention_NC, out.bag_logits_C), dense(module, bag_ND)[1:3], strict=True):
        torch.testing.assert_close(found, expected)


def test_checkpoints_that_are_none(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"has no i_classifier.fc.0.weight"):
        aggregate.load_dsmil({"fc.weight": torch.zeros(2, 2)})
    state = made(1).state_dict()
    del state["b_classifier.q.2.bias"]
    with pytest.raises(ConfigError, match=r"inconsistent.*q\.2\.bias"):
        aggregate.load_dsmil(state)
    (tmp_path / "broken.pth").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=r"^broken\.pth"):
        aggregate.load_dsmil(tmp_path / "broken.pth")
    torch.save({"weights": print}, tmp_path / "code.pth")
    with pytest.raises(ConfigError, match=r"^code\.pth"):
        aggregate.load_dsmil(tmp_path / "code.pth")
    with pytest.raises(ConfigError, match=r"^missing\.pth"):
        aggregate.load_dsmil(tmp_path / "missing.pth")
