/**
 * The viewer: one state, and what follows from a change of it.
 *
 * Whatever the reader does ends in `change`, which compares the state with the one before: another slide is opened,
 * another model's heatmap is loaded, all else is drawn anew. The address follows the state, and the state an opened link.
 */

import { COLOR_NAMES } from "./colors.js";
import { openData } from "./data.js";
import { byId, fillSelect, make, remembered, setWords } from "./dom.js";
import { SCORE_NAMES, Heatmap, formatValue } from "./heatmap.js";
import { listenToKeys } from "./keys.js";
import { findSlides, isWrong, SlideList, sortSlides } from "./list.js";
import { Pane } from "./pane.js";
import { Gallery } from "./gallery.js";
import { Panel } from "./panel.js";
import { fromHash, PLAIN, SORT_NAMES, START, toHash } from "./state.js";

/** @typedef {import("./state.js").State} State */

const KEPT_HEATMAPS = 6;
const TILES_ACROSS = 7;
const LOOK_AGAIN_MS = 10_000;
const NARROW = matchMedia("(max-width: 820px)");

class Viewer {
  constructor() {
    this.data = openData();
    /** @type {State} */
    this.state = { ...START };
    /** @type {import("./data.js").Study} */
    this.study = { title: "", research_notice: "", queue: false, models: [], slides: [], failures: [] };
    /** @type {import("./data.js").SlideInfo|null} */
    this.slide = null;
    /** @type {Map<string, Promise<{heatmap: Heatmap, lesions: import("./data.js").LesionJson[]}>>} */
    this.heatmaps = new Map();
    /** @type {import("./data.js").LesionJson[][]} of the two viewers */
    this.found = [[], []];
    /** @type {import("./data.js").AnnotationJson[]} */
    this.annotations = [];
    this.search = "";
    this.turn = 0;
    const events = {
      moved: (/** @type {Pane} */ pane) => this.#moved(pane),
      touched: (/** @type {Pane} */ pane) => void (this.leader = pane),
      picked: (/** @type {Pane} */ pane, /** @type {number} */ tile) => this.#picked(pane, tile),
      failed: (/** @type {Pane} */ pane, /** @type {string} */ url) => this.#failed(pane, url),
    };
    this.panes = [new Pane(byId("pane-first"), events), new Pane(byId("pane-second"), events)];
    this.leader = this.panes[0];
    this.panel = new Panel({
      change: (changes) => this.change(changes),
      stepTile: (step) => this.stepTile(step),
      goLesion: (index) => this.#goLesion(index),
      openSlide: (id) => this.choose(id),
    });
    this.list = new SlideList((id) => this.choose(id));
    this.gallery = new Gallery((place) => this.goTile(place));
  }

  async start() {
    try {
      this.study = await this.data.study();
    } catch (error) {
      return this.#message(wordsOf(error));
    }
    document.title = this.study.title || "selfvitmil";
    byId("title").textContent = this.study.title;
    byId("notice").textContent = this.study.research_notice;
    fillSelect(byId("sort"), Object.entries(SORT_NAMES), START.sort);
    this.#fillModels();
    this.#showFailures();
    this.#wire();
    await this.#reopen();
    if (this.study.queue) setTimeout(() => void this.#lookAgain(), LOOK_AGAIN_MS);
    document.documentElement.dataset.ready = "yes";
  }

  #fillModels() {
    const models = this.study.models.map((model) => /** @type {[string, string]} */ ([model.id, model.name]));
    fillSelect(byId("model"), models, this.state.model ?? "");
    this.panes.forEach((pane, k) => this.#fillHead(pane, k));
  }

  /** Take up slides and predictions that have come since; a server that does not answer changes nothing. */
  async #lookAgain() {
    const before = this.study;
    const now = await this.data.study().catch(() => before);
    if (JSON.stringify(now) !== JSON.stringify(before)) await this.#take(now, before);
    setTimeout(() => void this.#lookAgain(), LOOK_AGAIN_MS);
  }

  /** @param {import("./data.js").Study} now @param {import("./data.js").Study} before */
  async #take(now, before) {
    const known = (/** @type {{id: string}[]} */ models) => models.map((model) => model.id).join();
    const [models, had] = [known(now.models) !== known(before.models), Object.keys(this.row?.predictions ?? {}).join()];
    this.study = now;
    if (models) this.#fillModels();
    this.#showFailures();
    if (!before.slides.length) return this.#reopen();
    this.state.model ??= now.models[0]?.id ?? null;
    this.#relist();
    if (models || Object.keys(this.row?.predictions ?? {}).join() !== had) await this.#openSlide();
  }

