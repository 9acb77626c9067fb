"""The page of a study: whole, honest about what is missing, and fit to be mailed."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape
from PIL import Image

from helpers import heatmaps
from helpers.report_study import (
    EVALUATE,
    FILE,
    GONE,
    MODEL,
    NASTY,
    PATIENTS,
    SECRETS,
    TRAIN,
    WRONG,
    lesion_scores,
    make_heatmap,
    plant,
    predictions,
    result,
)
from selfvitmil import cli
from selfvitmil.cohort import SlideRow, make_cohort, write_cohort
from selfvitmil.engine import Outcome
from selfvitmil.errors import ArtefactError, ConfigError
from selfvitmil.evaluate.comparison import comparison_row, evaluated_on, write_results
from selfvitmil.evaluate.comparison_table import table_csv
from selfvitmil.evaluate.method_metrics import Estimator, score_method
from selfvitmil.evaluate.protocol import Run
from selfvitmil.localize import overlay
from selfvitmil.localize.detection import RANKS_ONLY
from selfvitmil.localize.heatmap import read_heatmap, write_heatmap
from selfvitmil.localize.lesion_results import (
    SCORES,
    compare_lesions,
    write_lesion_table,
)
from selfvitmil.pseudonyms import Names, give_pseudonyms
from selfvitmil.report import data as report_data
from selfvitmil.report import encoders, read_report_data, render, slide_sections, write_report
from selfvitmil.report.data import StudyFiles, decision_of
from selfvitmil.settings import StudySettings
from selfvitmil.slides import open_slide
from selfvitmil.stages import report as report_stage
from selfvitmil.store.failures import Failure
from selfvitmil.store.files import write_csv, write_text
from selfvitmil.store.layout import StudyLayout
from selfvitmil.store.provenance import UP_TO_DATE
from selfvitmil.study import Study

ANCHORS = ("answer", "evaluation", "comparison", "localization", "errors", "slides", "calibration", "subgroups")
ANCHORS += ("heatmaps", "pretraining", "tissue", "cohort", "overview", "failures", "timings", "definitions", "versions")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant(tmp_path_factory.mktemp("jane doe") / "made study")


@pytest.fixture(scope="module")
def plain(study: Path) -> str:
    return write_report(study, StudySettings()).path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def hidden(study: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("out") / "mailed.html"
    return write_report(study, StudySettings(), out=out, pseudonyms=True).path.read_text(encoding="utf-8")


class Page(HTMLParser):
    """All that a browser would see: elements, attributes, texts, what is inside pictures."""

    VOID = ("br", "img", "meta")
    UNSEEN = ("style", "script")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append((self.open[-1] if self.open else "", data))

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(data for tag, data in self.words if tag not in self.UNSEEN).split())

    @property
    def pictures(self) -> list[tuple[str, bytes, str]]:
        """Kind, content and alternative text."""
        found = []
        for image in self.named("img"):
            head, data = str(image["src"]).split(",", 1)
            found.append((head, base64.b64decode(data), str(image["alt"])))
        return found

    @property
    def everything(self) -> str:
        """Whatever could give a name away."""
        attributes = [str(value) for _, told in self.tags for key, value in told.items() if key != "src"]
        inside = [content.decode("utf-8" if "svg" in kind else "latin-1") for kind, content, _ in self.pictures]
        return "\n".join([self.text, *attributes, *inside])


# ---------------------------------------------------------------------------------------------------- the page


def test_page_is_whole_and_needs_nothing_else(plain: str):
    made = Page(plain)
    assert [told["id"] for told in made.named("section")] == list(ANCHORS)
    assert not {"link", "iframe", "object", "b", "i"} & {tag for tag, _ in made.tags}
    assert made.named("script") == [{}]
    anchors = {told["id"] for _, told in made.tags if "id" in told}
    assert {str(told["href"]) for told in made.named("a")} <= {f"#{anchor}" for anchor in anchors}
    assert all(str(told["src"]).startswith(("data:image/webp;", "data:image/svg+xml;")) for told in made.named("img"))
    assert all(told["alt"] for told in made.named("img"))
    assert not any("://" in str(value) for _, told in made.tags for key, value in told.items() if key != "src")
    assert not [told for _, told in made.tags if "style" in told or any(key.startswith("on") for key in told)]


def test_policy_allows_the_style_and_nothing_from_outside(plain: str):
    policy = next(str(told["content"]) for told in Page(plain).named("meta") if "http-equiv" in told)
    css = re.search(r"<style>(.*?)</style>", plain, re.DOTALL)
    assert css is not None
    digest = base64.b64encode(hashlib.sha256(css.group(1).encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in policy
    script = re.search(r"<script>(.*?)</script>", plain, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script.group(1).encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "url(" not in css.group(1)
    assert "@import" not in css.group(1)


def test_research_statement_stands_at_both_ends(plain: str):
    text = Page(plain).text
    assert text.count("For research use only. Not a medical device.") == 2
    assert text.rindex("Not a medical device") > text.index("Versions Of the program")


def test_page_tells_what_the_study_holds(study: Path, plain: str):
    text = Page(plain).text
    told = json.loads((study / "results" / MODEL / "metrics.json").read_text())["methods"][0]["slide"]["ensemble"]
    auc = told["auc"]
    assert f"AUC {auc['value']:.3f} {auc['low']:.3f} to {auc['high']:.3f}" in text
    assert "normal 0 1 1 1 0 tumor 1 2 3 3 0 all 1 3 4 4 0" in text  # train, test, slides, patients, annotated
    assert "tile.size_px 112 224 " in text  # value and default
    covered = f"{SCORES['coverage'][:1].upper()}{SCORES['coverage'][1:]}"
    assert f"{covered} 0.500 [0.500 to 0.500]" in text  # one of two tiles
    assert "From score 0.5 on: covers 50% of 0.00627 mm² annotated tumour, marks 0 mm² outside." in text
    assert f"Left out: {WRONG}: it is positive and has no annotation" in text
    assert "1 of 3 test slides are misclassified" in text
    assert "0.988 0.0031" in text  # the lesion
    assert "compare: self-vit-mil, 1 training 1.0 min" in text
    # 10 steps of 32 tiles by its settings, at 8 tiles a second
    assert "pretraining of vit about 40 s" in text
    alts = [alt for _, _, alt in Page(plain).pictures]
    assert {
        "Pretraining of vit",
        f"ROC of {GONE}",
        f"tissue and tiles of {NASTY}",
        f"heatmap of {NASTY} by {MODEL}",
    } <= {*alts}


def test_slides_that_are_called_negative_have_no_lesions(plain: str):
    text = Page(plain).text
    assert text.count(f"Predicted normal, not tumor: {RANKS_ONLY}.") == 2
    assert "0.778" not in text


def test_names_are_text_whatever_they_hold(plain: str):
    assert NASTY in Page(plain).text
    assert "<b>" not in plain
    assert "Meier &lt;b&gt;H&amp;E" in plain


def hostile_study(study: Path, folder: Path, evil: str) -> Path:
    """A copy of the study with a hostile text in every file that the report reads texts from."""
    copied = Path(shutil.copytree(study, folder))
    for path in (*copied.rglob("*.csv"), *copied.rglob("*.json"), *copied.rglob("*.toml")):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".csv":
            words = HOSTILE_WORDS if path.name == "cohort.csv" else (*HOSTILE_WORDS, TRAIN, "nothing", "self-vit-mil")
            write_csv(path, [[replaced(cell, words, evil) for cell in row] for row in csv.reader(io.StringIO(text))])
        elif path.suffix == ".json":
            path.write_text(json.dumps(renamed(json.loads(text), evil)), encoding="utf-8")
        else:
            path.write_text(text + f"\n[{json.dumps(evil)}]\nkey = {json.dumps(evil)}\n", encoding="utf-8")
    for path in sorted((copied / "maps").rglob("*.h5")):
        told = read_heatmap(path)
        own = told.prediction
        classes = tuple(name.replace("tumor", evil) for name in own.classes)
        own = replace(own, shown=evil, decision=own.decision.replace("tumor", evil), classes=classes)
        write_heatmap(path, replace(told, prediction=own, warnings=(evil,), kind=evil, method=evil), "x")
    lines = [{"step": 3, "loss": 1.0, "alarm": evil}]
    (copied / "encoders/vit/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return copied


def renamed(value: Any, evil: str) -> Any:
    """JSON whose free texts and names of classes are hostile, its keys and enums as before."""
    if isinstance(value, dict):
        return {
            replaced(key, HOSTILE_WORDS, evil): evil if key in FREE_TEXTS else renamed(own, evil)
            for key, own in value.items()
        }
    if isinstance(value, list):
        return [renamed(own, evil) for own in value]
    return replaced(value, (*HOSTILE_WORDS, "self-vit-mil"), evil) if isinstance(value, str) else value


def replaced(text: str, words: Sequence[str], evil: str) -> str:
    for word in words:
        text = text.replace(word, evil)
    return text


HOSTILE_WORDS = ("tumor", "cannot be read")
FREE_TEXTS = ("architecture", "trained_on", "encoder", "tiling", "words", "threshold_from", "why", "from", "mapped")
FREE_TEXTS += ("probabilities",)


@pytest.mark.parametrize(
    ("evil", "pseudonyms"),
    [
        ("<script>alert(1)</script>", False),
        ("<script>alert(1)</script>", True),
        ("\"><img src=x onerror='alert(1)'>{{ 7 * 7 }}{% raw %}", False),
        ("</title></style><svg/onload=alert(1)>' onmouseover='alert(1) &lt;", False),
    ],
)
def test_hostile_texts_are_escaped_in_every_section(study: Path, tmp_path: Path, evil: str, pseudonyms: bool):
    copied = hostile_study(study, tmp_path / "study", evil)
    made = write_report(copied, StudySettings(), out=tmp_path / "r.html", pseudonyms=pseudonyms)
    text = made.path.read_text(encoding="utf-8")
    page = Page(text)  # fails where a text opens or closes an element
    assert [told["id"] for told in page.named("section")] == list(ANCHORS)
    assert {tag for tag, _ in page.tags} <= ALLOWED_TAGS
    attributes = {key for _, told in page.tags for key in told}
    assert attributes <= ALLOWED_ATTRIBUTES
    assert evil not in re.sub(r'src="data:[^"]*"', "", text)
    assert "49" not in [word for kind, word in page.words if kind == "dd"]  # no template inside a text is run
    parts = dict(re.findall(r'<section id="(\w+)">(.*?)</section>', text, re.DOTALL))
    shown = {anchor for anchor, part in parts.items() if str(escape(evil)) in part}
    assert shown == {*ANCHORS} - {"versions", "definitions", "subgroups"}


ALLOWED_TAGS = {
    *("html", "head", "meta", "style", "title", "body", "header", "main", "footer", "nav", "section", "article", "div"),
    *("span", "p", "h1", "h2", "h3", "h4", "a", "br", "ul", "li", "dl", "dt", "dd", "strong", "code", "pre", "details"),
    *("table", "caption", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "img", "summary"),
}
ALLOWED_TAGS |= {"script", "svg", "line", "button"}
ALLOWED_ATTRIBUTES = {
    *("alt", "src", "width", "height", "class", "id", "href", "lang", "aria-label", "aria-hidden", "tabindex", "role"),
    *("charset", "http-equiv", "content", "name", "scope", "type", "title", "popover", "popovertarget"),
    *("viewbox", "preserveaspectratio", "x1", "x2", "y1", "y2"),
}


def test_tiles_are_those_of_the_map_in_their_order(study: Path, plain: str):
    heatmap = make_heatmap(NASTY, 0.9)
    order = sorted(range(16), key=lambda row: -float(heatmap.score[row]))
    shown = [(content, alt) for _, content, alt in Page(plain).pictures if alt.startswith("tile at")]
    assert len(shown) == 12  # one slide is there; 8 most and 4 least of its 16 tiles
    with open_slide(study / "files" / f"{FILE}.svs") as slide:
        for (content, alt), row in zip(shown, [*order[:8], *order[:11:-1]], strict=True):
            x, y = heatmap.coords_l0[row]
            assert alt == f"tile at x {x}, y {y}, score {heatmap.score[row]:.3f}"
            pixels = np.asarray(Image.open(io.BytesIO(content)), dtype=float)
            assert np.abs(pixels - slide.read_tile(int(x), int(y), 112, 0.5)).mean() < 8  # what WebP loses


def test_missing_slide_file_is_said(plain: str):
    text = Page(plain).text
    assert text.count("Tiles are not shown, since the slide's file cannot be used") == 2
    assert "gone.svs: no such file" in text


def test_equal_studies_give_equal_pages(study: Path, plain: str, hidden: str, tmp_path: Path):
    again = write_report(study, StudySettings(), out=tmp_path)
    assert again.path == tmp_path / "index.html"
    assert again.path.read_text(encoding="utf-8") == plain
    once_more = write_report(study, StudySettings(), out=tmp_path / "b.html", pseudonyms=True)
    assert once_more.path.read_text(encoding="utf-8") == hidden
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.html", "index.html"]


class Elsewhere:
    """In place of an Engine: jobs and results travel as between processes, in another order, and one worker dies."""

    num_local = 2

    def map(self, function: Any, items: Mapping[str, Any], *, stage: str) -> Iterator[Outcome[Any]]:
        for number, (name, item) in enumerate(reversed(items.items())):
            failure = Failure(name, stage, "the worker died", "") if number == 1 else None
            made = pickle.loads(pickle.dumps(function(pickle.loads(pickle.dumps(item)))))
            yield Outcome(name, made if failure is None else None, failure, 0.0)


def test_sections_read_by_workers_give_the_same_page(
    study: Path, plain: str, hidden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(report_data, "WORTH_WORKERS", 2)
    engine: Any = Elsewhere()
    for page, pseudonyms in ((plain, False), (hidden, True)):
        made = write_report(study, StudySettings(), out=tmp_path, pseudonyms=pseudonyms, engine=engine)
        assert made.path.read_text(encoding="utf-8") == page


def test_no_folder_of_this_machine_is_told(study: Path, plain: str, hidden: str):
    for text in (plain, hidden):
        told = Page(text).everything
        for folder in (str(study), str(study.parent), str(Path.home()) + "/", "/home", "jane doe"):
            assert folder not in told
        assert "z.log" in told  # only the folders are cut
        assert '"weights.pt"' in told
        assert "made study" in told  # the study's name is its title


# ---------------------------------------------------------------------------------------------------- pseudonyms


def test_pseudonyms_leave_no_name(study: Path, hidden: str):
    for told in (Page(hidden).everything.casefold(), unescape(re.sub(r'src="data:[^"]*"', "", hidden)).casefold()):
        for secret in SECRETS:
            assert secret.casefold() not in told
        assert "meier" not in told
    key = (study / "pseudonyms.csv").read_text()
    assert all(secret.replace('"', '""') in key for secret in PATIENTS)
    pseudonyms = {line.split(",")[-1] for line in key.splitlines()[1:]}
    assert {word for word in pseudonyms if word in Page(hidden).text} == pseudonyms


def test_names_stay_without_pseudonyms(plain: str):
    told = Page(plain).everything
    assert all(name in told for name in PATIENTS)


def test_overlays_are_drawn_anew_under_pseudonyms(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    titles: list[str] = []
    draw = overlay.draw_overlay

    def recorded(*args: Any, **kwargs: Any) -> Image.Image:
        titles.append(kwargs["title"])
        return draw(*args, **kwargs)

    monkeypatch.setattr(overlay, "draw_overlay", recorded)
    write_report(study, StudySettings(), out=tmp_path)
    assert titles == []  # the stored pictures do
    made = Page(write_report(study, StudySettings(), out=tmp_path, pseudonyms=True).path.read_text(encoding="utf-8"))
    key = give_pseudonyms(study, [], [])["slide"]
    assert titles == [key[NASTY]]
    assert [alt for _, _, alt in made.pictures if alt.startswith("heatmap of")] == [
        f"heatmap of {key[NASTY]}",
        f"heatmap of {key[NASTY]} by {MODEL}",
    ]
    assert made.text.count("No picture of this heatmap: the stored one shows the slide's name") == 2


def test_maps_of_further_models_are_small_and_show_no_name(study: Path, tmp_path: Path):
    """The first model's map has its page with words; others lie below it as pictures of the tissue alone."""
    copied = Path(shutil.copytree(study, tmp_path / "study"))
    shutil.copytree(copied / "maps" / MODEL, copied / "maps" / "vit_dsmil")
    for pseudonyms in (False, True):
        page = Page(write_report(copied, StudySettings(), pseudonyms=pseudonyms).path.read_text(encoding="utf-8"))
        shown = give_pseudonyms(copied, [], [])["slide"][NASTY] if pseudonyms else NASTY
        found = [content for _, content, alt in page.pictures if alt == f"heatmap of {shown} by vit_dsmil"]
        assert len(found) == 1
        assert max(Image.open(io.BytesIO(found[0])).size) <= slide_sections.OTHER_PX


