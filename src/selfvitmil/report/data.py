"""Read a study once into the data of its report, everything that the page shows, and write the page.

Missing parts are empty; files that cannot be read are noted in `ReportData.notes`, not raised. Names of slides and
patients are replaced while reading (see `pseudonyms`): tables use the pseudonyms, all other text goes through
`Names.apply`, so that templates only ever see what may be shared.
"""

from __future__ import annotations

import csv
import itertools
import json
import platform
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, cast

from selfvitmil import __version__
from selfvitmil.cohort import Cohort, SlideRow, read_cohort
from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError, SelfVitMilError
from selfvitmil.evaluate.predictions import Prediction
from selfvitmil.formatting import duration
from selfvitmil.localize.heatmap import MAIN_METHOD, main_first, read_heatmap
from selfvitmil.pseudonyms import Names, names_of
from selfvitmil.report.analyses import SubgroupsData, subgroups_data
from selfvitmil.report.answer import AnswerData, answer_data, main_result
from selfvitmil.report.encoders import EncoderData, EncoderFolder, describe_encoder, encoder_data, sample_views
from selfvitmil.report.neighbors import (
    NeighborData,
    SimilarSlidesData,
    neighbor_data,
    shown_features,
    similar_slides_data,
)
from selfvitmil.report.render import Shown, Table, picture_file, render_page
from selfvitmil.report.results import (
    ComparisonData,
    EvaluationData,
    LocalizationData,
    ResultsFolder,
    comparison_data,
    evaluation_data,
    localization_data,
    read_results,
)
from selfvitmil.report.slide_sections import (
    Decision,
    HeatmapFolder,
    Record,
    SectionJob,
    SlideData,
    choose_slides,
    order_of,
    slide_data,
)
from selfvitmil.runtime.training import read_metrics_and_damage
from selfvitmil.settings import StudySettings
from selfvitmil.store.failures import Failure, fold_failures, read_failures
from selfvitmil.store.files import section, write_text
from selfvitmil.store.layout import SETTINGS_FILE, SLIDES_FILE, StudyLayout, feature_name, tiling_summary

MAX_SLIDES = 40
"""Slides with a section of their own, unless more are asked for: a page of less than 10 MB."""
WORTH_WORKERS = 24
"""Sections from which on workers are asked: as long as they take to start, with all that they import."""
GALLERY_PX = 240
"""Longer edge of a tissue picture."""
PACKAGES = (
    "torch", "timm", "numpy", "scipy", "matplotlib", "pillow", "h5py", "openslide-python", "openslide-bin",
    "tifffile", "simplejpeg", "safetensors", "shapely",
)  # fmt: skip

T = TypeVar("T")


@dataclass(frozen=True)
class TissuePicture:
    """A slide with the tissue found and the tiles kept."""

    slide: str
    picture: Shown
    tiles: str
    tissue_mm2: float | None
    warnings: str


@dataclass(frozen=True)
class TissueData:
    tiling: str
    other_tilings: tuple[str, ...]
    pictures: tuple[TissuePicture, ...]
    num_left_out: int
    """Further slides with a picture."""


@dataclass(frozen=True)
class SlideEntry:
    """A row of the table of all slides."""

    name: str
    anchor: str
    """Id of its section; empty where it has none."""
    patient: str
    split: str
    label: str
    tiles: str
    decision: Decision | None

    @property
    def is_wrong_test(self) -> bool:
        return self.decision is not None and self.decision.is_wrong_test


