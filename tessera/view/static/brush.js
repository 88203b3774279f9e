// A brush for inpainting: what is painted over is generated again.

import { h } from "./dom.js";

export function brush(url) {
  const image = new Image();
  const canvas = h("canvas", { class: "brush pixels", "aria-label": "Paint over what is to be generated again" });
  const mask = document.createElement("canvas");
  const size = h("input", { type: "range", min: "2", max: "40", value: "14", "aria-label": "Brush size in per cent" });
  const undo = h("button", { type: "button", class: "quiet", onclick: () => clear() }, "Clear");
  let isPainted = false;
  let last = null;

  image.addEventListener("load", () => {
    for (const one of [canvas, mask]) Object.assign(one, { width: image.naturalWidth, height: image.naturalHeight });
    clear();
  });
  image.src = url;

  function clear() {
    isPainted = false;
    const context = mask.getContext("2d");
    context.fillStyle = "black";
    context.fillRect(0, 0, mask.width, mask.height);
    draw();
  }

  function draw() {
    const context = canvas.getContext("2d");
    context.globalAlpha = 1;
    context.globalCompositeOperation = "source-over";
    context.drawImage(image, 0, 0);
    context.globalAlpha = 0.55;
    context.globalCompositeOperation = "screen";
    context.drawImage(mask, 0, 0);
  }

  function point(event) {
    const box = canvas.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * canvas.width, ((event.clientY - box.top) / box.height) * canvas.height];
  }

  function paint(to) {
    const context = mask.getContext("2d");
    context.strokeStyle = "white";
    context.lineCap = "round";
    context.lineWidth = (Number(size.value) / 100) * canvas.width;
    context.beginPath();
    context.moveTo(...(last ?? to));
    context.lineTo(to[0] + 0.01, to[1]);
    context.stroke();
    last = to;
    isPainted = true;
    canvas.dataset.painted = "true";
    draw();
  }

  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    last = null;
    paint(point(event));
  });
  canvas.addEventListener("pointermove", (event) => event.buttons && paint(point(event)));
  canvas.addEventListener("pointerup", () => (last = null));

  // The mask has two values only: the soft edge of a stroke counts as painted.
  function threshold() {
    const context = mask.getContext("2d");
    const content = context.getImageData(0, 0, mask.width, mask.height);
    for (let i = 0; i < content.data.length; i += 4) content.data.fill(content.data[i] > 127 ? 255 : 0, i, i + 3);
    context.putImageData(content, 0, 0);
  }

  return {
    element: h("div", { class: "painter" }, canvas, h("div", { class: "controls" }, h("label", { class: "inline" }, "Brush", size), undo), h("span", { class: "help" }, "Paint over what is to be generated again.")),
    mask: async () => {
      if (!isPainted) return null;
      threshold();
      return new Promise((resolve) => mask.toBlob(resolve, "image/png"));
    },
  };
}
