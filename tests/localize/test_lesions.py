"""Lesions and points of maps, and their files: against flood fills, shapely's unions, slow loops and a schema."""

from __future__ import annotations

import gzip
import json
import math
import tracemalloc
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
import shapely

from helpers.heatmaps import PREDICTION, make_heatmap
from selfvitmil.annotations import box_coverage, read_annotations
from selfvitmil.annotations.annotation import polygons_of, region_of
from selfvitmil.errors import AnnotationError
from selfvitmil.localize.detection import (
    LESION_GROUP,
    REGION_GROUP,
    find_lesions,
    find_points,
    highest_scoring_tile,
    rank_tiles,
    size_class,
)
from selfvitmil.localize.export import write_asap, write_geojson
from selfvitmil.localize.heatmap import Frame


def random_map(seed: int, columns: int = 14, rows: int = 11, extent: float = 448.0, overlap: float = 0.0):
    """Noise with holes in the grid, corners rounded to pixels as tile tables round them."""
    rng = np.random.default_rng(seed)
    mpp, stride = float(rng.uniform(0.2, 0.5)), extent * (1 - overlap)
    y, x = (axis.ravel() for axis in np.mgrid[:rows, :columns])
    kept = rng.random(len(x)) < 0.9
    x, y = x[kept] + 3, y[kept] + 2
    coords = np.round(np.stack([x, y], axis=1) * stride).astype(np.int64)
    size = tuple((coords.max(axis=0) + math.ceil(extent) + 1).tolist())
    score = rng.random(len(x)).astype(np.float32).round(2)
    frame = Frame(mpp, size, extent, stride, 2 * mpp, 224)
    told = {"coords_l0": coords, "score": score, "detection": score * np.float32(0.9)}
    return replace(make_heatmap(1, 1, None), frame=frame, columns={}, annotated=None, **told)


def slow_regions(heatmap, threshold):
    """Flood fill over tiles that are at most one column and one line apart."""
    cells = {tuple(cell): row for row, cell in enumerate(heatmap.grid.tolist())}
    left = {cell for cell, row in cells.items() if heatmap.score[row] >= threshold}
    regions = []
    while left:
        stack, region = [left.pop()], []
        while stack:
            x, y = stack.pop()
            region.append(cells[x, y])
            near = {(x + dx, y + dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1)} & left
            left -= near
            stack += near
        regions.append(sorted(region))
    return sorted(regions)


# ---------------------------------------------------------------------------------------------------- lesions


@pytest.mark.parametrize("seed", range(8))
def test_lesions_are_the_regions_of_a_flood_fill(seed):
    heatmap = random_map(seed)
    threshold = (0.4, 0.6, 0.8, 0.95)[seed % 4]
    lesions = find_lesions(heatmap, threshold)
    assert sorted(lesion.rows.tolist() for lesion in lesions) == slow_regions(heatmap, threshold)
    frame = heatmap.frame
    for lesion in lesions:
        scores = [float(heatmap.score[row]) for row in lesion.rows]
        assert lesion.score == max(scores)
        assert lesion.mean_score == pytest.approx(sum(scores) / len(scores))
        assert lesion.area_mm2 == pytest.approx(len(scores) * (frame.extent_l0 * frame.slide_mpp / 1000) ** 2)
        centres = [heatmap.coords_l0[row] + 224.0 for row in lesion.rows]
        np.testing.assert_allclose(lesion.centroid_l0, sum(centres) / len(centres))
        np.testing.assert_array_equal(lesion.peak_l0, centres[scores.index(max(scores))])
        corners = [
            (x0 + dx, y0 + dy) for x0, y0 in heatmap.coords_l0[lesion.rows] for dx in (0, 448) for dy in (0, 448)
        ]
        longest = max(math.dist(one, other) for one in corners for other in corners)
        assert lesion.diameter_um == pytest.approx(longest * frame.slide_mpp)


