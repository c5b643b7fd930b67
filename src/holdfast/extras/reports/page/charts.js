// Small charts, drawn as SVG: few marks, colours by class, and a sentence that says what they show to those who cannot see them.

const WIDE = 360;

function chart(height, told, ...marks) {
  const svg = shape("svg", { viewBox: `0 0 ${WIDE} ${height}`, class: "chart", role: "img" });
  svg.append(shape("title", {}, told), ...marks);
  return svg;
}

function words(x, y, text, anchor = "start") {
  return shape("text", { x, y, "text-anchor": anchor, class: "tick" }, text);
}

// Bars from a line at the bottom. `ticks` are [place from 0 to 1, text].
function barChart(values, { told, ticks = [], title = () => "", height = 96 }) {
  const floor = height - 16;
  const most = Math.max(...values.map((value) => (Number.isFinite(value) ? value : 0)), 1e-300);
  const step = WIDE / values.length;
  const marks = values.map((value, at) => {
    const tall = Number.isFinite(value) ? Math.max(value > 0 ? 1 : 0, (value / most) * (floor - 6)) : 0;
    const bar = shape("rect", {
      x: (at * step).toFixed(2),
      y: (floor - tall).toFixed(2),
      width: Math.max(step - (step > 3 ? 1 : 0), 0.6).toFixed(2),
      height: tall.toFixed(2),
      class: "bar",
    });
    const text = title(at);
    if (text) bar.append(shape("title", {}, text));
    return bar;
  });
  marks.push(shape("line", { x1: 0, x2: WIDE, y1: floor + 0.5, y2: floor + 0.5, class: "axis" }));
  for (const [share, text] of ticks) {
    const anchor = share < 0.08 ? "start" : share > 0.92 ? "end" : "middle";
    marks.push(words((share * WIDE).toFixed(1), height - 3, text, anchor));
  }
  return chart(height, told, ...marks);
}

// A number on an axis, with as many digits as tell its ends apart.
function axisText(value, span) {
  const digits = Math.max(0, 2 - Math.floor(Math.log10(span)));
  return digits > 5 || Math.abs(value) >= 1e6 ? value.toExponential(2) : value.toFixed(digits);
}

// Points joined by a line; gaps where there is no value. On a logarithmic axis where `log`.
function lineChart(points, { told, log = false, height = 110, left = "", right = "" }) {
  const usable = points.filter(([, y]) => Number.isFinite(y) && (!log || y > 0));
  if (!usable.length) return null;
  const toScale = log ? Math.log10 : (value) => value;
  const xs = points.map(([x]) => x);
  const ys = usable.map(([, y]) => toScale(y));
  const [first, last] = [Math.min(...xs), Math.max(...xs)];
  let [low, high] = [Math.min(...ys), Math.max(...ys)];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const floor = height - 18;
  const across = (x) => 46 + ((x - first) / (last - first || 1)) * (WIDE - 54);
  const down = (y) => 8 + (1 - (toScale(y) - low) / (high - low)) * (floor - 16);
  const marks = [];
  for (const share of [0, 0.5, 1]) {
    const value = low + share * (high - low);
    const y = 8 + (1 - share) * (floor - 16);
    marks.push(shape("line", { x1: 46, x2: WIDE - 8, y1: y, y2: y, class: "grid-line" }));
    marks.push(words(42, y + 3.5, log ? numberText(10 ** value) : axisText(value, high - low), "end"));
  }
  let path = "";
  let joined = false;
  for (const [x, y] of points) {
    const there = Number.isFinite(y) && (!log || y > 0);
    if (there) path += `${joined ? "L" : "M"}${across(x).toFixed(1)} ${down(y).toFixed(1)}`;
    joined = there;
  }
  marks.push(shape("path", { d: path, class: "line" }));
  if (usable.length <= 60) {
    for (const [x, y, title] of usable) {
      const dot = shape("circle", { cx: across(x).toFixed(1), cy: down(y).toFixed(1), r: 2.4, class: "dot" });
      if (title) dot.append(shape("title", {}, title));
      marks.push(dot);
    }
  }
  marks.push(words(46, height - 4, left), words(WIDE - 8, height - 4, right, "end"));
  return chart(height, told, ...marks);
}

// Bars of two parts: what a step wrote, and what it shares with the one before.
function stackedChart(rows, { told, height = 110, left = "", right = "" }) {
  const floor = height - 18;
  const most = Math.max(...rows.map(({ own, shared }) => own + shared), 1);
  const step = (WIDE - 54) / rows.length;
  const marks = [];
  for (const share of [0, 0.5, 1]) {
    const y = floor - share * (floor - 12);
    marks.push(shape("line", { x1: 46, x2: WIDE - 8, y1: y, y2: y, class: "grid-line" }));
    marks.push(words(42, y + 3.5, nbytesText(Math.round(share * most)), "end"));
  }
  rows.forEach(({ own, shared, title, faded }, at) => {
    const tall = (nbytes) => (nbytes / most) * (floor - 12);
    const x = 46 + at * step + (step > 4 ? 1 : 0);
    const width = Math.max(step - (step > 4 ? 2 : 0), 0.7);
    const group = shape("g", faded ? { class: "faded" } : {});
    group.append(
      shape("title", {}, title),
      shape("rect", { x, y: floor - tall(own), width, height: tall(own), class: "bar" }),
      shape("rect", { x, y: floor - tall(own) - tall(shared), width, height: tall(shared), class: "bar second" }),
    );
    marks.push(group);
  });
  marks.push(words(46, height - 4, left), words(WIDE - 8, height - 4, right, "end"));
  return chart(height, told, ...marks);
}

// Where the values of a tensor lie: a line from the least to the largest, a box for the middle half, ticks between. The axis is
// symmetric and logarithmic far from zero, because weights are small and outliers are not.
function quantileChart(quantiles) {
  const [least, , , lower, middle, upper, , , largest] = quantiles;
  const unit = Math.max(Math.abs(lower), Math.abs(upper), 1e-12);
  const bent = (value) => Math.asinh(value / unit);
  const [low, high] = [bent(least), bent(largest)];
  const x = (value) => 8 + ((bent(value) - low) / (high - low || 1)) * (WIDE - 16);
  const marks = [shape("line", { x1: x(least), x2: x(largest), y1: 18, y2: 18, class: "axis" })];
  for (const value of [quantiles[1], quantiles[2], quantiles[6], quantiles[7]]) {
    marks.push(shape("line", { x1: x(value), x2: x(value), y1: 12, y2: 24, class: "axis" }));
  }
  marks.push(shape("rect", { x: x(lower), y: 8, width: Math.max(1, x(upper) - x(lower)), height: 20, class: "bar soft" }));
  marks.push(shape("line", { x1: x(middle), x2: x(middle), y1: 6, y2: 30, class: "line" }));
  if (least < 0 && largest > 0) {
    marks.push(shape("line", { x1: x(0), x2: x(0), y1: 30, y2: 34, class: "axis" }), words(x(0), 44, "0", "middle"));
  }
  marks.push(words(2, 44, numberText(least)), words(WIDE - 2, 44, numberText(largest), "end"));
  return chart(
    48,
    `from ${numberText(least)} to ${numberText(largest)}, half of them between ${numberText(lower)} and ${numberText(upper)}`,
    ...marks,
  );
}
