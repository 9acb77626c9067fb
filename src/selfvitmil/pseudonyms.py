"""How slides and patients are called in what may be mailed, and no folder of anybody's machine in any text.

Structured fields are renamed by `Names.slide` and `Names.patient`. `Names.text` then sees every other text
(reasons of failures, warnings, notes, alternatives of pictures): it cuts absolute paths down to the file's name and,
with pseudonyms, replaces names wherever they stand, in file names too.

Pseudonyms are given in random order, because the order of accession numbers is that of dates, and kept in the study's
`pseudonyms.csv`, so that later reports use the same ones. That table is the key: it never goes where the page goes.
"""

from __future__ import annotations

import csv
import itertools
import random
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape, unescape
from pathlib import Path

from selfvitmil.cohort import Cohort
from selfvitmil.errors import ArtefactError
from selfvitmil.store.files import write_csv
from selfvitmil.store.layout import StudyLayout
from selfvitmil.store.redact import without_folders

HEADER = ["kind", "name", "pseudonym"]


@dataclass(frozen=True)
class Names:
    """What slides and patients are called; by default as they are."""

    slides: Mapping[str, str] | None = None
    """Name -> pseudonym; None: names stay."""
    patients: Mapping[str, str] | None = None
    aliases: Mapping[str, str] | None = None
    """Further words that give a slide away (names of its files) -> its pseudonym."""
    common: frozenset[str] = frozenset()
    """Words of the study that a slide may be called by chance, as its label: replaced only where a file is meant."""
    folders: tuple[str, ...] = ()
    """Absolute folders that are known and must not be seen, blanks in them included."""

    @property
    def hidden(self) -> bool:
        return self.slides is not None

    def slide(self, name: str) -> str:
        return name if self.slides is None else self.slides.get(name, "unknown slide")

    def patient(self, name: str) -> str:
        return name if self.patients is None else self.patients.get(name, "unknown patient")

    def text(self, text: str) -> str:
        """A text of whatever origin, fit to be mailed."""
        text = without_folders(text, self.folders)
        return text if self._pattern is None else self._renamed(unicodedata.normalize("NFC", text), self._pattern)

    def _renamed(self, text: str, pattern: re.Pattern[str]) -> str:
        folded, places = _folded(text)
        parts, done = [], 0
        for found in pattern.finditer(folded):
            parts += [text[done : places[found.start()]], self._replacement[found.group()]]
            done = places[found.end()]
        return "".join([*parts, text[done:]])

    def _shows_a_name(self, text: str) -> bool:
        return self._pattern is not None and self._pattern.search(_fold(text)) is not None

    def svg(self, text: str) -> str | None:
        """A figure with its texts made fit; None where a name would still show, broken into lines."""
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
        """Names as whole words of a folded text, the longest first; `_` parts words, as it does in names of files.

        Short ones, numbers and words such as a label would be found everywhere. They are replaced where they stand
        for a slide or its file: before a suffix or a colon.
        """
        names = sorted(filter(None, self._replacement), key=lambda name: (-len(name), name))
        common = {_fold(word) for word in self.common}
        weak = [name for name in names if len(name) < 4 or (name.isdigit() and len(name) < 6) or name in common]
        strong = [name for name in names if name not in set(weak)]
        forms = [f"(?:{_any_of(strong)})(?![^\\W_])"] if strong else []
        forms += [f"(?:{_any_of(weak)})(?=\\.[a-z]\\w{{1,7}}|:|_(?:red|inferno|viridis|zoom|patches))"] if weak else []
        return re.compile(f"(?<![^\\W_])(?:{'|'.join(forms)})") if forms else None


_DOTLESS = str.maketrans({"İ": "i", "ı": "i", "\u0307": ""})
"""Turkish letters of which the other case is i, I or i with a second dot, depending on whom one asks."""


def _fold(text: str) -> str:
    """As names are compared: neither case nor the way accents are encoded matters, and ß is ss."""
    return unicodedata.normalize("NFC", text).translate(_DOTLESS).casefold()


def _folded(text: str) -> tuple[str, list[int]]:
    """A text in NFC as `_fold` gives it, and for each of its letters, and its end, the place in the text."""
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
    """How the slides and patients of a study are called, and which folders nobody may see.

    `slides` and `patients` are further ones, which the cohort no longer has. New pseudonyms go into the study's key.
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
    """Pseudonyms by kind (`slide`, `patient`) and name: those of the study's key, and new ones, which it then holds."""
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
    # A pseudonym must be nobody's name, nor look like one: `slide-001` would be taken for the slide slide_001.
    prefix = next(word for word in _words(kind) if not any(name.casefold().startswith(word) for name in avoid))
    taken, number = set(known.values()), 0
    for name in new:
        number += 1
        while f"{prefix}-{number:03d}" in taken:
            number += 1
        known[name] = f"{prefix}-{number:03d}"


def _words(kind: str) -> Iterator[str]:
    """What pseudonyms may begin with."""
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
            "Bring it back from a copy; without it new reports cannot use the names of earlier ones",
        ) from None
    return known
