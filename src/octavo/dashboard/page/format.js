// Numbers for people.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** A long name's beginning. */
export const brief = (name) => (name.length > 20 ? `${name.slice(0, 16)}…` : name);

export const whole = (value) => (value == null ? "–" : WHOLE.format(value));

/** Whole numbers in order, runs of three or more as `4–9`. */
export function ranges(numbers) {
  const runs = [];
  for (const number of numbers) {
    const run = runs[runs.length - 1];
    if (run !== undefined && run[1] === number - 1) run[1] = number;
    else runs.push([number, number]);
  }
  const told = ([first, last]) =>
    first === last ? `${first}` : `${first}${last === first + 1 ? ", " : "–"}${last}`;
  return runs.map(told).join(", ");
}

export function short(value) {
  if (value == null) return "–";
  if (value >= 1e6) return `${trim(value / 1e6)}M`;
  if (value >= 1e4) return `${trim(value / 1e3)}k`;
  if (value >= 100 || Number.isInteger(value)) return WHOLE.format(value);
  return trim(value);
}

function trim(value) {
  return value >= 100 ? value.toFixed(0) : value.toFixed(1).replace(/\.0$/, "");
}

export function seconds(value) {
  if (value == null) return "–";
  if (value === 0) return "0 s";
  if (value < 0.0995) return `${trim(value * 1000)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  if (value < 6000) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

export function percent(share) {
  if (share == null) return "–";
  if (share > 0 && share < 0.0005) return "< 0.1 %";
  const isNearAnEnd = (share > 0 && share < 0.0995) || (share > 0.995 && share < 1);
  return `${(100 * share).toFixed(isNearAnEnd ? 1 : 0)} %`;
}

export function bytes(value) {
  if (value == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit++) value /= 1024;
  return `${unit === 0 ? value : value.toFixed(value >= 100 ? 0 : 1)} ${units[unit]}`;
}
