"""Annotation files in and out, hostile ones included; masks, coverage and outlines against shapely and by hand."""

from __future__ import annotations

import gzip
import json
import pickle
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import shapely
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import ndimage

from helpers.error_codes import has_code
from selfvitmil.annotations import (
    Annotation,
    box_coverage,
    mask_to_annotations,
    read_annotations,
    to_mask,
    write_annotations,
)
from selfvitmil.errors import AnnotationError, ArtefactError
from selfvitmil.geometry import size_at_mpp

SQUARE = [[0, 0], [10, 0], [10, 10], [0, 10]]
BOW_TIE = [[0, 0], [10, 10], [10, 0], [0, 10]]
# Hypothesis reuses the folder between its examples, which is fine: every file is written before it is read.
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

ASAP = """<?xml version="1.0"?>
<ASAP_Annotations>
  <Annotations>
    <Annotation Name="Annotation 0" Type="Polygon" PartOfGroup="Tumor" Color="#F4FA58">
      <Coordinates>
        <Coordinate Order="1" X="20.5" Y="0" /><Coordinate Order="0" X="0" Y="0" />
        <Coordinate Order="2" X="20.5" Y="10.25" />
      </Coordinates>
    </Annotation>
    <Annotation Name="trou à côté" Type="Spline" PartOfGroup="Exclusion" Color="#0000FF">
      <Coordinates>
        <Coordinate Order="0" X="1" Y="1" /><Coordinate Order="1" X="3" Y="1" /><Coordinate Order="2" X="3" Y="3" />
        <Coordinate Order="3" X="1" Y="1" />
      </Coordinates>
    </Annotation>
    <Annotation Name="d" Type="Dot" PartOfGroup="None" Color="#F4FA58">
      <Coordinates><Coordinate Order="0" X="5" Y="6" /></Coordinates>
    </Annotation>
  </Annotations>
  <AnnotationGroups>
    <Group Name="Tumor" PartOfGroup="None" Color="#64FE2E"><Attributes /></Group>
  </AnnotationGroups>
</ASAP_Annotations>
"""


def asap_polygon(points: str, name: str = "a", kind: str = "Polygon") -> str:
    coordinates = "".join(f'<Coordinate Order="{k}" {point}/>' for k, point in enumerate(points.split(";")) if point)
    return (
        f'<ASAP_Annotations><Annotations><Annotation Name="{name}" Type="{kind}" PartOfGroup="Tumor" Color="#F4FA58">'
        f"<Coordinates>{coordinates}</Coordinates></Annotation></Annotations></ASAP_Annotations>"
    )


def feature(coordinates: object = None, kind: str = "Polygon", **properties: object) -> dict:
    rings = [[*SQUARE, SQUARE[0]]] if coordinates is None else coordinates
    return {"type": "Feature", "geometry": {"type": kind, "coordinates": rings}, "properties": properties}


def read_json(folder: Path, document: object, **options: bool) -> tuple[Annotation, ...]:
    (folder / "a.geojson").write_text(json.dumps(document), encoding="utf-8")
    return read_annotations(folder / "a.geojson", **options)


def refusal(folder: Path, content: str | bytes, name: str = "a.xml", repair: bool = False) -> str:
    """The message with which a file is refused."""
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(AnnotationError) as caught:
        read_annotations(folder / name, repair=repair)
    message = str(caught.value)
    assert caught.value.what.startswith(name)
    assert caught.value.why
    assert caught.value.how
    assert str(folder) not in message
    return message


def polygon_of(annotation: Annotation) -> shapely.Polygon:
    return shapely.Polygon(annotation.polygon, annotation.holes)


# ---------------------------------------------------------------------------------------------------- strategies


@st.composite
def stars(draw: st.DrawFn, size: float = 60.0) -> np.ndarray:
    """A ring around a middle, with points at growing angles: it never crosses itself."""
    count = draw(st.integers(3, 12))
    radii = draw(arrays(np.float64, count, elements=st.floats(0.2, 1.0)))
    middle = draw(arrays(np.float64, 2, elements=st.floats(0, size)))
    angles = (np.arange(count) + 0.5) * 2 * np.pi / count + draw(st.floats(0, 6))
    return middle + size / 2 * radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)


COLORS = st.none() | st.integers(0, 0xFFFFFF).map("#{:06X}".format)
# XML has no control characters but these; everything else in a name must survive.
NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc"], exclude_characters="\ufffe\uffff")
    | st.sampled_from("\t\n\r")
)


@st.composite
def annotations(draw: st.DrawFn) -> Annotation:
    ring = draw(stars())
    middle = shapely.Polygon(ring).representative_point()
    radius = shapely.Polygon(ring).exterior.distance(middle) / 2
    # A ring that does not contain its own middle well inside is no use for a hole.
    hole = np.array([middle.x, middle.y]) + radius * np.array([[0, -1], [-0.9, 0], [0, 1], [0.9, 0]])
    shape = draw(st.sampled_from(["polygon", "polygon", "rectangle", "spline", "line", "points"]))
    holes = (hole,) if shape == "polygon" and draw(st.booleans()) else ()
    return Annotation(draw(NAMES), draw(NAMES), ring, holes, shape, draw(COLORS), draw(COLORS))


@st.composite
def objects(draw: st.DrawFn) -> Annotation:
    """With all that GeoJSON can say besides."""
    json_values = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3)
    extra = draw(st.sampled_from([{}, {"properties": {"tissue_id": 3}}, {"geometry": {"plane": {"c": -1, "z": 0}}}]))
    if draw(st.booleans()):
        extra = {**extra, "feature": {"note": draw(st.lists(json_values, max_size=3))}}
    return replace(
        draw(annotations()),
        name=draw(st.text()),
        object_type=draw(st.sampled_from(["annotation", "detection", "tile", "cell"])),
        locked=draw(st.booleans()),
        measurements=draw(st.dictionaries(st.text(), st.floats(), max_size=3)),
        extra=extra,
    )


# ---------------------------------------------------------------------------------------------------- round trips


