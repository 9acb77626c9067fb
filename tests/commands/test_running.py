"""`init`, `plan`, `run` and `status`: the whole way on tiny slides, and what they say when something is amiss."""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from helpers.cli import Done, rows_of, selfvitmil
from helpers.error_codes import has_code
from helpers.studies import MICRO, TILING
from selfvitmil import stages as all_stages
from selfvitmil import study as study_module
from selfvitmil.cohort import read_cohort
from selfvitmil.cohort.camelyon16 import PAPER_TILES
from selfvitmil.commands.init import commented_settings
from selfvitmil.commands.plan import PlanResult, plan
from selfvitmil.commands.run import Request, RunRecord, camelyon16_lines, plan_run, read_record, write_record
from selfvitmil.encoder import build_encoder, save_encoder
from selfvitmil.errors import ConfigError, EncoderError
from selfvitmil.evaluate import dataset
from selfvitmil.report import data as report_data
from selfvitmil.settings import (
    STUDY_ENGINE,
    CompareSettings,
    LocalizeSettings,
    StudySettings,
    TrainSettings,
    all_keys,
    resolve_settings,
)
from selfvitmil.slides import synthetic
from selfvitmil.stages.base import Basis, Estimate
from selfvitmil.stages.train import heatmap_settings, lesion_baseline
from selfvitmil.store.failures import Failure, record_failures
from selfvitmil.store.lock import study_lock
from selfvitmil.study import Study, open_study, study_settings

STAGES = tuple(stage.name for stage in all_stages.STAGES if stage.in_run)


def cohort_of(study: Path) -> list[dict[str, str]]:
    return rows_of(study / "cohort.csv")


def write_rows(study: Path, rows: list[dict[str, str]]) -> None:
    lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
    (study / "cohort.csv").write_text("\n".join(lines) + "\n")


