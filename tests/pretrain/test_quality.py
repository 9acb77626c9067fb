"""Quality without labels: its formulas, what is kept by it, and runs that end early. Tiny networks on a CPU."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.pretraining import TINY as TINY_RUN
from selfvitmil.data.loader import order_of
from selfvitmil.data.sources import ImageTiles
from selfvitmil.data.views import ViewRecipe, make_views
from selfvitmil.encoder import load_encoder
from selfvitmil.pretrain import quality, train
from selfvitmil.pretrain.quality import (
    Ending,
    EvaluationPlan,
    QualityHistory,
    QualityMetrics,
    Sample,
    alignment,
    choose_tiles,
    measure,
    neighbour_agreement,
    plan_evaluations,
    read_sample,
    standard_error,
    two_views,
    uniformity,
    view_recipe,
)
from selfvitmil.pretrain.train import Origin, TrainedEncoder, pretrain
from selfvitmil.rendering import render
from selfvitmil.report.encoders import describe_steps
from selfvitmil.runtime.device import Worker
from selfvitmil.runtime.training import read_metrics
from selfvitmil.settings import PretrainSettings, resolve_settings
from selfvitmil.stages import pretrain as stage
from selfvitmil.study import Study

pytestmark = pytest.mark.usefixtures("one_thread")

ORIGIN = Origin(trained_on="train split of synthetic tiles")
TIMES = ("tiles_per_s", "data_wait_share", "mfu", "phase_s", "quality_s")


def random_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


# ---------------------------------------------------------------------------------------------------- formulas


def slow_agreement(embeddings: np.ndarray, groups: list[int], k: int, elsewhere: bool) -> list[float]:
    found = []
    count = embeddings.shape[1]
    for i in range(count):
        sets, candidates = [], 0
        for view in embeddings:
            near = []
            for j in range(count):
                if j != i and (not elsewhere or groups[j] != groups[i]):
                    cosine = view[i] @ view[j] / math.sqrt((view[i] @ view[i]) * (view[j] @ view[j]))
                    near.append((-cosine, j))
            sets.append({j for _, j in sorted(near)[:k]})
            candidates = len(near)
        share = len(sets[0] & sets[1]) / k
        found.append((share - k / candidates) / (1 - k / candidates))
    return found


@pytest.mark.parametrize(
    ("groups", "most", "k", "elsewhere"),
    [
        ([0] * 7 + [1] * 12 + [2] * 9 + [3] * 12, 5, 5, True),
        ([0] * 40, 5, 5, False),
        ([0] * 37 + [1] * 3, 5, 5, False),  # three candidates elsewhere would be too few
        ([0] * 12, 10, 2, False),
    ],
)
def test_agreement_is_that_of_a_slow_loop(groups: list[int], most: int, k: int, elsewhere: bool):
    first = random_rows(len(groups), 6)
    embeddings = torch.stack([first, first + 0.5 * random_rows(len(groups), 6, seed=1)])
    found = neighbour_agreement(embeddings, torch.tensor(groups), most)
    wanted = slow_agreement(embeddings.numpy(), groups, k, elsewhere)
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-12)
    assert 0.1 < found.mean() < 0.9


def test_alignment_and_uniformity_are_those_of_slow_loops():
    rows = torch.nn.functional.normalize(random_rows(2, 9, 4), dim=-1)
    distances = [((rows[0, i] - rows[1, i]) ** 2).sum().item() for i in range(9)]
    assert alignment(rows) == pytest.approx(sum(distances) / 9)
    logs = []
    for view in rows:
        potentials = [
            math.exp(-2 * ((view[i] - view[j]) ** 2).sum().item()) for i in range(9) for j in range(9) if i != j
        ]
        logs.append(math.log(sum(potentials) / len(potentials)))
    assert uniformity(rows) == pytest.approx(sum(logs) / 2)


@pytest.mark.parametrize("num_groups", [1, 4, 12])
def test_the_standard_error_is_a_jackknife_over_slides_or_tiles(num_groups: int):
    values, groups = random_rows(60)[:50], torch.arange(50) % num_groups
    names = groups.tolist() if num_groups >= 10 else list(range(50))
    means = []
    for name in sorted(set(names)):
        rest = [value.item() for value, other in zip(values, names, strict=True) if other != name]
        means.append(sum(rest) / len(rest))
    count, centre = len(means), sum(means) / len(means)
    wanted = math.sqrt((count - 1) / count * sum((mean - centre) ** 2 for mean in means))
    assert standard_error(values, groups) == pytest.approx(wanted)
    if num_groups < 10:  # then it is the textbook's
        assert wanted == pytest.approx(values.std().item() / math.sqrt(50))


def test_chance_gives_zero_and_views_that_make_no_difference_give_one():
    groups = torch.arange(300) % 15
    random = measure(random_rows(2, 300, 8), groups)
    assert abs(random.quality) < 4 * random.quality_se < 0.1
    same = random_rows(300, 8).expand(2, 300, 8)
    assert measure(same, groups).quality == 1.0


def test_an_encoder_that_says_the_same_of_all_tiles_has_no_quality():
    """Its neighbours are all equally near; they must not agree because ties are broken alike."""
    collapsed = measure(torch.ones(2, 300, 8), torch.arange(300) % 15)
    assert abs(collapsed.quality) < 0.05
    assert collapsed.rank == pytest.approx(1.0, abs=1e-3)


def test_quality_ranks_encoders_by_what_they_know_of_the_tissue():
    """Embeddings of tissue (the same in both views) and of the view, mixed in shares that get better, then worse."""
    groups = torch.arange(400) % 20
    tissue, own = random_rows(400, 16), random_rows(2, 400, 16, seed=1)
    shares = [0.1, 0.4, 0.55, 0.7, 0.85, 0.7, 0.55, 0.4, 0.1]
    found = [measure(share * tissue + (1 - share) * own, groups) for share in shares]
    qualities = [each.quality for each in found]
    assert int(np.argmax(qualities)) == 4
    np.testing.assert_array_equal(np.argsort(np.argsort(qualities[:5])), range(5))
    course = QualityHistory(patience=2, first_step=0)
    kept = [course.add(step, each, groups) for step, each in enumerate(found)]
    assert kept == [True] * 5 + [False] * 4
    assert (course.kept_step, course.kept_quality) == (4, qualities[4])
    assert course.fell


# ---------------------------------------------------------------------------------------------------- the sample


def test_tiles_are_spread_over_slides():
    counts = (1000, 3, 50, 0, 400)
    tiles = choose_tiles(counts, 100, seed=1)
    assert len(np.unique(tiles)) == 100
    by_slide = np.bincount(np.searchsorted(np.cumsum(counts), tiles, side="right"), minlength=5)
    assert by_slide[1] == 3
    assert by_slide[3] == 0
    assert sorted(by_slide[[0, 2, 4]].tolist()) == [32, 32, 33]
    np.testing.assert_array_equal(tiles, choose_tiles(counts, 100, seed=1))
    assert not np.array_equal(tiles, choose_tiles(counts, 100, seed=2))
    assert len(choose_tiles((5, 6), 100, seed=0)) == 11
    many = choose_tiles((10,) * 500, 100, seed=0)
    assert len(np.unique(many // 10)) == 100, "from as many slides as there are tiles"


def test_colours_alone_do_not_solve_it():
    """Tiles of 20 slides that differ in colour only: by mean colours they find each other unless colours are varied."""
    rng = np.random.default_rng(0)
    colours = rng.uniform([150, 90, 140], [235, 190, 220], (400, 3))
    tiles = torch.from_numpy(colours[:, :, None, None] + rng.normal(0, 4, (400, 3, 24, 24))).clamp(0, 255).byte()
    ids, groups = torch.arange(400), torch.arange(400) % 20

    def by_mean_colour(views: torch.Tensor) -> float:
        colours = views.float().mean(dim=(-1, -2))
        return measure(colours - colours.mean(dim=1, keepdim=True), groups).quality

    plain = ViewRecipe(size_px=16, stain=0.0, jitter=0.0, grey=0.0, blur=0.0, scale=(0.5, 0.5))
    (unvaried,) = make_views(tiles, ids, 0, (plain,) * 2, (0.0,) * 3, (1 / 255,) * 3)
    assert by_mean_colour(unvaried) > 0.8
    assert by_mean_colour(two_views(tiles, ids, plain, seed=0)) < 0.15


def test_views_are_cut_at_the_middle_scale_of_the_large_ones():
    recipe = view_recipe(ViewRecipe(size_px=112, scale=(0.2, 0.35), right_angles=False, solarize=0.2, blur=1.0))
    assert recipe.scale == (0.275, 0.275)
    assert (recipe.size_px, recipe.solarize, recipe.blur, recipe.right_angles) == (112, 0.0, 0.0, True)


def test_the_cost_stays_a_small_share_of_the_training():
    for steps, batch in ((360, 48), (1080, 256), (100_000, 256), (40, 2000)):
        plan = plan_evaluations(steps, steps * batch * 11.0, 1.0, 50_000)
        assert plan is not None
        assert plan.evaluations * plan.tiles * 2 <= quality.SHARE * steps * batch * 11.0
        assert 8 <= plan.evaluations <= 20
        assert 64 <= plan.tiles <= 1024
    assert plan_evaluations(100_000, 1e9, 1.0, 50_000) == EvaluationPlan(1024, 5000, 100_000)
    assert plan_evaluations(40, 40 * 8 * 11.0, 1.0, 50_000) is None, "too short to be measured"
    assert plan_evaluations(100_000, 1e9, 1.0, 30) is None, "too few tiles"
    assert [step for step in range(1, 11) if EvaluationPlan(64, 4, 10).is_due(step)] == [4, 8, 10]


# ---------------------------------------------------------------------------------------------------- decisions

GROUPS = torch.arange(200) % 20


def planted(level: float, noise: float = 0.0, seed: int = 0) -> QualityMetrics:
    """An evaluation with this quality; single tiles scatter, by `noise` from one evaluation to the next."""
    tiles = 0.2 * random_rows(200) + noise * random_rows(200, seed=seed + 1)
    return QualityMetrics(tiles - tiles.mean() + level, 0.0, 0.0, 0.0, 0.0)


def follow(levels: list[float], noise: float = 0.1, first_step: int = 0) -> QualityHistory:
    course = QualityHistory(patience=4, first_step=first_step)
    for step, level in enumerate(levels):
        course.add(step, planted(level, noise, seed=step), GROUPS)
    return course


def test_later_weights_are_kept_while_the_measure_cannot_tell_them_apart():
    assert follow([0.3, 0.6, 0.598]).kept_step == 2  # a standard error of a difference is about 0.01
    assert follow([0.3, 0.6, 0.57]).kept_step == 1


def test_small_steps_downhill_do_not_pass_unnoticed():
    course = follow([0.6 - 0.006 * step for step in range(12)])
    assert course.kept_step is not None
    assert course.kept_step <= 3
    assert course.peak == pytest.approx(0.6)


def test_two_low_evaluations_raise_an_alarm_and_a_fifth_of_the_run_ends_it():
    levels = [0.3, 0.61, 0.5, 0.45, 0.42, 0.4]
    told = [follow(levels[:count]).alarm for count in range(1, 7)]
    assert told[:3] == [None] * 3
    assert told[3] == "the quality of the embeddings fell from 0.610 to 0.450"
    assert [follow(levels[:count]).fell for count in range(1, 7)] == [False] * 5 + [True]
    assert EvaluationPlan(64, 5, 100).patience == 4
    assert EvaluationPlan(64, 10, 100).patience == 3


def test_a_run_that_recovers_or_falls_by_little_goes_on():
    recovering = follow([0.6, 0.4, 0.42, 0.44, 0.46, 0.48, 0.5])
    assert recovering.alarm
    assert not recovering.fell
    assert not follow([0.6, *[0.56] * 8]).fell, "less than a tenth"
    assert not follow([0.02, *[0.0] * 8], noise=0.5).fell, "within the noise"


def test_evaluations_before_the_end_of_the_warm_up_do_not_count():
    course = follow([0.9, 0.3, 0.4, 0.41], first_step=1)
    assert (course.peak, course.kept_step, course.low) == (pytest.approx(0.41), 3, 0)


# ---------------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for k in range(48):
        pixels = rng.integers(60, 250, (8, 8, 3), dtype=np.uint8).repeat(4, axis=0).repeat(4, axis=1)
        (folder / f"slide{k % 4}").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / f"slide{k % 4}" / f"{k:02}.png")
    return folder


def tiny(**changes: Any) -> PretrainSettings:
    own = TINY_RUN | {"steps": 12, "num_local": 1, "drop_path": 0.3, "checkpoint_minutes": 1e-9}
    return PretrainSettings(**(own | changes))


@pytest.fixture
def affordable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure after every step, whatever it costs."""
    monkeypatch.setattr(quality, "SHARE", 1e6)
    monkeypatch.setattr(quality, "FEWEST_TILES", 16)


