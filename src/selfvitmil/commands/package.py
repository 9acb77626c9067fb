"""The command `package`: a trained model leaves its study as one folder.

Nothing is trained, and test labels are read only to count classes: models must exist and be up to date. Statistics of
slides are those of training and validation slides, never of test slides. Settings are those that the artefacts were
built with, not those of today's study.toml.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from selfvitmil.cohort import Split
from selfvitmil.cohort.sites import SITE_COLUMNS
from selfvitmil.cohort.table import column_key, listing
from selfvitmil.errors import ArtefactError, CohortError, ConfigError
from selfvitmil.settings import StudySettings, parse, read_toml, tiling_name, to_toml, without_removed
from selfvitmil.stages.base import StageResult
from selfvitmil.stages.localize import Mapper, with_staging
from selfvitmil.stages.train import prepare, results_name
from selfvitmil.store.layout import StudyLayout, model_folder
from selfvitmil.study import FeatureChoice, Features, Study, encoder_source, split_features_name

if TYPE_CHECKING:
    from selfvitmil.encoder import Encoder
    from selfvitmil.evaluate import Case, Cases, Fitted, Prediction, Trial
    from selfvitmil.evaluate.protocol import Stored
    from selfvitmil.package import TrainingDistribution
    from selfvitmil.tiles import TileTable


AGAIN = "Run `selfvitmil tile`, `embed` and `train` again, then package"


@dataclass(frozen=True)
class PackageResult(StageResult):
    """A packaged model."""

    out: Path
    split: str
    num_models: int
    num_bytes: int
    evaluated: bool
    """Whether the model card has metrics of these models on their test set."""


def package(
    of: Study, out: Path, choice: FeatureChoice, split: str | None = None, results: str | None = None
) -> PackageResult:
    """Write the models of one split, and all that inference on new slides needs, into the folder `out`.

    `results` names the folder of results that the model card quotes, where it is not the default one.
    """
    from selfvitmil.evaluate import hold_out_test_labels, stored_models
    from selfvitmil.evaluate.decisions import package_sets
    from selfvitmil.evaluate.protocol import validation_predictions
    from selfvitmil.package import SETTINGS, PackageParts, check_target, model_card, write_package

    study, settings = of.root, of.settings
    _check_asked(choice, settings)
    check_target(out)
    with of.lock("package"):
        lines, learning = prepare(of, choice, "package")
        cases, splits, features = learning.cases, learning.splits, learning.features
        chosen = _choose_split(splits, split)
        if features.by_split:
            choice = replace(choice, encoder=None)  # the split's own, which its features name
            features = replace(features.by_split[chosen.name], encoder=features.encoder, models=features.models)
        trial, models = (
            hold_out_test_labels(cases, [chosen], settings.evaluate),
            features.models / settings.train.aggregator,
        )
        stored = stored_models(settings.train.aggregator, trial, settings.train, models)
        fitted = stored.fitted
        settings, _ = with_staging(settings, cases.cohort)
        if len(splits) == 1:
            settings = _with_heatmap_source(study, settings, trial, cases, features, stored)
        tables = _tables(study, features, trial, settings)
        carried = _carried_settings(study, features, tables, settings)
        scales = _scales(study, choice, features, carried, tables)
        ood = _distribution(trial, tables, carried, settings)
        about = _about(cases, chosen, trial, fitted, scales, features, settings)
        about["evaluation"], tested = _evaluation(study, results, about, fitted, features, settings)
        validated = validation_predictions(fitted, trial)
        about["reference"] = _references([*validated, *tested], cases, settings)
        if cases.outcome is None:
            about["prediction_sets"] = package_sets(validated, cases.class_names, settings.evaluate.coverage)
        if about["evaluation"] is not None:
            about["evaluation"]["transductive"] = len(trial.transductive.get(chosen.name, ()))
            about["evaluation"]["subgroups"] = _subgroups(tested, cases, settings)
        contents = PackageParts(
            about,
            model_card(about, ood, carried),
            to_toml(carried, SETTINGS),
            ood,
            {scale.folder: scale.encoder for scale in scales},
            {run.seed: model_folder(models, chosen.name, run.seed) for run in fitted.runs},
        )
        write_package(out, contents)
    return PackageResult(
        out,
        chosen.name,
        len(fitted.runs),
        sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
        about["evaluation"] is not None,
        failures=cases.failures,
        notes=tuple(lines),
    )


def _with_heatmap_source(
    study: Path, settings: StudySettings, trial: Trial, cases: Cases, features: Features, stored: Stored
) -> StudySettings:
    """What annotated validation slides choose to show in heatmaps, as `localize` takes it; new slides have none."""
    from selfvitmil.aggregate.train import BagStore

    mapper = Mapper(study, settings, trial, cases.cohort, features, "")
    source = mapper.choose_source(list(stored.modules.values()), BagStore.of(settings.train))
    if source is None:
        return settings
    return settings.model_copy(update={"localize": settings.localize.model_copy(update={"score": source.kind})})


def _check_asked(choice: FeatureChoice, settings: StudySettings) -> None:
    if choice.folder is not None:
        raise ConfigError(
            "--features with package",
            "a package embeds new slides itself, and feature files of other tools come without an encoder",
            "Embed the slides in the study (`selfvitmil embed`), train on those features, and package that",
            code="package-needs-encoder",
        )
    if settings.evaluate.protocol == "optimistic":
        raise ConfigError(
            "evaluate.protocol 'optimistic' with package",
            "epochs and thresholds chosen on test slides do not hold on new slides",
            "Train by the honest protocol and package that",
            code="package-optimistic",
        )


def _choose_split(splits: Sequence[Split], wanted: str | None) -> Split:
    names = [split.name for split in splits]
    if wanted is None and len(splits) > 1:
        raise ConfigError(
            f"--split is missing, and there are {len(splits)}: {listing(names)}",
            "each has models of its own",
            "Name the one to package",
            code="split-needed",
        )
    for split in splits:
        if wanted in (None, split.name):
            return split
    raise ConfigError(
        f"--split {wanted}: there is no such split", how=f"There are {listing(names)}", code="unknown-split"
    )


# ---------------------------------------------------------------------------------------------------- artefacts


def _tables(study: Path, features: Features, trial: Trial, settings: StudySettings) -> dict[str, TileTable]:
    """Return the tile tables of training and validation slides, checked to be those of their embeddings."""
    from selfvitmil.bags import read_bag
    from selfvitmil.tiles import read_tiles

    folder = StudyLayout(study).tiling(tiling_name(settings.tile))
    tables: dict[str, TileTable] = {}
    for case in _known(trial):
        path = folder / f"{case.slide}.h5"
        if not path.exists():
            why = "a package tells what the training slides were like"
            raise ArtefactError(
                f"{case.slide}: its tile table is gone", why, "Run `selfvitmil tile` again", code="no-tile-table"
            )
        tables[case.slide] = table = read_tiles(path)
        made_from = json.loads(read_bag(features.files[case.slide]).attributes.get("made_from", "{}"))
        if made_from.get("tiles") != table.digest:
            why = "they were cut anew since, or its feature file is not of this study"
            raise ArtefactError(f"{case.slide}: its embeddings are not of its tiles", why, AGAIN, code="stale-features")
    return tables


def _known(trial: Trial) -> tuple[Case, ...]:
    """Training and validation slides."""
    return (*trial.splits[0].train, *trial.splits[0].val)


def _carried_settings(
    study: Path, features: Features, tables: Mapping[str, TileTable], settings: StudySettings
) -> StudySettings:
    """Return the settings that tiled, stained and embedded these slides, without those of this study's machine."""
    info = {slide: _made_with(StudyLayout(study).tile_table(tiling_name(settings.tile), slide)) for slide in tables}
    first = next(iter(info.values()))
    others = [slide for slide, each in info.items() if each != first]
    if others:
        what = f"tile tables made with different settings, as those of {listing(others, 3)}"
        raise ArtefactError(what, "a package has one way to cut a slide", AGAIN, code="mixed-tile-settings")
    if first["tissue"]["method"] == "own":
        raise ConfigError(
            "tissue.method 'own' with package",
            "new slides have no masks of their own",
            "Tile with tissue.method otsu or saturation, then embed, train and package that",
            code="package-own-masks",
        )
    # Slides of another place must not inherit the microns per pixel that were given for those of this one.
    first = {**first, "slide": {**first["slide"], "mpp": None}}
    beside = next(iter(features.files.values())).parent / "settings.toml"
    used = parse(without_removed(read_toml(beside)), beside.name) if beside.exists() else settings
    embed = used.embed
    carried = {
        **first,
        # Embedding may leave colours as scanned although tiling fitted the stains.
        "stain": {**first["stain"], "method": used.stain.method},
        # The encoder in the package says its layout itself.
        "embed": embed.model_copy(update={"layout": None, "device": "auto", "readers": None}).model_dump(),
        "localize": settings.localize.model_dump(exclude={"of_class", "parts"}),
    }
    return parse(carried, "the settings of the study's tiles")