@pytest.mark.parametrize(("extent", "overlap"), [(448.0, 0.5), (460.93, 0.25), (391.4, 0.75), (460.93, 0.0)])
def test_overlapping_tiles_count_once(extent, overlap):
    heatmap = random_map(3, extent=extent, overlap=overlap)
    frame = heatmap.frame
    cells = heatmap.grid * frame.stride_l0
    for lesion in find_lesions(heatmap, 0.7):
        corners = cells[lesion.rows]
        union = shapely.union_all(shapely.box(*corners.T, *(corners + extent).T))
        assert lesion.area_mm2 == pytest.approx(union.area * frame.slide_mpp**2 / 1e6, rel=1e-6)
        assert lesion.diameter_um == pytest.approx(longest_chord(union) * frame.slide_mpp, rel=1e-6)
        assert shapely.area(region_of(lesion.annotation)) == pytest.approx(union.area, rel=1e-4)


def longest_chord(region):
    points = shapely.get_coordinates(region).tolist()
    return max(math.dist(one, other) for one in points for other in points)


def test_tiles_with_gaps_keep_their_own_area():
    heatmap = random_map(1, overlap=-0.5)
    assert heatmap.frame.stride_l0 == 672
    for lesion in find_lesions(heatmap, 0.6):
        tile_mm2 = (448 * heatmap.frame.slide_mpp / 1000) ** 2
        assert lesion.area_mm2 == pytest.approx(len(lesion.rows) * tile_mm2)


@pytest.mark.parametrize("seed", range(12))
def test_outlines_hold_their_tiles_and_no_others(seed):
    """With noise on a grid regions meet themselves at corners, have holes, and islands in holes that touch these."""
    heatmap = random_map(seed, 18, 15)
    for lesion in find_lesions(heatmap, 0.55):
        mine = np.isin(np.arange(len(heatmap)), lesion.rows)
        for outline in ([lesion.annotation], lesion.parts):
            shares = box_coverage(outline, heatmap.boxes_l0, groups={LESION_GROUP})
            np.testing.assert_allclose(shares, mine, atol=1e-9)
        assert shapely.is_valid(polygons_of(lesion.parts)).all()


def test_islands_in_holes_are_joined_to_one_line():
    """A frame of tiles, within its hole an island that meets it at a corner, and another that meets the island."""
    picture = ["#######", "#.....#", "#.....#", "#..#..#", "#.#...#", "##....#", "#######"]
    score = np.array([[cell == "#" for cell in line] for line in picture], dtype=np.float32).ravel()
    (lesion,) = find_lesions(make_heatmap(7, 7, None, score=score), 0.5)
    assert len(lesion.parts) == 3
    assert len(lesion.annotation.holes) == 1
    assert shapely.area(region_of(lesion.annotation)) == score.sum() * 448**2


def test_lesions_come_by_score_then_area_then_place():
    score = np.zeros((5, 9), np.float32)
    score[0, 0], score[0, 2:4], score[2, 0], score[2, 2], score[4, :3] = 0.8, 0.8, 0.9, 0.8, 0.6
    lesions = find_lesions(make_heatmap(9, 5, None, score=score.ravel()), 0.6)
    assert [lesion.rows.tolist() for lesion in lesions] == [[18], [2, 3], [0], [20], [36, 37, 38]]
    assert [lesion.number for lesion in lesions] == [1, 2, 3, 4, 5]
    assert [lesion.annotation.name for lesion in lesions][:2] == ["lesion 1", "lesion 2"]
    assert lesions[1].annotation.measurements == {
        "score": 0.8,
        "mean score": 0.8,
        "area mm^2": 0.025088,
        "longest diameter um": float(f"{112 * 5**0.5:.6g}"),
        "tile edge um": 112.0,
        "tiles": 2.0,
    }


def test_small_lesions_can_be_left_out():
    score = np.zeros((5, 9), np.float32)
    score[0, 0], score[2, :2] = 0.9, 0.8
    heatmap = make_heatmap(9, 5, None, score=score.ravel())
    assert len(find_lesions(heatmap, 0.5)) == 2
    (left,) = find_lesions(heatmap, 0.5, min_mm2=2 * 0.112**2 - 1e-9)
    assert (left.score, left.number) == (pytest.approx(0.8), 1)


def test_no_tile_high_enough_no_lesion():
    assert find_lesions(make_heatmap(lesion=None), 0.5) == ()
    none = np.empty(0, np.float32)
    coords = np.empty((0, 2), np.int64)
    nothing = replace(make_heatmap(), coords_l0=coords, score=none, detection=none, columns={}, annotated=None)
    assert find_lesions(nothing, 0.0) == ()
    assert find_points(nothing, 100.0).shape == (0, 3)


