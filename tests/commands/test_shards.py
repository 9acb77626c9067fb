"""Several processes that share one study without a server: each slide is done once, whoever dies meanwhile."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from faults.miniature import digests
from helpers.cli import selfvitmil
from helpers.error_codes import has_code
from helpers.studies import MICRO
from selfvitmil.commands.shards import Shard
from selfvitmil.engine.claims import Claims, results_of
from selfvitmil.errors import ConfigError, LockError
from selfvitmil.slides import synthetic
from selfvitmil.store import lock
from selfvitmil.store.layout import StudyLayout
from selfvitmil.store.lock import present_shards, shard_lock, study_lock

SLIDES = 8
SETTINGS = MICRO.replace("mpp = 1.0\nsize_px = 32", "mpp = 0.5\nsize_px = 224")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cohort with a slide that cannot be read."""
    folder = tmp_path_factory.mktemp("made")
    synthetic.make_cohort(folder, slides=SLIDES, seed=3, size=(1024, 1024), slides_per_patient=1)
    broken = sorted((folder / "slides").iterdir())[3]
    broken.write_bytes(broken.read_bytes()[:2000])
    return folder


def new_study(folder: Path) -> Path:
    folder.mkdir()
    (folder / "study.toml").write_text(SETTINGS)
    return folder


