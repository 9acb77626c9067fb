/**
 * What is shown, as plain data, and as the part of the address after `#`, so that a link reopens the same view.
 *
 * Only what differs from the start is written. A link is input like any other: what it cannot mean is left out.
 */

import { COLOR_NAMES } from "./colors.js";
import { SCORE_NAMES } from "./heatmap.js";

/**
 * @typedef {{x: number, y: number, w: number}} View Centre and width of what is seen, in level-0 pixels.
 *
 * @typedef {object} State
 * @property {string|null} slide id
 * @property {string|null} model id
 * @property {string} score
 * @property {string} colors
 * @property {number} opacity
 * @property {number} threshold
 * @property {boolean} fade
 * @property {boolean} map whether the heatmap is shown
 * @property {boolean} lesions
 * @property {boolean} annotation
 * @property {string|null} beside model id of the second viewer, or `PLAIN`; null when there is one viewer
 * @property {string} besideScore
 * @property {string} sort
 * @property {number|null} tile the tile that is marked
 * @property {View|null} view
 */

/** The second viewer shows no heatmap. */
export const PLAIN = "plain";

/** @type {Record<string, string>} */
export const SORT_NAMES = {
  score: "Probability",
  name: "Name",
  label: "Label",
  decision: "Decision",
  errors: "Errors first",
};

/** @type {State} */
export const START = {
  slide: null,
  model: null,
  score: "score",
  colors: "red",
  opacity: 0.5,
  threshold: 0,
  fade: true,
  map: true,
  lesions: true,
  annotation: true,
  beside: null,
  besideScore: "score",
  sort: "score",
  tile: null,
  view: null,
};

/** @param {State} state @returns {string} */
export function toHash(state) {
  const words = new URLSearchParams();
  for (const key of /** @type {(keyof State)[]} */ (Object.keys(START))) {
    const value = state[key];
    if (key === "view" || value === START[key] || value === null) continue;
    words.set(key, typeof value === "boolean" ? String(Number(value)) : String(value));
  }
  if (state.view) for (const key of /** @type {const} */ (["x", "y", "w"])) words.set(key, state.view[key].toFixed(1));
  return `#${words}`;
}

/** @param {string} hash @returns {State} */
export function fromHash(hash) {
  const words = new URLSearchParams(hash.replace(/^#/, ""));
  /** @param {string} key @param {number} low @param {number} high */
  const number = (key, low, high) => {
    const text = words.get(key);
    const value = text ? Number(text) : NaN;
    return Number.isFinite(value) ? Math.min(Math.max(value, low), high) : null;
  };
  /** @param {string} key @param {Record<string, string>} known @param {string} otherwise */
  const oneOf = (key, known, otherwise) => {
    const word = words.get(key) ?? "";
    return Object.hasOwn(known, word) ? word : otherwise;
  };
  /** @param {string} key @param {boolean} otherwise */
  const flag = (key, otherwise) => (words.has(key) ? words.get(key) === "1" : otherwise);
  const [x, y, w] = [number("x", -1e7, 1e7), number("y", -1e7, 1e7), number("w", 1, 1e7)];
  const tile = number("tile", 0, 1e9);
  return {
    slide: words.get("slide"),
    model: words.get("model"),
    score: oneOf("score", SCORE_NAMES, START.score),
    colors: oneOf("colors", COLOR_NAMES, START.colors),
    opacity: number("opacity", 0, 1) ?? START.opacity,
    threshold: number("threshold", 0, 1) ?? START.threshold,
    fade: flag("fade", START.fade),
    map: flag("map", START.map),
    lesions: flag("lesions", START.lesions),
    annotation: flag("annotation", START.annotation),
    beside: words.get("beside"),
    besideScore: oneOf("besideScore", SCORE_NAMES, START.besideScore),
    sort: oneOf("sort", SORT_NAMES, START.sort),
    tile: tile === null ? null : Math.floor(tile),
    view: x === null || y === null || w === null ? null : { x, y, w },
  };
}
