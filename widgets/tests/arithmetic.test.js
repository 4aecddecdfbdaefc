import assert from "node:assert/strict";
import { test } from "node:test";

import { pixel, strength, tint } from "../src/lib/colours.js";
import { numberProblem } from "../src/lib/fields.js";
import { bandMean, cosines, largest, leftOut, madeWith, notAnswered, numbersOf, overflowed, parting, perMessage, unpack } from "../src/lib/numbers.js";
import { between, fraction, keyMove, levelOf, ranges, short, ticks, valueAt, withRange } from "../src/lib/scales.js";
import { contrast, palette } from "../src/lib/theme.js";
import { cellAt, dosesFrom, mostEffect, shownOf } from "../src/lib/sweeps.js";

/** @param {number[][]} rows */
function packed(rows) {
  const data = new DataView(new ArrayBuffer(rows.flat().length * 4));
  rows.flat().forEach((value, at) => data.setFloat32(4 * at, value, true));
  return { shape: [rows.length, rows[0].length], data };
}

/** @param {Partial<import("../src/types").Answer>} fields @returns {import("../src/types").Answer} */
function answer(fields) {
  return { number: 1, messages: [], text: "", finish: null, prompt: 2, first: 0, ids: [5, 6, 7, 8], texts: [], head: "", bands: [], special: [], layers: [3, 9], direction: "d", norm: packed([[8, 8, 4], [4, 4, 4]]), projection: packed([[2, -2, 2], [2, 2, 0]]), ...fields };
}

test("a value's place on a slider and back", () => {
  assert.equal(fraction(0.5, -2, 2), 0.625);
  assert.equal(fraction(9, -2, 2), 1);
  assert.equal(valueAt(0.625, -2, 2, 0.01), 0.5);
  assert.equal(valueAt(0.6049, -2, 2, 0.01), 0.42);
  assert.equal(valueAt(-1, -2, 2, 0.01), -2);
  assert.ok(Object.is(valueAt(0.5, -2, 2, 0.01), 0), "no minus zero");
});

test("keys move by a step, with shift by ten, and stay inside", () => {
  assert.equal(keyMove(0.41, "ArrowRight", false, 0.01, -2, 2), 0.42);
  assert.equal(keyMove(0.41, "ArrowLeft", true, 0.01, -2, 2), 0.31);
  assert.equal(keyMove(1.95, "ArrowUp", true, 0.01, -2, 2), 2);
  assert.equal(keyMove(0, "Home", false, 0.01, -2, 2), -2);
  assert.equal(keyMove(0, "a", false, 0.01, -2, 2), null);
});

test("doses have levels on both sides of zero", () => {
  assert.deepEqual([0.69, 0.7, -0.7, 1.49, -1.5].map(levelOf), ["", "high", "high", "high", "extreme"]);
});

test("numbers and layers in few characters", () => {
  assert.deepEqual([0, 18.3456, -0.5, 123456, 1e-5, null, NaN].map(short), ["0", "18.3", "-0.5", "1.2e+5", "1.0e-5", "–", "–"]);
  assert.equal(ranges([9, 6, 7, 8, 3]), "3, 6–9");
  assert.deepEqual([[0.4001, 0.4], [2, 1]].map(between), ["0.4", "1 to 2"]);
  assert.deepEqual(ticks(-1, 1, 4), [-1, -0.5, 0, 0.5, 1]);
  assert.deepEqual(ticks(0, 137, 4), [0, 50, 100]);
});

test("a stretch of layers is switched on and off, in either direction", () => {
  assert.deepEqual(withRange([2], 7, 5, true), [2, 5, 6, 7]);
  assert.deepEqual(withRange([2, 5, 6, 7], 6, 9, false), [2, 5]);
});

test("colours are nothing at zero, red below and blue above", () => {
  assert.equal(tint(0, 3), "transparent");
  assert.equal(tint(NaN, 3), "transparent");
  assert.equal(tint(1, 0), "transparent");
  assert.equal(tint(1.5, 3), "rgba(37, 99, 235, 0.310)");
  assert.equal(tint(-9, 3), "rgba(220, 38, 38, 0.620)");
  assert.equal(strength(-1.5, 3), 0.5);
  assert.deepEqual(pixel(-3, 3), [220, 38, 38, 255]);
});