def test_outlines_stay_inside_the_slide():
    """Three tiles of 460.93 pixels: the grid from the rounded first corner would end half a pixel outside."""
    coords = np.round(np.arange(1, 4) * 460.93).astype(np.int64)
    heatmap = random_map(0, extent=460.93)
    frame = replace(heatmap.frame, size_l0=(int(coords[-1] + 460.93), 461))
    tiles = np.stack([coords, np.zeros(3, np.int64)], axis=1)
    ones = np.ones(3, np.float32)
    (lesion,) = find_lesions(replace(heatmap, coords_l0=tiles, score=ones, detection=ones, frame=frame), 0.5)
    assert (lesion.annotation.polygon <= frame.size_l0).all()
    assert lesion.annotation.polygon.max() == 1843


@pytest.mark.parametrize(
    ("diameter_um", "words"),
    [
        (158.4, "size of isolated tumour cells (under 0.2 mm)"),
        (199.9, "size of isolated tumour cells (under 0.2 mm)"),
        (200.0, "size of a micrometastasis (0.2 to 2 mm)"),
        (2000.0, "size of a micrometastasis (0.2 to 2 mm)"),
        (2000.1, "size of a macrometastasis (over 2 mm)"),
    ],
)
def test_size_classes_of_lymph_nodes(diameter_um, words):
    assert size_class(diameter_um) == words


@pytest.mark.parametrize(
    ("lesion", "words", "staged"),
    [
        ((4, 3, 1, 1), "1 tile, 64 µm", "size of isolated tumour cells (under 0.2 mm)"),
        ((4, 3, 4, 1), "4 tiles of 64 µm, 264 µm across", "size of a micrometastasis (0.2 to 2 mm)"),  # 256 x 64
        ((0, 3, 40, 1), "40 tiles of 64 µm, 2.6 mm across", "size of a macrometastasis (over 2 mm)"),
    ],
)
def test_sizes_come_with_the_tile_and_terms_of_lymph_nodes_on_request_alone(lesion, words, staged):
    heatmap = make_heatmap(40, 9, lesion, extent_l0=256.0, slide_mpp=0.25)
    (found,) = find_lesions(heatmap, 0.5)
    assert found.size_words("none") == found.size_words("auto") == words
    assert found.size_words("lymph-node") == f"{words}; {staged}"
    assert found.tile_um == 64


def test_regions_of_a_slide_that_is_not_called_positive_are_no_lesions():
    positive = make_heatmap()
    negative = replace(positive, prediction=replace(PREDICTION, decision="normal", probability=(0.1,)))
    (lesion,), (region,) = find_lesions(positive, 0.5), find_lesions(negative, 0.5)
    assert (positive.only_ranks, negative.only_ranks) == (False, True)
    assert [(part.name, part.group) for part in lesion.parts] == [("lesion 1", LESION_GROUP)]
    assert [(part.name, part.group, part.kind) for part in region.parts] == [("region 1", REGION_GROUP, "other")]
    assert lesion.area_mm2 == region.area_mm2


def test_a_class_whose_name_means_negative_has_no_lesions_among_several_either():
    told = replace(PREDICTION, classes=("luad", "lusc", "normal"), probability=(0.1, 0.1, 0.8))
    called = {
        name: replace(make_heatmap(), prediction=replace(told, decision=name, shown=name)) for name in told.classes
    }
    assert {name: slide.only_ranks for name, slide in called.items()} == {"luad": False, "lusc": False, "normal": True}


# ---------------------------------------------------------------------------------------------------- points


@pytest.mark.parametrize("seed", range(4))
def test_points_against_a_slow_suppression(seed):
    heatmap = random_map(seed)
    radius_um, least = 150.0 + 100 * seed, (0.0, 0.3)[seed % 2]
    mpp = heatmap.frame.slide_mpp
    left = [
        (float(value), float(x) + 224, float(y) + 224)
        for value, (x, y) in zip(heatmap.detection, heatmap.coords_l0, strict=True)
        if value >= least and value > 0
    ]
    left.sort(key=lambda point: (-point[0], point[2], point[1]))
    expected = []
    while left:
        best = left[0]
        expected.append(best)
        left = [point for point in left if math.dist(point[1:], best[1:]) * mpp > radius_um]
    np.testing.assert_allclose(find_points(heatmap, radius_um, least), expected)


