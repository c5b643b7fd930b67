// Puts the page together: reads the document, says what it is, and keeps the pictures in step with the filter, the colour and the
// theme.
//
// `page` is what they share: the model, the chosen measure with its scale and palette, and the tensors that the filter leaves
// (`shown`). A view is {section, filter, colour, size, print?}: what to do when the tensors, the colours or the width change, and
// on paper.

const WAIT = 90; // milliseconds after a key before the filter is applied

// What the reader chose, or what the system prefers. Some browsers refuse storage to a page opened from disk.
function chosenTheme() {
  let chosen = null;
  try {
    chosen = localStorage.getItem("holdfast-theme");
  } catch {
    // Then a choice lasts as long as the page.
  }
  if (chosen === "dark" || chosen === "light") return chosen;
  return window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

function remember(theme) {
  try {
    localStorage.setItem("holdfast-theme", theme);
  } catch {
    // As above.
  }
}

function drawTop(doc) {
  const kinds = { checkpoint: "report", diff: "diff", run: "run" };
  byId("kind").textContent = kinds[doc.kind] || "report";
  byId("title").textContent = clipped(doc.title);
  byId("sentence").textContent = shown(doc.sentence);
  const facts = empty(byId("facts"));
  for (const [label, text] of doc.facts) {
    if (label !== "scan") facts.append(make("div", "", make("dt", "", clipped(label, 60)), make("dd", "", clipped(text, 400))));
  }
  drawScan(doc.scan);
  if (doc.sampled) {
    byId("sampled").textContent = shown(doc.sampled.text);
    byId("sampled").hidden = false;
  }
  for (const note of doc.notes) byId("notes").append(make("li", "", clipped(note, 600)));
  byId("notes").hidden = !doc.notes.length;
  const of = `${clipped(doc.path)}${doc.other ? ` and ${clipped(doc.other)}` : ""}`;
  const written = doc.made ? `, written ${shown(doc.made.replace("T", " ").slice(0, 19))}` : "";
  byId("made").textContent = `holdfast ${shown(doc.version)} · ${of}${written}`;
}

function drawScan(scan) {
  if (!scan) return;
  const place = empty(byId("scan"));
  const tone = { clean: "good", dangerous: "bad", suspicious: "warn", notable: "warn" }[scan.verdict] || "";
  byId("facts").append(
    make("div", "", make("dt", "", "scan"), make("dd", "", make("span", `badge ${tone}`, clipped(scan.verdict, 60)))),
  );
  if (scan.findings.length) {
    const list = make("ul", "");
    for (const { severity, text } of scan.findings.slice(0, 50)) {
      list.append(make("li", "", make("strong", "", shown(severity)), ` ${clipped(text, 400)}`));
    }
    const more = make("details", "", make("summary", "", plural(scan.findings.length, "finding")), list);
    more.open = tone === "bad" && scan.findings.length <= 5;
    place.append(more);
  }
  place.hidden = !scan.findings.length;
}

// The measure that says most: a diff's change where there is one, then the size of the weights, then their type where there are
// several.
function firstMeasure(model) {
  const types = model.doc.tensors.dtype.labels.length > 1 ? ["dtype"] : ["nbytes", "dtype"];
  const says = ({ key, values }) => values.some((value) => (key === "change" ? value > 0 : !Number.isNaN(value)));
  for (const key of ["change", "rms", "state", ...types]) {
    const found = model.measures.find((measure) => measure.key === key && says(measure));
    if (found) return found;
  }
  return model.measures[0];
}

function makePage(model) {
  const page = {
    model,
    measure: null,
    scale: null,
    palette: null,
    theme: null,
    font: getComputedStyle(document.body).fontFamily,
    accent: "",
    relative: false,
    typed: "",
    onlyState: -1,
    shown: [],
    standouts: [],
    views: [],
    open: null,
    refilter: null,
    ask: (what, parameters) => ask(model.doc.live, what, parameters),
  };
  page.setTheme = (theme) => {
    document.documentElement.dataset.theme = page.theme = theme;
    page.palette = paletteOf(theme);
    page.accent = getComputedStyle(document.documentElement).getPropertyValue("--accent").trim();
  };
  page.setMeasure = (measure) => {
    page.measure = measure;
    page.scale = makeScale(measure);
  };
  page.refilter = () => {
    const matches = nameFilter(page.typed);
    const left = [];
    let nbytes = 0;
    for (let at = 0; at < model.count; at++) {
      if (page.onlyState >= 0 && model.state[at] !== page.onlyState) continue;
      if (matches && !matches(model.names[at])) continue;
      left.push(at);
      nbytes += model.area[at];
    }
    page.shown = left;
    const all = left.length === model.count;
    byId("filter-count").textContent = all
      ? ""
      : `${grouped.format(left.length)} of ${plural(model.count, "tensor")}, ${nbytesText(nbytes)}`;
    for (const view of page.views) view.filter();
    document.documentElement.dataset.filter = page.typed; // what the page shows now
  };
  page.recolour = () => {
    drawLegend(byId("legend"), page);
    for (const view of page.views) view.colour();
  };
  return page;
}

// Asks the server of `holdfast view`. The token goes in a header, which no other site's page can send.
async function ask(live, what, parameters) {
  const query = Object.entries(parameters)
    .map(([key, value]) => `${key}=${Number(value)}`)
    .join("&");
  let answer;
  try {
    answer = await fetch(`/api/${what}?${query}`, { headers: { "X-Holdfast-Token": live.token }, cache: "no-store" });
  } catch {
    throw new Error("nothing; has holdfast view ended?");
  }
  if (answer.ok) return answer.json();
  const said = (await answer.text()).slice(0, 600);
  throw new Error(said.startsWith("{") ? JSON.parse(said).error : `${answer.status} ${said}`);
}

function connectControls(page) {
  const { model } = page;
  const select = byId("measure");
  model.measures.forEach((measure, place) => {
    const option = make("option", "", clipped(measure.label, 40));
    option.value = String(place);
    select.append(option);
  });
  select.value = String(model.measures.indexOf(page.measure));
  select.addEventListener("change", () => {
    page.setMeasure(model.measures[Number(select.value)]);
    page.recolour();
    announce(`coloured by ${page.measure.label}`);
  });
  const filter = byId("filter");
  let waiting = 0;
  filter.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      page.typed = filter.value;
      page.refilter();
    }, WAIT);
  });
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      filter.focus();
      filter.select();
    } else if (event.key === "Escape") {
      if (page.drawer.isOpen()) page.drawer.close();
      else if (event.target === filter && filter.value) {
        filter.value = page.typed = "";
        page.refilter();
      }
    }
  });
}

