// What happened in a run: alarms with their remedies, skipped steps, examples that were rejected.

import { h, empty, formatNumber } from "./dom.js";

export function marksOf(notes) {
  const marks = (notes.alarms ?? []).map(({ step }) => ({ step, kind: "alarm" }));
  return marks.concat((notes.skipped_steps ?? []).map(({ step }) => ({ step, kind: "skipped" })));
}

export function timeline(notes, summary) {
  const events = [];
  for (const { step, alarm } of notes.alarms ?? []) {
    const [title, ...rest] = String(alarm).split(":");
    events.push({ step, kind: "alarm", title, text: rest.join(":").trim() });
  }
  for (const { step, update, examples } of notes.skipped_steps ?? []) {
    const names = (examples ?? []).slice(0, 8).join(", ");
    events.push({ step, kind: "skipped", title: "Skipped step", text: `The values of ${update} were not finite. Examples: ${names}` });
  }
  events.sort((a, b) => a.step - b.step);
  const rejected = notes.rejected ?? [];
  if (!events.length && !rejected.length) return empty("Nothing to report", "No alarms, no skipped steps, no rejected files.");
  const last = Math.max(summary.step, ...events.map((event) => event.step), 1);
  return h(
    "section",
    { class: "timeline" },
    events.length ? h("div", { class: "track" }, events.map((event) => mark(event, last))) : null,
    h("ol", {}, events.map((event) => h("li", { class: event.kind }, h("span", { class: "step" }, `Step ${formatNumber(event.step)}`), h("strong", {}, event.title), h("p", {}, event.text)))),
    rejected.length
      ? [
          h("h3", {}, `Rejected files (${rejected.length})`),
          h("div", { class: "scroll" }, h("table", { class: "settings" }, h("tbody", {}, rejected.slice(0, 500).map((one) => h("tr", {}, h("th", { scope: "row" }, one.example), h("td", {}, one.reason)))))),
        ]
      : null,
  );
}

function mark(event, last) {
  const element = h("span", { class: `mark-at ${event.kind}`, title: `Step ${event.step}: ${event.title}` });
  element.style.left = `${(100 * event.step) / last}%`;
  return element;
}
