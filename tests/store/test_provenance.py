"""An artefact is up to date, missing, or stale with every change named."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from selfvitmil.store.failures import Failure
from selfvitmil.store.provenance import (
    BUILT,
    FRESH,
    MISSING,
    UP_TO_DATE,
    BuildOutcome,
    BuildStatus,
    Change,
    ChangeKind,
    Freshness,
    Provenance,
    State,
    compare_digests,
    damaged,
    failed,
    outcome_of,
    rebuilt,
    stale,
)

KEYS = st.text("abcdefgh_", min_size=1, max_size=6)
LEAVES = st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.booleans() | st.lists(st.integers())
SETTINGS = st.dictionaries(KEYS, LEAVES | st.dictionaries(KEYS, LEAVES, min_size=1, max_size=3), max_size=4)
INPUTS = st.dictionaries(KEYS, st.text("0123456789abcdef", min_size=8, max_size=8), max_size=4)


def stored(provenance: Provenance) -> Provenance:
    """As it comes back from a file."""
    settings, inputs = (json.loads(json.dumps(part)) for part in (provenance.settings, provenance.inputs))
    return replace(provenance, settings=settings, inputs=inputs)


def paths(settings: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every leaf of nested settings."""
    found: list[tuple[str, ...]] = []
    for key, value in settings.items():
        found += paths(value, (*prefix, key)) if isinstance(value, dict) else [(*prefix, key)]
    return found


def with_value(settings: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    head, *rest = path
    return {**settings, head: with_value(settings[head], tuple(rest), value) if rest else value}


def value_at(settings: dict[str, Any], path: tuple[str, ...]) -> Any:
    for key in path:
        settings = settings[key]
    return settings


@given(SETTINGS, INPUTS)
def test_what_was_just_written_is_up_to_date(settings: dict[str, Any], inputs: dict[str, str]):
    now = Provenance("tile", 1, settings, inputs)
    assert now.compare(stored(now)) == FRESH
    assert stored(now).digest == now.digest
    other_order = Provenance("tile", 1, dict(reversed(settings.items())), dict(reversed(inputs.items())))
    assert other_order.digest == now.digest


@given(SETTINGS, INPUTS, LEAVES, st.data())
def test_any_changed_setting_is_named(settings: dict[str, Any], inputs: dict[str, str], value: Any, data: Any):
    assume(settings)
    path = data.draw(st.sampled_from(paths(settings)))
    before = value_at(settings, path)
    assume(before != value)
    was, now = (Provenance("tile", 1, each, inputs) for each in (settings, with_value(settings, path, value)))
    assert now.compare(stored(was)) == stale(Change(ChangeKind.SETTING, ".".join(path), before, value))
    assert now.digest != was.digest


@given(SETTINGS, INPUTS, st.text("0123456789abcdef", min_size=8, max_size=8), st.data())
def test_any_changed_input_is_named(settings: dict[str, Any], inputs: dict[str, str], value: str, data: Any):
    assume(inputs)
    key = data.draw(st.sampled_from(sorted(inputs)))
    assume(inputs[key] != value)
    was, now = (Provenance("tile", 1, settings, each) for each in (inputs, {**inputs, key: value}))
    assert now.compare(stored(was)) == stale(Change(ChangeKind.INPUT, key, inputs[key], value))
    assert now.digest != was.digest


@given(SETTINGS, INPUTS)
def test_added_and_removed_inputs_are_named(settings: dict[str, Any], inputs: dict[str, str]):
    bare, more = Provenance("tile", 1, settings, inputs), Provenance("tile", 1, settings, {**inputs, "mask": "ab"})
    assert more.compare(bare) == stale(Change(ChangeKind.INPUT, "mask", None, "ab"))
    assert bare.compare(more) == stale(Change(ChangeKind.INPUT, "mask", "ab", None))
    assert more.compare(bare, optional={"mask"}) == bare.compare(more, optional={"mask"}) == FRESH
    other = replace(more, inputs={**inputs, "mask": "cd"})
    assert other.compare(more, optional={"mask"}) == stale(Change(ChangeKind.INPUT, "mask", "ab", "cd"))


def test_another_version_is_named_alone():
    was, now = Provenance("tile", 1, {"a": 1}, {}), Provenance("tile", 2, {"a": 2}, {"slide": "x"})
    assert now.compare(was) == stale(Change(ChangeKind.VERSION, "tile", 1, 2))
    assert now.digest != replace(now, version=1).digest


def test_several_changes_are_all_named():
    was = Provenance("tile", 1, {"tile": {"mpp": 0.5, "size_px": 224}, "stain": "slide"}, {"slide": "x", "mpp": None})
    now = Provenance("tile", 1, {"tile": {"mpp": 1.0, "size_px": 224}, "stain": "none"}, {"slide": "y", "mpp": 0.25})
    assert [(change.kind, change.name) for change in now.compare(was).changes] == [
        (ChangeKind.SETTING, "stain"),
        (ChangeKind.SETTING, "tile.mpp"),
        (ChangeKind.INPUT, "mpp"),
        (ChangeKind.INPUT, "slide"),
    ]
    words = "rebuilt: stain slide -> none, tile.mpp 0.5 -> 1.0, mpp None -> 0.25, slide changed"
    assert str(outcome_of(now.compare(was))) == words


def test_hashes_alone_say_that_something_changed():
    assert compare_digests("a", "a") == FRESH
    (unnamed,) = compare_digests("a", "b").changes
    assert unnamed.kind is ChangeKind.UNNAMED
    assert str(rebuilt(unnamed)) == "rebuilt: settings or inputs changed (recorded as a hash only)"
    lr = Change(ChangeKind.SETTING, "recipe.lr", 1, 2)
    assert compare_digests(None, "b", [lr]) == stale(lr)
    assert compare_digests("a", "a", [lr]) == FRESH


def test_outcomes_follow_from_freshness():
    assert outcome_of(MISSING) == BUILT
    assert outcome_of(FRESH) == UP_TO_DATE
    assert outcome_of(damaged(Path("x/a.h5"))) == rebuilt(Change(ChangeKind.DAMAGED_FILE, "a.h5"))
    assert (str(BUILT), str(UP_TO_DATE)) == ("built", "up to date")
    failure = Failure("a", "tile", "no tissue", "look")
    assert failed(failure).failure == failure
    assert str(failed(failure)) == "failed: no tissue"
    for outcome in (BUILT, UP_TO_DATE, failed(failure), outcome_of(damaged(Path("a.h5")))):  # workers send them back
        assert pickle.loads(pickle.dumps(outcome)) == outcome


def test_changes_belong_to_what_is_stale_and_failures_to_what_failed():
    change = Change(ChangeKind.MISSING_FILE, "a.jpg")
    for wrong in (
        lambda: Freshness(State.STALE),
        lambda: Freshness(State.MISSING, (change,)),
        lambda: BuildOutcome(BuildStatus.REBUILT),
        lambda: BuildOutcome(BuildStatus.BUILT, (change,)),
        lambda: BuildOutcome(BuildStatus.FAILED),
    ):
        with pytest.raises(AssertionError):
            wrong()