def test_of_equal_scores_the_one_with_most_behind_it_is_point_and_peak():
    """Scores cut off at a limit are equal; what they were made from still tells which tile is the hottest."""
    score = np.array([[0.1, 1, 1, 0.2], [0.1, 1, 1, 0.2]], np.float32).ravel()
    behind = score * np.array([9, 1, 2, 9, 9, 4, 3, 9], np.float32)
    heatmap = replace(make_heatmap(4, 2, None), score=score, detection=score / 2, columns={"attention": behind})
    assert find_points(heatmap, 300.0)[0].tolist() == [0.5, 1.5 * 448, 1.5 * 448]
    assert find_lesions(heatmap, 0.5)[0].peak_l0 == (1.5 * 448, 1.5 * 448)
    assert highest_scoring_tile(heatmap) == 5


@pytest.mark.parametrize("seed", range(5))
def test_tiles_from_the_hottest_on(seed):
    rng = np.random.default_rng(seed)
    score, behind = rng.integers(0, 3, (2, 40)).astype(np.float32)
    heatmap = replace(make_heatmap(40, 1, None), score=score, columns={"attention": behind})
    expected = sorted(range(40), key=lambda row: (-score[row], -behind[row], row))
    assert rank_tiles(heatmap).tolist() == expected
    assert highest_scoring_tile(heatmap) == expected[0]


def test_tiles_that_detect_nothing_are_no_points():
    heatmap = make_heatmap(detection=np.zeros(108, np.float32))
    assert find_points(heatmap, 200.0).shape == (0, 3)


# ---------------------------------------------------------------------------------------------------- files

POSITION = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
RING = {"type": "array", "items": POSITION, "minItems": 4}
POLYGON = {"type": "array", "items": RING, "minItems": 1}
NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
COLOR = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}, "minItems": 3, "maxItems": 3}
UUID = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"


def geometry(kind, coordinates):
    told = {"type": {"const": kind}, "coordinates": coordinates}
    return {"type": "object", "properties": told, "required": list(told), "additionalProperties": False}


# RFC 7946 as far as areas go, with the properties that QuPath gives its objects.
SCHEMA = {
    "type": "object",
    "required": ["type", "features"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "FeatureCollection"},
        "features": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "geometry", "properties"],
                "additionalProperties": False,
                "properties": {
                    "type": {"const": "Feature"},
                    "id": {"type": "string", "pattern": UUID},
                    "geometry": {
                        "oneOf": [
                            geometry("Polygon", POLYGON),
                            geometry("MultiPolygon", {"type": "array", "items": POLYGON, "minItems": 2}),
                        ]
                    },
                    "properties": {
                        "type": "object",
                        "required": ["objectType", "measurements"],
                        "additionalProperties": False,
                        "properties": {
                            "objectType": {"enum": ["annotation", "detection", "tile", "cell"]},
                            "isLocked": {"type": "boolean"},
                            "name": {"type": "string", "minLength": 1},
                            "classification": {
                                "type": "object",
                                "required": ["name", "color"],
                                "additionalProperties": False,
                                "properties": {"name": {"type": "string"}, "color": COLOR},
                            },
                            "measurements": {"type": "object", "additionalProperties": NUMBER},
                        },
                    },
                },
            },
        },
    },
}


def no_constant(word):
    raise ValueError(f"{word} is no JSON")


def check_document(text: str):
    """Of the schema, and of what a schema cannot say: rings are closed, polygons are valid."""
    document = json.loads(text, parse_constant=no_constant)
    jsonschema.validate(document, SCHEMA)
    for feature in document["features"]:
        kind, coordinates = feature["geometry"]["type"], feature["geometry"]["coordinates"]
        for polygon in [coordinates] if kind == "Polygon" else coordinates:
            assert all(ring[0] == ring[-1] for ring in polygon)
        assert shapely.from_geojson(json.dumps(feature["geometry"])).is_valid
    return document


