"""The viewer's server: a Starlette application over one study, its socket and token, and the loop that runs it.

Every address but those below is unknown. What stands between the slashes is looked up (ids) or must be a plain number;
it never becomes part of a path. Pictures and documents are built in a few threads, each once however many ask for it at
the same time, and cached up to a number of bytes.

    /                                                the page
    /static/<name>                                   files of the package, in memory since the start
    /api/study.json                                  slides, models, predictions, failures
    /api/slides/<id>.json                            size, resolution, levels, models with a heatmap
    /api/slides/<id>/thumbnail.jpg
    /api/slides/<id>/tiles/<level>/<column>_<row>.jpg
    /api/slides/<id>/maps/<model>.json               heatmap
    /api/slides/<id>/lesions/<model>.json
    /api/slides/<id>/annotation.json
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import ipaddress
import math
import os
import re
import secrets
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Awaitable, Callable, Collection, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cachetools import LRUCache
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from selfvitmil.errors import ConfigError, SelfVitMilError
from selfvitmil.view import tiles
from selfvitmil.view.export import StaticFile, static_files
from selfvitmil.view.guard import MAX_HEADER_BYTES, Guard, HostNames, UserTokens, is_address, is_loopback, names_for
from selfvitmil.view.study import FileState, ViewedSlide, ViewedStudy, to_json

if TYPE_CHECKING:
    import uvicorn

T = TypeVar("T")

TILE_BYTES = 64 << 20
THUMBNAIL_BYTES = 32 << 20
DOCUMENT_BYTES = 64 << 20
MAX_OPEN_SLIDES = 16
MAX_CONNECTIONS = 4096
"""A browser keeps six open."""
LOOK_AGAIN_S = 1.0
"""Whether a slide's file or the list of slides has changed is checked at most this often."""
GONE = "The slide's file no longer exists. Was it moved, or is its drive not mounted?"
CACHED = {"cache-control": "private, max-age=600"}
REVALIDATED = {"cache-control": "private, no-cache"}
NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


class NoSuchTile(Exception):
    """A tile that the slide does not have."""


class BytesCache:
    """Least recently used bytes by key, at most `max_bytes`; each built once, however many ask at the same time.

    Lives in the server's event loop, so nothing of it needs a lock; `build` runs in a thread.
    """

    def __init__(self, pool: ThreadPoolExecutor, max_bytes: int):
        self.pool = pool
        self.stored: LRUCache[Hashable, bytes] = LRUCache(max_bytes, getsizeof=len)
        self._building: dict[Hashable, asyncio.Task[bytes]] = {}

    async def get(self, key: Hashable, build: Callable[[], bytes]) -> bytes:
        """Return what is cached under `key`, or what `build` returns; its exceptions reach everybody who waits."""
        if key in self.stored:
            return self.stored[key]
        task = self._building.get(key)
        if task is None:
            task = self._building[key] = asyncio.create_task(self._build(key, build))
        return await asyncio.shield(task)  # one who hangs up takes nothing away from the others

    async def _build(self, key: Hashable, build: Callable[[], bytes]) -> bytes:
        try:
            content = await asyncio.get_running_loop().run_in_executor(self.pool, build)
        finally:
            del self._building[key]
        with suppress(ValueError):  # larger than the whole cache
            self.stored[key] = content
        return content


