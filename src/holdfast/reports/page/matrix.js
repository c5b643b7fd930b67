// Layer by role: a heat map for each stack of layers. A row is the number in the name, a column is the rest of it.
//
// Several tensors of one layer and role (experts) are folded into one cell, which shows the worst of them; the column's title opens
// a map with a column an expert.

const MOST_PANELS = 16;
const MOST_COLUMNS = 180; // of a picture; a file may have a role for each of its tensors
const MOST_EXPERTS = 1024;
const ROW_LABEL = 40;
const TILT = (-52 * Math.PI) / 180;

// Stacks of the tensors that are shown: {stem, columns: [{label, role, cells: Map(layer -> [tensor…]), folded}], layers: [number…]}.
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
  return { stem: `each expert: ${column.label}`, columns: numbered.slice(0, MOST_EXPERTS), left: Math.max(0, numbered.length - MOST_EXPERTS), layers: [...column.cells.keys()].sort((a, b) => a - b), experts: true };
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

function makePanel(page, stack, whenExpanded) {
  const canvas = make("canvas");
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-roledescription", "heat map");
  canvas.setAttribute("aria-describedby", "matrix-help");
  const mark = make("div", "here");
  mark.hidden = true;
  const tall = make("div", "tall");
  const scroller = make("div", "scroller", tall);
  const stage = make("div", "stage", canvas, mark);
  const title = make("h3", "", clipped(stack.stem, 90) || "all");
  const more = stack.left ? make("p", "muted", `and ${grouped.format(stack.left)} more columns: filter by name to see them here`) : null;
  const panel = make("div", "panel", title, stage, more);
  const titles = columnTitles(stack.columns);
  const middles = new Map();
  let cells = null; // the geometry of the last drawing
  let focused = null; // [row, column]
  const rows = stack.layers.length;
  canvas.setAttribute("aria-label", `${clipped(stack.stem, 90)}: ${plural(rows, "layer")} by ${plural(stack.columns.length, stack.experts ? "expert" : "role")}`);
  const tallest = 900;
  const rowHeight = Math.max(7, Math.min(22, Math.floor(600 / rows)));
  const scrolls = rows * rowHeight > tallest;
  if (scrolls) {
    stage.replaceChildren(scroller);
    tall.append(canvas, mark);
    scroller.addEventListener("scroll", draw, { passive: true });
  }

  function measureHead(context) {
    context.font = `11px ${page.font}`;
    const longest = Math.max(...titles.map((text) => context.measureText(`${clipped(text, 34)} ⊞`).width));
    return { up: Math.ceil(longest * Math.sin(-TILT)) + 10, right: Math.ceil(longest * Math.cos(TILT)) };
  }

  function draw() {
    const room = Math.max(byId("matrix").clientWidth, 200);
    const flat = stack.experts;
    const context0 = canvas.getContext("2d");
    const head = flat ? { up: 20, right: 0 } : measureHead(context0);
    const columns = stack.columns.length;
    const fitting = (room - ROW_LABEL - Math.min(head.right, room / 4) - 4) / columns;
    const columnWidth = flat ? Math.max(0.5, Math.min(26, fitting)) : Math.max(1, Math.min(64, fitting > 6 ? Math.floor(fitting) : fitting));
    const spread = Math.min(head.right, Math.max(0, room - ROW_LABEL - columns * columnWidth - 2));
    const width = Math.min(room, ROW_LABEL + columns * columnWidth + spread);
    const viewport = scrolls ? 640 : head.up + rows * rowHeight + 2;
    const scrolled = scrolls ? scroller.scrollTop : 0;
    if (scrolls) {
      scroller.style.height = `${viewport}px`;
      scroller.style.width = `${width + 16}px`;
      tall.style.height = `${head.up + rows * rowHeight + 2}px`;
    }
    const context = sizeCanvas(canvas, width, viewport);
    cells = { left: ROW_LABEL, top: head.up, columnWidth, rowHeight, scrolled };
    const { palette } = page;
    const first = Math.max(0, Math.floor(scrolled / rowHeight));
    const last = Math.min(rows, Math.ceil((scrolled + viewport) / rowHeight));
    const rim = columnWidth > 5 && rowHeight > 5 ? 1 : 0;
    stack.columns.forEach((column, place) => {
      const middle = middles.get(column) ?? middleOf(column, page);
      middles.set(column, middle);
      for (let row = first; row < last; row++) {
        const cell = column.cells.get(stack.layers[row]);
        if (!cell) continue;
        const at = worstOf(cell, page, middle);
        const box = boxOf(row, place);
        const look = page.relative ? relativeLook(page, at, middle) : lookOf(page.model, page.scale, palette, at);
        const ink = paintCell(context, { ...box, w: box.w - rim, h: box.h - rim }, look, palette);
        if (columnWidth >= 44 && rowHeight >= 15) writeValue(context, box, at, ink, look);
      }
    });
    context.clearRect(0, 0, width, head.up);
    drawRowLabels(context, first, last);
    if (flat) drawExpertLabels(context);
    else drawTitles(context, head);
    placeMark(mark, focused && boxOf(...focused));
  }

  function boxOf(row, column) {
    return {
      x: cells.left + column * cells.columnWidth,
      y: cells.top + row * cells.rowHeight - cells.scrolled,
      w: cells.columnWidth,
      h: cells.rowHeight,
    };
  }

  function writeValue(context, box, at, ink, look) {
    const text = look === "sick" ? "NaN/Inf" : measureText(page.measure, page.measure.values[at]);
    context.font = `10px ${page.font}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    if (context.measureText(text).width < box.w - 4) {
      if (look === "sick") {
        context.fillStyle = page.palette.alarm[0];
        const width = context.measureText(text).width + 4;
        context.fillRect(box.x + box.w / 2 - width / 2, box.y + 2, width, box.h - 5);
      }
      context.fillStyle = ink;
      context.fillText(text, box.x + box.w / 2, box.y + box.h / 2);
    }
    context.textAlign = "left";
  }

  function drawRowLabels(context, first, last) {
    context.font = `11px ${page.font}`;
    context.fillStyle = page.palette.muted;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const every = [1, 2, 4, 5, 8, 10, 20, 50].find((step) => step * rowHeight >= 13) || 100;
    for (let row = first; row < last; row++) {
      if (row % every) continue;
      const { y, h } = boxOf(row, 0);
      if (y >= cells.top - 1) context.fillText(String(stack.layers[row]), ROW_LABEL - 7, y + h / 2);
    }
    context.textAlign = "left";
  }

  function drawTitles(context, head) {
    context.font = `11px ${page.font}`;
    context.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(12 / cells.columnWidth));
    stack.columns.forEach((column, place) => {
      if (place % every) return;
      context.save();
      context.translate(cells.left + (place + 0.5) * cells.columnWidth, head.up - 5);
      context.rotate(TILT);
      context.fillStyle = column.folded ? page.accent : page.palette.ink;
      context.fillText(clipped(titles[place], 34) + (column.folded ? " ⊞" : ""), 0, 0);
      context.restore();
    });
  }

  function drawExpertLabels(context) {
    context.font = `10px ${page.font}`;
    context.fillStyle = page.palette.muted;
    context.textAlign = "center";
    const every = [1, 2, 4, 8, 16, 32, 64, 128, 256].find((step) => step * cells.columnWidth >= 24) || 512;
    stack.columns.forEach((column, place) => {
      if (place % every === 0) context.fillText(titles[place], cells.left + (place + 0.5) * cells.columnWidth, 10);
    });
    context.textAlign = "left";
  }

  function describe(row, place) {
    const { model, measure } = page;
    const column = stack.columns[place];
    const cell = column.cells.get(stack.layers[row]);
    if (!cell) return null;
    const at = worstOf(cell, page, middles.get(column));
    const lines = [brief(model, at), measured(model, measure, at)];
    if (cell.length > 1) {
      const number = model.expert[at] < 0 ? cell.indexOf(at) : model.expert[at];
      lines.push(`the worst of ${cell.length}: expert ${number}`);
    }
    const middle = middles.get(column);
    if (page.relative && !Number.isNaN(middle) && page.scale.kind !== "category") {
      lines.push(`median of the role: ${measureText(measure, page.scale.kind === "log" ? 10 ** middle : middle)}`);
    }
    return { at, title: clipped(model.names[at]), lines, many: cell.length > 1, column };
  }

  function under(x, y) {
    if (!cells) return null;
    const place = Math.floor((x - cells.left) / cells.columnWidth);
    if (place < 0 || place >= stack.columns.length) return null;
    if (y < cells.top) return { head: place };
    const row = Math.floor((y - cells.top + cells.scrolled) / cells.rowHeight);
    return row < rows ? { row, place } : null;
  }

  function press(found) {
    if (!found) return;
    if ("head" in found) {
      if (stack.columns[found.head].folded) whenExpanded(stack.columns[found.head]);
      return;
    }
    const told = describe(found.row, found.place);
    if (!told) return;
    if (told.many) whenExpanded(told.column);
    page.open(told.at, canvas);
  }

  function focus(row, place) {
    focused = [Math.min(rows - 1, Math.max(0, row)), Math.min(stack.columns.length - 1, Math.max(0, place))];
    if (scrolls) {
      const top = focused[0] * cells.rowHeight;
      if (top < scroller.scrollTop) scroller.scrollTop = top;
      else if (top > scroller.scrollTop + 560 - cells.top) scroller.scrollTop = top - 560 + cells.top;
      draw();
    }
    const box = boxOf(...focused);
    placeMark(mark, box);
    const told = describe(...focused);
    const column = stack.experts ? `expert ${titles[focused[1]]}` : shown(titles[focused[1]]);
    const where = `layer ${stack.layers[focused[0]]}, ${column}`;
    announce(told ? `${where}: ${told.lines.join(", ")}` : `${where}: nothing`);
    const { left, top } = canvas.getBoundingClientRect();
    if (told) showTip(left + box.x + box.w, top + box.y, told.title, told.lines);
    else hideTip();
  }

  canvas.addEventListener("pointermove", (event) => {
    if (event.pointerType === "touch") return;
    const found = under(event.offsetX, event.offsetY);
    const told = found && "row" in found ? describe(found.row, found.place) : null;
    const folds = found && "head" in found && stack.columns[found.head].folded;
    canvas.classList.toggle("points", Boolean(told || folds));
    placeMark(mark, told && boxOf(found.row, found.place));
    if (told) showTip(event.clientX, event.clientY, told.title, told.lines);
    else if (folds) showTip(event.clientX, event.clientY, shown(titles[found.head]), ["several tensors a layer: click for one column each"]);
    else hideTip();
  });
  canvas.addEventListener("pointerleave", () => {
    hideTip();
    placeMark(mark, focused && document.activeElement === canvas ? boxOf(...focused) : null);
  });
  canvas.addEventListener("click", (event) => press(under(event.offsetX, event.offsetY)));
  canvas.addEventListener("blur", () => {
    placeMark(mark, null);
    hideTip();
  });
  canvas.addEventListener("focus", () => {
    if (focused) placeMark(mark, boxOf(...focused));
  });
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-10, 0], PageDown: [10, 0] };
    if (moves[event.key]) {
      if (!focused) focus(0, 0);
      else focus(focused[0] + moves[event.key][0], focused[1] + moves[event.key][1]);
    } else if (event.key === "Home") focus(0, focused ? focused[1] : 0);
    else if (event.key === "End") focus(rows - 1, focused ? focused[1] : 0);
    else if ((event.key === "Enter" || event.key === " ") && focused) press({ row: focused[0], place: focused[1] });
    else return;
    event.preventDefault();
  });
  return {
    panel,
    title,
    size: draw,
    colour: () => {
      middles.clear();
      draw();
    },
  };
}

function makeMatrix(page) {
  const host = byId("panels");
  let panels = [];

  function rebuild() {
    empty(host);
    const stacks = stacksOf(page.model, page.shown);
    panels = [];
    for (const stack of stacks.slice(0, MOST_PANELS)) add(stack, null);
    if (stacks.length > MOST_PANELS) {
      host.append(make("p", "muted", `and ${plural(stacks.length - MOST_PANELS, "smaller stack")}: filter by name to see them here`));
    }
    for (const one of panels) one.colour();
    openExperts(stacks);
    byId("matrix").classList.toggle("nothing", !stacks.length);
    drawOutside();
  }

  function add(stack, after) {
    const one = makePanel(page, stack, (column) => expand(column, one));
    if (after) after.panel.after(one.panel);
    else host.append(one.panel);
    panels.push(one);
    return one;
  }

  // One map of experts is open from the start: of a role in which something stands out, if there is one.
  function openExperts(stacks) {
    const folded = stacks.slice(0, MOST_PANELS).flatMap((stack, place) => stack.columns.filter((column) => column.folded).map((column) => [column, panels[place]]));
    if (!folded.length) return;
    const roles = page.standouts.flatMap(({ tensors }) => tensors.slice(0, 40).map((at) => page.model.role[at]));
    const odd = roles.find((role) => folded.some(([column]) => column.role === role));
    expand(...(folded.find(([column]) => column.role === odd) || folded[0]));
  }

  function expand(column, parent) {
    const there = panels.find((one) => one.column === column);
    if (there) return;
    const one = add(expertsOf(page.model, column), parent);
    one.column = column;
    one.title.append(" ", button("Close", "quiet small", () => {
      one.panel.remove();
      panels = panels.filter((other) => other !== one);
    }));
    one.colour();
  }

  // What has no number in its name: a few patches with their names, not a picture.
  function drawOutside() {
    const outside = empty(byId("outside"));
    const members = [];
    for (const at of page.shown) if (page.model.layer[at] < 0) members.push(at);
    byId("matrix").classList.toggle("nothing", !members.length && !panels.length);
    if (!members.length) return;
    outside.append(make("h3", "", "Outside the layers"));
    const list = make("ul", "patches");
    for (const at of members.slice(0, 40)) {
      const canvas = document.createElement("canvas");
      const look = lookOf(page.model, page.scale, page.palette, at);
      paintCell(sizeCanvas(canvas, 14, 14), { x: 0, y: 0, w: 14, h: 14 }, look, page.palette);
      const link = button("", "link patch", () => page.open(at, link));
      link.append(canvas, make("span", "", clipped(page.model.names[at], 60)));
      list.append(make("li", "", link, make("span", "muted", ` ${measureText(page.measure, page.measure.values[at])}`)));
    }
    outside.append(list);
    if (members.length > 40) outside.append(make("p", "muted", `and ${plural(members.length - 40, "tensor")} more in the table`));
  }

  // The colours of the comparison, which are not those of the legend above.
  function drawKey() {
    const key = empty(byId("relative-key"));
    key.hidden = !page.relative || page.scale.kind === "category";
    if (key.hidden) return;
    const canvas = document.createElement("canvas");
    const context = sizeCanvas(canvas, 120, 10);
    const { diverging } = page.palette;
    for (let x = 0; x < 120; x++) {
      context.fillStyle = diverging[Math.round((x / 119) * (diverging.length - 1))].css;
      context.fillRect(x, 0, 1, 10);
    }
    const [below, above] = page.scale.kind === "log" ? ["⅛ of the median", "8 times"] : ["below", "above"];
    key.append(below, canvas, above);
  }

  byId("relative").addEventListener("change", (event) => {
    page.relative = event.target.checked;
    drawKey();
    for (const one of panels) one.colour();
  });
  return {
    section: byId("matrix"),
    filter: rebuild,
    colour: () => {
      for (const one of panels) one.colour();
      drawOutside();
      drawKey();
    },
    size: () => panels.forEach((one) => one.size()),
  };
}
