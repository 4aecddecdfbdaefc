/** Arithmetic of sliders, axes and doses. No DOM. */

/** Advice, from small models: from these doses on answers often become odd, and mostly fall apart. */
export const HIGH = 0.7;
export const EXTREME = 1.5;
export const WARNING = "From dose 1.5 on answers mostly fall apart.";
export const DOSE_END = 2;
export const DOSE_MARKS = [0.25, 0.5, 1];

/** @param {number} value @param {number} low @param {number} high */
export function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

/** Where a value stands between two ends, from 0 to 1. @param {number} value @param {number} low @param {number} high */
export function fraction(value, low, high) {
  return high > low ? clamp((value - low) / (high - low), 0, 1) : 0;
}

/** The value at a place from 0 to 1, in steps. @param {number} place @param {number} low @param {number} high @param {number} step */
export function valueAt(place, low, high, step) {
  const value = low + clamp(place, 0, 1) * (high - low);
  return tidy(Math.round(value / step) * step);
}

/** A number without the dust of binary fractions. @param {number} value */
export function tidy(value) {
  return Number(value.toPrecision(10)) + 0;
}

/** @param {number} dose @returns {"" | "high" | "extreme"} */
export function levelOf(dose) {
  const size = Math.abs(dose);
  return size >= EXTREME ? "extreme" : size >= HIGH ? "high" : "";
}

/** A move by the keyboard. @param {number} value @param {string} key @param {boolean} shift @param {number} step @param {number} low @param {number} high @returns {number | null} */
export function keyMove(value, key, shift, step, low, high) {
  const by = step * (shift ? 10 : 1);
  if (key === "ArrowRight" || key === "ArrowUp") return clamp(tidy(value + by), low, high);
  if (key === "ArrowLeft" || key === "ArrowDown") return clamp(tidy(value - by), low, high);
  if (key === "Home") return low;
  if (key === "End") return high;
  return null;
}

/** A number in as few characters as say it. @param {number | null | undefined} value */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e5 || size < 1e-3)) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

/** One number, or the least and the largest of several. @param {number[]} values */
export function between(values) {
  const ends = [...new Set([Math.min(...values), Math.max(...values)].map(short))];
  return ends.join(" to ");
}

/** Round numbers for an axis. @param {number} low @param {number} high @param {number} count @returns {number[]} */
export function ticks(low, high, count) {
  if (!(high > low) || count < 1) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) ?? 10 * power;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(tidy(at));
  return found;
}

/** The layers after a stretch of the strip was switched on or off. @param {number[]} layers @param {number} from @param {number} to @param {boolean} on */
export function withRange(layers, from, to, on) {
  const chosen = new Set(layers);
  for (let at = Math.min(from, to); at <= Math.max(from, to); at += 1) {
    if (on) chosen.add(at);
    else chosen.delete(at);
  }
  return [...chosen].sort((left, right) => left - right);
}

/** Layer numbers with runs joined: 3, 6–9. @param {number[]} layers */
export function ranges(layers) {
  /** @type {[number, number][]} */
  const runs = [];
  for (const layer of [...layers].sort((left, right) => left - right)) {
    const last = runs[runs.length - 1];
    if (last && last[1] === layer - 1) last[1] = layer;
    else runs.push([layer, layer]);
  }
  return runs.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ");
}
