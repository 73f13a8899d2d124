// Colours for pixels: those of the style sheet, and one hue for each request.

const GOLDEN_ANGLE = 137.508;

function fromOklch(lightness, chroma, hue) {
  const radians = (hue * Math.PI) / 180;
  const a = chroma * Math.cos(radians), b = chroma * Math.sin(radians);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
}

function encode(linear) {
  const value = linear <= 0.0031308 ? 12.92 * linear : 1.055 * linear ** (1 / 2.4) - 0.055;
  return Math.round(255 * Math.min(1, Math.max(0, value)));
}

/** The nearest displayable colour of that lightness and hue, as [red, green, blue]. */
export function oklch(lightness, chroma, hue) {
  for (let c = chroma; c > 0; c -= 0.01) {
    const linear = fromOklch(lightness, c, hue);
    if (linear.every((value) => value >= -0.001 && value <= 1.001)) return linear.map(encode);
  }
  return fromOklch(lightness, 0, hue).map(encode);
}

export function mix(from, to, share) {
  return from.map((value, i) => Math.round(value + (to[i] - value) * share));
}

/** As a pixel of ImageData's buffer (little endian, as all browsers' machines are). */
export function pixel([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

export const css = (rgb) => `rgb(${rgb.join(" ")})`;

/** What the style sheet says now, in the theme that is on. */
export class Palette {
  constructor(element) {
    const probe = document.createElement("i");
    probe.hidden = true;
    element.append(probe);
    const style = getComputedStyle(probe);
    const read = (name) => {
      probe.style.color = `var(--${name})`;
      return style.color.match(/[\d.]+/g).slice(0, 3).map(Number);
    };
    this.card = read("card");
    this.ink = read("ink");
    this.muted = read("muted");
    this.line = read("line");
    this.free = read("free");
    this.cached = read("cached");
    this.external = read("external");
    this.accent = read("accent");
    this.second = read("second");
    this.terms = Object.fromEntries(
      ["tokens", "reserved", "internal", "external", "cached", "free", "shared"].map(
        (term) => [term, read(`term-${term}`)],
      ),
    );
    probe.remove();
    this.isDark = this.card[0] + this.card[1] + this.card[2] < 384;
    this.requests = new Map();
  }

  /**
   * Hues a golden angle apart, so that neighbours differ most; lightness goes in turn through three
   * levels, so that they differ for eyes that do not tell hues apart.
   */
  request(number) {
    let rgb = this.requests.get(number);
    if (rgb === undefined) {
      const lightness = (this.isDark ? [0.72, 0.6, 0.81] : [0.65, 0.54, 0.73])[number % 3];
      rgb = oklch(lightness, 0.135, (250 + number * GOLDEN_ANGLE) % 360);
      if (this.requests.size > 5000) this.requests.clear();
      this.requests.set(number, rgb);
    }
    return rgb;
  }
}
