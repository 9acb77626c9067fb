"""Read a `Cohort` from any supported source: a `cohort.csv`, a folder, Camelyon16, the tables of CLAM and STAMP.

A source lists the slides and their files; a second table may add labels and other fields. Labels are never derived from
file names or the order of folders, except for Camelyon16, whose names define them. No table content is dropped
silently. `merge_cohorts` adds a cohort to that of a study.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from selfvitmil.cohort.camelyon16 import is_camelyon16_name, read_camelyon16
from selfvitmil.cohort.files import (
    IMAGE_SUFFIXES,
    SLIDE_SUFFIXES,
    FoundSlide,
    Sheet,
    check_columns,
    check_spelling,
    find_slides,
    parse_mpp,
    read_sheet,
    split_name,
    whole_number,
)
from selfvitmil.cohort.table import (
    COLUMNS,
    Cohort,
    SlideRow,
    column_key,
    listing,
    make_cohort,
    name_key,
    resolve_path,
    specific_warnings,
    stated_fields,
)
from selfvitmil.errors import CohortError, ConfigError, raise_problems

_FEATURE_SUFFIXES = frozenset((".h5", ".pt", ".npy"))  # tables of CLAM and STAMP may name a slide by its feature file

CAMELYON16_PREFIX = "camelyon16:"
"""Prefix of a folder that must be Camelyon16."""


def read_cohort(
    source: Path,
    labels: Path | None = None,
    *,
    label_column: str | None = None,
    slides_folder: Path | None = None,
    features: Mapping[str, Path] | None = None,
    targets: Sequence[str] = (),
    replace_labels: bool = False,
) -> Cohort:
    """Read a cohort; tables are .csv, .tsv or .xlsx, and columns are recognized by name, ignoring case.

    read_cohort("cohort.csv")                          our own table: paths are relative to its folder
    read_cohort("slides/", "labels.xlsx")              a folder, searched recursively, and a table slide,label,...
    read_cohort("CAMELYON16/")                         the official folder: labels, split and annotations are known
    read_cohort("camelyon16:DIR")                      the same, but an error if the folder has another layout
    read_cohort("clam.csv", slides_folder="slides/")   case_id,slide_id,label; or any table of slides without paths
    read_cohort("slide_table.csv", "clini_table.xlsx", label_column="isMSIH", slides_folder="slides/")      STAMP

    `labels` has a column for the slide (name, file name or feature file name), or else one for the patient, and fills
    the empty fields of `source`; a row for an unknown slide is an error, a patient without slides is a warning. With
    `replace_labels` its labels replace those of `source`, which a warning counts.
    `label_column` names the column of the label; by default `label`, or the only column of unknown meaning.
    `slides_folder` contains the slides of a table without paths, and is the base of relative paths of a table with
    paths. `features` (slide -> feature file) replace the slides of a table without paths if no slides are available; a
    slide without one stays in the cohort and fails later, alone. `targets` are columns that will be predicted: a table
    that has them, or `time` and `event`, needs no label. All other columns of tables are kept as they are. Raises
    CohortError, with line numbers, for all contradictions at once; remarks are in the result's `warnings`.
    """
    prefixed = str(source).startswith(CAMELYON16_PREFIX)
    source = _existing(Path(str(source).removeprefix(CAMELYON16_PREFIX)).expanduser() if prefixed else source)
    if prefixed:
        return _official(source, labels, slides_folder)
    slides_folder = _existing(slides_folder) if slides_folder is not None else None
    problems: list[CohortError] = []
    if not source.is_dir():
        own_labels = label_column if labels is None else None
        cohort = _from_table(read_sheet(source), slides_folder, own_labels, features, problems)
    elif slides_folder is not None:
        raise ConfigError(
            "a folder of slides and --slides-folder exclude each other",
            how="Give the table as cohort, or only one folder",
            code="two-slide-folders",
        )
    else:
        if labels is None and label_column is not None:
            raise ConfigError(
                f"--label-column {label_column} without a table of labels",
                how="Give the table with --labels",
                code="label-column-without-table",
            )
        official = read_camelyon16(source) if labels is None else None
        cohort = official if official is not None else _from_folder(source, problems, hint=labels is None)
    if labels is not None:
        sheet = read_sheet(_existing(labels))
        cohort = _with_labels(cohort, sheet, label_column, targets, problems, replace_labels=replace_labels)
    if problems:  # report everything at once
        raise_problems([*problems, *cohort.common_problems], source.name)
    return cohort


def _official(folder: Path, labels: Path | None, slides_folder: Path | None) -> Cohort:
    if labels is not None or slides_folder is not None:
        raise ConfigError(
            f"{CAMELYON16_PREFIX} cannot be combined with --labels or --slides-folder",
            "the folder defines labels and slides",
            code="camelyon16-options",
        )
    cohort = read_camelyon16(folder) if folder.is_dir() else None
    if cohort is None:
        raise CohortError(
            f"{folder.name}: not a Camelyon16 folder",
            "it contains no slides such as training/normal/normal_001.tif, training/tumor/tumor_001.tif or "
            "testing/images/test_001.tif (nor the older TrainingData/Train_Normal, nor images/ next to annotations/)",
            f"Give the folder that contains those, or leave out {CAMELYON16_PREFIX} for another layout",
            code="not-camelyon16",
        )
    return cohort


def _existing(path: Path) -> Path:
    path = Path(path)
    if not os.path.exists(path):
        raise ConfigError(f"{path}: no such file or folder", how="Check the path", code="file-not-found")
    return path


# ---------------------------------------------------------------------------------------------------- slides


def _from_folder(folder: Path, problems: list[CohortError], *, hint: bool) -> Cohort:
    found, warnings = find_slides(folder)
    if hint and all(is_camelyon16_name(slide.path.name) for slide in found):
        warnings.append(
            "The names are those of Camelyon16, but not its folders (training/normal, training/tumor, testing/images), "
            "so no labels are derived from them."
        )
    if (folder / "cohort.csv").is_file():
        warnings.append("The folder contains a cohort.csv that was not read; give the file itself to use it.")
    return make_cohort(
        [SlideRow(slide.name, slide.path) for slide in found],
        Path(os.path.abspath(folder)).name,
        where=[slide.where for slide in found],
        warnings=warnings,
        problems=problems,
    )


def _from_table(
    sheet: Sheet,
    slides_folder: Path | None,
    label_column: str | None,
    features: Mapping[str, Path] | None,
    problems: list[CohortError],
) -> Cohort:
    folded = [column.casefold() for column in sheet.columns]
    ours = sheet.name == "cohort.csv" or {"slide", "path"} <= set(folded)
    if ours:
        check_columns(sheet, COLUMNS, required=("slide", "path"))
    else:
        check_spelling(sheet)
    if sheet.find("slide") is None and sheet.find("path") is None and not _by_patients(sheet, features):
        raise CohortError(
            f"{sheet.name}: no column names the slides",
            f"its columns are {listing(filter(None, sheet.columns))}",
            "The first line must name the columns: slide,path,label,patient,split,mpp,annotation",
            code="missing-column",
        )
    label_index = sheet.named(label_column) if label_column is not None else sheet.find("label")
    rows = list(_rows_of(sheet, label_index, keep_names=ours))
    warnings = list(sheet.warnings)
    if sheet.find("path") is None and slides_folder is None and features is not None:
        rows = [_at_features(row, features) for row in rows]
    elif sheet.find("path") is None:
        rows, unlisted = _located(sheet, rows, slides_folder, problems)
        warnings += unlisted
    else:
        base = Path(os.path.realpath(slides_folder)) if slides_folder is not None else sheet.folder
        paths = _filled_cells(sheet, "path")
        rows = [replace(row, path=resolve_path(path, base)) for row, path in zip(rows, paths, strict=True)]
    return make_cohort(rows, sheet.name, where=sheet.where, warnings=warnings, problems=problems)


def _by_patients(sheet: Sheet, features: Mapping[str, Path] | None) -> bool:
    """Return whether feature files are of whole patients, and the table lists these, as STAMP's clini table does."""
    names = {name_key(name) for name in features or ()}
    return any(key in names for cell in sheet.cells(sheet.find("patient")) for key in _spellings(cell))


