"""What a model expects of a slide, measured on the slides it was trained on; and what lies outside of that.

Measured are microns per pixel, tiles per slide, the two stains, and the vectors of the tiles. Limits are those within
which 99 of 100 further slides like the training slides would lie, if the logarithm of the measure were normal: with few
slides they are wide, as they must be, and no slide that was measured lies outside.

The distance of a slide is how far its vectors lie from those of the training slides, as the Fréchet distance of two
normal distributions with independent dimensions, each in units of the training spread:

    distance^2 = mean over dimensions of ((mean - training mean)^2 + (spread - training spread)^2) / training spread^2

It needs no more of a slide than mean and spread of its vectors. A training slide is measured against all others, for
it would look nearer than a new one if it were part of what it is compared with. Nothing here names a slide.

S slides, D dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfvitmil.settings import upsampling_warning
from selfvitmil.stain import StainFit
from selfvitmil.tiles import TileTable

Floats = NDArray[np.float64]

SHARE = 0.99
"""Of slides like the training slides, those that give no warning by one measure."""
MPP_SLACK = 0.1
"""Relative difference of microns per pixel beyond those of the training slides that goes unnoticed."""
LEAST_SPREAD = 0.05
"""Of a logarithm: slides that are alike by chance must not make limits that the next one breaks by a hair."""
STAINS = ("hematoxylin", "eosin")


@dataclass(frozen=True, eq=False)
class Measures:
    """What is measured of one slide."""

    slide_mpp: float
    num_tiles: int
    stain: StainFit | None
    """None where stains are not fitted by slide."""
    mean_D: Floats
    """Of its vectors."""
    squares_D: Floats
    """Sum of their squared deviations from that mean."""
    num_vectors: int

    @property
    def std_D(self) -> Floats:
        return np.sqrt(self.squares_D / self.num_vectors)

    @classmethod
    def of(cls, table: TileTable, moments: Any) -> Measures:
        """From its tile table and the moments of its bag (`BagStore.moments`)."""
        mean_D, squares_D = (values.cpu().numpy().astype(np.float64) for values in (moments.mean_D, moments.squares_D))
        return cls(table.slide_mpp, len(table), table.stain, mean_D, squares_D, moments.count)


@dataclass(frozen=True)
class Limits:
    """Where a measure is expected to lie."""

    low: float
    high: float
    median: float
    least: float
    """Of the slides that were measured."""
    most: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Outside:
    """One way in which a slide differs from those that a model was trained on."""

    about: str
    """`mpp`, `tiles`, `stain` or `features`."""
    text: str


@dataclass(frozen=True, eq=False)
class Expected:
    """What the slides of a training were like."""

    num_train: int
    num_val: int
    tile_mpp: float
    slide_mpp: Limits
    num_tiles: Limits
    num_fitted: int | None
    """Training slides whose stains could be fitted; None where stains are not fitted by slide."""
    stains: Mapping[str, Floats]
    """Name of a stain -> mean (3,) of its optical density, as a unit vector."""
    angle_deg: Mapping[str, Limits]
    """Between a slide's stain and that mean."""
    strength: Mapping[str, Limits]
    """Concentration that counts as full strength."""
    mean_D: Floats
    std_D: Floats
    distance: Limits
    """Of training slides (each against the others) and validation slides."""
    distances: tuple[float, ...]
    """The same, one by one, in rising order."""

    # ------------------------------------------------------------------------------------------------ a new slide

    def distance_of(self, facts: Measures) -> float:
        """How far the slide's vectors lie from those of the training slides."""
        return distance(facts.mean_D, facts.std_D, self.mean_D, self.std_D)

    def outside(self, facts: Measures) -> list[Outside]:
        """All ways in which the slide differs from the training slides."""
        return [*self._mpp(facts), *self._tiles(facts), *self._stain(facts), *self._features(facts)]

    def to_json(self, facts: Measures) -> dict[str, Any]:
        """Distance of a slide, for a report of it."""
        own = self.distance_of(facts)
        nearer = sum(each <= own for each in self.distances)
        return {"distance": own, "limit": _finite(self.distance.high), "nearer": nearer, "of": len(self.distances)}

    def _mpp(self, facts: Measures) -> list[Outside]:
        found: list[Outside] = []
        mpp, seen = facts.slide_mpp, self.slide_mpp
        if warning := upsampling_warning(mpp, self.tile_mpp):
            found.append(Outside("mpp", warning))
        elif not seen.least / (1 + MPP_SLACK) <= mpp <= seen.most * (1 + MPP_SLACK):
            found.append(Outside("mpp", f"scanned at {mpp:.4g} um/px, the training slides at {_span(seen)}"))
        return found

    def _tiles(self, facts: Measures) -> list[Outside]:
        if facts.num_tiles in self.num_tiles:
            return []
        seen = self.num_tiles
        return [
            Outside("tiles", f"{facts.num_tiles} tiles, the training slides have {seen.least:.0f} to {seen.most:.0f}")
        ]

    def _stain(self, facts: Measures) -> list[Outside]:
        if facts.stain is None or self.num_fitted is None:
            return []
        if not facts.stain.fitted:
            of = f"{self.num_fitted} of {self.num_train} training slides could"
            return [Outside("stain", f"its stains could not be fitted, those of {of}: {facts.stain.reason}")]
        found: list[Outside] = []
        for k, name in enumerate(STAINS):
            if name not in self.stains:
                continue
            angle = angle_deg(facts.stain.stains[:, k], self.stains[name])
            if angle > self.angle_deg[name].high:
                most = f"that of training slides by {self.angle_deg[name].most:.0f} at most"
                text = f"its {name} differs by {angle:.0f} degrees in colour from the usual, {most}"
                found.append(Outside("stain", text))
            strength = float(facts.stain.max_concentration[k])
            if strength not in self.strength[name]:
                seen = _span(self.strength[name])
                found.append(Outside("stain", f"its {name} has a strength of {strength:.2f}, training slides {seen}"))
        return found

    def _features(self, facts: Measures) -> list[Outside]:
        own = self.distance_of(facts)
        if own <= self.distance.high:
            return []
        text = (
            f"its tiles look unlike those that the model was trained on: distance {own:.2f}, "
            f"of {len(self.distances)} training and validation slides {self.distance.most:.2f} at most "
            f"(limit {self.distance.high:.2f})"
        )
        return [Outside("features", text)]

    # ------------------------------------------------------------------------------------------------ files

    def to_plain(self) -> dict[str, Any]:
        """All but the vectors, for JSON."""
        one = {key: _to_plain(getattr(self, key)) for key in ("slide_mpp", "num_tiles", "distance")}
        many = {
            key: {name: _to_plain(each) for name, each in getattr(self, key).items()}
            for key in ("angle_deg", "strength")
        }
        return {
            **{key: getattr(self, key) for key in ("num_train", "num_val", "tile_mpp", "num_fitted")},
            "stains": {name: vector.tolist() for name, vector in self.stains.items()},
            **one,
            **many,
            "distances": list(self.distances),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], mean_D: Floats, std_D: Floats) -> Expected:
        """What `to_plain` gave; KeyError, TypeError or ValueError where it did not."""
        told = dict(plain)
        told |= {key: _from_plain(told[key]) for key in ("slide_mpp", "num_tiles", "distance")}
        told |= {
            key: {name: _from_plain(each) for name, each in told[key].items()} for key in ("angle_deg", "strength")
        }
        told |= {"stains": {name: np.array(vector, np.float64) for name, vector in told["stains"].items()}}
        told |= {"distances": tuple(told["distances"])}
        return cls(**told, mean_D=mean_D, std_D=std_D)


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _to_plain(limits: Limits) -> dict[str, float | None]:
    return {**asdict(limits), "high": _finite(limits.high)}


