"""The report's part on encoders: views as training made them, neighbours by brute force, what quality says."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfvitmil import stain
from selfvitmil.bags import read_bag, write_bag
from selfvitmil.cohort import SlideRow, make_cohort, write_cohort
from selfvitmil.data.sources import SlideTiles, TrainSlide
from selfvitmil.pretrain import step, train
from selfvitmil.pseudonyms import Names, give_pseudonyms
from selfvitmil.report import encoders, neighbors, write_report
from selfvitmil.report.data import StudyFiles
from selfvitmil.report.encoders import Course, Measurement, assess, measurements
from selfvitmil.settings import StudySettings, to_toml
from selfvitmil.slides import SlideCache, SlideRef, open_slide
from selfvitmil.slides.synthetic import make_slide
from selfvitmil.tiles import TileJob, read_tiles
from selfvitmil.tiling import tile_slide

SLIDES = {"case-17": "Jane Roe", "case-18": "Jane Roe", "case-19": "Max Moe", "case-20": "Ida Noe"}
"""Patients by slide; the last slide is not trained on."""
TILING = "0.5mpp_64px_0px"
SETTINGS = StudySettings.model_validate(
    {
        "tile": {"size_px": 64},
        "stain": {"sample_tiles": 8},
        "pretrain": {
            "method": "dino",
            "architecture": "vit_tiny_patch16_224", "width": 32, "depth": 2, "heads": 2, "patch_px": 8, "batch": 12,
            "steps": 1, "num_local": 3, "out_dim": 32, "head_width": 32, "bottleneck": 16, "workers": 0, "seed": 5,
        },
    }
)  # fmt: skip


class Alts(HTMLParser):
    """Texts and alternatives of pictures; fails on elements that are not closed."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.alts: list[str] = []
        self.text = ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.alts += [str(dict(attrs)["alt"])] if tag == "img" else []
        self.open += [tag] if tag not in ("img", "br", "meta") else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data.replace("\n", " ")


class Trained:
    """A study with one encoder after one step, and what that step saw."""

    def __init__(self, study: Path):
        self.study, self.recorded = study, []
        tables = {}
        rows = []
        for seed, (slide, patient) in enumerate(SLIDES.items()):
            path = study / "files" / f"{slide}.svs"
            path.parent.mkdir(parents=True, exist_ok=True)
            make_slide(path, seed=seed, size=(1024, 1024))
            tile_slide(TileJob(SlideRef(slide, path), study / "tiles", SETTINGS))
            tables[slide] = study / "tiles" / TILING / f"{slide}.h5"
            rows.append(SlideRow(slide, path, None, patient, "test" if slide == "case-20" else "train"))
        write_cohort(study / "cohort.csv", make_cohort(rows))
        seen = [TrainSlide(SlideRef(row.slide, row.path), tables[row.slide]) for row in rows if row.split == "train"]
        self._train(SlideTiles(seen, stain_method="slide"))
        rng = np.random.default_rng(0)
        for row in rows:
            table = read_tiles(tables[row.slide])
            features = rng.normal(size=(len(table), 24)) + 2.0
            write_bag(study / "bags" / TILING / "features_dino" / f"{row.slide}.h5", features, table, "dino", {})

    def _train(self, source: SlideTiles) -> None:
        make_views = step.make_views

        def recorded(tiles: torch.Tensor, ids: torch.Tensor, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
            views = make_views(tiles, ids, *args, **kwargs)
            self.recorded.append((ids, [view for part in views for view in part]))
            return views

        folder = self.study / "encoders" / "dino"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step, "make_views", recorded)
            train.pretrain(source, folder, SETTINGS.pretrain, train.Origin("train split"), device="cpu")
        (folder / "slides.txt").write_text("".join(f"{name}\n" for name in sorted(source.names)))
        (folder / "settings.toml").write_text(to_toml(SETTINGS, {"preset", "slide", "stain", "tile", "pretrain"}))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("studies") / "study")


def section(study: Path, out: Path, **options: Any) -> Alts:
    """The part on encoders of the study's page."""
    page = write_report(study, StudySettings(), out=out, **options).path.read_text(encoding="utf-8")
    found = re.search(r'<section id="pretraining">.*?</section>', page, re.DOTALL)
    assert found is not None
    return Alts(found.group())


