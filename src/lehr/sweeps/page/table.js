// The table of configurations: sorted by any column, filtered by text and by what is brushed above.

const MOST_ROWS = 200;

/** The columns: the value to sort by and to show, whether the highest is first; left out if `when` is true for none. */
const columns = [
  { name: "place", value: (c) => c.place },
  { name: "configuration", value: (c) => c.index, copies: true },
  { name: "fresh score", value: (c) => c.fresh?.[0] ?? null, estimate: (c) => c.fresh, down: true, when: (c) => c.fresh },
  { name: "score", value: (c) => c.selected[0], estimate: (c) => c.selected, down: true },
  { name: "seeds", value: (c) => c.seeds },
  { name: "fresh failed", value: (c) => c.fresh_failed, down: true, when: (c) => c.fresh_failed },
  { name: "failed", value: (c) => c.failed, down: true, when: (c) => c.failed },
  { name: "frozen", value: (c) => c.frozen, down: true, when: (c) => c.frozen },
  { name: "stopped", value: (c) => c.stopped, down: true, when: (c) => c.stopped },
  { name: "env steps", value: (c) => c.env_steps, down: true, when: (c) => c.env_steps !== null },
  { name: "last rung's score", value: (c) => c.rung_score, down: true, when: (c) => c.rung_score !== null },
  ...parameters.map((parameter, p) => ({ name: parameter.name, value: (c) => c.values[p] })),
  { name: "settings", value: (c) => c.settings },
].filter((column) => !column.when || configurations.some(column.when));

const section = document.getElementById("table");
const search = section.querySelector("input");
const view = { column: columns[0], down: false, chosen: null, all: false };
configurations.forEach((each, index) => {
  each.index = index;
  const values = parameters.map((parameter, p) => `${parameter.name} ${each.values[p]}`);
  each.text = [index, each.settings, ...values].join(" ").toLowerCase();
});

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page from a file may not be allowed to
    const area = document.body.appendChild(element("textarea"));
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function cell(column, configuration) {
  const value = column.value(configuration);
  const made = element("td", typeof value === "number" || value === null ? number(value) : value);
  const [, low, high] = column.estimate?.(configuration) ?? [];
  if (low !== null && low !== undefined) made.append(element("span", `${number(low)} to ${number(high)}`, "interval"));
  if (column.copies) {
    const button = element("button", "Copy");
    button.type = "button";
    button.title = `Copy: ${configuration.command}`;
    button.addEventListener("click", () => copy(configuration.command, button));
    made.append(button);
  }
  return made;
}

/** Compare two values; null is last in both directions. */
function compare(a, b, down) {
  if (a === null || b === null) return (a === null) - (b === null);
  const areNumbers = typeof a === "number" && typeof b === "number";
  const order = areNumbers ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return down ? -order : order;
}

function rows() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  return configurations
    .filter((each) => view.chosen === null || view.chosen.has(each.index))
    .filter((each) => words.every((word) => each.text.includes(word)))
    .sort((a, b) => compare(view.column.value(a), view.column.value(b), view.down) || a.place - b.place);
}

function drawTable() {
  const found = rows();
  const shown = view.all ? found : found.slice(0, MOST_ROWS);
  section.querySelector("tbody").replaceChildren(...shown.map((configuration) => {
    const row = element("tr", undefined, configuration.index === winner ? "winner" : "");
    row.append(...columns.map((column) => cell(column, configuration)));
    return row;
  }));
  section.querySelectorAll("th").forEach((head, i) => {
    head.ariaSort = columns[i] === view.column ? (view.down ? "descending" : "ascending") : "none";
  });
  const total = `${number(configurations.length)} configuration${configurations.length === 1 ? "" : "s"}`;
  section.querySelector(".count").textContent =
    found.length < configurations.length ? `${number(found.length)} of ${total}` : total;
  section.querySelector(".clear").hidden = found.length === configurations.length;
  const more = section.querySelector(".more");
  more.hidden = shown.length === found.length;
  more.textContent = `Show all ${number(found.length)}`;
}

/** Show only these configurations, or all if null. */
function choose(chosen) {
  view.chosen = chosen;
  drawTable();
}

function makeTable(onClear) {
  const head = element("tr");
  for (const column of columns) {
    const button = element("button", column.name);
    button.type = "button";
    button.addEventListener("click", () => {
      view.down = view.column === column ? !view.down : Boolean(column.down);
      view.column = column;
      drawTable();
    });
    head.appendChild(element("th")).append(button);
  }
  section.querySelector("thead").append(head);
  search.addEventListener("input", drawTable);
  section.querySelector(".more").addEventListener("click", () => { view.all = true; drawTable(); });
  section.querySelector(".clear").addEventListener("click", () => { search.value = ""; choose(null); onClear(); });
  drawTable();
}
