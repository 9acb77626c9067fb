"""Settings of the smallest study."""

from __future__ import annotations

TILING = "1mpp_32px_0px"
MICRO = """
[tile]
mpp = 1.0
size_px = 32

[pretrain]
method = "dino"
width = 16
depth = 1
heads = 1
patch_px = 16
num_local = 1
batch = 8
steps = 2
head_width = 16
bottleneck = 8
out_dim = 16
workers = 0
log_steps = 1
measure_tiles = 8

[train]
seeds = 1
epochs = 2

[compare]
methods = ["self-vit-mil", "mean"]

[evaluate]
bootstrap = 100

[localize]
pictures = false
geojson = "none"

[engine]
workers = 0
"""
