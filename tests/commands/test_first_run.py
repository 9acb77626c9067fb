"""The first run of a new user: a folder of slides and an Excel sheet, and no split column."""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import openpyxl
import pytest

from helpers import planted
from helpers.cli import selfvitmil
from helpers.planted import row
from helpers.studies import MICRO
from selfvitmil.cohort import Cohort, hold_out, read_cohort
from selfvitmil.cohort.splits import split_table
from selfvitmil.commands.run import Request, plan_run
from selfvitmil.errors import CohortProblems
from selfvitmil.settings import PretrainSettings, StudySettings, TrainSettings
from selfvitmil.slides import synthetic
from selfvitmil.stages.pretrain import MIN_PATIENTS, propose_split
from selfvitmil.study import Study, open_study


def cohort_of(**patients: int) -> Cohort:
    rows = [
        row(f"{label}{p}_{s}", label, f"{label}{p}") for label, n in patients.items() for p in range(n) for s in "xy"
    ]
    return Cohort(tuple(rows))


# ---------------------------------------------------------------------------------------------------- drawing


@pytest.mark.parametrize("seed", range(3))
def test_a_held_out_test_set_is_by_patient_and_stratified(seed: int):
    cohort = cohort_of(a=20, b=10)
    drawn = hold_out(cohort, test=0.3, seed=seed)
    sides: dict[str, set[str | None]] = defaultdict(set)
    for each in drawn.rows:
        sides[each.patient].add(each.split)
    assert all(len(found) == 1 for found in sides.values())
    counts = Counter((patient[0], *found) for patient, found in sides.items())
    assert counts == {("a", "train"): 14, ("a", "test"): 6, ("b", "train"): 7, ("b", "test"): 3}
    assert drawn.rows == hold_out(cohort, test=0.3, seed=seed).rows
    assert drawn.rows != hold_out(cohort, test=0.3, seed=seed + 1).rows
    assert split_table(drawn) == (
        ("class", "train", "test"),
        ("a", "28 slides of 14 patients", "12 slides of 6 patients"),
        ("b", "14 slides of 7 patients", "6 slides of 3 patients"),
    )


def test_unlabelled_slides_go_with_their_patient_else_to_training():
    cohort = cohort_of(a=4, b=4)
    cohort = Cohort((*cohort.rows, *(row(f"n{p}", None, f"a{p}") for p in range(4)), row("free", None)))
    drawn = hold_out(cohort, test=0.5)
    assert drawn["free"].split == "train"
    for p in range(4):
        assert drawn[f"n{p}"].split == drawn[f"a{p}_x"].split


def proposed(folder: Path, cohort: Cohort, settings: StudySettings) -> tuple[Cohort, list[str], object]:
    """The cohort of a study as `propose_split` leaves it, with what it returns."""
    (folder / "cohort.csv").write_text("slide,path\ns,s.svs\n")
    study = Study(folder, settings)
    study.change_cohort(cohort)
    lines, table = propose_split(study, "dino")
    return study.cohort, lines, table


def test_a_split_is_proposed_only_where_one_is_needed_and_patients_suffice(tmp_path: Path):
    enough, few = cohort_of(a=MIN_PATIENTS, b=MIN_PATIENTS), cohort_of(a=MIN_PATIENTS, b=MIN_PATIENTS - 1)
    settings = StudySettings()
    drawn, lines, table = proposed(tmp_path, enough, settings)
    assert {each.split for each in drawn.rows} == {"train", "test"}
    assert table == split_table(drawn)
    assert any("--overwrite" in line for line in lines)
    kept, lines, table = proposed(tmp_path, few, settings)
    assert (kept, table) == (few, ())
    assert any(f"b ({MIN_PATIENTS - 1})" in line for line in lines)
    for asked in (
        StudySettings(train=TrainSettings(split="k-fold")),
        StudySettings(pretrain=PretrainSettings(transductive=True)),
        StudySettings(pretrain=PretrainSettings(per_split=True)),
    ):
        assert proposed(tmp_path, enough, asked) == (enough, [], ())
    assert proposed(tmp_path, drawn, settings) == (drawn, [], ())


# ---------------------------------------------------------------------------------------------------- the command


def test_the_command_split_writes_the_column_and_does_not_replace_one_unasked(tmp_path: Path):
    study = tmp_path / "study"
    lines = [
        "slide,path,label,patient",
        *(f"{r.slide},{r.slide}.svs,{r.label},{r.patient}" for r in cohort_of(a=10, b=6).rows),
    ]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    done = selfvitmil("split", study, "--cohort", tmp_path / "table.csv", "--test", 0.5)
    assert done.returncode == 0, done.stderr
    assert "10 slides of 5 patients" in done.stdout
    stored = read_cohort(study / "cohort.csv")
    assert Counter(each.split for each in stored.rows) == {"train": 16, "test": 16}
    refused = selfvitmil("split", study)
    assert refused.returncode == 2
    assert "--overwrite" in refused.stderr
    assert read_cohort(study / "cohort.csv").rows == stored.rows
    again = selfvitmil("split", study, "--overwrite", "--seed", 3)
    assert again.returncode == 0, again.stderr
    assert read_cohort(study / "cohort.csv").rows == hold_out(stored, test=0.3, seed=3).rows