test("values come as float32, whatever stands beside them", () => {
  const values = [25057, 0.01, 1e-30, 3e38, Infinity, -Infinity, NaN];
  assert.deepEqual(unpack(packed([values])), [new Float32Array(values)]);
  assert.equal(unpack(null), null);
});

test("a value that is not finite is marked and changes no other", () => {
  const numbers = numbersOf(answer({ norm: packed([[8, Infinity, 4], [4, 4, 4]]), projection: packed([[9, 2, Infinity], [NaN, NaN, NaN]]) }));
  assert.ok(numbers?.projection);
  assert.equal(largest([numbers], [3, 9]), 2);
  assert.deepEqual([0, 1, 2, 3, -1].map((at) => overflowed(numbers.projection?.[0] ?? null, at)), [false, false, true, false, false]);
  assert.equal(overflowed(numbers.projection[1], 1), false, "a row of only NaN was not read");
  assert.equal(overflowed(new Float32Array([1, NaN]), 1), true);
  assert.deepEqual([...cosines(numbers, 0)], [1.125, Infinity, Infinity]);
  assert.ok(cosines(numbers, 1).every(Number.isNaN));
  const band = { message: 0, role: "user", start: 0, end: 3 };
  assert.equal(leftOut(numbers.norm[0], 0, band), 1);
  assert.deepEqual(perMessage(numbers, 3, [band], "norm"), [4]);
  assert.deepEqual(pixel(-Infinity, 1), [217, 119, 6, 255]);
  assert.equal(tint(Infinity, 1), "transparent");
  assert.deepEqual([Infinity, -Infinity].map(short), ["∞", "−∞"]);
});

test("answers part at their first different token", () => {
  assert.equal(parting(answer({}), answer({ ids: [5, 6, 7, 9] })), 1);
  assert.equal(parting(answer({}), answer({ ids: [5, 6, 7] })), null);
  assert.equal(parting(answer({}), answer({ prompt: 1, ids: [5, 7, 9] })), 1, "prompts may differ");
  assert.equal(parting(answer({}), answer({ first: 1, ids: [6, 7, 9] })), 1);
  const late = answer({ first: 3, ids: [8, 4], head: "seven" });
  assert.equal(parting(late, { ...late, ids: [8, 5] }), 2, "counted from the answer's beginning, which is a text");
  assert.equal(parting(late, { ...late, ids: [8, 5], head: "other" }), null, "where they part is not shown any more");
});

test("the largest value leaves out position 0", () => {
  const numbers = numbersOf(answer({}));
  assert.equal(largest([numbers, null], [9]), 2);
  assert.equal(largest([numbersOf(answer({ projection: packed([[4, 0, 0], [2, 2, 0]]) }))], [3]), 0);
});

test("a message's mean leaves out position 0 and what is not known", () => {
  const band = { message: 0, role: "user", start: 0, end: 3 };
  assert.equal(bandMean(new Float32Array([100, 2, 4]), 0, band), 3);
  assert.equal(bandMean(new Float32Array([2, NaN]), 1, band), 2);
  assert.ok(Number.isNaN(bandMean(new Float32Array([]), 5, band)));
  const numbers = numbersOf(answer({}));
  assert.ok(numbers);
  assert.deepEqual(perMessage(numbers, 3, [band], "norm"), [6]);
  assert.deepEqual([...cosines(numbers, 0)], [0.25, -0.25, 0.5]);
  assert.deepEqual(perMessage(numbers, 3, [band], "cosine"), [0.125]);
  assert.deepEqual(perMessage(numbers, 4, [band], "norm"), [NaN]);
});

test("messages that are not answered yet", () => {
  assert.deepEqual(notAnswered(["a"], ["a", "b"]), ["b"]);
  assert.deepEqual(notAnswered(["a", "b"], ["a", "c"]), ["c"]);
  assert.deepEqual(notAnswered(["a"], ["a"]), []);
});

