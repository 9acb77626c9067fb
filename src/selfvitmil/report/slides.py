"""The part of the page about single slides: a table of all, and a section for those worth looking at.

A section shows the overlays of all models, the prediction of the main one, its lesions, and the tiles that it finds
most and least suspicious, read from the slide's file. Where that file is not at hand a line says so. The picture that
`localize` drew carries the slide's name, so with pseudonyms the overlay is drawn anew from map and slide.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from selfvitmil.annotations import Annotation, read_annotations
from selfvitmil.cohort import SlideRow
from selfvitmil.errors import SelfVitMilError
from selfvitmil.localize.detection import RANKS_ONLY, Lesion, find_lesions, highest_scoring_tile, rank_tiles
from selfvitmil.localize.heatmap import Heatmap
from selfvitmil.pseudonyms import Names
from selfvitmil.report.contents import Contents, Finding, Maps, Record
from selfvitmil.report.markup import Markup, bullets, facts, join, missing, section, table, tag
from selfvitmil.report.pictures import picture, picture_file
from selfvitmil.settings import LocalizeSettings, StudySettings
from selfvitmil.slides import Slide, open_slide

NUM_TILES = 10
"""Highest- and lowest-ranked tiles shown of a slide."""
TILE_PX = 224
"""Largest edge of a tile on the page; smaller ones stay as the encoder saw them."""
OVERLAY_PX = 860
"""Longer edge of an overlay on the page, where a slide has one."""
OTHER_PX = 280
"""Of the maps of all models but the first."""
MOST_LESIONS = 12
LESION_WORDS = {"lesion": "region", "score": "score", "area_mm2": "area, mm²", "size": "size"}
"""Columns of `lesions.csv` that are shown, in words."""


@dataclass(frozen=True)
class Chosen:
    """Slides with a section of their own, and how many there might have been."""

    slides: tuple[str, ...]
    possible: int


def choose(study: Contents, names: Names, findings: dict[str, Finding], most: int) -> Chosen:
    """Slides that have a map: all that were found positive or misclassified before others, test slides before others.

    They come in the order of the page: test slides first, the most suspicious first.
    """
    mapped = list(dict.fromkeys(slide for maps in study.maps for slide in maps.files))

    def suspicion(slide: str) -> tuple[bool, float, str]:
        finding = findings.get(slide)
        return (
            finding is None or finding.part != "test",
            -(finding.probability if finding else 0.0),
            names.slide(slide),
        )

    def dull(slide: str) -> bool:
        finding = findings.get(slide)
        return finding is None or not (finding.is_positive or finding.is_right is False)

    first = sorted(mapped, key=lambda slide: (dull(slide), *suspicion(slide)))[:most]
    return Chosen(tuple(sorted(first, key=suspicion)), len(mapped))


def anchors(chosen: Chosen) -> dict[str, str]:
    """Where on the page each section is; numbers, since a name may hold anything."""
    return {slide: f"slide{number}" for number, slide in enumerate(chosen.slides, start=1)}


# ---------------------------------------------------------------------------------------------------- all slides


def slide_table(study: Contents, names: Names, findings: dict[str, Finding], chosen: Chosen) -> Markup:
    """A row for every slide, in the order of the sections, then by probability."""
    places = anchors(chosen)
    tiling = next((one for one in study.tilings if one.rows), None)

    def order(slide: str) -> tuple[bool, float, str]:
        finding = findings.get(slide)
        not_tested = finding is None or finding.part != "test"
        return not_tested, -(finding.probability if finding else -1.0), names.slide(slide)

    rows: list[tuple[str, ...]] = []
    for slide in sorted(study.slides, key=order):
        row = study.cohort[slide] if study.cohort and slide in study.cohort else None
        finding, shown = findings.get(slide), names.slide(slide)
        tiles = tiling.rows.get(slide, {}).get("tiles", "") if tiling else ""
        rows.append(
            (
                tag("a", shown, href=f"#{places[slide]}") if slide in places else shown,
                names.patient(row.patient) if row else "",
                (row.split or "") if row else "",
                (row.label or "") if row else "",
                tiles,
                f"{finding.probability:.3f}" if finding else "",
                finding.decision if finding else "",
                _outcome(finding),
            )
        )
    if not rows:
        return section("slides", "All slides", missing("No slide is known yet"))
    header = ("slide", "patient", "split", "label", "tiles", "probability", "decision", "")
    return section("slides", "All slides", _decided_words(study, findings), table(header, rows, kind="slides"))


def _decided_words(study: Contents, findings: dict[str, Finding]) -> Markup:
    if not findings:
        return missing("No slide was evaluated yet", "evaluate")
    shown = " or ".join(sorted({finding.shown for finding in findings.values()}))
    whose = f"maps/{study.maps[0].model}" if study.maps else "the ensemble of the main method"
    wrong = sum(finding.is_right is False for finding in findings.values() if finding.part == "test")
    tested = sum(finding.part == "test" for finding in findings.values())
    return tag("p", f"Probability of {shown}, by {whose}. {wrong} of {tested} test slides are called wrongly.")


def _outcome(finding: Finding | None) -> str:
    if finding is None or finding.is_right is None:
        return ""
    where = "" if finding.part == "test" else f" ({finding.part} slide)"
    if finding.is_right:
        return f"right{where}"
    return tag("span", f"wrong{where}", class_="wrong")


# ---------------------------------------------------------------------------------------------------- one slide


def slide_sections(
    study: Contents, names: Names, settings: StudySettings, findings: dict[str, Finding], chosen: Chosen
) -> Markup:
    """All sections."""
    title = "Slide by slide"
    if not study.maps:
        return section("maps", title, missing("No maps yet", "localize"))
    left_out = chosen.possible - len(chosen.slides)
    words = "Test slides first, the most suspicious first."
    if left_out:
        words += f" {left_out} further slides with maps have no section; use --slides to have more."
    places = anchors(chosen)
    parts = [_slide(study, names, settings, slide, findings.get(slide), places[slide]) for slide in chosen.slides]
    return section("maps", title, tag("p", words), *parts)


def _slide(
    study: Contents, names: Names, settings: StudySettings, slide: str, finding: Finding | None, anchor: str
) -> Markup:
    row = study.cohort[slide] if study.cohort and slide in study.cohort else None
    own = [maps for maps in study.maps if slide in maps.files]
    first = own[0].read(slide)
    opened, problem = _open(row, first, settings)
    try:
        overlay = _overlay(own[0], slide, row, opened, names, study.lesion_row(own[0].model, slide))
        others = _other_overlays(study, own[1:], slide, row, opened, names)
        tiles = _tiles(first, opened, problem, names)
    finally:
        if opened is not None:
            opened.close()
    return tag(
        "article",
        tag("h3", names.slide(slide), " ", _badge(finding)),
        tag(
            "div",
            tag("div", overlay, class_="overlay"),
            tag(
                "div",
                _prediction(first, finding, row, names),
                _ranks_only(first) if first.only_ranks else _lesions(own[0].lesions.get(slide), bool(own[0].lesions)),
                bullets((names.text(text) for text in first.warnings), "warnings"),
            ),
            class_="beside",
        ),
        others,
        tiles,
        id=anchor,
        class_="slide",
    )


def _open(row: SlideRow | None, heatmap: Heatmap, settings: StudySettings) -> tuple[Slide | None, str]:
    """The slide with the microns per pixel that its map was made with, or why there is none."""
    if row is None:
        return None, "the cohort does not name it"
    try:
        opened = open_slide(row.path, reader=settings.slide.reader, mpp=heatmap.frame.slide_mpp)
    except SelfVitMilError as error:
        return None, error.reason
    if opened.size_l0 != heatmap.frame.size_l0:
        opened.close()
        return None, "the file has another size than the slide of the map"
    return opened, ""


def _badge(finding: Finding | None) -> Markup:
    if finding is None:
        return Markup()
    kind = "positive" if finding.is_positive else "negative"
    words = [tag("span", f"{finding.decision}, {finding.probability:.3f}", class_=f"badge {kind}")]
    if finding.is_right is not None:
        words.append(
            tag(
                "span",
                "right" if finding.is_right else "wrong",
                class_="badge plain" if finding.is_right else "badge error",
            )
        )
    return join(words, " ")


def _prediction(heatmap: Heatmap, finding: Finding | None, row: SlideRow | None, names: Names) -> Markup:
    from selfvitmil.localize.overlay import shown_words

    prediction, frame = heatmap.prediction, heatmap.frame
    threshold = "" if prediction.threshold is None else f"{prediction.threshold:.3f}, {prediction.threshold_from}"
    streams = [
        f"{name} {_numbers(values)}"
        for name, values in (("bag", prediction.bag_probability), ("max", prediction.max_probability))
        if values is not None
    ]
    width, height = (edge * frame.slide_mpp / 1000 for edge in frame.size_l0)
    return facts(
        [
            ("decision", f"{prediction.decision} (truth: {row.label if row and row.label else 'not known'})"),
            (f"probability of {prediction.shown}", f"{prediction.shown_probability:.3f}"),
            ("streams", ", ".join(streams)),
            ("threshold", threshold),
            ("part", f"{prediction.part} slide of split {prediction.split}"),
            ("patient", names.patient(row.patient) if row else ""),
            ("map", f"{heatmap.method}, {heatmap.kind}, scale {heatmap.scale}{', gated' * heatmap.gated}"),
            ("shows", shown_words(heatmap)),
            ("tiles", f"{len(heatmap):,} of {frame.size_px} px at {frame.tile_mpp:g} µm/px"),
            ("slide", f"{width:.1f} x {height:.1f} mm, {frame.slide_mpp:.4g} µm/px"),
            ("annotated", _annotated_words(heatmap)),
        ]
    )


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def _annotated_words(heatmap: Heatmap) -> str:
    if heatmap.annotated is None:
        return ""
    inside = heatmap.annotated > 0
    hottest = bool(inside[highest_scoring_tile(heatmap)])
    return f"{int(inside.sum()):,} tiles touch annotated tumour; the hottest tile {'does' if hottest else 'does not'}"


def _ranks_only(heatmap: Heatmap) -> Markup:
    """In place of lesions, where the slide is not called positive."""
    return tag(
        "p", f"Called {heatmap.prediction.decision}, not {heatmap.prediction.shown}: {RANKS_ONLY}.", class_="note"
    )


def _lesions(rows: Sequence[Record] | None, known: bool) -> Markup:
    """The regions that the map shows, with their sizes."""
    if not rows:
        return tag("p", "No region reaches the threshold of a lesion.", class_="missing") if known else Markup()
    columns = [key for key in LESION_WORDS if any(row.get(key) for row in rows)]
    shown = [[_rounded(row.get(key, "")) for key in columns] for row in rows[:MOST_LESIONS]]
    more = f", the first {MOST_LESIONS} of {len(rows)}" if len(rows) > MOST_LESIONS else ""
    header = [LESION_WORDS[column] for column in columns]
    return table(header, shown, kind="lesions", caption=f"Regions of the map{more}")


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _rounded(text: str) -> str:
    with suppress(ValueError):
        return text if text.lstrip("-").isdigit() else _short(float(text))
    return text


# ---------------------------------------------------------------------------------------------------- pictures


def _overlay(
    maps: Maps, slide: str, row: SlideRow | None, opened: Slide | None, names: Names, agreement: Record
) -> Markup:
    """The map on the slide: the picture that is there, or a new one where that shows a name or is missing."""
    alt = f"map of {names.slide(slide)} by {maps.model}"
    stored, shown = maps.overlay(slide), None
    if stored is not None and not names.hidden:
        shown = picture_file(stored, alt, edge_px=OVERLAY_PX)
    if shown is None and opened is not None:
        drawn = _draw(maps, slide, row, opened, names.slide(slide))
        shown = picture(drawn, alt, edge_px=OVERLAY_PX) if drawn is not None else None
    if shown is None:
        why = "the stored one shows the slide's name" if stored and names.hidden else "none is stored"
        shown = tag("p", f"No picture of this map: {why}, and the slide's file cannot be used.", class_="missing")
    return _captioned(shown, maps, agreement)


def _other_overlays(
    study: Contents, others: Sequence[Maps], slide: str, row: SlideRow | None, opened: Slide | None, names: Names
) -> Markup:
    """Small pictures of the same slide's maps by other models, without words, so that many fit."""
    from selfvitmil.localize.overlay import draw_panel

    if not others or opened is None:
        return Markup()
    mpp = max(opened.mpp, max(opened.size_l0) * opened.mpp / OTHER_PX)
    try:
        thumbnail = opened.thumbnail(mpp)
    except SelfVitMilError:
        return Markup()
    outlines, figures = _outlines(row), []
    for maps in others:
        heatmap = maps.read(slide)
        drawn = draw_panel(heatmap, thumbnail, mpp, annotations=outlines, lesions=_lesions_of(maps, heatmap))
        shown = picture(drawn, f"map of {names.slide(slide)} by {maps.model}", edge_px=OTHER_PX)
        figures.append(_captioned(shown, maps, study.lesion_row(maps.model, slide)))
    return tag("div", *figures, class_="overlays")


