// One run: its state, and tabs for curves, samples, playground, events, settings and model card.

import { h, replace, errorBox, runLink } from "./dom.js";
import { runHeader, evaluation } from "./header.js";
import { curves } from "./curves.js";
import { samplesOverTime } from "./samples.js";
import { playground } from "./playground.js";
import { timeline, marksOf } from "./timeline.js";
import { configTable, configDifference, modelCard } from "./config.js";

const TABS = { curves: "Curves", samples: "Samples", playground: "Playground", events: "Events", config: "Settings", card: "Model card" };

export async function showRun(view, source, id, chosen) {
  const run = await source.run(id);
  const { summary } = run;
  const header = h("div", { class: "run-header" });
  const drawHeader = () => replace(header, runHeader(summary));
  drawHeader();
  if (!summary.info) {
    replace(view, header, h("div", { class: "problem-box" }, h("strong", {}, "This folder cannot be shown as a run."), h("p", {}, summary.reason), h("p", { class: "muted path" }, summary.path)));
    return null;
  }
  const tab = chosen in TABS ? chosen : "curves";
  const tabs = h(
    "nav",
    { class: "tabs", "aria-label": "Parts of the run" },
    Object.entries(TABS).map(([key, name]) => {
      const count = key === "events" ? eventCount(run.notes) : 0;
      return h("a", { href: runLink(id, key), "aria-current": key === tab ? "page" : null }, name, count ? h("span", { class: "count" }, count) : null);
    }),
  );
  const body = h("div", { class: "tab", dataset: { tab } });
  replace(view, header, tabs, body);
  const current = tabs.querySelector("[aria-current]");  // which may be outside of a narrow window
  tabs.scrollLeft = current.offsetLeft - tabs.offsetLeft - (tabs.clientWidth - current.offsetWidth) / 2;
  const onState = (changed) => {
    Object.assign(summary, changed);
    drawHeader();
  };
  const builders = {
    curves: () => curvesTab(source, id, run, onState),
    samples: async () => {
      const samples = await samplesOverTime(source, id, summary.info);
      const close = source.followRuns([id], [], {
        state: (changed) => {
          onState(changed);
          samples.refresh(changed.samples.length);
        },
      });
      return { element: samples.element, close };
    },
    playground: () => playground(source, id, run),
    events: () => ({ element: timeline(run.notes, summary) }),
    config: () => settingsTab(source, id, run),
    card: () => ({ element: h("div", {}, evaluation(run.evaluation), modelCard(run.card)) }),
  };
  try {
    const { element, close } = await builders[tab]();
    replace(body, element);
    return close;
  } catch (error) {
    replace(body, errorBox(error));
    return null;
  }
}

function eventCount(notes) {
  return Object.values(notes).reduce((sum, list) => sum + list.length, 0);
}

async function curvesTab(source, id, run, onState) {
  const element = h("div");
  const current = await curves(source, [id], { marks: marksOf(run.notes), onState });
  const { runs } = await source.runs();
  const others = runs.filter((other) => other.info && other.id !== id);
  const select = h(
    "select",
    { "aria-label": "Compare with" },
    h("option", { value: "" }, "Compare with another run"),
    others.map((other) => h("option", { value: other.id }, other.id)),
  );
  select.addEventListener("change", () => {
    if (select.value) location.hash = `#/compare/${[id, select.value].map(encodeURIComponent).join(",")}`;
  });
  if (others.length) current.element.querySelector(".bar").append(select);
  element.append(current.element);
  return { element, close: () => current.close() };
}

async function settingsTab(source, id, run) {
  const { runs } = await source.runs();
  const others = runs.filter((other) => other.info && other.id !== id);
  const select = h("select", { "aria-label": "Difference to" }, h("option", { value: "" }, "Difference to another run"), others.map((other) => h("option", { value: other.id }, other.id)));
  const table = h("div", {}, configTable(run.config));
  select.addEventListener("change", async () => {
    if (!select.value) return replace(table, configTable(run.config));
    const other = await source.run(select.value);
    return replace(table, configDifference(run.config, other.config, id, other.summary.id));
  });
  return { element: h("section", {}, others.length ? h("div", { class: "bar" }, select) : null, table) };
}
