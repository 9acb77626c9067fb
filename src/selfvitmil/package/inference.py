"""Inference with a packaged model: a slide's bag and tile table come in, a `PredictedSlide` goes out.

Scores and prediction come from `score_by_seeds` and `ensemble_prediction`, as for a study's heatmaps, so the numbers
are those that `evaluate` gives the same slide.

`PredictionFiles` are `predictions.csv` and `predictions.json` of an output folder, with the predictions of all calls.
A call adds its rows and replaces those of the same slide by the same model; all others stay, with columns that
somebody added. Both files are read before any work is done: one that cannot be read is an error and is left as it is.
Calls into one folder exclude each other by the folder's lock, so no row is lost between reading and writing.

K columns of probabilities: one where there are two classes, else one per class.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from selfvitmil import __version__
from selfvitmil.bags import Bag
from selfvitmil.cohort.table import name_key
from selfvitmil.errors import ArtefactError
from selfvitmil.localize.detection import Lesion, find_lesions, rank_tiles
from selfvitmil.localize.heatmap import Heatmap, place_tiles
from selfvitmil.localize.scores import (
    build_heatmap,
    check_shown,
    ensemble_prediction,
    mean_probabilities,
    outcome_prediction,
    score_by_seeds,
    shown_class,
)
from selfvitmil.outcomes import Outcome
from selfvitmil.package.files import RESEARCH_ONLY, Package
from selfvitmil.package.ood import OODFinding, SlideStatistics
from selfvitmil.settings import LocalizeSettings
from selfvitmil.store.failures import Failure
from selfvitmil.store.files import read_json, write_csv, write_text
from selfvitmil.tiles import TileTable

if TYPE_CHECKING:
    from selfvitmil.aggregate import Aggregator
    from selfvitmil.aggregate.base import TileScores

UNFITTED = "stains not fitted"
"""How a tile table's warning of it begins."""
TOP_TILES = 10
"""Tiles that `predictions.json` lists of a slide."""

Values = tuple[float, ...]


@dataclass(frozen=True, eq=False)
class PredictedSlide:
    """Prediction of a packaged model for one slide."""

    slide: str
    file: str
    """Name of its file."""
    seeds: Mapping[int | str, Values]
    """Seed -> probabilities (K,), or the scores of another outcome than classes; of an ensemble of several splits
    `fold0/seed0` and so on."""
    score: Values
    """Their mean."""
    decision: str
    """In words; empty where the outcome has no groups."""
    calibrated: Values | None
    heatmap: Heatmap
    """Has the prediction: probability, decision, threshold."""
    regions: tuple[Lesion, ...]
    """Those that reach the threshold: lesions where the slide is called positive, else its highest-ranked regions."""
    findings: tuple[OODFinding, ...]
    """How it differs from the training slides."""
    ood: Mapping[str, Any]
    """Its OOD score and what that is compared with."""
    warnings: tuple[str, ...]
    """Of opening, tiling and localizing it."""
    fingerprint: str = ""
    """Of the slide's content, short: distinguishes slides of one name."""
    staging: str = "none"
    """Terms for the sizes of lesions: see LocalizeSettings.staging."""
    prediction_set: tuple[str, ...] | None = None
    """Classes that cannot be excluded, the likeliest first; None where the package has no threshold for that."""
    files: tuple[str, ...] = ()
    """Files of its heatmap, relative to the output folder."""

    @property
    def lesions(self) -> tuple[Lesion, ...]:
        """None where the slide is not called positive."""
        return () if self.heatmap.only_ranks else self.regions

    @property
    def notes(self) -> tuple[str, ...]:
        """All that a reader should know."""
        return (*(each.text for each in self.findings), *self.warnings)


