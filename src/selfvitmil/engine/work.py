"""Process one slide, in this process or in a worker: retries, failures, and interruption from outside."""

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
    """Result for one slide: `failure` is None on success, and then `value` is what the function returned."""

    name: str
    value: T | None
    failure: Failure | None
    seconds: float
    """Processing time, including retries."""


# ---------------------------------------------------------------------------------------------------- retries

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
"""Errors of network drives that may go away; ConnectionError and TimeoutError count as well."""


def is_transient(error: BaseException | None) -> bool:
    """Return whether a retry can help: the error or one of its causes is a drive failure or has `.transient = True`.

    Causes are `__cause__` and `__context__`, also with `from None`, which hides them only from the traceback. Our own
    errors without such a cause (a damaged file, no tissue) would occur again, and so would a missing file, a full disk
    and missing permissions.
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
    """Process one slide, with retries where they can help."""
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
    if error.__traceback__ is not None:  # drop our own frame
        error = error.with_traceback(error.__traceback__.tb_next)
    failure = Failure.of(name, stage, error)
    return replace(failure, reason=f"{failure.reason} (tried {tries} times)") if tries > 1 else failure


# ---------------------------------------------------------------------------------------------------- in a worker


class _Stopped(BaseException):
    """Raised inside the work on a slide when the run is interrupted; not caught by `except Exception`."""


_in_work: set[int] = set()
_in_work_lock = threading.Lock()


def do_slides(version: str, jobs: list[tuple[str, bytes]], stage: str, retries: int) -> list[bytes]:
    """Run a few slides in a worker process. Outcomes are returned pickled, so that dask does not inspect the values.

    There are fewer outcomes than jobs if `stop_slides` interrupted them.
    """
    if version != __version__:
        raise EngineError(f"selfvitmil {__version__} on the worker, {version} here", code="version-mismatch")
    outcomes: list[bytes] = []
    thread = threading.get_ident()
    with suppress(_Stopped):
        with _in_work_lock:
            _in_work.add(thread)
        for name, payload in jobs:
            outcomes.append(_do_slide(name, payload, stage, retries))
        with _in_work_lock:  # otherwise `_Stopped` could arrive after `suppress`
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
    """Run in a worker: interrupt its slides with an exception, so that their `finally` clauses clean up."""
    with _in_work_lock:
        for thread in _in_work:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Stopped))
