/** The steering panel. The session owns steering and runs; the page owns what is open, picked and hovered. */

import { chatPane } from "./lib/chat.js";
import { assign, fill, h, write } from "./lib/dom.js";
import { heldBack, mark, numberField, setNumber } from "./lib/fields.js";
import { layerStrip } from "./lib/layers.js";
import { linkTo } from "./lib/link.js";
import { largest, numbersOf, overflowed, parting, projectionsAt } from "./lib/numbers.js";
import { followOutputs } from "./lib/outputs.js";
import { place } from "./lib/place.js";
import { colourLegend, drawPlot } from "./lib/plots.js";
import { rowView } from "./lib/row.js";
import { levelOf, short, WARNING } from "./lib/scales.js";

/** @typedef {import("./types").Answer} Answer */
/** @typedef {import("./types").Model} Model */
/** @typedef {import("./types").Numbers} Numbers */
/** @typedef {import("./types").Row} Row */
/** @typedef {import("./types").Run} Run */
/** @typedef {import("./types").View} View */

/** As lab.direction has it. */
const MIN_TEXTS = 6;
const PLOTS = { norm: "norm per message", cosine: "cosine per message", projection: "projection per token", heatmap: "layer × token" };
const WORDS = { idle: "ready", waiting: "waiting", running: "running", done: "ready", stopped: "stopped", failed: "failed" };

const SPLIT = "Special tokens that a message spells, such as <|im_end|>, are sent as ordinary text. Otherwise the model reads them as those of its chat template.";
const RECEIPT = "rows: tokens that were computed under steering, at each steered layer; cached: tokens of the prompt that were not computed again";

/** Whether a row changes anything. @param {Row} row */
const acts = (row) => !row.muted && (row.operation === "cap" ? row.min !== null || row.max !== null : row.operation === "ablate" ? row.scale !== 1 : row.scale !== 0);

/** @param {string} text */
const linesOf = (text) => text.split("\n").filter((line) => line.trim()).length;

