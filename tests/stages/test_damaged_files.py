"""Damaged text files of a study: an error that names the file, or the work is done again; found by the campaign."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.cli import selfvitmil
from helpers.error_codes import has_code
from selfvitmil.errors import ArtefactError, EncoderError
from selfvitmil.runtime.training import read_metrics
from selfvitmil.slides import synthetic
from selfvitmil.stages.check import check_formats
from selfvitmil.stages.localize import write_tables
from selfvitmil.stages.pretrain import _stored_provenance, last_metrics
from selfvitmil.study import slides_of

NO_TEXT = b"slide_1\nslide_\xfd\xfe\xff\n"


def test_a_damaged_list_of_slides_is_named(tmp_path: Path):
    """Read as empty it would hide that test slides were seen."""
    (tmp_path / "slides.txt").write_bytes(NO_TEXT)
    with pytest.raises(ArtefactError, match=r"slides\.txt of ", check=has_code("unreadable-slide-list")):
        slides_of(tmp_path / "slides.txt")
    assert slides_of(tmp_path / "none.txt") == frozenset()


def test_a_damaged_check_table_is_written_anew(tmp_path: Path):
    synthetic.make_cohort(tmp_path / "made", slides=2, seed=1, size=(1024, 1024), slides_per_patient=1)
    run = ("run", tmp_path / "study", "--until", "check", "--workers", 0)
    assert selfvitmil(*run, "--cohort", tmp_path / "made" / "cohort.csv").returncode == 0
    table = tmp_path / "study" / "check.csv"
    sound = table.read_bytes()
    for damaged in (sound[:100] + NO_TEXT, b"", b"other,columns\n1,2\n"):
        table.write_bytes(damaged)
        assert selfvitmil("status", tmp_path / "study").returncode == 0
        assert selfvitmil(*run).returncode == 0
        assert table.read_bytes() == sound


@pytest.mark.parametrize("content", [NO_TEXT, b'slide,"' + b"x" * 200_000])
def test_a_damaged_table_of_lesions_is_named(content: bytes, tmp_path: Path):
    """It may have rows of slides that are not localized this time: they must not vanish in silence."""
    (tmp_path / "points.csv").write_bytes(content)
    with pytest.raises(ArtefactError, match=r"points\.csv of ", check=has_code("unreadable-heatmap-table")):
        write_tables(tmp_path, {}, ())


def test_damaged_lines_of_metrics_are_left_out(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n{"st\xff\xfe": 2}x\n{"step": 1}\n\0\0\0\n[3]\n{"ste')
    assert read_metrics(tmp_path) == [{"step": 0}, {"step": 1}]
    assert last_metrics(tmp_path) == {"step": 1}


@pytest.mark.parametrize("content", [NO_TEXT, b"", b"[1, 2]", b'{"selfvitmil": 3}'])
def test_a_damaged_encoder_config_is_named(content: bytes, tmp_path: Path):
    folder = tmp_path / "encoders" / "dino"
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(content)
    check_formats(tmp_path)
    with pytest.raises(EncoderError, match=r"dino: config\.json", check=has_code("unreadable-encoder-config")):
        _stored_provenance(folder)


def test_a_sound_encoder_config_says_what_it_was_built_from(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"selfvitmil": {"provenance": {"a": 1}}}))
    assert _stored_provenance(tmp_path) == {"a": 1}
