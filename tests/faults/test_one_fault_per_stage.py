"""One I/O error in each stage; `make faults` tries them all."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator

import pytest

from faults.campaign import IoFault, count_calls, try_io_fault
from faults.children import scratch
from faults.miniature import NAMES, Miniature


@pytest.fixture(scope="module")
def mini() -> Iterator[Miniature]:
    place = scratch()
    yield Miniature(place)
    shutil.rmtree(place)


@pytest.mark.parametrize("stage", range(len(NAMES)), ids=NAMES)
def test_stage_recovers_from_a_full_disk(mini: Miniature, stage: int):
    fired, problems = try_io_fault(mini, IoFault(stage, count_calls(mini, stage) // 2, errno.ENOSPC, lasting=True))
    assert fired
    assert not problems
