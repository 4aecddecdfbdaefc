/** Sliders with marks, drawn at once under the hand. What they say goes out when let go of, or at rest. */

import { assign, h } from "./dom.js";
import { fraction, keyMove, levelOf, valueAt } from "./scales.js";

/** Values that rest for so long count as let go of, in milliseconds. */
export const REST_MS = 150;

/**
 * @typedef {object} SliderOptions
 * @property {number} low
 * @property {number} high
 * @property {number} step
 * @property {number[]} marks
 * @property {string[]} labels one per handle
 * @property {boolean} [doses] whether values are doses, coloured by level
 * @property {(values: number[]) => string} say text for a screen reader
 * @property {(values: number[]) => void} moved at each move, at once
 * @property {(values: number[]) => void} settled when let go of or at rest
 * @property {(values: number[]) => number[]} [reset] on a double click
 */

/** A slider with one handle or several, in order. @param {SliderOptions} options */
export function slider(options) {
  let { low, high, step } = options;
  /** @type {number[]} */
  let values = options.labels.map(() => 0);
  /** @type {number | null} */
  let held = null;
  let timer = 0;
  let told = true;
  const bar = h("span", { class: "cl-bar" });
  const marks = options.marks.flatMap((mark) => (mark === 0 ? [0] : [-mark, mark])).map((mark) => {
    const element = h("span", { class: `cl-mark ${options.doses ? levelOf(mark) : ""}` });
    element.dataset.mark = String(mark);
    return element;
  });
  const handles = options.labels.map((label) => h("span", { class: "cl-handle", role: "slider", tabindex: 0, "aria-label": label }));
  const track = h("span", { class: "cl-track" }, ...marks, bar, ...handles);
  const element = h("span", { class: "cl-slider" }, track);

  function draw() {
    const places = values.map((value) => fraction(value, low, high));
    handles.forEach((handle, at) => {
      handle.style.left = `${places[at] * 100}%`;
      handle.dataset.level = options.doses ? levelOf(values[at]) : "";
      assign(handle, {
        "aria-valuenow": Number(values[at].toPrecision(4)),
        "aria-valuemin": low,
        "aria-valuemax": high,
        "aria-valuetext": options.say(values),
      });
    });
    const ends = values.length > 1 ? places : [fraction(0, low, high), ...places];
    bar.style.left = `${Math.min(...ends) * 100}%`;
    bar.style.width = `${(Math.max(...ends) - Math.min(...ends)) * 100}%`;
    for (const mark of marks) mark.style.left = `${fraction(Number(mark.dataset.mark), low, high) * 100}%`;
  }

  function settle() {
    window.clearTimeout(timer);
    if (!told) {
      told = true;
      options.settled(values);
    }
  }

  /** @param {number} at @param {number} value */
  function move(at, value) {
    const bounded = Math.min(Math.max(value, at > 0 ? values[at - 1] : -Infinity), at < values.length - 1 ? values[at + 1] : Infinity);
    if (bounded === values[at]) return;
    values = values.map((each, index) => (index === at ? bounded : each));
    told = false;
    draw();
    options.moved(values);
    window.clearTimeout(timer);
    timer = window.setTimeout(settle, REST_MS);
  }

  /** @param {PointerEvent} event */
  function valueUnder(event) {
    const box = track.getBoundingClientRect();
    return valueAt((event.clientX - box.left) / box.width, low, high, step);
  }

  track.addEventListener("pointerdown", (event) => {
    if (element.classList.contains("cl-off")) return;
    const value = valueUnder(event);
    const near = values.map((each) => Math.abs(each - value));
    held = near.indexOf(Math.min(...near));
    if (values.length > 1 && values[0] === values[1]) held = value < values[0] ? 0 : 1;
    track.setPointerCapture(event.pointerId);
    handles[held].focus();
    move(held, value);
    event.preventDefault();
  });
  track.addEventListener("pointermove", (event) => {
    if (held !== null) move(held, valueUnder(event));
  });
  for (const end of ["pointerup", "pointercancel"]) {
    track.addEventListener(end, () => {
      held = null;
      settle();
    });
  }
  track.addEventListener("dblclick", () => {
    if (!options.reset) return;
    values = options.reset(values);
    told = false;
    draw();
    options.moved(values);
    settle();
  });
  handles.forEach((handle, at) => {
    handle.addEventListener("keydown", (event) => {
      const next = keyMove(values[at], event.key, event.shiftKey, step, low, high);
      if (next === null || element.classList.contains("cl-off")) return;
      event.preventDefault();
      move(at, next);
    });
  });
  draw();
  return {
    element,
    get busy() {
      return held !== null || !told;
    },
    /** @param {number[]} given @param {{low?: number, high?: number, step?: number, off?: boolean}} [ends] */
    set(given, ends = {}) {
      if (held !== null || !told) return;
      ({ low = low, high = high, step = step } = ends);
      values = given;
      element.classList.toggle("cl-off", Boolean(ends.off));
      draw();
    },
  };
}
