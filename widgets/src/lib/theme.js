/** Colours that can be read on a given ground. No DOM. */

/** Contrast of every text with what is behind it, as WCAG 2 defines it, is at least this. */
const LEAST = 4.8;
const SOURCES = {
  light: { "blue-text": [29, 78, 216], "amber-text": [180, 83, 9], "red-text": [185, 28, 28] },
  dark: { "blue-text": [96, 165, 250], "amber-text": [251, 191, 36], "red-text": [248, 113, 113] },
};
const ERROR = [220, 38, 38];

/** @param {number[]} colour red, green, blue, 0 to 255 */
function luminance(colour) {
  const [red, green, blue] = colour.map((each) => (each / 255 <= 0.04045 ? each / 255 / 12.92 : ((each / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

/** @param {number[]} one @param {number[]} other @returns {number} 1 to 21 */
export function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((left, right) => left - right);
  return (high + 0.05) / (low + 0.05);
}

/** @param {number[]} from @param {number[]} to @param {number} share of the second */
function mixed(from, to, share) {
  return from.map((each, at) => each + (to[at] - each) * share);
}

/** The colour, as much nearer to the text's as is needed to be read on all grounds. @param {number[]} colour @param {number[]} text @param {number[][]} grounds */
function readable(colour, text, grounds) {
  for (let share = 0; share < 1; share += 0.05) {
    const found = mixed(colour, text, share);
    if (grounds.every((ground) => contrast(found, ground) >= LEAST)) return found;
  }
  return text;
}

/**
 * The panel's colours on a ground. A ground on which neither black nor white can be read well is replaced.
 *
 * @param {number[]} ground red, green, blue, 0 to 255
 * @returns {{dark: boolean, colours: Record<string, string>}} colours by the name of their CSS variable
 */
export function palette(ground) {
  const dark = luminance(ground) < 0.18;
  const text = dark ? [242, 242, 242] : [28, 28, 28];
  const below = contrast(text, ground) >= 10 ? ground : dark ? [27, 27, 27] : [255, 255, 255];
  const soft = mixed(below, text, 0.07);
  const grounds = [below, soft, mixed(below, text, 0.09), mixed(below, ERROR, 0.1)];
  /** @type {Record<string, number[]>} */
  const colours = { fg: text, bg: below, soft, line: mixed(below, text, 0.28), dim: readable(mixed(text, below, 0.4), text, grounds) };
  for (const [name, colour] of Object.entries(dark ? SOURCES.dark : SOURCES.light)) colours[name] = readable(colour, text, grounds);
  return { dark, colours: Object.fromEntries(Object.entries(colours).map(([name, colour]) => [name, `rgb(${colour.map(Math.round).join(", ")})`])) };
}
