/** The highest-ranked tiles of a slide as small pictures; a click goes to the tile. */

import { byId, make } from "./dom.js";
import { formatValue } from "./heatmap.js";

/** @typedef {import("./heatmap.js").Heatmap} Heatmap */
/** @typedef {import("./data.js").SlideInfo} SlideInfo */
/** @typedef {(level: number, column: number, row: number) => string} TileUrl */

const SHOWN = 8;
const EDGE_PX = 64;

export class Gallery {
  /** @param {(place: number) => void} go to the tile at a place in falling order of the value */
  constructor(go) {
    this.go = go;
    this.key = "";
  }

  /**
   * Show the tiles of a heatmap, again only where it is another one.
   *
   * @param {SlideInfo|null} slide
   * @param {Heatmap|null} heatmap
   * @param {string} score
   * @param {TileUrl} tileUrl
   * @param {string} model
   * @param {number} marked the marked tile, or -1
   */
  show(slide, heatmap, score, tileUrl, model, marked) {
    const list = byId("gallery");
    list.hidden = !slide || !heatmap;
    if (!slide || !heatmap) {
      this.key = "";
      return list.replaceChildren();
    }
    const tiles = heatmap.order(score).slice(0, SHOWN);
    const key = [slide.id, model, score].join(" ");
    if (key !== this.key) {
      this.key = key;
      list.replaceChildren(...[...tiles].map((tile, place) => this.#item(slide, heatmap, tile, place, score, tileUrl)));
    }
    [...tiles].forEach((tile, place) => {
      const button = list.children[place].firstElementChild;
      if (tile === marked) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    });
  }

  /**
   * @param {SlideInfo} slide
   * @param {Heatmap} heatmap
   * @param {number} tile
   * @param {number} place
   * @param {string} score
   * @param {TileUrl} tileUrl
   */
  #item(slide, heatmap, tile, place, score, tileUrl) {
    const value = formatValue(heatmap.values(score)[tile]);
    const canvas = make("canvas", { width: String(EDGE_PX), height: String(EDGE_PX), "aria-hidden": "true" });
    const words = `Tile ${place + 1}, ${value}`;
    const button = make("button", { type: "button", title: words, "aria-label": words }, canvas, make("span", {}, value));
    button.addEventListener("click", () => this.go(place));
    const [x, y, edge] = heatmap.box(tile);
    void drawRegion(canvas, slide, { x, y, edge }, tileUrl);
    return make("li", {}, button);
  }
}

/**
 * Draw a square of the slide from the pictures that the viewer loads too, at a level just fine enough.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {SlideInfo} slide
 * @param {{x: number, y: number, edge: number}} box in level-0 pixels
 * @param {TileUrl} tileUrl
 */
export async function drawRegion(canvas, slide, box, tileUrl) {
  const full = Math.ceil(Math.log2(Math.max(slide.width, slide.height)));
  const wanted = full - Math.max(0, Math.floor(Math.log2(box.edge / canvas.width)));
  const level = Math.max(0, Math.min(slide.max_level, wanted));
  const shrink = 2 ** (full - level);
  const [left, top, edge] = [box.x / shrink, box.y / shrink, box.edge / shrink];
  const last = (/** @type {number} */ size) => Math.max(0, Math.ceil(size / shrink / slide.tile_size) - 1);
  const at = (/** @type {number} */ place) => Math.max(0, Math.floor(place / slide.tile_size));
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const scale = canvas.width / edge;
  const parts = [];
  for (let row = at(top); row <= Math.min(last(slide.height), at(top + edge)); row += 1) {
    for (let column = at(left); column <= Math.min(last(slide.width), at(left + edge)); column += 1) {
      parts.push(drawPart(context, slide, { level, column, row, left, top, scale }, tileUrl));
    }
  }
  await Promise.all(parts);
  canvas.dataset.drawn = "true";
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {SlideInfo} slide
 * @param {{level: number, column: number, row: number, left: number, top: number, scale: number}} where
 * @param {TileUrl} tileUrl
 */
async function drawPart(context, slide, where, tileUrl) {
  const image = document.createElement("img");
  image.src = tileUrl(where.level, where.column, where.row);
  try {
    await image.decode();
  } catch {
    return; // the viewer itself says what is wrong with the slide
  }
  const origin = (/** @type {number} */ number) => number * slide.tile_size - (number ? slide.overlap : 0);
  const x = (origin(where.column) - where.left) * where.scale;
  const y = (origin(where.row) - where.top) * where.scale;
  context.drawImage(image, x, y, image.naturalWidth * where.scale, image.naturalHeight * where.scale);
}