# ---------------------------------------------------------------------------------------------------- views


def test_views_are_those_that_the_first_training_step_made(trained: Trained):
    held = StudyFiles.read(trained.study)
    found = encoders.read_samples(held.layout, held.cohort, held.encoders[0])
    ids, views = trained.recorded[0]
    config = held.encoders[0].config["pretrained_cfg"]
    mean, std = (np.array(config[key], dtype=np.float32)[:, None, None] for key in ("mean", "std"))
    assert [len(sample.large) for sample in found] == [2] * encoders.NUM_SAMPLES
    assert [len(sample.small) for sample in found] == [3] * encoders.NUM_SAMPLES
    assert len({sample.slide for sample in found}) == 3  # all that were trained on
    matched = []
    for sample in found:
        shown = [*sample.large, *sample.small]
        wanted = [(view.numpy() * std + mean) * 255 for view in views]
        same = [
            all(
                np.abs(one - np.moveaxis(every[k], 0, -1).clip(0, 255)).max() <= 0.51
                for one, every in zip(shown, wanted, strict=True)
            )
            for k in range(len(ids))
        ]
        assert sum(same) == 1  # one tile of the batch, with all of its views
        matched.append(int(ids[same.index(True)]))
    assert len(set(matched)) == encoders.NUM_SAMPLES


def test_shown_tile_is_the_normalized_tile_of_the_slide(trained: Trained):
    held = StudyFiles.read(trained.study)
    for sample in encoders.read_samples(held.layout, held.cohort, held.encoders[0]):
        table = read_tiles(trained.study / "tiles" / TILING / f"{sample.slide}.h5")
        assert table.stain is not None
        with open_slide(trained.study / "files" / f"{sample.slide}.svs") as slide:
            tiles = [stain.apply(slide.read_tile(int(x), int(y), 64, 0.5), table.stain) for x, y in table.coords_l0]
        assert min(np.abs(tile.astype(int) - sample.tile.astype(int)).max() for tile in tiles) <= 1


@pytest.mark.parametrize("damage", ["slides", "no slides", "tiles", "config", "settings", "table"])
def test_views_that_cannot_be_made_are_left_out(trained: Trained, tmp_path: Path, damage: str):
    study = Path(shutil.copytree(trained.study, tmp_path / "study"))
    encoder = study / "encoders" / "dino"
    reason = {
        "slides": lambda: shutil.rmtree(study / "files"),
        "no slides": lambda: (encoder / "slides.txt").unlink(),
        "tiles": lambda: (study / "tiles" / TILING / "case-17.h5").unlink(),
        "config": lambda: (encoder / "config.json").write_text("{}"),
        "settings": lambda: (encoder / "settings.toml").write_text('[pretrain]\nmethod = "unheard of"\n'),
        "table": lambda: (study / "tiles" / TILING / "case-17.h5").write_bytes(b"nothing"),
    }
    reason[damage]()
    words = {
        "slides": "no file of the slides that it was trained on is there",
        "no slides": "tiles of the slides that it was trained on are not in this study",
        "tiles": "the study's tiles are no longer those that it was trained on",
        "config": "its training is not finished",
        "settings": "its config.json or settings.toml cannot be used",
        "table": "case-17.h5: not a readable tile table",
    }
    found = section(study, tmp_path / "out")
    assert f"Not shown: {words[damage]}" in found.text
    assert "Pretraining of dino" in found.alts  # the rest is there
    assert not [alt for alt in found.alts if "view" in alt]
    assert bool([alt for alt in found.alts if "neighbour" in alt]) == (damage != "slides")


def test_tiles_of_a_batch_are_spread_over_its_readable_slides():
    batch = np.array([0, 1, 2, 10, 11, 25, 25, 26, 31])
    counts, readable = (10, 10, 10, 10), np.array([True, True, False, True])
    chosen = encoders.choose_tiles(batch, counts, readable)
    assert chosen.tolist() == [0, 2, 10, 31]
    assert encoders.choose_tiles(batch, counts, np.ones(4, dtype=bool)).tolist() == [0, 10, 25, 31]


