/**
 * One viewer: the slide (OpenSeadragon), above it a canvas with heatmap, contours and marked tile, a scale bar, a tooltip.
 *
 * The canvas is drawn in the very frame in which OpenSeadragon draws the slide, so they never come apart. Its unit is
 * the level-0 pixel. OpenSeadragon's own unit is the width of the slide; only `view`, `show` and `#frame` convert.
 */

import { icon, make } from "./dom.js";
import { copyGrid, paintGrid, SCORE_HELP, SCORE_NAMES, formatValue } from "./heatmap.js";

/** @typedef {import("./state.js").View} View */
/** @typedef {import("./heatmap.js").Heatmap} Heatmap */
/** @typedef {import("./heatmap.js").Look} Look */
/** @typedef {import("./data.js").SlideInfo} SlideInfo */

/**
 * @typedef {object} PaneEvents
 * @property {(pane: Pane) => void} moved
 * @property {(pane: Pane) => void} touched the reader acts on this viewer
 * @property {(pane: Pane, tile: number) => void} picked a tile
 * @property {(pane: Pane, url: string) => void} failed a picture did not come
 */

/**
 * @typedef {object} Ruler A distance in level-0 pixels.
 * @property {[number, number]} from
 * @property {[number, number]} to
 * @property {"middle"|"pointer"|"nothing"} follows what its end follows
 */

const LESION = "#00f0ff";
const ANNOTATION = "#8dff3a";
const DARK = "rgba(0, 0, 0, 0.75)";
const SCALE_PX = 140;
const NAVIGATOR_PX = 140;
const CLEAR_PX = 48;

export class Pane {
  /** @param {HTMLElement} element @param {PaneEvents} events */
  constructor(element, events) {
    this.element = element;
    this.events = events;
    /** @type {SlideInfo|null} */
    this.slide = null;
    /** @type {Heatmap|null} */
    this.heatmap = null;
    /** @type {Look|null} null: the heatmap is not drawn */
    this.look = null;
    this.grid = document.createElement("canvas");
    /** @type {Path2D|null} */
    this.lesions = null;
    /** @type {Path2D|null} */
    this.annotation = null;
    this.shown = { lesions: true, annotation: true };
    this.tile = -1;
    /** @type {Ruler|null} */
    this.ruler = null;
    this.#build();
    this.#listen();
  }

