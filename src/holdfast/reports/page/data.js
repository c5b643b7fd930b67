// The document behind the page: JSON, packed by gzip and written in base64, and the columns that the pictures read.
//
// A tensor is a number here, its place in every column. No object is made for a tensor: a page may have 30,000.

const STATES = ["same", "changed", "added", "removed", "renamed", "not comparable"];
const SICK = "nonfinite";
const APPEARED = "appeared"; // of a diff: elements that became NaN or infinite

async function readDocument() {
  const packed = atob(byId("holdfast-data").textContent.trim());
  const bytes = new Uint8Array(packed.length);
  for (let at = 0; at < packed.length; at++) bytes[at] = packed.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// Names are stored without what they have in common with the one before.
function wholeNames({ shared, rest }) {
  const names = new Array(rest.length);
  let before = "";
  for (let at = 0; at < rest.length; at++) {
    before = before.slice(0, shared[at]) + rest[at];
    names[at] = before;
  }
  return names;
}

// Numbers with NaN for "none", so that a comparison with one is false without asking.
function numbers(values) {
  return Float64Array.from(values, (value) => (value === null ? NaN : value));
}

function groupsOf(column) {
  const groups = new Map();
  column.forEach((group, at) => {
    if (group < 0) return;
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(at);
  });
  return groups;
}

function allMeasures(doc) {
  const { tensors } = doc;
  const known = new Set(doc.measures.map((measure) => measure.key));
  const measures = doc.measures.map((measure) => ({ ...measure, values: measure.values && numbers(measure.values) }));
  if (!known.has("dtype")) measures.unshift({ key: "dtype", label: "dtype", help: "", scale: "category", values: null });
  if (!known.has("nbytes"))
    measures.unshift({ key: "nbytes", label: "bytes", help: "", scale: "log", values: numbers(tensors.nbytes) });
  if (tensors.state && !known.has("state")) {
    measures.unshift({ key: "state", label: "state", help: "", scale: "category", values: null });
  }
  for (const measure of measures) {
    if (measure.scale !== "category") continue;
    measure.labels ||= measure.key === "state" ? STATES : tensors.dtype.labels;
    measure.values ||= numbers(measure.key === "state" ? tensors.state : tensors.dtype.at);
  }
  return measures;
}

function makeModel(doc) {
  const { tensors } = doc;
  const count = tensors.count;
  const ties = groupsOf(tensors.tie);
  const nbytes = Float64Array.from(tensors.nbytes);
  const measures = allMeasures(doc);
  const sickness = measures.filter(({ key }) => key === SICK || key === APPEARED);
  // Bytes that several names share are drawn once, at the name that has most of them.
  const area = nbytes.slice();
  for (const members of ties.values()) {
    const most = members.reduce((one, other) => (nbytes[other] > nbytes[one] ? other : one));
    for (const member of members) if (member !== most) area[member] = 0;
  }
  const strides = new Map(tensors.strides ? tensors.strides.at.map((at, place) => [at, tensors.strides.values[place]]) : []);
  const was = new Map(tensors.was ? tensors.was.at.map((at, place) => [at, tensors.was.names[place]]) : []);
  return {
    doc,
    count,
    names: wholeNames(tensors.names),
    nbytes,
    area,
    ties,
    strides,
    was,
    measures,
    layer: Int32Array.from(tensors.layer),
    role: Int32Array.from(tensors.role.at),
    expert: tensors.expert ? Int32Array.from(tensors.expert) : new Int32Array(count).fill(-1),
    roles: tensors.role.labels,
    state: tensors.state || null,
    sick: Uint8Array.from({ length: count }, (_, at) => (sickness.some(({ values }) => values[at] > 0) ? 1 : 0)),
    dtype: (at) => tensors.dtype.labels[tensors.dtype.at[at]],
    shape: (at) => tensors.shape.labels[tensors.shape.at[at]],
    file: (at) => tensors.file.labels[tensors.file.at[at]],
    start: (at) => tensors.start[at],
    end: (at) => tensors.end[at],
    tied: (at) => (tensors.tie[at] < 0 ? [] : ties.get(tensors.tie[at]).filter((other) => other !== at)),
  };
}

// One line about a tensor, for tips and for screen readers.
function brief(model, at) {
  return `${model.dtype(at)} ${shapeText(model.shape(at))}, ${nbytesText(model.nbytes[at])}`;
}

function measureText(measure, value) {
  if (Number.isNaN(value)) return "–";
  if (measure.scale === "category") return shown(String(measure.labels[value] ?? value));
  if (measure.scale === "share") return shareText(value);
  return measure.key === "nbytes" ? nbytesText(value) : numberText(value);
}

// What the chosen measure says of a tensor, with its name.
function measured(model, measure, at) {
  const sick = model.sick[at] && measure.key !== SICK && measure.key !== APPEARED ? ", has NaN or Inf" : "";
  return `${measure.label}: ${measureText(measure, measure.values[at])}${sick}`;
}

function median(values) {
  if (!values.length) return NaN;
  const sorted = Float64Array.from(values).sort();
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
