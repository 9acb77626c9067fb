"""Writes docs/reference/benchmarks.md from benchmarks/results/; `make docs` calls it, a test holds it current."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

HEAD = """# Benchmarks

One script per claim in `benchmarks/`; each lets its contenders take turns in one run, checks that they compute the
same, and ends in one JSON line. `python benchmarks/all.py` runs all that fit a machine and writes
`benchmarks/results/`, from which `make docs` makes this page; edit neither.

*Limit* is what must be reached, *aim* what is hoped for. Ratios hold from machine to machine; seconds do not. *Busy*:
other work ran on the machine at the same time, so the figure is worse than it should be. *Log*: there is no result in
`results/`; the figure was measured earlier and is written down in the [experiments](../experiments/README.md).
"""


@dataclass(frozen=True)
class Row:
    """One claim."""

    what: str
    result: str
    """File in results/, without suffix."""
    key: str
    """Where the figure stands in its result; dots lead inside."""
    unit: str = ""
    beside: str = ""
    """The reference that it is measured against."""
    sense: Literal[">=", "<"] = ">="
    limit: float | None = None
    aim: float | None = None
    log: float | None = None
    """The figure of docs/experiments, shown where there is no result."""


SECTIONS: dict[str, list[Row]] = {
    "Slides to tiles": [
        Row("reading, a 40x slide without a 20x level", "reading", "ratio_no20x", "x", "openslide-python and an area "
            "resize; bare decoding is 10.9x", ">=", 5, 10.9, 7.5),
        Row("reading, a 40x slide with a 20x level", "reading", "ratio_with20x", "x", "the same; bare decoding is 4.4x",
            ">=", 3, 4.4, 4.0),
        Row("JPEG 2000, imagecodecs (not used: 79 MB for this)", "jpeg2000", "ratio.imagecodecs", "x",
            "openslide-python, whose way is ours", log=1.4),
        Row("slide to tile table", "tiling", "seconds_table", "s", "TRIDENT's Otsu: 0.76 s for 704 tiles", "<", 0.076,
            log=0.013),
        Row("memory, a slide of 100,000 x 100,000", "tiling", "peak_mb_100k", "MB", log=441),
        Row("stain, one map per slide", "stain", "ratio", "x", "torchstain on every tile", log=16),
        Row("stain, every tile for itself", "stain", "ratio_own_tile", "x", "torchstain on every tile"),
    ],
    "Slides to report, one GPU": [
        Row("140 slides of 5,376 px, without pretraining", "end_to_end_cuda", "seconds_without_pretraining", "s",
            "preset quick, 5 seeds", "<", aim=60),
        Row("embedding them", "end_to_end_cuda", "seconds.embed", "s", "", "<", aim=4),
        Row("comparing 13 rows with 5 seeds", "end_to_end_cuda", "seconds.compare", "s", "", "<", aim=25),
        Row("heatmaps", "end_to_end_cuda", "seconds.localize", "s", "", "<", aim=8),
        Row("lesions", "end_to_end_cuda", "seconds.lesions", "s", "", "<", aim=8),
        Row("report", "end_to_end_cuda", "seconds.report", "s", "", "<", aim=8),
        Row("its size, with sections of 40 slides by 11 methods", "end_to_end_cuda", "report_mb", "MB", "", "<", 10),
        Row("start of the process, with imports and checks", "end_to_end_cuda", "seconds.start", "s"),
    ],
    "Encoders, one H200": [
        Row("DINO, ViT-B/16, 2 x 224 + 8 x 96, end to end", "pretrain_cuda", "tiles_per_s", "tiles/s",
            "DINO's main_dino.py: 350", ">=", 800, 1000, 896),
        Row("LeJEPA, the same network and views, tiles in memory", "pretrain_lejepa_cuda", "tiles_per_s", "tiles/s", "",
            ">=", 1000, log=1072),
        Row("preset quick, tiles in memory", "pretrain_quick_cuda", "tiles_per_s", "tiles/s", "eager: 1,822; with a "
            "batch of 512: 13,240", aim=12000, log=11309),
        Row("its start-up, nothing compiled before", "pretrain_quick_cuda", "start_s", "s", "", "<", aim=30, log=33.7),
        Row("embedding, ViT-B/16, compute alone", "embed_cuda", "tiles_per_s_compute", "tiles/s", "eager: 9,000", ">=",
            11000, 14000, 11762),
        Row("the same from slides, 16 cores", "embed_cuda", "tiles_per_s_end_to_end", "tiles/s",
            "reading alone: 9,200", log=6400),
        Row("embedding, share of time without tiles", "embed_cuda", "data_wait_share", "", "", "<", aim=0.1, log=0.38),
        Row("slide file to answer, ViT-S/16, a slide of 8,192 px", "predict_cuda", "cuda.slide_s", "s", log=1.65),
    ],
    "Encoders, CPU": [
        Row("embedding, share of a large product's rate", "embed", "fraction_of_sgemm", "", "sgemm, one thread", ">=",
            0.9, log=0.87),
        Row("slide file to answer, ViT-S/16, a small slide", "predict", "cpu.slide_s", "s"),
    ],
    "Learning from labels": [
        Row("a comparison of small bags on a GPU, 13 rows with 5 seeds", "turns_cuda", "seconds.in_turns", "s",
            "one training after the other: see `ratio`", "<", aim=25, log=58.7),
        Row("the same, trainings in turns against one after the other", "turns_cuda", "ratio", "x", log=3.1),
        Row("DSMIL step, 4,576 x 3,840", "aggregate", "ratio_dense", "x", "the dense form; the byte limit is 60x",
            ">=", 20, 60),
        Row("the same, as time", "aggregate", "ms_step", "ms", "copying the same bytes: see `ms_copy`"),
        Row("memory of a bag of 200,000 x 3,840", "aggregate_cuda", "peak_mb_beyond_features", "MB", "", "<", 4000,
            log=411),
        Row("50 epochs over 270 bags, one H200", "mil_epoch_cuda", "seconds", "s", "the paper: 22.5 hours on a V100",
            "<", 60, 10, 12.8),
        Row("one epoch over 270 bags, CPU", "mil_epoch", "seconds_per_epoch", "s", "the paper: 27 minutes on a V100"),
    ],
    "Maps": [
        Row("a map of 200,000 tiles", "localize", "map.seconds_all", "s", "", "<", 10),
        Row("its memory", "localize", "map.peak_mb", "MB", "", "<", 1000),
        Row("GeoJSON of it, memory", "localize", "geojson.grew_mb", "MB", "", "<", 200),
        Row("four pictures of a slide of 4,096 px, processor time", "localize", "pictures.core_seconds", "s",
            "before scores were drawn by cells: 1.94", log=0.99),
    ],
    "Start-up": [
        Row("`selfvitmil --help`", "startup", "help_s", "s", "", "<", 0.15),
        Row("first line of the slowest command", "startup", "first_line_s", "s", "it says that PyTorch is being loaded",
            "<", 1.5),
    ],
    "Viewer, 50 clients on 20 slides": [
        Row("95 of 100 tiles within, first time", "view", "cold_p95_s", "s", "", "<", 0.5),
        Row("95 of 100 tiles within, again", "view", "cached_p95_s", "s", "", "<", 0.1),
        Row("growth of memory", "view", "growth_mb", "MB", "", "<", 300),
        Row("first picture of 100,000 x 100,000", "view", "first_picture_s", "s", "", "<", 1),
    ],
}  # fmt: skip


def page(folder: Path = RESULTS) -> str:
    """The page from the results in `folder`."""
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    text = HEAD
    for title, rows in SECTIONS.items():
        text += f"\n## {title}\n\n| what | measured | limit | aim | beside | script |\n|---|---|---|---|---|---|\n"
        text += "".join(line(row, results.get(row.result)) for row in rows)
    return text + scaling(results.get("scaling")) + machines(results)


STAGES = ("check", "tile", "embed", "compare", "evaluate", "localize", "lesions", "report")
"""Those whose work grows with the slides."""


def scaling(record: Mapping[str, Any] | None) -> str:
    """How seconds and memory grow with the number of slides."""
    if record is None:
        return ""
    cohorts, result = record["result"]["cohorts"], record["result"]
    sizes = [f"{each['slides']:,}" for each in cohorts]
    text = (
        "\n## Growth with the number of slides\n\n"
        "Tiny synthetic slides (about 8 tiles each), two workers, two steps of pretraining, three methods, one seed:\n"
        "`scaling.py`. Seconds are processor time of all processes. The exponent is the slope between the last two\n"
        "sizes: 1 is linear. Memory is the peak of the command with its workers, mapped files left out.\n\n"
        "![Seconds and memory of each stage](../pictures/scaling.svg)\n\n"
    )
    heads = [f"{size} slides" for size in sizes]
    text += f"| stage | {' | '.join(heads)} | exponent | memory, {sizes[-1]} slides | exponent |\n"
    text += f"|---|{'---|' * len(sizes)}---|---|---|\n"
    for stage in STAGES:
        seconds = [f"{each['cpu_s'].get(stage, 0.0):,.1f} s" for each in cohorts]
        slopes = [result[key][stage][-1] for key in ("exponent_seconds", "exponent_mb")]
        time_slope, memory_slope = ("" if slope is None else f"{slope:.2f}" for slope in slopes)
        cells = [stage, *seconds, time_slope, f"{cohorts[-1]['peak_mb'][stage]:,} MB", memory_slope]
        text += f"| {' | '.join(cells)} |\n"
    return text


def scaling_figure(record: Mapping[str, Any]) -> str:
    """Draw seconds and memory of every stage over the number of slides, as SVG."""
    from matplotlib.figure import Figure

    from selfvitmil.evaluate.figures import to_svg

    cohorts = record["result"]["cohorts"]
    slides = [each["slides"] for each in cohorts]
    figure = Figure(figsize=(9, 3.6), layout="constrained", label="Seconds and memory over the number of slides")
    panels = figure.subplots(1, 2)
    for axes, key, words in zip(panels, ("cpu_s", "peak_mb"), ("processor seconds", "peak memory, MB"), strict=True):
        for stage in STAGES:
            axes.plot(slides, [max(each[key].get(stage, 0.0), 0.1) for each in cohorts], marker="o", label=stage)
        axes.set(xscale="log", yscale="log", xlabel="slides", ylabel=words)
    ends = [cohorts[-1]["cpu_s"]["tile"] * number / slides[-1] for number in slides]
    panels[0].plot(slides, ends, color="0.6", linestyle="--", label="linear")
    panels[1].set_ylim(100, 10_000)
    panels[0].legend(fontsize="x-small", ncols=2)
    return to_svg(figure)


def line(row: Row, record: Mapping[str, Any] | None) -> str:
    sense = "at least " if row.sense == ">=" else "under "
    limit = "" if row.limit is None else f"{sense}{number(row.limit, row.unit)}"
    aim = "" if row.aim is None else number(row.aim, row.unit)
    name = row.result.removesuffix("_cuda")
    script = "`pretrain.py`" if name.startswith("pretrain_") else f"`{name}.py`"
    return f"| {row.what} | {measured(row, record)} | {limit} | {aim} | {row.beside} | {script} |\n"


def measured(row: Row, record: Mapping[str, Any] | None) -> str:
    """The figure, whether it reaches its limit, and what to think of it."""
    value: Any = record["result"] if record else None
    for part in row.key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    notes = ["busy"] if record is not None and value is not None and record["busy"] else []
    if value is None and row.log is not None:
        value, notes = row.log, ["log"]
    if value is None:
        return "not measured"
    if row.limit is not None and not (value >= row.limit if row.sense == ">=" else value < row.limit):
        notes.append("**limit not reached**")
    return number(value, row.unit) + (f" ({', '.join(notes)})" if notes else "")


def number(value: float, unit: str) -> str:
    words = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{words}{unit}" if unit == "x" else f"{words} {unit}".strip()


def machines(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Where and with what each result was measured."""
    if not results:
        return "\nThere are no results yet: `python benchmarks/all.py`.\n"
    text = (
        "\n## Where\n\n| result | command | machine | others took | torch | selfvitmil |\n|---|---|---|---|---|---|\n"
    )
    for name, record in results.items():
        machine, versions = record["machine"], record["versions"]
        where = ", ".join([f"{machine['cores']} cores of {machine['cpu']}", *machine["gpus"]])
        others = record.get("others_share")
        took = "not known" if others is None else f"{others:.0%}"
        cells = (name, f"`{record['command']}`", where, took, versions["torch"], versions["selfvitmil"])
        text += f"| {' | '.join(cells)} |\n"
    return text


if __name__ == "__main__":
    docs = Path(__file__).parent
    (docs / "reference" / "benchmarks.md").write_text(page(), encoding="utf-8")
    if (scaled := RESULTS / "scaling.json").exists():
        drawn = scaling_figure(json.loads(scaled.read_text(encoding="utf-8")))
        (docs / "pictures" / "scaling.svg").write_text(drawn, encoding="utf-8")
