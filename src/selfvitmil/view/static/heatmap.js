/**
 * The heatmap of a slide: which tile lies where, what its values are, and its picture.
 *
 * The picture has one pixel per cell of the tile grid, so that 200,000 tiles are coloured in a few milliseconds and any
 * zoom is one scaled copy of it. Where tiles overlap, a tile's cell is the middle of it.
 */

import { colorTable } from "./colors.js";

/** What values are called, in the order in which they are offered. @type {Record<string, string>} */
export const SCORE_NAMES = {
  score: "Score",
  detection: "Detection",
  attention: "Attention",
  instance: "Tile alone",
  product: "Attention × tile",
  effect: "Effect of leaving it out",
  annotated: "Annotated share",
};

/** @type {Record<string, string>} */
export const SCORE_HELP = {
  score: "what the heatmap shows: scaled from 0 to 1 within this slide",
  detection: "score times the slide's probability: compares across slides",
  attention: "weight of the tile in the slide's answer; all weights sum to 1",
  instance: "probability of the tile on its own",
  product: "attention times the tile's own probability",
  effect: "what the slide's probability loses without the tile",
  annotated: "how much of the tile lies inside the annotation",
};

/** Values that have no natural end: they are shown up to the highest of the slide. */
const OPEN_ENDED = new Set(["attention", "product", "effect"]);

const SUSPICIOUS = 0.5;

/**
 * @typedef {object} Look How the heatmap is drawn.
 * @property {string} score
 * @property {string} colors
 * @property {number} opacity
 * @property {number} threshold share of the range of values; tiles below are not drawn
 * @property {boolean} fade
 */

export class Heatmap {
  /** @param {import("./data.js").HeatmapJson} json */
  constructor(json) {
    this.frame = json.frame;
    this.count = json.coords.length / 2;
    /** Slides that were not found positive are left blank, and this is one. */
    this.blank = json.gated && !json.prediction.positive;
    /** Colours only rank the tiles within a slide that is not called positive: no region of it is a lesion. */
    this.onlyRanks = !json.prediction.positive;
    /** What the score was made from, and why that. */
    this.kind = json.kind;
    this.shownBecause = json.shown_because;
    this.coords = Float64Array.from(json.coords);
    /** Names of the values that this heatmap has. */
    this.scores = Object.keys(SCORE_NAMES).filter((name) => Array.isArray(/** @type {any} */ (json)[name]));
    /** @type {Map<string, Float32Array>} */
    this.byName = new Map(this.scores.map((name) => [name, floats(/** @type {any} */ (json)[name])]));
    /** Where each tile comes in reports, which know more digits than were sent: this decides between equal values. */
    this.places = new Int32Array(this.count);
    json.strongest_first.forEach((tile, place) => void (this.places[tile] = place));
    /** @type {Map<string, number>} */
    this.tops = new Map();
    /** @type {Map<string, Int32Array>} */
    this.orders = new Map();
    const [left, top, right, bottom] = reach(this.coords);
    const stride = this.frame.stride_l0;
    const margin = (this.frame.extent_l0 - stride) / 2;
    this.columns = this.count ? Math.round((right - left) / stride) + 1 : 0;
    this.rows = this.count ? Math.round((bottom - top) / stride) + 1 : 0;
    /** Top left corner of the first cell. */
    this.originX = left + margin;
    this.originY = top + margin;
    /** Tile of each cell, row by row; -1 where there is none. */
    this.cells = new Int32Array(this.columns * this.rows).fill(-1);
    for (let tile = 0; tile < this.count; tile += 1) {
      const column = Math.round((this.coords[2 * tile] - left) / stride);
      const row = Math.round((this.coords[2 * tile + 1] - top) / stride);
      this.cells[row * this.columns + column] = tile;
    }
  }

  /** @param {string} score @returns {Float32Array} NaN where a tile has no value */
  values(score) {
    return /** @type {Float32Array} */ (this.byName.get(score) ?? this.byName.get("score"));
  }

  /** @param {string} score */
  has(score) {
    return this.scores.includes(score);
  }

  /** The value that is drawn strongest. @param {string} score @returns {number} */
  top(score) {
    if (!this.has(score) || !OPEN_ENDED.has(score)) return 1;
    let top = this.tops.get(score) ?? 0;
    if (!top) {
      for (const value of this.values(score)) if (value > top) top = value;
      top ||= 1;
      this.tops.set(score, top);
    }
    return top;
  }

  /** The tile at a place, or -1. @param {number} x @param {number} y */
  tileAt(x, y) {
    const column = Math.floor((x - this.originX) / this.frame.stride_l0);
    const row = Math.floor((y - this.originY) / this.frame.stride_l0);
    if (column < 0 || row < 0 || column >= this.columns || row >= this.rows) return -1;
    return this.cells[row * this.columns + column];
  }

