/** The sweep panel: layers by doses, filling while it runs. Colour is effect, hatching an answer that fell apart. */

import { tint } from "./lib/colours.js";
import { fill, h, s, write } from "./lib/dom.js";
import { heldBack, mark, numberField, setNumber } from "./lib/fields.js";
import { layerStrip } from "./lib/layers.js";
import { linkTo } from "./lib/link.js";
import { followOutputs } from "./lib/outputs.js";
import { place } from "./lib/place.js";
import { colourLegend } from "./lib/plots.js";
import { cellAt, dosesFrom, mostEffect, shownOf } from "./lib/sweeps.js";
import { levelOf, short, WARNING } from "./lib/scales.js";

/** @typedef {import("./types").Model} Model */
/** @typedef {import("./lib/sweeps.js").Cell} Cell */

const CELL_WIDTH = 64;
const CELL_HEIGHT = 20;
const MARGIN_LEFT = 56;
const MARGIN_TOP = 22;
const READ = "The unsteered model reads each answer, and x·u is its mean there: what the text says, without what was added to the run. The colour is its difference to the unsteered answer, in standard deviations of x·u on plain text.";

/** @param {{model: Model, el: HTMLElement}} context */
function render({ model, el }) {
  const facts = model.get("facts");
  const link = linkTo(model, el, { active: () => model.get("run").status === "running", answered: () => {}, drawn: () => drawEnded() });
  const { tell } = link;
  const change = (/** @type {Record<string, unknown>} */ patch) => tell({ kind: "plan", patch });

  const status = h("span", { class: "cl-status", role: "status", "aria-live": "polite" });
  const start = h("button", { type: "button" }, "run");
  const stop = h("button", { type: "button", class: "cl-small", "aria-label": "stop" }, "■ stop");
  start.addEventListener("click", () => {
    const written = prompts.map((each) => each.value);
    if (written.length > 1 && !written[written.length - 1].trim()) drawPrompts(written.slice(0, -1)); // begun, and nothing written
    mark(vector, vector.value ? "" : "choose a vector first");
    mark(layers.strip, model.get("plan").layers.length ? "" : "choose at least one layer");
    if (!heldBack(root)) tell({ kind: "start" });
  });
  stop.addEventListener("click", () => tell({ kind: "stop" }));
  const header = h("header", { class: "cl-header" }, h("strong", {}, "sweep"), h("span", {}, facts.model), h("span", { class: "cl-space" }), status, start, stop);
  const error = h("div", { class: "cl-error", role: "alert" });
  const ended = h("div", { class: "cl-notice", role: "status", hidden: true });

  const vector = h("select", { "aria-label": "vector" });
  vector.addEventListener("change", () => {
    mark(vector, "");
    change({ vector: vector.value || null });
  });
  for (const event of ["pointerdown", "focus"]) vector.addEventListener(event, () => tell({ kind: "variables" }));
  const operation = h("select", { "aria-label": "operation" }, ...["add", "ablate", "cap"].map((each) => h("option", { value: each }, each)));
  operation.addEventListener("change", () => {
    mark(doses, ""); // others come with the operation
    change({ operation: operation.value });
  });
  const bound = h("select", { "aria-label": "bound of the cap" }, ...["max", "min"].map((each) => h("option", { value: each }, each)));
  bound.addEventListener("change", () => change({ bound: bound.value }));
  const layers = layerStrip({ label: "layers to sweep", count: facts.layers, changed: (chosen) => {
    mark(layers.strip, "");
    change({ layers: chosen });
  } });
  const doses = h("input", { type: "text", "aria-label": "doses, with commas between", size: 26 });
  const dosesName = h("span");
  const warning = h("span", { class: "cl-warning", role: "status" });
  const takeDoses = () => {
    const { numbers, problem } = dosesFrom(doses.value);
    mark(doses, problem && `${dosesName.textContent?.trim()}: ${problem}`);
    if (numbers) change({ doses: numbers });
  };
  doses.addEventListener("change", takeDoses);
  doses.addEventListener("input", () => doses.dataset.problem && !dosesFrom(doses.value).problem && mark(doses, ""));
  doses.addEventListener("keydown", (event) => {
    if (event.key === "Enter") takeDoses();
    if (event.key === "Escape") {
      mark(doses, "");
      doses.value = model.get("plan").doses.join(", ");
    }
  });
  const read = h("select", { "aria-label": "layer where the effect is read" }, ...Array.from({ length: facts.layers }, (_, at) => h("option", { value: at }, at)));
  read.addEventListener("change", () => change({ read_layer: Number(read.value) }));
  const most = numberField("most tokens of an answer", { min: 1, step: 1 }, (value) => change({ max_tokens: value }));
  const seed = numberField("seed", { min: 0, step: 1 }, (value) => change({ seed: value }));
  /** One field for each prompt; the last one may be new and empty. @type {HTMLTextAreaElement[]} */
  let prompts = [];
  const promptsBox = h("div", { class: "cl-prompts" });
  const another = h("button", { type: "button", class: "cl-small", title: "every cell answers each prompt; the grid shows their mean" }, "+ prompt");
  another.addEventListener("click", () => {
    drawPrompts([...prompts.map((each) => each.value), ""]);
    prompts[prompts.length - 1].focus();
  });
  const hintText = h("span");
  const demo = h("button", { type: "button", class: "cl-small" }, "make the demo vector");
  demo.addEventListener("click", () => tell({ kind: "demo" }));
  const hint = h("div", { class: "cl-hint", role: "status" }, hintText, demo);
  /** What the grid shows, if answers are scored. */
  const shownAs = h("select", { "aria-label": "what the grid shows" }, ...["score", "effect"].map((each) => h("option", { value: each }, each)));
  shownAs.addEventListener("change", () => {
    drawGrid();
    drawText();
  });
  const shownAsLabel = h("label", {}, "show ", shownAs);
  const scored = () => model.get("scored") && shownAs.value === "score";
  const controls = h(
    "section",
    { class: "cl-controls-grid", "aria-label": "what to sweep" },
    operation, bound, h("label", {}, "vector ", vector), layers.element, h("label", {}, dosesName, doses), warning, h("label", { title: READ }, "answers read at layer ", read), h("label", {}, "tokens ", most), h("label", {}, "seed ", seed), shownAsLabel, promptsBox, hint,
  );
  const grid = h("div", { class: "cl-grid-box" });
  const text = h("section", { class: "cl-sweep-text", "aria-live": "polite", "aria-label": "text of the chosen run" });
  const root = h("div", { class: "cl-panel cl-sweep" }, header, ended, error, controls, grid, text);
  const placed = place(el, root, { error, ended, link });

  function drawEnded() {
    placed.drawEnded();
    drawHint();
    drawRun();
  }

  /** @param {Cell} cell */
  function choose(cell) {
    model.set("chosen", { layer: cell.layer, dose: cell.dose });
    model.save_changes();
  }

  function drawPlan() {
    const plan = model.get("plan");
    fill(vector, h("option", { value: "" }, "choose …"), ...model.get("vectors").map((/** @type {any} */ each) => h("option", { value: each.name }, each.name)));
    vector.value = plan.vector ?? "";
    operation.value = plan.operation;
    bound.hidden = plan.operation !== "cap";
    bound.value = plan.bound ?? "max";
    write(dosesName, { add: "doses ", ablate: "part that is kept ", cap: "bounds, as doses " }[/** @type {string} */ (plan.operation)] ?? "");
    write(warning, plan.operation === "add" && plan.doses.some((/** @type {number} */ dose) => levelOf(dose) === "extreme") ? WARNING : "");
    layers.set(plan.layers);
    if (document.activeElement !== doses && !doses.dataset.problem) doses.value = plan.doses.join(", ");
    read.value = String(plan.read_layer);
    setNumber(most, plan.max_tokens);
    setNumber(seed, plan.seed);
    const begun = prompts.length === plan.prompts.length + 1 && !prompts[prompts.length - 1].value.trim() ? [""] : [];
    drawPrompts([...plan.prompts, ...begun]);
    shownAsLabel.hidden = !model.get("scored");
    drawHint();
  }

  /** @param {string[]} texts */
  function drawPrompts(texts) {
    if (texts.length !== prompts.length) {
      const focused = prompts.findIndex((each) => each === document.activeElement);
      prompts = texts.map((_, at) => promptField(texts.length > 1 ? `prompt ${at + 1}` : "prompt", at));
      const rows = prompts.map((field, at) => {
        const remove = h("button", { type: "button", class: "cl-small", "aria-label": `remove prompt ${at + 1}` }, "✕");
        remove.addEventListener("click", () => takePrompts(at));
        return h("div", { class: "cl-prompt" }, h("label", {}, h("span", {}, texts.length > 1 ? `prompt ${at + 1} ` : "prompt "), field), texts.length > 1 && remove);
      });
      fill(promptsBox, ...rows, another);
      root.dispatchEvent(new CustomEvent("cl-mark"));
      prompts.forEach((field, at) => (field.value = texts[at]));
      if (focused >= 0) prompts[Math.min(focused, prompts.length - 1)].focus();
    }
    prompts.forEach((field, at) => {
      if (document.activeElement !== field && !field.dataset.problem) field.value = texts[at];
    });
  }

  /** @param {string} label @param {number} at */
  function promptField(label, at) {
    const field = h("textarea", { rows: 2, "aria-label": label });
    field.addEventListener("change", () => {
      const begun = at > 0 && at === prompts.length - 1 && prompts.length > model.get("plan").prompts.length;
      mark(field, field.value.trim() || begun ? "" : `the ${label} is empty`);
      if (field.value.trim()) takePrompts();
    });
    field.addEventListener("input", () => field.value.trim() && mark(field, ""));
    return field;
  }

  /** Sends the prompts, without one of them. @param {number} [without] */
  function takePrompts(without) {
    const texts = prompts.map((each) => each.value).filter((_, at) => at !== without);
    if (without !== undefined) {
      mark(prompts[without], "");
      drawPrompts(texts);
    }
    const known = texts.filter((each) => each.trim());
    if (known.length) change({ prompts: known });
  }

  /** What is missing, or what a run will be. */
  function drawHint() {
    const plan = model.get("plan");
    const count = plan.layers.length * plan.doses.length * plan.prompts.length;
    const none = !model.get("vectors").length;
    const busy = model.get("busy");
    write(hintText, busy ? `${busy} …` : none ? "No vector yet: make one with lab.direction or the steering panel, put one into lab.vectors, or" : `${count} ${count === 1 ? "run" : "runs"} of at most ${plan.max_tokens} tokens: each layer with each dose${plan.prompts.length > 1 ? ` and each of ${plan.prompts.length} prompts` : ""}, steered by itself.`);
    demo.hidden = !none;
    demo.disabled = link.dead || Boolean(busy);
  }

  /** What the cells were run with: a change of the plan since then is not theirs. */
  const ran = () => model.get("run").plan ?? model.get("plan");
  /** What the columns are, in a word. */
  const unit = () => ({ add: "dose", ablate: "keep", cap: ran().bound ?? "max" })[/** @type {string} */ (ran().operation)] ?? "";

  /** @param {any} plan */
  const effectOf = (plan) => `x·u along ${plan.vector} of the answer's text, as the unsteered model reads it at layer ${plan.read_layer}, beside the unsteered answer; 1 is the standard deviation on plain text`;

  function drawGrid() {
    const plan = ran();
    grid.classList.toggle("cl-stale", JSON.stringify(plan) !== JSON.stringify(model.get("plan")));
    /** @type {Cell[]} */
    const cells = model.get("cells");
    const chosen = model.get("chosen");
    const top = mostEffect(cells, scored());
    const rows = [...plan.layers].sort((left, right) => right - left);
    const width = MARGIN_LEFT + plan.doses.length * CELL_WIDTH + 8;
    const height = MARGIN_TOP + rows.length * CELL_HEIGHT + 8;
    const hatch = `cl-hatch-${link.view}`;
    let reached = false; // the first cell is reached by Tab, the others by arrow keys
    /** @type {SVGElement[]} */
    const parts = [
      s("defs", {}, s("pattern", { id: hatch, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, s("line", { x1: 0, y1: 0, x2: 0, y2: 6, class: "cl-hatch-line" }))),
      s("text", { x: 4, y: 14, class: "cl-tick" }, "layer"),
      ...plan.doses.map((/** @type {number} */ dose, /** @type {number} */ at) => s("text", { x: MARGIN_LEFT + (at + 0.5) * CELL_WIDTH, y: 14, "text-anchor": "middle", class: "cl-tick", "data-level": plan.operation === "add" ? levelOf(dose) : "" }, `${unit()} ${short(dose)}`)),
    ];
    rows.forEach((layer, line) => {
      const y = MARGIN_TOP + line * CELL_HEIGHT;
      parts.push(s("text", { x: MARGIN_LEFT - 8, y: y + 14, "text-anchor": "end", class: "cl-tick" }, layer));
      plan.doses.forEach((/** @type {number} */ dose, /** @type {number} */ at) => {
        const x = MARGIN_LEFT + at * CELL_WIDTH;
        const cell = cellAt(cells, layer, dose);
        if (!cell) {
          parts.push(s("rect", { x, y, width: CELL_WIDTH, height: CELL_HEIGHT, class: "cl-grid-cell cl-empty" }));
          return;
        }
        const picked = chosen && chosen.layer === layer && chosen.dose === dose;
        const { shade, value, spread } = shownOf(cell, scored());
        const over = cell.runs ? `, mean of ${cell.runs.length} ${cell.runs.length === 1 ? "prompt" : "prompts"}${spread === null ? "" : `, standard deviation ${short(spread)}`}` : "";
        const fell = cell.runs ? cell.runs.filter((run) => run.broken).length : 0;
        const label = `layer ${layer}, ${unit()} ${short(dose)}: ${scored() ? "score" : "effect"} ${short(value)}${over}${fell ? `, ${fell} of ${cell.runs?.length} fell apart` : cell.broken ? ", fell apart" : ""}`;
        parts.push(s("rect", { x, y, width: CELL_WIDTH, height: CELL_HEIGHT, class: "cl-empty" }));
        if (cell.broken) parts.push(s("rect", { x, y, width: CELL_WIDTH, height: CELL_HEIGHT, fill: `url(#${hatch})`, class: "cl-hatch" }));
        parts.push(
          s(
            "rect",
            {
              x, y, width: CELL_WIDTH, height: CELL_HEIGHT, fill: tint(shade ?? NaN, top), class: `cl-grid-cell${picked ? " cl-chosen" : ""}`, tabindex: picked || (!chosen && !reached) ? 0 : -1, role: "button", "aria-label": label,
              "data-layer": layer, "data-dose": dose, "data-broken": cell.broken ? "true" : "false",
              onclick: () => choose(cell),
              onkeydown: (/** @type {KeyboardEvent} */ event) => {
                const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] ?? [0, 0];
                const next = down || right ? grid.querySelector(`[data-layer="${rows[line + down]}"][data-dose="${plan.doses[at + right]}"]`) : null;
                if (next instanceof SVGElement) next.focus();
                else if (event.key === "Enter" || event.key === " ") choose(cell);
                else if (!down && !right) return;
                event.preventDefault();
              },
            },
            s("title", {}, label),
          ),
          s("text", { x: x + CELL_WIDTH / 2, y: y + 14, "text-anchor": "middle", class: "cl-tick cl-hatch" }, short(value)),
        );
        reached = true;
      });
    });
    const focused = document.activeElement instanceof SVGElement && grid.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    fill(grid, s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "cl-plot cl-sweep-plot", style: `width:${width}px;max-width:100%`, role: "group", "aria-label": "effect by layer and dose" }, ...parts), ...(top > 0 ? [colourLegend(top, `${scored() ? "your score, beside that of the unsteered answer" : effectOf(plan)}. Hatched: the answer fell apart (repeats itself, or surprises the unsteered model)`)] : []));
    if (focused) for (const each of grid.querySelectorAll("[role=button]")) if (each.getAttribute("aria-label") === focused && each instanceof SVGElement) each.focus();
  }

  /** @param {Cell} cell */
  const factsOf = (cell) => `${cell.score === undefined ? "" : `score ${short(cell.score)}, `}effect ${short(cell.effect)}, in the run itself ${short(cell.inside)} of the residual norm at layer ${ran().read_layer}, perplexity ${short(cell.perplexity)}, repetition ${short(cell.repetition)}, ${short(cell.tokens)} tokens`;

  function drawText() {
    const chosen = model.get("chosen");
    const cells = model.get("cells");
    const cell = chosen ? cellAt(cells, chosen.layer, chosen.dose) : null;
    const references = model.get("run").references ?? [];
    /** @param {string} note @param {string} said @param {string} [name] @returns {Node[]} */
    const answer = (note, said, name = "") => [h("div", { class: "cl-note" }, note), h("div", { class: name }, said)];
    const several = references.length > 1;
    const asked = (/** @type {number} */ at) => (several ? `“${references[at]?.prompt}”: ` : "");
    const head = cell ? `layer ${cell.layer}, ${unit()} ${short(cell.dose)} (raw ${short(cell.scale)}): ` : "";
    fill(
      text,
      ...(cell
        ? (cell.runs ?? [cell]).flatMap((/** @type {Cell} */ each) => answer(`${head}${asked(each.prompt_index)}${factsOf(each)}`, each.text, "cl-chosen-text"))
        : [h("div", { class: "cl-note" }, cells.length ? "click a cell to read its text" : "“run” fills the grid; a click on a cell shows its text")]),
      ...references.flatMap((/** @type {any} */ each, /** @type {number} */ at) => answer(`unsteered, ${asked(at)}${each.score === undefined ? "" : `score ${short(each.score)}, `}perplexity ${short(each.perplexity)}`, each.text)),
    );
  }

  function drawRun() {
    const run = model.get("run");
    const word = run.total ? `${run.status} ${run.done ?? 0} of ${run.total}` : run.status;
    write(status, link.dead ? `not connected, ${word}` : word);
    status.dataset.status = link.dead ? "ended" : run.status;
    stop.disabled = link.dead || run.status !== "running";
    write(error, model.get("error"));
    error.hidden = !model.get("error");
  }

  /** @type {[string, () => void][]} */
  const listeners = [
    ["change:plan", () => { drawPlan(); drawGrid(); }],
    ["change:vectors", drawPlan],
    ["change:busy", drawHint],
    ["change:cells", () => { drawGrid(); drawText(); }],
    ["change:chosen", () => { drawGrid(); drawText(); }],
    ["change:run", () => { drawRun(); drawGrid(); drawText(); }],
    ["change:error", drawRun],
  ];
  for (const [event, listener] of listeners) model.on(event, listener);
  const leaveOutputs = followOutputs(model);
  drawPlan();
  drawGrid();
  drawText();
  drawRun();
  drawEnded();
  return () => {
    for (const [event, listener] of listeners) model.off(event, listener);
    for (const leave of [leaveOutputs, placed.leave, link.close]) leave();
  };
}

export default { render };
