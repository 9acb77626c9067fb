"""The commands as a user meets them: exit status, messages, files; bad input and interruptions included."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.cli import rows_of, selfvitmil
from selfvitmil.bags import read_bag
from selfvitmil.cli.output import show
from selfvitmil.cli.parser import call
from selfvitmil.slides import synthetic
from selfvitmil.stages.pretrain import SplitResult
from selfvitmil.store.failures import Failure
from selfvitmil.tiles import read_tiles

TILING = "0.5mpp_224px_0px"


def artefacts(study: Path) -> dict[str, bytes]:
    """All files that must be identical however a study came about."""
    found = (path for path in (study / "tiles").rglob("*") if path.is_file())
    return {str(path.relative_to(study)): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four small slides with labels, patients and annotations."""
    folder = tmp_path_factory.mktemp("made") / "cohort"
    synthetic.make_cohort(folder, slides=4, seed=1, size=(1536, 1536))
    return folder


def test_from_made_slides_to_tile_tables(made: Path, tmp_path: Path):
    study = tmp_path / "study"
    checked = selfvitmil("check", study, "--cohort", made / "cohort.csv", "--workers", 0)
    assert checked.returncode == 0, checked.stderr
    assert "4 of 4 slides can be worked with" in checked.stdout
    assert len(rows_of(study / "check.csv")) == 4
    tiled = selfvitmil("tile", study, "--workers", 0)
    assert tiled.returncode == 0, tiled.stderr
    names = {row["slide"] for row in rows_of(study / "cohort.csv")}
    assert {path.stem for path in (study / "tiles" / TILING).glob("*.h5")} == names
    assert {path.stem for path in (study / "tiles" / TILING).glob("*.jpg")} == names
    assert {row["slide"] for row in rows_of(study / "tiles" / TILING / "tiles.csv")} == names
    assert not (study / "failures.csv").exists()
    # Nothing in the study names a place on this machine.
    for path in study.rglob("*"):
        if path.is_file() and path.suffix in (".csv", ".h5", ".geojson", ".toml"):
            assert str(tmp_path).encode() not in path.read_bytes(), path
    again = selfvitmil("tile", study, "--workers", 0)
    assert "4 were up to date" in again.stdout


@pytest.mark.slow
def test_processes_and_calling_process_give_the_same_bytes(made: Path, tmp_path: Path):
    for name, workers in (("one", 0), ("two", 2)):
        done = selfvitmil("tile", tmp_path / name, "--cohort", made / "cohort.csv", "--workers", workers)
        assert done.returncode == 0, done.stderr
    assert artefacts(tmp_path / "one") == artefacts(tmp_path / "two")


def test_synth_refuses_a_folder_with_things_in_it(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("precious")
    done = selfvitmil("synth", tmp_path, "--workers", 0)
    assert done.returncode == 2
    assert "not empty" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tyle", "study"], "tile"),
        (["tile"], "STUDY"),
        (["tile", "study", "--tile.mmp", "0.5"], "--tile.mpp"),
        (["tile", "study", "--tile.mpp", "-1"], "--tile.mpp: Input should be greater than or equal to 0.05"),
        (["tile", "study", "--slide.mpp", "25"], "--slide.mpp: 25 is no value of a slide: slides have 0.05 to 10"),
        (["check", "study", "--slide.mpp", "0.01"], "--slide.mpp: 0.01 is no value of a slide"),
        (["tile", "study", "--workers", "-1"], "selfvitmil: --workers: Input should be greater"),
        (["tile", "study", "--workers", "0", "another"], "another: more than this command takes"),
        (["run", "."], "here: this folder is empty"),
        (["run", "./"], "here: this folder is empty"),
        (["tile", "study", "--tile.overlap-px", "224"], "must be smaller than tile.size_px"),
        (["tile", "study"], "no cohort.csv yet"),
        (["tile", "study", "--cohort", "nowhere"], "nowhere"),
        (["tile", "study", "--workers", "1", "--cluster", "tls://host:1"], "exclude each other"),
    ],
)
def test_usage_errors_end_with_2_and_say_what_was_meant(arguments: list[str], says: str, tmp_path: Path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    done = selfvitmil(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr


def test_text_in_brackets_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]):
    table = (("slide", "AUC [range]"), ("case[old]_1", "0.9 [0.8, 1.0]"), ("a:cat:[/b]", ""))
    failure = Failure("b[1]", "tile", "b[1].svs: no [tissue]", "Look :eyes: at it")
    show(SplitResult(table, notes=("line [bold] :cat:",), failures=(failure,)))
    out = capsys.readouterr().out
    told = [each for row in table for each in row]
    for text in (*told, "line [bold] :cat:", "FAILED b[1] (tile): b[1].svs: no [tissue]. Look :eyes: at it"):
        assert text in out


