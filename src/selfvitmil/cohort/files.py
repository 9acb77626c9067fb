"""What people have: tables in CSV dialects and .xlsx, and folders of slides.

A CSV file may be separated by commas, semicolons or tabs, begin with a byte order mark, have any line endings and blank
lines; cells are stripped. Of an .xlsx file the first sheet is read. Columns are recognized by their meaning:
`slide_id`, `FILENAME` and `wsi` all name the slide. Every row keeps its line number for messages.

Folders are searched with their subfolders. Three slide formats have more than one file: of MIRAX (`x.mrxs` with a
folder `x`) the file is used and its folder is not searched; of Hamamatsu VMS the `.vms` file, while its `.jpg` files
are ignored like all ordinary images; a folder of DICOM `.dcm` files is one slide, named after the folder and opened by
the first file in sorted order. Hidden files and folders (including macOS's `._x.svs`) are skipped. Links are followed,
each folder is visited once.
"""

from __future__ import annotations

import csv
import difflib
import io
import math
import os
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from selfvitmil.cohort.table import absolute, column_key, listing
from selfvitmil.errors import CohortError
from selfvitmil.settings import slide_mpp_problem
from selfvitmil.store.files import check_expansion

_SLIDE_COLUMNS = ("slide", "slide_id", "slide_name", "sample_id", "filename", "file_name", "file", "image", "image_id")

ROLES = {
    "slide": (*_SLIDE_COLUMNS, "image_name", "wsi", "wsi_id", "wsi_name"),
    "path": ("path", "slide_path", "image_path", "wsi_path", "file_path", "filepath"),
    "label": ("label", "slide_label", "class"),
    "patient": ("patient", "patient_id", "case", "case_id", "subject", "subject_id"),
    "split": ("split",),
    "mpp": ("mpp", "slide_mpp", "spacing_at_level_0"),
    "annotation": ("annotation", "annotation_path", "annotations"),
}
"""Accepted column names for each meaning; if a table has several of them, the first here is used."""

_NOTHING = frozenset(("", "na", "n/a", "#n/a", "nan", "<na>"))  # how R, pandas and Excel write a missing value


@dataclass(frozen=True)
class Sheet:
    """A table of text cells with a header."""

    name: str
    """File name."""
    folder: Path
    """Folder of the file, with links resolved: relative paths in the table start here."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    where: tuple[str, ...]
    """Position of each row, for messages: `line 7`."""
    warnings: tuple[str, ...] = ()

    def find(self, role: str) -> int | None:
        """Return the index of the column with this meaning, or None."""
        folded = [_fold(column) for column in self.columns]
        return next((folded.index(name) for name in ROLES[role] if name in folded), None)

    def named(self, column: str) -> int:
        """Return the index of the column with this name, ignoring case."""
        folded = [_fold(name) for name in self.columns]
        if _fold(column) not in folded:
            raise CohortError(
                f"{self.name}: no column {column!r}",
                f"its columns are {listing(filter(None, self.columns))}",
                _did_you_mean(column, self.columns) or "Name one of them",
                code="missing-column",
            )
        return folded.index(_fold(column))

    def others(self) -> tuple[str, ...]:
        """Return columns with unknown meaning; unnamed ones (mostly row numbers) do not count."""
        known = {name for names in ROLES.values() for name in names}
        return tuple(column for column in self.columns if column and _fold(column) not in known)

    def extras(self, label_index: int | None) -> list[tuple[tuple[str, str], ...]]:
        """Return the further columns of each row, name and cell: those of unknown meaning, without the label's.

        Line breaks in their cells, which are often remarks, become spaces.
        """
        names = [name for name in self.others() if label_index is None or name != self.columns[label_index]]
        places = [self.columns.index(name) for name in names]
        rows = ([whole_number(_known(" ".join(row[place].split()))) for place in places] for row in self.rows)
        return [tuple(zip(names, cells, strict=True)) for cells in rows]

    def cells(self, index: int | None) -> list[str]:
        """Return one column with missing values as empty strings; all empty if there is no such column."""
        if index is None:
            return [""] * len(self.rows)
        values = [row[index] for row in self.rows]
        for where, value in zip(self.where, values, strict=True):
            if _has_break(value):  # two stray quotes merge the rows between them
                raise CohortError(
                    f"{self.name}: the {self.columns[index]} that ends on {where} has a line break",
                    "unbalanced quotes may have merged rows",
                    "Remove the line break, or the quotes around it",
                    code="line-break-in-cell",
                )
        return [_known(value) for value in values]


def _known(value: str) -> str:
    """Return a cell; empty if it is one of the ways to write a missing value."""
    return "" if value.casefold() in _NOTHING else value


def check_columns(sheet: Sheet, expected: tuple[str, ...], required: tuple[str, ...]) -> None:
    """Raise CohortError for columns that seem to mean one of `expected` under another name, and for missing ones.

    Those are misspellings (`lable`) and other tools' words for a known column (`case_id`). Other columns are kept.
    """
    folded = [_fold(column) for column in sheet.columns]
    for column in sheet.columns:
        if not column or _fold(column) in expected:
            continue
        role = next((role for role, names in ROLES.items() if _fold(column) in names), None)
        if meant := role or misspelt(column, expected):
            raise _unknown_column(sheet, column, meant)
        sheet.cells(sheet.columns.index(column))  # refuses line breaks
    for column in required:
        if column not in folded:
            raise CohortError(
                f"{sheet.name}: no column {column!r}",
                f"its columns are {listing(filter(None, sheet.columns))}",
                f"The first line must name the columns: {', '.join(expected)}",
                code="missing-column",
            )


def check_spelling(sheet: Sheet) -> None:
    """Raise CohortError for a column of another tool's table that is a misspelling of an important one it lacks."""
    lacking = tuple(role for role in ("label", "patient", "split") if sheet.find(role) is None)
    for column in sheet.others():
        if meant := misspelt(column, lacking):
            raise _unknown_column(sheet, column, meant)