def _captioned(shown: Markup, maps: Maps, agreement: Record) -> Markup:
    return tag("figure", shown, tag("figcaption", tag("strong", maps.model), tag("br"), _agreement(agreement)))


def _agreement(row: Record) -> str:
    """What the map covers of the outlined tumour, and what it marks outside of it."""
    try:
        covered, tumour, false = (float(row[key]) for key in ("covered_mm2", "tumour_mm2", "false_mm2"))
        threshold = float(row["threshold"])
    except (KeyError, ValueError):
        return ""
    share = f"covers {covered / tumour:.0%} of {tumour:.3g} mm² outlined tumour, " if tumour > 0 else ""
    return f"From score {threshold:.3g} on: {share}marks {false:.3g} mm² outside."


def _draw(maps: Maps, slide: str, row: SlideRow | None, opened: Slide, title: str) -> Image.Image | None:
    """The overlay under another title; None where the slide does not read."""
    from selfvitmil.localize.overlay import draw_overlay

    heatmap = maps.read(slide)
    mpp = max(opened.mpp, max(opened.size_l0) * opened.mpp / OVERLAY_PX)
    try:
        thumbnail = opened.thumbnail(mpp)
    except SelfVitMilError:
        return None
    lesions = _lesions_of(maps, heatmap)
    return draw_overlay(heatmap, thumbnail, mpp, annotations=_outlines(row), lesions=lesions, title=title)