  #build() {
    const stage = make("div.stage");
    this.canvas = make("canvas.overlay", { "aria-hidden": "true" });
    this.head = make("div.head");
    this.tip = make("div.tip", { "aria-hidden": "true", hidden: "" });
    this.scale = make("div.scale", { role: "img" }, make("span.ruler"), make("span.length"));
    this.magnification = make("output.magnification", { "aria-label": "Magnification" });
    this.measured = make("output.measured", { hidden: "" });
    this.trouble = make("div.trouble", { role: "alert", hidden: "" });
    this.element.replaceChildren(stage, this.head, this.scale, this.magnification, this.measured, this.#zoomButtons(), this.tip, this.trouble);
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    silenceStyle();
    this.osd = /** @type {any} */ (window).OpenSeadragon({
      element: stage,
      drawer: "canvas",
      showNavigationControl: false,
      showNavigator: true,
      navigatorPosition: "BOTTOM_RIGHT",
      navigatorBackground: "#fff",
      navigatorBorderColor: "transparent",
      navigatorDisplayRegionColor: "#d00000",
      keyboardNavEnabled: false,
      animationTime: still ? 0 : 0.5,
      blendTime: 0,
      gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: true },
      gestureSettingsTouch: { flickEnabled: !still, pinchRotate: false },
      maxZoomPixelRatio: 6,
      minZoomImageRatio: 0.6,
      visibilityRatio: 0.35,
      imageLoaderLimit: 6,
      maxImageCacheCount: 400,
      preserveImageSizeOnResize: false,
    });
    this.osd.canvas.append(this.canvas);
    this.osd.canvas.setAttribute("role", "application");
    this.osd.canvas.setAttribute("aria-label", "Slide. Arrow keys move, plus and minus zoom, n goes to the next suspicious tile");
  }

  #zoomButtons() {
    /** @param {string} text @param {string} title @param {() => void} act */
    const button = (text, title, act) => {
      const made = make("button.icon", { title, "aria-label": title, type: "button" }, text);
      made.addEventListener("click", () => {
        this.events.touched(this);
        act();
      });
      return made;
    };
    const home = button("", "Whole slide (0)", () => this.home());
    home.append(icon("home"));
    return make(
      "div.zoom",
      { role: "group", "aria-label": "Zoom" },
      button("+", "Zoom in (+)", () => this.zoom(2)),
      button("−", "Zoom out (-)", () => this.zoom(0.5)),
      home,
    );
  }

  #listen() {
    this.osd.addHandler("update-viewport", () => this.draw());
    this.osd.addHandler("resize", () => requestAnimationFrame(() => this.draw()));
    this.osd.addHandler("tile-load-failed", (/** @type {any} */ event) => {
      if (this.slide) this.events.failed(this, event.tile?.getUrl?.() ?? "");
    });
    this.osd.addHandler("canvas-click", (/** @type {any} */ event) => {
      if (event.quick && this.ruler && this.ruler.follows !== "nothing") {
        return this.#clickRuler(this.#placeAt(event.position.x, event.position.y));
      }
      if (!event.quick || !this.heatmap || !this.look) return;
      const tile = this.heatmap.tileAt(...this.#placeAt(event.position.x, event.position.y));
      if (tile >= 0) this.events.picked(this, tile);
    });
    const surface = this.osd.canvas;
    for (const name of ["pointerdown", "wheel", "focusin"]) {
      this.element.addEventListener(name, () => this.events.touched(this), { capture: true, passive: true });
    }
    surface.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => this.#hover(event));
    surface.addEventListener("pointerleave", () => this.#hideTip());
  }

  /**
   * Open a slide; resolves when its frame is known, not when its tiles are there.
   *
   * @param {SlideInfo} slide
   * @param {(level: number, column: number, row: number) => string} tileUrl
   * @param {View|null} view
   * @returns {Promise<void>}
   */
  open(slide, tileUrl, view) {
    this.clear();
    this.slide = slide;
    // A folder may hold a slide up to a coarser level only: then that level is what OpenSeadragon knows as the image.
    const full = Math.ceil(Math.log2(Math.max(slide.width, slide.height)));
    const shrink = 2 ** Math.max(0, full - slide.max_level);
    return new Promise((resolve) => {
      this.osd.addOnceHandler("open", () => {
        if (this.slide !== slide) return resolve();
        if (view) this.show(view, true);
        this.#sizeNavigator(slide);
        const image = this.osd.world.getItemAt(0);
        image.addHandler("fully-loaded-change", (/** @type {any} */ event) => this.#tilesThere(event.fullyLoaded));
        this.#tilesThere(image.getFullyLoaded());
        resolve();
      });
      this.osd.open({
        width: Math.ceil(slide.width / shrink),
        height: Math.ceil(slide.height / shrink),
        tileSize: slide.tile_size,
        tileOverlap: slide.overlap,
        minLevel: 0,
        maxLevel: slide.max_level,
        getTileUrl: tileUrl,
      });
    });
  }

  /** The small picture of the whole slide has the slide's shape. @param {SlideInfo} slide */
  #sizeNavigator(slide) {
    const longest = Math.min(NAVIGATOR_PX, this.element.clientWidth / 4);
    const unit = longest / Math.max(slide.width, slide.height);
    this.osd.navigator.setWidth(`${Math.round(slide.width * unit)}px`);
    this.osd.navigator.setHeight(`${Math.round(slide.height * unit)}px`);
  }

  /** @param {boolean} there */
  #tilesThere(there) {
    this.element.dataset.tiles = there ? "loaded" : "loading";
  }

  clear() {
    this.osd.close();
    this.slide = null;
    this.heatmap = null;
    this.lesions = null;
    this.annotation = null;
    this.tile = -1;
    this.ruler = null;
    this.element.dataset.tiles = "none";
    this.say("");
    this.#hideTip();
    this.draw();
  }

  /** Show what is wrong, in place of or above the slide. @param {string} words */
  say(words) {
    this.trouble.hidden = !words;
    this.trouble.textContent = words;
  }

  /** Not drawn before `dress`. @param {Heatmap|null} heatmap */
  setHeatmap(heatmap) {
    this.heatmap = heatmap;
  }

  /** Not drawn before `dress`. @param {[number, number][][]} lesions @param {[number, number][][]} annotation rings */
  setContours(lesions, annotation) {
    this.lesions = pathOf(lesions);
    this.annotation = pathOf(annotation);
  }

  /**
   * Draw it all.
   *
   * @param {Look|null} look null: without the heatmap
   * @param {{lesions: boolean, annotation: boolean}} shown
   * @param {number} tile the marked one, or -1
   */
  dress(look, shown, tile) {
    this.look = look;
    this.shown = shown;
    this.tile = tile;
    if (this.heatmap && look) paintGrid(this.grid, this.heatmap, look);
    this.draw();
  }

  // ------------------------------------------------------------------------------------------ where one looks

  /** @returns {View|null} */
  view() {
    if (!this.slide || !this.osd.isOpen()) return null;
    const bounds = this.osd.viewport.getBounds(true);
    const unit = this.slide.width;
    return { x: (bounds.x + bounds.width / 2) * unit, y: (bounds.y + bounds.height / 2) * unit, w: bounds.width * unit };
  }

  /** @param {View} view @param {boolean} [at_once] */
  show(view, at_once = false) {
    if (!this.slide || !this.osd.isOpen()) return;
    const unit = this.slide.width;
    const viewport = this.osd.viewport;
    viewport.zoomTo(unit / view.w, undefined, at_once);
    viewport.panTo(new /** @type {any} */ (window).OpenSeadragon.Point(view.x / unit, view.y / unit), at_once);
    viewport.applyConstraints(at_once);
  }

  /** @param {number} factor */
  zoom(factor) {
    this.osd.viewport.zoomBy(factor);
    this.osd.viewport.applyConstraints();
  }

  /** Move by shares of what is seen. @param {number} x @param {number} y */
  pan(x, y) {
    const bounds = this.osd.viewport.getBounds();
    this.osd.viewport.panBy(new /** @type {any} */ (window).OpenSeadragon.Point(x * bounds.width, y * bounds.height));
    this.osd.viewport.applyConstraints();
  }

  home() {
    this.osd.viewport.goHome();
  }

  // ------------------------------------------------------------------------------------------ drawing

  /** Element pixels per level-0 pixel, and the place of the slide's corner in the element. */
  #frame() {
    if (!this.slide || !this.osd.isOpen()) return null;
    const bounds = this.osd.viewport.getBounds(true);
    const size = this.osd.viewport.getContainerSize();
    const scale = size.x / (bounds.width * this.slide.width);
    return { scale, x: -bounds.x * this.slide.width * scale, y: -bounds.y * this.slide.width * scale, size };
  }

  draw() {
    const canvas = /** @type {HTMLCanvasElement} */ (this.canvas);
    const ratio = window.devicePixelRatio || 1;
    const size = [canvas.clientWidth, canvas.clientHeight].map((edge) => Math.round(edge * ratio));
    if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    const frame = this.#frame();
    this.scale.hidden = !frame || !this.slide?.mpp;
    this.magnification.hidden = this.scale.hidden;
    this.measured.hidden = !frame || !this.ruler;
    if (!frame) return;
    const scale = frame.scale * ratio;
    context.setTransform(scale, 0, 0, scale, frame.x * ratio, frame.y * ratio);
    if (this.heatmap && this.look) this.#drawHeatmap(context, frame);
    if (this.heatmap && this.tile >= 0) this.#drawMark(context, scale / ratio);
    if (this.annotation && this.shown.annotation) stroke(context, this.annotation, ANNOTATION, scale / ratio, [7, 5]);
    if (this.lesions && this.shown.lesions) stroke(context, this.lesions, LESION, scale / ratio, []);
    if (this.ruler) this.#drawRuler(context, frame, scale / ratio);
    this.#drawScale(frame.scale);
    this.events.moved(this);
  }

  /** @param {CanvasRenderingContext2D} context @param {any} frame */
  #drawHeatmap(context, frame) {
    const heatmap = /** @type {Heatmap} */ (this.heatmap);
    context.globalAlpha = /** @type {Look} */ (this.look).opacity;
    copyGrid(context, this.grid, heatmap, {
      left: -frame.x / frame.scale,
      top: -frame.y / frame.scale,
      right: (frame.size.x - frame.x) / frame.scale,
      bottom: (frame.size.y - frame.y) / frame.scale,
    });
    context.globalAlpha = 1;
  }

  /** @param {CanvasRenderingContext2D} context @param {number} scale */
  #drawMark(context, scale) {
    const [x, y, edge] = /** @type {Heatmap} */ (this.heatmap).box(this.tile);
    // never smaller than can be seen from afar
    const grown = Math.max(0, 14 / scale - edge) / 2;
    const path = new Path2D();
    path.rect(x - grown, y - grown, edge + 2 * grown, edge + 2 * grown);
    // close by, the marked tile is seen without colour
    if (edge * scale > CLEAR_PX) context.clearRect(x, y, edge, edge);
    stroke(context, path, "#ffffff", scale, [], 2.5);
  }

  /** @param {number} scale element pixels per level-0 pixel */
  #drawScale(scale) {
    const mpp = this.slide?.mpp;
    if (!mpp) return;
    const longest_um = (SCALE_PX / scale) * mpp;
    const power = 10 ** Math.floor(Math.log10(longest_um));
    const length_um = ([5, 2, 1].find((step) => step * power <= longest_um) ?? 1) * power;
    const words = length_um >= 1000 ? `${length_um / 1000} mm` : `${Number(length_um.toPrecision(1))} µm`;
    this.scale.firstChild.style.width = `${(length_um / mpp) * scale}px`;
    if (this.scale.lastChild.textContent !== words) {
      this.scale.lastChild.textContent = words;
      this.scale.setAttribute("aria-label", `Scale bar: ${words}`);
    }
    this.scale.dataset.um = String(length_um);
    // 10x is 1 micron per pixel, as scanners count
    const shown = mpp / scale;
    const times = 10 / shown;
    this.magnification.textContent = `${Number(times.toPrecision(times < 1 ? 1 : 2))}× · ${Number(shown.toPrecision(2))} µm/px`;
  }

  // ------------------------------------------------------------------------------------------ the ruler

  /** Begin at the middle of what is seen; the second time the ruler ends, the third time it goes. */
  measure() {
    const view = this.view();
    if (!view) return;
    if (!this.ruler) {
      const middle = this.#middle();
      this.ruler = { from: middle, to: middle, follows: "middle" };
    } else if (this.ruler.follows !== "nothing") {
      this.ruler.follows = "nothing";
    } else {
      this.ruler = null;
    }
    this.draw();
  }

  /** The first click is where the ruler begins, the second where it ends. @param {[number, number]} place */
  #clickRuler(place) {
    const ruler = /** @type {Ruler} */ (this.ruler);
    if (ruler.follows === "middle") this.ruler = { from: place, to: place, follows: "pointer" };
    else this.ruler = { ...ruler, to: place, follows: "nothing" };
    this.draw();
  }

  /** @returns {[number, number]} level-0 */
  #middle() {
    const box = this.osd.canvas.getBoundingClientRect();
    return this.#placeAt(box.width / 2, box.height / 2);
  }

  /** @param {CanvasRenderingContext2D} context @param {any} frame @param {number} scale */
  #drawRuler(context, frame, scale) {
    const ruler = /** @type {Ruler} */ (this.ruler);
    if (ruler.follows === "middle") ruler.to = this.#middle();
    const path = new Path2D();
    path.moveTo(...ruler.from);
    path.lineTo(...ruler.to);
    for (const [x, y] of [ruler.from, ruler.to]) {
      path.moveTo(x - 6 / scale, y);
      path.lineTo(x + 6 / scale, y);
      path.moveTo(x, y - 6 / scale);
      path.lineTo(x, y + 6 / scale);
    }
    stroke(context, path, "#ffe14d", scale, []);
    const pixels = Math.hypot(ruler.to[0] - ruler.from[0], ruler.to[1] - ruler.from[1]);
    const mpp = this.slide?.mpp;
    const um = pixels * (mpp ?? 0);
    const words = !mpp ? `${Math.round(pixels)} px` : um >= 1000 ? `${(um / 1000).toFixed(2)} mm` : `${Math.round(um)} µm`;
    this.measured.textContent = words;
    this.measured.dataset.um = String(um);
    const [x, y] = [frame.x + ruler.to[0] * frame.scale, frame.y + ruler.to[1] * frame.scale];
    this.measured.style.left = `${Math.max(4, Math.min(x + 10, frame.size.x - 90))}px`;
    this.measured.style.top = `${Math.max(4, Math.min(y + 10, frame.size.y - 30))}px`;
  }

  // ------------------------------------------------------------------------------------------ the tile under the pointer

  /** @param {number} x @param {number} y in the element @returns {[number, number]} level-0 */
  #placeAt(x, y) {
    const frame = this.#frame();
    return frame ? [(x - frame.x) / frame.scale, (y - frame.y) / frame.scale] : [NaN, NaN];
  }

  /** @param {PointerEvent} event */
  #hover(event) {
    if (this.ruler?.follows === "pointer") {
      const area = this.osd.canvas.getBoundingClientRect();
      this.ruler.to = this.#placeAt(event.clientX - area.left, event.clientY - area.top);
      this.draw();
      return this.#hideTip();
    }
    if (!this.heatmap || !this.look || event.pointerType === "touch") return this.#hideTip();
    const box = this.osd.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const tile = this.heatmap.tileAt(...this.#placeAt(x, y));
    if (tile < 0) return this.#hideTip();
    if (this.tip.dataset.tile !== String(tile)) {
      this.tip.dataset.tile = String(tile);
      this.tip.replaceChildren(valueList(this.heatmap, tile, this.look.score));
    }
    this.tip.hidden = false;
    const [width, height] = [this.tip.offsetWidth, this.tip.offsetHeight];
    this.tip.style.left = `${x + 18 + width > box.width ? x - width - 14 : x + 18}px`;
    this.tip.style.top = `${Math.max(4, Math.min(y + 14, box.height - height - 4))}px`;
  }

  #hideTip() {
    this.tip.hidden = true;
    delete this.tip.dataset.tile;
  }
}

