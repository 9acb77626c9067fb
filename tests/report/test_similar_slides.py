"""Similar slides on the page: who stands beside whom, and under which names."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from PIL import Image

from selfvitmil.bags.retrieval import SIMILAR, SimilarSlide, write_similar
from selfvitmil.cohort import Cohort, read_cohort
from selfvitmil.pseudonyms import names_of
from selfvitmil.report.neighbors import similar_slides_data
from selfvitmil.report.render import Picture
from selfvitmil.store.layout import StudyLayout

SLIDES = ("Meier_1", "Meier_2", "Huber_1", "Kunz_1")
AGREEMENT = {"k": 2, "share": {"value": 0.75, "low": 0.5, "high": 1.0}, "chance": 0.4, "num_queries": 4}


def study(folder: Path) -> tuple[StudyLayout, Cohort, dict[str, Path]]:
    layout = StudyLayout(folder)
    rows = [f"{name},/x/{name}.svs,{name.split('_')[0]},{'ba'[name == 'Kunz_1']}" for name in SLIDES]
    layout.cohort.write_text("\n".join(["slide,path,patient,label", *rows]) + "\n")
    similar = {name: [SimilarSlide(other, 0.9) for other in SLIDES if other[:2] != name[:2]] for name in SLIDES}
    write_similar(layout.slide_features("t", "vit_mean"), similar, AGREEMENT)
    Image.fromarray(np.full((40, 60, 3), 200, np.uint8)).save(folder / "picture.jpg")
    return layout, read_cohort(layout.cohort), dict.fromkeys(SLIDES[:3], folder / "picture.jpg")


def test_queries_of_every_label_stand_before_the_slides_like_them(tmp_path: Path):
    layout, cohort, pictures = study(tmp_path)
    data = similar_slides_data(layout, cohort, pictures, names_of(tmp_path, cohort, pseudonyms=False))
    assert data is not None
    queries = [each.slide for each in data.slides if each.similarity is None]
    assert queries == ["Huber_1", "Kunz_1", "Meier_1", "Meier_2"]
    assert [each.slide for each in data.slides[:4]] == ["Huber_1", "Meier_1", "Meier_2", "Kunz_1"]
    assert "0.75 (0.50 to 1.00)" in data.agreement
    assert {isinstance(each.picture, Picture) for each in data.slides if each.slide == "Kunz_1"} == {False}


def test_pseudonyms_hide_every_name(tmp_path: Path):
    layout, cohort, pictures = study(tmp_path)
    random.seed(0)
    names = names_of(tmp_path, cohort, pseudonyms=True)
    data = similar_slides_data(layout, cohort, pictures, names)
    assert data is not None
    assert all(word not in repr(names.apply(data)) for word in ("Meier", "Huber", "Kunz"))


def test_nothing_is_shown_without_a_readable_table(tmp_path: Path):
    layout, cohort, pictures = study(tmp_path)
    names = names_of(tmp_path, cohort, pseudonyms=False)
    (layout.slide_features("t", "vit_mean") / SIMILAR).write_text(
        "slide,rank,similar,similarity\nMeier_1,1,Huber_1,near\n"
    )
    assert similar_slides_data(layout, cohort, pictures, names) is None
    assert similar_slides_data(StudyLayout(tmp_path / "other"), cohort, pictures, names) is None
