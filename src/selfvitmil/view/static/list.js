/**
 * The list of slides: search, order, and only those rows in the page that can be seen, so that ten thousand are quick.
 *
 * To a screen reader it is a list box: the box has the focus, the active row is named by `aria-activedescendant`.
 */

import { byId, make } from "./dom.js";

const ROW_PX = 84;
const SPARE_ROWS = 6;

/** @typedef {import("./data.js").SlideRow} SlideRow */
/** @typedef {import("./data.js").Model} Model */

/** Whether the decision is not the slide's label. @param {SlideRow} slide @param {Model|undefined} model */
export function isWrong(slide, model) {
  const prediction = model && slide.predictions[model.id];
  return Boolean(prediction && slide.label && model.classes.includes(slide.label) && prediction.decision !== slide.label);
}

/** @param {SlideRow} slide @param {Model|undefined} model @returns {number} -1 where there is none */
function scoreOf(slide, model) {
  const prediction = model && slide.predictions[model.id];
  return prediction ? prediction.probability : -1;
}

/** @param {SlideRow} slide @param {Model|undefined} model */
function trouble(slide, model) {
  if (slide.status !== "ok") return 2;
  return isWrong(slide, model) ? 1 : 0;
}

/**
 * Slides in the wanted order; equal ones by name.
 *
 * @param {SlideRow[]} slides
 * @param {string} sort
 * @param {Model|undefined} model
 * @returns {SlideRow[]}
 */
export function sortSlides(slides, sort, model) {
  const names = new Intl.Collator("en", { numeric: true });
  /** @param {SlideRow} a @param {SlideRow} b */
  const byScore = (a, b) => scoreOf(b, model) - scoreOf(a, model);
  /** @param {SlideRow} slide */
  const decision = (slide) => (model && slide.predictions[model.id]?.decision) || "\uffff";
  /** @type {Record<string, (a: SlideRow, b: SlideRow) => number>} */
  const ways = {
    name: () => 0,
    score: byScore,
    label: (a, b) => names.compare(a.label ?? "\uffff", b.label ?? "\uffff") || byScore(a, b),
    decision: (a, b) => names.compare(decision(a), decision(b)) || byScore(a, b),
    errors: (a, b) => trouble(b, model) - trouble(a, model) || byScore(a, b),
  };
  return [...slides].sort((a, b) => ways[sort](a, b) || names.compare(a.name, b.name));
}

/**
 * Slides that hold every word of the search somewhere.
 *
 * @param {SlideRow[]} slides
 * @param {string} search
 * @param {Model|undefined} model
 * @returns {SlideRow[]}
 */
