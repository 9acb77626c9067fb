"""How long stages took, which makes the next `plan` better, and what was planned, which shows how good a plan was.

`run.json` keeps how long each stage took, for how many slides and under which conditions; `plan` extrapolates from
that. A plan writes nothing into the study, which may not even exist: its ranges lie in the user's folder of program
states until the next `run` of the same study under the same conditions has compared itself with them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil.engine import num_cores
from selfvitmil.errors import SelfVitMilError
from selfvitmil.store.files import hash_of, write_text

if TYPE_CHECKING:
    from selfvitmil.commands.run import RunPlan, RunRecord
    from selfvitmil.stages.base import Stage


def conditions_of(plan: RunPlan, device: str) -> str:
    """Return a hash of what times depend on beside the slides: settings, encoder, GPU and cores."""
    return hash_of(plan.settings, plan.encoder, plan.request.one_method, device, num_cores())


def timed_slides(plan: RunPlan, stage: Stage) -> int:
    """Return how many slides a stage's time is proportional to; 0 where it is not, or models may be used again."""
    if stage.name == "pretrain":  # its steps decide, and its own log has their rate
        return 0
    if stage.is_shared:
        return len(plan.pending(stage.name).changing)
    return len(plan.cohort) if plan.pending("embed").changing else 0


def expected_s(plan: RunPlan, stage: Stage, device: str, before: RunRecord | None, startup_s: float) -> float | None:
    """Return the seconds that a stage takes by what it took in earlier runs; None where they do not tell.

    What is beyond the start of workers grows in proportion to the slides.
    """
    slides = timed_slides(plan, stage)
    if (
        before is None
        or not slides
        or stage.name not in before.timings
        or before.conditions != conditions_of(plan, device)
    ):
        return None
    seconds, num_before = before.timings[stage.name]
    fixed_s = min(startup_s, seconds)
    return fixed_s + (seconds - fixed_s) * slides / num_before


# ---------------------------------------------------------------------------------------------------- the last plan


def plan_file(study: Path) -> Path:
    """Return where the last plan of a study lies until a run has used it. RuntimeError without a home directory."""
    base = os.environ.get("XDG_STATE_HOME")
    folder = Path(base) if base else Path.home() / ".local" / "state"
    return folder / "selfvitmil" / "plans" / f"{hash_of(str(study.resolve()))[:24]}.json"


def keep_plan(plan: RunPlan, device: str, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Store the least and most seconds of each stage; where that fails, the next run has nothing to compare with."""
    stages = {name: (plan.pending(name).line, *limits) for name, limits in ranges.items()}
    text = json.dumps({"conditions": conditions_of(plan, device), "stages": stages})
    with suppress(OSError, RuntimeError, SelfVitMilError):
        write_text(plan_file(plan.study.root), f"{text}\n")


def take_plan(plan: RunPlan, device: str) -> dict[str, tuple[float, float]]:
    """Return what was last planned for those stages that have the same to do now, and forget it."""
    try:
        path = plan_file(plan.study.root)
        info: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        if info["conditions"] != conditions_of(plan, device):
            return {}
        found = {name: (line, (float(low), float(high))) for name, (line, low, high) in info["stages"].items()}
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {
        name: limits for name, (line, limits) in found.items() if plan.has(name) and plan.pending(name).line == line
    }
