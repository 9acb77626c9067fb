"""Anatomy of a synthetic lymph node: a seed in, fields and lists of cells out. No pixels yet.

The plan of a slide is drawn on a coarse grid of about 4 um (`Anatomy.step_px` whole level-0 pixels per cell): depth
under the capsule, fibrous stroma, sinuses, germinal centres, lesions, and local stain uptake. Cells are points with a
kind. Distances are microns unless a name says otherwise; fields are arrays [y, x] whose cell (i, j) covers `step_px`
pixels from (j * step_px, i * step_px).

Normal tissue is planned everywhere, also under lesions: they inherit some of its colour variation.
"""

# scipy has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.spatial import KDTree

from selfvitmil.errors import ConfigError

# ---------------------------------------------------------------------------------------------------- the coarse grid

Field = NDArray[np.floating[Any]]
"""Values on the cells of the plan or on pixels: float32."""
Points = NDArray[np.floating[Any]]
"""Values at points, mostly (x, y) rows: float64."""


@dataclass(frozen=True)
class Grid:
    """Cell centres of the coarse grid, and random fields on it."""

    shape: tuple[int, int]
    cell_um: float
    mpp: float
    width_um: float
    height_um: float

    @classmethod
    def over(cls, size_px: tuple[int, int], step_px: int, mpp: float) -> Grid:
        """Return the grid of a slide of (width, height) level-0 pixels, with cells of `step_px` pixels."""
        width, height = size_px
        # One cell more than needed to cover the slide, so that interpolation stays inside.
        shape = (math.ceil(height / step_px) + 1, math.ceil(width / step_px) + 1)
        return cls(shape, step_px * mpp, mpp, width * mpp, height * mpp)

    @property
    def short_um(self) -> float:
        """Shorter side of the slide in microns."""
        return min(self.width_um, self.height_um)

    @property
    def area_mm2(self) -> float:
        """Area of the slide in square millimetres."""
        return self.width_um * self.height_um / 1e6

    def xy(self) -> tuple[Points, Points]:
        """Return cell centres, x as a row and y as a column."""
        x = (np.arange(self.shape[1]) + 0.5) * self.cell_um
        y = (np.arange(self.shape[0]) + 0.5) * self.cell_um
        return x[None, :], y[:, None]

    def distance_to(self, point_um: tuple[float, float]) -> Points:
        """Return the distance in microns from every cell centre to a point (x, y)."""
        x, y = self.xy()
        return np.hypot(x - point_um[0], y - point_um[1])

    def noise(self, rng: np.random.Generator, scale_um: float) -> Field:
        """Return smooth noise of about unit variance with features of about `scale_um`: B-splines on ever finer
        lattices."""
        out = np.zeros(self.shape)
        for share, weight in ((1.0, 1.0), (0.5, 0.45), (0.25, 0.2)):
            step = max(1.5, scale_um * share / self.cell_um)
            values = rng.standard_normal([int(extent / step) + 5 for extent in self.shape])
            for extent in self.shape:  # one axis, then the other
                values = _spline(values, np.arange(extent) / step + rng.random()).T
            out += weight * values
        return (out / 0.56).astype(np.float32)  # standard deviation of the spline basis


