"""The folder of a packaged model: written whole or not at all, and opened only when it is as it was written.

    package.json          what it is: format version, classes, threshold and where it comes from, data, versions, and
                          the SHA-256 of every other file; `identity` is a hash over all of that
    MODEL_CARD.md         the same for people
    settings.toml         how slides are cut, coloured and embedded
    expected.json, expected.safetensors   what the training slides were like
    encoder/              model.safetensors, config.json; encoder_coarse/ where two scales have different ones
    models/seed<k>/       model.safetensors, config.json of every aggregator of the ensemble; models/fold<n>/seed<k>/
                          where it has the models of several splits

The folder travels between hospitals: it names no slide, no patient and no place on a disk, and it holds no pickle.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from selfvitmil import __version__
from selfvitmil.cohort.table import listing
from selfvitmil.errors import ArtefactError, ConfigError
from selfvitmil.metrics import ConformalThreshold, Interval, Platt, Temperature
from selfvitmil.outcomes import Outcome, outcome_from_json
from selfvitmil.package.ood import TrainingDistribution
from selfvitmil.settings import (
    LARGEST_TILE_MPP,
    SMALLEST_MPP,
    StainSettings,
    StudySettings,
    TissueSettings,
    parse,
    read_toml,
)
from selfvitmil.store.files import (
    check_size,
    file_problem,
    hash_of,
    read_json,
    sha256,
    temporary_beside,
    write_bytes,
    write_text,
)

if TYPE_CHECKING:  # it loads torch, which a folder that is no package need not wait for
    from selfvitmil.evaluate.external import ReferenceScores
    from selfvitmil.evaluate.predictions import Choice

SCHEMA = "selfvitmil.package"
FORMAT_VERSION = 2
SETTINGS: dict[str, set[str]] = {
    "slide": {"reader"},
    "tissue": set(TissueSettings.model_fields) - {"folder"},
    "stain": set(StainSettings.model_fields),
    "tile": {"size_px", "mpp", "overlap_px", "min_tissue", "parent_mpp", "exclude"},
    "embed": {"batch", "precision"},
    "localize": {
        *("score", "scale", "z_limit", "gate"),
        *("lesion_threshold", "min_lesion_mm2", "point_radius_um", "point_min", "staging"),
    },
}
"""The settings that a package may hold: those that decide the numbers of a slide. Where the work runs, devices, paths,
processes, and which files are written are the user's alone. Any other key in a package is refused."""
RESEARCH_ONLY = "For research only: no medical device, not to be used to diagnose or to decide about patients"
MODEL_FACTS = (
    "schema", "format_version", "aggregator", "recipe", "epoch", "split", "seed", "classes", "protocol", "epoch_from",
    "encoder", "tiling",
)  # fmt: skip
"""What stays of a model's config.json; the names of the slides it was trained on do not."""
NOT_OURS = "Do not use this package; ask its author for one that `selfvitmil package` wrote"
ENCODER_FOLDERS = ("encoder", "encoder_coarse")
ENSEMBLE, FINAL_FIT = "ensemble", "final fit"
FITS = (ENSEMBLE, FINAL_FIT)
"""`fit` of package.json, where the package has not the models of one split: of all splits, or of all slides."""
MAX_FOLDS = 1000
MAX_NAME = 200
"""Characters of a name in package.json."""
COPY_AGAIN = "Copy the whole folder again from where it came from"


@dataclass(frozen=True)
class PackagedEncoder:
    """One encoder of a package."""

    folder: str
    name: str
    """What it is called in feature files."""
    mpp: float
    """Microns per pixel of the tiles it sees."""