class Predictor:
    """A packaged model in memory."""

    def __init__(self, package: Package, localize: LocalizeSettings, device: str = "auto"):
        from selfvitmil.aggregate.joint import part_of
        from selfvitmil.aggregate.train import BagStore, load_model

        self.package = package
        self._localize = localize
        loaded = (load_model(folder)[0] for folder in package.model_folders)
        self._models: list[Aggregator] = [part_of(module, package.target_place) for module in loaded]
        self._store = BagStore(device, cache_gb=0)  # a bag is seen once
        if package.outcome is not None:  # refused here rather than with every slide
            check_shown(package.outcome, localize.of_class)
        else:
            shown_class(package.classes, 0, localize.of_class)

    def predict(self, slide: str, file: str, bag: Bag, table: TileTable) -> PredictedSlide:
        """Return the prediction for a slide. Raises BagError where its bag does not fit the model."""
        return self.combine(slide, file, bag, table, self.scores(bag))

    def scores(self, bag: Bag) -> list[TileScores]:
        """Return the tile scores and slide probabilities of every seed."""
        return score_by_seeds(self._models, bag, self._localize.score, self._store)

    def combine(
        self, slide: str, file: str, bag: Bag, table: TileTable, scores: Sequence[TileScores]
    ) -> PredictedSlide:
        """Return the prediction of the ensemble from the scores of every seed."""
        package, ood = self.package, self.package.ood
        placement = place_tiles(bag, table)
        bags, of_class = [each.bag for each in scores], self._localize.of_class
        place: dict[str, Any] = {"split": package.split, "part": "new", "seeds": package.seeds * package.folds}
        if package.outcome is None:
            prediction = ensemble_prediction(bags, package.choice, package.classes, of_class, **place)
        else:
            prediction = outcome_prediction(bags, package.choice, package.validation_scores, of_class, **place)
        statistics = SlideStatistics.of(table, self._store.moments(bag))
        heatmap = build_heatmap(
            slide, package.name, package.method, placement.frame, placement.coords_l0, scores, prediction,
            self._localize, details={"package": package.identity},
        )  # fmt: skip
        regions = find_lesions(heatmap, self._localize.lesion_threshold, self._localize.min_lesion_mm2)
        names = package.seeds if package.folds == 1 else package.model_names
        seeds: dict[int | str, Values] = dict(zip(names, (each.bag.probabilities for each in scores), strict=True))
        findings = tuple(ood.findings(statistics))
        # A warning of the tile table that a finding repeats is left out.
        repeated = {each.text for each in findings}
        warnings = [
            text
            for text in table.attributes.get("warnings", ())
            if text not in repeated and not (findings and text.startswith(UNFITTED))
        ]
        score = mean_probabilities(list(seeds.values()))
        assert score is not None
        decision = prediction.decision
        if package.outcome is not None:
            decision = package.outcome.decision_words(np.array(score), package.choice.threshold)
        calibrated = None if package.outcome is not None else self._calibrated(prediction.probability)
        return PredictedSlide(
            slide, file, seeds, score, decision, calibrated, heatmap, regions, findings,
            ood.to_json(statistics), (*warnings, *heatmap.warnings), short_fingerprint(table.fingerprint or ""),
            self._localize.staging, None if package.outcome is not None else package.set_of_slide(score),
        )  # fmt: skip

    def _calibrated(self, probability: Values) -> Values | None:
        calibrated = self.package.choice.calibrate(np.array([probability]))
        return None if calibrated is None else tuple(calibrated[0].tolist())


# ---------------------------------------------------------------------------------------------------- files


FORMAT_VERSION = 2
"""Of predictions.json. Since 2 it holds the slides of several calls and models."""
CSV, JSON = "predictions.csv", "predictions.json"
KEY = ("slide", "model")

Row = Mapping[str, str]
Entry = Mapping[str, Any]


