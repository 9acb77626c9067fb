"""What the page shows of single slides: prediction, heatmaps of all models, lesions, tiles that matter.

Tiles are read from the slide's file; where that is not at hand a sentence says so. The picture that `localize` drew
carries the slide's name, so with pseudonyms the overlay is drawn anew from heatmap and slide. Sections are read by the
workers of the engine (`slide_data`), which need no torch for this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfvitmil.annotations import Annotation, read_annotations
from selfvitmil.cohort import SlideRow
from selfvitmil.errors import SelfVitMilError
from selfvitmil.localize import overlay
from selfvitmil.localize.detection import RANKS_ONLY, Lesion, find_lesions, highest_scoring_tile, rank_tiles
from selfvitmil.localize.heatmap import Heatmap, SlidePrediction, read_heatmap
from selfvitmil.pseudonyms import Names
from selfvitmil.report.render import (
    Picture,
    Shown,
    Table,
    layer_picture,
    picture,
    picture_file,
)
from selfvitmil.settings import LocalizeSettings, StudySettings
from selfvitmil.slides import Slide, SlideRef
from selfvitmil.store.files import section

if TYPE_CHECKING:
    pass


NUM_TILES, NUM_LOWEST = 8, 4
"""Highest- and lowest-ranked tiles shown of a slide."""
TILE_PX = 112
"""Largest edge of a tile on the page, about as large as it is shown."""
OVERLAY_PX = 640
"""Longer edge of the first model's overlay."""
OTHER_PX = 220
"""Longer edge of the heatmaps of other models."""
MOST_REGIONS = 12
REGION_COLUMNS = {"lesion": "region", "score": "score", "area_mm2": "area, mm²", "size": "size"}
"""Columns of `lesions.csv` that are shown, and their titles."""

Record = dict[str, str]


@dataclass(frozen=True)
class HeatmapFolder:
    """The heatmaps of one model."""

    model: str
    files: Mapping[str, Path]
    """By slide, those that can be read."""
    predictions: Mapping[str, SlidePrediction]
    regions: Mapping[str, Sequence[Record]]
    """Rows of `lesions.csv` by slide."""
    settings: Mapping[str, Any]

    def only(self, slide: str) -> HeatmapFolder:
        """Return what is known of one slide."""
        regions = {slide: self.regions.get(slide, ())} if self.regions else {}
        own = {slide: self.predictions[slide]}
        return replace(self, files={slide: self.files[slide]}, predictions=own, regions=regions)

    def stored_overlay(self, slide: str) -> Path | None:
        """Return the picture that was drawn with the heatmap: in the paper's colours where there are several."""
        folder = self.files[slide].parent
        named = [folder / f"{slide}_{colors}.png" for colors in ("red", "inferno", "viridis")]
        return next((path for path in named if path.exists()), None)

    def lesions(self, heatmap: Heatmap) -> Sequence[Lesion]:
        """Return the lesions of a heatmap, found with its own settings; none where the slide is predicted negative."""
        if heatmap.only_ranks:
            return ()
        try:
            how = LocalizeSettings.model_validate(section(self.settings, "localize"))
        except ValueError:
            how = LocalizeSettings()
        return find_lesions(heatmap, how.lesion_threshold, how.min_lesion_mm2)


@dataclass(frozen=True)
class Decision:
    """What the study's main model predicts for a slide."""

    probability: float
    """Of the positive class; of the predicted one where there are more than two."""
    shown: str
    """Name of the class of that probability."""
    predicted: str
    part: str
    """`train`, `val` or `test`."""
    label: str | None
    words: str = ""
    """The prediction in words, with another outcome than classes."""

    @property
    def is_correct(self) -> bool | None:
        """None where the ground truth is not known."""
        return None if self.label is None else self.label == self.predicted

    @property
    def is_wrong_test(self) -> bool:
        return self.part == "test" and self.is_correct is False

    @property
    def is_positive(self) -> bool:
        return self.predicted == self.shown


@dataclass(frozen=True)
class Agreement:
    """What a heatmap covers of the annotated tumour, and what it marks outside."""

    threshold: float
    covered_mm2: float
    tumour_mm2: float
    false_mm2: float


@dataclass(frozen=True)
class HeatmapPicture:
    model: str
    picture: Shown
    agreement: Agreement | None