def _at_features(row: SlideRow, features: Mapping[str, Path]) -> SlideRow:
    """Return the row with its feature file instead of the slide, or with the file name that it would have."""
    names = {name_key(name): name for name in features}
    name = next((names[key] for key in _spellings(str(row.path)) if key in names), None)
    if name is None:
        return replace(row, path=next(iter(features.values())).with_name(f"{row.slide}.h5"))
    return row.found_as(name, features[name])


def _rows_of(sheet: Sheet, label_index: int | None, *, keep_names: bool) -> Iterator[SlideRow]:
    """Yield the rows of the table; `path` is only the name that the table uses for the slide."""
    role = next((role for role in ("slide", "path") if sheet.find(role) is not None), "patient")
    names = _filled_cells(sheet, role)
    columns = [sheet.cells(sheet.find(role)) for role in ("patient", "split", "mpp", "annotation")]
    for where, name, extra, label, patient, split, mpp, annotation in zip(
        sheet.where, names, sheet.extras(label_index), sheet.cells(label_index), *columns, strict=True
    ):
        yield SlideRow(
            slide=name if keep_names else stem(name),
            path=Path(name),
            label=whole_number(label) or None,
            patient=whole_number(patient),
            split=split_name(split),
            mpp=parse_mpp(mpp, sheet, where),
            annotation=resolve_path(annotation, sheet.folder) if annotation else None,
            patient_stated=bool(patient),
            extra=extra,
        )