def _unknown_column(sheet: Sheet, column: str, meant: str) -> CohortError:
    return CohortError(
        f"{sheet.name}: unknown column {column!r}",
        "it is too similar to a known one to be a column of its own",
        f"Did you mean {meant!r}? Otherwise rename it",
        code="unknown-column",
    )


def misspelt(column: str, known: tuple[str, ...]) -> str | None:
    """Return the known column of which this name is a misspelling, or None.

    Close are `lable`, `labels` and `patiant`, but not `site` (to `slide`), nor a name with a number or a further word:
    `label_2`, `slide_type`.
    """
    name = _fold(column)
    if any(re.fullmatch(rf"{each}(_?\d+|_.+)", name) for each in known):
        return None
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.72)
    return nearest[0] if nearest else None


_fold = column_key


def _did_you_mean(word: str, choices: tuple[str, ...]) -> str:
    folded = {_fold(choice): choice for choice in choices}
    nearest = difflib.get_close_matches(_fold(word), folded, n=1)
    return f"Did you mean {folded[nearest[0]]!r}?" if nearest else ""


# ---------------------------------------------------------------------------------------------------- values


def whole_number(text: str) -> str:
    """Return `1` for `1.0`: spreadsheets turn numbers in a column with gaps into floats. Other text is unchanged."""
    match = re.fullmatch(r"([+-]?\d+)\.0*", text)
    return match[1] if match else text


_SPLIT_WORDS = {"training": "train", "valid": "val", "validation": "val", "testing": "test"}


def split_name(text: str) -> str | None:
    """Return a split in lower case, with `training`, `validation` and `testing` shortened; None if empty."""
    word = text.casefold()
    return _SPLIT_WORDS.get(word, word) or None


def parse_mpp(text: str, sheet: Sheet, where: str) -> float | None:
    """Parse microns per pixel; a decimal comma is accepted."""
    if not text:
        return None
    try:
        mpp = float(text.replace(",", "."))
    except ValueError:
        mpp = math.nan
    if problem := slide_mpp_problem(mpp):
        raise CohortError(
            f"{sheet.name}: {where}: mpp {text!r}",
            problem,
            "Correct it, or leave it empty to use the value in the slide file",
            code="invalid-mpp",
        )
    return mpp


# ---------------------------------------------------------------------------------------------------- files


def read_sheet(path: Path) -> Sheet:
    """Read a .csv, .tsv, .txt or .xlsx file."""
    suffix = path.suffix.lower()
    warnings: tuple[str, ...] = ()
    if suffix in (".xlsx", ".xlsm"):
        unit = "row"
        numbered, warnings = _read_xlsx(path)
    elif suffix in (".csv", ".tsv", ".txt"):
        unit = "line"
        numbered = _read_csv(path)
    else:
        raise CohortError(
            f"{path.name}: not a readable table",
            "tables end in .csv, .tsv, .txt or .xlsx",
            "Save it as CSV (UTF-8)",
            code="unknown-table-format",
        )
    if not numbered:
        raise CohortError(
            f"{path.name}: the table is empty", "a header and rows are needed", "Give another table", code="empty-table"
        )
    (_, header), *body = numbered
    rows = [_fitted(path.name, f"{unit} {number}", cells, len(header)) for number, cells in body]
    sheet = Sheet(
        path.name,
        Path(os.path.realpath(path.parent)),
        tuple(header),
        tuple(rows),
        tuple(f"{unit} {number}" for number, _ in body),
        warnings,
    )
    repeated = sorted({name for name in header if name and [_fold(n) for n in header].count(_fold(name)) > 1})
    if repeated:
        raise CohortError(
            f"{path.name}: duplicate columns: {listing(repeated)}",
            "the right one is ambiguous",
            "Rename or remove one",
            code="duplicate-columns",
        )
    return sheet