test("doses are read from a text", () => {
  assert.deepEqual(dosesFrom("1, -0.5;.25 1 +2e-1"), { numbers: [-0.5, 0.2, 0.25, 1], problem: "" });
  for (const [text, got] of [["0.1, abc", "abc"], ["0x10", "0x10"], ["Infinity", "Infinity"], ["1e40", "1e40"], ["0.1.2", "0.1.2"], [" ", "nothing"]]) {
    assert.deepEqual(dosesFrom(text), { numbers: null, problem: `must be numbers with commas between, got ${got}` });
  }
});

test("a number field says what is wrong in it", () => {
  const typed = (/** @type {string} */ text, bad = false) => ({ text, number: text === "" ? NaN : Number(text), bad });
  const tokens = { min: 1, step: 1 };
  assert.equal(numberProblem(typed("12"), tokens, false), "");
  assert.equal(numberProblem(typed("1.5"), tokens, false), "must be a whole number from 1 on, got 1.5");
  assert.equal(numberProblem(typed("0"), tokens, false), "must be a whole number from 1 on, got 0");
  assert.equal(numberProblem(typed("1e20"), tokens, false), "must be a whole number from 1 on, got 1e20");
  assert.equal(numberProblem(typed(""), tokens, false), "must be a whole number from 1 on, got nothing");
  assert.equal(numberProblem(typed("", true), { min: 0, max: 5, step: 0.1 }, false), "must be a number from 0 to 5, got something else");
  assert.equal(numberProblem(typed(""), { step: "any" }, true), "");
  assert.equal(numberProblem(typed("1e39"), { step: "any" }, true), "must be a number, got 1e39");
  assert.equal(numberProblem(typed("0.375"), { step: 0.01 }, false), "");
});

test("the colour of a sweep is scaled by answers that hold together", () => {
  const cell = { layer: 1, dose: 0.5, scale: 1, text: "", effect: -3, inside: 0, perplexity: 1, repetition: 0, tokens: 1, broken: false, prompt_index: 0 };
  const broken = { ...cell, dose: 1, effect: 90, broken: true };
  assert.equal(mostEffect([cell, broken]), 3);
  assert.equal(mostEffect([broken]), 90);
  assert.equal(cellAt([cell, broken], 1, 1), broken);
  assert.equal(cellAt([cell], 2, 0.5), null);
  const scored = { ...cell, score: 7, score_change: -2, score_spread: 0.5 };
  assert.deepEqual(shownOf(scored, true), { shade: -2, value: 7, spread: 0.5 });
  assert.deepEqual(shownOf(scored, false), { shade: -3, value: -3, spread: null });
  assert.equal(mostEffect([scored], true), 2);
});

test("an earlier answer says its own values, or that it has none", () => {
  const turn = { user: "a", baseline: "b", steered: null, made: { baseline: "not steered · seed 7 · T 0" } };
  assert.equal(madeWith(turn, "baseline"), "not steered · seed 7 · T 0");
  assert.equal(madeWith(turn, "steered"), "no answer");
  assert.equal(madeWith({ ...turn, steered: "c" }, "steered"), "given, not made here");
});

test("texts can be read on every ground", () => {
  const channel = (/** @type {string} */ colour) => colour.match(/\d+/g)?.map(Number) ?? [];
  for (let red = 0; red <= 255; red += 51) {
    for (let green = 0; green <= 255; green += 51) {
      for (let blue = 0; blue <= 255; blue += 51) {
        const { colours } = palette([red, green, blue]);
        for (const text of ["fg", "dim", "blue-text", "amber-text", "red-text"]) {
          for (const ground of ["bg", "soft"]) {
            const found = contrast(channel(colours[text]), channel(colours[ground]));
            assert.ok(found >= 4.5, `${text} on ${ground} of ${red}, ${green}, ${blue}: ${found}`);
          }
        }
      }
    }
  }
  assert.equal(palette([30, 30, 30]).dark, true);
  assert.equal(palette([253, 246, 227]).dark, false);
});