@QUICK
@given(st.lists(objects(), max_size=4), st.sampled_from(["a.geojson", "a.json", "a.geojson.gz", "a.JSON.gz"]))
def test_geojson_comes_back_as_it_was(tmp_path: Path, some: list[Annotation], name: str):
    write_annotations(tmp_path / name, some)
    once = read_annotations(tmp_path / name)
    assert once == tuple(some)
    write_annotations(tmp_path / f"b{name}", once)
    assert (tmp_path / name).read_bytes() == (tmp_path / f"b{name}").read_bytes()  # the ids stay, too


@QUICK
@given(st.lists(annotations(), max_size=4))
def test_asap_comes_back_as_it_was(tmp_path: Path, some: list[Annotation]):
    colors = {
        annotation.group: annotation.group_color for annotation in reversed(some)
    }  # one colour a group, the first
    colors["None"] = colors[""] = None
    some = [replace(a, group_color=colors[a.group], color=a.color) for a in some]
    write_annotations(tmp_path / "a.xml", some)
    once = read_annotations(tmp_path / "a.xml")
    assert once == tuple(some)
    write_annotations(tmp_path / "b.xml", once)
    assert (tmp_path / "a.xml").read_bytes() == (tmp_path / "b.xml").read_bytes()


@QUICK
@given(st.lists(annotations(), max_size=3))
def test_xml_to_geojson_to_xml_keeps_polygons_and_groups(tmp_path: Path, some: list[Annotation]):
    write_annotations(tmp_path / "a.xml", some)
    first = read_annotations(tmp_path / "a.xml")
    write_annotations(tmp_path / "a.geojson", first)
    write_annotations(tmp_path / "b.xml", read_annotations(tmp_path / "a.geojson"))
    last = read_annotations(tmp_path / "b.xml")
    assert [(a.name, a.group, a.shape, a.kind) for a in last] == [(a.name, a.group, a.shape, a.kind) for a in some]
    for before, after in zip(some, last, strict=True):
        assert np.array_equal(before.polygon, after.polygon)
        assert len(before.holes) == len(after.holes)


def test_written_xml_is_what_other_parsers_read(tmp_path: Path):
    from xml.etree import ElementTree

    donut = Annotation('a "b" <c>', "Tümor & Co", SQUARE, ([[2, 2], [4, 2], [4, 4], [2, 4]], [[6, 6], [8, 6], [7, 8]]))
    write_annotations(tmp_path / "a.xml", [donut])
    root = ElementTree.parse(tmp_path / "a.xml").getroot()
    (element,) = root.iter("Annotation")
    assert (root.tag, element.get("Name"), element.get("Type")) == ("ASAP_Annotations", 'a "b" <c>', "Polygon")
    assert [g.attrib for g in root.iter("Group")] == [{"Name": "Tümor & Co", "PartOfGroup": "None", "Color": "#0078C8"}]
    points = [(float(c.attrib["X"]), float(c.attrib["Y"])) for c in element.iter("Coordinate")]
    assert [c.get("Order") for c in element.iter("Coordinate")] == [str(k) for k in range(len(points))]
    # Any tool that fills the line by the even-odd rule gets the area with its holes.
    even_odd = shapely.make_valid(shapely.Polygon(points), method="linework")
    assert even_odd.area == pytest.approx(100 - 4 - 2)
    (back,) = read_annotations(tmp_path / "a.xml")
    assert np.array_equal(back.polygon, SQUARE)
    assert [
        shapely.Polygon(hole).equals(shapely.Polygon(was)) for hole, was in zip(back.holes, donut.holes, strict=True)
    ] == [True] * 2


def test_written_geojson_is_what_qupath_imports(tmp_path: Path):
    write_annotations(
        tmp_path / "a.geojson",
        [Annotation("t", "Tumor", SQUARE, object_type="tile", measurements={"attention": 0.5, "bad": np.nan})],
    )
    document = json.loads((tmp_path / "a.geojson").read_text())
    (one,) = document["features"]
    assert document["type"] == "FeatureCollection"
    assert one["geometry"] == {"type": "Polygon", "coordinates": [[*SQUARE, SQUARE[0]]]}
    assert one["properties"] == {
        "objectType": "tile",
        "isLocked": False,
        "name": "t",
        "classification": {"name": "Tumor", "color": [200, 0, 0]},
        "measurements": {"attention": 0.5, "bad": "NaN"},
    }
    assert len(one["id"]) == 36


def test_ids_are_unique_and_bytes_reproducible(tmp_path: Path):
    twice = [Annotation("a", "Tumor", SQUARE)] * 2
    for name in ("a.geojson.gz", "b.geojson.gz"):
        write_annotations(tmp_path / name, twice)
    assert (tmp_path / "a.geojson.gz").read_bytes() == (tmp_path / "b.geojson.gz").read_bytes()
    assert (tmp_path / "a.geojson.gz").read_bytes()[4:8] == b"\0\0\0\0"  # no time in it
    assert len({annotation.id for annotation in read_annotations(tmp_path / "a.geojson.gz")}) == 2


def test_annotations_compare_hash_and_pickle():
    one = Annotation("a", "Tumor", SQUARE, measurements={"x": np.nan})
    assert one == Annotation("a", "Tumor", np.array(SQUARE, dtype=float), measurements={"x": np.nan}, id="7")
    assert one != Annotation("a", "Tumor", SQUARE[:3], measurements={"x": np.nan})
    assert one != "a"
    assert Annotation("", "", [[-0.0, 1]]) == Annotation("", "", [[0.0, 1]])
    assert len({one, replace(one, id="8"), replace(one, group="_2")}) == 2
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(ValueError, match="read-only"):
        one.polygon[0, 0] = 5


@pytest.mark.parametrize("points", [[[0, 0, 0], [1, 1, 1]], [[np.nan, 0], [1, 1], [2, 0]], [[1e12, 0], [1, 1], [2, 0]]])
def test_an_annotation_holds_points_of_a_slide_only(points):
    with pytest.raises(AnnotationError, match=r"'a'.*pairs", check=has_code("invalid-points")):
        Annotation("a", "Tumor", points)