@dataclass(frozen=True)
class TilePicture:
    score: float
    is_tumour: bool
    """Whether it touches annotated tumour."""
    picture: Shown


@dataclass(frozen=True)
class SlideData:
    """The section of one slide."""

    name: str
    anchor: str
    decision: Decision | None
    facts: tuple[tuple[str, str], ...]
    """Name and value; empty values are not shown."""
    heatmap: HeatmapPicture
    backdrop: Picture | None
    """Thumbnail of the slide, which lies under `other_heatmaps`."""
    other_heatmaps: tuple[HeatmapPicture, ...]
    negative_note: str
    """In place of regions, where the slide is predicted negative."""
    regions: Table
    """The first regions above the threshold of a lesion."""
    num_regions: int | None
    """None where the model's regions are not known."""
    warnings: tuple[str, ...]
    highest: tuple[TilePicture, ...]
    lowest: tuple[TilePicture, ...]
    tiles_missing: str
    """Why no tiles are shown."""
    why: tuple[str, ...]
    """Of a misclassified slide: what is known of the reasons."""

    @property
    def is_wrong(self) -> bool:
        """Whether it is a test slide that was misclassified."""
        return self.decision is not None and self.decision.is_wrong_test


def order_of(decision: Decision | None, shown_name: str) -> tuple[bool, float, str]:
    """Sort key of slides: test slides first, the highest probability first."""
    return decision is None or decision.part != "test", -(decision.probability if decision else -1.0), shown_name


def choose_slides(mapped: Sequence[str], decisions: Mapping[str, Decision], names: Names, most: int) -> list[str]:
    """Return the slides with a section, in the order of the page; positive and misclassified ones before others."""

    def order(slide: str) -> tuple[bool, float, str]:
        return order_of(decisions.get(slide), names.slide(slide))

    def is_plain(slide: str) -> bool:
        decision = decisions.get(slide)
        return decision is None or not (decision.is_positive or decision.is_correct is False)

    return sorted(sorted(mapped, key=lambda slide: (is_plain(slide), *order(slide)))[:most], key=order)


class SectionJob(NamedTuple):
    """What the section of a slide is read from."""

    slide: str
    anchor: str
    folders: tuple[HeatmapFolder, ...]
    """With its heatmaps."""
    row: SlideRow | None
    decision: Decision | None
    agreements: Mapping[str, Record]
    """Its lesion scores, by model."""
    settings: StudySettings
    names: Names


def slide_data(job: SectionJob) -> SlideData:
    """Return the section of a slide."""
    slide, anchor, folders, row, decision, agreements, settings, names = job
    first, heatmap = folders[0], read_heatmap(folders[0].files[slide])
    opened, problem = open_mapped(row, heatmap, settings)
    try:
        main = HeatmapPicture(
            first.model,
            _overlay(first, heatmap, row, opened, names),
            _agreement(agreements.get(first.model, {})),
        )
        backdrop, others = _other_heatmaps(folders[1:], slide, row, opened, agreements, names)
        high, low = ends(heatmap, NUM_TILES)
        highest, lowest = (_tiles(heatmap, rows, opened) if opened else () for rows in (high, low[:NUM_LOWEST]))
    finally:
        if opened is not None:
            opened.close()
    predicted, regions = heatmap.prediction, first.regions.get(slide, ())
    columns = [key for key in REGION_COLUMNS if any(region.get(key) for region in regions)]
    lines = [[_rounded(region.get(key, "")) for key in columns] for region in regions[:MOST_REGIONS]]
    negative = f"Predicted {predicted.decision}, not {predicted.shown}: {RANKS_ONLY}." if heatmap.only_ranks else ""
    return SlideData(
        name=names.slide(slide),
        anchor=anchor,
        decision=decision,
        facts=tuple(_slide_facts(heatmap, row, names).items()),
        heatmap=main,
        backdrop=backdrop,
        other_heatmaps=others,
        negative_note=negative,
        regions=Table.of((REGION_COLUMNS[key] for key in columns), lines),
        num_regions=len(regions) if first.regions else None,
        warnings=heatmap.warnings,
        highest=highest,
        lowest=lowest,
        tiles_missing=problem,
        why=error_words(heatmap, decision),
    )


