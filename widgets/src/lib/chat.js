/** One side's conversation, its tokens tinted. */

import { tint } from "./colours.js";
import { fill, h, write } from "./dom.js";
import { madeWith, notAnswered } from "./numbers.js";

/** @typedef {import("../types").Answer} Answer */
/** @typedef {import("../types").Turn} Turn */

/**
 * @param {string} side
 * @param {{hover: (side: string, position: number | null) => void, pin: (side: string, position: number) => void, edit: (turn: number, text: string, done: (saved: boolean) => void) => void, moved: () => void}} calls
 */
export function chatPane(side, calls) {
  /** @type {Map<number, HTMLElement>} */
  let spans = new Map();
  /** @type {Answer | null} */
  let drawn = null;
  let answerBody = h("div");
  let shownTokens = 0;
  let active = -1;
  const list = h("div");
  const body = h("div", { class: "cl-messages", tabindex: 0, role: "log", "aria-label": `${side} conversation; arrow keys walk over its tokens, Enter pins one` }, list);
  const newest = h("button", { type: "button", class: "cl-small cl-newest", "data-local": "", "aria-label": `go to the end of the ${side} conversation`, hidden: true }, "↓ newest");
  const waiting = h("div", { class: "cl-pending" });
  const problem = h("div", { class: "cl-error", role: "alert", hidden: true });
  const element = h("section", { class: `cl-pane cl-${side}`, "aria-label": side }, h("div", { class: "cl-pane-title" }, side, newest), body, waiting, problem);

  /** The messages that are not answered yet, as they stand there. */
  let openTexts = "[]";

  let following = true;
  let place = 0;

  /** Shows the end of the conversation, or what the user has scrolled to. */
  function follow() {
    if (!body.clientHeight) return; // not on the page
    body.scrollTop = following ? body.scrollHeight : place;
    place = body.scrollTop;
  }

  body.addEventListener("scroll", () => {
    if (!body.clientHeight) return;
    if (body.scrollHeight - body.clientHeight - body.scrollTop <= 4) following = true;
    else if (body.scrollTop < place - 1) following = false; // by the user's hand: contents that grow do not scroll
    place = body.scrollTop;
    newest.hidden = following;
  });
  newest.addEventListener("click", () => {
    following = true;
    newest.hidden = true;
    follow();
    body.focus({ preventScroll: true });
  });
  new ResizeObserver(() => {
    follow();
    calls.moved();
  }).observe(body);

  /** @param {number} position @param {string} text @param {boolean} [control] whether a message spells a special token here */
  function token(position, text, control = false) {
    const span = h("span", { class: `cl-token${control ? " cl-control" : ""}`, "data-position": position }, text);
    spans.set(position, span);
    return span;
  }

  /** @param {string} text @param {number} turn */
  function userBubble(text, turn) {
    const bubble = h("div", { class: "cl-text" });
    const change = h("button", { type: "button", class: "cl-small cl-edit", "aria-label": `edit message ${turn + 1} (${side})` }, "✎");
    const row = h("div", { class: "cl-message", "data-role": "user" }, h("span", { class: "cl-role" }, "user"), bubble, change);
    change.addEventListener("click", () => {
      const field = h("textarea", { rows: 2, "aria-label": `new text of message ${turn + 1} (${side})` });
      field.value = text;
      const save = h("button", { type: "button", class: "cl-small" }, "save");
      const leave = h("button", { type: "button", class: "cl-small" }, "cancel");
      const form = h("div", { class: "cl-edit-form" }, field, save, leave);
      const done = () => {
        const focused = form.contains(document.activeElement);
        form.remove();
        row.classList.remove("cl-editing");
        if (focused) change.focus({ preventScroll: true });
      };
      save.addEventListener("click", () => {
        save.disabled = true;
        calls.edit(turn, field.value, (saved) => {
          save.disabled = false;
          if (saved) done(); // else what was typed stays
        });
      });
      leave.addEventListener("click", done);
      field.addEventListener("keydown", (event) => {
        if (event.key === "Escape") {
          event.stopPropagation();
          done();
        }
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
          event.preventDefault();
          save.click();
        }
      });
      row.classList.add("cl-editing");
      row.append(form);
      field.focus();
    });
    return { row, bubble };
  }

  /** @param {Answer} answer @param {Turn[]} turns */
  function rebuild(answer, turns) {
    spans = new Map();
    const rows = [];
    let turn = 0;
    answer.messages.forEach((message, index) => {
      const band = answer.bands.find((each) => each.message === index);
      /** @type {(Node | string)[]} */
      let content = [message.content];
      if (band && band.start >= answer.first && band.end <= answer.first + answer.ids.length) {
        const texts = answer.texts.slice(band.start - answer.first, band.end - answer.first);
        if (texts.join("") === message.content) content = texts.map((text, at) => token(band.start + at, text, answer.special.includes(band.start + at)));
      }
      if (message.role === "user") {
        const { row, bubble } = userBubble(message.content, turn);
        fill(bubble, ...content);
        rows.push(row);
        turn += 1;
      } else {
        const made = message.role === "assistant" ? madeWith(turns[turn - 1], side) : null;
        rows.push(h("div", { class: "cl-message", "data-role": message.role }, h("span", { class: "cl-role" }, message.role), h("div", { class: "cl-text" }, ...content), made && h("div", { class: "cl-note cl-made" }, made)));
      }
    });
    answerBody = h("div", { class: "cl-text cl-answer", "data-side": side }, answer.head);
    rows.push(h("div", { class: "cl-message", "data-role": "assistant" }, h("span", { class: "cl-role" }, "assistant"), answerBody));
    fill(list, ...rows);
    shownTokens = 0;
  }

  body.addEventListener("pointerover", (event) => {
    const span = event.target instanceof Element ? event.target.closest(".cl-token") : null;
    calls.hover(side, span instanceof HTMLElement ? Number(span.dataset.position) : null);
  });
  body.addEventListener("pointerleave", () => calls.hover(side, null));
  body.addEventListener("click", (event) => {
    const span = event.target instanceof Element ? event.target.closest(".cl-token") : null;
    if (span instanceof HTMLElement) calls.pin(side, Number(span.dataset.position));
  });
  body.addEventListener("keydown", (event) => {
    if (event.target !== body) return;
    const positions = [...spans.keys()].sort((left, right) => left - right);
    if (!positions.length) return;
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (step) {
      const at = positions.indexOf(active);
      active = positions[Math.min(Math.max(at < 0 ? 0 : at + step, 0), positions.length - 1)];
      calls.hover(side, active);
    } else if (event.key === "Enter" && spans.has(active)) calls.pin(side, active);
    else return;
    event.preventDefault();
  });

  return {
    element,
    /** Where a token stands on the page. @param {number} position */
    span(position) {
      return spans.get(position) ?? null;
    },
    /** @param {Answer | null} answer @param {number | null} parts index of the answer's first token that differs @param {Turn[]} turns */
    text(answer, parts, turns) {
      if (!answer) {
        drawn = null;
        spans = new Map();
        fill(list);
      } else {
        if (!drawn || drawn.number !== answer.number || drawn.first !== answer.first || answer.texts.length < shownTokens) rebuild(answer, turns);
        const from = Math.max(answer.prompt - answer.first, 0);
        for (let at = Math.max(from, shownTokens); at < answer.texts.length; at += 1) answerBody.append(token(answer.first + at, answer.texts[at]));
        // tokens that are parts of characters are written by the first of their row, which may have been incomplete then
        let first = Math.max(from, shownTokens - 1);
        while (first > from && answer.texts[first] === "") first -= 1;
        for (let at = first; at < shownTokens; at += 1) write(/** @type {Element} */ (spans.get(answer.first + at)), answer.texts[at]);
        shownTokens = answer.texts.length;
        drawn = answer;
        for (const span of body.querySelectorAll(".cl-part")) {
          span.classList.remove("cl-part");
          span.removeAttribute("title");
        }
        const marked = parts === null ? null : spans.get(answer.prompt + parts);
        if (marked) {
          marked.classList.add("cl-part");
          marked.title = "from here on the two answers differ";
        }
      }
      const known = answer ? answer.messages.filter((each) => each.role === "user").map((each) => each.content) : [];
      const open = notAnswered(known, turns.map((turn) => turn.user));
      follow();
      if (JSON.stringify(open) === openTexts) return; // one of them may be edited
      openTexts = JSON.stringify(open);
      fill(waiting, ...open.map((text, at) => {
        const { row, bubble } = userBubble(text, turns.length - open.length + at);
        fill(bubble, text);
        return row;
      }));
    },
    /**
     * Puts a note beside a token, inside the conversation: it scrolls with its token and covers no control.
     *
     * @param {HTMLElement} note @param {number} position @returns {boolean} whether the token is there
     */
    note(note, position) {
      const span = spans.get(position);
      if (!span) return false;
      note.classList.remove("cl-tip-below");
      note.style.left = note.style.top = "0";
      if (note.parentNode !== body) body.append(note);
      const origin = list.getBoundingClientRect();
      /** @param {DOMRect} box */
      const inside = (box) => ({ left: box.left - origin.left, top: box.top - origin.top, width: box.width, height: box.height });
      const at = inside(span.getClientRects()[0] ?? span.getBoundingClientRect());
      const edges = [...list.querySelectorAll(".cl-edit")].map((each) => inside(each.getBoundingClientRect())).filter((each) => each.width > 0);
      const right = Math.min(origin.width, ...edges.map((each) => each.left - 2)); // left of the buttons of all messages
      note.style.maxWidth = `${Math.min(320, right)}px`;
      const { width, height } = note.getBoundingClientRect();
      const taken = [...list.querySelectorAll("button, textarea")].map((each) => inside(each.getBoundingClientRect())).filter((each) => each.width > 0);
      const lefts = [at.left, at.left + at.width - width, 0].map((left) => Math.max(0, Math.min(left, right - width)));
      const places = [
        ...lefts.map((left) => ({ left, top: at.top + at.height + 2 })),
        ...lefts.map((left) => ({ left, top: at.top - height - 2 })),
        { left: at.left + at.width + 4, top: at.top },
        { left: at.left - width - 4, top: at.top },
      ];
      const found = places.find(
        ({ left, top }) =>
          left >= 0 && left + width <= origin.width + 1 && top >= 0 && top + height <= origin.height + 1 &&
          !taken.some((each) => left < each.left + each.width && each.left < left + width && top < each.top + each.height && each.top < top + height),
      );
      if (found) {
        note.style.left = `${found.left}px`;
        note.style.top = `${found.top}px`;
      } else note.classList.add("cl-tip-below"); // there is no room: it stands below the conversation
      return true;
    },
    /** @param {(position: number) => number} valueOf NaN where nothing is known, infinite where it is not finite @param {number} most */
    tint(valueOf, most) {
      for (const [position, span] of spans) {
        const value = valueOf(position);
        span.style.backgroundColor = tint(value, most);
        span.classList.toggle("cl-negative", Number.isFinite(value) && value < -0.25 * most);
        span.classList.toggle("cl-overflow", Math.abs(value) === Infinity);
      }
    },
    /** @param {number | null} pinned @param {number | null} hovered */
    mark(pinned, hovered) {
      for (const span of body.querySelectorAll(".cl-pinned, .cl-hovered")) span.classList.remove("cl-pinned", "cl-hovered");
      if (pinned !== null) spans.get(pinned)?.classList.add("cl-pinned");
      if (hovered !== null) spans.get(hovered)?.classList.add("cl-hovered");
    },
    /** @param {{stale: boolean, error: string | null}} state */
    state({ stale, error }) {
      element.classList.toggle("cl-stale", stale);
      element.setAttribute("aria-busy", String(stale));
      element.classList.toggle("cl-failed", error !== null); // then a message that was not answered can be edited
      body.hidden = error !== null;
      problem.hidden = error === null;
      write(problem, error ?? "");
      follow();
    },
  };
}
