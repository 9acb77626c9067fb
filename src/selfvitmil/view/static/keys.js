/** Keys: what each does, the help that lists them, and who gets a key that was pressed. */

import { byId, make, remembered } from "./dom.js";

/** @type {[string, string][]} keys (several with a space between) and what they do */
export const KEYS = [
  ["n p", "next, previous suspicious tile"],
  ["t", "the most suspicious tile"],
  ["] [", "next, previous slide"],
  ["+ - 0", "zoom in, zoom out, whole slide"],
  ["← ↑ → ↓", "move the slide"],
  ["h", "heatmap on or off"],
  ["v", "next value: score, detection, attention…"],
  ["c", "next colours"],
  ["f", "fade low values"],
  [". ,", "hide more, fewer tiles"],
  ["o a", "contours of lesions, annotation"],
  ["m", "next model"],
  ["s", "side by side"],
  ["/", "search slides"],
  ["r", "measure: start at the middle, again to end, again to remove"],
  ["y", "copy a link to this view"],
  ["d", "dark or light"],
  ["?", "this help"],
];

/** @type {Record<string, [number, number]>} */
const ARROWS = { ArrowLeft: [-0.2, 0], ArrowRight: [0.2, 0], ArrowUp: [0, -0.2], ArrowDown: [0, 0.2] };

/**
 * @param {Record<string, () => void>} actions by key
 * @param {(x: number, y: number) => void} pan
 */
export function listenToKeys(actions, pan) {
  const rows = KEYS.map(([keys, words]) => {
    const caps = keys.split(" ").flatMap((key) => [make("kbd", {}, key), " "]);
    return make("tr", {}, make("th", { scope: "row" }, ...caps), make("td", {}, words));
  });
  byId("keys").firstElementChild.replaceChildren(...rows);
  const wanted = byId("use-keys");
  wanted.checked = remembered("keys") !== "off";
  wanted.addEventListener("change", () => remembered("keys", wanted.checked ? "on" : "off"));
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.altKey || event.ctrlKey || event.metaKey) return;
    if (document.querySelector("dialog[open]") || takesKeys(event.target, event.key)) return;
    const letters = wanted.checked || !/^[a-z]$/i.test(event.key);
    if (event.key in ARROWS) pan(...ARROWS[event.key]);
    else if (letters && Object.hasOwn(actions, event.key)) actions[event.key]();
    else return;
    event.preventDefault();
  });
}

/** Whether an element needs the key for itself. @param {EventTarget|null} target @param {string} key */
function takesKeys(target, key) {
  if (target instanceof HTMLInputElement && target.type === "range") return key in ARROWS;
  if (target instanceof HTMLInputElement) return target.type !== "checkbox";
  return target instanceof HTMLSelectElement || target instanceof HTMLTextAreaElement;
}
