// Curves of every number in metrics.jsonl: train and validation, raw and EMA, of one or more runs.

import uPlot from "./vendor/uplot.js";
import { h, replace, empty, formatNumber, onRemoved } from "./dom.js";

const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];
const SPEED = ["examples_per_second", "data_wait_frac", "peak_memory_mb", "skipped_steps"];
const OPTIMIZER = ["lr", "grad_norm"];
const GROUPS = ["Validation", "Training", "Optimizer", "Speed"];

// A chart has a name; validation metrics of raw and EMA weights share one with the training value.
function place(column) {
  if (SPEED.includes(column)) return { group: "Speed", chart: column.replaceAll("_", " "), kind: "train" };
  const [prefix, ...rest] = column.split("/");
  const name = rest.join("/") || prefix;
  if (prefix === "val") return { group: "Validation", chart: name, kind: "raw" };
  if (prefix === "val_ema") return { group: "Validation", chart: name, kind: "EMA" };
  if (OPTIMIZER.includes(name)) return { group: "Optimizer", chart: column, kind: "train" };
  return { group: "Training", chart: column, kind: "train" };
}

function arrange(runs) {
  const charts = new Map();
  runs.forEach((run, index) => {
    for (const name of Object.keys(run.columns)) {
      const { group, chart, kind } = place(name);
      const key = `${group}/${chart}`;
      if (!charts.has(key)) charts.set(key, { group, name: chart, series: [] });
      charts.get(key).series.push({ run: index, column: name, kind });
    }
  });
  return [...charts.values()].sort((a, b) => GROUPS.indexOf(a.group) - GROUPS.indexOf(b.group));
}

function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function describe(series, ids) {
  const kind = { raw: "raw weights", EMA: "EMA weights", train: "train" }[series.kind];
  return ids.length > 1 ? `${ids[series.run]} ${series.kind === "train" ? "" : series.kind}`.trim() : kind;
}

function lastOf(values) {
  return values?.findLast((value) => value !== null && value !== undefined);
}

class Chart {
  constructor(spec, runs, ids, options) {
    Object.assign(this, { spec, runs, ids, options });
    this.element = h("figure", { class: "chart", dataset: { chart: spec.name } });
    this.plot = null;
  }

  data() {
    const tables = this.spec.series.map(({ run, column, kind }) => {
      const { steps, values } = this.runs[run].columns[column];
      const shown = kind === "train" ? smooth(values, this.options.smoothing) : values;
      const positive = this.options.log ? shown.map((value) => (value > 0 ? value : null)) : shown;
      return [steps, positive];
    });
    return uPlot.join(tables);
  }

  series() {
    const isOne = this.ids.length === 1;
    return this.spec.series.map((series) => {
      const number = isOne ? { train: 0, raw: 1, EMA: 2 }[series.kind] : series.run;
      return {
        label: describe(series, this.ids),
        stroke: () => colour(COLOURS[number % COLOURS.length]),
        width: 1.5,
        dash: !isOne && series.kind === "raw" ? [4, 4] : undefined,
        spanGaps: true,
        points: { size: 5 },
        value: (plot, value, number, index) => formatNumber(index === null ? lastOf(plot.data[number]) : value),
      };
    });
  }

