"""Views: each step against torchvision or Pillow on real tiles, each distribution against torchvision's draws."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ImageFilter, ImageOps
from scipy import stats
from torchvision import transforms
from torchvision.transforms import functional
from torchvision.transforms.functional import InterpolationMode

from selfvitmil import stain
from selfvitmil.data import views
from selfvitmil.data.views import (
    NUM_UNIFORMS,
    Draws,
    ViewRecipe,
    draw_view,
    make_views,
    philox,
    random_uniforms,
    view_recipes,
)
from selfvitmil.settings import PretrainSettings

LEVEL = 1 / 255
MEAN, STD = (0.6, 0.5, 0.55), (0.2, 0.25, 0.15)
PLAIN = ViewRecipe(64, (1.0, 1.0), (1.0, 1.0), hflip=0, vflip=0, right_angles=False, stain=0, jitter=0, grey=0, blur=0)
"""A recipe in which nothing happens but a resize."""


@pytest.fixture(autouse=True)
def one_thread():
    """These tensors are too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiles() -> torch.Tensor:
    """Three real tiles and one with every colour at full saturation, (4, 3, 224, 224) uint8."""
    with np.load(Path(__file__).parents[1] / "golden" / "macenko_tiles.npz") as file:
        real = next(value for value in file.values() if value.ndim == 4)
    hard = (
        np.random.default_rng(0).choice([0, 85, 128, 255], size=(28, 28, 3)).astype(np.uint8).repeat(8, 0).repeat(8, 1)
    )
    return torch.from_numpy(np.concatenate([real, hard[None]])).permute(0, 3, 1, 2).contiguous()


@pytest.fixture(scope="module")
def small(tiles: torch.Tensor) -> torch.Tensor:
    """Their corners, (4, 3, 64, 64)."""
    return tiles[..., :64, :64].contiguous()


def inside(image_B3HW: torch.Tensor) -> torch.Tensor:
    """Our axes: (B, H, 3, W)."""
    return image_B3HW.transpose(1, 2).contiguous()


def draws_of(recipe: ViewRecipe, count: int, height: int = 224, width: int = 224, step: int = 0) -> Draws:
    uniforms = random_uniforms(torch.arange(count), step, 1, NUM_UNIFORMS)
    return draw_view(uniforms[0], recipe, height, width)


# ---- random numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the answers that the generator's authors publish
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF,) * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_its_published_answers(counter, key, expected):
    assert [int(word) for word in philox([torch.tensor(c) for c in counter], key)] == expected


@settings(max_examples=50)
@given(value=st.integers(0, 2**32 - 1), factor=st.integers(0, 2**32 - 1))
def test_product_of_32_bits_is_exact(value, factor):
    high, low = views._multiply(torch.tensor(value), factor)
    assert (int(high) << 32) + int(low) == value * factor


def test_uniforms_are_uniform_and_independent():
    u = random_uniforms(torch.arange(500), 3, 4, 8, seed=9)
    assert u.shape == (4, 500, 8)
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 0.01
    neighbours = [
        (u[:, 1:], u[:, :-1]),
        (u[1:], u[:-1]),
        (u[..., 1:], u[..., :-1]),
        (u, random_uniforms(torch.arange(500), 4, 4, 8, seed=9)),
        (u, random_uniforms(torch.arange(500), 3, 4, 8, seed=10)),
    ]
    for one, other in neighbours:
        correlation = np.corrcoef(one.flatten(), other.flatten())[0, 1]
        assert abs(correlation) < 4 / np.sqrt(one.numel())


def test_uniforms_are_a_function_of_seed_tile_step_and_view_alone():
    ids = torch.tensor([7, -3, 2**40 + 7, 7])
    u = random_uniforms(ids, 5, 3, 10, seed=1)
    assert torch.equal(u[:, 0], u[:, 3])
    assert torch.equal(u[:2, [2]], random_uniforms(ids[2:3], 5, 2, 10, seed=1))
    assert torch.equal(u[..., :6], random_uniforms(ids, 5, 3, 6, seed=1))
    different = [u[0, 0], u[0, 1], u[0, 2], u[1, 0], random_uniforms(ids, 6, 1, 10, seed=1)[0, 0]]
    different += [random_uniforms(ids, 5, 1, 10, seed=1 + 2**32)[0, 0]]
    assert len({tuple(row.tolist()) for row in different}) == len(different)


