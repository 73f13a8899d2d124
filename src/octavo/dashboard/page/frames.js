// The model: what a source has sent, now and over the last minutes. Knows nothing of the page.

export const FREE = 0, CACHED = 1, USED = 2, EXTERNAL = 3;
export const STATE_NAMES = ["free", "cached", "used", "not allocatable"];
export const TERMS = ["tokens", "reserved", "internal", "external", "cached", "free"];

const BYTES_PER_BLOCK = 1 + 4 + 2 + 2 + 8;
const BYTES_PER_REQUEST = 400; // about what a parsed entry of `requests` takes
const KEYFRAME_S = 10;

/** One number of each kind per block, by block id. */
export class Pool {
  constructor(numBlocks) {
    this.numBlocks = numBlocks;
    this.state = new Uint8Array(numBlocks);
    this.owner = new Int32Array(numBlocks).fill(-1);
    this.refs = new Uint16Array(numBlocks);
    this.fill = new Uint16Array(numBlocks);
    /** When a block came into its present state, of its present owner; -Infinity: not known. */
    this.since = new Float64Array(numBlocks).fill(-Infinity);
  }

  copy() {
    return new Pool(0).take(this);
  }

  /** Become equal to another pool. */
  take(other) {
    this.numBlocks = other.numBlocks;
    for (const name of ["state", "owner", "refs", "fill", "since"]) {
      this[name] = other[name].slice();
    }
    return this;
  }

  /** Apply a change at a time; `dirty` is told the ids of blocks that look different now. */
  apply(change, timeS, dirty) {
    const { id } = change;
    const num = change.state.length;
    for (let i = 0; i < num; i++) {
      const block = id ? id[i] : i;
      if (block >= this.numBlocks) continue;
      const moved = this.state[block] !== change.state[i] || this.owner[block] !== change.owner[i];
      if (moved) {
        this.state[block] = change.state[i];
        this.owner[block] = change.owner[i];
        this.since[block] = timeS;
      } else if (this.refs[block] === change.refs[i] && this.fill[block] === change.fill[i]) {
        continue;
      }
      this.refs[block] = change.refs[i];
      this.fill[block] = change.fill[i];
      dirty?.(block);
    }
  }

  /** How many blocks are in each state, shared, or set aside and still empty. */
  count() {
    const counts = { free: 0, cached: 0, used: 0, external: 0, shared: 0, empty: 0 };
    const byState = [0, 0, 0, 0];
    for (let block = 0; block < this.numBlocks; block++) {
      byState[this.state[block]]++;
      if (this.state[block] !== USED) continue;
      if (this.refs[block] > 1) counts.shared++;
      if (this.fill[block] === 0) counts.empty++;
    }
    [counts.free, counts.cached, counts.used, counts.external] = byState;
    return counts;
  }
}

function compact(blocks, isFull) {
  return {
    id: isFull ? null : Uint32Array.from(blocks.id),
    state: Uint8Array.from(blocks.state),
    owner: Int32Array.from(blocks.owner),
    refs: Uint16Array.from(blocks.refs),
    fill: Uint16Array.from(blocks.fill),
  };
}

/**
 * The frames of the last minutes: keyframes (whole pools) and changes between them, within a
 * budget of bytes. `head` is the pool after the newest frame.
 */
export class History {
  constructor({ seconds = 300, budgetBytes = 128 * 2 ** 20 } = {}) {
    this.seconds = seconds;
    this.budgetBytes = budgetBytes;
    this.about = null;
    this.clear();
  }

  clear() {
    this.frames = [];
    this.head = new Pool(0);
    this.numBytes = 0;
    this.lastN = null;
    this.keyframeAt = -Infinity;
    this.changedBytes = 0;
  }

  get length() {
    return this.frames.length;
  }

  get newest() {
    return this.frames[this.frames.length - 1] ?? null;
  }

  get oldest() {
    return this.frames[0] ?? null;
  }

