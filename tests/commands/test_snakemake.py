"""The Snakemake workflow of the examples makes a whole study. Skipped where Snakemake is not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.cli import rows_of
from helpers.studies import MICRO
from selfvitmil.slides import synthetic

SNAKEFILE = Path(__file__).parents[2] / "docs" / "examples" / "Snakefile"
SNAKEMAKE = os.environ.get("SNAKEMAKE") or shutil.which("snakemake")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SNAKEMAKE is None, reason="snakemake is neither on PATH nor named by $SNAKEMAKE"),
]


def snakemake(folder: Path, *arguments: str, config: Sequence[str] = ()) -> str:
    """Run the workflow in a folder with `cohort.csv` and `my study`; return what it prints."""
    own = [str(Path(SNAKEMAKE or "").parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = os.environ | {"PATH": os.pathsep.join(own), "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    whole = ["--config", "study=my study", "cohort=cohort.csv", "shards=2", *config]
    command = [str(SNAKEMAKE), "-s", str(SNAKEFILE), "--cores", "2", *arguments, *whole]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.mark.timeout(1600)
def test_the_workflow_makes_a_study_and_does_nothing_twice(tmp_path: Path):
    synthetic.make_cohort(tmp_path / "made", slides=6, seed=1, size=(1024, 1024), slides_per_patient=1)
    rows = (tmp_path / "made" / "cohort.csv").read_text().replace(",slides/", ",made/slides/")
    (tmp_path / "cohort.csv").write_text(rows.replace(",annotations/", ",made/annotations/"))
    (tmp_path / "made" / "slides" / "broken.svs").write_text("no slide")
    with (tmp_path / "cohort.csv").open("a") as file:
        file.write("broken,made/slides/broken.svs,normal,patient_broken,train,,\n")
    study = tmp_path / "my study"
    study.mkdir()
    (study / "study.toml").write_text(MICRO.replace("mpp = 1.0\nsize_px = 32", "mpp = 0.5\nsize_px = 224"))
    assert "selfvitmil pretrain" in snakemake(tmp_path, "--dry-run", "--printshellcmds")
    chosen = ["encoder=mean_color", "until=evaluate"]
    snakemake(tmp_path, config=chosen)
    assert len(list(study.glob("tiles/*/*.h5"))) == 6
    assert len(list(study.glob("bags/*/features_mean_color/*.h5"))) == 6
    assert list(study.glob("results/*/metrics.json"))
    assert not (study / ".shards").exists()
    assert {row["slide"] for row in rows_of(study / "failures.csv")} == {"broken"}
    assert "Nothing to be done" in snakemake(tmp_path, "--dry-run", config=chosen)