# ---- what is drawn: the distributions of torchvision ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "ratio", "size"),
    [
        ((0.4, 1.0), (3 / 4, 4 / 3), (224, 224)),
        ((0.05, 0.4), (3 / 4, 4 / 3), (224, 224)),
        ((0.2, 1.0), (0.5, 3.0), (100, 60)),
    ],
)
def test_boxes_are_distributed_as_torchvisions(scale, ratio, size):
    width, height = size
    count = 4000
    ours = draws_of(ViewRecipe(scale=scale, ratio=ratio), count, height, width).box_B4.double()
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    theirs = [transforms.RandomResizedCrop.get_params(image, list(scale), list(ratio)) for _ in range(count)]
    theirs = torch.tensor(theirs, dtype=torch.float64)[:, [1, 0, 3, 2]]  # they say top, left, height, width
    assert (ours == ours.round()).all()
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, 0] + ours[:, 2] <= width).all()
    assert (ours[:, 1] + ours[:, 3] <= height).all()
    for measure in (
        lambda box: box[:, 2] * box[:, 3],
        lambda box: box[:, 2] / box[:, 3],
        lambda box: box[:, 0],
        lambda box: box[:, 1],
        lambda box: box[:, 0] + box[:, 2],
    ):
        assert stats.ks_2samp(measure(ours).numpy(), measure(theirs).numpy()).pvalue > 0.01


@pytest.mark.parametrize("size", [(300, 50), (50, 300), (64, 64)])
def test_box_that_never_fits_is_the_centre_as_in_torchvision(size):
    width, height = size
    scale, ratio = (1.5, 2.0), (3 / 4, 4 / 3)
    top, left, h, w = transforms.RandomResizedCrop.get_params(torch.empty(3, height, width), list(scale), list(ratio))
    boxes = draws_of(ViewRecipe(scale=scale, ratio=ratio), 5, height, width).box_B4
    assert boxes.tolist() == [[left, top, w, h]] * 5


def test_jitter_is_distributed_as_torchvisions():
    recipe = ViewRecipe(jitter=1.0, brightness=0.4, contrast=1.5, saturation=0.2, hue=0.1)
    draws = draws_of(recipe, 4800)
    transform = transforms.ColorJitter(0.4, 1.5, 0.2, 0.1)
    torch.manual_seed(0)
    ranges = (transform.brightness, transform.contrast, transform.saturation, transform.hue)
    theirs = [transform.get_params(*ranges)[1:] for _ in range(3000)]  # pyright: ignore[reportArgumentType]
    for ours, other in zip(draws.jitter_B4.T, np.array(theirs, dtype=float).T, strict=True):
        assert stats.ks_2samp(ours.numpy(), other).pvalue > 0.01
    orders = Counter(map(tuple, draws.order_BP.tolist()))
    assert orders.keys() == set(itertools.permutations(range(4)))
    assert stats.chisquare(list(orders.values())).pvalue > 0.01


def test_steps_happen_as_often_as_asked():
    count = 20_000
    recipe = ViewRecipe(
        hflip=0.3, vflip=0.6, right_angles=False, stain=0.25, jitter=0.8, grey=0.2, blur=0.1, solarize=0.2
    )
    draws = draws_of(recipe, count)
    happened = {
        "hflip": draws.flip_x_B,
        "vflip": draws.flip_y_B,
        "stain": (draws.stain_scale_B2 != 1).all(dim=1) & (draws.stain_shift_B2 != 0).all(dim=1),
        "jitter": (draws.jitter_B4 != torch.tensor([1.0, 1, 1, 0])).all(dim=1),
        "grey": draws.grey_B,
        "blur": draws.sigma_B > 0,
        "solarize": draws.solarize_B,
    }
    for name, did in happened.items():
        asked = getattr(recipe, name)
        assert abs(did.double().mean().item() - asked) < 4 * np.sqrt(asked * (1 - asked) / count), name
    assert not draws.transpose_B.any()
    # Whether a step happens says nothing about the others.
    correlations = np.corrcoef(torch.stack(list(happened.values())).double().numpy()) - np.eye(len(happened))
    assert np.abs(correlations).max() < 4 / np.sqrt(count)
    for name, always in (("blur", 1.0), ("grey", 1.0), ("blur", 0.0), ("grey", 0.0)):
        drawn = draws_of(replace(recipe, **{name: always}), 500)
        assert ((drawn.sigma_B > 0) if name == "blur" else drawn.grey_B).double().mean() == always