@dataclass(frozen=True)
class ReportData:
    """All that the page shows."""

    name: str
    answer: AnswerData
    stages: Table
    """Every artefact."""
    changed_settings: Table
    """Settings that are not the default, and the artefacts that were built with them."""
    all_settings: tuple[tuple[str, str], ...]
    """Artefacts and their settings as text; equal ones once."""
    notes: tuple[str, ...]
    cohort: Table | None
    """Numbers of slides by label and split, and of all at the end."""
    tissue: TissueData | None
    encoders: tuple[EncoderData, ...]
    neighbors: tuple[NeighborData, ...]
    similar_slides: SimilarSlidesData | None
    has_results: bool
    comparisons: tuple[ComparisonData, ...]
    evaluations: tuple[EvaluationData, ...]
    localization: LocalizationData
    subgroups: SubgroupsData
    slides: tuple[SlideEntry, ...]
    decided_by: str
    """Whose predictions the table of slides has; empty where there are none."""
    has_heatmaps: bool
    slide_sections: tuple[SlideData, ...]
    num_mapped: int
    """Slides with a heatmap: so many sections are possible."""
    failures: Table
    timings: Table
    versions: Table
    problems: tuple[str, ...]
    """Files that could not be read."""

    @property
    def num_tested(self) -> int:
        """Test slides with a prediction."""
        return sum(entry.decision is not None and entry.decision.part == "test" for entry in self.slides)


def read_report_data(
    study: Path,
    settings: StudySettings,
    *,
    pseudonyms: bool = False,
    results: Sequence[str] = (),
    most_slides: int = MAX_SLIDES,
    engine: Engine | None = None,
) -> ReportData:
    """Read a study, with pseudonyms in place of names where asked for; these are then stored in the study's key.

    `results` are the names of the results to show, all where it is empty. `engine`: its workers read the sections of
    slides. Raises ConfigError where the folder is no study, or has no such results.
    """
    files = StudyFiles.read(study, results)
    names = names_of(study, files.cohort, pseudonyms=pseudonyms, slides=files.slides, patients=files.patients)
    decisions = files.decisions()
    mapped = list(dict.fromkeys(slide for folder in files.heatmaps for slide in folder.files))
    chosen = choose_slides(mapped, decisions, names, most_slides)
    anchors = {slide: f"slide{number}" for number, slide in enumerate(chosen, start=1)}
    data = ReportData(
        name=study.resolve().name,
        answer=answer_data(files, decisions, anchors, settings, names),
        stages=Table.of(("stage", "what there is", ""), _stages(files)),
        changed_settings=Table.of(("setting", "value", "default", "where"), _changed_settings(files.settings)),
        all_settings=tuple(_all_settings(files.settings)),
        notes=(*(files.cohort.warnings if files.cohort else ()), *files.problems),
        cohort=_cohort(files.cohort) if files.cohort else None,
        tissue=_tissue(files.tilings, names, most_slides),
        encoders=tuple(_encoders(files, names)),
        neighbors=tuple(
            neighbor_data(files.layout, files.cohort, features, settings.slide.reader, names)
            for features in files.shown_features()
        ),
        similar_slides=similar_slides_data(
            files.layout,
            files.cohort,
            {slide: one.pictures[slide] for one in files.tilings for slide in one.pictures},
            names,
        ),
        has_results=bool(files.results),
        comparisons=tuple(comparison_data(one, names) for one in files.results if one.is_comparison),
        evaluations=tuple(
            evaluation_data(one, names)
            for one in sorted(files.results, key=lambda one: MAIN_METHOD not in one.name)
            if not one.is_comparison and one.methods
        ),
        localization=localization_data(files.results, names),
        subgroups=subgroups_data(files, main_result(files.results), settings.evaluate),
        slides=tuple(_slide_entries(files, decisions, anchors, names)),
        decided_by=_decided_by(files) if decisions else "",
        has_heatmaps=bool(files.heatmaps),
        slide_sections=_sections(_section_jobs(files, anchors, decisions, settings, names), engine),
        num_mapped=len(mapped),
        failures=_failures(files, names),
        timings=Table.of(("what", "time"), _timings(files)),
        versions=Table.of(("", "version"), _versions()),
        problems=files.problems,
    )
    return names.apply(data)


def _failures(files: StudyFiles, names: Names) -> Table:
    """Return one row for each cause."""
    rows = sorted(
        (names.slide(one.slide), one.stage, one.reason, one.remedy, ", ".join(later))
        for one, later in fold_failures(files.failures)
    )
    return Table.of(("slide", "stage", "reason", "what to do", "so also missing in"), rows)


