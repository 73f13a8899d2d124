// The pool as a grid of blocks on a canvas. Only cells that changed are painted again.

import { CACHED, EXTERNAL, USED } from "./frames.js";
import { css, mix, pixel } from "./colours.js";

const LARGEST_CELL = 56; // CSS pixels, gap included
const AGES = [0.75, 2.5, 10, 60]; // seconds at which a block looks older

function levelOf(age) {
  let level = 0;
  while (level < AGES.length && age >= AGES[level]) level++;
  return level;
}

export class Grid {
  /** `pool` is read, never written. */
  constructor(canvas, pool, palette) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.pool = pool;
    this.palette = palette;
    this.blockSize = 16;
    this.nowS = 0;
    this.chosen = null; // the number of the request whose blocks stand out
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.levels = new Uint8Array(0);
    this.isDirty = new Uint8Array(0);
    this.dirty = [];
    this.isAllDirty = true;
    this.drawnCells = 0;
    this.draws = 0;
    this.pitch = 0;
    this.columns = 1;
    this.rows = 0;
  }

  /** Choose the largest cells with which all blocks fit into the canvas's box. */
  layout(cssWidth, cssHeight) {
    const ratio = globalThis.devicePixelRatio || 1;
    const width = Math.max(1, Math.floor(cssWidth * ratio));
    const height = Math.max(1, Math.floor(cssHeight * ratio));
    const num = Math.max(1, this.pool.numBlocks);
    let pitch = Math.max(1, Math.floor(LARGEST_CELL * ratio));
    const columnsOf = (size) => {
      const columns = Math.max(1, Math.floor(width / size));
      return columns >= 32 ? columns - (columns % 8) : columns;
    };
    while (pitch > 1 && Math.ceil(num / columnsOf(pitch)) * pitch > height) pitch--;
    this.ratio = ratio;
    this.pitch = pitch;
    this.columns = Math.min(columnsOf(pitch), num);
    this.rows = Math.ceil(num / this.columns);
    this.gap = pitch >= 4 ? Math.max(1, Math.round(pitch / 11)) : 0;
    this.size = pitch - this.gap;
    const canvasWidth = this.columns * pitch, canvasHeight = this.rows * pitch;
    if (this.canvas.width !== canvasWidth || this.canvas.height !== canvasHeight || !this.image) {
      this.canvas.width = canvasWidth;
      this.canvas.height = canvasHeight;
      this.canvas.style.width = `${canvasWidth / ratio}px`;
      this.canvas.style.height = `${canvasHeight / ratio}px`;
      this.image = this.context.createImageData(canvasWidth, canvasHeight);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    this.levels = new Uint8Array(num);
    this.isDirty = new Uint8Array(num);
    this.dirty = [];
    Object.assign(this.canvas.dataset, { pitch, columns: this.columns, size: this.size });
    this.repaint();
  }

  repaint() {
    this.isAllDirty = true;
  }

  mark(block) {
    if (this.isAllDirty || this.isDirty[block]) return;
    this.isDirty[block] = 1;
    this.dirty.push(block);
  }

  /** Blocks of another request stand out (null: of none). */
  choose(number) {
    if (number === this.chosen) return;
    this.chosen = number;
    this.repaint();
  }

  /** Paint what changed, and what got older until `nowS`; returns how many cells that were. */
  draw(nowS) {
    this.nowS = nowS;
    const { since, numBlocks } = this.pool;
    if (this.pitch === 0 || numBlocks === 0) return 0;
    for (let block = 0; block < numBlocks; block++) {
      const level = levelOf(nowS - since[block]);
      if (level !== this.levels[block]) {
        this.levels[block] = level;
        this.mark(block);
      }
    }
    let num;
    if (this.isAllDirty) num = this.#drawAll();
    else num = this.#drawSome();
    if (num > 0) this.draws++;
    this.drawnCells += num;
    Object.assign(this.canvas.dataset, { draws: this.draws, cells: this.drawnCells });
    return num;
  }

  #drawAll() {
    const { numBlocks } = this.pool;
    this.#prepare();
    this.pixels.fill(this.background);
    for (let block = 0; block < numBlocks; block++) this.#paint(block);
    this.context.putImageData(this.image, 0, 0);
    for (let block = 0; block < numBlocks; block++) this.#write(block);
    this.isDirty.fill(0);
    this.dirty = [];
    this.isAllDirty = false;
    return numBlocks;
  }

  #drawSome() {
    const dirty = this.dirty;
    if (dirty.length === 0) return 0;
    this.#prepare();
    dirty.sort((a, b) => a - b);
    const { columns, pitch } = this;
    for (let start = 0; start < dirty.length; ) {
      // One transfer for each row of the grid that changed, from its first such cell to its last.
      const row = Math.floor(dirty[start] / columns);
      let end = start;
      for (; end < dirty.length && dirty[end] < (row + 1) * columns; end++) this.#paint(dirty[end]);
      const left = dirty[start] - row * columns, right = dirty[end - 1] - row * columns + 1;
      const place = [left * pitch, row * pitch, (right - left) * pitch, pitch];
      this.context.putImageData(this.image, 0, 0, ...place);
      const between = row * columns;
      for (let column = left; column < right; column++) this.#write(between + column);
      start = end;
    }
    for (const block of dirty) this.isDirty[block] = 0;
    this.dirty = [];
    return dirty.length;
  }

  #prepare() {
    const { palette } = this;
    this.background = pixel(palette.card);
    this.freePixel = pixel(palette.free);
    this.externalPixel = pixel(palette.external);
    this.ink = pixel(palette.isDark ? [255, 255, 255] : [16, 20, 28]);
    this.cache = new Map();
  }

  /** The pixels of a request's blocks at an age: filled, and still empty. */
  #shades(owner, level, dims) {
    const key = owner * 16 + level * 2 + (dims ? 1 : 0);
    let shades = this.cache.get(key);
    if (shades === undefined) {
      const { palette } = this;
      let full = palette.request(Math.max(0, owner));
      if (!this.calm.matches) {
        if (level === 0) full = mix(full, palette.isDark ? [255, 255, 255] : palette.ink, 0.35);
        if (level === 1) full = mix(full, palette.isDark ? [255, 255, 255] : palette.ink, 0.15);
      }
      if (dims) full = mix(full, palette.card, 0.82);
      const empty = mix(full, palette.card, 0.76);
      shades = { rgb: full, empty: empty, full: pixel(full), hollow: pixel(empty), steps: [] };
      this.cache.set(key, shades);
    }
    return shades;
  }

  #cachedPixel(level) {
    const fade = [0, 0, 0.15, 0.35, 0.55][level];
    const dims = this.chosen === null ? 0 : 0.5;
    return pixel(mix(this.palette.cached, this.palette.free, Math.max(fade, dims)));
  }

  #paint(block) {
    const { pixels, pitch, size, columns, pool } = this;
    const stride = this.canvas.width;
    const left = (block % columns) * pitch, top = Math.floor(block / columns) * pitch;
    const state = pool.state[block];
    if (state !== USED) {
      let colour = this.freePixel;
      if (state === CACHED) colour = this.#cachedPixel(this.levels[block]);
      if (state === EXTERNAL && size < 4) colour = this.externalPixel;
      for (let y = top; y < top + size; y++) {
        const line = y * stride + left;
        pixels.fill(colour, line, line + size);
      }
      if (state === EXTERNAL && size >= 4) this.#hatch(left, top);
      return;
    }
    const owner = pool.owner[block];
    const dims = this.chosen !== null && owner !== this.chosen;
    const shades = this.#shades(owner, this.levels[block], dims);
    const share = Math.min(1, pool.fill[block] / this.blockSize);
    const isSmall = size < 6;
    let colour = shades.full, filled = size;
    if (share < 1) {
      if (isSmall) {
        const step = Math.round(share * 8);
        colour = shades.steps[step] ??= pixel(mix(shades.empty, shades.rgb, step / 8));
      } else {
        filled = share === 0 ? 0 : Math.max(1, Math.round(share * size));
      }
    }
    for (let y = top; y < top + size; y++) {
      const line = y * stride + left;
      pixels.fill(colour, line, line + filled);
      if (filled < size) pixels.fill(shades.hollow, line + filled, line + size);
    }
    if (share === 0 && size >= 5) this.#frame(left, top, shades.full);
    if (pool.refs[block] > 1) this.#markShared(left, top, dims ? shades.full : this.ink);
  }

  /** Free, but not where anybody could use it. */
  #hatch(left, top) {
    const { pixels, size } = this;
    const stride = this.canvas.width;
    const step = size >= 14 ? 6 : 4, thick = size >= 14 ? 2 : 1;
    for (let y = 0; y < size; y++) {
      for (let x = 0; x < size; x++) {
        const isLine = (left + x + top + y) % step < thick;
        if (isLine) pixels[(top + y) * stride + left + x] = this.externalPixel;
      }
    }
  }

  /** Set aside and never filled: only an outline. */
  #frame(left, top, colour) {
    const { pixels, size } = this;
    const stride = this.canvas.width;
    const thick = size >= 18 ? 2 : 1;
    for (let y = 0; y < size; y++) {
      const line = (top + y) * stride + left;
      if (y < thick || y >= size - thick) pixels.fill(colour, line, line + size);
      else {
        pixels.fill(colour, line, line + thick);
        pixels.fill(colour, line + size - thick, line + size);
      }
    }
  }

  /** A folded corner; in cells too small for one, a dot. */
  #markShared(left, top, colour) {
    const { pixels, size } = this;
    const stride = this.canvas.width;
    if (size < 3) return;
    if (size < 6) {
      pixels[(top + (size >> 1)) * stride + left + (size >> 1)] = colour;
      return;
    }
    const corner = Math.max(3, Math.round(size * 0.36));
    for (let y = 0; y < corner; y++) {
      const line = (top + y) * stride + left + size;
      pixels.fill(colour, line - corner + y, line);
    }
  }

  /** How many references, as a number, where there is room for it. */
  #write(block) {
    const cssSize = this.size / this.ratio;
    const refs = this.pool.refs[block];
    if (cssSize < 17 || refs < 2 || this.pool.state[block] !== USED) return;
    const { context, pitch, size } = this;
    const x = (block % this.columns) * pitch, y = Math.floor(block / this.columns) * pitch;
    const owner = this.pool.owner[block];
    const shade = this.palette.request(Math.max(0, owner));
    const isLight = shade[0] * 0.3 + shade[1] * 0.59 + shade[2] * 0.11 > 120;
    const dims = this.chosen !== null && owner !== this.chosen;
    context.fillStyle = dims ? css(this.palette.muted) : isLight ? "#10141c" : "#ffffff";
    context.font = `600 ${Math.round(size * 0.46)}px system-ui, sans-serif`;
    context.textBaseline = "bottom";
    context.fillText(String(refs), x + size * 0.12, y + size * 0.98);
  }

  /** The block at a place of the page, or null. */
  blockAt(clientX, clientY) {
    const box = this.canvas.getBoundingClientRect();
    const x = ((clientX - box.left) * this.canvas.width) / box.width;
    const y = ((clientY - box.top) * this.canvas.height) / box.height;
    const column = Math.floor(x / this.pitch), row = Math.floor(y / this.pitch);
    if (column < 0 || row < 0 || column >= this.columns || row >= this.rows) return null;
    const block = row * this.columns + column;
    return block < this.pool.numBlocks ? block : null;
  }

  /** Where a block is on the canvas, in CSS pixels. */
  boxOf(block) {
    const step = this.pitch / this.ratio;
    return {
      left: (block % this.columns) * step,
      top: Math.floor(block / this.columns) * step,
      size: this.size / this.ratio,
    };
  }

}
