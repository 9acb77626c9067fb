"""The part of the page about encoders: how their training went, what it saw, and which tiles they take for similar."""

from __future__ import annotations

from selfvitmil.errors import MetricError
from selfvitmil.pseudonyms import Names
from selfvitmil.report.assessment import Course, assess, measurements
from selfvitmil.report.contents import Contents, EncoderFolder
from selfvitmil.report.curves import pretraining_figure, quality_figure
from selfvitmil.report.markup import Markup, bullets, facts, missing, section, tag
from selfvitmil.report.neighbors import neighbor_sections
from selfvitmil.report.pictures import figure
from selfvitmil.report.samples import sample_views
from selfvitmil.report.sections import encoder_words
from selfvitmil.settings import StudySettings

DOUBTFUL = (Course.COLLAPSED, Course.FELL)
"""Courses of which the sentence is a warning."""


def pretraining(study: Contents, names: Names, settings: StudySettings) -> Markup:
    """Every encoder of the study, views of the first one that was trained here, and nearest neighbours."""
    parts: list[str] = []
    trained = [encoder for encoder in study.encoders if encoder.metrics]
    for encoder in study.encoders:
        parts += _encoder(encoder, names)
        if trained and encoder is trained[0]:
            parts.append(sample_views(study, encoder, names))
    if not study.encoders:
        parts.append(missing("No encoder in this study yet", "pretrain"))
    return section("pretraining", "Pretraining", *parts, neighbor_sections(study, names, settings.slide.reader))


def _encoder(encoder: EncoderFolder, names: Names) -> list[str]:
    """What is known of an encoder, and the course of its training."""
    parts: list[str] = [tag("h3", encoder.name), tag("p", encoder_words(encoder) or "nothing is known of it")]
    if not encoder.metrics:
        return [*parts, tag("p", "No record of a training: it was not trained in this study.", class_="missing")]
    parts.append(_assessment(encoder))
    try:
        drawn = figure(pretraining_figure(encoder.metrics, f"Pretraining of {encoder.name}"), names)
    except MetricError as error:
        drawn = tag("p", str(error), class_="missing")
    beside = tag("div", _quality(encoder, names), _last_line(encoder))
    parts.append(tag("div", drawn, beside, class_="course"))
    alarms = dict.fromkeys(f"step {line['step']}: {line['alarm']}" for line in encoder.metrics if "alarm" in line)
    parts.append(bullets(list(alarms)[:3], "warnings"))
    return parts


def _assessment(encoder: EncoderFolder) -> str:
    """One sentence on the training, where its quality was measured."""
    warmup = encoder.provenance.get("warmup_steps")
    found = assess(measurements(encoder.metrics), _kept_step(encoder), warmup if isinstance(warmup, int) else 0)
    if found is None:
        return ""
    return tag("p", tag("strong", found.sentence), class_="warning" if found.course in DOUBTFUL else None)


def _quality(encoder: EncoderFolder, names: Names) -> str:
    measured = measurements(encoder.metrics)
    if not measured:
        return ""
    return figure(quality_figure(measured, _kept_step(encoder), f"Quality of {encoder.name}"), names)


def _kept_step(encoder: EncoderFolder) -> int | None:
    """Steps after which the weights of the encoder were taken; None where its config does not tell."""
    told = encoder.provenance.get("kept_step")
    return told if isinstance(told, int) else None


def _last_line(encoder: EncoderFolder) -> Markup:
    last = encoder.metrics[-1]
    shown = {
        "step": "last step", "loss": "loss", "teacher_entropy": "teacher entropy", "feature_rank": "feature rank",
        "knn20": "nearest-neighbour probe", "linear": "linear probe", "tiles_per_s": "tiles per second",
        "data_wait_share": "share of time waiting for tiles",
    }  # fmt: skip
    return facts((name, f"{last[key]:.4g}") for key, name in shown.items() if isinstance(last.get(key), int | float))