def test_pseudonyms_are_kept_and_new_names_get_new_ones(tmp_path: Path):
    first = give_pseudonyms(tmp_path, ["a1", "b2", "c3"], ["p"])
    before = StudyLayout(tmp_path).pseudonyms.read_bytes()
    assert give_pseudonyms(tmp_path, ["b2", "a1"], ["p"]) == first
    assert StudyLayout(tmp_path).pseudonyms.read_bytes() == before
    later = give_pseudonyms(tmp_path, ["a1", "0new"], ["q"])
    assert {**later["slide"], **first["slide"]} == later["slide"]
    assert sorted(later["slide"].values()) == [f"slide-{number:03d}" for number in range(1, 5)]
    assert len(set(later["patient"].values())) == 2


def test_pseudonyms_look_like_no_name(tmp_path: Path):
    given_names = give_pseudonyms(tmp_path, ["slide-001", "Specimen_2"], ["slide_9"])
    assert {word.split("-")[0] for word in given_names["slide"].values()} == {"s1"}
    assert list(given_names["patient"].values()) == ["patient-001"]


def test_damaged_key_is_an_error(tmp_path: Path):
    StudyLayout(tmp_path).pseudonyms.write_text("kind,name\nslide,a\n")
    with pytest.raises(ArtefactError, match="not a readable table of pseudonyms"):
        give_pseudonyms(tmp_path, ["a"], [])


