"""Where everything lies in a study's folder. Every path of a study is spelled here and nowhere else.

    layout = StudyLayout(study)
    layout.tile_table("0.5mpp_224px_0px", "slide_7")     # STUDY/tiles/0.5mpp_224px_0px/slide_7.h5

Names in the methods: `tiling` is what `settings.tiling_name` returns; `encoder` is a folder below encoders/; `features`
is an encoder's name, with the token layout appended where one was asked for; `model` names a folder of heatmaps.
The methods only build paths: they neither create folders nor check that files exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SETTINGS_FILE = "settings.toml"
"""Resolved settings, written beside every artefact."""
CONFIG_FILE = "config.json"
"""Description of an encoder or a trained aggregator; written last, so a folder with one is complete."""
SLIDES_FILE = "slides.txt"
"""In an encoder's folder: the slides that it was trained on, one name per line."""
ENCODER_SLIDES_FILE = "encoder_slides.txt"
"""The same beside the features that an encoder gave, whichever folder the encoder came from."""
MODEL_SLIDES_FILE = "model_slides.txt"
"""Beside slide embeddings: the slides whose labels the pooling model was trained and chosen on."""
_FEATURES, _SLIDE_FEATURES = "features_", "slide_features_"
_FEATURES_NOTE = "features.txt"


class _Below:
    """A path below the folder of a study."""

    def __init__(self, *parts: str):
        self._parts = parts

    def __get__(self, layout: StudyLayout, owner: object = None) -> Path:
        return layout.root.joinpath(*self._parts)


@dataclass(frozen=True)
class StudyLayout:
    """The paths of one study."""

    root: Path
    """Folder of the study."""

    # ------------------------------------------------------------------------------------------------ top level

    settings = _Below("study.toml")
    """The settings that the user asked for."""
    cohort = _Below("cohort.csv")
    """The table of slides."""
    check_table = _Below("check.csv")
    """The table that `check` writes."""
    failures = _Below("failures.csv")
    """The table of slides that failed."""
    lock = _Below(".lock")
    """The file that a working process locks."""
    shards = _Below(".shards")
    """The folder of the shards of a run that work on the study, and of the slides that each has claimed."""
    run_record = _Below("run.json")
    """The log of the last `run`."""
    pseudonyms = _Below("pseudonyms.csv")
    """The key from pseudonyms to names, which stays in the study."""
    synthetic_slides = _Below("slides")
    """The folder of the demo's synthetic slides."""

    # ------------------------------------------------------------------------------------------------ tiles

    tiles_folder = _Below("tiles")
    """The folder of all tilings."""

    def tiling(self, tiling: str) -> Path:
        """Return the folder of the tile tables of one tiling."""
        return self.tiles_folder / tiling

    def tile_table(self, tiling: str, slide: str) -> Path:
        """Return the tile table of a slide."""
        return self.tiling(tiling) / f"{slide}.h5"

    def all_tilings(self) -> list[Path]:
        """Return the folders of the tilings that exist, sorted."""
        return _folders(self.tiles_folder, "*")

    # ------------------------------------------------------------------------------------------------ encoders

    encoders_folder = _Below("encoders")
    """The folder of all encoders."""

    def encoder(self, encoder: str) -> Path:
        """Return the folder of an encoder: weights, config, checkpoint, metrics."""
        return self.encoders_folder / encoder

    def encoder_config(self, encoder: str) -> Path:
        """Return the config of an encoder, which exists once its training is complete."""
        return self.encoder(encoder) / CONFIG_FILE

    def encoder_slides(self, encoder: str) -> Path:
        """Return the list of slides that an encoder was trained on."""
        return self.encoder(encoder) / SLIDES_FILE

    def all_encoders(self) -> list[Path]:
        """Return the folders of the encoders that exist, sorted."""
        return _folders(self.encoders_folder, "*")

    # ------------------------------------------------------------------------------------------------ features

    bags_folder = _Below("bags")
    """The folder of all feature files."""

    def features(self, tiling: str, features: str) -> Path:
        """Return the folder of the feature files of one encoder at one tiling."""
        return self.bags_folder / tiling / f"{_FEATURES}{features}"

    def features_encoder_slides(self, tiling: str, features: str) -> Path:
        """Return the list of slides that the encoder of these features was trained on."""
        return self.features(tiling, features) / ENCODER_SLIDES_FILE

    def feature_file(self, tiling: str, features: str, slide: str) -> Path:
        """Return the feature file of a slide."""
        return self.features(tiling, features) / f"{slide}.h5"

    def features_of_tiling(self, tiling: str) -> list[str]:
        """Return the names of the features that a tiling has, sorted."""
        return [feature_name(folder) for folder in _folders(self.bags_folder / tiling, f"{_FEATURES}*")]

    def all_features(self) -> list[Path]:
        """Return the folders of feature files that exist, sorted."""
        return _folders(self.bags_folder, f"*/{_FEATURES}*")

    def slide_features(self, tiling: str, name: str) -> Path:
        """Return the folder of slide embeddings: of an encoder, pooled in one way."""
        return self.bags_folder / tiling / f"{_SLIDE_FEATURES}{name}"

    def all_slide_features(self) -> list[Path]:
        """Return the folders of slide embeddings that exist, sorted."""
        return _folders(self.bags_folder, f"*/{_SLIDE_FEATURES}*")

    # ------------------------------------------------------------------------------------------------ models, results

    models_folder = _Below("models")
    """The folder of all trained aggregators."""

    def models_on(self, tiling: str, features: str) -> Path:
        """Return the folder of the aggregators trained on one kind of features."""
        return self.models_folder / tiling / features

    def features_note(self, features: str) -> Path:
        """Return the file that says where another tool's features lie that models of this study learned from."""
        return self.models_on("external", features) / _FEATURES_NOTE

    def all_features_notes(self) -> list[Path]:
        """Return the files that say where other tools' features lie, sorted."""
        return sorted(self.models_on("external", "").glob(f"*/{_FEATURES_NOTE}"))

    def model(self, tiling: str, features: str, aggregator: str, split: str, seed: int) -> Path:
        """Return the folder of one trained aggregator."""
        return model_folder(self.models_on(tiling, features) / aggregator, split, seed)

    def all_models(self) -> list[Path]:
        """Return the folders of trained aggregators that exist, one per tiling and features, sorted."""
        return _folders(self.models_folder, "*/*")

    results_folder = _Below("results")
    """The folder of all results."""

    def results(self, name: str) -> Path:
        """Return the folder of one evaluation or comparison."""
        return self.results_folder / name

    def all_results(self) -> list[Path]:
        """Return the folders of results that exist, sorted."""
        return _folders(self.results_folder, "*")

    # ------------------------------------------------------------------------------------------------ heatmaps, report

    heatmaps_folder = _Below("maps")
    """The folder of all heatmaps."""

    def heatmaps(self, model: str) -> Path:
        """Return the folder of the heatmaps of one model."""
        return self.heatmaps_folder / model

    def heatmap(self, model: str, slide: str) -> Path:
        """Return the heatmap of a slide."""
        return self.heatmaps(model) / f"{slide}.h5"

    def all_heatmaps(self) -> list[Path]:
        """Return the folders of heatmaps that exist, one per model, sorted."""
        return _folders(self.heatmaps_folder, "*")

    sbatch_script = _Below("submit.sh")
    """The script that `sbatch` writes."""
    sbatch_logs = _Below("slurm")
    """The folder of the output of its jobs."""

    report = _Below("report", "index.html")
    """The page that `report` writes (report/index.html)."""

    # ------------------------------------------------------------------------------------------------ inference

    @property
    def work(self) -> StudyLayout:
        """Return the layout of the working files of `predict`: tiles/ and bags/ below work/."""
        return StudyLayout(self.root / "work")

    def validation(self, model: str) -> Path:
        """Return the folder of the evaluation of a packaged model by labels of another cohort."""
        return self.root / "validation" / model

    # ------------------------------------------------------------------------------------------------ all of it

    @property
    def artefact_folders(self) -> tuple[Path, ...]:
        """Return the folders that stages write, in the order of the data."""
        return (
            self.tiles_folder,
            self.encoders_folder,
            self.bags_folder,
            self.models_folder,
            self.results_folder,
            self.heatmaps_folder,
        )

    def has_any_artefact(self) -> bool:
        """Return whether the folder holds something that identifies it as a study."""
        return any(path.exists() for path in (self.settings, self.cohort, self.check_table, *self.artefact_folders))

    def name(self, path: Path) -> str:
        """Return a path of the study as users read it: relative to the study, with forward slashes."""
        return path.relative_to(self.root).as_posix()