# ---------------------------------------------------------------------------------------------------- what others write


def test_asap_file(tmp_path: Path):
    (tmp_path / "a.xml").write_text(ASAP, encoding="utf-8")
    tumour, excluded, dot = read_annotations(tmp_path / "a.xml")
    assert np.array_equal(tumour.polygon, [[0, 0], [20.5, 0], [20.5, 10.25]])  # by Order
    assert (tumour.name, tumour.group, tumour.kind) == ("Annotation 0", "Tumor", "tumour")
    assert (tumour.color, tumour.group_color) == ("#F4FA58", "#64FE2E")
    assert (excluded.name, excluded.kind, excluded.shape) == ("trou à côté", "excluded", "spline")
    assert np.array_equal(excluded.polygon, [[1, 1], [3, 1], [3, 3]])  # not closed twice
    assert (dot.shape, dot.has_area, dot.polygon.tolist()) == ("points", False, [[5, 6]])


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "iso-8859-1"])
def test_xml_in_other_encodings(tmp_path: Path, encoding: str):
    declared = {"utf-8-sig": "utf-8"}.get(encoding, encoding)
    text = ASAP.replace('version="1.0"', f'version="1.0" encoding="{declared}"')
    (tmp_path / "a.xml").write_bytes(text.encode(encoding))
    assert read_annotations(tmp_path / "a.xml")[1].name == "trou à côté"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_json_in_other_encodings(tmp_path: Path, encoding: str):
    (tmp_path / "a.json").write_bytes(json.dumps(feature(name="größer"), ensure_ascii=False).encode(encoding))
    assert read_annotations(tmp_path / "a.json")[0].name == "größer"


def test_format_follows_from_content_not_name(tmp_path: Path):
    (tmp_path / "a.geojson").write_text(ASAP, encoding="utf-8")
    assert len(read_annotations(str(tmp_path / "a.geojson"))) == 3
    (tmp_path / "a.xml").write_bytes(gzip.compress(json.dumps(feature()).encode()))
    assert len(read_annotations(tmp_path / "a.xml")) == 1


@pytest.mark.parametrize(
    "document",
    [
        {"type": "FeatureCollection", "features": [feature()]},
        [feature()],
        feature(),
        feature()["geometry"],
        {"type": "FeatureCollection", "features": [feature([SQUARE])]},  # not closed
    ],
)
def test_all_ways_to_wrap_a_feature(tmp_path: Path, document):
    assert read_json(tmp_path, document) == (Annotation("", "", SQUARE),)


def test_new_and_old_spellings_of_qupath_say_the_same(tmp_path: Path):
    new = feature(
        objectType="detection",
        name="n",
        classification={"name": "Tumor", "color": [200, 1, 2]},
        measurements={"a": 1.5, "b": None},
        isLocked=True,
    )
    old = feature(
        object_type="detection",
        name="n",
        classification={"name": "Tumor", "colorRGB": -3669758},
        measurements=[{"name": "a", "value": 1.5}, {"name": "b", "value": "NaN"}],
        isLocked=True,
    )
    assert read_json(tmp_path, new) == read_json(tmp_path, old)
    assert read_json(tmp_path, new)[0].group_color == "#C80102"
    oldest = [{**feature(classification="Tumor"), "id": "PathDetectionObject"}] * 2
    read = read_json(tmp_path, oldest)
    assert [(a.object_type, a.id, a.group) for a in read] == [("detection", "", "Tumor")] * 2
    write_annotations(tmp_path / "b.geojson", read)
    assert len(json.loads((tmp_path / "b.geojson").read_text())["features"]) == 2
    nested = feature(classification={"names": ["Tumor", "Positive"], "color": [1, 2, 3]})
    assert read_json(tmp_path, nested)[0].group == "Tumor: Positive"


def test_a_bare_nan_is_allowed_as_measurement_only(tmp_path: Path):
    text = json.dumps(feature(measurements={"a": 0.125})).replace("0.125", "NaN")
    (tmp_path / "a.geojson").write_text(text)
    assert np.isnan(read_annotations(tmp_path / "a.geojson")[0].measurements["a"])


def test_objects_of_several_parts_stay_one_object(tmp_path: Path):
    other = [[[20, 20], [30, 20], [30, 30], [20, 20]], [[26, 22], [28, 22], [28, 24], [26, 22]]]
    document = [
        {**feature([[[*SQUARE, SQUARE[0]]], other], "MultiPolygon", name="m"), "id": "x"},
        {"type": "Feature", "id": "y", "geometry": {"type": "GeometryCollection", "geometries": [
            {"type": "Point", "coordinates": [1, 2]}, {"type": "Polygon", "coordinates": other}]}},
        feature([[1, 2], [3, 4]], "LineString"),
        feature([[1, 2], [3, 4]], "MultiPoint"),
    ]  # fmt: skip
    read = read_json(tmp_path, document)
    assert [(a.shape, a.part, len(a.holes)) for a in read] == [
        ("polygon", 0, 0), ("polygon", 1, 1), ("points", 0, 0), ("polygon", 1, 1), ("line", 0, 0), ("points", 0, 0)
    ]  # fmt: skip
    write_annotations(tmp_path / "b.geojson", read)
    written = json.loads((tmp_path / "b.geojson").read_text())["features"]
    assert [one["geometry"] for one in written] == [one["geometry"] for one in document]
    assert [one["id"] for one in written[:2]] == ["x", "y"]
    assert read_annotations(tmp_path / "b.geojson") == read
    # Parts without their predecessor do not stick to a stranger.
    write_annotations(tmp_path / "b.geojson", [read[0], read[3]])
    assert len(json.loads((tmp_path / "b.geojson").read_text())["features"]) == 2


