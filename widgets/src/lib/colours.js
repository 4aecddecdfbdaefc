/** Colours: diverging with zero at nothing, negative red, positive blue; readable on light and dark. No DOM. */

const BLUE = "37, 99, 235";
const RED = "220, 38, 38";

/** Colours of the steered lines, one per layer. */
export const LINES = ["#2563eb", "#c2410c", "#15803d", "#9333ea", "#db2777", "#0e7490"];
export const GREY = "#888888";

/** How strong a value's colour is, from 0 to 1. @param {number} value @param {number} most */
export function strength(value, most) {
  if (!(most > 0) || !Number.isFinite(value)) return 0;
  return Math.min(Math.abs(value) / most, 1);
}

/** @param {number} value @param {number} most @returns {string} a CSS colour; "transparent" at zero and where nothing is known */
export function tint(value, most) {
  const size = strength(value, most);
  if (size === 0) return "transparent";
  return `rgba(${value < 0 ? RED : BLUE}, ${(size * 0.62).toFixed(3)})`;
}

/** Of what is not finite: no value has this colour. */
const AMBER = [217, 119, 6, 255];

/** Red, green, blue and opacity of a heatmap's cell, 0 to 255; amber where it is not finite. @param {number} value @param {number} most @returns {[number, number, number, number]} */
export function pixel(value, most) {
  if (Math.abs(value) === Infinity) return /** @type {[number, number, number, number]} */ (AMBER);
  const size = strength(value, most);
  return value < 0 ? [220, 38, 38, Math.round(size * 255)] : [37, 99, 235, Math.round(size * 255)];
}