def test_a_plain_address_is_refused(made: Path, tmp_path: Path):
    done = selfvitmil("tile", tmp_path, "--cohort", made / "cohort.csv", "--cluster", "tcp://127.0.0.1:1")
    assert done.returncode == 2
    assert done.code == "insecure-scheduler"


def test_unknown_key_in_study_toml(made: Path, tmp_path: Path):
    (tmp_path / "study.toml").write_text("[tile]\nmin_tisue = 0.5\n")
    done = selfvitmil("tile", tmp_path, "--cohort", made / "cohort.csv")
    assert done.returncode == 2
    assert "did you mean 'tile.min_tissue'" in done.stderr


def test_empty_cohort(tmp_path: Path):
    (tmp_path / "slides").mkdir()
    done = selfvitmil("tile", tmp_path / "study", "--cohort", tmp_path / "slides")
    assert (done.returncode, done.code) == (2, "no-slides")


def test_hostile_files_cost_only_themselves(made: Path, tmp_path: Path):
    folder = tmp_path / "slides"
    shutil.copytree(made / "slides", folder)
    hostile = synthetic.make_problem_files(folder / "hostile")
    good = {path.stem for path in (made / "slides").iterdir()}
    study = tmp_path / "study"
    done = selfvitmil("tile", study, "--cohort", folder, "--workers", 2)
    assert done.returncode == 3, done.stderr
    tiled = {path.stem for path in (study / "tiles" / TILING).glob("*.h5")}
    failed = {row["slide"]: row for row in rows_of(study / "failures.csv")}
    cohort = {row["slide"] for row in rows_of(study / "cohort.csv")}
    assert good <= tiled
    assert tiled | set(failed) == cohort  # every slide is either done or explained
    assert not tiled & set(failed)
    assert {path.stem for path in hostile.values() if path.suffix in (".svs", ".tif")} <= cohort
    for row in failed.values():
        assert row["stage"] == "tile"
        assert row["reason"]
        assert row["what to do"]
        assert "Error:" not in row["reason"], f"not raised on purpose: {row}"
    assert str(tmp_path) not in (study / "failures.csv").read_text()
    # Fix one: its row goes when the stage succeeds.
    name = sorted(failed)[0]
    broken = next(path for path in hostile.values() if path.stem == name)
    shutil.copy(next((made / "slides").iterdir()), broken)
    selfvitmil("tile", study, "--workers", 0)
    still = {row["slide"] for row in rows_of(study / "failures.csv")}
    assert name not in still or broken.suffix not in (".svs", ".tif")


def test_a_resolution_that_no_slide_has_is_told_by_check(tmp_path: Path):
    """A file that says 25 um/px would be cut into half a million tiles of nothing."""
    slides = tmp_path / "slides"
    synthetic.make_slide(slides / "a.svs", 1, size=(1024, 1024))
    content = (slides / "a.svs").read_bytes()
    assert content.count(b"MPP = 0.25") >= 1
    (slides / "a.svs").write_bytes(content.replace(b"MPP = 0.25", b"MPP = 25.0"))
    study = tmp_path / "study"
    for command in ("check", "tile"):
        done = selfvitmil(command, study, "--cohort", slides, "--workers", 0)
        assert done.returncode == 3
        assert "openslide.mpp-x says 25, but slides have 0.05 to 10 microns per pixel" in done.stdout
        assert "--slide.mpp 0.25" in done.stdout
    assert selfvitmil("check", study, "--slide.mpp", 0.25, "--workers", 0).returncode == 0
    tiled = selfvitmil("tile", study, "--slide.mpp", 0.25, "--workers", 0)
    assert tiled.returncode == 0, tiled.stdout


def test_tiles_finer_than_the_slide_are_warned_of(tmp_path: Path):
    synthetic.make_slide(tmp_path / "slides" / "a.svs", 1, size=(1024, 1024))
    given = ("--cohort", tmp_path / "slides", "--slide.mpp", 1.0, "--slide.force-mpp", "--workers", 0)
    for command in ("check", "tile"):
        done = selfvitmil(command, tmp_path / "study", *given)
        assert "a: scanned at 1 um/px, coarser than the 0.5 um/px of its tiles: they are upsampled" in done.stdout
    coarse = selfvitmil("tile", tmp_path / "study", *given, "--tile.mpp", 1.0)
    assert "upsampled" not in coarse.stdout


