"""The command `slide-embeddings`: an embedding per slide, the slides most like each, and how often their labels agree.

Labels are read for the agreement alone. Slides whose labels the pooling model was trained or chosen on are not asked
about, and the folder names them, so that a probe cannot be tested on them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from selfvitmil.bags import retrieval
from selfvitmil.bags.retrieval import LabelAgreement, label_agreement, nearest, numbered, unit_rows
from selfvitmil.cohort import SlideRow
from selfvitmil.engine import Engine
from selfvitmil.errors import ArtefactError, ConfigError
from selfvitmil.pseudonyms import names_of
from selfvitmil.stages.base import StageResult, data_frame
from selfvitmil.store.files import atomic_path, read_json, sha256, write_csv, write_text
from selfvitmil.store.layout import CONFIG_FILE, ENCODER_SLIDES_FILE, MODEL_SLIDES_FILE, StudyLayout
from selfvitmil.study import FeatureChoice, Features, Study, encoder_name, find_features, map_slides, num_tiles

if TYPE_CHECKING:
    from selfvitmil.aggregate.slide_embedding import PooledSlide

TABLES = (".csv", ".h5ad")


@dataclass(frozen=True)
class SimilarSlide:
    """A slide of another patient, near to a query."""

    slide: str
    patient: str
    label: str | None
    similarity: float
    """Cosine similarity of the embeddings."""


@dataclass(frozen=True, eq=False)
class SlideEmbeddingsResult(StageResult):
    """Embeddings of slides, and what retrieval by them finds."""

    folder: Path
    """Where the embeddings are: `<slide>.h5`, similar_slides.csv, agreement.json."""
    rows: tuple[SlideRow, ...]
    embeddings_SE: NDArray[np.float32]
    """In the order of `rows`."""
    similar: Mapping[str, tuple[SimilarSlide, ...]]
    """Slide -> the nearest slides of other patients, nearest first."""
    agreement: LabelAgreement | None
    """None where labels are too few."""
    num_slides: int
    """Slides of the cohort."""
    built: Mapping[str, PooledSlide]
    out: Path | None = None
    """The table that was asked for."""
    query: str | None = None
    """The slide whose neighbours were asked for."""

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with patient, label and the embedding e0, e1, ... of every slide."""
        return data_frame([dict(zip(_header(self.embeddings_SE), line, strict=True)) for line in _lines(self)], "slide")


def slide_embeddings(
    study: Study,
    choice: FeatureChoice,
    engine: Engine,
    *,
    pooling: str = "mean",
    model: Path | None = None,
    neighbors: int = 5,
    out: Path | None = None,
    pseudonyms: bool = False,
    query: str | None = None,
) -> SlideEmbeddingsResult:
    """Pool the features of every slide, and find the slides most like each.

    Parameters
    ----------
    pooling
        `mean` or `max` over the tiles; with `model` the aggregator pools instead.
    model
        A folder that `package` wrote, or of one trained model (models/.../seed0).
    neighbors
        Slides of other patients to list for each, and to compare labels with.
    out
        Also write all embeddings as one table: .csv, or .h5ad for AnnData.
    pseudonyms
        Replace names in that table.
    query
        A slide whose neighbours the result shows.
    """
    from selfvitmil.aggregate.slide_embedding import PoolJob, pool_slide

    if neighbors < 1:
        raise ConfigError(f"--neighbors {neighbors}", "at least one slide is compared", code="invalid-neighbors")
    _check_table(out)
    with study.lock("slide-embeddings"):
        cohort = study.store_cohort()
        if query is not None:
            query = cohort[query].slide
        features = find_features(study.root, choice, study.settings)
        if features.by_split:
            raise ConfigError(
                f"{features.encoder}: every split has an encoder of its own",
                "embeddings of different encoders cannot be compared",
                f"Name one with --encoder, as {next(iter(features.by_split.values())).encoder}",
                code="encoder-per-split",
            )
        pooler = _Pooler.of(study.layout, pooling, model, features)
        folder = study.layout.slide_features(features.tiling, f"{features.encoder}_{pooler.name}")
        jobs = {
            row.slide: PoolJob(
                row.slide, features.files[row.slide], folder / f"{row.slide}.h5", folder.name, pooler.how,
                pooler.folder, pooler.sha256,
            )
            for row in cohort.rows
            if row.slide in features.files
        }  # fmt: skip
        stage = f"slide-embeddings {folder.name}"
        done, failures = map_slides(engine, study.root, stage, pool_slide, jobs, unit="tiles", count=num_tiles)
        _write_names(folder / ENCODER_SLIDES_FILE, features.encoder_slides)
        _write_names(folder / MODEL_SLIDES_FILE, pooler.seen)
        result = _result(study, folder, done, pooler, neighbors, query, out, (tuple(failures), pooler.notes))
        if out is not None:
            _write_table(study, result, out, pseudonyms=pseudonyms)
    return result


