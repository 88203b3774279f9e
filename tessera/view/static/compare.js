// Two or more runs in the same axes, and the settings in which they differ.

import { h, replace, empty, runLink } from "./dom.js";
import { curves } from "./curves.js";
import { configDifference } from "./config.js";

export async function showComparison(view, source, ids) {
  const runs = await Promise.all(ids.map((id) => source.run(id)));
  const links = ids.map((id) => h("a", { href: runLink(id) }, id));
  const { element, close } = await curves(source, ids);
  const [first, ...others] = runs.filter((run) => run.config);
  replace(
    view,
    h("div", { class: "title" }, h("h1", {}, "Compare"), h("span", { class: "links" }, links)),
    element,
    h("h2", {}, "Settings that differ"),
    first && others.length
      ? others.map((other) => configDifference(first.config, other.config, first.summary.id, other.summary.id))
      : empty("Nothing to compare"),
  );
  return close;
}
