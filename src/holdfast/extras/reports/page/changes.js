// A diff: how many tensors are the same, changed, added, removed or renamed. Each count shows only those when it is pressed, and
// what has no counterpart is listed by name, since no picture of change can show it.

const NAMED = 12; // names of a list before it is cut; the table has all

function makeChanges(page) {
  const { model } = page;
  if (!model.state) return null;
  const body = byId("changes-body");
  const groups = STATES.map((label, state) => ({ label, state, members: [] }));
  model.state.forEach((state, at) => groups[state] && groups[state].members.push(at));
  const bar = make("div", "counts");
  const presses = groups
    .filter(({ members }) => members.length)
    .map(({ label, state, members }) => {
      const press = button("", "count-button", () => {
        page.onlyState = page.onlyState === state ? -1 : state;
        for (const other of presses) other.setAttribute("aria-pressed", "false");
        press.setAttribute("aria-pressed", String(page.onlyState === state));
        page.refilter();
      });
      press.setAttribute("aria-pressed", "false");
      press.append(make("strong", "", grouped.format(members.length)), ` ${label}`);
      press.title = `Show only those that are ${label}`;
      return press;
    });
  bar.append(...presses);
  body.append(bar);
  const lists = make("div", "lists");
  for (const { label, state, members } of groups) {
    if (state < 2 || !members.length) continue;
    const list = make("ul", "");
    for (const at of members.slice(0, NAMED)) {
      const link = button(clipped(model.names[at], 90), "link", () => page.open(at, link));
      const before = model.was.has(at) ? make("span", "muted", `${clipped(model.was.get(at), 90)} → `) : "";
      list.append(make("li", "", before, link));
    }
    if (members.length > NAMED) list.append(make("li", "muted", `and ${plural(members.length - NAMED, "other")} in the table`));
    lists.append(make("div", "", make("h3", "", `${label[0].toUpperCase()}${label.slice(1)}`), list));
  }
  body.append(lists);
  return { section: byId("changes"), filter: () => {}, colour: () => {}, size: () => {} };
}
