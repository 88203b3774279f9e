// Audio with waveform, spectrogram and play head. An original and its reconstruction, which are one
// file with a pause between them, become two tracks that are switched in place.

import { h } from "./dom.js";

const PAUSE_SECONDS = 0.4;
const FFT = 512;
let context = null;
let playing = null;

// The samples of a WAV file with 16 bits, mixed to one channel.
export function parseWav(buffer) {
  const view = new DataView(buffer);
  const text = (offset) => String.fromCharCode(...new Uint8Array(buffer, offset, 4));
  if (view.byteLength < 44 || text(0) !== "RIFF") throw new Error("This is not a WAV file.");
  let [offset, channels, rate, bits] = [12, 1, 16000, 16];
  while (offset + 8 <= view.byteLength) {
    const size = view.getUint32(offset + 4, true);
    if (text(offset) === "fmt ") {
      [channels, rate, bits] = [view.getUint16(offset + 10, true), view.getUint32(offset + 12, true), view.getUint16(offset + 22, true)];
    } else if (text(offset) === "data") {
      if (bits !== 16) throw new Error(`A WAV file with ${bits} bits cannot be shown.`);
      const count = Math.floor(Math.min(size, view.byteLength - offset - 8) / 2 / channels);
      const samples = new Float32Array(count);
      for (let i = 0; i < count; i++) {
        let sum = 0;
        for (let c = 0; c < channels; c++) sum += view.getInt16(offset + 8 + 2 * (i * channels + c), true);
        samples[i] = sum / channels / 32768;
      }
      return { samples, rate };
    }
    offset += 8 + size + (size % 2);
  }
  throw new Error("This WAV file has no samples.");
}

