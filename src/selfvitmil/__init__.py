"""Whole-slide images and slide labels to a classifier, an honest evaluation and heatmaps.

    import selfvitmil as sv

    study = sv.Study.create("study", cohort="slides/", labels="labels.csv", preset="quick")
    study.run()
    slide = sv.open_slide("slide.svs")
    encoder = sv.Encoder.load("study/encoders/dino")
    model = sv.aggregators.DSMIL(dim=encoder.dim, num_classes=1)

Heavy dependencies (torch, OpenSlide) are imported when a name that needs them is first used.
"""

# No `from __future__ import annotations` here: it would shadow the module selfvitmil.annotations.
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selfvitmil import aggregators, metrics
    from selfvitmil.api import Study
    from selfvitmil.encoder import Encoder
    from selfvitmil.slides import Slide, open_slide

__version__ = "0.1.0"
__all__ = ["Encoder", "Slide", "Study", "__version__", "aggregators", "metrics", "open_slide"]

_MODULES = ("aggregators", "metrics")
_HOME = {"Encoder": "encoder", "Slide": "slides", "Study": "api", "open_slide": "slides"}
"""Lazily imported names and the modules that define them."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"selfvitmil.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"selfvitmil.{_HOME[name]}"), name)
    raise AttributeError(f"module 'selfvitmil' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
