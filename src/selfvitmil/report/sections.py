"""The parts of the page about the whole study, in the order of the data. Each takes the contents and gives its HTML."""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

from selfvitmil import __version__
from selfvitmil.formatting import duration
from selfvitmil.pseudonyms import Names
from selfvitmil.report.contents import Contents, EncoderFolder, Record, Results
from selfvitmil.report.markup import Markup, bullets, join, missing, section, table, tag, unfold
from selfvitmil.report.pictures import picture_file
from selfvitmil.report.result_sections import counted, is_optimistic
from selfvitmil.settings import StudySettings

RESEARCH = "For research use only. Not a medical device."
RESEARCH_MORE = (
    "Nothing on this page is a diagnosis, and nothing on it may be used to diagnose, treat or manage a patient. Scores "
    "and maps show what a statistical model responds to, not what the tissue is."
)
GALLERY_PX = 300
"""Longer edge of a picture in the gallery."""
PACKAGES = ("torch", "timm", "numpy", "scipy", "matplotlib", "pillow", "h5py", "openslide-python", "openslide-bin")
PACKAGES += ("tifffile", "simplejpeg", "safetensors", "shapely")


def research_note() -> Markup:
    """The statement at the top and at the bottom."""
    return tag("p", tag("strong", RESEARCH), " ", RESEARCH_MORE, class_="research")


# ---------------------------------------------------------------------------------------------------- what was run


def overview(study: Contents, names: Names) -> Markup:
    """What there is, stage by stage, and the settings behind it."""
    rows = list(_stages(study))
    changed = _changed_settings(study.settings)
    notes = [*(study.cohort.warnings if study.cohort else ()), *study.problems]
    return section(
        "overview",
        "What was run",
        table(("stage", "what there is", ""), rows, kind="stages"),
        tag("h3", "Settings that are not the default"),
        table(("setting", "value", "default", "where"), changed, kind="settings")
        if changed
        else tag("p", "None: every stage ran with its default settings."),
        unfold("All settings of every stage", *_all_settings(study.settings)),
        tag("h3", "Notes") if notes else "",
        bullets(names.text(note) for note in notes),
    )


def _stages(study: Contents) -> Iterable[tuple[str, str, str]]:
    cohort = study.cohort
    if cohort is None:
        yield "cohort", "no cohort.csv", ""
    else:
        yield "cohort", f"{len(cohort)} slides of {len(cohort.patients)} patients", counted(cohort.class_counts)
    for tiling in study.tilings:
        tiles = sum(int(row["tiles"]) for row in tiling.rows.values() if row.get("tiles", "").isdigit())
        if tiling.rows:
            yield "tiles", tiling.name, f"{tiles:,} tiles of {len(tiling.rows)} slides"
        else:
            yield "tiles", tiling.name, "a coarser scale" if study.tilings else ""
    for encoder in study.encoders:
        yield "encoder", encoder.name, encoder_words(encoder)
    for name, number in study.bags.items():
        yield "vectors", name, f"{number} slides"
    if study.models:
        yield "models", f"{study.models} trained", ""
    for results in study.results:
        yield "results", results.name, _results_words(results)
    for maps in study.maps:
        yield "maps", maps.model, f"{len(maps.files)} slides"
    if not study.tilings:
        yield "tiles", "none yet", ""


def encoder_words(encoder: EncoderFolder) -> str:
    """Network, method, length and slides of a training."""
    own, told = encoder.config.get("selfvitmil") or {}, encoder.provenance
    parts = [str(encoder.config.get("architecture", "")), str(told.get("method", ""))]
    parts += _steps_words(told)
    parts += [f"trained on: {own['trained_on']}"] if own.get("trained_on") else []
    return ", ".join(filter(None, parts))


def _steps_words(told: Mapping[str, Any]) -> list[str]:
    """Length of a training, and which of its weights were kept where these are not the last."""
    total = told.get("total_steps")
    if not isinstance(total, int):
        return []
    ended, kept = (value if isinstance(value := told.get(key), int) else total for key in ("ended_step", "kept_step"))
    length = f"{total:,} steps" if ended >= total else f"stopped early after {ended:,} of {total:,} steps"
    return [length] if kept >= ended else [length, f"weights of step {kept:,} kept"]