# ---------------------------------------------------------------------------------------------------- the first run


def new_user(place: Path, slides: int) -> tuple[Path, Path]:
    """A folder of slides, and an Excel sheet with names and labels alone."""
    synthetic.make_cohort(place / "made", slides=slides, seed=1, size=(1024, 1024), slides_per_patient=1)
    folder = place / "slides"
    folder.mkdir()
    book = openpyxl.Workbook()
    sheet = book.active
    assert sheet is not None
    sheet.append(["slide", "label"])
    for each in read_cohort(place / "made" / "cohort.csv").rows:
        shutil.move(each.path, folder / each.path.name)
        sheet.append([each.slide, each.label])
    book.save(place / "labels.xlsx")
    return folder, place / "labels.xlsx"


@pytest.mark.parametrize("slides", [pytest.param(20, marks=pytest.mark.slow), 10])
def test_a_folder_and_an_excel_sheet_end_with_a_report(tmp_path: Path, slides: int):
    folder, labels = new_user(tmp_path, slides)
    study = tmp_path / "study"
    study.mkdir()
    (study / "study.toml").write_text(MICRO.replace("[train]", "[train]\nfolds = 2"))
    planned = selfvitmil("plan", study, "--cohort", folder, "--labels", labels)
    assert planned.returncode == 0, planned.stderr
    assert not (study / "cohort.csv").exists()
    done = selfvitmil("run", study, "--cohort", folder, "--labels", labels)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (study / "report" / "index.html").exists()
    cohort = read_cohort(study / "cohort.csv")
    told = json.loads((study / "results" / "compare" / "metrics.json").read_text())["methods"]
    assert all(each["transductive"] is None for each in told)
    with (study / "results" / "compare" / "predictions.csv").open(newline="") as file:
        tested = {each["slide"] for each in csv.DictReader(file) if each["part"] == "test"}
    if slides == 20:  # ten patients of each class: a held-out test set
        assert Counter((each.label, each.split) for each in cohort.rows) == {
            ("normal", "train"): 7, ("normal", "test"): 3, ("tumor", "train"): 7, ("tumor", "test"): 3,
        }  # fmt: skip
        assert tested == {each.slide for each in cohort.rows if each.split == "test"}
        assert done.stdout.index("7 slides of 7 patients") < done.stdout.index("what will be done")
        assert [path.name for path in (study / "encoders").iterdir()] == ["dino"]
    else:  # too few: cross-validation, an encoder per fold
        assert {each.split for each in cohort.rows} == {None}
        assert tested == set(cohort.slides)
        assert sorted(path.name for path in (study / "encoders").iterdir()) == ["dino_fold0", "dino_fold1"]
    stored = (study / "cohort.csv").read_bytes()
    again = selfvitmil("run", study, "--cohort", folder, "--labels", labels, "--until", "embed")
    assert again.returncode == 0, again.stderr
    assert (study / "cohort.csv").read_bytes() == stored
    assert "up to date (encoders/dino" in again.stdout


@pytest.mark.slow
def test_pretrain_alone_makes_the_same_proposal(tmp_path: Path):
    folder, labels = new_user(tmp_path, 20)
    study = tmp_path / "study"
    study.mkdir()
    (study / "study.toml").write_text(MICRO)
    assert selfvitmil("tile", study, "--cohort", folder, "--labels", labels).returncode == 0
    before = read_cohort(study / "cohort.csv")
    done = selfvitmil("pretrain", study)
    assert done.returncode == 0, done.stderr
    assert "one is proposed" in done.stderr  # before the training
    after = read_cohort(study / "cohort.csv")
    assert after.rows == hold_out(before).rows
    seen = set((study / "encoders" / "dino" / "slides.txt").read_text().split())
    assert seen == {each.slide for each in after.rows if each.split == "train"}


def test_labels_and_files_that_do_not_do_are_told_together_before_any_work(tmp_path: Path):
    study = tmp_path / "study"
    study.mkdir()
    (study / "cohort.csv").write_text("slide,path,label\na,a.svs,x\nb,b.svs,x\n")
    with pytest.raises(CohortProblems) as caught:
        plan_run(open_study(study), Request())
    first, second = map(str, caught.value.problems)
    assert "one class only" in first
    assert "do not exist: a, b" in second
    assert [path.name for path in study.iterdir()] == ["cohort.csv"]


def test_slides_that_were_kept_out_stay_out_of_another_split():
    rows = [
        planted.row(f"s{k}", ("normal", "tumor")[k % 2], f"p{k}", "external" if k >= 20 else "train") for k in range(24)
    ]
    drawn = hold_out(Cohort(tuple(rows)), test=0.3, seed=0)
    assert {row.split for row in drawn.rows[20:]} == {"external"}
    assert {row.split for row in drawn.rows[:20]} == {"train", "test"}
