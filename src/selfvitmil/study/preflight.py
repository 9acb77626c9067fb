"""What a run must not begin with: each check raises, before anything is touched, an error that says so.

The rules: files of a newer version are left alone; an encoder, which took hours, is neither overwritten nor used in
place of another one; a slide that an encoder has seen is not tested on unnoticed; labels that cannot be learned from,
and methods, options or maps that cannot be had, are found before the slides are worked on, by the very functions that
would refuse them later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil.cohort import Cohort
from selfvitmil.cohort.files import is_slide
from selfvitmil.cohort.table import listing
from selfvitmil.errors import ArtefactError, ConfigError, SelfVitMilError, raise_problems
from selfvitmil.settings import StudySettings
from selfvitmil.store.layout import CONFIG_FILE, StudyLayout
from selfvitmil.study.folder import CohortSource

if TYPE_CHECKING:
    from selfvitmil.evaluate import Trial


def check_study(study: Path, source: CohortSource) -> None:
    """ConfigError where the folder is not one to work in."""
    if study.exists() and not study.is_dir():
        raise ConfigError(f"{study.name}: this is a file", "a study is a folder", "Name a folder, new or old")
    if source.cohort is not None or StudyLayout(study).cohort.exists():
        return
    inside = sorted(path.name for path in study.iterdir() if not path.name.startswith(".")) if study.exists() else []
    what = "is empty" if study.exists() else "does not exist yet"
    if inside:
        what = f"holds {listing(inside, 4)} and no cohort.csv"
    how = "Give --cohort with a folder of slides or a table of them; `selfvitmil demo` makes slides to try with"
    if any(map(is_slide, inside)):
        how = f"A study is a folder of its own: name a new one, and give this one with --cohort {study.name}"
    raise ConfigError(
        f"{study.name}: this folder {what}", "so there are no slides to work on, and nothing was done", how
    )


def check_formats(study: Path) -> None:
    """ArtefactError when a newer version of this program has worked on the study: ours would undo its work."""
    from selfvitmil import bags, tiles
    from selfvitmil.encoder import files as encoders
    from selfvitmil.localize import heatmap

    layout = StudyLayout(study)
    known = (
        (layout.tiles_folder, "*/*.h5", tiles.FORMAT_VERSION),
        (layout.bags_folder, "*/features_*/*.h5", bags.FORMAT_VERSION),
        (layout.heatmaps_folder, "*/*.h5", heatmap.FORMAT_VERSION),
        (layout.encoders_folder, f"*/{CONFIG_FILE}", encoders.FORMAT_VERSION),
    )
    for folder, pattern, ours in known:
        for path in sorted(folder.glob(pattern)):
            version = _format_of(path)
            if version is not None and version > ours:
                raise ArtefactError(
                    f"{layout.name(path)} has format version {version}",
                    f"a newer selfvitmil wrote it, and this one, which knows version {ours}, would undo its work",
                    "Update selfvitmil, or start a new study; nothing was done",
                )


def _format_of(path: Path) -> int | None:
    """The format version of a file of ours; None of any other, and of a damaged one, which its stage will tell of."""
    from selfvitmil.untrusted import open_hdf5

    try:
        if path.suffix == ".json":
            return json.loads(path.read_text(encoding="utf-8")).get("selfvitmil", {}).get("format_version")
        with open_hdf5(path) as file:
            version: Any = file.attrs.get("format_version")
            return None if version is None else int(version)
    except (OSError, ValueError):
        return None


def check_labels(cohort: Cohort, settings: StudySettings) -> Trial:
    """The splits that learning will use, tried out: days of work on slides must not end at labels that do not do."""
    from selfvitmil.cohort.table import order_classes
    from selfvitmil.evaluate import Cases, hold_out_test_labels, make_splits
    from selfvitmil.evaluate.dataset import Case, check_two_classes

    labelled = cohort.select(labelled=True)
    try:
        if not labelled.rows:
            how = "Give --labels with a table of slides and their labels"
            raise ConfigError("the cohort has no labelled slide", "there is nothing to learn from", how)
        check_two_classes(set(cohort.classes), "the cohort")
        classes = order_classes(cohort.classes, settings.train.positive).names
        found = [Case(row.slide, row.patient, row.path, "", classes.index(row.label or "")) for row in labelled.rows]
        cases = Cases(tuple(found), classes, cohort, 0, "", "")
        return hold_out_test_labels(cases, make_splits(cases, settings.train, settings.evaluate), settings.evaluate)
    except SelfVitMilError as error:
        how = f"{error.how}. To go as far as that needs no labels, add --until embed".removeprefix(". ")
        raise_problems([_nothing_done(error, how), *cohort.missing_problems], "the cohort")
        raise


def check_files(study: Path, cohort: Cohort) -> None:
    """CohortError where not one slide is there, which is a wrong path; single ones fail later, alone."""
    there = any(row.path.exists() for row in cohort.rows)
    if not there and not any(StudyLayout(study).tiles_folder.glob("*/*.h5")):
        raise_problems([_nothing_done(each, each.how) for each in cohort.missing_problems], "the cohort")


@contextmanager
def nothing_done() -> Iterator[None]:
    """Add to an error raised inside that nothing was done."""
    try:
        yield
    except SelfVitMilError as error:
        raise _nothing_done(error, error.how) from None


def _nothing_done(error: SelfVitMilError, how: str) -> SelfVitMilError:
    return type(error)(error.what, error.why, f"{how}. Nothing was done" if how else "Nothing was done")


def annotated_slides(cohort: Cohort) -> list[str]:
    """Test slides with annotated lesions, which heatmaps are scored against."""
    return [row.slide for row in cohort.rows if row.annotation is not None and row.split in ("test", None)]
