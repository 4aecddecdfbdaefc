/** The plots, drawn as SVG, and the heatmap on a canvas. */

import { GREY, LINES, pixel } from "./colours.js";
import { fill, h, s } from "./dom.js";
import { cosines, leftOut, overflowed, perMessage, projectionsAt, valuesOf } from "./numbers.js";
import { short, ticks } from "./scales.js";

/** @typedef {import("../types").Band} Band */
/** @typedef {import("../types").Numbers} Numbers */

/**
 * @typedef {object} Scene
 * @property {Numbers | null} baseline
 * @property {Numbers | null} steered
 * @property {Band[]} bands of the steered side
 * @property {Band[]} baselineBands
 * @property {number[]} layers
 * @property {string} direction
 * @property {number | null} pinned
 * @property {number | null} hovered
 * @property {(position: number) => void} pin
 * @property {number} [width] of the plot on the page, in pixels: texts keep their size
 */

const HEIGHT = 210;
const LEFT = 52;
const RIGHT = 8;
const TOP = 16;
const BOTTOM = 26;

/** @param {number} low @param {number} high @param {number} from @param {number} to */
function scale(low, high, from, to) {
  return (/** @type {number} */ value) => from + ((value - low) / (high - low || 1)) * (to - from);
}

/** @param {string} kind @param {Scene} scene @returns {Node[]} */
export function plot(kind, scene) {
  if (kind === "heatmap") return [heatmap(scene, "baseline"), heatmap(scene, "steered"), heatLegend(scene)];
  if (kind === "projection") return [projectionPlot(scene), lineLegend(scene)];
  return [messagePlot(scene, kind === "norm" ? "norm" : "cosine"), lineLegend(scene)];
}

/** @param {Scene} scene */
const widthOf = (scene) => Math.max(scene.width || 880, 240);

/** @param {string} label @param {Scene} scene @param {...SVGElement} children */
function frame(label, scene, ...children) {
  const width = widthOf(scene);
  if (!scene.baseline && !scene.steered) children.push(s("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle", class: "cl-tick" }, "nothing read yet: the plot grows with an answer"));
  return s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label, class: "cl-plot" }, ...children);
}

/** @param {number} low @param {number} high @param {(value: number) => number} y @param {string} unit @param {number} width */
function yAxis(low, high, y, unit, width) {
  const marks = ticks(low, high, 4).flatMap((value) => [
    s("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value), class: value === 0 ? "cl-zero" : "cl-grid" }),
    s("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end", class: "cl-tick" }, short(value)),
  ]);
  return [...marks, s("text", { x: 4, y: 12, class: "cl-tick" }, unit)];
}

/** @param {Scene} scene */
function projectionPlot(scene) {
  const { baseline, steered, layers } = scene;
  const width = widthOf(scene);
  const end = Math.max(1, ...[baseline, steered].map((side) => (side ? side.first + side.count : 0)));
  const first = Math.min(...[baseline, steered].map((side) => (side ? side.first : Infinity)), end - 1);
  let low = 0;
  let high = 0;
  for (const side of [baseline, steered]) {
    for (const layer of layers) {
      projectionsAt(side, layer)?.forEach((value, at) => {
        if (side && !side.sinks[side.layers.indexOf(layer)][at] && Number.isFinite(value)) {
          low = Math.min(low, value);
          high = Math.max(high, value);
        }
      });
    }
  }
  if (low === high) high = 1;
  const x = scale(first, Math.max(end - 1, first + 1), LEFT + 4, width - RIGHT - 4);
  const y = scale(low, high, HEIGHT - BOTTOM, TOP);
  const inside = (/** @type {number} */ value) => Math.min(Math.max(y(value), TOP), HEIGHT - BOTTOM);
  const lines = layers.flatMap((layer, index) =>
    ["baseline", "steered"].map((name) => {
      const side = name === "baseline" ? baseline : steered;
      const values = projectionsAt(side, layer);
      /** @type {string[]} */
      const points = [];
      if (side && values) values.forEach((value, at) => Number.isFinite(value) && points.push(`${x(side.first + at).toFixed(1)} ${inside(value).toFixed(1)}`));
      const colour = name === "baseline" ? GREY : LINES[index % LINES.length];
      return s(
        "g",
        { "data-side": name, "data-layer": layer, "data-points": points.length },
        s("path", { d: points.length ? `M${points.join("L")}` : "", fill: "none", stroke: colour, "stroke-width": 1.2, "stroke-dasharray": index ? `${2 + 2 * index} 2` : null }),
        s("path", { d: points.map((point) => `M${point}h0`).join(""), stroke: colour, "stroke-width": 4, "stroke-linecap": "round" }),
        ...[...(values ?? [])].flatMap((value, at) => (side && overflowed(values, at) ? [s("text", { x: x(side.first + at), y: value < 0 ? HEIGHT - BOTTOM - 2 : TOP + 8, "text-anchor": "middle", class: "cl-tick cl-not-finite", "data-position": side.first + at }, short(value), s("title", {}, `${name}, layer ${layer}, position ${side.first + at}: not finite`))] : [])),
      );
    }),
  );
  const bands = scene.bands.flatMap((band, index) => {
    const from = x(Math.max(band.start, first) - 0.5);
    const length = Math.max(x(band.end - 0.5) - from, 0);
    const late = index === scene.bands.length - 1 && from + 70 > width; // its name would be cut off
    return [
      s("rect", { x: from, y: TOP, width: length, height: HEIGHT - TOP - BOTTOM, class: `cl-band cl-band-${index % 2}` }),
      s("text", { x: late ? width - 2 : from + 3, y: HEIGHT - 8, "text-anchor": late ? "end" : null, class: "cl-tick" }, length > 24 || late ? band.role : ""),
    ];
  });
  const marks = [
    [scene.hovered, "cl-line-hovered"],
    [scene.pinned, "cl-line-pinned"],
  ].flatMap(([position, name]) =>
    typeof position === "number" ? [s("line", { x1: x(position), x2: x(position), y1: TOP, y2: HEIGHT - BOTTOM, class: name, "data-position": position })] : [],
  );
  const svg = frame(`projection per token on ${scene.direction}`, scene, ...bands, ...yAxis(low, high, y, "x·u", width), ...lines, ...marks);
  svg.addEventListener("click", (event) => {
    const box = svg.getBoundingClientRect();
    const place = (/** @type {MouseEvent} */ (event).clientX - box.left) * (width / box.width);
    const position = Math.round(first + ((place - LEFT - 4) / (width - RIGHT - LEFT - 8)) * Math.max(end - 1 - first, 1));
    if (position >= first && position < end) scene.pin(position);
  });
  return svg;
}

