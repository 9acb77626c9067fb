"""The model card in Markdown, from the contents of package.json: data, training, evaluation, limits, intended use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from selfvitmil.formatting import markdown_list, markdown_table, percent, value_and_limits
from selfvitmil.outcomes import Outcome, outcome_from_json
from selfvitmil.package.files import ENSEMBLE, FINAL_FIT, RESEARCH_ONLY
from selfvitmil.package.ood import TrainingDistribution
from selfvitmil.settings import StudySettings

CARD_METRICS = (
    "auc", "accuracy", "balanced_accuracy", "sensitivity", "specificity", "ppv", "npv", "f1", "macro_f1", "pr_auc",
    "brier", "ece",
)  # fmt: skip
"""Metrics on the test set that the card shows."""
NOT_EVALUATED = "These models were not evaluated on test slides before they were packaged."
NO_RESULTS = "There were no cross-validated results of the procedure to quote when it was packaged."
UNTESTED = {
    ENSEMBLE: "The ensemble itself has not been tested: only the models of each split have been, on slides that models "
    "of other splits may have trained on.",
    FINAL_FIT: "This very model has not been tested: all labelled slides served to train it or to choose epoch and "
    "threshold.",
}
"""What the card says first of a package without a test set of its own, by its `fit`."""


def model_card(about: Mapping[str, Any], ood: TrainingDistribution, settings: StudySettings) -> str:
    """Return the card in Markdown from the contents of package.json."""
    parts = [
        f"# {about['name']}",
        _what(about),
        "## Intended use\n\n" + _use(about),
        "## Out of scope\n\n" + _out_of_scope(about),
        "## Data\n\n" + _data(about),
        "## Slides it expects\n\n" + _expects(about, ood, settings),
        "## Training\n\n" + _training(about),
        "## Evaluation\n\n" + _evaluation(about),
        "## Subgroups\n\n" + _subgroups(about),
        "## Limits\n\n" + _limits(about, ood),
        "## How to use it\n\n" + _how(),
    ]
    return "\n\n".join(parts) + "\n"


def _what(about: Mapping[str, Any]) -> str:
    scale = " and ".join(f"{each['mpp']:g} um/px" for each in about["encoders"])
    encoders = " and ".join(dict.fromkeys(each["name"] for each in about["encoders"]))
    outcome = _outcome(about)
    what, into = f"A classifier of whole-slide images: {', '.join(about['classes'])}", "a probability"
    if outcome is not None:
        what, into = (
            f"A model of whole-slide images that predicts {outcome.words}",
            f"its score ({outcome.score_words})",
        )
    return (
        f"{what}. The encoder {encoders} turns tiles at {scale} into "
        f"embeddings; the aggregator {about['method']}, an ensemble of {_members(about)}, "
        f"turns the embeddings of a slide into {into} and shows which tiles it is based on."
    )


def _members(about: Mapping[str, Any]) -> str:
    seeds, folds = len(about["seeds"]), about.get("folds", 1)
    if about.get("fit") == ENSEMBLE:
        return f"{seeds * folds} models ({seeds} seeds on each of {folds} splits)"
    return f"{seeds} seeds ({'all labelled slides' if about.get('fit') == FINAL_FIT else 'split ' + about['split']})"


def _chosen_on(about: Mapping[str, Any]) -> str:
    """The slides that the threshold comes from."""
    number = sum(about["chosen_on"]["slides"].values())
    return f"{number} slides{'' if about.get('fit') == ENSEMBLE else ' of the split ' + about['split']}"


def _outcome(about: Mapping[str, Any]) -> Outcome | None:
    return outcome_from_json(about["outcome"]) if "outcome" in about else None


def _use(about: Mapping[str, Any]) -> str:
    output = f"the probability of {about['positive']}" if about["positive"] else "the probability of each class"
    if (outcome := _outcome(about)) is not None:
        output = outcome.score_words
    return (
        f"{RESEARCH_ONLY}.\n\nFor slides like those it was trained on, it returns {output}, a decision, and a heatmap. "
        "Slides that are out of distribution are flagged; a slide without a flag can still be misclassified."
    )


def _out_of_scope(about: Mapping[str, Any]) -> str:
    asked = f"anything but {', '.join(about['classes'])}"
    if (outcome := _outcome(about)) is not None:
        asked = f"anything but {outcome.words}"
    return markdown_list(
        [
            "diagnosis, screening, or any decision about a patient, with or without a person who looks at it",
            f"other questions: {asked} is answered as if it did not exist",
            "other organs, species, stains, or preparations (frozen sections, cytology) than those it was trained on",
            "scanners and laboratories it was never tested on, before `predict --labels` has shown how it does there",
            "slides that `predict` flags as out of distribution",
        ]
    )


def _data(about: Mapping[str, Any]) -> str:
    classes = about["classes"]
    outcome = _outcome(about)
    heads = classes if outcome is None else [", ".join(outcome.columns)]
    rows: list[tuple[str, ...]] = [("slides", *heads, "patients")]
    names = {"train": "trained on", "val": "validated on (epoch, threshold)", "test": "tested on"}
    for part, name in names.items():
        own = about["data"][part]
        cells = [own["described"]] if outcome is not None else [str(own["slides"][label]) for label in classes]
        rows.append((name, *cells, str(own["patients"])))
    roles = {
        ENSEMBLE: "A slide may be in several rows: each split has its own models, and divides the slides anew.\n\n",
        FINAL_FIT: f"{UNTESTED[FINAL_FIT]}\n\n",
    }
    role = roles.get(about.get("fit") or "", "")
    joint: list[str] = about["joint"]["with"] if "joint" in about else []
    others = ", ".join(joint)
    shared = f"The network was trained jointly with {others}, also on slides that only have those.\n\n"
    role += shared if joint else ""
    kept = "Neither the slides nor their names or those of patients are part of this folder."
    return f"{markdown_table(rows)}\n\n{role}{kept}"


def _expects(about: Mapping[str, Any], ood: TrainingDistribution, settings: StudySettings) -> str:
    (least, most), tiles, distance = ood.mpp_range, ood.usual.get("tiles"), ood.usual.get("distance")
    stains = {
        "slide": "stains are fitted once per slide and brought to a reference (Macenko)",
        "tile": "stains are fitted in every tile and brought to a reference (Macenko)",
        "none": "colours stay as scanned",
    }
    lines = [
        f"tiles of {settings.tile.size_px} px, tissue in at least {percent(settings.tile.min_tissue)} of each",
        stains[settings.stain.method],
        f"training slides were scanned at {least:.4g} to {most:.4g} um/px",
    ]
    if tiles is not None:
        lines.append(f"training slides have {tiles.least:.0f} to {tiles.most:.0f} tiles")
    if ood.num_fitted is not None:
        lines.append(f"stains could be fitted on {ood.num_fitted} of {ood.num_train} training slides")
    if distance is not None:
        lines.append(
            f"distance of a slide's embeddings from the other training slides: median {distance.median:.2f}, largest "
            f"{distance.most:.2f}"
        )
    flags = f"`predict` flags slides that are out of distribution: {ood.threshold_words()}."
    return f"{markdown_list(lines)}\n\n{flags}"


def _training(about: Mapping[str, Any]) -> str:
    training, choice = about["training"], about["choice"]
    decision = "The largest probability decides."
    if (outcome := _outcome(about)) is not None:
        decision = "No decision is made."
        if choice["threshold_from"] != "none":
            decision = f"Decision: {choice['threshold_from']}."
        if choice["threshold"] is not None:
            decision = (
                f"A slide is of the group {outcome.groups[1]} from {outcome.rank_words} {choice['threshold']:.4g} on: "
                f"{choice['threshold_from']}, {_chosen_on(about)}."
            )
    elif choice["threshold"] is not None:
        decision = (
            f"A slide is called {about['positive']} from a probability of {choice['threshold']:.4g} on: "
            f"{choice['threshold_from']}, {_chosen_on(about)}, {about['protocol']} protocol."
        )
    if about.get("fit") == ENSEMBLE:
        decision += (
            " Each of these slides was scored by models that had not trained on it, of one split or a few; the mean "
            "over the models of all splits varies less, so threshold and calibration are approximate."
        )
    recipes = [
        {key: value for key, value in recipe.items() if value not in (None, {}, [])}
        for recipe in training.get("recipes", [training["recipe"]])
    ]
    trained_on = ", ".join(dict.fromkeys(each["trained_on"] for each in training["encoders"]))
    architecture = ", ".join(dict.fromkeys(each["architecture"] for each in training["encoders"]))
    lines = [
        f"encoder: {architecture}, trained on: {trained_on}",
        f"aggregator: {about['method']}, seeds {', '.join(map(str, about['seeds']))}, epochs chosen "
        f"{', '.join(map(str, training['epochs']))}",
        f"recipe{' of each split' if len(recipes) > 1 else ''}: "
        + ", ".join(f"`{json.dumps(recipe, ensure_ascii=False)}`" for recipe in recipes),
        f"calibration: {choice['calibration_from']}",
    ]
    return f"{decision}\n\n{markdown_list(lines)}"


def _evaluation(about: Mapping[str, Any]) -> str:
    evaluation = about["evaluation"]
    untested = UNTESTED.get(about.get("fit") or "")
    if evaluation is None:
        return NOT_EVALUATED if untested is None else f"{untested} {NO_RESULTS}"
    rows = [("by slide", "value", "interval")]
    outcome = _outcome(about)
    names = {name: name.replace("_", " ") for name in CARD_METRICS} if outcome is None else outcome.shown_metrics
    for name, words in names.items():
        metric = evaluation["figures"].get(name)
        if metric is not None:
            rows.append((words, *value_and_limits(metric)))
    seen = evaluation["transductive"]
    but = (
        f", except that the encoder saw {seen} of them or their patients, without labels (transductive)" if seen else ""
    )
    if untested is not None:
        shared = f"{percent(evaluation['confidence'])} intervals; every split by its own threshold"
        return f"{untested} {_quoted(about)}{but}; {shared}.\n\n{markdown_table(rows)}"
    words = (
        f"{evaluation['num']} test slides of the split {about['split']}, which took no part in training or choices{but}"
        f"; {percent(evaluation['confidence'])} intervals; threshold: {about['choice']['threshold_from']}."
    )
    return f"{words}\n\n{markdown_table(rows)}"


def _quoted(about: Mapping[str, Any]) -> str:
    """Whose metrics they are, where they are not those of the package."""
    num, splits, seeds = about["evaluation"]["num"], about["evaluation"]["splits"], len(about["seeds"])
    by = f"by cross-validation: {splits} splits, the {seeds} models of each tested on slides that they never saw"
    if splits == 1:
        by = f"on a test set: {seeds} models tested on slides that they never saw"
    what = "" if about["fit"] == ENSEMBLE else " of the procedure (the same method, settings and seeds)"
    return f"The metrics are estimates{what} {by} ({num} slides together)"


def _subgroups(about: Mapping[str, Any]) -> str:
    evaluation = about["evaluation"]
    if evaluation is None:
        return NO_RESULTS if about.get("fit") else NOT_EVALUATED
    tables = evaluation.get("subgroups") or ()
    if not tables:
        return (
            "Not known: the cohort has no column (site, hospital, laboratory ...) with several values on the test set,"
            " or too many. `predict --labels` with such columns evaluates them."
        )
    parts: list[str] = []
    for table in tables:
        names = list(table["groups"][0]["metrics"])
        rows: list[tuple[str, ...]] = [(table["column"], "test slides", *names)]
        for number, group in enumerate(table["groups"], 1):
            shown = (_with_limits(group["metrics"][name]) for name in names)
            rows.append((f"{table['column']} {number}", str(group["slides"]), *shown))
        parts.append(markdown_table(rows))
    words = "Values are numbered, since they may name places; subgroups are small, and differences may be chance."
    return "\n\n".join([words, *parts])


def _with_limits(metric: Mapping[str, Any] | None) -> str:
    if metric is None:
        return "-"
    value, limits = value_and_limits(metric)
    return f"{value} ({limits})" if limits else value


def _limits(about: Mapping[str, Any], ood: TrainingDistribution) -> str:
    evaluation = about["evaluation"]
    tested = "its metrics on new slides are not known"
    if evaluation is not None and about.get("fit"):
        tested = (
            f"it has not been tested itself; the metrics above are of {evaluation['num']} slides by models trained on "
            "other slides"
        )
    elif evaluation is not None:
        tested = f"its metrics rest on {evaluation['num']} test slides; the intervals above say how sure they are"
    known = ood.num_train
    if about.get("fit") == ENSEMBLE:  # some are kept apart to calibrate the OOD threshold
        known = sum(about["data"]["train"]["slides"].values())
    return markdown_list(
        [
            tested,
            f"it knows {known} training slides; other scanners, stains, organs and diseases were not seen",
            "scores are those of the training's mix of patients, and only calibrated where that is said above",
            "a heatmap shows which tiles the prediction is based on, which need not be where a pathologist would look",
            "sizes of regions are measurements of the heatmap, never a diagnosis",
        ]
    )


def _how() -> str:
    return (
        "```\nselfvitmil predict MODEL SLIDE... --out PREDICTIONS\n```\n\nMODEL is this folder. `predictions.json` and "
        "`predictions.csv` hold the predictions, `maps/` the heatmaps. No network is "
        "needed, and no file in here can run code."
    )