  /** Left, top and edge of a tile. @param {number} tile @returns {[number, number, number]} */
  box(tile) {
    return [this.coords[2 * tile], this.coords[2 * tile + 1], this.frame.extent_l0];
  }

  /** All tiles, the highest value first. @param {string} score @returns {Int32Array} */
  order(score) {
    let order = this.orders.get(score);
    if (!order) {
      const values = this.values(score);
      const known = (/** @type {number} */ tile) => (Number.isNaN(values[tile]) ? -Infinity : values[tile]);
      order = Int32Array.from(values.keys()).sort((a, b) => known(b) - known(a) || this.places[a] - this.places[b]);
      this.orders.set(score, order);
    }
    return order;
  }

  /**
   * How many of `order` are worth a look: from half of the range on, or from the threshold where that is higher; all
   * that are drawn where none comes that far.
   *
   * @param {string} score
   * @param {number} threshold
   */
  countSuspicious(score, threshold) {
    const count = this.#countFrom(score, Math.max(threshold, SUSPICIOUS));
    return count || this.#countFrom(score, threshold);
  }

  /** @param {string} score @param {number} share of the range */
  #countFrom(score, share) {
    const least = share * this.top(score);
    let count = 0;
    for (const value of this.values(score)) if (value >= least) count += 1;
    return count;
  }
}

/**
 * Draw the grid of a heatmap, one pixel per cell.
 *
 * @param {HTMLCanvasElement} canvas gets the size of the grid
 * @param {Heatmap} heatmap
 * @param {Look} look
 */
export function paintGrid(canvas, heatmap, look) {
  canvas.width = Math.max(heatmap.columns, 1);
  canvas.height = Math.max(heatmap.rows, 1);
  if (!heatmap.count) return;
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const picture = context.createImageData(heatmap.columns, heatmap.rows);
  const colors = new Uint32Array(colorTable(look.colors, look.fade).buffer);
  const pixels = new Uint32Array(picture.data.buffer);
  const values = heatmap.values(look.score);
  const top = heatmap.top(look.score);
  const least = look.threshold * top;
  for (let cell = 0; cell < heatmap.cells.length; cell += 1) {
    const tile = heatmap.cells[cell];
    if (tile < 0) continue;
    const value = values[tile];
    if (value >= least) pixels[cell] = colors[Math.round((255 * Math.min(Math.max(value, 0), top)) / top)];
  }
  context.putImageData(picture, 0, 0);
}

/**
 * Copy the part of the grid that can be seen.
 *
 * @param {CanvasRenderingContext2D} context whose unit is a level-0 pixel
 * @param {HTMLCanvasElement} grid
 * @param {Heatmap} heatmap
 * @param {{left: number, top: number, right: number, bottom: number}} seen
 */
export function copyGrid(context, grid, heatmap, seen) {
  const stride = heatmap.frame.stride_l0;
  const column = Math.max(0, Math.floor((seen.left - heatmap.originX) / stride));
  const row = Math.max(0, Math.floor((seen.top - heatmap.originY) / stride));
  const columns = Math.min(heatmap.columns, Math.ceil((seen.right - heatmap.originX) / stride)) - column;
  const rows = Math.min(heatmap.rows, Math.ceil((seen.bottom - heatmap.originY) / stride)) - row;
  if (columns <= 0 || rows <= 0) return;
  context.imageSmoothingEnabled = false;
  const [x, y] = [heatmap.originX + column * stride, heatmap.originY + row * stride];
  context.drawImage(grid, column, row, columns, rows, x, y, columns * stride, rows * stride);
}

/** Least and most of the corners. @param {Float64Array} coords @returns {[number, number, number, number]} */
function reach(coords) {
  let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
  for (let k = 0; k < coords.length; k += 2) {
    left = Math.min(left, coords[k]);
    right = Math.max(right, coords[k]);
    top = Math.min(top, coords[k + 1]);
    bottom = Math.max(bottom, coords[k + 1]);
  }
  return [left, top, right, bottom];
}

/** @param {(number|null)[]} values */
function floats(values) {
  const made = new Float32Array(values.length);
  for (let k = 0; k < values.length; k += 1) made[k] = values[k] ?? NaN;
  return made;
}

/** A value in few digits. @param {number} value @returns {string} */
export function formatValue(value) {
  if (!Number.isFinite(value)) return "none";
  if (value === 0 || Math.abs(value) >= 0.1) return value.toFixed(2);
  return Math.abs(value) >= 0.001 ? value.toPrecision(2) : value.toExponential(1);
}