def test_more_tiles_than_any_slide_has_are_not_cut(tmp_path: Path):
    synthetic.make_slide(tmp_path / "slides" / "a.svs", 1, size=(1024, 1024))
    given = ("--cohort", tmp_path / "slides", "--slide.mpp", 10, "--slide.force-mpp", "--workers", 0)
    done = selfvitmil("tile", tmp_path / "study", *given, "--tile.mpp", 0.05, "--tile.overlap-px", 200)
    assert done.returncode == 3
    assert "the slide is 10 x 10 mm, and tiles are 1.2 um apart" in done.stdout


def test_check_tells_twins_and_missing_resolution(made: Path, tmp_path: Path):
    slide = next((made / "slides").iterdir())
    folder = tmp_path / "slides"
    folder.mkdir()
    shutil.copy(slide, folder / f"a{slide.suffix}")
    shutil.copy(slide, folder / f"b{slide.suffix}")
    shutil.copy(synthetic.make_problem_files(tmp_path / "hostile")["no_mpp"], folder / "c.tif")
    done = selfvitmil("check", tmp_path / "study", "--cohort", folder, "--workers", 0)
    assert done.returncode == 3
    assert "the same file as a" in done.stdout
    (failed,) = rows_of(tmp_path / "study" / "failures.csv")
    assert failed["slide"] == "c"
    assert "microns-per-pixel" in failed["reason"]
    assert "--slide.mpp" in failed["what to do"]
    assert selfvitmil("check", tmp_path / "study", "--slide.mpp", 0.25, "--workers", 0).returncode == 0
    assert rows_of(tmp_path / "study" / "failures.csv") == []