@dataclass(frozen=True, eq=False)
class Package:
    """A packaged model on disk that was found whole."""

    folder: Path
    about: Mapping[str, Any]
    """package.json."""
    settings: StudySettings
    ood: TrainingDistribution

    @property
    def identity(self) -> str:
        return self.about["identity"]

    @property
    def name(self) -> str:
        return self.about["name"]

    @property
    def tag(self) -> str:
        """Name and short identity: what rows, files and folders of its predictions are named after."""
        return f"{self.name}_{self.identity[:12]}"

    @property
    def method(self) -> str:
        return self.about["method"]

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.about["classes"])

    @cached_property
    def outcome(self) -> Outcome | None:
        """What it predicts; None for classes."""
        info = self.about.get("outcome")
        return None if info is None else outcome_from_json(info)

    @property
    def target_place(self) -> int | None:
        """Which of the targets of its models it predicts, where several were trained jointly."""
        joint = self.about.get("joint")
        return None if joint is None else int(joint["place"])

    @cached_property
    def validation_scores(self) -> NDArray[np.float64]:
        """(V, K) how it scored its validation slides, without their names, with another outcome than classes."""
        return np.array(self.about["validation_scores"], dtype=np.float64)

    @property
    def split(self) -> str:
        return self.about["split"]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(self.about["seeds"])

    @cached_property
    def encoders(self) -> tuple[PackagedEncoder, ...]:
        """The encoder of the tiles, and with two scales that of the tiles around them."""
        return tuple(PackagedEncoder(**each) for each in self.about["encoders"])

    @cached_property
    def choice(self) -> Choice:
        """Threshold and calibration of the ensemble."""
        from selfvitmil.evaluate.predictions import Choice

        info = dict(self.about["choice"])
        fitted: Mapping[str, float] | None = info.pop("calibration")
        calibration = None
        if fitted is not None:
            calibration = Temperature(**fitted) if "temperature" in fitted else Platt(**fitted)
        return Choice(**info, calibration=calibration, outcome=self.outcome)

    @cached_property
    def references(self) -> tuple[ReferenceScores, ...]:
        """How it scored its validation and test slides; of an earlier package only metrics on the test set, if any."""
        from selfvitmil.evaluate.external import ReferenceScores

        if "reference" in self.about:
            return tuple(ReferenceScores.from_json(each) for each in self.about["reference"])
        known = self.about.get("evaluation")
        if known is None:
            return ()
        level, figures = float(known["confidence"]), known["figures"]
        limits = {
            name: Interval(own["value"], own["low"], own["high"], "as the package says", level)
            for name in ("auc", "sensitivity", "specificity", "accuracy")
            if (own := figures.get(name)) and own.get("low") is not None
        }
        plain = {name: float(figures[name]["value"]) for name in ("brier", "ece") if figures.get(name)}
        return (ReferenceScores("test", int(known["num"]), {}, None, None, {}, limits, plain),)

    @cached_property
    def set_threshold(self) -> tuple[ConformalThreshold | None, str]:
        """Threshold of prediction sets, or why there is none."""
        from selfvitmil.evaluate.decisions import packaged_threshold

        return packaged_threshold(self.about.get("prediction_sets"))

    def set_of_slide(self, score: Sequence[float]) -> tuple[str, ...] | None:
        """Return the classes in the prediction set of a slide; None where the threshold, if there is one, is that of
        patients with several slides: sets of single slides would not have its coverage."""
        from selfvitmil.evaluate.decisions import set_of_slide

        threshold, _ = self.set_threshold
        if threshold is None or self.about["prediction_sets"].get("level") != "slide":
            return None
        return set_of_slide(score, self.classes, threshold)

    @property
    def folds(self) -> int:
        """How many splits the ensemble has models of; every seed was trained on each."""
        return int(self.about.get("folds", 1))

    @property
    def model_names(self) -> tuple[str, ...]:
        """Of the aggregators, in the order of splits and seeds: folders below models/."""
        return model_names(self.seeds, self.folds)

    @property
    def model_folders(self) -> tuple[Path, ...]:
        """Of the aggregators, in the order of `model_names`."""
        return tuple(self.folder / "models" / name for name in self.model_names)

    def to_json(self) -> dict[str, Any]:
        """What a prediction tells of its model."""
        kept = (
            "identity",
            "name",
            "method",
            "classes",
            "positive",
            "protocol",
            "split",
            "seeds",
            "choice",
            "chosen_on",
        )
        return {
            **{key: self.about[key] for key in kept},
            **{key: self.about[key] for key in ("fit", "folds") if key in self.about},
            **({} if self.outcome is None else {"outcome": self.outcome.to_json()}),
            "encoder": "+".join(dict.fromkeys(each.name for each in self.encoders)),
            "selfvitmil": self.about["versions"]["selfvitmil"],
        }