def test_strengths_of_blur_and_stain_are_uniform():
    draws = draws_of(ViewRecipe(blur=1.0, blur_sigma=(0.1, 2.0), stain=1.0, stain_scale=0.3, stain_shift=0.1), 3000)
    for values, low, high in (
        (draws.sigma_B, 0.1, 2.0),
        *((column, 0.7, 1.3) for column in draws.stain_scale_B2.T),
        *((column, -0.1, 0.1) for column in draws.stain_shift_B2.T),
    ):
        assert stats.kstest(values.numpy(), "uniform", args=(low, high - low)).pvalue > 0.01


def test_switching_a_step_off_leaves_the_other_draws():
    with_all, without = draws_of(ViewRecipe(), 50), draws_of(ViewRecipe(stain=0.0, grey=0.0), 50)
    for name in Draws._fields:
        same = torch.equal(getattr(with_all, name), getattr(without, name))
        assert same == (name not in ("stain_scale_B2", "stain_shift_B2", "grey_B")), name


# ---- what is done: the pixels of torchvision and Pillow ------------------------------------------------------------


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [96, 224])
def test_crops_equal_torchvisions_and_pillows(tiles, interpolation, size):
    mode = InterpolationMode(interpolation)
    boxes = [(3, 10, 221, 200), (100, 17, 40, 61), (0, 0, 224, 224), (183, 190, 41, 34)]
    draws = draws_of(PLAIN, 4)._replace(box_B4=torch.tensor(boxes).float())
    out = views.crop_and_flip(inside(tiles.float()), draws, size, interpolation).transpose(1, 2)
    for i, (image, tile, (x, y, w, h)) in enumerate(zip(out, tiles, boxes, strict=True)):
        exact = functional.resized_crop(tile.double() / 255, y, x, h, w, [size, size], mode, antialias=True)
        torch.testing.assert_close(image.double(), exact.clamp(0, 1), atol=2e-5, rtol=0)
        pil = functional.resized_crop(functional.to_pil_image(tile), y, x, h, w, [size, size], mode)
        difference = (image - functional.to_tensor(pil)).abs()
        # Pillow rounds, and clips what a bicubic overshoots, between rows and columns as well.
        if i < 3:
            assert difference.mean() < 0.35 * LEVEL
            assert difference.max() < 3 * LEVEL


def test_flips_and_turns_are_the_eight_symmetries(tiles):
    recipe = replace(PLAIN, size_px=224, hflip=0.5, vflip=0.5, right_angles=True)
    ids = torch.arange(300)
    turns = (4 * random_uniforms(ids, 0, 1, NUM_UNIFORMS)[0, :, views._TURN]).floor().int()
    hflips = random_uniforms(ids, 0, 1, NUM_UNIFORMS)[0, :, views._HFLIP] < 0.5
    vflips = random_uniforms(ids, 0, 1, NUM_UNIFORMS)[0, :, views._VFLIP] < 0.5
    seen = Counter()
    draws = draw_view(random_uniforms(ids, 0, 1, NUM_UNIFORMS)[0], recipe, 224, 224)
    for i in range(300):
        kind = (int(turns[i]), bool(hflips[i]), bool(vflips[i]))
        seen[kind] += 1
        if seen[kind] > 1:
            continue
        one = Draws(*[value[i : i + 1] for value in draws])
        out = views.render_view(inside(tiles[3:].float()), one, recipe, (), (0.0,) * 3, (1.0,) * 3)[0]
        expected = tiles[3].float() / 255
        expected = functional.hflip(expected) if kind[1] else expected
        expected = functional.vflip(expected) if kind[2] else expected
        torch.testing.assert_close(out, torch.rot90(expected, kind[0], dims=(1, 2)), atol=1e-6, rtol=0)
    assert len(seen) == 16
    assert stats.chisquare(list(seen.values())).pvalue > 0.01


