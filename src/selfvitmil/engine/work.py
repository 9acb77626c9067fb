"""What happens to one slide, in this process or in a worker: tries, failures, and the interrupt from outside."""

from __future__ import annotations

import ctypes
import errno
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from selfvitmil import __version__
from selfvitmil.errors import EngineError
from selfvitmil.store.failures import Failure

T = TypeVar("T")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What became of one slide: `failure` is None where it worked, and then `value` is what the function returned."""

    name: str
    value: T | None
    failure: Failure | None
    seconds: float
    """Time spent on it by whoever did it, further tries included."""


# ---------------------------------------------------------------------------------------------------- tries

_FIRST_PAUSE_S = 1.0

TRANSIENT_ERRNOS = {
    errno.EIO,
    errno.ESTALE,
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINTR,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.ENOTCONN,
    errno.ECONNREFUSED,
}
"""What network drives answer when they hiccup; ConnectionError and TimeoutError count as well."""


def is_transient(error: BaseException | None) -> bool:
    """Whether trying again can help: it, or what it came of, is a hiccup of a drive or has `.transient = True`.

    What it came of is its cause, or else what was being handled when it was raised, `from None` or not: our errors hide
    a library's from the reader, not from us. An error of ours that stands for itself (a damaged file, no tissue) is as
    true the second time, and so are a missing file, a full disk and lacking rights.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, ConnectionError | TimeoutError) or getattr(error, "transient", False):
            return True
        if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def attempt(function: Callable[[Item], T], name: str, item: Item, stage: str, retries: int) -> Outcome[T]:
    """Do one slide, with further tries where they can help."""
    began = time.perf_counter()
    tries = 0
    while True:
        tries += 1
        try:
            return Outcome(name, function(item), None, time.perf_counter() - began)
        except (Exception, SystemExit) as error:
            if tries > retries or not is_transient(error):
                return Outcome(name, None, _failure(name, stage, error, tries), time.perf_counter() - began)
        time.sleep(_FIRST_PAUSE_S * 2 ** (tries - 1))


def _failure(name: str, stage: str, error: BaseException, tries: int) -> Failure:
    if error.__traceback__ is not None:  # the line above that calls `function` says nothing about the slide
        error = error.with_traceback(error.__traceback__.tb_next)
    failure = Failure.of(name, stage, error)
    return replace(failure, reason=f"{failure.reason} (tried {tries} times)") if tries > 1 else failure


# ---------------------------------------------------------------------------------------------------- in a worker


class _Stopped(BaseException):
    """Raised inside a slide's work from outside, when the run is interrupted; `except Exception` lets it through."""


_in_work: set[int] = set()
_in_work_lock = threading.Lock()


def do_slides(version: str, jobs: list[tuple[str, bytes]], stage: str, retries: int) -> list[bytes]:
    """What a worker process runs: a few slides in turn. Outcomes go back pickled, so that no value can upset dask.

    There are fewer outcomes than jobs when `stop_slides` came in between.
    """
    if version != __version__:
        raise EngineError(f"selfvitmil {__version__} there, {version} here")
    outcomes: list[bytes] = []
    thread = threading.get_ident()
    with suppress(_Stopped):
        with _in_work_lock:
            _in_work.add(thread)
        for name, payload in jobs:
            outcomes.append(_do_slide(name, payload, stage, retries))
        with _in_work_lock:  # or `_Stopped` could arrive after `suppress`
            _in_work.discard(thread)
    _in_work.discard(thread)
    return outcomes


def _do_slide(name: str, payload: bytes, stage: str, retries: int) -> bytes:
    try:
        function, item = pickle.loads(payload)
        return pickle.dumps(attempt(function, name, item, stage, retries))
    except Exception as error:  # the job cannot be unpickled here, or its value cannot be pickled
        return pickle.dumps(Outcome(name, None, Failure.of(name, stage, error), 0.0))


def stop_slides() -> None:
    """Run in a worker: let its slide end with an exception, so that its `finally` clauses tidy up."""
    with _in_work_lock:
        for thread in _in_work:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Stopped))