def _from_plain(plain: Mapping[str, Any]) -> Limits:
    return Limits(**{**plain, "high": math.inf if plain["high"] is None else plain["high"]})


def _span(limits: Limits) -> str:
    return f"{limits.least:.3g}" if limits.least == limits.most else f"{limits.least:.3g} to {limits.most:.3g}"


# ---------------------------------------------------------------------------------------------------- measuring


def expect(train: Sequence[Measures], val: Sequence[Measures], tile_mpp: float) -> Expected:
    """What slides like these let a model expect."""
    count, mean_D, squares_D = _pooled(train)
    std_D = np.sqrt(squares_D / count)
    distances = [*_distances_to_others(train), *(distance(each.mean_D, each.std_D, mean_D, std_D) for each in val)]
    fits = [each.stain for each in train if each.stain is not None]
    fitted = [fit for fit in fits if fit.fitted]
    stains, angles = _usual_stains(fitted)
    return Expected(
        num_train=len(train),
        num_val=len(val),
        tile_mpp=tile_mpp,
        slide_mpp=limits([each.slide_mpp for each in train]),
        num_tiles=limits([each.num_tiles for each in train]),
        num_fitted=len(fitted) if fits else None,
        stains=stains,
        angle_deg={name: limits(values, one_sided=True) for name, values in angles.items()},
        strength={name: limits([fit.max_concentration[k] for fit in fitted]) for k, name in enumerate(stains)},
        mean_D=mean_D,
        std_D=std_D,
        distance=limits(distances, one_sided=True),
        distances=tuple(sorted(distances)),
    )


