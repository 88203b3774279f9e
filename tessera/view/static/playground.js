// The playground of a run: forms made from the flags of its commands, jobs, and what was made.

import { h, replace, append, empty, errorBox, copyButton, formatAge, formatNumber, formatValue, onRemoved } from "./dom.js";
import { Gallery } from "./media.js";
import { tokenPanel } from "./tokens.js";
import { brush } from "./brush.js";
import { recorder } from "./record.js";

export async function playground(source, id, run) {
  const { forms, indexes, can_sample: canSample, is_kept: isKept } = await source.forms(id);
  if (!canSample) return { element: empty("No checkpoint yet", "The playground opens when the run has saved its first checkpoint.") };
  const info = run.summary.info;
  const jobs = h("div", { class: "jobs" });
  const history = h("div", { class: "history" });
  const states = new Map();
  const cards = new Map();
  const context = { source, id, info, indexes, jobs };
  context.fill = null;

  // The last state of a job may arrive before the response to the request that started it.
  const add = (job) => {
    const card = new JobCard(context, states.get(job.id) ?? job);
    cards.set(job.id, card);
    jobs.prepend(card.element);
  };
  const update = (job) => {
    states.set(job.id, job);
    const card = cards.get(job.id);
    if (!card && !job.is_finished) add(job);
    if (!card || card.isFinished) return;
    card.update(job);
    if (job.state === "done") refresh();
  };
  async function refresh() {
    const made = await source.history(id);
    const shown = new Set([...jobs.querySelectorAll("[data-folder]")].map((card) => card.dataset.folder));
    replace(
      history,
      h("h3", {}, "History"),
      made.length ? made.filter((one) => !shown.has(one.name)).map((one) => historyEntry(context, one)) : empty("Nothing made yet", "What is made here, or with tessera sample, is kept among the samples of the run and listed here."),
    );
  }

  const sections = forms.map((form) => new FormView(context, form, (job) => {
    if (!cards.has(job.id)) add(job);
    cards.get(job.id).element.scrollIntoView({ block: "nearest", behavior: "smooth" });
  }));
  const panel = h("div", { class: "forms" });
  const chooser = h("div", { class: "choice" }, forms.length > 1 ? sections.map((section, i) => h("button", { type: "button", class: "quiet", onclick: () => show(i) }, forms[i].title)) : null);
  function show(number) {
    [...chooser.children].forEach((button, i) => button.setAttribute("aria-pressed", String(i === number)));
    replace(panel, sections[number].element);
  }
  show(0);
  context.fill = (command, values) => {
    const number = forms.findIndex((form) => form.command === command);
    if (number < 0) return;
    show(number);
    sections[number].fill(values);
    scrollTo({ top: 0, behavior: "smooth" });
  };
  const element = h(
    "section",
    { class: "playground" },
    h("div", { class: "side" }, chooser, panel, !isKept && h("p", { class: "notice" }, "This folder is read-only: what is made here is kept until the server stops.")),
    h("div", { class: "results" }, jobs, history),
  );
  await refresh();
  const close = source.followJobs(id, { job: update });
  onRemoved(element, close);
  return { element, close };
}

class FormView {
  constructor(context, form, onStarted) {
    Object.assign(this, { context, form, onStarted });
    this.inputs = new Map(form.fields.map((field) => [field.name, makeInput(context, field, this)]));
    const rows = (isMain) => form.fields.filter((field) => field.is_main === isMain).map((field) => this.inputs.get(field.name).row);
    this.status = h("div", { role: "status" });
    this.button = h("button", { type: "submit", class: "primary" }, form.title);
    const others = rows(false);
    this.element = h(
      "form",
      { class: "form", autocomplete: "off" },
      h("p", { class: "muted" }, form.help),
      rows(true),
      others.length ? h("details", {}, h("summary", {}, "More settings"), others) : null,
      this.button,
      this.status,
    );
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
  }

  async submit() {
    this.button.disabled = true;
    replace(this.status);
    try {
      const values = {};
      for (const [name, input] of this.inputs) {
        const value = await input.value();
        if (value !== null && value !== "" && !(Array.isArray(value) && !value.length)) values[name] = value;
      }
      this.onStarted(await this.context.source.start(this.context.id, this.form.command, values));
    } catch (error) {
      replace(this.status, errorBox(error));
    }
    this.button.disabled = false;
  }

  fill(values) {
    for (const [name, input] of this.inputs) input.set(values[name] ?? null);
  }
}

function makeInput(context, field, form) {
  const makers = { lines: linesInput, choice: choiceInput, file: fileInput, run: choiceInput, index: indexInput, integer: numberInput, number: numberInput };
  const { control, value, set } = (makers[field.input] ?? textInput)(context, field, form);
  const label = h("label", {}, h("span", { class: "label" }, field.label), control, h("span", { class: "help" }, field.help));
  const row = field.input === "file" ? h("div", { class: "field" }, label.childNodes.length ? [...label.childNodes] : null) : h("div", { class: "field" }, label);
  row.dataset.field = field.name;
  return { row, value, set };
}

