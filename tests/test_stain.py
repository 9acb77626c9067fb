"""Stain normalization: golden tiles, planted stains, the formula in two steps, and pixels that cannot be fitted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from helpers.error_codes import has_code
from selfvitmil import stain
from selfvitmil.errors import StainError
from selfvitmil.stain import REFERENCE, StainFit, apply, apply_transforms, fit_slide, normalize_tile

GOLDEN = Path(__file__).parent / "golden" / "macenko_tiles.npz"
quick = settings(max_examples=25, deadline=None, derandomize=True)

HEMATOXYLIN = np.array([0.60, 0.70, 0.38])
EOSIN = np.array([0.22, 0.85, 0.48])


def unit_columns(*vectors: Any) -> NDArray[np.float64]:
    columns = np.array(vectors, dtype=np.float64).T
    return columns / np.linalg.norm(columns, axis=0)


STAINS = unit_columns(HEMATOXYLIN, EOSIN)


def concentrations(count: int, seed: int) -> NDArray[np.float64]:
    """(N, 2) amounts of two stains: a fifth of the pixels has the first alone, a fifth the second, the rest both."""
    rng = np.random.default_rng(seed)
    amounts = np.column_stack([rng.uniform(0.6, 2.0, count), rng.uniform(1.0, 2.0, count)])
    kind = rng.integers(0, 5, count)
    amounts[kind == 0, 1] = 0
    amounts[kind == 1, 0] = 0
    return amounts


def beer_lambert(amounts: NDArray[np.float64], stains: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Pixels (N, 3) that a camera sees through these amounts of stain."""
    return np.rint(240 * np.exp(-amounts @ stains.T) - 1).clip(0, 255).astype(np.uint8)


def tissue(seed: int = 0, stains: NDArray[np.float64] = STAINS, strength: float = 1.0) -> NDArray[np.uint8]:
    return beer_lambert(strength * concentrations(64 * 64, seed), stains).reshape(64, 64, 3)


def two_steps(images: NDArray[np.uint8], fit: StainFit, reference: StainFit = REFERENCE) -> NDArray[np.float64]:
    """Macenko as it is told: concentrations by least squares, scaled, mixed with the reference stains. Not rounded."""
    od = -np.log((images.reshape(-1, 3).astype(np.float64) + 1) / 240)
    amounts = np.linalg.lstsq(fit.stains, od.T, rcond=None)[0]
    amounts *= (reference.max_concentration / fit.max_concentration)[:, None]
    return (240 * np.exp(-(reference.stains @ amounts))).T.reshape(images.shape)


