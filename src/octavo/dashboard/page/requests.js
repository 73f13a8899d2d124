// The table of requests: who runs, who waits and why, and what each costs.

import { css } from "./colours.js";
import { seconds, whole } from "./format.js";

const MOST_ROWS = 100;

const COLUMNS = [
  (one) => (one.why ? `${one.state}: ${one.why}` : one.state),
  (one) => whole(one.blocks),
  (one) => (one.shared_blocks ? whole(one.shared_blocks) : "–"),
  (one) => whole(one.block_seconds),
  (one) => whole(one.prompt_tokens),
  (one) => (one.cached_tokens ? whole(one.cached_tokens) : "–"),
  (one) => `${whole(one.output_tokens)} of ${whole(one.max_tokens)}`,
  (one) => (one.preemptions ? whole(one.preemptions) : "–"),
  (one) => seconds(one.age_s),
  (one) => (one.queue_s == null ? "–" : seconds(one.queue_s)),
];

const ORDER = { running: 0, preempted: 1, waiting: 2 };

export class RequestTable {
  /** `onChoose(number or null)`: the blocks of that request shall stand out. */
  constructor(body, more, onChoose) {
    this.body = body;
    this.more = more;
    this.onChoose = onChoose;
    this.rows = new Map();
    this.chosen = null;
  }

  show(frame, palette) {
    const all = frame.requests ?? [];
    const shown = [...all]
      .sort((a, b) => (ORDER[a.state] ?? 3) - (ORDER[b.state] ?? 3))
      .slice(0, MOST_ROWS);
    const left = new Set(this.rows.keys());
    for (const one of shown) left.delete(one.no);
    for (const number of left) {
      this.rows.get(number).line.remove();
      this.rows.delete(number);
    }
    let before = null;
    for (const one of shown) {
      const row = this.rows.get(one.no) ?? this.#add(one);
      this.#fill(row, one, palette);
      const place = before === null ? this.body.firstChild : before.line.nextSibling;
      if (place !== row.line) this.body.insertBefore(row.line, place);
      before = row;
    }
    if (left.has(this.chosen)) this.#choose(null);
    const num = Math.max(all.length, frame.num_requests ?? 0) - shown.length;
    this.more.textContent =
      all.length === 0 ? "No requests at the moment." : num > 0 ? `and ${whole(num)} more` : "";
  }

  #add(one) {
    const line = document.createElement("tr");
    const head = document.createElement("th");
    head.scope = "row";
    const button = document.createElement("button");
    button.type = "button";
    button.className = "request";
    button.setAttribute("aria-pressed", "false");
    button.title = "Show its blocks";
    const swatch = document.createElement("i");
    swatch.className = "swatch";
    const name = document.createElement("span");
    button.append(swatch, name);
    button.addEventListener("click", () => this.#choose(this.chosen === one.no ? null : one.no));
    head.append(button);
    line.append(head);
    const cells = COLUMNS.map((_, i) => {
      const cell = line.insertCell();
      if (i > 0) cell.className = "number";
      return cell;
    });
    cells[0].className = "state";
    const row = { line, button, swatch, name, cells };
    this.rows.set(one.no, row);
    return row;
  }

  #fill(row, one, palette) {
    set(row.name, one.client ? `${one.id} · ${one.client}` : one.id);
    row.name.title = one.id;
    row.line.dataset.state = one.state;
    const isIn = one.blocks > 0;
    row.swatch.style.background = isIn ? css(palette.request(one.no)) : "transparent";
    COLUMNS.forEach((textOf, i) => set(row.cells[i], textOf(one)));
  }

  #choose(number) {
    this.rows.get(this.chosen)?.button.setAttribute("aria-pressed", "false");
    this.chosen = number;
    this.rows.get(number)?.button.setAttribute("aria-pressed", "true");
    this.onChoose(number);
  }
}

function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
