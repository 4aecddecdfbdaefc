/** Arithmetic of the sweep panel. No DOM. */

/**
 * A cell of the grid. Of several prompts it has the means, their spread, and each answer in `runs`.
 *
 * @typedef {{layer: number, dose: number, scale: number, text: string, effect: number | null, inside: number | null, perplexity: number | null, repetition: number | null, tokens: number, broken: boolean, score?: number | null, score_change?: number | null, effect_spread?: number | null, score_spread?: number | null, runs?: Cell[], prompt_index: number}} Cell
 */

/** What a cell is coloured by, and what is written in it. @param {Cell} cell @param {boolean} scored @returns {{shade: number | null, value: number | null, spread: number | null}} */
export function shownOf(cell, scored) {
  if (scored) return { shade: cell.score_change ?? null, value: cell.score ?? null, spread: cell.score_spread ?? null };
  return { shade: cell.effect, value: cell.effect, spread: cell.effect_spread ?? null };
}

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

/** The strongest colour among answers that did not fall apart; of all, if they all did. @param {Cell[]} cells @param {boolean} [scored] */
export function mostEffect(cells, scored = false) {
  const sizes = (/** @type {Cell[]} */ of) => of.map((cell) => Math.abs(shownOf(cell, scored).shade ?? 0));
  const whole = sizes(cells.filter((cell) => !cell.broken));
  return Math.max(0, ...(whole.length ? whole : sizes(cells)));
}
