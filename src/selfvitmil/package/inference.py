"""Inference on one new slide with a packaged model: its bag and its tile table come in, an `Answer` goes out.

Scores and prediction come from `score_by_seeds` and `ensemble_prediction`, as for a study's heatmaps, so the numbers
are those that `evaluate` gives the same slide. What `predictions.json` and `predictions.csv` contain is here too.

K columns of probabilities: one where there are two classes, else one per class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from selfvitmil import __version__
from selfvitmil.bags import Bag
from selfvitmil.localize.detection import Lesion, find_lesions, rank_tiles
from selfvitmil.localize.heatmap import Heatmap, place_tiles
from selfvitmil.localize.scores import build_heatmap, ensemble_prediction, score_by_seeds, shown_class
from selfvitmil.package.expected import Measures, Outside
from selfvitmil.package.files import RESEARCH_ONLY, Package
from selfvitmil.package.predictions import Predictions
from selfvitmil.settings import LocalizeSettings
from selfvitmil.store.failures import Failure
from selfvitmil.tiles import TileTable

if TYPE_CHECKING:
    from selfvitmil.aggregate import Aggregator
    from selfvitmil.aggregate.scoring import TileScores

UNFITTED = "stains not fitted"
"""How a tile table's warning of it begins."""
TOP_TILES = 10
"""Tiles that `predictions.json` lists of a slide."""

Values = tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Answer:
    """What a packaged model says of one slide."""

    slide: str
    file: str
    """Name of its file."""
    seeds: Mapping[int, Values]
    """Seed -> probabilities (K,)."""
    calibrated: Values | None
    heatmap: Heatmap
    """Has the prediction: probability, decision, threshold."""
    regions: tuple[Lesion, ...]
    """Those that reach the threshold: lesions where the slide is called positive, else its highest-ranked regions."""
    outside: tuple[Outside, ...]
    """In what it differs from the training slides."""
    ood: Mapping[str, Any]
    """Its OOD score and what that is compared with."""
    warnings: tuple[str, ...]
    """Of opening, cutting and mapping it."""
    fingerprint: str = ""
    """Of the slide's content, short: tells slides of one name apart."""
    staging: str = "none"
    """Terms for the sizes of lesions: see LocalizeSettings.staging."""
    files: tuple[str, ...] = ()
    """What was written of its map, within the folder of the answers."""

    @property
    def lesions(self) -> tuple[Lesion, ...]:
        """None where the slide is not called positive."""
        return () if self.heatmap.only_ranks else self.regions

    @property
    def notes(self) -> tuple[str, ...]:
        """All that a reader should know."""
        return (*(each.text for each in self.outside), *self.warnings)


class Predictor:
    """A packaged model in memory."""

    def __init__(self, package: Package, localize: LocalizeSettings, device: str = "auto"):
        from selfvitmil.aggregate.train import BagStore, load_model

        self.package = package
        self._localize = localize
        self._models: list[Aggregator] = [load_model(folder)[0] for folder in package.model_folders]
        self._store = BagStore(device, cache_gb=0)  # a bag is seen once
        shown_class(package.classes, 0, localize.of_class)  # refused here rather than with every slide

    def predict(self, slide: str, file: str, bag: Bag, table: TileTable) -> Answer:
        """The answer for a slide; BagError where its bag does not fit the model."""
        return self.answer(slide, file, bag, table, self.scores(bag))

    def scores(self, bag: Bag) -> list[TileScores]:
        """What every seed says of the bag."""
        return score_by_seeds(self._models, bag, self._localize.score, self._store)

    def answer(self, slide: str, file: str, bag: Bag, table: TileTable, scores: Sequence[TileScores]) -> Answer:
        """From what every seed says of the bag."""
        package, expected = self.package, self.package.expected
        placement = place_tiles(bag, table)
        prediction = ensemble_prediction(
            [each.bag for each in scores], package.choice, package.classes, self._localize.of_class,
            split=package.split, part="new", seeds=package.seeds,
        )  # fmt: skip
        facts = Measures.of(table, self._store.moments(bag))
        heatmap = build_heatmap(
            slide, package.name, package.method, placement.frame, placement.coords_l0, scores, prediction,
            self._localize, details={"package": package.identity},
        )  # fmt: skip
        regions = find_lesions(heatmap, self._localize.lesion_threshold, self._localize.min_lesion_mm2)
        seeds = dict(zip(package.seeds, (each.bag.probabilities for each in scores), strict=True))
        outside = tuple(expected.outside(facts))
        # Told once, and there with what it means.
        twice = {each.text for each in outside}
        told = [
            text
            for text in table.attributes.get("warnings", ())
            if text not in twice and not (outside and text.startswith(UNFITTED))
        ]
        return Answer(
            slide, file, seeds, self._calibrated(prediction.probability), heatmap, regions, outside,
            expected.to_json(facts), (*told, *heatmap.warnings), short_fingerprint(table.fingerprint or ""),
            self._localize.staging,
        )  # fmt: skip

    def _calibrated(self, probability: Values) -> Values | None:
        calibrated = self.package.choice.calibrate(np.array([probability]))
        return None if calibrated is None else tuple(calibrated[0].tolist())