export function findSlides(slides, search, model) {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return slides;
  return slides.filter((slide) => {
    const prediction = model && slide.predictions[model.id];
    const parts = [slide.name, slide.label, slide.patient, slide.split, prediction?.decision];
    if (slide.status !== "ok") parts.push(slide.status, slide.problem);
    if (isWrong(slide, model)) parts.push("wrong");
    if (slide.waits) parts.push("waits");
    const text = parts.filter(Boolean).join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

export class SlideList {
  /** @param {(id: string) => void} choose */
  constructor(choose) {
    this.box = byId("rows");
    this.spacer = byId("spacer");
    this.choose = choose;
    /** @type {SlideRow[]} */
    this.slides = [];
    /** @type {Model|undefined} */
    this.model = undefined;
    /** @type {string|null} */
    this.open = null;
    this.active = 0;
    this.box.addEventListener("scroll", () => this.#draw(), { passive: true });
    this.box.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this.#key(event));
    this.box.addEventListener("click", (/** @type {MouseEvent} */ event) => {
      const row = /** @type {Element} */ (event.target).closest("[data-id]");
      if (row instanceof HTMLElement) this.choose(row.dataset.id ?? "");
    });
    new ResizeObserver(() => this.#draw()).observe(this.box);
  }

  /** @param {SlideRow[]} slides in order @param {Model|undefined} model @param {string|null} open id of the open slide */
  show(slides, model, open) {
    const moved = open !== this.open || slides !== this.slides;
    Object.assign(this, { slides, model, open });
    const at = slides.findIndex((slide) => slide.id === open);
    this.active = Math.max(at, 0);
    this.spacer.style.height = `${slides.length * ROW_PX}px`;
    if (moved) this.#reveal(this.active);
    this.#draw();
  }

  /** The slide so many rows on, or undefined. @param {number} step @returns {SlideRow|undefined} */
  neighbour(step) {
    const at = this.slides.findIndex((slide) => slide.id === this.open);
    return at < 0 ? this.slides[0] : this.slides[at + step];
  }

  /** @param {number} index */
  #reveal(index) {
    const top = index * ROW_PX;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    const most = top + ROW_PX - this.box.clientHeight;
    if (most > this.box.scrollTop) this.box.scrollTop = most;
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const page = Math.max(1, Math.floor(this.box.clientHeight / ROW_PX) - 1);
    /** @type {Record<string, number>} */
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in steps && !event.altKey && !event.ctrlKey && !event.metaKey) {
      this.active = Math.min(Math.max(this.active + steps[event.key], 0), this.slides.length - 1);
      this.#reveal(this.active);
      this.#draw();
    } else if ((event.key === "Enter" || event.key === " ") && this.slides[this.active]) {
      this.choose(this.slides[this.active].id);
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }

  #draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW_PX) - SPARE_ROWS);
    const last = Math.min(this.slides.length, first + Math.ceil(this.box.clientHeight / ROW_PX) + 2 * SPARE_ROWS);
    /** @type {Map<string, HTMLElement>} */
    const there = new Map([...this.spacer.children].map((row) => [row.dataset.key, row]));
    const rows = [];
    for (let index = first; index < last; index += 1) {
      const slide = this.slides[index];
      const key = `${slide.id} ${this.model?.id} ${slide.status} ${slide.waits}`;
      const row = there.get(key) ?? this.#row(slide, key);
      row.style.top = `${index * ROW_PX}px`;
      row.classList.toggle("active", index === this.active);
      row.setAttribute("aria-selected", String(slide.id === this.open));
      row.setAttribute("aria-posinset", String(index + 1));
      row.setAttribute("aria-setsize", String(this.slides.length));
      rows.push(row);
    }
    this.spacer.replaceChildren(...rows);
    const active = this.slides[this.active];
    if (active) this.box.setAttribute("aria-activedescendant", `row-${active.id}`);
    else this.box.removeAttribute("aria-activedescendant");
  }

  /** @param {SlideRow} slide @param {string} key @returns {HTMLElement} */
  #row(slide, key) {
    const row = make("div.row", { role: "option", id: `row-${slide.id}`, "data-id": slide.id, "data-key": key });
    row.append(thumbnail(slide));
    const head = make("div.title", {}, make("span.name", { title: slide.name }, slide.name));
    if (isWrong(slide, this.model)) {
      head.append(make("span.chip.wrong", { title: "The decision is not the label" }, "wrong"));
    }
    const facts = make("div.facts", {}, head);
    facts.append(...(slide.status === "ok" ? this.#facts(slide) : [problem(slide)]));
    row.append(facts);
    return row;
  }

  /** @param {SlideRow} slide @returns {Node[]} */
  #facts(slide) {
    const chips = make("div.chips");
    if (slide.label !== null) chips.append(make("span.chip", { title: "Label of the slide" }, slide.label));
    const prediction = this.model && slide.predictions[this.model.id];
    if (slide.waits) return [make("span.chip", { title: "Its prediction is still to come" }, "waits")];
    if (!prediction) {
      if (this.model) chips.append(make("span.quiet", {}, "no heatmap"));
      return [chips];
    }
    const kind = prediction.positive ? "positive" : "negative";
    chips.append(make(`span.chip.${kind}`, { title: "Decision of the model" }, `→ ${prediction.decision}`));
    const fill = make(`span.fill.${kind}`);
    fill.style.width = `${100 * prediction.probability}%`;
    const bar = make("span.bar", { "aria-hidden": "true" }, fill);
    return [chips, make("div.scored", {}, bar, make("span.number", {}, prediction.probability.toFixed(2)))];
  }
}

/** @param {SlideRow} slide */
export function thumbnail(slide) {
  const frame = make("span.thumb");
  if (slide.thumbnail === null || slide.status === "missing") return frame;
  const picture = make("img", { src: slide.thumbnail, alt: "", loading: "lazy", decoding: "async" });
  picture.addEventListener("error", () => picture.remove());
  frame.append(picture);
  return frame;
}

/** @param {SlideRow} slide */
function problem(slide) {
  const what = slide.status === "missing" ? "Missing" : "Failed";
  return make("div.problem", { title: slide.problem }, make("b", {}, what), ` ${slide.problem}`);
}
