"""Running the viewer: the socket, the token, the address to open."""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from selfvitmil.errors import ConfigError
from selfvitmil.view.app import make_app
from selfvitmil.view.files import static_files
from selfvitmil.view.guard import MAX_HEADER_BYTES, is_loopback, names_for
from selfvitmil.view.study import ViewedStudy

if TYPE_CHECKING:
    import uvicorn

MAX_CONNECTIONS = 512


@dataclass(frozen=True)
class Address:
    """Where the viewer listens."""

    listener: socket.socket
    host: str
    port: int
    token: str | None

    @property
    def url(self) -> str:
        """To be opened in a browser; holds the token where one is needed."""
        host = self.host
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}/" + (f"?token={self.token}" if self.token else "")


def listen(host: str, port: int, *, require_token: bool = False) -> Address:
    """Take the port at once, so that one that is taken is an error before anything else is done."""
    if not 0 <= port <= 65_535:
        raise ConfigError(f"port {port} was asked for", "ports go from 0 to 65535", "Choose another --port")
    token = secrets.token_urlsafe(32) if require_token or not is_loopback(host) else None
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
    return Address(listener, host, bound[1], token)


def _cannot_listen(host: str, port: int, error: Exception) -> ConfigError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} is in use", "another viewer or program listens there", "Choose another --port, or 0 for any"
        )
    if isinstance(error, OSError) and error.errno == errno.EACCES:
        return ConfigError(f"port {port} may not be used", "ports below 1024 are reserved", "Choose another --port")
    reason = getattr(error, "strerror", None) or str(error)
    return ConfigError(
        f"cannot listen on {host}, port {port}", f"{reason[:1].lower()}{reason[1:]}", "Check --host and --port"
    )


def serve(
    study: ViewedStudy, address: Address, *, open_browser: bool = True, say: Callable[[str], None] = print
) -> None:
    """Serve until interrupted."""
    app = make_app(
        study,
        static_files(),
        hosts=names_for(address.host),
        token=address.token,
        cookie=f"selfvitmil-{address.port}",  # browsers keep one jar for all ports of a machine
    )
    say(f"Open {address.url} in a browser; Ctrl-C ends the viewer.")
    if open_browser and _has_screen():
        threading.Timer(0.5, webbrowser.open, [address.url]).start()
    try:
        make_server(app).run(sockets=[address.listener])
    except KeyboardInterrupt:  # the usual end of a viewer
        pass
    finally:
        address.listener.close()


def make_server(app: ASGIApp) -> uvicorn.Server:
    """With bounded requests and no words about itself."""
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
    """Whether a browser could show anything; text browsers in the same terminal would only be in the way."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
