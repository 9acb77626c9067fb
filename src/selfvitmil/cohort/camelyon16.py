"""Camelyon16: its folder in the published layouts, with known corrections, and its published counts.

Ehteshami Bejnordi et al., JAMA 2017, doi:10.1001/jama.2017.14585. There are three layouts: `training/normal`,
`training/tumor`, `testing/images`; the older `TrainingData/Train_Normal`, `TrainingData/Train_Tumor`, `Testset/Images`;
and `images` next to `annotations` and `masks`. File names give the kind of a slide (`normal_001.tif`, `Tumor_001.tif`,
`test_001.tif`); the labels of the test slides are in `reference.csv`. As far as is known every slide is from a
different patient.

Special slides: test_049 is a duplicate; the lesions of test_114 are not exhaustively annotated; normal_086 contains a
tumour and was later published as tumor_111. With these corrections there are 159 + 111 training and 129 test slides.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from selfvitmil.cohort.files import Listing, is_slide, read_text, split_lines, walk
from selfvitmil.cohort.table import Cohort, SlideRow, absolute, listing, make_cohort
from selfvitmil.errors import CohortError

_TRAIN_TEST_FOLDERS = re.compile(
    r"training/(normal|tumor)|trainingdata/train_(normal|tumor)|(testing|testset)/images", re.IGNORECASE
)
_FLAT_COMPANIONS = frozenset(("annotations", "masks", "background_tissue", "evaluation"))
_SLIDE_NAME = re.compile(r"(normal|tumor|test)_\d{3}", re.IGNORECASE)
_SLIDE_FILE = re.compile(rf"{_SLIDE_NAME.pattern}\.tif", re.IGNORECASE)
_REFERENCES = ("reference.csv", "reference.txt", "gt.csv")

_OFFICIAL_TRAIN = {"normal": 159, "tumor": 111}
_OFFICIAL_TEST = frozenset(f"test_{number:03d}" for number in range(1, 131)) - {"test_049"}

PAPER_TILES = {"train": (1_235_428, 270), "test": (544_420, 129)}
"""Tiles and slides of each split as the paper of Self-ViT-MIL counts them."""

CHALLENGE_LEVEL = 5
"""Level of the evaluation masks of the challenge's FROC."""
CHALLENGE_MPP = 0.243
"""Microns per level-0 pixel that the challenge takes for every slide."""


def is_camelyon16_name(file_name: str) -> bool:
    """Return whether a file is named like the slides of Camelyon16."""
    return _SLIDE_FILE.fullmatch(file_name) is not None


def has_camelyon16_names(slides: Iterable[str]) -> bool:
    """Return whether all slides are named like those of Camelyon16, with some of each kind: normal, tumor, test."""
    kinds = [match[1].casefold() if (match := _SLIDE_NAME.fullmatch(slide)) else "" for slide in slides]
    return set(kinds) == {"normal", "tumor", "test"}


def is_official_test_set(slides: Iterable[str]) -> bool:
    """Return whether these are the 129 test slides of the challenge, which the published results are about."""
    return frozenset(slide.casefold() for slide in slides) == _OFFICIAL_TEST


def has_all_lesions(row: SlideRow) -> bool:
    """Return whether all lesions of a slide are annotated, so that it can be used in lesion metrics.

    False only for one slide of the test set. It is identified by its name among annotated test slides, because
    `cohort.csv` has no column for such a remark.
    """
    annotated_tumour = row.annotation is not None and row.label == "tumor" and row.split == "test"
    return not (annotated_tumour and row.slide.casefold() == "test_114")


def compare_tile_counts(counts: Mapping[str, Sequence[int]]) -> list[str]:
    """Return one line per split that compares tiles per slide with the paper's; `counts` are tiles of each slide."""
    lines: list[str] = []
    for split, (tiles, slides) in PAPER_TILES.items():
        if not (own := counts.get(split)):
            continue
        total, mean, published = sum(own), sum(own) / len(own), tiles / slides
        line = f"{split}: {total:,} tiles of {len(own)} slides; the paper has {tiles:,} of {slides}"
        if len(own) == slides:
            line += f" ({total / tiles - 1:+.1%})"
        lines.append(f"{line}; {mean:,.0f} a slide, the paper {published:,.0f} ({mean / published - 1:+.1%})")
    return lines


# ---------------------------------------------------------------------------------------------------- folder


def read_camelyon16(root: Path) -> Cohort | None:
    """Return the cohort of a Camelyon16 folder; None if the folder is not one."""
    places = list(walk(root))
    top = {place.relative.parts[0].casefold() for place in places if place.relative.parts}
    flat = "images" in top and bool(top & _FLAT_COMPANIONS)
    slide_places = [place for place in places if _holds_slides(place, flat)]
    files = [place.folder / file for place in slide_places for file in place.files if is_camelyon16_name(file)]
    if not files:
        return None
    warnings = ["Recognized as Camelyon16: labels and splits come from its file names and reference table."]
    used = set(files)
    images = (
        place.relative / f for place in places for f in place.files if is_slide(f) and place.folder / f not in used
    )
    if others := [str(image) for image in images]:
        warnings.append(f"{len(others)} other images (mostly masks) are ignored: {listing(others, 4)}.")
    rows = [_training_or_test_row(file) for file in sorted(files, key=lambda file: (file.stem.casefold(), str(file)))]
    rows, notes = _in_order(rows)
    warnings += notes
    rows, notes = _with_reference(rows, places)
    warnings += notes
    rows, notes = _with_annotations(rows, places)
    warnings += notes
    warnings += _count_warnings(rows)
    base = absolute(root)
    where = [str(row.path.relative_to(base)) for row in rows]
    return make_cohort(rows, base.name, where=where, warnings=warnings)