const placeholder = (field) => (field.default === null || field.default === undefined ? "" : formatValue(field.default));

function textInput(context, field) {
  const control = h("input", { type: "text", name: field.name, placeholder: placeholder(field) });
  return { control, value: () => control.value, set: (value) => (control.value = value === null ? "" : formatValue(value)) };
}

function numberInput(context, field) {
  const isWhole = field.input === "integer";
  const control = h("input", { type: "number", name: field.name, step: isWhole ? "1" : "any", placeholder: placeholder(field) });
  const value = () => (control.value === "" ? null : Number(control.value));
  const set = (value) => (control.value = value === null ? "" : String(value));
  if (field.name !== "seed") return { control, value, set };
  const dice = h("button", { type: "button", class: "quiet", title: "Another seed", onclick: () => set(Math.floor(Math.random() * 1e6)) }, "⚄");
  return { control: h("span", { class: "with-button" }, control, dice), value, set };
}

function linesInput(context, field) {
  if (field.choices.length) return choiceInput(context, field, null, true);
  const control = h("textarea", { name: field.name, rows: 3, placeholder: "One prompt per line" });
  return {
    control,
    value: () => control.value.split("\n").map((line) => line.trim()).filter(Boolean),
    set: (value) => (control.value = [value ?? []].flat().join("\n")),
  };
}

function choiceInput(context, field, form, isList = false) {
  const isDefault = field.choices.includes(field.default);
  const first = isDefault ? [] : [h("option", { value: "" }, field.default ? formatValue(field.default) : "none")];
  const control = h("select", { name: field.name }, first, field.choices.map((choice) => h("option", { value: choice, selected: choice === field.default }, choice)));
  return {
    control,
    value: () => {
      if (isDefault && control.value === field.default) return null;
      return isList && control.value ? [control.value] : control.value;
    },
    set: (value) => (control.value = [value ?? (isDefault ? field.default : "")].flat()[0] ?? ""),
  };
}

function indexInput(context, field) {
  const control = h("select", { name: field.name }, context.indexes.map((one) => h("option", { value: one.path }, `${one.name} (${formatNumber(one.examples)} examples)`)));
  if (!context.indexes.length) {
    return { control: h("span", { class: "muted" }, "There is no index yet: build one first."), value: () => null, set: () => {} };
  }
  return { control, value: () => control.value, set: (value) => (control.value = value ?? context.indexes[0].path) };
}

// A file is uploaded when the form is sent. An image can be painted on if there is a mask.
function fileInput(context, field, form) {
  const isImage = field.modality === "image";
  const isAudio = field.modality === "audio";
  let chosen = null;
  const input = h("input", { type: "file", name: field.name, accept: field.suffixes.join(","), "aria-label": field.label });
  const shown = h("div", { class: "preview" });
  const clear = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => set(null) }, "Remove");
  const drop = h("div", { class: "drop" }, input, clear, isAudio ? recorder((file) => choose({ file, name: "recording.wav" })) : null, shown);
  input.addEventListener("change", () => input.files[0] && choose({ file: input.files[0], name: input.files[0].name }));
  drop.addEventListener("dragover", (event) => event.preventDefault());
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    const [file] = event.dataTransfer.files;
    if (file) choose({ file, name: file.name });
  });
  if (field.name === "mask") drop.classList.add("mask-file");

  function choose(value) {
    chosen = value;
    clear.hidden = false;
    const url = value.file ? URL.createObjectURL(value.file) : context.source.fileUrl(context.id, value.folder, value.name);
    replace(shown, h("span", { class: "muted" }, value.name));
    const mask = form.form.fields.some((other) => other.name === "mask");
    if (isImage && field.name === "data" && mask) {
      const painter = brush(url);
      replace(shown, painter.element);
      form.inputs.get("mask").painter = painter;
    } else if (isImage) replace(shown, h("img", { src: url, alt: value.name, class: "pixels thumbnail" }));
  }
  function set(value) {
    if (value && (value.folder || value.upload)) {
      choose(value.upload ? { upload: value.upload, folder: "inputs", name: value.upload } : value);
      return;
    }
    chosen = null;
    input.value = "";
    clear.hidden = true;
    replace(shown);
  }
  async function value() {
    const entry = form.inputs.get(field.name);
    if (field.name === "mask" && !chosen && entry.painter) {
      const painted = await entry.painter.mask();
      if (!painted) return null;
      return context.source.upload(context.id, field.name, painted, "mask.png");
    }
    if (!chosen) return null;
    if (chosen.upload) return { upload: chosen.upload };
    if (chosen.file) return context.source.upload(context.id, field.name, chosen.file, chosen.name);
    return { folder: chosen.folder, name: chosen.name };
  }
  return { control: drop, value, set };
}

