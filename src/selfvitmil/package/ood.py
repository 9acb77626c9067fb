"""What a model expects of a slide, measured on the slides it was trained on; and when a slide is out of distribution.

Five kinds of measures are taken of a slide: tiles, colour and strength of the two stains, and the distance of its
embeddings. Each is compared with the training slides on a logarithmic scale, in units of their spread; the largest of
these deviations is the slide's OOD score. A slide is flagged when its score exceeds a threshold that is calibrated on
the validation slides, which took no part in what they are compared with, as a new slide does not: with n of them, the
ceil((n + 1) (1 - RATE))-th smallest score. Of slides like the validation slides at most `RATE` are then flagged,
whatever the distribution, all measures together (split conformal prediction: Vovk et al. 2005; Papadopoulos et al.
2002). With fewer than 1 / RATE - 1 validation slides no threshold can promise that; then it is the largest score of
validation and training slides, but at least what a measure whose logarithm is normal exceeds at a fifth of the rate
(Student's t; there are about five measures), and every warning says that the rate cannot be guaranteed.

Two facts need no calibration and are reported too: microns per pixel unlike those of all training slides, and pixels
coarser than the tiles.

The distance of a slide is how far its embeddings lie from those of the training slides, as the Fréchet distance of two
normal distributions with independent dimensions, each in units of the training spread:

    distance^2 = mean over dimensions of ((mean - training mean)^2 + (spread - training spread)^2) / training spread^2

It needs no more of a slide than mean and spread of its embeddings. A training slide is measured against all others, for
it would look nearer than a new one if it were part of what it is compared with. Nothing here names a slide.

S slides, D dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfvitmil.settings import upsampling_warning
from selfvitmil.stain import StainFit
from selfvitmil.tiles import TileTable

Floats = NDArray[np.float64]

RATE = 0.05
"""Of slides like those of the training, those that are flagged at most."""
MPP_SLACK = 0.1
"""Relative difference of microns per pixel beyond those of the training slides that goes unnoticed."""
LEAST_SPREAD = 0.05
"""Of a logarithm: slides that are alike by chance must not make a scale by which the next one is far away."""
LEAST_SPREAD_TILES = math.log(2)
"""The same for tiles: how much tissue lies on a slide differs from block to block, also where all training slides are
of one size, and says little about whether its tiles look like theirs. Only a multiple of it counts."""
STAINS = ("hematoxylin", "eosin")
TINY = 1e-9
"""What the logarithm of 0 is taken of."""


@dataclass(frozen=True, eq=False)
class SlideStatistics:
    """What is measured of one slide."""

    slide_mpp: float
    num_tiles: int
    stain: StainFit | None
    """None where stains are not fitted by slide."""
    mean_D: Floats
    """Of its embeddings."""
    squares_D: Floats
    """Sum of their squared deviations from that mean."""
    num_embeddings: int

    @property
    def std_D(self) -> Floats:
        return np.sqrt(self.squares_D / self.num_embeddings)

    @classmethod
    def of(cls, table: TileTable, moments: Any) -> SlideStatistics:
        """From its tile table and the moments of its bag (`BagStore.moments`)."""
        mean_D, squares_D = (values.cpu().numpy().astype(np.float64) for values in (moments.mean_D, moments.squares_D))
        return cls(table.slide_mpp, len(table), table.stain, mean_D, squares_D, moments.count)


@dataclass(frozen=True)
class Usual:
    """A measure of the training slides."""

    log_mean: float
    log_spread: float
    """Standard deviation of its logarithm."""
    two_sided: bool
    """Whether small values are unusual too."""
    median: float
    least: float
    most: float

    def deviation(self, value: float) -> float:
        """How far a value lies from the usual, in units of the spread."""
        z = (math.log(max(value, TINY)) - self.log_mean) / self.log_spread
        return abs(z) if self.two_sided else max(z, 0.0)


@dataclass(frozen=True)
class OODFinding:
    """One way in which a slide differs from those that a model was trained on."""

    about: str
    """`mpp`, `tiles`, `stain` or `features`."""
    text: str


@dataclass(frozen=True, eq=False)
class TrainingDistribution:
    """What the slides of a training were like."""

    num_train: int
    num_val: int
    tile_mpp: float
    mpp_range: tuple[float, float]
    """Microns per pixel of the training slides."""
    num_fitted: int | None
    """Training slides whose stains could be fitted; None where stains are not fitted by slide."""
    stains: Mapping[str, Floats]
    """Name of a stain -> mean (3,) of its optical density, as a unit vector."""
    usual: Mapping[str, Usual]
    """By measure: `tiles`, `distance`, `<stain> colour` (degrees from the mean), `<stain> strength`."""
    mean_D: Floats
    std_D: Floats
    rate: float
    """Of slides like the validation slides, those that the threshold flags at most."""
    threshold: float = math.inf
    scores: tuple[float, ...] = ()
    """OOD scores of the validation slides in rising order, of which the threshold comes."""

    @property
    def guaranteed(self) -> bool:
        """Whether there are enough validation slides with a finite score for the rate."""
        threshold = conformal_threshold(self.scores, self.rate)
        return threshold is not None and math.isfinite(threshold)

    # ------------------------------------------------------------------------------------------------ a new slide

    def distance_of(self, slide: SlideStatistics) -> float:
        """How far the slide's embeddings lie from those of the training slides."""
        return distance(slide.mean_D, slide.std_D, self.mean_D, self.std_D)

    def values(self, slide: SlideStatistics) -> dict[str, float]:
        """The slide's measures, by the names of `usual`."""
        found: dict[str, float] = {"tiles": slide.num_tiles, "distance": self.distance_of(slide)}
        if slide.stain is not None and slide.stain.fitted:
            for k, name in enumerate(STAINS):
                if name in self.stains:
                    found[f"{name} colour"] = angle_deg(slide.stain.stains[:, k], self.stains[name])
                    found[f"{name} strength"] = float(slide.stain.max_concentration[k])
        return {name: value for name, value in found.items() if name in self.usual}

    def deviations(self, slide: SlideStatistics) -> dict[str, float]:
        """By measure, how unusual the slide is; infinite for stains that cannot be fitted where others' can."""
        found = {name: self.usual[name].deviation(value) for name, value in self.values(slide).items()}
        if self._lacks_stains(slide):
            found["stain fit"] = math.inf
        return found

    def score(self, slide: SlideStatistics) -> float:
        """The OOD score: the largest deviation."""
        return max(self.deviations(slide).values(), default=0.0)

    def findings(self, slide: SlideStatistics) -> list[OODFinding]:
        """Return the ways in which the slide differs from the training slides, those above the threshold."""
        found, values = self._mpp(slide), self.values(slide)
        for name, deviation in self.deviations(slide).items():
            if deviation > self.threshold:
                what = self._words(name, values, slide)
                about = "features" if name == "distance" else "tiles" if name == "tiles" else "stain"
                found.append(OODFinding(about, f"{what}: {self.scale_words(deviation)}"))
        return found

    def scale_words(self, score: float) -> str:
        """A score with its threshold and what that means."""
        return f"OOD score {score:.1f}, {self.threshold_words()}"

    def threshold_words(self) -> str:
        """The threshold of the OOD score and the rate at which it flags slides."""
        if self.guaranteed:
            rate = f"flags {self.rate:.0%} of slides like those of the training"
        else:
            rate = (
                f"above all of {self.num_train} training and {self.num_val} validation slides; a rate of "
                f"{self.rate:.0%} cannot be guaranteed with fewer than {num_needed(self.rate)} validation slides whose "
                "stains could be fitted"
            )
        return f"threshold {self.threshold:.1f} ({rate})"

    def to_json(self, slide: SlideStatistics) -> dict[str, Any]:
        """OOD score of a slide and what it is compared with, for a report of it."""
        return {
            "score": _finite(self.score(slide)),
            "threshold": _finite(self.threshold),
            "rate": self.rate,
            "guaranteed": self.guaranteed,
            "calibrated_on": len(self.scores),
            "deviations": {name: _finite(value) for name, value in self.deviations(slide).items()},
            "distance": self.distance_of(slide),
        }

    def _lacks_stains(self, slide: SlideStatistics) -> bool:
        if slide.stain is None or slide.stain.fitted or self.num_fitted is None:
            return False
        return self.num_fitted > (1 - self.rate) * self.num_train

    def _mpp(self, slide: SlideStatistics) -> list[OODFinding]:
        mpp, (least, most) = slide.slide_mpp, self.mpp_range
        if warning := upsampling_warning(mpp, self.tile_mpp):
            return [OODFinding("mpp", warning)]
        if not least / (1 + MPP_SLACK) <= mpp <= most * (1 + MPP_SLACK):
            return [OODFinding("mpp", f"scanned at {mpp:.4g} um/px, the training slides at {_span(least, most)}")]
        return []

    def _words(self, name: str, values: Mapping[str, float], slide: SlideStatistics) -> str:
        """What is unusual, and what the training slides have."""
        if name == "stain fit":
            assert slide.stain is not None
            of = f"{self.num_fitted} of {self.num_train} training slides could"
            return f"its stains could not be fitted, those of {of} ({slide.stain.reason})"
        usual, value = self.usual[name], values[name]
        if name == "tiles":
            return f"{value:.0f} tiles, the training slides have {usual.least:.0f} to {usual.most:.0f}"
        if name == "distance":
            return f"its tiles look unlike those that the model was trained on (distance {value:.2f})"
        stain, what = name.split()
        if what == "colour":
            most = f"that of training slides by {usual.most:.0f} at most"
            return f"its {stain} differs by {value:.0f} degrees in colour from the usual, {most}"
        return f"its {stain} has a strength of {value:.2f}, training slides {_span(usual.least, usual.most)}"

    # ------------------------------------------------------------------------------------------------ files

    def to_plain(self) -> dict[str, Any]:
        """All but the embeddings' mean and spread, for JSON."""
        return {
            **{key: getattr(self, key) for key in ("num_train", "num_val", "tile_mpp", "num_fitted", "rate")},
            "mpp_range": list(self.mpp_range),
            "stains": {name: vector.tolist() for name, vector in self.stains.items()},
            "usual": {name: asdict(each) for name, each in self.usual.items()},
            "threshold": _finite(self.threshold),
            "scores": [_finite(each) for each in self.scores],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], mean_D: Floats, std_D: Floats) -> TrainingDistribution:
        """What `to_plain` gave; KeyError, TypeError or ValueError where it did not."""
        least, most = plain["mpp_range"]
        info: dict[str, Any] = dict(plain) | {
            "mpp_range": (float(least), float(most)),
            "stains": {name: np.array(vector, np.float64) for name, vector in plain["stains"].items()},
            "usual": {name: Usual(**each) for name, each in plain["usual"].items()},
            "threshold": _or_infinite(plain["threshold"]),
            "scores": tuple(_or_infinite(each) for each in plain["scores"]),
        }
        return cls(**info, mean_D=mean_D, std_D=std_D)


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None else float(value)


