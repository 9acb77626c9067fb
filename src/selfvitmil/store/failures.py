"""`failures.csv`: the slides that a stage could not process, with the reason and what to do.

Messages, tables and reports may be mailed, so `without_folders` removes absolute paths from their text."""

from __future__ import annotations

import csv
import errno
import itertools
import os
import re
import sys
import traceback
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field
from functools import lru_cache
from pathlib import Path

from selfvitmil.errors import ArtefactError, SelfVitMilError
from selfvitmil.store.files import WRITE_REMEDIES, write_csv, write_error
from selfvitmil.store.layout import StudyLayout


@dataclass(frozen=True, order=True)
class Failure:
    """A slide that a stage could not process."""

    slide: str
    stage: str
    reason: str
    remedy: str
    code: str = field(default="", compare=False)
    """Of the error (`SelfVitMilError.code`); not in the file."""

    @classmethod
    def of(cls, slide: str, stage: str, error: BaseException) -> Failure:
        """Return the failure for any exception; an unexpected one is shown with its type and the line of our code.

        Files are named without their folders, since `failures.csv` may be mailed.
        """
        if isinstance(error, SelfVitMilError):  # of which many hold a library's words
            return cls(slide, stage, _one_line(error.reason), _one_line(error.how), error.code)
        if isinstance(error, OSError):
            remedy = _REMEDIES_ANY.get(
                error.errno or 0, "Check the file and its drive, then run the same command again"
            )
            return cls(slide, stage, _reason_of_os_error(error), remedy)
        return cls(slide, stage, _unexpected(error), "Please report this, with the slide's format")


_REMEDIES_ANY = {
    **WRITE_REMEDIES,
    errno.EACCES: "Correct its permissions",
    errno.EPERM: "Correct its permissions",
    errno.ENOENT: "Check whether it was moved or renamed, or its drive is not mounted",
}
"""For an OSError that may come from reading or from writing."""


def _reason_of_os_error(error: OSError) -> str:
    if not error.strerror:  # a library's own words
        return _unexpected(error)
    words = _one_line(f"{error.strerror[:1].lower()}{error.strerror[1:]}")
    if isinstance(error.filename, str | bytes):
        return f"{Path(os.fsdecode(error.filename)).name}: {words}"
    return f"{words}{_place(error)}"


def _unexpected(error: BaseException) -> str:
    text = _one_line(str(error))
    return f"{type(error).__name__}{': ' if text else ''}{text}{_place(error)}"


def _one_line(text: str) -> str:
    return " ".join(without_folders(text).split())


def _place(error: BaseException) -> str:
    """Return the innermost line of our code that the exception passed, as ` (tiles.py:123)`."""
    package = Path(__file__).parents[1]
    lines = [
        f" ({Path(frame.filename).relative_to(package).as_posix()}:{frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(package)
    ]
    return lines[-1] if lines else ""


FAILURE_COLUMNS = ("slide", "stage", "reason", "what to do", "so also missing in")
"""The last one names stages that lack the slide because of this failure; files of earlier versions do not have it."""


def read_failures(study: Path) -> list[Failure]:
    """Return the failures in `failures.csv`, of each slide in every stage; none without such a file.

    Raises ArtefactError where it is another table.
    """
    path = StudyLayout(study).failures
    if not path.exists():
        return []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header, *rows = [tuple(row) for row in csv.reader(file) if row] or [FAILURE_COLUMNS]
        if header not in (FAILURE_COLUMNS, FAILURE_COLUMNS[:4]):
            raise ValueError(f"its columns are {', '.join(filter(None, header))}")
        for row in rows:
            if len(row) != len(header):
                raise ValueError(f"a row has {len(row)} cells under {len(header)} columns")
    except (OSError, ValueError, csv.Error) as error:
        why = (error.strerror or "") if isinstance(error, OSError) else str(error)
        raise ArtefactError(
            "failures.csv: not a readable table of failures",
            why,
            "Move it away: the next command writes it anew",
            code="invalid-failures-table",
        ) from None
    return [failure for row in rows for failure in _unfolded(*row)]


def _unfolded(slide: str, stage: str, reason: str, remedy: str, later: str = "") -> Iterator[Failure]:
    yield Failure(slide, stage, reason, remedy)
    because = reason if is_consequence(reason) else f"{slide}: {BECAUSE}{stage}"
    for other in later.split("; ") if later else ():
        yield Failure(slide, other, because, remedy)


BECAUSE = "not done, because of its failure in "
MISSING_INPUT = ("no tile table", "no feature file", BECAUSE)
"""What a failure says whose cause is that an earlier stage did not do the slide."""


def is_consequence(reason: str) -> bool:
    return any(words in reason for words in MISSING_INPUT)


def fold_failures(failures: Iterable[Failure]) -> list[tuple[Failure, tuple[str, ...]]]:
    """Return the failures that have a cause of their own, each with the stages that lack the slide because of it.

    Failures of one slide with equal reasons are one. A slide that is only missing keeps its first failure.
    """
    by_slide: dict[str, list[Failure]] = {}
    for failure in failures:
        by_slide.setdefault(failure.slide, []).append(failure)
    folded: list[tuple[Failure, tuple[str, ...]]] = []
    for own in by_slide.values():
        causes = [each for each in own if not is_consequence(each.reason)] or own[:1]
        distinct = list({each.reason: each for each in reversed(causes)}.values())[::-1]
        stages = [each.stage for each in own if each not in distinct]
        folded += [(each, tuple(stages) if number == 0 else ()) for number, each in enumerate(distinct)]
    return folded


