"""A trained model as one portable folder, and its answers for new slides.

    expected.py   what the training slides were like, and in what a new slide differs from them
    files.py      the folder: written whole, opened only when unaltered
    card.py       the model card
    inference.py  one slide's bag to an answer
    predictions.py   predictions.json and predictions.csv of all calls into one folder

The commands are `commands.package` and `commands.predict`.
"""

from __future__ import annotations

from selfvitmil.package.card import FIGURES, model_card
from selfvitmil.package.expected import Expected, Measures, Outside, expect
from selfvitmil.package.files import (
    RESEARCH_ONLY,
    SETTINGS,
    Package,
    PackagedEncoder,
    PackageParts,
    check_target,
    open_package,
    write_package,
)
from selfvitmil.package.inference import JSON_HEAD, Answer, Predictor, add_answers, short_fingerprint
from selfvitmil.package.predictions import Predictions

__all__ = [
    "FIGURES",
    "JSON_HEAD",
    "RESEARCH_ONLY",
    "SETTINGS",
    "Answer",
    "Expected",
    "Measures",
    "Outside",
    "Package",
    "PackageParts",
    "PackagedEncoder",
    "Predictions",
    "Predictor",
    "add_answers",
    "check_target",
    "expect",
    "model_card",
    "open_package",
    "short_fingerprint",
    "write_package",
]