# ---------------------------------------------------------------------------------------------------- writing


def model_names(seeds: Sequence[int], folds: int = 1) -> tuple[str, ...]:
    """Return the folders of aggregators below models/; splits are numbered, since their names may name hospitals."""
    if folds == 1:
        return tuple(f"seed{seed}" for seed in seeds)
    return tuple(f"fold{fold}/seed{seed}" for fold in range(folds) for seed in seeds)


@dataclass(frozen=True, eq=False)
class PackageParts:
    """All that goes into a package."""

    about: Mapping[str, Any]
    """package.json but for versions, files and identity."""
    card: str
    settings: str
    """TOML."""
    ood: TrainingDistribution
    encoders: Mapping[str, Any]
    """Folder -> encoder."""
    models: Mapping[str, Path]
    """Folder below models/ -> folder of a trained aggregator."""


def check_target(folder: Path) -> None:
    """ConfigError where something is in the way of a new package."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        what = f"{folder.name}: this folder is not empty" if folder.is_dir() else f"{folder.name}: this is a file"
        raise ConfigError(
            what, "a package is a folder of its own", "Name a new one with --out, or remove this one", code="out-exists"
        )


def write_package(folder: Path, contents: PackageParts) -> None:
    """Write the folder atomically: under a temporary name, then renamed."""
    from selfvitmil.encoder import save_encoder

    folder = Path(os.path.abspath(folder))
    check_target(folder)
    building = temporary_beside(folder)
    try:
        for place, encoder in contents.encoders.items():
            save_encoder(building / place, encoder)
        for name, source in contents.models.items():
            _copy_model(source, building / "models" / name, contents.about["split"])
        write_text(building / "settings.toml", contents.settings)
        _write_distribution(building, contents.ood)
        write_text(building / "MODEL_CARD.md", contents.card)
        write_text(building / "package.json", _package_json(building, contents.about))
        os.replace(building, folder)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ArtefactError(
            f"{folder.name} cannot be written", reason, "Check the disk, or name another --out", code="not-writable"
        ) from error
    finally:
        with suppress(OSError):  # moved to its place already, or never made
            shutil.rmtree(building)


def _copy_model(source: Path, target: Path, split: str) -> None:
    """Weights as they are, of the config only what names no slide; `split` as the package calls it."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    info = {key: config[key] for key in MODEL_FACTS} | {"split": split}
    write_bytes(target / "model.safetensors", (source / "model.safetensors").read_bytes())
    write_text(target / "config.json", _json(info))


def _write_distribution(folder: Path, ood: TrainingDistribution) -> None:
    write_text(folder / "expected.json", _json(ood.to_plain()))
    moments = {"mean": np.ascontiguousarray(ood.mean_D), "std": np.ascontiguousarray(ood.std_D)}
    write_bytes(folder / "expected.safetensors", safetensors.numpy.save(moments))


def _package_json(folder: Path, about: Mapping[str, Any]) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    versions = {name: metadata.version(name) for name in ("torch", "timm", "numpy")}
    info = {
        "schema": SCHEMA,
        "format_version": FORMAT_VERSION,
        **about,
        "research_only": RESEARCH_ONLY,
        "versions": {"selfvitmil": __version__, **versions},
        "files": {path.relative_to(folder).as_posix(): sha256(path) for path in files},
    }
    return _json({**info, "identity": hash_of(info)})


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


# ---------------------------------------------------------------------------------------------------- opening