def _made_with(table: Path) -> dict[str, Any]:
    """Settings of a tile table, as its file tells them."""
    from selfvitmil.store.files import open_hdf5

    with open_hdf5(table) as file:
        return json.loads(str(cast("Any", file.attrs["settings"])))


@dataclass(frozen=True, eq=False)
class _Scale:
    """One resolution and its encoder."""

    folder: str
    """Of the encoder in the package."""
    name: str
    mpp: float
    encoder: Encoder


def _scales(
    study: Path, choice: FeatureChoice, features: Features, settings: StudySettings, tables: Mapping[str, TileTable]
) -> list[_Scale]:
    """Return the encoder of the tiles and, with features of two scales, that of the tiles around them."""
    fine = _scale(study, "encoder", choice.encoder, features.files, settings.tile.mpp, tables)
    if features.coarse is None:
        return [fine]
    mpp = settings.tile.parent_mpp[0]
    wanted = choice.coarse_encoder or choice.encoder
    coarse = _scale(study, "encoder_coarse", wanted, features.coarse.files, mpp, tables)
    return [fine, replace(coarse, folder="encoder") if coarse.name == fine.name else coarse]


def _scale(
    study: Path, folder: str, wanted: str | None, files: Mapping[str, Path], mpp: float, slides: Mapping[str, Any]
) -> _Scale:
    """Return the encoder of these feature files, checked to be the one that they were built with."""
    from selfvitmil.bags import read_bag
    from selfvitmil.encoder import load_encoder

    name = next(iter(files.values())).parent.name.removeprefix("features_")
    plain, layout = split_features_name(name)
    source = encoder_source(study, plain if wanted in (None, name) else wanted)
    if wanted is None and source == plain:
        raise ConfigError(
            f"{plain}: this encoder is not in the study's folder encoders/",
            "a package carries its encoder along",
            "Give --encoder with what `selfvitmil embed` was given: a folder, a checkpoint, a timm or hub name",
            code="encoder-not-in-study",
        )
    encoder = load_encoder(source, layout=layout)
    identity = encoder.identity()
    for slide in slides:
        made_from = json.loads(read_bag(files[slide]).attributes.get("made_from", "{}"))
        if made_from.get("encoder") != identity:
            what = f"{slide}: its features were built by another encoder than {name} is now"
            raise ArtefactError(
                what, "a package of this encoder would use other embeddings", AGAIN, code="stale-features"
            )
    return _Scale(folder, name, mpp, encoder)


