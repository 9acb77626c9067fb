/**
 * All data of the viewer comes through here, from one of two places with the same methods:
 *
 * - `ServerData`: `selfvitmil view` answers under `api/`.
 * - `FolderData`: a folder written by `selfvitmil view --export`, opened from disk. Pages from disk may neither fetch nor
 *   load modules, so there the modules of this folder are one classic script, and data are classic scripts too:
 *   `data/study.js` (named in index.html before the viewer's script) sets
 *       window.SELFVITMIL_DATA = {study: <api/study.json>, slides: {}}
 *   and `data/<id>.js`, loaded when its slide is opened, sets
 *       window.SELFVITMIL_DATA.slides["<id>"] = {slide: <api/slides/id.json>, maps: {<model id>: ...},
 *                                                lesions: {<model id>: [...]}, annotation: [...]}
 *   Tiles are files `tiles/<id>/<level>/<column>_<row>.jpg`; a slide's `thumbnail` is an address relative to the page.
 *
 * Coordinates are level-0 pixels, the corner of a tile is its top left one.
 */

/**
 * @typedef {object} SlidePrediction What a model predicts for a slide.
 * @property {number} probability of the class that the heatmap shows
 * @property {string} decision name of a class
 * @property {boolean} positive whether the decision is the class that the heatmap shows
 * @property {number|null} threshold
 * @property {string} threshold_from
 * @property {string} part test, val, train or new
 * @property {number|null} [lesions] how many
 * @property {string} shown class that the heatmap shows evidence for
 * @property {string} [value_words] the prediction in words, with another outcome than classes
 *
 * @typedef {object} Model
 * @property {string} id
 * @property {string} name
 * @property {string} method
 * @property {string[]} classes
 *
 * @typedef {object} SlideRow
 * @property {string} id
 * @property {string} name
 * @property {string|null} label
 * @property {string|null} patient
 * @property {string|null} split
 * @property {boolean} waits whether its prediction is still to come
 * @property {"ok"|"missing"|"failed"} status
 * @property {string} problem
 * @property {string|null} thumbnail
 * @property {Record<string, SlidePrediction>} predictions by model id
 *
 * @typedef {object} Study
 * @property {string} title
 * @property {string} research_notice
 * @property {boolean} queue whether slides and predictions are still arriving
 * @property {Model[]} models
 * @property {SlideRow[]} slides
 * @property {{name: string, stage: string, reason: string, remedy: string}[]} failures
 *
 * @typedef {object} SlideInfo
 * @property {string} id
 * @property {string} name
 * @property {number} width
 * @property {number} height
 * @property {number|null} mpp
 * @property {number} tile_size
 * @property {number} overlap
 * @property {number} max_level
 * @property {boolean} annotation
 * @property {string[]} maps ids of the models that have a heatmap of the slide
 * @property {{slide: string, similarity: number}[]} similar ids of the slides most like it, nearest first
 *
 * @typedef {object} HeatmapFrame
 * @property {number} slide_mpp
 * @property {[number, number]} size_l0
 * @property {number} extent_l0
 * @property {number} stride_l0
 * @property {number} tile_mpp
 * @property {number} size_px
 *
 * @typedef {object} HeatmapJson
 * @property {HeatmapFrame} frame
 * @property {string} kind
 * @property {string} scale
 * @property {boolean} gated
 * @property {string} shown_because why `kind` is shown
 * @property {SlidePrediction} prediction
 * @property {string[]} columns
 * @property {number[]} coords x0, y0, x1, y1, ...
 * @property {number[]} strongest_first the tiles from the strongest to the weakest, as report and predictions have them
 * (and, each under its name, the values of the tiles: see SCORE_NAMES; null where there is none)
 * @property {string[]} [warnings]
 *
 * @typedef {object} LesionJson
 * @property {number} score
 * @property {number} mean_score
 * @property {number} area_mm2
 * @property {number} diameter_um
 * @property {number} tile_um edge of a tile
 * @property {string} size_words
 * @property {boolean} finding whether it is a lesion; else a highest-ranked region of a slide not called positive
 * @property {[number, number]} centroid_l0
 * @property {[number, number][][]} rings
 *
 * @typedef {object} AnnotationJson
 * @property {string} name
 * @property {string} group
 * @property {string} kind
 * @property {[number, number][][]} rings
 */

