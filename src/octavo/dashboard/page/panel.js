// One source on the page: everything that is shown of it, at the moment that is looked at.

import { lines, stacked, timeAt } from "./charts.js";
import { History, Pool, TERMS, summary } from "./frames.js";
import { brief, bytes, percent, seconds, short, whole } from "./format.js";
import { Grid } from "./grid.js";
import { GroupTable } from "./groups.js";
import { Inspector } from "./inspector.js";
import { RequestTable } from "./requests.js";

const NUM_EVENTS = 40;
const TERM_NAMES = {
  tokens: "tokens",
  reserved: "reserved",
  internal: "internal fragmentation",
  external: "external fragmentation",
  cached: "cached",
  free: "free",
};

export class Panel {
  /** `onSeek(seconds)`: somebody points at that time in a chart; `onStale()`: there is to draw. */
  constructor(name, blockUrl, palette, { onSeek, onStale }) {
    this.onStale = onStale;
    this.name = name;
    this.palette = palette;
    this.history = new History();
    this.pool = new Pool(0);
    this.shownTime = null; // null: the newest frame
    this.frame = null;
    this.isStale = false;
    const content = document.getElementById("panel").content.cloneNode(true);
    this.root = content.querySelector(".panel");
    this.parts = new Map();
    this.at(".name").textContent = name;
    this.root.setAttribute("aria-label", name);
    this.grid = new Grid(this.at(".grid"), this.pool, palette);
    this.inspector = new Inspector(this, blockUrl);
    this.requests = new RequestTable(this.at(".rows"), this.at(".more"), (number) => {
      this.grid.choose(number);
      this.touch();
    });
    this.groups = new GroupTable(this.at(".groups"));
    for (const chart of this.root.querySelectorAll(".chart")) {
      chart.addEventListener("click", (event) => {
        if (this.frame) onSeek(timeAt(chart, event.clientX, this.range()));
      });
    }
    const fits = new ResizeObserver(() => this.layout());
    fits.observe(this.at(".blocks"));
    fits.observe(this.at(".c-memory"));
  }

  /** Something has changed: draw at the screen's next frame. */
  touch() {
    this.isStale = true;
    this.onStale();
  }

  at(selector) {
    let part = this.parts.get(selector);
    if (part === undefined) this.parts.set(selector, (part = this.root.querySelector(selector)));
    return part;
  }

  text(selector, text) {
    const part = this.at(selector);
    if (part.textContent !== text) part.textContent = text;
  }

  /** A frame came; false when one is missing before it. */
  take(frame) {
    const numBefore = this.pool.numBlocks;
    const isLive = this.shownTime === null;
    const mark = isLive ? (block) => this.grid.mark(block) : null;
    if (!this.history.push(frame, mark)) return false;
    if (isLive) {
      // The grid reads the head itself while nobody looks back: no copy for each frame.
      this.#look(this.history.newest, this.history.head, numBefore);
    }
    return true;
  }

