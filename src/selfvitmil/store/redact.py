"""Absolute paths removed from texts, so that messages, tables and reports can be mailed."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

_WORD = r"""(?:[^\s"'/<>]|(?<=\w)'(?=\w))+"""
"""Part of a folder's name without blanks; with the apostrophe of O'Brien, not with quotes around a path."""
_FILE = r"[^\s/]*\.(?:svs|svslide|tiff?|ndpi|scn|mrxs|bif|czi|dcm|vm[su]|h5|pt|png|jpe?g|json|geojson|csv|xml|toml)"
"""Where a path ends, though blanks and slashes may follow."""
_PAIRS = r"\d/\d(?= of )|(?:and|either)/or|[uµ]m/px|input/output|i/o|n/a|w/o|(?:tiles|slides|steps|[kmg]b)/s"
"""Words with a slash that are no path."""
_FOLDER = rf"(?:(?!{_FILE},? ){_WORD}(?<![;:]) +(?!(?:{_PAIRS})\b(?!\.\w|/))){{0,5}}{_WORD}"
"""A folder's name, which may have a few blanks: to cut too much does less harm than to tell whose home it is."""
_START = r"(?<![\w./~)\]}<>%*])"
"""Before the slash that an absolute path begins with: not in tiles/a.h5, ~/x, </p>, f(x)/2."""
_ROOTS = re.compile(rf"{_START}/(?:home|Users|root|tmp|mnt|media|data|var|srv|scratch)(?![\w-]|\.\w)/*")
"""What may stand for a whole path of one folder."""


def without_folders(text: str, known: Iterable[str | Path] = ()) -> str:
    """Return a text with every absolute path shortened to the name of its file.

    The ends of a path with spaces are ambiguous, so folders that are `known` are removed exactly, also where they stand
    alone. URLs (https://...), relative paths and words such as and/or stay.
    """
    text = _paths(tuple(map(str, known))).sub(lambda found: found["address"] or "", text)
    return _ROOTS.sub("", text)


def _spellings(folder: str) -> Iterator[str]:
    """Of an absolute folder other than the root; macOS takes accents apart."""
    folder = folder.rstrip("/")
    if folder.startswith("/"):
        yield from (folder, *(unicodedata.normalize(form, folder) for form in ("NFC", "NFD")))


@lru_cache(maxsize=32)
def _paths(known: tuple[str, ...]) -> re.Pattern[str]:
    """Addresses, which stay, and the folders of absolute paths, which do not."""
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
