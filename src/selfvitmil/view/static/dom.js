/** Small helpers for the page. */

/** The element with an id; it must be there. @param {string} id @returns {any} */
export function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`index.html has no #${id}`);
  return element;
}

/**
 * A new element. Text is always text, never markup: names of slides come from files.
 *
 * @param {string} tag with classes, as `span.chip.wrong`
 * @param {Record<string, string>} [attributes]
 * @param {...(string|Node)} children
 * @returns {any}
 */
export function make(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** An icon of index.html. @param {string} name @returns {SVGElement} */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

/** Put a text into an element, `commands` in it as code. @param {Element} element @param {string} words */
export function setWords(element, words) {
  element.replaceChildren(...words.split("`").map((part, k) => (k % 2 ? make("code", {}, part) : part)));
}

/** Fill a choice. @param {HTMLSelectElement} select @param {[string, string][]} options value and text @param {string} chosen */
export function fillSelect(select, options, chosen) {
  select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
  select.value = chosen;
}

/** Read or keep a choice of the reader in this browser; private windows may refuse. @param {string} key @param {string} [value] */
export function remembered(key, value) {
  try {
    if (value !== undefined) localStorage.setItem(`selfvitmil.${key}`, value);
    return localStorage.getItem(`selfvitmil.${key}`);
  } catch {
    return null;
  }
}