/** @param {Scene} scene @param {"norm" | "cosine"} what */
function messagePlot(scene, what) {
  const { layers } = scene;
  const bars = layers.flatMap((layer, index) => [
    { side: "baseline", layer, colour: GREY, values: perMessage(scene.baseline, layer, scene.baselineBands, what) },
    { side: "steered", layer, colour: LINES[index % LINES.length], values: perMessage(scene.steered, layer, scene.bands, what) },
  ]);
  const left = (/** @type {string} */ side, /** @type {number} */ layer, /** @type {Band} */ band) => {
    const numbers = side === "baseline" ? scene.baseline : scene.steered;
    const values = valuesOf(numbers, layer, what);
    const count = numbers && values ? leftOut(values, numbers.first, band) : 0;
    return count ? `, without ${count} that ${count === 1 ? "is" : "are"} not finite` : "";
  };
  const known = bars.flatMap((each) => each.values).filter(Number.isFinite);
  let low = Math.min(0, ...known);
  let high = Math.max(0, ...known);
  if (low === high) high = 1;
  if (low < 0) low *= 1.05;
  high *= 1.05;
  const y = scale(low, high, HEIGHT - BOTTOM, TOP);
  const count = Math.max(scene.bands.length, 1);
  const step = (widthOf(scene) - LEFT - RIGHT) / count;
  const width = Math.min((step * 0.7) / bars.length, 40);
  const groups = scene.bands.flatMap((band, at) => {
    const from = LEFT + at * step;
    const rects = bars.map((bar, index) => {
      const value = bar.values[at];
      const shown = Number.isFinite(value) ? value : 0;
      return s(
        "rect",
        {
          x: from + (step - width * bars.length) / 2 + index * width, width: width * 0.9,
          y: Math.min(y(shown), y(0)), height: Math.abs(y(shown) - y(0)), fill: bar.colour,
          "data-side": bar.side, "data-layer": bar.layer, "data-message": band.message, "data-value": Number.isFinite(value) ? value.toPrecision(5) : "",
        },
        s("title", {}, `${bar.side}, layer ${bar.layer}, ${band.role}: ${short(value)}${left(bar.side, bar.layer, band)}`),
      );
    });
    const pinned = scene.pinned !== null && scene.pinned >= band.start && scene.pinned < band.end;
    return [
      s("rect", { x: from, y: TOP, width: step, height: HEIGHT - TOP - BOTTOM, class: `cl-band cl-band-${at % 2}${pinned ? " cl-band-pinned" : ""}`, "data-pinned": pinned ? "true" : null }),
      ...rects,
      s("text", { x: from + step / 2, y: HEIGHT - 8, "text-anchor": "middle", class: "cl-tick" }, `${band.role} (${band.end - band.start})`),
    ];
  });
  const title = what === "norm" ? "mean activation norm per message" : `mean cosine to ${scene.direction} per message`;
  return frame(title, scene, ...groups, ...yAxis(low, high, y, what === "norm" ? "|x|" : "cosine", widthOf(scene)));
}