def open_package(folder: Path) -> Package:
    """The package in this folder; ArtefactError where it is no package, of a later format, altered or incomplete.

    Every file is read and compared with its checksum before anything in it is used.
    """
    folder = Path(os.path.abspath(folder))
    about = _read_about(folder)
    _check_files(folder, about["files"])
    try:
        _check_about(folder, about)
        check_size(folder / "settings.toml")
        info = read_toml(folder / "settings.toml")
        _check_settings(folder, info)
        settings = parse(info, "settings.toml")
        moments: dict[str, NDArray[np.float64]] = cast("Any", safetensors.numpy).load_file(
            folder / "expected.safetensors"
        )
        ood = TrainingDistribution.from_plain(read_json(folder / "expected.json"), moments["mean"], moments["std"])
        package = Package(folder, about, settings, ood)
        places = [each.folder for each in package.encoders] + [f"models/{name}" for name in package.model_names]
        needed = ["settings.toml", "expected.json", "expected.safetensors"]
        needed += [f"{place}/{name}" for place in places for name in ("config.json", "model.safetensors")]
        missing = [name for name in needed if name not in about["files"]]
        predicted = len(package.classes) > 1 or (package.outcome is not None and len(package.validation_scores))
        if missing or not package.seeds or not package.encoders or not predicted:
            raise KeyError(missing[0] if missing else "models")
        _ = package.choice, package.references, package.set_threshold, package.target_place  # that they can be read
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError, safetensors.SafetensorError) as error:
        why = str(error).strip("'\"").splitlines()[0]
        raise ArtefactError(
            f"{folder.name}: this package cannot be used", why, "Package the model again", code="invalid-package"
        ) from None
    return package


def check_packaged(settings: Mapping[str, Any]) -> list[str]:
    """The settings, as `section.key`, that a package may not hold."""
    found: list[str] = []
    for section, values in settings.items():
        keys = list(cast("Mapping[str, Any]", values)) if isinstance(values, Mapping) else []
        if section not in SETTINGS or not isinstance(values, Mapping):
            found += [f"{section}.{key}" for key in keys] or [section]
        else:
            found += [f"{section}.{key}" for key in keys if key not in SETTINGS[section]]
    return found


def _check_settings(folder: Path, info: Mapping[str, Any]) -> None:
    if forbidden := check_packaged(info):
        more = f" and {len(forbidden) - 5} more" if len(forbidden) > 5 else ""
        raise ArtefactError(
            f"{folder.name}: this package sets {', '.join(forbidden[:5])}{more}",
            "a package may only say how slides are cut, coloured, embedded and scored; where work runs and which "
            "programs, paths and devices are used is for its user to say, by flags",
            NOT_OURS,
            code="package-settings-forbidden",
        )


def _check_about(folder: Path, about: Mapping[str, Any]) -> None:
    """ArtefactError where package.json holds names that are no names, or numbers that are none."""
    words = [about["name"], about["method"], about["split"], *about["classes"]]
    words += [each["name"] for each in about["encoders"]] + ([about["positive"]] if about["positive"] else [])
    for word in words:
        if not isinstance(word, str) or not word.isprintable() or not 0 < len(word) <= MAX_NAME:
            _refuse_name(folder, word, "it is no printable text of a name's length")
    if (outcome := about.get("outcome")) is not None:
        for word in (*outcome["columns"], *outcome.get("levels", ())):
            if not isinstance(word, str) or not word.isprintable() or not 0 < len(word) <= MAX_NAME:
                _refuse_name(folder, word, "it is no printable text of a name's length")
    if (joint := about.get("joint")) is not None:
        if type(joint["place"]) is not int or joint["place"] < 0:
            _refuse_name(folder, joint["place"], "it should be the place of a target")
        for word in joint["with"]:
            if not isinstance(word, str) or not word.isprintable() or not 0 < len(word) <= MAX_NAME:
                _refuse_name(folder, word, "it is no printable text of a name's length")
    # These become names of files.
    for word in (about["name"], about["method"], about["split"], *(each["name"] for each in about["encoders"])):
        if "/" in word or "\\" in word or word.startswith("."):
            _refuse_name(folder, word, "files are named after it, and it is a path")
    for each in about["encoders"]:
        if type(each["mpp"]) not in (int, float) or not SMALLEST_MPP <= each["mpp"] <= LARGEST_TILE_MPP:
            _refuse_name(folder, each["mpp"], "it should be microns per pixel of tiles")
        if each["folder"] not in ENCODER_FOLDERS:
            _refuse_name(folder, each["folder"], f"encoders lie in {' or '.join(ENCODER_FOLDERS)}")
    for seed in about["seeds"]:
        if type(seed) is not int or seed < 0:
            _refuse_name(folder, seed, "seeds are whole numbers")
    if type(folds := about.get("folds", 1)) is not int or not 1 <= folds <= MAX_FOLDS:
        _refuse_name(folder, folds, f"it should be the number of splits, at most {MAX_FOLDS}")
    if (fit := about.get("fit")) not in (None, *FITS):
        _refuse_name(folder, fit, f"a model of several splits is {' or '.join(FITS)}")


