"""A miniature study: six slides of 1024 px, a tumour and a normal one each for training, validation and test."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from faults.children import run_here
from helpers.studies import MICRO
from selfvitmil.slides import synthetic

SETTINGS = MICRO.replace("width = 16", "width = 32", 1).replace('pictures = false\ngeojson = "none"\n', "")
SLIDES_OF_SIDE = ("train", "val", "test")


@dataclass(frozen=True)
class Stage:
    """A command of the study, and the arguments that follow the study's folder."""

    name: str
    arguments: tuple[str, ...] = ()

    def command(self, study: Path) -> list[str]:
        return [self.name, str(study), *(each.format(place=study.parent) for each in self.arguments)]


STAGES = (
    Stage("check", ("--cohort", "{place}/made/cohort.csv")),
    Stage("tile"),
    Stage("pretrain"),
    Stage("embed", ("--encoder", "dino")),
    Stage("train"),
    Stage("compare"),
    Stage("evaluate"),
    Stage("localize"),
    Stage("report"),
    Stage("run"),  # what is left for it: lesions, maps of the second method
)
NAMES = tuple(stage.name for stage in STAGES)


class Miniature:
    """Studies as they are before and after each stage, in `place`."""

    def __init__(self, place: Path):
        self.place = place
        synthetic.make_cohort(place / "made", slides=6, seed=1, size=(1024, 1024), slides_per_patient=1)
        _assign_sides(place / "made" / "cohort.csv")
        study = place / "before_0"
        study.mkdir()
        (study / "study.toml").write_text(SETTINGS)
        for k, stage in enumerate(STAGES):
            after = self.before(k + 1)
            shutil.copytree(study, after)
            done = run_here(stage.command(after))
            assert done.status == 0, f"{stage.name}: {done.output}"
            study = after

    def before(self, k: int) -> Path:
        """The study before stage number k."""
        return self.place / f"before_{k}"

    @cached_property
    def expected(self) -> list[dict[str, str]]:
        """The digests after stage number k."""
        return [digests(self.before(k + 1)) for k in range(len(STAGES))]

    def copy(self, k: int, name: str) -> Path:
        """A copy of the study before stage number k, to be disturbed."""
        work = self.place / name
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(self.before(k), work)
        return work


def _assign_sides(cohort: Path) -> None:
    with cohort.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for label in ("tumor", "normal"):
        for row, side in zip([row for row in rows if row["label"] == label], SLIDES_OF_SIDE, strict=True):
            row["split"] = side
    with cohort.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


# ---------------------------------------------------------------------------------------------------- comparison

LOGS = ("run.json", ".lock")
"""Files that hold times or processes only."""
TIMED = {
    "metrics.jsonl": ("seconds", "tiles_per_s", "data_wait_share", "time", "epoch_seconds", "wall_s"),
}


def digests(study: Path) -> dict[str, str]:
    """Hash of every file of a study, without the declared measurements of time."""
    found = {}
    for path in sorted(study.rglob("*")):
        name = path.relative_to(study).as_posix()
        if path.is_file() and path.name not in LOGS:
            content = _untimed(path)
            if content is not None:
                found[name] = hashlib.sha256(content).hexdigest()
    return found


def _untimed(path: Path) -> bytes | None:
    content = path.read_bytes()
    if path.name == "failures.csv" and content.count(b"\n") <= 1:  # of slides that have recovered
        return None
    if path.name == "metrics.jsonl":
        try:
            lines = [json.loads(line) for line in content.decode().splitlines()]
        except ValueError:  # a damaged line, which is a difference
            return content
        return json.dumps([{k: v for k, v in line.items() if not _is_time(k)} for line in lines]).encode()
    if path.name in ("table.csv", "table.md", "auc.svg") and path.parent.name == "compare":
        return b"has training times"
    if path.name == "index.html":
        return b"the report has times"
    return content


def _is_time(key: str) -> bool:
    return bool(re.search(r"second|_s$|per_s|wait|time|mfu|memory", key))


def differences(study: Path, expected: dict[str, str]) -> list[str]:
    """What distinguishes a study from the undisturbed one: names of files, leftovers."""
    found = digests(study)
    lines = [f"missing: {name}" for name in expected.keys() - found.keys()]
    lines += [f"not expected: {name}" for name in found.keys() - expected.keys()]
    lines += [f"differs: {name}" for name in expected.keys() & found.keys() if found[name] != expected[name]]
    lines += [f"temporary file: {path.name}" for path in study.rglob(".*.part")]
    return sorted(lines)
