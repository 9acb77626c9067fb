"""The command `package`: a trained model leaves its study as one folder.

Nothing is trained, and test labels are read only to count classes: models must exist and be up to date. Statistics of
slides are those of training and validation slides, never of test slides. Settings are those that the artefacts were
built with, not those of today's study.toml.

Of several splits (k-fold) one is packaged, or the models of all as one ensemble, whose threshold and calibration come
from the validation slides of all splits. `train.split all` is one split, of a final fit. Neither the ensemble nor the
final fit has a test set: their card quotes the results of the splits, and says so (`package_results`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from selfvitmil.cohort import Split
from selfvitmil.cohort.table import listing
from selfvitmil.commands.package_results import quoted_results
from selfvitmil.errors import ArtefactError, ConfigError
from selfvitmil.settings import StudySettings, parse, read_toml, tiling_name, to_toml, without_removed
from selfvitmil.stages.base import StageResult
from selfvitmil.stages.localize import Mapper, with_staging
from selfvitmil.stages.train import prepare, results_name
from selfvitmil.store.layout import StudyLayout, model_folder
from selfvitmil.study import FeatureChoice, Features, Study, encoder_source, remembered_choice, split_features_name

if TYPE_CHECKING:
    from selfvitmil.encoder import Encoder
    from selfvitmil.evaluate import Case, Cases, Fitted, Prediction, Trial
    from selfvitmil.evaluate.predictions import Choice
    from selfvitmil.evaluate.protocol import Stored
    from selfvitmil.outcomes import Outcome
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
    """Whether the model card has metrics of these models on their test set, or of their splits (`fit`)."""
    num_splits: int = 1
    fit: str | None = None
    """`ensemble` for the models of all splits, `final fit` for models of all labelled slides: neither is tested."""


def package(
    of: Study, out: Path, choice: FeatureChoice, split: str | None = None, results: str | None = None
) -> PackageResult:
    """Write the models of one split or of all, and all that inference on new slides needs, into the folder `out`.

    `split` is needed where there are several: the name of one, or `ensemble`. `results` names the folder of results
    that the model card quotes, where it is not the default one.
    """
    from selfvitmil.evaluate import hold_out_test_labels, stored_models
    from selfvitmil.evaluate.decisions import package_sets
    from selfvitmil.evaluate.protocol import pooled_validation, validation_predictions
    from selfvitmil.package import (
        ENSEMBLE,
        FINAL_FIT,
        SETTINGS,
        PackageParts,
        check_target,
        model_card,
        model_names,
        write_package,
    )

    study, settings = of.root, of.settings
    _check_asked(remembered_choice(of, choice), settings)
    check_target(out)
    with of.lock("package"):
        lines, learning = prepare(of, choice, "package")
        cases, splits, features = learning.cases, learning.splits, learning.features
        chosen = _choose_splits(splits, split)
        fit = ENSEMBLE if len(chosen) > 1 else FINAL_FIT if settings.train.split == "all" else None
        if fit == ENSEMBLE:
            _check_scale(cases.outcome, chosen)
        if features.by_split:
            own = _own_features(features, chosen)
            choice = replace(choice, encoder=None)  # the split's own, which its features name
            features = replace(own, encoder=features.encoder, models=features.models)
        trial, models = (
            hold_out_test_labels(cases, chosen, settings.evaluate, may_be_final=True),
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
        name = chosen[0].name if len(chosen) == 1 else ENSEMBLE
        if fit == ENSEMBLE:
            decision, validated = pooled_validation(fitted, trial, name)
        else:
            decision, validated = fitted.choices[name, None], validation_predictions(fitted, trial)
        about = _about(cases, name, chosen, trial, fitted, (decision, validated), scales, features, settings)
        about |= {} if fit is None else {"fit": fit, "folds": len(chosen)}
        about |= quoted_results(of, results, about, learning, trial, fitted, validated)
        if cases.outcome is None:
            about["prediction_sets"] = package_sets(validated, cases.class_names, settings.evaluate.coverage)
        places = model_names(about["seeds"], len(chosen))
        contents = PackageParts(
            about,
            model_card(about, ood, carried),
            to_toml(carried, SETTINGS),
            ood,
            {scale.folder: scale.encoder for scale in scales},
            {name: model_folder(models, run.split, run.seed) for name, run in zip(places, fitted.runs, strict=True)},
        )
        write_package(out, contents)
    return PackageResult(
        out,
        name,
        len(fitted.runs),
        sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
        about["evaluation"] is not None,
        len(chosen),
        fit,
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


def _choose_splits(splits: Sequence[Split], wanted: str | None) -> tuple[Split, ...]:
    """Return the split whose models are packaged, or all with --split ensemble."""
    from selfvitmil.package import ENSEMBLE

    names = [split.name for split in splits]
    if wanted is None and len(splits) > 1:
        raise ConfigError(
            f"--split is missing, and there are {len(splits)}: {listing(names)}",
            "each has models of its own",
            "Package all as one ensemble (--split ensemble), or one of them; for one model of all slides run "
            "`selfvitmil train STUDY --train.split all`, then package with --train.split all",
            code="split-needed",
        )
    for split in splits:
        if wanted in (None, split.name):
            return (split,)
    if wanted == ENSEMBLE and len(splits) > 1:
        return tuple(splits)
    if wanted == ENSEMBLE:
        raise ConfigError(
            f"--split ensemble: there is one split only, {names[0]}",
            "an ensemble is of several (k-fold)",
            "Leave --split out: all seeds of the split are packaged",
            code="one-split",
        )
    how = f"There are {listing(names)}{', and ensemble for all of them' if len(splits) > 1 else ''}"
    if wanted == "all":
        how = "For a final fit on all slides run `selfvitmil train STUDY --train.split all`, then package with the same"
    raise ConfigError(f"--split {wanted}: there is no such split", how=how, code="unknown-split")


def _check_scale(outcome: Outcome | None, chosen: Sequence[Split]) -> None:
    """ConfigError where scores by models of different splits cannot be averaged, nor have one threshold."""
    if outcome is not None and not outcome.is_absolute:
        raise ConfigError(
            f"--split ensemble with the outcome {outcome.kind}",
            "the risks of every split are on a scale of their own, so they have neither a mean nor one cut",
            f"Package one split (--split {chosen[0].name}), or a final fit: `selfvitmil train STUDY "
            "--train.split all`, then package with --train.split all",
            code="split-scales",
        )


def _own_features(features: Features, chosen: Sequence[Split]) -> Features:
    """Return the features of the split's own encoder; ConfigError for several splits with an encoder each."""
    if len(chosen) == 1:
        return features.by_split[chosen[0].name]
    first = f"{features.encoder}_{chosen[0].name}"
    raise ConfigError(
        f"--split ensemble: {features.encoder} is {len(chosen)} encoders, one for every split",
        "a package embeds the tiles of a slide once, by one encoder",
        f"Package one split (--split {chosen[0].name}), or embed and train all splits on one encoder. For a final fit "
        f"one of them will do: --encoder {first} --train.split all",
        code="encoder-per-split",
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
    """Training and validation slides of all splits, each once."""
    return _distinct(case for split in trial.splits for case in (*split.train, *split.val))


def _distinct(cases: Iterable[Case]) -> tuple[Case, ...]:
    return tuple({case.slide: case for case in cases}.values())


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

    # Slides that the OOD threshold is calibrated on must not be among those that they are compared with. Of several
    # splits the validation slides of the first are kept apart, and the others together are what is usual.
    store, val = BagStore.of(settings.train), trial.splits[0].val
    apart = {case.slide for case in val}
    train, val = (
        [SlideStatistics.of(tables[case.slide], store.moments(trial.bag(case))) for case in part]
        for part in ([case for case in _known(trial) if case.slide not in apart], val)
    )
    return fit_distribution(train, val, carried.tile.mpp)


# ---------------------------------------------------------------------------------------------------- package.json


def _about(
    cases: Cases,
    split: str,
    chosen: Sequence[Split],
    trial: Trial,
    fitted: Fitted,
    decided: tuple[Choice, Sequence[Prediction]],
    scales: Sequence[_Scale],
    features: Features,
    settings: StudySettings,
) -> dict[str, Any]:
    """Return the contents of package.json without versions and checksums; names neither slides nor patients."""
    name, (decision, validated) = settings.train.aggregator, decided
    recipes = [_recipe(each.name, cases, fitted, settings) for each in chosen]
    tuned = [fitted.tuned[each.name].words for each in chosen if each.name in fitted.tuned]
    parts = {
        part: tuple(dict.fromkeys(slide for each in chosen for slide in getattr(each, part)))
        for part in ("train", "val", "test")
    }
    return {
        "name": results_name(None, f"{features.encoder}_{name}", settings),
        "method": name,
        "classes": list(cases.class_names),
        "positive": cases.class_names[1] if cases.outcome is None and cases.num_classes == 1 else None,
        **_about_outcome(cases, validated),
        **({} if cases.whole is None else {"joint": {"place": cases.target_place, "with": list(cases.trained_with)}}),
        "encoders": [{"folder": scale.folder, "name": scale.name, "mpp": scale.mpp} for scale in scales],
        "dim": cases.dim,
        "protocol": trial.evaluate.protocol,
        "split": split,
        "seeds": list(dict.fromkeys(run.seed for run in fitted.runs)),
        "choice": decision.to_json(),
        "chosen_on": {"part": trial.where, "slides": _counts(cases, parts["val"])["slides"]},
        "data": {part: _counts(cases, slides) for part, slides in parts.items()},
        "training": {
            "recipe": recipes[0],
            # Splits that tune their settings, or choose their kind of evidence, may differ.
            **({} if all(each == recipes[0] for each in recipes) else {"recipes": recipes}),
            **({"tuned": tuned[0] if len(chosen) == 1 else tuned} if tuned else {}),
            "epochs": [run.epoch for run in fitted.runs],
            "encoders": [
                {"architecture": scale.encoder.config.architecture, "trained_on": scale.encoder.config.trained_on}
                for scale in scales
            ],
        },
    }


def _about_outcome(cases: Cases, validated: Sequence[Prediction]) -> dict[str, Any]:
    """Return what package.json tells of another outcome than classes; scores are sorted, so that none has a name."""
    if cases.outcome is None:
        return {}
    scores = [list(score) for score in sorted(row.score for row in validated)]
    return {"outcome": cases.outcome.to_json(), "validation_scores": scores}


def _recipe(split: str, cases: Cases, fitted: Fitted, settings: StudySettings) -> dict[str, Any]:
    """Return the numbers that the models of a split were trained by."""
    from selfvitmil.aggregate.recipes import recipe_of

    name, tuning = settings.train.aggregator, fitted.tuned.get(split)
    train = settings.train if tuning is None else tuning.apply(name, settings.train)
    recipe = recipe_of(name, train).for_dim(cases.dim).to_json()
    del recipe["keep_min_lr"]  # it says how to scale, which is done
    found = next((run.evidence for run in fitted.runs if run.split == split and run.evidence), None)
    if found is not None:
        recipe["options"] = {**recipe["options"], "evidence": found.evidence}
    return recipe


def _counts(cases: Cases, slides: Sequence[str]) -> dict[str, Any]:
    patients = {cases.by_slide[slide].patient for slide in slides}
    if cases.outcome is not None:
        targets = [cases.by_slide[slide].label for slide in slides]
        described = cases.outcome.describe(targets) if targets else "no slides"
        return {"slides": {"slides": len(slides)}, "patients": len(patients), "described": described}
    counts: Counter[str] = Counter(cases.class_names[int(cases.by_slide[slide].label)] for slide in slides)
    return {"slides": {name: counts[name] for name in cases.class_names}, "patients": len(patients)}