TOLD = Names(
    {"S-100": "slide-001", "S-100_b": "slide-002", "12": "slide-003", "tumor": "slide-004"},
    {"Doe, Jane": "patient-001", "S-100": "patient-002"},
    {"acc77.svs": "slide-001.svs"},
    common=frozenset({"tumor"}),
    folders=("/data/Doe, Jane", "/data"),
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("S-100: no tissue", "slide-001: no tissue"),
        ("s-100_patches.h5 and S-100_b", "slide-001_patches.h5 and slide-002"),
        ("S-1000, XS-100 and S-100", "S-1000, XS-100 and slide-001"),
        ("12 tiles of 12.svs; 12: empty", "12 tiles of slide-003.svs; slide-003: empty"),
        ("3 normal, 4 tumor; tumor.svs", "3 normal, 4 tumor; slide-004.svs"),
        ("by Doe, Jane (ACC77.SVS)", "by patient-001 (slide-001.svs)"),
        ("see /data/Doe, Jane/x.svs", "see x.svs"),
        ("read '/mnt/my slides/a.svs' at 0.5 um/px", "read 'a.svs' at 0.5 um/px"),
        ("file:///home/u/a.svs and/or tiles/a.h5", "a.svs and/or tiles/a.h5"),
        ("of /srv/Jane van Doe/a.svs, see b/c", "of a.svs, see b/c"),
        ("left in /home and /tmp/x", "left in  and x"),
        ("a / b / c, 1/2, </p>", "a / b / c, 1/2, </p>"),
    ],
)
def test_texts_are_made_fit_to_be_mailed(text: str, shown: str):
    assert TOLD.text(text) == shown