def _spline(knots: Points, at: Points) -> Points:
    """Evaluate a uniform cubic B-spline over the rows of `knots`, at positions counted in rows."""
    low = at.astype(np.int64)
    t = (at - low)[:, None]
    basis = ((1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3)
    return sum((weight / 6 * knots[low + k] for k, weight in enumerate(basis)), np.zeros(()))


def sample(grid: Grid, values: Field, xy_um: Points) -> Points:
    """Return values of a field at points, linearly interpolated between cell centres."""
    if not len(xy_um):
        return np.empty(0)
    return ndimage.map_coordinates(values, xy_um.T[::-1] / grid.cell_um - 0.5, order=1, mode="nearest")


def smooth_step(values: Field, low: float | Field, high: float | Field) -> Field:
    """Return 0 below `low`, 1 above `high`, smooth between; falling if `low` > `high`."""
    t = np.clip((values - low) / (high - low), 0, 1)
    return t * t * (3 - 2 * t)


def scatter(rng: np.random.Generator, grid: Grid, spacing_um: float, jitter: float) -> Points:
    """Return points over the slide on a jittered triangular lattice."""
    rows = np.arange(0, grid.height_um + spacing_um, spacing_um * math.sqrt(0.75))
    columns = np.arange(-spacing_um, grid.width_um + spacing_um, spacing_um)
    x = columns[None, :] + (np.arange(len(rows)) % 2 * spacing_um / 2)[:, None]
    xy = np.stack([x, np.broadcast_to(rows[:, None], x.shape)], axis=-1).reshape(-1, 2)
    return xy + rng.normal(0, jitter * spacing_um, xy.shape)


def loosen(xy: Points, apart_um: float, rounds: int) -> Points:
    """Push points that are closer than `apart_um` away from each other."""
    for _ in range(rounds):
        if len(xy) < 2:
            return xy
        pairs = KDTree(xy).query_pairs(apart_um, output_type="ndarray")
        gap = xy[pairs[:, 1]] - xy[pairs[:, 0]]
        length = np.hypot(gap[:, 0], gap[:, 1])[:, None] + 1e-9
        push = gap / length * (apart_um - length) * 0.45
        moved = xy.copy()
        for axis in range(2):
            moved[:, axis] += np.bincount(pairs[:, 1], push[:, axis], len(xy))
            moved[:, axis] -= np.bincount(pairs[:, 0], push[:, axis], len(xy))
        xy = moved
    return xy


# ---------------------------------------------------------------------------------------------------- lymph node

LYMPHOCYTE, BLAST, HISTIOCYTE, SPINDLE, RED_CELL, TUMOUR_BODY, TUMOUR_NUCLEUS = range(7)
FAT, VESSEL, LUMEN = range(3)


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells as parallel arrays, in painting order."""

    xy_px: NDArray[np.int32]
    kind: NDArray[np.int8]
    shape: NDArray[np.int32]
    """A random number that selects the cell's image and its orientation."""
    angle: NDArray[np.float32]
    """Direction of the long axis of spindle cells, radians."""


@dataclass(frozen=True, eq=False)
class Cavities:
    """Round holes in the tissue: fat cells, vessels, and the lumina of tumour glands."""

    xy_um: Points
    radius_um: Points
    kind: NDArray[np.int8]
    phase: Points


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The plan of one slide."""

    size_px: tuple[int, int]
    mpp: float
    step_px: int
    depth_um: Field
    """Distance under the surface of the tissue; negative on glass."""
    across_um: Field
    """A coordinate across the fibres, which follow its level lines."""
    stroma: Field
    sinus: Field
    centre: Field
    """Germinal centres, 0 to 1."""
    h_gain: Field
    e_gain: Field
    glass: Field
    """Unevenness of the illumination, in standard deviations."""
    tint: Field
    """Unevenness of its hue, in standard deviations."""
    lesion_um: Field
    """Distance inside the border of the nearest lesion; negative outside."""
    septum: Field
    """Fibrous bands within lesions, 0 to 1."""
    lesions_um: tuple[Points, ...]
    """Contours of the lesions, (K, 2) in microns."""
    cells: Cells
    replaced: NDArray[np.bool_]
    """Which of `cells` are replaced by a lesion."""
    tumour_cells: Cells
    cavities: Cavities
    lumina: Cavities
    dust_um: Points
    """(x, y, radius) of specks on the glass."""


def grow_anatomy(
    rng: np.random.Generator,
    size_px: tuple[int, int],
    mpp: float,
    num_lesions: int,
    lesion_um: tuple[float, float],
    fibrosis: bool = False,
) -> Anatomy:
    """Generate the plan of a slide; lesions are `lesion_um` = (smallest, largest) microns in diameter.

    With `fibrosis` broad bands of collagen run through the whole node.
    """
    step_px = max(1, round(4.0 / mpp))
    # Separate random streams, so that adding lesions changes the rest as little as possible.
    node_rng, stain_rng, cell_rng, lesion_rng, cavity_rng = rng.spawn(5)
    grid = Grid.over(size_px, step_px, mpp)

    depth, hilum = _node_shape(node_rng, grid)
    near_hilum = np.exp(-0.5 * (grid.distance_to(hilum) / (0.2 * grid.short_um)) ** 2)
    bands = grid.noise(node_rng, 150)
    stroma = _stroma(node_rng, grid, depth, bands, near_hilum, FIBROSIS * fibrosis)
    sinus = _sinus(node_rng, grid, depth, near_hilum) * (1 - stroma)
    centre, mantle = _follicles(node_rng, grid, depth)
    centre *= (1 - stroma) * (1 - sinus)
    edge = np.exp(-((depth / 45) ** 2))
    across = edge * depth + (1 - edge) * 110 * bands

    lesions = _place_lesions(lesion_rng, grid, depth, num_lesions, lesion_um)
    inside = _lesion_depth(grid, lesions)
    septum = np.exp(-((grid.noise(lesion_rng, 55) / 0.16) ** 2))
    cavities = _cavities(cavity_rng, grid, depth, hilum)
    cavities = _select(cavities, sample(grid, inside, cavities.xy_um) < -cavities.radius_um)
    lumina = _lumina(lesion_rng, grid, inside)

    density = _density(cell_rng, grid, depth, stroma, sinus, centre, mantle)
    cells = _normal_cells(cell_rng, grid, depth, across, stroma, sinus, centre, density, cavities)
    tumour_cells = _tumour_cells(lesion_rng, grid, inside, septum, lumina)
    h_gain, e_gain = _stain_uptake(stain_rng, grid, depth)
    num_dust = stain_rng.poisson(3 + 4 * grid.area_mm2)
    dust = stain_rng.random((num_dust, 3)) * (grid.width_um, grid.height_um, 3.0) + (0, 0, 1.0)
    return Anatomy(
        size_px=size_px,
        mpp=mpp,
        step_px=step_px,
        depth_um=depth,
        across_um=across,
        stroma=stroma,
        sinus=sinus,
        centre=centre,
        h_gain=h_gain,
        e_gain=e_gain,
        glass=grid.noise(stain_rng, 500),
        tint=grid.noise(stain_rng, 130),
        lesion_um=inside,
        septum=septum.astype(np.float32),
        lesions_um=lesions,
        cells=cells,
        replaced=sample(grid, inside, cells.xy_px * mpp) > 0,
        tumour_cells=tumour_cells,
        cavities=cavities,
        lumina=lumina,
        dust_um=dust,
    )


def is_tissue(anatomy: Anatomy, xy_um: Points) -> NDArray[np.bool_]:
    """Return whether points are in tissue: under its surface and in no cavity."""
    grid = Grid.over(anatomy.size_px, anatomy.step_px, anatomy.mpp)
    under = sample(grid, anatomy.depth_um, xy_um) > 0
    return under & ~_in_cavity(xy_um, anatomy.cavities) & ~_in_cavity(xy_um, anatomy.lumina)


# ---------------------------------------------------------------------------------------------------- tissue


def _node_shape(rng: np.random.Generator, grid: Grid) -> tuple[Field, tuple[float, float]]:
    """Return the depth under the surface of a bean-shaped node, and the position of its hilum."""
    x, y = grid.xy()
    centre = np.array([grid.width_um, grid.height_um]) * rng.uniform(0.47, 0.53, 2)
    half = np.array([grid.width_um, grid.height_um]) * rng.uniform(0.41, 0.46, 2)
    direction = rng.uniform(0, 2 * np.pi)
    hilum = centre + half * 0.93 * np.array([np.cos(direction), np.sin(direction)])
    shape = 1 - ((np.abs(x - centre[0]) / half[0]) ** 2.4 + (np.abs(y - centre[1]) / half[1]) ** 2.4) ** (1 / 2.4)
    shape = shape + 0.09 * grid.noise(rng, 0.4 * grid.short_um) + 0.035 * grid.noise(rng, 0.14 * grid.short_um)
    shape = shape - 0.3 * np.exp(-0.5 * (grid.distance_to((hilum[0], hilum[1])) / (0.13 * grid.short_um)) ** 2)
    margin = np.minimum(np.minimum(x, grid.width_um - x), np.minimum(y, grid.height_um - y)) / grid.short_um
    inside = np.minimum(shape, 2 * margin - 0.07 + 0.02 * grid.noise(rng, 0.2 * grid.short_um)) > 0
    inside = _largest_piece(inside)
    depth: Field = np.subtract(*(np.asarray(ndimage.distance_transform_edt(part)) for part in (inside, ~inside)))
    depth = ndimage.gaussian_filter(depth, 1.2) * grid.cell_um
    return depth.astype(np.float32), (float(hilum[0]), float(hilum[1]))


def _largest_piece(inside: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the largest connected region, without holes."""
    labels: NDArray[np.int32] = ndimage.label(inside)[0]  # pyright: ignore[reportIndexIssue, reportAssignmentType]
    sizes = np.bincount(labels.ravel())
    sizes[0] = 0
    return np.asarray(ndimage.binary_fill_holes(labels == sizes.argmax()), bool)


FIBROSIS = 0.16
"""Width that fibrosis adds to the trabeculae, in standard deviations of the noise whose zeros they follow."""


def _stroma(
    rng: np.random.Generator, grid: Grid, depth: Field, bands: Field, near_hilum: Points, wider: float = 0.0
) -> Field:
    """Return the capsule, the trabeculae that run in from it, and the fibrous hilum."""
    capsule_um = np.maximum(15 + 7 * grid.noise(rng, 140), 5)
    capsule = smooth_step(depth, capsule_um + 3, capsule_um - 3)
    width = 0.07 * smooth_step(grid.noise(rng, 250), 0.1, 1.0) * smooth_step(depth, 420, 120) + 0.10 * near_hilum + 1e-3
    width += wider
    trabeculae = np.exp(-((bands / width) ** 2)) * smooth_step(width, 0.01, 0.03)
    core = smooth_step(near_hilum + 0.12 * grid.noise(rng, 90), 0.72, 0.9)
    return np.clip(np.maximum(np.maximum(capsule, trabeculae), core), 0, 1).astype(np.float32)


def _sinus(rng: np.random.Generator, grid: Grid, depth: Field, near_hilum: Points) -> Field:
    """Return loose channels: under the capsule, and a net of them towards the hilum."""
    under = np.exp(-(((depth - 30) / 10) ** 2)) * smooth_step(grid.noise(rng, 140), -0.4, 0.7)
    net = np.exp(-((grid.noise(rng, 80) / 0.22) ** 2))
    gate = smooth_step(near_hilum + 0.25 * grid.noise(rng, 200), 0.15, 0.55)
    patches = 0.7 * smooth_step(grid.noise(rng, 180), 0.9, 1.7)
    return np.clip(np.maximum(under, net * np.maximum(gate, patches)), 0, 1).astype(np.float32)


def _follicles(rng: np.random.Generator, grid: Grid, depth: Field) -> tuple[Field, Field]:
    """Return germinal centres and the dark mantles around them."""
    centre, mantle = np.zeros(grid.shape), np.zeros(grid.shape)
    ripple = grid.noise(rng, 60)
    taken: list[tuple[float, float, float]] = []
    for _ in range(int(40 * grid.area_mm2) + 4):
        x, y = rng.random(2) * (grid.width_um, grid.height_um)
        radius = rng.uniform(55, 105)
        here = sample(grid, depth, np.array([[x, y]]))[0]
        if not radius + 45 < here < radius + 260:
            continue
        if any(math.hypot(x - a, y - b) < radius + r + 70 for a, b, r in taken):
            continue
        taken.append((x, y, radius))
        distance = grid.distance_to((x, y)) + 9 * ripple
        centre = np.maximum(centre, smooth_step(distance, radius + 8, radius - 12))
        mantle = np.maximum(mantle, np.exp(-(((distance - radius - 18) / 18) ** 2)))
    return centre.astype(np.float32), mantle.astype(np.float32)


def _stain_uptake(rng: np.random.Generator, grid: Grid, depth: Field) -> tuple[Field, Field]:
    """Return the local uptake of haematoxylin and eosin: uneven baths, uneven thickness, a fold."""
    thickness = 0.07 * grid.noise(rng, 90)
    h_gain = np.exp(thickness + 0.05 * grid.noise(rng, 400) + 0.11 * grid.noise(rng, 110))
    e_gain = np.exp(thickness + 0.07 * grid.noise(rng, 450) + 0.16 * grid.noise(rng, 120))
    if rng.random() < 0.6 and grid.short_um > 500:
        x, y = grid.xy()
        direction = rng.uniform(0, np.pi)
        along = (x - grid.width_um / 2) * np.cos(direction) + (y - grid.height_um / 2) * np.sin(direction)
        aside = -(x - grid.width_um / 2) * np.sin(direction) + (y - grid.height_um / 2) * np.cos(direction)
        aside = aside - rng.uniform(-0.3, 0.3) * grid.short_um - 25 * grid.noise(rng, 250)
        start, length = rng.uniform(-0.45, 0.1) * grid.short_um, rng.uniform(0.2, 0.45) * grid.short_um
        width = 14 * np.sqrt(np.clip(1 - ((along - start - length / 2) / (length / 2)) ** 2, 1e-4, 1))
        fold = smooth_step(np.abs(aside), width, width * 0.5) * (depth > 15)
        h_gain, e_gain = h_gain * (1 + 0.55 * fold), e_gain * (1 + 0.75 * fold)
    return h_gain.astype(np.float32), e_gain.astype(np.float32)


def _cavities(rng: np.random.Generator, grid: Grid, depth: Field, hilum: tuple[float, float]) -> Cavities:
    """Return fat cells packed around the hilum, and scattered vessels."""
    spacing = 50.0
    fat = scatter(rng, grid, spacing, jitter=0.16)
    reach = rng.uniform(0.10, 0.2) * min(grid.short_um, 1500)
    away = np.hypot(fat[:, 0] - hilum[0], fat[:, 1] - hilum[1]) + 40 * sample(grid, grid.noise(rng, 70), fat)
    fat = fat[(away < reach) & (sample(grid, depth, fat) > 28)]
    vessels = rng.random((rng.poisson(22 * grid.area_mm2), 2)) * (grid.width_um, grid.height_um)
    vessels = vessels[sample(grid, depth, vessels) > 55]
    radius = np.concatenate([rng.uniform(19, 25, len(fat)), np.exp(rng.normal(2.1, 0.5, len(vessels)))])
    xy = np.concatenate([fat, vessels])
    kind = np.repeat(np.array([FAT, VESSEL], np.int8), [len(fat), len(vessels)])
    keep = _apart(xy, radius, kind)
    return _select(Cavities(xy, radius, kind, rng.uniform(0, 2 * np.pi, len(xy))), keep)


def _apart(xy: Points, radius: Points, kind: NDArray[np.int8]) -> NDArray[np.bool_]:
    """Mark vessels that do not overlap another cavity."""
    keep = np.ones(len(xy), bool)
    for i, j in KDTree(xy).query_pairs(150) if len(xy) else ():
        if max(kind[i], kind[j]) == VESSEL and np.hypot(*(xy[i] - xy[j])) < 2.2 * (radius[i] + radius[j]) + 10:
            keep[max(i, j)] = False
    return keep


def _select(cavities: Cavities, keep: NDArray[np.bool_]) -> Cavities:
    return Cavities(cavities.xy_um[keep], cavities.radius_um[keep], cavities.kind[keep], cavities.phase[keep])


# ---------------------------------------------------------------------------------------------------- lesions


def _place_lesions(
    rng: np.random.Generator, grid: Grid, depth: Field, num_lesions: int, lesion_um: tuple[float, float]
) -> tuple[Points, ...]:
    """Return contours of irregular islands inside the tissue, 80 um apart if there is room, never touching."""
    smallest, largest = lesion_um
    free = depth.copy()
    contours: list[Points] = []
    x, y = grid.xy()
    for _ in range(num_lesions):
        widest = min(largest, float(free.max()) / ROOM)
        if widest < smallest:
            raise ConfigError(
                f"{num_lesions} lesions of {smallest:g} um or more do not fit",
                f"the tissue of a slide of {grid.width_um:.0f} x {grid.height_um:.0f} um has room for {len(contours)}",
                "Use fewer or smaller lesions, or a larger slide",
                code="lesions-do-not-fit",
            )
        diameter = rng.uniform(smallest, widest)
        rows, columns = np.nonzero(free >= ROOM * diameter - 1e-6)
        # Tumour cells arrive under the capsule, and most metastases are there.
        chance = 0.1 + np.exp(-depth[rows, columns] / 70)
        pick = rng.choice(len(rows), p=chance / chance.sum())
        centre = np.array([columns[pick] + 0.5, rows[pick] + 0.5]) * grid.cell_um
        contour = _island(rng, grid, depth, free, centre, diameter / 2)
        contours.append(contour)
        free = np.minimum(free, -_inside(contour, x, y) - 30)
    return tuple(contours)


NUM_CORNERS = 120
ROOM = 0.3
"""Free depth required around the centre of a lesion, in diameters; below a radius, since it may spread along the
capsule."""


def _island(rng: np.random.Generator, grid: Grid, depth: Field, free: Field, centre: Points, radius: float) -> Points:
    """Return a star-shaped contour around `centre`, limited where it would leave the tissue or meet another lesion."""
    angle = np.arange(NUM_CORNERS) * (2 * np.pi / NUM_CORNERS)
    reach = np.ones(NUM_CORNERS)
    for order in range(2, 15):
        reach += rng.normal(0, 0.26 / order**0.9) * np.cos(order * angle + rng.uniform(0, 2 * np.pi))
    reach = radius * np.clip(reach / reach.max(), 0.35, 1)
    direction = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    steps = np.linspace(0, radius, 65)[1:]
    along = centre + direction[:, None, :] * steps[None, :, None]
    clear = (sample(grid, depth, along.reshape(-1, 2)) > 6) & (sample(grid, free, along.reshape(-1, 2)) > 2)
    clear = np.logical_and.accumulate(clear.reshape(NUM_CORNERS, -1), axis=1)
    reach = np.minimum(reach, clear.sum(axis=1) * (radius / 64))
    return centre + direction * np.maximum(reach, 4.0)[:, None]


def _inside(contour: Points, x: Points, y: Points) -> Points:
    """Return the approximate distance inside a star-shaped contour, exactly 0 on it; negative outside."""
    centre = _contour_centre(contour)
    reach = np.hypot(*(contour - centre).T)
    angle = np.arctan2(y - centre[1], x - centre[0]) % (2 * np.pi)
    corners = np.arange(NUM_CORNERS + 1) * (2 * np.pi / NUM_CORNERS)
    return np.interp(angle, corners, np.append(reach, reach[0])) - np.hypot(x - centre[0], y - centre[1])


def _contour_centre(contour: Points) -> Points:
    """Return the centre of a star-shaped contour: the intersection of the lines between opposite corners."""
    a, b = contour[0], contour[NUM_CORNERS // 2]
    c, d = contour[NUM_CORNERS // 4], contour[3 * NUM_CORNERS // 4]
    return np.array([(c[0] + d[0]) / 2, (a[1] + b[1]) / 2])


def _lesion_depth(grid: Grid, lesions: tuple[Points, ...]) -> Field:
    """Return the distance inside the border of the nearest lesion in microns; negative outside."""
    x, y = grid.xy()
    inside = np.full(grid.shape, -1e4)
    for contour in lesions:
        inside = np.maximum(inside, _inside(contour, x, y))
    return inside.astype(np.float32)


def _lumina(rng: np.random.Generator, grid: Grid, inside: Field) -> Cavities:
    """Return the lumina of tumour glands."""
    xy = scatter(rng, grid, 46.0, jitter=0.2)
    keep = (sample(grid, inside, xy) > 16) & (rng.random(len(xy)) < 0.85)
    xy, count = xy[keep], int(keep.sum())
    return Cavities(xy, rng.uniform(5, 12, count), np.full(count, LUMEN, np.int8), rng.uniform(0, 2 * np.pi, count))


# ---------------------------------------------------------------------------------------------------- cells


def _density(
    rng: np.random.Generator, grid: Grid, depth: Field, stroma: Field, sinus: Field, centre: Field, mantle: Field
) -> Field:
    """Return the probability that a lattice point holds a cell of lymphoid tissue."""
    base = 0.83 + 0.08 * grid.noise(rng, 130) + 0.05 * grid.noise(rng, 35) + 0.15 * mantle
    base = base * (1 - 0.80 * sinus) * (1 - 0.42 * centre)
    return (np.clip(base, 0.05, 1) * (1 - 0.96 * stroma) * smooth_step(depth, 5, 12)).astype(np.float32)


def _normal_cells(
    rng: np.random.Generator,
    grid: Grid,
    depth: Field,
    across: Field,
    stroma: Field,
    sinus: Field,
    centre: Field,
    density: Field,
    cavities: Cavities,
) -> Cells:
    """Return lymphocytes, blasts, histiocytes; spindle cells of stroma and vessels; red cells in some vessels."""
    xy = scatter(rng, grid, 7.1, jitter=0.28)
    xy = xy[rng.random(len(xy)) < sample(grid, density, xy)]
    xy = loosen(xy[~_in_cavity(xy, cavities, 3.5)], 6.4, rounds=2)
    in_centre, in_sinus = sample(grid, centre, xy), sample(grid, sinus, xy)
    draw = rng.random(len(xy))
    kind = np.full(len(xy), LYMPHOCYTE, np.int8)
    kind[draw < 0.10 + 0.60 * in_centre] = BLAST
    kind[draw < 0.015 + 0.28 * in_sinus + 0.05 * in_centre] = HISTIOCYTE

    fibres = scatter(rng, grid, 14.0, jitter=0.3)
    fibres = fibres[rng.random(len(fibres)) < 0.75 * sample(grid, stroma, fibres) + 0.03]
    fibres = fibres[(sample(grid, depth, fibres) > 4) & ~_in_cavity(fibres, cavities, 3.0)]
    lining, lining_angle, red = _vessel_cells(rng, cavities)
    points = np.concatenate([xy, fibres, lining, red])
    kinds = np.concatenate(
        [kind, np.full(len(fibres) + len(lining), SPINDLE, np.int8), np.full(len(red), RED_CELL, np.int8)]
    )
    angles = np.concatenate([np.zeros(len(xy)), _fibre_angle(grid, across, fibres), lining_angle, np.zeros(len(red))])
    return _as_cells(rng, grid, points, kinds, angles)


def _vessel_cells(rng: np.random.Generator, cavities: Cavities) -> tuple[Points, Points, Points]:
    """Return endothelial cells along the walls (with their direction), and red cells in some of the lumina."""
    lining, angles, red = [np.empty((0, 2))], [np.empty(0)], [np.empty((0, 2))]
    for xy, radius in zip(
        cavities.xy_um[cavities.kind == VESSEL], cavities.radius_um[cavities.kind == VESSEL], strict=True
    ):
        turn = rng.uniform(0, 2 * np.pi, max(3, int(radius * 0.6)))
        ring = radius * rng.uniform(1.02, 1.45, len(turn)) + 1.5
        lining.append(xy + np.stack([np.cos(turn), np.sin(turn)], axis=-1) * ring[:, None])
        angles.append(turn + np.pi / 2)
        if rng.random() < 0.55:
            dots = rng.uniform(-radius, radius, (int(radius * radius / 9), 2))
            red.append(xy + dots[np.hypot(dots[:, 0], dots[:, 1]) < radius - 3])
    return np.concatenate(lining), np.concatenate(angles), np.concatenate(red)


def _tumour_cells(rng: np.random.Generator, grid: Grid, inside: Field, septum: Field, lumina: Cavities) -> Cells:
    """Return tumour cells packed between septa and lumina; spindle cells and stray lymphocytes in the septa."""
    xy = scatter(rng, grid, 18.5, jitter=0.25)
    xy = xy[sample(grid, inside, xy) > 9]
    xy = xy[(sample(grid, septum, xy) < 0.75) & ~_in_cavity(xy, lumina, 4.0)]
    xy = loosen(xy, 16.6, rounds=2)
    small = scatter(rng, grid, 9.0, jitter=0.3)
    small = small[sample(grid, inside, small) > 2]
    in_septum, draw = sample(grid, septum, small), rng.random(len(small))
    spindle = draw < 0.3 * in_septum
    lymphocyte = ~spindle & (draw > 1 - 0.025 - 0.22 * in_septum)
    # All bodies before all nuclei, so that no nucleus is hidden by a neighbour's cytoplasm.
    points = np.concatenate([xy, xy, small[spindle], small[lymphocyte]])
    counts = [len(xy), len(xy), int(spindle.sum()), int(lymphocyte.sum())]
    kind = np.repeat(np.array([TUMOUR_BODY, TUMOUR_NUCLEUS, SPINDLE, LYMPHOCYTE], np.int8), counts)
    return _as_cells(rng, grid, points, kind, _fibre_angle(grid, septum, points))


def _in_cavity(xy_um: Points, cavities: Cavities, margin_um: float = 0.0) -> NDArray[np.bool_]:
    """Return whether points are in a cavity or within `margin_um` of it."""
    inside = np.zeros(len(xy_um), bool)
    tree = KDTree(xy_um)
    for centre, radius in zip(cavities.xy_um, cavities.radius_um, strict=True):
        inside[tree.query_ball_point(centre, radius + margin_um)] = True
    return inside


def _fibre_angle(grid: Grid, across: Field, xy_um: Points) -> Points:
    """Return the direction along the level lines of `across`."""
    slopes = [sample(grid, np.asarray(slope), xy_um) for slope in np.gradient(across)]
    return np.arctan2(*slopes) + np.pi / 2


def _as_cells(rng: np.random.Generator, grid: Grid, xy_um: Points, kind: NDArray[np.int8], angle: Points) -> Cells:
    shape = rng.integers(0, 1 << 30, len(xy_um), dtype=np.int32)
    return Cells(np.round(xy_um / grid.mpp).astype(np.int32), kind, shape, angle.astype(np.float32))
