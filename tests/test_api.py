"""`selfvitmil.Study`: a whole study from Python, and its results as objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import pytest
from PIL import Image

import selfvitmil as sv
from helpers.viewer import packaged_files
from selfvitmil import metrics
from selfvitmil.commands.run import StageState
from selfvitmil.errors import ArtefactError, ConfigError
from selfvitmil.formatting import html_table
from selfvitmil.slides import synthetic
from selfvitmil.stages.base import StageResult

SETTINGS: dict[str, Any] = {
    "tile": {"mpp": 1.0, "size_px": 32},
    "pretrain": {
        "width": 16, "depth": 1, "heads": 1, "patch_px": 16, "num_local": 1, "batch": 8, "steps": 2, "head_width": 16,
        "bottleneck": 8, "workers": 0, "log_steps": 1, "measure_tiles": 8,
    },
    "train": {"seeds": 2, "epochs": 2},
    "compare": {"methods": ["self-vit-mil", "mean"]},
    "evaluate": {"bootstrap": 100},
    "localize": {"picture_px": 200, "geojson": "none"},
}  # fmt: skip


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slides") / "made"
    synthetic.make_cohort(folder, slides=10, seed=1, size=(1024, 1024), slides_per_patient=1)
    return folder


@pytest.fixture(scope="module")
def study(slides: Path) -> sv.Study:
    """A study that was run to its heatmaps."""
    study = sv.Study.create(slides.parent / "study", cohort=slides / "cohort.csv", settings=SETTINGS, workers=0)
    assert not study.run(until="localize").failures
    return study


def test_create_stores_cohort_and_settings(study: sv.Study):
    assert len(study.cohort) == 10
    again = sv.Study(study.root, workers=0)
    assert again.settings.tile.mpp == 1.0
    assert again.settings.compare.methods == ("self-vit-mil", "mean")
    assert "10 slides" in repr(again)


def test_create_refuses_a_folder_that_is_a_study(study: sv.Study, slides: Path):
    with pytest.raises(ConfigError) as refused:
        sv.Study.create(study.root, cohort=slides)
    assert refused.value.code == "study-exists"


def test_a_folder_without_a_cohort_is_no_study(tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        sv.Study(tmp_path)
    assert refused.value.code == "no-study"


def test_a_wrong_setting_or_cohort_writes_nothing(tmp_path: Path, slides: Path):
    with pytest.raises(ConfigError, match=r"tile\.mp"):
        sv.Study.create(tmp_path / "study", cohort=slides, settings={"tile": {"mp": 1.0}})
    with pytest.raises(ConfigError):
        sv.Study.create(tmp_path / "study", cohort=tmp_path / "nowhere.csv")
    assert not (tmp_path / "study").exists()


def test_unknown_setting_is_an_error_at_once(study: sv.Study):
    with pytest.raises(ConfigError, match="epoch"):
        sv.Study(study.root, settings={"train": {"epoch": 3}})


def test_settings_of_the_constructor_are_on_top(study: sv.Study):
    assert sv.Study(study.root, settings={"train": {"epochs": 3}}).settings.train.epochs == 3
    assert sv.Study(study.root).settings.train.epochs == 2


def test_run_returns_what_was_done(study: sv.Study):
    done = study.run(until="tile")
    assert {name: report.state for name, report in done.stages.items()} == dict.fromkeys(
        ("check", "tile"), StageState.UP_TO_DATE
    )
    assert not done.results
    assert not done.interrupted


def test_comparison_has_the_stored_metrics(study: sv.Study):
    table = study.comparison()
    assert table.methods == ("self-vit-mil", "mean")
    value, low, high = table.auc("mean")
    rows = [row for row in table.predictions if row.method == "mean" and row.part == "test" and row.seed is None]
    assert value == pytest.approx(metrics.auc([row.label for row in rows], [row.score[0] for row in rows]), abs=1e-5)
    assert low <= value <= high
    frame = table.to_frame()
    assert list(frame.index) == list(table.methods)
    assert frame.loc["mean", "auc"] == pytest.approx(value)


def test_roc_curves_end_in_the_corners_and_enclose_the_auc(study: sv.Study):
    table = study.comparison()
    axes = table.plot_roc(["mean"]).axes[0]
    curve = next(line for line in axes.lines if str(line.get_label()).startswith("mean"))
    x, y = (np.asarray(values, dtype=float) for values in curve.get_data())
    assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 1, 1)
    assert np.trapezoid(y, x) == pytest.approx(table.auc("mean")[0], abs=1e-5)


def test_unknown_methods_are_named(study: sv.Study):
    with pytest.raises(ConfigError) as refused:
        study.comparison().auc("mena")
    assert refused.value.code == "unknown-method"
    assert "mean" in str(refused.value)


def test_compare_takes_methods(study: sv.Study):
    table = study.compare(["mean", "max"])
    assert table.methods == ("mean", "max")
    assert not table.failures
    html = table._repr_html_()
    assert html.count("<tr>") == 3
    study.compare()  # as the settings say, for the tests that follow


def test_a_study_without_results_says_so(slides: Path, tmp_path: Path):
    fresh = sv.Study.create(tmp_path / "fresh", cohort=slides / "cohort.csv")
    with pytest.raises(ArtefactError) as missing:
        fresh.comparison()
    assert missing.value.code == "no-comparison"
    with pytest.raises(ArtefactError) as missing:
        fresh.heatmap("slide_001")
    assert missing.value.code == "no-heatmap"


def test_heatmap_is_the_picture_that_localize_drew(study: sv.Study):
    model, drawn = next((model, names) for model, names in study.heatmaps().items() if model.endswith("_self-vit-mil"))
    with Image.open(study.root / "maps" / model / f"{drawn[0]}_red.png") as picture:
        assert study.heatmap(drawn[0]).tobytes() == picture.tobytes()
    assert len(study.heatmap_scores(drawn[0], model)) > 0


def test_summaries_escape_what_users_named(study: sv.Study):
    assert "&lt;b&gt;" in html_table([("a",), ("<b>",)])
    assert "&lt;i&gt;" in StageResult(notes=("<i>",))._repr_html_()
    assert "<table>" in study._repr_html_()


def test_dir_shows_what_the_package_offers():
    import selfvitmil

    assert {*selfvitmil.__all__} <= {*dir(selfvitmil)}


def test_the_viewer_runs_beside_the_notebook(study: sv.Study):
    packaged_files()
    viewer = study.view(height_px=500)
    try:
        with urlopen(f"{viewer.url}api/study.json", timeout=20) as answer:
            shown = json.load(answer)
        assert [slide["name"] for slide in shown["slides"]] == [row.slide for row in study.cohort.rows]
        html = viewer._repr_html_()
        assert f'<iframe src="{viewer.url}"' in html
        assert 'height="500"' in html
    finally:
        viewer.close()
    with pytest.raises(URLError):
        urlopen(viewer.url, timeout=5)
