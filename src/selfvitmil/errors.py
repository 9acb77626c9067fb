"""Every exception that selfvitmil raises on purpose, as one tree.

An error tells its reader three things: *what* happened (with the file), *why* that stops us and *how* to go on.
They are kept apart, because a batch job writes them into separate columns of `failures.csv`. All three are positional
arguments of the exception, so that errors survive the pickling between worker processes.
"""

from __future__ import annotations

from collections.abc import Iterable


class SelfVitMilError(Exception):
    """Base of all errors of this package; catch this one to catch them all."""

    exit_status = 3
    """What the command line ends with: something that was asked for does not exist."""
    transient = False
    """Whether trying again may help. To be set where the cause does not tell: pickling loses it, OpenSlide has none."""

    def __init__(self, what: str, why: str = "", how: str = ""):
        super().__init__(what, why, how)
        self.what = what
        self.why = why
        self.how = how

    @property
    def reason(self) -> str:
        """What and why in one line, as it stands in `failures.csv`."""
        return f"{self.what}, {self.why}" if self.why else self.what

    def __str__(self) -> str:
        stop = "" if self.reason.endswith("?") else "."
        return f"{self.reason}{stop} {self.how}" if self.how else self.reason


class ConfigError(SelfVitMilError):
    """A setting, flag or argument that cannot be meant."""

    exit_status = 2


class CohortError(SelfVitMilError):
    """A table of slides that contradicts itself or the files it names."""


class CohortProblems(CohortError):
    """Several things that are wrong with a cohort, to be put right together."""

    def __init__(self, what: str, why: str = "", how: str = "", problems: tuple[SelfVitMilError, ...] = ()):
        super().__init__(what, why, how)
        self.problems = problems


def raise_problems(problems: Iterable[SelfVitMilError], whole: str) -> None:
    """Raise the only problem, or one error that lists all problems of `whole`; do nothing where there is none."""
    found = tuple(problems)
    if len(found) == 1:
        raise found[0]
    if found:
        lines = "".join(f"\n  {number}. {problem}" for number, problem in enumerate(found, start=1))
        raise CohortProblems(f"{whole}: {len(found)} problems{lines}", problems=found)


class SlideError(SelfVitMilError):
    """A slide that cannot be opened or read."""


class MissingMppError(SlideError):
    """A slide that does not say how large its pixels are."""


class AnnotationError(SelfVitMilError):
    """An annotation file that cannot be read or makes no sense."""


class TissueError(SelfVitMilError):
    """No tissue found, or a tissue mask that does not fit its slide."""


class StainError(SelfVitMilError):
    """Stains that cannot be estimated from the given pixels."""


class EncoderError(SelfVitMilError):
    """An encoder that cannot be loaded, or does not fit its tiles."""


class BagError(SelfVitMilError):
    """A feature file that cannot be read, or a bag that nothing can be learned from."""


class MetricError(SelfVitMilError):
    """Numbers from which a score cannot be computed."""


class ArtefactError(SelfVitMilError):
    """A file of the study that cannot be written, or read back, or is damaged."""


class LockError(ArtefactError):
    """Another process works on the same study."""


class EngineError(SelfVitMilError):
    """The workers cannot be started or reached."""


class SealedLabelError(SelfVitMilError):
    """A test label that was asked for before the final scoring, or a training that was begun after it."""