@pytest.mark.parametrize(
    ("group", "kind"),
    [("_0", "tumour"), ("_1", "tumour"), ("Tumor", "tumour"), ("tumour", "tumour"), ("metastases", "tumour"),
     ("_2", "excluded"), ("Exclusion", "excluded"), ("None", "excluded"), ("Ignore*", "excluded"),
     ("Stroma", "other"), ("", "other"), ("Tumor: Positive", "tumour"), ("Tumor: Negative", "tumour"),
     ("Metastasis", "tumour"), ("Carcinoma", "tumour"), ("Tumor region", "tumour"), ("tumor_area_2", "tumour"),
     ("Invasive ductal carcinoma", "tumour"), ("Tumor stroma", "other"), ("non-tumor", "other"),
     ("peritumoral", "other"),
     ("tumor bed", "other"), ("Positive", "other"), ("Region 3", "other"), ("Tumor: Necrosis", "other")],
)  # fmt: skip
def test_groups_have_a_meaning(group: str, kind: str):
    assert Annotation("a", group, SQUARE).kind == kind


def test_ncrf_file(tmp_path: Path):
    document = {"positive": [{"name": "_0", "vertices": SQUARE}], "negative": [{"name": "_1", "vertices": SQUARE[:3]}]}
    tumour, excluded = read_json(tmp_path, document)
    assert (tumour.name, tumour.group, tumour.kind) == ("_0", "Tumor", "tumour")
    assert (excluded.name, excluded.kind, len(excluded.polygon)) == ("_1", "excluded", 3)


@pytest.mark.parametrize(
    "content",
    ["<ASAP_Annotations/>", "<ASAP_Annotations><Annotations/></ASAP_Annotations>", "[]",
     '{"type": "FeatureCollection", "features": []}', '{"positive": [], "negative": []}'],
)  # fmt: skip
def test_no_annotations_are_fine(tmp_path: Path, content: str):
    (tmp_path / "a").write_text(content)
    assert read_annotations(tmp_path / "a") == ()


# ---------------------------------------------------------------------------------------------------- hostile files

LAUGHS = "".join(f'<!ENTITY l{k} "{f"&l{k - 1};" * 10 if k else "lol"}">' for k in range(10))


@pytest.mark.parametrize(
    "doctype",
    [f"<!DOCTYPE x [{LAUGHS}]>", '<!DOCTYPE x [<!ENTITY l9 SYSTEM "file:///etc/passwd">]>', "<!DOCTYPE x>",
     '<!DOCTYPE x SYSTEM "http://example.org/x.dtd">', '<!DOCTYPE x [<!ENTITY % p "<!ENTITY l9 \'a\'>"> %p;]>'],
    ids=["billion laughs", "external entity", "bare", "external", "parameter entity"],
)  # fmt: skip
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_document_types_are_refused_before_anything_expands(tmp_path: Path, doctype: str, encoding: str):
    tracemalloc.start()
    content = f'<?xml version="1.0" encoding="{encoding}"?>{doctype}{asap_polygon("", name="&l9;")}'
    message = refusal(tmp_path, content.encode(encoding))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "document type or entities" in message
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "it is empty"),
        (" \n", "it is empty"),
        (b"\xef\xbb\xbf", "it is empty"),
        (b"II*\x00\x08\x00\x00\x00", "neither XML nor JSON"),
        ("x,y\n1,2\n", "neither XML nor JSON"),
        (ASAP[:600], "not complete XML"),
        ("<ASAP_Annotations>&l9;</ASAP_Annotations>", "not complete XML"),
        ('<?xml version="1.0" encoding="klingon"?><ASAP_Annotations/>', "not complete XML"),
        ('<Annotations MicronsPerPixel="0.5"/>', "<Annotations> instead of <ASAP_Annotations>"),
        ("<ASAP_Annotations>" + "<a>" * 100_000, "nested more than"),
        (asap_polygon('X="1" Y="nan"'), "annotation 1 ('a') has the coordinate 'nan'"),
        (asap_polygon('X="-inf" Y="1"'), "coordinate '-inf'"),
        (asap_polygon('X="1,5" Y="1"'), "coordinate '1,5'"),
        (asap_polygon('X="1_000" Y="1"'), "coordinate '1_000'"),
        (asap_polygon('X="1"'), "coordinate None"),
        (asap_polygon('X="1e99" Y="1"'), "far outside any slide"),
        (asap_polygon('X="1" Y="1"', kind="Circle"), "type 'Circle'"),
        ('[{"type": "Feature", ', "not complete JSON"),
        (b'["\xff\xfe"]', "not complete JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"positive": {}, "negative": []}', "'positive' is not a list"),
        ('{"positive": [{"name": "a"}]}', "entry 1 of 'positive' has no vertices"),
        ('{"a": 1}', "neither GeoJSON nor"),
        ('{"type": "FeatureCollection"}', "neither GeoJSON nor"),
        ('[{"type": "Topology"}]', "entry 1 is not a GeoJSON feature"),
        ('[{"type": "Feature", "geometry": null}]', "annotation 1 has no geometry"),
        (
            '[{"type": "Feature", "geometry": {"type": "Point", "coordinates": [1, 2]}, "properties": [1]}]',
            "properties",
        ),
        (gzip.compress(b"[]" * 99, mtime=0)[:-9], "truncated or damaged"),
        (gzip.compress(b"[]", mtime=0)[:12] + b"\xff" * 20, "truncated or damaged"),
    ],
)
def test_broken_files_say_what_is_wrong(tmp_path: Path, content: str | bytes, part: str):
    message = refusal(tmp_path, content)
    assert "cannot be read as annotations" in message
    assert part in message
    assert "Export it again from ASAP" in message


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        (feature([[[0, 0], [1, float("nan")], [2, 2], [0, 0]]]), "not pairs of finite numbers"),
        (feature([[[0, 0], [1, float("inf")], [2, 2], [0, 0]]]), "not pairs of finite numbers"),
        (feature([[[0, 0], ["1", 1], [2, 2]]]), "not pairs of finite numbers"),
        (feature([[[0, 0, 1], [1, 1, 1], [2, 0, 1]]]), "not pairs of finite numbers"),
        (feature([[[0, 0], [1], [2, 0]]]), "not pairs of finite numbers"),
        (feature([[[0, 0], [10**400, 1], [2, 0]]]), "not pairs of finite numbers"),
        (feature([1, 2]), "not pairs of finite numbers"),
        (feature([[1, 2]]), "not pairs of finite numbers"),
        (feature({}), "without coordinates"),
        (feature(kind="Circle"), "unknown type 'Circle'"),
        (feature(kind="GeometryCollection"), "unknown type 'GeometryCollection'"),
        (feature(classification=[1]), "classification"),
        (feature(measurements={"a": "high"}), "measurements"),
        (feature(measurements=[1]), "measurements"),
        (feature(measurements="a"), "measurements"),
    ],
)
def test_broken_features_are_named(tmp_path: Path, bad: dict, part: str):
    bad["properties"]["name"] = "läsion"
    message = refusal(tmp_path, json.dumps([feature(), bad]), "a.geojson")
    assert "annotation 2 ('läsion')" in message
    assert part in message


