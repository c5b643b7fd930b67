// The elements of a tensor as a map, in the served page: one pixel an element, dragged and zoomed. Only the tiles that are seen
// are asked for, 256 by 256 at a time; zoomed out, the server averages. A tensor of more than two axes is rows by its last axis.

const TILE = 256;
const TALLEST = 280; // pixels of the picture
const LARGEST_PIXEL = 24; // pixels an element
const KEPT_TILES = 96; // drawn tiles that are kept

function makeTiles(page, tensor, owner) {
  const sizes = owner.shape;
  const columns = sizes.length ? sizes[sizes.length - 1] : 1;
  const rows = sizes.slice(0, -1).reduce((a, b) => a * b, 1);
  const canvas = make("canvas");
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-roledescription", "map of elements");
  canvas.setAttribute(
    "aria-label",
    `${grouped.format(rows)} by ${grouped.format(columns)} elements. Arrows move, plus and minus zoom.`,
  );
  const note = make("p", "muted", "");
  const value = make("p", "muted value", " ");
  const zoomIn = button("+", "quiet small", () => zoom(2, 0.5, 0.5));
  const zoomOut = button("−", "quiet small", () => zoom(0.5, 0.5, 0.5));
  zoomIn.setAttribute("aria-label", "Zoom in");
  zoomOut.setAttribute("aria-label", "Zoom out");
  const element = make("div", "tiles", make("div", "stage", canvas), make("div", "inline", zoomIn, zoomOut, note), value);
  const tiles = new Map(); // key -> {image, values, low, high} or "asked" or "failed"
  let view = null; // {x, y: the element at the corner, zoom: pixels an element}
  let tall = TALLEST;
  let reach = 0; // the largest magnitude seen: the end of the colours
  let stopped = false;
  let drag = null;
  let over = null; // where the pointer is
  let sampled = false; // the server took some elements of a large square, not all

  const level = () => Math.max(0, Math.floor(Math.log2(1 / view.zoom) + 0.001));
  const side = () => ({ width: element.clientWidth || 380, height: tall });

  // A small tensor fills the picture; of a large one as much is seen as covers it.
  function fit() {
    const { width } = side();
    const whole = Math.min(width / columns, TALLEST / rows, LARGEST_PIXEL);
    view = { x: 0, y: 0, zoom: whole >= 1 ? whole : Math.min(1, Math.max(width / columns, TALLEST / rows, 1 / 4096)) };
    tall = Math.max(24, Math.min(TALLEST, Math.ceil(rows * view.zoom)));
  }

  function hold() {
    const { width, height } = side();
    view.zoom = Math.min(LARGEST_PIXEL, Math.max(view.zoom, Math.min(1, width / columns, height / rows)));
    view.x = Math.min(Math.max(0, view.x), Math.max(0, columns - width / view.zoom));
    view.y = Math.min(Math.max(0, view.y), Math.max(0, rows - height / view.zoom));
  }

  function draw() {
    if (stopped || !element.isConnected) return;
    if (!view) fit();
    hold();
    const { width, height } = side();
    const context = sizeCanvas(canvas, width, height);
    context.imageSmoothingEnabled = false;
    const at = level();
    const span = TILE * 2 ** at;
    const lastColumn = Math.min(columns, view.x + width / view.zoom);
    const lastRow = Math.min(rows, view.y + height / view.zoom);
    for (let row = Math.floor(view.y / span) * span; row < lastRow; row += span) {
      for (let column = Math.floor(view.x / span) * span; column < lastColumn; column += span) {
        drawTile(context, row, column, at);
      }
    }
    const ends = (from, to) => `${Math.floor(from)} to ${Math.ceil(to)}`;
    const parts = [`rows ${ends(view.y, lastRow)}`, `columns ${ends(view.x, lastColumn)}`];
    if (at) parts.push(`${sampled ? "sampled" : "averaged"} ${2 ** at} × ${2 ** at}`);
    if (reach) parts.push(`colours from ${numberText(-reach)} to ${numberText(reach)}`);
    note.textContent = parts.join(", ");
    sayValue();
  }

  function drawTile(context, row, column, at) {
    const key = `${at}/${row}/${column}`;
    const tile = tiles.get(key);
    if (!tile) return ask(key, row, column, at);
    if (tile === "asked" || tile === "failed") return;
    if (!tile.image || tile.reach !== reach || tile.theme !== page.theme) paintTile(tile);
    const scale = view.zoom * 2 ** at;
    context.drawImage(
      tile.image,
      (column - view.x) * view.zoom,
      (row - view.y) * view.zoom,
      tile.columns * scale,
      tile.rows * scale,
    );
  }

  function ask(key, row, column, at) {
    tiles.set(key, "asked");
    if (tiles.size > KEPT_TILES) tiles.delete(tiles.keys().next().value);
    page.ask("tile", { tensor, other: owner.other, row, col: column, level: at }).then(
      (found) => {
        const bytes = Uint8Array.from(atob(found.values), (char) => char.charCodeAt(0));
        const values = new Float32Array(bytes.buffer);
        for (const end of [found.low, found.high]) if (Number.isFinite(end)) reach = Math.max(reach, Math.abs(end));
        sampled ||= Boolean(found.sampled);
        tiles.set(key, { values, rows: found.rows, columns: found.cols, image: null });
        draw();
      },
      (error) => {
        tiles.set(key, "failed");
        value.textContent = `The server said: ${shown(error.message)}`;
      },
    );
  }

  // NaN and Inf are the alarm's colour in a chequer, which no value has.
  function paintTile(tile) {
    const image = document.createElement("canvas");
    image.width = tile.columns;
    image.height = tile.rows;
    const context = image.getContext("2d");
    const pixels = context.createImageData(tile.columns, tile.rows);
    const { diverging, alarm } = page.palette;
    const middle = (diverging.length - 1) / 2;
    const loud = [1, 3, 5].map((from) => parseInt(alarm[0].slice(from, from + 2), 16));
    for (let at = 0; at < tile.values.length; at++) {
      const number = tile.values[at];
      const sick = !Number.isFinite(number);
      // The square root lets small weights be seen beside an outlier.
      const share = reach ? Math.sign(number) * Math.sqrt(Math.abs(number) / reach) : 0;
      const rgb = sick
        ? (at + Math.floor(at / tile.columns)) % 2
          ? loud
          : [0, 0, 0]
        : diverging[Math.round(middle + share * middle)].rgb;
      pixels.data.set([rgb[0], rgb[1], rgb[2], 255], at * 4);
    }
    context.putImageData(pixels, 0, 0);
    tile.image = image;
    tile.reach = reach;
    tile.theme = page.theme;
  }

  // Zooms by a factor and keeps the element at a share of the picture where it is.
  function zoom(factor, across, down) {
    const { width, height } = side();
    const [x, y] = [view.x + (across * width) / view.zoom, view.y + (down * height) / view.zoom];
    view.zoom *= factor;
    hold();
    view.x = x - (across * width) / view.zoom;
    view.y = y - (down * height) / view.zoom;
    draw();
  }

  canvas.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const { width, height } = side();
      zoom(event.deltaY < 0 ? 1.25 : 0.8, event.offsetX / width, event.offsetY / height);
    },
    { passive: false },
  );
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    drag = { x: event.clientX, y: event.clientY, from: { ...view } };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      view.x = drag.from.x - (event.clientX - drag.x) / view.zoom;
      view.y = drag.from.y - (event.clientY - drag.y) / view.zoom;
      draw();
      return;
    }
    over = { x: event.offsetX, y: event.offsetY };
    sayValue();
  });
  canvas.addEventListener("pointerleave", () => (over = null));
  canvas.addEventListener("pointerup", () => (drag = null));
  canvas.addEventListener("pointercancel", () => (drag = null));
  canvas.addEventListener("keydown", (event) => {
    const by = 64 / view.zoom;
    const moves = { ArrowLeft: [-by, 0], ArrowRight: [by, 0], ArrowUp: [0, -by], ArrowDown: [0, by] };
    if (moves[event.key]) {
      view.x += moves[event.key][0];
      view.y += moves[event.key][1];
      draw();
      announce(note.textContent);
    } else if (event.key === "+" || event.key === "=") zoom(2, 0.5, 0.5);
    else if (event.key === "-") zoom(0.5, 0.5, 0.5);
    else return;
    event.preventDefault();
  });

  // The element under the pointer; a tile that comes later says it then.
  function sayValue() {
    if (over) value.textContent = elementAt(Math.floor(view.y + over.y / view.zoom), Math.floor(view.x + over.x / view.zoom));
  }

  function elementAt(row, column) {
    const at = level();
    const span = TILE * 2 ** at;
    const [top, left] = [Math.floor(row / span) * span, Math.floor(column / span) * span];
    const tile = tiles.get(`${at}/${top}/${left}`);
    if (!tile || !tile.values || row >= rows || column >= columns) return " ";
    const found = tile.values[Math.floor((row - top) / 2 ** at) * tile.columns + Math.floor((column - left) / 2 ** at)];
    return `[${row}, ${column}] ${Number.isFinite(found) ? numberText(found) : String(found)}`;
  }

  requestAnimationFrame(draw);
  return { element, stop: () => (stopped = true), draw };
}
