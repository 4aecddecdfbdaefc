/** One row of the panel: a vector, an operation, layers, and the sliders of that operation. */

import { fill, h, write } from "./dom.js";
import { forceNumber, numberField, setNumber } from "./fields.js";
import { layerStrip } from "./layers.js";
import { between, DOSE_END, DOSE_MARKS, levelOf, short } from "./scales.js";
import { slider } from "./sliders.js";

/** @typedef {import("../types").Row} Row */

const ADVICE = "Dose 1 adds as much as the residual stream's own mean norm at a layer on this prompt. The dose counts at each of the layers, and additions at several layers add up: the total is their sum. Other layers keep the dose; the raw scale follows. From small models: from 0.7 on answers often become odd, from 1.5 on they mostly fall apart.";

/**
 * @param {Row} first
 * @param {number} layerCount
 * @param {{moving: (id: string, patch: Partial<Row>) => void, edit: (id: string, patch: Partial<Row>) => void, remove: (id: string) => void}} calls
 */
export function rowView(first, layerCount, calls) {
  let row = first;
  const name = row.vector;
  const operation = h(
    "select",
    { "aria-label": `operation of ${name}` },
    ...["add", "cap", "ablate"].map((each) => h("option", { value: each }, each)),
  );
  operation.addEventListener("change", () => calls.edit(row.id, { operation: /** @type {Row["operation"]} */ (operation.value) }));
  const strip = layerStrip({
    label: `layers of ${name}`,
    count: layerCount,
    changed: (layers) => calls.edit(row.id, { layers }),
  });
  const mute = h("button", { type: "button", class: "cl-small", "aria-label": `mute ${name}` }, "mute");
  mute.addEventListener("click", () => calls.edit(row.id, { muted: !row.muted }));
  const remove = h("button", { type: "button", class: "cl-small", "aria-label": `remove ${name}` }, "✕");
  remove.addEventListener("click", () => calls.remove(row.id));
  const title = h("span", { class: "cl-name", title: name }, name);
  const controls = h("span", { class: "cl-controls" });
  const element = h("div", { class: "cl-row", role: "group", "aria-label": `vector ${name}` }, title, operation, strip.element, controls, h("span", { class: "cl-ends" }, mute, remove));
  let kind = "";
  /** @type {() => void} */
  let draw = () => {};
  /** @type {() => boolean} */
  let busy = () => false;

  function addControls() {
    const raw = numberField(`raw scale of ${name}`, { step: "any" }, (value) => calls.edit(row.id, { scale: value, factors: {} }));
    const exact = numberField(`exact dose of ${name}`, { step: 0.01 }, (value) => calls.edit(row.id, { dose: value }));
    const total = h("span", { class: "cl-note cl-total" });
    const dose = slider({
      low: -DOSE_END, high: DOSE_END, step: 0.01, marks: DOSE_MARKS, labels: [`dose of ${name}`], doses: true,
      say: ([value]) => `dose ${short(value)}${levelOf(value) ? `, ${levelOf(value)}` : ""}`,
      moved: (values) => {
        forceNumber(exact, values[0]);
        forceNumber(raw, row.unit ? Number((values[0] / row.unit).toPrecision(6)) : "");
        drawTotal(row.layers.map(() => values[0]));
        calls.moving(row.id, { dose: values[0] });
      },
      settled: (values) => calls.edit(row.id, { dose: values[0] }),
      reset: () => [0],
    });
    dose.element.title = total.title = ADVICE;
    fill(controls, h("span", { class: "cl-label", title: ADVICE }, "dose"), dose.element, exact, total, h("span", { class: "cl-label" }, "raw"), raw);
    const drawTotal = (/** @type {number[] | null} */ doses) => {
      const sum = (doses ?? []).reduce((one, other) => one + other, 0);
      total.hidden = row.layers.length < 2;
      total.dataset.level = levelOf(sum);
      write(total, doses ? `× ${row.layers.length} = ${short(sum)}` : "");
    };
    draw = () => {
      const known = row.dose !== null;
      dose.set([row.dose ?? 0], { off: !known });
      exact.disabled = !known;
      if (dose.busy) return;
      setNumber(exact, known ? Number((row.dose ?? 0).toPrecision(4)) : null);
      setNumber(raw, row.scale);
      exact.dataset.level = levelOf(row.dose ?? 0);
      drawTotal(row.doses);
      raw.title = `raw scale of ${name}, ${row.layers.map((layer, at) => `at layer ${layer}: ${short(row.scales[at])}`).join(", ")}`;
      exact.title = `exact dose of ${name}${row.doses && between(row.doses) !== short(row.dose) ? `, the mean of ${between(row.doses)}` : ""}`;
    };
    busy = () => dose.busy;
  }

  function ablateControls() {
    const exact = numberField(`factor of ${name}`, { step: 0.01 }, (value) => calls.edit(row.id, { scale: value }));
    const factor = slider({
      low: -1, high: 2, step: 0.01, marks: [0, 1], labels: [`what is left of ${name}`],
      say: ([value]) => `${short(value)} of the component is left`,
      moved: ([value]) => {
        forceNumber(exact, value);
        calls.moving(row.id, { scale: value });
      },
      settled: ([value]) => calls.edit(row.id, { scale: value }),
      reset: () => [1],
    });
    factor.element.title = "0 removes the component, 1 leaves it as it is";
    fill(controls, h("span", { class: "cl-label" }, "keep"), factor.element, exact);
    draw = () => {
      factor.set([row.scale]);
      if (!factor.busy) setNumber(exact, row.scale);
    };
    busy = () => factor.busy;
  }

  function capControls() {
    const low = numberField(`lower bound of ${name}`, { step: "any", placeholder: "no min" }, (value) => calls.edit(row.id, { min: value }), {
      emptied: () => calls.edit(row.id, { min: null }),
      wrong: (value) => (row.max !== null && value > row.max ? `must be at most the upper bound, ${short(row.max)}, got ${value}` : ""),
    });
    const high = numberField(`upper bound of ${name}`, { step: "any", placeholder: "no max" }, (value) => calls.edit(row.id, { max: value }), {
      emptied: () => calls.edit(row.id, { max: null }),
      wrong: (value) => (row.min !== null && value < row.min ? `must be at least the lower bound, ${short(row.min)}, got ${value}` : ""),
    });
    const note = h("span", { class: "cl-note" });
    let ends = /** @type {[number, number]} */ ([-1, 1]);
    const patchOf = (/** @type {number[]} */ values) => ({
      min: values[0] <= ends[0] && row.min === null ? null : values[0],
      max: values[1] >= ends[1] && row.max === null ? null : values[1],
    });
    const bounds = slider({
      low: -1, high: 1, step: 0.01, marks: [0], labels: [`min of ${name}`, `max of ${name}`],
      say: (values) => `from ${short(values[0])} to ${short(values[1])}`,
      moved: (values) => {
        const { min, max } = patchOf(values);
        forceNumber(low, min ?? "");
        forceNumber(high, max ?? "");
        calls.moving(row.id, patchOf(values));
      },
      settled: (values) => calls.edit(row.id, patchOf(values)),
    });
    bounds.element.title = "The component along the direction is clamped to this range";
    fill(controls, low, bounds.element, high, note);
    draw = () => {
      ends = row.range ?? [-Math.max(1, Math.abs(row.min ?? 0), Math.abs(row.max ?? 0)) * 1.25, Math.max(1, Math.abs(row.min ?? 0), Math.abs(row.max ?? 0)) * 1.25];
      bounds.set([row.min ?? ends[0], row.max ?? ends[1]], { low: ends[0], high: ends[1], step: (ends[1] - ends[0]) / 400 });
      if (!bounds.busy) {
        setNumber(low, row.min);
        setNumber(high, row.max);
      }
      write(note, row.clipped && (row.min !== null || row.max !== null) ? `${row.clipped[0]} of ${row.clipped[1]} clipped` : "");
    };
    busy = () => bounds.busy;
  }

  return {
    element,
    remove,
    get busy() {
      return busy();
    },
    /** @param {Row} next @param {number[] | null} known layers for which the vector is given */
    update(next, known) {
      row = next;
      if (row.operation !== kind) {
        kind = row.operation;
        ({ add: addControls, ablate: ablateControls, cap: capControls })[row.operation]();
      }
      operation.value = row.operation;
      strip.set(row.layers, known);
      mute.setAttribute("aria-pressed", String(row.muted));
      element.classList.toggle("cl-muted", row.muted);
      write(title, row.vector);
      draw();
    },
  };
}
