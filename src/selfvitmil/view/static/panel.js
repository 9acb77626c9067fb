/**
 * The panel beside the slide: the prediction, how the heatmap is drawn, suspicious tiles, lesions.
 *
 * It shows what it is given and reports what the reader changes; it keeps nothing but the list of lesions.
 */

import { COLOR_NAMES, colorTable } from "./colors.js";
import { byId, fillSelect, make, setWords } from "./dom.js";
import { SCORE_HELP, SCORE_NAMES, formatValue } from "./heatmap.js";
import { isWrong, thumbnail } from "./list.js";
import { valueList } from "./pane.js";

/** @typedef {import("./state.js").State} State */
/** @typedef {import("./data.js").LesionJson} LesionJson */
/** @typedef {import("./heatmap.js").Heatmap} Heatmap */

const FIRST_LESIONS = 50;

/** @type {Record<string, string>} */
const PARTS = {
  test: "Not seen in training (test).",
  val: "Seen to choose the model (validation), not to train it.",
  train: "The model was trained on this slide: expect it to do well here.",
  new: "A new slide, of no split.",
};

export class Panel {
  /**
   * @param {object} events
   * @param {(changes: Partial<State>) => void} events.change
   * @param {(step: number) => void} events.stepTile
   * @param {(index: number) => void} events.goLesion
   * @param {(id: string) => void} events.openSlide
   */
  constructor(events) {
    this.events = events;
    /** @type {LesionJson[]} */
    this.lesions = [];
    for (const [id, key] of Object.entries({ model: "model", score: "score", colors: "colors" })) {
      byId(id).addEventListener("change", () => events.change({ [key]: byId(id).value }));
    }
    for (const id of ["opacity", "threshold"]) {
      byId(id).addEventListener("input", () => events.change({ [id]: Number(byId(id).value) }));
    }
    const switches = { "show-heatmap": "map", fade: "fade", "show-lesions": "lesions", "show-annotation": "annotation" };
    for (const [id, key] of Object.entries(switches)) {
      byId(id).addEventListener("change", () => events.change({ [key]: byId(id).checked }));
    }
    fillSelect(byId("colors"), Object.entries(COLOR_NAMES), "red");
    for (const id of ["next-tile", "quick-next"]) byId(id).addEventListener("click", () => events.stepTile(1));
    for (const id of ["previous-tile", "quick-previous"]) byId(id).addEventListener("click", () => events.stepTile(-1));
    byId("more-lesions").addEventListener("click", () => this.#listLesions(this.lesions.length));
  }

  /** Bring all controls in line. @param {State} state @param {Heatmap|null} heatmap @param {string[]} models of this slide */
  sync(state, heatmap, models) {
    byId("show-heatmap").checked = state.map;
    byId("fade").checked = state.fade;
    byId("show-lesions").checked = state.lesions;
    byId("show-annotation").checked = state.annotation;
    byId("model").value = state.model ?? "";
    byId("colors").value = state.colors;
    byId("opacity").value = String(state.opacity);
    byId("opacity-value").textContent = `${Math.round(100 * state.opacity)} %`;
    byId("threshold").value = String(state.threshold);
    for (const option of byId("model").options) option.disabled = models.length > 0 && !models.includes(option.value);
    byId("heatmap-controls").hidden = !heatmap;
    byId("lesions-switch").hidden = !heatmap || heatmap.onlyRanks;
    byId("tiles-section").hidden = !heatmap;
    byId("quick").hidden = !heatmap;
    byId("lesions-section").hidden = !heatmap;
    if (heatmap) this.#syncHeatmap(state, heatmap);
  }

  /** @param {State} state @param {Heatmap} heatmap */
  #syncHeatmap(state, heatmap) {
    const score = heatmap.has(state.score) ? state.score : "score";
    const choices = heatmap.scores.map((name) => /** @type {[string, string]} */ ([name, SCORE_NAMES[name]]));
    if (byId("score").options.length !== choices.length) fillSelect(byId("score"), choices, score);
    byId("score").value = score;
    byId("score").title = SCORE_HELP[score];
    const top = heatmap.top(score);
    const least = formatValue(state.threshold * top);
    byId("threshold-value").textContent = state.threshold ? least : "nothing";
    byId("threshold").setAttribute("aria-valuetext", state.threshold ? `below ${least}` : "nothing hidden");
    const ranks = heatmap.onlyRanks && score === "score";
    byId("legend-low").textContent = ranks ? "lowest in this slide" : formatValue(0);
    byId("legend-high").textContent = ranks ? "highest in this slide" : formatValue(top);
    const shows = score === "score" && heatmap.shownBecause ? `Score: ${SCORE_NAMES[heatmap.kind]}, ${heatmap.shownBecause}.` : "";
    byId("heatmap-shows").textContent = shows;
    paintLegend(byId("legend"), state);
  }

  /** Say why there is no heatmap. @param {string} words */
  explain(words) {
    setWords(byId("heatmap-note"), words);
    byId("heatmap-note").hidden = !words;
  }

  /**
   * @param {import("./data.js").SlideRow|undefined} slide
   * @param {import("./data.js").Model|undefined} model
   */
  showPrediction(slide, model) {
    byId("slide-name").textContent = slide?.name ?? "No slide";
    const facts = make("p.quiet");
    if (slide?.patient && slide.patient !== slide.name) facts.append(`Patient ${slide.patient}. `);
    if (slide) facts.append(slide.label === null ? "No label." : "Label: ");
    if (slide?.label) facts.append(make("b", {}, slide.label));
    const prediction = slide && model && slide.predictions[model.id];
    byId("prediction").replaceChildren(...(prediction ? predictionParts(slide, prediction, model) : []), facts);
    if (prediction) facts.append(`. ${PARTS[prediction.part] ?? ""}`);
  }

