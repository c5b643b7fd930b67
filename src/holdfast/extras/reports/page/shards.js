// The files: each a strip of its bytes, all on one scale. A tensor has the colour of the chosen measure; headers are grey, bytes
// that nothing refers to are hatched. Where another mesh was asked about, one rank is chosen and the files that it would not read
// fade.

const FILE_ROW = 38;
const STRIP = 16;
const [OF_TENSOR, OF_HEADER, OF_NOTHING, OF_MANY] = [0, 1, 2, 3];
const FILES_SEEN = 14; // rows before the list scrolls

function makeShards(page) {
  const { shards } = page.model.doc;
  if (!shards) return null;
  const body = byId("shards-body");
  const canvas = make("canvas");
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-roledescription", "map of files");
  canvas.setAttribute(
    "aria-label",
    `${plural(shards.files.length, "file")} as strips of bytes. Arrows move, Enter opens a tensor.`,
  );
  const mark = make("div", "here");
  mark.hidden = true;
  const tall = make("div", "tall", canvas, mark);
  const scroller = make("div", "scroller", tall);
  const largest = shards.files.reduce((most, file) => Math.max(most, file.nbytes), 1);
  const met = new Set();
  for (const file of shards.files) for (const strip of file.strips) met.add(strip[2]);
  let rank = -1;
  let focused = null; // [file, strip]
  let wanted = null; // which tensors the filter leaves

  function told() {
    const total = shards.files.reduce((sum, file) => sum + file.nbytes, 0);
    const parts = [`${plural(shards.files.length, "file")}, ${nbytesText(total)}`];
    const boxes = shards.boxes ? shards.boxes.tensor.length : 0;
    if (boxes) parts.push(plural(boxes, "box").replace("boxs", "boxes"));
    parts.push(shards.replicas ? plural(shards.replicas, "replica") : "no replicas");
    parts.push(shards.gaps ? plural(shards.gaps, "gap") : "no gaps");
    return parts.join(" · ");
  }

  // The files of a rank that would read with another mesh.
  function ranks() {
    if (!shards.mesh) return null;
    const select = make("select");
    select.id = "rank";
    select.append(make("option", "", "no rank"));
    select.firstChild.value = "-1";
    shards.mesh.ranks.forEach((one, at) => {
      const option = make("option", "", `rank ${one.rank}: ${plural(one.files.length, "file")}, ${nbytesText(one.nbytes)}`);
      option.value = String(at);
      select.append(option);
    });
    select.addEventListener("change", () => {
      rank = Number(select.value);
      draw();
      announce(
        rank < 0 ? "no rank" : `rank ${shards.mesh.ranks[rank].rank} reads ${plural(shards.mesh.ranks[rank].files.length, "file")}`,
      );
    });
    const label = make("label", "field", make("span", "", `What one of ${shown(shards.mesh.text)} would read`), select);
    label.htmlFor = "rank";
    return make("div", "inline", label);
  }

  function left(file) {
    return { scale: tall.clientWidth / largest, y: file * FILE_ROW - scroller.scrollTop };
  }

  function boxOf(file, strip) {
    const { scale, y } = left(file);
    const [start, end] = shards.files[file].strips[strip];
    return { x: start * scale, y: y + FILE_ROW - STRIP - 4, w: Math.max((end - start) * scale, 1), h: STRIP };
  }

  function draw() {
    const rows = shards.files.length;
    const height = Math.min(rows, FILES_SEEN) * FILE_ROW;
    scroller.style.height = `${height}px`;
    tall.style.height = `${rows * FILE_ROW}px`;
    const width = tall.clientWidth;
    const context = sizeCanvas(canvas, width, height);
    const first = Math.floor(scroller.scrollTop / FILE_ROW);
    const last = Math.min(rows, Math.ceil((scroller.scrollTop + height) / FILE_ROW));
    const reads = rank < 0 ? null : new Set(shards.mesh.ranks[rank].files);
    for (let file = first; file < last; file++) {
      context.globalAlpha = !reads || reads.has(file) ? 1 : 0.22;
      drawFile(context, file, width);
    }
    context.globalAlpha = 1;
    placeMark(mark, focused && document.activeElement === canvas ? boxOf(...focused) : null);
  }

  function drawFile(context, file, width) {
    const { palette } = page;
    const { y, scale } = left(file);
    const { name, nbytes, strips } = shards.files[file];
    context.font = `11.5px ${page.font}`;
    context.textBaseline = "middle";
    context.fillStyle = palette.ink;
    const size = nbytesText(nbytes);
    const room = width - context.measureText(size).width - 12;
    const text = fitted(context, clipped(name, 120), room);
    context.fillText(text, 0, y + 8);
    context.fillStyle = palette.muted;
    context.fillText(size, context.measureText(text).width + 10, y + 8);
    const base = { y: y + FILE_ROW - STRIP - 4, h: STRIP };
    context.fillStyle = palette.none.css;
    context.fillRect(0, base.y, Math.max(nbytes * scale, 1), base.h);
    strips.forEach(([start, end, kind, tensor]) => {
      const wide = (end - start) * scale;
      const box = { ...base, x: start * scale, w: Math.max(wide - (wide > 4 ? 1 : 0), 0.5) };
      if (kind === OF_TENSOR && tensor >= 0) {
        const before = context.globalAlpha;
        if (wanted && !wanted.has(tensor)) context.globalAlpha = before * 0.15;
        paintCell(context, box, lookOf(page.model, page.scale, palette, tensor), palette);
        context.globalAlpha = before;
      } else if (kind === OF_MANY) {
        context.fillStyle = palette.muted;
        context.fillRect(box.x, box.y, box.w, box.h);
      } else if (kind === OF_HEADER) {
        context.fillStyle = palette.line;
        context.fillRect(box.x, box.y, box.w, box.h);
      } else {
        hatch(context, box, palette);
      }
    });
  }

  function hatch(context, box, palette) {
    context.save();
    context.beginPath();
    context.rect(box.x, box.y, box.w, box.h);
    context.clip();
    context.fillStyle = palette.paper;
    context.fillRect(box.x, box.y, box.w, box.h);
    context.strokeStyle = palette.muted;
    context.lineWidth = 1;
    context.beginPath();
    for (let x = box.x - box.h; x < box.x + box.w; x += 5) {
      context.moveTo(x, box.y + box.h);
      context.lineTo(x + box.h, box.y);
    }
    context.stroke();
    context.strokeRect(box.x + 0.5, box.y + 0.5, Math.max(box.w - 1, 0.5), box.h - 1);
    context.restore();
  }

  function describe(file, strip) {
    const { model, measure } = page;
    const [start, end, kind, tensor] = shards.files[file].strips[strip];
    const where = `bytes ${grouped.format(start)} to ${grouped.format(end)}, ${nbytesText(end - start)}`;
    if (kind === OF_TENSOR && tensor >= 0) {
      return {
        title: clipped(model.names[tensor]),
        lines: [brief(model, tensor), where, measured(model, measure, tensor)],
        tensor,
      };
    }
    const title =
      kind === OF_HEADER ? "header" : kind === OF_MANY ? "several small tensors" : "a gap: nothing refers to these bytes";
    return { title, lines: [where], tensor: -1 };
  }

  function under(x, y) {
    const file = Math.floor((y + scroller.scrollTop) / FILE_ROW);
    if (file < 0 || file >= shards.files.length) return null;
    const { scale } = left(file);
    const { strips } = shards.files[file];
    const at = x / scale;
    // Strips are in order: the last that starts before the point.
    let [low, high] = [0, strips.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (strips[middle][0] <= at) low = middle + 1;
      else high = middle;
    }
    return low > 0 && at < strips[low - 1][1] + 1 / scale ? [file, low - 1] : null;
  }

  function focus(file, strip) {
    const row = Math.min(shards.files.length - 1, Math.max(0, file));
    if (!shards.files[row].strips.length) return;
    focused = [row, Math.min(shards.files[row].strips.length - 1, Math.max(0, strip))];
    if (row * FILE_ROW < scroller.scrollTop) scroller.scrollTop = row * FILE_ROW;
    else if ((row + 1) * FILE_ROW > scroller.scrollTop + scroller.clientHeight)
      scroller.scrollTop = (row + 1) * FILE_ROW - scroller.clientHeight;
    draw();
    const { title, lines } = describe(...focused);
    announce(`${clipped(shards.files[row].name, 60)}: ${title}, ${lines.join(", ")}`);
    const box = boxOf(...focused);
    const corner = canvas.getBoundingClientRect();
    showTip(corner.left + box.x, corner.top + box.y + box.h, title, lines);
  }

  canvas.addEventListener("pointermove", (event) => {
    if (event.pointerType === "touch") return;
    const found = under(event.offsetX, event.offsetY);
    placeMark(mark, found && boxOf(...found));
    if (!found) return hideTip();
    const { title, lines, tensor } = describe(...found);
    canvas.classList.toggle("points", tensor >= 0);
    showTip(event.clientX, event.clientY, title, lines);
  });
  canvas.addEventListener("pointerleave", () => {
    hideTip();
    placeMark(mark, null);
  });
  canvas.addEventListener("blur", () => {
    hideTip();
    placeMark(mark, null);
  });
  canvas.addEventListener("click", (event) => {
    const found = under(event.offsetX, event.offsetY);
    const tensor = found ? describe(...found).tensor : -1;
    if (tensor >= 0) page.open(tensor, canvas);
  });
  canvas.addEventListener("keydown", (event) => {
    const [file, strip] = focused || [0, 0];
    const moves = {
      ArrowUp: [file - 1, 0],
      ArrowDown: [file + 1, 0],
      ArrowLeft: [file, strip - 1],
      ArrowRight: [file, strip + 1],
      Home: [file, 0],
      End: [file, 1e9],
    };
    if (moves[event.key]) focus(...(focused ? moves[event.key] : [0, 0]));
    else if (event.key === "Enter" && focused && describe(...focused).tensor >= 0) page.open(describe(...focused).tensor, canvas);
    else return;
    event.preventDefault();
  });
  // What the strips are beside tensors, where it occurs.
  function drawKinds() {
    const { palette } = page;
    const marks = empty(kinds);
    const add = (kind, text, paint) => {
      if (!met.has(kind)) return;
      const swatch = document.createElement("canvas");
      paint(sizeCanvas(swatch, 14, 14), { x: 0, y: 0, w: 14, h: 14 });
      marks.append(make("span", "mark", swatch, text));
    };
    const flat =
      (colour) =>
      (context, { w, h }) => {
        context.fillStyle = colour;
        context.fillRect(0, 0, w, h);
      };
    add(OF_HEADER, "header", flat(palette.line));
    add(OF_MANY, "several small tensors", flat(palette.muted));
    add(OF_NOTHING, "a gap", (context, box) => hatch(context, box, palette));
  }

  const kinds = make("div", "marks hint");
  scroller.addEventListener("scroll", draw, { passive: true });
  body.append(make("p", "lead", told()), ...[ranks()].filter(Boolean), scroller, kinds);
  return {
    section: byId("shards"),
    filter: () => {
      wanted = page.typed || page.onlyState >= 0 ? new Set(page.shown) : null;
      drawKinds();
      draw();
    },
    colour: () => {
      drawKinds();
      draw();
    },
    size: draw,
  };
}