class Viewer:
    """Answers requests."""

    def __init__(self, study: ViewedStudy, static: dict[str, StaticFile]):
        self.study = study
        self.static = static
        self.open_slides = tiles.OpenSlides(MAX_OPEN_SLIDES)
        self.pool = ThreadPoolExecutor(min(8, max(2, os.cpu_count() or 2)), "view")
        self.list_pool = ThreadPoolExecutor(2, "list")  # a list scrolled through must not hold up the slide looked at
        self.looking = ThreadPoolExecutor(2, "look")  # and what is cached already waits for nothing being built
        self.tiles = BytesCache(self.pool, TILE_BYTES)
        self.thumbnails = BytesCache(self.list_pool, THUMBNAIL_BYTES)
        self.documents = BytesCache(self.pool, DOCUMENT_BYTES)
        self._states: dict[str, tuple[float, FileState]] = {}
        self._list: tuple[float, asyncio.Future[bytes] | None] = (-math.inf, None)

    def close(self) -> None:
        """Close slides and threads."""
        for pool in (self.pool, self.list_pool, self.looking):
            pool.shutdown(cancel_futures=True)
        self.open_slides.close()

    # ------------------------------------------------------------------------------------------------ pages

    async def page(self, request: Request) -> Response:
        return _answer(request, self.static["index.html"].content, "text/html; charset=utf-8")

    async def file(self, request: Request) -> Response:
        file = self.static.get(request.path_params["name"])
        if file is None or request.path_params["name"] == "index.html":
            raise HTTPException(404, "There is no such file")
        return _answer(request, file.content, file.media_type)

    # ------------------------------------------------------------------------------------------------ documents

    async def study_list(self, request: Request) -> Response:
        """Built at most once in `LOOK_AGAIN_S`: of 10,000 slides it takes 65 ms, and everybody begins with it."""
        looked, building = self._list
        if building is None or time.monotonic() - looked >= LOOK_AGAIN_S or building.cancelled():
            building = asyncio.ensure_future(_in_thread(self.list_pool, self._build_list))
            self._list = time.monotonic(), building
        return _answer(request, await asyncio.shield(building), "application/json")

    def _build_list(self) -> bytes:
        return to_json(self.study.study_data()).encode()

    async def slide(self, request: Request) -> Response:
        slide, _ = await self._slide(request)

        def build() -> bytes:
            return to_json(self.study.slide_data(slide, self.open_slides.get(slide.ref))).encode()

        return _answer(request, await self._checked(slide, _in_thread(self.pool, build)), "application/json")

    async def heatmap(self, request: Request) -> Response:
        return await self._of_heatmap(request, "heatmap", self.study.heatmap_json)

    async def lesions(self, request: Request) -> Response:
        return await self._of_heatmap(
            request, "lesions", lambda slide, model: to_json(self.study.lesions_data(slide, model))
        )

    async def _of_heatmap(self, request: Request, kind: str, build: Callable[[ViewedSlide, str], str]) -> Response:
        slide, model = self._known(request), request.path_params["model"]
        try:
            entry = await _in_thread(self.looking, lambda: self.study.heatmap_entry(slide, model))
        except KeyError:
            raise HTTPException(404, "There is no such heatmap") from None
        key = (kind, slide.id, model, entry.state)
        content = await self._checked(slide, self.documents.get(key, lambda: build(slide, model).encode()))
        return _answer(request, content, "application/json")

    async def annotation(self, request: Request) -> Response:
        slide = self._known(request)
        if slide.row.annotation is None:
            raise HTTPException(404, "The cohort names no annotation of this slide")
        building = _in_thread(self.pool, lambda: to_json(self.study.annotation_data(slide)).encode())
        return _answer(request, await self._checked(slide, building), "application/json")

    # ------------------------------------------------------------------------------------------------ pictures

    async def thumbnail(self, request: Request) -> Response:
        slide, state = await self._slide(request)

        def build() -> bytes:
            return tiles.to_jpeg(tiles.read_thumbnail(self.open_slides.get(slide.ref)))

        return await self._picture(request, slide, self.thumbnails, (slide.id, state), build)

    async def tile(self, request: Request) -> Response:
        slide, state = await self._slide(request)
        level, column, row = (_number(request.path_params[name]) for name in ("level", "column", "row"))

        def build() -> bytes:
            opened = self.open_slides.get(slide.ref)
            if not opened.zoom.has_tile(level, column, row):
                raise NoSuchTile
            return tiles.to_jpeg(tiles.read_tile(opened, level, column, row))

        return await self._picture(request, slide, self.tiles, (slide.id, state, level, column, row), build)

    async def _picture(
        self,
        request: Request,
        slide: ViewedSlide,
        cache: BytesCache,
        key: tuple[Hashable, ...],
        build: Callable[[], bytes],
    ) -> Response:
        tag = _tag(repr(key).encode())
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers={**CACHED, "etag": tag})
        content = await self._checked(slide, cache.get(key, build))
        return Response(content, media_type="image/jpeg", headers={**CACHED, "etag": tag})

    # ------------------------------------------------------------------------------------------------ looking up

    def _known(self, request: Request) -> ViewedSlide:
        slide = self.study.slides.get(request.path_params["slide"])
        if slide is None:
            raise HTTPException(404, "There is no such slide")
        return slide

    async def _slide(self, request: Request) -> tuple[ViewedSlide, FileState]:
        slide = self._known(request)
        looked, state = self._states.get(slide.id, (-math.inf, None))
        if state is None or time.monotonic() - looked >= LOOK_AGAIN_S:
            try:
                state = await _in_thread(self.looking, lambda: tiles.state_of(os.stat(slide.ref.path)))
            except OSError:
                raise HTTPException(410, f"{slide.name}: {GONE}") from None
            self._states[slide.id] = time.monotonic(), state
        return slide, state

    async def _checked(self, slide: ViewedSlide, building: Awaitable[bytes]) -> bytes:
        """Return what was built; failures become answers."""
        try:
            return await building
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
    token: str | UserTokens | None = None,
    cookie: str = "selfvitmil",
    base_path: str = "/",
    framed: bool = False,
) -> ASGIApp:
    """Return the whole application behind its guard; `framed` lets notebooks of this machine show it in a cell."""
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
        Route(f"{of_slide}/maps/{{model}}.json", viewer.heatmap),
        Route(f"{of_slide}/lesions/{{model}}.json", viewer.lesions),
        Route(f"{of_slide}/annotation.json", viewer.annotation),
    ]
    handlers: dict[Any, Any] = {HTTPException: _refused, Exception: _unexpected}
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.viewer = viewer
    return Guard(app, hosts, token, cookie, base_path, framed)


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = "There is nothing under this address" if error.detail == "Not Found" else error.detail
    return JSONResponse({"error": reason}, error.status_code, {"cache-control": "no-store"})