def _filled_cells(sheet: Sheet, role: str) -> list[str]:
    cells = sheet.cells(sheet.find(role))
    gaps = [where for where, cell in zip(sheet.where, cells, strict=True) if not cell]
    if gaps:
        raise CohortError(
            f"{sheet.name}: rows without {role}: {listing(gaps)}",
            how="Fill them in, or delete the rows",
            code="empty-cells",
        )
    return cells


def stem(name: str) -> str:
    """Return the slide's name from a file name, without folders, feature file suffix and slide suffix."""
    name = PurePosixPath(name).name
    for suffixes in (_FEATURE_SUFFIXES, SLIDE_SUFFIXES | IMAGE_SUFFIXES):
        base, ending = os.path.splitext(name)
        name = base if ending.lower() in suffixes else name
    return name


def _spellings(name: str) -> Iterator[str]:
    # "b.1.tif" is usually the slide b.1, but a slide may itself be called "b.1.tif".
    yield from (name_key(name), name_key(PurePosixPath(name).name), name_key(stem(name)))


def _located(
    sheet: Sheet, rows: list[SlideRow], slides_folder: Path | None, problems: list[CohortError]
) -> tuple[list[SlideRow], list[str]]:
    """Return the rows with the files of their names in `slides_folder`, and warnings."""
    if slides_folder is None:
        raise CohortError(
            f"{sheet.name}: lists slides, but has no column of paths",
            "the files cannot be found by name alone",
            "Give their folder with --slides-folder, or add a column path",
            code="no-paths",
        )
    found, warnings = find_slides(slides_folder)
    files: dict[str, list[FoundSlide]] = defaultdict(list)
    for slide in found:
        files[name_key(slide.name)].append(slide)
    located: list[SlideRow] = []
    missing: list[str] = []
    several: list[str] = []
    used: set[str] = set()
    for row, where in zip(rows, sheet.where, strict=True):
        key = next((key for key in _spellings(str(row.path)) if key in files), None)
        if key is None:
            missing.append(f"{where} ({row.slide})")
            located.append(row.found_as(row.slide, slides_folder / row.path))
            continue
        if len(files[key]) > 1:
            several.append(f"{where}: several files are named {row.slide}: {listing(s.where for s in files[key])}")
        located.append(row.found_as(files[key][0].name, files[key][0].path))
        used.add(key)
    if several:
        what = f"{sheet.name}: {listing(several)}"
        how = "Add a column path to the table"
        problems.append(CohortError(what, "the right one is ambiguous", how, code="ambiguous-slide-file"))
    if missing:
        what = f"{sheet.name}: slides that are not in the slides folder: {listing(missing)}"
        problems.append(CohortError(what, *_LOST_LABEL, code="slides-not-found"))
    unlisted = [slide.where for key, group in files.items() if key not in used for slide in group]
    if unlisted:
        warnings.append(
            f"{len(unlisted)} slides of the folder are not in {sheet.name} and are ignored: {listing(unlisted)}."
        )
    return located, warnings