export function encodeWav({ samples, rate }) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const put = (offset, text) => [...text].forEach((character, i) => view.setUint8(offset + i, character.charCodeAt(0)));
  put(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  put(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  put(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((value, i) => view.setInt16(44 + 2 * i, Math.max(-1, Math.min(1, value)) * 32767, true));
  return new Blob([view], { type: "audio/wav" });
}

// The two halves around a silent pause, or the whole.
export function splitPair({ samples, rate }) {
  const pause = Math.round(PAUSE_SECONDS * rate);
  const half = Math.floor((samples.length - pause) / 2);
  const isPair = half > 0 && samples.subarray(half + 8, half + pause - 8).every((value) => value === 0);
  if (!isPair) return [{ name: "Audio", samples, rate }];
  return [
    { name: "Original", samples: samples.subarray(0, half), rate },
    { name: "Reconstruction", samples: samples.subarray(half + pause), rate },
  ];
}

function spectrum(frame) {
  const n = frame.length;
  const [re, im] = [Float32Array.from(frame), new Float32Array(n)];
  for (let i = 1, j = 0; i < n; i++) {
    let bit = n >> 1;
    for (; j & bit; bit >>= 1) j ^= bit;
    j ^= bit;
    if (i < j) [re[i], re[j]] = [re[j], re[i]];
  }
  for (let size = 2; size <= n; size *= 2) {
    const angle = (-2 * Math.PI) / size;
    for (let start = 0; start < n; start += size) {
      for (let k = 0; k < size / 2; k++) {
        const [c, s] = [Math.cos(angle * k), Math.sin(angle * k)];
        const [a, b] = [start + k, start + k + size / 2];
        const [x, y] = [re[b] * c - im[b] * s, re[b] * s + im[b] * c];
        [re[b], im[b], re[a], im[a]] = [re[a] - x, im[a] - y, re[a] + x, im[a] + y];
      }
    }
  }
  return Float32Array.from({ length: n / 2 }, (_, i) => Math.hypot(re[i], im[i]));
}

function drawTrack(canvas, { samples }, peak) {
  const { width, height } = canvas;
  const context = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const waveHeight = Math.round(height * 0.4);
  context.clearRect(0, 0, width, height);
  context.fillStyle = style.getPropertyValue("--c1").trim();
  for (let x = 0; x < width; x++) {
    const [start, end] = [x, x + 1].map((edge) => Math.floor((edge * samples.length) / width));
    let [low, high] = [0, 0];
    for (let i = start; i < Math.max(end, start + 1); i++) {
      low = Math.min(low, samples[i] ?? 0);
      high = Math.max(high, samples[i] ?? 0);
    }
    const top = (waveHeight / 2) * (1 - high / peak);
    context.fillRect(x, top, 1, Math.max(1, ((waveHeight / 2) * (high - low)) / peak));
  }
  const rows = height - waveHeight - 4;
  const image = context.createImageData(width, rows);
  const shown = FFT / 2;
  const hann = Float32Array.from({ length: FFT }, (_, i) => 0.5 - 0.5 * Math.cos((2 * Math.PI * i) / FFT));
  for (let x = 0; x < width; x++) {
    const centre = Math.floor(((x + 0.5) * samples.length) / width) - FFT / 2;
    const bins = spectrum(hann.map((weight, i) => weight * (samples[centre + i] ?? 0)));
    for (let y = 0; y < rows; y++) {
      // Bins are spaced as on a mel scale, low frequencies at the bottom.
      const position = (Math.pow(shown / 8 + 1, 1 - y / rows) - 1) * 8;
      const level = Math.max(0, Math.min(1, (20 * Math.log10((bins[Math.min(shown - 1, Math.floor(position))] ?? 0) + 1e-6) + 50) / 90));
      image.data.set([30 + 225 * level * level, 40 + 190 * level, 90 + 60 * Math.sin(Math.PI * level), 255], 4 * (y * width + x));
    }
  }
  context.putImageData(image, 0, waveHeight + 4);
}

export class AudioPlayer {
  constructor(url, title = "") {
    this.tracks = [];
    this.track = 0;
    this.offset = 0;
    this.node = null;
    this.canvas = h("canvas", { class: "wave", width: 560, height: 150, role: "img", "aria-label": `Waveform and spectrogram ${title}` });
    this.head = h("div", { class: "head" });
    this.play = h("button", { type: "button", class: "play", disabled: true, "aria-label": "Play" }, "▶");
    this.clock = h("span", { class: "muted clock" });
    this.choice = h("span", { class: "choice" });
    this.surface = h("div", { class: "surface" }, this.canvas, this.head);
    this.element = h("div", { class: "audio", dataset: { playing: "false" } }, this.surface, h("div", { class: "transport" }, this.play, this.clock, this.choice));
    this.play.addEventListener("click", () => (this.node ? this.stop() : this.start()));
    this.surface.addEventListener("click", (event) => {
      const box = this.surface.getBoundingClientRect();
      this.seek(((event.clientX - box.left) / box.width) * this.seconds);
    });
    this.load(url);
  }

  async load(url) {
    try {
      const response = await fetch(url);
      if (!response.ok) throw new Error("The file cannot be loaded.");
      this.tracks = splitPair(parseWav(await response.arrayBuffer()));
      this.play.disabled = false;
      // Both tracks are drawn at one scale, so that a reconstruction that is too quiet looks so.
      const loudest = (track) => track.samples.reduce((peak, value) => Math.max(peak, Math.abs(value)), 0);
      this.peak = Math.max(0.05, ...this.tracks.map(loudest));
      if (this.tracks.length > 1) {
        this.choice.append(
          ...this.tracks.map((track, i) => h("button", { type: "button", class: "quiet", onclick: () => this.choose(i) }, track.name)),
        );
      }
      this.choose(this.tracks.length - 1);
    } catch (error) {
      this.element.replaceChildren(h("div", { class: "empty small" }, error.message));
    }
  }

  get seconds() {
    const { samples, rate } = this.tracks[this.track];
    return samples.length / rate;
  }

  choose(i) {
    const time = this.time();
    const wasPlaying = this.node !== null;
    this.stop();
    this.track = i;
    [...this.choice.children].forEach((button, j) => button.setAttribute("aria-pressed", String(i === j)));
    drawTrack(this.canvas, this.tracks[i], this.peak);
    this.offset = Math.min(time, this.seconds);
    if (wasPlaying) this.start();
    else this.show();
  }

  time() {
    return this.node ? this.offset + (context.currentTime - this.started) : this.offset;
  }

  async start() {
    playing?.stop();
    playing = this;
    context ??= new AudioContext();
    await context.resume();
    const { samples, rate } = this.tracks[this.track];
    const buffer = context.createBuffer(1, samples.length, rate);
    buffer.copyToChannel(samples, 0);
    if (this.offset >= this.seconds - 0.01) this.offset = 0;
    this.node = context.createBufferSource();
    this.node.buffer = buffer;
    this.node.connect(context.destination);
    this.started = context.currentTime;
    this.node.start(0, this.offset);
    this.node.onended = () => {
      if (this.time() >= this.seconds - 0.05) {
        this.stop();
        this.offset = 0;
        this.element.dataset.played = "true";
        this.show();
      }
    };
    this.element.dataset.playing = "true";
    this.play.textContent = "❚❚";
    this.play.setAttribute("aria-label", "Pause");
    this.follow();
  }

  stop() {
    if (!this.node) return;
    this.offset = Math.min(this.time(), this.seconds);
    this.node.onended = null;
    this.node.stop();
    this.node = null;
    this.element.dataset.playing = "false";
    this.play.textContent = "▶";
    this.play.setAttribute("aria-label", "Play");
    this.show();
  }

  seek(time) {
    const wasPlaying = this.node !== null;
    this.stop();
    this.offset = time;
    this.show();
    if (wasPlaying) this.start();
  }

  follow() {
    if (!this.node) return;
    if (!this.element.isConnected) {
      this.stop();
      return;
    }
    this.show();
    requestAnimationFrame(() => this.follow());
  }

  show() {
    const time = Math.min(this.time(), this.seconds);
    this.head.style.left = `${(100 * time) / this.seconds}%`;
    this.clock.textContent = `${time.toFixed(1)} / ${this.seconds.toFixed(1)} s`;
    this.element.dataset.time = time.toFixed(3);
  }
}