  /** Take a frame; false when one is missing before it, so that a full one must be asked for. */
  push(frame, dirty) {
    const isFull = frame.kind === "full";
    if (!isFull && (this.about === null || this.lastN === null || frame.n !== this.lastN + 1)) {
      return false;
    }
    if (isFull) this.#begin(frame);
    this.lastN = frame.n;
    const change = compact(frame.blocks, isFull);
    this.head.apply(change, this.#changeTime(frame), dirty);
    const { blocks, about, ...meta } = frame;
    const entry = { ...meta, time: frame.time_s, change, pool: null, about: this.about, bytes: 0 };
    entry.bytes = (frame.requests?.length ?? 0) * BYTES_PER_REQUEST + 1000;
    entry.bytes += change.state.length * BYTES_PER_BLOCK;
    this.changedBytes += change.state.length * BYTES_PER_BLOCK;
    const poolBytes = this.head.numBlocks * BYTES_PER_BLOCK;
    const isDue = entry.time - this.keyframeAt >= KEYFRAME_S || this.changedBytes > 4 * poolBytes;
    if (isFull || isDue || this.length === 0) {
      // What a whole pool says, its change need not say again.
      entry.bytes += poolBytes - change.state.length * BYTES_PER_BLOCK;
      entry.pool = this.head.copy();
      entry.change = null;
      this.keyframeAt = entry.time;
      this.changedBytes = 0;
    }
    this.frames.push(entry);
    entry.rates = this.#rates(this.length - 1);
    this.numBytes += entry.bytes;
    this.#trim();
    return true;
  }

  #begin(frame) {
    const about = frame.about;
    const isOther = this.newest !== null && frame.time_s < this.newest.time;
    if (isOther) this.clear(); // the engine has started again: its clock has, too
    if (this.head.numBlocks !== about.num_blocks) this.head = new Pool(about.num_blocks);
    this.about = about;
  }

  /** Blocks of the very first frame have been as they are for nobody knows how long. */
  #changeTime(frame) {
    return this.length === 0 || frame.about?.num_blocks !== this.newest.about.num_blocks &&
      frame.kind === "full" ? -Infinity : frame.time_s;
  }

  #trim() {
    const first = this.newest.time - this.seconds;
    for (;;) {
      const next = this.frames.findIndex((entry, i) => i > 0 && entry.pool !== null);
      if (next < 0) return;
      const isOld = this.frames[next].time <= first;
      if (!isOld && this.numBytes <= this.budgetBytes) return;
      for (const entry of this.frames.splice(0, next)) this.numBytes -= entry.bytes;
    }
  }

  /** The index of the last frame that is not after a time (the first one if all are). */
  indexAt(timeS) {
    let low = 0, high = this.frames.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.frames[middle].time <= timeS + 1e-6) low = middle + 1;
      else high = middle;
    }
    return Math.max(0, low - 1);
  }

  /** The pool after a frame, into `pool`. */
  poolAt(index, pool) {
    if (index === this.frames.length - 1) return pool.take(this.head);
    let key = index;
    while (this.frames[key].pool === null) key--;
    pool.take(this.frames[key].pool);
    for (let i = key + 1; i <= index; i++) {
      pool.apply(this.frames[i].change, this.frames[i].time, null);
    }
    return pool;
  }

  /** Tokens per second over the last second, and the share of prompts found over the last 30. */
  #rates(index) {
    const end = this.frames[index];
    const grown = (name, window) => {
      const start = this.frames[this.indexAt(end.time - window)];
      const seconds = end.time - start.time;
      const by = (end.totals?.[name] ?? 0) - (start.totals?.[name] ?? 0);
      return seconds > 0 && by > 0 ? { by, perSecond: by / seconds } : { by: 0, perSecond: 0 };
    };
    const asked = grown("query_tokens", 30).by;
    return {
      output: grown("output_tokens", 1).perSecond,
      prompt: grown("prompt_tokens", 1).perSecond,
      hits: asked > 0 ? grown("hit_tokens", 30).by / asked : null,
    };
  }

  /** The newest events up to a frame, newest first; of one that was told twice, what is newer. */
  events(index, num) {
    const found = [], serials = new Set();
    for (let i = index; i >= 0 && found.length < num; i--) {
      const events = this.frames[i].events ?? [];
      for (let j = events.length - 1; j >= 0 && found.length < num; j--) {
        const { serial } = events[j];
        if (serial !== undefined && serials.has(serial)) continue;
        serials.add(serial);
        found.push(events[j]);
      }
    }
    return found;
  }
}

/** The pool in a sentence, for people who cannot see it. */
export function summary(frame, pool) {
  const counts = pool.count();
  const number = (n) => n.toLocaleString("en");
  const numRunning = (frame.requests ?? []).filter((one) => one.state === "running").length;
  const parts = [
    `${number(counts.used)} used by ${number(numRunning)} request${numRunning === 1 ? "" : "s"}`,
    `${number(counts.shared)} shared`,
  ];
  if (counts.empty) parts.push(`${number(counts.empty)} set aside but empty`);
  parts.push(`${number(counts.cached)} cached`, `${number(counts.free)} free`);
  if (counts.external) parts.push(`${number(counts.external)} free but not allocatable`);
  return `${number(pool.numBlocks)} blocks: ${parts.join(", ")}.`;
}
