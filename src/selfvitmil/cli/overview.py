"""The commands and what each does: the one list of them, which the parser and `selfvitmil --help` share.

`overview` renders it without loading the parser, which takes fifty times as long.
"""

from __future__ import annotations

import os
import textwrap

SUMMARY = "Whole-slide images and slide labels to a classifier, an honest evaluation and heatmaps of the evidence."

NARROWEST = 30
"""Characters of a column of text; in a narrower terminal lines are longer than the terminal."""

GROUPS = {
    "The whole pipeline": {
        "init": "Write a commented study.toml with every setting, its meaning and its value.",
        "plan": "Print what `run` would do: slides, tiles, disk, memory and time per stage. Writes nothing.",
        "run": "Run all stages from slides to the report, skipping what is up to date; resumes a stopped run.",
        "sbatch": "Write a script that submits the study to Slurm: arrays for tiles and features, then the rest.",
        "status": "Print what a study has done, what failed and what is next; also while another process works on it.",
        "report": "Write a self-contained HTML report: cohort, settings, metrics, heatmaps.",
        "view": "Show slides and heatmaps in a browser.",
    },
    "One stage at a time": {
        "check": "Open every slide, read some of it, and report what will cause problems.",
        "split": "Hold out a test set by patient, stratified by label, in the column split of cohort.csv.",
        "tile": "Segment tissue, cut it into tiles at an exact resolution, and fit the stains.",
        "pretrain": "Pretrain an encoder on the tiles of the training set, without labels; resumes by itself.",
        "embed": "Embed every tile; writes one feature file per slide, which other tools can read.",
        "train": "Train an aggregator on slide labels with several seeds; the test set is not touched.",
        "compare": "Compare all methods on the same slides, splits and seeds, in one table with the published results.",
        "evaluate": "Evaluate an aggregator on the test set: metrics with intervals, predictions, ROC curves.",
        "localize": "Draw heatmaps by trained models: scores per tile, lesions, pictures, files for QuPath and ASAP.",
    },
    "Trained models on new slides": {
        "package": "Package a trained model as one portable folder: encoder, aggregators, threshold, model card.",
        "predict": "Predict new slides with a packaged model; with --labels also evaluate it (external validation).",
    },
    "Other tools": {
        "export": "Write feature files in the format of another tool. Readers of TRIDENT files need no export.",
        "slide-embeddings": "Pool tile embeddings into one per slide, and find slides that are alike.",
        "doctor": "Check whether this machine and a study folder have what is needed; print a remedy for each problem.",
        "synth": "Write a cohort of synthetic slides with annotated lesions, for trying things out.",
        "demo": "Run the full pipeline on synthetic slides; no data needed.",
    },
}
"""Command -> its help, by what one wants to do."""

COMMANDS = {name: words for group in GROUPS.values() for name, words in group.items()}

FLAGS = {
    "-h, --help": "Print this, or after a command the options that are used first; --help-all prints all of them.",
    "--quiet": "With any command: print failures and errors alone.",
    "--json": "With any command: print one JSON object instead of text.",
    "--log-file": "With any command: append all that is printed to this file.",
    "--version": "Print the version.",
}

BOLD, CYAN, PLAIN = "\x1b[1m", "\x1b[36m", "\x1b[0m"


def overview(width: int, *, colour: bool = False) -> str:
    """Return what `selfvitmil --help` prints on a terminal that is `width` characters wide."""
    bold, cyan, plain = (BOLD, CYAN, PLAIN) if colour else ("", "", "")
    lines = [f"{bold}Usage:{plain} selfvitmil COMMAND [FLAGS]", "", *textwrap.wrap(SUMMARY, width)]
    first = max(map(len, (*COMMANDS, *FLAGS))) + len("    ")
    for title, words in (*GROUPS.items(), ("Flags", FLAGS)):
        lines += ["", f"{bold}{title}{plain}"]
        for name, text in words.items():
            rows = textwrap.wrap(text.replace("`", ""), max(width - first, NARROWEST), break_on_hyphens=False)
            lines += [f"  {cyan}{name}{plain}".ljust(first + len(cyan + plain)) + rows[0]]
            lines += [" " * first + row for row in rows[1:]]
    return "\n".join(lines)


def terminal_width() -> int:
    """Return the width of the terminal, as `COLUMNS` or the system says it; 80 where there is none."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdigit():
        return int(asked)
    try:
        return os.get_terminal_size(1).columns or 80
    except OSError:
        return 80
