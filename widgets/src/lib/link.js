/** The link to the kernel: what was lost on the way is sent again, and a page that nobody answers says so. */

import { assign } from "./dom.js";

/** @typedef {import("../types").Model} Model */

/** The page compares its state with the kernel's so often while something changes, in milliseconds. */
const STEP_MS = 400;
/** What the kernel has sent again may be on its way for so long; then the page asks once more. */
const ARRIVES_MS = 280;
/** … and so often while no answer comes. */
const MOST_MS = 4000;
/** A kernel that has not answered for so long is busy or gone. */
const SILENT_MS = 3000;
const PICTURE = "This is a picture of the last state. ";
const DISCONNECTED = "No kernel is connected to it: to go on, run the notebook's cells again, this one last.";
const SILENT = "No answer from the kernel: it is busy with another cell, or gone. If it is gone, run the notebook's cells again, this one last.";

/**
 * A server may drop messages of a kernel (Jupyter's `iopub_msg_rate_limit`), the last ones of a stream included. So
 * each update says how often its values have been sent, and while anything changes the page tells the kernel what it has.
 * That request also opens a limit of the server's again: it counts from the end of the kernel's last reply.
 *
 * @param {Model} model
 * @param {HTMLElement} el where the panel is shown
 * @param {{active: () => boolean, answered: (n: number, failed: boolean) => void, drawn: () => void}} calls
 *   `active`: whether something runs; `answered`: all messages up to `n` were handled, `failed` if the last was not;
 *   `drawn`: pending messages or the state of the link have changed
 */
export function linkTo(model, el, calls) {
  const view = Math.random().toString(36).slice(2);
  let count = 0;
  let answered = 0;
  let level = false;
  let still = 0;
  let wait = STEP_MS;
  let timer = 0;
  /** When the kernel was asked first without an answer since. @type {number | null} */
  let silentSince = null;
  let ended = "";
  /** @type {Record<string, number>} */
  const versions = {};

  const disconnected = () => el.closest(".jupyter-widgets-disconnected") !== null;

  function check() {
    const silent = silentSince !== null && performance.now() - silentSince >= SILENT_MS;
    const found = model.get("ended") ? PICTURE + model.get("ended") : disconnected() ? PICTURE + DISCONNECTED : silent ? SILENT : "";
    if (found !== ended) {
      ended = found;
      calls.drawn();
    }
  }

  /** @param {Record<string, unknown>} message */
  function send(message) {
    silentSince ??= performance.now();
    model.send(message);
  }

  function ask() {
    send({ kind: "level", view, n: count, versions, still });
  }

  /** @param {number} after */
  function schedule(after) {
    if (!timer) timer = window.setTimeout(tick, after);
  }

  function tick() {
    timer = 0;
    check();
    if (disconnected() || (level && answered >= count && !calls.active())) return;
    ask();
    schedule(wait);
    wait = Math.min(wait * 1.5, MOST_MS);
  }

  function sooner() {
    clearTimeout(timer);
    timer = 0;
    wait = STEP_MS;
    schedule(STEP_MS);
  }

  function merge() {
    Object.assign(versions, model.get("versions"));
  }

  const changed = () => {
    level = false;
    schedule(STEP_MS);
  };
  /** @param {any} message */
  const received = (message) => {
    if (message?.still) still = message.still;
    if (message?.beat) {
      level = false;
      clearTimeout(timer);
      tick();
    }
    if (message?.view !== view || !("ack" in message)) return;
    silentSince = null;
    wait = STEP_MS;
    if ("level" in message) level = message.level;
    answered = Math.max(answered, message.ack);
    calls.answered(message.ack, Boolean(message.failed));
    if (message.level === false) {
      clearTimeout(timer);
      timer = 0;
      schedule(ARRIVES_MS);
    } else if (answered < count || !level || calls.active()) schedule(STEP_MS);
    check();
    calls.drawn();
  };
  model.on("change:versions", merge);
  model.on("change:ended", check);
  model.on("change", changed);
  model.on("msg:custom", received);
  const observer = new MutationObserver(check);
  for (let each = /** @type {Element | null} */ (el); each && observer; each = each === el ? el.parentElement : null) observer.observe(each, { attributes: true, attributeFilter: ["class"] });
  merge();
  queueMicrotask(tick);

  return {
    /** Names this view in messages and ids. */
    view,
    /** How many messages the kernel has not answered. */
    get pending() {
      return count - answered;
    },
    /** Why nothing answers, in words; empty while the kernel does. */
    get ended() {
      return ended;
    },
    /** Whether it is known that nothing will answer. */
    get dead() {
      return ended !== "" && ended !== SILENT;
    },
    /** Sends a message, and returns its number. @param {Record<string, unknown>} message */
    tell(message) {
      count += 1;
      send({ ...message, view, n: count });
      sooner();
      calls.drawn();
      return count;
    },
    close() {
      clearTimeout(timer);
      observer.disconnect();
      model.off("change:versions", merge);
      model.off("change:ended", check);
      model.off("change", changed);
      model.off("msg:custom", received);
    },
  };
}

/**
 * Returns a function that switches a panel's controls off, and on again; all but those marked `data-local`, which need
 * no kernel.
 *
 * @param {HTMLElement} root
 */
export function switchOf(root) {
  let off = false;
  /** @type {Set<HTMLButtonElement>} */
  const disabled = new Set();
  /** @param {Event} event */
  const swallow = (event) => {
    const target = /** @type {Element} */ (event.target);
    const control = target.closest("button, [role=slider], .cl-slider, .cl-strip");
    if (!off || !control || control.closest("[data-local]") || (event instanceof KeyboardEvent && event.key === "Tab")) return;
    event.stopPropagation();
    event.preventDefault();
  };
  for (const name of ["pointerdown", "click", "dblclick", "keydown"]) root.addEventListener(name, swallow, true);

  /** @param {boolean} now */
  return (now) => {
    off = now;
    root.classList.toggle("cl-ended", off);
    for (const each of root.querySelectorAll("[role=slider], .cl-strip")) if (!each.closest("[data-local]")) assign(each, { "aria-disabled": off ? "true" : null });
    if (off) {
      for (const each of root.querySelectorAll("button, input, select, textarea")) {
        const control = /** @type {HTMLButtonElement} */ (each);
        if (control.closest("[data-local]") || control.disabled) continue;
        control.disabled = true;
        disabled.add(control);
      }
    } else {
      for (const control of disabled) control.disabled = false;
      disabled.clear();
    }
  };
}