# ---------------------------------------------------------------------------------------------------- labels


_LOST_LABEL = (
    "a label without a slide is an error in the table or a lost file",
    "Add the files, or delete the rows",
)


def _with_labels(
    cohort: Cohort, sheet: Sheet, label_column: str | None, targets: Sequence[str], problems: list[CohortError], *,
    replace_labels: bool = False,
) -> Cohort:  # fmt: skip
    """Fill empty fields of the cohort from a table of slides or, if it has no column for them, of patients."""
    label_index, chosen = _label_index(sheet, label_column, targets, all_labelled=not cohort.unlabelled)
    by_slide = sheet.find("slide") is not None or sheet.find("path") is not None
    if not by_slide and sheet.find("patient") is None:
        raise CohortError(
            f"{sheet.name}: no column names slides or patients",
            f"its columns are {listing(filter(None, sheet.columns))}",
            "The first line must name the columns, for instance: slide,label",
            code="missing-column",
        )
    additions = _by_slide(cohort, sheet, label_index) if by_slide else _by_patient(cohort, sheet, label_index)
    rows = {row.slide: row for row in cohort.rows}
    warnings = [*specific_warnings(cohort), *sheet.warnings, *chosen]
    conflicts: list[str] = []
    missing: list[str] = []
    seen: set[str] = set()
    with_cohort = False
    """Whether a value contradicts the cohort, not just another line of the table."""
    replaced: dict[str, bool] = {}
    """Slides whose label is replaced -> whether it is another one."""
    for where, name, addition in additions:
        if addition is None:
            missing.append(f"{where} ({name})")
            continue
        if replace_labels and addition.label and name not in replaced:
            replaced[name] = rows[name].label not in (None, addition.label)
            rows[name] = replace(rows[name], label=None)
        rows[name], disagreements = combine(rows[name], replace(addition, path=rows[name].path))
        conflicts += [f"{where}: {disagreement}" for disagreement in disagreements]
        with_cohort |= bool(disagreements) and name not in seen
        seen.add(name)
    if changed := sum(replaced.values()):
        warnings.append(f"{sheet.name}: {changed} labels were replaced by others.")
    if missing and by_slide:
        what = f"{sheet.name}: labels of unknown slides: {listing(missing)}"
        problems.append(CohortError(what, *_LOST_LABEL, code="slides-not-found"))
    elif missing:
        warnings.append(f"{sheet.name}: {len(missing)} patients have no slide: {listing(missing)}.")
    if conflicts:
        what = f"{sheet.name}: contradicts {'the cohort' if with_cohort else 'itself'}: {listing(conflicts)}"
        why, how = "the right value is ambiguous", "Correct one of the two"
        if with_cohort and all("(label: " in each for each in conflicts):
            how += (
                ", or replace the labels with --replace-labels; to predict another column beside the label, name it "
                "with --train.target"
            )
        problems.append(CohortError(what, why, how, code="conflicting-values"))
    return make_cohort(list(rows.values()), sheet.name, warnings=warnings, problems=problems)


_Addition = tuple[str, str, SlideRow | None]  # row in the table; slide to fill; values, or None for an unknown slide


def _by_slide(cohort: Cohort, sheet: Sheet, label_index: int | None) -> Iterator[_Addition]:
    names = {name_key(slide): slide for slide in cohort.slides}
    for where, row in zip(sheet.where, _rows_of(sheet, label_index, keep_names=True), strict=True):
        name = next((names[key] for key in _spellings(row.slide) if key in names), None)
        if name is None:
            yield where, PurePosixPath(row.slide).name, None
        else:
            yield where, name, replace(row, slide=name, patient=row.patient if row.patient_stated else "")


