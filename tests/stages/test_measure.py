"""What `plan` measures, against slides whose tiles are known and against planted times."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from selfvitmil.cohort import read_cohort
from selfvitmil.commands.plan import PlanResult, StagePlan
from selfvitmil.encoder import build_encoder
from selfvitmil.rendering import render
from selfvitmil.settings import StudySettings
from selfvitmil.slides import SlideRef, synthetic
from selfvitmil.stages.base import Basis, Estimate, Pending, unknown
from selfvitmil.stages.measure import (
    MAX_INSTANCES,
    STARTUP_S,
    Measures,
    measure_aggregators,
    measure_encoder,
    measure_slides,
)
from selfvitmil.stages.train import compared_methods
from selfvitmil.tiles import TileJob, count_tiles
from selfvitmil.tiling import tile_slide

SETTINGS = StudySettings.model_validate({"tile": {"mpp": 1.0, "size_px": 32}})


def test_tiles_are_estimated_from_area_and_broken_slides_count_as_empty(tmp_path: Path):
    for number, edge in enumerate((1024, 1024, 2048)):
        synthetic.make_slide(tmp_path / "slides" / f"s{number}.svs", number, size=(edge, edge))
    (tmp_path / "slides" / "broken.svs").write_bytes(b"no slide")
    cohort = read_cohort(tmp_path / "slides")
    found = measure_slides(tmp_path / "study", cohort, SETTINGS)
    true = {
        row.slide: tile_slide(TileJob(SlideRef(row.slide, row.path), tmp_path / "tiles", SETTINGS)).num_tiles
        for row in cohort.rows
        if row.slide != "broken"
    }
    assert found.unreadable == ("broken",)
    assert found.tiles["broken"] == 0
    assert sum(found.tiles.values()) == pytest.approx(sum(true.values()), abs=len(true))  # all were sampled
    assert found.tiles["s2"] / found.tiles["s0"] == pytest.approx(4, rel=0.1)  # by area
    assert found.read_per_s > 0
    assert found.tile_s > 0
    assert not (tmp_path / "study").exists()
    table = next((tmp_path / "tiles").rglob("s0.h5"))
    assert count_tiles(table) == true["s0"]
    table.write_bytes(b"damaged")
    assert count_tiles(table) is None


def test_the_operations_of_an_encoder_are_counted():
    encoder = build_encoder(
        "vit_tiny_patch16_224", img_size=32, model_args={"embed_dim": 48, "depth": 4, "num_heads": 3}
    )
    found = measure_encoder(encoder, SETTINGS)
    width, tokens, depth = 48, 5, 4
    # Per token and block: 12 width^2 multiply-adds in linear layers; attention and patch embedding come on top.
    least_gflop = 2 * tokens * depth * 12 * width**2 / 1e9
    assert least_gflop < found.gflop_per_s / found.tiles_per_s < 1.5 * least_gflop
    assert found.activations_per_block(32) == tokens * width
    assert found.activations([32, 16]) == (tokens + 2) * width * depth


def test_training_is_taken_as_proportional_beyond_the_timed_bag():
    rows = [row for row in compared_methods(StudySettings(), two_scales=False) if row.method in ("mean", "abmil")]
    some, many = (
        measure_aggregators(rows, 64, num, torch.device("cpu")) for num in (MAX_INSTANCES, 100 * MAX_INSTANCES)
    )
    assert set(some) == {row.title for row in rows}
    assert all(many[name] > 10 * some[name] > 0 for name in some)  # 100 times but for noise


def test_reading_overlaps_with_computing_on_a_gpu_only():
    shared = {"read_per_s": 50.0, "processes": 2}
    assert Measures(**shared, gpu=True).with_reading(100.0) == 100.0
    assert Measures(**shared, gpu=True).with_reading(500.0) == 100.0
    assert Measures(**shared).with_reading(100.0) == pytest.approx(50.0)
    assert Measures(processes=2).with_reading(100.0) == 100.0  # nothing is known of reading
    assert Measures(processes=4).over_workers(20.0) == STARTUP_S + 5.0


def test_totals_leave_out_what_is_unknown_and_shortages_are_named():
    stages = (
        StagePlan("tile", Pending(), Estimate(10.0, 100.0, 5.0, Basis.MEASURED)),
        StagePlan("pretrain", Pending(), Estimate(20.0, 900.0, 40.0, Basis.DERIVED, on_gpu=True)),
        StagePlan("embed", Pending(), unknown(on_gpu=True)),
    )
    result = PlanResult(stages, Measures(gpu=True), disk_free=1099, memory=10, gpu_memory=10)
    assert (result.seconds, result.gpu_seconds, result.disk) == (30.0, 20.0, 1000.0)
    assert [stage.name for stage in result.unknown] == ["embed"]
    assert [stage.name for stage in result.too_large] == ["pretrain"]
    assert not result.enough_disk
    words = render(result)
    assert "--pretrain.accumulate 4" in " ".join(words.lines)
    assert words.table[3][-1] == Basis.UNKNOWN
    assert len({len(row) for row in words.table}) == 1