@dataclass(frozen=True)
class _Pooler:
    """How tiles become the embedding of a slide."""

    name: str
    how: str
    folder: Path | None = None
    """Of the trained aggregator."""
    sha256: str = ""
    seen: frozenset[str] = frozenset()
    """Slides whose labels it was trained or chosen on."""
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, layout: StudyLayout, pooling: str, model: Path | None, features: Features) -> _Pooler:
        from selfvitmil.aggregate.slide_embedding import pool

        if model is None:
            pool(np.zeros((1, 1), np.float32), pooling)  # an unknown word is an error before anything is read
            return cls(pooling, pooling)
        folder, name = _model_folder(model, features)
        digest = sha256(folder / "model.safetensors")
        config = _config(folder)
        if "trained_on" not in config:
            config = next((_config(each) for each in _models_of(layout) if _is_same(each, folder, digest)), config)
        seen = frozenset((*config.get("trained_on", ()), *config.get("chosen_on", ())))
        note = (
            "note: the model does not name the slides that it was trained on; if they are among these, the agreement "
            "of labels is optimistic"
        )
        return cls(name, "model", folder, digest, seen, () if seen else (note,))


def _model_folder(model: Path, features: Features) -> tuple[Path, str]:
    """Return the folder of the first model of a package, or of the one model that `model` is, and its name."""
    if (model / "package.json").is_file():
        from selfvitmil.package import open_package

        package = open_package(model)
        _check_encoder(package, features)
        return package.model_folders[0], encoder_name(package.name)
    config = _config(model)
    if not config:
        raise ArtefactError(
            f"{model.name}: neither a package nor a trained model",
            "it has neither package.json nor config.json",
            "Give a folder that `package` wrote, or one as models/.../seed0",
            code="no-model",
        )
    parts = (config["aggregator"]["name"], config.get("split", ""), f"seed{config.get('seed', 0)}")
    return model, encoder_name("_".join(filter(None, parts)))


def _check_encoder(package: Any, features: Features) -> None:
    """ArtefactError where the features were made by another encoder than the one in the package."""
    from selfvitmil.bags import read_bag
    from selfvitmil.encoder import load_encoder

    attributes = read_bag(next(iter(features.files.values()))).attributes
    made_by = json.loads(attributes.get("made_from", "{}")).get("encoder")
    if len(package.encoders) > 1 or features.coarse is not None:
        raise ConfigError(
            f"{package.name}: a model of two scales",
            "slide embeddings are made of one",
            "Use a model of one scale",
            code="two-scales",
        )
    if made_by is not None and made_by != load_encoder(package.folder / package.encoders[0].folder).identity():
        raise ArtefactError(
            f"{package.name}: its encoder is not the one of the features {features.encoder}",
            "the aggregator would see embeddings that it does not know",
            "Embed the slides with the encoder of the package, in its folder encoder/",
            code="stale-features",
        )


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    return read_json(path) if path.is_file() else {}


def _models_of(layout: StudyLayout) -> list[Path]:
    return sorted(path.parent for path in layout.models_folder.rglob("model.safetensors"))


def _is_same(folder: Path, other: Path, digest: str) -> bool:
    one, two = folder / "model.safetensors", other / "model.safetensors"
    return one.stat().st_size == two.stat().st_size and sha256(one) == digest


# ---------------------------------------------------------------------------------------------------- retrieval


