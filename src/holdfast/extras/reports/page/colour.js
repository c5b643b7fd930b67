// Colours that mean something. They are computed in OKLab, where equal steps look equal: lightness rises evenly along the map, so
// it is right in grey and for every kind of colour blindness; hue only helps. What is no number has a pattern, not a colour.

// Red, green and blue of a lightness, a chroma and a hue; the chroma is lowered until a screen can show it.
function oklch(lightness, chroma, hue) {
  for (let c = chroma; ; c -= 0.005) {
    const angle = (hue * Math.PI) / 180;
    const a = Math.max(c, 0) * Math.cos(angle);
    const b = Math.max(c, 0) * Math.sin(angle);
    const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
    const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
    const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
    const linear = [
      4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
      -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
      -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
    ];
    if (c > 0 && linear.some((part) => part < -0.0005 || part > 1.0005)) continue;
    return linear.map((part) => {
      const held = Math.min(Math.max(part, 0), 1);
      return Math.round(255 * (held <= 0.0031308 ? 12.92 * held : 1.055 * held ** (1 / 2.4) - 0.055));
    });
  }
}

// A colour and the ink that can be read on it.
function swatch(lightness, chroma, hue) {
  const rgb = oklch(lightness, chroma, hue);
  const linear = rgb.map((part) => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  // Black and white have the same contrast on a luminance of 0.18.
  return { css: `rgb(${rgb.join()})`, ink: luminance > 0.18 ? "#000000" : "#ffffff", rgb };
}

const STEPS = 128;

// Hues far apart at two lightnesses, in an order in which neighbours differ for every kind of colour blindness.
const CATEGORIES = [
  [0.56, 0.1, 205],
  [0.77, 0.08, 245],
  [0.8, 0.12, 85],
  [0.5, 0.13, 290],
  [0.7, 0.13, 145],
  [0.6, 0.16, 35],
  [0.45, 0.08, 160],
  [0.8, 0.1, 340],
  [0.5, 0.06, 60],
  [0.68, 0.02, 250],
];

// What changed is loud, what stayed is quiet: same, changed, added, removed, renamed, not comparable.
const STATE_COLOURS = {
  light: [
    [0.88, 0.01, 240],
    [0.6, 0.1, 205],
    [0.74, 0.14, 145],
    [0.55, 0.17, 30],
    [0.78, 0.13, 80],
    [0.5, 0.13, 300],
  ],
  dark: [
    [0.36, 0.01, 240],
    [0.66, 0.1, 205],
    [0.74, 0.14, 145],
    [0.62, 0.17, 30],
    [0.8, 0.13, 80],
    [0.62, 0.13, 300],
  ],
};

const palettes = new Map();

function paletteOf(theme) {
  if (palettes.has(theme)) return palettes.get(theme);
  const dark = theme === "dark";
  const along = (count, colour) => Array.from({ length: count }, (_, step) => colour(step / (count - 1)));
  const palette = {
    // From violet over teal to yellow.
    ramp: along(STEPS, (t) => swatch((dark ? 0.33 : 0.3) + 0.6 * t, 0.125 + 0.025 * Math.sin(Math.PI * t), 300 - 195 * t)),
    // Blue below, orange above, the paper's own grey between.
    diverging: along(2 * STEPS + 1, (t) => {
      const away = Math.abs(2 * t - 1);
      return swatch(dark ? 0.32 + 0.42 * away : 0.95 - 0.42 * away, 0.16 * away, t < 0.5 ? 250 : 45);
    }),
    categories: CATEGORIES.map((parts) => swatch(...parts)),
    states: STATE_COLOURS[theme].map((parts) => swatch(...parts)),
    none: dark ? { css: "#2a2e35", ink: "#a0a7b4" } : { css: "#e9ebee", ink: "#5a606b" },
    paper: dark ? "#1a1d22" : "#ffffff",
    ink: dark ? "#e7e9ee" : "#1b1d21",
    muted: dark ? "#a0a7b4" : "#5a606b",
    line: dark ? "#3a404a" : "#cfd3d9",
    alarm: dark ? ["#ff4d3d", "#1a0503"] : ["#c3160a", "#ffffff"],
  };
  palettes.set(theme, palette);
  return palette;
}

function quantile(sorted, share) {
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(share * (sorted.length - 1))))];
}