def open_mapped(row: SlideRow | None, heatmap: Heatmap, settings: StudySettings) -> tuple[Slide | None, str]:
    """Open the slide with the microns per pixel of its heatmap; or say why that is not possible."""
    if row is None:
        return None, "the cohort does not name it"
    try:
        opened = SlideRef.of(row, settings.slide).at_mpp(heatmap.frame.slide_mpp).open()
    except SelfVitMilError as error:
        return None, error.reason
    if opened.size_l0 != heatmap.frame.size_l0:
        opened.close()
        return None, "the file has another size than the slide of the heatmap"
    return opened, ""


def _slide_facts(heatmap: Heatmap, row: SlideRow | None, names: Names) -> dict[str, str]:
    predicted, frame = heatmap.prediction, heatmap.frame
    streams = [
        f"{name} {' '.join(f'{value:.3f}' for value in values)}"
        for name, values in (("bag", predicted.bag_probability), ("max", predicted.max_probability))
        if values is not None
    ]
    width_mm, height_mm = (edge * frame.slide_mpp / 1000 for edge in frame.size_l0)
    annotated = ""
    if heatmap.annotated is not None:
        inside = heatmap.annotated > 0
        top_tile = "does" if inside[highest_scoring_tile(heatmap)] else "does not"
        annotated = f"{int(inside.sum()):,} tiles touch annotated tumour; the highest-scoring tile {top_tile}"
    threshold = "" if predicted.threshold is None else f"{predicted.threshold:.3f}, {predicted.threshold_from}"
    truth, own = row.label if row and row.label else "not known", predicted.value_words
    said = {"prediction": own, "decision": predicted.decision} if own else {
        "decision": f"{predicted.decision} (ground truth: {truth})",
        f"probability of {predicted.shown}": f"{predicted.shown_probability:.3f}",
    }  # fmt: skip
    return said | {
        "streams": ", ".join(streams),
        "threshold": threshold,
        "part": f"{predicted.part} slide of split {predicted.split}",
        "patient": names.patient(row.patient) if row else "",
        "heatmap": f"{heatmap.method}, {heatmap.kind}, scale {heatmap.scale}{', gated' * heatmap.gated}",
        "shows": overlay.shown_words(heatmap),
        "tiles": f"{len(heatmap):,} of {frame.size_px} px at {frame.tile_mpp:g} µm/px",
        "slide": f"{width_mm:.1f} x {height_mm:.1f} mm, {frame.slide_mpp:.4g} µm/px",
        "annotated": annotated,
    }


BORDERLINE = 0.1
"""A probability no further than this from the threshold is called borderline."""
LEAST_TUMOUR_TILES = 10
"""Fewer tiles with annotated tumour than this are called few."""


def error_words(heatmap: Heatmap, decision: Decision | None) -> tuple[str, ...]:
    """Return what the heatmap and the annotation tell about a wrong decision; nothing for others."""
    if decision is None or decision.is_correct is not False or not len(heatmap):
        return ()
    found: list[str] = []
    predicted = heatmap.prediction
    if predicted.threshold is not None:
        gap = predicted.shown_probability - predicted.threshold
        side = "above" if gap >= 0 else "below"
        near = "a borderline case" if abs(gap) <= BORDERLINE else "not a borderline case"
        found.append(f"The probability of {predicted.shown} is {abs(gap):.2f} {side} the threshold: {near}.")
    if heatmap.annotated is not None and (heatmap.annotated > 0).any():
        inside = heatmap.annotated > 0
        few = " only" if inside.sum() < LEAST_TUMOUR_TILES else ""
        found.append(f"Annotated tumour touches{few} {int(inside.sum()):,} of {len(heatmap):,} tiles.")
        if inside[highest_scoring_tile(heatmap)]:
            found.append("The highest-scoring tile lies in it: the region was noticed, but not rated highly enough.")
        else:
            found.append("The highest-scoring tile lies outside it: the model looked elsewhere.")
    elif decision.is_positive:
        found.append("The highest-ranked tiles below are what made it positive.")
    return tuple(found)


def _rounded(text: str) -> str:
    with suppress(ValueError):
        value = float(text)
        return text if text.lstrip("-").isdigit() else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return text