def _by_patient(cohort: Cohort, sheet: Sheet, label_index: int | None) -> Iterator[_Addition]:
    owned = cohort.patients
    patients = [whole_number(cell) for cell in sheet.cells(sheet.find("patient"))]
    if not set(patients) & set(owned):
        raise CohortError(
            f"{sheet.name}: none of its patients has a slide",
            "the table lists patients, not slides, and the cohort does not have them",
            "Give a table with patient and slide as the cohort (STAMP's slide table), or add a column slide",
            code="unknown-patients",
        )
    labels, splits = sheet.cells(label_index), sheet.cells(sheet.find("split"))
    extras = sheet.extras(label_index)
    for k, where in enumerate(sheet.where):
        if not patients[k]:
            raise CohortError(
                f"{sheet.name}: {where} has no patient", how="Fill it in, or delete the row", code="empty-cells"
            )
        if patients[k] not in owned:
            yield where, patients[k], None
        for row in owned.get(patients[k], ()):
            label, split = whole_number(labels[k]) or None, split_name(splits[k])
            yield where, row.slide, replace(row, label=label, split=split, extra=extras[k])


_NEVER_LABELS = ("time", "event", "site", "scanner")
"""Columns that are not taken as the label where a table has no other."""


def _label_index(
    sheet: Sheet, label_column: str | None, targets: Sequence[str], *, all_labelled: bool
) -> tuple[int | None, list[str]]:
    """Return the index of the label column, None if the table needs none, and a warning if it was inferred."""
    if label_column is not None:
        return sheet.named(label_column), []
    if sheet.find("label") is not None:
        return sheet.find("label"), []
    others = sheet.others()
    keys = {column_key(name) for name in others}
    no_label_needed = {"time", "event"} <= keys or keys & {column_key(name) for name in targets}
    if others and (all_labelled or no_label_needed):
        return None, []
    candidates = [name for name in others if column_key(name) not in _NEVER_LABELS]
    if len(candidates) != 1:
        check_spelling(sheet)
        raise CohortError(
            f"{sheet.name}: the label column is ambiguous",
            f"it could be any of {listing(candidates)}" if candidates else "no column is left that could be it",
            "Name it with --label-column, or the columns to predict with --train.target"
            if candidates
            else "Add a column label",
            code="ambiguous-label-column",
        )
    note = f"{sheet.name}: labels are taken from {candidates[0]!r}, the only possible column."
    return sheet.named(candidates[0]), [note]


# ---------------------------------------------------------------------------------------------------- merging


@dataclass(frozen=True)
class MergeReport:
    """Result of merging, as slide names."""

    added: tuple[str, ...]
    """Slides that the old cohort did not have."""
    filled: tuple[str, ...]
    """Old slides with fields filled from the new cohort."""
    columns: tuple[str, ...]
    """Columns in which that happened; with replaced labels `label` among them."""
    moved: tuple[str, ...]
    """Old slides whose file has moved."""
    only_old: tuple[str, ...]
    """Old slides that are not in the new cohort; they are kept."""


def merge_cohorts(old: Cohort, new: Cohort, *, replace_labels: bool = False) -> tuple[Cohort, MergeReport]:
    """Add to the cohort of a study: old rows are kept, their empty fields are filled, new slides are appended.

    With `replace_labels` the labels of `new` hold where both have one.
    Conflicting fields raise one CohortError that lists them all. A path may change only if the old file is gone and the
    new one exists.
    """
    newer = {row.slide: row for row in new.rows}
    rows: list[SlideRow] = []
    filled: list[str] = []
    moved: list[str] = []
    conflicts: list[str] = []
    columns: dict[str, None] = {}
    for row in old.rows:
        addition = newer.get(row.slide)
        if addition is None:
            rows.append(row)
            continue
        if _same_file(row.path, addition.path) or _only_features(row.path, addition.path):
            addition = replace(addition, path=row.path)
        elif not os.path.exists(row.path) and os.path.exists(addition.path):
            row = replace(row, path=addition.path)
            moved.append(row.slide)
        before = row
        if replace_labels and addition.label:
            row = replace(row, label=None)
        combined, disagreements = combine(row, addition)
        conflicts += disagreements
        rows.append(combined)
        if combined != before:
            filled.append(row.slide)
            columns |= _changed_columns(before, combined)
    if conflicts:
        raise CohortError(
            f"cohort.csv and the new table contradict each other: {listing(conflicts)}",
            "the right value is ambiguous",
            "Correct one of the two; to drop a row, delete it from cohort.csv",
            code="conflicting-values",
        )
    added = tuple(row for row in new.rows if row.slide not in old)
    merged = make_cohort([*rows, *added], "the merged cohort", warnings=specific_warnings(new))
    only_old = tuple(row.slide for row in old.rows if row.slide not in newer)
    return merged, MergeReport(tuple(row.slide for row in added), tuple(filled), tuple(columns), tuple(moved), only_old)


