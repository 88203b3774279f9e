// The page: #/ is the table of runs, #/run/ID/TAB one run, #/compare/ID,ID several.

import { h, replace, errorBox } from "./dom.js";
import { server } from "./source.js";
import { showRuns } from "./table.js";
import { showRun } from "./run.js";
import { showComparison } from "./compare.js";

const main = document.getElementById("main");
const crumbs = document.getElementById("crumbs");
let leave = () => {};
let visit = 0;

async function route() {
  const [page, name = "", tab = ""] = location.hash.replace(/^#\/?/, "").split("/");
  const number = ++visit;
  leave();
  leave = () => {};
  const view = h("div", { class: "view" });
  replace(main, view);
  try {
    const ids = name.split(",").filter(Boolean).map(decodeURIComponent);
    if (page === "run") {
      replace(crumbs, h("a", { href: "#/" }, "Runs"), h("span", {}, ids[0]));
      document.title = `${ids[0]} · Tessera`;
    } else if (page === "compare") {
      replace(crumbs, h("a", { href: "#/" }, "Runs"), h("span", {}, "Compare"));
      document.title = "Compare · Tessera";
    } else {
      replace(crumbs);
      document.title = "Tessera";
    }
    const pages = { run: () => showRun(view, server, ids[0], tab), compare: () => showComparison(view, server, ids) };
    const cleanUp = await (pages[page] ?? (() => showRuns(view, server)))();
    if (number === visit) leave = cleanUp ?? leave;
    else cleanUp?.();
  } catch (error) {
    if (number === visit) replace(view, errorBox(error));
  }
  document.body.dataset.ready = String(number);
}

addEventListener("hashchange", route);
route();
