"""Encoders: networks that turn a tile into an embedding. `network` computes it, `files` loads and saves encoders.

In come uint8 tiles (B, 3, H, W), out go embeddings (B, dim). An `Encoder` is a timm network with an `EncoderConfig`,
which says which tiles it is for. `load_encoder` takes it from a folder, a checkpoint, timm or the Hugging Face hub.
"""

from __future__ import annotations

from selfvitmil.encoder.files import load_encoder, save_encoder
from selfvitmil.encoder.network import (
    LAYOUTS,
    POOLED,
    Encoder,
    EncoderConfig,
    build_backbone,
    build_encoder,
    check_fits,
    embed_tokens,
)

__all__ = [
    "LAYOUTS", "POOLED", "Encoder", "EncoderConfig", "build_backbone", "build_encoder", "check_fits", "embed_tokens",
    "load_encoder", "save_encoder",
]  # fmt: skip