/** @param {Scene} scene */
function lineLegend(scene) {
  const entry = (/** @type {string} */ colour, /** @type {string} */ text) =>
    h("span", { class: "cl-key" }, h("span", { class: "cl-swatch", style: `background:${colour}` }), text);
  return h("div", { class: "cl-legend" }, entry(GREY, "baseline"), ...scene.layers.map((layer, index) => entry(LINES[index % LINES.length], `steered, layer ${layer}`)));
}

/** Cosine of every token at every layer: norms grow from layer to layer, cosines can be compared. @param {Scene} scene @param {"baseline" | "steered"} name */
function heatmap(scene, name) {
  const numbers = scene[name];
  const rows = numbers && numbers.projection ? numbers.layers.map((_, index) => cosines(numbers, index)) : [];
  const tokens = numbers ? numbers.count : 0;
  const canvas = h("canvas", {
    width: Math.max(tokens, 1), height: Math.max(rows.length, 1), class: "cl-heat", role: "img",
    "aria-label": `cosine to ${scene.direction} by layer and token, ${name}`, "data-side": name, "data-points": rows.length * tokens,
  });
  const context = canvas.getContext("2d");
  if (context && rows.length && tokens) {
    const image = context.createImageData(tokens, rows.length);
    const most = heatMost(scene);
    rows.forEach((row, index) => {
      const line = rows.length - 1 - index;
      row.forEach((value, at) => image.data.set(pixel(overflowed(row, at) ? Infinity : value, most), 4 * (line * tokens + at)));
    });
    context.putImageData(image, 0, 0);
  }
  const layers = numbers ? numbers.layers : [];
  const first = numbers ? numbers.first : 0;
  const place = (/** @type {number} */ position) => `${((position - first + 0.5) / Math.max(tokens, 1)) * 100}%`;
  const marks = [
    [scene.hovered, "cl-line-hovered"],
    [scene.pinned, "cl-line-pinned"],
  ].flatMap(([position, kind]) =>
    typeof position === "number" && position >= first && position < first + tokens ? [h("span", { class: `cl-heat-line ${kind}`, style: `left:${place(position)}`, "data-position": position })] : [],
  );
  const shown = scene.layers.flatMap((layer) => {
    const at = layers.indexOf(layer);
    return at < 0 ? [] : [h("span", { class: "cl-heat-layer", style: `top:${((layers.length - at - 0.5) / layers.length) * 100}%` })];
  });
  const box = h("div", { class: "cl-heat-box" }, canvas, ...marks, ...shown);
  box.addEventListener("click", (event) => {
    const area = box.getBoundingClientRect();
    if (tokens) scene.pin(first + Math.min(Math.floor(((event.clientX - area.left) / area.width) * tokens), tokens - 1));
  });
  const axis = layers.length ? `layer ${layers[0]} (bottom) to ${layers[layers.length - 1]}` : "nothing read yet";
  return h("div", { class: "cl-heat-row" }, h("div", { class: "cl-heat-name" }, name, h("br"), h("span", { class: "cl-note" }, axis)), box);
}

/** @param {Scene} scene */
function heatMost(scene) {
  let most = 0;
  for (const numbers of [scene.baseline, scene.steered]) {
    if (!numbers || !numbers.projection) continue;
    numbers.layers.forEach((_, index) =>
      cosines(numbers, index).forEach((value, at) => {
        if (!numbers.sinks[index][at] && Number.isFinite(value) && Math.abs(value) > most) most = Math.abs(value);
      }),
    );
  }
  return most;
}

/** @param {Scene} scene */
function heatLegend(scene) {
  const infinite = [scene.baseline, scene.steered].some((numbers) => numbers?.projection && numbers.layers.some((_, index) => cosines(numbers, index).some((value) => Math.abs(value) === Infinity)));
  return colourLegend(heatMost(scene), `cosine; lines mark the layers shown elsewhere${infinite ? "; amber: not finite" : ""}`);
}

/** @param {number} most @param {string} what */
export function colourLegend(most, what) {
  return h("div", { class: "cl-legend" }, h("span", {}, short(-most)), h("span", { class: "cl-gradient" }), h("span", {}, short(most)), h("span", { class: "cl-note" }, what));
}

/** @param {Element} host @param {string} kind @param {Scene} scene */
export function drawPlot(host, kind, scene) {
  fill(host, ...plot(kind, scene));
}