def torchvision_jitter(image: torch.Tensor, factors: list[float], order: list[int]) -> torch.Tensor:
    steps = [
        functional.adjust_brightness,
        functional.adjust_contrast,
        functional.adjust_saturation,
        functional.adjust_hue,
    ]
    for number in order:
        image = steps[number](image, factors[number])
    return image


def test_colour_jitter_equals_torchvisions_in_every_order(tiles):
    """Torchvision's grey has weights that sum to 0.9999, ours to 1: that much may remain, times the factors."""
    rng = random.Random(0)
    orders = list(itertools.permutations(range(4)))
    factors = [[*(rng.uniform(0.2, 1.8) for _ in range(3)), rng.uniform(-0.5, 0.5)] for _ in orders]
    small = (tiles[:, :, ::8, ::8].float() / 255)[[i % 4 for i in range(24)]]
    out = views.jitter_colour(inside(small), torch.tensor(factors), torch.tensor(orders)).transpose(1, 2)
    for i, order in enumerate(orders):
        expected = torchvision_jitter(small[i], factors[i], list(order))
        assert (out[i] - expected).abs().max() < 1e-3, order


def test_hue_equals_torchvisions_and_leaves_grey_alone(tiles):
    turn = torch.tensor([-0.5, -0.1, 0.03, 0.4])
    image = tiles.float() / 255
    out = views.turn_hue(inside(image), turn).transpose(1, 2)
    for i in range(4):
        torch.testing.assert_close(out[i], functional.adjust_hue(image[i], turn[i].item()), atol=1e-5, rtol=0)
    grey = torch.rand(4, 5, 1, 5).expand(-1, -1, 3, -1)
    torch.testing.assert_close(views.turn_hue(grey, turn), grey, atol=0, rtol=0)
    torch.testing.assert_close(views.turn_hue(inside(image), turn * 0), inside(image), atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [224, 12, 5])
def test_blur_equals_torchvisions(tiles, size):
    image = tiles[:, :, :size, :size].float() / 255
    sigma = torch.tensor([0.1, 0.7, 2.0, 0.0])
    out = views.blur(inside(image), sigma, 2.0, torch.float32).transpose(1, 2)
    taps = 2 * min(8, size - 1) + 1
    for i in range(3):
        expected = functional.gaussian_blur(image[i], [taps, taps], [sigma[i].item()] * 2)
        torch.testing.assert_close(out[i], expected, atol=1e-5, rtol=0)
    assert torch.equal(out[3], image[3])


def test_blur_is_near_pillows(tiles):
    """DINO blurs with Pillow, which approximates a Gaussian of the same sigma by box filters."""
    for sigma in (0.5, 1.0, 2.0):
        out = views.blur(inside(tiles[:1].float() / 255), torch.tensor([sigma]), 2.0, torch.float32)[0].transpose(0, 1)
        pil = functional.to_pil_image(tiles[0]).filter(ImageFilter.GaussianBlur(sigma))
        apart = (out - functional.to_tensor(pil))[:, 4:-4, 4:-4].abs().mean()  # edges differ: reflected, repeated
        assert apart < 0.8 * LEVEL  # of which rounding is 0.25; the blur itself changes up to 12 levels


def test_grey_and_solarize_equal_pillows(tiles):
    recipe = replace(PLAIN, size_px=224, grey=1.0)
    out = make_views(tiles, torch.arange(4), 0, [recipe], (0,) * 3, (1,) * 3)[0][0]
    for image, tile in zip(out, tiles, strict=True):
        pil = functional.to_tensor(functional.to_pil_image(tile).convert("L")).expand(3, -1, -1)
        assert (image - pil).abs().max() < 0.51 * LEVEL
    recipe = replace(PLAIN, size_px=224, solarize=1.0)
    out = make_views(tiles, torch.arange(4), 0, [recipe], (0,) * 3, (1,) * 3)[0][0]
    for image, tile in zip(out, tiles, strict=True):
        pil = functional.to_tensor(ImageOps.solarize(functional.to_pil_image(tile), 128))
        torch.testing.assert_close(image, pil, atol=1e-6, rtol=0)


