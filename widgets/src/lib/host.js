/** The page around a panel: its keys and its colours. */

import { assign } from "./dom.js";
import { palette } from "./theme.js";

const SUPPRESS = "data-lm-suppress-shortcuts";

/**
 * Keeps keys from the page around, so that no shortcut of a notebook acts while anything in the panel has the focus.
 *
 * JupyterLab looks for shortcuts from the focused element outwards, either when the event comes to the document or
 * before it comes here; so the event ends at the panel, and the focused element is marked by itself too.
 *
 * @param {HTMLElement} root
 */
export function keepKeys(root) {
  /** @type {Element | null} */
  let focused = null;
  assign(root, { tabindex: -1, [SUPPRESS]: "true" });
  for (const event of ["keydown", "keypress", "keyup"]) root.addEventListener(event, (pressed) => pressed.stopPropagation());
  root.addEventListener("focusin", (event) => {
    focused = /** @type {Element} */ (event.target);
    focused.setAttribute(SUPPRESS, "true");
  });
  const gone = () => focused !== null && (!focused.isConnected || focused.matches(":disabled"));
  root.addEventListener("focusout", (event) => {
    setTimeout(() => { // a browser may tell of the loss before the control is gone
      if (focused === event.target && focused !== document.activeElement && !gone()) focused = null;
    });
  });
  // the focus of a control that goes, or is disabled, would fall to the page
  const observer = new MutationObserver(() => {
    if (!gone()) return;
    const held = [document.body, null, focused].includes(document.activeElement); // a control keeps it for a moment after it is disabled
    focused = null;
    if (held) root.focus({ preventScroll: true });
  });
  observer.observe(root, { childList: true, subtree: true, attributes: true, attributeFilter: ["disabled"] });
  return () => observer.disconnect();
}

/** @type {CanvasRenderingContext2D | null} */
let canvas = null;

/** @param {string} colour any CSS colour @returns {[number, number, number, number]} red, green, blue (0 to 255) and opacity (0 to 1) */
function channels(colour) {
  canvas ??= document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const context = canvas;
  if (!context) return [0, 0, 0, 0];
  context.clearRect(0, 0, 1, 1);
  context.fillStyle = "transparent";
  context.fillStyle = colour;
  context.fillRect(0, 0, 1, 1);
  const [red, green, blue, opacity] = context.getImageData(0, 0, 1, 1).data;
  return [red, green, blue, opacity / 255];
}

/** What the page shows behind an element: the backgrounds of all that contain it, or what its variables say. @param {Element} element */
function groundOf(element) {
  const layers = [];
  /** @type {Node | null} */
  let at = element.parentNode;
  while (at) {
    if (at instanceof Element) {
      const found = channels(getComputedStyle(at).backgroundColor);
      if (found[3] > 0) layers.push(found);
      if (found[3] === 1) break;
    }
    at = at instanceof ShadowRoot ? at.host : at.parentNode;
  }
  if (!layers.length || layers[layers.length - 1][3] < 1) {
    const style = getComputedStyle(element);
    const named = ["--jp-layout-color1", "--vscode-notebook-outputContainerBackgroundColor", "--vscode-editor-background"].map((name) => style.getPropertyValue(name).trim());
    const probe = document.createElement("span");
    probe.style.backgroundColor = "Canvas";
    element.append(probe);
    layers.push(channels(named.find((colour) => colour && channels(colour)[3] === 1) ?? getComputedStyle(probe).backgroundColor));
    probe.remove();
  }
  return layers.reduceRight((below, top) => below.map((each, index) => top[index] * top[3] + each * (1 - top[3])), [255, 255, 255]);
}

/**
 * Gives the panel colours that can be read on what the page shows behind it, now and when that changes. No host's
 * marker of a dark theme is needed for it.
 *
 * @param {HTMLElement} root
 */
export function followColours(root) {
  let known = "";
  let timers = /** @type {number[]} */ ([]);
  const draw = () => {
    if (!root.isConnected) return;
    const ground = groundOf(root).map(Math.round);
    if (String(ground) === known) return;
    known = String(ground);
    const { dark, colours } = palette(ground);
    root.dataset.theme = dark ? "dark" : "light";
    for (const [name, colour] of Object.entries(colours)) root.style.setProperty(`--cl-${name}`, colour);
  };
  const soon = () => {
    timers.forEach((timer) => clearTimeout(timer));
    timers = [0, 150, 600, 2000].map((wait) => window.setTimeout(draw, wait)); // style sheets come after the mark of a theme
  };
  const observer = new MutationObserver(soon);
  for (const each of [document.documentElement, document.body]) observer.observe(each, { attributes: true });
  observer.observe(document.head, { childList: true });
  const size = new ResizeObserver(draw);
  size.observe(root);
  const media = matchMedia("(prefers-color-scheme: dark)");
  media.addEventListener("change", soon);
  soon();
  return () => {
    timers.forEach((timer) => clearTimeout(timer));
    observer.disconnect();
    size.disconnect();
    media.removeEventListener("change", soon);
  };
}