def angle_deg(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return float(np.degrees(np.arccos(np.clip(a @ b / np.linalg.norm(a) / np.linalg.norm(b), -1, 1))))


def difference(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> NDArray[np.int64]:
    return np.abs(a.astype(np.int64) - b.astype(np.int64))


def to_numpy(images_b3hw: torch.Tensor) -> NDArray[np.uint8]:
    return images_b3hw.movedim(-3, -1).cpu().numpy()


def to_torch(images: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(images).movedim(-1, -3).contiguous()


@pytest.fixture
def golden() -> Any:
    return np.load(GOLDEN)


# ---- tile by tile


def test_tiles_equal_those_of_the_authors_code(golden: Any) -> None:
    for tile, expected in zip(golden["tile"], golden["normalized"], strict=True):
        off = difference(normalize_tile(tile), expected)
        assert (off <= 1).mean() >= 0.999
        assert off.mean() < 1e-3  # not one level off everywhere


@pytest.fixture(params=[(1, 1, 1), (1, -1, 1), (1, 1, -1), (-1, -1, -1)])
def flipped_eigenvectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eigenvector has no sign: libraries and processors return one or the other."""
    eigh = np.linalg.eigh

    def flipped(matrix: Any) -> Any:
        values, vectors = eigh(matrix)
        return values, vectors * np.sign(vectors.sum(axis=0)) * request.param

    monkeypatch.setattr(np.linalg, "eigh", flipped)


@pytest.mark.usefixtures("flipped_eigenvectors")
def test_tile_does_not_depend_on_the_signs_of_eigenvectors(golden: Any) -> None:
    assert difference(normalize_tile(golden["tile"][0]), golden["normalized"][0]).max() <= 1


@pytest.mark.usefixtures("flipped_eigenvectors")
def test_stains_do_not_depend_on_the_signs_of_eigenvectors() -> None:
    # Hue varies more than strength, so the first axis runs from one stain to the other and angles from it would wrap.
    rng = np.random.default_rng(0)
    share, strength = rng.uniform(-0.2, 1.2, (9_000, 1)).clip(0, 1), rng.uniform(1.4, 1.6, (9_000, 1))
    fit = fit_slide(beer_lambert(strength * np.hstack([share, 1 - share]), STAINS))
    assert fit.reason == ""
    assert angle_deg(fit.stains[:, 0], STAINS[:, 0]) < 1
    assert angle_deg(fit.stains[:, 1], STAINS[:, 1]) < 1


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("white", np.full((8, 8, 3), 255)),
        ("glass", np.full((8, 8, 3), 236)),
        ("black", np.zeros((8, 8, 3))),
        ("one colour", np.full((8, 8, 3), (120, 60, 140))),
        ("grey", np.arange(64).repeat(3).reshape(8, 8, 3)),
        ("one pixel", np.full((1, 1, 3), 100)),
        ("one stained pixel", np.concatenate([np.full((1, 8, 3), 255), np.full((1, 1, 3), 90).repeat(8, 1)])[:, :1]),
        ("empty", np.empty((0, 8, 3))),
        ("three primaries", np.eye(3)[np.arange(66).reshape(6, 11) % 3] * 150 + 20),
    ],
)
def test_tiles_without_two_stains_raise(name: str, tile: NDArray[Any]) -> None:
    with pytest.raises(StainError):
        normalize_tile(tile.astype(np.uint8))


# ---- fit


@st.composite
def stain_pairs(draw: st.DrawFn) -> NDArray[np.float64]:
    def between(low: float, high: float) -> float:
        return draw(st.floats(low, high))

    stains = unit_columns(
        [between(0.5, 0.75), between(0.55, 0.8), between(0.25, 0.5)],
        [between(0.18, 0.35), between(0.75, 0.95), between(0.3, 0.65)],
    )
    assume(angle_deg(stains[:, 0], stains[:, 1]) > 14)
    return stains


@quick
@given(stain_pairs(), st.floats(0.8, 1.3), st.integers(0, 99))
def test_planted_stains_are_found(stains: NDArray[np.float64], strength: float, seed: int) -> None:
    amounts = strength * concentrations(8_000, seed)
    fit = fit_slide(beer_lambert(amounts, stains))
    assert fit.reason == ""
    assert angle_deg(fit.stains[:, 0], stains[:, 0]) < 2
    assert angle_deg(fit.stains[:, 1], stains[:, 1]) < 2
    np.testing.assert_allclose(np.linalg.norm(fit.stains, axis=0), 1, atol=1e-9)
    np.testing.assert_allclose(fit.max_concentration, np.percentile(amounts, 99, axis=0), rtol=0.08)


@quick
@given(stain_pairs(), stain_pairs(), st.floats(0.8, 1.25))
def test_one_tissue_in_two_stainings_becomes_one(
    first: NDArray[np.float64], second: NDArray[np.float64], strength: float
) -> None:
    a, b = tissue(3, first), tissue(3, second, strength)
    before = difference(a, b).mean()
    assume(before > 8)
    after = difference(apply(a, fit_slide(a)), apply(b, fit_slide(b))).mean()
    assert after < before / 5


def test_order_of_pixels_does_not_matter() -> None:
    pixels = tissue(1).reshape(-1, 3)
    fit = fit_slide(pixels)
    for seed in range(3):
        assert fit_slide(np.random.default_rng(seed).permutation(pixels)) == fit


def test_glass_and_black_do_not_count() -> None:
    pixels = tissue(1).reshape(-1, 3)
    rng = np.random.default_rng(0)
    glass = rng.integers(225, 256, (9_000, 3), dtype=np.uint8)
    black = rng.integers(0, 8, (9_000, 3), dtype=np.uint8)
    assert fit_slide(np.concatenate([glass, pixels, black])) == fit_slide(pixels)


def test_tiles_and_their_pixels_give_one_fit() -> None:
    tiles = np.stack([tissue(seed) for seed in range(4)])
    assert fit_slide(tiles) == fit_slide(tiles.reshape(-1, 3)) == fit_slide(tiles[:, ::-1, ::-1][:, ::-1, ::-1])


def test_a_sample_stands_for_all_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = np.stack([tissue(seed, strength=0.8 + 0.05 * seed) for seed in range(16)])
    whole = fit_slide(tiles)
    monkeypatch.setattr(stain, "MAX_PIXELS", 8_000)
    sampled = fit_slide(tiles)
    assert sampled != whole
    np.testing.assert_allclose(sampled.stains, whole.stains, atol=0.01)
    np.testing.assert_allclose(sampled.max_concentration, whole.max_concentration, rtol=0.02)


def test_a_few_foreign_pixels_do_not_move_the_stains() -> None:
    pixels = tissue(2).reshape(-1, 3)
    pen = np.tile(np.array([[20, 160, 60]], dtype=np.uint8), (len(pixels) // 250, 1))
    fit, with_pen = fit_slide(pixels), fit_slide(np.concatenate([pixels, pen]))
    for k in range(2):
        assert angle_deg(fit.stains[:, k], with_pen.stains[:, k]) < 2


def three_colours(*colours: tuple[int, int, int]) -> NDArray[np.int64]:
    return np.array(colours)[np.arange(3_000) % 3]


RNG = np.random.default_rng(5)
UNFITTABLE = {
    "nothing": (np.empty((0, 3)), "only 0 of 0 pixels"),
    "one pixel": (np.full((1, 3), 100), "only 1 of 1 pixels"),
    "white": (np.full((2, 40, 40, 3), 255), "only 0 of 3200 pixels"),
    "black": (np.zeros((2, 40, 40, 3)), "only 0 of 3200 pixels"),
    "little tissue": (np.concatenate([tissue().reshape(-1, 3)[:999], np.full((3000, 3), 240)]), "only 999 of 3999"),
    "one colour": (np.full((4000, 3), (120, 60, 140)), "one hue"),
    "shades of grey": (RNG.integers(0, 200, (4000, 1)).repeat(3, 1), "one hue"),
    "three primaries": (np.eye(3)[np.arange(6000) % 3] * 150 + 20, "around grey"),
    "noise": (RNG.integers(0, 256, (9000, 3)), "plane"),
    "noise around lilac": (RNG.normal((150, 100, 160), 12, (9000, 3)).clip(0, 255), "plane"),
    "one stain": (beer_lambert(RNG.uniform(0.6, 2, (9000, 1)), STAINS[:, :1]), "degrees apart"),
    "blue and yellow": (
        beer_lambert(concentrations(9000, 0), unit_columns((0.7, 0.6, 0.3), (0.1, 0.1, 0.9))),
        "from eosin",
    ),
    "light that shines": (three_colours((10, 150, 140), (170, 40, 20), (170, 10, 110)), "a stain absorbs light"),
    "no hematoxylin": (three_colours((80, 170, 30), (110, 140, 170), (100, 80, 60)), "from hematoxylin"),
    "colours too close": (three_colours((130, 60, 110), (180, 180, 190), (170, 130, 160)), "amplify"),
    "tinted glass": (three_colours((80, 120, 130), (40, 80, 110), (90, 190, 150)), "darken white"),
}


@pytest.mark.parametrize("name", UNFITTABLE)
def test_odd_pixels_are_left_unchanged_with_a_reason(name: str) -> None:
    values, reason = UNFITTABLE[name]
    pixels = values.astype(np.uint8)
    fit = fit_slide(pixels)
    assert not fit.fitted
    assert reason in fit.reason
    np.testing.assert_array_equal(fit.od_transform(), np.eye(3))
    every_level = np.arange(256, dtype=np.uint8)[:, None, None].repeat(3, 2)
    np.testing.assert_array_equal(apply(every_level, fit), every_level)
    np.testing.assert_array_equal(apply(pixels, fit), pixels)


def test_a_stain_that_is_hardly_there_is_not_scaled_up() -> None:
    stain._require_gentle_transform(StainFit(STAINS, np.array([1.5, 1.5])))
    for full in ((0.1, 1.5), (1.5, 0.1), (0.0, 1.5), (1.5, -1.0)):
        with pytest.raises(StainError, match="full strength"):
            stain._require_gentle_transform(StainFit(STAINS, np.array(full)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(*[st.integers(0, 255)] * 3), min_size=1, max_size=12),
    st.integers(0, 60),
    st.integers(0, 99),
)
def test_any_palette_gives_a_fit_or_a_reason_and_keeps_white(
    palette: list[tuple[int, int, int]], spread: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    pixels = np.array(palette)[rng.integers(0, len(palette), 4_000)] + rng.integers(-spread, spread + 1, (4_000, 3))
    fit = fit_slide(pixels.clip(0, 255).astype(np.uint8))
    assert np.isfinite(fit.od_transform()).all()
    assert fit.fitted == (fit.reason == "")
    assert apply(np.full((1, 1, 3), 255, dtype=np.uint8), fit).min() >= 230


# ---- apply


def test_map_is_the_two_steps_in_one(golden: Any) -> None:
    for tile in golden["tile"]:
        fit = fit_slide(tile)
        od = -np.log((tile.reshape(-1, 3).astype(np.float64) + 1) / 240)
        np.testing.assert_allclose(
            240 * np.exp(-od @ fit.od_transform().T), two_steps(tile, fit).reshape(-1, 3), rtol=1e-9
        )
        off = difference(apply(tile, fit), np.rint(two_steps(tile, fit)).clip(0, 255).astype(np.uint8))
        assert off.max() <= 1
        assert (off > 0).mean() < 1e-4


@quick
@given(stain_pairs(), st.tuples(st.floats(0.3, 4), st.floats(0.3, 3)), st.integers(0, 99))
def test_any_colour_follows_the_two_steps(stains: NDArray[np.float64], full: tuple[float, float], seed: int) -> None:
    fit = StainFit(stains, np.array(full))
    colours = np.random.default_rng(seed).integers(0, 256, (50, 50, 3), dtype=np.uint8)
    exact = two_steps(colours, fit).clip(0, 255)
    got = apply(colours, fit)
    assert np.abs(got - exact).max() < 0.5 + 1e-3


def test_own_stains_change_next_to_nothing() -> None:
    for seed in range(4):
        made = tissue(seed)
        fit = fit_slide(made)
        off = difference(apply(made, fit, reference=fit), made)
        assert off.max() <= 3
        assert off.mean() < 1.2  # one level is the "+ 1" of the logarithm


def test_own_stains_remove_what_is_neither_stain(golden: Any) -> None:
    for tile in golden["tile"]:
        fit = fit_slide(tile)
        normal = np.cross(fit.stains[:, 0], fit.stains[:, 1])
        normal /= np.linalg.norm(normal)
        od = -np.log((tile.astype(np.float64) + 1) / 240)
        flat = 240 * np.exp(-(od - (od @ normal)[..., None] * normal))
        got = apply(tile, fit, reference=fit)
        assert np.abs(got - flat.clip(0, 255)).max() < 0.5 + 1e-3


def test_white_stays_white_on_real_tiles(golden: Any) -> None:
    glass = np.array([[[255, 255, 255], [243, 243, 243]]], dtype=np.uint8)
    for tile in golden["tile"]:
        out = apply(glass, fit_slide(tile))
        assert out.min() >= 238
        assert np.ptp(out.astype(int), axis=-1).max() <= 10


def test_a_reference_needs_stains() -> None:
    with pytest.raises(StainError, match="all white"):
        apply(tissue(), REFERENCE, reference=StainFit.unfitted("all white"))


def test_extreme_maps_stay_finite() -> None:
    colours = np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    transforms = np.array([np.full((3, 3), 50.0), np.full((3, 3), -50.0), [[90, -90, 90]] * 3])
    batch = np.stack([colours] * 3)
    with np.errstate(all="raise", under="ignore"):
        out = apply_transforms(batch, transforms)
    assert out[0][(colours > 240).all(-1)].min(initial=255) == 255
    assert out[0][(colours < 200).all(-1)].max() == 0
    assert out[1][(colours < 200).all(-1)].min() == 255
    np.testing.assert_array_equal(to_numpy(apply_transforms(to_torch(batch), transforms)), out)


@pytest.mark.parametrize("shape", [(31, 17), (1, 31, 17), (5, 31, 17), (2, 3, 9, 8), (2, 200, 200), (0, 8, 8)])
def test_torch_gives_the_bytes_of_numpy(shape: tuple[int, ...]) -> None:
    images = np.random.default_rng(1).integers(0, 256, (*shape, 3), dtype=np.uint8)
    fit = fit_slide(tissue())
    expected = apply(images, fit)
    assert expected.shape == images.shape
    channels_first = to_torch(images)
    for tensor in (channels_first, torch.from_numpy(images).movedim(-1, -3)):
        before = tensor.clone()
        got = apply(tensor, fit)
        assert got.dtype == torch.uint8
        assert got.shape == tensor.shape
        np.testing.assert_array_equal(to_numpy(got), expected)
        assert torch.equal(tensor, before)


def test_arrays_need_not_be_contiguous() -> None:
    image, fit = tissue(7), fit_slide(tissue())
    expected = apply(image, fit)
    np.testing.assert_array_equal(apply(image[::-1, ::2], fit), expected[::-1, ::2])
    np.testing.assert_array_equal(apply(image.transpose(1, 0, 2), fit), expected.transpose(1, 0, 2))
    np.testing.assert_array_equal(to_numpy(apply(to_torch(image)[:, ::3, 1:], fit)), expected[::3, 1:])


def mixed_batch() -> tuple[NDArray[np.uint8], list[StainFit]]:
    fits = [fit_slide(tissue(0, STAINS, strength)) for strength in (0.8, 1.0, 1.3)]
    fits += [StainFit.unfitted("white"), fits[0]]
    images = np.stack([tissue(seed) for seed in range(len(fits))])
    images[3, :16] = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(4, 1)
    return images, fits


def test_a_batch_with_many_maps_equals_its_images_one_by_one() -> None:
    images, fits = mixed_batch()
    expected = np.stack([apply(image, fit) for image, fit in zip(images, fits, strict=True)])
    np.testing.assert_array_equal(expected[3], images[3])
    transforms = np.stack([fit.od_transform() for fit in fits])
    np.testing.assert_array_equal(apply_transforms(images, transforms), expected)
    np.testing.assert_array_equal(to_numpy(apply_transforms(to_torch(images), transforms)), expected)
    np.testing.assert_array_equal(to_numpy(apply_transforms(to_torch(images), torch.from_numpy(transforms))), expected)
    # The way of a GPU, where the whole batch is looked up at once.
    out = torch.empty_like(to_torch(images))
    stain._look_up_batch(to_torch(images), torch.from_numpy(stain._tables(transforms)), out)
    np.testing.assert_array_equal(to_numpy(out), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_bytes_of_numpy() -> None:
    images, fits = mixed_batch()
    transforms = np.stack([fit.od_transform() for fit in fits])
    tensor = to_torch(images).cuda()
    assert apply(tensor, fits[0]).device == tensor.device
    np.testing.assert_array_equal(to_numpy(apply(tensor, fits[0])), apply(images, fits[0]))
    for on_device in (transforms, torch.from_numpy(transforms).cuda()):
        np.testing.assert_array_equal(
            to_numpy(apply_transforms(tensor, on_device)), apply_transforms(images, transforms)
        )


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((4, 4, 3)),
        np.zeros((4, 4, 4), dtype=np.uint8),
        np.zeros((3, 4, 4), dtype=np.uint8),
        torch.zeros(3, 4, 4),
        torch.zeros(4, 4, 3, dtype=torch.uint8),
        [[[1, 2, 3]]],
    ],
)
def test_wrong_types_and_layouts_are_refused(images: Any) -> None:
    with pytest.raises(StainError, match=r"uint8.*RGB last|uint8, \(\.\.\., H, W, 3\)"):
        apply(images, REFERENCE)


def test_wrong_maps_are_refused() -> None:
    images = np.zeros((2, 4, 4, 3), dtype=np.uint8)
    for transforms in (np.eye(3), np.zeros((3, 3, 3)), np.full((2, 3, 3), np.nan)):
        with pytest.raises(StainError, check=has_code("stain-transform-shape")):
            apply_transforms(images, transforms)


# ---- storing


@pytest.mark.parametrize("fit", [fit_slide(tissue()), StainFit.unfitted("only 3 pixels show stain"), REFERENCE])
def test_a_fit_survives_json_and_hdf5_without_loss(fit: StainFit, tmp_path: Path) -> None:
    assert StainFit.from_attributes(json.loads(json.dumps(fit.to_attributes()))) == fit
    with h5py.File(tmp_path / "fit.h5", "w") as file:
        file.attrs.update(fit.to_attributes())
    with h5py.File(tmp_path / "fit.h5") as file:
        again = StainFit.from_attributes(dict(file.attrs))
    assert again == fit
    assert again.od_transform().tobytes() == fit.od_transform().tobytes()


def test_a_damaged_fit_is_refused() -> None:
    for damage in ({"stains": [[1, 2, 3]]}, {"max_concentration": [1.0, float("nan")]}):
        with pytest.raises(StainError, check=has_code("invalid-stain-fit")):
            StainFit.from_attributes(REFERENCE.to_attributes() | damage)


def test_numpy_alone_suffices() -> None:
    code = (
        "import sys, numpy as np; from selfvitmil import stain;"
        "stain.apply(np.zeros((2, 2, 3), np.uint8), stain.REFERENCE); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- real tiles


def test_real_slides_are_fitted_and_come_closer(shared: Path) -> None:
    slides: dict[str, list[NDArray[np.uint8]]] = {}
    for path in sorted((shared / "data" / "camelyon16" / "patches").rglob("*.png")):
        slides.setdefault(path.name[:9], []).append(np.asarray(Image.open(path).convert("RGB")))
    assert len(slides) == 4
    means: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
    for tiles in map(np.stack, slides.values()):
        fit = fit_slide(tiles)
        assert fit.fitted, fit.reason
        assert angle_deg(fit.stains[:, 0], REFERENCE.stains[:, 0]) < 30
        assert angle_deg(fit.stains[:, 1], REFERENCE.stains[:, 1]) < 35
        stained = (tiles < 206).all(-1)
        means.append((tiles[stained].mean(0), apply(tiles, fit)[stained].mean(0)))
    before, after = (np.std(values, axis=0).mean() for values in zip(*means, strict=True))
    assert after < before
