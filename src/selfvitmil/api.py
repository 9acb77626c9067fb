"""The Python API: a study, and the results of its stages, as objects for notebooks and scripts.

    import selfvitmil as sv

    study = sv.Study.create("study", cohort="slides/", labels="labels.xlsx", preset="quick")
    study.run(until="embed")
    table = study.compare(["self-vit-mil", "abmil", "mean"])
    table.to_frame()
    table.plot_roc()
    study.heatmap("slide_7")

Everything here calls the functions of the commands and returns their results, which have `_repr_html_`, so that a
notebook shows them as tables, and `to_frame()`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil import study as core
from selfvitmil.cohort import Cohort
from selfvitmil.errors import ArtefactError, ConfigError
from selfvitmil.settings import StudySettings, flags_to_toml
from selfvitmil.store.files import write_text
from selfvitmil.store.layout import StudyLayout

if TYPE_CHECKING:
    from PIL.Image import Image

    from selfvitmil.commands.run import RunResult
    from selfvitmil.commands.slide_embeddings import SimilarSlide, SlideEmbeddingsResult
    from selfvitmil.commands.status import StatusResult
    from selfvitmil.localize.heatmap import Heatmap
    from selfvitmil.stages.compare import CompareResult
    from selfvitmil.stages.evaluate import EvaluateResult
    from selfvitmil.view.server import BackgroundViewer

OVERLAYS = ("red", "inferno", "viridis")
"""Colour maps of heatmap pictures, the one of the paper first."""


class Study:
    """A study folder, for notebooks and scripts.

    Every method opens it anew (`selfvitmil.study.Study`, which the stages share), so that files which changed in the
    meantime are seen.

    Parameters
    ----------
    root
        Folder of the study. It must hold a cohort.csv; `Study.create` makes one.
    settings
        Settings on top of those of the study's study.toml, as nested mappings: `{"tile": {"mpp": 1.0}}`.
    workers
        Processes that work on slides; None means one per core, 0 works in the calling process.

    Raises
    ------
    ConfigError
        Where the folder is no study, or a setting is unknown or invalid.
    """

    def __init__(
        self, root: str | Path, *, settings: Mapping[str, Any] | None = None, workers: int | None = None
    ) -> None:
        self.root = Path(root)
        if not self.layout.cohort.is_file():
            raise ConfigError(
                f"{self.root.name}: there is no study here",
                "it has no cohort.csv",
                "Create it with Study.create(folder, cohort=...)",
                code="no-study",
            )
        self._flags: dict[str, Any] = {key: dict(value) for key, value in (settings or {}).items()}
        if workers is not None:
            self._flags["engine"] = {**self._flags.get("engine", {}), "workers": workers}
        self.settings  # noqa: B018  an unknown setting is an error now, not hours later

    @classmethod
    def create(
        cls,
        root: str | Path,
        *,
        cohort: str | Path,
        labels: str | Path | None = None,
        label_column: str | None = None,
        slides_folder: str | Path | None = None,
        preset: str | None = None,
        settings: Mapping[str, Any] | None = None,
        workers: int | None = None,
    ) -> Study:
        """Create a study folder with its cohort.csv and, where settings are given, its study.toml.

        Parameters
        ----------
        root
            New folder, or one without a cohort.csv.
        cohort
            Folder of slides, or a table of them.
        labels, label_column
            Table (csv or xlsx) of slide labels, and its column where that is not `label`.
        slides_folder
            Where the slides lie that a table names without a path.
        preset, settings
            Stored in study.toml, so that later commands mean the same.
        workers
            As in the constructor; not stored.
        """
        layout = StudyLayout(Path(root))
        if layout.cohort.exists():
            raise ConfigError(
                f"{layout.root.name}: this folder is a study already",
                "it has a cohort.csv",
                "Open it with Study(folder), or name another folder",
                code="study-exists",
            )
        kept = {**({} if preset is None else {"preset": preset}), **(settings or {})}
        text = flags_to_toml(kept)
        source = core.CohortSource(
            Path(cohort),
            None if labels is None else Path(labels),
            label_column,
            None if slides_folder is None else Path(slides_folder),
        )
        study = core.Study(layout.root, StudySettings(), source)
        study.cohort  # noqa: B018  its errors come before anything is written
        with study.lock("create"):
            if kept:
                write_text(layout.settings, text)
            study.store_cohort()
        return cls(root, workers=workers)

    def __repr__(self) -> str:
        return f"Study({str(self.root)!r}), {len(self.cohort)} slides"

    def _repr_html_(self) -> str:
        return self.status()._repr_html_()  # pyright: ignore[reportPrivateUsage]

    def _open(self) -> core.Study:
        return core.open_study(self.root, self._flags)

    @property
    def layout(self) -> StudyLayout:
        """Paths of all files of the study."""
        return StudyLayout(self.root)

    @property
    def settings(self) -> StudySettings:
        """Settings of study.toml with those of the constructor on top."""
        return self._open().settings

    @property
    def cohort(self) -> Cohort:
        """The table of slides as cohort.csv has it now."""
        return self._open().cohort

    def status(self) -> StatusResult:
        """Return what is done, what failed and what is next. Reads only."""
        from selfvitmil.commands.status import status

        return status(self.root)

    # ------------------------------------------------------------------------------------------------ doing

    def run(
        self,
        until: str | None = None,
        *,
        encoder: str | None = None,
        name: str | None = None,
        one_method: bool = False,
    ) -> RunResult:
        """Run all stages up to `until`; what is up to date is skipped.

        Parameters
        ----------
        until
            Name of the last stage (`selfvitmil.stages.STAGES` lists them); None runs all of them.
        encoder
            Use this encoder (name, folder, timm or hub name) instead of training one.
        name
            Name of an encoder that is trained.
        one_method
            Evaluate train.aggregator alone and skip the comparison.

        Returns
        -------
        RunResult
            What became of every stage, with their results by name (`.results["compare"]`). A slide that fails raises
            nothing and is in `failures`.
        """
        from selfvitmil.commands.run import Request, RunResult, run
        from selfvitmil.engine import Engine

        study = self._open()
        request = Request(encoder=encoder, name=name, one_method=one_method, until=until)
        with Engine(study.settings.engine) as engine:
            done = next(each for each in list(run(study, request, engine)) if isinstance(each, RunResult))
        failures = (failure for each in done.results.values() for failure in each.failures)
        interrupted = any(each.interrupted for each in done.results.values())
        return replace(done, failures=tuple(dict.fromkeys(failures)), interrupted=interrupted)

    def compare(self, methods: Sequence[str] | None = None, *, encoder: str | None = None) -> CompareResult:
        """Train and evaluate methods on the same slides, splits and seeds; stored models are used again.

        Parameters
        ----------
        methods
            Names as in compare.methods (`self-vit-mil`, `abmil`, `mean`, `dsmil:published`); None means those of the
            settings. The baseline of the settings, or else the first method, is what the others are tested against.
        encoder
            Whose features to learn from; needed where the study has those of several encoders.
        """
        from selfvitmil.engine import Engine
        from selfvitmil.runtime.device import workers_for
        from selfvitmil.stages.compare import compare

        study = self._open()
        settings = study.settings
        if methods is not None:
            chosen: dict[str, Any] = {"methods": tuple(methods)}
            if settings.compare.baseline not in methods:
                chosen["baseline"] = methods[0].replace(":published", " (published)")
            settings = settings.model_copy(update={"compare": settings.compare.model_copy(update=chosen)})
        with Engine(workers_for(settings.engine, settings.embed.device)) as engine:
            return compare(study.with_settings(settings), core.FeatureChoice(encoder), engine)

    def evaluate(self, method: str | None = None, *, encoder: str | None = None) -> EvaluateResult:
        """Train and evaluate one method on the test set; stored models are used again.

        Parameters
        ----------
        method
            Name of the aggregator; None means train.aggregator of the settings.
        encoder
            Whose features to learn from; needed where the study has those of several encoders.
        """
        from selfvitmil.engine import Engine
        from selfvitmil.stages.evaluate import evaluate

        study = self._open()
        if method is not None:
            train = study.settings.train.model_copy(update={"aggregator": method})
            study = study.with_settings(study.settings.model_copy(update={"train": train}))
        with Engine(study.settings.engine) as engine:
            return evaluate(study, core.FeatureChoice(encoder), engine)

    def comparison(self) -> CompareResult:
        """Return the stored comparison. Raises ArtefactError where there is none."""
        from selfvitmil.stages.compare import CompareResult
        from selfvitmil.stages.train import results_name

        folder = self.layout.results(results_name(None, "compare", self.settings))
        if not (folder / "table.csv").exists():
            raise ArtefactError(
                f"{self.root.name}: there is no comparison yet", how="Run study.compare() first", code="no-comparison"
            )
        return CompareResult.read(folder)

    # ------------------------------------------------------------------------------------------------ whole slides

    def slide_embeddings(
        self,
        pooling: str = "mean",
        *,
        encoder: str | None = None,
        features: str | Path | None = None,
        model: str | Path | None = None,
        neighbors: int = 5,
    ) -> SlideEmbeddingsResult:
        """Pool the features of every slide into one embedding, and find the slides most like each.

        Parameters
        ----------
        pooling
            `mean` or `max` over the tiles.
        encoder, features
            Whose features, or a folder of feature files of another tool instead.
        model
            A trained aggregator that pools instead: a folder that `package` wrote, or one of models/.
        neighbors
            Slides of other patients to find for each.
        """
        from selfvitmil.commands.slide_embeddings import slide_embeddings
        from selfvitmil.engine import Engine

        study = self._open()
        choice = core.FeatureChoice(encoder, None if features is None else Path(features))
        folder = None if model is None else Path(model)
        with Engine(study.settings.engine) as engine:
            return slide_embeddings(study, choice, engine, pooling=pooling, model=folder, neighbors=neighbors)

    def similar(self, slide: str, n: int = 5, **how: Any) -> tuple[SimilarSlide, ...]:
        """Return the `n` slides of other patients that are most like a slide, nearest first.

        `how` is as in `slide_embeddings`, by default the mean of the tile embeddings.
        """
        name = self.cohort[slide].slide
        found = self.slide_embeddings(**how, neighbors=n).similar
        if name not in found:
            raise ArtefactError(
                f"{name}: this slide has no embedding", how='Run study.run(until="embed")', code="no-slide-embedding"
            )
        return found[name]

    # ------------------------------------------------------------------------------------------------ heatmaps

    def heatmaps(self) -> dict[str, tuple[str, ...]]:
        """Model -> slides that have a heatmap by it."""
        return {
            folder.name: tuple(sorted(path.stem for path in folder.glob("*.h5")))
            for folder in self.layout.all_heatmaps()
        }

    def heatmap(self, slide: str, model: str | None = None) -> Image:
        """Return the picture of a slide with its heatmap.

        `model` is a folder of maps/; None means the study's own method. Raises ArtefactError where `localize` has not
        drawn one.
        """
        from PIL import Image

        file = self._heatmap_file(slide, model)
        pictures = [file.with_name(f"{slide}_{colors}.png") for colors in OVERLAYS]
        found = next((path for path in pictures if path.exists()), None)
        if found is None:
            raise ArtefactError(
                f"{slide}: its heatmap by {file.parent.name} has no picture",
                "pictures were switched off, or the slide's file was missing",
                'Run study.run(until="localize") with localize.pictures on',
                code="no-heatmap-picture",
            )
        with Image.open(found) as image:
            return image.copy()

    def heatmap_scores(self, slide: str, model: str | None = None) -> Heatmap:
        """Return the scores of a slide's tiles with their coordinates and the slide's prediction."""
        from selfvitmil.localize.heatmap import read_heatmap

        return read_heatmap(self._heatmap_file(slide, model))

    def view(self, *, pseudonyms: bool = False, height_px: int = 640) -> BackgroundViewer:
        """Start the web viewer and show it in the notebook's cell, where that runs on the machine of the browser.

        Only browsers on this machine reach it, all of its users' alike. It ends with `.close()` or with the notebook's
        kernel. For a notebook on a server forward the port of `.url`, or run `selfvitmil view` there.

        Parameters
        ----------
        pseudonyms
            Replace names of slides and patients.
        height_px
            Height of the cell.
        """
        from selfvitmil.commands.view import viewed_study
        from selfvitmil.view.server import BackgroundViewer

        return BackgroundViewer(viewed_study(self._open(), pseudonyms), height_px)

    def _heatmap_file(self, slide: str, model: str | None) -> Path:
        there = self.heatmaps()
        if model is None:
            method = self.settings.train.aggregator
            model = next((each for each in there if each.endswith(f"_{method}") and slide in there[each]), None)
        if model is None or slide not in there.get(model, ()):
            having = sorted({each for slides in there.values() for each in slides})
            raise ArtefactError(
                f"{slide}: there is no heatmap" + (f" by {model}" if model else ""),
                f"slides with one are {', '.join(having[:5])}" if having else "no slide has one",
                'Run study.run(until="localize"); localize.parts says which slides are drawn',
                code="no-heatmap",
            )
        return self.layout.heatmap(model, slide)