def _agreement(row: Record) -> Agreement | None:
    try:
        return Agreement(*(float(row[key]) for key in ("threshold", "covered_mm2", "tumour_mm2", "false_mm2")))
    except (KeyError, ValueError):
        return None


# ---------------------------------------------------------------------------------------------------- pictures


def _overlay(
    folder: HeatmapFolder, heatmap: Heatmap, row: SlideRow | None, opened: Slide | None, names: Names
) -> Shown:
    """Return the overlay: the stored picture, or a new one where that shows a name or is missing."""
    alt = f"heatmap of {names.slide(heatmap.slide)} by {folder.model}"
    stored = folder.stored_overlay(heatmap.slide)
    shown = picture_file(stored, alt, edge_px=OVERLAY_PX, quality=70) if stored and not names.hidden else None
    if shown is None and opened is not None:
        with suppress(SelfVitMilError):
            mpp = max(opened.mpp, max(opened.size_l0) * opened.mpp / OVERLAY_PX)
            title, lesions = names.slide(heatmap.slide), folder.lesions(heatmap)
            drawn = overlay.draw_overlay(
                heatmap, opened.thumbnail(mpp), mpp, title=title, annotations=annotations_of(row), lesions=lesions
            )
            shown = picture(drawn, alt, edge_px=OVERLAY_PX, quality=70)
    why = "the stored one shows the slide's name" if stored and names.hidden else "none is stored"
    return shown or f"No picture of this heatmap: {why}, and the slide's file cannot be used."


def _other_heatmaps(
    folders: Sequence[HeatmapFolder],
    slide: str,
    row: SlideRow | None,
    opened: Slide | None,
    agreements: Mapping[str, Record],
    names: Names,
) -> tuple[Picture | None, tuple[HeatmapPicture, ...]]:
    """Return a thumbnail, and the heatmaps of other models to lay over it, small and without words: many fit."""
    if not folders or opened is None:
        return None, ()
    mpp = max(opened.mpp, max(opened.size_l0) * opened.mpp / OTHER_PX)
    try:
        backdrop = picture(opened.thumbnail(mpp), f"thumbnail of {names.slide(slide)}", edge_px=OTHER_PX)
    except SelfVitMilError:
        return None, ()
    assert backdrop.width is not None
    assert backdrop.height is not None
    size_px = backdrop.width, backdrop.height
    annotations = annotations_of(row)
    found: list[HeatmapPicture] = []
    for folder in folders:
        heatmap = read_heatmap(folder.files[slide])
        drawn = overlay.draw_layer(heatmap, size_px, mpp, annotations=annotations, lesions=folder.lesions(heatmap))
        shown = layer_picture(drawn, f"heatmap of {names.slide(slide)} by {folder.model}")
        found.append(HeatmapPicture(folder.model, shown, _agreement(agreements.get(folder.model, {}))))
    return backdrop, tuple(found)


def annotations_of(row: SlideRow | None) -> Sequence[Annotation]:
    """Return the annotations of a slide, none where they cannot be read."""
    with suppress(SelfVitMilError):
        if row is not None and row.annotation is not None:
            return read_annotations(row.annotation, repair=True)
    return ()


def ends(heatmap: Heatmap, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return rows of the highest scores, highest first, and of the lowest, lowest first; none is in both."""
    order = rank_tiles(heatmap)
    high = min(most, -(-len(order) // 2))
    low = min(most, len(order) - high)
    return order[:high], order[::-1][:low]


def _tiles(heatmap: Heatmap, rows: NDArray[np.int64], opened: Slide) -> tuple[TilePicture, ...]:
    frame = heatmap.frame
    found: list[TilePicture] = []
    for row in rows:
        x, y = (int(corner) for corner in heatmap.coords_l0[row])
        score = float(heatmap.score[row])
        try:
            pixels = opened.read_tile(x, y, frame.size_px, frame.tile_mpp)
            shown: Shown = picture(pixels, f"tile at x {x}, y {y}, score {score:.3f}", edge_px=TILE_PX, quality=68)
        except SelfVitMilError:
            shown = "cannot be read"
        tumour = heatmap.annotated is not None and bool(heatmap.annotated[row] > 0)
        found.append(TilePicture(score, tumour, shown))
    return tuple(found)
