// The map of bytes: names are paths, a path is a rectangle, its area is bytes. Squarified: rows of rectangles that are as near to
// squares as they can be, the largest first; equal ones stay in the order of their names, so that layers read from left to right.

const DEEPEST = 12; // parts of a name that become groups; a hostile name may have thousands

// Numbers by size, other names as they came: a sort is stable. Intl.Collator does it for all names, in ten times the time.
function inOrder(one, other) {
  return Number(one) - Number(other) || 0;
}

// The tree of the names that are shown. A group with one child is one with it: "model.layers".
function nameTree(model, members) {
  const root = { label: "", parent: null, children: [], groups: new Map(), leaf: -1, size: 0 };
  for (const at of members) {
    if (!(model.area[at] > 0)) continue;
    const parts = model.names[at].split(".", DEEPEST);
    const whole = parts.join(".").length;
    let last = parts.pop();
    if (whole < model.names[at].length) last = model.names[at].slice(whole - last.length);
    let node = root;
    for (const part of parts) {
      let next = node.groups.get(part);
      if (!next) {
        next = { label: part, parent: node, children: [], groups: new Map(), leaf: -1, size: 0 };
        node.groups.set(part, next);
        node.children.push(next);
      }
      node = next;
    }
    node.children.push({ label: last, parent: node, children: null, groups: null, leaf: at, size: model.area[at] });
  }
  settle(root, model);
  return root;
}

function settle(node, model) {
  for (let at = 0; at < node.children.length; at++) {
    const child = node.children[at];
    if (child.leaf >= 0) {
      node.size += child.size;
      node.sick ||= model.sick[child.leaf] > 0;
      continue;
    }
    settle(child, model);
    node.size += child.size;
    node.sick ||= child.sick;
    if (child.children.length === 1) {
      const only = child.children[0];
      only.label = `${child.label}.${only.label}`;
      only.parent = node;
      node.children[at] = only;
    }
  }
  node.groups = null;
  // Among equals layer 10 comes after layer 9, however the file has them.
  node.children.sort((a, b) => b.size - a.size || inOrder(a.label, b.label));
}

// Places children in a rectangle, row after row along its shorter side.
function squarify(children, total, box) {
  let { x, y, w, h } = box;
  const perByte = (w * h) / total;
  let at = 0;
  while (at < children.length) {
    const side = Math.min(w, h);
    let sum = 0;
    let worst = Infinity;
    let stop = at;
    const largest = children[at].size * perByte;
    while (stop < children.length) {
      const area = children[stop].size * perByte;
      const next = sum + area;
      const ratio = Math.max((side * side * largest) / (next * next), (next * next) / (side * side * area));
      if (ratio > worst) break;
      worst = ratio;
      sum = next;
      stop++;
    }
    const thick = side > 0 ? sum / side : 0;
    let along = 0;
    for (; at < stop; at++) {
      const length = thick > 0 ? (children[at].size * perByte) / thick : 0;
      if (w >= h) place(children[at], x, y + along, thick, length);
      else place(children[at], x + along, y, length, thick);
      along += length;
    }
    if (w >= h) {
      x += thick;
      w -= thick;
    } else {
      y += thick;
      h -= thick;
    }
  }
}

function place(node, x, y, w, h) {
  node.x = x;
  node.y = y;
  node.w = w;
  node.h = h;
}

const TITLE = 17; // pixels of a group's title
const FINE = 24; // pixels of a group below which no line is drawn around it
const NEARLY = 0.85; // of a group's bytes

function layOut(node, depth) {
  if (node.leaf >= 0) return;
  const gap = depth === 0 ? 0 : depth === 1 ? 2 : Math.min(node.w, node.h) < FINE ? 0 : 1;
  node.titled = depth > 0 && !node.within && node.w > 46 && node.h > 3 * TITLE;
  node.caption = node.label;
  // A group that is nearly all of the one around it shares its title: "3.mlp.experts" takes one line, not three.
  for (let inner = node; inner.leaf < 0;) {
    const most = inner.children[0];
    if (most.leaf >= 0 || most.size < NEARLY * inner.size || (inner === node && depth === 0)) break;
    most.within = node.titled || node.within;
    if (node.titled) node.caption += `.${most.label}`;
    inner = most;
  }
  const top = node.titled ? TITLE : gap;
  const inner = { x: node.x + gap, y: node.y + top, w: node.w - 2 * gap, h: node.h - top - gap };
  node.open = inner.w > 2 && inner.h > 2;
  if (!node.open) return;
  squarify(node.children, node.size, inner);
  for (const child of node.children) layOut(child, depth + 1);
  for (const child of node.children) child.within = false;
}

function largestLeaf(node) {
  let found = node;
  while (found.leaf < 0) found = found.children[0];
  return found.leaf;
}

