"""The engine accounts for every slide, whatever one of them does, and leaves nothing behind."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from selfvitmil.engine import Engine, Outcome, Progress, _Map, cluster, is_transient, work
from selfvitmil.engine.work import Job, Receiver, WorkerDied, Workers
from selfvitmil.errors import ConfigError, EngineError, SlideError
from selfvitmil.settings import ClusterSettings, EngineSettings
from selfvitmil.store.failures import Failure
from selfvitmil.store.files import atomic_path

# ------------------------------------------------------------------------------- what the workers are asked to do


def square(number: int) -> int:
    if number < 0:
        raise SlideError(f"{number}.svs: negative", "it has no root", "Turn it round")
    if number == 13:
        raise ValueError("unlucky")
    if number == 17:
        sys.exit(4)
    return number * number


def act(job: tuple[Path, str, str]) -> str:
    """Note the call in a folder, then do what is asked."""
    folder, name, deed = job
    with (folder / name).open("a") as calls:
        calls.write("x")
    tries = (folder / name).stat().st_size
    if deed == "crash":
        ctypes.string_at(0)
    elif deed == "exit":
        os._exit(3)
    elif deed == "kill" or (deed == "kill once" and tries == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed == "hiccup once" and tries == 1:
        raise OSError(errno.EIO, "Input/output error", str(folder / "a.svs"))
    elif deed == "nap":
        time.sleep(0.05)
    return deed


def write_slowly(path: Path) -> None:
    with atomic_path(path) as temporary:
        temporary.write_bytes(b"half")
        for _ in range(1200):
            time.sleep(0.05)


def threads_of_worker(_: int) -> str | None:
    return os.environ.get("OMP_NUM_THREADS")


def make_lambda(number: int) -> Any:
    return (lambda: number) if number == 1 else number


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("this holds an open file")


def act_or_write(item: int | Path) -> int | None:
    return write_slowly(item) if isinstance(item, Path) else square(item)


def give_back(item: Any) -> Any:
    return item


# ------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="module", autouse=True)
def dask_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """dask-jobqueue puts a template of its configuration into the user's home when it is loaded: not for a test."""
    import dask.config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dask.config, "PATH", str(tmp_path_factory.mktemp("dask")))
        yield