  #look(frame, pool, numBefore) {
    if (this.pool !== pool) {
      this.pool = this.grid.pool = pool;
      this.grid.repaint();
    }
    if (this.frame?.about !== frame.about) this.#facts(frame.about);
    this.frame = frame;
    this.grid.blockSize = frame.about.block_size;
    if (pool.numBlocks !== numBefore) this.layout();
    this.touch();
  }

  /** Look at the newest frame (null) or at the last one not after a time. */
  seek(timeS) {
    this.shownTime = timeS;
    const { history } = this;
    if (history.length === 0) return;
    const numBefore = this.pool.numBlocks;
    if (timeS === null) {
      this.#look(history.newest, history.head, numBefore);
    } else {
      const index = history.indexAt(timeS);
      this.#look(history.frames[index], history.poolAt(index, new Pool(0)), numBefore);
    }
    this.grid.repaint();
  }

  layout() {
    if (this.pool.numBlocks === 0) return;
    const box = this.at(".blocks");
    const most = Math.max(240, Math.min(innerHeight * 0.58, 1400));
    const key = [box.clientWidth, most, this.pool.numBlocks, devicePixelRatio].join();
    this.touch(); // charts look at their own size when they are drawn
    if (key === this.laidOut) return;
    this.laidOut = key;
    this.grid.layout(box.clientWidth, most);
    this.inspector.place();
  }

  theme(palette) {
    this.palette = this.grid.palette = palette;
    this.grid.repaint();
    this.touch();
  }

  status(status, text) {
    this.root.dataset.status = status;
    this.at(".panel-status").hidden = status === "live";
    this.text(".panel-status", text);
  }

  /** Bring the page up to date; at most once for each frame of the screen. */
  draw() {
    if (!this.isStale || this.frame === null) return;
    this.isStale = false;
    const { frame } = this;
    this.grid.draw(frame.time);
    this.#tiles(frame);
    this.#charts(frame);
    this.groups.show(frame);
    this.requests.show(frame, this.palette);
    this.#prefix(frame);
    this.#tiers(frame);
    this.#events(frame);
    this.inspector.refresh();
  }

  range() {
    const to = this.history.newest.time;
    const span = Math.max(30, to - this.history.oldest.time);
    return { from: to - Math.min(span, this.history.seconds), to, now: this.frame.time };
  }

  #facts(about) {
    const isPath = /^([/~.]|[A-Za-z]:)/.test(about.model ?? "");
    const facts = [
      isPath ? about.model.split(/[/\\]/).filter(Boolean).pop() : about.model,
      about.kv_policy && `KV policy ${about.kv_policy}`,
      about.scheduling_policy && `scheduling ${about.scheduling_policy}`,
      `${whole(about.num_blocks)} blocks × ${about.block_size} tokens`,
      about.bytes_per_block && bytes(about.num_blocks * about.bytes_per_block),
    ];
    this.at(".facts").replaceChildren(
      ...facts.filter(Boolean).map((fact) => {
        const item = document.createElement("li");
        item.textContent = fact;
        return item;
      }),
    );
  }

  #tiles(frame) {
    const { ledger = {}, about, latency } = frame;
    const slots = about.num_blocks * about.block_size;
    const held = ["tokens", "reserved", "internal"].reduce((sum, t) => sum + (ledger[t] ?? 0), 0);
    this.text(".t-used", percent(held / slots));
    const full = held ? `${percent((ledger.tokens ?? 0) / held)} of it holds tokens` : "";
    this.text(".t-used-sub", full);
    this.text(".t-running", whole(frame.num_running));
    this.text(".t-waiting", `${whole(frame.num_waiting)} waiting`);
    this.text(".t-output", `${short(Math.round(frame.rates.output))} tok/s`);
    this.text(".t-prompt", `${short(Math.round(frame.rates.prompt))} prompt tok/s`);
    for (const kind of ["ttft", "tpot"]) {
      const values = latency?.[`${kind}_s`];
      this.text(`.t-${kind}`, seconds(values?.[0]));
      this.text(`.t-${kind}-p99`, values ? `p99 ${seconds(values[1])}` : "none ended lately");
      const both = values ? `${seconds(values[0])}, p99 ${seconds(values[1])}` : "–";
      this.text(`.v-${kind}`, both);
    }
    this.text(".t-hits", percent(frame.rates.hits));
    const { query_tokens: asked = 0, hit_tokens: found = 0 } = frame.totals ?? {};
    this.text(".t-hits-sub", asked ? `${percent(found / asked)} since start` : "none looked up yet");
    const said = summary(frame, this.pool);
    this.text(".summary", said);
    this.at(".grid").setAttribute("aria-label", `KV pool of ${this.name}. ${said}`);
    this.text(".v-output", `${short(Math.round(frame.rates.output))}/s`);
    this.text(".v-prompt", `${short(Math.round(frame.rates.prompt))}/s`);
  }

  #charts(frame) {
    const { palette, history } = this;
    const { frames } = history;
    const range = this.range();
    const { about, ledger = {} } = frame;
    const slots = about.num_blocks * about.block_size;
    const used = ({ ledger: one = {} }) =>
      (one.tokens ?? 0) + (one.reserved ?? 0) + (one.internal ?? 0) + (one.shared_saved ?? 0);
    stacked(this.at(".c-memory"), palette, frames, range, {
      terms: TERMS.filter((term) => term !== "free"),
      valueOf: (one, term) => one.ledger?.[term] ?? 0,
      max: slots,
      format: (value) => `${Math.round((100 * value) / slots)} %`,
      extra: frames.some((one) => one.ledger?.shared_saved) ? used : undefined,
    });
    const items = TERMS.map((term) => [`term-${term}`, TERM_NAMES[term], ledger[term] ?? 0]);
    items.push(["term-shared", "saved by sharing", ledger.shared_saved ?? 0]);
    const texts = items.map(([, label, value]) => [label, percent(value / slots)]);
    this.#legend(this.at(".ledger"), items, texts);
    const said = texts.map((pair) => pair.join(" ")).join(", ");
    this.at(".c-memory").setAttribute("aria-label", `Memory over time; at this moment ${said}`);
    const rounded = (value) => short(value);
    lines(this.at(".c-tokens"), palette, frames, range, {
      series: [
        { rgb: palette.second, dashed: true, valueOf: (one) => one.rates.prompt },
        { rgb: palette.accent, valueOf: (one) => one.rates.output },
      ],
      format: rounded,
    });
    const [output, prompt] = [".v-output", ".v-prompt"].map((name) => this.at(name).textContent);
    const speeds = `Tokens per second over time; ${output} output, ${prompt} prompt`;
    this.at(".c-tokens").setAttribute("aria-label", speeds);
    for (const kind of ["ttft", "tpot"]) {
      const canvas = this.at(`.c-${kind}`);
      lines(canvas, palette, frames, range, {
        series: [1, 0].map((which) => ({
          rgb: which ? palette.second : palette.accent,
          dashed: which === 1,
          valueOf: (one) => one.latency?.[`${kind}_s`]?.[which] ?? null,
        })),
        format: (value) => (value === 0 ? "0" : seconds(value)),
      });
      const now = this.at(`.v-${kind}`).textContent;
      canvas.setAttribute("aria-label", `${kind.toUpperCase()} over time; median ${now}`);
    }
  }

  #legend(list, items, texts) {
    if (list.childElementCount !== items.length) {
      list.replaceChildren(
        ...items.map(([className, label]) => {
          const item = document.createElement("li");
          const swatch = document.createElement("i");
          swatch.className = `swatch ${className}`;
          item.append(swatch, `${label} `, document.createElement("b"));
          return item;
        }),
      );
    }
    texts.forEach(([, text], i) => {
      const value = list.children[i].lastChild;
      if (value.textContent !== text) value.textContent = text;
    });
  }

  #prefix(frame) {
    const { totals = {} } = frame;
    const asked = totals.query_tokens ?? 0;
    const found = totals.hit_tokens ?? 0;
    this.text(
      ".prefix-text",
      asked
        ? `${whole(found)} of ${whole(asked)} prompt tokens found (${percent(found / asked)}), ` +
            `${whole(totals.evictions ?? 0)} blocks evicted.`
        : "No prompt has been looked up yet.",
    );
    const misses = Object.entries(totals.misses ?? {}).filter(([, num]) => num > 0);
    misses.sort((a, b) => b[1] - a[1]);
    const most = misses[0]?.[1] ?? 1;
    const rows = misses.map(([reason, num]) => [reason, whole(num), [["accent", num / most]]]);
    this.#bars(this.at(".misses"), rows, "none");
  }

  #tiers(frame) {
    const rows = [];
    for (const [name, tier] of Object.entries(frame.tiers ?? {})) {
      const total = tier ? tier.held + tier.cached + tier.free : 0;
      if (total === 0) continue;
      const text = `${whole(tier.held)} held, ${whole(tier.cached)} cached of ${whole(total)}`;
      rows.push([name, text, [["held", tier.held / total], ["cached", tier.cached / total]]]);
    }
    this.#bars(this.at(".tiers"), rows, "none: what leaves the pool is computed again");
  }

  #bars(list, rows, none) {
    const key = JSON.stringify(rows);
    if (list.dataset.key === key) return;
    list.dataset.key = key;
    const parts = [];
    for (const [label, text, shares] of rows) {
      const term = document.createElement("dt");
      term.textContent = label;
      const value = document.createElement("dd");
      const bar = document.createElement("div");
      bar.className = "bar";
      for (const [kind, share] of shares) {
        const part = document.createElement("i");
        part.className = `part-${kind}`;
        part.style.width = `${100 * share}%`;
        bar.append(part);
      }
      value.append(bar, text);
      parts.push(term, value);
    }
    if (rows.length === 0) {
      const nothing = document.createElement("dd");
      nothing.className = "nothing";
      nothing.textContent = none;
      parts.push(nothing);
    }
    list.replaceChildren(...parts);
  }

  #events(frame) {
    const events = this.history.events(this.history.indexAt(frame.time), NUM_EVENTS);
    const num = Object.values(frame.totals?.preemptions ?? {}).reduce((a, b) => a + b, 0);
    const total = typeof frame.totals?.preemptions === "number" ? frame.totals.preemptions : num;
    this.text(".events-num", total ? `${whole(total)} preemptions since start` : "");
    const list = this.at(".event-list");
    const items = events.map((event) => this.#event(event, frame.time));
    if (items.length === 0) {
      const nothing = document.createElement("li");
      nothing.className = "nothing";
      nothing.textContent = "Nothing has happened: no preemption, no wait, no refusal.";
      items.push(nothing);
    }
    const key = items.map((item) => item.textContent).join("\n");
    if (this.eventKey !== key) list.replaceChildren(...items);
    this.eventKey = key;
  }

  #event(event, nowS) {
    const item = document.createElement("li");
    item.dataset.kind = event.kind;
    const kind = document.createElement("b");
    kind.textContent = event.mode ? `${event.kind} (${event.mode})` : event.kind;
    const when = document.createElement("time");
    const ago = `${whole(Math.max(0, Math.round(nowS - event.time_s)))} s ago`;
    const lasted = event.until_s == null ? "" : `, for ${seconds(event.until_s - event.time_s)}`;
    when.textContent = ago + lasted;
    const who = document.createElement("span");
    who.className = "who";
    who.textContent = event.request_id === null ? "engine" : brief(event.request_id);
    const why = document.createElement("p");
    why.textContent = event.why;
    item.append(kind, " ", who, " ", when, why);
    return item;
  }
}