const NARROWEST = 1; // decades of a logarithmic scale: where weights are alike, the picture is calm

// The ends of a scale: of all values, or of all but a hundredth at each end where a few would make the rest one colour.
function ends(values) {
  const sorted = Float64Array.from(values).sort();
  if (!sorted.length) return { low: 0, high: 1, below: false, above: false };
  let low = sorted[0];
  let high = sorted[sorted.length - 1];
  const [inner, outer] = [quantile(sorted, 0.01), quantile(sorted, 0.99)];
  const cut = sorted.length >= 40 && high - low > 3 * (outer - inner) && outer > inner;
  if (cut) [low, high] = [inner, outer];
  return { low, high, below: cut && low > sorted[0], above: cut && high < sorted[sorted.length - 1] };
}

// The usual value stands away from both ends, so that what is less and what is more can be seen beside it.
function centred(low, high, middle) {
  const share = 0.3;
  if (middle - low < share * (high - low)) return [middle - (share / (1 - share)) * (high - middle), high];
  if (high - middle < share * (high - low)) return [low, middle + (share / (1 - share)) * (middle - low)];
  return [low, high];
}

// From values to swatches. `place` gives 0 to 1; a zero on a logarithmic scale has no place and is drawn hollow.
function makeScale(measure) {
  if (measure.scale === "category") {
    const of = (palette) => (measure.key === "state" ? palette.states : palette.categories);
    return { measure, kind: "category", swatch: (value, palette) => of(palette)[value % of(palette).length], zero: () => false };
  }
  const log = measure.scale === "log";
  const healthy = measure.key === SICK || measure.key === APPEARED; // where none is NaN, zero is well and not worth a mark
  const toScale = log ? (value) => Math.log10(Math.abs(value)) : (value) => value;
  const usable = measure.values.filter((value) => !Number.isNaN(value) && (!log || value !== 0));
  let { low, high, below, above } = ends(usable.map(toScale));
  if (log && usable.length) [low, high] = centred(low, high, median(usable.map(toScale)));
  if (log && high - low < NARROWEST) [low, high] = [(low + high - NARROWEST) / 2, (low + high + NARROWEST) / 2];
  if (measure.scale === "share") [low, high, below, above] = [0, 1, false, false];
  if (measure.scale === "diverging") {
    high = Math.max(Math.abs(low), Math.abs(high)) || 1;
    low = -high;
  }
  const width = high - low;
  const place = (value) => (width > 0 ? Math.min(1, Math.max(0, (toScale(value) - low) / width)) : 0.5);
  const colours = (palette) => (measure.scale === "diverging" ? palette.diverging : palette.ramp);
  return {
    measure,
    kind: measure.scale,
    usable: usable.length > 0,
    place,
    below,
    above,
    low: log ? 10 ** low : low,
    high: log ? 10 ** high : high,
    between: (share) => (log ? 10 ** (low + share * width) : low + share * width),
    toScale,
    width,
    zero: (value) => log && value === 0 && !healthy,
    healthy,
    zeros: log && !healthy && measure.values.some((value) => value === 0),
    colours,
    swatch: (value, palette) => {
      const map = colours(palette);
      return map[Math.round(place(value) * (map.length - 1))];
    },
  };
}

const patterns = new Map();

// Diagonal stripes in the alarm's two colours: seen without colour, and on paper.
function alarmPattern(context, palette) {
  const key = palette.alarm.join();
  if (!patterns.has(key)) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const inner = tile.getContext("2d");
    inner.fillStyle = palette.alarm[0];
    inner.fillRect(0, 0, 8, 8);
    inner.strokeStyle = palette.alarm[1];
    inner.lineWidth = 2.2;
    for (const shift of [-8, 0, 8]) {
      inner.beginPath();
      inner.moveTo(shift - 1, 9);
      inner.lineTo(shift + 9, -1);
      inner.stroke();
    }
    patterns.set(key, tile);
  }
  return context.createPattern(patterns.get(key), "repeat");
}

