"""Tables as people and other tools write them: CSV in its dialects and .xlsx, read into plain text cells.

A CSV file may be separated by commas, semicolons or tabs, begin with a byte order mark, end its lines in any way and
have blank lines; cells lose the spaces around them. Of an .xlsx file the first sheet is read. Columns are found by what
they mean: `slide_id`, `FILENAME` and `wsi` are all the slide. Every row knows its line, for messages.
"""

from __future__ import annotations

import csv
import difflib
import io
import math
import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import ParseError

from selfvitmil.cohort.table import listing
from selfvitmil.errors import CohortError
from selfvitmil.settings import slide_mpp_problem
from selfvitmil.untrusted import check_expansion

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
"""Names that a column of each meaning may have; where a table has several of them, the first here is taken."""

_NOTHING = frozenset(("", "na", "n/a", "#n/a", "nan", "<na>"))  # how R, pandas and Excel write a missing value


@dataclass(frozen=True)
class Sheet:
    """A table of text cells under a header."""

    name: str
    """Of the file."""
    folder: Path
    """Where the file lies, free of links: relative paths in the table start here."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    where: tuple[str, ...]
    """The place of each row, for messages: `line 7`."""
    warnings: tuple[str, ...] = ()

    def find(self, role: str) -> int | None:
        """Index of the column that has this meaning."""
        folded = [_fold(column) for column in self.columns]
        return next((folded.index(name) for name in ROLES[role] if name in folded), None)

    def named(self, column: str) -> int:
        """Index of the column of this name, in any case."""
        folded = [_fold(name) for name in self.columns]
        if _fold(column) not in folded:
            raise CohortError(
                f"{self.name}: has no column {column!r}",
                f"its columns are {listing(filter(None, self.columns))}",
                _did_you_mean(column, self.columns) or "Name one of them",
            )
        return folded.index(_fold(column))

    def others(self) -> tuple[str, ...]:
        """Columns whose meaning is not known; those without a name (a row number, mostly) do not count."""
        known = {name for names in ROLES.values() for name in names}
        return tuple(column for column in self.columns if column and _fold(column) not in known)

    def cells(self, index: int | None) -> list[str]:
        """One column, a missing value as an empty text; all empty where there is no such column."""
        if index is None:
            return [""] * len(self.rows)
        values = [row[index] for row in self.rows]
        for where, value in zip(self.where, values, strict=True):
            if _has_break(value):  # two stray quotes make one value of the rows between them
                raise CohortError(
                    f"{self.name}: the {self.columns[index]} that ends on {where} has a line break",
                    "it may have swallowed the rows before",
                    "Remove the line break, or the quotes around it",
                )
        return ["" if value.casefold() in _NOTHING else value for value in values]


def check_columns(sheet: Sheet, expected: tuple[str, ...], required: tuple[str, ...]) -> None:
    """Refuse columns beyond `expected` (in any case), naming the nearest, and a table that lacks a required one."""
    folded = [_fold(column) for column in sheet.columns]
    for column in sheet.columns:
        if column and _fold(column) not in expected:
            role = next((role for role, names in ROLES.items() if _fold(column) in names), None)
            raise CohortError(
                f"{sheet.name}: unknown column {column!r}",
                f"the columns are {', '.join(expected)}",
                f"Did you mean {role!r}?" if role else _did_you_mean(column, expected) or "Rename or remove it",
            )
    for column in required:
        if column not in folded:
            raise CohortError(
                f"{sheet.name}: has no column {column!r}",
                f"its columns are {listing(filter(None, sheet.columns))}",
                f"The first line must name the columns: {', '.join(expected)}",
            )


def _fold(column: str) -> str:
    return re.sub(r"[\s\-.]+", "_", column.strip().casefold())


def _did_you_mean(word: str, choices: tuple[str, ...]) -> str:
    folded = {_fold(choice): choice for choice in choices}
    nearest = difflib.get_close_matches(_fold(word), folded, n=1)
    return f"Did you mean {folded[nearest[0]]!r}?" if nearest else ""


# ---------------------------------------------------------------------------------------------------- values


def whole_number(text: str) -> str:
    """`1.0` as `1`: spreadsheets make floats of numbers in a column with gaps. All else stays."""
    match = re.fullmatch(r"([+-]?\d+)\.0*", text)
    return match[1] if match else text


_SPLIT_WORDS = {"training": "train", "valid": "val", "validation": "val", "testing": "test"}


def split_name(text: str) -> str | None:
    """A split in lower case, `training`, `validation` and `testing` in their short forms; None when empty."""
    word = text.casefold()
    return _SPLIT_WORDS.get(word, word) or None


def parse_mpp(text: str, sheet: Sheet, where: str) -> float | None:
    """Microns per pixel; a comma may stand for the point, as in spreadsheets of half of Europe."""
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
            "Correct it, or leave it empty to use what the slide itself says",
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
            f"{path.name}: not a table that can be read",
            "tables end in .csv, .tsv, .txt or .xlsx",
            "Save it as CSV (UTF-8)",
        )
    if not numbered:
        raise CohortError(f"{path.name}: the table is empty", "a header and rows are needed", "Give another table")
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
            f"{path.name}: columns that occur twice: {listing(repeated)}", "which one is meant?", "Rename or remove one"
        )
    return sheet


def _fitted(name: str, where: str, cells: list[str], width: int) -> tuple[str, ...]:
    if any(cells[width:]):
        raise CohortError(
            f"{name}: {where} has {len(cells)} cells under {width} columns",
            "it cannot be told which value belongs to which column",
            'Put a value that holds the separator into quotes: "a, b"',
        )
    return (*cells[:width], *[""] * (width - len(cells)))


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CohortError(f"{path.name}: cannot be read", f"{error.strerror or error}", "Check the path") from None


def read_text(path: Path) -> str:
    """A UTF-8 file, with or without a byte order mark."""
    content = _read_bytes(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise CohortError(
            f"{path.name}: line {line} is not UTF-8 text",
            "letters beyond a to z would be read wrongly",
            "Save it again as CSV UTF-8 (in Excel: Save as, CSV UTF-8)",
        ) from None
    if "\0" in text:
        raise CohortError(f"{path.name}: is not a text file", "it holds zero bytes", "Save it again as CSV UTF-8")
    return text


def split_lines(text: str, name: str, separator: str) -> list[tuple[int, list[str]]]:
    """Rows of a CSV text with their line numbers, cells stripped, rows without any content left out."""
    try:
        rows = _parsed(text, separator, strict=True)
    except csv.Error:
        # Spaces after a closing quote are no harm, but a quote that never closes swallows all rows that follow.
        try:
            rows = _parsed(text, separator, strict=False)
            broken = next((f" before line {line + 1}" for line, cells in rows if any(map(_has_break, cells))), None)
        except csv.Error:
            rows, broken = [], ""
        if broken is not None:
            raise CohortError(
                f"{name}: a quote does not close{broken}",
                "the rows that follow it cannot be told apart",
                'Close it, or write a quote inside a value twice: ""',
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
    from openpyxl.utils.exceptions import InvalidFileException

    content = io.BytesIO(_read_bytes(path))
    # expat, below all of it, ends XML whose entities grow without bound; it then raises ParseError.
    broken = (InvalidFileException, zipfile.BadZipFile, KeyError, ValueError, ParseError)

    def refused(error: Exception) -> CohortError:
        return CohortError(
            f"{path.name}: cannot be read as .xlsx ({error})",
            "it is damaged or of another format",
            "Save it again, as .xlsx or CSV UTF-8",
        )

    try:
        with zipfile.ZipFile(content) as archive:
            claimed = sum(entry.file_size for entry in archive.infolist())
        check_expansion("the workbook", claimed, len(content.getvalue()))
        book = openpyxl.load_workbook(content, read_only=True, data_only=True)
    except broken as error:
        raise refused(error) from None
    try:
        sheet = book.worksheets[0]
        sheet.reset_dimensions()  # some programs store a wrong size
        rows = [
            (number, ["" if value is None else str(value).strip() for value in values])
            for number, values in enumerate(sheet.iter_rows(values_only=True), start=1)
        ]
        others = [other.title for other in book.worksheets[1:]]
    except broken as error:
        raise refused(error) from None
    finally:
        book.close()
    ignored = f"{path.name}: only the first sheet is read; not {listing(others)}." if others else ""
    return [(number, cells) for number, cells in rows if any(cells)], (ignored,) if ignored else ()
