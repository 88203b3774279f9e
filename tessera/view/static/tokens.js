// The tokens of a reconstruction: compression, the grid of codes and how evenly codes are used.

import { h, formatNumber } from "./dom.js";

export function tokenPanel(tokens) {
  const used = tokens.counts.filter((count) => count > 0).length;
  const facts = [
    ["Tokens", formatNumber(tokens.tokens)],
    ["Grid", tokens.shape.join(" × ")],
    ["Vocabulary", formatNumber(tokens.vocab_size)],
    ["Codes used", `${formatNumber(used)} (${((100 * used) / tokens.vocab_size).toFixed(0)} %)`],
    ["Uncompressed", `${formatNumber(Math.round(tokens.bytes))} bytes`],
    ["As tokens", `${formatNumber(Math.round(tokens.token_bytes))} bytes`],
    ["Compression", `${formatNumber(Math.round(10 * tokens.compression) / 10)} ×`],
  ];
  return h(
    "section",
    { class: "tokens" },
    h("h3", {}, "Tokens"),
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h("div", { class: "pair" }, codeGrid(tokens), histogram(tokens.counts)),
  );
}

// The codes of the first example, one cell each; equal codes have equal colours.
function codeGrid({ codes, shape, vocab_size: size }) {
  const columns = shape.length > 1 ? shape[1] : Math.min(shape[0], 64);
  const perCell = shape.length > 2 ? shape.slice(2).reduce((a, b) => a * b, 1) : 1;
  const cells = codes.filter((_, i) => i % perCell === 0);
  const rows = Math.ceil(cells.length / columns);
  const canvas = h("canvas", { class: "pixels codes", width: columns, height: rows, role: "img", "aria-label": "Codes" });
  const context = canvas.getContext("2d");
  cells.forEach((code, i) => {
    const hue = (code * 137.508) % 360;
    context.fillStyle = code < 0 ? "transparent" : `hsl(${hue} 45% ${35 + (40 * code) / size}%)`;
    context.fillRect(i % columns, Math.floor(i / columns), 1, 1);
  });
  return h("figure", {}, h("figcaption", {}, perCell > 1 ? "Codes of the first quantizer, first example" : "Codes of the first example"), canvas);
}

// How often the codes were used in the last validation up to a step, one histogram for each quantizer.
export function codebookPanel(validations, step) {
  const found = validations.findLast((one) => one.step <= step);
  if (!found) return null;
  const charts = Object.entries(found.histograms).map(([name, counts]) =>
    histogram(counts, `${name.replaceAll("_", " ")}, most frequent codes first`),
  );
  return h(
    "section",
    { class: "codebook", dataset: { step: found.step } },
    h("h3", {}, `Use of the codebook on held-out examples at step ${formatNumber(found.step)}`),
    h("div", { class: "pair" }, charts),
  );
}

function histogram(counts, title = "") {
  const sorted = [...counts].sort((a, b) => b - a);
  const width = 320;
  const canvas = h("canvas", { class: "histogram", width, height: 120, role: "img", "aria-label": "Use of the codebook" });
  const context = canvas.getContext("2d");
  const highest = sorted[0] || 1;
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--c1").trim();
  for (let x = 0; x < width; x++) {
    const count = sorted[Math.floor((x * sorted.length) / width)];
    const height = (118 * count) / highest;
    context.fillRect(x, 120 - height, 1, height);
  }
  const caption = title || `Use of the ${formatNumber(counts.length)} codes, most frequent first (at most ${formatNumber(highest)} times)`;
  return h("figure", {}, h("figcaption", {}, caption), canvas);
}
