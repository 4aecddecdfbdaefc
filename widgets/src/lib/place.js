/** A panel's place on the page: its keys, its colours, what is wrong in its fields, and whether anything answers it. */

import { write } from "./dom.js";
import { problemLine } from "./fields.js";
import { followColours, keepKeys } from "./host.js";
import { switchOf } from "./link.js";

/**
 * Puts a panel on the page.
 *
 * @param {HTMLElement} el
 * @param {HTMLElement} root the panel
 * @param {{error: HTMLElement, ended: HTMLElement, link: {ended: string, dead: boolean}}} parts
 *   `error`: shows errors of the kernel, those of fields follow it; `ended`: says why nothing answers
 */
export function place(el, root, { error, ended, link }) {
  error.after(problemLine(root));
  el.append(root);
  const leaveKeys = keepKeys(root);
  const leaveColours = followColours(root);
  const switchOff = switchOf(root);
  return {
    /** Says that nothing answers, if so, and switches off what needs an answer. */
    drawEnded() {
      write(ended, link.ended);
      ended.hidden = !link.ended;
      switchOff(link.dead);
    },
    leave() {
      leaveKeys();
      leaveColours();
    },
  };
}
