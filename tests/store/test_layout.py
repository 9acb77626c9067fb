"""Every path of a study has one method in `StudyLayout`, and no other module spells a study's folders."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import selfvitmil
from selfvitmil.store import layout as module
from selfvitmil.store.layout import (
    StudyLayout,
    model_folder,
    patches_of,
    quality_examples_of,
    quality_page,
    thumbnail_of,
    tiling_summary,
)

ROOT = Path(selfvitmil.__file__).parent
STUDY = StudyLayout(Path("study"))
TILING = "0.5mpp_224px_0px"

PATHS = {
    "study.toml": STUDY.settings,
    "cohort.csv": STUDY.cohort,
    "check.csv": STUDY.check_table,
    "failures.csv": STUDY.failures,
    ".lock": STUDY.lock,
    "run.json": STUDY.run_record,
    "pseudonyms.csv": STUDY.pseudonyms,
    "slides": STUDY.synthetic_slides,
    f"tiles/{TILING}/a.h5": STUDY.tile_table(TILING, "a"),
    f"tiles/{TILING}/a.jpg": thumbnail_of(STUDY.tile_table(TILING, "a")),
    f"tiles/{TILING}/tiles.csv": tiling_summary(STUDY.tiling(TILING)),
    f"tiles/{TILING}/quality.html": quality_page(STUDY.tiling(TILING)),
    f"tiles/{TILING}/quality/s1.jpg": quality_examples_of(STUDY.tile_table(TILING, "s1")),
    "encoders/dino/config.json": STUDY.encoder_config("dino"),
    "encoders/dino/slides.txt": STUDY.encoder_slides("dino"),
    f"bags/{TILING}/features_dino/a.h5": STUDY.feature_file(TILING, "dino", "a"),
    f"bags/{TILING}/features_dino/encoder_slides.txt": STUDY.features_encoder_slides(TILING, "dino"),
    f"bags/{TILING}/patches/a_patches.h5": patches_of(STUDY.feature_file(TILING, "dino", "a"), "a"),
    f"models/{TILING}/dino/abmil/given/seed0": STUDY.model(TILING, "dino", "abmil", "given", 0),
    "results/compare": STUDY.results("compare"),
    "maps/dino_abmil/a.h5": STUDY.heatmap("dino_abmil", "a"),
    "report/index.html": STUDY.report,
    f"work/tiles/{TILING}/a.h5": STUDY.work.tile_table(TILING, "a"),
}
"""As the reference of files (docs/reference/files.md) documents them."""


@pytest.mark.parametrize("documented", PATHS)
def test_paths_are_those_that_are_documented(documented: str):
    assert PATHS[documented].as_posix() == f"study/{documented}"
    assert STUDY.name(PATHS[documented]) == documented


def test_files_beside_others_agree_with_the_study():
    assert model_folder(STUDY.models_on(TILING, "dino") / "abmil", "fold1", 3) == STUDY.model(
        TILING, "dino", "abmil", "fold1", 3
    )


def test_listings_find_what_the_methods_name(tmp_path: Path):
    study = StudyLayout(tmp_path)
    wanted = {
        study.all_tilings: study.tiling(TILING),
        study.all_encoders: study.encoder("dino"),
        study.all_features: study.features(TILING, "dino"),
        study.all_models: study.models_on(TILING, "dino"),
        study.all_results: study.results("compare"),
        study.all_heatmaps: study.heatmaps("dino_abmil"),
    }
    assert not study.has_any_artefact()
    assert [listing() for listing in wanted] == [[]] * len(wanted)
    for folder in wanted.values():
        folder.mkdir(parents=True)
        (folder.parent / ".hidden").mkdir()
        (folder.parent / "a file").write_text("")
    assert [listing() for listing in wanted] == [[folder] for folder in wanted.values()]
    assert study.features_of_tiling(TILING) == ["dino"]
    assert study.has_any_artefact()


# ---------------------------------------------------------------------------------------------------- nowhere else

SPELLED = {"tiles", "encoders", "bags", "models", "results", "maps", "report", "patches", "study.toml"}
SPELLED |= {"tiles.csv", "cohort.csv", "check.csv", "failures.csv", ".lock", "run.json", "pseudonyms.csv"}
OTHER_FOLDERS = {
    "view/export.py": {"tiles"},  # the exported viewer, which is no study
    "package/files.py": {"models"},  # a packaged model
    "cohort/sources.py": {"cohort.csv"},  # a folder of slides that has a table
    "slides/synthetic/cohort.py": {"cohort.csv"},  # a cohort of synthetic slides
}


def spelled_paths(code: str) -> set[str]:
    """Names of a study's files and folders that code joins to a path, or looks for by a pattern."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        part: ast.AST | None = None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            part = node.right
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            part = node.args[0] if node.func.attr in ("glob", "rglob", "joinpath") else None
        if isinstance(part, ast.JoinedStr) and part.values:
            part = part.values[0]
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            first = part.value.split("/")[0]
            found |= {first} if first in SPELLED or first.startswith("features_") else set()
    return found


def test_no_other_module_spells_a_path_of_a_study():
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        if path != Path(module.__file__):
            spelled = spelled_paths(path.read_text(encoding="utf-8")) - OTHER_FOLDERS.get(name, set())
            assert not spelled, f"{name} spells {', '.join(sorted(spelled))}; use StudyLayout"


@pytest.mark.parametrize(
    "code", ['study / "tiles" / x', 'study / f"features_{x}"', 'study.glob("maps/*/*.h5")', '(a / "bags").rglob("x")']
)
def test_spelled_paths_are_found(code: str):
    assert len(spelled_paths(code)) == 1


def test_other_paths_are_left_alone():
    assert not spelled_paths('folder / "config.json"; a / b; 1 / 2; folder.glob("*.h5")')
