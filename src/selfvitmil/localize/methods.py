"""Heatmaps of several models scored on the same slides: what each covers, and what it marks wrongly.

In come the `LesionScores` of every model, out go a table for terminal, Markdown and csv, and JSON. Every model has the
threshold that its own validation maps chose. Differences to the baseline are paired: the same resamples of slides for
both, so that slides which are hard for all do not blur them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from selfvitmil.cohort.table import listing
from selfvitmil.errors import MetricError
from selfvitmil.evaluate.comparison_table import holm
from selfvitmil.evaluate.method_metrics import interval_json, read_interval
from selfvitmil.formatting import markdown_list, markdown_table, number, p_value, percent, shorten, with_limits
from selfvitmil.localize.lesion_metrics import LesionCase
from selfvitmil.localize.lesion_scores import SCORES, LesionScores, limits, record_csv
from selfvitmil.metrics import Interval
from selfvitmil.metrics.intervals import bootstrap_p_value

COLUMNS = {
    "froc": "FROC",
    "coverage": "coverage",
    "lesions_touched": "lesions\ntouched",
    "dice": "Dice",
    "false_mm2_positive": "false mm2\npositive",
    "false_mm2_negative": "false mm2\nnegative",
    "called_mm2_negative": "of these\ncalled",
    "tile_auc": "tile\nAUC",
    "tile_ap": "tile\nAP",
    "hit_rate": "hit\nrate",
}
"""Scores that the table shows, and their heads."""
TESTED = ("froc", "coverage", "false_mm2_negative")
"""Scores whose p-values the table shows; csv and JSON have all."""


@dataclass(frozen=True)
class Difference:
    """A score of a model minus the baseline's on the same slides."""

    interval: Interval
    p_value: float
    """Two-sided, from the bootstrap."""
    holm_p_value: float
    """Corrected for the number of models that are compared with the baseline."""