# ---------------------------------------------------------------------------------------------------- beside a file


def thumbnail_of(tile_table: Path) -> Path:
    """Return the thumbnail beside a tile table."""
    return tile_table.with_suffix(".jpg")


def quality_examples_of(tile_table: Path) -> Path:
    """Return the picture of flagged tiles of the slide of a tile table."""
    return tile_table.parent / "quality" / f"{tile_table.stem}.jpg"


def quality_page(tiling: Path) -> Path:
    """Return the page on the quality of tiles in the folder of a tiling."""
    return tiling / "quality.html"


def tiling_summary(tiling: Path) -> Path:
    """Return the table of tile counts and warnings in the folder of a tiling, one row per slide."""
    return tiling / "tiles.csv"


def patches_of(feature_file: Path, slide: str) -> Path:
    """Return the coordinate file that belongs to a feature file in the layout of TRIDENT."""
    return feature_file.parents[1] / "patches" / f"{slide}_patches.h5"


def feature_name(folder: Path) -> str:
    """Return the name of the features in a folder of feature files."""
    return folder.name.removeprefix(_SLIDE_FEATURES).removeprefix(_FEATURES)


def model_folder(aggregator: Path, split: str, seed: int) -> Path:
    """Return the folder of one trained model below the folder of its aggregator."""
    return aggregator / split / f"seed{seed}"


def tuning_file(aggregator: Path, split: str) -> Path:
    """Return the file with the settings that were chosen for the models of a split."""
    return aggregator / split / "tuning.json"


def _folders(root: Path, pattern: str) -> list[Path]:
    return sorted(path for path in root.glob(pattern) if path.is_dir() and not path.name.startswith("."))
