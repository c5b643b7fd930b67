// One heat map on a canvas, drawn from a stack: row labels, tilted titles, cells with their numbers where there is room; pointer
// and keys. Of more rows than fit, only those in the window are drawn.

const ROW_LABEL = 40;
const TILT = (-52 * Math.PI) / 180;

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
  const more = stack.left
    ? make("p", "muted", `and ${grouped.format(stack.left)} more columns: filter by name to see them here`)
    : null;
  const panel = make("div", "panel", title, stage, more);
  const titles = columnTitles(stack.columns);
  const middles = new Map();
  let cells = null; // the geometry of the last drawing
  let focused = null; // [row, column]
  const rows = stack.layers.length;
  canvas.setAttribute(
    "aria-label",
    `${clipped(stack.stem, 90)}: ${plural(rows, "layer")} by ${plural(stack.columns.length, stack.experts ? "expert" : "role")}`,
  );
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
    const columnWidth = flat
      ? Math.max(0.5, Math.min(26, fitting))
      : Math.max(1, Math.min(64, fitting > 6 ? Math.floor(fitting) : fitting));
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
    const tiny = [];
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
        if (look === "sick" && Math.min(box.w, box.h) < 6) tiny.push(box);
        if (columnWidth >= 44 && rowHeight >= 15) writeValue(context, box, at, ink, look);
      }
    });
    paintTiny(context, tiny, palette);
    context.clearRect(0, 0, width, head.up);
    drawRowLabels(context, first, last);
    if (flat) drawExpertLabels(context);
    else drawTitles(context, head);
    placeMark(mark, focused && boxOf(...focused));
  }

  // On whole pixels, so that narrow columns are no pattern of their own.
  function boxOf(row, column) {
    const x = Math.round(cells.left + column * cells.columnWidth);
    const next = Math.round(cells.left + (column + 1) * cells.columnWidth);
    return { x, y: cells.top + row * cells.rowHeight - cells.scrolled, w: Math.max(next - x, 1), h: cells.rowHeight };
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
    else if (folds)
      showTip(event.clientX, event.clientY, shown(titles[found.head]), ["several tensors a layer: click for one column each"]);
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
    const moves = {
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
      PageUp: [-10, 0],
      PageDown: [10, 0],
    };
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
