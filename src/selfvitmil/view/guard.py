"""Who may ask, and what every answer carries: the viewer's outermost layer.

A browser on the same machine runs pages of strangers too. They must not reach the viewer under a name of their own (DNS
rebinding), not embed or read its answers, and find no script or style of theirs run in it. Where others on the network
can reach the viewer, they need the token that was printed when it was started.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import socket
import stat
import threading
from collections.abc import Collection
from html import escape
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from selfvitmil.errors import ConfigError

MAX_TARGET = 2048
"""Longest path and query that is looked at; ours are shorter than 100."""

MAX_HEADER_BYTES = 16 << 10

MIN_TOKEN = 20
"""Characters of a user's token: fewer could be guessed."""

FRAMED_BY = "http://localhost:* http://127.0.0.1:* https://localhost:* https://127.0.0.1:* vscode-webview:"
"""Pages that may show the viewer inside themselves where a notebook started it: notebooks on the same machine."""

CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "font-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-embedder-policy": "require-corp",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class UserTokens:
    """Tokens of several users, from a file with lines of a name and a token; a changed file holds from then on.

    Raises ConfigError where the file cannot be read, other users of the machine may read it, or a line is invalid.
    While the viewer runs, a file that became invalid changes nothing.
    """

    def __init__(self, file: Path):
        self.file = file
        self._lock = threading.Lock()
        self._state, self._tokens = self._read()

    def __call__(self) -> frozenset[str]:
        """Return the tokens that count now."""
        with self._lock:
            try:
                found = self.file.stat()
                if (found.st_mtime_ns, found.st_size) != self._state:
                    self._state, self._tokens = self._read()
            except (OSError, ConfigError):
                pass
            return self._tokens

    def _read(self) -> tuple[tuple[int, int], frozenset[str]]:
        try:
            found, text = self.file.stat(), self.file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise self._error("it cannot be read", f"{reason}. Check --tokens") from None
        if found.st_mode & (stat.S_IRGRP | stat.S_IROTH | stat.S_IWGRP | stat.S_IWOTH) and os.name == "posix":
            raise self._error("other users of this machine may read or change it", f"Run: chmod 600 {self.file.name}")
        lines = [line.split() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        how = f"A line is a name and a token of at least {MIN_TOKEN} letters, digits, - or _, with a space between"
        for number, words in enumerate(lines, 1):
            if len(words) != 2 or len(words[1]) < MIN_TOKEN or not words[1].replace("-", "").replace("_", "").isalnum():
                raise self._error(f"entry {number} is no name and token", how)
        tokens = frozenset(words[1] for words in lines)
        if len(tokens) != len(lines) or not tokens or not all(token.isascii() for token in tokens):
            raise self._error("it has no token, or one token twice", how)
        return (found.st_mtime_ns, found.st_size), tokens

    def _error(self, why: str, how: str) -> ConfigError:
        return ConfigError(f"{self.file.name}: not usable as tokens of users", why, how, code="user-tokens")


class Guard:
    """ASGI middleware; without a token everybody who reaches it by an allowed name may look."""

    def __init__(
        self,
        app: ASGIApp,
        hosts: HostNames,
        token: str | UserTokens | None = None,
        cookie: str = "selfvitmil",
        base_path: str = "/",
        framed: bool = False,
    ):
        """`framed`: notebooks on this machine may show the viewer inside themselves."""
        self.app = app
        self.hosts = hosts
        self.token = token
        self.headers = dict(HEADERS)
        if framed:
            del self.headers["x-frame-options"]
            policy = CONTENT_POLICY.replace("frame-ancestors 'none'", f"frame-ancestors {FRAMED_BY}")
            self.headers |= {"content-security-policy": policy, "cross-origin-resource-policy": "cross-origin"}
        self.cookie = cookie
        self.base_path = base_path
        """Path below which a proxy offers the viewer; the proxy may pass it on or take it away."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no websockets here
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name.lower() for name, _ in message["headers"]}
                extra = [
                    (name.encode(), value.encode()) for name, value in self.headers.items() if name.encode() not in own
                ]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        outer, scope = scope["path"], self._below_base(scope)
        refusal = self._refusal(scope)
        if refusal is not None:
            await _refuse(scope, send_marked, *refusal)
        elif f"{outer}/" == self.base_path:  # addresses of the page are relative, so it needs the slash
            await _redirect(send_marked, self._home(scope))
        elif self.token is not None and (brought := self._brought_token(scope)) is not None:
            await self._let_in(send_marked, brought)
        elif self.token is not None and not self._has_cookie(scope):
            await _refuse(scope, send_marked, 401, TOKEN_MISSING)
        else:
            await self.app(scope, receive, send_marked)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        names = _headers(scope, b"host")
        if len(names) != 1 or not self.hosts.allow(names[0]):
            return 403, NAME_REFUSED.format(host_of(names[0]) if len(names) == 1 else "")
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "This viewer can only be looked at"
        lengths = [length.strip() for length in _headers(scope, b"content-length")]
        if any(length != "0" for length in lengths) or _headers(scope, b"transfer-encoding"):
            return 413, "This viewer takes nothing in"
        if len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"]) > MAX_TARGET:
            return 414, "That address is too long"
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            return 431, "That is too much to ask with"
        if _headers(scope, b"sec-fetch-site") == ["cross-site"] and scope["path"] != "/":
            return 403, "Other sites may not use this viewer"
        return None

    def _below_base(self, scope: Scope) -> Scope:
        """Return the request with the path as the viewer knows it."""
        path, base = scope["path"], self.base_path
        if base == "/" or not f"{path}/".startswith(base):
            return scope
        inner = f"/{path[len(base) :]}"
        return {**scope, "path": inner, "raw_path": inner.encode("utf-8")}

    def _home(self, scope: Scope) -> str:
        query = scope["query_string"].decode("latin-1")
        return self.base_path + (f"?{query}" if query else "")

    def _brought_token(self, scope: Scope) -> str | None:
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        return given[0] if len(given) == 1 and self._is_token(given[0]) else None

    def _has_cookie(self, scope: Scope) -> bool:
        try:
            jar = SimpleCookie("; ".join(_headers(scope, b"cookie")))
        except CookieError:
            return False
        return self.cookie in jar and self._is_token(jar[self.cookie].value)

    def _is_token(self, given: str) -> bool:
        assert self.token is not None
        known = [self.token] if isinstance(self.token, str) else self.token()
        return max((hmac.compare_digest(given.encode(), token.encode()) for token in known), default=False)

    async def _let_in(self, send: Send, token: str) -> None:
        """Keep the token as a cookie and take it out of the address, where it could be copied along with a link."""
        cookie = f"{self.cookie}={token}; HttpOnly; SameSite=Strict; Path={self.base_path}"
        await _redirect(send, self.base_path, (b"set-cookie", cookie.encode()))


async def _redirect(send: Send, place: str, *headers: tuple[bytes, bytes]) -> None:
    all_headers = [(b"location", place.encode("latin-1")), *headers, (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 303, "headers": all_headers})
    await send({"type": "http.response.body", "body": b""})


class HostNames:
    """Names that the viewer may be asked by, whatever the port (a tunnel may change it).

    Bound to other than loopback it cannot know all its names: numeric addresses are allowed then too, which no name
    server can change.
    """

    def __init__(self, names: Collection[str], any_address: bool = False):
        self.names = frozenset(name.casefold() for name in names)
        self.any_address = any_address

    def allow(self, header: str) -> bool:
        """Whether a Host header is one of ours."""
        name = host_of(header)
        return name in self.names or (self.any_address and is_address(name))


LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


def names_for(host: str, further: Collection[str] = ()) -> HostNames:
    """What a viewer bound to `host` may be called; `further` names are a proxy's, or other ones of the machine."""
    if is_loopback(host):
        return HostNames({*LOOPBACK_NAMES, host, *further})
    machine = {socket.gethostname(), socket.getfqdn()}
    return HostNames({*LOOPBACK_NAMES, host, *machine, *further}, any_address=True)


def host_of(header: str) -> str:
    """The name in a Host header, without its port; empty where it is malformed."""
    text = header.strip().casefold()
    if text.startswith("["):
        name, closed, port = text[1:].partition("]")
        port = port.removeprefix(":") if port.startswith(":") or not port else "x"
        return name if closed and (port.isdecimal() or not port) else ""
    name, _, port = text.partition(":")
    return name.rstrip(".") if port.isdecimal() or not port else ""


def is_address(name: str) -> bool:
    """Whether it is a numeric address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server bound there."""
    if host.casefold() == "localhost":
        return True
    return is_address(host) and ipaddress.ip_address(host).is_loopback


def _headers(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]


TOKEN_MISSING = (
    "This viewer needs its token: open the whole address that `selfvitmil view` printed when it was started, up to its "
    "end (?token=...). Ask whoever started it. Cookies must be allowed, since the browser keeps the token in one."
)
NAME_REFUSED = (
    "This viewer does not answer under the name {!r}. Whoever starts it can allow that: selfvitmil view STUDY "
    "--allowed-host NAME. Behind a proxy the name is the one in the address of the browser."
)


async def _refuse(scope: Scope, send: Send, status: int, reason: str) -> None:
    """Answer with the reason: a page for people, JSON for programs."""
    for_people = any("text/html" in accepted for accepted in _headers(scope, b"accept"))
    body = (_page(status, reason) if for_people else json.dumps({"error": reason})).encode()
    headers = [
        (b"content-type", b"text/html; charset=utf-8" if for_people else b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    if status == 413:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _page(status: int, reason: str) -> str:
    title = {401: "The token is missing", 403: "Not allowed"}.get(status, "Not possible")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"></head>'
        f"<body><main><h1>{title}</h1><p>{escape(reason)}</p></main></body></html>"
    )
