"""The objective that the settings ask for."""

from __future__ import annotations

from typing import Any

from selfvitmil.pretrain.objectives.contract import Objective
from selfvitmil.pretrain.objectives.dino import Dino, DinoNumbers
from selfvitmil.pretrain.objectives.lejepa import Lejepa
from selfvitmil.pretrain.objectives.simclr import Simclr
from selfvitmil.pretrain.objectives.simdino import Simdino
from selfvitmil.settings import PretrainSettings


def make_objective(settings: PretrainSettings, out_dim: int, freeze_steps: int) -> Objective:
    """A new objective; `out_dim` and `freeze_steps` are what DINO's settings of these names come to for the run."""
    width: int = settings.chosen("bottleneck")
    head: dict[str, Any] = {"head_width": settings.head_width, "head_layers": settings.head_layers}
    match settings.method:
        case "dino":
            names = (
                "norm_last_layer",
                "student_temp",
                "centering",
                "center_momentum",
                "koleo",
                "kde",
                "kde_concentration",
            )
            own = {name: getattr(settings, name) for name in names}
            return Dino(DinoNumbers(out_dim=out_dim, bottleneck=width, freeze_steps=freeze_steps, **head, **own))
        case "simdino":
            return Simdino(width, eps=settings.coding_eps, **head)
        case "lejepa":
            return Lejepa(width, weight=settings.sigreg, directions=settings.directions, seed=settings.seed, **head)
        case "simclr":
            return Simclr(width, settings.temperature)