def test_a_number_too_large_for_a_float_is_refused(tmp_path: Path):
    text = json.dumps(feature()).replace("10", "1e999")
    assert "far outside any slide" in refusal(tmp_path, text, "a.json")


def test_a_packed_bomb_is_not_unpacked_whole(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("selfvitmil.annotations.files._MAX_BYTES", 1 << 16)
    assert "more than" in refusal(tmp_path, gzip.compress(b" " * (1 << 20)), "a.geojson.gz")


def test_missing_files_and_folders_are_errors_of_ours(tmp_path: Path):
    with pytest.raises(
        AnnotationError, match=r"none\.xml cannot be read, no such file", check=has_code("unreadable-annotation-file")
    ):
        read_annotations(tmp_path / "none.xml")
    with pytest.raises(AnnotationError, check=has_code("unreadable-annotation-file")):
        read_annotations(tmp_path)


@pytest.mark.parametrize("name", ["a.txt", "a", "a.xml.gz", "a.gz"])
def test_unknown_endings_are_refused(tmp_path: Path, name: str):
    with pytest.raises(AnnotationError, check=has_code("unknown-annotation-suffix")):
        write_annotations(tmp_path / name, [])
    assert list(tmp_path.iterdir()) == []


def test_names_that_xml_cannot_hold_are_refused_and_nothing_is_lost(tmp_path: Path):
    write_annotations(tmp_path / "a.xml", [Annotation("before", "Tumor", SQUARE)])
    with pytest.raises(AnnotationError, check=has_code("invalid-xml-name")):
        write_annotations(tmp_path / "a.xml", [Annotation("a\0", "Tumor", SQUARE)])
    assert [file.name for file in tmp_path.iterdir()] == ["a.xml"]
    assert read_annotations(tmp_path / "a.xml")[0].name == "before"
    write_annotations(tmp_path / "a.geojson", [Annotation("a\0\ud800", "Tumor", SQUARE)])
    assert read_annotations(tmp_path / "a.geojson")[0].name == "a\0\ud800"


def test_a_file_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ArtefactError, check=has_code("not-writable")):
        write_annotations(tmp_path / "file" / "a.xml", [])


def test_writing_needs_no_memory_for_what_is_written(tmp_path: Path):
    tracemalloc.start()
    write_annotations(tmp_path / "a.geojson", (Annotation("a", "Tumor", SQUARE) for _ in range(5000)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "a.geojson").stat().st_size > 1 << 20
    assert peak < 1 << 18


# ---------------------------------------------------------------------------------------------------- unsound outlines


def crossing(points: list, *holes: list) -> dict:
    return feature([[*ring, ring[0]] if ring else [] for ring in (points, *holes)], name="läsion")


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        (crossing(BOW_TIE), "crosses itself near x = "),
        (
            crossing([[0, 0], [10, 0], [10, 10], [-5, 10], [-5, 5], [5, 5], [5, 12], [0, 12]]),
            "crosses itself near x = ",
        ),
        (crossing([]), "has no points"),
        (feature([], name="läsion"), "has no points"),
        (feature([], "MultiPolygon", name="läsion"), "has no points"),
        (feature([], "MultiPoint", name="läsion"), "has no points"),
        (crossing([[1, 1]]), "fewer than 3 different points"),
        (crossing([[1, 1], [2, 2]]), "fewer than 3 different points"),
        (crossing([[1, 1], [2, 2], [1, 1], [2, 2]]), "fewer than 3 different points"),
        (crossing(SQUARE, [[1, 1], [2, 2]]), "fewer than 3 different points"),
        (crossing([[0, 0], [5, 5], [9, 9]]), "has no area"),
        (crossing([[0, 0], [5, 0], [9, 0], [2, 0]]), "has no area"),
        (crossing(SQUARE, [[20, 20], [25, 20], [20, 25]]), "holes that cross or are outside near x = 2"),
        (crossing(SQUARE, [[5, 5], [15, 5], [5, 9]]), "holes that cross or are outside near x = 1"),
        (
            crossing(SQUARE, [[1, 1], [6, 1], [1, 6]], [[2, 2], [6, 2], [2, 6]]),
            "holes that cross or are outside near x",
        ),
        (crossing(SQUARE, SQUARE), "has no area"),
    ],
)
def test_unsound_outlines_are_refused_by_name(tmp_path: Path, bad: dict, part: str):
    message = refusal(tmp_path, json.dumps([feature(), bad]), "a.geojson")
    assert "a.geojson has 1 of 2 annotations without a clear area: annotation 2 ('läsion')" in message
    assert part in message
    assert "draw these again" in message
    assert "repair=True" in message


def test_all_unsound_outlines_are_listed(tmp_path: Path):
    message = refusal(tmp_path, json.dumps([crossing(BOW_TIE), feature(), crossing([[1, 1]])] * 7), "a.geojson")
    assert "14 of 21" in message
    assert message.count("läsion") == 10
    assert "and 4 more" in message