@pytest.mark.parametrize("extent", [448.0, 460.93])
def test_geojson_is_sound_and_reads_back(tmp_path, extent):
    heatmap = random_map(2, extent=extent)
    attention = np.random.default_rng(0).random(len(heatmap)).astype(np.float32) ** 12 / 1000
    annotated = (heatmap.score > 0.5).astype(np.float32)
    heatmap = replace(heatmap, columns={"attention": attention, "instance": heatmap.score}, annotated=annotated)
    lesions = find_lesions(heatmap, 0.6)
    assert any(len(lesion.parts) > 1 for lesion in lesions)
    path = tmp_path / "a.geojson"
    write_geojson(path, heatmap, lesions)
    check_document(path.read_text("ascii"))

    read = read_annotations(path)
    tiles = [one for one in read if one.object_type == "tile"]
    found = [one for one in read if one.object_type == "annotation"]
    assert tuple(found) == tuple(part for lesion in lesions for part in lesion.parts)
    assert {one.kind for one in read} == {"other"}
    bounds = shapely.bounds(polygons_of(tiles))
    np.testing.assert_allclose(bounds, heatmap.boxes_l0, atol=0.005)
    expected = {
        "score": heatmap.score,
        "detection": heatmap.detection,
        "attention": attention,
        "instance probability": heatmap.score,
        "annotated": annotated,
    }
    assert list(tiles[0].measurements) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose([tile.measurements[name] for tile in tiles], values, rtol=1e-5)


def test_geojson_packed_and_plain_are_equal_and_repeatable(tmp_path):
    heatmap = make_heatmap()
    for name in ("a.geojson", "b.geojson", "a.geojson.gz", "b.geojson.gz"):
        write_geojson(tmp_path / name, heatmap, find_lesions(heatmap, 0.5))
    plain, packed = (tmp_path / "a.geojson").read_bytes(), (tmp_path / "a.geojson.gz").read_bytes()
    assert plain == (tmp_path / "b.geojson").read_bytes() == gzip.decompress(packed)
    assert packed == (tmp_path / "b.geojson.gz").read_bytes()


def test_geojson_of_a_map_without_lesions_or_numbers(tmp_path):
    effect = np.array([np.nan, np.inf, -np.inf, -1e-9], np.float32)
    heatmap = replace(make_heatmap(2, 2, None), columns={"effect": effect}, annotated=None)
    path = tmp_path / "a.geojson"
    write_geojson(path, heatmap, ())
    document = check_document(path.read_text("ascii"))
    told = [feature["properties"]["measurements"]["effect"] for feature in document["features"]]
    assert told == ["NaN", "Infinity", "-Infinity", -1e-9]
    write_geojson(path, make_heatmap(1, 1, None), ())
    assert len(check_document(path.read_text("ascii"))["features"]) == 1


def test_geojson_names_are_checked(tmp_path):
    with pytest.raises(AnnotationError, match=r"a\.xml: wrong ending"):
        write_geojson(tmp_path / "a.xml", make_heatmap(), ())


def test_geojson_is_streamed(tmp_path):
    heatmap = make_heatmap(160, 150, None)
    path = tmp_path / "a.geojson"
    write_geojson(path, make_heatmap(2, 2, None), ())
    tracemalloc.start()
    try:
        write_geojson(path, heatmap, ())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 6e6
    assert peak < 4e6


def test_asap_tells_model_score_and_size_and_reads_back(tmp_path):
    heatmap = random_map(4)
    lesions = find_lesions(heatmap, 0.6)
    path = tmp_path / "a.xml"
    write_asap(path, heatmap, lesions)
    read = read_annotations(path)
    assert len(read) == len(lesions)
    for one, lesion in zip(read, lesions, strict=True):
        assert (one.group, one.kind) == (LESION_GROUP, "other")
        area = shapely.area(region_of(one)) * heatmap.frame.slide_mpp**2 / 1e6
        assert area == pytest.approx(lesion.area_mm2, rel=1e-4)
    first = lesions[0]
    size = f"{first.area_mm2:.3g} mm2, {first.size_words('none')}"
    assert read[0].name == f"vit_dsmil lesion 1: score {first.score:.3f}, {size}"