def _result(
    study: Study,
    folder: Path,
    built: Mapping[str, PooledSlide],
    pooler: _Pooler,
    most: int,
    query: str | None,
    out: Path | None,
    said: tuple[tuple[Any, ...], tuple[str, ...]],
) -> SlideEmbeddingsResult:
    """Return the embeddings with their neighbours, which are written beside them."""
    from selfvitmil.aggregate.slide_embedding import read_slide_embedding

    rows = tuple(row for row in study.cohort.rows if row.slide in built)
    if not rows:
        failures = said[0]
        raise ArtefactError(
            f"{study.name}: no slide of the cohort has features that can be pooled",
            failures[0].reason if failures else "no feature file has the name of a slide of cohort.csv",
            "Run `selfvitmil embed` first, or name the features with --features",
            code="no-features",
        )
    embeddings_SE = np.stack([read_slide_embedding(folder / f"{row.slide}.h5") for row in rows])
    unit_SE, patients = unit_rows(embeddings_SE), [row.patient for row in rows]
    owner_S = numbered(patients)
    similar: dict[str, tuple[SimilarSlide, ...]] = {}
    for number, row in enumerate(rows):
        found = nearest(unit_SE, owner_S, number, most)
        similar[row.slide] = tuple(
            SimilarSlide(rows[other].slide, rows[other].patient, rows[other].label, float(value))
            for other, value in zip(map(int, found.rows), found.similarity, strict=True)
        )
    labels = [row.label for row in rows]
    agreement = label_agreement(
        unit_SE, patients, labels, k=most, queries=[row.slide not in pooler.seen for row in rows]
    )
    pairs = {
        slide: [retrieval.SimilarSlide(each.slide, each.similarity) for each in found]
        for slide, found in similar.items()
    }
    retrieval.write_similar(folder, pairs, None if agreement is None else asdict(agreement))
    failures, notes = said
    return SlideEmbeddingsResult(
        folder, rows, embeddings_SE, similar, agreement, len(study.cohort), built, out, query,
        failures=failures, notes=notes,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- tables


def _check_table(out: Path | None) -> None:
    if out is not None and out.suffix not in TABLES:
        raise ConfigError(
            f"--out {out.name}",
            "its suffix says neither table",
            f"Give a file that ends in {' or '.join(TABLES)}",
            code="unknown-export",
        )


def _header(embeddings_SE: NDArray[np.float32]) -> list[str]:
    return ["slide", "patient", "label", *(f"e{k}" for k in range(embeddings_SE.shape[1]))]


def _lines(result: SlideEmbeddingsResult) -> list[list[Any]]:
    return [
        [row.slide, row.patient, row.label, *values.tolist()]
        for row, values in zip(result.rows, result.embeddings_SE, strict=True)
    ]


def _write_table(study: Study, result: SlideEmbeddingsResult, out: Path, *, pseudonyms: bool) -> None:
    names = names_of(study.root, study.cohort, pseudonyms=pseudonyms)
    lines = [[names.slide(line[0]), names.patient(line[1]), line[2] or "", *line[3:]] for line in _lines(result)]
    if names.hidden:  # the cohort's order may follow dates
        lines.sort(key=lambda line: line[0])
    if out.suffix == ".csv":
        write_csv(out, [_header(result.embeddings_SE), *lines])
        return
    try:
        import anndata  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        raise ConfigError(
            "anndata is not installed",
            "it is needed to write these files",
            "pip install 'selfvitmil[anndata]'",
            code="missing-package",
        ) from None
    import pandas  # pyright: ignore[reportMissingTypeStubs]

    about = pandas.DataFrame(
        {"patient": [line[1] for line in lines], "label": [line[2] for line in lines]},
        index=pandas.Index([line[0] for line in lines]),
    )
    table = anndata.AnnData(
        X=np.array([line[3:] for line in lines], dtype=np.float32), obs=about, uns={"embedding": result.folder.name}
    )
    with atomic_path(out) as temporary:
        table.write_h5ad(temporary)


def _write_names(path: Path, slides: Sequence[str] | frozenset[str]) -> None:
    if slides:
        write_text(path, "".join(f"{slide}\n" for slide in sorted(slides)))
    else:
        path.unlink(missing_ok=True)
