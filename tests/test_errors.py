"""Errors: three texts for people, one code for programs."""

from __future__ import annotations

import ast
import pickle
import re
import sys
from pathlib import Path

import pytest

from selfvitmil import errors, open_slide
from selfvitmil.errors import CohortError, CohortProblems, SlideError, raise_problems
from selfvitmil.stages.base import say_nothing_done

DOCS = Path(__file__).parents[1] / "docs"
SOURCE = Path(errors.__file__).parent


def test_error_says_what_why_and_how():
    error = SlideError("a.svs: the slide cannot be opened", "it is truncated", "Copy it again", code="unreadable")
    assert str(error) == "a.svs: the slide cannot be opened, it is truncated. Copy it again"
    assert error.reason == "a.svs: the slide cannot be opened, it is truncated"
    assert SlideError("what").code == ""


def test_code_and_texts_survive_pickling():
    error = SlideError("what", "why", "how", code="no-mpp")
    error.transient = True
    copied = pickle.loads(pickle.dumps(error))
    assert (copied.what, copied.why, copied.how, copied.code, copied.transient) == (
        "what",
        "why",
        "how",
        "no-mpp",
        True,
    )
    several = pickle.loads(pickle.dumps(CohortProblems("what", problems=(CohortError("a", code="one-class"),))))
    assert several.code == "several-problems"
    assert [problem.code for problem in several.problems] == ["one-class"]


def test_one_problem_is_raised_as_it_is():
    only = CohortError("a", code="one-class")
    with pytest.raises(CohortError) as caught:
        raise_problems([only], "cohort.csv")
    assert caught.value is only
    raise_problems([], "cohort.csv")


def test_errors_page_lists_every_code(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    import make_errors_page  # pyright: ignore[reportMissingImports]

    raised = {row[:2] for path in make_errors_page.SOURCE.rglob("*.py") for row in make_errors_page.codes(path)}
    listed = set(
        re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", (DOCS / "reference" / "errors.md").read_text(), re.MULTILINE)
    )
    assert listed == raised, "run `python docs/make_errors_page.py`"
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code) for code, _ in raised)


def test_every_error_in_the_source_has_a_code():
    """Also an error that is only constructed here, as it is raised elsewhere; a code may be passed on as a variable."""
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)} - {"CohortProblems"}
    without = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in classes and "code" not in {keyword.arg for keyword in node.keywords}:
                    without.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {name} without code=")
    assert not without, "\n".join(without)


def test_copy_of_an_error_that_says_nothing_was_done_keeps_code_and_fields():
    problem = CohortError("a", code="one-class")
    several = CohortProblems("what", "why", "Fix them", problems=(problem,))
    changed = say_nothing_done(several, several.how)
    assert (changed.code, changed.what, changed.how) == ("several-problems", "what", "Fix them. Nothing was done")
    assert isinstance(changed, CohortProblems)
    assert changed.problems == (problem,)
    assert pickle.loads(pickle.dumps(changed)).how == changed.how


def test_missing_slide_has_the_documented_code(tmp_path: Path):
    with pytest.raises(SlideError) as caught:
        open_slide(tmp_path / "missing.svs")
    assert caught.value.code == "file-not-found"
