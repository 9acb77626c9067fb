"""Augmented views of tiles, rendered on the training device: uint8 tiles in, normalized views out.

A `ViewRecipe` describes one view. Its steps, in this order: random resized crop, flips and right-angle
rotations, stain jitter, colour jitter (brightness, contrast, saturation and hue in random order), grey, blur, solarize,
normalize. Distributions are those of torchvision's transforms, on which DINO's multi-crop is built.

Randomness is a function of (seed, tile, step, view) and nothing else: a counter-based generator (Philox4x32-10) turns
these numbers into uniforms with integer arithmetic. So a tile's views depend neither on the other tiles of its batch,
nor on order, process or device, and there is no generator state to save.

What is unusual: nothing loops over tiles and nothing is decided in Python, so a batch costs the same few kernels
whatever was drawn, and the whole can be compiled. Views that are made alike are made together, since starting a kernel
takes longer than most of them run. A resized crop is two matrix products, rows and columns, with weights
made for every tile (Pillow's antialiased filters); flips only reverse their rows. A blur is two more products. The four
colour steps come in 24 orders; they run as three blends, one turn of the hue, three blends, where each tile uses three
of the six blends: the ones that its order puts before the hue, and after it.

Inside, images are (B, H, 3, W), which makes each product one call on contiguous memory, and are float32 from 0 to 1.
Axes in names: V views, B tiles, 3 is RGB, H and W height and width, S edge of a view, U uniforms, P place in an order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Literal, NamedTuple

import numpy as np
import torch

from selfvitmil import stain
from selfvitmil.errors import ConfigError
from selfvitmil.settings import PretrainSettings

CROP_TRIES = 10
"""Boxes drawn before a crop falls back to the centre, as in torchvision."""
BLUR_REACH = 4.0
"""Standard deviations of the strongest blur that its kernel covers."""
SOLARIZE_FROM = 0.5
"""Brightness from which solarizing inverts: halfway between grey levels 127 and 128 of 255."""
_BLOCK = {True: 2**20, False: 2**28}
"""Values of an image block: on a CPU (True) what stays in its caches, elsewhere what bounds the memory."""
_PRODUCTS = {"cuda": torch.float16}
"""What products are computed in: on a GPU off by up to 0.7 grey levels of 255, float32 elsewhere."""
_GREY = (0.299, 0.587, 0.114)
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = range(4)


@dataclass(frozen=True)
class ViewRecipe:
    """Augmentation of one view of a tile. A step with probability 0 is skipped at no cost."""

    size_px: int = 224
    """Edge of the view."""
    scale: tuple[float, float] = (0.4, 1.0)
    """Smallest and largest share of the tile's area that the crop takes."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest width of the crop over its height."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """Filter of the resampling; antialiased where it shrinks."""
    hflip: float = 0.5
    """Probability of left and right swapped."""
    vflip: float = 0.5
    """Probability of top and bottom swapped; tissue has no upside, ImageNet has."""
    right_angles: bool = True
    """Whether to turn by 0, 90, 180 or 270 degrees, all equally likely."""
    stain: float = 0.5
    """Probability of stain jitter."""
    stain_scale: float = 0.2
    """Concentration of each stain is multiplied by 1 minus to 1 plus this."""
    stain_shift: float = 0.02
    """Then shifted by minus to plus this (in optical density along the stain)."""
    jitter: float = 0.8
    """Probability of colour jitter."""
    brightness: float = 0.4
    """Factor from 1 minus to 1 plus this; the same for the next two."""
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1
    """Turn of the hue by minus to plus this, in turns of the colour circle."""
    grey: float = 0.2
    """Probability of grey."""
    blur: float = 0.5
    """Probability of a Gaussian blur."""
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    """Its smallest and largest standard deviation in pixels of the view."""
    solarize: float = 0.0
    """Probability of inverting everything brighter than half."""


