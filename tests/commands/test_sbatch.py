"""The script for Slurm: submitted to a stand-in for Slurm, its jobs make the study."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from helpers.cli import selfvitmil
from helpers.error_codes import has_code
from helpers.studies import MICRO
from selfvitmil.commands.run import Request
from selfvitmil.commands.sbatch import Jobs, sbatch
from selfvitmil.errors import ConfigError
from selfvitmil.settings import StudySettings
from selfvitmil.slides import synthetic
from selfvitmil.study import CohortSource, Study

SBATCH = """\
#!/bin/bash
# Keeps options and script of a job, and prints its number.
number=$(( $(ls "$JOBS" | wc -l) / 2 + 1 ))
printf '%s\\n' "$@" > "$JOBS/$number.options"
cat > "$JOBS/$number.sh"
echo "$number"
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    synthetic.make_cohort(folder, slides=6, seed=1, size=(1024, 1024), slides_per_patient=1)
    return folder / "cohort.csv"


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with stand-ins for sbatch and scontrol."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(SBATCH)
    (folder / "scontrol").write_text('#!/bin/bash\necho "$@" >> "$JOBS/../scontrol.log"\n')
    for file in folder.iterdir():
        file.chmod(0o755)
    (tmp_path / "jobs").mkdir()
    return folder


def environment(tools: Path, **more: str) -> dict[str, str]:
    path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "JOBS": str(tools.parent / "jobs"), "OMP_NUM_THREADS": "1", **more}


def submit(study: Path, tools: Path) -> list[tuple[list[str], Path]]:
    """Options and script of every job that the study's script submits."""
    subprocess.run(["bash", study / "submit.sh"], env=environment(tools), check=True, capture_output=True)
    jobs = tools.parent / "jobs"
    return [((jobs / f"{k}.options").read_text().splitlines(), jobs / f"{k}.sh") for k in range(1, 5)]


@pytest.mark.slow
def test_the_jobs_make_the_study(made: Path, tools: Path, tmp_path: Path):
    study = tmp_path / "a study"
    study.mkdir()
    (study / "study.toml").write_text(MICRO.replace('[compare]\nmethods = ["self-vit-mil", "mean"]', ""))
    done = selfvitmil("sbatch", study, "--cohort", made, "--shards", 2, "--until", "evaluate", "--one-method")
    assert done.returncode == 0, done.stderr
    for options, script in submit(study, tools):
        tasks = [1]
        if array := [option for option in options if option.startswith("--array=1-")]:
            tasks = list(range(1, int(array[0].removeprefix("--array=1-")) + 1))
        for task in tasks:
            variables = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_COUNT": str(len(tasks))}
            job = subprocess.run(
                ["bash", script], env=environment(tools, **variables, SLURM_CPUS_PER_TASK="1"), capture_output=True,
                text=True, check=False,
            )  # fmt: skip
            assert job.returncode == 0, job.stdout + job.stderr
    assert len(list((study / "tiles").glob("*/*.h5"))) == 6
    assert len(list((study / "bags").glob("*/features_dino/*.h5"))) == 6
    assert list((study / "results").glob("*/metrics.json"))
    assert not (study / ".shards").exists()
    assert not (tmp_path / "scontrol.log").exists()


def opened(folder: Path, made: Path, **batch: object) -> Study:
    settings = StudySettings()
    engine = settings.engine.model_copy(update={"batch": settings.engine.batch.model_copy(update=batch)})
    return Study(folder, settings.model_copy(update={"engine": engine}), CohortSource(made))


def test_options_and_order_of_the_jobs(made: Path, tools: Path, tmp_path: Path):
    study = opened(
        tmp_path / "study", made,
        queue="long", account="lab", memory="16GB", walltime="12:00:00", directives=("--constraint=a b",),
        prologue=('echo "it\'s $HOME"',),
    )  # fmt: skip
    result = sbatch(study, Request(name="own"), Jobs(40, 8, 4, 6, "gpu:a100"))
    assert [name for name, _ in result.jobs] == ["tile", "encoder", "embed", "run"]
    tile, encoder, embed, rest = submit(study.root, tools)
    common = {"--partition=long", "--account=lab", "--mem=16G", "--time=12:00:00", "--constraint=a b", "--requeue"}
    for options, script in (tile, encoder, embed, rest):
        assert common <= set(options)
        assert 'echo "it\'s $HOME"' in script.read_text().splitlines()
        subprocess.run(["bash", "-n", script], check=True)
    assert "--array=1-40" in tile[0]
    assert not any("gres" in option for option in tile[0])
    assert {"--gres=gpu:a100:4", "--cpus-per-task=24", "--dependency=afterany:1"} <= set(encoder[0])
    assert {"--gres=gpu:a100:1", "--array=1-8", "--dependency=afterok:2"} <= set(embed[0])
    assert "--dependency=afterany:3" in rest[0]
    lines = {script.read_text().splitlines()[-1] for _, script in (tile, encoder, embed, rest)}
    root = shlex.quote(str(study.root))
    assert (
        f"run_until_warned torchrun --standalone --nproc-per-node 4 -m selfvitmil pretrain {root} --name own" in lines
    )


def test_with_an_encoder_nothing_is_trained(made: Path, tmp_path: Path):
    result = sbatch(opened(tmp_path / "study", made), Request(encoder="hf-hub:x/y"), Jobs())
    assert [name for name, _ in result.jobs] == ["tile", "embed", "run"]
    assert all("--encoder hf-hub:x/y" in command for _, command in result.jobs)
    script = (tmp_path / "study" / "submit.sh").read_text()
    assert '"--dependency=afterany:$tile"' in script, "some slides may fail, and the others are embedded"


def test_a_number_of_jobs_must_be_positive(made: Path, tmp_path: Path):
    with pytest.raises(ConfigError, check=has_code("invalid-number-of-jobs")):
        sbatch(opened(tmp_path / "study", made), Request(), Jobs(shards=0))


def test_a_job_that_is_warned_ends_its_command_and_is_queued_again(made: Path, tools: Path, tmp_path: Path):
    (tools / "selfvitmil").write_text(
        textwrap.dedent(
            f"""\
            #!/bin/bash
            trap 'echo checkpoint > {tmp_path}/saved; exit 130' TERM
            touch {tmp_path}/works
            for k in $(seq 600); do sleep 0.1; done
            """
        )
    )
    (tools / "selfvitmil").chmod(0o755)
    sbatch(opened(tmp_path / "study", made), Request(), Jobs())
    script = submit(tmp_path / "study", tools)[1][1]
    job = subprocess.Popen(["bash", script], env=environment(tools, SLURM_JOB_ID="17"))
    until = time.monotonic() + 20
    while not (tmp_path / "works").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    job.wait(timeout=20)
    assert (tmp_path / "saved").read_text() == "checkpoint\n"
    assert (tmp_path / "scontrol.log").read_text() == "requeue 17\n"