async def _unexpected(_request: Request, error: Exception) -> Response:
    """Answer an unforeseen error with its name, and nothing that it says."""
    reason = f"Something went wrong in the viewer ({type(error).__name__}); its terminal says more"
    return JSONResponse({"error": reason}, 500, {"cache-control": "no-store"})


async def _in_thread(pool: ThreadPoolExecutor, build: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, build)


def _answer(request: Request, content: bytes, media_type: str) -> Response:
    tag = _tag(content)
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={**REVALIDATED, "etag": tag})
    return Response(content, media_type=media_type, headers={**REVALIDATED, "etag": tag})


def _tag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:20]}"'


def _number(text: str) -> int:
    if not NUMBER.fullmatch(text):
        raise HTTPException(404, "The slide has no such tile")
    return int(text)


# ---------------------------------------------------------------------------------------------------- running it


@dataclass(frozen=True)
class Address:
    """Where the viewer listens."""

    listener: socket.socket
    host: str
    port: int
    token: str | UserTokens | None
    allowed_hosts: tuple[str, ...] = ()
    """Further names under which browsers reach it."""
    base_path: str = "/"

    @property
    def url(self) -> str:
        """Return what to open in a browser; has the token where one is needed."""
        host = self.host
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}{self.base_path}{self._query}"

    @property
    def proxied(self) -> tuple[str, ...]:
        """Return what to open behind a proxy, by the names that were allowed."""
        return tuple(f"//{name}{self.base_path}{self._query}" for name in self.allowed_hosts)

    @property
    def _query(self) -> str:
        if isinstance(self.token, UserTokens):
            return "?token=TOKEN"  # theirs: none is printed
        return f"?token={self.token}" if self.token else ""


def listen(
    host: str,
    port: int,
    *,
    require_token: bool = False,
    allowed_hosts: Collection[str] = (),
    base_path: str = "/",
    tokens: Path | None = None,
) -> Address:
    """Take the port at once, so that one that is taken is an error before anything else is done.

    Who names further hosts lets others in, through a proxy or a name of the machine: they need the token, which is a
    new one, or those of the users in the file `tokens`.
    """
    base_path = _checked_base_path(base_path)
    for name in allowed_hosts:
        _check_host_name(name)
    if not 0 <= port <= 65_535:
        raise ConfigError(
            f"port {port} was asked for", "ports go from 0 to 65535", "Choose another --port", code="invalid-port"
        )
    needed = require_token or bool(allowed_hosts) or not is_loopback(host)
    token = UserTokens(tokens) if tokens else secrets.token_urlsafe(32) if needed else None
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, error) from None
    bound = listener.getsockname()
    if token is None and not ipaddress.ip_address(bound[0]).is_loopback:
        token = secrets.token_urlsafe(32)  # a localhost that is none
    return Address(listener, host, bound[1], token, tuple(allowed_hosts), base_path)


