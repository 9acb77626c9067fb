"""A trained model as one portable folder, and inference with it on new slides.

    files.py      the folder: written atomically, opened only when unaltered
    ood.py        what the training slides were like, and when a new slide is out of distribution
    card.py       the model card
    inference.py  one slide's bag to a prediction; predictions.json and predictions.csv

The commands are `commands.package` and `commands.predict`.
"""

from selfvitmil.package.card import CARD_METRICS, model_card
from selfvitmil.package.files import (  # fmt: skip
    ENSEMBLE,
    FINAL_FIT,
    RESEARCH_ONLY,
    SETTINGS,
    Package,
    PackageParts,
    check_target,
    model_names,
    open_package,
    write_package,
)
from selfvitmil.package.inference import (  # fmt: skip
    JSON_HEAD,
    PredictedSlide,
    PredictionFiles,
    Predictor,
    add_predictions,
    short_fingerprint,
)
from selfvitmil.package.ood import OODFinding, SlideStatistics, TrainingDistribution, fit_distribution

__all__ = [
    "CARD_METRICS", "ENSEMBLE", "FINAL_FIT", "JSON_HEAD", "RESEARCH_ONLY", "SETTINGS", "OODFinding", "Package",
    "PackageParts", "PredictedSlide", "PredictionFiles", "Predictor", "SlideStatistics", "TrainingDistribution",
    "add_predictions", "check_target", "fit_distribution", "model_card", "model_names", "open_package",
    "short_fingerprint", "write_package",
]  # fmt: skip
