// The table of all runs, sorted, filtered and followed.

import { h, replace, badge, empty, spark, formatNumber, formatPace, formatSeconds, formatAge, runLink } from "./dom.js";

const ORDER = { training: 0, problem: 1, stopped: 2, done: 3 };

const COLUMNS = [
  { name: "Run", key: (run) => run.id, cell: runCell },
  { name: "State", key: (run) => ORDER[run.state], cell: (run) => badge(run.state) },
  { name: "Step", key: (run) => run.step, cell: stepCell, class: "number" },
  { name: "Metric", key: (run) => run.value ?? -Infinity, cell: metricCell },
  { name: "Loss", cell: (run) => spark(run.spark) },
  { name: "Pace", key: (run) => run.steps_per_second ?? 0, cell: paceCell, class: "number" },
  { name: "Data", key: (run) => run.info?.data ?? "", cell: (run) => run.info?.data ?? "" },
  { name: "Last alarm", key: (run) => run.alarm?.step ?? -1, cell: alarmCell },
  { name: "Updated", key: (run) => run.modified, cell: (run) => (run.modified ? formatAge(run.modified) : "–") },
];

function describe({ id, info }) {
  const kind = `${info.modality} ${info.kind}`;
  return id.split("/").at(-1) === info.recipe ? kind : `${info.recipe}, ${kind}`;
}

function runCell(run) {
  const parents = Object.entries(run.depends_on).map(([name, id]) =>
    h("span", { class: "depends" }, `${name.replaceAll("_", " ")}: `, h("a", { href: runLink(id) }, id)),
  );
  return h(
    "div",
    { class: "run-cell" },
    h("a", { class: "run-name", href: runLink(run.id) }, run.id),
    h("div", { class: "muted" }, run.info ? describe(run) : run.reason),
    parents,
  );
}

function stepCell(run) {
  if (!run.info) return "–";
  return h(
    "div",
    {},
    `${formatNumber(run.step)} / ${formatNumber(run.info.steps)}`,
    h("progress", { max: run.info.steps, value: Math.min(run.step, run.info.steps), "aria-label": "Progress" }),
  );
}

function metricCell(run) {
  if (!run.info || run.value === null) return "–";
  return h("div", {}, formatNumber(run.value), h("div", { class: "muted" }, run.info.metric));
}

function paceCell(run) {
  if (!run.steps_per_second) return "–";
  const left = run.seconds_left !== null ? `${formatSeconds(run.seconds_left)} left` : "";
  return h("div", {}, `${formatPace(run.steps_per_second)}`, left && h("div", { class: "muted" }, left));
}

function alarmCell(run) {
  const reason = run.info ? run.reason : "";
  if (!run.alarm) return reason ? h("span", { class: "muted" }, reason) : h("span", { class: "muted" }, "none");
  const text = String(run.alarm.alarm ?? "");
  return h("span", { class: "alarm", title: text }, `step ${run.alarm.step}: ${text.split(":")[0]}`);
}

export async function showRuns(view, source) {
  const content = await source.runs();
  let runs = content.runs;
  let sorting = { column: 1, up: true };
  const chosen = new Set();
  const rows = new Map();
  const filter = h("input", { type: "search", placeholder: "Filter by name, recipe, data, state", "aria-label": "Filter" });
  const count = h("span", { class: "muted" });
  const compare = h("button", { type: "button", disabled: true }, "Compare");
  const body = h("tbody");
  const headers = COLUMNS.map((column, i) =>
    h(
      "th",
      { class: column.class, scope: "col" },
      column.key ? h("button", { type: "button", class: "sort", onclick: () => sortBy(i) }, column.name) : column.name,
    ),
  );
  const table = h("table", { class: "runs" }, h("thead", {}, h("tr", {}, h("th", {}, h("span", { class: "offscreen" }, "Select")), headers)), body);
  const note = h("div");

  function sortBy(i) {
    sorting = { column: i, up: sorting.column === i ? !sorting.up : true };
    draw();
  }

  function draw() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = runs.filter((run) => {
      const text = [run.id, run.info?.recipe, run.info?.data, run.state].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const { key } = COLUMNS[sorting.column];
    const sign = sorting.up ? 1 : -1;
    const compareKeys = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    shown.sort((a, b) => sign * compareKeys(key(a), key(b)) || compareKeys(a.id, b.id));
    headers.forEach((header, i) => {
      const direction = sorting.up ? "ascending" : "descending";
      header.setAttribute("aria-sort", i === sorting.column ? direction : "none");
    });
    const wanted = shown.map(rowOf);
    // Rows that stay are not touched, so that focus and clicks are not lost.
    if (wanted.length !== body.children.length || wanted.some((one, i) => one !== body.children[i])) replace(body, wanted);
    count.textContent = `${shown.length} of ${runs.length} runs`;
    table.hidden = !runs.length;
    replace(
      note,
      runs.length === 0 && empty("No runs yet", `There are no runs in ${content.folders.join(", ")}. Start one with: tessera train images-vqgan`),
      runs.length > 0 && !shown.length && empty("No run matches the filter"),
    );
  }

  function rowOf(run) {
    const text = JSON.stringify(run);
    const known = rows.get(run.id);
    if (known?.text === text) return known.element;
    const element = row(run);
    known?.element.replaceWith(element);
    rows.set(run.id, { text, element });
    return element;
  }

  function row(run) {
    const box = h("input", { type: "checkbox", checked: chosen.has(run.id), "aria-label": `Select ${run.id}`, disabled: !run.info });
    box.addEventListener("change", () => {
      if (box.checked) chosen.add(run.id);
      else chosen.delete(run.id);
      compare.disabled = chosen.size < 2;
    });
    const cells = COLUMNS.map((column) => h("td", { class: column.class, "data-label": column.name }, column.cell(run)));
    return h("tr", { dataset: { run: run.id } }, h("td", { class: "select" }, box), cells);
  }

  compare.addEventListener("click", () => {
    location.hash = `#/compare/${[...chosen].map(encodeURIComponent).join(",")}`;
  });
  filter.addEventListener("input", draw);
  replace(
    view,
    h("div", { class: "title" }, h("h1", {}, "Runs"), h("span", { class: "muted path" }, content.folders.join(", "))),
    h("div", { class: "bar" }, filter, count, compare),
    h("div", { class: "scroll" }, table),
    note,
  );
  draw();
  return source.followTable({
    all: (all) => {
      runs = all.runs;
      draw();
    },
    runs: ({ changed, gone }) => {
      const known = new Map(runs.map((run) => [run.id, run]));
      changed.forEach((run) => known.set(run.id, run));
      gone.forEach((id) => known.delete(id));
      runs = [...known.values()];
      draw();
    },
  });
}
