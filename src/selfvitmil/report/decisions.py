"""Tables of decision curves and prediction sets of a method, and of settings that were tuned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from selfvitmil.formatting import number, percent, value_and_limits
from selfvitmil.report.render import Shown, Table

SETS = "Prediction sets contain the true class"
SET_WORDS = (
    "A prediction set holds all classes that cannot be excluded. Its threshold comes from validation slides, which "
    "also chose the epoch, so that coverage may be a little lower than asked for; sets of one class are decisions, "
    "larger ones say that the model does not know."
)
CURVE_WORDS = (
    "At a threshold probability in this range decisions by the model are of more use than treating everyone or no one."
)
NAMES = {"decision_curve": "Decision curve", "prediction_sets": "Prediction sets"}


@dataclass(frozen=True)
class DecisionsData:
    """Prediction sets and decision curves of one method."""

    table: Table
    notes: tuple[str, ...]
    missing: tuple[str, ...]
    """What there is not, and why."""
    charts: tuple[Shown, ...] = ()


def decisions_data(info: Mapping[str, Any] | None, charts: tuple[Shown, ...] = ()) -> DecisionsData | None:
    """Return the section of the `decisions` in metrics.json; None where there are none."""
    if not info:
        return None
    rows: list[tuple[str, str, str]] = []
    notes: list[str] = []
    sets, curve = info.get("prediction_sets"), info.get("decision_curve")
    if sets:
        wanted = percent(float(sets["wanted"]))
        rows.append((f"{SETS} (asked for: {wanted})", *value_and_limits(sets["coverage"])))
        rows += [
            (f"{SETS}, {name}", *value_and_limits(own)) for name, own in sets["per_class"].items() if own is not None
        ]
        rows.append(("Classes in a set, on average", *value_and_limits(sets["mean_size"])))
        rows.append(("Sets of one class", number(sets["single"]), ""))
        rows.append(("Empty sets", number(sets["empty"]), ""))
        notes.append(SET_WORDS)
    if curve:
        for name, own in curve["better_than_all_and_none"].items():
            found = "none" if own is None else f"{own['low']:.2f} to {own['high']:.2f}"
            rows.append((f"Useful threshold probabilities of {name}", found, ""))
        notes.append(CURVE_WORDS)
    missing = [f"{_named(key)}: {why}" for key, why in (info.get("reasons") or {}).items()]
    return DecisionsData(Table.of(("", "", "interval"), rows), tuple(notes), tuple(missing), charts)


def _named(key: str) -> str:
    name, _, split = key.partition(" of ")
    return NAMES.get(name, name) + (f" of {split}" if split else "")


@dataclass(frozen=True)
class TuningData:
    """Settings that cross-validation chose, for each split, among which others."""

    words: str
    table: Table


def tuning_data(info: Mapping[str, Any]) -> TuningData | None:
    """Return the section of `tuned` in metrics.json: a row per point, a column per split, the chosen one marked."""
    tuned: Mapping[str, Any] = info.get("tuned") or {}
    if not tuned:
        return None
    from selfvitmil.evaluate.tuning import point_words

    first = next(iter(tuned.values()))
    points = list(dict.fromkeys(point_words(each["settings"]) for own in tuned.values() for each in own["tried"]))
    columns = {split: _scores(own, point_words) for split, own in tuned.items()}
    rows = [(point, *(scores.get(point, "") for scores in columns.values())) for point in points]
    words = (
        f"Mean {first['metric']} in {first['folds']}-fold cross-validation on training and validation slides alone, by "
        f"patient; * is the choice of the split. Test slides took no part."
    )
    return TuningData(words, Table.of(("settings", *columns), rows))


def _scores(own: Mapping[str, Any], point_words: Callable[[Mapping[str, Any]], str]) -> dict[str, str]:
    return {
        point_words(each["settings"]): ("diverged" if each["mean"] is None else number(each["mean"]))
        + (" *" if place == own["chosen"] else "")
        for place, each in enumerate(own["tried"])
    }