def plant(monkeypatch: pytest.MonkeyPatch, levels: list[float]) -> list[Any]:
    """Make evaluations say this, one after the other, and later ones the last; returns the weights that they saw."""
    seen: list[Any] = []
    groups = torch.arange(48) % 4

    def measured(self: Sample, encoder: Any) -> QualityMetrics:
        assert torch.equal(self.groups_N.sort().values, groups.sort().values)
        weights = {name: value.clone() for name, value in encoder.backbone.state_dict().items()}
        seen.append(weights)
        scatter = 0.05 * random_rows(48, seed=len(seen))
        return QualityMetrics(scatter - scatter.mean() + levels[min(len(seen), len(levels)) - 1], 0.01, 0.0, 0.0, 0.0)

    monkeypatch.setattr(Sample, "measure", measured)
    return seen


def timeless(folder: Path) -> list[dict[str, Any]]:
    return [{key: line[key] for key in line if key not in TIMES} for line in read_metrics(folder)]


def same_weights(folder: Path, weights: dict[str, torch.Tensor]) -> bool:
    found = load_encoder(folder).backbone.state_dict()
    return all(torch.equal(found[name], value) for name, value in weights.items())


def test_measuring_changes_nothing_in_the_training(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = tiny(keep="last", stop_early=False)
    pretrain(ImageTiles(images), tmp_path / "plain", settings, ORIGIN, device="cpu")
    monkeypatch.setattr(quality, "SHARE", 1e6)
    monkeypatch.setattr(quality, "FEWEST_TILES", 16)
    pretrain(ImageTiles(images), tmp_path / "measured", settings, ORIGIN, device="cpu")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "measured")]
    assert files[0] == files[1]
    plain, measured = (read_metrics(tmp_path / name) for name in ("plain", "measured"))
    assert all("quality" not in line for line in plain)
    for line in measured:
        assert {"quality", "quality_se", "alignment", "uniformity", "sample_rank", "quality_s"} <= set(line)
        assert -0.5 < line["quality"] < 1
        assert line["quality_se"] > 0
    own = load_encoder(tmp_path / "plain").config.provenance
    assert (own["ended_step"], own["kept_step"], own["kept_quality"]) == (12, 12, None)