@torch.no_grad()
def make_views(
    tiles_B3HW: torch.Tensor,
    tile_ids_B: torch.Tensor,
    step: int | torch.Tensor,
    recipes: Sequence[ViewRecipe],
    mean: Sequence[float],
    std: Sequence[float],
    *,
    seed: int = 0,
    transforms_B33: np.ndarray | torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    render: Callable[..., torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Return all views of a batch of uint8 tiles, one tensor (V, B, 3, S, S) per run of recipes of equal size.

    `tile_ids_B` (int64) identifies tiles; with `seed`, `step` and the view's index it determines all randomness. `step`
    may be an int64 number on the device, so that a recorded step can be repeated with another one.
    `transforms_B33` are stain transforms (`stain.apply_transforms`), applied first. Stain jitter moves along the stains
    that normalized tiles have. `mean` and `std` are per channel of tiles from 0 to 1; `dtype` is that of the result.
    `render` may be a compiled `render_view`.
    """
    assert tiles_B3HW.dtype == torch.uint8, tiles_B3HW.dtype
    assert tiles_B3HW.shape == (len(tile_ids_B), 3, *tiles_B3HW.shape[-2:]), tiles_B3HW.shape
    device = tiles_B3HW.device
    if transforms_B33 is not None:
        tiles_B3HW = stain.apply_transforms(tiles_B3HW, transforms_B33)
    product_dtype = _PRODUCTS.get(device.type, torch.float32)
    # One pass for cast and new order; whole grey levels are exact in float16 and bfloat16.
    tiles_BH3W = tiles_B3HW.transpose(1, 2).to(product_dtype, memory_format=torch.contiguous_format)
    basis = stain_basis(stain.REFERENCE.stains)
    uniforms_VBU = random_uniforms(tile_ids_B.to(device), step, len(recipes), NUM_UNIFORMS, seed)
    height, width = tiles_B3HW.shape[-2:]
    views: list[torch.Tensor] = []
    with torch.autocast(device.type, enabled=False):
        for _, numbered in groupby(enumerate(recipes), key=lambda pair: _rendered_with(pair[1])):
            numbers, together = zip(*numbered, strict=True)
            size = together[0].size_px
            out_VB3SS = torch.empty((len(together), len(tiles_BH3W), 3, size, size), dtype=dtype, device=device)
            draws = _draw_views(uniforms_VBU[numbers[0] : numbers[-1] + 1], together, height, width)
            recipe = _all_steps(together)
            make = partial(render or render_view, recipe=recipe, basis=basis, mean=tuple(mean), std=tuple(std))
            _fill(out_VB3SS, tiles_BH3W, draws, make)
            if views and views[-1].shape[2:] == out_VB3SS.shape[2:]:
                out_VB3SS = torch.cat([views.pop(), out_VB3SS])
            views.append(out_VB3SS)
    return views


def _rendered_with(recipe: ViewRecipe) -> tuple[object, ...]:
    """Return what views must share to be rendered together; in all else they differ by what is drawn for them."""
    return recipe.size_px, recipe.interpolation, recipe.blur_sigma[1], recipe.right_angles


def _all_steps(recipes: Sequence[ViewRecipe]) -> ViewRecipe:
    """Return a recipe with every step that one of the recipes has; for the others it is drawn as left out."""
    steps = ("stain", "jitter", "grey", "blur", "solarize")
    return replace(recipes[0], **{step: max(getattr(recipe, step) for recipe in recipes) for step in steps})


def _draw_views(uniforms_VBU: torch.Tensor, recipes: Sequence[ViewRecipe], height: int, width: int) -> Draws:
    """Return the draws of these views, grouped by view."""
    parts: list[Draws] = []
    for recipe, grouped in groupby(enumerate(recipes), key=lambda pair: pair[1]):
        alike = [number for number, _ in grouped]
        parts.append(draw_view(uniforms_VBU[alike[0] : alike[-1] + 1].flatten(0, 1), recipe, height, width))
    return Draws(*[torch.cat(each) for each in zip(*parts, strict=True)]) if len(parts) > 1 else parts[0]


def _fill(
    out_VB3SS: torch.Tensor, tiles_BH3W: torch.Tensor, draws: Draws, make: Callable[[torch.Tensor, Draws], torch.Tensor]
) -> None:
    """Render views of one recipe, several of them at once if they fit into a block; `draws` are grouped by view."""
    draws_VB = Draws(*[values.unflatten(0, out_VB3SS.shape[:2]) for values in draws])
    for some_views, some_tiles in _blocks(out_VB3SS, tiles_BH3W):
        target_VB3SS, part = out_VB3SS[some_views, some_tiles], tiles_BH3W[some_tiles]
        drawn = Draws(*[values[some_views, some_tiles].flatten(0, 1) for values in draws_VB])
        part = part if len(target_VB3SS) == 1 else part.repeat(len(target_VB3SS), 1, 1, 1)
        target_VB3SS[:] = make(part, drawn).view(target_VB3SS.shape)


def _blocks(out_VB3SS: torch.Tensor, tiles_BH3W: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of equal size, (views, tiles): as many whole views as fit, or else parts of one view."""
    views, tiles = out_VB3SS.shape[:2]
    of_view, of_tile = out_VB3SS[0, 0].numel(), tiles_BH3W[0].numel()
    most = _BLOCK[out_VB3SS.device.type == "cpu"]
    tiles_together = max(most // of_view, 1)
    fitting = most // (tiles * max(of_view, of_tile))  # each view has a copy of the tiles
    views_together = max((n for n in range(1, min(fitting, views) + 1) if views % n == 0), default=1)
    for view in range(0, views, views_together):
        for tile in range(0, tiles, tiles_together):
            yield slice(view, view + views_together), slice(tile, tile + tiles_together)


# ---- random numbers ------------------------------------------------------------------------------------------------

_MASK = 0xFFFFFFFF


def _multiply(value: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return high and low 32 bits of the product of two 32-bit numbers, in int64 without overflow."""
    upper, lower = (value >> 16) * factor, (value & 0xFFFF) * factor
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & _MASK


def philox(counter: Sequence[torch.Tensor], key: tuple[int, int]) -> list[torch.Tensor]:
    """Return four 32-bit numbers from a counter of four and a key of two: Philox4x32-10 (Salmon et al., SC 2011).

    All numbers are held in int64. The same input gives the same bits on every device.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return [c0, c1, c2, c3]


def random_uniforms(
    tile_ids_B: torch.Tensor, step: int | torch.Tensor, num_views: int, num_uniforms: int, seed: int = 0
) -> torch.Tensor:
    """Return uniforms in (0, 1), float64 (num_views, B, num_uniforms), functions of position, step and seed."""
    blocks = -(-num_uniforms // 4)
    shape = (num_views, len(tile_ids_B), blocks)
    tiles = tile_ids_B[None, :, None].expand(shape)
    view = torch.arange(num_views, device=tile_ids_B.device)[:, None, None]
    place = (view * 65536 + torch.arange(blocks, device=tile_ids_B.device)).expand(shape)
    steps = step if isinstance(step, torch.Tensor) else torch.full_like(tiles, step & _MASK)
    counter = [tiles & _MASK, (tiles >> 32) & _MASK, steps.expand(shape) & _MASK, place]
    words = torch.stack(philox(counter, (seed & _MASK, (seed >> 32) & _MASK)), dim=-1)
    return ((words.flatten(2)[..., :num_uniforms]).double() + 0.5) / 2**32


# ---- what happens to each tile -------------------------------------------------------------------------------------


class Draws(NamedTuple):
    """Random parameters of one view of every tile; float32 or bool."""

    box_B4: torch.Tensor
    """x, y, width, height of the crop in whole pixels of the tile."""
    flip_x_B: torch.Tensor
    """Left and right swapped; like `flip_y_B` before `transpose_B`. Rotations are already split into the three."""
    flip_y_B: torch.Tensor
    transpose_B: torch.Tensor
    stain_scale_B2: torch.Tensor
    """Factor and shift of the concentration of each stain: 1 and 0 where there is no stain jitter."""
    stain_shift_B2: torch.Tensor
    jitter_B4: torch.Tensor
    """Factors of brightness, contrast and saturation, turn of the hue: 1, 1, 1, 0 where there is no jitter."""
    order_BP: torch.Tensor
    """Which of these four comes first, second, third, last (int64)."""
    grey_B: torch.Tensor
    sigma_B: torch.Tensor
    """Standard deviation of the blur; 0 where there is none."""
    solarize_B: torch.Tensor


# Every decision has its own uniforms, so that switching one step off leaves the draws of all others as they were.
_AREA, _RATIO = slice(0, CROP_TRIES), slice(CROP_TRIES, 2 * CROP_TRIES)
_X, _Y, _HFLIP, _VFLIP, _TURN, _STAIN, _JITTER, _GREYS, _BLUR, _SIGMA, _SOLARIZE = range(20, 31)
_FACTORS, _ORDER, _STAIN_SCALE, _STAIN_SHIFT = slice(32, 36), slice(36, 40), slice(40, 42), slice(42, 44)
NUM_UNIFORMS = 44
"""Uniforms that a view of a tile takes."""


def draw_view(uniforms_BU: torch.Tensor, recipe: ViewRecipe, height: int, width: int) -> Draws:
    """Convert uniforms to the parameters of a view of tiles of this size. In float64, so that all devices agree."""
    u = uniforms_BU
    turns_B = torch.floor(4 * u[:, _TURN]) * recipe.right_angles
    # A turn by 90 degrees, anticlockwise, is left-right swapped, then rows as columns; by 270 it is top-bottom.
    flip_x_B = (u[:, _HFLIP] < recipe.hflip) ^ (turns_B == 1) ^ (turns_B == 2)
    flip_y_B = (u[:, _VFLIP] < recipe.vflip) ^ (turns_B == 3) ^ (turns_B == 2)
    spread = [recipe.brightness, recipe.contrast, recipe.saturation]
    ranges = [(max(0.0, 1 - most), 1 + most) for most in spread] + [(-recipe.hue, recipe.hue)]
    factors_B4 = torch.stack([_between(u[:, _FACTORS][:, i], *ranges[i]) for i in range(4)], dim=1)
    no_jitter_B4 = (torch.arange(4, device=u.device) != _HUE).expand_as(factors_B4)
    stain_B1, jitter_B1 = u[:, _STAIN, None] < recipe.stain, u[:, _JITTER, None] < recipe.jitter
    stain_scale_B2 = _between(u[:, _STAIN_SCALE], 1 - recipe.stain_scale, 1 + recipe.stain_scale)
    stain_shift_B2 = _between(u[:, _STAIN_SHIFT], -recipe.stain_shift, recipe.stain_shift)
    sigma_B = _between(u[:, _SIGMA], *recipe.blur_sigma)
    return Draws(
        box_B4=_draw_box(u, recipe.scale, recipe.ratio, height, width).float(),
        flip_x_B=flip_x_B,
        flip_y_B=flip_y_B,
        transpose_B=(turns_B == 1) | (turns_B == 3),
        stain_scale_B2=torch.where(stain_B1, stain_scale_B2, 1.0).float(),
        stain_shift_B2=torch.where(stain_B1, stain_shift_B2, 0.0).float(),
        jitter_B4=torch.where(jitter_B1, factors_B4, no_jitter_B4.double()).float(),
        order_BP=u[:, _ORDER].argsort(dim=1),
        grey_B=u[:, _GREYS] < recipe.grey,
        sigma_B=torch.where(u[:, _BLUR] < recipe.blur, sigma_B, 0.0).float(),
        solarize_B=u[:, _SOLARIZE] < recipe.solarize,
    )


def _between(uniform: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return low + (high - low) * uniform


def _draw_box(
    u: torch.Tensor, scale: tuple[float, float], ratio: tuple[float, float], height: int, width: int
) -> torch.Tensor:
    """Return (B, 4) x, y, width, height: the first of ten boxes that fits into the tile, else a central one."""
    area_BT = height * width * _between(u[:, _AREA], *scale)
    ratio_BT = torch.exp(_between(u[:, _RATIO], math.log(ratio[0]), math.log(ratio[1])))
    width_BT, height_BT = torch.round(torch.sqrt(area_BT * ratio_BT)), torch.round(torch.sqrt(area_BT / ratio_BT))
    fits_BT = (width_BT > 0) & (width_BT <= width) & (height_BT > 0) & (height_BT <= height)
    # The weights fall, so that the largest marks the first that fits.
    first_B1 = (fits_BT * torch.arange(CROP_TRIES, 0, -1, device=u.device)).argmax(dim=1, keepdim=True)
    width_B = width_BT.gather(1, first_B1)[:, 0]
    height_B = height_BT.gather(1, first_B1)[:, 0]
    x_B = torch.floor(u[:, _X] * (width - width_B + 1))
    y_B = torch.floor(u[:, _Y] * (height - height_B + 1))
    fallback_w = min(width, round(height * ratio[1]))
    fallback_h = min(height, round(width / ratio[0]))
    fallback = ((width - fallback_w) // 2, (height - fallback_h) // 2, fallback_w, fallback_h)
    any_B = fits_BT.any(dim=1)
    drawn = (x_B, y_B, width_B, height_B)
    return torch.stack([torch.where(any_B, value, other) for value, other in zip(drawn, fallback, strict=True)], dim=1)


# ---- doing it ------------------------------------------------------------------------------------------------------


def render_view(
    tiles_BH3W: torch.Tensor,
    draws: Draws,
    recipe: ViewRecipe,
    basis: tuple[tuple[float, ...], ...],
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> torch.Tensor:
    """Render one view of every tile, normalized, float32 (B, 3, S, S). `tiles_BH3W` are grey levels, 0 to 255."""
    image = crop_and_flip(tiles_BH3W, draws, recipe.size_px, recipe.interpolation)
    if recipe.stain > 0:
        image = jitter_stain(image, draws.stain_scale_B2, draws.stain_shift_B2, basis)
    if recipe.jitter > 0:
        image = jitter_colour(image, draws.jitter_B4, draws.order_BP)
    if recipe.grey > 0:
        image = torch.where(draws.grey_B[:, None, None, None], _grey(image), image)
    if recipe.blur > 0:
        image = blur(image, draws.sigma_B, recipe.blur_sigma[1], tiles_BH3W.dtype)
    if recipe.solarize > 0:
        image = torch.where(draws.solarize_B[:, None, None, None] & (image >= SOLARIZE_FROM), 1 - image, image)
    if recipe.right_angles:
        # All steps before treat rows and columns alike, so the turn may come last.
        image = torch.where(draws.transpose_B[:, None, None, None], image.transpose(1, 3), image)
    return torch.stack([(image[:, :, i] - mean[i]) / std[i] for i in range(3)], dim=1)


def crop_and_flip(tiles_BH3W: torch.Tensor, draws: Draws, size: int, interpolation: str) -> torch.Tensor:
    """Return the crops resized to `size` and flipped, (B, S, 3, S) from 0 to 1, resampled as Pillow does."""
    batch, height, _, width = tiles_BH3W.shape
    x_B, y_B, width_B, height_B = draws.box_B4.unbind(dim=1)
    rows_BSH = _resize_weights(y_B, height_B, draws.flip_y_B, size, height, interpolation).to(tiles_BH3W.dtype)
    columns_BSW = _resize_weights(x_B, width_B, draws.flip_x_B, size, width, interpolation).to(tiles_BH3W.dtype)
    narrow = torch.bmm(tiles_BH3W.view(batch, height * 3, width), columns_BSW.mT)
    image = torch.bmm(rows_BSH, narrow.view(batch, height, 3 * size))
    # Bicubic weights overshoot at edges.
    return image.view(batch, size, 3, size).float().mul(1 / 255).clamp(0, 1)


def _resize_weights(
    start_B: torch.Tensor, length_B: torch.Tensor, flip_B: torch.Tensor, size: int, extent: int, interpolation: str
) -> torch.Tensor:
    """Return (B, size, extent): the weight of each input pixel of a line for each output pixel; rows sum to one."""
    step_B11 = (length_B / size)[:, None, None]
    place = torch.arange(size, device=start_B.device)
    place_BS = torch.where(flip_B[:, None], size - 1 - place, place)
    centre_BS1 = start_B[:, None, None] + (place_BS[:, :, None] + 0.5) * step_B11
    pixel = torch.arange(extent, device=start_B.device) + 0.5
    distance = (pixel - centre_BS1).abs() / step_B11.clamp_min(1.0)
    if interpolation == "bicubic":  # Keys' cubic with a = -0.5
        near = (1.5 * distance - 2.5) * distance * distance + 1
        far = ((2.5 - 0.5 * distance) * distance - 4) * distance + 2
        weights = torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
    else:
        weights = (1 - distance).clamp_min(0.0)
    inside_B1E = (pixel > start_B[:, None, None]) & (pixel < (start_B + length_B)[:, None, None])
    weights = weights * inside_B1E
    return weights / weights.sum(dim=-1, keepdim=True)


def stain_basis(stains: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """Return the unit vectors of two stains (3, 2), then the rows that give their concentrations from optical density.

    The third direction, orthogonal to both stains, is not changed by stain jitter.
    """
    unit = np.asarray(stains, dtype=np.float64) / np.linalg.norm(stains, axis=0)
    reading = np.linalg.inv(np.column_stack([unit, np.cross(unit[:, 0], unit[:, 1])]))
    return tuple(tuple(float(number) for number in row) for row in (*unit.T, *reading[:2]))


def jitter_stain(
    image: torch.Tensor, scale_B2: torch.Tensor, shift_B2: torch.Tensor, basis: tuple[tuple[float, ...], ...]
) -> torch.Tensor:
    """Scale and shift the concentrations of the two stains in optical density. Scaling keeps white unchanged."""
    density = -torch.log((image * 255 + 1) / 256)
    moved = [density[:, :, channel] for channel in range(3)]
    for number in range(2):
        vector, reading = basis[number], basis[2 + number]
        concentration = sum(reading[channel] * density[:, :, channel] for channel in range(3))
        more = (scale_B2[:, number, None, None] - 1) * concentration + shift_B2[:, number, None, None]
        moved = [moved[channel] + vector[channel] * more for channel in range(3)]
    return ((torch.exp(-torch.stack(moved, dim=2)) * 256 - 1) / 255).clamp(0, 1)


def _grey(image: torch.Tensor) -> torch.Tensor:
    red, green, blue = image.split(1, dim=2)
    return _GREY[0] * red + _GREY[1] * green + _GREY[2] * blue


def jitter_colour(image: torch.Tensor, jitter_B4: torch.Tensor, order_BP: torch.Tensor) -> torch.Tensor:
    """Change brightness, contrast, saturation and hue, in each tile's own random order."""
    position = torch.arange(4, device=order_BP.device)
    before_BP = position < (order_BP == _HUE).int().argmax(dim=1, keepdim=True)
    for slot in range(3):
        image = _blend(image, jitter_B4, torch.where(before_BP[:, slot], order_BP[:, slot], _HUE))
    image = turn_hue(image, jitter_B4[:, _HUE])
    for slot in range(1, 4):
        image = _blend(image, jitter_B4, torch.where(before_BP[:, slot], _HUE, order_BP[:, slot]))
    return image


def _blend(image: torch.Tensor, jitter_B4: torch.Tensor, step_B: torch.Tensor) -> torch.Tensor:
    """Mix each image with black (brightness), its mean grey (contrast) or its grey (saturation); with hue, nothing."""
    factor_B = jitter_B4.gather(1, step_B[:, None])[:, 0]
    factor = torch.where(step_B == _HUE, 1.0, factor_B)[:, None, None, None]
    grey = _grey(image)
    flat = (step_B == _CONTRAST)[:, None, None, None]
    with_colour = (step_B == _SATURATION)[:, None, None, None]
    other = torch.where(flat, grey.mean(dim=(1, 3), keepdim=True), grey) * (flat | with_colour)
    return (factor * image + (1 - factor) * other).clamp(0, 1)


def turn_hue(image: torch.Tensor, turn_B: torch.Tensor) -> torch.Tensor:
    """Rotate the hue (HSV) by a fraction of the full circle; value and saturation are unchanged."""
    red, green, blue = image.split(1, dim=2)
    value = image.amax(dim=2, keepdim=True)
    chroma = value - image.amin(dim=2, keepdim=True)
    # Sixths of the circle from red. Grey has no hue; any will do, as its chroma is 0.
    safe = torch.where(chroma > 0, chroma, 1.0)
    from_red, from_green, from_blue = (green - blue) / safe, (blue - red) / safe + 2, (red - green) / safe + 4
    hue = torch.where(red == value, from_red, torch.where(green == value, from_green, from_blue))
    hue = hue + 6 * turn_B[:, None, None, None]
    # A channel falls from the value by up to the chroma, as the hue moves away from it; channels are a third apart.
    offset = torch.arange(5, 0, -2, device=image.device)[:, None]
    away = torch.remainder(hue + offset, 6)
    return value - chroma * torch.minimum(away, 4 - away).clamp(0, 1)


def blur(image: torch.Tensor, sigma_B: torch.Tensor, max_sigma: float, dtype: torch.dtype) -> torch.Tensor:
    """Apply a Gaussian blur with reflected edges; sigma 0 changes nothing. Products are computed in `dtype`."""
    batch, size = image.shape[:2]
    weights_BSS = _blur_weights(sigma_B, max_sigma, size).to(dtype)
    narrow = torch.bmm(image.to(dtype).view(batch, size * 3, size), weights_BSS.mT)
    return torch.bmm(weights_BSS, narrow.view(batch, size, 3 * size)).view(batch, size, 3, size).float()


def _blur_weights(sigma_B: torch.Tensor, max_sigma: float, size: int) -> torch.Tensor:
    """Return (B, size, size): each row is the kernel around its pixel, reflected at the edges."""
    reach = min(math.ceil(BLUR_REACH * max_sigma), size - 1)
    taps = torch.arange(reach + 1, device=sigma_B.device)
    kernel_BT = torch.exp(-0.5 * (taps / sigma_B.clamp_min(1e-3)[:, None]) ** 2)
    kernel_BT = kernel_BT / (2 * kernel_BT.sum(dim=1, keepdim=True) - 1)
    # Which tap a pair of pixels is apart: directly, or by way of either edge (whose own pixel is not repeated).
    place = torch.arange(size, device=sigma_B.device)
    direct, over_start = (place[:, None] - place).abs(), place[:, None] + place
    over_end = 2 * (size - 1) - over_start
    taps_T11 = taps[:, None, None]
    counts_TSS = (direct == taps_T11).float()
    counts_TSS += (over_start == taps_T11) & (place > 0)
    counts_TSS += (over_end == taps_T11) & (place < size - 1)
    return (kernel_BT @ counts_TSS.view(reach + 1, -1)).view(-1, size, size)


# ---- views of a pretraining run --------------------------------------------------------------------------------------

OWN_SCALE = 0.15
"""Relative change of scale, at the middle of their range, up to which views count as being at the tile's own scale."""


def view_recipes(settings: PretrainSettings, tile_px: int, patch_px: int | None) -> tuple[ViewRecipe, ...]:
    """Return the recipes of the views of a tile: two global ones and, except for SimCLR, local ones."""
    large = settings.global_px or tile_px
    base = ViewRecipe(
        size_px=large,
        scale=settings.chosen("global_scale"),
        hflip=settings.hflip,
        vflip=settings.vflip,
        right_angles=settings.right_angles,
        stain=settings.stain_jitter,
        stain_scale=settings.stain_scale,
        stain_shift=settings.stain_shift,
        jitter=settings.jitter,
        grey=settings.grey,
        **{name: settings.chosen(name) for name in ("brightness", "contrast", "saturation", "hue")},
    )
    unit = patch_px or 1
    _check_size("global_px", large, unit)
    if settings.method == "simclr":  # resampled as torchvision does where nothing is said, and DSMIL with it
        return (replace(base, blur=settings.blur[2], interpolation="bilinear"),) * 2
    small = settings.local_px or max(round(large * 3 / 7 / unit), 1) * unit
    _check_size("local_px", small, unit)
    first, second, third = settings.blur
    return (
        replace(base, blur=first),
        replace(base, blur=second, solarize=settings.solarize),
        *[replace(base, size_px=small, scale=settings.local_scale, blur=third)] * settings.num_local,
    )


def _check_size(name: str, size: int, unit: int) -> None:
    if size % unit:
        raise ConfigError(
            f"pretrain.{name} {size} is no multiple of {unit}",
            f"the ViT cuts its views into patches of {unit} px",
            f"Use {max(round(size / unit), 1) * unit}",
            code="invalid-view-size",
        )


def encoder_tile_px(recipe: ViewRecipe, tile_px: int) -> int:
    """Return the edge, in pixels, of the tiles for which an encoder trained on these global views is meant.

    Views that show the whole tile downscaled give an encoder for tiles of the views' size, at a coarser resolution.
    Views cropped at about the tile's own scale (at the middle of their range) keep the size of the tile.
    """
    zoom = tile_px * math.sqrt(sum(recipe.scale) / 2) / recipe.size_px
    return tile_px if abs(zoom - 1) < OWN_SCALE else recipe.size_px
