// Record a voice in the browser as a WAV file.

import { h } from "./dom.js";
import { encodeWav } from "./audio.js";

const MAX_SECONDS = 30;

export function recorder(onFile) {
  if (!navigator.mediaDevices?.getUserMedia || typeof MediaRecorder === "undefined") return null;
  const button = h("button", { type: "button", class: "quiet record" }, "Record");
  let current = null;
  button.addEventListener("click", async () => {
    if (current) {
      current.stop();
      return;
    }
    button.disabled = true;
    try {
      current = await startRecording(button);
      button.disabled = false;
      onFile(await current.wav);
      button.textContent = "Record";
    } catch (error) {
      button.textContent = error.name === "EncodingError" ? "Nothing was recorded" : "No microphone";
    }
    button.disabled = false;
    current = null;
  });
  return button;
}

// Start a recording, and show its length until it is stopped.
async function startRecording(button) {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const media = new MediaRecorder(stream);
  const parts = [];
  media.addEventListener("dataavailable", (event) => parts.push(event.data));
  const stopped = new Promise((resolve) => media.addEventListener("stop", resolve, { once: true }));
  media.start();
  const started = performance.now();
  const timer = setInterval(showLength, 100);
  function showLength() {
    const seconds = (performance.now() - started) / 1000;
    button.textContent = `Stop (${seconds.toFixed(1)} s)`;
    button.dataset.seconds = seconds.toFixed(1);
    if (seconds >= MAX_SECONDS || !button.isConnected) stop();
  }
  function stop() {
    clearInterval(timer);
    if (media.state !== "inactive") media.stop();
    stream.getTracks().forEach((track) => track.stop());
  }
  showLength();
  return { stop, wav: stopped.then(() => toWav(new Blob(parts))) };
}

async function toWav(blob) {
  const decoder = new OfflineAudioContext(1, 1, 24000);
  const buffer = await decoder.decodeAudioData(await blob.arrayBuffer());
  return encodeWav({ samples: buffer.getChannelData(0), rate: buffer.sampleRate });
}