def _section_jobs(
    files: StudyFiles,
    anchors: Mapping[str, str],
    decisions: Mapping[str, Decision],
    settings: StudySettings,
    names: Names,
) -> dict[str, SectionJob]:
    """Return what is needed to read the section of each slide that has an anchor."""
    return {
        slide: SectionJob(
            slide,
            anchor,
            tuple(folder.only(slide) for folder in files.heatmaps if slide in folder.files),
            files.row(slide),
            decisions.get(slide),
            {one.name: one.lesion_slides[slide] for one in files.results if slide in one.lesion_slides},
            settings,
            names,
        )
        for slide, anchor in anchors.items()
    }


def _sections(jobs: Mapping[str, SectionJob], engine: Engine | None) -> tuple[SlideData, ...]:
    """Return the sections in the order of the jobs, read by the workers of the engine where there are enough."""
    done: dict[str, SlideData] = {}
    if engine is not None and engine.num_local > 1 and len(jobs) >= WORTH_WORKERS:
        for outcome in engine.map(slide_data, jobs, stage="report"):
            if outcome.value is not None:
                done[outcome.name] = outcome.value
    return tuple(done[slide] if slide in done else slide_data(job) for slide, job in jobs.items())


# ---------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class Tiling:
    """The slides cut into tiles in one way."""

    name: str
    rows: Mapping[str, Record]
    """Rows of `tiles.csv` by slide."""
    pictures: Mapping[str, Path]
    """Pictures of tissue and kept tiles by slide."""


class Reader:
    """Reads what is there, and remembers what could not be read."""

    def __init__(self, study: Path):
        self.study = study
        self.problems: list[str] = []

    def attempt(self, path: Path, read: Callable[[Path], T], otherwise: T) -> T:
        """Return what `read` makes of a file; `otherwise` where it is missing or damaged."""
        if not path.exists():
            return otherwise
        try:
            return read(path)
        except SelfVitMilError as error:
            self.problems.append(str(error))
        except (OSError, ValueError, KeyError, TypeError) as error:
            where = path.relative_to(self.study).as_posix()
            self.problems.append(f"{where} cannot be read ({type(error).__name__})")
        return otherwise

    def metrics(self, encoder: Path) -> list[dict[str, Any]]:
        """Return the lines of an encoder's `metrics.jsonl`."""
        lines, damaged = self.attempt(
            encoder / "metrics.jsonl", lambda path: read_metrics_and_damage(path.parent), ([], 0)
        )
        if damaged:
            self.problems.append(f"encoders/{encoder.name}/metrics.jsonl: {damaged} of its lines cannot be read")
        return lines

    def text(self, path: Path) -> str:
        return self.attempt(path, lambda path: path.read_text(encoding="utf-8"), "")

    def toml(self, path: Path) -> dict[str, Any]:
        return self.attempt(path, lambda path: tomllib.loads(path.read_text(encoding="utf-8")), {})

    def json(self, path: Path) -> dict[str, Any]:
        def read(path: Path) -> dict[str, Any]:
            info = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(info, dict):
                raise TypeError("not an object")
            return cast("dict[str, Any]", info)

        return self.attempt(path, read, {})

    def records(self, path: Path) -> list[Record]:
        def read(path: Path) -> list[Record]:
            with path.open(newline="", encoding="utf-8") as file:
                return [{key: value or "" for key, value in row.items() if key} for row in csv.DictReader(file)]

        return self.attempt(path, read, [])

    def by_slide(self, path: Path) -> dict[str, Record]:
        return {row["slide"]: row for row in self.records(path) if row.get("slide")}