def _holds_slides(place: Listing, flat: bool) -> bool:
    if flat and place.relative.as_posix().casefold() == "images":
        return True
    return _TRAIN_TEST_FOLDERS.fullmatch(f"{place.folder.parent.name}/{place.folder.name}") is not None


def _training_or_test_row(file: Path) -> SlideRow:
    kind = file.stem.casefold().split("_")[0]
    folder = file.parent.name.casefold().removeprefix("train_")
    if folder in ("normal", "tumor") and kind != folder:
        raise CohortError(
            f"{file.name}: is in the folder {file.parent.name}",
            "file name and folder give different labels",
            "Move it to the folder that matches its name",
            code="camelyon16-label-conflict",
        )
    label, split = (None, "test") if kind == "test" else (kind, "train")
    # Each slide of the challenge is from a different patient.
    return SlideRow(file.stem, file, label, file.stem, split, patient_stated=True)


def _in_order(rows: list[SlideRow]) -> tuple[list[SlideRow], list[str]]:
    """Remove duplicate slides and correct the label of normal_086; return a warning for each special slide."""
    names = {row.slide.casefold() for row in rows}
    kept: list[SlideRow] = []
    warnings: list[str] = []
    for row in rows:
        name = row.slide.casefold()
        if name == "test_049":
            warnings.append(f"{row.slide} is left out: it is a duplicate, and the official test set excludes it.")
            continue
        if name == "normal_086" and "tumor_111" in names:
            warnings.append(f"{row.slide} is left out: it contains a tumour and is the same slide as tumor_111.")
            continue
        if name == "normal_086":
            warnings.append(f"{row.slide} is labelled tumor: it contains one, and was later published as tumor_111.")
            row = replace(row, label="tumor")
        if name == "test_114":
            warnings.append(f"{row.slide} stays, but not in lesion scores: its lesions are not exhaustively annotated.")
        kept.append(row)
    return kept, warnings


def _with_reference(rows: list[SlideRow], places: list[Listing]) -> tuple[list[SlideRow], list[str]]:
    """Add the labels of the reference table to the test slides."""
    if not any(row.split == "test" for row in rows):
        return rows, []
    tables = [place.folder / file for place in places for file in place.files if file.casefold() in _REFERENCES]
    if not tables:
        return rows, ["The test slides have no label: there is no testing/reference.csv in the folder."]
    labels = _read_reference(tables[0])
    labelled = [replace(row, label=labels.get(row.slide.casefold())) if row.split == "test" else row for row in rows]
    several = f"There are {len(tables)} tables of test labels; the first, {tables[0].name}, is used."
    return labelled, [several] if len(tables) > 1 else []


def _read_reference(table: Path) -> dict[str, str]:
    """Return label by slide name. The table may have a header or not, so cells are recognized by their content."""
    labels: dict[str, str] = {}
    rows = split_lines(read_text(table), table.name, ",")
    for k, (line, cells) in enumerate(rows):
        folded = [cell.casefold().removesuffix(".tif") for cell in cells]
        names = [cell for cell in folded if re.fullmatch(r"test_\d{3}", cell)]
        kinds = [cell for cell in folded if cell in ("normal", "tumor")]
        if k == 0 and not names:
            continue
        if len(names) != 1 or len(kinds) != 1 or labels.get(names[0], kinds[0]) != kinds[0]:
            raise CohortError(
                f"{table.name}: line {line} does not give one slide and one label",
                "rows look like test_001,Tumor,IDC,Macro",
                "Download the table from the data set again",
                code="invalid-camelyon16-reference",
            )
        labels[names[0]] = kinds[0]
    return labels


def _with_annotations(rows: list[SlideRow], places: list[Listing]) -> tuple[list[SlideRow], list[str]]:
    """Link slides to the XML files of their names; warn about tumour slides without one."""
    outlines: dict[str, list[Path]] = defaultdict(list)
    for place in places:
        for file in place.files:
            if file.lower().endswith(".xml"):
                outlines[file[:-4].casefold()].append(place.folder / file)
    linked: list[SlideRow] = []
    for row in rows:
        name = row.slide.casefold()
        matches = outlines[name] or (outlines["tumor_111"] if name == "normal_086" else [])
        if len(matches) > 1:
            raise CohortError(
                f"{row.slide}: has several annotations ({listing(f'{m.parent.name}/{m.name}' for m in matches)})",
                "the right one is ambiguous",
                "Keep one of them in the folder",
                code="several-annotations",
            )
        linked.append(replace(row, annotation=matches[0]) if matches else row)
    return linked, _annotation_warnings(linked, places)


def _annotation_warnings(rows: list[SlideRow], places: list[Listing]) -> list[str]:
    bare = [row.slide for row in rows if row.label == "tumor" and row.annotation is None]
    if not bare:
        return []
    archives = [
        str(place.relative / file)
        for place in places
        for file in place.files
        if file.lower().endswith(".zip") and "annotation" in file.lower()
    ]
    remedy = f"; unzip {listing(archives)} beside itself" if archives else "; lesion scores cannot count them"
    return [f"{len(bare)} tumour slides have no annotation{remedy}: {listing(bare)}."]


def _count_warnings(rows: list[SlideRow]) -> list[str]:
    counts = Counter((row.split, row.label) for row in rows)
    train = {label: counts["train", label] for label in ("normal", "tumor")}
    test = sum(row.split == "test" for row in rows)
    if sum(train.values()) < 200 or (train == _OFFICIAL_TRAIN and test == len(_OFFICIAL_TEST)):
        return []
    return [
        f"There are {train['normal']} normal and {train['tumor']} tumor training and {test} test slides;"
        " the official set has 159 and 111 (270 in total) and 129."
    ]