  /** The slides most like the open one. @param {{row: import("./data.js").SlideRow, similarity: number}[]} found nearest first */
  showSimilar(found) {
    const items = found.map(({ row, similarity }) => {
      const facts = [row.label ?? "no label", row.patient === row.name ? "" : row.patient].filter(Boolean).join(", ");
      const name = make("span", {}, make("b", {}, row.name), make("small", {}, facts));
      const button = make("button.lesion", { type: "button" }, thumbnail(row), name, make("span.number", {}, similarity.toFixed(3)));
      button.addEventListener("click", () => this.events.openSlide(row.id));
      return make("li", {}, button);
    });
    byId("similar").replaceChildren(...items);
    byId("similar-section").hidden = !items.length;
  }

  /** @param {Heatmap} heatmap @param {number} tile @param {string} score @param {string} place */
  showTile(heatmap, tile, score, place) {
    for (const id of ["tile-place", "quick-place"]) byId(id).textContent = place;
    const list = byId("tile-values");
    list.replaceChildren(...(tile < 0 ? [] : valueList(heatmap, tile, score).children));
  }

  /**
   * @param {LesionJson[]} lesions best first
   * @param {string} words said above them
   * @param {boolean} onlyRanks whether the slide is not called positive: then these are no lesions
   */
  showLesions(lesions, words, onlyRanks) {
    this.lesions = lesions;
    byId("lesions-heading").textContent = onlyRanks ? "Highest-ranked regions" : "Lesions";
    byId("tiles-heading").textContent = onlyRanks ? "Highest-ranked tiles" : "Suspicious tiles";
    byId("lesions-note").textContent = words;
    byId("lesions-note").hidden = !words;
    this.#listLesions(FIRST_LESIONS);
  }

  /** @param {number} most */
  #listLesions(most) {
    const items = this.lesions.slice(0, most).map((lesion, index) => {
      const [size, ...rest] = lesion.size_words.split("; ");
      const area = areaWords(lesion.area_mm2);
      const button = make(
        "button.lesion",
        { type: "button", title: lesion.size_words },
        make("span.rank", {}, String(index + 1)),
        make("span", {}, make("b", {}, size), make("small", {}, [area, ...rest].join("; "))),
        make("span.number", {}, formatValue(lesion.score)),
      );
      button.addEventListener("click", () => this.events.goLesion(index));
      return make("li", {}, button);
    });
    byId("lesions").replaceChildren(...items);
    byId("more-lesions").hidden = this.lesions.length <= most;
    byId("more-lesions").textContent = `Show all ${this.lesions.length}`;
  }
}

/** @param {number} area_mm2 */
function areaWords(area_mm2) {
  return area_mm2 >= 0.01 ? `${area_mm2.toFixed(2)} mm²` : `${Math.round(area_mm2 * 1e6)} µm²`;
}

/**
 * The decision, the probability with its threshold, and whether the label agrees.
 *
 * @param {import("./data.js").SlideRow} slide
 * @param {import("./data.js").SlidePrediction} prediction
 * @param {import("./data.js").Model} model
 */
function predictionParts(slide, prediction, model) {
  const { probability } = prediction;
  const kind = prediction.positive ? "positive" : "negative";
  const headline = make("p.headline", {}, make(`b.${kind}`, {}, prediction.decision));
  const ofClasses = !prediction.value_words;
  if (isWrong(slide, model)) headline.append(" ", make("span.chip.wrong", {}, "not the label"));
  else if (slide.label !== null && ofClasses) headline.append(" ", make("span.chip", {}, "agrees with the label"));
  const fill = make(`span.fill.${kind}`);
  fill.style.width = `${100 * probability}%`;
  const bar = make("span.bar.big", { "aria-hidden": "true" }, fill);
  const pair = [make("span", {}, `Probability of ${prediction.shown}`), make("b", {}, probability.toFixed(2))];
  const said = ofClasses ? make("p.pair", {}, ...pair) : make("p.note", { id: "value" }, prediction.value_words ?? "");
  if (prediction.threshold === null) return [headline, bar, said, ...rankNote(prediction)];
  const mark = make("span.mark");
  mark.style.left = `${100 * prediction.threshold}%`;
  bar.append(mark);
  const from = prediction.threshold_from ? ` (${prediction.threshold_from})` : "";
  return [headline, bar, said, make("small", {}, `threshold ${prediction.threshold.toFixed(2)}${from}`), ...rankNote(prediction)];
}

/** What to know of the colours of a slide that is not called positive. @param {import("./data.js").SlidePrediction} prediction */
function rankNote(prediction) {
  if (prediction.positive) return [];
  const words = `Called ${prediction.decision}, not ${prediction.shown}: colours only rank tiles within this slide. They are no evidence of ${prediction.shown}.`;
  return [make("p.note", { id: "ranks-only" }, words)];
}

/** @param {HTMLCanvasElement} canvas @param {State} state */
function paintLegend(canvas, state) {
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const picture = context.createImageData(canvas.width, 1);
  picture.data.set(colorTable(state.colors, state.fade));
  for (let level = 0; level < canvas.width * state.threshold; level += 1) picture.data[4 * level + 3] = 0;
  context.putImageData(picture, 0, 0);
}