def record_failures(study: Path, stage: str, tried: Iterable[str], failures: Iterable[Failure]) -> None:
    """Update `failures.csv` for the slides that `stage` has just tried; other rows stay. Each cause has one row.

    An unreadable file, edited by somebody, is renamed and a line on stderr says so: neither it nor the new failures
    are lost.
    """
    tried = set(tried)
    path = StudyLayout(study).failures
    try:
        before = read_failures(study)
    except ArtefactError as error:
        before = []
        _put_aside(path, error)
    kept = [row for row in before if row.stage != stage or row.slide not in tried]
    rows = fold_failures(sorted({*kept, *failures}))
    if not rows and not path.exists():
        return
    write_csv(path, [FAILURE_COLUMNS, *((*astuple(row)[:4], "; ".join(later)) for row, later in rows)])


def _put_aside(path: Path, error: ArtefactError) -> None:
    places = (path.with_name(f"{path.stem}-unreadable-{k}{path.suffix}") for k in itertools.count(1))
    aside = next(place for place in places if not place.exists())
    try:
        path.rename(aside)
    except OSError as trouble:
        raise write_error(path, trouble) from trouble
    print(f"{error.reason}. It is now {aside.name}, and a new one is written", file=sys.stderr)


# ---------------------------------------------------------------------------------------------------- no folder names

_WORD = r"""(?:[^\s"'/<>]|(?<=\w)'(?=\w))+"""
"""Part of a folder's name without spaces; with the apostrophe of O'Brien, not with quotes around a path."""
_FILE = r"[^\s/]*\.(?:svs|svslide|tiff?|ndpi|scn|mrxs|bif|czi|dcm|vm[su]|h5|pt|png|jpe?g|json|geojson|csv|xml|toml)"
"""Where a path ends, although spaces and slashes may follow."""
_PAIRS = r"\d/\d(?= of )|(?:and|either)/or|[uµ]m/px|input/output|i/o|n/a|w/o|(?:tiles|slides|steps|[kmg]b)/s"
"""Words with a slash that are not a path."""
_FOLDER = rf"(?:(?!{_FILE},? ){_WORD}(?<![;:]) +(?!(?:{_PAIRS})\b(?!\.\w|/))){{0,5}}{_WORD}"
"""A folder's name, which may have a few spaces: removing too much does less harm than revealing a user's name."""
_START = r"(?<![\w./~)\]}<>%*])"
"""Before the slash that an absolute path begins with: not in tiles/a.h5, ~/x, </p>, f(x)/2."""
_ROOTS = re.compile(rf"{_START}/(?:home|Users|root|tmp|mnt|media|data|var|srv|scratch)(?![\w-]|\.\w)/*")
"""Folders that are a whole path by themselves."""


def without_folders(text: str, known: Iterable[str | Path] = ()) -> str:
    """Return a text with every absolute path shortened to the name of its file.

    The ends of a path with spaces are ambiguous, so folders that are `known` are removed exactly, also where they stand
    alone. URLs (https://...), relative paths and words such as and/or stay.
    """
    text = _paths(tuple(map(str, known))).sub(lambda found: found["address"] or "", text)
    return _ROOTS.sub("", text)


def _spellings(folder: str) -> Iterator[str]:
    """Yield the Unicode forms of an absolute folder other than the root; macOS decomposes accents."""
    folder = folder.rstrip("/")
    if folder.startswith("/"):
        yield from (folder, *(unicodedata.normalize(form, folder) for form in ("NFC", "NFD")))


@lru_cache(maxsize=32)
def _paths(known: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of URLs, which stay, and of the folders of absolute paths, which are removed."""
    spelt = sorted({form for folder in known for form in _spellings(folder)}, key=len, reverse=True)
    one_of_known = rf"(?:\bfile://|{_START})(?=/)(?:{'|'.join(map(re.escape, spelt))})" if spelt else r"(?!)"
    name = r"""(?=[^\s"'/\\])"""  # of the file, which stays
    forms = (
        r"""(?P<address>\b(?!file:)[a-z][\w+.-]*://[^\s"'<>,;]*)""",
        rf"""(?<=")/[^"\n]*/{name}""",  # between quotes: all up to the last slash
        rf"""(?<=')/(?:[^'\n]|'(?=\w))*/{name}""",
        rf"{one_of_known}/+(?:{_FOLDER}/+)*{name}",
        # By itself, and whole: neither /data/slides2 nor "/data/slides old/x" means /data/slides.
        rf"{one_of_known}/*(?![\w/-]|\.\w|(?: +{_WORD}){{1,5}}/)",
        rf"(?:\bfile:/+|{_START}(?<!:)/+|(?<=:)/(?!/))(?:{_FOLDER}/+)+{name}",
        rf"""(?:\b[a-z]:|(?<!\S)\\)\\(?:[^\\/:*?"'<>|\n]+\\)+{name}""",  # from Windows
    )
    return re.compile("|".join(forms), re.IGNORECASE)
