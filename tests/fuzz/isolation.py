"""Calls in a fork of this process, with limits of time and memory.

One fork serves many calls. When it dies or hangs, the call that it was at is the finding, and another fork goes on.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import struct
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from selfvitmil.store import guard

LIMIT_S = 5
MEMORY = 4 << 30
"""Address space beyond what the process has already."""


def run_all(call: Callable[[str], str], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each name with what its call returned: `ok`, an error of ours, or `BAD ...`; the rest may be anything."""
    waiting = list(names)
    while waiting:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            _serve(call, waiting, write)
        os.close(write)
        done = 0
        with os.fdopen(read, "rb") as pipe:
            while head := pipe.read(4):
                yield waiting[done], pickle.loads(pipe.read(struct.unpack("<I", head)[0]))
                done += 1
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if done < len(waiting):
            yield waiting[done], f"BAD {_end(status)}"
            done += 1
        waiting = waiting[done:]


def _end(status: int) -> str:
    if status == -signal.SIGALRM:
        return "hangs"
    return f"dies of {signal.Signals(-status).name}" if status < 0 else f"ends with status {status}"


def _serve(call: Callable[[str], str], names: list[str], pipe: int) -> None:
    """Run calls until the end or the first crash; never returns."""
    try:
        guard.LIMIT_S = LIMIT_S / 2
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        size = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
        now = int(size.split()[1]) << 10
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for name in names:
            signal.alarm(LIMIT_S)
            try:
                result = call(name)
            except BaseException as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                ours = [f for f in traceback.extract_tb(error.__traceback__) if "/selfvitmil/" in f.filename]
                at = f" at {os.path.basename(ours[-1].filename)}:{ours[-1].lineno}" if ours else ""
                result = f"BAD {type(error).__name__}{at} in {os.path.basename(last.filename)}: {str(error)[:120]}"
            signal.alarm(0)
            message = pickle.dumps(result)
            os.write(pipe, struct.pack("<I", len(message)) + message)
    finally:
        os._exit(0)
