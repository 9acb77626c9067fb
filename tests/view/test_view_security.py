"""What the viewer must never do: each way to get more out of it than it shows, tried."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from helpers.viewer import STATIC, app_of, make_study, packaged_files, viewed
from selfvitmil.cohort import read_cohort
from selfvitmil.errors import ConfigError
from selfvitmil.pseudonyms import names_of
from selfvitmil.slides.synthetic import make_problem_files
from selfvitmil.store.failures import Failure, record_failures
from selfvitmil.view import export, guard, server, tiles
from selfvitmil.view import study as viewed_study

pytestmark = pytest.mark.usefixtures("impatient")

SECRET = b"nobody may read this"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        return json.loads(self.body)["error"]


def ask(
    app: Any,
    target: str,
    method: str = "GET",
    host: str | None = "127.0.0.1:8000",
    headers: dict[str, str] | None = None,
) -> Answer:
    """One request with exactly these bytes, as uvicorn would hand it on; clients of libraries tidy addresses up."""
    path, _, query = target.partition("?")
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    if host is not None:
        raw.append((b"host", host.encode("latin-1")))
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode(),
        "root_path": "", "headers": raw, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    try:
        asyncio.run(app(scope, receive, send))
    except BaseException:
        if not sent:  # Starlette answers 500 first and raises then, for the terminal
            raise
    told = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], told, b"".join(message.get("body", b"") for message in sent[1:]))


# Python tells which files are opened or listed, whoever does it.
_touched: list[str] | None = None


def _listen_in(event: str, arguments: tuple[Any, ...]) -> None:
    if _touched is not None and event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str | bytes):
        _touched.append(os.fsdecode(arguments[0]))


sys.addaudithook(_listen_in)


@contextmanager
def touched_files() -> Iterator[list[str]]:
    global _touched
    _touched = seen = []
    try:
        yield seen
    finally:
        _touched = None


@pytest.fixture
def study(tmp_path: Path, slide_file: Path) -> Path:
    (tmp_path / "secret.txt").write_bytes(SECRET)
    made = make_study(tmp_path / "study", slide_file)
    (made / "secret.txt").write_bytes(SECRET)
    return made


@pytest.fixture
def app(study: Path) -> Any:
    return app_of(study)[0]


def addresses(app: Any, name: str = "Meier_01") -> dict[str, str]:
    """Every kind of address, of the slide that has everything; `name` is what it is called there."""
    data = json.loads(ask(app, "/api/study.json").body)
    (slide,) = (row["id"] for row in data["slides"] if row["name"] == name)
    model = data["models"][0]["id"]
    return {
        "page": "/",
        "static": "/static/main.js",
        "study": "/api/study.json",
        "slide": f"/api/slides/{slide}.json",
        "thumbnail": f"/api/slides/{slide}/thumbnail.jpg",
        "tile": f"/api/slides/{slide}/tiles/11/0_0.jpg",
        "map": f"/api/slides/{slide}/maps/{model}.json",
        "lesions": f"/api/slides/{slide}/lesions/{model}.json",
        "annotation": f"/api/slides/{slide}/annotation.json",
    }


# ---------------------------------------------------------------------------------------------------- paths

STEPS = [
    "../",
    "..%2f",
    "%2e%2e/",
    "%2e%2e%2f",
    "..%252f",
    "%252e%252e%252f",
    "..\\",
    "..%5c",
    "....//",
    "..;/",
    "..%c0%af",
]
WAYS = [f"{step * count}{name}" for step in STEPS for count in (1, 3, 9) for name in ("secret.txt", "etc/passwd")]
WAYS += [
    "/etc/passwd",
    "//etc/passwd",
    "%2fetc%2fpasswd",
    "file:///etc/passwd",
    "file:%2f%2f%2fetc/passwd",
    "~/.ssh/id",
]
WAYS += ["C:\\Windows\\win.ini", "C:%5cWindows%5cwin.ini", "\\\\host\\share", "secret.txt%00.js", "main.js%00", "%00"]
WAYS += [
    "./main.js",
    "vendor/../main.js",
    "vendor/..%2fmain.js",
    "index.html",
    "",
    ".",
    "..",
    "*",
    "main.js/",
    "MAIN.JS",
]


def test_no_spelling_of_a_path_reaches_a_file(app: Any, study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewed_study, "REFRESH_S", 3600.0)  # a busy machine takes longer than that while
    known = addresses(app)
    slide = known["slide"].removesuffix(".json")
    starts = [
        "/",
        "/static/",
        "/static/vendor/",
        "/api/",
        "/api/slides/",
        f"{slide}/",
        f"{slide}/tiles/",
        f"{slide}/tiles/11/",
    ]
    starts += [f"{slide}/maps/", f"{slide}/lesions/"]
    ask(app, "/api/study.json")  # lists the maps, which is then not done again for a while
    with touched_files() as touched:
        for start in starts:
            for way in WAYS:
                for end in ("", ".json", ".jpg"):
                    target = f"{start}{way}{end}"
                    answer = ask(app, target)
                    if target in ("/", f"{slide}/.json"):
                        continue
                    assert answer.status == 404, target
                    assert SECRET not in answer.body
                    assert b"root:" not in answer.body
    assert touched == []


def test_names_in_the_study_are_no_ids(app: Any) -> None:
    """Neither the name of a slide or model nor its file is understood, only what the list says."""
    for slide in (
        "Meier_01",
        "Meier_01.svs",
        "slides/Meier_01",
        "0",
        "-1",
        "s0",
        "S" * 13,
        "sfffffffffffff",
        "é",
        "%F0%9F",
    ):
        for rest in (".json", "/thumbnail.jpg", "/tiles/11/0_0.jpg", "/annotation.json", "/maps/vit_dsmil.json"):
            assert ask(app, f"/api/slides/{slide}{rest}").status == 404
    known = addresses(app)["slide"].removesuffix(".json")
    for model in ("vit_dsmil", "mffffffffffff", "..", "Meier_01"):
        for kind in ("maps", "lesions"):
            assert ask(app, f"{known}/{kind}/{model}.json").status == 404


@pytest.mark.parametrize(
    "level", ["-1", "12", "99999999999999999999", "1e1", "0x1", "١", "+1", "01", "1.0", "%20", "nan", "8 "]
)
def test_levels_that_cannot_be_cost_nothing(app: Any, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setattr(tiles, "read_tile", lambda *_: pytest.fail("work was done"))
    tile = addresses(app)["tile"]
    assert ask(app, tile.replace("/11/", f"/{level}/")).status == 404


@pytest.mark.parametrize(
    "place", ["6_0", "0_5", "-1_0", "0_-1", "1000000000_0", "9" * 400 + "_0", "0_0_0", "0", "0_", "a_b"]
)
def test_tiles_that_cannot_be_cost_nothing(app: Any, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(tiles, "read_tile", lambda *_: pytest.fail("work was done"))
    assert ask(app, addresses(app)["tile"].replace("0_0", place)).status == 404


def test_links_out_of_the_study_are_not_followed(study: Path, tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    own = study / "maps/vit_dsmil/Meier_01.h5"
    shutil.move(own, outside / "Meier_01.h5")
    own.symlink_to(outside / "Meier_01.h5")
    shutil.copytree(study / "maps/vit_abmil", outside / "model")
    (study / "maps/linked").symlink_to(outside / "model")
    (study / "maps/vit_abmil/lesions.csv").symlink_to(outside / "lesions.csv")
    (outside / "lesions.csv").write_text("slide\nother\n")
    (study / "failures.csv").unlink()
    (study / "failures.csv").symlink_to(tmp_path / "secret.txt")
    app, _ = app_of(study)
    data = json.loads(ask(app, "/api/study.json").body)
    assert SECRET.decode() not in json.dumps(data)
    assert [model["name"] for model in data["models"]] == ["vit_abmil", "vit_dsmil"]
    ids = {model["name"]: model["id"] for model in data["models"]}
    first, second, *_ = data["slides"]
    assert list(first["predictions"]) == [ids["vit_abmil"]]
    assert second["predictions"][ids["vit_abmil"]]["lesions"] is None
    assert ask(app, f"/api/slides/{first['id']}/maps/{ids['vit_dsmil']}.json").status == 404
    assert ["leads out of the study" in failure["reason"] for failure in data["failures"]] == [True]


def test_links_inside_the_study_and_slides_that_the_cohort_links_are_followed(study: Path, tmp_path: Path) -> None:
    shutil.move(study / "slides/Meier_01.svs", tmp_path / "archive.svs")
    (study / "slides/Meier_01.svs").symlink_to(tmp_path / "archive.svs")
    (study / "maps/vit_dsmil/unlabelled.h5").symlink_to(study / "maps/vit_dsmil/Meier_01.h5")
    app, shown = app_of(study)
    assert ask(app, addresses(app)["tile"]).status == 200
    assert len(shown.models_of(shown.slides[shown.id_of("unlabelled")])) == 1


def test_there_is_no_way_to_labels_and_macros(app: Any) -> None:
    slide = addresses(app)["slide"].removesuffix(".json")
    for name in ("label", "macro", "associated/label", "thumbnail", "properties"):
        for end in ("", ".jpg", ".png", ".json"):
            if (name, end) != ("thumbnail", ".jpg"):
                assert ask(app, f"{slide}/{name}{end}").status == 404
    source = "".join(Path(module.__file__ or "").read_text() for module in (tiles, server, viewed_study))
    assert "associated_images" not in source


# ---------------------------------------------------------------------------------------------------- who may ask


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8000", "localhost", "LOCALHOST:99", "[::1]:8000", "[::1]", "localhost."]
)
def test_our_own_names_are_answered(app: Any, host: str) -> None:
    assert ask(app, "/", host=host).status == 200


@pytest.mark.parametrize(
    "host",
    [
        None, "", "evil.example", "127.0.0.1.evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.5",
        "127.0.0.1:8000@evil.example", "evil.example#127.0.0.1", "127.0.0.1:x", "[::1", "[::1]x", "::1", "0.0.0.0",
        "127.1", "localhost, evil.example", "\xa0localhost\xa0x",
    ],
)  # fmt: skip
def test_other_names_are_not(app: Any, host: str | None) -> None:
    for target in ("/", "/api/study.json"):
        answer = ask(app, target, host=host)
        assert answer.status == 403
        assert b"Meier" not in answer.body


def test_two_host_headers_are_one_too_many(app: Any) -> None:
    assert ask(app, "/", headers={"host": "evil.example"}).status == 403
    assert ask(app, "/", headers={"host": "127.0.0.1"}).status == 403


def test_a_network_address_is_answered_by_name_or_in_figures_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "workstation")
    monkeypatch.setattr(socket, "getfqdn", lambda: "workstation.hospital.example")
    hosts = guard.names_for("0.0.0.0")
    for name in ("workstation:8000", "workstation.hospital.example", "10.1.2.3:8000", "[fe80::1]:8000", "localhost"):
        assert hosts.allow(name)
    for name in ("evil.example", "10.1.2.3.evil.example", "workstation.evil.example", "10.1.2.3:80:80"):
        assert not hosts.allow(name)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [(host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost", "LocalHost")]
    + [(host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "")],
)
def test_what_counts_as_this_machine(host: str, loopback: bool) -> None:
    assert guard.is_loopback(host) == loopback


def test_beyond_this_machine_a_token_is_always_asked_for() -> None:
    seen: set[str] = set()
    for host, needs, wanted in (("127.0.0.1", False, False), ("0.0.0.0", True, False), ("127.0.0.1", True, True)):
        address = server.listen(host, 0, require_token=wanted)
        with address.listener:
            assert (address.token is not None) == needs
            if address.token is not None:
                assert len(address.token) >= 40
                assert address.url.endswith(f"?token={address.token}")
                seen.add(address.token)
    assert len(seen) == 2


def test_without_the_token_nothing_is_told(study: Path) -> None:
    known = addresses(app_of(study)[0])
    app, _ = app_of(study, token="right-token", cookie="selfvitmil-8000")
    tries = [{}, {"cookie": "selfvitmil-8000=wrong"}, {"cookie": "other=right-token"}, {"cookie": "selfvitmil-8000="}]
    tries += [
        {"authorization": "Bearer right-token"},
        {"cookie": "a=\x01;;;=="},
        {"cookie": "selfvitmil-8000=right-token2"},
    ]
    targets = [*known.values(), "/nowhere", "/static/nothing.js", "/?token=", "/?token=wrong", "/?Token=right-token"]
    targets += ["/?token=right-token&token=x", "/?" + "&".join(f"a{k}=1" for k in range(99))]
    for target in targets:
        for headers in tries:
            answer = ask(app, target, headers=headers)
            assert answer.status == 401, (target, headers)
            assert "selfvitmil view" in answer.error
            assert "set-cookie" not in answer.headers


def test_the_token_becomes_a_cookie_and_leaves_the_address(study: Path) -> None:
    app, _ = app_of(study, token="right-token", cookie="selfvitmil-8000")
    answer = ask(app, "/?token=right-token")
    assert (answer.status, answer.headers["location"]) == (303, "/")
    parts = [part.strip() for part in answer.headers["set-cookie"].split(";")]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(parts)
    for target in addresses(app_of(study)[0]).values():
        assert ask(app, target, headers={"cookie": f"a=b; {parts[0]}"}).status == 200
    assert ask(app, "/", host="evil.example", headers={"cookie": parts[0]}).status == 403


@pytest.mark.parametrize("passed_on", [True, False])
def test_a_proxy_may_pass_its_path_on_or_take_it_away(study: Path, passed_on: bool) -> None:
    hosts = guard.names_for("127.0.0.1", ["pathology.example"])
    app, _ = app_of(study, token="right-token", cookie="c", hosts=hosts, base_path="/slides/viewer/")
    base = "/slides/viewer" if passed_on else ""
    entered = ask(app, f"{base}/?token=right-token", host="pathology.example")
    assert (entered.status, entered.headers["location"]) == (303, "/slides/viewer/")
    parts = [part.strip() for part in entered.headers["set-cookie"].split(";")]
    assert "Path=/slides/viewer/" in parts  # not sent to what else the proxy offers
    for target in addresses(app_of(study)[0]).values():
        answer = ask(app, f"{base}{target}", host="pathology.example", headers={"cookie": parts[0]})
        assert answer.status == 200, target
        assert ask(app, f"{base}{target}", host="pathology.example").status == 401
        assert ask(app, f"{base}{target}", host="evil.example", headers={"cookie": parts[0]}).status == 403


def test_base_path_without_its_slash_leads_to_the_page(study: Path) -> None:
    app, _ = app_of(study, base_path="/viewer/")
    answer = ask(app, "/viewer?token=x")
    assert (answer.status, answer.headers["location"]) == (303, "/viewer/?token=x")
    assert ask(app, "/viewers").status == 404


def test_people_get_a_page_that_says_what_to_do(study: Path) -> None:
    app, _ = app_of(study, token="right-token")
    asked = {"accept": "text/html,application/xhtml+xml"}
    missing = ask(app, "/", headers=asked)
    assert (missing.status, missing.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert b"open the whole address" in missing.body
    other = ask(app, "/", host="<b>.example", headers=asked)
    assert other.status == 403
    assert b"--allowed-host" in other.body
    assert b"<b>" not in other.body
    assert b"&lt;b&gt;.example" in other.body


@pytest.mark.parametrize("name", ["https://a.example", "a.example:443", "", "a b", "a/b"])
def test_allowed_hosts_are_plain_names(name: str) -> None:
    with pytest.raises(ConfigError) as found:
        server.listen("127.0.0.1", 0, allowed_hosts=[name])
    assert found.value.code == "allowed-host"


@pytest.mark.parametrize("path", ["/a b", "/..", "/a/../b", "/a?b", "/ä"])
def test_base_paths_are_plain_paths(path: str) -> None:
    with pytest.raises(ConfigError) as found:
        server.listen("127.0.0.1", 0, base_path=path)
    assert found.value.code == "base-path"


def test_who_lets_others_in_by_a_name_needs_a_token() -> None:
    address = server.listen("127.0.0.1", 0, allowed_hosts=["a.example"], base_path="viewer")
    with address.listener:
        assert address.token is not None
        assert address.base_path == "/viewer/"
        assert address.url == f"http://127.0.0.1:{address.port}/viewer/?token={address.token}"
        assert address.proxied == (f"//a.example/viewer/?token={address.token}",)


def tokens_file(folder: Path, *lines: str, mode: int = 0o600) -> Path:
    file = folder / "tokens.txt"
    file.write_text("# who may look\n\n" + "\n".join(lines), encoding="utf-8")
    file.chmod(mode)
    return file


def test_every_user_has_a_token_until_it_is_taken_away(study: Path, tmp_path: Path) -> None:
    anna, bert = "anna " + "a" * 24, "bert " + "b-_2" * 6
    file = tokens_file(tmp_path, anna, bert)
    address = server.listen("127.0.0.1", 0, allowed_hosts=["a.example"], tokens=file)
    address.listener.close()
    assert "aaaa" not in address.url + address.proxied[0]  # printed, and kept in the logs of services
    app, _ = app_of(study, token=address.token, cookie="c")
    cookies = []
    for token in ("a" * 24, "b-_2" * 6):
        entered = ask(app, f"/?token={token}")
        assert entered.status == 303
        cookies.append({"cookie": entered.headers["set-cookie"].split(";")[0]})
        assert ask(app, "/api/study.json", headers=cookies[-1]).status == 200
    assert ask(app, "/?token=anna").status == 401
    tokens_file(tmp_path, anna)
    assert [ask(app, "/api/study.json", headers=each).status for each in cookies] == [200, 401]
    file.write_text("not a token", encoding="utf-8")  # while it is being edited, say
    assert [ask(app, "/api/study.json", headers=each).status for each in cookies] == [200, 401]


@pytest.mark.parametrize(
    ("lines", "mode"),
    [
        (["anna short"], 0o600),
        (["a" * 30], 0o600),
        (["anna " + "a;" * 20], 0o600),
        (["anna " + "é" * 30], 0o600),
        (["anna " + "a" * 30, "bert " + "a" * 30], 0o600),
        ([], 0o600),
        (["anna " + "a" * 30], 0o644),
        (["anna " + "a" * 30], 0o620),
    ],
)
def test_tokens_that_are_not_safe_are_refused(tmp_path: Path, lines: list[str], mode: int) -> None:
    with pytest.raises(ConfigError) as found:
        server.listen("127.0.0.1", 0, tokens=tokens_file(tmp_path, *lines, mode=mode))
    assert found.value.code == "user-tokens"
    with pytest.raises(ConfigError):
        server.listen("127.0.0.1", 0, tokens=tmp_path / "none.txt")


def test_only_a_viewer_that_a_notebook_started_may_be_framed(study: Path) -> None:
    for framed in (False, True):
        app, _ = app_of(study, framed=framed)
        headers = ask(app, "/").headers
        assert ("x-frame-options" in headers) != framed
        allowed = headers["content-security-policy"].partition("frame-ancestors ")[2]
        assert ("http://localhost:*" in allowed) == framed
        assert (allowed == "'none'") != framed
        assert "script-src 'self';" in headers["content-security-policy"]


def test_tokens_are_compared_in_constant_time(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(guard.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or False)
    app, _ = app_of(study, token="right-token")
    ask(app, "/?token=right-token")
    ask(app, "/", headers={"cookie": "selfvitmil=right-token"})
    assert compared == [(b"right-token", b"right-token")] * 2


def test_other_sites_may_link_to_the_page_and_no_more(app: Any) -> None:
    known = addresses(app)
    for kind, target in known.items():
        answer = ask(app, target, headers={"sec-fetch-site": "cross-site"})
        assert answer.status == (200 if kind == "page" else 403)
        assert ask(app, target, headers={"sec-fetch-site": "same-origin"}).status == 200


# ---------------------------------------------------------------------------------------------------- every answer

POLICY = {
    "default-src": ["'none'"],
    "script-src": ["'self'"],
    "style-src": ["'self'"],
    "img-src": ["'self'", "data:", "blob:"],
    "connect-src": ["'self'"],
    "base-uri": ["'none'"],
    "form-action": ["'none'"],
    "frame-ancestors": ["'none'"],
}


def check_headers(answer: Answer) -> None:
    rules = [rule.split() for rule in answer.headers["content-security-policy"].split(";")]
    policy = {name: sources for name, *sources in rules}
    assert POLICY.items() <= policy.items()
    assert not any(word in str(policy) for word in ("unsafe", "http", "*", "'strict-dynamic'"))
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cross-origin-opener-policy"] == "same-origin"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in answer.headers
    assert "server" not in answer.headers
    if answer.status >= 400:
        assert answer.error
        assert answer.headers["cache-control"] == "no-store"


def test_every_answer_carries_the_headers(app: Any, study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = addresses(app)
    answers = [ask(app, target) for target in known.values()]
    assert {answer.status for answer in answers} == {200}
    etag = answers[0].headers["etag"]
    answers += [ask(app, "/", headers={"if-none-match": etag}), ask(app, "/nowhere"), ask(app, "/", method="POST")]
    answers += [
        ask(app, "/", host="evil.example"),
        ask(app, "/", headers={"content-length": "5"}),
        ask(app, "/" + "x" * 3000),
    ]
    guarded, _ = app_of(study, token="t")
    answers += [ask(guarded, "/"), ask(guarded, "/?token=t")]
    (study / "slides/Meier_01.svs").unlink()
    answers.append(ask(app, known["tile"]))
    monkeypatch.setattr(server, "to_json", lambda _: 1 / 0)
    answers.append(ask(app, "/api/study.json"))
    assert [answer.status for answer in answers[9:]] == [304, 404, 405, 403, 413, 414, 401, 303, 410, 500]
    for answer in answers:
        check_headers(answer)
    assert "division" not in answers[-1].error


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get"])
def test_it_can_only_be_looked_at(app: Any, method: str) -> None:
    for target in addresses(app).values():
        assert ask(app, target, method=method).status == 405


def test_heads_are_told_like_the_whole(app: Any) -> None:
    for target in addresses(app).values():
        assert ask(app, target, method="HEAD").headers["etag"] == ask(app, target).headers["etag"]


def test_nothing_is_taken_in(app: Any) -> None:
    for headers in (
        {"content-length": "1"},
        {"content-length": "99999999999"},
        {"transfer-encoding": "chunked"},
        {"content-length": "x"},
    ):
        assert ask(app, "/", headers=headers).status == 413
    assert ask(app, "/", headers={"content-length": "0"}).status == 200
    assert ask(app, f"/?{'a' * 5000}").status == 414
    assert ask(app, "/", headers={"cookie": "a" * 20_000}).status == 431


# ---------------------------------------------------------------------------------------------------- what leaks


def test_messages_name_no_folder(app: Any, study: Path, tmp_path: Path) -> None:
    known = addresses(app)
    made = make_problem_files(tmp_path / "hostile")
    slide, map_file = study / "slides/Meier_01.svs", next(study.glob("maps/vit_abmil/Meier_01.h5"))
    said: list[str] = []
    for content in (made["truncated"].read_bytes(), made["text"].read_bytes(), b"", slide.read_bytes()[:200]):
        slide.write_bytes(content)
        said += [ask(app, known[kind]).error for kind in ("slide", "thumbnail", "tile")]
    slide.unlink()
    said += [ask(app, known[kind]).error for kind in ("slide", "thumbnail", "tile")]
    (study / "Meier_01.xml").write_text("<broken")
    said.append(ask(app, known["annotation"]).error)
    (study / "Meier_01.xml").unlink()
    said.append(ask(app, known["annotation"]).error)
    content = map_file.read_bytes()
    for damage in (b"", content[:3000], None):
        map_file.unlink() if damage is None else map_file.write_bytes(damage)
        said += [ask(app, known[kind]).error for kind in ("map", "lesions")]
    for text in said:
        assert str(tmp_path) not in text
        assert not re.search(r"(?<![\w<])/\w+/", text), text


def test_pseudonyms_hide_every_name(study: Path, tmp_path: Path) -> None:
    names = names_of(study, read_cohort(study / "cohort.csv"), pseudonyms=True)
    app, shown = app_of(study, names)
    known = addresses(app, names.slide("Meier_01"))
    texts = [ask(app, target).body.decode("utf-8", "replace") for target in known.values()]
    (study / "slides/Meier_01.svs").write_bytes(b"")
    texts += [ask(app, known[kind]).error for kind in ("slide", "tile")]
    (study / "slides/Meier_01.svs").unlink()
    texts += [ask(app, known[kind]).error for kind in ("slide", "tile")]
    assert any("no tissue" in text for text in texts)
    for text in texts:
        for name in ("Meier", "Anna", "Bert", "Carl", "unlabelled"):
            assert name not in text, text[:500]
    plain = viewed(study)
    assert not set(shown.slides) & set(plain.slides)  # a hash of a name could be guessed


def test_pseudonyms_hide_every_name_in_an_exported_folder(study: Path, tmp_path: Path) -> None:
    packaged_files()
    out = tmp_path / "out"
    names = names_of(study, read_cohort(study / "cohort.csv"), pseudonyms=True)
    chosen = ["Meier_01", "other", "unlabelled"]
    assert export.write_folder(viewed(study, names), out, slides=chosen, say=lambda _: None).num_slides == 3
    for path in out.rglob("*"):
        if path.is_file() and not path.is_relative_to(out / "static"):
            text = path.relative_to(out).as_posix().encode() + path.read_bytes()
            for name in (b"Meier", b"Anna", b"Bert", b"unlabelled", b"study/"):
                assert name not in text, path


def test_pseudonyms_hide_the_order_of_the_cohort(study: Path, tmp_path: Path) -> None:
    packaged_files()
    true_names = ["Meier_01", "other", "unlabelled", "missing"]
    key = [f"slide,{name},slide-00{9 - k}" for k, name in enumerate(true_names)]
    (study / "pseudonyms.csv").write_text("\n".join(["kind,name,pseudonym", *key]) + "\n")
    failures = [Failure(name, "check", "it is small", "Look at it") for name in true_names]
    record_failures(study, "check", true_names, failures)
    (study / "maps/vit_dsmil/other.h5").write_bytes(b"damaged")
    names = names_of(study, read_cohort(study / "cohort.csv"), pseudonyms=True)
    shown = viewed(study, names)
    data = shown.study_data()
    assert [row["name"] for row in data["slides"]] == ["slide-006", "slide-007", "slide-008", "slide-009"]
    assert len(data["failures"]) == 6
    assert [one["name"] for one in data["failures"]] == sorted(one["name"] for one in data["failures"])
    out = tmp_path / "out"
    export.write_folder(shown, out, slides=true_names[:3], say=lambda _: None)
    written = json.loads((out / "data/study.js").read_text().removeprefix("window.SELFVITMIL_DATA = ").rstrip(";\n"))
    ids = [row["id"] for row in written["study"]["slides"]]
    assert [row["name"] for row in written["study"]["slides"]] == ["slide-007", "slide-008", "slide-009"]
    for files in ([out / f"data/{id}.js" for id in ids], [out / f"thumbnails/{id}.jpg" for id in ids]):
        assert files == sorted(files, key=lambda path: path.stat().st_mtime_ns)  # files are older and younger too
    assert [row["name"] for row in viewed(study).study_data()["slides"]] == true_names  # who sees names sees the table


def test_our_page_asks_nobody_else_and_runs_nothing_inline() -> None:
    packaged = packaged_files()
    page = packaged["index.html"].content.decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)", page)
    assert not re.search(r"<[^!>]*\s(?:on\w+|style)\s*=", page)
    assert "<style" not in page
    assert "javascript:" not in page
    for name, file in packaged.items():
        if not name.startswith("vendor/") and name.rpartition(".")[2] in ("html", "js", "css", "svg"):
            text = file.content.decode().replace("http://www.w3.org/", "")
            assert not re.search(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", text), name


# ---------------------------------------------------------------------------------------------------- over the wire


@pytest.fixture
def port(study: Path) -> Iterator[int]:
    """A running server, as the command starts it."""
    address = server.listen("127.0.0.1", 0)
    app, _ = app_of(study)
    running = server.make_server(app)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [address.listener]}, daemon=True)
    thread.start()
    until = time.monotonic() + 10
    while not running.started and time.monotonic() < until:
        time.sleep(0.01)
    yield address.port
    running.should_exit = True
    thread.join(10)
    address.listener.close()


def exchange(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(request)
        received = b""
        try:
            while block := connection.recv(65536):
                received += block
        except ConnectionResetError:
            pass
        return received


def test_the_running_server_keeps_to_all_that(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", "/api/study.json")
    answer = connection.getresponse()
    assert answer.status == 200
    assert len(json.loads(answer.read())["slides"]) == 4
    connection.close()
    end = b"Host: 127.0.0.1\r\nConnection: close\r\n\r\n"
    for target in (b"/static/../../secret.txt", b"/../../../etc/passwd", b"/static/%2e%2e/secret.txt", b"//etc/passwd"):
        assert exchange(port, b"GET " + target + b" HTTP/1.1\r\n" + end).startswith(b"HTTP/1.1 404")
    assert exchange(
        port, b"GET http://127.0.0.1/ HTTP/1.1\r\n" + end.replace(b"127.0.0.1", b"evil.example")
    ).startswith(b"HTTP/1.1 403")
    assert exchange(port, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")[9:12] in (b"400", b"403")
    many = b"".join(b"X-%d: %s\r\n" % (k, b"y" * 900) for k in range(100))
    assert exchange(port, b"GET / HTTP/1.1\r\n" + many + end)[9:12] in (b"400", b"431", b"")
    assert exchange(port, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n" + end)[9:12] in (b"400", b"414", b"")
    assert exchange(port, b"POST / HTTP/1.1\r\nContent-Length: 10\r\n" + end + b"0123456789").startswith(
        b"HTTP/1.1 405"
    )
    assert exchange(port, b"GET / HTTP/1.1\r\nContent-Length: 10\r\n" + end + b"0123456789").startswith(b"HTTP/1.1 413")
    assert exchange(port, b"\x16\x03\x01 no http at all\r\n\r\n")[9:12] == b"400"
    assert exchange(port, b"GET / HTTP/1.1\r\n" + end).startswith(b"HTTP/1.1 200")  # and is still there


def test_hundreds_of_browsers_keep_their_connections(port: int) -> None:
    """500 viewers look at the same time; each browser keeps several connections open."""
    server.allow_connections()
    with ExitStack() as stack:
        for _ in range(700):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        end = b"Host: 127.0.0.1\r\nConnection: close\r\n\r\n"
        assert exchange(port, b"GET / HTTP/1.1\r\n" + end).startswith(b"HTTP/1.1 200")


def test_the_limit_of_open_files_is_raised_as_far_as_needed() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
        server.allow_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(server.MAX_CONNECTIONS + 512, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_static_files_are_a_fixed_list(app: Any) -> None:
    for name in STATIC:
        assert ask(app, f"/static/{name}").status == (404 if name == "index.html" else 200)
