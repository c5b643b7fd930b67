// A table that makes elements only for the rows that are seen, so that 30,000 rows cost as much as thirty. It is a real table: a
// screen reader is told how many rows there are and which one it is at. Arrows move, Enter opens, a column's title sorts.

const ROW = 29; // pixels; page.css says the same
const BEFORE = 8; // rows above and below the window, so that fast scrolling shows no gap
const PRINTED = 400; // rows on paper
const natural = new Intl.Collator("en", { numeric: true }); // layer 2 before layer 10

function classOf(column) {
  return ["number", "wide", "extra", "sized", "roomy", "loose", "name"].filter((key) => column[key]).join(" ");
}

// `columns`: {label, text(at), value(at) to sort by, number: right-aligned, wide and extra: taken away where there is little
// room, sized and roomy: wider, loose and name: take what is left}.
function makeTable(host, { label, columns, open, height = 14 }) {
  const head = make("thead");
  const body = make("tbody");
  const table = make("table", "grid", head, body);
  table.setAttribute("aria-label", label);
  const scroller = make("div", "rows", table);
  scroller.tabIndex = 0;
  scroller.setAttribute("role", "region");
  scroller.setAttribute("aria-label", `${label}. Arrow keys move between rows, Enter opens one.`);
  const more = make("p", "muted only-print");
  host.append(scroller, more);
  let members = [];
  let order = [];
  let sorted = { column: -1, down: false };
  let active = 0;
  let printing = false;
  let drawn = [0, 0]; // the first row that has an element, and the one after the last

  const titles = columns.map((column, place) => {
    const cell = make("th", classOf(column));
    cell.scope = "col";
    const press = button(clipped(column.label, 60), "sort", () => sortBy(place));
    press.title = shown(column.help || column.label);
    cell.append(press);
    return cell;
  });
  head.append(make("tr", "", ...titles));

  function sortBy(place) {
    const same = sorted.column === place;
    if (same && sorted.down !== Boolean(columns[place].number)) sorted = { column: -1, down: false };
    else sorted = { column: place, down: same ? !sorted.down : Boolean(columns[place].number) };
    arrange();
    scroller.scrollTop = 0;
    const how =
      sorted.column < 0
        ? "in the order of the checkpoint"
        : `sorted by ${columns[place].label}, ${sorted.down ? "largest first" : "smallest first"}`;
    announce(how);
  }

  function arrange() {
    titles.forEach((cell, place) => {
      if (sorted.column === place) cell.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    order = Array.from(members);
    if (sorted.column >= 0) {
      const { value } = columns[sorted.column];
      const keys = new Map(order.map((at) => [at, value(at)]));
      const sign = sorted.down ? -1 : 1;
      // What has no value is last, whichever way.
      const none = (key) => key === null || key === undefined || Number.isNaN(key);
      order.sort((a, b) => {
        const [left, right] = [keys.get(a), keys.get(b)];
        if (none(left) || none(right)) return none(left) - none(right);
        if (typeof left === "string") return sign * natural.compare(left, right);
        return left < right ? -sign : left > right ? sign : 0;
      });
    }
    active = Math.min(active, Math.max(0, order.length - 1));
    draw();
  }

  function spacer(rows) {
    const cell = make("td", "spacer");
    cell.style.height = `${rows * ROW}px`;
    const row = make("tr", "", cell);
    row.setAttribute("aria-hidden", "true");
    return row;
  }

  function rowOf(place) {
    const at = order[place];
    const row = make("tr", place === active ? "active" : "");
    row.setAttribute("aria-rowindex", String(place + 2));
    for (const column of columns) {
      const cell = make("td", classOf(column));
      if (column.mark) {
        const found = column.mark(at);
        if (found) cell.append(make("span", `flag ${found}`, found));
      }
      const text = column.text(at);
      cell.append(text);
      if (column.name) cell.title = text;
      row.append(cell);
    }
    row.addEventListener("click", () => {
      active = place;
      draw();
      if (open) open(at, scroller);
    });
    return row;
  }

  // Scrolling within the rows that are there changes nothing.
  function scrolled() {
    const [first, last] = seen();
    if (first !== drawn[0] || last !== drawn[1]) draw();
  }

  function seen() {
    if (printing) return [0, Math.min(order.length, PRINTED)];
    const top = Math.floor(scroller.scrollTop / ROW) - BEFORE;
    const first = Math.max(0, Math.min(top - (top % BEFORE), order.length));
    const rows = Math.ceil((scroller.clientHeight || height * ROW) / ROW) + 3 * BEFORE;
    return [first, Math.min(order.length, first + rows)];
  }

  function draw() {
    scroller.style.maxHeight = printing ? "none" : `${(height + 1.5) * ROW}px`;
    const whole = printing ? Math.min(order.length, PRINTED) : order.length;
    const [first, last] = (drawn = seen());
    const rows = [];
    if (first > 0) rows.push(spacer(first));
    for (let place = first; place < last; place++) rows.push(rowOf(place));
    if (!printing && last < order.length) rows.push(spacer(order.length - last));
    body.replaceChildren(...rows);
    table.setAttribute("aria-rowcount", String(order.length + 1));
    more.textContent = order.length > whole ? `and ${grouped.format(order.length - whole)} more` : "";
  }

  function moveTo(place) {
    active = Math.min(order.length - 1, Math.max(0, place));
    const top = active * ROW;
    const room = scroller.clientHeight - 2 * ROW;
    if (top < scroller.scrollTop) scroller.scrollTop = top;
    else if (top > scroller.scrollTop + room) scroller.scrollTop = top - room;
    draw();
    announce(columns.map((column) => `${column.label} ${column.text(order[active])}`).join(", "));
  }

  scroller.addEventListener("scroll", scrolled, { passive: true });
  scroller.addEventListener("keydown", (event) => {
    if (event.target !== scroller || !order.length) return;
    const page = Math.max(1, height - 1);
    const moves = {
      ArrowDown: active + 1,
      ArrowUp: active - 1,
      PageDown: active + page,
      PageUp: active - page,
      Home: 0,
      End: order.length - 1,
    };
    if (event.key in moves) moveTo(moves[event.key]);
    else if (event.key === "Enter" && open) open(order[active], scroller);
    else return;
    event.preventDefault();
  });
  return {
    show(next) {
      members = next;
      active = 0;
      arrange();
    },
    draw,
    print(on) {
      printing = on;
      draw();
    },
  };
}

// Titles of columns, which have little room; the whole name is in the tip.
const SHORT = {
  rms: "rms",
  absmax: "largest",
  nonfinite: "NaN/Inf",
  std: "std",
  change: "change",
  changed: "changed",
  state: "state",
};

// The table of tensors: what the pictures show, in words.
function makeTensorTable(page) {
  const { model } = page;
  const columns = [
    {
      label: "name",
      name: true,
      text: (at) => clipped(model.names[at]),
      value: (at) => model.names[at],
      mark: (at) => (model.sick[at] ? "NaN" : ""),
    },
    { label: "dtype", wide: true, text: (at) => shown(model.dtype(at)), value: (at) => model.dtype(at) },
    {
      label: "shape",
      wide: true,
      roomy: true,
      text: (at) => shapeText(model.shape(at)),
      value: (at) => model.shape(at).reduce((a, b) => a * b, 1),
    },
    { label: "bytes", number: true, sized: true, text: (at) => nbytesText(model.nbytes[at]), value: (at) => model.nbytes[at] },
  ];
  for (const measure of model.measures) {
    if (measure.key === "dtype" || measure.key === "nbytes") continue;
    columns.push({
      label: SHORT[measure.key] || measure.label,
      help: `${measure.label}: ${measure.help}`,
      number: measure.scale !== "category",
      wide: true,
      extra: columns.length >= 8,
      text: (at) => measureText(measure, measure.values[at]),
      value: (at) => measure.values[at],
    });
  }
  // Beside many numbers there is no room for it; the drawer has it.
  if (model.doc.tensors.file.labels.length > 1 && columns.length < 9) {
    columns.push({
      label: "file",
      wide: true,
      roomy: true,
      text: (at) => clipped(model.file(at) ?? "", 60),
      value: (at) => model.file(at),
    });
  }
  const table = makeTable(byId("table"), { label: "Tensors", columns, open: page.open });
  return {
    section: byId("tensors"),
    filter: () => table.show(page.shown),
    colour: () => {},
    size: table.draw,
    print: table.print,
  };
}
