/** From what the kernel sends to what is drawn. No DOM. */

/** @typedef {import("../types").Answer} Answer */
/** @typedef {import("../types").Band} Band */
/** @typedef {import("../types").Numbers} Numbers */
/** @typedef {import("../types").Packed} Packed */

/** @param {Packed | null} packed float32, little-endian @returns {Float32Array[] | null} a row per layer */
export function unpack(packed) {
  if (!packed) return null;
  const [layers = 0, tokens = 0] = packed.shape;
  const data = packed.data;
  const rows = [];
  for (let layer = 0; layer < layers; layer += 1) {
    const row = new Float32Array(tokens);
    for (let at = 0; at < tokens; at += 1) row[at] = data.getFloat32(4 * (layer * tokens + at), true);
    rows.push(row);
  }
  return rows;
}

/** @param {Answer | null} answer @returns {Numbers | null} */
export function numbersOf(answer) {
  if (!answer || !answer.norm) return null;
  const norm = unpack(answer.norm) ?? [];
  return {
    first: answer.first,
    count: norm.length ? norm[0].length : 0,
    layers: answer.layers,
    norm,
    projection: unpack(answer.projection),
    sinks: norm.map((row) => sinksOf(row, answer.first)),
  };
}

/** A token whose norm is above this many times the lower quartile at a layer is an attention sink there, as readings.py has it. */
const SINK = 3;

/** Which tokens of a layer no mean and no range of colours counts: the one at position 0, and attention sinks. @param {Float32Array} norm @param {number} first @returns {boolean[]} */
export function sinksOf(norm, first) {
  const later = norm.slice(Math.max(1 - first, 0)).sort();
  const quartile = later.some(Number.isNaN) || !later.length ? Infinity : later[Math.floor((later.length - 1) / 4)];
  return Array.from(norm, (value, at) => first + at === 0 || (Number.isFinite(value) && value > SINK * quartile));
}

/** The index in two answers of the first token where they part; null if one is a beginning of the other, or it is no longer shown. @param {Answer} left @param {Answer} right @returns {number | null} */
export function parting(left, right) {
  if (!left.head.startsWith(right.head) && !right.head.startsWith(left.head)) return null;
  const [one, other] = [left, right].map((answer) => (/** @type {number} */ at) => answer.ids[answer.prompt - answer.first + at]);
  let at = Math.max(left.first - left.prompt, right.first - right.prompt, 0);
  while (one(at) !== undefined && one(at) === other(at)) at += 1;
  return one(at) === undefined || other(at) === undefined ? null : at;
}

/** Projections of each token at a layer, by position − first; null if none were read. @param {Numbers | null} numbers @param {number} layer */
export function projectionsAt(numbers, layer) {
  if (!numbers || !numbers.projection) return null;
  const at = numbers.layers.indexOf(layer);
  return at < 0 ? null : numbers.projection[at];
}

/** The largest finite size among values but those of attention sinks, which are many times larger. @param {(Numbers | null)[]} sides @param {number[]} layers */
export function largest(sides, layers) {
  let most = 0;
  for (const numbers of sides) {
    for (const layer of layers) {
      const values = projectionsAt(numbers, layer);
      if (!values || !numbers) continue;
      const sinks = numbers.sinks[numbers.layers.indexOf(layer)];
      for (let at = 0; at < values.length; at += 1) {
        const size = Math.abs(values[at]);
        if (!sinks[at] && Number.isFinite(size) && size > most) most = size;
      }
    }
  }
  return most;
}

/** Whether a value was read and is not finite: NaN at a layer where others are known, or infinite. A row of nothing but NaN was not read. @param {Float32Array | null} values @param {number} at */
export function overflowed(values, at) {
  if (!values || at < 0 || at >= values.length || Number.isFinite(values[at])) return false;
  return !Number.isNaN(values[at]) || values.some((each) => !Number.isNaN(each));
}

/** Mean of the finite values over a band of positions but position 0; NaN if there is none. @param {Float32Array} values @param {number} first @param {Band} band */
export function bandMean(values, first, band) {
  let sum = 0;
  let count = 0;
  for (let position = Math.max(band.start, first, 1); position < Math.min(band.end, first + values.length); position += 1) {
    const value = values[position - first];
    if (Number.isFinite(value)) {
      sum += value;
      count += 1;
    }
  }
  return count ? sum / count : NaN;
}

/** How many values of a band of positions but position 0 were read and are not finite. @param {Float32Array} values @param {number} first @param {Band} band */
export function leftOut(values, first, band) {
  let count = 0;
  for (let position = Math.max(band.start, first, 1); position < band.end; position += 1) count += Number(overflowed(values, position - first));
  return count;
}

/** Norm or cosine of each message at a layer: the mean over its tokens, attention sinks left out. @param {Numbers | null} numbers @param {number} layer @param {Band[]} bands @param {"norm" | "cosine"} what @returns {number[]} */
export function perMessage(numbers, layer, bands, what) {
  const values = valuesOf(numbers, layer, what);
  if (!numbers || !values) return bands.map(() => NaN);
  const sinks = numbers.sinks[numbers.layers.indexOf(layer)];
  const counted = values.map((value, at) => (sinks[at] ? NaN : value));
  return bands.map((band) => bandMean(counted, numbers.first, band));
}

/** @param {Numbers | null} numbers @param {number} layer @param {"norm" | "cosine"} what @returns {Float32Array | null} */
export function valuesOf(numbers, layer, what) {
  const at = numbers ? numbers.layers.indexOf(layer) : -1;
  if (!numbers || at < 0 || (what === "cosine" && !numbers.projection)) return null;
  return what === "norm" ? numbers.norm[at] : cosines(numbers, at);
}

/** Cosine of each token with the direction at a layer, given by its index; infinite where one of the two numbers is. @param {Numbers} numbers @param {number} index */
export function cosines(numbers, index) {
  const norm = numbers.norm[index];
  const projection = numbers.projection ? numbers.projection[index] : new Float32Array(norm.length).fill(NaN);
  return projection.map((value, at) => (Number.isFinite(norm[at]) || Number.isNaN(value) ? value / norm[at] : Infinity));
}

/** Which users' messages are not in an answer yet: all from the first that differs. @param {string[]} shown @param {string[]} users */
export function notAnswered(shown, users) {
  let same = 0;
  while (same < users.length && shown[same] === users[same]) same += 1;
  return users.slice(same);
}

/** With which values an earlier answer was made, in words. @param {import("../types").Turn | undefined} turn @param {string} side */
export function madeWith(turn, side) {
  return turn?.made[side] ?? (turn && turn[/** @type {"baseline" | "steered"} */ (side)] === null ? "no answer" : "given, not made here");
}