def test_stain_jitter_moves_concentrations(tiles):
    """A mixture of the two stains with known concentrations becomes the mixture with the moved ones."""
    unit = stain.REFERENCE.stains / np.linalg.norm(stain.REFERENCE.stains, axis=0)
    amounts = np.random.default_rng(1).uniform(0.05, 0.8, size=(2, 36))
    mix = lambda c: (256 * np.exp(-(unit @ c)) - 1) / 255  # noqa: E731
    image = torch.from_numpy(mix(amounts)).float().view(1, 3, 6, 6)
    scale, shift = torch.tensor([[1.2, 0.7]]), torch.tensor([[0.05, -0.03]])
    basis = views.stain_basis(stain.REFERENCE.stains)
    out = views.jitter_stain(inside(image), scale, shift, basis).transpose(1, 2)
    expected = mix(amounts * scale.numpy().T + shift.numpy().T).reshape(1, 3, 6, 6)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    # No change of concentrations changes nothing, and scaling leaves white alone.
    photo = inside(tiles.float() / 255)
    nothing = views.jitter_stain(photo, torch.ones(4, 2), torch.zeros(4, 2), basis)
    torch.testing.assert_close(nothing, photo, atol=2e-6, rtol=0)
    white = views.jitter_stain(torch.ones(1, 4, 3, 4), scale, torch.zeros(1, 2), basis)
    torch.testing.assert_close(white, torch.ones(1, 4, 3, 4), atol=1e-6, rtol=0)


# ---- the whole -----------------------------------------------------------------------------------------------------


def slow_view(tile: torch.Tensor, draws: Draws, i: int, recipe: ViewRecipe) -> torch.Tensor:
    """One view of one tile, step by step with torchvision."""
    x, y, w, h = (int(v) for v in draws.box_B4[i])
    size = [recipe.size_px, recipe.size_px]
    image = functional.resized_crop(tile.float() / 255, y, x, h, w, size, InterpolationMode.BICUBIC, antialias=True)
    image = image.clamp(0, 1)
    image = functional.hflip(image) if draws.flip_x_B[i] else image
    image = functional.vflip(image) if draws.flip_y_B[i] else image
    image = image.mT if draws.transpose_B[i] else image
    stains = stain.REFERENCE.stains / np.linalg.norm(stain.REFERENCE.stains, axis=0)
    stains = np.column_stack([stains, np.cross(stains[:, 0], stains[:, 1])])
    density = -np.log((image.numpy().reshape(3, -1) * 255 + 1) / 256)
    amounts = np.linalg.solve(stains, density)
    amounts[:2] = amounts[:2] * draws.stain_scale_B2[i].numpy()[:, None] + draws.stain_shift_B2[i].numpy()[:, None]
    image = torch.from_numpy((256 * np.exp(-stains @ amounts) - 1) / 255).float().view_as(image).clamp(0, 1)
    image = torchvision_jitter(image, draws.jitter_B4[i].tolist(), draws.order_BP[i].tolist())
    image = functional.rgb_to_grayscale(image, 3) if draws.grey_B[i] else image
    image = functional.gaussian_blur(image, [17, 17], [draws.sigma_B[i].item()] * 2) if draws.sigma_B[i] > 0 else image
    return functional.solarize(image, 0.5) if draws.solarize_B[i] else image


def test_views_equal_a_chain_of_torchvisions_steps(tiles):
    recipes = view_recipes(PretrainSettings(global_px=80, local_px=40, num_local=2, stain_jitter=0.7), 224, None)
    batch, ids = tiles[[0, 1, 2, 0, 1, 2]], torch.arange(100, 106)
    made = make_views(batch, ids, 17, recipes, MEAN, STD, seed=5)
    assert [tuple(view.shape) for view in made] == [(2, 6, 3, 80, 80), (2, 6, 3, 40, 40)]
    flat = [view for group in made for view in group]
    uniforms = random_uniforms(ids, 17, 4, NUM_UNIFORMS, seed=5)
    for number, (view, recipe) in enumerate(zip(flat, recipes, strict=True)):
        draws = draw_view(uniforms[number], recipe, 224, 224)
        for i in range(6):
            image = view[i] * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
            difference = (image - slow_view(batch[i], draws, i, recipe)).abs()
            # Solarize and hue jump, so a hair's breadth before them may be a lot behind them, for single pixels.
            assert difference.quantile(0.999) < 0.5 * LEVEL
            assert difference.mean() < 0.05 * LEVEL