def _fitted(name: str, where: str, cells: list[str], width: int) -> tuple[str, ...]:
    if any(cells[width:]):
        raise CohortError(
            f"{name}: {where} has {len(cells)} cells under {width} columns",
            "the column of each value is ambiguous",
            'Quote values that contain the separator: "a, b"',
            code="too-many-cells",
        )
    return (*cells[:width], *[""] * (width - len(cells)))


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CohortError(
            f"{path.name}: cannot be read", f"{error.strerror or error}", "Check the path", code="unreadable-table"
        ) from None


def read_text(path: Path) -> str:
    """Read a UTF-8 file, with or without a byte order mark."""
    content = _read_bytes(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise CohortError(
            f"{path.name}: line {line} is not UTF-8 text",
            "non-ASCII letters would be read wrongly",
            "Save it again as CSV UTF-8 (in Excel: Save as, CSV UTF-8)",
            code="not-utf8",
        ) from None
    if "\0" in text:
        raise CohortError(
            f"{path.name}: not a text file", "it contains null bytes", "Save it again as CSV UTF-8", code="not-text"
        )
    return text


def split_lines(text: str, name: str, separator: str) -> list[tuple[int, list[str]]]:
    """Return the rows of a CSV text with their line numbers, cells stripped, empty rows removed."""
    try:
        rows = _parsed(text, separator, strict=True)
    except csv.Error:
        # Spaces after a closing quote are harmless, but a quote that never closes swallows all rows that follow.
        try:
            rows = _parsed(text, separator, strict=False)
            broken = next((f" before line {line + 1}" for line, cells in rows if any(map(_has_break, cells))), None)
        except csv.Error:
            rows, broken = [], ""
        if broken is not None:
            raise CohortError(
                f"{name}: unclosed quote{broken}",
                "the rows after it cannot be separated",
                'Close it, or write a quote inside a value twice: ""',
                code="unclosed-quote",
            ) from None
    return [(number, cells) for number, cells in rows if any(cells)]


def _has_break(cell: str) -> bool:
    return "\n" in cell or "\r" in cell


def _parsed(text: str, separator: str, *, strict: bool) -> list[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=strict)
    return [(reader.line_num, [cell.strip() for cell in row]) for row in reader]


def _read_csv(path: Path) -> list[tuple[int, list[str]]]:
    text = read_text(path)
    header = next((line for line in text.splitlines() if line.strip()), "")
    known = {name for names in ROLES.values() for name in names}

    def fit(separator: str) -> tuple[int, int]:
        cells = header.split(separator)
        return sum(_fold(cell.strip(' "')) in known for cell in cells), len(cells)

    return split_lines(text, path.name, max(",;\t", key=fit))


def _read_xlsx(path: Path) -> tuple[list[tuple[int, list[str]]], tuple[str, ...]]:
    import openpyxl

    content = io.BytesIO(_read_bytes(path))

    def refused(error: Exception) -> CohortError:
        return CohortError(
            f"{path.name}: cannot be read as .xlsx ({error})",
            "it is damaged or in another format",
            "Save it again, as .xlsx or CSV UTF-8",
            code="unreadable-table",
        )

    try:
        with zipfile.ZipFile(content) as archive:
            claimed = sum(entry.file_size for entry in archive.infolist())
        check_expansion("the workbook", claimed, len(content.getvalue()))
        book = openpyxl.load_workbook(content, read_only=True, data_only=True)
    except Exception as error:  # bytes of any kind make the parsers fail in any way
        raise refused(error) from None
    try:
        sheet = book.worksheets[0]
        sheet.reset_dimensions()  # some programs store a wrong size
        rows = [
            (number, ["" if value is None else str(value).strip() for value in values])
            for number, values in enumerate(sheet.iter_rows(values_only=True), start=1)
        ]
        others = [other.title for other in book.worksheets[1:]]
    except Exception as error:
        raise refused(error) from None
    finally:
        book.close()
    ignored = f"{path.name}: only the first sheet is read; ignored: {listing(others)}." if others else ""
    return [(number, cells) for number, cells in rows if any(cells)], (ignored,) if ignored else ()


# ---------------------------------------------------------------------------------------------------- folders


SLIDE_SUFFIXES = frozenset(
    (".svs", ".tif", ".tiff", ".ndpi", ".vms", ".vmu", ".scn", ".mrxs", ".svslide", ".bif", ".czi", ".dcm")
)
"""Suffixes of slide files, in lower case; upper case is recognized too."""
IMAGE_SUFFIXES = frozenset((".png", ".jpg", ".jpeg"))
"""Suffixes of ordinary images: slides too, but in a folder with other slides they are rather thumbnails or masks."""


@dataclass(frozen=True)
class FoundSlide:
    """A slide on disk: its name, its file and, for messages, its path within the folder."""

    name: str
    path: Path
    where: str


@dataclass(frozen=True)
class Listing:
    """One folder of a tree: its path relative to the root (`.` for the root itself) and its file names."""

    folder: Path
    relative: Path
    files: tuple[str, ...]


def is_slide(file_name: str) -> bool:
    """Return whether the file name has the suffix of a slide."""
    return os.path.splitext(file_name)[1].lower() in SLIDE_SUFFIXES


def find_slides(root: Path) -> tuple[list[FoundSlide], list[str]]:
    """Return all slides under `root`, sorted by name, and warnings; images only where there are no other slides."""
    found: list[FoundSlide] = []
    images: list[FoundSlide] = []
    dicom = 0
    for place in walk(root):
        images += [
            FoundSlide(Path(file).stem.strip(), place.folder / file, str(place.relative / file))
            for file in place.files
            if os.path.splitext(file)[1].lower() in IMAGE_SUFFIXES
            and not any(other.lower().endswith((".vms", ".vmu")) for other in place.files)  # whose pixels they may be
        ]
        slides = [file for file in place.files if is_slide(file)]
        parts = [file for file in slides if file.lower().endswith(".dcm")]
        if parts and len(parts) < len(slides):
            raise CohortError(
                f"{place.folder.name}: contains .dcm files and other slides ({listing(slides, 4)})",
                "all .dcm files of a folder count as one slide",
                "Put every DICOM slide into its own folder, or give a cohort.csv",
                code="mixed-dicom-folder",
            )
        if parts:
            dicom += 1
            found.append(FoundSlide(place.folder.name, place.folder / parts[0], str(place.relative / parts[0])))
        else:
            found += [
                FoundSlide(Path(file).stem.strip(), place.folder / file, str(place.relative / file)) for file in slides
            ]
    if not found and not images:
        raise CohortError(
            f"{root.name}: no slides in this folder",
            f"no file ends in {', '.join(sorted(SLIDE_SUFFIXES | IMAGE_SUFFIXES))}",
            "Give the folder that contains the slides, or a cohort.csv",
            code="no-slides",
        )
    warnings = [f"{dicom} folders of .dcm files are taken as one slide each."] if dicom else []
    if images and not found:
        found, warnings = images, [f"PNG and JPEG images are taken as slides ({len(images)}): there are no others."]
    elif images:
        warnings.append(f"PNG and JPEG images are not taken as slides ({len(images)}); a cohort.csv may list them.")
    return sorted(found, key=lambda slide: (slide.name, slide.where)), warnings


def walk(root: Path) -> Iterator[Listing]:
    """Yield the folders of the tree in sorted order; unreadable folders are errors, link loops are visited once."""
    base = absolute(root)
    seen: set[tuple[int, int]] = set()
    waiting = [base]
    while waiting:
        folder = waiting.pop()
        try:
            status = folder.stat()
            identity = (status.st_dev, status.st_ino)
            if identity in seen:
                continue
            seen.add(identity)
            with os.scandir(folder) as entries:
                visible = [entry for entry in entries if not entry.name.startswith(".")]
            folders = sorted(entry.name for entry in visible if entry.is_dir())
        except OSError as error:
            relative = folder.relative_to(base)
            raise CohortError(
                f"{base.name if folder == base else relative}: the folder cannot be read",
                f"{error.strerror or error}, so its slides would be missed",
                "Correct its permissions, or move it elsewhere",
                code="unreadable-folder",
            ) from None
        files = tuple(sorted({entry.name for entry in visible} - set(folders)))
        data_of_mirax = {file[:-5] for file in files if file.lower().endswith(".mrxs")}
        waiting += [folder / name for name in reversed(folders) if name not in data_of_mirax]
        yield Listing(folder, folder.relative_to(base), files)