/** @param {{model: Model, el: HTMLElement}} context */
function render({ model, el }) {
  /** Edits of this view that the kernel has not answered yet. @type {Map<string, {patch: Partial<Row>, n: number}>} */
  const edits = new Map();
  /** Rows under the hand: their sliders have moved and nothing was sent yet. @type {Set<string>} */
  const moving = new Set();
  /** @type {Map<string, ReturnType<typeof rowView>>} */
  const rowViews = new Map();
  /** @type {{side: string, position: number} | null} */
  let hovered = null;
  /** @type {Record<string, {answer: Answer | null, numbers: Numbers | null}>} */
  const sides = { baseline: { answer: null, numbers: null }, steered: { answer: null, numbers: null } };

  /** What to do when the kernel has handled a message, by the message's number. @type {Map<number, (failed: boolean) => void>} */
  const handled = new Map();
  const link = linkTo(model, el, {
    active: () => ["waiting", "running"].includes(model.get("run").status),
    answered: acknowledged,
    drawn: () => {
      drawPending();
      drawEnded();
    },
  });
  const { tell } = link;

  /** How many messages the kernel has not answered. */
  function drawPending() {
    status.dataset.pending = String(link.pending + moving.size);
  }

  /** @returns {View} */
  const view = () => model.get("view");

  /** @param {Partial<View>} patch */
  function look(patch) {
    model.set("view", { ...view(), ...patch });
    model.save_changes();
  }

  // -- header ---------------------------------------------------------------------------------------------------------

  const facts = model.get("facts");
  const status = h("span", { class: "cl-status", role: "status", "aria-live": "polite" });
  const steeredCount = h("span", { class: "cl-note" });
  const stop = h("button", { type: "button", class: "cl-small", "aria-label": "stop" }, "■ stop");
  stop.addEventListener("click", () => tell({ kind: "stop" }));
  const header = h("header", { class: "cl-header" }, h("strong", {}, "chatspace-lab"), h("span", {}, facts.model), h("span", { class: "cl-note" }, `${facts.dtype}, ${facts.layers} layers`), h("span", { class: "cl-space" }), status, steeredCount, stop);
  const error = h("div", { class: "cl-error", role: "alert" });
  const ended = h("div", { class: "cl-notice", role: "status", hidden: true });

  // -- vectors ----------------------------------------------------------------------------------------------------------

  const rowsBox = h("div", { class: "cl-rows" });
  const source = h("select", { "aria-label": "vector to add" });
  const add = h("button", { type: "button", class: "cl-small" }, "add row");
  add.addEventListener("click", () => source.value && tell({ kind: "add", vector: source.value }));
  source.addEventListener("change", () => drawAdd());
  for (const event of ["pointerdown", "focus"]) source.addEventListener(event, () => tell({ kind: "variables" }));
  const formName = h("input", { type: "text", placeholder: "name", "aria-label": "name of the direction" });
  const positive = h("textarea", { rows: 3, placeholder: "texts that have it, one a line", "aria-label": "texts that have it, one a line" });
  const negative = h("textarea", { rows: 3, placeholder: "texts that do not", "aria-label": "texts that do not have it, one a line" });
  const build = h("button", { type: "button", class: "cl-small" }, "build");
  const busy = h("div", { class: "cl-note cl-busy", role: "status", hidden: true });
  const counts = h("span", { class: "cl-note" });
  const built = h("div", { class: "cl-built", role: "status", hidden: true });
  const advice = h("div", { class: "cl-note" }, `At least ${MIN_TEXTS} texts on each side, line by line as pairs that differ in one thing only. The direction from one side to the other is tested on pairs that were held out. A name that is known already gets the new direction.`);
  const form = h("details", { class: "cl-form" }, h("summary", {}, "from contrasting texts"), advice, h("div", { class: "cl-form-body" }, formName, positive, negative, h("span", { class: "cl-form-end" }, build, counts)));
  const checkForm = () => {
    const [one, other] = [linesOf(positive.value), linesOf(negative.value)];
    mark(formName, formName.value.trim() ? "" : "the direction needs a name");
    mark(positive, one < MIN_TEXTS ? `at least ${MIN_TEXTS} texts that have it, got ${one}` : "");
    mark(negative, other < MIN_TEXTS ? `at least ${MIN_TEXTS} texts that do not have it, got ${other}` : one >= MIN_TEXTS && one !== other ? `as many texts that do not have it as texts that do, got ${other} and ${one}` : "");
    return ![formName, positive, negative].some((each) => each.dataset.problem);
  };
  for (const each of [formName, positive, negative]) {
    each.addEventListener("input", () => {
      write(counts, `${linesOf(positive.value)} and ${linesOf(negative.value)} texts`);
      for (const other of [formName, positive, negative]) mark(other, "");
    });
  }
  build.addEventListener("click", () => {
    if (checkForm()) tell({ kind: "contrast", name: formName.value, positive: positive.value, negative: negative.value });
  });
  form.addEventListener("toggle", () => {
    if (!form.open) for (const each of [formName, positive, negative]) mark(each, ""); // nothing waits for a form that is shut
  });
  const prompt = h("input", { type: "checkbox", "aria-label": "steer the prompt" });
  const answer = h("input", { type: "checkbox", "aria-label": "steer the answer" });
  const whereNote = h("span", { class: "cl-note" });
  for (const [box, other] of [[prompt, answer], [answer, prompt]]) {
    box.addEventListener("change", () => {
      if (!prompt.checked && !answer.checked) other.checked = true; // something is steered, or rows are muted
      tell({ kind: "where", where: prompt.checked && answer.checked ? "all" : prompt.checked ? "prompt" : "answer" });
    });
  }
  const where = h("span", { class: "cl-where" }, "applies to: ", h("label", {}, prompt, " prompt"), h("label", {}, answer, " answer"), whereNote);
  const warning = h("div", { class: "cl-warning", role: "status", hidden: true });
  const demo = h("button", { type: "button", class: "cl-small" }, "make the demo vector");
  demo.addEventListener("click", () => tell({ kind: "demo" }));
  const hintText = h("span");
  const hint = h("div", { class: "cl-hint", hidden: true }, hintText, demo);
  const vectors = h("section", { class: "cl-vectors", "aria-label": "vectors" }, rowsBox, warning, hint, h("div", { class: "cl-add" }, source, add, form, h("span", { class: "cl-space" }), where), busy, built);

  /** Rows as they are to be shown: the kernel's, with edits that it has not answered yet. @returns {Row[]} */
  function shownRows() {
    return model.get("rows").map((/** @type {Row} */ row) => {
      const patch = edits.get(row.id)?.patch ?? {};
      const { dose } = patch; // set at each layer
      return { ...row, ...(typeof dose === "number" && row.unit ? { scale: dose / row.unit, doses: row.layers.map(() => dose) } : {}), ...patch };
    });
  }

  function drawRows() {
    const rows = shownRows();
    const known = new Map(model.get("vectors").map((/** @type {any} */ each) => [each.name, each.layers]));
    for (const [id, each] of rowViews) {
      if (!rows.some((row) => row.id === id)) {
        const focused = each.element.contains(document.activeElement);
        each.element.remove();
        rowViews.delete(id);
        moving.delete(id);
        if (focused) (rowViews.get(rows[0]?.id)?.remove ?? source).focus({ preventScroll: true });
        root.dispatchEvent(new CustomEvent("cl-mark"));
      }
    }
    rows.forEach((row, at) => {
      let each = rowViews.get(row.id);
      if (!each) {
        each = rowView(row, facts.layers, {
          moving: (id) => {
            moving.add(id);
            drawPending();
            drawState();
          },
          edit: (id, patch) => {
            moving.delete(id);
            const before = edits.get(id)?.patch;
            edits.set(id, { patch: { ...before, ...patch }, n: tell({ kind: "edit", row: id, patch }) });
            drawRows();
            drawState();
          },
          remove: (id) => tell({ kind: "remove", row: id }),
        });
        rowViews.set(row.id, each);
      }
      if (rowsBox.children[at] !== each.element) rowsBox.insertBefore(each.element, rowsBox.children[at] ?? null);
      each.update(row, known.get(row.vector) ?? null);
    });
    const steered = new Set(rows.filter(acts).flatMap((row) => row.layers));
    const strong = rows.filter((row) => row.operation === "add" && !row.muted && (row.doses ?? []).some((dose) => levelOf(dose) === "extreme"));
    const much = rows.filter((row) => row.operation === "add" && !row.muted && !strong.includes(row) && levelOf((row.doses ?? []).reduce((one, other) => one + other, 0)) === "extreme");
    write(warning, strong.length ? `${strong.map((row) => row.vector).join(", ")}: ${WARNING}` : much.length ? `${much.map((row) => row.vector).join(", ")}: the doses of the layers add up to 1.5 or more; answers may fall apart.` : "");
    warning.hidden = !warning.textContent;
    hint.hidden = rows.length > 0;
    demo.hidden = known.size > 0;
    write(hintText, known.size ? "No row yet: choose a vector and press “add row”; its slider then steers the session." : "No vector yet. Build one “from contrasting texts”, put one into lab.vectors, or define a variable that holds one. To see what a vector does:");
    drawUse();
    write(steeredCount, `${steered.size} steered layer${steered.size === 1 ? "" : "s"}`);
  }

  const use = h("button", { type: "button", class: "cl-small" });
  use.addEventListener("click", () => tell({ kind: "use", vector: model.get("built").name }));

  /** A direction that a row has already is not offered again. */
  function drawUse() {
    use.hidden = model.get("rows").some((/** @type {Row} */ row) => row.vector === model.get("built").name);
  }

  function drawAdd() {
    const empty = !model.get("vectors").length;
    add.disabled = link.dead || !source.value;
    add.title = source.value ? "" : empty ? "there is no vector yet: make the demo vector, or build one from contrasting texts" : "choose a vector first";
  }

  function drawBusy() {
    write(busy, model.get("busy") && `${model.get("busy")} …`);
    busy.hidden = !model.get("busy");
    build.disabled = demo.disabled = Boolean(model.get("busy"));
  }

  /** The test of a direction that was just built, before it is used. */
  function drawBuilt() {
    const found = model.get("built");
    built.hidden = !found.name;
    if (!found.name) return;
    assign(use, { "aria-label": `add a row with ${found.name}` });
    write(use, `add row at layer ${found.layer}`);
    drawUse();
    const leave = h("button", { type: "button", class: "cl-small", "aria-label": "dismiss the test" }, "✕");
    leave.addEventListener("click", () => {
      built.hidden = true;
    });
    built.classList.toggle("cl-doubtful", !found.trusted);
    fill(built, h("strong", {}, found.name), " ", `${found.trusted ? "" : "Not to be trusted. "}${found.text} Shuffled labels reach ${short(found.shuffled)} on average; 0.5 is chance.`, " ", use, " ", leave);
  }

  function drawSources() {
    const names = model.get("vectors").map((/** @type {any} */ each) => each.name);
    for (const [select, first] of /** @type {[HTMLSelectElement, string][]} */ ([[source, names.length ? "add a vector …" : "no vectors yet"], [direction, "none"]])) {
      const chosen = select === direction ? view().direction ?? "" : select.value;
      fill(select, h("option", { value: "" }, first), ...model.get("vectors").map((/** @type {any} */ each) => h("option", { value: each.name }, each.from === "variable" ? `${each.name} (variable)` : each.name)));
      select.value = chosen;
    }
    drawAdd();
  }

  function drawWhere() {
    const chosen = model.get("where");
    prompt.checked = chosen === "all" || chosen === "prompt";
    answer.checked = chosen === "all" || chosen === "answer";
    write(whereNote, ["all", "prompt", "answer"].includes(chosen) ? "" : chosen);
  }

  // -- chats ------------------------------------------------------------------------------------------------------------

  const calls = {
    /** @param {string} side @param {number | null} position */
    hover(side, position) {
      const before = hovered;
      hovered = position === null ? null : { side, position };
      if (before?.side !== hovered?.side || before?.position !== hovered?.position) drawMarks();
    },
    moved: () => drawMarks(),
    /** @param {string} side @param {number} position */
    pin(side, position) {
      const now = view().pinned;
      look({ pinned: now && now.position === position ? null : { side, position } });
    },
    /** @param {number} index @param {string} text @param {(saved: boolean) => void} done */
    edit(index, text, done) {
      handled.set(tell({ kind: "turn", index, text }), (failed) => done(!failed));
    },
  };
  const panes = { baseline: chatPane("baseline", calls), steered: chatPane("steered", calls) };
  const tip = h("div", { class: "cl-tip", role: "tooltip", title: "click or Escape closes it", hidden: true });
  /** Whether the note of the pinned token is shown; its marks stay without it. */
  let noted = true;
  const unpin = () => view().pinned && look({ pinned: null });
  tip.addEventListener("click", (event) => {
    event.stopPropagation();
    unpin();
  });
  /** @param {PointerEvent} event */
  const pressed = (event) => {
    const on = event.composedPath().find((each) => each instanceof Element && each.matches(".cl-token, .cl-plot-box, .cl-tip"));
    if (tip.hidden || (on && root.contains(/** @type {Node} */ (on)))) return;
    noted = false;
    drawMarks();
  };
  /** @param {KeyboardEvent} event */
  const escaped = (event) => {
    if (event.key !== "Escape" || (!hovered && !view().pinned)) return;
    hovered = null;
    unpin();
    drawMarks();
  };
  document.addEventListener("pointerdown", pressed, true);
  document.addEventListener("keydown", escaped, true);
  const field = h("textarea", { rows: 2, placeholder: "type a message …", "aria-label": "message", "data-local": "" });
  field.value = model.get("draft");
  field.addEventListener("change", () => {
    model.set("draft", field.value);
    model.save_changes();
  });
  /** A message that was sent and not answered yet. */
  let unheard = "";
  const send = h("button", { type: "button" }, "send ⏎");
  const again = h("button", { type: "button", class: "cl-small" }, "regenerate");
  const fresh = h("button", { type: "button", class: "cl-small" }, "new chat");
  const submit = () => {
    const text = field.value;
    if (link.dead) return;
    mark(field, text.trim() ? "" : "the message is empty");
    if (heldBack(root)) return;
    field.value = "";
    unheard = text;
    handled.set(tell({ kind: "ask", text }), (failed) => {
      unheard = "";
      if (failed && !field.value) field.value = text;
    });
  };
  send.addEventListener("click", submit);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  field.addEventListener("input", () => mark(field, ""));
  again.addEventListener("click", () => {
    mark(field, "");
    if (!heldBack(root)) tell({ kind: "regenerate" });
  });
  fresh.addEventListener("click", () => tell({ kind: "clear" }));
  const resample = (/** @type {string} */ name) => (/** @type {number} */ value) => tell({ kind: "sampling", patch: { [name]: value } });
  const seed = numberField("seed", { min: 0, step: 1 }, resample("seed"));
  const temperature = numberField("temperature", { min: 0, max: 5, step: 0.1 }, resample("temperature"));
  const most = numberField("most tokens of an answer", { min: 1, step: 1 }, resample("max_tokens"));
  const split = h("input", { type: "checkbox", "aria-label": "send special tokens as text" });
  split.addEventListener("change", () => tell({ kind: "special", split: split.checked }));
  const controls = h("div", { class: "cl-note cl-controls-note", role: "status", hidden: true });
  const chatHint = h("div", { class: "cl-hint" }, "Nothing was asked yet. A message is answered on both sides with the same seed: on the left as the model is, on the right steered by the rows above.");
  const chats = h(
    "section",
    { class: "cl-chats", "aria-label": "conversations" },
    chatHint,
    h("div", { class: "cl-panes" }, panes.baseline.element, panes.steered.element),
    h("div", { class: "cl-input" }, field, h("div", { class: "cl-buttons" }, send, again, fresh, h("label", {}, "seed", seed), h("label", {}, "T", temperature), h("label", {}, "tokens", most), h("label", { title: SPLIT }, split, " special tokens as text")), controls),
  );

  /** @param {string} side */
  function take(side) {
    const given = model.get(side);
    const found = given && "number" in given ? given : null;
    sides[side] = { answer: found, numbers: numbersOf(found) };
  }

  function drawTexts() {
    chatHint.hidden = model.get("turns").length > 0;
    const { baseline, steered } = sides;
    const parts = baseline.answer && steered.answer ? parting(baseline.answer, steered.answer) : null;
    for (const side of /** @type {const} */ (["baseline", "steered"])) panes[side].text(sides[side].answer, parts, model.get("turns"));
    const names = new Set([baseline.answer, steered.answer].flatMap((found) => (found?.special ?? []).map((at) => found?.texts[at - found.first])));
    fill(controls, ...(names.size ? [h("span", { class: "cl-control" }, [...names].join(", ")), " in a message: a control token. The model reads it as it reads those of its chat template: it can end a message and begin another. “special tokens as text” sends it as it is written."] : []));
    controls.hidden = !names.size;
  }

  function drawTints() {
    const layer = view().layers[0];
    const top = largest([sides.baseline.numbers, sides.steered.numbers], [layer]);
    let infinite = 0;
    for (const side of /** @type {const} */ (["baseline", "steered"])) {
      const { numbers } = sides[side];
      const values = projectionsAt(numbers, layer);
      panes[side].tint((position) => {
        const at = numbers ? position - numbers.first : -1;
        if (!overflowed(values, at)) return values?.[at] ?? NaN;
        infinite += 1;
        return Infinity;
      }, top);
    }
    const marked = infinite ? `; ${infinite} underlined in amber: not finite` : "";
    fill(legend, ...(top > 0 ? [colourLegend(top, `projection on ${view().direction} at layer ${layer}, in units of the residual stream${marked}`)] : []));
  }

  /** What is shown belongs to other values than those of the controls: grey it. */
  function drawState() {
    /** @type {Run} */
    const run = model.get("run");
    const moved = moving.size > 0 || edits.size > 0;
    const word = moved && model.get("turns").length ? "waiting" : WORDS[run.status];
    write(status, link.dead ? "not connected ○" : `${word} ●`);
    status.dataset.status = link.dead && run.status !== "failed" ? "ended" : moved && model.get("turns").length ? "waiting" : run.status;
    stop.disabled = link.dead || !["waiting", "running"].includes(run.status);
    again.disabled = link.dead || !model.get("turns").length;
    for (const side of /** @type {const} */ (["baseline", "steered"])) {
      const found = sides[side].answer;
      const failed = run.status === "failed" && (run.sides ?? []).includes(side);
      const mine = side === "steered" || (run.sides ?? []).includes(side);
      const stale = found !== null && mine && (found.number !== run.number || run.status === "waiting" || (side === "steered" && moved));
      panes[side].state({ stale, error: failed ? run.error ?? "it failed" : null });
    }
    if (run.receipt ? run.status !== "waiting" : run.status === "idle") drawReceipt(run); // else the last one stays, greyed
    receipt.classList.toggle("cl-stale", (!run.receipt && run.status !== "idle") || moved);
  }

  // -- plots ------------------------------------------------------------------------------------------------------------

  const layer = h("select", { "aria-label": "layer of the tints and plots", "data-local": "" }, ...Array.from({ length: facts.layers }, (_, at) => h("option", { value: at }, at)));
  layer.addEventListener("change", () => look({ layers: [Number(layer.value), ...view().layers.slice(1).filter((each) => each !== Number(layer.value))] }));
  const more = layerStrip({
    label: "layers of the plots",
    count: facts.layers,
    changed: (layers) => {
      const first = view().layers[0];
      if (layers.length) look({ layers: layers.includes(first) ? [first, ...layers.filter((each) => each !== first)] : layers });
      else drawLooks();
    },
  });
  const direction = h("select", { "aria-label": "direction of the tints and plots" });
  direction.addEventListener("change", () => look({ direction: direction.value || null }));
  const tabs = Object.entries(PLOTS).map(([name, text]) => {
    const tab = h("button", { type: "button", role: "tab", "data-plot": name }, text);
    tab.addEventListener("click", () => look({ plot: name }));
    tab.addEventListener("keydown", (event) => {
      const names = Object.keys(PLOTS);
      const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
      if (!step) return;
      const next = names[(names.indexOf(name) + step + names.length) % names.length];
      look({ plot: next });
      tabs[names.indexOf(next)].focus();
      event.preventDefault();
    });
    return tab;
  });
  const plotBox = h("div", { class: "cl-plot-box", role: "tabpanel" });
  let plotted = 0;
  const sized = new ResizeObserver(() => {
    if (plotBox.clientWidth && plotBox.clientWidth !== plotted) drawPlots();
    plotted = plotBox.clientWidth;
  });
  sized.observe(plotBox);
  const legend = h("div");
  const plots = h(
    "section",
    { class: "cl-plots", "aria-label": "plots" },
    legend,
    h("div", { class: "cl-looks" }, h("label", {}, "layer ", layer), h("label", {}, "direction ", direction), more.element, h("span", { class: "cl-space" }), h("div", { role: "tablist", "aria-label": "plots", "data-local": "" }, ...tabs)),
    plotBox,
  );

  function drawLooks() {
    const { layers, plot } = view();
    layer.value = String(layers[0]);
    more.set([...layers].sort((left, right) => left - right), sides.steered.answer ? sides.steered.answer.layers : null);
    direction.value = view().direction ?? "";
    for (const tab of tabs) assign(tab, { "aria-selected": String(tab.dataset.plot === plot), tabindex: tab.dataset.plot === plot ? 0 : -1 });
  }

  let frame = 0;
  function drawPlots() {
    if (!frame) frame = requestAnimationFrame(plotNow);
  }

  function plotNow() {
    frame = 0;
    const { layers, pinned, plot } = view();
    const { baseline, steered } = sides;
    drawPlot(plotBox, plot, {
      baseline: baseline.numbers,
      steered: steered.numbers,
      bands: (steered.answer ?? baseline.answer)?.bands ?? [],
      baselineBands: (baseline.answer ?? steered.answer)?.bands ?? [],
      layers,
      direction: view().direction ?? "no direction",
      pinned: pinned ? pinned.position : null,
      hovered: hovered ? hovered.position : null,
      pin: (position) => calls.pin("steered", position),
      width: plotBox.clientWidth,
    });
  }

  function drawMarks() {
    const { pinned, layers } = view();
    for (const side of /** @type {const} */ (["baseline", "steered"])) {
      panes[side].mark(pinned ? pinned.position : null, hovered && hovered.side === side ? hovered.position : null);
    }
    const shown = hovered ?? (noted ? pinned : null);
    const pane = shown ? panes[/** @type {"baseline" | "steered"} */ (shown.side)] : null;
    tip.hidden = !shown || !pane?.span(shown.position);
    if (shown && pane && !tip.hidden) {
      const { answer: found, numbers } = sides[shown.side];
      const values = projectionsAt(numbers, layers[0]);
      const value = values && numbers ? values[shown.position - numbers.first] : NaN;
      write(tip, `${view().direction ?? "no direction"} at ${layers[0]}: ${short(value ?? NaN)} · token ${found?.ids[shown.position - found.first]} · position ${shown.position}${found?.special.includes(shown.position) ? " · control token" : ""}`);
      tip.classList.toggle("cl-tip-pinned", !hovered || hovered.position === pinned?.position);
      pane.note(tip, shown.position);
    }
    drawPlots();
  }

  // -- receipt ----------------------------------------------------------------------------------------------------------

  const receiptText = h("span", { class: "cl-receipt-text", title: RECEIPT });
  const code = h("pre", { class: "cl-code", tabindex: 0, "aria-label": "a cell that does it again" });
  const copy = h("button", { type: "button", class: "cl-small", "data-local": "" }, "copy as code");
  const shownCode = h("details", {}, h("summary", {}, "code"), code);
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent ?? "");
      write(copy, "copied");
    } catch {
      shownCode.open = true;
      getSelection()?.selectAllChildren(code);
      write(copy, "selected: press Ctrl-C");
    }
    setTimeout(() => write(copy, "copy as code"), 2000);
  });
  const save = h("button", { type: "button", class: "cl-small", "aria-label": "save session and panel" }, "save");
  save.addEventListener("click", () => tell({ kind: "save" }));
  const saved = h("span", { class: "cl-note cl-saved", role: "status" });
  const receipt = h("footer", { class: "cl-receipt" }, receiptText, copy, save, saved, shownCode);

  /** @param {Run} run */
  function drawReceipt(run) {
    write(receiptText, run.receipt ? run.receipt.text : "nothing was asked yet");
    write(code, run.receipt ? run.receipt.code : "");
    copy.disabled = !run.receipt;
  }

  function drawSaved() {
    write(saved, model.get("saved") && `saved in ${model.get("saved")}`);
  }

  // -- together ---------------------------------------------------------------------------------------------------------

  const root = h("div", { class: "cl-panel cl-steering" }, header, ended, error, vectors, chats, plots, receipt);
  const placed = place(el, root, { error, ended, link });

  function drawEnded() {
    placed.drawEnded();
    if (link.dead && unheard && !field.value) field.value = unheard;
    if (link.dead) unheard = "";
    drawAdd();
    drawState();
  }

  function drawSampling() {
    const found = model.get("sampling");
    setNumber(seed, found.seed);
    setNumber(temperature, found.temperature);
    setNumber(most, found.max_tokens);
    split.checked = model.get("split_special_tokens");
  }

  function drawError() {
    write(error, model.get("error"));
    error.hidden = !model.get("error");
  }

  /** @type {[string, () => void][]} */
  const listeners = [
    ["change:rows", () => { drawRows(); drawState(); }],
    ["change:vectors", () => { drawSources(); drawRows(); }],
    ["change:turns", () => { drawTexts(); drawState(); }],
    ["change:sampling", drawSampling],
    ["change:where", drawWhere],
    ["change:run", drawState],
    ["change:error", drawError],
    ["change:split_special_tokens", drawSampling],
    ["change:busy", drawBusy],
    ["change:built", drawBuilt],
    ["change:saved", drawSaved],
    ["change:draft", () => { if (document.activeElement !== field) field.value = model.get("draft"); }],
    ["change:view", () => { notePinned(); drawLooks(); drawTints(); drawMarks(); }],
    ...["baseline", "steered"].map((side) => /** @type {[string, () => void]} */ ([`change:${side}`, () => { take(side); drawTexts(); drawTints(); drawState(); drawMarks(); drawLooks(); }])),
  ];
  let pinnedAt = view().pinned?.position;
  /** Another pinned token has its note shown. */
  function notePinned() {
    const now = view().pinned?.position;
    if (now !== pinnedAt) noted = true;
    pinnedAt = now;
  }

  /** @param {number} n @param {boolean} failed */
  function acknowledged(n, failed) {
    for (const [id, edit] of edits) if (edit.n <= n) edits.delete(id);
    for (const [each, done] of handled) {
      if (each > n) continue;
      handled.delete(each);
      done(each === n && failed);
    }
    drawRows();
    drawState();
  }
  for (const [event, listener] of listeners) model.on(event, listener);
  const leaveOutputs = followOutputs(model);
  take("baseline");
  take("steered");
  drawSources();
  drawRows();
  drawWhere();
  drawSampling();
  drawError();
  drawTexts();
  drawTints();
  drawLooks();
  drawState();
  drawMarks();
  drawPending();
  drawBusy();
  drawBuilt();
  drawSaved();
  drawEnded();
  return () => {
    for (const [event, listener] of listeners) model.off(event, listener);
    sized.disconnect();
    document.removeEventListener("pointerdown", pressed, true);
    document.removeEventListener("keydown", escaped, true);
    for (const leave of [leaveOutputs, placed.leave, link.close]) leave();
  };
}

export default { render };