function pathOf(node) {
  const labels = [];
  for (let step = node; step && step.parent; step = step.parent) labels.unshift(step.label);
  return labels.join(".");
}

function makeTreemap(page) {
  const host = byId("treemap-place");
  const canvas = make("canvas");
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-roledescription", "tree map");
  canvas.setAttribute("aria-label", "Map of bytes by name. The table below has the same tensors.");
  canvas.setAttribute("aria-describedby", "treemap-help");
  const mark = make("div", "here");
  mark.hidden = true;
  host.append(canvas, mark);
  let tree = null;
  let root = null; // the group that fills the picture
  let focused = null; // where the keyboard is
  let tiny = []; // what must be seen and is too small

  function rebuild() {
    const before = root ? pathOf(root) : "";
    tree = nameTree(page.model, page.shown);
    root = tree;
    // Zoomed in, a filter keeps the group where it is still there.
    for (let step = tree; step && before && pathOf(step) !== before;) {
      step = step.children && step.children.find((child) => child.leaf < 0 && `${before}.`.startsWith(`${pathOf(child)}.`));
      if (step && pathOf(step) === before) root = step;
    }
    focused = null;
    draw();
  }

  function draw() {
    const width = host.clientWidth;
    const height = Math.round(Math.min(Math.max(width * 0.46, 300), 560));
    const context = sizeCanvas(canvas, width, height);
    byId("treemap").classList.toggle("nothing", !(root.size > 0));
    placeMark(mark, null);
    drawCrumbs();
    if (!(root.size > 0)) return;
    place(root, 0, 0, width, height);
    root.within = false;
    layOut(root, 0);
    context.textBaseline = "middle";
    tiny = [];
    paint(context, root, 0);
    paintTiny(context, tiny, page.palette);
  }

  function paint(context, node, depth) {
    const { palette, scale, model } = page;
    if (node.leaf >= 0 || !node.open) {
      const at = node.leaf >= 0 ? node.leaf : largestLeaf(node);
      // On whole pixels: thousands of blurred edges would be a pattern of their own.
      const [x, y] = [Math.round(node.x), Math.round(node.y)];
      const [w, h] = [Math.round(node.x + node.w) - x, Math.round(node.y + node.h) - y];
      // Lines between those of one group, or none: some would be a pattern that says nothing.
      const around = node.parent || root;
      const rim = around.w * around.h > around.children.length * 100 ? 1 : 0;
      const box = { x, y, w: Math.max(w - rim, 1), h: Math.max(h - rim, 1) };
      const look = lookOf(model, scale, palette, at);
      const ink = paintCell(context, box, look, palette);
      if (look === "sick" && Math.min(w, h) < 4) tiny.push(box);
      if (node.leaf >= 0) label(context, node, ink, look);
      return;
    }
    if (node.titled) {
      context.font = `${depth === 1 ? 600 : 400} 11.5px ${page.font}`;
      context.fillStyle = depth === 1 ? palette.ink : palette.muted;
      const text = fitted(context, clipped(node.caption, 120), node.w - 8);
      if (text) context.fillText(text, node.x + 3, node.y + TITLE / 2 + 0.5);
      // What is sick somewhere below is seen from here, however small it is.
      const flag = { x: node.x + 8 + context.measureText(text).width, y: node.y + 4, w: 11, h: 10 };
      if (node.sick && flag.x + 12 < node.x + node.w) paintCell(context, flag, "sick", palette);
    }
    for (const child of node.children) paint(context, child, depth + 1);
  }

  function label(context, node, ink, look) {
    if (node.w < 30 || node.h < 15) return;
    context.font = `11px ${page.font}`;
    const text = fitted(context, clipped(node.label.replace(/\.weight$/, ""), 60), node.w - 9);
    if (!text) return;
    // No text is read over stripes.
    if (typeof look === "string" && look !== "none") {
      context.fillStyle = look === "sick" ? page.palette.alarm[0] : page.palette.paper;
      context.fillRect(node.x + 1.5, node.y + 1.5, Math.min(context.measureText(text).width + 6, node.w - 4), 15);
    }
    context.fillStyle = ink;
    context.fillText(text, node.x + 4, node.y + 9);
    if (node.h < 31 || typeof look === "string") return;
    const below = fitted(context, nbytesText(page.model.nbytes[node.leaf]), node.w - 9, true);
    context.globalAlpha = 0.85;
    if (below) context.fillText(below, node.x + 4, node.y + 23);
    context.globalAlpha = 1;
  }

  function drawCrumbs() {
    const nav = empty(byId("crumbs"));
    const steps = [];
    for (let step = root; step; step = step.parent) steps.unshift(step);
    steps.forEach((step, at) => {
      const text = at === 0 ? "all" : clipped(step.label, 60);
      const size = `${nbytesText(step.size)}`;
      if (step === root) {
        const here = make("span", "crumb here-now", text, make("span", "muted", ` ${size}`));
        here.setAttribute("aria-current", "location");
        nav.append(here);
      } else {
        nav.append(
          button(text, "link crumb", () => zoom(step)),
          make("span", "muted", "›"),
        );
      }
    });
  }

  function zoom(node) {
    root = node;
    focused = null;
    draw();
    hideTip();
    announce(`${node.parent ? shown(pathOf(node)) : "all"}, ${nbytesText(node.size)}`);
  }

  // The leaf or the title under a point, and the way to it.
  function under(x, y) {
    let node = root;
    while (node.leaf < 0 && node.open) {
      if (node !== root && node.titled && y < node.y + TITLE) return node;
      const child = node.children.find((one) => x >= one.x && x < one.x + one.w && y >= one.y && y < one.y + one.h);
      if (!child) return node === root ? null : node;
      node = child;
    }
    return node;
  }

  function describe(node) {
    const { model, measure } = page;
    if (node.leaf < 0) {
      let tensors = 0;
      const stack = [node];
      while (stack.length) {
        const top = stack.pop();
        if (top.leaf >= 0) tensors++;
        else stack.push(...top.children);
      }
      return { title: clipped(pathOf(node)), lines: [`${plural(tensors, "tensor")}, ${nbytesText(node.size)}`] };
    }
    return { title: clipped(model.names[node.leaf]), lines: [brief(model, node.leaf), measured(model, measure, node.leaf)] };
  }

  function press(node) {
    if (!node) return;
    if (node.leaf < 0) {
      if (node !== root) zoom(node);
      return;
    }
    // Too small to aim at: look closer first.
    let step = node;
    while (step.parent && step.parent !== root) step = step.parent;
    if (step !== node && node.w * node.h < 60 && step.leaf < 0) zoom(step);
    else page.open(node.leaf, canvas);
  }

  function focus(node) {
    if (!node) return;
    focused = node;
    placeMark(mark, node);
    const { title, lines } = describe(node);
    announce(`${title}, ${lines.join(", ")}`);
    const { left, top } = canvas.getBoundingClientRect();
    showTip(left + node.x + Math.min(node.w, 40), top + node.y + Math.min(node.h, 24), title, lines);
  }

  canvas.addEventListener("pointermove", (event) => {
    if (event.pointerType === "touch") return;
    const node = under(event.offsetX, event.offsetY);
    placeMark(mark, node);
    canvas.classList.toggle("points", Boolean(node));
    if (!node) return hideTip();
    const { title, lines } = describe(node);
    showTip(event.clientX, event.clientY, title, lines);
  });
  canvas.addEventListener("pointerleave", () => {
    hideTip();
    placeMark(mark, focused);
  });
  canvas.addEventListener("click", (event) => press(under(event.offsetX, event.offsetY)));
  canvas.addEventListener("blur", () => {
    placeMark(mark, null);
    hideTip();
  });
  canvas.addEventListener("focus", () => {
    if (focused) placeMark(mark, focused);
  });
  canvas.addEventListener("keydown", (event) => {
    if (!(root.size > 0)) return;
    const key = event.key;
    const siblings = focused ? focused.parent.children : root.children;
    const step = (by) => siblings[Math.min(siblings.length - 1, Math.max(0, siblings.indexOf(focused) + by))];
    if (!focused && key.startsWith("Arrow")) focus(root.children[0]);
    else if (key === "ArrowRight") focus(step(1));
    else if (key === "ArrowLeft") focus(step(-1));
    else if (key === "Home") focus(siblings[0]);
    else if (key === "End") focus(siblings[siblings.length - 1]);
    else if (key === "ArrowDown") focus(focused.leaf < 0 && focused.open ? focused.children[0] : step(1));
    else if (key === "ArrowUp") focus(focused.parent === root ? step(-1) : focused.parent);
    else if (key === "Enter" || key === " ") focused && (focused.leaf < 0 ? zoom(focused) : page.open(focused.leaf, canvas));
    else if (key === "Backspace" && root.parent) zoom(root.parent);
    else return;
    event.preventDefault();
  });
  return { section: byId("treemap"), filter: rebuild, colour: draw, size: draw };
}

// The text that fits into so many pixels, cut with an ellipsis; nothing where not even a few letters would be left.
function fitted(context, text, width, whole = false) {
  if (context.measureText(text).width <= width) return text;
  if (whole) return "";
  let keep = Math.floor((text.length * width) / context.measureText(text).width);
  while (keep > 2 && context.measureText(`${text.slice(0, keep)}…`).width > width) keep--;
  return keep > 2 ? `${text.slice(0, keep)}…` : "";
}
