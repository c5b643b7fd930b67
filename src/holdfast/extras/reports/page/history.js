// A run: what each step weighs and shares, norms and losses over time, and which steps are kept and why.

const MOST_STEPS = 600; // marks in a chart; a longer run is thinned out, the table has all

function thinned(steps) {
  const every = Math.ceil(steps.length / MOST_STEPS);
  return steps.filter((_, at) => at % every === 0 || at === steps.length - 1);
}

function makeHistory(page) {
  const { run } = page.model.doc;
  if (!run) return null;
  const { steps } = run;
  if (run.summary !== page.model.doc.sentence) byId("run-summary").textContent = shown(run.summary || "");
  const charts = byId("run-charts");
  const [left, right] = steps.length ? [`step ${steps[0].step}`, `step ${steps[steps.length - 1].step}`] : ["", ""];
  const few = thinned(steps);
  const add = (title, drawing, note = null) =>
    drawing && charts.append(make("figure", "", make("figcaption", "", title), drawing, note));
  const bars = few.map((one) => ({
    own: Math.max(one.nbytes - one.shared, 0),
    shared: one.shared,
    faded: one.state === "deleted",
    title: `step ${one.step}: ${nbytesText(one.nbytes)}, ${nbytesText(one.shared)} shared, ${shown(one.state)}`,
  }));
  if (steps.length) {
    const note = make(
      "p",
      "muted keys",
      make("span", "key own", "written"),
      make("span", "key second", "shared with the step before"),
    );
    add("Bytes of each step", stackedChart(bars, { told: `bytes of ${plural(steps.length, "step")}`, left, right }), note);
  }
  for (const [key, title] of [
    ["norm", "Norm of all weights"],
    ["loss", "Loss"],
  ]) {
    const points = few.map((one) => [one.step, one[key] ?? NaN, `step ${one.step}: ${numberText(one[key] ?? NaN)}`]);
    add(title, lineChart(points, { told: `${title} over ${plural(points.length, "step")}`, left, right }));
  }
  const columns = [
    { label: "step", number: true, text: (at) => grouped.format(steps[at].step), value: (at) => steps[at].step },
    {
      label: "state",
      text: (at) => `${steps[at].state}${steps[at].pinned ? ", pinned" : ""}`,
      value: (at) => steps[at].state,
      mark: (at) => (steps[at].state === "torn" ? "torn" : ""),
    },
    { label: "kept", text: (at) => (steps[at].kept ? "kept" : "not kept"), value: (at) => Number(steps[at].kept) },
    { label: "why", wide: true, loose: true, text: (at) => shown(steps[at].why || ""), value: (at) => steps[at].why },
    { label: "bytes", number: true, sized: true, text: (at) => nbytesText(steps[at].nbytes), value: (at) => steps[at].nbytes },
    {
      label: "shared",
      wide: true,
      number: true,
      sized: true,
      text: (at) => nbytesText(steps[at].shared),
      value: (at) => steps[at].shared,
    },
    { label: "norm", wide: true, number: true, text: (at) => numberText(steps[at].norm ?? NaN), value: (at) => steps[at].norm },
    { label: "loss", wide: true, number: true, text: (at) => numberText(steps[at].loss ?? NaN), value: (at) => steps[at].loss },
    {
      label: "time",
      wide: true,
      loose: true,
      text: (at) => shown((steps[at].time || "").replace("T", " ").slice(0, 19)),
      value: (at) => steps[at].time,
    },
  ].filter(
    ({ label }) =>
      !["norm", "loss", "time"].includes(label) || steps.some((one) => one[label] !== null && one[label] !== undefined),
  );
  const table = makeTable(byId("run-table"), {
    label: "Steps",
    columns,
    open: null,
    height: Math.min(10, Math.max(steps.length, 1)),
  });
  byId("run").hidden = false;
  table.show(steps.map((_, at) => at));
  return { section: byId("run"), filter: () => {}, colour: () => {}, size: table.draw, print: table.print };
}
