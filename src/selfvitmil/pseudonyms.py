"""Names of slides and patients in shareable output: pseudonyms, and text without folder names.

`Names.slide` and `Names.patient` rename structured fields. `Names.text` processes all other text (reasons of failures,
warnings, notes, alternative texts): it reduces absolute paths to the file name and, with pseudonyms, replaces names
wherever they occur, also inside file names. `Names.apply` does so for all texts of a data structure, once, when it is
read: what renders it cannot show a name.

Pseudonyms are assigned in random order, because accession numbers follow dates. They are kept in the study's
`pseudonyms.csv`, so that later reports use the same ones. That table is the key: it is never part of shared output.
"""

from __future__ import annotations

import csv
import itertools
import random
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from html import escape, unescape
from pathlib import Path
from typing import TypeVar, cast

from selfvitmil.cohort import Cohort
from selfvitmil.errors import ArtefactError
from selfvitmil.store.failures import without_folders
from selfvitmil.store.files import write_csv
from selfvitmil.store.layout import StudyLayout

T = TypeVar("T")

HEADER = ["kind", "name", "pseudonym"]


@dataclass(frozen=True)
class Names:
    """Display names of slides and patients; by default the real ones."""

    slides: Mapping[str, str] | None = None
    """Name -> pseudonym; None keeps the names."""
    patients: Mapping[str, str] | None = None
    aliases: Mapping[str, str] | None = None
    """Further words that identify a slide (the names of its files) -> its pseudonym."""
    common: frozenset[str] = frozenset()
    """Common words of the study that a slide may also be named by (such as a label); replaced only in file names."""
    folders: tuple[str, ...] = ()
    """Known absolute folders to remove from text, including those with spaces."""

    @property
    def hidden(self) -> bool:
        return self.slides is not None

    def slide(self, name: str) -> str:
        return name if self.slides is None else self.slides.get(name, "unknown slide")

    def patient(self, name: str) -> str:
        return name if self.patients is None else self.patients.get(name, "unknown patient")

    def text(self, text: str) -> str:
        """Return any text in shareable form."""
        text = without_folders(text, self.folders)
        return text if self._pattern is None else self._renamed(unicodedata.normalize("NFC", text), self._pattern)

    def apply(self, data: T) -> T:
        """Return data with all text in shareable form: strings in dataclasses, tuples and lists, at any depth."""
        if isinstance(data, str):
            return self.text(data)  # pyright: ignore[reportReturnType]
        if isinstance(data, tuple | list):
            items = cast("tuple[object, ...]", data)
            return type(items)(self.apply(item) for item in items)  # pyright: ignore[reportReturnType]
        if is_dataclass(data) and not isinstance(data, type):
            return replace(data, **{field.name: self.apply(getattr(data, field.name)) for field in fields(data)})
        return data

    def _renamed(self, text: str, pattern: re.Pattern[str]) -> str:
        folded, places = _folded(text)
        parts: list[str] = []
        done = 0
        for found in pattern.finditer(folded):
            parts += [text[done : places[found.start()]], self._replacement[found.group()]]
            done = places[found.end()]
        return "".join([*parts, text[done:]])

    def _shows_a_name(self, text: str) -> bool:
        return self._pattern is not None and self._pattern.search(_fold(text)) is not None

    def svg(self, text: str) -> str | None:
        """Return an SVG figure in shareable form; None if a name is still visible, split over several lines."""
        parts = re.split(r"(<[^>]*>)", text)
        parts[::2] = [escape(self.text(unescape(part)), quote=False) for part in parts[::2]]
        words = " ".join(" ".join(unescape(part) for part in parts[::2]).split())
        joined = re.sub(r"<!--.*?-->|<[^>]*>", "", "".join(parts))
        if self._shows_a_name(words) or self._shows_a_name(unescape(joined)):
            return None
        return "".join(part for part in parts if not part.startswith("<!--"))

    # ------------------------------------------------------------------------------------------------ searching

    @cached_property
    def _replacement(self) -> dict[str, str]:
        both = {**(self.patients or {}), **(self.aliases or {}), **(self.slides or {})}
        return {_fold(name): pseudonym for name, pseudonym in both.items()}

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        """Match names as whole words of a folded text, longest first; `_` separates words, as it does in file names.

        Short names, numbers and common words such as labels would match everywhere. They are replaced only where they
        stand for a slide or its file: before a suffix or a colon.
        """
        names = sorted(filter(None, self._replacement), key=lambda name: (-len(name), name))
        common = {_fold(word) for word in self.common}
        weak = [name for name in names if len(name) < 4 or (name.isdigit() and len(name) < 6) or name in common]
        strong = [name for name in names if name not in set(weak)]
        forms = [f"(?:{_any_of(strong)})(?![^\\W_])"] if strong else []
        forms += [f"(?:{_any_of(weak)})(?=\\.[a-z]\\w{{1,7}}|:|_(?:red|inferno|viridis|zoom|patches))"] if weak else []
        return re.compile(f"(?<![^\\W_])(?:{'|'.join(forms)})") if forms else None


