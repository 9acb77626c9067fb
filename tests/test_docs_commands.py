"""Every command of README and documentation runs as it is written, page by page, on a tiny study."""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openpyxl
import pytest
from PIL import Image

from helpers.cli import selfvitmil
from helpers.pages import PAGES, ROOT, command_lines, command_of
from selfvitmil.slides import synthetic

TINY = """
[tissue]
thumbnail_downsample = 32

[pretrain]
width = 16
depth = 4
heads = 1
batch = 8
steps = 2
log_steps = 1
head_width = 16
bottleneck = 8
directions = 8
workers = 0
measure_tiles = 8

[train]
seeds = 1
epochs = 2

[compare]
methods = ["self-vit-mil", "abmil", "mean"]

[evaluate]
bootstrap = 100

[localize]
picture_px = 200

[engine]
workers = 0
"""


@dataclass(frozen=True)
class Start:
    """What the reader of a page has already."""

    finished: bool = True
    """STUDY is finished, with the encoder `lejepa`; otherwise it has a study.toml alone."""
    before: tuple[str, ...] = ()
    """Commands that the page takes for granted."""
    settings: str = TINY


SHAPE = "width = 16\ndepth = 4\nheads = 1\n"
"""Of the ViT; the ResNet of the preset dsmil-simclr cannot have it."""
NEW = Start(finished=False)
MINE = Start(False, ("run STUDY --cohort data/slides --labels labels.csv --name mine --until embed",))
STARTS = {
    "README.md": NEW,
    "bring-your-slides.md": NEW,
    "continue-a-foundation-model.md": NEW,
    "correct-tissue.md": Start(),
    "find-similar-slides.md": Start(),
    "plan-a-million-slides.md": NEW,
    "predict-new-slides.md": Start(),
    "read-the-report.md": Start(),
    "reproduce-camelyon16.md": Start(
        False,
        before=("synth data/CAMELYON16 --layout camelyon16 --slides 10 --size-px 2560",),
        settings=TINY.replace(SHAPE, f"{SHAPE}out_dim = 16\n"),
    ),
    "round-trip-with-qupath.md": Start(),
    "run-a-study.md": NEW,
    "run-on-a-cluster.md": NEW,
    "serve-predictions.md": Start(before=("package STUDY --out MODEL",)),
    "train-several-targets.md": Start(
        False,
        before=(
            "synth made --slides 40 --size-px 1024 --positives 0.8 --outcomes",
            "run study --cohort made/cohort.csv --until embed",
        ),
    ),
    "train-an-encoder.md": Start(False, ("tile STUDY --cohort data/slides --labels labels.csv",)),
    "tune-settings.md": Start(),
    "use-foundation-model-features.md": MINE,
    "use-other-tools.md": Start(),
    "view-a-study.md": Start(),
    "work-offline.md": Start(False, ("tile STUDY --cohort data/slides --labels labels.csv",)),
    "demo.md": Start(),
    "features-to-table.md": NEW,
    "first-study.md": NEW,
    "attention.md": Start(),
    "privacy.md": Start(),
    "which-method.md": Start(),
    "troubleshooting.md": Start(),
}
ELSEWHERE = {
    "outcomes.md": "test_outcomes_tutorial.py runs the page",
}
"""Pages whose commands another test runs."""

NOT_RUN = {
    "torchrun": "several GPUs; tests/runtime run several processes on a CPU",
    "--cluster tls://": "needs a scheduler; tests/engine have one",
    "ExecStart=": "a service: the same commands as at the top of its page",
    "/bin/selfvitmil demo demo": "`make demo` of the continuous integration",
}
"""Part of a command that is parsed (test_docs.py), but not run here: why."""

NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES if command_lines(page)]


def test_every_page_with_commands_is_run_somewhere():
    names = {Path(name).name for name in NAMES}
    assert names == {*STARTS, *ELSEWHERE}
    lines = [line for page in PAGES for line in command_lines(page)]
    for part in NOT_RUN:
        assert any(part in line for line in lines), f"{part}: no page has it any more"