@pytest.fixture(scope="module")
def two_workers() -> Iterator[Engine]:
    """One engine with two processes for all tests, in a shell where the user asked numpy for seven threads."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "7"
    try:
        with Engine(EngineSettings(workers=2)) as engine:
            by_name(engine.map(square, {"a": 1, "b": 2}, stage="check"))
            yield engine
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


@pytest.fixture(params=["in this process", "in two processes"])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "in this process":
        return Engine(EngineSettings(workers=0))
    return request.getfixturevalue("two_workers")


def by_name(outcomes: Iterator[Outcome[Any]]) -> dict[str, Outcome[Any]]:
    found: dict[str, Outcome[Any]] = {}
    for outcome in outcomes:
        assert outcome.name not in found, f"{outcome.name} came twice"
        found[outcome.name] = outcome
    return found


def reason_of(outcome: Outcome[Any]) -> str:
    assert outcome.failure is not None
    return outcome.failure.reason


def code_of(outcome: Outcome[Any]) -> str:
    assert outcome.failure is not None
    return outcome.failure.code


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def calls_of(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


# ------------------------------------------------------------------------------- every slide is accounted for


def test_values_and_failures_are_those_of_a_plain_loop(engine: Engine) -> None:
    items = {f"slide {k}": k for k in (3, -1, 0, 13, 17, 12, 2)}
    found = by_name(engine.map(square, items, stage="tile"))
    expected: dict[str, tuple[int | None, Failure | None]] = {}
    for name, number in items.items():
        try:
            expected[name] = square(number), None
        except (Exception, SystemExit) as error:
            expected[name] = None, Failure.of(name, "tile", error)
    assert {name: (outcome.value, outcome.failure) for name, outcome in found.items()} == expected
    assert found["slide -1"].failure == Failure("slide -1", "tile", "-1.svs: negative, it has no root", "Turn it round")


def test_thousands_of_quick_slides_all_come_back(two_workers: Engine) -> None:
    items = {str(k): k for k in range(100, 1100)}
    found = by_name(two_workers.map(square, items, stage="check"))
    assert {name: outcome.value for name, outcome in found.items()} == {str(k): k * k for k in range(100, 1100)}


def test_what_cannot_be_pickled_fails_alone(two_workers: Engine) -> None:
    found = by_name(two_workers.map(make_lambda, {"a": 0, "b": 1, "c": 2}, stage="tile"))
    assert [found[name].value for name in "ac"] == [0, 2]
    assert "lambda" in reason_of(found["b"])
    found = by_name(two_workers.map(give_back, {"a": 0, "b": Unpicklable(), "c": 2}, stage="tile"))
    assert [found[name].value for name in "ac"] == [0, 2]
    assert "this holds an open file" in reason_of(found["b"])


def test_nothing_to_do_starts_nothing() -> None:
    children = len(psutil.Process().children())
    with Engine(EngineSettings(workers=2)) as idle:
        assert list(idle.map(square, {}, stage="tile")) == []
        assert len(psutil.Process().children()) == children


def test_a_map_left_halfway_does_not_disturb_the_next(two_workers: Engine, tmp_path: Path) -> None:
    slow = two_workers.map(act_or_write, {"a": 1, "b": tmp_path / "b.h5", "c": tmp_path / "c.h5"}, stage="tile")
    assert next(slow).value == 1
    wait_for(lambda: any(tmp_path.iterdir()))
    del slow  # closes it
    found = by_name(two_workers.map(square, {"a": 1, "b": 2, "c": 3}, stage="tile"))
    assert {name: outcome.value for name, outcome in found.items()} == {"a": 1, "b": 4, "c": 9}
    wait_for(lambda: not any(tmp_path.iterdir()))  # the slide in work was stopped and has tidied up


# ------------------------------------------------------------------------------- crashes


DEEDS = {f"s{k}": "nap" for k in range(8)} | {"s0": "crash", "s3": "exit", "s5": "kill once"}


@pytest.fixture(scope="module")
def after_deaths(
    two_workers: Engine, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Outcome[Any]], dict[str, int]]:
    """Outcomes, and how often each slide was begun, of a map that costs three workers their life."""
    folder = tmp_path_factory.mktemp("calls")
    found = by_name(two_workers.map(act, {k: (folder, k, deed) for k, deed in DEEDS.items()}, stage="tile"))
    return found, calls_of(folder)


def test_only_slides_that_crash_their_worker_fail(after_deaths: tuple[dict[str, Outcome[Any]], dict[str, int]]) -> None:
    found, _ = after_deaths
    assert found.keys() == DEEDS.keys()
    assert {name for name, outcome in found.items() if outcome.failure} == {"s0", "s3"}
    assert code_of(found["s0"]) == "worker-crashed"
    assert code_of(found["s3"]) == "worker-exited"
    for name, sign in {"s0": "SIGSEGV", "s3": "status 3"}.items():
        assert "its worker process died while processing this slide" in reason_of(found[name])
        assert sign in reason_of(found[name])


def test_only_a_slide_whose_worker_was_killed_is_done_twice(
    after_deaths: tuple[dict[str, Outcome[Any]], dict[str, int]],
) -> None:
    found, calls = after_deaths
    assert found["s5"].value == "kill once"
    assert calls == {name: 2 if deed == "kill once" else 1 for name, deed in DEEDS.items()}


class PretendedWorkers(Workers):
    """Two workers in this process that die of some slides and are then replaced."""

    local = True

    def __init__(self, deadly: set[str], exit_code: int):
        self.deadly, self.exit_code = deadly, exit_code
        self.workers = {"worker 0", "worker 1"}
        self.in_work: dict[str, tuple[Job, Receiver]] = {}
        self.history: list[list[str]] = []  # names of the slides in work at the same time

    def ask_for(self, number: int) -> None:
        pass

    def any_alive(self) -> bool:
        return bool(self.workers)

    def free(self) -> list[str]:
        return sorted(self.workers - self.in_work.keys())

    def submit(self, worker: str, job: Job, receive: Receiver) -> None:
        assert worker in self.free()
        self.in_work[worker] = job, receive

    def wait(self, seconds: float) -> None:
        in_work, self.in_work = self.in_work, {}
        self.history.append(sorted(job.name for job, _ in in_work.values()))
        for worker, (job, receive) in in_work.items():
            if job.name in self.deadly:
                self.workers = self.workers - {worker} | {f"{worker}'"}
                receive((job.name, WorkerDied(self.exit_code)))
            else:
                receive((job.name, job.run()))

    def interrupt(self, receive: Receiver) -> None:
        raise AssertionError("nothing is in work")


def run_pretending(deadly: set[str], exit_code: int) -> tuple[dict[str, Outcome[int]], list[list[str]]]:
    """Outcomes and history of a map over seven slides."""
    workers = PretendedWorkers(deadly, exit_code)
    items = {str(k): k for k in range(100, 107)}
    mapping: _Map[int] = _Map(workers, square, items, "tile", retries=0, admit=lambda name: True)
    found = by_name(mapping.outcomes(Progress("tile", "slides", len(items))))
    mapping.stop()
    assert found.keys() == items.keys()
    assert {name for name, outcome in found.items() if outcome.failure} == deadly
    assert all(outcome.value == items[name] ** 2 for name, outcome in found.items() if name not in deadly)
    return found, workers.history


def test_a_crash_is_conclusive() -> None:
    found, history = run_pretending({"100", "102", "103", "105"}, -signal.SIGSEGV)
    assert code_of(found["100"]) == "worker-crashed"
    assert sorted(name for together in history for name in together) == [str(k) for k in range(100, 107)]


def test_a_suspect_runs_after_all_others_with_none_beside_it() -> None:
    found, history = run_pretending({"101", "103"}, -signal.SIGKILL)
    assert code_of(found["101"]) == "worker-killed"
    assert "twice, the second time with no other slide running (SIGKILL)" in reason_of(found["101"])
    assert sorted(history[-2:]) == [["101"], ["103"]]
    assert sorted(name for together in history[:-2] for name in together) == [str(k) for k in range(100, 107)]


@pytest.mark.slow
def test_a_real_crash_among_hundreds_of_quick_slides(two_workers: Engine, tmp_path: Path) -> None:
    deeds = {f"s{k:03d}": "crash" if k == 150 else "nothing" for k in range(300)}
    found = by_name(two_workers.map(act, {k: (tmp_path, k, deed) for k, deed in deeds.items()}, stage="check"))
    assert found.keys() == deeds.keys()
    assert [name for name, outcome in found.items() if outcome.failure] == ["s150"]


# ------------------------------------------------------------------------------- further tries


def test_a_hiccup_is_tried_again(two_workers: Engine, tmp_path: Path) -> None:
    found = by_name(two_workers.map(act, {"a": (tmp_path, "a", "hiccup once")}, stage="tile"))
    assert found["a"].value == "hiccup once"
    assert calls_of(tmp_path) == {"a": 2}


def test_tries_are_as_many_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_FIRST_PAUSE_S", 0.0)
    calls = 0

    def always(error: BaseException) -> None:
        nonlocal calls
        calls += 1
        raise error

    for retries in (0, 1, 3):
        for error, tries in ((OSError(errno.ESTALE, "Stale file handle", "/a/b.svs"), retries + 1), (ValueError(), 1)):
            calls = 0
            [outcome] = Engine(EngineSettings(workers=0, retries=retries)).map(always, {"b": error}, stage="tile")
            assert calls == tries
            assert outcome.failure is not None
            times = f" (tried {tries} times)" if tries > 1 else ""
            told = "b.svs: stale file handle" if isinstance(error, OSError) else "ValueError"
            assert outcome.failure.reason == told + times


def test_which_failures_may_pass() -> None:
    def raised_from(cause: BaseException | None) -> SlideError:
        error = SlideError("a.svs: cannot be read")
        error.__cause__ = cause
        return error

    class Busy(Exception):
        transient = True

    passing = [OSError(errno.EIO, ""), OSError(errno.ESTALE, ""), TimeoutError(), ConnectionResetError(), Busy()]
    lasting = [OSError(errno.ENOSPC, ""), FileNotFoundError(errno.ENOENT, ""), PermissionError(errno.EACCES, "")]
    lasting += [ValueError(), MemoryError(), raised_from(None)]
    assert all(is_transient(error) and is_transient(raised_from(error)) for error in passing)
    assert not any(is_transient(error) or is_transient(raised_from(error)) for error in lasting)


def test_a_hiccup_that_our_error_hides_from_the_reader_may_still_pass() -> None:
    def read(error: OSError) -> None:
        try:
            raise error
        except OSError:
            raise SlideError("a.svs: cannot be read") from None

    for number, passing in ((errno.EIO, True), (errno.ENOENT, False)):
        with pytest.raises(SlideError) as caught:
            read(OSError(number, ""))
        assert is_transient(caught.value) is passing
    circle, other = ValueError(), KeyError()
    circle.__cause__, other.__context__ = other, circle
    assert not is_transient(circle)


# ------------------------------------------------------------------------------- good manners


@pytest.mark.usefixtures("after_deaths")  # so these are restarted ones
def test_workers_use_one_thread_and_leave_our_environment_alone(two_workers: Engine) -> None:
    found = by_name(two_workers.map(threads_of_worker, dict.fromkeys("abcd", 0), stage="tile"))
    assert {outcome.value for outcome in found.values()} == {"1"}
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_local_workers_open_no_port(two_workers: Engine) -> None:
    by_name(two_workers.map(square, {"a": 1, "b": 2}, stage="tile"))
    workers = psutil.Process().children(recursive=True)
    assert len(workers) >= 2
    assert [process.net_connections("inet") for process in workers] == [[]] * len(workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_neither_dask_nor_rich_nor_torch_is_loaded_for_work_on_this_machine(workers: int) -> None:
    program = f"""