def _span(least: float, most: float) -> str:
    return f"{least:.3g}" if least == most else f"{least:.3g} to {most:.3g}"


# ---------------------------------------------------------------------------------------------------- measuring


def fit_distribution(
    train: Sequence[SlideStatistics], val: Sequence[SlideStatistics], tile_mpp: float, rate: float = RATE
) -> TrainingDistribution:
    """What slides like these let a model expect; the threshold of the OOD score comes from `val`."""
    count, mean_D, squares_D = _pooled(train)
    fits = [each.stain for each in train if each.stain is not None]
    fitted = [fit for fit in fits if fit.fitted]
    stains, angles = _usual_stains(fitted)
    values: dict[str, list[float]] = {
        "tiles": [each.num_tiles for each in train],
        "distance": _distances_to_others(train),
    }
    for k, name in enumerate(stains):
        values[f"{name} colour"] = angles[name]
        values[f"{name} strength"] = [float(fit.max_concentration[k]) for fit in fitted]
    usual = {name: _usual(name, each) for name, each in values.items()}
    uncalibrated = TrainingDistribution(
        num_train=len(train),
        num_val=len(val),
        tile_mpp=tile_mpp,
        mpp_range=(min(each.slide_mpp for each in train), max(each.slide_mpp for each in train)),
        num_fitted=len(fitted) if fits else None,
        stains=stains,
        usual={name: each for name, each in usual.items() if each is not None},
        mean_D=mean_D,
        std_D=np.sqrt(squares_D / count),
        rate=rate,
    )
    scores = sorted(uncalibrated.score(each) for each in val)
    threshold = conformal_threshold(scores, rate)
    if threshold is None or not math.isfinite(threshold):  # too few slides, or too many whose stains cannot be fitted
        known = [uncalibrated.usual[name].deviation(each) for name in uncalibrated.usual for each in values[name]]
        normal = _normal_threshold(len(train), rate) if uncalibrated.usual else math.inf
        threshold = max(each for each in (normal, *scores, *known) if each == normal or math.isfinite(each))
    return replace(uncalibrated, threshold=threshold, scores=tuple(scores))


