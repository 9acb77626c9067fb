"""Slide embeddings: the tile embeddings of a slide pooled into one, by mean, by maximum or by a trained aggregator.

A file per slide holds `features` (E,), as TRIDENT's `slide_features_<name>/<slide>.h5` do: such a folder can be given
to `--features`, where each slide is a bag of one instance, so that `mean` on it is a linear probe.

N instances, D dimensions, E dimensions of a slide embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from selfvitmil.bags import Bag, Features, check_bag, read_bag
from selfvitmil.errors import BagError, ConfigError
from selfvitmil.store.files import file_fingerprint, hash_of, open_hdf5, write_hdf5
from selfvitmil.store.provenance import MISSING, BuildOutcome, Freshness, compare_digests, damaged, outcome_of

SCHEMA = "selfvitmil.slide"
FORMAT_VERSION = 1
CHUNK_ROWS = 4096
Pooling = Literal["mean", "max"]
Floats = NDArray[np.float32]


def pool(features_ND: Features, how: str) -> Floats:
    """Return the mean or the maximum (D,) of every dimension over the instances, in float32; sums are in float64."""
    if how not in get_args(Pooling):
        raise ConfigError(
            f"pooling {how!r}", how=f"Choose one of {', '.join(get_args(Pooling))}", code="unknown-pooling"
        )
    chunks = (features_ND[start : start + CHUNK_ROWS] for start in range(0, len(features_ND), CHUNK_ROWS))
    if how == "max":
        return np.max([chunk.max(axis=0) for chunk in chunks], axis=0).astype(np.float32)
    total_D = np.sum([chunk.sum(axis=0, dtype=np.float64) for chunk in chunks], axis=0)
    return (total_D / len(features_ND)).astype(np.float32)


def pool_by_model(module: Any, bag: Bag) -> Floats:
    """Return what the slide classifier of a trained aggregator sees (E,). Raises BagError for embeddings that it cannot
    take."""
    import torch

    if bag.dim != module.dim:
        raise BagError(
            f"{bag.slide}: embeddings of {bag.dim} dimensions",
            f"the aggregator was trained on {module.dim}",
            "Use the encoder it was trained with",
            code="dimension-mismatch",
        )
    with torch.no_grad():
        features_ND = torch.from_numpy(np.array(bag.features_ND))  # mapped files are read-only
        coords_N2 = None if bag.coords is None else torch.from_numpy(np.array(bag.coords))
        embedding_E = module.slide_embedding(features_ND, coords_N2 if module.needs_coordinates else None)
    return embedding_E.float().numpy()


# ---------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class PoolJob:
    """Input of one worker call: the slide to pool."""

    slide: str
    features: Path
    """Its feature file."""
    out: Path
    name: str
    """Of the embedding, for the file's attribute `encoder`."""
    pooling: str
    """`mean`, `max`, or `model`."""
    model: Path | None = None
    """Folder of the trained aggregator."""
    model_sha256: str = ""


@dataclass(frozen=True)
class PooledSlide:
    """Result for one slide."""

    num_tiles: int
    outcome: BuildOutcome


def pool_slide(job: PoolJob) -> PooledSlide:
    """Write the embedding of one slide, unless it is up to date. Raises SelfVitMilError on failure."""
    bag = read_bag(job.features)
    made_from = hash_of(FORMAT_VERSION, job.pooling, job.model_sha256, file_fingerprint(job.features))
    freshness = _freshness(job.out, made_from)
    if not freshness.is_up_to_date:
        check_bag(bag)
        embedding_E = _way(job)(bag)
        with write_hdf5(job.out) as file:
            file.attrs.update({"schema": SCHEMA, "format_version": FORMAT_VERSION, "made_from_hash": made_from})
            features = file.create_dataset("features", data=embedding_E)
            features.attrs.update({"name": job.slide, "savetodir": "", "encoder": job.name})
    return PooledSlide(len(bag), outcome_of(freshness))


def read_slide_embedding(path: Path) -> Floats:
    """Return the embedding (E,) of a slide."""
    return np.array(read_bag(path).features_ND[0], dtype=np.float32)


def _way(job: PoolJob) -> Callable[[Bag], Floats]:
    if job.model is None:
        return lambda bag: pool(bag.features_ND, job.pooling)
    module = _loaded(job.model, job.model_sha256)
    return lambda bag: pool_by_model(module, bag)


@lru_cache(maxsize=1)
def _loaded(folder: Path, _sha256: str) -> Any:
    from selfvitmil.aggregate.train import load_model

    return load_model(folder)[0]


def _freshness(path: Path, made_from: str) -> Freshness:
    if not path.exists():
        return MISSING
    try:
        with open_hdf5(path) as file:
            return compare_digests(str(file.attrs.get("made_from_hash")), made_from)
    except (OSError, ValueError):
        return damaged(path)
