// What a person would look for first, found by the numbers: NaN and Inf, those that appeared before all others, tensors that are all zero, tensors far from the others of
// their role, and those that did not change while their siblings did. Each is a line with a link; few, the worst first.

const MOST = 6; // lines of one kind
const FAR = 3; // powers of two from the median of the role
const SPREADS = 6; // and so many times the usual distance from it
const MORE = 0.005; // of a tensor's elements are zero beyond what is usual: one head of many
const SIBLINGS = 4; // tensors of a role, at least, of which one can stand out

function membersByRole(model) {
  const roles = new Map();
  for (let at = 0; at < model.count; at++) {
    if (model.layer[at] < 0) continue;
    if (!roles.has(model.role[at])) roles.set(model.role[at], []);
    roles.get(model.role[at]).push(at);
  }
  return [...roles.values()].filter((members) => members.length >= SIBLINGS);
}

// Tensors far from the median of their role: [tensor, how many powers of two].
function farOnes(measure, roles) {
  const found = [];
  for (const members of roles) {
    const usable = members.filter((at) => measure.values[at] > 0);
    if (usable.length < SIBLINGS) continue;
    const logs = usable.map((at) => Math.log2(measure.values[at]));
    const middle = median(logs);
    const spread = median(logs.map((value) => Math.abs(value - middle)));
    usable.forEach((at, place) => {
      const away = logs[place] - middle;
      if (Math.abs(away) > FAR && Math.abs(away) > SPREADS * spread) found.push([at, away]);
    });
  }
  return found.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
}

// Tensors with more zeros than the others of their role: a dead head, rows that were never trained. The worst first.
function zeroedOnes(measure, roles, usual) {
  const found = [];
  for (const members of roles) {
    const usable = members.filter((at) => !Number.isNaN(measure.values[at]));
    if (usable.length < SIBLINGS) continue;
    const middle = median(usable.map((at) => measure.values[at]));
    const spread = median(usable.map((at) => Math.abs(measure.values[at] - middle)));
    for (const at of usable) {
      const away = measure.values[at] - middle;
      if (measure.values[at] === 1 || away < MORE || away < SPREADS * spread) continue;
      found.push(at);
      usual.set(at, middle);
    }
  }
  return found.sort((a, b) => measure.values[b] - usual.get(b) - measure.values[a] + usual.get(a));
}

// Lines to show: {kind, tensors: [tensor…], text(at)}.
function findStandouts(model) {
  const measureOf = (key) => model.measures.find((measure) => measure.key === key);
  const everyone = Array.from({ length: model.count }, (_, at) => at);
  const found = [];
  const add = (kind, tensors, text) => tensors.length && found.push({ kind, tensors, text });
  const appeared = measureOf(APPEARED);
  if (appeared)
    add(
      "NaN or Inf appeared",
      everyone.filter((at) => appeared.values[at] > 0).sort((a, b) => appeared.values[b] - appeared.values[a]),
      (at) => withFirst(plural(appeared.values[at], "element"), model.appeared.get(at)),
    );
  const sick = measureOf(SICK);
  add(
    "NaN or Inf",
    everyone.filter((at) => sick && sick.values[at] > 0),
    (at) => {
      const much = sick.scale === "share" ? measureText(sick, sick.values[at]) : plural(sick.values[at], "element");
      return withFirst(much, model.first.get(at));
    },
  );
  const zeros = measureOf("zeros");
  if (zeros)
    add(
      "all zero",
      everyone.filter((at) => zeros.values[at] === 1 && model.nbytes[at] > 0),
      (at) => shapeText(model.shape(at)),
    );
  const roles = membersByRole(model);
  if (zeros) {
    const usual = new Map();
    add(
      "more zeros than its role",
      zeroedOnes(zeros, roles, usual),
      (at) => `${shareText(zeros.values[at])}, median ${shareText(usual.get(at))}`,
    );
  }
  for (const key of ["rms", "change"]) {
    const measure = measureOf(key);
    if (!measure) continue;
    const far = farOnes(measure, roles).filter(([at]) => !model.sick[at]);
    const factors = new Map(far);
    add(
      `${measure.label} unlike its role`,
      far.map(([at]) => at),
      (at) => {
        const power = factors.get(at);
        const factor = 2 ** Math.abs(power);
        const much = numberText(Number(factor.toPrecision(2)));
        return `${measureText(measure, measure.values[at])}, ${much}× ${power > 0 ? "above" : "below"} the median`;
      },
    );
  }
  const change = measureOf("change");
  if (change) {
    // Of a role that changed, those that did not: a layer that did not train. Norms and buffers that never change are no news.
    const still = [];
    for (const members of roles) {
      const known = members.filter((at) => !Number.isNaN(change.values[at]));
      const same = known.filter((at) => change.values[at] === 0);
      if (same.length && same.length < known.length / 2) still.push(...same);
    }
    add("did not change, its siblings did", still, () => "");
  }
  return found;
}

function withFirst(text, first) {
  const place = firstText(first);
  return place ? `${text}, ${place}` : text;
}

function drawStandouts(page) {
  const { model } = page;
  const list = empty(byId("standouts-list"));
  for (const { kind, tensors, text } of page.standouts) {
    const line = make("li", "", make("span", kind.startsWith("NaN") ? "flag NaN" : "flag", kind));
    tensors.slice(0, MOST).forEach((at) => {
      const link = button(clipped(model.names[at], 80), "link", () => page.open(at, link));
      const said = text(at);
      line.append(make("span", "found", link, said ? make("span", "muted", ` ${said}`) : ""));
    });
    if (tensors.length > MOST) {
      const layers = [...new Set(tensors.map((at) => model.layer[at]))].filter((layer) => layer >= 0).sort((a, b) => a - b);
      const where = layers.length ? `, in layers ${clipped(rangesText(layers), 80)}` : "";
      line.append(make("span", "muted", `and ${plural(tensors.length - MOST, "other")}${where}`));
    }
    list.append(line);
  }
  if (!list.childElementCount && model.count) {
    const keys = new Set(model.measures.map(({ key }) => key));
    const looked = [];
    if (keys.has(SICK)) looked.push("no NaN");
    if (keys.has("zeros")) looked.push("no tensor of zeros");
    if (keys.has("rms")) looked.push("none far from the others of its role");
    if (keys.has("change")) looked.push("none that changed unlike the others of its role");
    if (looked.length) list.append(make("li", "muted", `Nothing stands out: ${looked.join(", ")}.`));
  }
  byId("standouts").hidden = !list.childElementCount;
}