def test_crossing_is_found_at_the_corners_too(tmp_path: Path):
    # Both lines go through (5, 5), where they have a point each.
    message = refusal(tmp_path, json.dumps(crossing([[0, 0], [5, 5], [10, 10], [10, 0], [5, 5], [0, 10]])), "a.json")
    assert "crosses itself near" in message


@pytest.mark.parametrize(
    ("ring", "area"),
    [
        ([[0, 0], [10, 0], [10, 10], [5, 0], [0, 10]], 50),  # a corner on a side
        ([[0, 0], [5, 5], [10, 0], [10, 10], [5, 5], [0, 10]], 50),  # two corners meet: they touch, and do not cross
        ([[0, 0], [10, 0], [15, 0], [10, 0], [10, 10], [0, 10]], 100),  # a spike
        ([[0, 0], [10, 0], [10, 0], [10, 10], [0, 10]], 100),  # a point twice
        ([[0, 0], [10, 0], [10, 10], [0, 10], [0, 0], [2, 2], [2, 4], [4, 4], [4, 2], [2, 2]], 96),  # a keyhole
        ([[0, 0], [10, 0], [10, 10], [0, 10], [0, 5], [3, 3], [3, 6], [6, 6], [6, 3], [3, 3], [0, 5]], 91),  # another
    ],
)
def test_outlines_that_touch_themselves_are_sound(tmp_path: Path, ring: list, area: float):
    (annotation,) = read_json(tmp_path, feature([[*ring, ring[0]]], classification="Tumor"))
    assert np.array_equal(annotation.polygon, ring)
    assert not annotation.repaired
    assert to_mask([annotation], (20, 20), 1.0, 0.125).sum() / 64 == pytest.approx(area, abs=1)
    assert box_coverage([annotation], [[0, 0, 20, 20]]) == pytest.approx([area / 400])
    write_annotations(tmp_path / "a.xml", [annotation])
    (again,) = read_annotations(tmp_path / "a.xml")
    assert polygon_of(again).area == pytest.approx(area) or again == annotation


