// The head of a run, and its evaluation.

import { h, badge, empty, formatNumber, formatPace, formatSeconds, runLink } from "./dom.js";

export function runHeader(summary) {
  const { info } = summary;
  const facts = [];
  if (info) {
    facts.push(["Recipe", info.recipe], ["Data", info.data]);
    facts.push(["Step", `${formatNumber(summary.step)} of ${formatNumber(info.steps)}`]);
    if (summary.value !== null) facts.push([info.metric, formatNumber(summary.value)]);
    if (summary.steps_per_second) facts.push(["Pace", formatPace(summary.steps_per_second)]);
    if (summary.seconds_left !== null) facts.push(["Time left", formatSeconds(summary.seconds_left)]);
    for (const [name, id] of Object.entries(summary.depends_on ?? {})) facts.push([name.replaceAll("_", " "), h("a", { href: runLink(id) }, id)]);
  }
  return [
    h("div", { class: "title" }, h("h1", {}, summary.id), badge(summary.state)),
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    summary.reason && info && h("p", { class: "notice" }, summary.reason),
    summary.alarm && h("p", { class: "notice alarm" }, `Alarm at step ${summary.alarm.step}: ${summary.alarm.alarm}`),
  ];
}

export function evaluation(content) {
  if (!content) return null;
  const names = Object.keys(content.metrics.ema ?? {});
  const row = (name) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, formatNumber(content.metrics.raw?.[name])), h("td", {}, formatNumber(content.metrics.ema[name])));
  const head = h("tr", {}, h("th", {}, "metric"), h("th", {}, "raw"), h("th", {}, "EMA"));
  return h("section", {}, h("h3", {}, "Evaluation"), names.length ? h("table", { class: "settings" }, h("thead", {}, head), h("tbody", {}, names.map(row))) : empty("No metrics"));
}
