/** Arithmetic of the sweep panel. No DOM. */

/** @typedef {{layer: number, dose: number, scale: number, text: string, effect: number | null, inside: number | null, perplexity: number | null, repetition: number | null, tokens: number, broken: boolean}} Cell */

/** Doses as written with commas or blanks between, ascending, each once; or what is wrong with the text. @param {string} text @returns {{numbers: number[] | null, problem: string}} */
export function dosesFrom(text) {
  const parts = text.split(/[\s,;]+/).filter(Boolean);
  const wrong = parts.find((part) => !/^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i.test(part) || Math.abs(Number(part)) > 3.4e38);
  if (wrong !== undefined) return { numbers: null, problem: `must be numbers with commas between, got ${wrong}` };
  if (!parts.length) return { numbers: null, problem: "must be numbers with commas between, got nothing" };
  return { numbers: [...new Set(parts.map(Number))].sort((left, right) => left - right), problem: "" };
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
