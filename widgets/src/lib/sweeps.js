/** Arithmetic of the sweep panel. No DOM. */

/** @typedef {{layer: number, dose: number, scale: number, text: string, effect: number | null, perplexity: number | null, repetition: number | null, tokens: number, broken: boolean}} Cell */

/** Doses as written with commas or blanks between; null if one is no number, or there is none. @param {string} text @returns {number[] | null} */
export function dosesFrom(text) {
  const parts = text.split(/[\s,;]+/).filter(Boolean);
  const numbers = parts.map(Number);
  return numbers.length && numbers.every(Number.isFinite) ? [...new Set(numbers)].sort((left, right) => left - right) : null;
}

/** @param {Cell[]} cells @param {number} layer @param {number} dose @returns {Cell | null} */
export function cellAt(cells, layer, dose) {
  return cells.find((cell) => cell.layer === layer && cell.dose === dose) ?? null;
}

/** The largest effect among answers that did not fall apart; of all, if they all did. @param {Cell[]} cells */
export function mostEffect(cells) {
  const sizes = (/** @type {Cell[]} */ of) => of.map((cell) => Math.abs(cell.effect ?? 0));
  const whole = sizes(cells.filter((cell) => !cell.broken));
  return Math.max(0, ...(whole.length ? whole : sizes(cells)));
}