def _distribution(
    trial: Trial, tables: Mapping[str, TileTable], carried: StudySettings, settings: StudySettings
) -> TrainingDistribution:
    from selfvitmil.aggregate.train import BagStore
    from selfvitmil.package import SlideStatistics, fit_distribution

    store, split = BagStore.of(settings.train), trial.splits[0]
    train, val = (
        [SlideStatistics.of(tables[case.slide], store.moments(trial.bag(case))) for case in part]
        for part in (split.train, split.val)
    )
    return fit_distribution(train, val, carried.tile.mpp)


# ---------------------------------------------------------------------------------------------------- package.json


def _about(
    cases: Cases,
    split: Split,
    trial: Trial,
    fitted: Fitted,
    scales: Sequence[_Scale],
    features: Features,
    settings: StudySettings,
) -> dict[str, Any]:
    """Return the contents of package.json without versions and checksums; names neither slides nor patients."""
    from selfvitmil.aggregate.recipes import recipe_of

    name = settings.train.aggregator
    tuning = fitted.tuned.get(split.name)
    train = settings.train if tuning is None else tuning.apply(name, settings.train)
    recipe = recipe_of(name, train).for_dim(cases.dim).to_json()
    del recipe["keep_min_lr"]  # it says how to scale, which is done
    chosen = next((run.evidence for run in fitted.runs if run.split == split.name and run.evidence), None)
    if chosen is not None:
        recipe["options"] = {**recipe["options"], "evidence": chosen.evidence}
    return {
        "name": results_name(None, f"{features.encoder}_{name}", settings),
        "method": name,
        "classes": list(cases.class_names),
        "positive": cases.class_names[1] if cases.outcome is None and cases.num_classes == 1 else None,
        **_about_outcome(cases, fitted, split),
        "encoders": [{"folder": scale.folder, "name": scale.name, "mpp": scale.mpp} for scale in scales],
        "dim": cases.dim,
        "protocol": trial.evaluate.protocol,
        "split": split.name,
        "seeds": [run.seed for run in fitted.runs],
        "choice": fitted.choices[split.name, None].to_json(),
        "chosen_on": {"part": trial.where, "slides": _counts(cases, split.val)["slides"]},
        "data": {part: _counts(cases, getattr(split, part)) for part in ("train", "val", "test")},
        "training": {
            "recipe": recipe,
            **({} if tuning is None else {"tuned": tuning.words}),
            "epochs": [run.epoch for run in fitted.runs],
            "encoders": [
                {"architecture": scale.encoder.config.architecture, "trained_on": scale.encoder.config.trained_on}
                for scale in scales
            ],
        },
    }


