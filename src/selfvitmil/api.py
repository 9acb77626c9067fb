"""The Python API: a study, and the results of its stages, as objects for notebooks and scripts.

    import selfvitmil as sv

    study = sv.Study.create("study", cohort="slides/", labels="labels.xlsx", preset="quick")
    study.run(until="embed")
    table = study.compare(["self-vit-mil", "abmil", "mean"])
    table.to_frame()
    table.plot_roc()
    study.heatmap("slide_7")

Everything here calls the functions of the commands and reads the files that they write; nothing is computed twice.
Results have `_repr_html_`, so that a notebook shows them as tables.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil.cohort import Cohort
from selfvitmil.errors import ArtefactError, ConfigError
from selfvitmil.formatting import html_table
from selfvitmil.settings import StudySettings, flags_to_toml
from selfvitmil.store.failures import Failure
from selfvitmil.store.files import write_text
from selfvitmil.store.layout import StudyLayout
from selfvitmil.study.features import FeatureChoice
from selfvitmil.study.folder import (
    CohortSource,
    Summary,
    find_cohort,
    join_summaries,
    open_study,
    study_cohort,
    study_settings,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

    from selfvitmil.commands.status import StudyStatus
    from selfvitmil.evaluate.predictions import Prediction
    from selfvitmil.localize.heatmap import Heatmap

SHOWN_COLUMNS = ("method", "recipe", "AUC", "sensitivity", "specificity", "accuracy", "balanced accuracy")
OVERLAYS = ("red", "inferno", "viridis")
"""Colour maps of heatmap pictures, the one of the paper first."""


class Study:
    """A study folder.

    Parameters
    ----------
    root
        Folder of the study. It must hold a cohort.csv; `Study.create` makes one.
    settings
        Settings on top of those of the study's study.toml, as nested mappings: `{"tile": {"mpp": 1.0}}`.
    workers
        Processes that work on slides; None means one per core, 0 works in the calling process. In a script, call
        methods with workers under `if __name__ == "__main__":`.

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
        source = CohortSource(
            Path(cohort),
            None if labels is None else Path(labels),
            label_column,
            None if slides_folder is None else Path(slides_folder),
        )
        find_cohort(layout.root, source)  # its errors come before anything is written
        with open_study(layout.root, "create"):
            if kept:
                write_text(layout.settings, text)
            study_cohort(layout.root, source)
        return cls(root, workers=workers)

    def __repr__(self) -> str:
        return f"Study({str(self.root)!r}), {len(self.cohort)} slides"

    def _repr_html_(self) -> str:
        return self.status().summary()._repr_html_()

    @property
    def layout(self) -> StudyLayout:
        """Paths of all files of the study."""
        return StudyLayout(self.root)

    @property
    def settings(self) -> StudySettings:
        """Settings of study.toml with those of the constructor on top."""
        return study_settings(self.root, self._flags)

    @property
    def cohort(self) -> Cohort:
        """The table of slides as cohort.csv has it now."""
        return find_cohort(self.root, CohortSource())[0]

    def status(self) -> StudyStatus:
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
    ) -> Summary:
        """Run all stages up to `until`; what is up to date is skipped.

        Parameters
        ----------
        until
            Last stage: `check`, `tile`, `pretrain`, `embed`, `compare`, `evaluate`, `localize`, `lesions` or `report`.
        encoder
            Use this encoder (name, folder, timm or hub name) instead of training one.
        name
            Name of an encoder that is trained.
        one_method
            Evaluate train.aggregator alone and skip the comparison.

        Returns
        -------
        Summary
            Lines, table and failures. A slide that fails raises nothing and is in `failures`.
        """
        from selfvitmil.commands.run import run
        from selfvitmil.engine import Engine
        from selfvitmil.stages.run_plan import Request

        settings = self.settings
        request = Request(encoder=encoder, name=name, one_method=one_method, until=until)
        with Engine(settings.engine) as engine:
            summaries = list(run(self.root, request, settings, engine))
        last = [summary for summary in summaries if summary.table]
        return Summary(
            tuple(line for summary in summaries for line in summary.lines),
            join_summaries(summaries).failures,
            last[-1].table if last else (),
            any(summary.interrupted for summary in summaries),
        )

    def compare(self, methods: Sequence[str] | None = None, *, encoder: str | None = None) -> Comparison:
        """Train and evaluate methods on the same slides, splits and seeds; stored models are used again.

        Parameters
        ----------
        methods
            Names as in compare.methods (`self-vit-mil`, `abmil`, `mean`, `dsmil:published`); None means those of the
            settings. The baseline of the settings, or else the first method, is what the others are tested against.
        encoder
            Whose features to learn from; needed where the study has those of several encoders.
        """
        from selfvitmil.embed import workers_for
        from selfvitmil.engine import Engine
        from selfvitmil.stages.compare import compare

        settings = self.settings
        if methods is not None:
            chosen: dict[str, Any] = {"methods": tuple(methods)}
            if settings.compare.baseline not in methods:
                chosen["baseline"] = methods[0].replace(":published", " (published)")
            settings = settings.model_copy(update={"compare": settings.compare.model_copy(update=chosen)})
        with Engine(workers_for(settings.engine, settings.embed.device)) as engine:
            summary = compare(self.root, CohortSource(), FeatureChoice(encoder), settings, engine)
        return Comparison(self._results_folder(settings), summary.lines, summary.failures)

    def comparison(self) -> Comparison:
        """Return the stored comparison. Raises ArtefactError where there is none."""
        folder = self._results_folder(self.settings)
        if not (folder / "table.csv").exists():
            raise ArtefactError(
                f"{self.root.name}: there is no comparison yet", how="Run study.compare() first", code="no-comparison"
            )
        return Comparison(folder)

    def _results_folder(self, settings: StudySettings) -> Path:
        from selfvitmil.stages.train import results_name

        return self.layout.results(results_name("compare", settings))

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


