// The samples of a run over its steps: a slider, and all samples of the chosen step.

import { h, replace, empty } from "./dom.js";
import { Gallery } from "./media.js";
import { codebookPanel, tokenPanel } from "./tokens.js";

export async function samplesOverTime(source, run, info) {
  let [steps, validations] = await Promise.all([source.samples(run), source.histograms(run)]);
  const element = h("section", { class: "samples" });
  const slider = h("input", { type: "range", min: "0", step: "1", "aria-label": "Step", list: "steps" });
  const output = h("output", { class: "step" });
  const [earlier, later] = [-1, 1].map((change) =>
    h("button", { type: "button", class: "quiet", "aria-label": change < 0 ? "Earlier step" : "Later step", onclick: () => choose(Number(slider.value) + change) }, change < 0 ? "◀" : "▶"),
  );
  const controls = h("div", { class: "controls" });
  const grid = h("div", { class: "grid" });
  const note = h("div");
  const sheet = h("div");
  let zoom = 1;
  let settings = {};

  function choose(number) {
    if (number < 0 || number >= steps.length) return;
    slider.value = String(number);
    draw();
  }

  function draw() {
    element.classList.toggle("none", !steps.length);
    if (!steps.length) {
      replace(note, empty("No samples yet", "A run saves samples every --sample-every steps and at its end."));
      return;
    }
    replace(note);
    slider.max = String(steps.length - 1);
    const folder = steps[Number(slider.value)];
    output.textContent = `Step ${folder.step.toLocaleString("en-US")}`;
    const gallery = new Gallery(source, run, { zoom });
    Object.assign(gallery.meshes, settings);
    replace(grid, folder.samples.map((sample) => gallery.cell(folder.name, sample, { downloads: source.isLive })));
    grid.dataset.step = String(folder.step);
    replace(controls, gallery.controls(info.modality));
    controls.oninput = () => {
      zoom = gallery.zoom;
      settings = { turning: gallery.meshes.turning, wireframe: gallery.meshes.wireframe };
    };
    controls.onchange = controls.oninput;
    if (!folder.samples.length && folder.sheet) {
      const contact = { label: "Contact sheet", files: [folder.sheet], shown: folder.sheet };
      replace(grid, gallery.cell(folder.name, contact));
    }
    replace(
      sheet,
      info.kind === "embedding" && folder.sheet && h("figure", { class: "sheet" }, h("figcaption", { class: "muted" }, "Similarity of recordings and captions"), h("img", { src: source.fileUrl(run, folder.name, folder.sheet), alt: "Similarity matrix" })),
    );
    if (folder.tokens.shape) note.append(tokenPanel(folder.tokens));
    note.append(...[codebookPanel(validations, folder.step)].filter(Boolean));
  }

  slider.addEventListener("input", draw);
  element.append(h("div", { class: "bar slider" }, earlier, slider, later, output, controls), sheet, grid, note);
  slider.max = String(Math.max(0, steps.length - 1));
  slider.value = String(Math.max(0, steps.length - 1));
  draw();
  return {
    element,
    // Called with the number of steps that have samples; the slider stays at the end if it was there.
    async refresh(count) {
      if (count === steps.length) return;
      const wasLast = Number(slider.value) === steps.length - 1;
      [steps, validations] = await Promise.all([source.samples(run), source.histograms(run)]);
      slider.max = String(Math.max(0, steps.length - 1));
      if (wasLast) slider.value = slider.max;
      draw();
    },
  };
}