def _lesions_of(maps: Maps, heatmap: Heatmap) -> Sequence[Lesion]:
    """The lesions of a map, found as they were when it was made; none where the slide is not called positive."""
    if heatmap.only_ranks:
        return ()
    how = _localize_settings(maps)
    return find_lesions(heatmap, how.lesion_threshold, how.min_lesion_mm2)


def _localize_settings(maps: Maps) -> LocalizeSettings:
    """Those that the maps were made with; the defaults where they are not known."""
    try:
        return LocalizeSettings.model_validate(maps.settings.get("localize") or {})
    except ValueError:
        return LocalizeSettings()


def _outlines(row: SlideRow | None) -> Sequence[Annotation]:
    if row is None or row.annotation is None:
        return ()
    try:
        return read_annotations(row.annotation, repair=True)
    except SelfVitMilError:
        return ()


def _tiles(heatmap: Heatmap, opened: Slide | None, problem: str, names: Names) -> Markup:
    """The tiles at both ends of the map."""
    if opened is None:
        words = f"Tiles are not shown, since the slide's file cannot be used: {names.text(problem)}."
        return tag("p", words, class_="missing")
    highest, lowest = ends(heatmap, NUM_TILES)
    annotated = heatmap.annotated is not None and bool((heatmap.annotated[[*highest, *lowest]] > 0).any())
    return join(
        (
            _strip(f"The {len(highest)} highest-ranked tiles", heatmap, highest, opened),
            _strip(f"The {len(lowest)} lowest-ranked tiles", heatmap, lowest, opened),
            tag("p", "Framed, with a star: tiles that touch annotated tumour.", class_="note") if annotated else "",
        )
    )


def ends(heatmap: Heatmap, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the highest scores, highest first, and of the lowest, lowest first; none is in both."""
    order = rank_tiles(heatmap)
    high = min(most, -(-len(order) // 2))
    low = min(most, len(order) - high)
    return order[:high], order[::-1][:low]


def _strip(title: str, heatmap: Heatmap, rows: NDArray[np.int64], opened: Slide) -> Markup:
    if not len(rows):
        return Markup()
    frame = heatmap.frame
    figures: list[Markup] = []
    for row in rows:
        x, y = (int(corner) for corner in heatmap.coords_l0[row])
        score = f"{heatmap.score[row]:.3f}"
        tumour = heatmap.annotated is not None and bool(heatmap.annotated[row] > 0)
        try:
            pixels = opened.read_tile(x, y, frame.size_px, frame.tile_mpp)
            shown = picture(pixels, f"tile at x {x}, y {y}, score {score}", edge_px=TILE_PX, quality=70)
        except SelfVitMilError:
            shown = tag("p", "cannot be read", class_="missing")
        caption = tag("figcaption", f"{score} *" if tumour else score)
        figures.append(tag("figure", shown, caption, class_="annotated" if tumour else None))
    return join((tag("h4", title), tag("div", *figures, class_="tiles")))