def test_a_tiles_views_depend_neither_on_batch_nor_on_order(small, monkeypatch):
    recipes = view_recipes(PretrainSettings(local_px=48, num_local=4), 64, None)  # four small ones, made together
    ids = torch.tensor([11, -5, 2**50, 7])
    together = make_views(small, ids, 3, recipes, MEAN, STD)
    order = [2, 0, 3, 1]
    shuffled = make_views(small[order], ids[order], 3, recipes, MEAN, STD)
    alone = make_views(small[1:2], ids[1:2], 3, recipes, MEAN, STD)
    monkeypatch.setattr(views, "_BLOCK", {True: 3 * 64 * 64, False: 1})
    in_blocks = make_views(small, ids, 3, recipes, MEAN, STD)
    later = make_views(small, ids, 4, recipes, MEAN, STD)
    for i, group in enumerate(together):
        torch.testing.assert_close(shuffled[i], group[:, order], atol=1e-5, rtol=0)
        torch.testing.assert_close(alone[i], group[:, 1:2], atol=1e-5, rtol=0)
        torch.testing.assert_close(in_blocks[i], group, atol=1e-5, rtol=0)
        assert (later[i] - group).abs().mean() > 0.05
        assert torch.equal(make_views(small, ids, 4, recipes, MEAN, STD)[i], later[i])


def test_views_of_one_tile_differ_from_each_other(small):
    (made,) = make_views(small, torch.arange(4), 0, [ViewRecipe(size_px=32)] * 3, MEAN, STD)
    for one, other in itertools.combinations(made, 2):
        assert ((one - other).abs().mean(dim=(1, 2, 3)) > 0.05).all()


def test_stain_transforms_come_first(small):
    transforms = np.stack([np.eye(3) * gain for gain in (1.0, 0.5, 1.5, 0.8)])
    recipes = [ViewRecipe(size_px=32)]
    made = make_views(small, torch.arange(4), 0, recipes, MEAN, STD, transforms_B33=transforms)[0]
    transformed = make_views(stain.apply_transforms(small, transforms), torch.arange(4), 0, recipes, MEAN, STD)[0]
    assert torch.equal(made, transformed)
    assert not torch.equal(made, make_views(small, torch.arange(4), 0, recipes, MEAN, STD)[0])


@pytest.mark.parametrize(("dtype", "levels"), [(torch.float16, 0.3), (torch.bfloat16, 4.0)])
def test_products_in_half_precision_stay_within_grey_levels(small, dtype, levels, monkeypatch):
    recipes = [replace(PLAIN, size_px=48, scale=(0.2, 0.9), blur=1.0)]
    exact = make_views(small, torch.arange(4), 0, recipes, (0,) * 3, (1,) * 3)[0]
    monkeypatch.setattr(views, "_PRODUCTS", {"cpu": dtype})
    half = make_views(small, torch.arange(4), 0, recipes, (0,) * 3, (1,) * 3)[0]
    assert half.dtype == torch.float32
    assert 0 < (half - exact).abs().max() < levels * LEVEL


def test_autocast_around_us_changes_nothing_and_the_result_has_its_dtype(small):
    recipes = [ViewRecipe(size_px=32)]
    plain = make_views(small, torch.arange(4), 0, recipes, MEAN, STD)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(make_views(small, torch.arange(4), 0, recipes, MEAN, STD)[0], plain)
    low = make_views(small, torch.arange(4), 0, recipes, MEAN, STD, dtype=torch.bfloat16)[0]
    assert torch.equal(low, plain.bfloat16())


def test_rendering_is_one_graph_without_branches(small):
    """What torch.compile can take whole does not depend on drawn values in Python; speed is measured elsewhere."""
    recipes = [ViewRecipe(size_px=24, solarize=0.5)]
    render = torch.compile(views.render_view, fullgraph=True, backend="eager")
    for step in range(2):
        compiled = make_views(small, torch.arange(4), step, recipes, MEAN, STD, render=render)[0]
        assert torch.equal(compiled, make_views(small, torch.arange(4), step, recipes, MEAN, STD)[0])


def test_views_stay_between_black_and_white(small):
    recipes = view_recipes(PretrainSettings(local_px=32, num_local=1), 64, None)
    made = make_views(small, torch.arange(4), 0, recipes, MEAN, STD)
    for group in made:
        picture = group * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
        assert picture.min() > -1e-5
        assert picture.max() < 1 + 1e-5
