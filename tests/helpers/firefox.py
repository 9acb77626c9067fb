"""A headless Firefox, driven by Marionette, the protocol that every Firefox brings along (a length, then JSON).

Playwright drives only Firefox builds of its own; this is the one that people have (Debian: `apt-get install
firefox-esr`).
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.browser import AXE

FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
WAIT_S = 60.0
PREFERENCES = {
    "marionette.port": 0,  # any free one, written into the profile
    "app.update.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "toolkit.telemetry.reportingpolicy.firstRun": False,
}
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004", "ArrowDown": "\ue015"}


class Firefox:
    """One window; `evaluate` returns what a script returns, as JSON."""

    def __init__(self, port: int):
        self._socket = socket.create_connection(("127.0.0.1", port), WAIT_S)
        self._socket.settimeout(2 * WAIT_S)
        self._number = 0
        self._receive()  # its greeting
        self._send("WebDriver:NewSession", {"capabilities": {"alwaysMatch": {"pageLoadStrategy": "normal"}}})

    def _receive(self) -> Any:
        size = b""
        while (byte := self._socket.recv(1)) != b":":
            assert byte, "Firefox has gone"
            size += byte
        parts, missing = [], int(size)
        while missing:
            parts.append(self._socket.recv(min(missing, 1 << 16)))
            missing -= len(parts[-1])
        return json.loads(b"".join(parts))

    def _send(self, command: str, values: dict[str, Any]) -> Any:
        self._number += 1
        text = json.dumps([0, self._number, command, values]).encode()
        self._socket.sendall(f"{len(text)}:".encode() + text)
        _, _, error, result = self._receive()
        assert error is None, f"{command}: {error['message']}"
        return result

    def open(self, url: str, width: int, height: int) -> None:
        """Go to a page in a window whose inside has this size."""
        self._send("WebDriver:SetWindowRect", {"width": width, "height": height})
        self._send("WebDriver:Navigate", {"url": url})
        inside = self.evaluate("return [innerWidth, innerHeight]")
        size = {"width": 2 * width - inside[0], "height": 2 * height - inside[1]}
        self._send("WebDriver:SetWindowRect", size)

    def evaluate(self, script: str) -> Any:
        """Run the body of a function in the page; a promise is waited for."""
        return self._send("WebDriver:ExecuteScript", {"script": script, "args": []})["value"]

    def press(self, *keys: str) -> None:
        """Press keys one after the other."""
        for key in keys:
            pressed = [{"type": kind, "value": KEYS.get(key, key)} for kind in ("keyDown", "keyUp")]
            self._send("WebDriver:PerformActions", {"actions": [{"type": "key", "id": "keys", "actions": pressed}]})

    def wait(self, condition: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + WAIT_S
        while not self.evaluate(f"return Boolean({condition})"):
            assert time.monotonic() < end, f"waited in vain: {condition}"
            time.sleep(0.1)

    def accessibility_problems(self) -> list[str]:
        """Return what axe-core finds serious or critical."""
        run = "return axe.run(document, {resultTypes: ['violations']}).then(found => JSON.stringify(found.violations))"
        found = json.loads(self.evaluate(f"{AXE.read_text(encoding='utf-8')}\n{run}"))
        return [f"{rule['id']}: {rule['help']}" for rule in found if rule["impact"] in ("serious", "critical")]

    def quit(self) -> None:
        self._send("Marionette:Quit", {"flags": ["eForceQuit"]})
        self._socket.close()


def _port(profile: Path, alive: Callable[[], bool]) -> int:
    end = time.monotonic() + WAIT_S
    told = profile / "MarionetteActivePort"
    while not (told.exists() and told.read_text().strip()):
        assert alive(), "Firefox did not start"
        assert time.monotonic() < end, "Firefox does not say where it listens"
        time.sleep(0.1)
    return int(told.read_text())


@contextmanager
def browsing_with_firefox(folder: Path, dark: bool = False) -> Iterator[Firefox]:
    """A headless Firefox with a new profile in a folder."""
    assert FIREFOX
    profile = folder / "profile"
    profile.mkdir()
    settings = {**PREFERENCES, "layout.css.prefers-color-scheme.content-override": 0 if dark else 1}
    lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});" for name, value in settings.items()]
    (profile / "user.js").write_text("\n".join(lines), encoding="utf-8")
    command = [FIREFOX, "--headless", "--marionette", "--no-remote", "--profile", str(profile)]
    with (folder / "firefox.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        browser = Firefox(_port(profile, lambda: process.poll() is None))
        yield browser
        browser.quit()
        process.wait(30)
    finally:
        process.kill()
        process.wait(30)
