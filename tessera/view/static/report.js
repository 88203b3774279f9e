// A report: one run in one file, with the same parts as the page and the data inside of the file.

import { h, replace } from "./dom.js";
import { runHeader, evaluation } from "./header.js";
import { curves } from "./curves.js";
import { samplesOverTime } from "./samples.js";
import { timeline, marksOf } from "./timeline.js";
import { configTable, modelCard } from "./config.js";

const content = JSON.parse(document.getElementById("report").textContent);

const source = {
  isLive: false,
  metrics: async () => content.metrics,
  samples: async () => content.steps,
  histograms: async () => content.validations,
  fileUrl: (run, folder, name) => content.files[`${folder}/${name}`] ?? null,
};

async function show() {
  const { run } = content;
  const { summary } = run;
  summary.depends_on = {};
  document.title = `${summary.id} · Tessera`;
  const charts = await curves(source, [summary.id], { marks: marksOf(run.notes) });
  const samples = await samplesOverTime(source, summary.id, summary.info);
  const section = (title, ...children) => h("section", {}, h("h2", {}, title), children);
  replace(
    document.getElementById("main"),
    h("div", { class: "run-header" }, runHeader(summary)),
    section("Samples", samples.element),
    content.left_out ? h("p", { class: "muted" }, `${content.left_out} samples are left out to keep this file small.`) : null,
    section("Curves", charts.element),
    section("Events", timeline(run.notes, summary)),
    section("Evaluation and model card", evaluation(run.evaluation), modelCard(run.card)),
    section("Settings", configTable(run.config)),
  );
  document.body.dataset.ready = "1";
}

show();