def test_figure_with_a_name_over_two_lines_is_left_out():
    svg = "<svg><text>{}</text></svg>"
    assert TOLD.svg(svg.format("of S-100 &lt;1&gt;")) == svg.format("of slide-001 &lt;1&gt;")
    assert TOLD.svg("<svg><text>by Doe,</text><text>Jane</text></svg>") is None
    assert TOLD.svg("<svg><!-- Doe, Jane --><text>x</text></svg>") == "<svg><text>x</text></svg>"


# ---------------------------------------------------------------------------------------------------- what is missing


def test_study_with_a_cohort_alone(tmp_path: Path):
    write_cohort(tmp_path / "cohort.csv", make_cohort([SlideRow("a", tmp_path / "a.svs")]))
    made = write_report(tmp_path, StudySettings())
    text = Page(made.path.read_text(encoding="utf-8")).text
    for line in (
        "No slide was cut into tiles yet: run selfvitmil tile .",
        "No encoder in this study yet: run selfvitmil pretrain .",
        "No comparison of methods yet: run selfvitmil compare .",
        "No results yet: run selfvitmil evaluate .",
        "Heatmaps were not compared with annotations yet: run selfvitmil evaluate --lesions .",
        "No slide was evaluated yet: run selfvitmil evaluate .",
        "No heatmaps yet: run selfvitmil localize .",
        "Failures None.",
        "no label 1 1 1 0",
    ):
        assert line in text
    assert (made.num_sections, made.num_mapped, made.problems) == (0, 0, ())


