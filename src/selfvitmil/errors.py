"""The exceptions that selfvitmil raises on purpose, as one tree under `SelfVitMilError`.

An error has three texts for people: *what* failed (with the file), *why*, and *how* to fix it. They are kept separate
because `failures.csv` has a column for each. Code uses the class and `code` instead, a short kebab-case identifier of
the kind of failure (`"no-mpp"`), which stays the same when the wording changes; docs/reference/errors.md lists them.
The texts are positional arguments and `code` is an attribute, so errors survive pickling between worker processes.
"""

from __future__ import annotations

from collections.abc import Iterable


class SelfVitMilError(Exception):
    """Base class of all errors of this package."""

    exit_status = 3
    """Exit status of the command line: a requested output does not exist."""
    transient = False
    """Whether a retry may succeed. Set where the cause is not known: pickling loses it, OpenSlide has none."""

    def __init__(self, what: str, why: str = "", how: str = "", *, code: str = ""):
        super().__init__(what, why, how)
        self.what = what
        self.why = why
        self.how = how
        self.code = code

    @property
    def reason(self) -> str:
        """What failed and why in one line, as in `failures.csv`."""
        return f"{self.what}, {self.why}" if self.why else self.what

    def __str__(self) -> str:
        stop = "" if self.reason.endswith("?") else "."
        return f"{self.reason}{stop} {self.how}" if self.how else self.reason


class ConfigError(SelfVitMilError):
    """An invalid setting, flag or argument."""

    exit_status = 2


class CohortError(SelfVitMilError):
    """A cohort table that contradicts itself or the files it names, or that cannot be split as asked for."""

    exit_status = 2


class CohortProblems(CohortError):
    """Several problems of one cohort, reported together."""

    def __init__(
        self,
        what: str,
        why: str = "",
        how: str = "",
        problems: tuple[SelfVitMilError, ...] = (),
        *,
        code: str = "several-problems",
    ):
        super().__init__(what, why, how, code=code)
        self.problems = problems


def raise_problems(problems: Iterable[SelfVitMilError], whole: str) -> None:
    """Raise the only problem, or one `CohortProblems` that lists all problems of `whole`; return if there is none."""
    found = tuple(problems)
    if len(found) == 1:
        raise found[0]
    if found:
        lines = "".join(f"\n  {number}. {problem}" for number, problem in enumerate(found, start=1))
        raise CohortProblems(f"{whole}: {len(found)} problems{lines}", problems=found)


class SlideError(SelfVitMilError):
    """A slide that cannot be opened or read."""


class MissingMppError(SlideError):
    """A slide without a microns-per-pixel value."""


class AnnotationError(SelfVitMilError):
    """An annotation file that cannot be read or is invalid."""


class TissueError(SelfVitMilError):
    """No tissue found, or a tissue mask that does not fit its slide."""


class StainError(SelfVitMilError):
    """Stain vectors that cannot be estimated or applied."""


class EncoderError(SelfVitMilError):
    """An encoder that cannot be loaded or does not fit its tiles."""


class BagError(SelfVitMilError):
    """A feature file that cannot be read, or a bag that cannot be used for training."""


class MetricError(SelfVitMilError):
    """Input from which a metric cannot be computed."""


class ArtefactError(SelfVitMilError):
    """A file of the study that cannot be written or read, or is damaged."""


class LockError(ArtefactError):
    """Another process is working on the same study."""


class EngineError(SelfVitMilError):
    """Workers that cannot be started or reached."""


class HeldOutLabelError(SelfVitMilError):
    """A test label requested before the final evaluation, or training started after it."""