@dataclass(frozen=True)
class StudyFiles:
    """The files of a study, with the names of its slides and patients."""

    layout: StudyLayout
    cohort: Cohort | None
    checked: Mapping[str, Record]
    tilings: Sequence[Tiling]
    encoders: Sequence[EncoderFolder]
    features: Mapping[str, int]
    """Number of feature files by `<tiling>/<encoder>`."""
    models: int
    results: Sequence[ResultsFolder]
    heatmaps: Sequence[HeatmapFolder]
    """Those of the main model first."""
    failures: Sequence[Failure]
    settings: Mapping[str, Mapping[str, Any]]
    """`study.toml` and every `settings.toml`, by the artefact beside them."""
    problems: tuple[str, ...]

    @classmethod
    def read(cls, study: Path, only: Sequence[str] = ()) -> StudyFiles:
        """Read a study with the results named `only`, or all. Raises ConfigError as `read_report_data` does."""
        layout, reader = StudyLayout(study), Reader(study)
        if not layout.has_any_artefact():
            why = "it holds none of the things that commands write" if study.is_dir() else "there is no such folder"
            raise ConfigError(
                f"{study.name}: not a study", why, "Name the folder that other commands were given", code="no-study"
            )
        results = [read_results(reader, folder) for folder in layout.all_results()]
        unknown = [name for name in only if name not in {one.name for one in results}]
        if unknown:
            there = f"there are {', '.join(one.name for one in results) or 'none'}"
            raise ConfigError(
                f"{study.name}: no results called {unknown[0]!r}", there, "Name one of these", code="unknown-results"
            )
        heatmaps = [_read_heatmaps(reader, folder) for folder in layout.all_heatmaps()]
        return cls(
            layout=layout,
            cohort=reader.attempt(layout.cohort, read_cohort, None),
            checked=reader.by_slide(layout.check_table),
            tilings=[_read_tiling(reader, folder) for folder in layout.all_tilings()],
            encoders=[_read_encoder(reader, folder) for folder in layout.all_encoders()],
            features={
                f"{folder.parent.name}/{feature_name(folder)}": sum(1 for _ in folder.glob("*.h5"))
                for folder in layout.all_features()
            },
            models=sum(1 for _ in layout.models_folder.rglob("model.safetensors")),
            results=[one for one in results if not only or one.name in only],
            heatmaps=sorted(heatmaps, key=lambda folder: main_first(folder.model)),
            failures=reader.attempt(layout.failures, lambda path: read_failures(path.parent), []),
            settings={where: reader.toml(path) for where, path in _settings_files(layout)},
            problems=tuple(dict.fromkeys(reader.problems)),
        )

    @property
    def slides(self) -> list[str]:
        """Every slide that is named anywhere, those of the cohort first and in its order."""
        named = [row.slide for row in self.cohort.rows] if self.cohort else []
        for tiling in self.tilings:
            named += [*tiling.rows, *tiling.pictures]
        named += [row.slide for results in self.results for row in results.predictions]
        named += [slide for folder in self.heatmaps for slide in (*folder.files, *folder.regions)]
        named += [*self.checked, *(failure.slide for failure in self.failures)]
        return list(dict.fromkeys(named))

    @property
    def patients(self) -> list[str]:
        named = [row.patient for row in self.cohort.rows] if self.cohort else []
        return list(dict.fromkeys([*named, *(row.patient for one in self.results for row in one.predictions)]))

    def row(self, slide: str) -> SlideRow | None:
        return self.cohort[slide] if self.cohort and slide in self.cohort else None

    def shown_features(self) -> list[str]:
        """Return the features whose neighbours are shown."""
        trained = [encoder.name for encoder in self.encoders if encoder.metrics]
        pictured = [tiling.name for tiling in self.tilings if tiling.pictures]
        return shown_features(self.features, trained, [encoder.name for encoder in self.encoders], pictured)

    def decisions(self) -> dict[str, Decision]:
        """Return decisions by slide: of the first heatmaps, else of the ensemble of the main method."""
        found: dict[str, Decision] = {}
        predictions, class_names = self._main_predictions()
        for row in predictions:
            if row.decision is not None and (row.slide not in found or row.part == "test"):
                found[row.slide] = decision_of(row, class_names)
        for folder in self.heatmaps[:1]:
            for slide, info in folder.predictions.items():
                row = self.row(slide)
                label = row.label if row and not info.value_words else None
                known = (info.shown_probability, info.shown, info.decision, info.part, label, info.value_words)
                found[slide] = Decision(*known)
        return found

    def _main_predictions(self) -> tuple[list[Prediction], tuple[str, ...]]:
        """Return predictions of the ensemble, and class names, of the main method; comparisons are the last resort."""
        for one in sorted(self.results, key=lambda one: (one.is_comparison, MAIN_METHOD not in one.name)):
            methods = list(dict.fromkeys(row.method for row in one.predictions))
            if methods and not isinstance(one.predictions[0].label, tuple):  # decisions are of classes
                main = MAIN_METHOD if MAIN_METHOD in methods else methods[0]
                return [row for row in one.predictions if row.seed is None and row.method == main], one.class_names
        return [], ()