@dataclass(frozen=True)
class PredictionFiles:
    """Contents of the two files."""

    columns: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    """Of predictions.csv."""
    models: Mapping[str, Entry] = field(default_factory=dict[str, Entry])
    """Model -> its entry in predictions.json."""
    slides: tuple[Entry, ...] = ()
    failures: tuple[Entry, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> PredictionFiles:
        """Read the files of a folder; empty where there are none. Raises ArtefactError where one cannot be read."""
        try:
            columns, rows = _read_csv(folder / CSV)
        except (OSError, ValueError, csv.Error) as error:
            raise _unreadable(CSV, error) from None
        try:
            content = _read_json(folder / JSON)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(JSON, error) from None
        return cls(columns, rows, **content)

    def updated(
        self,
        columns: Sequence[str],
        rows: Sequence[Row],
        model: tuple[str, Entry],
        slides: Sequence[Entry],
        failures: Sequence[Entry],
        tried: Sequence[str],
    ) -> PredictionFiles:
        """Return a copy with the predictions of one call by one model added; `tried` are all slides of that call."""
        kept = [each for each in self.failures if each["model"] != model[0] or each["slide"] not in tried]
        return replace(
            self,
            columns=_joined_columns(self.columns, columns),
            rows=_replaced(self.rows, rows),
            models={**self.models, model[0]: model[1]},
            slides=_replaced(self.slides, slides),
            failures=(*kept, *failures),
        )

    def write(self, folder: Path, head: Entry) -> None:
        """Write both files, each atomically; `head` begins predictions.json."""
        cells = [[row.get(column, "") for column in self.columns] for row in self.rows]
        write_csv(folder / CSV, [self.columns, *cells])
        write_text(folder / JSON, self.json_text(head))

    def json_text(self, head: Entry) -> str:
        content = {"format_version": FORMAT_VERSION, **head, "models": self.models}
        content |= {"slides": self.slides, "failures": self.failures}
        return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def contents(self, slide: str) -> set[tuple[str, str]]:
        """Return (name, fingerprint) of the predicted slides with this name, ignoring case."""
        return {
            (row["slide"], row.get("fingerprint", "")) for row in self.rows if name_key(row["slide"]) == name_key(slide)
        }


def _replaced(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """`before` with the entries of the same slide and model replaced in their places, and new ones at the end.

    Fields that only the earlier entry has stay: somebody may have added a column of remarks.
    """
    entries = {_key(each): each for each in before}
    for each in now:
        entries[_key(each)] = {**entries.get(_key(each), {}), **each}
    return tuple(entries.values())


def _key(entry: Mapping[str, Any]) -> tuple[str, str]:
    return entry["slide"], entry["model"]


def _joined_columns(before: Sequence[str], now: Sequence[str]) -> tuple[str, ...]:
    """All columns; those that are new follow the one that they follow in their own table."""
    columns = list(before)
    for place, column in enumerate(now):
        if column not in columns:
            at = columns.index(now[place - 1]) + 1 if place else 0
            columns.insert(at, column)
    return tuple(columns)


def _read_csv(path: Path) -> tuple[tuple[str, ...], tuple[Row, ...]]:
    if not path.exists():
        return (), ()
    lines = list(csv.reader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""), strict=True))
    if not lines or not all(column in lines[0] for column in KEY):
        raise ValueError(f"its first line does not name the columns {' and '.join(KEY)}, separated by commas")
    columns, *rows = [line for line in lines if any(line)]
    if len(set(columns)) < len(columns):
        raise ValueError("two of its columns have the same name")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(columns):
            raise ValueError(f"row {number} has {len(row)} cells under {len(columns)} columns")
    content = tuple(dict(zip(columns, row, strict=True)) for row in rows)
    if len({_key(row) for row in content}) < len(content):
        raise ValueError("it has two rows of one slide by one model")
    return tuple(columns), content


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = read_json(path)
    if content["format_version"] != FORMAT_VERSION:
        raise ValueError(f"its format is version {content['format_version']}, this program writes {FORMAT_VERSION}")
    for each in (*content["slides"], *content["failures"]):
        _key(each)
    return {
        "models": dict(content["models"]),
        "slides": tuple(content["slides"]),
        "failures": tuple(content["failures"]),
    }


def _unreadable(name: str, error: Exception) -> ArtefactError:
    why = (error.strerror or "") if isinstance(error, OSError) else str(error).strip("'\"")
    return ArtefactError(
        f"{name}: the predictions of earlier calls cannot be read",
        f"{why}; it was not overwritten",
        f"Correct it, move {CSV} and {JSON} away, or name another --out",
        code="unreadable-predictions",
    )


JSON_HEAD = {"research_only": RESEARCH_ONLY, "selfvitmil": __version__}
"""What `predictions.json` begins with."""


def short_fingerprint(fingerprint: str) -> str:
    """As much of a slide's fingerprint as a table shows."""
    return fingerprint[:16]


def add_predictions(
    before: PredictionFiles,
    package: Package,
    slides: Sequence[PredictedSlide],
    failures: Sequence[Failure],
    tried: Sequence[str],
) -> PredictionFiles:
    """Return the contents of a folder's files with the predictions of one call added; `tried` are its slides."""
    columns, rows = predictions_table(package, slides)
    return before.updated(
        columns,
        rows,
        (package.tag, package.to_json()),
        [{"slide": slide.slide, "model": package.tag, **_to_json(slide, package.outcome)} for slide in slides],
        [{"model": package.tag, **asdict(failure)} for failure in failures],
        tried,
    )