# ---------------------------------------------------------------------------------------------------- neighbours


def brute_force(study: Path, slide: str, row: int, most: int) -> list[tuple[str, int, float]]:
    """(slide, row, cosine similarity) of the nearest tiles of other patients, one pair of tiles after the other."""
    folder = study / "bags" / TILING / "features_dino"
    query = np.array(read_bag(folder / f"{slide}.h5").features_ND[row], dtype=np.float64)
    found = []
    for other, patient in SLIDES.items():
        if patient != SLIDES[slide]:
            for number, values in enumerate(np.array(read_bag(folder / f"{other}.h5").features_ND, dtype=np.float64)):
                cosine = float(np.dot(query, values) / math.sqrt(np.dot(query, query) * np.dot(values, values)))
                found.append((other, number, cosine))
    return sorted(found, key=lambda one: -one[2])[:most]


def test_neighbours_are_those_of_a_search_through_all_tiles(trained: Trained):
    cohort = StudyFiles.read(trained.study).cohort
    assert cohort is not None
    pool = neighbors.read_pool(trained.study / "bags" / TILING / "features_dino", cohort)
    found = neighbors.find_neighbors(pool)
    names = [slide.row.slide for slide in pool.slides]
    queries = [names[pool.slide_N[one.query]] for one in found]
    assert len(queries) == len(set(queries)) == 4  # all slides, each once
    for one, slide in zip(found, queries, strict=True):
        wanted = brute_force(trained.study, slide, int(pool.row_N[one.query]), neighbors.NUM_NEIGHBORS)
        assert [(names[pool.slide_N[row]], int(pool.row_N[row])) for row in one.rows] == [each[:2] for each in wanted]
        np.testing.assert_allclose(one.similarity, [each[2] for each in wanted], atol=1e-6)
        assert all(SLIDES[names[pool.slide_N[row]]] != SLIDES[slide] for row in one.rows)


def test_tiles_of_the_pool_are_read_where_the_feature_file_says(trained: Trained):
    cohort = StudyFiles.read(trained.study).cohort
    assert cohort is not None
    pool = neighbors.read_pool(trained.study / "bags" / TILING / "features_dino", cohort)
    cache = SlideCache()
    for tile in range(0, len(pool.unit_ND), 40):
        row, bag = pool.slides[pool.slide_N[tile]]
        assert bag.coords is not None
        x, y = bag.coords[pool.row_N[tile]]
        with open_slide(row.path) as slide:
            wanted = slide.read_tile(int(x), int(y), 64, 0.5)
        np.testing.assert_array_equal(neighbors.read_tile(pool, tile, cache, "auto"), wanted)
    cache.close()


def test_large_pools_are_searched_in_part(trained: Trained, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(neighbors, "MOST_VALUES", 24 * 4 * 7)
    cohort = StudyFiles.read(trained.study).cohort
    assert cohort is not None
    pool = neighbors.read_pool(trained.study / "bags" / TILING / "features_dino", cohort)
    assert np.bincount(pool.slide_N).tolist() == [7] * 4
    assert pool.num_tiles == sum(len(slide.bag) for slide in pool.slides) > 28


def test_embeddings_that_are_no_numbers_are_never_shown(trained: Trained, tmp_path: Path):
    folder = Path(shutil.copytree(trained.study / "bags" / TILING, tmp_path / TILING)) / "features_dino"
    table = read_tiles(trained.study / "tiles" / TILING / "case-19.h5")
    features = np.ones((len(table), 24))
    features[0], features[1] = np.nan, 0
    write_bag(folder / "case-19.h5", features, table, "dino", {})
    (folder / "case-17.h5").write_bytes(b"nothing of ours")
    cohort = StudyFiles.read(trained.study).cohort
    assert cohort is not None
    pool = neighbors.read_pool(folder, cohort)
    assert [slide.row.slide for slide in pool.slides] == ["case-18", "case-19", "case-20"]
    assert pool.row_N[pool.slide_N == 1].min() == 2
    assert np.isfinite(pool.unit_ND).all()
    found = neighbors.find_neighbors(pool)
    assert all(np.isfinite(one.similarity).all() for one in found)


def test_queries_come_one_from_each_group_of_alike_embeddings():
    rng = np.random.default_rng(1)
    centres = np.linalg.qr(rng.normal(size=(16, 16)))[0][:6]
    group = np.repeat(np.arange(6), [200, 100, 90, 80, 70, 60])
    points = centres[group] + rng.normal(size=(len(group), 16)) * 0.05
    unit = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)
    slide = rng.integers(0, 12, len(group))
    chosen = neighbors.choose_queries(unit, slide, 6)
    assert sorted(group[chosen]) == [0, 1, 2, 3, 4, 5]
    assert len(set(slide[chosen])) == 6
    assert neighbors.choose_queries(unit, slide, 6) == chosen


