"""Files that are damaged after they were written, processes that meet, and random sequences of all of it."""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from faults.children import run_command
from faults.miniature import NAMES, STAGES, Miniature, differences
from faults.recovery import Tally, tail
from selfvitmil.store import guard

LAST = len(STAGES) - 1
HOW = ("flip", "truncate", "empty", "garbage")
TRIES = 4
"""Times that a user does what the message says."""


def damage(path: Path, how: str, rng: random.Random) -> None:
    """Damage a file in place."""
    content = bytearray(path.read_bytes())
    if how == "flip" and content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif how == "truncate":
        del content[rng.randrange(len(content) + 1) :]
    elif how == "empty":
        content.clear()
    else:
        at = rng.randrange(len(content) + 1)
        content[at : at + 64] = rng.randbytes(64)
    path.write_bytes(content)


def artefacts(study: Path) -> list[Path]:
    """Every file that commands have written and read again: not their final pages, pictures and logs."""
    kinds = (".h5", ".pt", ".safetensors", ".json", ".csv", ".toml", ".txt")
    own = ("study.toml", "cohort.csv", "run.json")  # the user's, and a log
    found = (path for path in sorted(study.rglob("*")) if path.is_file() and path.suffix in kinds)
    return [path for path in found if path.name not in own and not _is_past(path)]


def _is_past(path: Path) -> bool:
    """Whether it is the checkpoint of a finished training, which nothing reads again."""
    return path.name == "state.pt" and (path.parent / "config.json").exists()


def kind_of(path: Path, study: Path) -> str:
    """What counts as one kind of artefact: its folder at the top, and its ending."""
    return f"{path.relative_to(study).parts[0]} {path.name if path.suffix != '.h5' else '.h5'}"


def recover(mini: Miniature, work: Path, damaged: list[Path], *, silent: bool = False) -> tuple[str, list[str]]:
    """Run what is needed; do what messages say of damaged files. Return how it went, and what is wrong in the end.

    Where a value in a file was changed to another valid one (`silent`), nobody can notice unless the file has a
    checksum; all else must be found.
    """
    asked = False
    for plan in (STAGES[LAST:], *([STAGES[1:]] * TRIES)):
        refused = None
        for stage in plan:
            done = run_command(stage.command(work), prepare=_with_guard)
            if not done.is_clean:
                return "", [f"{stage.name} ends with status {done.status}: {tail(done)}"]
            if done.status != 0:
                refused = done
                break
        if refused is None:
            if not differences(work, mini.expected[LAST]):
                return ("named" if asked else "rebuilt"), []
            continue
        asked = True
        named = [path for path in damaged if path.exists() and _is_named(path, refused.output)]
        if not named:
            names = [path.name for path in damaged]
            return "", [f"status {refused.status} without the name of {names}: {tail(refused)}"]
        for path in named:
            path.unlink()
            if path.parent.name == "dino" or path.parent.name.startswith("seed"):  # "remove the folder"
                shutil.rmtree(path.parent)
    if silent and not asked:
        return "unnoticed", []
    return "", [f"in the end {line}" for line in differences(work, mini.expected[LAST])[:3]]


def _is_named(path: Path, output: str) -> bool:
    """Whether a message says which file it is about: by its name, or by the folder that it belongs to."""
    return path.name in output or path.stem in output or path.parent.name in output


def _with_guard() -> None:
    """Damaged HDF5 files may hang the library."""
    guard.helper = guard.Helper()
    guard.LIMIT_S = 10


def damages(mini: Miniature, tally: Tally, seed: int, until: float, stages: list[int]) -> None:
    """Damage one file of every kind in every way, round after round with other files and places."""
    del stages
    first = mini.before(LAST + 1)
    kinds: dict[str, list[Path]] = {}
    for path in artefacts(first):
        kinds.setdefault(kind_of(path, first), []).append(path.relative_to(first))
    for turn in range(1000):
        for kind, paths in kinds.items():
            if time.monotonic() > until:
                return
            rng = random.Random(f"{seed} {turn} {kind}")
            how = HOW[(turn + len(kind)) % len(HOW)]
            work = mini.copy(LAST + 1, "damage")
            path = work / rng.choice(paths)
            damage(path, how, rng)
            found, problems = recover(mini, work, [path], silent=how in ("flip", "garbage"))
            problems = [f"{how} {path.relative_to(work)}: {each}" for each in problems]
            tally.add(f"{how}, {found or 'NOT RECOVERED'}", f"--part damage --seed {seed}", problems)


# ---------------------------------------------------------------------------------------------------- at once


def _no_locks() -> None:
    import fcntl

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    fcntl.flock = refuse  # type: ignore[assignment]


def _jumping_clock() -> None:
    """The time of day leaps by days, back and forth, at every look."""
    true, jump = time.time, iter(range(1, 1 << 30))
    time.time = lambda: true() + (-1) ** next(jump) * 86400.0 * 3


