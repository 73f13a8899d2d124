// What is in a block: pointed at, tapped, or reached by the arrow keys.

import { CACHED, STATE_NAMES, USED } from "./frames.js";
import { brief, seconds, whole } from "./format.js";
import { groupText, hasGroups } from "./groups.js";

const PATIENCE_MS = 120; // how long a pointer rests before the server is asked

const positions = ({ start, end }) => {
  if (end <= start) return "nothing in it yet";
  return end === start + 1 ? `position ${start}` : `positions ${start}–${end - 1}`;
};

export class Inspector {
  constructor(panel, blockUrl) {
    this.panel = panel;
    this.blockUrl = blockUrl;
    this.block = null;
    this.isKept = false; // by key or tap: it stays when the pointer leaves
    this.answer = null;
    this.timer = null;
    const canvas = panel.at(".grid");
    canvas.addEventListener("pointermove", (event) => {
      if (event.pointerType === "mouse") this.#point(event);
    });
    canvas.addEventListener("pointerdown", (event) => {
      this.isKept = true;
      this.#point(event);
    });
    canvas.addEventListener("pointerleave", () => {
      if (!this.isKept) this.show(null);
    });
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("blur", () => {
      this.isKept = false;
      this.show(null);
    });
  }

  #point(event) {
    this.show(this.panel.grid.blockAt(event.clientX, event.clientY));
  }

  #key(event) {
    const { columns } = this.panel.grid;
    const last = this.panel.pool.numBlocks - 1;
    const moves = {
      ArrowLeft: -1,
      ArrowRight: 1,
      ArrowUp: -columns,
      ArrowDown: columns,
      PageUp: -10 * columns,
      PageDown: 10 * columns,
      Home: -Infinity,
      End: Infinity,
    };
    if (event.key === "Escape") {
      this.isKept = false;
      this.show(null);
    } else if (event.key === "Enter" && this.block !== null) {
      this.#ask(0);
    } else if (event.key in moves) {
      this.isKept = true;
      const from = this.block ?? (moves[event.key] > 0 ? -1 : 0);
      const isFirst = this.block === null && Math.abs(moves[event.key]) !== Infinity;
      const to = isFirst ? 0 : from + moves[event.key];
      this.show(Math.min(last, Math.max(0, to)));
    } else {
      return;
    }
    event.preventDefault();
    this.#say();
  }

  /** Look at a block (null: at none). */
  show(block) {
    if (block === this.block) return;
    this.block = block;
    this.answer = null;
    this.panel.at(".tip").hidden = this.panel.at(".cursor").hidden = block === null;
    clearTimeout(this.timer);
    if (block === null) return;
    this.refresh();
    this.place();
    if (this.panel.pool.state[block] !== 0) this.#ask(PATIENCE_MS);
  }

  #ask(waitMs) {
    if (this.panel.shownTime !== null) return; // the server knows only what is in it now
    clearTimeout(this.timer);
    const { block } = this;
    this.timer = setTimeout(async () => {
      try {
        const answer = await fetch(this.blockUrl + block);
        const content = answer.ok ? await answer.json() : null;
        if (this.block !== block) return;
        this.answer = content;
        this.refresh();
        this.place();
        this.#say();
      } catch {
        // What the frames tell is there; its tokens are not to be had now.
      }
    }, waitMs);
  }

  /** The lines about the block. */
  lines() {
    const { pool, frame } = this.panel;
    const { block } = this;
    const state = pool.state[block];
    const about = [];
    if (state === USED) {
      const number = pool.owner[block];
      const one = frame.requests?.find((request) => request.no === number);
      about.push(one ? `request ${brief(one.id)}` : `request number ${number}`);
      if (one?.client) about.push(`of ${one.client}`);
    }
    const refs = pool.refs[block];
    if (state === USED && refs === 0) about.push("set aside for a fork");
    if (state === CACHED && refs > 0) about.push("pinned");
    if (refs > 0) about.push(`${refs} reference${refs === 1 ? "" : "s"}`);
    if (state === USED || pool.fill[block] > 0) {
      about.push(`${pool.fill[block]} of ${frame.about.block_size} slots filled`);
    }
    const age = frame.time - pool.since[block];
    about.push(Number.isFinite(age) ? `for ${seconds(age)}` : "since before this page was open");
    const found = [`Block ${whole(block)}: ${STATE_NAMES[state]}`, about.join(", ")];
    const owners = this.answer?.owners ?? [];
    if (owners.length > 0) {
      if (hasGroups(frame.about)) {
        found.push(`Holds KV of ${groupText(frame.about, owners[0].group)}`);
      }
      const names = owners.slice(0, 4).map((owner) => {
        return `${brief(owner.id)} (its block ${owner.index}, ${positions(owner)})`;
      });
      if (owners.length > 4) names.push(`and ${owners.length - 4} more`);
      found.push(`In the tables of ${names.join(", ")}`);
    }
    return found;
  }

  refresh() {
    if (this.block === null) return;
    if (this.block >= this.panel.pool.numBlocks) return this.show(null);
    const lines = this.lines();
    const key = JSON.stringify([lines, this.answer?.token_ids, this.answer?.text]);
    if (key === this.key) return;
    this.key = key;
    const parts = lines.map((line, i) => {
      const part = document.createElement(i === 0 ? "b" : "span");
      part.textContent = line;
      return part;
    });
    const { text, token_ids: tokens } = this.answer ?? {};
    if (text || tokens?.length) {
      const content = document.createElement("q");
      content.className = "content";
      content.textContent = text ?? tokens.join(" ");
      parts.push(content);
    }
    this.panel.at(".tip").replaceChildren(...parts);
  }

  /** Put the frame around the block, and the text beside it. */
  place() {
    if (this.block === null) return;
    const { left, top, size } = this.panel.grid.boxOf(this.block);
    const cursor = this.panel.at(".cursor"), tip = this.panel.at(".tip");
    Object.assign(cursor.style, {
      left: `${left}px`, top: `${top}px`, width: `${size}px`, height: `${size}px`,
    });
    const room = this.panel.at(".blocks").clientWidth;
    const x = Math.max(0, Math.min(left, room - tip.offsetWidth));
    const isLow = top > tip.offsetHeight + 10;
    tip.style.left = `${x}px`;
    tip.style.top = isLow ? `${top - tip.offsetHeight - 8}px` : `${top + size + 8}px`;
  }

  /** For a screen reader, when the keys moved. */
  #say() {
    if (!this.isKept) return;
    const content = this.answer?.text ? `. Tokens: ${this.answer.text}` : "";
    const text = this.block === null ? "" : this.lines().join(". ") + content;
    this.panel.text(".cursor-text", text);
  }
}
