"""The command `predict`: inference on new slides with a packaged model, without a study.

A slide is processed by the functions of the stages (`tile_slide`, `embed_slide`, `score_tiles`, `build_heatmap`) with
the package's settings, so its prediction is that of `evaluate`, bit for bit on the same machine. Tiles and embeddings
stay in `work/` of the output folder: the same command again computes only what is missing.

    OUT/predictions.csv, predictions.json   predictions of all calls into this folder, by slide and model
    OUT/maps/<model>/<slide>.h5, _red.png, .geojson ...
    OUT/failures.csv                        slides that failed
    OUT/work/tiles/, work/bags/             may be removed
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil.cohort import Cohort, SlideRow, read_cohort, write_cohort
from selfvitmil.cohort.files import find_slides
from selfvitmil.cohort.table import listing, make_cohort, name_key
from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError, SelfVitMilError
from selfvitmil.localize.export import ExportJob, ExportRecord, export_heatmap
from selfvitmil.settings import StudySettings, parse, tiling_name, with_user_engine
from selfvitmil.slides import SlideRef
from selfvitmil.stages.base import StageResult
from selfvitmil.stages.localize import MAP_SETTINGS, VERSION, write_tables
from selfvitmil.store.failures import Failure, record_failures
from selfvitmil.store.files import file_fingerprint
from selfvitmil.store.layout import StudyLayout
from selfvitmil.study import lock_study, map_slides, num_tiles

if TYPE_CHECKING:
    from selfvitmil.package import Package, PredictedSlide, PredictionFiles, Predictor

SCORING = "judge"  # what failures.csv has called this step since version 0.1
STEPS = ("tile", "embed", SCORING, "localize")
"""Those that depend on the model."""


@dataclass(frozen=True)
class PredictResult(StageResult):
    """Predictions of one call of `predict`."""

    slides: tuple[PredictedSlide, ...]
    num_asked: int
    package: Package
    out: Path
    json: str
    """The predictions of this call alone, in the form of predictions.json."""


def predict_settings(package: Package, flags: Mapping[str, Any]) -> StudySettings:
    """Return the package's settings with flags of the sections slide, embed, localize and engine on top.

    A package holds no engine settings: they come from flags and the user's own file.
    """
    sections = package.settings.model_dump(mode="json")
    for section, values in with_user_engine(flags).items():
        sections[section] = {**sections[section], **values}
    settings = parse(sections, "the command line")
    if settings.embed.layout is not None:
        raise ConfigError(
            f"embed.layout {settings.embed.layout!r} with predict",
            "the model was trained on the layout that its own encoder has",
            "Leave embed.layout out",
            code="layout-of-package",
        )
    return settings


def predict(
    package: Package, slides: Sequence[Path], out: Path, settings: StudySettings, engine: Engine, *, maps: bool = True
) -> PredictResult:
    """Run inference on slides (files, or folders of them) and add the predictions to those in the folder `out`.

    A prediction replaces that of the same model for the same slide; those for other slides and of other models stay.
    """
    from selfvitmil.package import JSON_HEAD, PredictionFiles, Predictor, add_predictions

    if Path(os.path.abspath(out)) == package.folder:
        what, how = f"{out.name}: this is the folder of the model", "Name another --out"
        raise ConfigError(what, "it must stay as it is", how, code="out-is-model")
    if out.exists() and not out.is_dir():
        what, why = f"{out.name}: this is a file", "predictions are written into a folder"
        raise ConfigError(what, why, "Name another --out", code="out-is-file")
    cohort = find_new_slides(slides)
    predictor = Predictor(package, settings.localize, settings.embed.device)
    with lock_study(out, "predict"):
        before = PredictionFiles.read(out)  # one that cannot be read is an error before hours of work
        tried = [row.slide for row in cohort.rows]
        rows, failures = _open(cohort, before)
        call = _Call(engine, out, package, settings, failures)
        rows = call.embed(call.tile(rows))
        predicted = call.predict(predictor, rows)
        if maps:
            predicted = call.localize(rows, predicted)
        list_slides(out, rows)
        for stage in ("open", *map(call.stage, STEPS)):
            record_failures(out, stage, tried, [each for each in failures if each.stage == stage])
        # Read again: somebody may have written remarks into the table meanwhile.
        add_predictions(PredictionFiles.read(out), package, predicted, failures, tried).write(out, JSON_HEAD)
    own = add_predictions(PredictionFiles(), package, predicted, failures, tried).json_text(JSON_HEAD)
    return PredictResult(tuple(predicted), len(tried), package, out, own, failures=tuple(failures))


def list_slides(out: Path, rows: Sequence[SlideRow]) -> None:
    """Add slides to those that the folder has predictions for, so that `view` finds their files."""
    table = StudyLayout(out).work.cohort
    listed = {row.slide: row for row in (read_cohort(table).rows if table.exists() else ())}
    listed |= {row.slide: row for row in rows}
    if listed:
        write_cohort(table, make_cohort(list(listed.values()), table.name))


# ---------------------------------------------------------------------------------------------------- slides


def find_new_slides(places: Sequence[Path]) -> Cohort:
    """Return the slides at these paths (files or folders), each once. Raises ConfigError where two have one name."""
    rows: list[SlideRow] = []
    for place in places:
        path = Path(os.path.abspath(place))
        if path.is_dir():
            rows += [SlideRow(found.name, found.path) for found in find_slides(path)[0]]
        else:
            # All .dcm files of a folder are one slide, which is named after the folder.
            rows.append(SlideRow(path.parent.name if path.suffix.lower() == ".dcm" else path.stem.strip(), path))
    rows = list({row.path: row for row in rows}.values())
    if not rows:
        raise ConfigError("no slide was named", how="Give files of slides, or folders that hold some", code="no-slides")
    places_of: dict[str, list[str]] = {}
    for row in rows:
        places_of.setdefault(name_key(row.slide), []).append(f"{row.path.parent.name}/{row.path.name}")
    twice = [" = ".join(each) for each in places_of.values() if len(each) > 1]
    if twice:
        raise ConfigError(
            f"slides of the same name: {listing(twice)}",
            "predictions and heatmaps are named after the slide, and some file systems ignore case",
            "Predict them one after the other with another --out each, or rename the files",
            code="duplicate-slides",
        )
    return make_cohort(rows, "the slides")


def _open(cohort: Cohort, before: PredictionFiles) -> tuple[list[SlideRow], list[Failure]]:
    """Return slides that exist, and failures of those that do not or have the name of another predicted slide."""
    rows: list[SlideRow] = []
    failures: list[Failure] = []
    for row in cohort.rows:
        if not row.path.exists():
            remedy = "Correct the path, and check that the drive is mounted"
            failures.append(Failure(row.slide, "open", f"{row.path.name}: there is no such file", remedy))
        elif _is_another(row, before):
            reason = f"{row.path.name}: the folder has predictions for another slide of this name, which are kept"
            remedy = "Name another --out; if it is the same slide and its file was changed, remove its rows first"
            failures.append(Failure(row.slide, "open", reason, remedy))
        else:
            rows.append(row)
    return rows, failures


def _is_another(row: SlideRow, before: PredictionFiles) -> bool:
    """Return whether the folder has predictions for another slide of this name, or one that differs in case only."""
    from selfvitmil.package import short_fingerprint
    from selfvitmil.slides import fingerprint

    known = before.contents(row.slide)
    if not known:
        return False
    try:
        own = short_fingerprint(fingerprint(row.path))
    except OSError:
        return False  # it cannot be read, as the next stage reports
    return any(name != row.slide or content not in ("", own) for name, content in known)


# ---------------------------------------------------------------------------------------------------- stages


@dataclass
class _Call:
    """One call: its steps return what succeeded and add to `failures`."""

    engine: Engine
    out: Path
    package: Package
    settings: StudySettings
    failures: list[Failure] = field(default_factory=list)

    def stage(self, name: str) -> str:
        """Return the name of a step in failures.csv: another model may succeed where this one fails."""
        return f"{name} {self.package.tag}"

    def tile(self, rows: Sequence[SlideRow]) -> list[SlideRow]:
        from selfvitmil.tiles import TileJob
        from selfvitmil.tiling import tile_slide

        folder = StudyLayout(self.out).work.tiles_folder
        jobs = {row.slide: TileJob(SlideRef.of(row, self.settings.slide), folder, self.settings) for row in rows}
        return self._map("tile", tile_slide, jobs, rows)

    def embed(self, rows: list[SlideRow]) -> list[SlideRow]:
        from selfvitmil.embed import EmbedJob, embed_slide

        settings = self.settings
        for scale in self.package.encoders:
            tiling = tiling_name(settings.tile, scale.mpp)
            jobs = {
                row.slide: EmbedJob(
                    SlideRef.of(row, settings.slide),
                    self._table(tiling, row.slide),
                    self._bag(tiling, scale.name, row.slide),
                    str(self.package.folder / scale.folder),
                    scale.name,
                    settings.stain.method,
                    settings.embed,
                )
                for row in rows
            }
            rows = self._map("embed", embed_slide, jobs, rows)
        return rows

    def _map(
        self, name: str, work: Callable[[Any], Any], jobs: dict[str, Any], rows: Sequence[SlideRow]
    ) -> list[SlideRow]:
        done, failed = map_slides(self.engine, self.out, self.stage(name), work, jobs, unit="tiles", count=num_tiles)
        self.failures += failed
        return [row for row in rows if row.slide in done]

    def predict(self, predictor: Predictor, rows: Sequence[SlideRow]) -> list[PredictedSlide]:
        """Predict in this process: the number of threads affects the last bits, and `evaluate` is one process."""
        from selfvitmil.bags import check_bag, read_bag
        from selfvitmil.tiles import read_tiles

        predicted: list[PredictedSlide] = []
        for row in rows:
            try:
                bag = replace(read_bag(self._features(row.slide)), slide=row.slide)
                check_bag(bag)
                table = read_tiles(self._table(tiling_name(self.settings.tile), row.slide))
                predicted.append(predictor.predict(row.slide, row.path.name, bag, table))
            except ConfigError:
                raise  # a setting that is invalid for every slide
            except (SelfVitMilError, OSError) as error:
                self.failures.append(Failure.of(row.slide, self.stage(SCORING), error))
        return predicted

    def localize(self, rows: Sequence[SlideRow], predicted: Sequence[PredictedSlide]) -> list[PredictedSlide]:
        """Write heatmaps, pictures and exports; return the predictions with the names of these files."""
        from selfvitmil.localize.heatmap import write_heatmap

        settings, stage = self.settings, self.stage("localize")
        slides = {row.slide: SlideRef.of(row, settings.slide) for row in rows}
        folder = StudyLayout(self.out).heatmaps(self.package.tag)
        jobs: dict[str, ExportJob] = {}
        for each in predicted:
            file = folder / f"{each.slide}.h5"
            write_heatmap(file, each.heatmap, self._provenance(each.slide))
            jobs[each.slide] = ExportJob(file, slides[each.slide], None, settings.localize)
        done, failed = map_slides(self.engine, self.out, stage, export_heatmap, jobs)
        self.failures += failed
        self.failures += [replace(each.failure, stage=stage) for each in done.values() if each.failure is not None]
        write_tables(folder, done, list(jobs))
        return [replace(each, files=_files(folder, each.slide)) for each in predicted]

    def _provenance(self, slide: str) -> str:
        """Return the identity of a heatmap, by which pictures and exports are known to be up to date."""
        features = file_fingerprint(self._features(slide))
        how = self.settings.localize.model_dump(mode="json", include=MAP_SETTINGS)
        identity = self.package.identity
        return json.dumps({"version": VERSION, "package": identity, "features": features, "localize": how})

    def _features(self, slide: str) -> Path:
        """Return the slide's feature file; with two scales the one that joins both."""
        from selfvitmil.evaluate import join_scales
        from selfvitmil.tiles import read_tiles

        scales = self.package.encoders
        tilings = [tiling_name(self.settings.tile, scale.mpp) for scale in scales]
        fine, *coarse = (self._bag(tiling, scale.name, slide) for tiling, scale in zip(tilings, scales, strict=True))
        if not coarse:
            return fine
        name = "+".join(dict.fromkeys(scale.name for scale in scales))
        table = read_tiles(self._table(tilings[0], slide))
        return join_scales(fine, coarse[0], table, tilings[1], self._bag("+".join(tilings), name, slide))

    def _table(self, tiling: str, slide: str) -> Path:
        return StudyLayout(self.out).work.tile_table(tiling, slide)

    def _bag(self, tiling: str, encoder: str, slide: str) -> Path:
        return StudyLayout(self.out).work.feature_file(tiling, encoder, slide)


def _files(folder: Path, slide: str) -> tuple[str, ...]:
    """Return the files of a slide's heatmap, relative to the output folder."""
    products = ExportRecord.read(folder / f"{slide}.json").products.values()
    names = [f"{slide}.h5", *(name for product in products for name in product["files"])]
    return tuple(f"{folder.parent.name}/{folder.name}/{name}" for name in names)
