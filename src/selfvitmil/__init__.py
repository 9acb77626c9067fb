"""Whole-slide images and slide labels to a classifier, an honest evaluation and maps of where the evidence lies."""

# No `from __future__ import annotations` here: it would shadow the module selfvitmil.annotations.
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selfvitmil.slides import Slide, open_slide

__version__ = "0.1.0"
__all__ = ["Slide", "__version__", "open_slide"]


def __getattr__(name: str) -> Any:
    # The readers load OpenSlide; `import selfvitmil` alone must stay light.
    if name in ("Slide", "open_slide"):
        from selfvitmil import slides

        return getattr(slides, name)
    raise AttributeError(f"module 'selfvitmil' has no attribute {name!r}")