def test_unreadable_files_are_told_and_stop_nothing(study: Path, tmp_path: Path):
    broken = tmp_path / "broken"
    for part in ("results/r", "maps/m", "encoders/e", "tiles/t"):
        (broken / part).mkdir(parents=True)
    for file in ("results/r/metrics.json", "results/r/predictions.csv", "maps/m/s.h5", "tiles/t/s.jpg", "cohort.csv"):
        (broken / file).write_bytes(b"\xff\x00 nothing of ours")
    (broken / "encoders/e/settings.toml").write_text("= 3")
    made = write_report(broken, StudySettings())
    assert len(made.problems) == 5
    text = Page(made.path.read_text(encoding="utf-8")).text
    assert "s.h5: not a readable" in text
    assert "This picture cannot be read" in text
    assert "encoders/e/settings.toml cannot be read (TOMLDecodeError)" in text


@pytest.mark.parametrize("folder", ["nowhere", "empty"])
def test_what_is_no_study_is_refused(tmp_path: Path, folder: str):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"{folder}: not a study"):
        write_report(tmp_path / folder, StudySettings())
    assert not (tmp_path / folder / "report").exists()


def test_results_are_chosen_by_name(study: Path, tmp_path: Path):
    made = write_report(study, StudySettings(), out=tmp_path, results=("compare",))
    text = Page(made.path.read_text(encoding="utf-8")).text
    assert "No method was evaluated by itself yet" in text
    with pytest.raises(ConfigError, match=f"there are compare, {MODEL}"):
        write_report(study, StudySettings(), results=("other",))