def snapshot(study: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a study with its time and content: equal ones mean that nothing was touched."""
    return {
        path.relative_to(study).as_posix(): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(study.rglob("*"))
        if path.is_file() and path.name not in (".lock", "run.json")
    }


def run(study: Path, *flags: object) -> Done:
    return selfvitmil("run", study, *flags)


def said(done: Done) -> str:
    """What was printed, with line breaks and columns as single blanks."""
    return " ".join((done.stdout + done.stderr).split())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten tiny slides, each of another patient, and a finished study of them."""
    place = tmp_path_factory.mktemp("place")
    synthetic.make_cohort(place / "made", slides=10, seed=1, size=(1024, 1024), slides_per_patient=1)
    (place / "finished").mkdir()
    (place / "finished" / "study.toml").write_text(MICRO)
    done = run(place / "finished", "--cohort", place / "made" / "cohort.csv")
    assert done.returncode == 0, done.stdout + done.stderr
    (place / "said.txt").write_text(done.stdout)
    return place


@pytest.fixture
def study(place: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the finished study, to be changed."""
    copy = place / re.sub(r"\W", "_", request.node.name)
    shutil.copytree(place / "finished", copy)
    return copy


@pytest.fixture
def fresh(place: Path, request: pytest.FixtureRequest) -> Path:
    """A study that knows its slides and has done nothing."""
    new = place / re.sub(r"\W", "_", f"fresh_{request.node.name}")
    new.mkdir()
    (new / "study.toml").write_text(MICRO)
    shutil.copy(place / "finished" / "cohort.csv", new)
    return new


# ---------------------------------------------------------------------------------------------------- init


@pytest.mark.parametrize("preset", ["default", "quick", "demo", "paper", "authors-code", "dsmil-simclr"])
def test_init_shows_every_setting_and_uncommenting_all_changes_none(preset: str, tmp_path: Path):
    study = tmp_path / "study"
    done = selfvitmil("init", study, "--preset", preset)
    assert done.returncode == 0, done.stderr
    text = (study / "study.toml").read_text()
    wanted = resolve_settings(None, {"preset": preset})
    assert resolve_settings(study / "study.toml") == wanted
    bare = re.sub(r"(?m)^#(?=\w+ = )", "", text)
    told = tomllib.loads(bare)
    assert StudySettings.model_validate(told) == wanted
    named = {f"{section}.{key}" for section, keys in told.items() if isinstance(keys, dict) for key in keys}
    unset = {key for key in all_keys() if re.search(rf"(?m)^# {key.split('.')[-1]} is not set$", text)}
    not_of_a_study = {key for key in all_keys() if key.startswith("engine.") and key.split(".")[1] not in STUDY_ENGINE}
    assert set(all_keys()) - {"preset"} - not_of_a_study <= named | unset | set(told)
    assert not named & not_of_a_study
    assert "Edge of a tile as the encoder sees it" in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_init_does_not_overwrite(tmp_path: Path):
    (tmp_path / "study.toml").write_text("# mine\n")
    done = selfvitmil("init", tmp_path)
    assert done.returncode == 2
    assert done.code == "study-exists"
    assert (tmp_path / "study.toml").read_text() == "# mine\n"
    assert commented_settings() != "# mine\n"


# ---------------------------------------------------------------------------------------------------- the whole way


def test_a_run_says_first_what_it_will_do_and_last_what_it_did(place: Path):
    text = (place / "said.txt").read_text()
    first, last = text.index("what will be done"), text.index("what was done")
    before, after = text[first : text.index("slides in the cohort")], text[last:]
    for stage in STAGES:
        assert re.search(rf"(?m)^{stage} ", before), stage
        assert re.search(rf"(?m)^{stage} +done +[\d.]+ (s|min)", after), stage
    finished = place / "finished"
    assert (finished / "report" / "index.html").stat().st_size > 1000
    assert (finished / "results" / "compare" / "table.csv").exists()
    assert list((finished / "maps" / "dino_self-vit-mil").glob("*.h5"))
    assert (finished / "results" / "compare" / "lesions.json").exists()
    record = read_record(finished)
    assert record is not None
    assert record.ended == "finished"
    assert tuple(record.seconds) == STAGES


def test_heatmaps_of_compared_methods_fall_back_where_they_lack_the_asked_score():
    asked = LocalizeSettings(score="attention")
    train = TrainSettings(aggregator="max")
    assert heatmap_settings("max", train, 1, asked, main="self-vit-mil").score == "auto"
    assert (
        heatmap_settings("abmil", TrainSettings(aggregator="abmil"), 1, asked, main="self-vit-mil").score == "attention"
    )
    with pytest.raises(ConfigError, check=has_code("no-such-evidence")):
        heatmap_settings("max", train, 1, asked, main="max")
    published = StudySettings(compare=CompareSettings(baseline="dsmil (published)"))
    assert lesion_baseline(published) == "dsmil"


def test_a_run_ends_with_the_comparison_and_where_to_look(place: Path):
    text = (place / "said.txt").read_text()
    last = text[text.index("all of it took") :]
    with (place / "finished" / "results" / "compare" / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    with (place / "finished" / "results" / "compare" / "lesions.csv").open(newline="") as file:
        hits = {row["maps_of"]: row["hit_rate"] for row in csv.DictReader(file)}
    for row in rows:
        name = row["display_name"]
        auc = f"{float(row['auc']):.3f} [{float(row['auc_low']):.3f}, {float(row['auc_high']):.3f}]"
        hit = f"{float(hits[name]):.2f}" if hits.get(name) else "-"
        assert re.search(rf"(?m)^{re.escape(name)} +{re.escape(auc)} .* {hit} *$", last), name
    assert re.search(r"AUC of self-vit-mil: [\d.]+ \[", last)
    assert last.index("AUC of self-vit-mil") < last.index("index.html") < last.index("viewer: selfvitmil view")


def test_a_second_run_redoes_nothing(study: Path):
    before = snapshot(study)
    done = run(study, "--until", "embed")
    assert done.returncode == 0, done.stderr
    assert said(done).count("up to date (10 slides)") == 6  # check, tile and embed, first and last
    assert "up to date (encoders/dino)" in said(done)
    assert snapshot(study) == before


def test_a_broken_slide_stops_no_other_and_ends_with_3(fresh: Path):
    rows = cohort_of(fresh)
    broken = fresh / "broken.svs"
    broken.write_bytes(b"this is no slide")
    write_rows(fresh, [*rows, {**rows[0], "slide": "broken", "path": "broken.svs", "patient": "p", "annotation": ""}])
    done = run(fresh, "--until", "embed")
    assert done.returncode == 3
    assert "1 slide failed in one stage or another" in said(done)
    assert len(list((fresh / "bags" / TILING / "features_dino").glob("*.h5"))) == 10
    again = run(fresh, "--until", "embed")
    assert again.returncode == 3
    assert "1 that failed the last time (broken)" in said(again)
    assert "up to date (encoders/dino)" in said(again)  # what fails again changes nothing


def test_an_interrupted_run_goes_on_with_the_same_command(fresh: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("selfvitmil.stages.embed.embed", interrupted)
        stopped = run(fresh, "--until", "embed")
    assert stopped.returncode == 130
    assert "was interrupted in embed" in said(selfvitmil("status", fresh))
    before = snapshot(fresh)
    done = run(fresh, "--until", "embed")
    assert done.returncode == 0
    assert {name: before[name] for name in before if "tiles" in name or "encoders" in name} == {
        name: content for name, content in snapshot(fresh).items() if "tiles" in name or "encoders" in name
    }
    assert "10 slides to do: 10 new" in said(done)


def test_training_that_was_stopped_goes_on(fresh: Path):
    assert run(fresh, "--until", "pretrain").returncode == 0
    (fresh / "encoders" / "dino" / "config.json").unlink()  # as if it had been killed before its end
    done = run(fresh, "--until", "pretrain")
    assert done.returncode == 0, done.stderr
    assert "resume encoders/dino from step 2, of 2 steps" in said(done)
    (fresh / "encoders" / "dino" / "config.json").unlink()
    changed = run(fresh, "--until", "pretrain", "--pretrain.steps", 5)
    assert changed.returncode == 2
    assert changed.code == "checkpoint-of-other-run"


def test_an_error_in_a_stage_comes_after_what_was_done(fresh: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise ConfigError("of a test", code="of-a-test")

    monkeypatch.setattr("selfvitmil.stages.compare.compare", refuse)
    done = run(fresh)
    assert done.returncode == 2
    assert re.search(r"(?m)^embed +done", done.stdout)
    assert re.search(r"(?m)^compare +could not be done", done.stdout)
    assert done.code == "of-a-test"


def test_an_encoder_from_elsewhere_is_not_trained_and_is_remembered(fresh: Path):
    folder = fresh.parent / "tiny_vit"
    args = {"embed_dim": 8, "depth": 1, "num_heads": 1, "patch_size": 16}
    encoder = build_encoder("vit_tiny_patch16_224", img_size=32, model_args=args, layout="cls")
    save_encoder(folder, encoder)
    done = run(fresh, "--encoder", folder, "--until", "embed")
    assert done.returncode == 0, done.stderr
    assert "pretrain" not in done.stdout
    assert len(list((fresh / "bags" / TILING / "features_tiny_vit").glob("*.h5"))) == 10
    again = run(fresh, "--until", "embed")
    assert "pretrain" not in again.stdout
    assert "up to date (10 slides)" in said(again)
    assert str(fresh.parent) not in (fresh / "run.json").read_text()
    refused = run(fresh, "--until", "pretrain")
    assert refused.returncode == 2
    assert refused.code == "unknown-stage"


def test_flags_of_the_first_run_hold_for_later_commands(place: Path):
    study = place / "flags"
    flags = (
        "--tile.mpp",
        1,
        "--tile.size-px",
        64,
        "--pretrain.probe-table",
        "p.csv",
        "--until",
        "tile",
        "--workers",
        0,
    )
    done = run(study, "--cohort", place / "made" / "cohort.csv", *flags)
    assert done.returncode == 0, done.stderr
    assert "study.toml written" in done.stdout
    told = tomllib.loads((study / "study.toml").read_text())
    assert told == {"tile": {"mpp": 1.0, "size_px": 64}, "pretrain": {"probe_table": str(Path("p.csv").absolute())}}
    assert "up to date (10 slides)" in said(selfvitmil("run", study, "--until", "tile", "--workers", 0))


# ---------------------------------------------------------------------------------------------------- bad input


def test_an_empty_folder(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "absent"):
        done = run(tmp_path / name)
        assert (done.returncode, done.code) == (2, "no-cohort")
    assert not (tmp_path / "absent").exists()
    assert list((tmp_path / "empty").iterdir()) == []
    no_slides = run(tmp_path / "study", "--cohort", tmp_path / "empty")
    assert no_slides.returncode == 2
    assert no_slides.code == "no-slides"
    assert not (tmp_path / "study").exists()


def test_a_folder_of_slides_is_no_study(place: Path):
    done = run(place / "made" / "slides")
    assert (done.returncode, done.code) == (2, "no-cohort")
    assert "--cohort slides" in done.stderr


def test_no_labels_or_no_split_is_said_before_anything_is_done(place: Path, tmp_path: Path):
    slides = place / "made" / "slides"
    done = run(tmp_path / "study", "--cohort", slides)
    assert done.returncode == 2
    assert done.code == "no-labels"
    assert "--until embed" in done.stderr
    unsplit = run(tmp_path / "study", "--cohort", slides, "--until", "pretrain")
    assert unsplit.returncode == 2
    assert unsplit.code == "no-training-slides"
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("flags", "code", "names"),
    [
        ({"train": {"aggregator": "dsml"}}, "unknown-aggregator", "did you mean 'dsmil'"),
        ({"train": {"positive": "tumour"}}, "unknown-positive-class", "normal, tumor"),
        ({"train": {"options": {"hiden": 8}}}, "unknown-aggregator-setting", "'hiden'"),
        ({"train": {"options": {"mean": {"hiden": 8}}}}, "unknown-aggregator-setting", "'hiden'"),
        ({"train": {"options": {"q": "liner"}}}, "invalid-aggregator-setting", "did you mean 'linear'"),
        ({"train": {"warmup_epochs": 9}}, "invalid-warmup", "warmup_epochs=9"),
        ({"train": {"aggregator": "dsmil-lc"}}, "no-parent-tiles", "tile.parent_mpp"),
        ({"tile": {"parent_mpp": [2.0]}, "compare": {"methods": []}}, "two-scales-mpp", "2 um/px"),
        ({"compare": {"methods": ["mean", "abmill"]}}, "unknown-method", "did you mean 'abmil'"),
        ({"compare": {"baseline": "mena"}}, "unknown-baseline", "did you mean 'mean'"),
        ({"compare": {"baseline": "dsmil-lc", "methods": ["dsmil-lc"]}}, "baseline-without-heatmaps", "dsmil-lc"),
        ({"localize": {"of_class": "tumour"}}, "unknown-class", "normal, tumor"),
        ({"localize": {"parts": []}}, "empty-parts", "localize.parts"),
        ({"localize": {"score": "attention"}, "train": {"aggregator": "mean"}}, "no-such-evidence", "mean"),
        ({"train": {"positive": "normal"}, "compare": {"supervised": "probe"}}, "no-annotations", "normal"),
    ],
)
def test_what_learning_would_refuse_is_refused_before_any_work(
    fresh: Path, flags: dict[str, Any], code: str, names: str
):
    settings = study_settings(fresh, flags)
    with pytest.raises(ConfigError, check=has_code(code)) as refused:
        plan_run(Study(fresh, settings), Request())
    assert names in refused.value.reason
    assert refused.value.how.endswith("Nothing was done")
    plan_run(Study(fresh, settings), Request(until="tile"))  # who stops before that need not care


def test_three_classes_are_refused_what_is_for_two(fresh: Path):
    one = {**cohort_of(fresh)[0], "split": "", "annotation": ""}
    names = [(f"{label}{k}", label) for label in "abc" for k in range(6)]
    write_rows(fresh, [{**one, "slide": name, "label": label, "patient": name} for name, label in names])
    asked = (
        ("evaluate", {"calibration": "platt"}, "not-binary"),
        ("compare", {"supervised": "probe"}, "not-binary"),
        ("train", {"positive": "a"}, "unknown-positive-class"),
        ("localize", {"of_class": "d"}, "unknown-class"),
    )
    for section, values, code in asked:
        settings = study_settings(fresh, {"train": {"folds": 2}, section: values})
        with pytest.raises(ConfigError, match=f"{section}.{next(iter(values))}", check=has_code(code)):
            plan_run(Study(fresh, settings), Request())


@pytest.mark.parametrize("section", ["embed", "train", "supervised"])
def test_a_device_that_is_none_is_refused_before_any_work(fresh: Path, section: str):
    before = snapshot(fresh)
    done = run(fresh, f"--{section}.device", "gpu")
    assert done.returncode == 2
    assert done.code == "device-unavailable"
    assert f"{section}.device" in done.stderr
    assert snapshot(fresh) == before


def test_an_untrained_encoder_needs_one_of_the_study_to_be_like(fresh: Path):
    folder = fresh.parent / "from_elsewhere"
    save_encoder(folder, build_encoder("mean_color", img_size=32))
    settings = study_settings(fresh, {"compare": {"random_encoder": True}})
    request = Request(encoder=str(folder))
    with pytest.raises(ConfigError, match="from_elsewhere", check=has_code("encoder-not-in-study")):
        plan_run(Study(fresh, settings), request)
    shutil.copytree(folder, fresh / "encoders" / "from_elsewhere")
    plan_run(Study(fresh, settings), Request(encoder="from_elsewhere"))


def test_an_encoder_that_does_not_fit_is_refused_before_any_work(fresh: Path):
    folder = fresh.parent / "other_scale"
    save_encoder(folder, build_encoder("mean_color", img_size=32, mpp=4.0))
    with pytest.raises(EncoderError, check=has_code("encoder-mpp-mismatch")):
        plan_run(open_study(fresh), Request(encoder=str(folder)))
    with pytest.raises(ConfigError, match="a_b", check=has_code("invalid-name")):
        plan_run(open_study(fresh), Request(name="a b"))


def set_format(table: Path, version: int) -> None:
    with h5py.File(table, "r+") as file:
        file.attrs["format_version"] = version


@pytest.mark.parametrize(("folder", "stage"), [(f"tiles/{TILING}", "tile"), (f"bags/{TILING}/features_dino", "embed")])
def test_an_older_format_is_made_again_and_said_so(study: Path, folder: str, stage: str):
    table = study / folder / f"{cohort_of(study)[0]['slide']}.h5"
    before = snapshot(study)
    set_format(table, 0)
    done = run(study, "--until", stage)
    assert done.returncode == 0, done.stderr
    assert f"1 stale: {stage} version 0 -> 1 ({table.stem}); 9 up to date" in said(done)
    after = snapshot(study)
    assert after[f"{folder}/{table.name}"][1] == before[f"{folder}/{table.name}"][1]
    untouched = [name for name in before if name.endswith(".h5") and table.stem not in name]
    assert {name: after[name] for name in untouched} == {name: before[name] for name in untouched}


@pytest.mark.parametrize("kind", ["tiles", "bags", "encoder"])
def test_a_newer_format_is_left_alone(study: Path, kind: str):
    slide = cohort_of(study)[0]["slide"]
    if kind == "encoder":
        config = study / "encoders" / "dino" / "config.json"
        config.write_text(config.read_text().replace('"format_version": 1', '"format_version": 2'))
    else:
        folder = study / "tiles" / TILING if kind == "tiles" else study / "bags" / TILING / "features_dino"
        set_format(folder / f"{slide}.h5", 2)
    before = snapshot(study)
    done = run(study)
    assert done.returncode == 3
    assert done.code == "newer-format-version"
    assert snapshot(study) == before


def test_a_changed_tile_setting_is_said_before_it_is_done(study: Path):
    flags = ("--tile.min-tissue", 0.9, "--until", "embed")
    settings = resolve_settings(study / "study.toml", {"tile": {"min_tissue": 0.9}})
    todo = plan_run(Study(study, settings), Request(until="embed"))
    assert set(todo.pending("tile").todo.values()) == {"stale: tile.min_tissue 0.5 -> 0.9"}
    assert len(todo.pending("tile").todo) == len(todo.pending("embed").todo) == 10
    assert not todo.pending("pretrain").todo
    assert "tiles have changed" in todo.pending("pretrain").line
    before = snapshot(study)
    done = run(study, *flags)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d+ slides rebuilt: .*tiles changed", said(done))
    changed = {name for name, content in snapshot(study).items() if before.get(name) != content}
    assert "encoders/dino/model.safetensors" not in changed
    assert sum("/features_dino/" in name and name.endswith(".h5") for name in changed) == 10


def test_another_resolution_leaves_the_tiles_that_are_there(study: Path):
    before = snapshot(study)
    done = run(study, "--tile.mpp", 2, "--until", "tile")
    assert "stay as they are: 1mpp_32px_0px" in said(done)
    assert "10 slides to do: 10 new" in said(done)
    after = snapshot(study)
    assert {name: after[name] for name in before if name.startswith("tiles/")} == {
        name: before[name] for name in before if name.startswith("tiles/")
    }


def test_other_settings_of_the_encoder_throw_none_away(study: Path):
    before = snapshot(study)
    done = run(study, "--pretrain.steps", 3, "--tile.min-tissue", 0.9)
    assert done.returncode == 2
    assert "pretrain.steps 2 -> 3" in done.stderr
    assert snapshot(study) == before
    named = run(study, "--pretrain.steps", 3, "--name", "other", "--until", "pretrain")
    assert named.returncode == 0, named.stderr
    assert (study / "encoders" / "other" / "config.json").exists()
    assert snapshot(study)["encoders/dino/model.safetensors"] == before["encoders/dino/model.safetensors"]
    kept = run(study, "--pretrain.steps", 3, "--encoder", "dino", "--until", "embed")
    assert "up to date (10 slides)" in said(kept)
    assert "up to date (encoders/other)" in said(
        run(study, "--pretrain.steps", 3, "--name", "other", "--until", "pretrain")
    )
    assert run(study, "--encoder", "dino", "--name", "other").returncode == 2


def test_a_slide_added(study: Path, place: Path):
    synthetic.make_slide(study / "new.svs", seed=77, size=(1024, 1024), mpp=0.25)
    rows = cohort_of(study)
    new = {**rows[0], "slide": "new", "path": "new.svs", "label": "normal", "patient": "new", "annotation": ""}
    write_rows(study, [*rows, new])
    done = run(study, "--until", "embed")
    assert done.returncode == 0, done.stderr
    assert "1 new (new); 10 up to date" in said(done)
    assert "encoders/dino is kept" in said(done)
    assert (study / "bags" / TILING / "features_dino" / "new.h5").exists()


def test_a_slide_removed_from_the_table_or_from_the_disk(study: Path, place: Path):
    first, second, *rest = cohort_of(study)
    gone = {**second, "path": "nowhere.svs"}
    write_rows(study, [gone, *rest])
    before = snapshot(study)
    done = run(study, "--until", "embed")
    assert done.returncode == 3  # the slide whose file is gone
    assert f"found 1 slides that cohort.csv no longer names: {first['slide']}" in said(done)
    assert f"found 1 slides whose files are not there any more: {second['slide']}" in said(done)
    after = snapshot(study)
    for slide in (first["slide"], second["slide"]):
        for name in (f"tiles/{TILING}/{slide}.h5", f"bags/{TILING}/features_dino/{slide}.h5"):
            assert after[name] == before[name]


def test_a_slide_that_the_encoder_has_seen_is_not_tested_on_unnoticed(study: Path):
    rows = cohort_of(study)
    moved = next(row for row in rows if row["split"] == "train")
    moved["split"] = "test"
    write_rows(study, rows)
    done = run(study, "--until", "embed")
    assert done.returncode == 2
    assert done.code == "encoder-saw-test-patients"
    assert moved["slide"] in done.stderr
    allowed = run(study, "--encoder", "dino", "--until", "embed")
    assert allowed.returncode == 0
    assert f"was trained on 1 test slides or other slides of their patients: {moved['slide']}" in said(allowed)


def test_the_gpu_is_gone(study: Path):
    record = read_record(study)
    assert record is not None
    (study / "bags" / TILING / "features_dino" / f"{cohort_of(study)[0]['slide']}.h5").unlink()
    write_record(study, RunRecord(**{**record.__dict__, "device": "NVIDIA H200"}))
    required = run(study, "--embed.device", "cuda", "--until", "embed")
    assert required.returncode == 2
    assert required.code == "device-unavailable"
    done = run(study, "--until", "embed")
    assert done.returncode == 0, done.stderr
    assert "the last run had a GPU (NVIDIA H200), and none can be used now: embed will run on the CPU" in said(done)


def read_only(monkeypatch: pytest.MonkeyPatch, study: Path) -> None:
    """Let every attempt to make or open a file of the study for writing fail, as on a read-only file system."""
    honest: Callable[..., int] = os.open

    def refuse(path: object, flags: int, *rest: object, **more: object) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and str(path).startswith(str(study)):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return honest(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)


def test_a_read_only_folder(study: Path, monkeypatch: pytest.MonkeyPatch):
    before = snapshot(study)
    with monkeypatch.context() as patch:
        read_only(patch, study)
        done = run(study)
        planned = selfvitmil("plan", study, "--until", "embed")
        asked = selfvitmil("status", study)
    assert done.returncode == 3
    assert "up to date (10 slides)" in said(done)  # what it found
    assert done.code == "not-writable"
    assert planned.returncode == asked.returncode == 0
    assert snapshot(study) == before


def test_torchrun_is_for_pretraining(study: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = run(study)
    assert done.returncode == 2
    assert done.code == "run-under-torchrun"


# ---------------------------------------------------------------------------------------------------- Camelyon16


def test_camelyon16_by_its_name(tmp_path: Path):
    folder = tmp_path / "c16"
    synthetic.make_cohort(folder, slides=6, seed=3, size=(1024, 1024), layout="camelyon16")
    small = ("--tile.size-px", 32, "--tile.mpp", 1, "--tissue.thumbnail-downsample", 16)
    flags = ("--preset", "paper", *small, "--until", "tile", "--workers", 0)
    done = run(tmp_path / "study", "--cohort", f"camelyon16:{folder}", *flags)
    assert done.returncode == 0, done.stderr
    counts = {row["slide"]: int(row["tiles"]) for row in rows_of(tmp_path / "study" / "tiles" / TILING / "tiles.csv")}
    for split, (tiles, slides) in PAPER_TILES.items():
        own = [count for slide, count in counts.items() if slide.startswith("test") == (split == "test")]
        deviation = sum(own) / len(own) / (tiles / slides) - 1
        assert f"{split}: {sum(own):,} tiles of {len(own)} slides; the paper has {tiles:,} of {slides};" in said(done)
        assert f"the paper {tiles / slides:,.0f} ({deviation:+.1%})" in said(done)
    study, cohort = tmp_path / "study", read_cohort(tmp_path / "study" / "cohort.csv")
    assert camelyon16_lines(study, cohort, resolve_settings(None, {"tile": {"mpp": 1, "size_px": 32}})) == []


def test_a_folder_that_is_not_camelyon16(place: Path, tmp_path: Path):
    done = run(tmp_path / "study", "--cohort", f"camelyon16:{place / 'made'}")
    assert done.returncode == 2
    assert done.code == "not-camelyon16"
    both = run(
        tmp_path / "study", "--cohort", f"camelyon16:{place / 'made'}", "--labels", place / "made" / "labels.csv"
    )
    assert both.returncode == 2


# ---------------------------------------------------------------------------------------------------- plan


def planned(study: Path) -> PlanResult:
    return plan(open_study(study), Request())


@pytest.mark.slow
def test_a_plan_counts_what_is_there_estimates_what_is_not_and_writes_nothing(study: Path, fresh: Path):
    before = snapshot(study), snapshot(fresh)
    counted, estimated = planned(study), planned(fresh)
    true = {row["slide"]: int(row["tiles"]) for row in rows_of(study / "tiles" / TILING / "tiles.csv")}
    assert counted.measures.tiles == true
    assert counted.measures.num_sampled == 0
    assert estimated.measures.num_sampled == 5
    assert sum(estimated.measures.tiles.values()) == pytest.approx(sum(true.values()), rel=0.3)
    assert [stage.name for stage in estimated.stages] == list(STAGES)
    found = {stage.name: stage.estimate for stage in counted.stages}
    assert found["tile"] == found["pretrain"] == found["embed"] == Estimate()  # nothing to do
    found = {stage.name: stage.estimate for stage in estimated.stages}
    assert found["tile"].basis == found["embed"].basis == Basis.MEASURED
    assert found["pretrain"].basis == Basis.DERIVED
    assert all(estimate.seconds > 0 for estimate in found.values())
    assert estimated.seconds == pytest.approx(sum(estimate.seconds for estimate in found.values()))
    assert (snapshot(study), snapshot(fresh)) == before
    assert not (fresh / ".lock").exists()


def test_a_dry_run_prints_the_plan(study: Path):
    done = selfvitmil("run", study, "--dry-run")
    assert done.returncode == 0, done.stderr
    for stage in STAGES:
        assert re.search(rf"(?m)^{stage} ", done.stdout)
    assert "nothing was written" in done.stdout


def test_the_disk_of_a_plan_is_that_of_the_files(study: Path, fresh: Path):
    """Features are the bulk of a real study: their size must come out right."""
    true = sum(path.stat().st_size for path in (study / "bags" / TILING).rglob("*.h5"))
    [embed] = [stage.estimate for stage in planned(fresh).stages if stage.name == "embed"]
    assert embed.disk == pytest.approx(true, abs=20_000 * 10)


@pytest.mark.slow
def test_a_plan_uses_the_logged_rate_of_unfinished_pretraining(study: Path):
    encoder = study / "encoders" / "dino"
    (encoder / "config.json").unlink()
    lines = (encoder / "metrics.jsonl").read_text().splitlines()
    first = {**json.loads(lines[0]), "tiles_per_s": 2.0}
    (encoder / "metrics.jsonl").write_text(json.dumps(first) + "\n")
    [found] = [stage.estimate for stage in planned(study).stages if stage.name == "pretrain"]
    own = study_settings(study, {}).pretrain
    assert own.steps is not None
    assert found.basis == Basis.RECORDED
    assert found.seconds == pytest.approx((own.steps - first["step"] - 1) * own.batch / 2.0)


# ---------------------------------------------------------------------------------------------------- status


def test_status_of_a_finished_study(study: Path):
    done = selfvitmil("status", study, "--json")
    assert done.returncode == 0
    told = json.loads(done.stdout)
    assert told["slides"] == 10
    assert told["running"] == ""
    stages = {each["stage"]: each for each in told["stages"]}
    assert {*STAGES, "train"} == set(stages)
    assert stages["tile"]["done"] == stages["embed"]["done"] == stages["check"]["done"] == 10
    assert stages["tile"]["newest"] == (max(p.stat().st_mtime for p in (study / "tiles" / TILING).glob("*.h5")))
    assert "finished" in stages["pretrain"]["words"]
    assert "selfvitmil view" in told["next"]


def test_status_beside_a_process_that_works_on_the_study(study: Path):
    with study_lock(study, "embed"):
        done = selfvitmil("status", study)
        assert f"`embed` works on it, process {os.getpid()}" in said(done)
        assert "wait" in said(done)
    record = read_record(study)
    assert record is not None
    working = RunRecord(**{**record.__dict__, "ended": None, "now": "compare", "pid": os.getpid()})
    write_record(study, working)
    told = said(selfvitmil("status", study))
    assert "`run` works on it" in told
    assert "after this come evaluate, localize, lesions, report" in told
    write_record(study, RunRecord(**{**working.__dict__, "pid": 2**22 + 1}))  # no process has that number
    assert "the last run was killed in compare" in said(selfvitmil("status", study))


def test_status_tells_failures_and_unfinished_training(study: Path):
    encoder = study / "encoders" / "dino"
    (encoder / "config.json").unlink()
    with (encoder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.25, "tiles_per_s": 3')  # a line that is being written
    failure = Failure("s1", "tile", "s1.svs: no tissue found", "Look at the slide")
    record_failures(study, "tile", ["s1"], [failure])
    told = said(selfvitmil("status", study))
    assert "not finished, step 2" in told
    assert "failed in tile: 1, for instance s1.svs: no tissue found. Look at the slide" in told
    assert "see failures.csv" in told


def test_status_of_what_is_no_study(tmp_path: Path):
    (tmp_path / "file").touch()
    assert selfvitmil("status", tmp_path / "file").code == "no-study"
    assert selfvitmil("status", tmp_path / "nowhere").returncode == 2
    told = said(selfvitmil("status", tmp_path))
    assert "no cohort.csv yet" in told


# ---------------------------------------------------------------------------------------------------- looking ahead


def test_the_plan_is_what_happens(study: Path):
    """Whatever is stale: the slides that `plan_run` names are those whose files are other afterwards."""
    rng = np.random.default_rng(0)
    slides = [row["slide"] for row in cohort_of(study)]
    tables, bags = study / "tiles" / TILING, study / "bags" / TILING / "features_dino"
    for slide in rng.choice(slides, 3, replace=False):
        (tables / f"{slide}.jpg").unlink()
    for slide in rng.choice(slides, 3, replace=False):
        (bags / f"{slide}.h5").write_bytes(b"damaged")
    run_plan = plan_run(open_study(study), Request(until="embed"))
    before = snapshot(study)
    assert run(study, "--until", "embed").returncode == 0
    after = snapshot(study)
    for stage, folder in (("tile", tables), ("embed", bags)):
        names = {slide: f"{folder.relative_to(study).as_posix()}/{slide}.h5" for slide in slides}
        touched = {slide for slide, name in names.items() if after[name] != before[name]}
        assert touched <= set(run_plan.pending(stage).todo)
        damaged = {slide for slide, name in names.items() if after[name][1] != before[name][1]}
        assert damaged <= touched
    assert len(run_plan.pending("tile").todo) == 3
    assert len(run_plan.pending("embed").todo) >= 3


# ---------------------------------------------------------------------------------------------------- read once


def test_a_run_reads_its_cohort_and_every_feature_file_once_to_learn_from(study: Path, monkeypatch: pytest.MonkeyPatch):
    """All stages share one `Study`; before, cohort.csv was read a dozen times and every feature file five times."""
    reads: Counter[str] = Counter()
    checked: Counter[str] = Counter()

    def counted(place: Any, name: str, counter: Counter[str], key: Callable[[Any], str]) -> None:
        function = getattr(place, name)
        monkeypatch.setattr(place, name, lambda what, **named: counter.update([key(what)]) or function(what, **named))

    counted(study_module, "read_cohort", reads, lambda path: path.name)
    counted(report_data, "read_cohort", reads, lambda path: f"{path.name} by the report")
    counted(dataset, "check_bag", checked, lambda bag: bag.slide)
    assert run(study).returncode == 0
    assert reads == {"cohort.csv": 1, "cohort.csv by the report": 1}
    assert checked == {row["slide"]: 1 for row in cohort_of(study)}
