"""A short run of every fuzzed parser; `python -m fuzz.campaign` makes the long one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from fuzz.mutations import Edit, edits, edits_of, mutate
from fuzz.targets import Target, make_targets

TESTS = Path(__file__).parents[1]
HERE = ("cohort csv", "cohort xlsx", "settings toml", "asap xml", "geojson", "ncrf json", "encoder config")
"""Parsers in Python, which can be tried in this process."""


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return make_targets(tmp_path_factory.mktemp("examples"))


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_damaged_text_is_read_or_refused(name: str, targets: dict[str, Target], tmp_path: Path):
    """Hypothesis looks for the fewest edits that break a parser."""
    target = targets[name]

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(edits)
    def try_edits(chosen: list[Edit]) -> None:
        for example in target.examples:
            answer = target.try_bytes(mutate(example.read_bytes(), chosen), example, tmp_path)
            assert not answer.startswith("BAD"), answer

    try_edits()
    for example in target.examples:
        assert target.try_bytes(example.read_bytes(), example, tmp_path) == "ok", "the example itself is sound"


@pytest.mark.slow
def test_no_parser_crashes_or_hangs_in_a_short_campaign():
    """In a process of its own, which forks."""
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fuzz.campaign", "--number", "150"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 bad") == 17, done.stdout


def test_a_seed_gives_the_same_damage_again():
    example = bytes(range(256)) * 4
    damaged = [mutate(example, edits_of(f"0 x {k}")) for k in range(200)]
    assert damaged == [mutate(example, edits_of(f"0 x {k}")) for k in range(200)]
    assert len(set(damaged)) > 150
