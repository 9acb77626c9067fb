"""Macenko stain normalization (Macenko et al., ISBI 2009) as one 3x3 transform in optical density (OD).

`normalize_tile` fits and normalizes each tile separately, as the authors' code does. `fit_slide` estimates the stains
of a whole slide once from sampled pixels; `apply` then normalizes all its tiles to the reference stains. The two steps
of Macenko's method (concentrations by least squares, then reference stains times scaled concentrations) are combined
exactly into one matrix, `OD_out = M @ OD_in`, with `M = stains_ref @ diag(max_ref / max) @ pinv(stains)`. M has rank 2,
so colours that are neither stain (pen, pigment) are projected onto the plane of the two stains.

Constants are those of the authors' code: OD = -ln((level + 1) / 240), back to levels by 240 exp(-OD). The missing "- 1"
on the way back is also theirs; it lifts an image by one level. Levels above 240 have a negative OD and are transformed
like all others; a fit that would tint white is rejected, so glass keeps its colour.

Implementation: `apply` computes no logarithm or exponential per pixel. 240 exp(-sum_k M[c, k] OD_k) is a product of
three factors, each a function of one grey level, so a transform becomes nine lookup tables of 256 float32. Lookup and
multiplication are exact in IEEE arithmetic, so NumPy, torch on the CPU and torch on a GPU give the same bytes.

Axes in names: N pixels, B images, H and W height and width, 3 is RGB, 2 the stains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from selfvitmil.errors import StainError

if TYPE_CHECKING:
    import torch

Images = TypeVar("Images", NDArray[np.uint8], "torch.Tensor")

LIGHT = 240.0
"""Grey level of unstained glass."""
MIN_OD = 0.15
"""A pixel is stained when all three channels absorb at least this much."""
MAX_OD = 3.2
"""Pixels whose three channels all absorb more are too dark to have a colour: black padding, ink, folds."""
OUTLIERS = 1.0
"""Percent of the pixels ignored at either end of the range of hues."""
FULL = 99.0
"""Percentile of a stain's concentration that counts as its full strength."""

MIN_PIXELS, MAX_PIXELS = 1_000, 200_000
"""Minimum and maximum number of stained pixels for a slide's fit."""

# "Real" below: range over 4 slides of Camelyon16 and 81 patients of BreakHis, up to 32 tiles each.
MIN_VARIANCE = 1e-8
"""Variance of OD across the main axis below which all pixels have the same hue."""
MIN_MEAN_OD = 0.01
"""Mean OD within the plane of the two main axes; every stained pixel has at least 0.26 in all."""
MAX_THICKNESS = 0.25
"""Variance off the plane of the two stains, relative to the largest; real slides reach 0.07, noise starts at 0.4."""
MIN_COMPONENT = -0.05
"""Stains absorb light; a component of a stain vector may be negative only within noise. Real: above 0.06."""
MAX_DRIFT_DEG = 45.0
"""Angle between a stain and its reference above which it is a different stain. Real: up to 23 and 32."""
MIN_ANGLE_DEG = 8.0
"""Angle between the stains below which they are one stain plus noise. Real: 15 to 42."""
MIN_CONCENTRATION = 0.2
"""Full strength of a stain below which it counts as absent. Real: above 0.4."""
MAX_GAIN = 7.0
"""Largest entry of the transform; above this it amplifies noise. Real: 0.7 to 5.3."""
MIN_WHITE = 230.0
"""Level that white must keep in every channel. Real: above 246."""

_OD = -np.log((np.arange(256) + 1) / LIGHT)
_FIRST_PALE_LEVEL = int(np.argmax(_OD < MIN_OD))
_LAST_BLACK_LEVEL = int(np.argmin(_OD > MAX_OD)) - 1
# Two factors of this size and LIGHT still multiply to a normal float32, so no product is infinity times zero.
_MAX_EXPONENT = 40.0
# Temporaries take 16 bytes per pixel: blocks of this size fit into the cache, whatever the batch size.
_BLOCK_PIXELS = 32_768
_HOW = "Keep the pixels unchanged and record the reason"