def _only_features(known: Path, added: Path) -> bool:
    """Return whether `added` has features of a slide whose file is known: it is no other place of that file."""
    return added.suffix.lower() in _FEATURE_SUFFIXES and os.path.exists(known)


def _changed_columns(before: SlideRow, after: SlideRow) -> dict[str, None]:
    """Return the columns in which two rows differ, as the keys of a dict to keep their order."""
    old, new = ({**stated_fields(row), **dict(row.extra)} for row in (before, after))
    return {name: None for name in new if new[name] != old.get(name)}


def with_slides(cohort: Cohort, folder: Path) -> tuple[Cohort, list[str]]:
    """Return a study's cohort with slides of a folder in place of feature files and of files that are gone, and notes.

    Raises CohortError where the folder has none of them, or several of a name; ConfigError where no slide is missing.
    """
    wanted = [row for row in cohort.rows if row.path.suffix.lower() in _FEATURE_SUFFIXES or not row.path.exists()]
    if not wanted:
        raise ConfigError(
            f"--slides-folder {folder.name} without a table that needs it",
            "the study's cohort.csv names the files of its slides itself",
            "Give the table with --cohort, or correct the column path of cohort.csv",
            code="slides-folder-without-table",
        )
    files: dict[str, list[FoundSlide]] = defaultdict(list)
    for slide in find_slides(_existing(folder))[0]:
        files[name_key(slide.name)].append(slide)
    found = {row.slide: group for row in wanted if (group := files.get(name_key(row.slide)))}
    if several := [f"{slide}: {listing(each.where for each in group)}" for slide, group in found.items() if group[1:]]:
        what = f"{folder.name}: several files of the same name: {listing(several)}"
        how = "Give a folder that has one of each, or correct the column path of cohort.csv"
        raise CohortError(what, "the right one is ambiguous", how, code="ambiguous-slide-file")
    if wanted and not found:
        what = f"{folder.name}: none of the study's slides: {listing([row.slide for row in wanted])}"
        raise CohortError(what, *_LOST_LABEL, code="slides-not-found")
    missing = [row.slide for row in wanted if row.slide not in found]
    notes = [f"cohort.csv: {len(found)} slides found in {folder.name}"]
    notes += [f"note: {len(missing)} slides are not in {folder.name}: {listing(missing)}"] if missing else []
    rows = [replace(row, path=found[row.slide][0].path) if row.slide in found else row for row in cohort.rows]
    return replace(cohort, rows=tuple(rows)), notes


def combine(row: SlideRow, addition: SlideRow) -> tuple[SlideRow, list[str]]:
    """Return `row` with its empty fields filled from `addition`, and the fields with conflicting values."""
    changes: dict[str, Any] = {}
    conflicts: list[str] = []
    ours = stated_fields(row)
    for name, theirs in stated_fields(addition).items():
        if theirs is None or ours[name] == theirs:
            continue
        if ours[name] is None:
            changes[name] = theirs
        elif not isinstance(theirs, Path):
            conflicts.append(f"{row.slide} ({name}: {ours[name]} or {theirs})")
        elif not _same_file(ours[name], theirs):
            conflicts.append(f"{row.slide} ({name}: another file)")
    if "patient" in changes:
        changes["patient_stated"] = True
    extra = dict(row.extra)
    spelling = {column_key(name): name for name in extra}
    for name, theirs in addition.extra:
        name = spelling.setdefault(column_key(name), name)
        if theirs and not extra.get(name):
            extra[name] = theirs
        elif theirs and extra[name] != theirs:
            conflicts.append(f"{row.slide} ({name}: {extra[name]} or {theirs})")
    return replace(row, **changes, extra=tuple(extra.items())), conflicts


def _same_file(one: Path, other: Path) -> bool:
    return one == other or os.path.realpath(one) == os.path.realpath(other)