# ---------------------------------------------------------------------------------------------------- which slides


def test_sections_go_to_positives_and_errors_first(study: Path):
    decisions = StudyFiles.read(study).decisions()
    mapped = [WRONG, NASTY, GONE]
    assert [slide_sections.choose_slides(mapped, decisions, Names(), most) for most in (9, 2, 1, 0)] == [
        [NASTY, WRONG, GONE],  # by probability: 0.9, 0.3, 0.2
        [NASTY, WRONG],
        [NASTY],
        [],
    ]
    late = {**decisions, NASTY: replace(decisions[NASTY], part="train")}
    assert slide_sections.choose_slides(mapped, late, Names(), 9) == [WRONG, GONE, NASTY]
    data = read_report_data(study, StudySettings(), most_slides=1)
    assert ([one.name for one in data.slide_sections], data.num_mapped) == ([NASTY], 3)


def test_decisions_of_several_classes():
    row = replace(predictions(None)[0], score=(0.2, 0.1, 0.7), decision=2, label=1, threshold=None)
    found = decision_of(row, ("a", "b", "c"))
    assert (found.probability, found.shown, found.predicted, found.label) == (0.7, "c", "c", "b")
    assert found.is_correct is False


def test_of_equal_scores_what_is_behind_decides():
    behind = {"attention": np.array([0.1, 0.4, 0.2, 0.3], np.float32)}
    high, low = slide_sections.ends(
        replace(heatmaps.make_heatmap(4, 1), score=np.ones(4, np.float32), columns=behind), 2
    )
    assert (high.tolist(), low.tolist()) == ([1, 3], [0, 2])