def _to_json(slide: PredictedSlide, outcome: Outcome | None) -> dict[str, Any]:
    prediction, heatmap = slide.heatmap.prediction, slide.heatmap
    shown = prediction.classes[1:] if len(prediction.classes) == 2 else prediction.classes
    if outcome is not None:
        shown = outcome.score_names

    def named(values: Values | None) -> dict[str, float] | None:
        return None if values is None else dict(zip(shown, values, strict=True))

    scores: dict[str, Any] = {"score": named(slide.score), "in_words": prediction.value_words}
    if outcome is None:
        scores = {
            "probability": named(prediction.probability),
            "calibrated": named(slide.calibrated),
            "max": named(prediction.max_probability),
            "bag": named(prediction.bag_probability),
            **({} if slide.prediction_set is None else {"prediction_set": list(slide.prediction_set)}),
        }
    elif not outcome.evidence_per_column:
        scores["higher_than_validation"] = prediction.probability[0]
    return {
        "file": slide.file,
        "fingerprint": slide.fingerprint,
        "decision": slide.decision,
        **scores,
        "seeds": {str(seed): named(values) for seed, values in slide.seeds.items()},
        "threshold": prediction.threshold,
        "threshold_from": prediction.threshold_from,
        "slide_mpp": heatmap.frame.slide_mpp,
        "size_l0": list(heatmap.frame.size_l0),
        "tiles": len(heatmap),
        "outside": [asdict(each) for each in slide.findings],
        "warnings": list(slide.warnings),
        "ood": dict(slide.ood),
        "map": {"shows": prediction.shown, "kind": heatmap.kind, "scale": heatmap.scale, "files": list(slide.files)},
        "top_tiles": _top_tiles(heatmap),
        "only_ranks": heatmap.only_ranks,
        "lesions": [_lesion(lesion, slide.staging) for lesion in slide.lesions],
        "highest_ranked_regions": [_lesion(region, "none") for region in slide.regions] * heatmap.only_ranks,
    }


def _top_tiles(heatmap: Heatmap) -> list[dict[str, Any]]:
    """The tiles that score highest, with their positions in level-0 pixels."""
    return [
        {
            "x_l0": int(heatmap.coords_l0[row, 0]),
            "y_l0": int(heatmap.coords_l0[row, 1]),
            "size_l0": heatmap.frame.extent_l0,
            "score": float(heatmap.score[row]),
            **{name: float(values[row]) for name, values in heatmap.columns.items()},
        }
        for row in rank_tiles(heatmap)[:TOP_TILES]
    ]


def _lesion(lesion: Lesion, staging: str) -> dict[str, Any]:
    return {
        "score": lesion.score,
        "mean_score": lesion.mean_score,
        "area_mm2": lesion.area_mm2,
        "diameter_um": lesion.diameter_um,
        "tile_um": lesion.tile_um,
        "size": lesion.size_words(staging),
        "centroid_l0": list(lesion.centroid_l0),
        "peak_l0": list(lesion.peak_l0),
        "tiles": len(lesion.rows),
    }


def predictions_table(package: Package, slides: Sequence[PredictedSlide]) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of `predictions.csv`, a row per slide; numbers read back as the same ones, bit for bit."""
    outcome, binary = package.outcome, len(package.classes) == 2
    names = [""] if binary else [f"_{name}" for name in package.classes]
    streams = ("probability", "calibrated", "max", "bag")
    columns = [f"{stream}{name}" for stream in streams for name in names]
    if outcome is not None:
        columns = [*outcome.score_names, "higher_than_validation"]
    coverage = ""
    if any(slide.prediction_set is not None for slide in slides) and package.set_threshold[0] is not None:
        columns += ["prediction_set", "set_coverage"]  # an empty set has a coverage, no set has none
        coverage = repr(round(1 - package.set_threshold[0].alpha, 6))
    tail = ("threshold", "threshold_from", "tiles", "lesions", "outside", "ood_score", "ood_threshold")
    tail = (*tail, "warnings", "classes", "fingerprint")
    header = ["slide", "model", "file", "decision", *columns, *tail]
    rows: list[dict[str, str]] = []
    for slide in slides:
        prediction = slide.heatmap.prediction
        values = (prediction.probability, slide.calibrated, prediction.max_probability, prediction.bag_probability)
        cells = [cell for each in values for cell in ([""] * len(names) if each is None else map(repr, each))]
        if outcome is not None:
            cells = [*map(repr, slide.score), "" if outcome.evidence_per_column else repr(prediction.probability[0])]
        if slide.prediction_set is not None:
            cells += ["; ".join(slide.prediction_set), coverage]
        about = " ".join(dict.fromkeys(each.about for each in slide.findings))
        cut = prediction.threshold if outcome is None else package.choice.threshold
        threshold = "" if cut is None else repr(cut)
        lesions = "" if slide.heatmap.only_ranks else len(slide.lesions)
        ood = ["" if slide.ood[key] is None else repr(slide.ood[key]) for key in ("score", "threshold")]
        decided = (threshold, prediction.threshold_from, len(slide.heatmap), lesions, about, *ood)
        classes = " ".join(package.classes) if outcome is None else outcome.words
        row = [
            slide.slide,
            package.tag,
            slide.file,
            slide.decision,
            *cells,
            *decided,
            "; ".join(slide.notes),
            classes,
        ]
        rows.append(dict(zip(header, map(str, [*row, slide.fingerprint]), strict=True)))
    return header, rows