function connectTheme(page) {
  const press = byId("theme");
  const say = () => (press.textContent = page.theme === "dark" ? "Light" : "Dark");
  const apply = (theme) => {
    page.setTheme(theme);
    say();
    page.recolour();
  };
  press.addEventListener("click", () => {
    const next = page.theme === "dark" ? "light" : "dark";
    remember(next);
    apply(next);
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => apply(chosenTheme()));
  say();
  // Paper is white: the pictures are drawn for it, and the tables as far as paper is worth it.
  let onPaper = false;
  const paper = (on) => {
    if (on === onPaper) return;
    onPaper = on;
    apply(on ? "light" : chosenTheme());
    for (const view of page.views) {
      view.size();
      if (view.print) view.print(on);
    }
  };
  window.matchMedia("print").addEventListener("change", (event) => paper(event.matches));
  window.addEventListener("beforeprint", () => paper(true));
  window.addEventListener("afterprint", () => paper(window.matchMedia("print").matches));
}

function watchWidth(page) {
  let width = document.documentElement.clientWidth;
  let asked = 0;
  new ResizeObserver(() => {
    if (document.documentElement.clientWidth === width) return;
    width = document.documentElement.clientWidth;
    cancelAnimationFrame(asked);
    asked = requestAnimationFrame(() => page.views.forEach((view) => view.size()));
  }).observe(document.documentElement);
}

async function start() {
  const doc = await readDocument();
  drawTop(doc);
  const model = makeModel(doc);
  const page = makePage(model);
  page.setTheme(chosenTheme());
  page.setMeasure(firstMeasure(model));
  page.standouts = findStandouts(model);
  page.drawer = makeDrawer(page);
  page.open = page.drawer.open;
  const makers = model.count
    ? [makeHistory, makeChanges, makeTreemap, makeMatrix, makeShards, makeTensorTable]
    : [makeHistory, makeShards];
  page.views = makers.map((maker) => maker(page)).filter(Boolean);
  for (const view of page.views) view.section.hidden = false;
  byId("controls").hidden = !model.count;
  connectControls(page);
  connectTheme(page);
  page.refilter();
  drawLegend(byId("legend"), page);
  drawStandouts(page);
  watchWidth(page);
  // For whoever measures: the page answers from here on.
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

document.documentElement.dataset.theme = chosenTheme(); // before the first paint: no flash of the other theme
document.addEventListener("DOMContentLoaded", () => {
  start().catch((error) => {
    byId("sentence").textContent =
      `This page could not be drawn: ${error.message}. The data behind it is whole; holdfast report --json writes it.`;
    throw error;
  });
});