def _results_words(results: Results) -> str:
    number = len(results.methods)
    if not number:
        return "no metrics"
    method = str(results.methods[0].get("method", ""))
    doubts = ", OPTIMISTIC protocol" if is_optimistic(results) else ""
    doubts += ", transductive" if any(told.get("transductive") for told in results.methods) else ""
    return (method if number == 1 else f"{number} methods compared") + doubts


def _changed_settings(settings: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Settings beside artefacts that differ from the defaults; a row for each value, with the places that have it."""
    defaults = _flat(StudySettings().model_dump(mode="json"))
    found: dict[tuple[str, str], list[str]] = {}
    for where, told in settings.items():
        for key, value in _flat(told).items():
            if value != defaults.get(key):
                found.setdefault((key, _plain(value)), []).append(where)
    return [
        (key, value, _plain(defaults.get(key)), ", ".join(_stages_of(places)))
        for (key, value), places in sorted(found.items())
    ]


def _stages_of(places: Sequence[str]) -> list[str]:
    """Places, told by their stage where all would be too long."""
    return list(places) if len(places) <= 2 else list(dict.fromkeys(place.split("/")[0] for place in places))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _plain(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _all_settings(settings: Mapping[str, Mapping[str, Any]]) -> list[Markup]:
    """Equal ones once, under all places that have them."""
    texts: dict[str, list[str]] = {}
    for where, told in settings.items():
        lines = [f"{key} = {_plain(value)}" for key, value in _flat(told).items()]
        if lines:
            texts.setdefault("\n".join(lines), []).append(where)
    return [join((tag("h4", ", ".join(places)), tag("pre", text))) for text, places in texts.items()]


# ---------------------------------------------------------------------------------------------------- slides


def cohort(study: Contents, names: Names) -> Markup:
    """How many slides and patients of each label there are in each split."""
    if study.cohort is None:
        return section("cohort", "Cohort", missing("This study has no cohort.csv that can be read"))
    rows = study.cohort.rows
    splits = sorted({row.split or "" for row in rows}, key=_split_order)
    labels = [*study.cohort.classes, *([None] if study.cohort.unlabelled else [])]
    lines: list[list[str]] = []
    for label in labels:
        own = [row for row in rows if row.label == label]
        counts = [str(sum((row.split or "") == split for row in own)) for split in splits]
        annotated = sum(row.annotation is not None for row in own)
        lines.append(
            [label or "no label", *counts, str(len(own)), str(len({row.patient for row in own})), str(annotated)]
        )
    totals = [str(sum((row.split or "") == split for row in rows)) for split in splits]
    annotated = sum(row.annotation is not None for row in rows)
    lines.append(["all", *totals, str(len(rows)), str(len(study.cohort.patients)), str(annotated)])
    header = ("label", *(split or "no split" for split in splits), "slides", "patients", "annotated")
    del names
    return section(
        "cohort",
        "Cohort",
        table(header, lines, kind="counts"),
        tag("p", "Every slide with what was decided: see ", tag("a", "all slides", href="#slides"), "."),
    )


def _split_order(split: str) -> tuple[int, str]:
    known = ("train", "val", "test")
    return (known.index(split) if split in known else len(known), split)


def tissue(study: Contents, names: Names) -> Markup:
    """A picture of every slide with the tissue that was found and the tiles that were kept."""
    tiling = next((one for one in study.tilings if one.pictures), None)
    if tiling is None:
        return section("tissue", "Tissue and tiles", missing("No slide was cut into tiles yet", "tile"))
    parts: list[Markup] = []
    for slide in _by_shown_name((slide for slide in tiling.pictures), names):
        shown, row = names.slide(slide), tiling.rows.get(slide, {})
        image = picture_file(tiling.pictures[slide], f"tissue and tiles of {shown}", edge_px=GALLERY_PX, quality=72)
        parts.append(tag("figure", image or missing("This picture cannot be read"), _tissue_caption(shown, row)))
    others = [one.name for one in study.tilings if one is not tiling and one.pictures]
    return section(
        "tissue",
        "Tissue and tiles",
        tag("p", f"Tiles {tiling.name}. Green: outline of the tissue found; blue: tiles kept."),
        tag("p", f"Pictures of other tilings are in the study: {', '.join(others)}.") if others else "",
        tag("div", *parts, class_="gallery"),
    )


def _tissue_caption(shown: str, row: Record) -> Markup:
    counted = [f"{row['tiles']} tiles"] if row.get("tiles") else []
    counted += [f"{float(row['tissue_mm2']):.3g} mm²"] if _is_float(row.get("tissue_mm2")) else []
    warning = row.get("warnings", "")
    return tag(
        "figcaption",
        tag("strong", shown),
        tag("br"),
        ", ".join(counted),
        tag("span", warning, class_="warning") if warning else "",
    )


def _is_float(text: str | None) -> bool:
    try:
        return text is not None and float(text) == float(text)
    except ValueError:
        return False


def _by_shown_name(slides: Iterable[str], names: Names) -> list[str]:
    """In the order of what they are called on the page, which tells nothing of their true names."""
    return sorted(slides, key=names.slide)


# ---------------------------------------------------------------------------------------------------- the end


def failures(study: Contents, names: Names) -> Markup:
    """What could not be done."""
    rows = [
        (names.slide(failure.slide), failure.stage, names.text(failure.reason), names.text(failure.remedy))
        for failure in study.failures
    ]
    rows.sort()
    body = table(("slide", "stage", "reason", "what to do"), rows, kind="failures") if rows else tag("p", "None.")
    return section("failures", "Failures", body)


def timings(study: Contents, names: Names) -> Markup:
    """What artefacts tell of the time they took."""
    del names
    rows = [
        (f"pretraining of {encoder.name}", f"about {duration(seconds)}")
        for encoder in study.encoders
        if (seconds := pretraining_seconds(encoder)) is not None
    ]
    for results in study.results:
        for record in results.records:
            if _is_float(record.get("training_seconds")):
                name = record.get("display_name", "")
                what = f"{results.name}: {name}{_trainings(results, name)}"
                rows.append((what, duration(float(record["training_seconds"]))))
    if not rows:
        return section(
            "timings", "Timings", tag("p", "Nothing in this study tells how long it took.", class_="missing")
        )
    note = "Pretraining: by the pace that its record tells. Trainings: all of a method, those of earlier runs too."
    return section("timings", "Timings", table(("what", "time"), rows, kind="timings"), tag("p", note, class_="note"))


def _trainings(results: Results, name: str) -> str:
    """How many trainings a row of a comparison rests on: of all splits and seeds."""
    number = sum(len(told.get("trainings") or []) for told in results.methods if told.get("method") == name)
    return f", {number} training{'s' * (number > 1)}" if number else ""


def pretraining_seconds(encoder: EncoderFolder) -> float | None:
    """Seconds of a pretraining by its steps and its pace; None where these are not known."""
    batch = (encoder.settings.get("pretrain") or {}).get("batch")
    lines = [line for line in encoder.metrics if line.get("tiles_per_s") and "step" in line]
    if not lines or not isinstance(batch, int):
        return None
    steps = [
        lines[0]["step"] + 1,
        *(line["step"] - before["step"] for before, line in itertools.pairwise(lines)),
    ]
    return sum(number * batch / line["tiles_per_s"] for number, line in zip(steps, lines, strict=True))


def versions(study: Contents, names: Names) -> Markup:
    """The program that wrote this page and what it stands on."""
    del study, names
    rows = [("selfvitmil", __version__), ("Python", platform.python_version())]
    rows.append(("system", f"{platform.system()} {platform.machine()}"))
    for package in PACKAGES:
        try:
            rows.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    note = "Of the program that wrote this page; earlier stages may have been run with others."
    return section("versions", "Versions", tag("p", note), table(("", "version"), rows, kind="versions"))
