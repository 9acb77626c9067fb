"""The commands as functions: each takes a study folder and settings, runs its stage over the cohort, writes artefacts.

Together with `cli` this is the only place that knows several stages. Every function returns a `Summary`; slides that
failed are in `failures.csv` by then and did not stop the others. Functions that work on slides take the `Engine` to do
it with, so that one command starts its workers once.

    study.py      what all share: settings, cohort, lock, one stage over all slides
    slides.py     synth, check, tile
    splitting.py  split
    encoders.py   pretrain, embed, export; pretraining.py which slides an encoder may see
    learning.py   train, evaluate, compare; lesions.py what `--lesions` adds to the last two; methods.py which they have
    localizing.py localize; products.py what its workers make from a map
    packaging.py  package
    predicting.py predict
    reporting.py  report
    viewing.py    view
    demo.py       demo
    starting.py   init
    running.py    run; outlook.py what it has before it, door.py what stops it, record.py how far it is
    planning.py   plan, with the help of measuring.py
    watching.py   status
    examining.py  doctor
"""

from selfvitmil.pipeline.demo import demo, start_demo
from selfvitmil.pipeline.encoders import embed, export, pretrain
from selfvitmil.pipeline.examining import doctor, doctor_summary
from selfvitmil.pipeline.learning import FeatureChoice, compare, evaluate, train
from selfvitmil.pipeline.lesions import compare_lesions, evaluate_lesions
from selfvitmil.pipeline.localizing import localize
from selfvitmil.pipeline.outlook import Request
from selfvitmil.pipeline.packaging import package
from selfvitmil.pipeline.planning import plan
from selfvitmil.pipeline.predicting import predict, predict_settings
from selfvitmil.pipeline.reporting import report
from selfvitmil.pipeline.running import run
from selfvitmil.pipeline.slides import check, synth, tile
from selfvitmil.pipeline.splitting import split
from selfvitmil.pipeline.starting import init
from selfvitmil.pipeline.study import CohortSource, Summary, study_settings
from selfvitmil.pipeline.viewing import export_view, view
from selfvitmil.pipeline.watching import status

__all__ = [
    "CohortSource",
    "FeatureChoice",
    "Request",
    "Summary",
    "check",
    "compare",
    "compare_lesions",
    "demo",
    "doctor",
    "doctor_summary",
    "embed",
    "evaluate",
    "evaluate_lesions",
    "export",
    "export_view",
    "init",
    "localize",
    "package",
    "plan",
    "predict",
    "predict_settings",
    "pretrain",
    "report",
    "run",
    "split",
    "start_demo",
    "status",
    "study_settings",
    "synth",
    "tile",
    "train",
    "view",
]