/** Something that cannot be shown, in words for the reader. */
export class DataError extends Error {}

export class ServerData {
  /** @returns {Promise<Study>} */
  study() {
    return this.#get("api/study.json");
  }
  /** @param {string} id @returns {Promise<SlideInfo>} */
  slide(id) {
    return this.#get(`api/slides/${id}.json`);
  }
  /** @param {string} id @param {string} model @returns {Promise<HeatmapJson>} */
  heatmap(id, model) {
    return this.#get(`api/slides/${id}/maps/${model}.json`);
  }
  /** @param {string} id @param {string} model @returns {Promise<LesionJson[]>} */
  lesions(id, model) {
    return this.#get(`api/slides/${id}/lesions/${model}.json`);
  }
  /** @param {string} id @returns {Promise<AnnotationJson[]>} */
  annotation(id) {
    return this.#get(`api/slides/${id}/annotation.json`);
  }
  /** @param {string} id @param {number} level @param {number} column @param {number} row */
  tileUrl(id, level, column, row) {
    return `api/slides/${id}/tiles/${level}/${column}_${row}.jpg`;
  }
  /** Why a tile did not come. @param {string} url @returns {Promise<string>} */
  async whyNot(url) {
    try {
      const answer = await fetch(url);
      return answer.ok ? "" : await reasonOf(answer);
    } catch {
      return "the server does not answer";
    }
  }
  /** @param {string} url @returns {Promise<any>} */
  async #get(url) {
    let answer;
    try {
      answer = await fetch(url);
    } catch {
      throw new DataError("The server does not answer. Is `selfvitmil view` still running?");
    }
    if (!answer.ok) throw new DataError(await reasonOf(answer));
    return answer.json();
  }
}

/** The server's own words about a failure. @param {Response} answer @returns {Promise<string>} */
async function reasonOf(answer) {
  const text = (await answer.text()).slice(0, 2000);
  try {
    const answered = JSON.parse(text);
    const words = answered.error ?? answered.detail ?? answered.message;
    if (typeof words === "string" && words) return words;
  } catch {
    // plain text is fine too
  }
  return text && !text.startsWith("<") ? text : `The server answered ${answer.status} ${answer.statusText}`;
}

export class FolderData {
  /** @returns {Promise<Study>} */
  study() {
    return Promise.resolve(folderData().study);
  }
  /** @param {string} id @returns {Promise<SlideInfo>} */
  async slide(id) {
    return (await this.#loaded(id)).slide;
  }
  /** @param {string} id @param {string} model @returns {Promise<HeatmapJson>} */
  async heatmap(id, model) {
    return present((await this.#loaded(id)).maps?.[model]);
  }
  /** @param {string} id @param {string} model @returns {Promise<LesionJson[]>} */
  async lesions(id, model) {
    return (await this.#loaded(id)).lesions?.[model] ?? [];
  }
  /** @param {string} id @returns {Promise<AnnotationJson[]>} */
  async annotation(id) {
    return (await this.#loaded(id)).annotation ?? [];
  }
  /** @param {string} id @param {number} level @param {number} column @param {number} row */
  tileUrl(id, level, column, row) {
    return `tiles/${id}/${level}/${column}_${row}.jpg`;
  }
  /** Why a tile did not come. @param {string} _url @returns {Promise<string>} */
  whyNot(_url) {
    return Promise.resolve("a picture is missing from this folder. Was all of it copied?");
  }
  /** The data of a slide, from its own script. @param {string} id @returns {Promise<any>} */
  #loaded(id) {
    const slides = folderData().slides;
    if (id in slides) return Promise.resolve(slides[id]);
    return new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = `data/${id}.js`;
      const fail = () => reject(new DataError(`data/${id}.js is missing from this folder. Was all of it copied?`));
      script.onerror = fail;
      script.onload = () => (id in slides ? resolve(slides[id]) : fail());
      document.head.append(script);
    });
  }
}

/** @returns {any} */
function folderData() {
  return /** @type {any} */ (window).SELFVITMIL_DATA;
}

/** @template T @param {T|undefined} value @returns {T} */
function present(value) {
  if (value === undefined) throw new DataError("This folder has no such heatmap");
  return value;
}

/** From disk where the page brought data along, else from the server. @returns {ServerData|FolderData} */
export function openData() {
  return folderData() ? new FolderData() : new ServerData();
}