/** The values of a tile as a list. @param {Heatmap} heatmap @param {number} tile @param {string} score the one that is drawn */
export function valueList(heatmap, tile, score) {
  const list = make("dl.values");
  for (const name of heatmap.scores) {
    const mark = name === score ? ".shown" : "";
    list.append(make(`dt${mark}`, { title: SCORE_HELP[name] }, SCORE_NAMES[name]), make(`dd${mark}`, {}, formatValue(heatmap.values(name)[tile])));
  }
  return list;
}

/** @param {[number, number][][]} rings */
function pathOf(rings) {
  const path = new Path2D();
  for (const ring of rings) {
    ring.forEach(([x, y], k) => (k ? path.lineTo(x, y) : path.moveTo(x, y)));
    path.closePath();
  }
  return path;
}

/**
 * A line that shows on any ground: bright on a dark rim.
 *
 * @param {CanvasRenderingContext2D} context
 * @param {Path2D} path
 * @param {string} color
 * @param {number} scale screen pixels per unit
 * @param {number[]} dash in screen pixels
 * @param {number} [width] in screen pixels
 */
function stroke(context, path, color, scale, dash, width = 2) {
  context.lineJoin = "round";
  context.setLineDash([]);
  context.strokeStyle = DARK;
  context.lineWidth = (width + 2) / scale;
  context.stroke(path);
  context.setLineDash(dash.map((part) => part / scale));
  context.strokeStyle = color;
  context.lineWidth = width / scale;
  context.stroke(path);
}

/**
 * OpenSeadragon adds a style sheet of its own unless one is there; our Content-Security-Policy refuses it, and ours says
 * the same. An element of that name that styles nothing keeps it from trying.
 */
function silenceStyle() {
  if (document.querySelector("style[data-openseadragon-mobile-css]")) return;
  const nothing = document.createElementNS(null, "style");
  nothing.setAttribute("data-openseadragon-mobile-css", "true");
  document.head.append(nothing);
}