@given(seed=st.integers(0, 50), tiles=st.integers(1, 30), slides=st.integers(1, 5), most=st.integers(1, 8))
def test_queries_of_any_embeddings(seed: int, tiles: int, slides: int, most: int):
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(tiles, 3)).round(0) + 3  # many are equal
    unit = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)
    slide = rng.integers(0, slides, tiles)
    clusters = neighbors.split_clusters(unit, most)
    assert sorted(np.concatenate(clusters).tolist()) == list(range(tiles))
    assert 1 <= len(clusters) <= most
    chosen = neighbors.choose_queries(unit, slide, most)
    assert 1 <= len(chosen) <= most
    assert len(set(slide[chosen].tolist())) == len(chosen)


def test_collapsed_embeddings_have_one_query():
    unit = np.full((40, 4), 0.5, dtype=np.float32)
    assert len(neighbors.choose_queries(unit, np.arange(40) % 3, 6)) == 1


def test_neighbours_of_the_trained_encoder_and_of_one_from_elsewhere_are_shown(tmp_path: Path):
    for folder in ("encoders/dino", "encoders/untrained_dino", "encoders/mean_color"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "encoders/dino/metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "lo')
    (tmp_path / "tiles" / "0.5mpp").mkdir(parents=True)
    (tmp_path / "tiles" / "0.5mpp" / "a.jpg").write_bytes(b"")
    for features in ("0.5mpp/uni", "0.5mpp/untrained_dino", "0.5mpp/mean_color", "0.5mpp/dino__cls4", "0.25mpp/dino"):
        tiling, name = features.split("/")
        (tmp_path / "bags" / tiling / f"features_{name}").mkdir(parents=True)
    files = StudyFiles.read(tmp_path)
    assert files.shown_features() == ["0.5mpp/dino__cls4", "0.5mpp/uni"]
    assert files.problems == ("encoders/dino/metrics.jsonl: 1 of its lines cannot be read",)


# ---------------------------------------------------------------------------------------------------- the page


def test_section_shows_views_and_neighbours(trained: Trained, tmp_path: Path):
    found = section(trained.study, tmp_path)
    assert len([alt for alt in found.alts if alt.startswith("training tile of case-")]) == 4
    assert len([alt for alt in found.alts if alt.startswith("large view ")]) == 8
    assert len([alt for alt in found.alts if alt.startswith("small view ")]) == 12
    assert len([alt for alt in found.alts if alt.startswith("query tile of case-")]) == 4
    assert len([alt for alt in found.alts if re.fullmatch(r"neighbour of case-\d+, .* [01]\.\d{3}", alt)]) == 20
    assert "the 5 tiles of other patients with the most similar embeddings" in found.text
    assert "Neighbours should share morphology" in found.text
    assert "Not shown" not in found.text
    again = section(trained.study, tmp_path)
    assert (again.text, again.alts) == (found.text, found.alts)


def test_section_shows_pseudonyms_alone(trained: Trained, tmp_path: Path):
    study = Path(shutil.copytree(trained.study, tmp_path / "study"))
    found = section(study, tmp_path / "out", pseudonyms=True)
    told = f"{found.text} {found.alts}"
    assert not [name for name in (*SLIDES, *SLIDES.values()) if name in told]
    key = give_pseudonyms(study, [], [])["slide"]
    assert {alt.removeprefix("query tile of ") for alt in found.alts if alt.startswith("query")} == {*key.values()}


def test_pictures_of_the_section_are_small(trained: Trained):
    """With the default tiles and views, and neighbours of two encoders."""
    with open_slide(trained.study / "files" / "case-17.svs") as slide:
        tile = slide.read_tile(400, 400, 224, 0.5)
    sample = encoders.Sample("a", tile, [tile] * 2, [tile[:96, :96]] * 8)
    shown = encoders.show_sample(sample, Names())
    size = sum(len(one.src) for one in (shown.tile, *shown.large, *shown.small)) * encoders.NUM_SAMPLES
    grid = neighbors.NUM_QUERIES * (1 + neighbors.NUM_NEIGHBORS)
    size += (
        grid * len(neighbors.picture(tile, "a", edge_px=neighbors.TILE_PX, quality=70).src) * neighbors.MOST_FEATURES
    )
    assert 200_000 < size < 600_000


def test_encoder_from_elsewhere_has_neither_views_nor_quality(trained: Trained, tmp_path: Path):
    shutil.copytree(trained.study / "bags" / TILING / "features_dino", tmp_path / "bags" / TILING / "features_uni")
    shutil.copytree(trained.study / "files", tmp_path / "files")
    shutil.copy(trained.study / "cohort.csv", tmp_path)
    found = section(tmp_path, tmp_path / "out")
    assert "No encoder in this study yet" in found.text
    assert "Nearest neighbours: uni" in found.text
    assert len(found.alts) == 24


# ---------------------------------------------------------------------------------------------------- quality


def course(values: Sequence[float], error: float = 0.01, every: int = 100) -> list[Measurement]:
    return [Measurement(every * k, value, error) for k, value in enumerate(values, start=1)]


RISING = [0.1 + 0.03 * k for k in range(20)]
LEVEL = [0.05 * k for k in range(1, 9)] + [0.45] * 22
FALLING = [0.1, 0.25, 0.4, 0.45, 0.5, 0.49, 0.4, 0.33, 0.3, 0.3]


@pytest.mark.parametrize(
    ("measured", "kept", "wanted", "sentence"),
    [
        (course(RISING), None, Course.IMPROVING, "still improving when training ended: more steps may help"),
        (course(RISING), 2000, Course.IMPROVING, "still improving when training ended: more steps may help"),
        (course(LEVEL), 3000, Course.LEVELLED_OFF, "levelled off since step 900: longer training is unlikely to help"),
        (course(LEVEL), 2500, Course.LEVELLED_OFF, "step 900 (the weights of step 2,500 were kept): longer training"),
        (course([0.4] * 8), None, Course.LEVELLED_OFF, "has not risen since step 100: longer training is unlikely"),
        (course(FALLING), 500, Course.FELL, "Quality fell after step 500; the weights of step 500 were kept."),
        (course(FALLING), 600, Course.FELL, "Quality fell after step 500; the weights of step 600 were kept."),
        (
            course(FALLING),
            None,
            Course.FELL,
            "the later, worse weights were kept: train again with --pretrain.steps 500",
        ),
        (course([0.3, 0.2, 0.1, 0.0, 0.0]), None, Course.COLLAPSED, "The features collapsed: do not use this encoder."),
        (course([0.3, 0.3, 0.2, 0.0, 0.0]), 200, Course.FELL, "the weights of step 200 were kept"),
        (course([0.02] * 6, error=0.02), None, Course.COLLAPSED, "The features collapsed"),
        ([Measurement(100, 0.4, 0.01, 1.1)] * 5, None, Course.COLLAPSED, "The features collapsed"),
        ([Measurement(100, 0.01, 0.01, 12.0)] * 5, None, Course.CHANCE, "Quality is no better than chance"),
        (course([0.2, 0.3, 0.4]), None, Course.UNKNOWN, "measured 3 times after the warm-up: too few"),
    ],
)
def test_sentence_follows_from_the_course(measured: list[Measurement], kept: int | None, wanted: Course, sentence: str):
    found = assess(measured, kept)
    assert found is not None
    assert found.course is wanted
    assert sentence in found.sentence


def test_slow_trend_within_the_noise_of_single_measurements_counts():
    """Neighbouring measurements differ by less than their error, and the last quarter alone shows no rise."""
    values = [0.3 + 0.004 * k for k in range(40)]
    found = assess(course(values, error=0.03))
    assert found is not None
    assert found.course is Course.IMPROVING
    levelling = assess(course([min(value, 0.36) for value in values], error=0.01))
    assert levelling is not None
    assert levelling.course is Course.LEVELLED_OFF


def test_slope_is_that_of_weighted_least_squares():
    rng = np.random.default_rng(3)
    steps, quality, error = np.arange(1, 13) * 100.0, rng.normal(0.4, 0.1, 12), rng.uniform(0.01, 0.05, 12)
    measured = [Measurement(int(step), *pair) for step, *pair in zip(steps, quality, error, strict=True)]
    design = np.stack([np.ones(12), steps], axis=1) / error[:, None]
    covariance = np.linalg.inv(design.T @ design)
    slope = covariance @ design.T @ (quality / error)
    assert encoders.slope(measured) == pytest.approx((slope[1], math.sqrt(covariance[1, 1])))


def test_noise_around_a_level_is_called_level():
    """Of 200 level courses with independent errors hardly any is called falling or rising."""
    rng = np.random.default_rng(0)
    found = [assess(course(0.4 + rng.normal(0, 0.02, 20), error=0.02)) for _ in range(200)]
    courses = [one.course for one in found if one is not None]
    assert courses.count(Course.LEVELLED_OFF) >= 170
    assert courses.count(Course.COLLAPSED) == 0


def test_measurements_of_the_warm_up_do_not_count():
    """An untrained network may start high: colours of views agree."""
    values = [0.9, 0.5, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45]
    early, late = assess(course(values)), assess(course(values), warmup_steps=300)
    assert early is not None
    assert late is not None
    assert (early.course, late.course) == (Course.FELL, Course.IMPROVING)


def test_measurements_are_read_from_metrics():
    lines = [
        {"step": 0, "loss": 1.0},
        {"step": 9, "quality": 0.3, "quality_se": 0.02, "sample_rank": 12.0},
        {"step": 10, "quality": float("nan"), "quality_se": 0.02},
        {"step": 11, "quality": None, "quality_se": 0.02},
        {"step": 19, "quality": 0.4, "quality_se": 0.01},
    ]
    assert measurements(lines) == [Measurement(10, 0.3, 0.02, 12.0), Measurement(20, 0.4, 0.01)]
    assert assess(measurements(lines[:1])) is None


def test_quality_is_drawn_with_its_band_and_the_kept_step():
    measured = course([0.2, 0.4, 0.3], error=0.05)
    (axes,) = encoders.draw_quality(measured, 200).axes
    curve, kept = axes.get_lines()[:2]
    assert curve.get_xydata().tolist() == [[100, 0.2], [200, 0.4], [300, 0.3]]
    assert list(kept.get_xdata()) == [200, 200]
    band = axes.collections[0].get_paths()[0].vertices
    assert {(round(x), round(y, 6)) for x, y in band} == {
        (x, round(y + sign * 0.1, 6)) for x, y in ((100, 0.2), (200, 0.4), (300, 0.3)) for sign in (-1, 1)
    }
    assert encoders.quality_figure(measured, 200) == encoders.quality_figure(measured, 200)
    assert len(encoders.draw_quality(measured, None).axes[0].get_lines()) == 2  # the curve and the line of chance


def test_page_shows_quality_and_its_sentence_where_it_was_measured(trained: Trained, tmp_path: Path):
    encoder = tmp_path / "encoders" / "dino"
    shutil.copytree(trained.study / "encoders" / "dino", encoder)
    assert "Quality of dino" not in section(tmp_path, tmp_path / "a").alts
    lines = [{"step": k * 100 - 1, "quality": value, "quality_se": 0.01} for k, value in enumerate(FALLING, start=1)]
    (encoder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = json.loads((encoder / "config.json").read_text())
    config["selfvitmil"]["provenance"] |= {"kept_step": 500, "warmup_steps": 100}
    (encoder / "config.json").write_text(json.dumps(config))
    found = section(tmp_path, tmp_path / "b")
    assert "Quality of dino" in found.alts
    assert "Quality fell after step 500; the weights of step 500 were kept." in found.text
