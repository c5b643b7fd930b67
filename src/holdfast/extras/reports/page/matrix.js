// Layer by role: a heat map for each stack of layers. A row is the number in the name, a column is the rest of it. The title of a
// column of experts opens a map with a column an expert.

const MOST_PANELS = 16;

function makeMatrix(page) {
  const host = byId("panels");
  let panels = [];

  function rebuild() {
    empty(host);
    const stacks = stacksOf(page.model, page.shown);
    panels = [];
    for (const stack of stacks.slice(0, MOST_PANELS)) add(stack, null);
    if (stacks.length > MOST_PANELS) {
      host.append(
        make("p", "muted", `and ${plural(stacks.length - MOST_PANELS, "smaller stack")}: filter by name to see them here`),
      );
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
    const folded = stacks
      .slice(0, MOST_PANELS)
      .flatMap((stack, place) => stack.columns.filter((column) => column.folded).map((column) => [column, panels[place]]));
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
    one.title.append(
      " ",
      button("Close", "quiet small", () => {
        one.panel.remove();
        panels = panels.filter((other) => other !== one);
      }),
    );
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