def _about_outcome(cases: Cases, fitted: Fitted, split: Split) -> dict[str, Any]:
    """Return what package.json tells of another outcome than classes; scores are sorted, so that none has a name."""
    from selfvitmil.evaluate import ensemble_scores

    if cases.outcome is None:
        return {}
    scores = sorted(ensemble_scores(fitted, split.val).tolist())
    return {"outcome": cases.outcome.to_json(), "validation_scores": scores}


def _counts(cases: Cases, slides: Sequence[str]) -> dict[str, Any]:
    patients = {cases.by_slide[slide].patient for slide in slides}
    if cases.outcome is not None:
        targets = [cases.by_slide[slide].label for slide in slides]
        described = cases.outcome.describe(targets) if targets else "no slides"
        return {"slides": {"slides": len(slides)}, "patients": len(patients), "described": described}
    counts: Counter[str] = Counter(cases.class_names[int(cases.by_slide[slide].label)] for slide in slides)
    return {"slides": {name: counts[name] for name in cases.class_names}, "patients": len(patients)}


def _evaluation(
    study: Path,
    results: str | None,
    about: Mapping[str, Any],
    fitted: Fitted,
    features: Features,
    settings: StudySettings,
) -> tuple[dict[str, Any] | None, list[Prediction]]:
    """Return metrics and predictions of these models on their test set; None where there are none, or other models'."""
    from selfvitmil.evaluate import read_predictions
    from selfvitmil.package import CARD_METRICS

    folder = StudyLayout(study).results(results_name(results or about["name"], "", settings))
    if results is not None and not folder.is_dir():
        what = f"--results {results}: there is no such folder of results"
        raise ConfigError(what, how="See results/ in the study", code="unknown-results")
    try:
        rows, _ = read_predictions(folder / "predictions.csv")
        metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        methods, confidence = metrics["methods"], float(metrics["settings"]["confidence"])
    except (ArtefactError, OSError, ValueError, KeyError, TypeError):
        return None, []
    method, split = about["method"], about["split"]
    scores = {
        (row.seed, row.slide): row.score for row in rows if (row.method, row.split, row.part) == (method, split, "val")
    }
    info = next((each for each in methods if each["method"] == method), None)
    if info is None:
        return None, []
    same = [each for each in info["choices"] if (each["split"], each["seed"]) == (split, "ensemble")]
    ours = {(run.seed, slide): each.probabilities for run in fitted.runs for slide, each in run.chosen_on.items()}
    if not same or any(same[0][key] != about["choice"][key] for key in about["choice"]):
        return None, []  # of another threshold or calibration
    if any(scores.get(key) != value for key, value in ours.items()):
        return None, []  # of other models
    whole = info["slide"]["splits"].get(split, info["slide"])["ensemble"]
    if whole is None:
        return None, []
    outcome = fitted.choices[split, None].outcome
    figures = {
        name: {key: whole[name].get(key) for key in ("value", "low", "high")}
        for name in (CARD_METRICS if outcome is None else outcome.shown_metrics)
        if whole.get(name)
    }
    tested = [row for row in rows if (row.method, row.split, row.part) == (method, split, "test")]
    return {"num": whole["num"], "confidence": confidence, "figures": figures}, tested


def _subgroups(tested: Sequence[Prediction], cases: Cases, settings: StudySettings) -> list[dict[str, Any]]:
    """Return metrics of the test slides by site, where the cohort names several; the sites themselves stay here."""
    from selfvitmil.evaluate.subgroups import subgroup_tables

    slides = {row.slide for row in tested}
    found: list[dict[str, Any]] = []
    for column in cases.cohort.extra_columns if cases.outcome is None else ():
        values = {row.slide: row.value(column) for row in cases.cohort.rows if row.slide in slides}
        if column_key(column) not in SITE_COLUMNS or len(set(values.values()) - {None}) < 2:
            continue
        try:
            table = subgroup_tables(tested, {column: values}, cases.class_names, settings.evaluate)[0]
        except CohortError:
            continue  # more values than can be subgroups
        groups = [
            {
                "slides": group.num_slides,
                "metrics": {
                    name: None if each is None else {"value": each.value, "low": each.low, "high": each.high}
                    for name, each in group.metrics.items()
                },
            }
            for group in table.groups
        ]
        found.append({"column": column, "groups": groups})
    return found


def _references(predictions: Sequence[Prediction], cases: Cases, settings: StudySettings) -> list[dict[str, Any]]:
    """Return how the models scored their validation and test slides, without names: what drift is measured against."""
    from selfvitmil.evaluate.external import reference_scores

    parts: tuple[Literal["val", "test"], ...] = ("val", "test")
    found = [reference_scores(predictions, part, cases.class_names, settings.evaluate, cases.outcome) for part in parts]
    return [each.to_json() for each in found if each is not None]
