"""The commands as functions: each takes a study folder and settings, runs its stage over the cohort, writes artefacts.

Together with `cli` this is the only place that knows several stages. Every function returns a `Summary`; slides that
failed are in `failures.csv` by then and did not stop the others. Functions that work on slides take the `Engine` to do
it with, so that one command starts its workers once.

    study.py      what all share: settings, cohort, lock, one stage over all slides
    slides.py     synth, check, tile
    encoders.py   pretrain, embed, export
    learning.py   train, evaluate, compare
    demo.py       demo
"""

from selfvitmil.pipeline.demo import demo, start_demo
from selfvitmil.pipeline.encoders import embed, export, pretrain
from selfvitmil.pipeline.learning import FeatureChoice, compare, evaluate, train
from selfvitmil.pipeline.slides import check, synth, tile
from selfvitmil.pipeline.study import CohortSource, Summary, study_settings

__all__ = [
    "CohortSource",
    "FeatureChoice",
    "Summary",
    "check",
    "compare",
    "demo",
    "embed",
    "evaluate",
    "export",
    "pretrain",
    "start_demo",
    "study_settings",
    "synth",
    "tile",
    "train",
]
