"""The command `predict`: inference on new slides with a packaged model, without a study.

A slide goes the way of the stages, by their own functions (`tile_slide`, `embed_slide`, `score_tiles`,
`build_heatmap`) and with the package's settings, so it gets the numbers that `evaluate` gives it, to the bit on the
same machine. Tiles and embeddings stay in `work/` below the answers: the same command again does only what is missing.

    OUT/predictions.csv, predictions.json   the answers of all calls into this folder, by slide and model
    OUT/maps/<model>/<slide>.h5, _red.png, .geojson ...
    OUT/failures.csv                        slides that could not be done
    OUT/work/tiles/, work/bags/             may be removed
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil.cohort import Cohort, SlideRow
from selfvitmil.cohort.files import find_slides
from selfvitmil.cohort.table import listing, make_cohort, name_key
from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError, SelfVitMilError
from selfvitmil.localize.export import ExportJob, ExportRecord, export_heatmap
from selfvitmil.settings import StudySettings, parse, tiling_name, with_user_engine
from selfvitmil.slides import SlideRef
from selfvitmil.stages.localize import MAP_SETTINGS, VERSION, write_tables
from selfvitmil.store.failures import Failure, record_failures
from selfvitmil.store.files import file_fingerprint
from selfvitmil.store.layout import StudyLayout
from selfvitmil.study.folder import Summary, map_slides, num_tiles, open_study

if TYPE_CHECKING:
    from selfvitmil.package import Answer, Package, Predictions


@dataclass(frozen=True)
class PredictResult:
    """What one call of `predict` found."""

    summary: Summary
    json: str
    """The answers of this call alone, in the form of predictions.json."""


STAGES = ("tile", "embed", "judge", "localize")
"""Those that depend on the model."""


def _stage(name: str, package: Package) -> str:
    """What failures.csv calls a stage: another model may do what this one cannot."""
    return f"{name} {package.tag}"


def predict_settings(package: Package, flags: Mapping[str, Any]) -> StudySettings:
    """The package's settings with what was typed on top of the sections slide, embed, localize and engine.

    A package holds no engine settings: they come from flags and the user's own file.
    """
    told = package.settings.model_dump(mode="json")
    for section, values in with_user_engine(flags).items():
        told[section] = {**told[section], **values}
    settings = parse(told, "the command line")
    if settings.embed.layout is not None:
        raise ConfigError(
            f"embed.layout {settings.embed.layout!r} with predict",
            "the model was trained on the layout that its own encoder says",
            "Leave embed.layout out",
        )
    return settings


def predict(
    package: Package, slides: Sequence[Path], out: Path, settings: StudySettings, engine: Engine, *, maps: bool = True
) -> PredictResult:
    """Run inference on slides (files, or folders of them) and add the answers to those in the folder `out`.

    An answer replaces that of the same model for the same slide; answers for other slides and of other models stay.
    """
    from selfvitmil.package import JSON_HEAD, Predictions, Predictor, add_answers

    if Path(os.path.abspath(out)) == package.folder:
        raise ConfigError(f"{out.name}: this is the folder of the model", "it must stay as it is", "Name another --out")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out.name}: this is a file", "answers go into a folder", "Name another --out")
    cohort = find_new_slides(slides)
    predictor = Predictor(package, settings.localize, settings.embed.device)
    with open_study(out, "predict"):
        before = Predictions.read(out)  # one that cannot be read is told before hours of work
        tried = [row.slide for row in cohort.rows]
        rows, failures = _open(cohort, before)
        rows = _tile(engine, out, rows, package, settings, failures)
        rows = _embed(engine, out, rows, package, settings, failures)
        answers = _predict(predictor, out, rows, package, settings, failures)
        if maps:
            answers = _localize(engine, out, rows, answers, package, settings, failures)
        for stage in ("open", *(_stage(name, package) for name in STAGES)):
            record_failures(out, stage, tried, [each for each in failures if each.stage == stage])
        # Read again: somebody may have written remarks into the table meanwhile.
        add_answers(Predictions.read(out), package, answers, failures, tried).write(out, JSON_HEAD)
    told = add_answers(Predictions(), package, answers, failures, tried).json_text(JSON_HEAD)
    return PredictResult(_summary(answers, len(tried), failures, package, out), told)


# ---------------------------------------------------------------------------------------------------- slides


def find_new_slides(places: Sequence[Path]) -> Cohort:
    """The slides that were named, or lie in folders that were named, each once; ConfigError where two have one name."""
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
        raise ConfigError("no slide was named", how="Give files of slides, or folders that hold some")
    places_of: dict[str, list[str]] = {}
    for row in rows:
        places_of.setdefault(name_key(row.slide), []).append(f"{row.path.parent.name}/{row.path.name}")
    twice = [" = ".join(each) for each in places_of.values() if len(each) > 1]
    if twice:
        raise ConfigError(
            f"slides of the same name: {listing(twice)}",
            "answers and maps are files of a slide's name, and some file systems ignore case",
            "Predict them one after the other with another --out each, or rename the files",
        )
    return make_cohort(rows, "the slides")


def _open(cohort: Cohort, before: Predictions) -> tuple[list[SlideRow], list[Failure]]:
    """Slides that are there, and failures of those that are not, or that have the name of another one answered here."""
    rows: list[SlideRow] = []
    failures: list[Failure] = []
    for row in cohort.rows:
        if not row.path.exists():
            how = "Correct the path, and see that the drive is there"
            failures.append(Failure(row.slide, "open", f"{row.path.name}: there is no such file", how))
        elif _is_another(row, before):
            reason = f"{row.path.name}: the folder has answers for another slide of this name, which stay"
            how = "Name another --out; if it is the same slide and its file was changed, remove its rows first"
            failures.append(Failure(row.slide, "open", reason, how))
        else:
            rows.append(row)
    return rows, failures


def _is_another(row: SlideRow, before: Predictions) -> bool:
    """Whether answers in the folder are of another slide of this name, or of one that differs in case alone."""
    from selfvitmil.package import short_fingerprint
    from selfvitmil.slides import fingerprint

    known = before.contents(row.slide)
    if not known:
        return False
    try:
        own = short_fingerprint(fingerprint(row.path))
    except OSError:
        return False  # it cannot be read, as the next stage says
    return any(name != row.slide or content not in ("", own) for name, content in known)


# ---------------------------------------------------------------------------------------------------- stages


def _tile(
    engine: Engine,
    out: Path,
    rows: Sequence[SlideRow],
    package: Package,
    settings: StudySettings,
    failures: list[Failure],
) -> list[SlideRow]:
    from selfvitmil.tiles import TileJob, tile_slide

    jobs = {
        row.slide: TileJob(SlideRef.of(row, settings.slide), StudyLayout(out).work.tiles_folder, settings)
        for row in rows
    }
    done, failed = map_slides(engine, out, _stage("tile", package), tile_slide, jobs, unit="tiles", count=num_tiles)
    failures += failed
    return [row for row in rows if row.slide in done]


def _embed(
    engine: Engine,
    out: Path,
    rows: Sequence[SlideRow],
    package: Package,
    settings: StudySettings,
    failures: list[Failure],
) -> list[SlideRow]:
    from selfvitmil.embed import EmbedJob, embed_slide

    rows = list(rows)
    for scale in package.encoders:
        tiling = tiling_name(settings.tile, scale.mpp)
        jobs = {
            row.slide: EmbedJob(
                SlideRef.of(row, settings.slide),
                _table(out, tiling, row.slide),
                _bag(out, tiling, scale.name, row.slide),
                str(package.folder / scale.folder),
                scale.name,
                settings.stain.method,
                settings.embed,
            )
            for row in rows
        }
        done, failed = map_slides(
            engine, out, _stage("embed", package), embed_slide, jobs, unit="tiles", count=num_tiles
        )
        failures += failed
        rows = [row for row in rows if row.slide in done]
    return rows


def _predict(
    predictor: Any,
    out: Path,
    rows: Sequence[SlideRow],
    package: Package,
    settings: StudySettings,
    failures: list[Failure],
) -> list[Answer]:
    """Here, not by workers: how many threads share a sum is part of its bits, and `evaluate` is one process."""
    from selfvitmil.bags import check_bag, read_bag
    from selfvitmil.tiles import read_tiles

    answers: list[Answer] = []
    for row in rows:
        try:
            bag = replace(read_bag(_joined(out, row.slide, package, settings)), slide=row.slide)
            check_bag(bag)
            table = read_tiles(_table(out, tiling_name(settings.tile), row.slide))
            answers.append(predictor.predict(row.slide, row.path.name, bag, table))
        except ConfigError:
            raise  # what was asked for cannot be, whatever the slide
        except (SelfVitMilError, OSError) as error:
            failures.append(Failure.of(row.slide, _stage("judge", package), error))
    return answers


def _joined(out: Path, slide: str, package: Package, settings: StudySettings) -> Path:
    """The slide's feature file, of both scales where there are two."""
    from selfvitmil.evaluate import join_scales
    from selfvitmil.tiles import read_tiles

    tilings = [tiling_name(settings.tile, scale.mpp) for scale in package.encoders]
    files = [_bag(out, tiling, scale.name, slide) for tiling, scale in zip(tilings, package.encoders, strict=True)]
    fine, *coarse = files
    if not coarse:
        return fine
    name = "+".join(dict.fromkeys(scale.name for scale in package.encoders))
    table = read_tiles(_table(out, tilings[0], slide))
    return join_scales(fine, coarse[0], table, tilings[1], _bag(out, "+".join(tilings), name, slide))