def decision_of(row: Prediction, class_names: Sequence[str]) -> Decision:
    """Return the decision of a prediction; with more than two classes its probability is that of the predicted one."""
    binary, predicted = len(class_names) == 2, class_names[int(row.decision)]
    probability, shown = (row.score[0], class_names[1]) if binary else (row.score[int(row.decision)], predicted)
    return Decision(probability, shown, predicted, row.part, class_names[int(row.label)])


def _read_tiling(reader: Reader, folder: Path) -> Tiling:
    pictures = {path.stem: path for path in sorted(folder.glob("*.jpg"))}
    return Tiling(folder.name, reader.by_slide(tiling_summary(folder)), pictures)


def _read_encoder(reader: Reader, folder: Path) -> EncoderFolder:
    return EncoderFolder(
        folder.name,
        reader.json(folder / "config.json"),
        reader.metrics(folder),
        reader.toml(folder / SETTINGS_FILE),
        reader.text(folder / SLIDES_FILE).splitlines(),
    )


def _read_heatmaps(reader: Reader, folder: Path) -> HeatmapFolder:
    found = {path: reader.attempt(path, read_heatmap, None) for path in sorted(folder.glob("*.h5"))}
    heatmaps = {path: heatmap for path, heatmap in found.items() if heatmap is not None and len(heatmap)}
    regions: dict[str, list[Record]] = {}
    for row in reader.records(folder / "lesions.csv"):
        regions.setdefault(row.get("slide", ""), []).append(row)
    return HeatmapFolder(
        folder.name,
        {heatmap.slide: path for path, heatmap in heatmaps.items()},
        {heatmap.slide: heatmap.prediction for heatmap in heatmaps.values()},
        regions,
        reader.toml(folder / SETTINGS_FILE),
    )


def _settings_files(layout: StudyLayout) -> Iterator[tuple[str, Path]]:
    """Yield `study.toml` and the resolved settings beside every artefact, in the order of the data."""
    yield layout.settings.name, layout.settings
    for folder in layout.artefact_folders:
        for path in sorted(folder.rglob(SETTINGS_FILE)):
            yield layout.name(path.parent), path


# ---------------------------------------------------------------------------------------------------- the study


def _stages(files: StudyFiles) -> Iterator[tuple[str, str, str]]:
    cohort = files.cohort
    if cohort is None:
        yield "cohort", "no cohort.csv", ""
    else:
        counts = ", ".join(f"{number} {label}" for label, number in cohort.class_counts.items())
        yield "cohort", f"{len(cohort)} slides of {len(cohort.patients)} patients", counts
    for tiling in files.tilings:
        tiles = sum(int(row["tiles"]) for row in tiling.rows.values() if row.get("tiles", "").isdigit())
        cut = f"{tiles:,} tiles of {len(tiling.rows)} slides" if tiling.rows else "a coarser scale"
        yield "tiles", tiling.name, cut
    for encoder in files.encoders:
        yield "encoder", encoder.name, describe_encoder(encoder)
    for name, number in files.features.items():
        yield "features", name, f"{number} slides"
    if files.models:
        yield "models", f"{files.models} trained", ""
    for results in files.results:
        yield "results", results.name, results.summary
    for folder in files.heatmaps:
        yield "heatmaps", folder.model, f"{len(folder.files)} slides"
    if not files.tilings:
        yield "tiles", "none yet", ""