@given(scores=st.lists(st.integers(0, 5), max_size=30), most=st.integers(1, 10))
def test_ends_of_a_map(scores: list[int], most: int):
    heatmap = replace(heatmaps.make_heatmap(1, 1), score=np.array(scores, dtype=np.float32), columns={})
    high, low = (part.tolist() for part in slide_sections.ends(heatmap, most))
    assert not set(high) & set(low)
    assert len(high) + len(low) == min(len(scores), 2 * most)
    assert 0 <= len(high) - len(low) <= 1
    rest = [row for row in range(len(scores)) if row not in {*high, *low}]
    assert [scores[row] for row in high] == sorted(scores, reverse=True)[: len(high)]
    assert [scores[row] for row in low] == sorted(scores)[: len(low)]
    assert all(scores[row] <= min(scores[h] for h in high) for row in rest)


# ---------------------------------------------------------------------------------------------------- parts


def test_columns_of_numbers_are_found():
    table = render.Table.of(("name", "n", "time"), [("12 a", 1234, "3.5 s"), ("7", "-", "")])
    assert table.number_columns == [False, True, True]


def test_limits_stand_below_their_value_and_stay_text():
    assert render.limits_below("0.9 [0.8, 1.0]") == '0.9<span class="limits">[0.8, 1.0]</span>'
    assert render.limits_below("<b> [<i>]") == '&lt;b&gt;<span class="limits">[&lt;i&gt;]</span>'
    assert render.limits_below("<b>") == "&lt;b&gt;"


def test_data_has_no_name_under_pseudonyms(study: Path):
    """What templates get is renamed already: they could not show a name."""
    told = repr(read_report_data(study, StudySettings(), pseudonyms=True)).casefold()
    assert not [secret for secret in SECRETS if secret.casefold() in told]
    assert str(study).casefold() not in told


def test_course_of_a_pretraining_is_drawn():
    lines = [{"step": 0, "loss": 1.0, "knn20": None}, {"step": 5, "loss": float("nan"), "linear": 0.7}]
    figure = encoders.draw_pretraining(lines, "T")
    drawn = {axes.get_title(): axes.get_lines() for axes in figure.axes if axes.axison}
    assert {title: line[0].get_xdata().tolist() for title, line in drawn.items()} == {
        "loss": [0],
        "probe: linear classifier": [5],
    }
    assert encoders.pretraining_figure(lines, "T") == encoders.pretraining_figure(lines, "T")


def test_maps_of_several_models_stand_in_one_table(tmp_path: Path):
    scores = lesion_scores()
    write_lesion_table(tmp_path / "results" / "compare", compare_lesions({"ours": scores, "theirs": scores}, "theirs"))
    # The lesion is as small as isolated tumour cells, which FROC does not count: there is no curve.
    (tmp_path / "results" / "compare" / "froc.svg").write_text("<svg><title>FROC of ours</title></svg>")
    made = Page(write_report(tmp_path, StudySettings()).path.read_text(encoding="utf-8"))
    assert "ours - 0.500 [0.500, 0.500]" in made.text
    assert [alt for _, _, alt in made.pictures] == ["FROC of ours"]
    (tmp_path / "results" / "compare" / "lesions.md").unlink()  # for people only
    assert Page(write_report(tmp_path, StudySettings()).path.read_text(encoding="utf-8")).text == made.text