  /** Show what the address says. */
  async #reopen() {
    const asked = fromHash(location.hash);
    const models = this.study.models.map((model) => model.id);
    if (!asked.model || !models.includes(asked.model)) asked.model = models[0] ?? null;
    if (asked.beside && asked.beside !== PLAIN && !models.includes(asked.beside)) asked.beside = null;
    if (!models.length && asked.sort === "score") asked.sort = "name";
    const known = this.study.slides.some((slide) => slide.id === asked.slide);
    if (asked.slide && !known) this.say("This study has no slide that the link names. The first one is shown.");
    if (!known) Object.assign(asked, { slide: null, view: null, tile: null });
    this.state = asked;
    byId("sort").value = asked.sort;
    this.#arrange();
    this.#relist();
    if (!this.study.slides.length) return this.#message("This study has no slides. `selfvitmil check STUDY` says why.");
    this.state.slide ??= (this.list.slides.find((slide) => slide.status === "ok") ?? this.list.slides[0]).id;
    await this.#openSlide();
  }

  // ------------------------------------------------------------------------------------------ state

  /** @param {Partial<State>} changes */
  change(changes) {
    const before = this.state;
    this.state = { ...before, ...changes };
    const changed = (/** @type {(keyof State)[]} */ ...keys) => keys.some((key) => before[key] !== this.state[key]);
    if (changed("sort", "model", "slide")) this.#relist();
    if (changed("beside")) this.#arrange();
    if (changed("slide")) {
      history.pushState(null, "", toHash(this.state));
      void this.#openSlide();
    } else if (changed("model", "beside")) {
      void this.#openHeatmaps(this.turn);
    } else {
      this.#redraw();
    }
  }

  /** Open another slide. @param {string} id */
  choose(id) {
    if (id !== this.state.slide) this.change({ slide: id, view: null, tile: null });
    this.#closeDrawers();
  }

  /** Keep the address in step, but not at every frame. */
  #writeAddress() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.state.view = this.panes[0].view() ?? this.state.view;
      history.replaceState(null, "", toHash(this.state));
    }, 150);
  }

  get model() {
    return this.study.models.find((model) => model.id === this.state.model);
  }

  get row() {
    return this.study.slides.find((slide) => slide.id === this.state.slide);
  }

  get heatmap() {
    return this.panes[0].heatmap;
  }

  // ------------------------------------------------------------------------------------------ slides

  #relist() {
    const found = findSlides(this.study.slides, this.search, this.model);
    const rows = sortSlides(found, this.state.sort, this.model);
    this.list.show(rows, this.model, this.state.slide);
    const wrong = rows.filter((slide) => isWrong(slide, this.model)).length;
    const out = rows.filter((slide) => slide.status !== "ok").length;
    const words = [`${rows.length === this.study.slides.length ? "" : `${rows.length} of `}${counted(this.study.slides.length, "slide")}`];
    const waiting = rows.filter((slide) => slide.waits).length;
    if (waiting) words.push(`${waiting} waiting`);
    if (wrong) words.push(`${wrong} wrong`);
    if (out) words.push(`${out} not readable`);
    byId("count").textContent = words.join(" · ");
  }

  async #openSlide() {
    const turn = (this.turn += 1);
    const row = this.row;
    const { view } = this.state;
    this.slide = null;
    this.annotations = [];
    this.found = [[], []];
    this.panes.forEach((pane) => pane.clear());
    this.panel.showPrediction(row, this.model);
    this.panel.showSimilar([]);
    this.panel.sync(this.state, null, []);
    this.#showGallery();
    byId("measure").setAttribute("aria-pressed", "false");
    this.panel.explain("");
    this.#message("");
    if (!row) return;
    if (row.status === "missing") return this.#noSlide(row.problem);
    try {
      const slide = await this.data.slide(row.id);
      if (turn !== this.turn) return;
      this.slide = slide;
      this.#showSimilar(slide);
      await this.#openPanes(view);
    } catch (error) {
      if (turn === this.turn) this.#noSlide(wordsOf(error));
      return;
    }
    if (turn !== this.turn) return;
    await this.#openAnnotations(turn, row);
    if (turn === this.turn) await this.#openHeatmaps(turn);
  }

  /** @param {import("./data.js").SlideInfo} slide */
  #showSimilar(slide) {
    const rows = new Map(this.study.slides.map((row) => [row.id, row]));
    const found = slide.similar.map(({ slide: id, similarity }) => ({ row: rows.get(id), similarity }));
    this.panel.showSimilar(found.flatMap(({ row, similarity }) => (row ? [{ row, similarity }] : [])));
  }

  /**
   * Load the annotation; without it the slide and its heatmaps are shown all the same.
   *
   * @param {number} turn
   * @param {import("./data.js").SlideRow} row
   */
  async #openAnnotations(turn, row) {
    if (row.problem) this.panes[0].say(row.problem);
    if (!this.slide?.annotation) return;
    try {
      const annotations = await this.data.annotation(row.id);
      if (turn === this.turn) this.annotations = annotations;
    } catch (error) {
      const words = `The annotation of this slide is not shown: ${wordsOf(error)}`;
      if (turn === this.turn) this.panes[0].say([row.problem, words].filter(Boolean).join(" "));
    }
  }

  /** @param {import("./state.js").View|null} view */
  async #openPanes(view) {
    const slide = /** @type {import("./data.js").SlideInfo} */ (this.slide);
    this.leader = this.panes[0];
    const shown = this.state.beside === null ? this.panes.slice(0, 1) : this.panes;
    const url = (/** @type {number} */ level, /** @type {number} */ column, /** @type {number} */ row) =>
      this.data.tileUrl(slide.id, level, column, row);
    await Promise.all(shown.filter((pane) => pane.slide !== slide).map((pane) => pane.open(slide, url, view)));
  }

  /** @param {string} words */
  #noSlide(words) {
    this.panes[0].say(words);
    this.panel.explain("");
    this.live(words);
  }

  /** A tile did not come: ask once why. @param {Pane} pane @param {string} url */
  async #failed(pane, url) {
    const slide = pane.slide;
    if (!url || pane.trouble.textContent) return;
    pane.say("Part of this slide could not be read.");
    const why = await this.data.whyNot(url);
    if (pane.slide === slide) pane.say(why ? `Part of this slide could not be read: ${why}` : "");
  }

  // ------------------------------------------------------------------------------------------ heatmaps

  /** @param {string} id @param {string} model @returns {Promise<{heatmap: Heatmap, lesions: import("./data.js").LesionJson[]}>} */
  #heatmapOf(id, model) {
    const key = `${id} ${model}`;
    let kept = this.heatmaps.get(key);
    if (!kept) {
      kept = Promise.all([this.data.heatmap(id, model), this.data.lesions(id, model)]).then(([json, lesions]) => ({
        heatmap: new Heatmap(json),
        lesions,
      }));
      kept.catch(() => this.heatmaps.delete(key));
      this.heatmaps.set(key, kept);
      if (this.heatmaps.size > KEPT_HEATMAPS) this.heatmaps.delete(/** @type {string} */ (this.heatmaps.keys().next().value));
    }
    return kept;
  }

  /** Load the heatmaps of both viewers. @param {number} turn */
  async #openHeatmaps(turn) {
    const slide = this.slide;
    if (!slide) return;
    delete document.documentElement.dataset.slide; // until its heatmaps are there
    const { model, beside } = this.state;
    const stale = () => turn !== this.turn || model !== this.state.model || beside !== this.state.beside;
    if (beside !== null) await this.#openPanes(this.panes[0].view());
    if (stale()) return;
    this.panel.explain(this.#whyNoHeatmap());
    const wanted = [model, beside].map((id) => (id && slide.maps.includes(id) ? this.#heatmapOf(slide.id, id) : null));
    const results = await Promise.allSettled(wanted);
    if (stale()) return;
    results.forEach((result, k) => {
      const made = result.status === "fulfilled" ? result.value : null;
      if (result.status === "rejected") this.panel.explain(wordsOf(result.reason));
      this.found[k] = made?.lesions ?? [];
      this.panes[k].setHeatmap(made?.heatmap ?? null);
      const rings = this.found[k].filter((lesion) => lesion.finding).flatMap((lesion) => lesion.rings);
      this.panes[k].setContours(rings, this.annotations.flatMap((annotation) => annotation.rings));
    });
    if (this.state.tile !== null && this.heatmap && this.state.tile >= this.heatmap.count) this.state.tile = null;
    this.#showLesions();
    this.#redraw();
    document.documentElement.dataset.slide = slide.id;
  }

  #whyNoHeatmap() {
    if (!this.study.models.length) return "This study has no heatmaps yet. `selfvitmil localize STUDY` computes them.";
    if (this.slide && this.state.model && this.slide.maps.includes(this.state.model)) return "";
    const name = this.model?.name ?? "this model";
    return `${name} has no heatmap of this slide. \`selfvitmil localize STUDY\` covers test slides; add --localize.parts for others.`;
  }

  #showLesions() {
    const lesions = this.found[0];
    const ranks = this.heatmap?.onlyRanks ?? false;
    let words = lesions.length ? "" : "No region reaches the threshold of a lesion.";
    if (ranks) words = "No lesions: the slide is not called positive. Every slide has highest-ranked regions.";
    if (this.heatmap?.blank) words = "Left blank: the slide was not found positive.";
    this.panel.showLesions(lesions, words, ranks);
  }

  /** Draw everything that depends on the state but needs no loading. */
  #redraw() {
    const { state } = this;
    this.panes.forEach((pane, k) => {
      const look = { ...state, score: k ? state.besideScore : state.score };
      // another model may have cut the slide otherwise: then its tiles are not these
      const alike = pane.heatmap?.count === this.heatmap?.count;
      pane.dress(state.map ? look : null, state, alike ? (state.tile ?? -1) : -1);
      this.#syncHead(pane, k);
    });
    byId("show-annotation").disabled = !this.annotations.length;
    this.panel.sync(state, this.heatmap, this.slide?.maps ?? []);
    this.panel.showPrediction(this.row, this.model);
    if (this.heatmap) this.#showTile(this.heatmap);
    this.#showGallery();
    byId("toggle-compare").setAttribute("aria-pressed", String(state.beside !== null));
    this.#writeAddress();
  }

  #showGallery() {
    const slide = this.slide;
    const { score, model, tile } = this.state;
    const url = (/** @type {number} */ level, /** @type {number} */ column, /** @type {number} */ row) =>
      this.data.tileUrl(slide?.id ?? "", level, column, row);
    this.gallery.show(slide, this.heatmap, score, url, model ?? "", tile ?? -1);
  }

  /** Begin, end or remove the ruler of the viewer that was used last. */
  measure() {
    if (!this.slide) return;
    this.leader.measure();
    byId("measure").setAttribute("aria-pressed", String(this.leader.ruler !== null));
    const { ruler, measured } = this.leader;
    if (!ruler) this.live("The ruler is removed");
    else if (ruler.follows === "middle") this.say("Ruler: click where it begins and ends, or move the slide and press r again.");
    else this.live(`Distance: ${measured.textContent}`);
  }

  /** @param {Heatmap} heatmap */
  #showTile(heatmap) {
    const { score, threshold } = this.state;
    const tile = this.state.tile ?? -1;
    const count = heatmap.countSuspicious(score, threshold);
    const place = tile < 0 ? -1 : heatmap.order(score).indexOf(tile);
    const words = place < 0 ? counted(count, "tile") : place < count ? `${place + 1} of ${count}` : `rank ${place + 1}`;
    this.panel.showTile(heatmap, tile, score, words);
  }

  // ------------------------------------------------------------------------------------------ tiles and lesions

  /** To the next weaker or stronger tile of those that are drawn. @param {number} step */
  stepTile(step) {
    const { heatmap } = this;
    if (!heatmap) return this.say(this.#whyNoHeatmap());
    const { score, threshold, tile } = this.state;
    const order = heatmap.order(score);
    const count = heatmap.countSuspicious(score, threshold);
    if (!count) return this.say("No tile reaches the threshold: hide fewer tiles.");
    const at = tile === null ? -1 : order.indexOf(tile);
    this.goTile(at < 0 || at >= count ? (step > 0 ? 0 : count - 1) : (at + step + count) % count);
  }

  /** @param {number} place in falling order of the value */
  goTile(place) {
    const heatmap = /** @type {Heatmap} */ (this.heatmap);
    const tile = heatmap.order(this.state.score)[place];
    const [x, y, edge] = heatmap.box(tile);
    const now = this.panes[0].view();
    this.leader = this.panes[0];
    const wide = TILES_ACROSS * edge;
    this.panes[0].show({ x: x + edge / 2, y: y + edge / 2, w: now ? Math.min(now.w, wide) : wide });
    if (NARROW.matches) this.#closeDrawers();
    this.change({ tile });
    this.#readTile(heatmap, tile, place);
  }

  /** @param {Pane} pane @param {number} tile */
  #picked(pane, tile) {
    const heatmap = /** @type {Heatmap} */ (pane.heatmap);
    if (pane === this.panes[0]) this.change({ tile });
    this.#readTile(heatmap, tile, heatmap.order(this.state.score).indexOf(tile));
  }

  /** Say the values of a tile. @param {Heatmap} heatmap @param {number} tile @param {number} place */
  #readTile(heatmap, tile, place) {
    const values = heatmap.scores.map((name) => `${SCORE_NAMES[name]} ${formatValue(heatmap.values(name)[tile])}`);
    const [x, y] = heatmap.box(tile);
    const mm = (/** @type {number} */ l0) => ((l0 * heatmap.frame.slide_mpp) / 1000).toFixed(1);
    this.live(`Tile ${place + 1}: ${values.join(", ")}; ${mm(x)} mm from the left, ${mm(y)} mm from the top`);
  }

  /** @param {number} index */
  #goLesion(index) {
    const lesion = this.found[0][index];
    const xs = lesion.rings.flat().map((point) => point[0]);
    const ys = lesion.rings.flat().map((point) => point[1]);
    const [left, right] = [Math.min(...xs), Math.max(...xs)];
    const [top, bottom] = [Math.min(...ys), Math.max(...ys)];
    const size = this.panes[0].canvas;
    const across = Math.max(right - left, ((bottom - top) * size.clientWidth) / Math.max(size.clientHeight, 1));
    this.leader = this.panes[0];
    this.panes[0].show({ x: (left + right) / 2, y: (top + bottom) / 2, w: 1.8 * across });
    this.live(`${lesion.finding ? "Lesion" : "Region"} ${index + 1}: ${lesion.size_words}, highest score ${formatValue(lesion.score)}`);
    if (NARROW.matches) this.#closeDrawers();
  }

  // ------------------------------------------------------------------------------------------ two viewers

  /** @param {Pane} pane */
  #moved(pane) {
    if (pane !== this.leader) return;
    const view = pane.view();
    if (view && this.state.beside !== null) this.panes.find((other) => other !== pane)?.show(view, true);
    this.#writeAddress();
  }

  toggleBeside() {
    if (this.state.beside !== null) return this.change({ beside: null });
    const other = this.study.models.find((model) => model.id !== this.state.model);
    this.change({ beside: other?.id ?? PLAIN });
  }

  /** One or two viewers. */
  #arrange() {
    const two = this.state.beside !== null;
    byId("panes").classList.toggle("two", two);
    byId("pane-second").hidden = !two;
    if (!two) this.panes[1].clear();
  }

  /** What each of two viewers shows. @param {Pane} pane @param {number} k */
  #fillHead(pane, k) {
    const which = k ? "second" : "first";
    const model = make("select", { "aria-label": `Model of the ${which} viewer` });
    const score = make("select", { "aria-label": `Value of the ${which} viewer` });
    const models = this.study.models.map((one) => /** @type {[string, string]} */ ([one.id, one.name]));
    fillSelect(model, k ? [...models, [PLAIN, "No heatmap"]] : models, "");
    model.addEventListener("change", () => this.change(k ? { beside: model.value } : { model: model.value }));
    score.addEventListener("change", () => this.change(k ? { besideScore: score.value } : { score: score.value }));
    pane.head.replaceChildren(model, score, make("span.said"));
  }

  /** @param {Pane} pane @param {number} k */
  #syncHead(pane, k) {
    const [model, score, said] = pane.head.children;
    const id = k ? this.state.beside : this.state.model;
    model.value = id ?? PLAIN;
    score.hidden = !pane.heatmap;
    if (pane.heatmap) {
      const choices = pane.heatmap.scores.map((name) => /** @type {[string, string]} */ ([name, SCORE_NAMES[name]]));
      fillSelect(score, choices, k ? this.state.besideScore : this.state.score);
    }
    const prediction = id ? this.row?.predictions[id] : undefined;
    said.textContent = prediction ? `→ ${prediction.decision} ${prediction.probability.toFixed(2)}` : "";
  }

  // ------------------------------------------------------------------------------------------ the page around it

  #wire() {
    byId("search").addEventListener("input", () => {
      this.search = byId("search").value;
      this.#relist();
    });
    byId("search").addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      const [first] = this.list.slides;
      if (event.key === "Enter" && first) this.choose(first.id);
      if (event.key === "Escape") byId("rows").focus();
      if (event.key === "ArrowDown") byId("rows").focus();
    });
    byId("sort").addEventListener("change", () => this.change({ sort: byId("sort").value }));
    byId("toggle-compare").addEventListener("click", () => this.toggleBeside());
    byId("measure").addEventListener("click", () => this.measure());
    byId("copy-link").addEventListener("click", () => void this.copyLink());
    byId("toggle-theme").addEventListener("click", () => switchTheme());
    byId("open-help").addEventListener("click", () => byId("help").showModal());
    byId("open-failures").addEventListener("click", () => byId("failures").showModal());
    byId("toggle-list").addEventListener("click", () => this.#drawer("slides"));
    byId("toggle-panel").addEventListener("click", () => this.#drawer("panel"));
    byId("shade").addEventListener("click", () => this.#closeDrawers());
    window.addEventListener("popstate", () => void this.#reopen());
    this.#listen();
  }

  #listen() {
    const flip = (/** @type {"map"|"fade"|"lesions"|"annotation"} */ key) => this.change({ [key]: !this.state[key] });
    const hide = (/** @type {number} */ step) =>
      this.change({ threshold: Math.min(1, Math.max(0, Math.round(100 * (this.state.threshold + step)) / 100)) });
    const slide = (/** @type {number} */ step) => {
      const next = this.list.neighbour(step);
      if (next) this.choose(next.id);
    };
    const zoom = (/** @type {number} */ factor) => this.slide && this.leader.zoom(factor);
    const models = () => this.slide?.maps ?? [];
    listenToKeys(
      {
        n: () => this.stepTile(1),
        p: () => this.stepTile(-1),
        t: () => (this.heatmap ? this.goTile(0) : this.say(this.#whyNoHeatmap())),
        "]": () => slide(1),
        "[": () => slide(-1),
        "+": () => zoom(1.5),
        "=": () => zoom(1.5),
        "-": () => zoom(1 / 1.5),
        0: () => this.slide && this.leader.home(),
        h: () => flip("map"),
        v: () => this.change({ score: after(this.heatmap?.scores ?? ["score"], this.state.score) }),
        c: () => this.change({ colors: after(Object.keys(COLOR_NAMES), this.state.colors) }),
        f: () => flip("fade"),
        ".": () => hide(0.05),
        ",": () => hide(-0.05),
        o: () => flip("lesions"),
        a: () => flip("annotation"),
        m: () => models().length && this.change({ model: after(models(), this.state.model ?? "") }),
        s: () => this.toggleBeside(),
        r: () => this.measure(),
        "/": () => this.#goSearch(),
        y: () => void this.copyLink(),
        d: () => switchTheme(),
        "?": () => byId("help").showModal(),
        Escape: () => this.#closeDrawers(),
      },
      (x, y) => this.slide && this.leader.pan(x, y),
    );
  }

  #goSearch() {
    if (getComputedStyle(byId("toggle-list")).display !== "none") this.#drawer("slides", true);
    byId("search").focus();
  }

  /** @param {"slides"|"panel"} which @param {boolean} [open] */
  #drawer(which, open = !byId(which).classList.contains("open")) {
    this.#closeDrawers();
    byId(which).classList.toggle("open", open);
    byId(which === "slides" ? "toggle-list" : "toggle-panel").setAttribute("aria-expanded", String(open));
    byId("shade").hidden = !open;
  }

  #closeDrawers() {
    for (const [drawer, button] of [["slides", "toggle-list"], ["panel", "toggle-panel"]]) {
      byId(drawer).classList.remove("open");
      byId(button).setAttribute("aria-expanded", "false");
    }
    byId("shade").hidden = true;
  }

  async copyLink() {
    this.state.view = this.panes[0].view() ?? this.state.view;
    history.replaceState(null, "", toHash(this.state));
    try {
      await navigator.clipboard.writeText(location.href);
      this.say("The link to this view is copied.");
    } catch {
      byId("link-text").value = location.href;
      byId("link").showModal();
      byId("link-text").select();
    }
  }

  #showFailures() {
    const { failures } = this.study;
    const button = byId("open-failures");
    button.hidden = !failures.length;
    button.textContent = `${counted(failures.length, "failure")} recorded: what to do`;
    const rows = failures.map((one) =>
      make("tr", {}, ...[one.name, one.stage, one.reason, one.remedy].map((text) => make("td", {}, text))),
    );
    byId("failure-rows").replaceChildren(...rows);
  }

  /** In place of the slide. @param {string} words */
  #message(words) {
    setWords(byId("message"), words);
    byId("message").hidden = !words;
  }

  /** For a moment, and for screen readers. @param {string} words */
  say(words) {
    const toast = byId("toast");
    setWords(toast, words);
    toast.hidden = false;
    clearTimeout(this.toastTimer);
    this.toastTimer = setTimeout(() => void (toast.hidden = true), 6000);
  }

  /** For screen readers alone. @param {string} words */
  live(words) {
    byId("live").textContent = words;
  }
}

/** @param {number} count @param {string} noun */
function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

/** The one that follows, round and round. @template T @param {T[]} all @param {T} now @returns {T} */
function after(all, now) {
  return all[(all.indexOf(now) + 1) % all.length];
}

/** @param {unknown} error */
function wordsOf(error) {
  return error instanceof Error ? error.message : String(error);
}

const DARK_SYSTEM = matchMedia("(prefers-color-scheme: dark)");

/** As chosen before; without a choice as the system has it. */
function setTheme() {
  const theme = remembered("theme");
  const chosen = theme === "dark" || theme === "light" ? theme : DARK_SYSTEM.matches ? "dark" : "light";
  document.documentElement.dataset.theme = chosen;
}

function switchTheme() {
  remembered("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  setTheme();
}

DARK_SYSTEM.addEventListener("change", setTheme);
setTheme();
void new Viewer().start();