def _changed_settings(settings: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, str, str]]:
    """Yield every value that is not the default, with the artefacts that have it; by stage where these are many."""
    defaults = _flat(StudySettings().model_dump(mode="json"))
    found: dict[tuple[str, str], list[str]] = {}
    for where, info in settings.items():
        for key, value in _flat(info).items():
            if value != defaults.get(key):
                found.setdefault((key, _plain(value)), []).append(where)
    for (key, value), places in sorted(found.items()):
        listed = places if len(places) <= 2 else dict.fromkeys(place.split("/")[0] for place in places)
        yield key, value, _plain(defaults.get(key)), ", ".join(listed)


def _all_settings(settings: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    texts: dict[str, list[str]] = {}
    for where, info in settings.items():
        lines = [f"{key} = {_plain(value)}" for key, value in _flat(info).items()]
        if lines:
            texts.setdefault("\n".join(lines), []).append(where)
    for text, places in texts.items():
        yield ", ".join(places), text


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        is_table = isinstance(value, Mapping)
        flat |= _flat(cast("Mapping[str, Any]", value), f"{prefix}{key}.") if is_table else {f"{prefix}{key}": value}
    return flat


def _plain(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _cohort(cohort: Cohort) -> Table:
    known = ("train", "val", "test")
    splits = {row.split or "" for row in cohort.rows}
    ordered = sorted(splits, key=lambda split: (known.index(split) if split in known else len(known), split))

    def count(label: str, rows: Sequence[SlideRow]) -> list[str | int]:
        by_split = [sum((row.split or "") == split for row in rows) for split in ordered]
        annotated = sum(row.annotation is not None for row in rows)
        return [label, *by_split, len(rows), len({row.patient for row in rows}), annotated]

    labels = [*cohort.classes, *([None] if cohort.unlabelled else [])]
    rows = [count(label or "no label", [row for row in cohort.rows if row.label == label]) for label in labels]
    header = ("label", *(split or "no split" for split in ordered), "slides", "patients", "annotated")
    return Table.of(header, [*rows, count("all", cohort.rows)])


def _tissue(tilings: Sequence[Tiling], names: Names, most: int) -> TissueData | None:
    """Return pictures of tissue and tiles; where there are too many, of slides with warnings first."""
    tiling = next((one for one in tilings if one.pictures), None)
    if tiling is None:
        return None
    found: list[TissuePicture] = []
    ordered = sorted(tiling.pictures, key=names.slide)  # the order says nothing of the real names
    warned = [slide for slide in ordered if tiling.rows.get(slide, {}).get("warnings")]
    chosen = {*[*warned, *(slide for slide in ordered if slide not in set(warned))][:most]}
    for slide in (slide for slide in ordered if slide in chosen):
        shown, row = names.slide(slide), tiling.rows.get(slide, {})
        image = picture_file(tiling.pictures[slide], f"tissue and tiles of {shown}", edge_px=GALLERY_PX, quality=72)
        area = _float(row.get("tissue_mm2", ""))
        found.append(
            TissuePicture(
                shown, image or "This picture cannot be read.", row.get("tiles", ""), area, row.get("warnings", "")
            )
        )
    others = tuple(one.name for one in tilings if one is not tiling and one.pictures)
    return TissueData(tiling.name, others, tuple(found), len(ordered) - len(found))


def _float(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value == value else None


def _encoders(files: StudyFiles, names: Names) -> Iterator[EncoderData]:
    """Yield every encoder, the first one that was trained here with views of tiles."""
    first = next((encoder for encoder in files.encoders if encoder.metrics), None)
    for encoder in files.encoders:
        views = sample_views(files.layout, files.cohort, encoder, names) if encoder is first else None
        yield encoder_data(encoder, names, views)


def _slide_entries(
    files: StudyFiles, decisions: Mapping[str, Decision], anchors: Mapping[str, str], names: Names
) -> Iterator[SlideEntry]:
    """Yield every slide in the order of the sections."""
    tiles = next((tiling.rows for tiling in files.tilings if tiling.rows), dict[str, dict[str, str]]())
    for slide in sorted(files.slides, key=lambda slide: order_of(decisions.get(slide), names.slide(slide))):
        row = files.row(slide)
        yield SlideEntry(
            name=names.slide(slide),
            anchor=anchors.get(slide, ""),
            patient=names.patient(row.patient) if row else "",
            split=(row.split if row else None) or "",
            label=(row.label if row else None) or "",
            tiles=tiles.get(slide, {}).get("tiles", ""),
            decision=decisions.get(slide),
        )


def _decided_by(files: StudyFiles) -> str:
    return f"maps/{files.heatmaps[0].model}" if files.heatmaps else "the ensemble of the main method"


def _timings(files: StudyFiles) -> Iterator[tuple[str, str]]:
    for encoder in files.encoders:
        seconds = pretraining_seconds(encoder)
        if seconds is not None:
            yield f"pretraining of {encoder.name}", f"about {duration(seconds)}"
    for results in files.results:
        for row in results.rows:
            if row.training_seconds is not None:
                info = [one for one in results.methods if one.get("method") == row.display_name]
                number = sum(len(one.get("trainings") or []) for one in info)
                trainings = f", {number} training{'s' * (number > 1)}" if number else ""
                yield f"{results.name}: {row.display_name}{trainings}", duration(row.training_seconds)


def pretraining_seconds(encoder: EncoderFolder) -> float | None:
    """Return the seconds of a pretraining by its steps and tiles per second; None where these are not known."""
    batch = section(encoder.settings, "pretrain").get("batch")
    lines = [line for line in encoder.metrics if line.get("tiles_per_s") and "step" in line]
    if not lines or not isinstance(batch, int):
        return None
    steps = [lines[0]["step"] + 1, *(line["step"] - before["step"] for before, line in itertools.pairwise(lines))]
    return sum(number * batch / line["tiles_per_s"] for number, line in zip(steps, lines, strict=True))


def _versions() -> Iterator[tuple[str, str]]:
    yield "selfvitmil", __version__
    yield "Python", platform.python_version()
    yield "system", f"{platform.system()} {platform.machine()}"
    for package in PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue


# ---------------------------------------------------------------------------------------------------- the page


@dataclass(frozen=True)
class Report:
    """What was written."""

    path: Path
    size_bytes: int
    num_sections: int
    """Slides with a section of their own."""
    num_mapped: int
    """Slides that might have one."""
    problems: tuple[str, ...]
    """Files of the study that could not be read."""


def write_report(
    study: Path,
    settings: StudySettings,
    *,
    out: Path | None = None,
    pseudonyms: bool = False,
    results: Sequence[str] = (),
    most_slides: int = MAX_SLIDES,
    engine: Engine | None = None,
) -> Report:
    """Write the page of a study to `out`, by default `report/index.html` in it; a folder gets an `index.html`.

    `results`: names of the results to show, all where it is empty. `pseudonyms`: slides and patients are renamed, and
    the key is kept in the study. `engine`: its workers read the sections of slides. Raises ConfigError where the folder
    is no study or has no such results. Equal studies give equal pages while the versions of the program and its
    libraries are the same.
    """
    data = read_report_data(
        study, settings, pseudonyms=pseudonyms, results=results, most_slides=most_slides, engine=engine
    )
    page = render_page(data)
    path = StudyLayout(study).report if out is None else out
    if path.suffix.lower() not in (".html", ".htm"):
        path /= "index.html"
    write_text(path, page)
    size = len(page.encode("utf-8"))
    return Report(path, size, len(data.slide_sections), data.num_mapped, data.problems)
