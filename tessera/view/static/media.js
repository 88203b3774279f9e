// One sample as an element: an image without blur, a video in step with others, audio, or a mesh.

import { h, onRemoved } from "./dom.js";
import { AudioPlayer } from "./audio.js";
import { MeshGroup } from "./mesh.js";

const suffix = (name) => name.slice(name.lastIndexOf("."));

// Samples that are shown together: meshes turn together and videos play in step.
export class Gallery {
  constructor(source, run, { zoom = 1 } = {}) {
    Object.assign(this, { source, run, zoom });
    this.meshes = new MeshGroup();
    this.videos = [];
    this.images = [];
  }

  cell(folder, sample, { downloads = false, action = null } = {}) {
    const url = this.source.fileUrl(this.run, folder, sample.shown);
    const links = downloads
      ? sample.files.map((name) => h("a", { href: this.source.fileUrl(this.run, folder, name), download: `${folder}-${name}` }, suffix(name).slice(1)))
      : [];
    return h(
      "figure",
      { class: `sample ${suffix(sample.shown).slice(1)}` },
      h("figcaption", { title: sample.label }, sample.label),
      url === null ? h("div", { class: "empty small" }, "Not in this report") : this.content(url, sample),
      links.length || action ? h("div", { class: "links" }, links, action) : null,
    );
  }

  content(url, sample) {
    const kind = suffix(sample.shown);
    if (kind === ".obj") {
      return this.meshes.cell(fetch(url).then((response) => (response.ok ? response.text() : Promise.reject(new Error("The file cannot be loaded.")))));
    }
    if (kind === ".wav") return new AudioPlayer(url, sample.label).element;
    if (kind === ".mp4") return this.video(url);
    const image = h("img", { src: url, alt: sample.label, class: "pixels" });
    image.addEventListener("load", () => this.scale(image));
    this.images.push(image);
    return h("a", { class: "image", href: url, target: "_blank", rel: "noopener" }, image);
  }

  scale(image) {
    // Small images are enlarged by whole factors, so that all pixels have the same size.
    const base = Math.max(1, Math.floor(280 / image.naturalWidth));
    image.style.width = `${image.naturalWidth * base * this.zoom}px`;
  }

  setZoom(zoom) {
    this.zoom = zoom;
    this.images.forEach((image) => this.scale(image));
    this.videos.forEach((video) => this.scaleVideo(video));
  }

  video(url) {
    const video = h("video", { src: url, loop: true, playsinline: true, preload: "auto", class: "pixels" });
    video.muted = true;
    video.addEventListener("loadedmetadata", () => this.scaleVideo(video));
    video.addEventListener("canplaythrough", () => this.playInStep(), { once: true });
    this.videos.push(video);
    return video;
  }

  scaleVideo(video) {
    const base = Math.max(1, Math.floor(280 / video.videoWidth));
    video.style.width = `${video.videoWidth * base * this.zoom}px`;
  }

  // Videos start together once all can play, and those that drift follow the first.
  playInStep() {
    const ready = this.videos.filter((video) => video.readyState >= 3);
    if (ready.length < this.videos.length || this.isPaused) return;
    ready.forEach((video) => {
      video.currentTime = 0;
      video.play().catch(() => {});
    });
    const [leader, ...others] = this.videos;
    this.timer ??= setInterval(() => {
      if (!leader.isConnected) {
        clearInterval(this.timer);
        return;
      }
      others.forEach((video) => {
        if (Math.abs(video.currentTime - leader.currentTime) > 0.15) video.currentTime = leader.currentTime;
      });
    }, 1000);
  }

  controls(modality) {
    const parts = [];
    if (modality === "mesh") parts.push(this.meshes.controls());
    if (modality === "image" || modality === "video") {
      const zoom = h("input", { type: "range", min: "0.5", max: "4", step: "0.5", value: String(this.zoom), "aria-label": "Zoom" });
      zoom.addEventListener("input", () => this.setZoom(Number(zoom.value)));
      parts.push(h("label", { class: "inline" }, "Zoom", zoom));
    }
    if (modality === "video") {
      const pause = h("button", { type: "button", class: "quiet" }, "Pause");
      pause.addEventListener("click", () => {
        this.isPaused = !this.isPaused;
        pause.textContent = this.isPaused ? "Play" : "Pause";
        if (this.isPaused) this.videos.forEach((video) => video.pause());
        else this.playInStep();
      });
      parts.push(pause);
    }
    const element = h("div", { class: "controls" }, parts);
    onRemoved(element, () => clearInterval(this.timer));
    return element;
  }
}
