// Small charts over time on canvases, all with the same time axis.

import { css } from "./colours.js";

function prepare(canvas) {
  const ratio = globalThis.devicePixelRatio || 1;
  const width = Math.max(40, canvas.clientWidth), height = Math.max(30, canvas.clientHeight);
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  const font = 0.73 * parseFloat(getComputedStyle(document.documentElement).fontSize);
  context.font = `${font}px system-ui, sans-serif`;
  return { context, width, height, edge: margins() };
}

/** How far the axes are from a chart's edges, in rem: [left, right, top, bottom]. */
const MARGINS = [3.4, 0.55, 0.55, 1.2];

function margins() {
  const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
  const [left, right, top, bottom] = MARGINS.map((size) => Math.round(size * rem));
  return { left, right, top, bottom };
}

function niceMax(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].find((step) => step * power >= value) * power;
}

/**
 * Where a time and a value are; draws the lines at 0, half of `top` and `top` with their labels.
 * `range` is {from, to, now} in seconds.
 */
function axes({ context, width, height, edge }, palette, range, max, format, top = max) {
  const plotWidth = width - edge.left - edge.right, plotHeight = height - edge.top - edge.bottom;
  const x = (time) => edge.left + ((time - range.from) / (range.to - range.from)) * plotWidth;
  const y = (value) => edge.top + (1 - Math.min(1, value / max)) * plotHeight;
  context.strokeStyle = css(palette.line);
  context.fillStyle = css(palette.muted);
  context.lineWidth = 1;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const share of [0, 0.5, 1]) {
    const at = Math.round(y(top * share)) + 0.5;
    context.beginPath();
    context.moveTo(edge.left, at);
    context.lineTo(width - edge.right, at);
    context.stroke();
    context.fillText(format(top * share), edge.left - 6, at);
  }
  const span = range.to - range.from;
  const step = [5, 10, 30, 60, 120].find((one) => span / one <= Math.max(2, plotWidth / 90)) ?? 300;
  context.textBaseline = "bottom";
  for (let back = 0; back <= span; back += step) {
    const at = x(range.to - back);
    context.textAlign = back === 0 ? "right" : "center";
    if (at < edge.left + 8) break;
    const text = back === 0 ? "now" : back < 120 ? `−${back} s` : `−${back / 60} min`;
    context.fillText(text, at, height);
  }
  return { x, y };
}

function cursor({ context, height, edge }, palette, x, range) {
  if (range.now >= range.to) return;
  const at = Math.round(x(range.now)) + 0.5;
  context.strokeStyle = css(palette.ink);
  context.setLineDash([3, 3]);
  context.beginPath();
  context.moveTo(at, edge.top);
  context.lineTo(at, height - edge.bottom);
  context.stroke();
  context.setLineDash([]);
}

/** Not more points than can be seen: every k-th frame, and the last. */
function thin(frames, most) {
  const step = Math.ceil(frames.length / most);
  if (step <= 1) return frames;
  return frames.filter((_, i) => i % step === 0 || i === frames.length - 1);
}

/** Areas on top of each other that add up to `max`; `extra` is a line above them. */
export function stacked(canvas, palette, frames, range, { terms, valueOf, max, format, extra }) {
  const plot = prepare(canvas);
  const { context } = plot;
  const points = thin(frames, plot.width);
  const most = points.reduce((top, frame) => Math.max(top, extra?.(frame) ?? 0), max);
  const { x, y } = axes(plot, palette, range, most, format, max);
  if (points.length === 0) return;
  const below = new Float64Array(points.length);
  for (const term of terms) {
    context.fillStyle = css(palette.terms[term]);
    context.beginPath();
    points.forEach((frame, i) => context.lineTo(x(frame.time), y(below[i] + valueOf(frame, term))));
    for (let i = points.length - 1; i >= 0; i--) context.lineTo(x(points[i].time), y(below[i]));
    context.fill();
    points.forEach((frame, i) => (below[i] += valueOf(frame, term)));
  }
  if (extra !== undefined) {
    context.strokeStyle = css(palette.terms.shared);
    context.lineWidth = 2;
    context.beginPath();
    for (const frame of points) context.lineTo(x(frame.time), y(extra(frame)));
    context.stroke();
  }
  cursor(plot, palette, x, range);
}

/** Lines; a point that is null leaves a gap. `series` is [{rgb, valueOf, dashed}]. */
export function lines(canvas, palette, frames, range, { series, format }) {
  const plot = prepare(canvas);
  const { context } = plot;
  const points = thin(frames, plot.width);
  const values = series.map(({ valueOf }) => points.map(valueOf));
  const max = niceMax(values.flat().reduce((top, value) => Math.max(top, value ?? 0), 0));
  const { x, y } = axes(plot, palette, range, max, format);
  series.forEach(({ rgb, dashed }, which) => {
    context.strokeStyle = css(rgb);
    context.lineWidth = 1.75;
    context.lineJoin = "round";
    context.setLineDash(dashed ? [4, 3] : []);
    context.beginPath();
    let isOpen = false;
    points.forEach((frame, i) => {
      const value = values[which][i];
      if (value === null || value === undefined) isOpen = false;
      else if (isOpen) context.lineTo(x(frame.time), y(value));
      else {
        context.moveTo(x(frame.time), y(value));
        isOpen = true;
      }
    });
    context.stroke();
    context.setLineDash([]);
  });
  cursor(plot, palette, x, range);
}

/** The time that a place of a chart stands for. */
export function timeAt(canvas, clientX, range) {
  const box = canvas.getBoundingClientRect();
  const edge = margins();
  const share = (clientX - box.left - edge.left) / (box.width - edge.left - edge.right);
  return range.from + Math.min(1, Math.max(0, share)) * (range.to - range.from);
}