HOST_NAME = re.compile(r"[\w.-]+", re.ASCII)
BASE_PATH = re.compile(r"/(?:[\w.~-]+/)*", re.ASCII)


def _checked_base_path(path: str) -> str:
    """Return a base path with a slash at both ends. Raises ConfigError for one that is no path of plain words."""
    whole = f"/{path.strip('/')}/".replace("//", "/")
    if not BASE_PATH.fullmatch(whole) or ".." in whole.split("/"):
        raise ConfigError(
            f"--base-path {path}",
            "it is no path of letters, digits and -._~",
            "Give for instance /viewer",
            code="base-path",
        )
    return whole


def _check_host_name(name: str) -> None:
    if not HOST_NAME.fullmatch(name) and not is_address(name):
        raise ConfigError(
            f"--allowed-host {name}",
            "it is no name of a host",
            "Give the name alone, without https:// and without a port",
            code="allowed-host",
        )


def _cannot_listen(host: str, port: int, error: Exception) -> ConfigError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        remedy = "Choose another --port, or 0 for any"
        return ConfigError(
            f"port {port} is in use", "another viewer or program listens there", remedy, code="port-in-use"
        )
    if isinstance(error, OSError) and error.errno == errno.EACCES:
        return ConfigError(
            f"port {port} may not be used",
            "ports below 1024 are reserved",
            "Choose another --port",
            code="port-reserved",
        )
    reason = getattr(error, "strerror", None) or str(error)
    reason = f"{reason[:1].lower()}{reason[1:]}"
    return ConfigError(f"cannot listen on {host}, port {port}", reason, "Check --host and --port", code="cannot-listen")


def serve(
    study: ViewedStudy, address: Address, *, open_browser: bool = True, say: Callable[[str], None] = print
) -> None:
    """Serve until interrupted."""
    app = make_app(
        study,
        static_files(),
        hosts=names_for(address.host, address.allowed_hosts),
        token=address.token,
        base_path=address.base_path,
        cookie=f"selfvitmil-{address.port}",  # browsers keep one jar for all ports of a machine
    )
    address.listener.listen()  # a browser may ask as soon as the address is printed
    say(f"Open {address.url} in a browser; Ctrl-C ends the viewer.")
    for place in address.proxied:
        say(f"Behind your proxy: https:{place}")
    if isinstance(address.token, UserTokens):
        say(f"TOKEN is each user's own, from {address.token.file.name}.")
    elif open_browser and _has_screen():
        threading.Timer(0.5, webbrowser.open, [address.url]).start()
    allow_connections()
    try:
        make_server(app).run(sockets=[address.listener])
    except KeyboardInterrupt:  # the usual end of a viewer
        pass
    finally:
        address.listener.close()


class BackgroundViewer:
    """A viewer in a thread of this process, for notebooks: shown in a cell, until `close` or the end of the process."""

    def __init__(self, study: ViewedStudy, height_px: int = 640):
        address = listen("127.0.0.1", 0)
        address.listener.listen()  # a browser may ask before the thread has started
        app = make_app(study, static_files(), hosts=names_for(address.host), framed=True)
        self.url = address.url
        """For a browser on the same machine."""
        self.height_px = height_px
        self._address, self._server = address, make_server(app)
        options: dict[str, Any] = {"sockets": [address.listener]}
        self._thread = threading.Thread(target=self._server.run, kwargs=options, name="viewer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = True
        self._thread.join(10)
        self._address.listener.close()

    def __repr__(self) -> str:
        return f"The viewer is at {self.url}"

    def _repr_html_(self) -> str:
        return (
            f'<iframe src="{self.url}" title="selfvitmil viewer" width="100%" height="{self.height_px}" '
            f'style="border: 1px solid #8888" allowfullscreen></iframe>\n<p><a href="{self.url}" target="_blank" '
            'rel="noopener">Open in a window of its own</a></p>'
        )


def allow_connections() -> None:
    """Raise the limit of open files, often 1024 at first, as far as `MAX_CONNECTIONS` needs and the system allows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + 512
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS may allow less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def make_server(app: ASGIApp) -> uvicorn.Server:
    """Return the server, with bounded requests and no header that names it."""
    import uvicorn

    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
    )
    return uvicorn.Server(config)


def _has_screen() -> bool:
    """Return whether a browser has a screen; a text browser in the same terminal would be in the way."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
