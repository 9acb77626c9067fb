"""Images of many forms as uint8 tiles of an encoder. Pure; PIL images are recognized without importing PIL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfvitmil.errors import EncoderError

Images = NDArray[np.uint8] | Tensor | Sequence[Any]
"""A uint8 array or tensor (N, H, W, 3), or a sequence of uint8 (H, W, 3) arrays or PIL images of one size."""


def check_sequence(images: Images) -> None:
    """Raise EncoderError for a single image where several are expected."""
    if getattr(images, "ndim", 4) != 4 or not hasattr(images, "__len__"):
        shape = tuple(getattr(images, "shape", ()))
        raise EncoderError(
            f"{type(images).__name__}{f' of shape {shape}' if shape else ''} is not a batch of images",
            "an array (N, H, W, 3) or a list of images is expected",
            "For one image pass [image]",
        )


def to_tiles(images: Iterable[Any], size_px: int) -> Tensor:
    """Return RGB images of `size_px` x `size_px` pixels as a uint8 tensor (B, 3, H, W).

    PIL images are converted to RGB. Raises EncoderError for another dtype, shape or size.
    """
    return torch.stack([_to_tile(image, size_px) for image in images])


def _to_tile(image: Any, size_px: int) -> Tensor:
    if hasattr(image, "convert") and hasattr(image, "getbands"):
        image = image.convert("RGB")
    pixels = image if isinstance(image, Tensor) else torch.from_numpy(np.array(image))
    if pixels.dtype != torch.uint8:
        raise EncoderError(f"image of dtype {pixels.dtype}", "pixels are expected as uint8, 0 to 255")
    if tuple(pixels.shape) != (size_px, size_px, 3):
        what, why = f"image of shape {tuple(pixels.shape)}", f"the encoder takes ({size_px}, {size_px}, 3)"
        raise EncoderError(what, why, "Resize the images to the encoder's tile size and microns per pixel")
    return pixels.permute(2, 0, 1)
