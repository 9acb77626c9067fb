"""Tables of labels, patients and splits as other tools read them: text of files, by their path in the export folder.

    clam      dataset.csv (case_id, slide_id, label), splits/splits_<k>.csv and splits_<k>_bool.csv
    stamp     slide_table.csv (PATIENT, FILENAME); clini_table.csv (PATIENT, label, further columns), a row per patient
    trident   labels.csv with labels as numbers (MIL-Lab, torchmil), and Patho-Bench's k=all.tsv and config.yaml

A table that cannot be written is left out, with a note that says why.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from selfvitmil.cohort.splits import SIDES, Split
from selfvitmil.cohort.table import Cohort, SlideRow, listing

LABEL = "label"


def tool_tables(tool: str, cohort: Cohort, splits: Sequence[Split]) -> tuple[dict[str, str], list[str]]:
    """Return the files of a tool for the slides of a cohort, and notes on what is missing. Other tools have none."""
    labelled = [row for row in cohort.rows if row.label is not None]
    writers = {"clam": _clam, "trident": _trident}
    if tool == "stamp":
        return _stamp(cohort.rows)
    if tool not in writers:
        return {}, []
    if not labelled:
        return {}, ["note: no tables of labels and splits were written: no slide has a label"]
    return writers[tool](labelled, cohort.classes, splits), []


def _clam(rows: Sequence[SlideRow], classes: Sequence[str], splits: Sequence[Split]) -> dict[str, str]:
    del classes
    found = {"dataset.csv": _text([("case_id", "slide_id", "label"), *((r.patient, r.slide, r.label) for r in rows)])}
    for k, split in enumerate(splits):
        sides = [getattr(split, side) for side in SIDES]
        columns = ((index, *cells) for index, cells in enumerate(zip_longest(*sides, fillvalue="")))
        found[f"splits/splits_{k}.csv"] = _text([("", *SIDES), *columns])
        member = ((slide, *(slide in side for side in sides)) for side in sides for slide in side)
        found[f"splits/splits_{k}_bool.csv"] = _text([("", *SIDES), *member])
    return found


def _stamp(rows: Sequence[SlideRow]) -> tuple[dict[str, str], list[str]]:
    found = {"slide_table.csv": _text([("PATIENT", "FILENAME"), *((r.patient, f"{r.slide}.h5") for r in rows)])}
    columns = [LABEL, *dict.fromkeys(name for row in rows for name, _ in row.extra)]
    values: dict[str, list[set[str]]] = {}
    for row in rows:
        extra = {LABEL: row.label or "", **dict(row.extra)}
        known = values.setdefault(row.patient, [set() for _ in columns])
        for cell, name in zip(known, columns, strict=True):
            cell.update(filter(None, [extra.get(name, "")]))
    torn = [patient for patient, cells in values.items() if len(cells[0]) > 1]
    if torn:
        note = f"note: no clini_table.csv was written: slides of one patient have different labels: {listing(torn)}"
        return found, [note]
    kept = [k for k in range(len(columns)) if all(len(cells[k]) < 2 for cells in values.values())]
    lines = [(patient, *(next(iter(cells[k]), "") for k in kept)) for patient, cells in values.items()]
    found["clini_table.csv"] = _text([("PATIENT", *(columns[k] for k in kept)), *lines])
    return found, []


def _trident(rows: Sequence[SlideRow], classes: Sequence[str], splits: Sequence[Split]) -> dict[str, str]:
    sides = [{slide: side for side in SIDES for slide in getattr(split, side)} for split in splits]
    only = sides[0] if len(sides) == 1 else None
    head = ("slide_id", "case_id", "label", "class", *(() if only is None else ("split",)))
    number = {name: k for k, name in enumerate(classes)}
    labels = [
        (r.slide, r.patient, number[str(r.label)], r.label, *(() if only is None else (only.get(r.slide, ""),)))
        for r in rows
    ]
    tasks = [
        (r.patient, r.slide, number[str(r.label)], *(own.get(r.slide, "") for own in sides))
        for r in rows
    ]  # fmt: skip
    config = {
        "task_name": LABEL,
        "task_col": LABEL,
        "task_type": "classification",
        "sample_col": "slide_id",
        "extra_cols": [],
        "label_dict": {str(k): name for k, name in enumerate(classes)},
        "metrics": ["macro-ovr-auc", "bacc"],
    }
    return {
        "labels.csv": _text([head, *labels]),
        "k=all.tsv": _text([("case_id", "slide_id", LABEL, *(f"fold_{k}" for k in range(len(sides)))), *tasks], "\t"),
        "config.yaml": _yaml(config),
    }


def _yaml(config: Mapping[str, Any]) -> str:
    """Return flat settings as YAML, of which JSON's values are a part; keys that are numbers stay numbers."""
    lines: list[str] = []
    for key, value in config.items():
        if key == "label_dict":
            lines += [f"{key}:", *(f"  {name}: {json.dumps(each, ensure_ascii=False)}" for name, each in value.items())]
        else:
            lines.append(f"{key}: {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def _text(rows: Iterable[Iterable[object]], delimiter: str = ",") -> str:
    stream = io.StringIO()
    csv.writer(stream, delimiter=delimiter, lineterminator="\n").writerows(rows)
    return stream.getvalue()
