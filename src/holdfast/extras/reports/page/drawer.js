// The drawer: all that is known of one tensor. It opens beside the page, takes the focus, and gives it back when it closes (Esc).

const QUANTILES = ["least", "0.1%", "1%", "25%", "median", "75%", "99%", "99.9%", "largest"];

function makeDrawer(page) {
  const { model } = page;
  const drawer = byId("drawer");
  let from = null; // what had the focus
  let current = -1;
  let maps = []; // the maps of elements, in the served page

  function close() {
    if (drawer.hidden) return;
    drawer.hidden = true;
    stopMaps();
    current = -1;
    document.body.classList.remove("drawn");
    if (from && from.isConnected) from.focus({ preventScroll: true });
  }

  function stopMaps() {
    for (const map of maps) map.stop();
    maps = [];
  }

  function open(at, opener) {
    if (drawer.hidden) from = opener || document.activeElement;
    stopMaps();
    current = at;
    hideTip();
    fill(at);
    drawer.hidden = false;
    drawer.scrollTop = 0;
    document.body.classList.add("drawn");
    drawer.querySelector(".close").focus({ preventScroll: true });
    announce(`${clipped(model.names[at])}, ${brief(model, at)}`);
  }

  function fill(at) {
    const title = make("h2", "", ...breakable(shown(model.names[at].slice(0, 4000))));
    title.id = "drawer-name";
    const closing = button("Close", "quiet close", close);
    closing.setAttribute("aria-keyshortcuts", "Escape");
    empty(drawer).append(make("div", "drawer-head", neighbours(at), closing), title);
    if (model.sick[at]) drawer.append(make("p", "callout bad", sickness(at)));
    const sides = sidesOf(model, at);
    drawer.append(facts(at));
    // Of a difference, what is known of one side stands under the name of that side.
    if (sides[0].label) drawer.append(...[measuresOf(at, sides), boxesOf(at)].filter(Boolean));
    for (const side of sides) drawer.append(sideOf(at, side));
    const [first, second] = sides;
    if (second && first.alike) {
      drawer.append(make("h3", "side-name", "Both: the same values"), valuesOf(at, first));
    }
  }

  function sickness(at) {
    const appeared = firstText(model.appeared.get(at));
    if (appeared) return `NaN or Inf appeared in this tensor: ${appeared}.`;
    const first = firstText(model.first.get(at));
    return `This tensor has elements that are NaN or Inf${first ? `: ${first}` : ""}.`;
  }

  // What one checkpoint has of the tensor. Values that both sides share are shown behind both.
  function sideOf(at, side) {
    const part = make("section", "side");
    if (side.label) {
      part.append(make("h3", "side-name", `${side.label}: ${clipped(side.path, 160)}`));
      part.append(storedFacts(make("dl", "pairs"), side), python(side));
    } else {
      part.append(...[python(side), measuresOf(at, [side]), boxesOf(at)].filter(Boolean));
    }
    const isShown = !(side.alike && model.counterparts && model.counterparts.stored(at));
    if (isShown) part.append(valuesOf(at, side));
    return part;
  }

  // The histogram, quantiles, norms and, in the served page, the elements of one side.
  function valuesOf(at, side) {
    const part = make("div");
    const inside = make("div", "inside");
    part.append(inside);
    if (side.details) fillDetails(inside, side.details, side);
    else if (model.doc.live) askDetails(inside, at, side);
    else inside.append(make("p", "muted", "For its histogram and quantiles, make the page with --stats."));
    if (model.doc.live) part.append(elements(at, side));
    return part;
  }

  // A long name breaks after its dots rather than anywhere.
  function breakable(text) {
    const parts = text.split(".");
    if (parts.length > 40) return [text];
    return parts.flatMap((part, place) => (place ? [".", make("wbr"), part] : [part]));
  }

  // The same role in the layers before and after: a walk through the layers without closing the drawer.
  function neighbours(at) {
    const nav = make("div", "walk");
    if (model.layer[at] < 0) return nav;
    const found = { before: -1, after: -1 };
    for (let other = 0; other < model.count; other++) {
      if (model.role[other] !== model.role[at] || model.expert[other] !== model.expert[at] || other === at) continue;
      const layer = model.layer[other];
      if (layer < model.layer[at] && (found.before < 0 || layer > model.layer[found.before])) found.before = other;
      if (layer > model.layer[at] && (found.after < 0 || layer < model.layer[found.after])) found.after = other;
    }
    const step = (to, text, which) => {
      // The focus stays on the way: the next press goes on to the next layer.
      const press = button(text, `quiet ${which}`, () => {
        open(to);
        const again = drawer.querySelector(`.${which}`);
        if (!again.disabled) again.focus({ preventScroll: true });
      });
      press.disabled = to < 0;
      return press;
    };
    nav.append(step(found.before, "← layer before", "before"), step(found.after, "layer after →", "after"));
    return nav;
  }

  // How one side stores the tensor.
  function storedFacts(list, { dtype, shape: sizes, nbytes, strides, file, start, end }) {
    const add = (label, ...what) => list.append(make("dt", "", label), make("dd", "", ...what));
    add("dtype", shown(dtype));
    const elements = sizes.reduce((a, b) => a * b, 1);
    add("shape", `${shapeText(sizes)}, ${countText(elements)} element${elements === 1 ? "" : "s"}`);
    add("bytes", `${nbytesText(nbytes)}${nbytes >= 1024 ? ` (${grouped.format(nbytes)})` : ""}`);
    if (strides) add("strides", `${shapeText(strides)}, not dense`);
    if (file) add("file", clipped(file));
    const isOnePiece = start !== null && start !== undefined;
    add("byte range", isOnePiece ? `${grouped.format(start)} to ${grouped.format(end)}` : "in several pieces");
    return list;
  }

  function facts(at) {
    const list = make("dl", "pairs");
    const add = (label, ...what) => list.append(make("dt", "", label), make("dd", "", ...what));
    if (!model.state) storedFacts(list, sidesOf(model, at)[0]);
    if (model.layer[at] >= 0) add("layer", `${model.layer[at]}${model.expert[at] >= 0 ? `, expert ${model.expert[at]}` : ""}`);
    if (model.state) add("state", STATES[model.state[at]] + (model.was.has(at) ? `, was ${clipped(model.was.get(at))}` : ""));
    const ties = model.tied(at);
    if (ties.length) {
      const links = make("span", "ties");
      for (const other of ties.slice(0, 20)) links.append(button(clipped(model.names[other], 90), "link", () => open(other)));
      if (ties.length > 20) links.append(make("span", "muted", `and ${ties.length - 20} more`));
      add("shares bytes with", links);
    }
    return list;
  }

  function python({ path, name }) {
    const line = `holdfast.open(${pythonText(path)})[${pythonText(name)}]`;
    const press = button("Copy", "quiet small", () => copy(line, press));
    press.setAttribute("aria-label", "Copy the line of Python");
    return make("div", "code", make("code", "", line), press);
  }

  // Each measure with the median of the same role beside it: 0.02 says little, a hundredth of its siblings says all.
  function measuresOf(at, sides) {
    const rows = [];
    const { counterparts } = model;
    const hasTwo = sides.length > 1 && model.measures.some(({ key }) => counterparts.hasMeasure(key));
    for (const measure of model.measures) {
      if (measure.scale === "category" || measure.key === "nbytes" || Number.isNaN(measure.values[at])) continue;
      const peers = [];
      for (let other = 0; other < model.count; other++) {
        if (model.role[other] === model.role[at] && !Number.isNaN(measure.values[other])) peers.push(measure.values[other]);
      }
      const values = sides.map((side) => {
        const value = side.other ? counterparts.measure(at, measure.key) : measure.values[at];
        return value === undefined ? measure.values[at] : value;
      });
      const isOfOneSide = hasTwo && counterparts.hasMeasure(measure.key);
      const cells = (isOfOneSide ? values : [measure.values[at]]).map((value) => make("td", "number", measureText(measure, value)));
      // A measure of the difference stands below both sides.
      if (hasTwo && !isOfOneSide) {
        cells[0].colSpan = 2;
        cells[0].classList.add("of-both");
      }
      const row = make("tr", "", make("th", "", measure.label), ...cells);
      row.firstChild.scope = "row";
      row.firstChild.title = shown(measure.help || "");
      row.append(make("td", "number muted", peers.length > 2 ? measureText(measure, median(peers)) : "–"));
      rows.push(row);
    }
    if (!rows.length) return null;
    const labels = hasTwo ? ["first", "second"] : ["here"];
    const columns = [...labels, "median of its role"].map((label) => make("th", "number", label));
    const head = make("tr", "", make("th", "", ""), ...columns);
    for (const cell of head.children) cell.scope = "col";
    return make("table", "plain", make("thead", "", head), make("tbody", "", ...rows));
  }

  function fillDetails(place, found, side) {
    empty(place);
    const first = firstText({ nan: found.first_nan, inf: found.first_inf });
    // A page without sides says it at its top, unless the values were read just now.
    if (first && (side.label || model.doc.live)) place.append(make("p", "callout bad", `NaN or Inf: ${first}.`));
    const add = (title, ...what) => place.append(make("h3", "", title), ...what.filter(Boolean));
    if (found.exponents) add("Exponents", exponentChart(found.exponents), signs(found.negative));
    if (found.quantiles && found.quantiles.every((value) => value !== null)) {
      add("Quantiles", quantileChart(found.quantiles), quantileTable(found.quantiles));
    }
    const sizes = side.shape;
    if (found.rows)
      add(
        "Norms of rows",
        norms(
          found.rows,
          sizes.slice(0, -1).reduce((a, b) => a * b, 1),
          "row",
        ),
      );
    if (found.columns) add("Norms of columns", norms(found.columns, sizes[sizes.length - 1] ?? 1, "column"));
    if (found.singular) {
      const points = found.singular.map((value, place) => [place + 1, value, `${place + 1}: ${numberText(value)}`]);
      const told = `the ${points.length} largest singular values, from ${numberText(found.singular[0])}`;
      add("Singular values", lineChart(points, { told, log: true, left: "1", right: String(points.length) }) || "all zero");
    }
    if (!place.childElementCount) place.append(make("p", "muted", "Nothing more is known of its values."));
  }

  function exponentChart([low, counts]) {
    const high = low + counts.length - 1;
    const most = power(low + counts.indexOf(Math.max(...counts)));
    const told = `histogram of binary exponents, from ${power(low)} to ${power(high)}, most at ${most}`;
    const middle = Math.floor(counts.length / 2);
    const each = counts.map((_, place) => [(place + 0.5) / counts.length, power(low + place)]);
    const ticks = [
      [0, power(low)],
      [(middle + 0.5) / counts.length, power(low + middle)],
      [1, power(high)],
    ];
    return barChart(counts, { told, ticks: counts.length > 8 ? ticks : each, title: (place) => power(low + place) });
  }

  function signs(negative) {
    if (negative === null || negative === undefined) return null;
    const bar = shape("svg", { viewBox: `0 0 ${WIDE} 10`, class: "chart thin", role: "img" });
    bar.append(
      shape("title", {}, `${shareText(negative)} negative`),
      shape("rect", { x: 0, y: 0, width: WIDE * negative, height: 10, class: "bar second" }),
      shape("rect", { x: WIDE * negative, y: 0, width: WIDE * (1 - negative), height: 10, class: "bar" }),
    );
    return make(
      "div",
      "signs",
      bar,
      make("p", "muted ends", make("span", "", `${shareText(negative)} negative`), make("span", "", "zero or positive")),
    );
  }

  function quantileTable(quantiles) {
    const cell = (tag, text) => make(tag, "number", text);
    const third = (from) =>
      QUANTILES.slice(from, from + 3).flatMap((text, place) => [cell("th", text), cell("td", numberText(quantiles[from + place]))]);
    return make("table", "plain quantiles", make("tbody", "", ...[0, 3, 6].map((from) => make("tr", "", ...third(from)))));
  }

  function norms(values, count, noun) {
    const each = Math.max(1, Math.round(count / values.length));
    const low = Math.min(...values.filter(Number.isFinite));
    const high = Math.max(...values.filter(Number.isFinite));
    const dead = values.filter((value) => value === 0).length;
    const zero = dead ? `, ${dead} of ${values.length} groups zero` : "";
    const told = `norms of ${plural(count, noun)}, from ${numberText(low)} to ${numberText(high)}${zero}`;
    const ticks = [
      [0, "0"],
      [1, String(count)],
    ];
    const title = (place) => `${noun}s ${place * each} to ${Math.min(count, (place + 1) * each)}: ${numberText(values[place])}`;
    return make(
      "div",
      "",
      barChart(values, { told, ticks, title }),
      dead
        ? make(
            "p",
            "callout",
            `${each > 1 ? `${plural(dead, "group")} of ${noun}s` : plural(dead, noun)} ${dead === 1 ? "is" : "are"} all zero.`,
          )
        : "",
    );
  }

  // Who holds which box of a tensor that was cut.
  function boxesOf(at) {
    const shards = model.doc.shards;
    if (!shards || !shards.boxes) return null;
    const mine = [];
    shards.boxes.tensor.forEach((tensor, place) => {
      if (tensor === at && mine.length < 256) mine.push(place);
    });
    if (!mine.length) return null;
    const part = make("div", "", make("h3", "", "Boxes"));
    part.append(boxChart(model.shape(at), mine, shards));
    const rows = mine.slice(0, 24).map((place) => {
      const offset = shards.boxes.offset[place];
      const range = offset.map((start, axis) => `${start}:${start + shards.boxes.size[place][axis]}`).join(", ");
      return make("tr", "", make("td", "", `[${range}]`), make("td", "", clipped(shards.files[shards.boxes.file[place]].name, 60)));
    });
    part.append(make("table", "plain", make("tbody", "", ...rows)));
    if (mine.length > 24) part.append(make("p", "muted", `and ${mine.length - 24} more`));
    return part;
  }

  function askDetails(place, at, side) {
    place.append(make("p", "muted", "Reading its values…"));
    page.ask("detail", { tensor: at, other: side.other }).then(
      (found) => {
        if (current !== at) return;
        fillDetails(place, found, side);
        if (side.shape.length > 1) place.append(askSingular(place, at, side));
      },
      (error) => current === at && empty(place).append(make("p", "callout bad", `The server said: ${shown(error.message)}`)),
    );
  }

  function askSingular(place, at, side) {
    const press = button("Singular values", "quiet", () => {
      press.disabled = true;
      press.textContent = "Computing…";
      page.ask("detail", { tensor: at, other: side.other, svd: 1 }).then(
        (found) => {
          if (current !== at) return;
          fillDetails(place, found, side);
          if (!found.singular)
            place.append(make("p", "muted", "Its singular values are not to be had: not a matrix of floats, or too large."));
        },
        (error) => (press.textContent = shown(error.message)),
      );
    });
    return press;
  }

  function elements(at, side) {
    const part = make("div", "", make("h3", "", "Elements"));
    const map = makeTiles(page, at, side);
    maps.push(map);
    part.append(map.element);
    return part;
  }

  drawer.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    close();
  });
  return { open, close, isOpen: () => !drawer.hidden };
}

