"""What is installed: hashes, minimum versions, and a list of threats whose tests exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import openslide
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
WITHOUT_KNOWN_HOLES = {
    "cryptography": "44.0.1",  # CVE-2024-12797
    "jinja2": "3.1.6",  # CVE-2025-27516
    "openslide-bin": "4.0.1",  # CVE-2026-48977, CVE-2026-54604
    "pillow": "11.3",  # CVE-2025-48379
    "starlette": "0.49.1",  # CVE-2025-62727
}


def locked() -> dict[str, set[str]]:
    """Name -> versions in requirements.lock; more than one where Python versions differ."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", LOCK, re.MULTILINE):
        found.setdefault(name.lower(), set()).add(version)
    return found


def required() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return {Requirement(line).name.lower(): Requirement(line) for line in lines}


def test_every_locked_package_has_a_hash():
    entries = re.split(r"\n(?=[A-Za-z0-9])", LOCK)
    packages = [entry for entry in entries if re.match(r"[A-Za-z0-9._-]+==", entry)]
    assert len(packages) > 100
    assert all("--hash=sha256:" in entry for entry in packages)
    assert "--require-hashes -r requirements.lock" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_locked_versions_are_those_that_the_project_allows():
    versions = locked()
    for name, requirement in required().items():
        assert name in versions, f"{name} is not in the lock"
        assert all(requirement.specifier.contains(version) for version in versions[name]), name


@pytest.mark.parametrize(("name", "fixed"), WITHOUT_KNOWN_HOLES.items())
def test_versions_with_known_holes_are_not_allowed(name: str, fixed: str):
    specifier = required()[name].specifier
    lowest = min(Version(each.version) for each in specifier if each.operator == ">=")
    assert lowest >= Version(fixed)


def test_the_openslide_that_is_loaded_is_the_installed_one():
    assert Version(openslide.__library_version__) >= Version("4.0.1")


def test_every_test_of_the_list_of_threats_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert len(named) >= 20
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"