def num_needed(rate: float) -> int:
    """Calibration slides from which on a threshold can promise a rate."""
    return math.ceil(1 / rate - 1 - 1e-9)


def conformal_threshold(scores: Sequence[float], rate: float) -> float | None:
    """Threshold that a further score like these exceeds with a probability of `rate` at most; None with too few."""
    place = math.ceil((len(scores) + 1) * (1 - rate) - 1e-9)
    return sorted(scores)[place - 1] if place <= len(scores) else None


def _normal_threshold(number: int, rate: float) -> float:
    """Deviation that a normal measure exceeds at a fifth of the rate, in units of the spread of `number` slides."""
    from scipy import stats  # pyright: ignore[reportMissingTypeStubs]

    students: Any = stats.t
    return float(students.ppf(1 - rate / 5, number - 1)) * math.sqrt(1 + 1 / number)


def _usual(name: str, values: Sequence[float]) -> Usual | None:
    """A measure of training slides; None with fewer than three, whose spread is not known."""
    if len(values) < 3:
        return None
    given = np.asarray(values, np.float64)
    logs = np.log(np.maximum(given, TINY))
    spread = max(float(logs.std(ddof=1)), LEAST_SPREAD_TILES if name == "tiles" else LEAST_SPREAD)
    two_sided = name == "tiles" or name.endswith("strength")
    least, most, median = (float(each) for each in (given.min(), given.max(), np.median(given)))
    return Usual(float(logs.mean()), spread, two_sided, median, least, most)