def _localize(
    engine: Engine,
    out: Path,
    rows: Sequence[SlideRow],
    answers: Sequence[Answer],
    package: Package,
    settings: StudySettings,
    failures: list[Failure],
) -> list[Answer]:
    """Maps, pictures and exports as files; the answers with the names of these."""
    from selfvitmil.localize.heatmap import write_heatmap

    slides = {row.slide: SlideRef.of(row, settings.slide) for row in rows}
    folder = StudyLayout(out).heatmaps(package.tag)
    jobs: dict[str, ExportJob] = {}
    for each in answers:
        file = folder / f"{each.slide}.h5"
        write_heatmap(file, each.heatmap, _map_made_from(out, each.slide, package, settings))
        jobs[each.slide] = ExportJob(file, slides[each.slide], None, settings.localize)
    stage = _stage("localize", package)
    made, failed = map_slides(engine, out, stage, export_heatmap, jobs)
    unmade = [replace(each.failure, stage=stage) for each in made.values() if each.failure is not None]
    failures += [*failed, *unmade]
    write_tables(folder, made, list(jobs))
    return [replace(each, files=_files(folder, each.slide)) for each in answers]


def _map_made_from(out: Path, slide: str, package: Package, settings: StudySettings) -> str:
    """Identity of a map, by which pictures and exports know whether they are current."""
    bag = file_fingerprint(_joined(out, slide, package, settings))
    how = settings.localize.model_dump(mode="json", include=MAP_SETTINGS)
    return json.dumps({"version": VERSION, "package": package.identity, "features": bag, "localize": how})