def distance(mean_D: Floats, std_D: Floats, usual_mean_D: Floats, usual_std_D: Floats) -> float:
    """Between two sets of vectors, in units of the spread of the usual one; dimensions without spread do not count."""
    varies = usual_std_D > 0
    if not varies.any():
        return 0.0
    shift, spread, unit = (mean_D - usual_mean_D)[varies], (std_D - usual_std_D)[varies], usual_std_D[varies]
    return math.sqrt(float(((shift**2 + spread**2) / unit**2).mean()))


def limits(values: Sequence[float], *, one_sided: bool = False) -> Limits:
    """Where `SHARE` of further values like these are expected, on a logarithmic scale; none that is here lies outside.

    With fewer than three values nothing is outside. `one_sided`: only large values can be.
    """
    from scipy import stats

    given = np.asarray(values, np.float64)
    least, most, median = (float(each) for each in (given.min(), given.max(), np.median(given)))
    low, high = 0.0, math.inf
    if len(given) >= 3:
        logs = np.log(np.maximum(given, 1e-9))
        spread = max(float(logs.std(ddof=1)), LEAST_SPREAD) * math.sqrt(1 + 1 / len(given))
        reach = spread * float(stats.t.ppf(SHARE if one_sided else (1 + SHARE) / 2, len(given) - 1))
        low = 0.0 if one_sided else min(least, math.exp(logs.mean() - reach))
        high = max(most, math.exp(min(logs.mean() + reach, 700.0)))
    return Limits(low, high, median, least, most)


def angle_deg(a: Floats, b: Floats) -> float:
    """Between two unit vectors."""
    return math.degrees(math.acos(float(np.clip(a @ b, -1.0, 1.0))))


def _pooled(facts: Sequence[Measures]) -> tuple[int, Floats, Floats]:
    """Number, mean and sum of squared deviations of the vectors of all slides together."""
    counts_S1 = np.array([[each.num_vectors] for each in facts], np.float64)
    means_SD = np.stack([each.mean_D for each in facts])
    count = counts_S1.sum()
    mean_D = (counts_S1 * means_SD).sum(axis=0) / count
    squares_D = np.sum([each.squares_D for each in facts], axis=0) + (counts_S1 * (means_SD - mean_D) ** 2).sum(axis=0)
    return int(count), mean_D, squares_D


def _distances_to_others(facts: Sequence[Measures]) -> list[float]:
    """Of each slide to all others together, which are what is left when its own share is taken out of the whole."""
    if len(facts) < 2:
        return [0.0] * len(facts)
    count, mean_D, squares_D = _pooled(facts)
    found: list[float] = []
    for each in facts:
        rest = count - each.num_vectors
        rest_mean_D = mean_D + (mean_D - each.mean_D) * (each.num_vectors / rest)
        between_D = (each.mean_D - mean_D) ** 2 * (each.num_vectors * count / rest)
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