  draw() {
    this.plot?.destroy();
    const axis = { stroke: () => colour("--muted"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const options = {
      width: Math.max(240, this.element.clientWidth),
      height: 180,
      padding: [8, 26, 0, 0],
      title: this.spec.name,
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false }, focus: { prox: 20 } },
      scales: { x: { time: false }, y: { distr: this.options.log ? 3 : 1 } },
      axes: [
        { ...axis, size: 26, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? formatNumber(tick) : "")) },
        { ...axis, size: 58, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : formatNumber(tick))) },
      ],
      series: [{ label: "step", value: (plot, value, _, index) => formatNumber(index === null ? plot.data[0].at(-1) : value) }, ...this.series()],
      hooks: { draw: [(plot) => this.drawMarks(plot)] },
      legend: { live: true },
    };
    this.plot = new uPlot(options, this.data(), this.element);
    this.element.dataset.points = String(this.plot.data[0].length);
    this.element.dataset.lastStep = String(this.plot.data[0].at(-1) ?? "");
  }

  drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    for (const { step, kind } of this.options.marks) {
      const x = plot.valToPos(step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = colour(kind === "alarm" ? "--bad" : "--warn");
      ctx.setLineDash([3, 3]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  update() {
    if (!this.plot) return;
    this.plot.setData(this.data());
    this.element.dataset.points = String(this.plot.data[0].length);
    this.element.dataset.lastStep = String(this.plot.data[0].at(-1) ?? "");
  }

  resize() {
    const width = Math.max(240, this.element.clientWidth);
    if (this.plot && this.plot.width !== width) this.plot.setSize({ width, height: 180 });
  }
}

export async function curves(source, ids, { marks = [], onState = () => {} } = {}) {
  const runs = await Promise.all(ids.map((id) => source.metrics(id)));
  const options = { log: false, smoothing: 0, marks };
  const element = h("section", { class: "curves" });
  const closers = [];
  let charts = [];

  const log = h("input", { type: "checkbox" });
  log.addEventListener("change", () => {
    options.log = log.checked;
    charts.forEach((chart) => chart.draw());
  });
  const smoothing = h("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", "aria-label": "Smoothing" });
  const shown = h("output", {}, "0");
  smoothing.addEventListener("input", () => {
    options.smoothing = Number(smoothing.value);
    shown.textContent = smoothing.value;
    charts.forEach((chart) => chart.update());
  });
  const filter = h("input", { type: "search", placeholder: "Filter curves", "aria-label": "Filter curves" });
  filter.addEventListener("input", build);
  const groups = h("div");
  const bar = h(
    "div",
    { class: "bar" },
    filter,
    h("label", { class: "inline" }, log, "Log scale"),
    h("label", { class: "inline" }, "Smoothing", smoothing, shown),
    h("span", { class: "muted hint" }, "Drag to zoom, double-click to reset"),
  );

  function build() {
    const words = filter.value.toLowerCase();
    const specs = arrange(runs).filter((spec) => `${spec.group} ${spec.name}`.toLowerCase().includes(words));
    charts.forEach((chart) => chart.plot?.destroy());
    charts = specs.map((spec) => new Chart(spec, runs, ids, options));
    replace(
      groups,
      GROUPS.map((group) => {
        const inside = charts.filter((chart) => chart.spec.group === group);
        return inside.length ? [h("h2", {}, group), h("div", { class: "charts" }, inside.map((chart) => chart.element))] : null;
      }),
      !charts.length && empty(words ? "No curve matches the filter" : "No metrics yet", words ? "" : "The first line is written after a few steps."),
    );
    if (element.isConnected) charts.forEach((chart) => chart.draw());
  }

  let scheduled = false;
  function redraw() {
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(() => {
      scheduled = false;
      charts.forEach((chart) => chart.update());
    });
  }

  function add(run, records) {
    let isNew = false;
    for (const record of records) {
      for (const [name, value] of Object.entries(record)) {
        if (["step", "examples"].includes(name) || !(typeof value === "number" || value === null)) continue;
        isNew ||= !(name in run.columns);
        run.columns[name] ??= { steps: [], values: [] };
        run.columns[name].steps.push(record.step);
        run.columns[name].values.push(value);
      }
    }
    if (isNew) build();
    else redraw();
  }

  build();
  element.append(bar, groups);
  const observer = new ResizeObserver(() => charts.forEach((chart) => (chart.plot ? chart.resize() : chart.draw())));
  observer.observe(element);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const repaint = () => charts.forEach((chart) => chart.plot?.redraw());
  scheme.addEventListener("change", repaint);
  closers.push(() => scheme.removeEventListener("change", repaint), () => observer.disconnect());
  let isClosed = false;
  let stop = () => {};
  function follow() {
    const cursors = runs.map((run) => run.cursor);
    stop = source.followRuns(ids, cursors, {
      records: ({ run, records }) => add(runs[ids.indexOf(run)], records),
      state: onState,
      // A resumed run replaced its metrics by those up to its checkpoint.
      reset: async ({ run }) => {
        stop();
        runs[ids.indexOf(run)] = await source.metrics(run);
        build();
        if (!isClosed) follow();
      },
    });
  }
  if (source.isLive) follow();
  closers.push(() => {
    isClosed = true;
    stop();
  });
  const close = () => closers.splice(0).forEach((closer) => closer());
  onRemoved(element, close);
  return { element, close };
}
