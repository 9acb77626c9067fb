"""The one place that maps work over slides: in this process, in local processes, or on a cluster.

In come a function and named items; out come outcomes in the order of completion, one per name, each a value or a
Failure. Nothing that happens to one slide stops another: an exception becomes a Failure, and so does a crash that takes
the worker process with it.

How the last one is kept exact: a worker has one slide at a time, and the engine, not dask's scheduler, decides which.
So when a process dies, the slide it died on is known, and no innocent one was waiting behind it. (Slides that take a
few milliseconds travel several at a time; if their worker dies they are repeated one by one.) Where the death says
enough (a segmentation fault, an exit) the slide has failed. Where it may have been someone else's fault (the kernel's
out-of-memory killer, a batch job at its time limit, a worker elsewhere of which we know no more than that it is gone)
the slide is tried once more after all others, on this machine with no other slide beside it; a second death is its own.

Processes are spawned, not forked: a script that uses an Engine with workers must do so under
`if __name__ == "__main__":`, as with any `multiprocessing`. All connections use TLS with a key made for the run; local
workers listen on 127.0.0.1 only. dask.distributed is loaded when workers are needed, not before.

    engine.py     Engine: what the stages call; it opens workers when there is something to do
    run.py        one map: which slide goes to which worker next, and what becomes of one whose worker died
    work.py       what happens to one slide, in this process or in a worker: tries, failures, the interrupt
    workers.py    a connection to workers, the same for all three kinds
    local.py      worker processes on this machine
    external.py   the workers of a dask scheduler that is already running
    batch.py      workers as jobs of Slurm, PBS or LSF
    progress.py   the moving bar of a terminal, the plain lines of a log
"""

from selfvitmil.engine.engine import Engine
from selfvitmil.engine.local import num_cores
from selfvitmil.engine.work import Outcome, is_transient

__all__ = ["Engine", "Outcome", "is_transient", "num_cores"]