def distance(mean_D: Floats, std_D: Floats, usual_mean_D: Floats, usual_std_D: Floats) -> float:
    """Return the distance of two sets of embeddings in units of the usual spread; constant dimensions do not count."""
    varies = usual_std_D > 0
    if not varies.any():
        return 0.0
    shift, spread, unit = (mean_D - usual_mean_D)[varies], (std_D - usual_std_D)[varies], usual_std_D[varies]
    return math.sqrt(float(((shift**2 + spread**2) / unit**2).mean()))


def angle_deg(a: Floats, b: Floats) -> float:
    """Between two unit vectors."""
    return math.degrees(math.acos(float(np.clip(a @ b, -1.0, 1.0))))


def _pooled(slides: Sequence[SlideStatistics]) -> tuple[int, Floats, Floats]:
    """Number, mean and sum of squared deviations of the embeddings of all slides together."""
    counts_S1 = np.array([[each.num_embeddings] for each in slides], np.float64)
    means_SD = np.stack([each.mean_D for each in slides])
    count = counts_S1.sum()
    mean_D = (counts_S1 * means_SD).sum(axis=0) / count
    squares_D = np.sum([each.squares_D for each in slides], axis=0) + (counts_S1 * (means_SD - mean_D) ** 2).sum(axis=0)
    return int(count), mean_D, squares_D


def _distances_to_others(slides: Sequence[SlideStatistics]) -> list[float]:
    """Of each slide to all others together, which are what is left when its own share is taken out of the whole."""
    if len(slides) < 2:
        return [0.0] * len(slides)
    count, mean_D, squares_D = _pooled(slides)
    found: list[float] = []
    for each in slides:
        rest = count - each.num_embeddings
        rest_mean_D = mean_D + (mean_D - each.mean_D) * (each.num_embeddings / rest)
        between_D = (each.mean_D - mean_D) ** 2 * (each.num_embeddings * count / rest)
        rest_squares_D = np.maximum(squares_D - each.squares_D - between_D, 0.0)
        found.append(distance(each.mean_D, each.std_D, rest_mean_D, np.sqrt(rest_squares_D / rest)))
    return found


def _usual_stains(fits: Sequence[StainFit]) -> tuple[dict[str, Floats], dict[str, list[float]]]:
    """Mean vector of each stain, and the angle of each slide's to the mean of the others'."""
    if len(fits) < 2:
        return {}, {}
    usual: dict[str, Floats] = {}
    angles: dict[str, list[float]] = {}
    for k, name in enumerate(STAINS):
        vectors_S3 = np.stack([fit.stains[:, k] for fit in fits])
        whole = vectors_S3.sum(axis=0)
        usual[name] = whole / np.linalg.norm(whole)
        angles[name] = [angle_deg(own, (whole - own) / np.linalg.norm(whole - own)) for own in vectors_S3]
    return usual, angles
