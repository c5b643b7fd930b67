// Which tensor stands where in the heat maps: stacks of layers, their columns, and which of several tensors of a cell is shown.
//
// Several tensors of one layer and role (experts) are folded into one cell, which shows the worst of them.

const MOST_COLUMNS = 180; // of a picture; a file may have a role for each of its tensors
const MOST_EXPERTS = 1024;

// Stacks of the tensors that are shown: {stem, columns: [{label, role, cells: Map(layer -> [tensor…]), folded}], layers:
// [number…]}.
function stacksOf(model, members) {
  const stacks = new Map();
  const columns = new Map();
  for (const at of members) {
    if (model.layer[at] < 0) continue;
    const role = model.role[at];
    let column = columns.get(role);
    if (!column) {
      const [stem, ...rest] = model.roles[role].split("*");
      column = { role, label: rest.join("*").replace(/^\./, "") || stem, cells: new Map(), folded: false, experts: new Set() };
      columns.set(role, column);
      if (!stacks.has(stem)) stacks.set(stem, { stem: stem.replace(/\.$/, ""), columns: [], layers: new Set() });
      stacks.get(stem).columns.push(column);
      column.stack = stacks.get(stem);
    }
    const cell = column.cells.get(model.layer[at]);
    if (cell) {
      cell.push(at);
      column.folded = true;
    } else {
      column.cells.set(model.layer[at], [at]);
    }
    column.stack.layers.add(model.layer[at]);
  }
  return [...stacks.values()]
    .map((stack) => ({
      ...stack,
      columns: stack.columns.slice(0, MOST_COLUMNS),
      left: Math.max(0, stack.columns.length - MOST_COLUMNS),
      layers: [...stack.layers].sort((a, b) => a - b),
    }))
    .sort((a, b) => b.layers.length * b.columns.length - a.layers.length * a.columns.length);
}

// A stack with a column an expert, of one folded column.
function expertsOf(model, column) {
  const experts = new Map();
  for (const [layer, cell] of column.cells) {
    cell.forEach((at, place) => {
      const number = model.expert[at] < 0 ? place : model.expert[at];
      if (!experts.has(number)) experts.set(number, { role: column.role, label: String(number), cells: new Map(), folded: false });
      const one = experts.get(number).cells;
      if (one.has(layer)) one.get(layer).push(at);
      else one.set(layer, [at]);
    });
  }
  const numbered = [...experts.keys()].sort((a, b) => a - b).map((number) => experts.get(number));
  return {
    stem: `each expert: ${column.label}`,
    columns: numbered.slice(0, MOST_EXPERTS),
    left: Math.max(0, numbered.length - MOST_EXPERTS),
    layers: [...column.cells.keys()].sort((a, b) => a - b),
    experts: true,
  };
}

// The tensor of a cell that a person should see. NaN first; then the most zeros, the least alike, or what is farthest from the
// median of its role.
function worstOf(cell, page, middle) {
  const { model, measure, scale } = page;
  if (cell.length === 1) return cell[0];
  const values = measure.values;
  const badness = (at) => {
    if (model.sick[at]) return Infinity;
    const value = values[at];
    if (Number.isNaN(value)) return -Infinity;
    if (measure.key === "cosine") return -value;
    if (measure.scale === "share" || measure.scale === "category") return value;
    return scale.zero(value) ? 1e9 : Math.abs(scale.toScale(value) - middle);
  };
  let worst = cell[0];
  let most = badness(worst);
  for (const at of cell) {
    const much = badness(at);
    if (much > most) [worst, most] = [at, much];
  }
  return worst;
}

// The median of a column on its scale.
function middleOf(column, { measure, scale }) {
  if (scale.kind === "category") return NaN;
  const values = [];
  for (const cell of column.cells.values()) {
    for (const at of cell) {
      const value = measure.values[at];
      if (!Number.isNaN(value) && !scale.zero(value)) values.push(scale.toScale(value));
    }
  }
  return median(values);
}

// How far a value is from its role's median, as a swatch: a factor of eight, or half of the scale, is the end of the colours.
function relativeLook(page, at, middle) {
  const { model, measure, scale, palette } = page;
  const value = measure.values[at];
  if (model.sick[at] || Number.isNaN(value) || scale.zero(value) || scale.kind === "category") {
    return lookOf(model, scale, palette, at);
  }
  const reach = scale.kind === "log" ? Math.log10(8) : scale.width / 2 || 1;
  const away = Math.min(1, Math.max(-1, (scale.toScale(value) - middle) / reach));
  return palette.diverging[Math.round(((away + 1) / 2) * (palette.diverging.length - 1))];
}

// Titles of columns without what all of them end with: ".weight" says nothing where every one has it.
function columnTitles(columns) {
  const labels = columns.map((column) => column.label);
  const bare = labels.map((label) => label.replace(/\.weight$/, ""));
  const met = new Map();
  for (const label of bare) met.set(label, (met.get(label) || 0) + 1);
  return bare.map((label, at) => (met.get(label) > 1 || !label ? labels[at] : label));
}
