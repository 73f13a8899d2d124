// Groups of layers that keep their KV for different times: what each holds of the pool.

import { bytes, ranges, whole } from "./format.js";

/** Whether there is more to tell than that all layers keep everything. */
export const hasGroups = ({ windows = [0] }) => windows.length > 1 || windows[0] !== 0;

const keeps = (window) => (window ? `last ${whole(window)}` : "all");

/** `layers 5, 11, 17, which keep all tokens`; the group's number where layers are not known. */
export function groupText({ layers, windows }, group) {
  const which = layers?.[group] ? `layers ${ranges(layers[group])}` : `group ${group} of layers`;
  const keep = layers?.[group]?.length > 1 ? "which keep" : "which keeps";
  return `${which}, ${keep} ${windows[group] ? "the " : ""}${keeps(windows[group])} tokens`;
}

export class GroupTable {
  /** `part` is hidden while there is nothing to tell. */
  constructor(part) {
    this.part = part;
    this.body = part.querySelector("tbody");
    this.about = null;
  }

  show({ about, groups }) {
    if (about !== this.about) this.#begin(about);
    if (this.part.hidden || groups === undefined) return;
    groups.forEach(([numBlocks, numBehind], group) => {
      const size = about.bytes_per_block ? bytes(numBlocks * about.bytes_per_block) : "–";
      const back = about.windows[group] ? whole(numBehind) : "–";
      const cells = this.body.rows[group].cells;
      [whole(numBlocks), size, back].forEach((text, i) => {
        if (cells[i + 2].textContent !== text) cells[i + 2].textContent = text;
      });
    });
  }

  #begin(about) {
    this.about = about;
    this.part.hidden = !hasGroups(about);
    if (this.part.hidden) return;
    const rows = about.windows.map((window, group) => {
      const row = document.createElement("tr");
      const head = document.createElement("th");
      head.scope = "row";
      head.textContent = about.layers?.[group] ? ranges(about.layers[group]) : `group ${group}`;
      row.append(head);
      for (const name of ["keeps", "number", "number", "number"]) {
        const cell = document.createElement("td");
        cell.className = name;
        row.append(cell);
      }
      row.cells[1].textContent = keeps(window);
      return row;
    });
    this.body.replaceChildren(...rows);
  }
}
