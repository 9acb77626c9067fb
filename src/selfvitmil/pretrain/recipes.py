"""The views that the settings ask for, as one `ViewRecipe` per view, and the tiles that an encoder of them is for."""

from __future__ import annotations

import math
from dataclasses import replace

from selfvitmil.data.views import ViewRecipe
from selfvitmil.errors import ConfigError
from selfvitmil.settings import PretrainSettings

OWN_SCALE = 0.15
"""By how much views may shrink or enlarge the tile, in the middle of their range, and still show it at its scale."""


def recipes_of(settings: PretrainSettings, tile_px: int, patch_px: int | None) -> tuple[ViewRecipe, ...]:
    """How the views of a tile are made: two large ones and, but for SimCLR, small ones besides."""
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
        )


def made_for_px(recipe: ViewRecipe, tile_px: int) -> int:
    """Edge of the tiles that an encoder of these large views is for.

    Views that show the whole tile smaller make an encoder for tiles of their own size, at a coarser resolution. Views
    that are cut out of the tile at about its own scale (by the middle of their range) leave it as it is.
    """
    zoom = tile_px * math.sqrt(sum(recipe.scale) / 2) / recipe.size_px
    return tile_px if abs(zoom - 1) < OWN_SCALE else recipe.size_px
