"""`predictions.csv` and `predictions.json` of an output folder: what all calls of `predict` into it have answered.

A call adds its rows and replaces those of the same slide by the same model; all others stay, with columns that somebody
added. Both files are read before any work is done: one that cannot be read is an error and is left as it is. Calls into
one folder exclude each other by the folder's lock, so no row is lost between reading and writing.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfvitmil.cohort.table import name_key
from selfvitmil.errors import ArtefactError
from selfvitmil.store.files import write_csv, write_text
from selfvitmil.untrusted import read_json

FORMAT_VERSION = 2
"""Of predictions.json. Since 2 it holds the slides of several calls and models."""
CSV, JSON = "predictions.csv", "predictions.json"
KEY = ("slide", "model")

Row = Mapping[str, str]
Told = Mapping[str, Any]


@dataclass(frozen=True)
class Predictions:
    """What the two files hold."""

    columns: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    """Of predictions.csv."""
    models: Mapping[str, Told] = field(default_factory=dict)
    """Model -> what predictions.json says of it."""
    slides: tuple[Told, ...] = ()
    failures: tuple[Told, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Predictions:
        """Those of a folder, empty where there are none; ArtefactError where one of the files cannot be read."""
        try:
            columns, rows = _read_csv(folder / CSV)
        except (OSError, ValueError, csv.Error) as error:
            raise _unreadable(CSV, error) from None
        try:
            told = _read_json(folder / JSON)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(JSON, error) from None
        return cls(columns, rows, **told)

    def updated(
        self,
        columns: Sequence[str],
        rows: Sequence[Row],
        model: tuple[str, Told],
        slides: Sequence[Told],
        failures: Sequence[Told],
        tried: Sequence[str],
    ) -> Predictions:
        """With the answers of one call by one model on top; `tried` are all slides of that call."""
        kept = [each for each in self.failures if each["model"] != model[0] or each["slide"] not in tried]
        return replace(
            self,
            columns=_joined_columns(self.columns, columns),
            rows=_replaced(self.rows, rows),
            models={**self.models, model[0]: model[1]},
            slides=_replaced(self.slides, slides),
            failures=(*kept, *failures),
        )

    def write(self, folder: Path, head: Told) -> None:
        """Both files, each an atomic write; `head` begins predictions.json."""
        cells = [[row.get(column, "") for column in self.columns] for row in self.rows]
        write_csv(folder / CSV, [self.columns, *cells])
        write_text(folder / JSON, self.json_text(head))

    def json_text(self, head: Told) -> str:
        told = {"format_version": FORMAT_VERSION, **head, "models": self.models}
        told |= {"slides": self.slides, "failures": self.failures}
        return json.dumps(told, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def contents(self, slide: str) -> set[tuple[str, str]]:
        """(name, fingerprint) of the answered slides that have this name, case aside."""
        return {
            (row["slide"], row.get("fingerprint", "")) for row in self.rows if name_key(row["slide"]) == name_key(slide)
        }


def _replaced(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """`before` with the entries of the same slide and model replaced in their places, and new ones at the end.

    Fields that only the earlier entry has stay: somebody may have added a column of remarks.
    """
    entries = {_key(each): each for each in before}
    for each in now:
        entries[_key(each)] = {**entries.get(_key(each), {}), **each}
    return tuple(entries.values())


def _key(entry: Mapping[str, Any]) -> tuple[str, str]:
    return entry["slide"], entry["model"]


def _joined_columns(before: Sequence[str], now: Sequence[str]) -> tuple[str, ...]:
    """All columns; those that are new follow the one that they follow in their own table."""
    columns = list(before)
    for place, column in enumerate(now):
        if column not in columns:
            at = columns.index(now[place - 1]) + 1 if place else 0
            columns.insert(at, column)
    return tuple(columns)


def _read_csv(path: Path) -> tuple[tuple[str, ...], tuple[Row, ...]]:
    if not path.exists():
        return (), ()
    lines = list(csv.reader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""), strict=True))
    if not lines or not all(column in lines[0] for column in KEY):
        raise ValueError(f"its first line does not name the columns {' and '.join(KEY)}, separated by commas")
    columns, *rows = [line for line in lines if any(line)]
    if len(set(columns)) < len(columns):
        raise ValueError("two of its columns have the same name")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(columns):
            raise ValueError(f"row {number} has {len(row)} cells under {len(columns)} columns")
    told = tuple(dict(zip(columns, row, strict=True)) for row in rows)
    if len({_key(row) for row in told}) < len(told):
        raise ValueError("it has two rows of one slide by one model")
    return tuple(columns), told


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    told = read_json(path)
    if told["format_version"] != FORMAT_VERSION:
        raise ValueError(f"its format is version {told['format_version']}, this program writes {FORMAT_VERSION}")
    for each in (*told["slides"], *told["failures"]):
        _key(each)
    return {"models": dict(told["models"]), "slides": tuple(told["slides"]), "failures": tuple(told["failures"])}


def _unreadable(name: str, error: Exception) -> ArtefactError:
    why = (error.strerror or "") if isinstance(error, OSError) else str(error).strip("'\"")
    return ArtefactError(
        f"{name}: answers of earlier calls cannot be read",
        f"{why}; it was not overwritten",
        f"Correct it, move {CSV} and {JSON} away, or name another --out",
    )
