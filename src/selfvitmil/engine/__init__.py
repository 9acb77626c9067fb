"""Map work over slides: in this process, in local processes, or on a cluster.

Input: a function and named items; output: outcomes in the order of completion, one per name, each a value or a Failure.
A problem with one slide does not stop the others: an exception becomes a Failure, and so does a crash that kills the
worker process.

To attribute a crash to its slide, a worker has one slide at a time, assigned by the engine and not by dask's scheduler.
So when a process dies, the slide it was working on is known, and no other slide was queued behind it. (Slides that take
a few milliseconds are sent several at a time; if their worker dies they are repeated one by one.) If the exit code is
conclusive (a segmentation fault, an exit) the slide has failed. If the cause may lie elsewhere (the kernel's
out-of-memory killer, a batch job at its time limit, a remote worker that disappeared) the slide is retried once after
all others, on this machine with no other slide at the same time; a second death counts as its failure.

Processes are spawned, not forked: a script that uses an Engine with workers must do so under
`if __name__ == "__main__":`, as with any `multiprocessing`. All connections use TLS with a key made for the run; local
workers listen on 127.0.0.1 only. dask.distributed is imported only when workers are needed.

    engine.py     Engine: the interface for the stages; starts workers on demand
    run.py        one map: assigns slides to workers and handles dead workers
    work.py       processing of one slide, in this process or in a worker: retries, failures, interruption
    workers.py    a connection to workers, the same for all three kinds
    local.py      worker processes on this machine
    external.py   workers of a dask scheduler that is already running
    batch.py      workers as jobs of Slurm, PBS or LSF
    progress.py   progress bar in a terminal, plain lines in a log
"""

from selfvitmil.engine.engine import Engine
from selfvitmil.engine.local import num_cores
from selfvitmil.engine.work import Outcome, is_transient

__all__ = ["Engine", "Outcome", "is_transient", "num_cores"]