@dataclass(frozen=True, eq=False)
class StainFit:
    """The two stain vectors of a slide, or the reason why they could not be fitted; then the transform is the
    identity."""

    stains: NDArray[np.float64]
    """(3, 2): OD of hematoxylin and of eosin in R, G, B, as unit columns; zeros when not fitted."""
    max_concentration: NDArray[np.float64]
    """(2,): the concentration of each stain that counts as its full strength; zeros when not fitted."""
    reason: str = ""
    """Why there is no fit; empty when there is one."""

    def __post_init__(self) -> None:
        for name, shape in (("stains", (3, 2)), ("max_concentration", (2,))):
            values = np.array(getattr(self, name), dtype=np.float64)
            if values.shape != shape or not np.isfinite(values).all():
                raise StainError(
                    f"a stain fit has {name} of shape {values.shape} with {np.isfinite(values).sum()} finite values",
                    f"{shape} finite numbers are needed",
                    "Fit the slide again",
                    code="invalid-stain-fit",
                )
            values.flags.writeable = False
            object.__setattr__(self, name, values)

    @classmethod
    def unfitted(cls, reason: str) -> StainFit:
        """Return the fit of a slide that could not be fitted."""
        return cls(np.zeros((3, 2)), np.zeros(2), reason)

    @property
    def fitted(self) -> bool:
        """Whether there are stains to normalize."""
        return not self.reason

    def od_transform(self, reference: StainFit | None = None) -> NDArray[np.float64]:
        """Return the (3, 3) matrix M that transforms these stains to those of `reference`: OD_out = M @ OD_in."""
        target = REFERENCE if reference is None else reference
        if not target.fitted:
            raise StainError(
                "the reference has no stains",
                target.reason,
                "Choose a reference that could be fitted",
                code="unfitted-reference",
            )
        if not self.fitted:
            return np.eye(3)
        gains = target.max_concentration / self.max_concentration
        return (target.stains * gains) @ np.linalg.pinv(self.stains)

    def to_attributes(self) -> dict[str, Any]:
        """Return lists of floats and a string, which JSON and HDF5 attributes store without loss."""
        return {
            "stains": self.stains.tolist(),
            "max_concentration": self.max_concentration.tolist(),
            "reason": self.reason,
        }

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, Any]) -> StainFit:
        """Read the result of `to_attributes`; further keys are ignored."""
        return cls(
            np.asarray(attributes["stains"], dtype=np.float64),
            np.asarray(attributes["max_concentration"], dtype=np.float64),
            str(attributes["reason"]),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StainFit) and self.to_attributes() == other.to_attributes()

    def __hash__(self) -> int:
        return hash((self.stains.tobytes(), self.max_concentration.tobytes(), self.reason))


REFERENCE = StainFit(np.array([[0.5626, 0.2159], [0.7201, 0.8012], [0.4062, 0.5581]]), np.array([1.9705, 1.0308]))
"""The target stains of all slides: those of the authors' code and of most Macenko implementations."""


# ---- fit -----------------------------------------------------------------------------------------------------------


def fit_slide(pixels: NDArray[np.uint8]) -> StainFit:
    """Fit the stains of a slide to a sample of its pixels: (N, 3) pixels or (T, H, W, 3) tiles.

    Glass, padding and black pixels are ignored. At most `MAX_PIXELS` stained pixels are used, spread evenly. Pixels
    that two stains cannot explain give a fit with a `reason`. Tile tables store that text, so its wording stays fixed.
    """
    _check_pixels(pixels)
    flat_N3 = pixels.reshape(-1, 3)
    red, green, blue = flat_N3.T
    stained = (red < _FIRST_PALE_LEVEL) & (green < _FIRST_PALE_LEVEL) & (blue < _FIRST_PALE_LEVEL)
    stained &= (red > _LAST_BLACK_LEVEL) | (green > _LAST_BLACK_LEVEL) | (blue > _LAST_BLACK_LEVEL)
    indices = np.flatnonzero(stained)
    try:
        if len(indices) < MIN_PIXELS:
            raise StainError(
                f"only {len(indices)} of {len(flat_N3)} pixels show stain",
                f"{MIN_PIXELS} are needed",
                code="few-stained-pixels",
            )
        od_3N = _OD[np.ascontiguousarray(flat_N3[_spread(indices, MAX_PIXELS)].T)]
        stains, variances = _find_stains(od_3N)
        _require_two_stains(stains, variances)
        full = _full_strength(np.linalg.pinv(stains) @ od_3N)
        # Sums differ slightly with the number of threads and the processor; the stored fit must not.
        fit = StainFit(stains.round(10), full.round(10))
        _require_gentle_transform(fit)
        return fit
    except StainError as error:
        return StainFit.unfitted(error.reason)


