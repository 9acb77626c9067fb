/**
 * Colours of values from 0 to 1.
 *
 * `red` is the paper's: black tiles, the redder the more evidence. `inferno` and `viridis` are perceptual colour maps,
 * readable with any colour vision; they are interpolated between thirteen of their colours.
 */

/** @type {Record<string, string>} */
const STOPS = {
  red: "000000 ff0000",
  clear: "d40000 ff0000",
  inferno: "000004 110a30 320a5e 57106e 781c6d 9a2865 bc3754 d84c3e ed6925 f98e09 fbb61a f4df53 fcffa4",
  viridis: "440154 481f70 443983 3b528b 31688e 287c8e 21918c 20a486 35b779 5ec962 90d743 c8e020 fde725",
};

/** @type {Record<string, string>} */
export const COLOR_NAMES = { red: "Red, as in the paper", inferno: "Inferno", viridis: "Viridis" };

const LEVELS = 256;

/**
 * Red, green, blue and alpha of 256 values.
 *
 * @param {string} name of a colour map
 * @param {boolean} fade let low values be seen through; red then is red throughout, and only its strength changes
 * @returns {Uint8ClampedArray}
 */
export function colorTable(name, fade) {
  const colors = STOPS[fade && name === "red" ? "clear" : name].split(" ").map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  const table = new Uint8ClampedArray(LEVELS * 4);
  for (let level = 0; level < LEVELS; level += 1) {
    const value = level / (LEVELS - 1);
    const place = value * (colors.length - 1);
    const low = Math.min(Math.floor(place), colors.length - 2);
    const share = place - low;
    for (let channel = 0; channel < 3; channel += 1) {
      table[4 * level + channel] = colors[low][channel] * (1 - share) + colors[low + 1][channel] * share;
    }
    table[4 * level + 3] = fade ? 255 * value : 255;
  }
  return table;
}
