"""Made slides: lymph nodes in H&E with and without metastases, whose truth is known. A seed gives a cohort of files.

    truth = make_slide(Path("a.svs"), seed=1, lesions=2)        # truth.lesions: outlines in level-0 pixels
    make_cohort(Path("made"), slides=12, seed=1)                # slides, annotations, tables, truth

They serve the tests, the demo and the documentation, so they look like tissue: a capsule, sinuses, follicles, packed
lymphocytes, uneven staining, folds, dust; and lesions are told from normal tissue by their structure, large nuclei and
glands, not by their colour: its mean is by construction that of the tissue that they replace, its spread within a tile
about the same. Nothing learnt from them holds for patients.

`anatomy` decides (on a coarse `grid`) where everything lies, `painter` turns any window of that into concentrations of
the two stains with the pictures of `cells`, `colour` turns these into pixels, `pyramid` writes slide files, `slide` and
`cohort` put it together.
"""

from selfvitmil.slides.synthetic.cohort import (
    PlannedTruth,
    SlidePlan,
    finish_cohort,
    make_cohort,
    plan_cohort,
    write_planned,
)
from selfvitmil.slides.synthetic.slide import SlideTruth, make_hostile, make_slide, write_sparse_slide

__all__ = [
    "PlannedTruth",
    "SlidePlan",
    "SlideTruth",
    "finish_cohort",
    "make_cohort",
    "make_hostile",
    "make_slide",
    "plan_cohort",
    "write_planned",
    "write_sparse_slide",
]
