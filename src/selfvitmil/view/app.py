"""The viewer's server: a Starlette application over one study, and the loop that runs it.

Every address but those below is unknown. What stands between the slashes is looked up (ids) or must be a plain number;
it never becomes part of a path. Pictures and documents are made in a few threads, each once however many ask for it at
the same time, and kept up to a number of bytes.

    /                                                the page
    /static/<name>                                   files of the package, in memory since the start
    /api/study.json                                  slides, models, predictions, failures
    /api/slides/<id>.json                            size, resolution, levels, maps
    /api/slides/<id>/thumbnail.jpg
    /api/slides/<id>/tiles/<level>/<column>_<row>.jpg
    /api/slides/<id>/maps/<model>.json
    /api/slides/<id>/lesions/<model>.json
    /api/slides/<id>/annotation.json
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from selfvitmil.errors import SelfVitMilError
from selfvitmil.view import tiles
from selfvitmil.view.files import StaticFile
from selfvitmil.view.guard import Guard, HostNames
from selfvitmil.view.index import State
from selfvitmil.view.study import ViewedSlide, ViewedStudy, to_json

TILE_BYTES = 64 << 20
THUMBNAIL_BYTES = 32 << 20
DOCUMENT_BYTES = 64 << 20
MAX_OPEN_SLIDES = 16
LOOK_AGAIN_S = 1.0
"""Whether a slide's file is still the same is asked at most this often."""
GONE = "The slide's file is no longer there. Was it moved, or is its drive not mounted?"
KEPT = {"cache-control": "private, max-age=600"}
ASKED_AGAIN = {"cache-control": "private, no-cache"}
NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


class NoSuchTile(Exception):
    """A tile that the slide does not have."""


