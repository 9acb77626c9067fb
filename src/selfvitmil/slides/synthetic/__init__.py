"""Synthetic slides: H&E lymph nodes with and without metastases and known ground truth, reproducible from a seed.

    slide = make_slide(Path("a.svs"), seed=1, lesions=2)        # slide.lesions: contours in level-0 pixels
    make_cohort(Path("synthetic"), slides=12, seed=1)           # slides, annotations, tables, ground truth

They are used in the tests, the demo and the documentation, so they resemble tissue: a capsule, sinuses, follicles,
packed lymphocytes, uneven staining, folds, dust. Lesions differ from normal tissue in morphology (large nuclei,
glands), not in colour: their mean colour is by construction that of the tissue they replace, and the spread within a
tile is about the same. Results on synthetic slides do not carry over to patients.

`anatomy` decides on a coarse grid where everything is, `painter` renders any window of it as concentrations of the two
stains, `colour` converts these to pixels, `pyramid` writes slide files, and `cohort` writes slides and cohorts.
"""

from selfvitmil.slides.synthetic.cohort import (
    CohortSlide,
    SlidePlan,
    SyntheticSlide,
    finish_cohort,
    make_cohort,
    make_problem_files,
    make_slide,
    plan_cohort,
    write_planned,
    write_sparse_slide,
)

__all__ = [
    "CohortSlide", "SlidePlan", "SyntheticSlide", "finish_cohort", "make_cohort", "make_problem_files", "make_slide",
    "plan_cohort", "write_planned", "write_sparse_slide",
]  # fmt: skip