class JobCard {
  constructor(context, job) {
    this.context = context;
    this.status = h("strong", { class: "job-state" });
    this.bar = h("progress");
    this.cancel = h("button", { type: "button", class: "quiet" }, "Cancel");
    this.cancel.addEventListener("click", () => context.source.cancel(job.id).catch(() => {}));
    this.preview = h("img", { class: "pixels emerging", alt: "Unfinished samples", hidden: true });
    this.body = h("div");
    this.element = h("article", { class: "job", dataset: { job: job.id, folder: job.folder } }, h("div", { class: "job-head" }, this.status, this.bar, this.cancel), this.preview, this.body);
    this.update(job);
  }

  update(job) {
    const isFinished = (this.isFinished = job.is_finished);
    const texts = {
      queued: job.position > 0 ? `Waiting for ${job.position} other job${job.position > 1 ? "s" : ""}` : "Waiting",
      loading: job.command === "index" ? "Embedding" : "Loading the model",
      running: `Decoding step ${job.step} of ${job.steps}`,
      done: "Done",
      failed: "Failed",
      cancelled: "Cancelled",
    };
    this.element.dataset.state = job.state;
    this.status.textContent = texts[job.state];
    this.bar.hidden = this.cancel.hidden = isFinished;
    if (job.steps) Object.assign(this.bar, { max: job.steps, value: job.step });
    if (job.preview && !isFinished) {
      this.preview.src = `data:image/png;base64,${job.preview}`;
      this.preview.hidden = false;
    }
    if (isFinished) this.preview.hidden = true;
    if (job.state === "failed") replace(this.body, errorBox({ message: job.message }), copyRow(this.context, job));
    if (job.state === "done") {
      const notices = job.notices.filter((line) => !line.includes("contact sheet:"));
      replace(this.body, resultOf(this.context, job.result, job), notices.map((line) => h("p", { class: "muted" }, line)));
    }
  }
}

function copyRow(context, request) {
  if (!request?.shell) return null;
  const again = h("button", { type: "button", class: "quiet", onclick: () => context.fill(request.command, request.values) }, "Use these settings");
  return h("div", { class: "copies" }, copyButton("Copy as command", request.shell), copyButton("Copy as Python", request.python), again);
}

function resultOf(context, folder, request) {
  if (request?.command === "index") return h("p", {}, "The index is ready: choose it in the search. Open the playground again to see it.");
  const gallery = new Gallery(context.source, context.id);
  const canEdit = context.info.modality === "image" && context.info.kind === "generator";
  const edit = (sample) =>
    canEdit ? h("button", { type: "button", class: "quiet", onclick: () => context.fill("sample", { ...(request?.values ?? {}), data: { folder: folder.name, name: sample.shown } }) }, "Edit") : null;
  const hits = folder.hits.hits;
  return h(
    "div",
    { class: "result" },
    gallery.controls(context.info.modality),
    context.info.kind === "embedding" && folder.sheet ? h("img", { class: "sheet", src: context.source.fileUrl(context.id, folder.name, folder.sheet), alt: "Similarity matrix" }) : null,
    h("div", { class: "grid" }, folder.samples.map((sample) => gallery.cell(folder.name, sample, { downloads: true, action: edit(sample) }))),
    !folder.samples.length && !hits && empty("No files"),
    hits && !folder.samples.length ? h("ol", {}, hits.map((hit) => h("li", {}, `${hit.similarity.toFixed(3)} ${hit.name} ${hit.caption}`))) : null,
    (folder.hits.notices ?? []).map((line) => h("p", { class: "notice" }, line)),
    folder.tokens.shape ? tokenPanel(folder.tokens) : null,
    copyRow(context, request),
  );
}

function historyEntry(context, folder) {
  const { request, settings } = folder;
  const title = settings.query ?? [...new Set(settings.prompts ?? [])].filter(Boolean).join(" · ");
  const body = h("div");
  const details = h(
    "details",
    { class: "made", dataset: { made: folder.name } },
    h("summary", {}, h("span", { class: "made-title" }, title || folder.name), h("span", { class: "muted" }, `step ${settings.step ?? "–"}, seed ${settings.seed ?? "–"}, ${formatAge(folder.modified)}`)),
    body,
  );
  details.addEventListener("toggle", () => {
    if (!details.open || body.childNodes.length) return;
    append(body, [resultOf(context, folder, request.shell ? request : null), settingsList(settings)]);
  });
  return details;
}

function settingsList(settings) {
  const rows = Object.entries(settings).filter(([name]) => !["prompts", "examples"].includes(name));
  return h("details", {}, h("summary", {}, "All settings"), h("table", { class: "settings" }, h("tbody", {}, rows.map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, formatValue(value)))))));
}