// One cell of a picture. `found` is a swatch, "zero", "none" or "sick". Gives the ink for text on it.
function paintCell(context, box, found, palette) {
  const { x, y, w, h } = box;
  if (found === "sick") {
    context.fillStyle = alarmPattern(context, palette);
    context.fillRect(x, y, w, h);
    context.strokeStyle = palette.alarm[0];
    context.lineWidth = 1.5;
    if (w > 4 && h > 4) context.strokeRect(x + 0.75, y + 0.75, w - 1.5, h - 1.5);
    return palette.alarm[1];
  }
  if (found === "none") {
    context.fillStyle = palette.none.css;
    context.fillRect(x, y, w, h);
    return palette.none.ink;
  }
  if (found === "zero") {
    context.fillStyle = palette.paper;
    context.fillRect(x, y, w, h);
    context.strokeStyle = palette.muted;
    context.lineWidth = 1;
    if (w > 3 && h > 3) context.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
    if (w > 7 && h > 7) {
      context.beginPath();
      context.moveTo(x + 2, y + h - 2);
      context.lineTo(x + w - 2, y + 2);
      context.stroke();
    }
    return palette.ink;
  }
  context.fillStyle = found.css;
  context.fillRect(x, y, w, h);
  return found.ink;
}

// Cells too small to be seen that must be: painted last, over their neighbours.
function paintTiny(context, boxes, palette) {
  for (const { x, y, w, h } of boxes) {
    const [wide, tall] = [Math.max(w, 4), Math.max(h, 4)];
    context.fillStyle = palette.alarm[0];
    context.fillRect(Math.round(x + w / 2 - wide / 2), Math.round(y + h / 2 - tall / 2), wide, tall);
  }
}

// What a cell of one tensor is painted with.
function lookOf(model, scale, palette, at) {
  if (model.sick[at]) return "sick";
  const value = scale.measure.values[at];
  if (Number.isNaN(value) || (value === 0 && scale.healthy)) return "none";
  return scale.zero(value) ? "zero" : scale.swatch(value, palette);
}

// The legend: the colours with their ends, and the patterns that occur.
function drawLegend(place, page) {
  const { model, measure, scale, palette } = page;
  empty(place);
  const marks = make("div", "marks");
  const mark = (found, text) => {
    const canvas = document.createElement("canvas");
    paintCell(sizeCanvas(canvas, 14, 14), { x: 0, y: 0, w: 14, h: 14 }, found, palette);
    marks.append(make("span", "mark", canvas, text));
  };
  if (scale.kind === "category") {
    const used = new Set(measure.values.filter((value) => !Number.isNaN(value)));
    measure.labels.forEach((label, value) => {
      if (used.has(value) && marks.childElementCount < 10) mark(scale.swatch(value, palette), clipped(String(label), 24));
    });
  } else {
    const bar = make("div", "bar");
    bar.hidden = !scale.usable;
    const canvas = document.createElement("canvas");
    canvas.setAttribute("aria-hidden", "true");
    const map = scale.colours(palette);
    const context = sizeCanvas(canvas, 168, 10);
    for (let x = 0; x < 168; x++) {
      context.fillStyle = map[Math.round((x / 167) * (map.length - 1))].css;
      context.fillRect(x, 0, 1, 10);
    }
    const say = (value) => measureText(measure, value);
    bar.append(
      canvas,
      make(
        "div",
        "ticks",
        make("span", "", `${scale.below ? "≤ " : ""}${say(scale.low)}`),
        make("span", "", say(scale.between(0.5))),
        make("span", "", `${scale.above ? "≥ " : ""}${say(scale.high)}`),
      ),
    );
    place.append(bar);
    if (scale.zeros) mark("zero", "zero");
    if (scale.healthy) mark("none", "none");
    else if (measure.values.some((value, at) => Number.isNaN(value) && !model.sick[at])) mark("none", "no value");
  }
  if (model.sick.includes(1)) mark("sick", "NaN or Inf");
  place.append(marks);
  place.setAttribute("aria-label", `Legend: ${measure.label}`);
  place.title = measure.help ? shown(measure.help) : "";
}