@pytest.mark.usefixtures("affordable")
def test_an_evaluation_is_that_of_the_encoder_that_is_saved(images: Path, tmp_path: Path):
    result = pretrain(ImageTiles(images), tmp_path / "run", tiny(steps=3, keep="last"), ORIGIN, device="cpu")
    sample = read_sample(ImageTiles(images), ViewRecipe(size_px=32, scale=(0.4, 1.0)), 48, seed=0, workers=0)
    again = sample.measure(load_encoder(tmp_path / "run"))
    assert again.quality == result.metrics["quality"]
    assert again.uniformity == result.metrics["uniformity"]


@pytest.mark.usefixtures("affordable")
def test_the_best_weights_are_kept(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = plant(monkeypatch, [0.9, 0.2, 0.4, 0.5, 0.6, 0.47, 0.5, 0.56, 0.55, 0.5, 0.5, 0.5])
    result = pretrain(ImageTiles(images), tmp_path / "run", tiny(stop_early=False), ORIGIN, device="cpu")
    assert len(seen) == 12
    assert result.ending is not None
    # The warm-up is a tenth of the run: the evaluation after the first step counts here.
    assert (result.ending.kept_step, result.ending.kept_quality) == (1, pytest.approx(0.9))
    assert same_weights(tmp_path / "run", seen[0])
    assert result.ending.words == "kept the weights of step 1, whose quality is 0.900 (0.500 at the end)"
    assert not result.ending.stopped_early
    state = torch.load(tmp_path / "run" / "state.pt", weights_only=True)
    assert state["step"] == 12
    assert not all(torch.equal(state["learner"][f"teacher.backbone.{name}"], value) for name, value in seen[0].items())


@pytest.mark.usefixtures("affordable")
def test_a_run_that_gets_worse_says_so_and_ends_early(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    levels = [0.2, 0.4, 0.61, 0.5, 0.45, 0.4, 0.4]
    seen = plant(monkeypatch, levels)
    told: list[dict[str, Any]] = []
    result = pretrain(ImageTiles(images), tmp_path / "run", tiny(), ORIGIN, device="cpu", report=told.append)
    words = "stopped early at step 6 of 12: quality fell from 0.610 to 0.400; kept the weights of step 3"
    assert result.finished
    assert result.ending is not None
    assert (result.step, result.total_steps, result.ending.words) == (6, 12, words)
    assert same_weights(tmp_path / "run", seen[2])
    assert [line["step"] for line in told if "alarm" in line] == [4, 5]
    (warning,) = (each for each in result.warnings if each.startswith("at step"))
    assert "at step 4: the quality of the embeddings fell from 0.610 to 0.450. Use --pretrain.method lejepa" in warning
    config = json.loads((tmp_path / "run" / "config.json").read_text())["selfvitmil"]["provenance"]
    assert (config["kept_step"], config["ended_step"], config["total_steps"]) == (3, 6, 12)
    assert config["kept_quality"] == pytest.approx(0.61)

    again = pretrain(ImageTiles(images), tmp_path / "run", tiny(), ORIGIN, device="cpu")
    assert (again.note, again.step, again.ending) == ("up to date", 6, result.ending)
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    for name in ("config.json", "model.safetensors"):  # as if killed between the last checkpoint and the encoder
        (tmp_path / "run" / name).unlink()
    resumed = pretrain(ImageTiles(images), tmp_path / "run", tiny(), ORIGIN, device="cpu")
    assert (resumed.finished, resumed.step, resumed.ending) == (True, 6, result.ending)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before
    assert len(seen) == 6


@pytest.mark.usefixtures("affordable")
@pytest.mark.parametrize(("level", "warns"), [(0.001, True), (0.3, False)])
def test_an_encoder_that_is_no_better_than_chance_is_not_handed_over_in_silence(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: float, warns: bool
):
    plant(monkeypatch, [level] * 7)
    result = pretrain(ImageTiles(images), tmp_path / "run", tiny(), ORIGIN, device="cpu")
    assert any("no better than chance (0.001, standard error" in each for each in result.warnings) == warns


@pytest.mark.usefixtures("affordable")
def test_the_last_weights_are_kept_and_all_steps_done_where_that_is_asked_for(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = plant(monkeypatch, [0.6, 0.4, 0.4])
    settings = tiny(keep="last", stop_early=False)
    result = pretrain(ImageTiles(images), tmp_path / "run", settings, ORIGIN, device="cpu")
    assert result.ending is not None
    assert (result.step, result.ending.kept_step, result.ending.words) == (12, 12, "")
    assert result.ending.kept_quality == pytest.approx(0.4)
    assert same_weights(tmp_path / "run", seen[-1])
    assert "alarm" in result.metrics


@pytest.mark.usefixtures("affordable")
def test_a_resumed_run_decides_alike(images: Path, tmp_path: Path):
    """Killed twice, after the line of a step and before its checkpoint; these evaluations are done again."""
    settings = tiny(lr=5e-2, steps=8)
    whole = pretrain(ImageTiles(images), tmp_path / "whole", settings, ORIGIN, device="cpu")
    for at in (2, 5):

        def die(line: dict[str, Any], at: int = at) -> None:
            if line["step"] == at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pretrain(ImageTiles(images), tmp_path / "cut", settings, ORIGIN, device="cpu", report=die)
    result = pretrain(ImageTiles(images), tmp_path / "cut", settings, ORIGIN, device="cpu")
    assert result.ending == whole.ending
    assert timeless(tmp_path / "cut") == timeless(tmp_path / "whole")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    states = [torch.load(tmp_path / name / "state.pt", weights_only=True)["quality"] for name in ("cut", "whole")]
    assert torch.equal(states[0]["course"].pop("peak_N"), states[1]["course"].pop("peak_N"))
    assert states[0]["course"] == states[1]["course"]
    assert all(torch.equal(value, states[1]["kept"][name]) for name, value in states[0]["kept"].items())


PROCESS = """
    import sys
    from pathlib import Path
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    from selfvitmil.pretrain import quality, train
    from selfvitmil.data.sources import ImageTiles
    from selfvitmil.settings import PretrainSettings

    quality.SHARE, quality.FEWEST_TILES = 1e6, 16
    levels = iter([0.2, 0.4, 0.61, 0.5, 0.45, 0.4])
    scatter = torch.linspace(-0.05, 0.05, 48, dtype=torch.float64)

    def measured(self, encoder):
        level = next(levels)
        return quality.QualityMetrics(scatter * level + level, 0.01, 0.0, 0.0, 0.0)

    quality.Sample.measure = measured
    dist.init_process_group("gloo")
    settings = PretrainSettings.model_validate_json(sys.argv[3])
    images, out = (Path(path) for path in sys.argv[1:3])
    result = train.pretrain(ImageTiles(images), out, settings, train.Origin("made"), device="cpu")
    assert result.finished and result.step == 6 and result.ending.kept_step == 3, result
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_end_early_at_the_same_step(images: Path, tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = tiny(drop_path=0.0).model_dump_json()
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), str(images), str(tmp_path / "run"), settings]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(command, env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    assert len(read_metrics(tmp_path / "run")) == 6
    assert load_encoder(tmp_path / "run").config.provenance["kept_step"] == 3


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (
            Ending(3400, 1400, 900, 0.61, 0.61, 0.4),
            "encoders/dino: built, stopped early at step 1,400 of 3,400: quality fell from 0.610 to 0.400; "
            "kept the weights of step 900",
        ),
        (
            Ending(3400, 3400, 2900, 0.6, 0.61, 0.55),
            "encoders/dino: built, step 3400 of 3400, loss 1.250; "
            "kept the weights of step 2,900, whose quality is 0.600 (0.550 at the end)",
        ),
        (Ending(3400, 3400, 3400, 0.6, 0.61, 0.6), "encoders/dino: built, step 3400 of 3400, loss 1.250"),
    ],
)
def test_the_summary_of_pretrain_says_which_weights_were_kept(
    ending: Ending, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "encoders" / "dino").mkdir(parents=True)
    result = TrainedEncoder(tmp_path, ending.ended_step, 3400, True, "built", {"loss": 1.25}, (), ending)
    monkeypatch.setattr(train, "pretrain", lambda *given, **named: result)
    source = SimpleNamespace(names=("s1",), counts=(8,), run=1)
    trained = stage._train(source, Study(tmp_path, resolve_settings()), "dino", "train split")
    assert render(stage.PretrainResult({"dino": trained})).lines == (words,)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"total_steps": 3400}, ["3,400 steps"]),
        ({"total_steps": 3400, "ended_step": 3400, "kept_step": 3400}, ["3,400 steps"]),
        (
            {"total_steps": 3400, "ended_step": 1400, "kept_step": 900},
            ["stopped early after 1,400 of 3,400 steps", "weights of step 900 kept"],
        ),
        ({}, []),
    ],
)
def test_the_report_says_which_weights_were_kept(told: dict[str, int], words: list[str]):
    assert describe_steps(told) == words


def test_watching_a_run_shows_its_length_and_the_first_alarm(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    settings = tiny(steps=None, epochs=2)
    order = order_of(ImageTiles(images), settings)
    total = 2 * order.steps_per_epoch
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with stage._watched(ImageTiles(images), tmp_path, settings) as show:
        for step in range(total):
            clock[0] += 30.0
            show({"step": step, "loss": 1.0} | ({"alarm": "it got worse"} if step >= 1 else {}))
    first, *_, last = (lines := capsys.readouterr().err.splitlines())
    assert first.startswith(f"pretrain: 1/{total} steps, ")
    assert f"{settings.batch / 30:.2f} tiles/s" in first or f"{settings.batch / 30:.1f} tiles/s" in first
    left = 30 * (total - 1)
    assert first.endswith(f"loss 1, 0:00:30 so far, about {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left")
    assert [line for line in lines if "warning" in line] == ["pretrain: step 1, warning: it got worse"]
    assert last.startswith(f"pretrain: {total}/{total} steps")


def test_watching_a_resumed_run_counts_from_where_it_was(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "metrics.jsonl").write_text('{"step": 5}\n')
    with stage._watched(ImageTiles(images), tmp_path, tiny(steps=10)) as show:
        show({"step": 7, "loss": 1.0})
    assert "pretrain: 8/10 steps" in capsys.readouterr().err


@pytest.mark.parametrize("preset", ["paper", "authors-code", "dsmil-simclr"])
def test_published_presets_choose_no_weights(preset: str):
    settings = resolve_settings(flags={"preset": preset}).pretrain
    assert (settings.keep, settings.stop_early) == ("last", False)
    assert (PretrainSettings().keep, PretrainSettings().stop_early) == ("best", True)


def test_what_is_kept_is_part_of_the_identity(images: Path, tmp_path: Path):
    source = ImageTiles(images)
    worker = Worker(torch.device("cpu"))
    found = {
        train.PretrainRun(source, tmp_path, settings, ORIGIN, worker, threading.Event()).made_from
        for settings in (tiny(), tiny(keep="last"), tiny(stop_early=False))
    }
    assert len(found) == 3