class Kept:
    """Bytes by key, up to `max_bytes` of them; each made once, however many ask for it at the same time.

    Lives in the server's event loop, so nothing of it needs a lock; `make` runs in a thread.
    """

    def __init__(self, pool: ThreadPoolExecutor, max_bytes: int):
        self.pool = pool
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._kept: OrderedDict[Hashable, bytes] = OrderedDict()
        self._making: dict[Hashable, asyncio.Task[bytes]] = {}

    async def get(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        """What is kept under `key`, or what `make` returns; its exceptions reach everybody who waits."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        task = self._making.get(key)
        if task is None:
            task = self._making[key] = asyncio.create_task(self._make(key, make))
        return await asyncio.shield(task)  # one who hangs up takes nothing away from the others

    async def _make(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        try:
            content = await asyncio.get_running_loop().run_in_executor(self.pool, make)
        finally:
            del self._making[key]
        if len(content) <= self.max_bytes:
            self._kept[key] = content
            self.num_bytes += len(content)
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= len(self._kept.popitem(last=False)[1])
        return content


class Viewer:
    """Answers to requests."""

    def __init__(self, study: ViewedStudy, static: dict[str, StaticFile]):
        self.study = study
        self.static = static
        self.open_slides = tiles.OpenSlides(MAX_OPEN_SLIDES)
        self.pool = ThreadPoolExecutor(min(8, max(2, os.cpu_count() or 2)), "view")
        self.list_pool = ThreadPoolExecutor(2, "list")  # a list scrolled through must not hold up the slide looked at
        self.looking = ThreadPoolExecutor(2, "look")  # and what is kept already waits for nothing that is being made
        self.tiles = Kept(self.pool, TILE_BYTES)
        self.thumbnails = Kept(self.list_pool, THUMBNAIL_BYTES)
        self.documents = Kept(self.pool, DOCUMENT_BYTES)
        self._states: dict[str, tuple[float, State]] = {}

    def close(self) -> None:
        """Let go of slides and threads."""
        for pool in (self.pool, self.list_pool, self.looking):
            pool.shutdown(cancel_futures=True)
        self.open_slides.close()

    # ------------------------------------------------------------------------------------------------ pages

    async def page(self, request: Request) -> Response:
        return _answer(request, self.static["index.html"].content, "text/html; charset=utf-8", ASKED_AGAIN)

    async def file(self, request: Request) -> Response:
        file = self.static.get(request.path_params["name"])
        if file is None or request.path_params["name"] == "index.html":
            raise HTTPException(404, "There is no such file")
        return _answer(request, file.content, file.media_type, ASKED_AGAIN)

    # ------------------------------------------------------------------------------------------------ documents

    async def study_list(self, request: Request) -> Response:
        def make() -> bytes:
            return to_json(self.study.study_data()).encode()

        content = await asyncio.get_running_loop().run_in_executor(self.list_pool, make)
        return _answer(request, content, "application/json", ASKED_AGAIN)

    async def slide(self, request: Request) -> Response:
        slide, _ = await self._slide(request)

        def make() -> bytes:
            return to_json(self.study.slide_data(slide, self.open_slides.get(slide.source))).encode()

        content = await self._made(slide, asyncio.get_running_loop().run_in_executor(self.pool, make))
        return _answer(request, content, "application/json", ASKED_AGAIN)

    async def map(self, request: Request) -> Response:
        return await self._of_map(request, "map", lambda slide, model: self.study.heatmap_json(slide, model))

    async def lesions(self, request: Request) -> Response:
        return await self._of_map(
            request, "lesions", lambda slide, model: to_json(self.study.lesions_data(slide, model))
        )

    async def _of_map(self, request: Request, kind: str, make: Callable[[ViewedSlide, str], str]) -> Response:
        slide, model = self._known(request), request.path_params["model"]
        try:
            entry = await asyncio.get_running_loop().run_in_executor(
                self.looking, self.study.heatmap_entry, slide, model
            )
        except KeyError:
            raise HTTPException(404, "There is no such map") from None
        key = (kind, slide.id, model, entry.state)
        content = await self._made(slide, self.documents.get(key, lambda: make(slide, model).encode()))
        return _answer(request, content, "application/json", ASKED_AGAIN)

    async def annotation(self, request: Request) -> Response:
        slide = self._known(request)
        if slide.row.annotation is None:
            raise HTTPException(404, "The cohort names no annotation of this slide")

        def make() -> bytes:
            return to_json(self.study.annotation_data(slide)).encode()

        content = await self._made(slide, asyncio.get_running_loop().run_in_executor(self.pool, make))
        return _answer(request, content, "application/json", ASKED_AGAIN)

    # ------------------------------------------------------------------------------------------------ pictures

    async def thumbnail(self, request: Request) -> Response:
        slide, state = await self._slide(request)

        def make() -> bytes:
            return tiles.to_jpeg(tiles.read_thumbnail(self.open_slides.get(slide.source)))

        return await self._picture(request, slide, self.thumbnails, (slide.id, state), make)

    async def tile(self, request: Request) -> Response:
        slide, state = await self._slide(request)
        level, column, row = (_number(request.path_params[name]) for name in ("level", "column", "row"))

        def make() -> bytes:
            opened = self.open_slides.get(slide.source)
            if not opened.zoom.has_tile(level, column, row):
                raise NoSuchTile
            return tiles.to_jpeg(tiles.read_tile(opened, level, column, row))

        return await self._picture(request, slide, self.tiles, (slide.id, state, level, column, row), make)

    async def _picture(
        self, request: Request, slide: ViewedSlide, kept: Kept, key: tuple[Hashable, ...], make: Callable[[], bytes]
    ) -> Response:
        tag = _tag(repr(key).encode())
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers={**KEPT, "etag": tag})
        content = await self._made(slide, kept.get(key, make))
        return Response(content, media_type="image/jpeg", headers={**KEPT, "etag": tag})

    # ------------------------------------------------------------------------------------------------ looking up

    def _known(self, request: Request) -> ViewedSlide:
        slide = self.study.slides.get(request.path_params["slide"])
        if slide is None:
            raise HTTPException(404, "There is no such slide")
        return slide

    async def _slide(self, request: Request) -> tuple[ViewedSlide, State]:
        slide = self._known(request)
        looked, state = self._states.get(slide.id, (-math.inf, None))
        if state is None or time.monotonic() - looked >= LOOK_AGAIN_S:
            try:
                state = await asyncio.get_running_loop().run_in_executor(self.looking, slide.source.state)
            except OSError:
                raise HTTPException(410, f"{slide.name}: {GONE}") from None
            self._states[slide.id] = time.monotonic(), state
        return slide, state

    async def _made(self, slide: ViewedSlide, making: Awaitable[bytes]) -> bytes:
        try:
            return await making
        except NoSuchTile:
            raise HTTPException(404, "The slide has no such tile") from None
        except FileNotFoundError:
            raise HTTPException(410, f"{slide.name}: {GONE}") from None
        except SelfVitMilError as error:
            raise HTTPException(502, self.study.names.text(str(error))) from None


def make_app(
    study: ViewedStudy,
    static: dict[str, StaticFile],
    *,
    hosts: HostNames,
    token: str | None = None,
    cookie: str = "selfvitmil",
) -> ASGIApp:
    """The whole application, guarded."""
    viewer = Viewer(study, static)

    @asynccontextmanager
    async def lifespan(_app: Starlette):
        yield
        viewer.close()

    of_slide = "/api/slides/{slide}"
    routes = [
        Route("/", viewer.page),
        Route("/static/{name:path}", viewer.file),
        Route("/api/study.json", viewer.study_list),
        Route(f"{of_slide}.json", viewer.slide),
        Route(f"{of_slide}/thumbnail.jpg", viewer.thumbnail),
        Route(f"{of_slide}/tiles/{{level}}/{{column}}_{{row}}.jpg", viewer.tile),
        Route(f"{of_slide}/maps/{{model}}.json", viewer.map),
        Route(f"{of_slide}/lesions/{{model}}.json", viewer.lesions),
        Route(f"{of_slide}/annotation.json", viewer.annotation),
    ]
    handlers: dict[Any, Any] = {HTTPException: _refusal, Exception: _mishap}
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.viewer = viewer
    return Guard(app, hosts, token, cookie)


async def _refusal(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = "There is nothing under this address" if error.detail == "Not Found" else error.detail
    return JSONResponse({"error": words}, error.status_code, {"cache-control": "no-store"})


async def _mishap(_request: Request, error: Exception) -> Response:
    """For what nobody thought of: its name, and nothing that it says."""
    words = f"Something went wrong in the viewer ({type(error).__name__}); its terminal says more"
    return JSONResponse({"error": words}, 500, {"cache-control": "no-store"})


def _answer(request: Request, content: bytes, media_type: str, headers: dict[str, str]) -> Response:
    tag = _tag(content)
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={**headers, "etag": tag})
    return Response(content, media_type=media_type, headers={**headers, "etag": tag})


def _tag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:20]}"'


def _number(text: str) -> int:
    if not NUMBER.fullmatch(text):
        raise HTTPException(404, "The slide has no such tile")
    return int(text)
