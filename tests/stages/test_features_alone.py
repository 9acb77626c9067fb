"""A study of feature files alone: later commands find them, heatmaps lie on the grid of tiles, slides come later."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers import planted
from helpers.cli import rows_of, selfvitmil
from helpers.heatmaps import make_heatmap
from selfvitmil.cohort import read_cohort, with_slides
from selfvitmil.errors import ConfigError, SelfVitMilError, SlideError
from selfvitmil.localize.grid import TILE_GREY, GridRef, GridSlide
from selfvitmil.localize.heatmap import read_heatmap
from selfvitmil.settings import StudySettings
from selfvitmil.study import FeatureChoice, open_study, remember_features, remembered_choice
from selfvitmil.view.study import ViewedStudy
from selfvitmil.view.tiles import OpenSlides, read_thumbnail


def test_later_commands_need_no_flag_and_heatmaps_are_drawn_on_the_grid(tmp_path: Path):
    cases = planted.planted(tmp_path / "other tool", patients=12, shift=6.0)
    labels = "".join(f"{row.slide},{row.patient},{row.label}\n" for row in cases.cohort.rows)
    (tmp_path / "labels.csv").write_text(f"slide,patient,label\n{labels}")
    study, features = tmp_path / "study", tmp_path / "other tool" / "features_vit"
    quick = ("--train.seeds", 1, "--train.epochs", 2, "--train.folds", 2, "--workers", 0)
    given = ("--features", features, "--labels", tmp_path / "labels.csv")
    done = selfvitmil("compare", study, *given, "--compare.methods", "abmil,mean", *quick)
    assert done.returncode == 0, done.stderr
    done = selfvitmil("localize", study, "--train.aggregator", "abmil", "--localize.colors", "red", "--workers", 0)
    assert done.returncode == 0, done.stderr
    assert "a grid of tiles" in done.stdout
    folder = study / "maps" / "features_vit_abmil"
    heatmaps = sorted(folder.glob("*.h5"))
    assert heatmaps
    for path in heatmaps:
        assert Image.open(path.with_name(f"{path.stem}_red.png")).size[0] > 100

    viewed = ViewedStudy(study, read_cohort(study / "cohort.csv"), StudySettings())
    slide = viewed.slides[viewed.id_of(heatmaps[0].stem)]
    opened = OpenSlides().get(slide.ref)
    heatmap = read_heatmap(heatmaps[0])
    assert viewed.slide_data(slide, opened)["width"] == heatmap.frame.size_l0[0]
    assert read_thumbnail(opened).min() == TILE_GREY


def test_tiles_of_the_grid_lie_where_the_heatmap_has_them(tmp_path: Path):
    full = make_heatmap()
    heatmap = replace(full, coords_l0=full.coords_l0[:40], score=full.score[:40])
    grid = GridSlide(heatmap, tmp_path / "s.h5")
    assert grid.size_l0 == heatmap.frame.size_l0
    assert grid.mpp == heatmap.frame.slide_mpp
    factor = 4
    picture = grid.thumbnail(factor * grid.mpp)[:, :, 0]
    expected = np.full(picture.shape, 255, np.uint8)
    centres_x, centres_y = (factor * (np.arange(edge) + 0.5) for edge in reversed(picture.shape))
    for x0, y0, x1, y1 in heatmap.boxes_l0:
        inside = np.ix_((centres_y >= y0) & (centres_y < y1), (centres_x >= x0) & (centres_x < x1))
        expected[inside] = TILE_GREY
    assert (picture != expected).mean() < 0.01  # the rounding of stored corners
    assert set(np.unique(picture)) == {TILE_GREY, 255}
    assert (pickle.loads(pickle.dumps(grid)).thumbnail(factor * grid.mpp)[:, :, 0] == picture).all()


def test_a_slide_with_neither_file_nor_heatmap_says_what_to_do(tmp_path: Path):
    with pytest.raises(SlideError) as caught:
        GridRef("s", tmp_path / "s.h5", lambda: None).open()
    assert caught.value.code == "slide-not-at-hand"


def test_features_are_remembered_where_the_study_has_none_of_its_own(tmp_path: Path):
    folders = [tmp_path / name for name in ("a b", "c")]
    for folder in folders:
        folder.mkdir()
    study = open_study(tmp_path / "study")
    nothing = FeatureChoice()
    assert remembered_choice(study, nothing) == nothing
    remember_features(study.root, FeatureChoice(folder=folders[0]))
    assert remembered_choice(study, nothing).folder == folders[0].resolve()
    assert remembered_choice(study, FeatureChoice("uni")) == FeatureChoice("uni")
    (study.layout.features(study.tiling, "uni")).mkdir(parents=True)
    assert remembered_choice(study, nothing) == nothing  # its own embeddings are meant
    study.layout.features(study.tiling, "uni").rmdir()
    remember_features(study.root, FeatureChoice(folder=folders[1]))
    assert remembered_choice(study, nothing) == nothing  # of two it is not clear which


def features_cohort(tmp_path: Path) -> Path:
    study = tmp_path / "study"
    study.mkdir()
    for name in ("s1", "s2"):
        (tmp_path / f"{name}.h5").touch()
    (study / "cohort.csv").write_text("slide,path,label\ns1,../s1.h5,a\ns2,../s2.h5,b\n")
    return study


def test_slides_take_the_place_of_feature_files(tmp_path: Path):
    study, slides = features_cohort(tmp_path), tmp_path / "slides"
    (slides / "deep").mkdir(parents=True)
    (slides / "deep" / "s1.svs").touch()
    cohort = read_cohort(study / "cohort.csv")
    found, notes = with_slides(cohort, slides)
    assert [row.path.name for row in found.rows] == ["s1.svs", "s2.h5"]
    assert [row.label for row in found.rows] == ["a", "b"]
    assert "s2" in notes[-1]
    (slides / "s1.svs").touch()
    with pytest.raises(SelfVitMilError) as caught:
        with_slides(cohort, slides)
    assert caught.value.code == "ambiguous-slide-file"
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "other.svs").touch()
    with pytest.raises(SelfVitMilError) as caught:
        with_slides(cohort, tmp_path / "empty")
    assert caught.value.code == "slides-not-found"


def test_a_study_that_has_all_slides_needs_no_folder(tmp_path: Path):
    study = features_cohort(tmp_path)
    for name in ("s1", "s2"):
        (tmp_path / f"{name}.svs").touch()
    (study / "cohort.csv").write_text("slide,path\ns1,../s1.svs\ns2,../s2.svs\n")
    with pytest.raises(ConfigError) as caught:
        with_slides(read_cohort(study / "cohort.csv"), tmp_path)
    assert caught.value.code == "slides-folder-without-table"


def test_check_stores_where_the_slides_are(tmp_path: Path):
    study, slides = features_cohort(tmp_path), tmp_path / "slides"
    slides.mkdir()
    for name in ("s1", "s2"):
        (slides / f"{name}.svs").touch()
    selfvitmil("check", study, "--slides-folder", slides, "--workers", 0)  # empty files fail, each alone
    assert [row["path"] for row in rows_of(study / "cohort.csv")] == ["../slides/s1.svs", "../slides/s2.svs"]
    refused = selfvitmil("check", study, "--slides-folder", slides, "--labels", study / "cohort.csv")
    assert refused.returncode == 2
