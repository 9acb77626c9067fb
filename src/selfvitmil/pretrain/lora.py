"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): continue a large ViT by training few weights.

Every linear layer of attention (`qkv`, or separate `q_proj`, `k_proj`, `v_proj`, and the output `proj`) gets two thin
matrices, and works with `weight + up @ down`. `up` starts at zero, so the network starts as it was. All weights of the
network itself are frozen; MLPs, norms and embeddings have no adapter. The paper's scale alpha / rank is 1.

The adapters are parametrizations of torch: whoever reads `layer.weight` gets the sum, so nothing else has to know of
them. Training keeps them apart (few gradients, small moving averages); `merged` gives the plain network that is saved.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn.utils import parametrize

from selfvitmil.errors import ConfigError

LAYERS = ("attn.qkv", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.proj")
"""How the names of adapted layers end, in timm's ViTs."""


class Adapter(nn.Module):
    """Adds a product of rank `rank` to a weight (outputs, inputs)."""

    def __init__(self, outputs: int, inputs: int, rank: int):
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up @ self.down


def attention_layers(network: nn.Module) -> list[nn.Linear]:
    """Return the layers that adapters are for; none where the network is no ViT of timm's form."""
    return [
        module
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("blocks.") and name.endswith(LAYERS)
    ]


def check_lora(network: nn.Module, rank: int) -> None:
    """ConfigError where adapters of this rank are impossible or pointless."""
    layers = attention_layers(network)
    if not layers:
        raise ConfigError(
            f"pretrain.lora {rank} cannot adapt a {type(network).__name__}",
            "LoRA is for the attention layers of a ViT, and this network has none",
            "Leave pretrain.lora out: all weights are trained then",
        )
    smallest = min(min(layer.in_features, layer.out_features) for layer in layers)
    if rank >= smallest:
        raise ConfigError(
            f"pretrain.lora {rank} is not below the width of the network ({smallest})",
            "such adapters have more weights than the layers that they adapt",
            "Use 4 to 16, or leave pretrain.lora out to train all weights",
        )


def add_adapters(network: nn.Module, rank: int) -> None:
    """Freeze all weights of a ViT and add an adapter to each of its attention layers, in place."""
    check_lora(network, rank)
    network.requires_grad_(False)
    for layer in attention_layers(network):
        adapter = Adapter(layer.out_features, layer.in_features, rank).to(layer.weight.device)
        parametrize.register_parametrization(layer, "weight", adapter)


def share_frozen(network: nn.Module, source: nn.Module) -> None:
    """Let `network` use the very frozen parameters of `source`, which has the same layers, instead of a copy.

    A moving average then has nothing to average there, and the weights are in memory once.
    """
    for mine, theirs in zip(network.modules(), source.modules(), strict=True):
        for name, parameter in theirs.named_parameters(recurse=False):
            if not parameter.requires_grad:
                setattr(mine, name, parameter)


def merged(network: nn.Module) -> nn.Module:
    """Return the network with its adapters merged into plain weights: a copy, or itself where it has none."""
    if not any(parametrize.is_parametrized(module) for module in network.modules()):
        return network
    plain = copy.deepcopy(network)
    for name, module in list(plain.named_modules()):
        if parametrize.is_parametrized(module):
            assert isinstance(module, nn.Linear)
            # torch's own removal would change the class that the copy shares with the layer of the original.
            parent, _, own = name.rpartition(".")
            setattr(plain.get_submodule(parent), own, _plain_layer(module))
    return plain


def _plain_layer(layer: nn.Linear) -> nn.Linear:
    """A linear layer of the same function without parametrization."""
    plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    plain.weight = nn.Parameter(layer.weight.detach())
    plain.bias = layer.bias
    return plain.train(layer.training)
