/** Fields of forms. What cannot be used is marked and said, stays as it was typed, and holds back what would run with it. */

import { fill, h } from "./dom.js";

/** The largest float32: the kernel refuses what is beyond it. */
const LARGEST = 3.4028234e38;

/** Marks a field with what is wrong in it; "" takes the mark away. @param {HTMLElement} field @param {string} problem */
export function mark(field, problem) {
  if ((field.dataset.problem ?? "") === problem) return;
  if (problem) field.dataset.problem = problem;
  else delete field.dataset.problem;
  if (problem) field.setAttribute("aria-invalid", "true");
  else field.removeAttribute("aria-invalid");
  field.dispatchEvent(new CustomEvent("cl-mark", { bubbles: true }));
}

/** What is wrong in the fields of a panel, as a line that follows them. @param {HTMLElement} root */
export function problemLine(root) {
  const line = h("div", { class: "cl-error cl-problems", role: "alert", hidden: true });
  root.addEventListener("cl-mark", () => {
    const found = marked(root);
    line.hidden = !found.length;
    fill(line, found.map((field) => field.dataset.problem).join("; "));
  });
  return line;
}

/** @param {HTMLElement} root @returns {HTMLElement[]} */
function marked(root) {
  return /** @type {HTMLElement[]} */ ([...root.querySelectorAll("[data-problem]")]);
}

/** Whether a marked field holds back what is asked for; the first one gets the focus. A form holds back only itself. @param {HTMLElement} root */
export function heldBack(root) {
  const [first] = marked(root).filter((field) => !field.closest("details"));
  if (!first) return false;
  first.focus();
  return true;
}

/** What is wrong with the number in a field; "" if nothing is. @param {{text: string, number: number, bad: boolean}} typed @param {Attributes} attributes @param {boolean} mayBeEmpty */
export function numberProblem({ text, number, bad }, { min, max, step }, mayBeEmpty) {
  const whole = step === 1;
  const what = `must be a ${whole ? "whole " : ""}number${min === undefined ? "" : max === undefined ? ` from ${min} on` : ` from ${min} to ${max}`}`;
  if (bad) return `${what}, got something else`;
  if (text === "") return mayBeEmpty ? "" : `${what}, got nothing`;
  const outside = number < (min ?? -LARGEST) || number > (max ?? (whole ? Number.MAX_SAFE_INTEGER : LARGEST));
  return !Number.isFinite(number) || outside || (whole && !Number.isInteger(number)) ? `${what}, got ${text}` : "";
}

/** @typedef {Record<string, any>} Attributes */

/**
 * A number field that tells of a whole entry only. An entry that is no such number is marked and stays; Escape brings back
 * the last value.
 * @param {string} label
 * @param {Attributes} attributes
 * @param {(value: number) => void} changed
 * @param {{emptied?: () => void, wrong?: (value: number) => string}} [more] what an empty field means, if anything; and what else is wrong with a number
 */
export function numberField(label, attributes, changed, { emptied, wrong } = {}) {
  const input = h("input", { type: "number", "aria-label": label, title: label, ...attributes });
  const problem = () => {
    const typed = { text: input.value, number: input.valueAsNumber, bad: input.validity.badInput };
    const found = numberProblem(typed, attributes, emptied !== undefined);
    return found || (input.value !== "" && wrong?.(input.valueAsNumber)) || "";
  };
  input.addEventListener("input", () => {
    input.dataset.typing = "true";
    if (input.dataset.problem && !problem()) mark(input, "");
  });
  const commit = () => {
    if (!input.dataset.typing) return;
    const found = problem();
    mark(input, found && `${label} ${found}`);
    if (found) return;
    delete input.dataset.typing;
    if (input.value === "") emptied?.();
    else changed(input.valueAsNumber);
  };
  input.addEventListener("change", commit);
  input.addEventListener("blur", commit);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") commit();
    if (event.key === "Escape" && input.dataset.typing) {
      event.stopPropagation();
      forceNumber(input, input.dataset.last ?? "");
    }
  });
  return input;
}

/** Sets a field unless somebody writes in it. @param {HTMLInputElement} input @param {number | null} value */
export function setNumber(input, value) {
  const text = value === null ? "" : String(Number(value.toPrecision(6)));
  input.dataset.last = text;
  if (!input.dataset.typing) input.value = text;
}

/** Sets a field, whatever is written in it. @param {HTMLInputElement} input @param {string | number} value */
export function forceNumber(input, value) {
  delete input.dataset.typing;
  mark(input, "");
  input.value = String(value);
}