def together(mini: Miniature, tally: Tally, seed: int, until: float, stages: list[int]) -> None:
    """Stale locks, no locks, clocks that jump, and two processes on one study."""
    lines = {
        "a lock of a dead process here": f"host {os.uname().nodename}, pid 999999, selfvitmil tile\n",
        "a lock of a reused process id": f"host {os.uname().nodename}, pid {os.getpid()}, selfvitmil tile\n",
    }
    prepares: dict[str, Callable[[], None]] = {"no locks": _no_locks, "a jumping clock": _jumping_clock}
    for k in stages:
        for what in (*lines, *prepares, "two at once"):
            if time.monotonic() > until:
                return
            work = mini.copy(k, "together")
            (work / ".lock").write_text(lines.get(what, ""))
            problems = _two_at_once(work, k) if what == "two at once" else []
            if what != "two at once":
                done = run_command(STAGES[k].command(work), prepares.get(what, _nothing))
                problems = [] if done.status == 0 else [f"status {done.status}: {tail(done)}"]
            problems += differences(work, mini.expected[k])
            tally.add(what, f"--part together --stage {NAMES[k]} --seed {seed}", problems)


def _nothing() -> None:
    pass


def _two_at_once(work: Path, k: int) -> list[str]:
    """Run a stage twice at the same moment; one may be refused."""
    import tempfile

    from faults.children import start

    with tempfile.TemporaryFile() as output:
        children = [start(STAGES[k].command(work), output.fileno()) for _ in range(2)]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        output.seek(0)
        text = output.read().decode(errors="replace")
    refused = "another process works on this study" in text
    problems = [] if "Traceback" not in text else [f"a traceback: {text[-300:]}"]
    if sorted(statuses) != [0, 0] and not (sorted(statuses) == [0, 3] and refused):
        problems.append(f"statuses {statuses}: {text[-300:]}")
    return problems


# ---------------------------------------------------------------------------------------------------- commands


def commands(mini: Miniature, tally: Tally, seed: int, until: float, stages: list[int]) -> None:
    """Let Hypothesis draw sequences of commands, kills, edits and damage; their end equals a clean run."""
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis import seed as seeded
    from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
    from hypothesis.strategies import integers, sampled_from

    del stages
    toml, cohort = ((mini.before(1) / name).read_text() for name in ("study.toml", "cohort.csv"))

    class Commands(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.work = mini.copy(1, "commands")
            self.damaged: list[Path] = []
            self.steps: list[str] = []

        @rule(k=integers(1, LAST))
        def command(self, k: int) -> None:
            self._run(k, None)

        @rule(k=integers(1, LAST), share=integers(0, 100))
        def kill(self, k: int, share: int) -> None:
            self._run(k, 0.02 * share)

        def _run(self, k: int, kill_after: float | None) -> None:
            self.steps.append(f"{NAMES[k]} {kill_after or ''}")
            done = run_command(STAGES[k].command(self.work), _with_guard, kill_after=kill_after)
            killed = kill_after is not None and done.status < 0
            assert done.is_clean or killed, f"{self.steps}: {tail(done)}"

        @rule(line=sampled_from(["epochs = 2", "epochs = 3"]))
        def edit_a_setting(self, line: str) -> None:
            self.steps.append(line)
            (self.work / "study.toml").write_text(toml.replace("epochs = 2", line))

        @rule(row=integers(1, 6))
        def remove_a_slide(self, row: int) -> None:
            self.steps.append(f"without row {row}")
            lines = cohort.splitlines(keepends=True)
            (self.work / "cohort.csv").write_text("".join(lines[:row] + lines[row + 1 :]))

        @rule()
        def add_it_again(self) -> None:
            self.steps.append("all rows")
            (self.work / "cohort.csv").write_text(cohort)

        @rule(number=integers(0, 10_000), how=sampled_from(HOW[1:3]))
        def damage_a_file(self, number: int, how: str) -> None:
            files = artefacts(self.work)
            if files:
                path = files[number % len(files)]
                self.steps.append(f"{how} {path.relative_to(self.work)}")
                damage(path, how, random.Random(number))
                self.damaged.append(path)

        def teardown(self) -> None:
            (self.work / "study.toml").write_text(toml)
            (self.work / "cohort.csv").write_text(cohort)
            _, problems = recover(mini, self.work, self.damaged)
            assert not problems, f"{self.steps}: {problems}"
            tally.add("sequence of commands", f"--part commands --seed {seed}", [])

    turn = 0
    while time.monotonic() < until:
        machine = seeded(1000 * seed + turn)(Commands)
        turn += 1
        try:
            run_state_machine_as_test(
                machine,
                settings=settings(
                    max_examples=2, stateful_step_count=6, deadline=None, database=None, phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                ),
            )  # fmt: skip
        except AssertionError as error:
            tally.add("sequence of commands", f"--part commands --seed {seed}", [str(error)[:1500]])
