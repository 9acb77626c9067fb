"""Settings of a pretraining that takes a second."""

from __future__ import annotations

from typing import Any

TINY_VIT: dict[str, Any] = {
    "architecture": "vit_tiny_patch16_224", "width": 32, "depth": 2, "heads": 2, "patch_px": 8, "local_px": 16,
    "batch": 8, "lr": 5e-3,
}  # fmt: skip
SHORT: dict[str, Any] = {
    "method": "dino", "num_local": 2, "out_dim": 32, "head_width": 32, "bottleneck": 16, "workers": 0, "log_steps": 1,
    "shuffle_tiles": 16,
}  # fmt: skip
TINY: dict[str, Any] = TINY_VIT | SHORT
