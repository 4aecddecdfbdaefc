/** The layer picker: a strip of all layers. Click, drag a range, or use the keyboard. */

import { assign, h } from "./dom.js";
import { clamp, ranges, withRange } from "./scales.js";

/** @param {{label: string, count: number, changed: (layers: number[]) => void}} options */
export function layerStrip({ label, count, changed }) {
  /** @type {number[]} */
  let layers = [];
  let active = 0;
  /** @type {{from: number, on: boolean, before: number[]} | null} */
  let drag = null;
  const cells = Array.from({ length: count }, (_, layer) =>
    h("span", { class: "cl-cell", role: "option", "data-layer": layer, title: `layer ${layer}` }),
  );
  const text = h("span", { class: "cl-layers-text" });
  const strip = h("span", { class: "cl-strip", role: "listbox", tabindex: 0, "aria-label": label, "aria-multiselectable": "true" }, ...cells);
  const element = h("span", { class: "cl-layers" }, strip, text);

  function draw() {
    const chosen = new Set(layers);
    cells.forEach((cell, layer) => {
      assign(cell, { "aria-selected": String(chosen.has(layer)) });
      cell.classList.toggle("cl-active", layer === active);
    });
    text.textContent = text.title = layers.length ? ranges(layers) : "none";
  }

  /** @param {PointerEvent} event */
  function layerAt(event) {
    const box = strip.getBoundingClientRect();
    return clamp(Math.floor(((event.clientX - box.left) / box.width) * count), 0, count - 1);
  }

  strip.addEventListener("pointerdown", (event) => {
    active = layerAt(event);
    drag = { from: active, on: !layers.includes(active), before: layers };
    layers = withRange(drag.before, active, active, drag.on);
    strip.setPointerCapture(event.pointerId);
    draw();
  });
  strip.addEventListener("pointermove", (event) => {
    if (!drag) return;
    active = layerAt(event);
    layers = withRange(drag.before, drag.from, active, drag.on);
    draw();
  });
  strip.addEventListener("pointerup", () => {
    if (!drag) return;
    drag = null;
    changed(layers);
  });
  strip.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (step !== undefined) {
      const next = clamp(active + step, 0, count - 1);
      if (event.shiftKey) {
        const on = layers.includes(active);
        layers = withRange(layers, active, next, on);
        changed(layers);
      }
      active = next;
    } else if (event.key === " " || event.key === "Enter") {
      layers = withRange(layers, active, active, !layers.includes(active));
      changed(layers);
    } else if (event.key === "Home" || event.key === "End") {
      active = event.key === "Home" ? 0 : count - 1;
    } else return;
    event.preventDefault();
    draw();
  });
  draw();
  return {
    element,
    strip,
    /** @param {number[]} chosen @param {number[] | null} [known] */
    set(chosen, known = null) {
      if (drag) return;
      layers = chosen;
      if (document.activeElement !== strip && chosen.length && !chosen.includes(active)) active = chosen[0];
      cells.forEach((cell, layer) => cell.classList.toggle("cl-unknown", known !== null && !known.includes(layer)));
      draw();
    },
  };
}