def test_optimistic_results_say_so(tmp_path: Path):
    rows = tuple(replace(row, protocol="optimistic") for row in result().predictions)
    one = result(protocol="optimistic", predictions=rows)
    write_results(tmp_path / "results" / "r_optimistic", [one], [score_method(one, EVALUATE)], EVALUATE)
    text = Page(write_report(tmp_path, StudySettings()).path.read_text(encoding="utf-8")).text
    assert "OPTIMISTIC: epoch and threshold were chosen on the test slides" in text


@pytest.mark.parametrize(
    ("overlap", "words"),
    [
        (False, "20 normal, 20 tumor, each in one of 5 splits"),
        (True, "4 normal, 4 tumor in 5 of 5 splits, which overlap"),
    ],
)
def test_slides_and_trainings_of_all_splits_are_told(overlap: bool, words: str, tmp_path: Path):
    rows = [
        replace(row, slide=f"s{0 if overlap else split}_{k}", split=f"fold{split}", label=k % 2, seed=seed)
        for split in range(5)
        for seed in (0, 1, None)
        for k, row in enumerate(8 * predictions(seed)[:1])
    ]
    runs = tuple(Run(f"fold{split}", seed, 3, UP_TO_DATE, 60.0, (), {}, {}) for split in range(5) for seed in (0, 1))
    one = result(predictions=tuple(rows), runs=runs)
    scored, folder = score_method(one, EVALUATE), tmp_path / "results"
    write_results(folder / "alone", [one], [scored], EVALUATE)
    write_results(folder / "compare", [one], [scored], EVALUATE)
    write_text(folder / "compare" / "table.csv", table_csv([comparison_row(one, scored, evaluated_on(one, "c"))]))
    text = Page(write_report(tmp_path, StudySettings()).path.read_text(encoding="utf-8")).text
    assert f"test slides {words}" in text
    assert "compare: self-vit-mil, 10 trainings 10 min" in text
    assert "took no time" not in text
    estimator = Estimator.WITHIN_OVERLAPPING_SPLITS if overlap else Estimator.WITHIN_FOLDS
    assert estimator.words in text
    assert estimator.conditional_on in text
    assert "Stale" not in text


def test_metrics_of_an_earlier_version_that_ranked_splits_together_are_called_stale(tmp_path: Path):
    one = result()
    rows = [replace(row, split=f"fold{k}", slide=f"{row.slide}{k}") for k in range(2) for row in one.predictions]
    runs = tuple(replace(run, split=f"fold{k}") for k in range(2) for run in one.runs)
    for name, own in (("single", one), ("folds", replace(one, predictions=tuple(rows), runs=runs))):
        write_results(tmp_path / "results" / name, [own], [score_method(own, EVALUATE)], EVALUATE)
        file = tmp_path / "results" / name / "metrics.json"
        file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), "format_version": 1}), encoding="utf-8")
    found = {each.name: each.is_stale for each in StudyFiles.read(tmp_path).results}
    assert found == {"single": False, "folds": True}
    text = Page(write_report(tmp_path, StudySettings()).path.read_text(encoding="utf-8")).text
    assert text.count("Stale: ") == 1


# ---------------------------------------------------------------------------------------------------- the command


def test_command(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as done:
        cli.main(["report", str(study), "--slides", "1", "--out", str(tmp_path / "r.html"), "--pseudonyms"])
    assert done.value.code == 0
    told = capsys.readouterr().out
    assert "1 of 3 slides with heatmaps have a section (--slides 1)" in told
    assert "pseudonyms.csv in the study is the key" in told
    assert "r.html: one page of" in told
    assert "2 further slides with heatmaps have no section" in Page((tmp_path / "r.html").read_text("utf-8")).text
    with pytest.raises(SystemExit) as failed:
        cli.main(["report", str(tmp_path / "nowhere")])
    assert failed.value.code == 2
    with pytest.raises(ConfigError, match="--slides -1"):
        report_stage.report(Study(study, StudySettings()), slides=-1)