import sys
from selfvitmil.engine import Engine
from selfvitmil.settings import EngineSettings
with Engine(EngineSettings(workers={workers})) as engine:
    assert [outcome.value for outcome in engine.map(abs, {{"a": -1}}, stage="tile")] == [1]
print(sorted({{"dask", "distributed", "rich", "torch", "openslide"}} & set(sys.modules)))
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"
    assert answer.stderr.startswith("tile: 1/1 slides, 0 failed, ")


UNGUARDED = """
from pathlib import Path
from selfvitmil.engine import Engine
from selfvitmil.settings import EngineSettings

def double(number):
    return 2 * number

with Path("runs").open("a") as file:
    file.write("once ")
with Engine(EngineSettings(workers=2)) as engine:
    print(sorted(outcome.value for outcome in engine.map(double, {"a": 1, "b": 2}, stage="tile")))
"""


@pytest.mark.parametrize("how", ["file", "module"])
def test_script_without_a_main_guard_runs_once_and_its_functions_in_workers(tmp_path: Path, how: str) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED)
    command = [sys.executable, *(["script.py"] if how == "file" else ["-m", "script"])]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert answer.stdout == "[2, 4]\n", answer
    assert (tmp_path / "runs").read_text() == "once "


@pytest.mark.slow
def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen([sys.executable, str(script), str(tmp_path)], env=environment)
    wait_for(lambda: len(list(tmp_path.glob(".*.part"))) == 2)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    process.kill()
    process.wait()
    assert psutil.wait_procs(family, timeout=10)[1] == []