def _files(folder: Path, slide: str) -> tuple[str, ...]:
    """What was written of a slide's map, from the folder of the answers on."""
    products = ExportRecord.read(folder / f"{slide}.json").products.values()
    names = [f"{slide}.h5", *(name for product in products for name in product["files"])]
    return tuple(f"{folder.parent.name}/{folder.name}/{name}" for name in names)


def _table(out: Path, tiling: str, slide: str) -> Path:
    return StudyLayout(out).work.tile_table(tiling, slide)


def _bag(out: Path, tiling: str, encoder: str, slide: str) -> Path:
    return StudyLayout(out).work.feature_file(tiling, encoder, slide)


# ---------------------------------------------------------------------------------------------------- words


def _summary(
    answers: Sequence[Answer], asked: int, failures: Sequence[Failure], package: Package, out: Path
) -> Summary:
    from selfvitmil.localize.detection import RANKS_ONLY
    from selfvitmil.package import RESEARCH_ONLY

    of = f" of {package.about['positive']}" if package.about["positive"] else ""
    header = ("slide", "decision", f"probability{of}", "tiles", "lesions", "outside")
    table: list[tuple[str, ...]] = [header]
    for answer in answers:
        prediction = answer.heatmap.prediction
        own = prediction.classes.index(prediction.decision)
        probability = prediction.probability[0 if len(prediction.probability) == 1 else own]
        outside = ", ".join(dict.fromkeys(each.about for each in answer.outside))
        counts = (str(len(answer.heatmap)), "-" if answer.heatmap.only_ranks else str(len(answer.lesions)))
        table.append((answer.slide, prediction.decision, f"{probability:.4f}", *counts, outside))
    lines = [f"{answer.slide}: {note}" for answer in answers for note in answer.notes]
    if negative := sum(answer.heatmap.only_ranks for answer in answers):
        lines.append(f"{negative} slides are not called positive: there {RANKS_ONLY}")
    choice = package.choice
    if choice.threshold is not None:
        chosen = sum(package.about["chosen_on"]["slides"].values())
        where = f"{choice.threshold_from}, {chosen} slides of split {package.split}"
        lines.append(f"{package.about['positive']} from {choice.threshold:.4f} on ({where})")
    lines.append(
        f"{len(answers)} of {asked} slides predicted by {package.name} {package.identity[:12]}; see {out.name}"
    )
    lines.append(f"{RESEARCH_ONLY}.")
    return Summary(tuple(lines), tuple(failures), tuple(table))
