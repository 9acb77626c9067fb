"""Frames and units against slow loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfvitmil.geometry import box_fractions, extent_l0, grid_origins, nominal_magnification, size_at_mpp

mpps = st.floats(0.1, 4.0)


@given(extent=st.integers(1, 5000), size=st.floats(1, 700), stride=st.floats(1, 700))
def test_grid_fits_and_leaves_nothing_out(extent: int, size: float, stride: float):
    origins = grid_origins(extent, size, stride)
    assert all(origin >= 0 and origin + size <= extent + 1e-6 for origin in origins)
    # The slow loop: walk on by one stride until a tile no longer fits.
    expected, k = [], 0
    while k * stride + size <= extent + 1e-9 * stride:
        origin = round(k * stride)
        expected.append(origin if origin + size <= extent + 1e-6 else origin - 1)
        k += 1
    assert origins.tolist() == expected


def test_rounding_does_not_add_up():
    origins = grid_origins(200_000, 460.905, 460.905)
    assert abs(origins[-1] - 460.905 * (len(origins) - 1)) <= 0.5


@given(size_px=st.integers(1, 1000), tile_mpp=mpps, slide_mpp=mpps)
def test_extent_round_trips_through_microns(size_px: int, tile_mpp: float, slide_mpp: float):
    microns = extent_l0(size_px, tile_mpp, slide_mpp) * slide_mpp
    assert microns == pytest.approx(size_px * tile_mpp)


@given(width=st.integers(1, 100_000), slide_mpp=mpps, mpp=mpps)
def test_size_at_mpp_covers_the_slide_and_no_more(width: int, slide_mpp: float, mpp: float):
    pixels, _ = size_at_mpp((width, width), slide_mpp, mpp)
    assert (pixels - 1) * mpp < width * slide_mpp <= (pixels + 1e-6) * mpp or pixels == 1


@given(st.data())
def test_box_fractions_equal_the_slow_area_loop(data: st.DataObject):
    height, width = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=height * width, max_size=height * width)))
    mask = mask.reshape(height, width)
    corner = st.floats(-1, 7).map(lambda value: round(value, 3))
    x0, y0 = data.draw(corner), data.draw(corner)
    w, h = data.draw(st.floats(0.1, 5)), data.draw(st.floats(0.1, 5))
    area = 0.0
    for i in range(height):
        for j in range(width):
            overlap_x = max(0.0, min(j + 1, x0 + w) - max(j, x0))
            overlap_y = max(0.0, min(i + 1, y0 + h) - max(i, y0))
            area += mask[i, j] * overlap_x * overlap_y
    found = box_fractions(mask, np.array([[x0, y0, x0 + w, y0 + h]]))[0]
    assert found == pytest.approx(area / (w * h), abs=1e-9)


def test_nominal_magnification_names_the_usual_objectives():
    assert [nominal_magnification(mpp) for mpp in (0.243, 0.2527, 0.5, 1.0, 2.0, 8.0)] == [40, 40, 20, 10, 5, 1]