@pytest.fixture(scope="module")
def local(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that one process has checked and tiled."""
    study = new_study(tmp_path_factory.mktemp("local") / "study")
    assert selfvitmil("check", study, "--cohort", made / "cohort.csv").returncode == 3
    assert selfvitmil("tile", study).returncode == 3
    return study


@pytest.fixture(scope="module")
def expected(local: Path) -> dict[str, str]:
    """What one process writes."""
    return digests(local)


TILE = ("--until", "tile")


def start(study: Path, made: Path, shard: str, *more: str) -> subprocess.Popen[str]:
    """Start a shard in a process of its own."""
    command = [sys.executable, "-m", "selfvitmil", "run", str(study), "--cohort", str(made / "cohort.csv")]
    command += ["--shard", shard, *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )


def wait_until(condition: object, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.01)


def done_by(output: str, stage: str) -> int:
    """Slides that a shard processed, by what it printed."""
    found = re.search(rf"^{stage}[^\n]*? (\d+) +\d+ *$", output, re.MULTILINE)
    assert found is not None, output
    return int(found[1])


@pytest.mark.slow
def test_shards_share_the_slides_and_write_what_one_process_writes(
    made: Path, expected: dict[str, str], tmp_path: Path
):
    study = new_study(tmp_path / "study")
    shards = [start(study, made, f"{k}/3", *TILE) for k in (1, 2, 3)]
    outputs = [shard.communicate(timeout=300)[0] for shard in shards]
    assert sorted(shard.returncode for shard in shards) == [0, 0, 3], outputs  # the last one names the broken slide
    assert digests(study) == expected, outputs
    assert not StudyLayout(study).shards.exists()
    # Each slide was processed once; the broken one is tried by a second shard.
    assert sum(done_by(output, "tile") for output in outputs) in (SLIDES, SLIDES + 1), outputs


@pytest.mark.slow
def test_claims_of_a_killed_shard_pass_to_others(made: Path, expected: dict[str, str], tmp_path: Path):
    study = new_study(tmp_path / "study")
    claims = StudyLayout(study).shards
    killed = start(study, made, "1/2", *TILE, "--shard-expiry", "5")
    wait_until(lambda: any(claims.glob("tile-*/*.done")))
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert len(present_shards(study)) == 1, "its file is still there"
    other = start(study, made, "2/2", *TILE, "--shard-expiry", "5")
    output = other.communicate(timeout=300)[0]
    assert other.returncode == 3, output
    assert digests(study) == expected, output


@pytest.mark.slow
def test_a_shard_that_was_cut_off_ends_and_its_late_writes_change_nothing(
    made: Path, expected: dict[str, str], tmp_path: Path
):
    """It is stopped in the middle of its work, as by a network that hangs, and goes on when all is assembled."""
    study = new_study(tmp_path / "study")
    claims = StudyLayout(study).shards
    late = start(study, made, "1/2", *TILE, "--shard-expiry", "3")
    wait_until(lambda: any(claims.glob("tile-*/*.done")))
    os.killpg(late.pid, signal.SIGSTOP)
    # On one machine the lock itself shows that it lives. As from another machine, without locks:
    arguments = ["--shard", "2/2", *TILE, "--shard-expiry", "3"]
    command = [sys.executable, "-c", ELSEWHERE, "run", str(study), "--cohort", str(made / "cohort.csv"), *arguments]
    other = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert other.returncode == 3, other.stdout + other.stderr
    assert digests(study) == expected
    os.killpg(late.pid, signal.SIGCONT)
    output = late.communicate(timeout=300)[0]
    assert late.returncode == 3, output
    assert "no sign of life" in output
    assert digests(study) == expected
    assert not list(study.rglob("*.part"))


ELSEWHERE = """
import fcntl, os, socket, sys
def no_locks(*arguments):
    raise OSError(38, os.strerror(38))
fcntl.flock = no_locks
socket.gethostname = lambda: "elsewhere"
from selfvitmil import cli
if __name__ == "__main__":
    cli.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_run_without_shard_assembles_what_killed_shards_have_done(
    made: Path, expected: dict[str, str], tmp_path: Path
):
    study = new_study(tmp_path / "study")
    claims = StudyLayout(study).shards
    killed = start(study, made, "1/1", *TILE)
    wait_until(lambda: len(list(claims.glob("tile-*/*.done"))) >= SLIDES - 1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    done = selfvitmil("run", study, *TILE, "--encoder", "mean_color")
    assert done.returncode == 3, done.stdout
    (study / "run.json").unlink()
    assert digests(study) == expected
    assert not StudyLayout(study).shards.exists()


# ---------------------------------------------------------------------------------------------------- claims


def test_never_two_shards_claim_the_same_slide(tmp_path: Path):
    """Sixteen threads, each a shard, scramble for the same slides."""
    slides = [f"slide.{k}" for k in range(200)]
    taken: list[tuple[int, str]] = []

    def scramble(k: int) -> None:
        with shard_lock(tmp_path, f"{k}/16", 60.0) as presence:
            claims = Claims(tmp_path / ".shards" / "tile", presence)
            ready.wait()
            for slide, number in claims.situation(Shard(k, 16).in_order(slides)).free.items():
                if claims.take(slide, number):
                    taken.append((k, slide))
                    claims.finish(slide, failed=False, value={"by": k})

    ready = threading.Barrier(16)
    threads = [threading.Thread(target=scramble, args=(k,)) for k in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(slide for _, slide in taken) == sorted(slides)
    assert results_of(tmp_path / ".shards" / "tile") == {slide: {"by": k} for k, slide in taken}


def test_a_slide_that_failed_is_tried_once_more_by_another_shard(tmp_path: Path):
    folder = tmp_path / ".shards" / "tile"
    with shard_lock(tmp_path, "1/3", 60.0) as one, shard_lock(tmp_path, "2/3", 60.0) as two:
        first, second = Claims(folder, one), Claims(folder, two)
        assert first.take("a", 1)
        assert second.situation(["a", "b"]).busy == {"a": one.token}
        first.finish("a", failed=True)
        assert first.situation(["a", "b"]).free == {"b": 1}
        assert list(second.situation(["a", "b"]).free.items()) == [("b", 1), ("a", 2)]  # what failed comes last
        assert second.take("a", 2)
        second.finish("a", failed=True)
        assert second.situation(["a"]).free == {}
        with shard_lock(tmp_path, "3/3", 60.0) as three:
            assert Claims(folder, three).situation(["a"]).free == {}


def test_claims_of_a_shard_that_ended_or_fell_silent_are_void(tmp_path: Path):
    folder = tmp_path / ".shards" / "tile"
    with shard_lock(tmp_path, "1/2", 60.0) as two:
        claims = Claims(folder, two)
        with shard_lock(tmp_path, "2/2", 60.0) as one:
            assert Claims(folder, one).take("a", 1)
            assert claims.situation(["a"]).busy == {"a": one.token}
            silent = one.now() - 61
            one._ended.set()
            one._thread.join()
            os.utime(folder.parent / f"{one.token}.alive", (silent, silent))
            assert claims.situation(["a"]).free == {"a": 2}
        assert claims.situation(["a"]).free == {"a": 2}
        assert claims.take("a", 2)
        assert not claims.take("a", 2)


def test_a_claim_without_owner_holds_as_long_as_a_shard_may_be_silent(tmp_path: Path):
    """Its shard was killed between creating the file and writing into it."""
    folder = tmp_path / ".shards" / "tile"
    with shard_lock(tmp_path, "1/1", 60.0) as presence:
        claims = Claims(folder, presence)
        (folder / "a~1").touch()
        assert claims.situation(["a"]).busy == {"a": ""}
        old = presence.now() - 61
        os.utime(folder / "a~1", (old, old))
        assert claims.situation(["a"]).free == {"a": 2}


def test_clocks_of_machines_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ages are measured by the file system's clock: a machine that is an hour ahead declares nobody dead."""
    folder = tmp_path / ".shards" / "tile"
    with shard_lock(tmp_path, "1/2", 60.0) as one, shard_lock(tmp_path, "2/2", 60.0) as two:
        assert Claims(folder, one).take("a", 1)
        late = time.time() + 3600
        monkeypatch.setattr(time, "time", lambda: late)
        assert Claims(folder, two).situation(["a"]).busy == {"a": one.token}


# ---------------------------------------------------------------------------------------------------- the lock


def test_a_working_shard_keeps_others_from_the_study(tmp_path: Path):
    with shard_lock(tmp_path, "3/40", 60.0):
        with pytest.raises(LockError, match="shard 3/40", check=has_code("study-locked")):
            study_lock(tmp_path, "train").__enter__()
        with shard_lock(tmp_path, "4/40", 60.0):
            assert {each.shard for each in present_shards(tmp_path)} == {"3/40", "4/40"}
    with study_lock(tmp_path, "train"):
        assert not present_shards(tmp_path)


def without_locks(*arguments: object) -> None:
    raise OSError(38, os.strerror(38))


def test_shards_of_other_machines_keep_others_from_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lock.fcntl, "flock", without_locks)
    with shard_lock(tmp_path, "3/40", 2.0):
        with pytest.raises(LockError, match="shard 3/40", check=has_code("study-locked")):
            study_lock(tmp_path, "train").__enter__()
        assert (tmp_path / ".lock").read_text() == "", "a refused process leaves no line"


def test_a_dead_shard_of_another_machine_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lock.fcntl, "flock", without_locks)
    (tmp_path / ".shards").mkdir()
    (tmp_path / ".shards" / "x.alive").write_text('{"shard": "3/40", "host": "n7", "pid": 1, "expiry_s": 1.0}')
    begin = time.monotonic()
    lines: list[str] = []
    with study_lock(tmp_path, "train", lines.append):
        assert time.monotonic() - begin >= 0.9
        assert not list((tmp_path / ".shards").iterdir())
    assert len(lines) == 1
    assert "shard 3/40, host n7" in lines[0]


def test_a_shard_waits_for_the_end_of_another_command(tmp_path: Path):
    held, ended = threading.Event(), threading.Event()

    def work_alone() -> None:
        with study_lock(tmp_path, "train"):
            held.set()
            time.sleep(0.5)
            ended.set()

    thread = threading.Thread(target=work_alone)
    thread.start()
    held.wait()
    with shard_lock(tmp_path, "1/2", 30.0):
        assert ended.is_set()
    thread.join()
    with (
        study_lock(tmp_path, "train"),
        pytest.raises(LockError, match=socket.gethostname()),
        shard_lock(tmp_path, "1/2", 1.0),
    ):
        pass
    assert not present_shards(tmp_path)


@pytest.mark.parametrize("text", ["0/4", "5/4", "3", "a/b", "1/0", "-1/4"])
def test_what_is_no_shard_is_refused(text: str):
    with pytest.raises(ConfigError, check=has_code("invalid-shard")):
        Shard.parse(text)


def test_shards_begin_at_different_slides():
    slides = list("abcdefgh")
    assert [Shard(k, 3).in_order(slides)[0] for k in (1, 2, 3)] == ["a", "c", "f"]
    assert sorted(Shard(2, 3).in_order(slides)) == slides


def test_shards_and_a_cluster_exclude_each_other(made: Path, tmp_path: Path):
    study = tmp_path / "study"
    done = selfvitmil(
        "run", study, "--cohort", made / "cohort.csv", "--shard", "1/2", "--cluster", "tcp://x:1", "--insecure"
    )
    assert done.returncode == 2
    assert "--shard" in done.stderr


def test_shards_tile_and_then_say_that_the_encoder_is_to_be_trained(made: Path, tmp_path: Path):
    study = new_study(tmp_path / "study")
    done = selfvitmil("run", study, "--cohort", made / "cohort.csv", "--shard", "1/1")
    assert done.returncode == 3, done.stderr
    assert "selfvitmil pretrain" in done.stdout
    assert len(list((study / "tiles" / "0.5mpp_224px_0px").glob("*.h5"))) == SLIDES - 1
    assert (study / "tiles" / "0.5mpp_224px_0px" / "tiles.csv").exists()


@pytest.mark.slow
def test_shards_embed_once_there_is_an_encoder(made: Path, local: Path, tmp_path: Path):
    study, alone = tmp_path / "study", tmp_path / "alone"
    shutil.copytree(local, study)
    shutil.copytree(local, alone)
    assert selfvitmil("embed", alone, "--encoder", "mean_color").returncode == 3
    done = selfvitmil("run", study, "--encoder", "mean_color", "--until", "embed", "--shard", "1/1")
    assert done.returncode == 3, done.stdout
    assert digests(study) == digests(alone)
    assert any((study / "bags").rglob("*.h5"))