def _spread(indices: NDArray[np.intp], count: int) -> NDArray[np.intp]:
    """Return at most `count` of `indices`, spread evenly by the golden ratio, which does not align with JPEG blocks."""
    if len(indices) <= count:
        return indices
    return indices[(np.arange(count) * ((5**0.5 - 1) / 2) % 1 * len(indices)).astype(np.intp)]


def _find_stains(od_3N: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return unit stain vectors (3, 2), hematoxylin first, and the variances of OD along its main axes, ascending.

    The stains are the extreme hues in the plane of the two main axes. Hues are angles from the mean colour, so they do
    not depend on the arbitrary sign of an eigenvector, and only a hue opposite to the mean could wrap. The authors'
    code measures angles from one of the axes; unless its angles wrap, the stains are the same.
    """
    variances, axes = np.linalg.eigh(np.cov(od_3N))
    if variances[1] < MIN_VARIANCE:
        raise StainError("all stained pixels have one hue", "two stains cannot be separated", _HOW, code="one-hue")
    plane = axes[:, 1:]
    along, across = od_3N.mean(axis=1) @ plane
    length = np.hypot(along, across)
    if length < MIN_MEAN_OD:
        raise StainError(
            "the hues spread around grey", "mixtures of two stains lie between two hues", _HOW, code="grey-hues"
        )
    basis = plane @ np.array([[along, -across], [across, along]]) / length
    x_N, y_N = basis.T @ od_3N
    low, high = np.percentile(np.arctan2(y_N, x_N), [OUTLIERS, 100 - OUTLIERS])
    stains = basis @ np.array([[np.cos(low), np.cos(high)], [np.sin(low), np.sin(high)]])
    # Hematoxylin absorbs more red than eosin does.
    return (stains if stains[0, 0] > stains[0, 1] else stains[:, ::-1]), variances


def _full_strength(concentrations_2N: NDArray[Any]) -> NDArray[np.float64]:
    return np.percentile(concentrations_2N, FULL, axis=1)


def _require_two_stains(stains: NDArray[np.float64], variances: NDArray[np.float64]) -> None:
    if variances[0] > MAX_THICKNESS * variances[2]:
        raise StainError("the colours do not lie in a plane", "mixtures of two stains would", code="not-two-stains")
    if stains.min() < MIN_COMPONENT:
        shown = ", ".join(f"({r:.2f}, {g:.2f}, {b:.2f})" for r, g, b in stains.T)
        raise StainError(
            f"the stains would be {shown} in optical density",
            "a stain absorbs light in all channels",
            code="negative-stain",
        )
    for name, found, expected in zip(("hematoxylin", "eosin"), stains.T, REFERENCE.stains.T, strict=True):
        drift = _angle_deg(found, expected)
        if drift > MAX_DRIFT_DEG:
            raise StainError(
                f"a stain is {drift:.0f} degrees from {name}",
                f"above {MAX_DRIFT_DEG:g} it is another",
                code="unknown-stain",
            )
    angle = _angle_deg(stains[:, 0], stains[:, 1])
    if angle < MIN_ANGLE_DEG:
        raise StainError(
            f"the stains are {angle:.1f} degrees apart",
            f"below {MIN_ANGLE_DEG:g} they are one",
            code="stains-too-close",
        )


def _angle_deg(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return float(np.degrees(np.arccos(np.clip(a @ b, -1, 1))))


def _require_gentle_transform(fit: StainFit) -> None:
    faint = fit.max_concentration.min()
    if faint < MIN_CONCENTRATION:
        raise StainError(
            f"a stain has a full strength of {faint:.2f}",
            f"below {MIN_CONCENTRATION:g} it is absent",
            code="stain-absent",
        )
    transform = fit.od_transform()
    gain = np.abs(transform).max()
    if gain > MAX_GAIN:
        raise StainError(
            f"the map would amplify by {gain:.1f}", f"above {MAX_GAIN:g} noise is all that is left", code="stain-gain"
        )
    white = (LIGHT * np.exp(-transform @ _OD[[255, 255, 255]])).min()
    if white < MIN_WHITE:
        raise StainError(f"the map would darken white to {white:.0f}", "glass must stay glass", code="tinted-glass")


# ---- apply ---------------------------------------------------------------------------------------------------------


def apply(images: Images, fit: StainFit, reference: StainFit | None = None) -> Images:
    """Normalize images of one slide to the stains of `reference`; without a fit the pixels are unchanged.

    uint8, either a NumPy array (..., H, W, 3) or a torch tensor (..., 3, H, W) on any device; the results are
    identical.
    """
    return _look_up(images, _tables(fit.od_transform(reference)[None]))


def apply_transforms(images: Images, transforms_B33: ArrayLike | torch.Tensor) -> Images:
    """Normalize a batch with one transform per image: (B, H, W, 3) in NumPy or (B, 3, H, W) in torch.

    `transforms_B33` are results of `StainFit.od_transform`, as an array or as a tensor on any device (a CPU tensor
    avoids a synchronization). The identity leaves its image unchanged.
    """
    on_cpu: Any = transforms_B33.cpu() if hasattr(transforms_B33, "cpu") else transforms_B33  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
    transforms = np.asarray(on_cpu, dtype=np.float64)
    if images.ndim != 4 or transforms.shape != (len(images), 3, 3) or not np.isfinite(transforms).all():
        raise StainError(
            f"stain transforms of shape {transforms.shape} for images of shape {tuple(images.shape)}",
            "every image of a batch needs one 3x3 matrix of finite numbers",
            "Stack the images' od_transform()",
            code="stain-transform-shape",
        )
    return _look_up(images, _tables(transforms))


def _tables(transforms_B33: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return (B, 3, 256, 4): per transform, input channel and level the factors of output R, G, B, and a 1 as
    padding."""
    tables = np.empty((len(transforms_B33), 3, 256, 4), dtype=np.float32)
    for table, transform in zip(tables, transforms_B33, strict=True):
        table[:] = _table(np.ascontiguousarray(transform).tobytes())
    return tables


@lru_cache(maxsize=512)
def _table(transform_bytes: bytes) -> NDArray[np.float32]:
    transform = np.frombuffer(transform_bytes).reshape(3, 3)
    table = np.ones((3, 256, 4))
    if np.array_equal(transform, np.eye(3)):
        for channel in range(3):
            table[channel, :, channel] = np.arange(256)
    else:
        exponents = -transform.T[:, None, :] * _OD[None, :, None]
        table[..., :3] = np.exp(np.clip(exponents, -_MAX_EXPONENT, _MAX_EXPONENT))
        table[0, :, :3] *= LIGHT
    return table.astype(np.float32)


def _look_up(images: Images, tables: NDArray[np.float32]) -> Images:
    """Transform every pixel by the table of its image; one table may serve all images."""
    if isinstance(images, np.ndarray):
        return _look_up_numpy(images, tables)
    return _look_up_torch(images, tables)


def _look_up_numpy(images: NDArray[np.uint8], tables: NDArray[np.float32]) -> NDArray[np.uint8]:
    _check_pixels(images)
    out = np.empty(images.shape, dtype=np.uint8)
    shape = (len(tables), images.size // 3 // max(len(tables), 1), 3)
    # A row of four float32 is gathered three times faster when viewed as one number of 16 bytes.
    cells = tables.view(np.complex128)[..., 0]
    for table, pixels_N3, out_N3 in zip(cells, images.reshape(shape), out.reshape(shape), strict=True):
        for start in range(0, len(pixels_N3), _BLOCK_PIXELS):
            block = slice(start, start + _BLOCK_PIXELS)
            _look_up_block(pixels_N3[block], table, out_N3[block])
    return out


def _look_up_block(pixels_N3: NDArray[np.uint8], table: NDArray[np.complex128], out_N3: NDArray[np.uint8]) -> None:
    product = table[0].take(pixels_N3[:, 0]).view(np.float32)
    product *= table[1].take(pixels_N3[:, 1]).view(np.float32)
    with np.errstate(over="ignore", under="ignore"):  # overflow is white, underflow black
        product *= table[2].take(pixels_N3[:, 2]).view(np.float32)
    np.clip(product, 0, 255, out=product)
    np.rint(product, out=product)
    levels_N4 = product.astype(np.uint8).reshape(-1, 4)
    for channel in range(3):  # five times faster than copying [:, :3]
        out_N3[:, channel] = levels_N4[:, channel]


def _look_up_torch(images: Any, tables: NDArray[np.float32]) -> Any:
    import torch

    if not isinstance(images, torch.Tensor) or images.dtype != torch.uint8 or images.ndim < 3 or images.shape[-3] != 3:
        raise StainError(
            f"cannot normalize the stain of {_describe(images)}",
            "expected uint8, (..., H, W, 3) as a NumPy array or (..., 3, H, W) as a torch tensor",
            "Convert before the call",
            code="invalid-pixels",
        )
    images_B3HW = images.reshape(-1, *images.shape[-3:])
    out_B3HW = torch.empty_like(images_B3HW)
    tables_on_device = torch.from_numpy(tables)  # pyright: ignore[reportUnknownMemberType]
    # Pinned for a GPU, so that the copy waits for nothing that the device was given before.
    is_gpu = images.device.type == "cuda"
    tables_on_device = (tables_on_device.pin_memory() if is_gpu else tables_on_device).to(
        images.device, non_blocking=is_gpu
    )
    if images.device.type == "cpu":  # one image at a time fits into the cache
        per_image = tables_on_device.expand(len(images_B3HW), -1, -1, -1)
        for image, table, out in zip(images_B3HW, per_image, out_B3HW, strict=True):
            _look_up_batch(image[None], table[None], out[None])
    else:
        _look_up_batch(images_B3HW, tables_on_device, out_B3HW)
    return out_B3HW.reshape(images.shape)


def _look_up_batch(images_B3HW: torch.Tensor, tables: torch.Tensor, out_B3HW: torch.Tensor) -> None:
    import torch

    batch, _, height, width = images_B3HW.shape
    first_rows = 256 * torch.arange(len(tables), dtype=torch.int32, device=images_B3HW.device)[:, None, None]
    factors: list[torch.Tensor] = []
    for channel in range(3):
        rows = (images_B3HW[:, channel].to(torch.int32) + first_rows).reshape(-1)
        table = tables[:, channel].reshape(-1, 4)
        if table.device.type == "mps":  # has no complex128
            factors.append(table.index_select(0, rows))
        else:  # 16 bytes as one number, as in NumPy: a hundred times faster than rows of four on an H200
            cells = table.view(torch.complex128)[:, 0].index_select(0, rows)
            factors.append(cells.view(torch.float32).reshape(-1, 4))
    product = factors[0].mul_(factors[1]).mul_(factors[2])
    levels = product.clamp_(0, 255).round_().reshape(batch, height, width, 4)
    out_B3HW.copy_(levels[..., :3].permute(0, 3, 1, 2))


# ---- tile by tile --------------------------------------------------------------------------------------------------


def normalize_tile(tile: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Normalize a tile by its own stains (Macenko et al., ISBI 2009), exactly as the authors' code does.

    All pixels count for the full strength, including glass; levels are truncated; values above 255 become 254.

    Parameters
    ----------
    tile
        RGB pixels, uint8 (H, W, 3).

    Returns
    -------
    NDArray[np.uint8]
        The tile in the reference stains, (H, W, 3).

    Raises
    ------
    StainError
        The two stains cannot be estimated; the authors' code drops such tiles. Also if `tile` is not uint8 with RGB
        last.
    """
    _check_pixels(tile)
    channels_3N = np.ascontiguousarray(tile.reshape(-1, 3).T)
    od_3N = _OD[channels_3N]
    stained_3N = od_3N.compress((channels_3N < _FIRST_PALE_LEVEL).all(axis=0), axis=1)
    if stained_3N.shape[1] < 2:
        raise StainError(
            "no pixels of the tile show stain", "there is nothing to estimate", _HOW, code="few-stained-pixels"
        )
    stains, _ = _find_stains(stained_3N)
    concentrations_2N = np.linalg.pinv(stains) @ od_3N
    strength = _full_strength(concentrations_2N)
    if strength.min() <= 0:
        raise StainError("the tile lacks one of two stains", "it has no strength to scale", _HOW, code="stain-absent")
    scaled_2N = concentrations_2N * (REFERENCE.max_concentration / strength)[:, None]
    levels_3N = LIGHT * np.exp(-REFERENCE.stains @ scaled_2N)
    levels_3N[levels_3N > 255] = 254
    return levels_3N.T.astype(np.uint8, order="C").reshape(tile.shape)


def normalize_or_keep(tile: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], bool]:
    """Return the normalized tile and True, or the unchanged tile and False if its stains cannot be estimated."""
    try:
        return normalize_tile(tile), True
    except StainError:
        return tile, False


def _check_pixels(pixels: NDArray[Any]) -> None:
    # Callers may pass a list or a tensor, whatever the annotation says.
    is_array = isinstance(pixels, np.ndarray)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_array or pixels.dtype != np.uint8 or pixels.ndim < 2 or pixels.shape[-1] != 3:
        raise StainError(
            f"cannot read the stain of {_describe(pixels)}",
            "expected uint8 pixels with RGB last",
            "Convert before the call",
            code="invalid-pixels",
        )


def _describe(images: Any) -> str:
    return f"{type(images).__name__} {getattr(images, 'dtype', '')} {tuple(getattr(images, 'shape', ()))}"