_DOTLESS = str.maketrans({"İ": "i", "ı": "i", "\u0307": ""})
"""Turkish dotted and dotless i, whose case folding depends on the locale."""


def _fold(text: str) -> str:
    """Normalize for comparison: ignores case and the encoding of accents; ß equals ss."""
    return unicodedata.normalize("NFC", text).translate(_DOTLESS).casefold()


def _folded(text: str) -> tuple[str, list[int]]:
    """Return an NFC text as `_fold` gives it, and the position in the text of each of its letters and of its end."""
    letters = [(letter, place) for place, whole in enumerate(text) for letter in whole.translate(_DOTLESS).casefold()]
    return "".join(letter for letter, _ in letters), [*(place for _, place in letters), len(text)]


def _any_of(names: Sequence[str]) -> str:
    return "|".join(re.escape(name) for name in names)


def names_of(
    study: Path,
    cohort: Cohort | None,
    *,
    pseudonyms: bool,
    slides: Iterable[str] = (),
    patients: Iterable[str] = (),
) -> Names:
    """Return the display names of a study's slides and patients, and the folders to remove from text.

    `slides` and `patients` are additional names that the cohort no longer has. New pseudonyms are added to the study's
    key.
    """
    rows = cohort.rows if cohort is not None else ()
    files = [(row, file) for row in rows for file in (row.path, row.annotation) if file is not None]
    folders = {study.resolve(), Path.home(), *(file.parent for _, file in files)}
    known = tuple(sorted((str(folder) for folder in folders if len(folder.parts) > 1), key=len, reverse=True))
    if not pseudonyms:
        return Names(folders=known)
    key = give_pseudonyms(study, [*slides, *(row.slide for row in rows)], [*patients, *(row.patient for row in rows)])
    aliases = {file.stem: key["slide"][row.slide] for row, file in files}
    aliases |= {row.path.name: f"{key['slide'][row.slide]}{row.path.suffix}" for row in rows}
    words = {word for row in rows for word in (row.label, row.split)}
    words |= {"train", "val", "test", "slide", "patient"}
    return Names(key["slide"], key["patient"], aliases, frozenset(filter(None, words)), known)


# ---------------------------------------------------------------------------------------------------- the key


def give_pseudonyms(study: Path, slides: Iterable[str], patients: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return pseudonyms by kind (`slide`, `patient`) and name; new ones are added to the study's key."""
    path = StudyLayout(study).pseudonyms
    known = _read_key(path)
    before = {kind: dict(own) for kind, own in known.items()}
    both = {"slide": sorted(set(slides)), "patient": sorted(set(patients))}
    for kind, names in both.items():
        _give(known[kind], names, kind, avoid=[*both["slide"], *both["patient"]])
    if known != before:
        rows = [[kind, *pair] for kind, own in known.items() for pair in sorted(own.items())]
        write_csv(path, [HEADER, *rows])
    return known


def _give(known: dict[str, str], names: Sequence[str], kind: str, avoid: Sequence[str]) -> None:
    new = [name for name in names if name not in known]
    random.SystemRandom().shuffle(new)
    # A pseudonym must not equal or resemble a real name: `slide-001` could be mistaken for the slide slide_001.
    prefix = next(word for word in _words(kind) if not any(name.casefold().startswith(word) for name in avoid))
    taken, number = set(known.values()), 0
    for name in new:
        number += 1
        while f"{prefix}-{number:03d}" in taken:
            number += 1
        known[name] = f"{prefix}-{number:03d}"


def _words(kind: str) -> Iterator[str]:
    """Yield possible prefixes of pseudonyms."""
    yield from {"slide": ("slide", "specimen"), "patient": ("patient", "person")}[kind]
    yield from (f"{kind[0]}{number}" for number in itertools.count(1))


def _read_key(path: Path) -> dict[str, dict[str, str]]:
    known: dict[str, dict[str, str]] = {"slide": {}, "patient": {}}
    if not path.exists():
        return known
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        if header != HEADER:
            raise ValueError(f"its columns are {', '.join(header)}")
        for kind, name, pseudonym in rows:
            known[kind][name] = pseudonym
    except (OSError, ValueError, KeyError) as error:
        raise ArtefactError(
            f"{path.name}: not a readable table of pseudonyms",
            str(error).strip("'\""),
            "Restore it from a backup; without it new reports cannot use the pseudonyms of earlier ones",
            code="unreadable-pseudonyms",
        ) from None
    return known