// The boxes of a tensor as a drawing of its last two axes that are cut, with the file's number in each.
function boxChart(sizes, places, shards) {
  const cut = sizes.map((_, axis) => new Set(places.map((place) => shards.boxes.offset[place][axis])).size > 1);
  const axes = sizes.map((_, axis) => axis).filter((axis) => cut[axis]);
  const down = axes[0] ?? 0;
  const across = axes.find((axis) => axis !== down) ?? sizes.length - 1;
  const height = 90;
  const span = (place, axis, room) => {
    if (axis === down && axis === across && room === WIDE) return [0, WIDE];
    const start = (shards.boxes.offset[place][axis] / (sizes[axis] || 1)) * room;
    return [start, (shards.boxes.size[place][axis] / (sizes[axis] || 1)) * room];
  };
  const marks = [];
  for (const place of places) {
    const [y, tall] = span(place, down, height);
    const [x, wide] = span(place, across, WIDE);
    const file = shards.boxes.file[place];
    marks.push(
      shape("rect", {
        x: x + 0.5,
        y: y + 0.5,
        width: Math.max(wide - 1, 1),
        height: Math.max(tall - 1, 1),
        class: `box tone${file % 6}`,
      }),
    );
    if (wide > 24 && tall > 12) marks.push(words(x + wide / 2, y + tall / 2 + 4, String(file), "middle"));
  }
  return chart(
    height,
    `${places.length} boxes in ${new Set(places.map((place) => shards.boxes.file[place])).size} files`,
    ...marks,
  );
}
