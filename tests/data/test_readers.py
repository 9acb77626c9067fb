"""Tiles read ahead, by threads and by processes: the same pixels in the same order, whatever goes wrong in between."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from selfvitmil import stain
from selfvitmil.data.readers import (
    ProcessReaders,
    Readers,
    SlideTiles,
    ThreadReaders,
    TileBatch,
    TileRequest,
    compact_runs,
    serve,
)
from selfvitmil.engine import is_transient
from selfvitmil.errors import EngineError, SlideError
from selfvitmil.slides import SlideRef, jpegtiff, open_slide, synthetic

SIZE, MPP, BATCH = 32, 1.0, 24

pytestmark = pytest.mark.skipif(not ProcessReaders.available, reason="no anonymous files in memory on this system")
Read = Callable[[TileRequest, NDArray[np.int64]], Iterator[TileBatch]]


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("readers") / "made.svs"
    synthetic.make_slide(path, seed=3, size=(2048, 2048))
    return path


@pytest.fixture(scope="module", params=["threads", "processes"])
def readers(request: pytest.FixtureRequest) -> Iterator[Readers]:
    with (ThreadReaders if request.param == "threads" else ProcessReaders)(2, BATCH, SIZE) as made:
        yield made


@pytest.fixture
def read(readers: Readers) -> Read:
    return lambda request, coords_l0: read_one(readers, request, coords_l0)


def read_one(readers: Readers, request: TileRequest, coords_l0: NDArray[np.int64]) -> Iterator[TileBatch]:
    """The batches of one slide; its error is raised."""
    for batch in readers.read([SlideTiles("s", request, coords_l0)], shared=False):
        for part in batch.parts:
            if part.error is not None:
                raise part.error
        yield batch


def corners(number: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, 1800, (number, 2))


def joined(batches: Iterator[TileBatch]) -> NDArray[np.uint8]:
    return np.concatenate([batch.tiles_BHW3.copy() for batch in batches])


def one_by_one(path: Path, coords_l0: NDArray[np.int64]) -> NDArray[np.uint8]:
    with open_slide(path) as opened:
        return np.stack([opened.read_tile(int(x), int(y), SIZE, MPP) for x, y in coords_l0])


@pytest.mark.parametrize("number", [1, BATCH, 6 * BATCH + 5])
def test_same_tiles_as_reading_one_by_one(read: Read, slide: Path, number: int):
    sizes = []
    tiles = []
    for batch in read(TileRequest(SlideRef("s", slide), MPP), corners(number)):
        sizes.append(len(batch.tiles_BHW3))
        tiles.append(batch.tiles_BHW3.copy())
        assert batch.waited_s >= 0
    assert sizes == [BATCH] * (number // BATCH) + [number % BATCH] * (number % BATCH > 0)
    np.testing.assert_array_equal(np.concatenate(tiles), one_by_one(slide, corners(number)))


def test_a_batch_stays_while_the_next_is_looked_at(read: Read, slide: Path):
    """A GPU may still copy from a batch when the next one is asked for."""
    wanted = one_by_one(slide, corners(8 * BATCH))
    before: TileBatch | None = None
    for number, batch in enumerate(read(TileRequest(SlideRef("s", slide), MPP), corners(8 * BATCH))):
        if before is not None:
            np.testing.assert_array_equal(before.tiles_BHW3, wanted[(number - 1) * BATCH : number * BATCH])
        before = batch


def test_giving_up_leaves_nothing_behind(read: Read, slide: Path):
    for _ in read(TileRequest(SlideRef("s", slide), MPP), corners(8 * BATCH, seed=1)):
        break
    np.testing.assert_array_equal(
        joined(read(TileRequest(SlideRef("s", slide), MPP), corners(50, seed=2))),
        one_by_one(slide, corners(50, seed=2)),
    )


def test_a_slide_that_is_gone_is_named_and_the_next_one_works(read: Read, slide: Path):
    with pytest.raises(SlideError, match=r"gone\.svs"):
        joined(read(TileRequest(SlideRef("gone", slide.with_name("gone.svs")), MPP), corners(50)))
    np.testing.assert_array_equal(
        joined(read(TileRequest(SlideRef("s", slide), MPP), corners(30))), one_by_one(slide, corners(30))
    )


@pytest.mark.parametrize(("number", "passing"), [(errno.EIO, True), (errno.EACCES, False)])
def test_whether_an_error_may_pass_survives_the_way_from_the_reader(
    slide: Path, monkeypatch: pytest.MonkeyPatch, number: int, passing: bool
):
    def failing(*arguments: int) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(jpegtiff.os, "pread", failing)
    ours, theirs = socket.socketpair()
    memory = os.memfd_create("test")
    os.ftruncate(memory, SIZE * SIZE * 3)
    reader = threading.Thread(target=serve, args=(memory, theirs.detach(), 1, 1, SIZE, SIZE, 3))
    reader.start()
    with Connection(ours.detach()) as connection:
        connection.send((TileRequest(SlideRef("s", slide), MPP), corners(1), np.array([0]), 0))
        error = connection.recv()
    reader.join()
    assert isinstance(error, SlideError)
    assert is_transient(error) is passing


def test_tiles_normalized_one_by_one_and_those_that_cannot_be_are_counted(read: Read, slide: Path):
    coords = corners(40)
    plain = one_by_one(slide, coords)
    wanted, unfitted = [], 0
    for tile in plain:
        try:
            wanted.append(stain.normalize_tile(tile))
        except stain.StainError:
            wanted.append(tile)
            unfitted += 1
    batches = [
        (b.tiles_BHW3.copy(), sum(part.unfitted for part in b.parts))
        for b in read(TileRequest(SlideRef("s", slide), MPP, normalize_tiles=True), coords)
    ]
    np.testing.assert_array_equal(np.concatenate([tiles for tiles, _ in batches]), np.stack(wanted))
    assert sum(count for _, count in batches) == unfitted > 0


def by_slide(batches: Iterator[TileBatch]) -> tuple[dict[str, NDArray[np.uint8]], dict[str, Exception], list[int]]:
    """The tiles of every slide put together from its parts, the errors, and the sizes of the batches."""
    tiles: dict[str, list[NDArray[np.uint8]]] = {}
    errors: dict[str, Exception] = {}
    sizes: list[int] = []
    for batch in batches:
        sizes.append(len(batch.tiles_BHW3))
        for part in batch.parts:
            if part.error is not None:
                errors[part.key] = part.error
            else:
                found = tiles.setdefault(part.key, [])
                assert sum(map(len, found)) == part.rows.start
                found.append(batch.tiles_BHW3[part.place].copy())
    return {key: np.concatenate(found) for key, found in tiles.items() if key not in errors}, errors, sizes


@pytest.mark.parametrize("shared", [True, False])
def test_slides_one_after_the_other_and_one_that_fails_among_them(readers: Readers, slide: Path, shared: bool):
    counts = {"a": 5, "b": 3 * BATCH + 1, "gone": 4 * BATCH, "c": 40, "d": 1}
    slides = [
        SlideTiles(
            key,
            TileRequest(SlideRef(key, slide.with_name("gone.svs") if key == "gone" else slide), MPP),
            corners(count, seed=k),
        )
        for k, (key, count) in enumerate(counts.items())
    ]
    tiles, errors, sizes = by_slide(readers.read(iter(slides), shared=shared))
    assert set(errors) == {"gone"}
    assert isinstance(errors["gone"], SlideError)
    assert set(tiles) == set(counts) - {"gone"}
    for key, _, coords_l0 in slides:
        if key != "gone":
            np.testing.assert_array_equal(tiles[key], one_by_one(slide, coords_l0))
    if shared:
        assert set(sizes[:-1]) == {BATCH}
    else:
        assert sizes[:1] == [5]


def test_slides_are_taken_only_as_there_is_room(slide: Path):
    taken: list[int] = []

    def endless() -> Iterator[SlideTiles]:
        while True:
            taken.append(len(taken))
            yield SlideTiles(f"{len(taken)}", TileRequest(SlideRef("s", slide), MPP), corners(BATCH))

    with ThreadReaders(1, BATCH, SIZE) as readers:
        next(readers.read(endless(), shared=True))
    assert len(taken) == 3


def test_runs_are_squares_of_the_grid_and_contain_every_tile_once():
    y, x = np.divmod(np.arange(8 * 12), 12)
    coords_l0 = np.stack([x * 448, y * 448], axis=1)
    runs = compact_runs(coords_l0)
    assert sorted(np.concatenate(runs).tolist()) == list(range(8 * 12))
    for run in runs:
        assert np.ptp(coords_l0[run], axis=0).tolist() == [3 * 448, 3 * 448]


def test_a_reader_that_dies_fails_its_slide_and_no_other(slide: Path):
    with ProcessReaders(2, BATCH, SIZE) as readers:
        batches = read_one(readers, TileRequest(SlideRef("s", slide), MPP), corners(20 * BATCH))
        next(batches)
        os.kill(readers._readers[0].process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"made\.svs.*died"):
            joined(batches)
        request = TileRequest(SlideRef("s", slide), MPP)
        np.testing.assert_array_equal(joined(read_one(readers, request, corners(60))), one_by_one(slide, corners(60)))
        processes = [reader.process for reader in readers._readers]
    assert not readers.alive
    assert all(process.poll() is not None for process in processes)


def test_readers_end_with_their_caller(slide: Path):
    code = (
        "import os, sys; from selfvitmil.data.readers import ProcessReaders; readers = ProcessReaders(2, 4, 16);"
        "print(*[reader.process.pid for reader in readers._readers], flush=True); os.kill(os.getpid(), 9)"
    )
    pids = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout.split()
    assert len(pids) == 2
    for pid in pids:
        for _ in range(500):
            state = Path(f"/proc/{pid}/stat")
            if not state.exists() or state.read_text().split(")")[1].split()[0] == "Z":
                break
            subprocess.run(["sleep", "0.02"], check=True)
        else:
            pytest.fail("a reader outlived its caller")


def test_readers_load_no_torch():
    code = "import sys, selfvitmil.data.readers; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