@pytest.fixture(autouse=True)
def work_in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes for slides would each load PyTorch, for a second of work."""
    (tmp_path / "config" / "selfvitmil").mkdir(parents=True)
    (tmp_path / "config" / "selfvitmil" / "engine.toml").write_text("[engine]\nworkers = 0\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has besides the program: slides, tables, an encoder, features, and one finished study."""
    folder = tmp_path_factory.mktemp("world")
    synthetic.make_cohort(folder / "made", slides=22, slides_per_patient=1, seed=1, size=(1536, 1536))
    data = folder / "data"
    shutil.copytree(folder / "made" / "slides", data / "slides")
    shutil.copytree(folder / "made" / "annotations", folder / "annotations")
    shutil.move(folder / "made" / "cohort.csv", folder / "planned.csv")
    shutil.rmtree(folder / "made")
    first, *others = sorted((data / "slides").iterdir())[:4]
    for name in ("new.svs", "another.svs"):
        shutil.copy(first, folder / name)
    for place in (folder / "new-slides", data / "incoming"):
        place.mkdir()
        shutil.copy(others[0], place / f"unseen{others[0].suffix}")
        os.utime(place / f"unseen{others[0].suffix}", (0, 0))  # long since whole
    with (folder / "planned.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    write_table(folder / "labels.csv", [{key: row[key] for key in ("slide", "label", "patient")} for row in rows])
    book = openpyxl.Workbook()
    for row in [["slide", "label"], *([row["slide"], row["label"]] for row in rows)]:
        book.worksheets[0].append(row)
    book.save(folder / "labels.xlsx")
    write_table(folder / "slides.csv", [{"slide": row["slide"], "path": f"data/{row['path']}"} for row in rows])
    write_table(folder / "labelled.csv", [{k: row[k] for k in ("slide", "label", "annotation")} for row in rows])
    write_encoder(folder / "models" / "uni")
    shutil.copytree(folder / "models" / "uni", folder / "MahmoodLab" / "UNI")
    write_probe_tiles(folder / "labelled")
    return folder


def write_table(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_encoder(folder: Path) -> None:
    from selfvitmil.encoder import build_encoder, save_encoder

    small = {"embed_dim": 16, "depth": 4, "num_heads": 1}
    save_encoder(folder, build_encoder("vit_tiny_patch16_224", model_args=small, size_px=224, mpp=0.5))


def write_probe_tiles(folder: Path) -> None:
    folder.mkdir()
    rng, rows = np.random.default_rng(0), []
    for k in range(16):
        tile = rng.integers(60 + 60 * (k % 2), 120 + 60 * (k % 2), (224, 224, 3), dtype=np.uint8)
        Image.fromarray(tile).save(folder / f"{k}.png")
        rows.append({"tile": f"{k}.png", "label": str(k % 2), "split": "test" if k % 4 > 1 else "train"})
    write_table(folder / "tiles.csv", rows)


@pytest.fixture(scope="module")
def finished(world: Path) -> Path:
    """A finished study, whose slides lie in the world beside it."""
    write_settings(world, "done", TINY)
    run_line("selfvitmil run done --cohort data/slides --labels labelled.csv", world)
    (features,) = (world / "done" / "bags").glob("*/features_lejepa")
    for copy in ("data/features_uni", "data/features_uni_v1", "features_uni"):
        shutil.copytree(features, world / copy)
    (world / "MY_OUTLINES").mkdir()
    for outline in (world / "done" / "tiles").glob("*/*.geojson"):
        shutil.copy(outline, world / "MY_OUTLINES")
    return world


def write_settings(folder: Path, study: str, settings: str) -> None:
    (folder / study).mkdir(exist_ok=True)
    (folder / study / "study.toml").write_text(settings)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in NAMES if Path(name).name in STARTS])
def test_commands_of_the_page_run(name: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    start = STARTS[Path(name).name]
    place = tmp_path / "world"
    shutil.copytree(finished, place)
    monkeypatch.chdir(place)
    for variable in ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"):
        monkeypatch.setenv(variable, "1")
    for study in ("STUDY", "study", "demo", "mystudy"):
        if start.finished:
            shutil.copytree(place / "done", place / study)
        else:
            write_settings(place, study, start.settings)
    for line in [f"selfvitmil {each}" for each in start.before]:
        run_line(line, place)
    for line in dict.fromkeys(command_lines(ROOT / name)):
        if "dsmil-simclr" in line:
            write_settings(place, "STUDY", TINY.replace(SHAPE, ""))
        if not any(part in line for part in NOT_RUN):
            run_line(line, place)
        if "dsmil-simclr" in line:
            write_settings(place, "STUDY", TINY)


def run_line(line: str, folder: Path) -> None:
    """Run a command of a page; folders at the root of a machine are below `folder` here."""
    local = os.path.expandvars(line).replace("/data/", "data/").replace("/models/", "models/")
    arguments = command_of(local) or []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        if "--watch" in arguments:
            arguments[arguments.index("--watch") + 1] = "1"
            until_interrupted(arguments, predictions_are_there)
        elif arguments[0] == "view" and "--export" not in arguments:
            until_interrupted([*arguments, "--port", "0", "--no-browser"], page_is_served)
        else:
            done = selfvitmil(*arguments)
            assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def until_interrupted(arguments: list[str], is_done: Callable[[str], bool]) -> None:
    """Run a command that ends by Ctrl-C alone, until the lines that it prints say that it has done its work."""
    command = [sys.executable, "-u", "-m", "selfvitmil", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    printed: list[str] = []
    try:
        found = any(printed.append(line) or is_done(line) for line in process.stdout)
        assert found, "".join(printed)
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=120)
    assert process.returncode in (0, 130), "".join(printed) + rest


def predictions_are_there(line: str) -> bool:
    return "predicted by" in line and Path("data/predictions/predictions.csv").exists()


def page_is_served(line: str) -> bool:
    address = re.search(r"http://\S+", line)
    if address is None:
        return False
    with urllib.request.urlopen(address.group()) as answer:
        return answer.status == 200 and b"<title>" in answer.read()