def test_kill_in_the_middle_then_rerun_is_identical(made: Path, tmp_path: Path):
    """kill -9 while tables are being written; the rerun ends with the bytes of an undisturbed run."""
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    assert selfvitmil("tile", calm, "--cohort", made / "cohort.csv", "--workers", 0).returncode == 0
    command = [
        sys.executable,
        "-m",
        "selfvitmil",
        "tile",
        str(killed),
        "--cohort",
        str(made / "cohort.csv"),
        "--workers",
        "0",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(killed.glob(f"tiles/{TILING}/*.h5")) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 0 < len(list(killed.glob(f"tiles/{TILING}/*.h5"))) < 4
    (killed / "tiles" / TILING / ".s.h5.1.part").write_bytes(b"left behind")
    done = selfvitmil("tile", killed, "--workers", 0)
    assert done.returncode == 0, done.stderr
    assert artefacts(killed) == artefacts(calm)


def test_a_folder_that_cannot_be_written(made: Path, tmp_path: Path):
    (tmp_path / "study").write_text("a file where a folder should be")
    done = selfvitmil("tile", tmp_path / "study", "--cohort", made / "cohort.csv")
    assert done.returncode == 3
    assert "cannot be written" in done.stderr


@pytest.mark.skipif(
    os.geteuid() != 0 or sys.platform != "linux", reason="a full disk is made with mount, which needs root"
)
def test_a_drive_that_fails_while_a_file_is_read_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(study: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/mnt/private/failures.csv")

    monkeypatch.setattr("selfvitmil.commands.status.read_failures", fail)
    done = selfvitmil("status", tmp_path)
    assert done.returncode == 3
    assert "failures.csv: input/output error. Check the file and its drive" in done.stderr
    assert "private" not in done.stderr
    monkeypatch.setattr("selfvitmil.commands.status.status", lambda study: os.write(-1, b""))
    with pytest.raises(OSError, match="Bad file descriptor"):  # no file of anybody's
        call(["status", str(tmp_path)])


def test_a_full_disk_names_itself_and_the_rerun_completes(made: Path, tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("this machine does not allow mounts, so no disk can be filled")
    try:
        done = selfvitmil("tile", disk / "study", "--cohort", made / "cohort.csv", "--workers", 0)
        assert done.returncode == 3
        assert "no space left" in (done.stdout + done.stderr).lower()
        assert not list(disk.rglob("*.part"))
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert selfvitmil("tile", disk / "study", "--cohort", made / "cohort.csv", "--workers", 0).returncode == 0
        assert not rows_of(disk / "study" / "failures.csv") if (disk / "study" / "failures.csv").exists() else True
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


SMALL = """
[tile]
mpp = 2.0
size_px = 32
[pretrain]
width = 32
depth = 4
heads = 2
num_local = 2
batch = 8
steps = 3
head_width = 32
bottleneck = 16
workers = 0
log_steps = 1
"""


def test_from_tiles_to_an_encoder_to_feature_files(made: Path, tmp_path: Path):
    study = tmp_path / "study"
    study.mkdir()
    (study / "study.toml").write_text(SMALL)
    assert selfvitmil("tile", study, "--cohort", made / "cohort.csv", "--workers", 0).returncode == 0
    trained = selfvitmil("pretrain", study, "--name", "tiny")
    assert trained.returncode == 0, trained.stderr
    assert "step 3 of 3" in trained.stdout
    training = [row["slide"] for row in rows_of(study / "cohort.csv") if row["split"] == "train"]
    config = json.loads((study / "encoders" / "tiny" / "config.json").read_text())
    assert f"train split, {len(training)} slides" in json.dumps(config)
    assert "up to date" in selfvitmil("pretrain", study, "--name", "tiny").stdout
    embedded = selfvitmil("embed", study, "--encoder", "tiny", "--workers", 0)
    assert embedded.returncode == 0, embedded.stderr
    for row in rows_of(study / "cohort.csv"):
        table = read_tiles(study / "tiles" / "2mpp_32px_0px" / f"{row['slide']}.h5")
        bag = read_bag(study / "bags" / "2mpp_32px_0px" / "features_tiny" / f"{row['slide']}.h5")
        assert (len(bag), bag.dim) == (len(table), 5 * 32)
    # A slide without tiles is named, the others stay current.
    (study / "tiles" / "2mpp_32px_0px" / f"{training[0]}.h5").unlink()
    again = selfvitmil("embed", study, "--encoder", "tiny", "--workers", 0)
    assert again.returncode == 3
    assert [row["slide"] for row in rows_of(study / "failures.csv")] == [training[0]]
    # An encoder is for one scale: the coarser tiles are named and left out, and the failure above stays on record.
    selfvitmil("tile", study, "--tile.parent-mpp", 4, "--workers", 0)
    (study / "tiles" / "2mpp_32px_0px" / f"{training[0]}.h5").unlink()
    scales = selfvitmil("embed", study, "--encoder", "tiny", "--tile.parent-mpp", 4, "--workers", 0)
    assert "tiles at 4 um/px are not embedded with tiny" in scales.stdout
    assert [row["slide"] for row in rows_of(study / "failures.csv")] == [training[0]]
    assert selfvitmil("embed", study, "--encoder", "tiny", "--tile.mpp", 4, "--workers", 0).returncode == 3
    for path in study.rglob("*"):
        if path.is_file() and path.suffix in (".json", ".jsonl", ".h5", ".toml"):
            assert str(tmp_path).encode() not in path.read_bytes(), path


def test_self_supervision_needs_a_training_split(made: Path, tmp_path: Path):
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "study.toml").write_text(SMALL)
    assert selfvitmil("tile", tmp_path / "study", "--cohort", made / "slides", "--workers", 0).returncode == 0
    refused = selfvitmil("pretrain", tmp_path / "study")
    assert refused.returncode == 2
    assert "--pretrain.transductive" in refused.stderr
    allowed = selfvitmil("pretrain", tmp_path / "study", "--pretrain.transductive")
    assert allowed.returncode == 0, allowed.stderr
    assert "transductive" in (tmp_path / "study" / "encoders" / "lejepa" / "config.json").read_text()
    unknown = selfvitmil("embed", tmp_path / "study", "--encoder", "no_such_net", "--workers", 0)
    assert unknown.returncode == 3
    assert "no_such_net" in unknown.stderr


def test_camelyon16_folder(tmp_path: Path):
    folder = tmp_path / "CAMELYON16"
    synthetic.make_cohort(folder, slides=4, seed=2, size=(1024, 1024), layout="camelyon16")
    done = selfvitmil("check", tmp_path / "study", "--cohort", folder, "--workers", 0)
    assert done.returncode == 0, done.stderr
    rows = {row["slide"]: row for row in rows_of(tmp_path / "study" / "cohort.csv")}
    assert {row["split"] for row in rows.values()} == {"train", "test"}
    for name, row in rows.items():
        assert row["label"] in ("normal", "tumor")
        assert bool(row["annotation"]) == (row["label"] == "tumor"), name


def test_settings_page_is_current():
    done = subprocess.run(
        [sys.executable, "-c", "import make_settings_page as m; print(m.page(), end='')"],
        cwd=Path(__file__).parents[1] / "docs",
        capture_output=True,
        text=True,
        check=True,
    )
    written = (Path(__file__).parents[1] / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    assert done.stdout == written, "run `make docs`"
