"""Find the positive class of two by the meaning of their names: `normal` is negative, whatever the other class is.

Scores are probabilities of the positive class, heatmaps show evidence for it, and sensitivity is its recall, so it must
be the disease and not simply the class that is last in alphabetical order.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Literal

from selfvitmil.cohort.table import listing
from selfvitmil.errors import ConfigError

_NEGATIVE = """
    normal healthy negative neg benign control controls ctrl false absent absence wildtype wt wild unaffected uninvolved
    unremarkable unmutated intact free background low mss stable pmmr n0
    gesund negativ gutartig kontrolle unauffallig
    sain saine normale normaux negatif benin benigne temoin controle
    sano sana negativo negativa benigno benigna saudavel negativi sani benigni controllo
    gezond negatief goedaardig frisk godartad godartet zdrowy zdrowa lagodny ujemny saglikli
    норма нормальныи нормальная здоровыи здоровая отрицательныи доброкачественныи контроль
    正常 阴性 陰性 良性 健康 정상 음성
"""
_NEGATING = """
    no not non none nothing without
    kein keine nein ohne aucun aucune sans ninguno ninguna sin nao nenhum nenhuma sem nessuno nessuna senza
    geen nee zonder ingen inga nej nei utan brak nie bez yok hayir нет без 无 無 否 なし 없음
"""
NEGATIVE_WORDS = frozenset(_NEGATIVE.split())
"""Words that make a class the negative one, in lower case and without accents; MSS is microsatellite stable, pMMR
proficient mismatch repair, N0 without node metastasis."""
NEGATIONS = frozenset(_NEGATING.split())
"""Words that do so as the first word of a name: `no metastasis`, but not `carcinoma of no special type`."""
NEGATIVE_PREFIXES = ("non", "no", "un")
"""Prefixes that negate the other class: `nontumor` with `tumor`."""
NEGATIVE_SYMBOLS = {"0": "", "-": "", "n": "yjosp", "f": "t"}
"""Complete names that are negative, if the other name is one of these letters, or with any other name."""

Source = Literal["setting", "meaning", "order"]


@dataclass(frozen=True)
class ClassOrder:
    """Class names in the order of their indices, and for two classes how the positive one, the last, was found."""

    names: tuple[str, ...]
    source: Source

    @property
    def reason(self) -> str:
        """How the positive class of two was found, for the user."""
        negative, positive = self.names[0], self.names[-1]
        flag = f"--train.positive {negative!r} swaps them"
        if self.source == "setting":
            return "as train.positive says"
        if self.source == "meaning":
            return f"{negative!r} means negative; {flag}"
        return f"GUESSED from the order of the names; {flag}, if {positive!r} is the negative class"


def order_classes(classes: tuple[str, ...], positive: str | None) -> ClassOrder:
    """Order the classes of a cohort so that the positive one of two comes last.

    `positive` names it; without it the meaning of the names decides (`is_negative_name`), and if both or neither are
    negative the cohort's own order. More than two classes keep their order. ConfigError if `positive` is not a class.
    """
    if positive is not None:
        if positive not in classes or len(classes) != 2:
            binary = "" if len(classes) == 2 else ", and only one of two is positive"
            why = f"the classes are {listing(classes)}{binary}"
            raise ConfigError(
                f"train.positive {positive!r}",
                why,
                "Name one of two classes, or leave it out",
                code="unknown-positive-class",
            )
        return ClassOrder(tuple(sorted(classes, key=positive.__eq__)), "setting")
    if len(classes) != 2:
        return ClassOrder(classes, "order")
    first, second = (is_negative_name(name, other) for name, other in (classes, classes[::-1]))
    if first == second:
        return ClassOrder(classes, "order")
    return ClassOrder(classes if first else (classes[1], classes[0]), "meaning")


def is_negative_name(name: str, other: str = "") -> bool:
    """Return whether a class name means the negative class; `other` is the name of the other class.

    True for a name with a word of `NEGATIVE_WORDS` (`Normal`, `KRAS wild-type`, `tumor-free`), one that begins with a
    word of `NEGATIONS` (`no tumour`), one that negates the other (`nontumor` with `tumor`, `ER-` with `ER+`), and
    `NEGATIVE_SYMBOLS`. Words that both names share do not count (`low grade` and `high grade`).
    """
    plain, plain_other = _plain(name), _plain(other)
    if plain in NEGATIVE_SYMBOLS:
        return not NEGATIVE_SYMBOLS[plain] or (len(plain_other) == 1 and plain_other in NEGATIVE_SYMBOLS[plain])
    if plain.endswith("-") and plain_other == f"{plain[:-1]}+":
        return True
    words, joined = _words(name), "".join(_words(name))
    own = [word for word in words if word not in _words(other)]
    if joined in NEGATIVE_WORDS or not NEGATIVE_WORDS.isdisjoint(own) or (words and words[0] in NEGATIONS):
        return True
    return bool(plain_other) and any(joined == prefix + "".join(_words(other)) for prefix in NEGATIVE_PREFIXES)


def _plain(name: str) -> str:
    """Return the name in lower case, without accents and surrounding spaces."""
    decomposed = unicodedata.normalize("NFKD", name.strip().casefold())
    kept = "".join(letter for letter in decomposed if not unicodedata.combining(letter))
    return unicodedata.normalize("NFC", kept)


def _words(name: str) -> list[str]:
    return re.findall(r"[^\W_]+", _plain(name))
