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

// A map from rows to values, of columns that have an entry for some rows only.
function byRow(rows, value) {
  return new Map((rows || []).map((row, place) => [row, value(place)]));
}

// The first NaN and the first infinity of some rows: {nan, inf}, each the place of an element or null.
function firstPlaces(column) {
  return byRow(column && column.at, (place) => ({ nan: column.nan[place], inf: column.inf[place] }));
}

// How a tensor is stored, by its place in columns such as those of the document.
function storedAt(columns, place, strides) {
  return {
    dtype: columns.dtype.labels[columns.dtype.at[place]],
    shape: columns.shape.labels[columns.shape.at[place]],
    nbytes: columns.nbytes[place],
    file: columns.file.labels[columns.file.at[place]],
    start: columns.start[place],
    end: columns.end[place],
    strides: strides.get(place),
  };
}

// All that is known of the values of a tensor, by its place in columns of details.
function detailsAt(details, place, first) {
  const pick = (column) => (column ? column[place] : null);
  return {
    exponents: pick(details.exponents),
    negative: pick(details.negative),
    quantiles: pick(details.quantiles),
    rows: pick(details.rows),
    columns: pick(details.columns),
    singular: pick(details.singular),
    first_nan: first && first.nan,
    first_inf: first && first.inf,
  };
}

// The other side of a difference: for each row that both checkpoints have, how its counterpart is stored and its numbers.
function makeCounterparts(doc) {
  const columns = doc.counterparts;
  if (!columns) return null;
  const strides = byRow(columns.strides.at, (place) => columns.strides.values[place]);
  const places = byRow(columns.at, (place) => place);
  const read = byRow(columns.read, (place) => place);
  const first = firstPlaces(columns.nonfinite);
  return {
    stored: (row) => (places.has(row) ? storedAt(columns, places.get(row), strides) : null),
    // Null for a counterpart with the same numbers, and without numbers.
    details: (row) => {
      const place = read.get(places.get(row));
      return place === undefined ? null : detailsAt(columns.details, place, first.get(place));
    },
    // Undefined for a measure that is not of one side.
    measure: (row, key) => {
      const values = columns.measures && columns.measures[key];
      const place = read.get(places.get(row));
      return values && place !== undefined ? (values[place] ?? NaN) : undefined;
    },
    hasMeasure: (key) => Boolean(columns.measures && columns.measures[key]),
  };
}

// The sides that have the tensor of a row, the first checkpoint before the second. A page that is no difference has one side,
// without a label.
function sidesOf(model, at) {
  const { doc } = model;
  const details = doc.details ? detailsAt(doc.details, at, model.first.get(at)) : null;
  const own = { ...storedAt(doc.tensors, at, model.strides), name: model.names[at], path: doc.path, details, other: 0 };
  if (!model.state) return [own];
  const state = STATES[model.state[at]];
  const alike = state === "same" || state === "renamed";
  const label = (side, second) => ({ ...side, label: second ? "Second" : "First", path: second ? doc.other : doc.path, alike });
  // A renamed tensor stands under its new name, as the second has it.
  const ownIsSecond = state === "added" || state === "renamed";
  const stored = model.counterparts && model.counterparts.stored(at);
  if (!stored) return [label(own, ownIsSecond)];
  const name = model.was.get(at) ?? model.names[at];
  const other = { ...stored, name, details: alike ? details : model.counterparts.details(at), other: 1 };
  const sides = [label(own, ownIsSecond), label(other, !ownIsSecond)];
  return ownIsSecond ? sides.reverse() : sides;
}

// "first NaN at [17, 204]", of the first places that are known; empty where none is.
function firstText(first) {
  if (!first) return "";
  const parts = [];
  if (first.nan && first.nan.length) parts.push(`first NaN at ${shapeText(first.nan)}`);
  if (first.inf && first.inf.length) parts.push(`first Inf at ${shapeText(first.inf)}`);
  return parts.join(", ");
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
  const strides = byRow(tensors.strides && tensors.strides.at, (place) => tensors.strides.values[place]);
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
    first: firstPlaces(doc.nonfinite),
    appeared: firstPlaces(tensors.appeared),
    counterparts: makeCounterparts(doc),
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