def test_ways_to_keyholes_do_not_count_as_crossings(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("selfvitmil.annotations.annotation._MAX_CROSSINGS", 0)
    first, second = [[1, 3], [3, 3], [3, 1]], [[6, 6], [6, 8], [8, 6]]  # the way to the second leads across the first
    ring = [*SQUARE, SQUARE[0], *first, first[0], SQUARE[0], *second, second[0]]
    (annotation,) = read_json(tmp_path, feature([[*ring, ring[0]]], classification="Tumor"))
    assert box_coverage([annotation], [[0, 0, 10, 10]]) == pytest.approx([0.96])


@pytest.mark.parametrize(
    ("ring", "holes", "area", "count"),
    [
        (BOW_TIE, (), 50, 2),
        # The end runs over the beginning: the part gone round twice is inside as well.
        ([[0, 0], [10, 0], [10, 10], [-5, 10], [-5, 5], [5, 5], [5, 12], [0, 12]], (), 100 + 25 + 10, 1),
        (SQUARE, ([[20, 20], [25, 20], [20, 25]],), 100 + 12.5, 2),
        (SQUARE, ([[1, 1], [2, 2]],), 100, 1),
    ],
)
def test_repair_takes_all_that_the_line_goes_round(tmp_path: Path, ring: list, holes: tuple, area: float, count: int):
    read = read_json(tmp_path, [feature(), crossing(ring, *holes), feature()], repair=True)
    assert [a.repaired for a in read] == [False, *[True] * count, False]
    mended = read[1:-1]
    assert {a.name for a in mended} == {"läsion"}
    assert sum(polygon_of(a).area for a in mended) == pytest.approx(area)
    for name in ("b.geojson", "b.xml"):
        write_annotations(tmp_path / name, read)
        assert len(read_annotations(tmp_path / name)) == len(read)  # sound now
    document = json.loads((tmp_path / "b.geojson").read_text())
    assert len(document["features"]) == 3  # the pieces of one are still one


def test_repair_within_an_object_of_several_parts_keeps_it_one(tmp_path: Path):
    parts = [
        [[*[[x + shift, y] for x, y in ring], [shift, 0]]] for shift, ring in ((0, SQUARE), (20, BOW_TIE), (40, SQUARE))
    ]
    read = read_json(tmp_path, feature(parts, "MultiPolygon"), repair=True)
    assert [(a.part, a.repaired) for a in read] == [(0, False), (1, True), (2, True), (3, False)]


@pytest.mark.parametrize(
    ("ring", "shape"),
    [([[1, 1]], "points"), ([[1, 1], [2, 2]], "line"), ([[0, 0], [5, 5], [9, 9]], "line"), ([], "points")],
)
def test_repair_keeps_what_encloses_nothing_without_area(tmp_path: Path, ring: list, shape: str):
    (read,) = read_json(tmp_path, crossing(ring), repair=True)
    assert (read.shape, read.repaired, read.polygon.tolist()) == (shape, True, ring)
    assert not to_mask([replace(read, group="Tumor")], (20, 20), 1.0, 1.0).any()
    assert box_coverage([replace(read, group="Tumor")], [[0, 0, 20, 20]]).tolist() == [0]


@pytest.mark.parametrize("repair", [False, True])
def test_a_scribble_is_refused_in_time(tmp_path: Path, repair: bool):
    scribble = np.random.default_rng(0).uniform(0, 1e5, (5000, 2)).tolist()
    start = time.monotonic()
    message = refusal(tmp_path, json.dumps(crossing(scribble)), "a.json", repair)
    assert "crosses itself more than 10000 times" in message
    assert time.monotonic() - start < 20  # sorting out its millions of crossings would take far longer


# ---------------------------------------------------------------------------------------------------- masks


def centres_inside(polygon: shapely.Geometry, shape: tuple[int, int], scale: float) -> np.ndarray:
    """The slow way: ask shapely for the centre of every pixel."""
    y, x = np.indices(shape)
    return shapely.contains_xy(polygon, (x + 0.5) * scale, (y + 0.5) * scale)


@QUICK
@given(st.lists(annotations(), min_size=1, max_size=4), st.sampled_from([0.37, 1.0, 3.0]), st.data())
def test_mask_agrees_with_every_pixel_centre(some: list[Annotation], mpp: float, data):
    groups = data.draw(st.lists(st.sampled_from(["Tumor", "_2", "Stroma"]), min_size=len(some), max_size=len(some)))
    some = [replace(a, group=group, group_color=None) for a, group in zip(some, groups, strict=True)]
    size_l0, slide_mpp = (57, 91), 0.5
    mask = to_mask(some, size_l0, slide_mpp, mpp)
    assert mask.shape == size_at_mpp(size_l0, slide_mpp, mpp)[::-1]
    wanted = np.zeros_like(mask)
    for group, value in (("Tumor", True), ("_2", False)):
        for annotation in some:
            if annotation.group == group and annotation.has_area:
                wanted[centres_inside(polygon_of(annotation), mask.shape, mpp / slide_mpp)] = value
    # A centre may lie on an outline but for rounding.
    outlines = shapely.union_all([shapely.boundary(polygon_of(a)) for a in some])
    y, x = np.nonzero(mask != wanted)
    centres = shapely.points((x + 0.5) * mpp / slide_mpp, (y + 0.5) * mpp / slide_mpp)
    assert (shapely.distance(centres, outlines) < 1e-9).all()


def test_mask_in_strips_is_the_same(monkeypatch):
    ring = np.random.default_rng(3).uniform(0, 50, (7, 2))
    some = [Annotation("a", "Tumor", shapely.get_coordinates(shapely.convex_hull(shapely.MultiPoint(ring))))]
    whole = to_mask(some, (50, 50), 1.0, 1.0)
    monkeypatch.setattr("selfvitmil.annotations.annotation._STRIP_PIXELS", 120)
    assert 0 < whole.sum() < whole.size
    assert np.array_equal(to_mask(some, (50, 50), 1.0, 1.0), whole)


def test_areas_that_share_a_border_share_no_pixel():
    # Corners and borders lie exactly on pixel centres, or cut across them.
    for x, y in ((0.5, 0.5), (3.5, 0.5), (0.5, 4.5)):
        ring = [[x, y], [x + 3, y], [x + 3, y + 4], [x, y + 4]]
        assert to_mask([Annotation("", "Tumor", ring)], (10, 10), 1.0, 1.0).sum() == 12
    left = to_mask([Annotation("", "Tumor", [[0, 0], [7.5, 0], [2.5, 10], [0, 10]])], (10, 10), 1.0, 1.0).astype(int)
    right = to_mask([Annotation("", "Tumor", [[7.5, 0], [10, 0], [10, 10], [2.5, 10]])], (10, 10), 1.0, 1.0)
    assert (left + right == 1).all()


def test_overlapping_tumours_do_not_cancel_and_exclusion_wins():
    one = Annotation("", "Tumor", SQUARE)
    two = Annotation("", "_0", np.array(SQUARE)[::-1] + 5)  # drawn the other way round
    out = Annotation("", "Exclusion", np.array(SQUARE) * 0.2 + 6)
    assert to_mask([one, two], (20, 20), 1.0, 1.0).sum() == 175
    assert to_mask([out, one, two], (20, 20), 1.0, 1.0).sum() == 171
    island = Annotation("", "Tumor", SQUARE, ([[2, 2], [8, 2], [8, 8], [2, 8]],))
    inner = Annotation("", "Tumor", np.array(SQUARE) * 0.2 + 4)
    assert to_mask([island, inner], (20, 20), 1.0, 1.0).sum() == 100 - 36 + 4


def test_groups_can_be_named():
    some = [
        Annotation("", "Tissue", SQUARE),
        Annotation("", "Tumor", np.array(SQUARE) + 5),
        Annotation("", "_2", SQUARE),
    ]
    assert to_mask(some[:2], (20, 20), 1.0, 1.0, groups=["Tissue"]).sum() == 100
    assert to_mask(some, (20, 20), 1.0, 1.0, groups=["Tissue", "_2"]).sum() == 100  # named, so filled
    assert to_mask(some, (20, 20), 1.0, 1.0, groups=["Tissue"]).sum() == 0  # not named, so taken away
    assert box_coverage(some[:2], [[0, 0, 20, 10]], groups=["Tissue"]).tolist() == [0.5]


def test_mask_of_a_huge_frame():
    size_l0 = (200_000, 180_001)
    frame = Annotation("", "Tumor", np.array(SQUARE) * [20_000, 18_000] - [0, 64])
    mask = to_mask([frame], size_l0, 0.25, 8.0)
    assert mask.shape == (5626, 6250)
    assert mask.sum() == 6250 * 5623
    assert not mask[-3:].any()
    assert not to_mask([], size_l0, 0.25, 8.0).any()


# ---------------------------------------------------------------------------------------------------- coverage


@QUICK
@given(arrays(np.float64, (6, 4), elements=st.floats(0, 50)), arrays(np.float64, 4, elements=st.floats(0, 50)))
def test_coverage_of_rectangles_is_exact(boxes: np.ndarray, rectangle: np.ndarray):
    boxes = np.concatenate([np.minimum(boxes[:, :2], boxes[:, 2:]), np.maximum(boxes[:, :2], boxes[:, 2:]) + 1], axis=1)
    (x0, y0), (x1, y1) = np.minimum(rectangle[:2], rectangle[2:]), np.maximum(rectangle[:2], rectangle[2:]) + 1
    overlap = np.clip(np.minimum(boxes[:, 2:], [x1, y1]) - np.maximum(boxes[:, :2], [x0, y0]), 0, None).prod(axis=1)
    tumour = Annotation("", "Tumor", [[x0, y0], [x1, y0], [x1, y1], [x0, y1]])
    shares = overlap / (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    assert box_coverage([tumour], boxes) == pytest.approx(shares, abs=1e-9)
    assert box_coverage([tumour, tumour], boxes) == pytest.approx(shares, abs=1e-9)  # twice is not more
    assert box_coverage([tumour, replace(tumour, group="_2")], boxes) == pytest.approx(0 * shares, abs=1e-9)


def test_coverage_of_a_long_outline_agrees_with_its_mask():
    rng = np.random.default_rng(1)
    angles = np.sort(rng.uniform(0, 2 * np.pi, 3000))
    radii = 400 + 50 * np.sin(9 * angles) + rng.normal(0, 3, 3000)
    ring = 500 + radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    hole = 500 + 0.3 * (ring[::-1] - 500)
    some = [Annotation("", "Tumor", ring, (hole,)), Annotation("", "_2", np.array(SQUARE) * 30 + 50)]
    origins = np.stack(np.meshgrid(np.arange(0, 1000, 50), np.arange(0, 1000, 50)), axis=-1).reshape(-1, 2)
    fine = to_mask(some, (1000, 1000), 1.0, 0.5).reshape(20, 100, 20, 100).mean(axis=(1, 3)).ravel()
    shares = box_coverage(some, np.concatenate([origins, origins + 50], axis=1))
    assert shares == pytest.approx(fine, abs=0.01)
    assert shares.sum() == pytest.approx(fine.sum(), abs=0.05)
    assert 0.3 < shares.mean() < 0.6


def test_coverage_of_nothing():
    assert box_coverage([], [[0, 0, 1, 1]]).tolist() == [0]
    assert box_coverage([Annotation("", "Tumor", SQUARE)], np.empty((0, 4))).shape == (0,)


# ---------------------------------------------------------------------------------------------------- outlines

MASKS = arrays(bool, st.tuples(st.integers(1, 12), st.integers(1, 12)))


@settings(QUICK, max_examples=200)
@given(MASKS, st.sampled_from([(8.0, 0.25), (7.9, 0.2431), (0.5, 0.5)]))
def test_mask_to_outline_to_mask(mask: np.ndarray, mpps: tuple[float, float]):
    mpp, slide_mpp = mpps
    outlines = mask_to_annotations(mask, mpp, slide_mpp, "Tissue")
    polygons = [polygon_of(annotation) for annotation in outlines]
    assert all(polygon.is_valid for polygon in polygons)
    assert len(outlines) == ndimage.label(mask)[1]
    assert sum(polygon.area for polygon in polygons) == pytest.approx(mask.sum() * (mpp / slide_mpp) ** 2)
    size_l0 = tuple(round(edge * mpp / slide_mpp) for edge in mask.shape[::-1])
    back = to_mask(outlines, size_l0, slide_mpp, mpp, groups=["Tissue"])
    assert np.array_equal(back[: mask.shape[0], : mask.shape[1]], mask)
    assert back.sum() == mask.sum()


@QUICK
@given(MASKS, st.sampled_from(["a.xml", "a.geojson"]))
def test_outlines_survive_files(tmp_path: Path, mask: np.ndarray, name: str):
    write_annotations(tmp_path / name, mask_to_annotations(mask, 8.0, 0.25, "Tissue"))
    size_l0 = (mask.shape[1] * 32, mask.shape[0] * 32)
    back = to_mask(read_annotations(tmp_path / name), size_l0, 0.25, 8.0, groups=["Tissue"])
    assert np.array_equal(back, mask)


def test_outlines_have_no_point_too_many():
    mask = np.zeros((9, 12), dtype=bool)
    mask[2:8, 3:10] = True
    mask[4:6, 5:7] = False
    (outline,) = mask_to_annotations(mask, 2.0, 0.5, "Tissue")
    assert (outline.name, outline.group) == ("Tissue 1", "Tissue")
    assert sorted(outline.polygon.tolist()) == [[12, 8], [12, 32], [40, 8], [40, 32]]
    assert [sorted(hole.tolist()) for hole in outline.holes] == [[[20, 16], [20, 24], [28, 16], [28, 24]]]


# ---------------------------------------------------------------------------------------------------- real files


def test_real_tumour_patches_lie_in_the_real_annotations(shared: Path):
    folder = shared / "data" / "camelyon16"
    counts = {"tumor": 0, "normal": 0}
    patches = [(path, path.stem.rsplit("_", 2)) for path in sorted(folder.glob("patches/*/*.png"))]
    for path in (folder / "annotations").glob("*.json"):
        here = [
            (patch.parent.name, int(x) + 128, int(y) + 128)
            for patch, (slide, x, y) in patches
            if slide == path.stem.lower()
        ]
        boxes = [[x - 1e-3, y - 1e-3, x + 1e-3, y + 1e-3] for _, x, y in here]
        inside = box_coverage(read_annotations(path, repair=True), boxes) > 0.5
        for (label, _, _), hit in zip(here, inside, strict=True):
            counts[label] += int(hit)
    assert len(patches) == 44 + 45
    assert counts == {"tumor": 42, "normal": 0}


def test_real_annotations_touch_and_cross_themselves(shared: Path):
    paths = sorted((shared / "data" / "camelyon16" / "annotations").glob("*.json"))
    refused = {}
    for path in paths:
        try:
            read_annotations(path)
        except AnnotationError as error:
            refused[path.stem] = str(error).count("crosses itself")
    assert refused == {"Tumor_004": 3, "Tumor_064": 3}
    for path in paths:
        document = json.loads(path.read_text())
        rings = [entry["vertices"] for key in ("positive", "negative") for entry in document[key]]
        area = sum(shapely.make_valid(shapely.Polygon(ring)).area for ring in rings)
        mended = read_annotations(path, repair=True)
        assert sum(polygon_of(a).area for a in mended) == pytest.approx(area, rel=1e-5)


def test_a_fresh_interpreter_finds_the_module():
    # In a package whose __init__ says `from __future__ import annotations` this name would be something else.
    code = "from selfvitmil import annotations; annotations.read_annotations"
    subprocess.run([sys.executable, "-c", code], check=True)