@dataclass(frozen=True)
class Comparison:
    """Several methods on the same test slides: `table.csv` and `predictions.csv` of a folder of results."""

    folder: Path
    lines: tuple[str, ...] = ()
    """Notes of the run that made it."""
    failures: tuple[Failure, ...] = ()

    @cached_property
    def rows(self) -> tuple[dict[str, str], ...]:
        """Rows of table.csv: every metric with its 95 % confidence interval, tests against the baseline, and more."""
        with (self.folder / "table.csv").open(newline="", encoding="utf-8") as file:
            return tuple(csv.DictReader(file))

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(row["display_name"] for row in self.rows)

    @cached_property
    def predictions(self) -> tuple[Prediction, ...]:
        """Every prediction of every method, seed and split; `seed` None is the mean over seeds."""
        from selfvitmil.evaluate.predictions import read_predictions

        return tuple(read_predictions(self.folder / "predictions.csv")[0])

    def auc(self, method: str) -> tuple[float, float, float]:
        """Return AUC (macro AUC with several classes) with the limits of its 95 % confidence interval."""
        row = self._row(method)
        name = "macro_auc" if "macro_auc" in row else "auc"
        value, low, high = (float(row[key]) for key in (name, f"{name}_low", f"{name}_high"))
        return value, low, high

    def to_frame(self) -> Any:
        """Return table.csv as a pandas DataFrame, numbers as numbers. Needs pandas."""
        try:
            import pandas
        except ImportError:
            raise ConfigError(
                "to_frame needs pandas",
                "it is not installed",
                "Run pip install pandas, or use .rows",
                code="no-pandas",
            ) from None
        return pandas.read_csv(self.folder / "table.csv").set_index("display_name")

    def _repr_html_(self) -> str:
        return html_table([SHOWN_COLUMNS, *map(self._cells, self.rows)])

    def plot_roc(self, methods: Sequence[str] | None = None) -> Figure:
        """Draw the ROC curves of methods (all by default) on the test slides, by the mean probability over seeds.

        Two classes only. With several splits a curve is the mean over splits.
        """
        from matplotlib.figure import Figure

        from selfvitmil.metrics import roc_curve

        figure = Figure(figsize=(5, 5), layout="constrained")
        axes = figure.add_subplot(xlabel="1 - specificity", ylabel="sensitivity", aspect="equal")
        axes.plot([0, 1], [0, 1], color="0.8", linewidth=1)
        for method in methods or self.methods:
            label, score, split = self._test_scores(method)
            curve = roc_curve(label, score, folds=split)
            value, low, high = self.auc(method)
            name = f"{method}: {value:.3f} [{low:.3f}, {high:.3f}]"
            axes.plot(curve.false_positive_rate, curve.sensitivity, label=name, linewidth=1.5)
        axes.legend(title="AUC [95 % CI]", fontsize="small", loc="lower right")
        return figure

    def _test_scores(self, method: str) -> tuple[list[int], list[float], list[int]]:
        self._row(method)
        rows = [row for row in self.predictions if row.method == method and row.part == "test" and row.seed is None]
        if rows and len(rows[0].score) > 1:
            raise ConfigError(
                "an ROC curve was asked for", "there are more than two classes", "Use .rows", code="not-binary"
            )
        splits = sorted({row.split for row in rows})
        return [row.label for row in rows], [row.score[0] for row in rows], [splits.index(row.split) for row in rows]

    def _row(self, method: str) -> Mapping[str, str]:
        found = next((row for row in self.rows if row["display_name"] == method), None)
        if found is None:
            raise ConfigError(
                f"unknown method {method!r}", how=f"There are {', '.join(self.methods)}", code="unknown-method"
            )
        return found

    def _cells(self, row: Mapping[str, str]) -> tuple[str, ...]:
        value, low, high = self.auc(row["display_name"])
        auc = f"{value:.3f} [{low:.3f}, {high:.3f}]"
        names = ("sensitivity", "specificity", "accuracy", "balanced_accuracy")
        decided = (f"{float(row[name]):.3f}" if row.get(name) else "-" for name in names)
        return (row["display_name"], row.get("recipe") or "-", auc, *decided)