INTERRUPTED = """
import signal
import sys
from pathlib import Path
from selfvitmil.engine import Engine
from selfvitmil.settings import EngineSettings
from test_engine import write_slowly

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs the tests in the background
    try:
        with Engine(EngineSettings(workers=2)) as engine:
            items = {name: Path(sys.argv[1]) / name for name in "abcd"}
            for outcome in engine.map(write_slowly, items, stage="tile"):
                print("unexpected", outcome)
    except KeyboardInterrupt:
        sys.exit(130)
"""


def test_sigterm_is_an_interrupt_and_no_longer_ours_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), Engine(EngineSettings(workers=0)) as engine:
        list(engine.map(signal.raise_signal, {"a": signal.SIGTERM}, stage="tile"))
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("sign", ["Ctrl-C in a terminal", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_an_interrupt_ends_everything_and_leaves_nothing(tmp_path: Path, sign: str) -> None:
    script, target, scratch = tmp_path / "script.py", tmp_path / "study", tmp_path / "scratch"
    script.write_text(INTERRUPTED)
    target.mkdir()
    scratch.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(scratch)}
    command = [sys.executable, str(script), str(target)]
    process = subprocess.Popen(  # a session of its own, so that the signal reaches the workers as a terminal's would
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        wait_for(lambda: len(list(target.iterdir())) == 2)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2
        if sign == "SIGTERM":
            process.terminate()
        else:
            os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert set(output.splitlines()) <= {"tile: starting a worker"}
    assert list(target.iterdir()) == []
    assert list(scratch.iterdir()) == []
    _, alive = psutil.wait_procs(family, timeout=5)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


# ------------------------------------------------------------------------------- a scheduler that runs already


@pytest.mark.slow
def test_a_running_tls_cluster_is_used_and_its_settings_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distributed import LocalCluster
    from distributed.security import Security

    security = Security.temporary()
    files = {"tls_ca": security.tls_ca_file, "tls_cert": security.tls_client_cert, "tls_key": security.tls_client_key}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    calls = tmp_path / "calls"
    calls.mkdir()
    with LocalCluster(  # dask's defaults: a task may take four workers down before it fails, and others queue behind it
        n_workers=2,
        threads_per_worker=1,
        security=security,
        dashboard_address="127.0.0.1:0",
        local_directory=str(tmp_path),
        silence_logs=100,
    ) as started:
        running: Any = started
        settings = EngineSettings(cluster=running.scheduler_address, **{name: tmp_path / name for name in files})
        with Engine(settings) as engine:
            deeds = {f"s{k}": "kill" if k == 1 else "nap" for k in range(8)}
            found = by_name(engine.map(act, {k: (calls, k, deed) for k, deed in deeds.items()}, stage="tile"))
        assert running.scheduler_address.startswith("tls://")
    assert [name for name, outcome in found.items() if outcome.failure] == ["s1"]
    assert calls_of(calls) == {name: 2 if deed == "kill" else 1 for name, deed in deeds.items()}


def test_a_scheduler_that_does_not_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_CONNECT_S", 0.3)
    with socket.socket() as reserved:  # bound but not listening
        reserved.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
        settings = EngineSettings(cluster=address, insecure=True)
        with Engine(settings) as engine, pytest.raises(EngineError) as caught:
            list(engine.map(square, {"a": 1}, stage="tile"))
        assert caught.value.code == "scheduler-unreachable"


@pytest.mark.parametrize(
    ("address", "code", "complaint"),
    [
        ("tcp://10.0.0.1:8786", "insecure-scheduler", "--insecure"),
        ("10.0.0.1:8786", "invalid-scheduler-address", "tls://host:port"),
        ("tls://10.0.0.1:8786", "tls-files-missing", "engine.tls_ca, engine.tls_cert, engine.tls_key"),
    ],
)
def test_an_address_is_checked_before_anybody_is_called(address: str, code: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        Engine(EngineSettings(cluster=address))
    assert caught.value.code == code


def test_a_certificate_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    there, missing = tmp_path / "ca.pem", tmp_path / "me.pem"
    with pytest.raises(ConfigError, match=r"me\.pem: no such file, set in engine\.tls_key") as caught:
        Engine(EngineSettings(cluster="tls://a:1", tls_ca=there, tls_cert=there, tls_key=missing))
    assert caught.value.code == "tls-file-not-found"
    assert str(tmp_path) not in str(caught.value)


# ------------------------------------------------------------------------------- batch systems


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("slurm", ["#SBATCH -p long", "#SBATCH -A lab", "#SBATCH --mem=8G", "#SBATCH -t 04:00:00", "#SBATCH --gres=x"]),
        ("pbs", ["#PBS -q long", "#PBS -A lab", "#PBS -l walltime=04:00:00", "#PBS --gres=x"]),
        ("lsf", ["#BSUB -q long", '#BSUB -P "lab"', "#BSUB -W 04:00", "#BSUB -n 1", "#BSUB --gres=x"]),
    ],
)
def test_the_job_script(kind: Any, lines: list[str], tmp_path: Path) -> None:
    settings = ClusterSettings(
        kind=kind, queue="long", account="lab", directives=("--gres=x",), prologue=("module load p",)
    )
    with cluster._batch_cluster(settings, tmp_path, cluster.Answers()) as started:
        script = started.job_script().splitlines()
    assert set(lines) <= set(script)
    assert script.index("export OMP_NUM_THREADS=1") < script.index("module load p") < len(script) - 1
    [worker] = [line for line in script if "dask_worker" in line]
    assert worker.startswith(f"{sys.executable} -m distributed.cli.dask_worker tls://")
    assert "--nthreads 1 " in worker
    assert worker.rfind("--memory-limit 0") > worker.find("--memory-limit")  # the last one counts
    for option, name in (("--tls-ca-file", "ca.pem"), ("--tls-cert", "cert.pem"), ("--tls-key", "key.pem")):
        assert f"{option} {tmp_path / name}" in worker
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for made-up sbatch and scancel, first in PATH, and a home of its own."""
    commands, home = tmp_path / "bin", tmp_path / "home"
    commands.mkdir()
    home.mkdir()
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(home))
    return commands


def put_command(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.slow
def test_a_batch_system_runs_the_slides(slurm: Path, tmp_path: Path) -> None:
    # Slurm copies the script, runs it later in a session of its own and answers with a number.
    put_command(
        slurm / "sbatch",
        f'cp "$1" {tmp_path}/job; setsid sh {tmp_path}/job > {tmp_path}/log 2>&1 & echo Submitted batch job $!',
    )
    put_command(slurm / "scancel", f"echo $1 >> {tmp_path}/cancelled; kill -- -$1")
    prologue = (f"export PYTHONPATH={Path(__file__).parent}",)
    settings = EngineSettings(batch=ClusterSettings(kind="slurm", jobs=1, prologue=prologue))
    keys = tmp_path / "home" / ".cache" / "selfvitmil"
    with Engine(settings) as engine:
        found = by_name(engine.map(square, {"a": 1, "b": 2, "c": -1}, stage="tile"))
        [folder] = keys.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [found[name].value for name in "abc"] == [1, 4, None]
    assert len((tmp_path / "cancelled").read_text().split()) == 1
    assert list(keys.iterdir()) == []


def test_a_job_that_is_refused_is_an_error_in_slurms_own_words(slurm: Path) -> None:
    put_command(slurm / "sbatch", "echo 'sbatch: error: invalid partition specified: lnog' >&2; exit 1")
    put_command(slurm / "scancel", "true")
    settings = EngineSettings(batch=ClusterSettings(kind="slurm", queue="lnog"))
    with Engine(settings) as engine, pytest.raises(EngineError, match=r"invalid partition.*lnog") as caught:
        list(engine.map(square, {"a": 1}, stage="tile"))
    assert caught.value.code == "job-rejected"


def test_a_refused_job_is_submitted_again_and_counts_no_more_once_it_is_taken(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_AGAIN_S", 0.1)
    recovered = tmp_path / "recovered"
    refusal = "{ echo 'sbatch: error: Socket timed out' >&2; exit 1; }"
    put_command(slurm / "sbatch", f"[ -e {recovered} ] || {refusal}; echo Submitted batch job 7")
    put_command(slurm / "scancel", "true")
    settings = EngineSettings(batch=ClusterSettings(kind="slurm", jobs=2))
    with cluster.open_workers(settings) as workers:
        assert isinstance(workers, cluster.BatchWorkers)
        workers.ask_for(2)
        answers = workers._answers
        wait_for(lambda: len(answers.refused) == 2)
        with pytest.raises(EngineError, match="Socket timed out"):
            workers.check_timeout(0)  # nothing was ever taken: wrong settings, most likely
        recovered.touch()
        wait_for(lambda: not answers.refused)
        assert answers.accepted == 2
        workers.check_timeout(10_000)  # they are in the queue, for hours perhaps


def test_jobs_that_are_all_refused_at_once_late_in_a_run_end_it_only_after_a_while(tmp_path: Path) -> None:
    answers = cluster.Answers(accepted=9, refused={"job 1": "Socket timed out", "job 2": "Socket timed out"})
    workers = cluster.BatchWorkers(None, None, ClusterSettings(kind="slurm"), answers, tmp_path)  # pyright: ignore[reportArgumentType]
    workers._number = 3
    workers.check_timeout(10_000)
    workers._number = 2
    workers.check_timeout(60)
    with pytest.raises(EngineError, match="Socket timed out"):
        workers.check_timeout(1000)


def test_what_a_batch_system_needs_is_named(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(kind: Any, memory: str = "8GB") -> None:
        with Engine(EngineSettings(batch=ClusterSettings(kind=kind, memory=memory))) as engine:
            list(engine.map(square, {"a": 1}, stage="tile"))

    with pytest.raises(EngineError, match="bsub") as caught:
        start("lsf")
    assert caught.value.code == "batch-command-not-found"
    put_command(slurm / "sbatch", "true")
    with pytest.raises(ConfigError, match=r"engine\.batch: .*gigs") as caught:
        start("slurm", memory="8 gigs")
    assert caught.value.code == "invalid-batch-settings"
    monkeypatch.setitem(sys.modules, "dask_jobqueue", None)
    with pytest.raises(ConfigError, match=re.escape("selfvitmil[cluster]")) as caught:
        start("slurm")
    assert caught.value.code == "missing-package"


# ------------------------------------------------------------------------------- progress


def test_plain_lines_count_slides_failures_and_units(capsys: pytest.CaptureFixture[str]) -> None:
    with Engine(EngineSettings(workers=0)) as engine:
        items = {str(k): k for k in (-1, *range(1, 9))}
        list(engine.map(square, items, stage="tile", unit="tiles", count=lambda value: 1000 * value))
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"tile: 1/9 slides, 1 failed, 0\.00 tiles/s, 0:00:00 so far, about 0:00:00 left", lines[0])
    assert re.fullmatch(r"tile: 9/9 slides, 1 failed, \d+ tiles/s, 0:00:00 so far", lines[-1])


@pytest.mark.parametrize(("total", "seconds_each", "most_lines"), [(5000, 0.004, 22), (5000, 7.2, 300), (30, 60, 30)])
def test_lines_come_at_a_pace_for_logs(
    total: int,
    seconds_each: float,
    most_lines: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Progress("embed", "tiles", total) as progress:
        for _ in range(total):
            now += seconds_each
            progress.advance(failed=False, amount=50)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"embed: 1/{total} slides, 0 failed, ")
    assert lines[-1].startswith(f"embed: {total}/{total} slides, 0 failed, ")
    assert 2 <= len(lines) <= most_lines
    assert float(lines[-1].split()[-5]) == pytest.approx(50 / seconds_each, rel=0.01)


def test_a_terminal_gets_a_bar_and_prints_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tempfile.TemporaryFile("w+", encoding="utf-8") as terminal:
        monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.setenv("TERM", "xterm")
        with Engine(EngineSettings(workers=0)) as engine:
            for outcome in engine.map(square, {"a": 1, "b": -1}, stage="tile"):
                print("done", outcome.name)
        terminal.seek(0)
        screen = terminal.read()
    assert "2/2 slides, 1 failed" in screen
    assert capsys.readouterr().out == "done a\ndone b\n"  # standard output is no terminal here: it stays clean


@pytest.mark.parametrize(
    ("kind", "walltime", "seconds"),
    [
        ("slurm", "90", 5400),
        ("slurm", "90:30", 5430),
        ("slurm", "04:00:00", 14400),
        ("slurm", "2-12", 216000),
        ("slurm", "1-00:30", 88200),
        ("slurm", "1-02:03:04", 93784),
        ("pbs", "3600", 3600),
        ("pbs", "04:00:00", 14400),
        ("lsf", "90", 5400),
        ("lsf", "4:30", 16200),
        ("slurm", "UNLIMITED", None),
    ],
)
def test_time_limits_of_batch_systems(kind: Any, walltime: str, seconds: float | None):
    """As their manuals say: sbatch --time, qsub -l walltime, bsub -W."""
    from selfvitmil.engine.cluster import time_limit_s

    assert time_limit_s(ClusterSettings(kind=kind, walltime=walltime)) == seconds


def test_a_worker_close_to_its_time_limit_gets_no_more_slides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from selfvitmil.engine import cluster

    class Scheduler:
        def nthreads(self) -> dict[str, int]:
            return dict.fromkeys(addresses, 1)

    clock = 0.0
    monkeypatch.setattr(cluster.time, "monotonic", lambda: clock)
    addresses = ["old"]
    batch = ClusterSettings(kind="slurm", walltime="01:00:00")
    workers = cluster.BatchWorkers(Scheduler(), None, batch, cluster.Answers(), tmp_path)  # type: ignore[arg-type]
    assert workers.free() == ["old"]
    clock, addresses = 3300.0, ["old", "new"]
    assert workers.free() == ["new"]
    options = cluster._options(batch, tmp_path)["worker_extra_args"]
    lifetime = options[options.index("--lifetime") + 1]
    stagger = options[options.index("--lifetime-stagger") + 1]
    assert (lifetime, stagger) == ("3420s", "90s")
    assert 3420 + 90 < 3600, "it ends before its job is killed"