@dataclass(frozen=True, eq=False)
class LesionTable:
    """Models beside each other."""

    scores: Mapping[str, LesionScores]
    """By the name of the row."""
    baseline: str
    differences: Mapping[str, Mapping[str, Difference]]
    """Row, score -> difference; without the baseline, and without scores that one of the two has not."""

    def cells(self, *, intervals: bool = False) -> list[list[str]]:
        """The header and a line of cells for each row; headers may have two lines."""
        return lesion_cells(self.to_json(), intervals=intervals)

    def notes(self) -> list[str]:
        """What stands below the table."""
        return lesion_notes(self.to_json())

    def markdown(self) -> str:
        """The table with intervals, and its notes as a list below."""
        return f"{markdown_table(self.cells(intervals=True))}\n\n{markdown_list(self.notes())}\n"

    def csv(self) -> str:
        """A line for every row with all scores, limits and differences."""
        return record_csv([self._record(name) for name in self.scores])

    def _record(self, name: str) -> dict[str, Any]:
        scores, tests = self.scores[name], self.differences.get(name, {})
        record: dict[str, Any] = {"maps_of": name, "model": scores.about["model"], "mapped": scores.about["mapped"]}
        record |= {"threshold": scores.threshold.value, "threshold_from": scores.threshold.words}
        for score, found in scores.intervals.items():
            record |= {score: found and found.value, f"{score}_low": found and found.low}
            record |= {f"{score}_high": found and found.high}
        record["baseline"] = self.baseline
        for score in SCORES:
            test = tests.get(score)
            record |= {f"{score}_difference": test and test.interval.value}
            record |= {f"{score}_difference_low": test and test.interval.low}
            record |= {f"{score}_difference_high": test and test.interval.high}
            record |= {f"{score}_p": test and test.p_value, f"{score}_p_holm": test and test.holm_p_value}
        return record

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data without NaN."""
        return {
            "format_version": 1,
            "baseline": self.baseline,
            "methods": {name: scores.to_json() for name, scores in self.scores.items()},
            "differences": {
                name: {
                    score: {
                        **interval_json(test.interval),
                        "p_value": test.p_value,
                        "holm_p_value": test.holm_p_value,
                    }
                    for score, test in tests.items()
                }
                for name, tests in self.differences.items()
            },
        }


def lesion_cells(told: Mapping[str, Any], *, intervals: bool = False) -> list[list[str]]:
    """Return header and rows of the table in a `lesions.json` of several models; headers may have two lines."""
    methods: Mapping[str, Any] = told["methods"]
    found = (score for own in methods.values() for score in own["scores"].values() if score)
    level = next((f" [{percent(score['level'])}]" for score in found), "")
    rest = level if intervals else ""
    header = ["maps of", f"FROC{level}", *(f"{head}{rest}" for head in list(COLUMNS.values())[1:])]
    header += ["threshold", *(f"p\n{COLUMNS[name].replace(chr(10), ' ')}" for name in TESTED)]
    rows = [_line(name, own, told["differences"].get(name, {}), intervals) for name, own in methods.items()]
    return [header, *rows]


def _line(name: str, own: Mapping[str, Any], tests: Mapping[str, Any], intervals: bool) -> list[str]:
    found = {score: read_interval(own["scores"].get(score)) for score in COLUMNS}
    return [
        name if intervals else shorten(name, 24),
        *(with_limits(each) if intervals or score == "froc" else number(each.value) for score, each in found.items()),
        f"{own['threshold']['value']:.3g}",
        *(p_value(tests[score]["p_value"]) if score in tests else "-" for score in TESTED),
    ]


def lesion_notes(told: Mapping[str, Any]) -> list[str]:
    """Return what stands below that table."""
    methods: Mapping[str, Any] = told["methods"]
    first = next(iter(methods.values()))
    slides = f"{first['slides']['positive']} positive and {first['slides']['negative']} negative test slides"
    notes = [
        f"Maps of {slides} beside their outlines; FROC in the frame {first['froc_frame']!r}.",
        *(f"{head.replace(chr(10), ' ')}: {SCORES[score]}." for score, head in COLUMNS.items()),
    ]
    if len(methods) > 1:
        notes.append(f"p: paired bootstrap over slides against {told['baseline']}, two-sided, not corrected.")
    origins = {name: own["threshold"]["from"] for name, own in methods.items()}
    if len(set(origins.values())) == 1:
        notes.append(f"Threshold of every row: {origins.popitem()[1]}.")
    else:
        notes += [f"Threshold of {name}: {text}." for name, text in origins.items()]
    return notes + list(dict.fromkeys(text for own in methods.values() for text in own["warnings"]))


def common_cases(
    cases: Mapping[str, Sequence[LesionCase]],
) -> tuple[dict[str, list[LesionCase]], tuple[str, ...]]:
    """Of every model the cases of those slides that all have, in the order of the first; and who lacks which."""
    slides = {name: {case.slide: case for case in own} for name, own in cases.items()}
    everywhere = set.intersection(*map(set, slides.values())) if slides else set()
    anywhere = {slide for own in slides.values() for slide in own}
    first = next(iter(cases.values()), ())
    kept = {name: [own[case.slide] for case in first if case.slide in everywhere] for name, own in slides.items()}
    warnings = [
        f"{name} has no map of {listing(missing)}: left out for all"
        for name, own in slides.items()
        if (missing := sorted(anywhere - own.keys()))
    ]
    return kept, tuple(warnings)


def compare_lesions(scores: Mapping[str, LesionScores], baseline: str) -> LesionTable:
    """Rows in the given order, each but the baseline compared with it; MetricError unless scored alike."""
    if baseline not in scores:
        raise MetricError(f"no maps of the baseline {baseline!r}", f"there are those of {listing(scores)}", "Name one")
    _check_alike(scores)
    base, found = scores[baseline], {name: own for name, own in scores.items() if name != baseline}
    differences: dict[str, dict[str, Difference]] = {name: {} for name in found}
    for place, score in enumerate(SCORES):
        pairs: dict[str, tuple[Interval, float]] = {}
        for name, own in found.items():
            value = float(own.values[place] - base.values[place])
            drawn = own.drawn[:, place] - base.drawn[:, place]
            if np.isfinite(value):
                pairs[name] = limits(value, drawn, base.evaluate.confidence), bootstrap_p_value(drawn)
        corrected = holm([p for _, p in pairs.values()])
        for (name, (interval, p)), holm_p in zip(pairs.items(), corrected, strict=True):
            differences[name][score] = Difference(interval, p, holm_p)
    return LesionTable(scores, baseline, differences)


def _check_alike(scores: Mapping[str, LesionScores]) -> None:
    names = list(scores)
    first = scores[names[0]]
    told = ("froc_frame", "point_radius_um", "point_min", "tumour_share")
    for name in names[1:]:
        own = scores[name]
        same_slides = [(s.slide, s.positive, s.patient) for s in own.slides] == [
            (s.slide, s.positive, s.patient) for s in first.slides
        ]
        same_rules = own.evaluate == first.evaluate and all(own.about[key] == first.about[key] for key in told)
        if not (same_slides and same_rules):
            raise MetricError(
                f"heatmaps of {names[0]} and of {name} were scored on different slides or in different ways",
                "side by side they would look comparable",
                "Score the heatmaps of the slides that all models have (common_cases), with the same settings",
            )
