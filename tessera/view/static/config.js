// Configurations as tables, and the model card.

import { h, empty, formatValue } from "./dom.js";

export function flatten(values, prefix = "") {
  const result = {};
  for (const [name, value] of Object.entries(values ?? {})) {
    const isNested = value !== null && typeof value === "object" && !Array.isArray(value);
    if (isNested) Object.assign(result, flatten(value, `${prefix}${name}.`));
    else result[prefix + name] = value;
  }
  return result;
}

export function configTable(config) {
  if (!config) return empty("No configuration", "config.json cannot be read.");
  const groups = new Map();
  for (const [name, value] of Object.entries(flatten(config))) {
    const group = name.includes(".") ? name.split(".")[0] : "run";
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push([name, value]);
  }
  return h(
    "div",
    { class: "config" },
    [...groups].map(([group, rows]) => [
      h("h3", {}, group),
      h("table", { class: "settings" }, h("tbody", {}, rows.map(([name, value]) => settingRow(name, value)))),
    ]),
  );
}

function settingRow(name, value) {
  return h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, formatValue(value)));
}

export function configDifference(one, other, oneName, otherName) {
  const [left, right] = [flatten(one), flatten(other)];
  const names = [...new Set([...Object.keys(left), ...Object.keys(right)])];
  const differing = names.filter((name) => JSON.stringify(left[name]) !== JSON.stringify(right[name]));
  if (!differing.length) return empty("The settings are equal");
  const show = (values, name) => (name in values ? formatValue(values[name]) : "absent");
  const head = h("tr", {}, h("th", {}, "setting"), h("th", {}, oneName), h("th", {}, otherName));
  const rows = differing.map((name) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, show(left, name)), h("td", {}, show(right, name))));
  return h("div", { class: "scroll" }, h("table", { class: "settings difference" }, h("thead", {}, head), h("tbody", {}, rows)));
}

// The Markdown that model cards use: headings, lists, tables, fenced code, paragraphs, inline code.
export function modelCard(text) {
  if (!text) return empty("No model card yet", "It is written when a run ends.");
  const card = h("article", { class: "card" });
  const lines = text.split("\n");
  let i = 0;
  if (lines[0] === "---") {
    const end = lines.indexOf("---", 1);
    if (end > 0) i = end + 1;
  }
  while (i < lines.length) {
    const line = lines[i];
    if (line.startsWith("```")) {
      const code = [];
      for (i++; i < lines.length && !lines[i].startsWith("```"); i++) code.push(lines[i]);
      card.append(h("pre", {}, code.join("\n")));
      i++;
    } else if (/^#{1,6} /.test(line)) {
      card.append(h(`h${Math.min(6, line.indexOf(" ") + 1)}`, {}, inline(line.replace(/^#+ /, ""))));
      i++;
    } else if (/^[-*] /.test(line)) {
      const list = h("ul");
      for (; i < lines.length && /^([-*] | {2,}\S)/.test(lines[i]); i++) {
        if (/^[-*] /.test(lines[i])) list.append(h("li", {}, inline(lines[i].slice(2))));
        else list.lastChild?.append(" ", ...inline(lines[i].trim()));
      }
      card.append(list);
    } else if (line.startsWith("|")) {
      const rows = [];
      for (; i < lines.length && lines[i].startsWith("|"); i++) {
        if (!/^\|[\s|:-]+\|?$/.test(lines[i])) rows.push(lines[i].replace(/^\||\|$/g, "").split("|"));
      }
      const cells = (row, tag) => h("tr", {}, row.map((cell) => h(tag, {}, inline(cell.trim()))));
      card.append(
        h("table", { class: "settings" }, h("thead", {}, cells(rows[0], "th")), h("tbody", {}, rows.slice(1).map((row) => cells(row, "td")))),
      );
    } else if (line.trim() === "") {
      i++;
    } else {
      const words = [];
      for (; i < lines.length && lines[i].trim() && !/^(#|```|\||[-*] )/.test(lines[i]); i++) words.push(lines[i]);
      card.append(h("p", {}, inline(words.join(" "))));
    }
  }
  return card;
}

function inline(text) {
  return text.split(/(`[^`]+`|\*\*[^*]+\*\*)/).map((part) => {
    if (part.startsWith("`")) return h("code", {}, part.slice(1, -1));
    if (part.startsWith("**")) return h("strong", {}, part.slice(2, -2));
    return document.createTextNode(part);
  });
}