def _refuse_name(folder: Path, word: Any, why: str) -> NoReturn:
    raise ArtefactError(
        f"{folder.name}: package.json holds {str(word)[:80]!r}", why, NOT_OURS, code="invalid-package-value"
    )


def _read_about(folder: Path) -> dict[str, Any]:
    path = folder / "package.json"
    try:
        if problem := file_problem(folder, "package.json") if folder.is_dir() else "":
            raise ArtefactError(
                f"{folder.name}: package.json cannot be used", problem, NOT_OURS, code="invalid-package-file"
            )
        about = read_json(path)
        schema, version, identity = about["schema"], about["format_version"], about["identity"]
    except (FileNotFoundError, NotADirectoryError):
        why = "it has no package.json" if folder.is_dir() else "there is no such folder"
        how = "Name the folder that `selfvitmil package` wrote"
        raise ArtefactError(f"{folder.name}: no packaged model", why, how, code="no-package") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"its package.json cannot be read ({type(error).__name__})"
        raise ArtefactError(f"{folder.name}: no packaged model", why, COPY_AGAIN, code="unreadable-package") from None
    if schema != SCHEMA or not isinstance(version, int):
        how = "Name the folder that `selfvitmil package` wrote"
        raise ArtefactError(
            f"{folder.name}: no packaged model", f"its package.json is of {schema!r}", how, code="no-package"
        )
    if version != FORMAT_VERSION:
        why = f"its format is version {version}, this program reads {FORMAT_VERSION}"
        how = "Update selfvitmil" if version > FORMAT_VERSION else "Package the model again"
        raise ArtefactError(f"{folder.name}: a package of another version", why, how, code="other-format-version")
    if identity != hash_of({key: value for key, value in about.items() if key != "identity"}):
        why = "its package.json differs from what was written"
        raise ArtefactError(f"{folder.name}: this package was altered", why, COPY_AGAIN, code="package-altered")
    return about


def _check_files(folder: Path, files: Mapping[str, str]) -> None:
    """ArtefactError that lists what is missing or altered."""
    for name in files:
        if problem := file_problem(folder, name):
            raise ArtefactError(
                f"{folder.name}: {name} is not a file of this package", problem, NOT_OURS, code="invalid-package-file"
            )
    missing: list[str] = []
    altered: list[str] = []
    for name, digest in files.items():
        try:
            if sha256(folder / name) != digest:
                altered.append(name)
        except OSError:
            missing.append(name)
    if missing:
        raise ArtefactError(
            f"{folder.name}: this package is incomplete",
            f"missing or unreadable: {listing(missing, 5)}",
            COPY_AGAIN,
            code="package-incomplete",
        )
    if altered:
        raise ArtefactError(
            f"{folder.name}: this package is altered",
            f"other content than was written: {listing(altered, 5)}",
            COPY_AGAIN,
            code="package-altered",
        )