# ---------------------------------------------------------------------------------------------------- files


JSON_HEAD = {"research_only": RESEARCH_ONLY, "selfvitmil": __version__}
"""What `predictions.json` begins with."""


def short_fingerprint(fingerprint: str) -> str:
    """As much of a slide's fingerprint as a table shows."""
    return fingerprint[:16]


def add_answers(
    before: Predictions, package: Package, answers: Sequence[Answer], failures: Sequence[Failure], tried: Sequence[str]
) -> Predictions:
    """What a folder's files hold, with the answers of one call on top; `tried` are all slides of that call."""
    columns, rows = answers_table(package, answers)
    return before.updated(
        columns,
        rows,
        (package.tag, package.to_json()),
        [{"slide": answer.slide, "model": package.tag, **_told(answer)} for answer in answers],
        [{"model": package.tag, **asdict(failure)} for failure in failures],
        tried,
    )


def _told(answer: Answer) -> dict[str, Any]:
    prediction, heatmap = answer.heatmap.prediction, answer.heatmap
    shown = prediction.classes[1:] if len(prediction.classes) == 2 else prediction.classes

    def named(values: Values | None) -> dict[str, float] | None:
        return None if values is None else dict(zip(shown, values, strict=True))

    return {
        "file": answer.file,
        "fingerprint": answer.fingerprint,
        "decision": prediction.decision,
        "probability": named(prediction.probability),
        "calibrated": named(answer.calibrated),
        "max": named(prediction.max_probability),
        "bag": named(prediction.bag_probability),
        "seeds": {str(seed): named(values) for seed, values in answer.seeds.items()},
        "threshold": prediction.threshold,
        "threshold_from": prediction.threshold_from,
        "slide_mpp": heatmap.frame.slide_mpp,
        "size_l0": list(heatmap.frame.size_l0),
        "tiles": len(heatmap),
        "outside": [asdict(each) for each in answer.outside],
        "warnings": list(answer.warnings),
        "ood": dict(answer.ood),
        "map": {"shows": prediction.shown, "kind": heatmap.kind, "scale": heatmap.scale, "files": list(answer.files)},
        "top_tiles": _top_tiles(heatmap),
        "only_ranks": heatmap.only_ranks,
        "lesions": [_lesion(lesion, answer.staging) for lesion in answer.lesions],
        "highest_ranked_regions": [_lesion(region, "none") for region in answer.regions] * heatmap.only_ranks,
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


def answers_table(package: Package, answers: Sequence[Answer]) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of `predictions.csv`, a row per slide; numbers read back as the same ones, bit for bit."""
    binary = len(package.classes) == 2
    names = [""] if binary else [f"_{name}" for name in package.classes]
    streams = ("probability", "calibrated", "max", "bag")
    columns = [f"{stream}{name}" for stream in streams for name in names]
    tail = ("threshold", "threshold_from", "tiles", "lesions", "outside", "ood_score", "ood_threshold")
    tail = (*tail, "warnings", "classes", "fingerprint")
    header = ["slide", "model", "file", "decision", *columns, *tail]
    rows: list[dict[str, str]] = []
    for answer in answers:
        prediction = answer.heatmap.prediction
        values = (prediction.probability, answer.calibrated, prediction.max_probability, prediction.bag_probability)
        cells = [cell for each in values for cell in ([""] * len(names) if each is None else map(repr, each))]
        about = " ".join(dict.fromkeys(each.about for each in answer.outside))
        threshold = "" if prediction.threshold is None else repr(prediction.threshold)
        lesions = "" if answer.heatmap.only_ranks else len(answer.lesions)
        ood = ["" if answer.ood[key] is None else repr(answer.ood[key]) for key in ("score", "threshold")]
        told = (threshold, prediction.threshold_from, len(answer.heatmap), lesions, about, *ood)
        classes = " ".join(package.classes)
        row = [
            answer.slide,
            package.tag,
            answer.file,
            prediction.decision,
            *cells,
            *told,
            "; ".join(answer.notes),
            classes,
        ]
        rows.append(dict(zip(header, map(str, [*row, answer.fingerprint]), strict=True)))
    return header, rows
