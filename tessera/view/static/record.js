// Record a voice in the browser as a WAV file.

import { h } from "./dom.js";
import { encodeWav } from "./audio.js";

const MAX_SECONDS = 30;

export function recorder(onFile) {
  if (!navigator.mediaDevices?.getUserMedia || typeof MediaRecorder === "undefined") return null;
  const button = h("button", { type: "button", class: "quiet" }, "Record");
  let current = null;
  button.addEventListener("click", async () => {
    if (current) {
      current.stop();
      return;
    }
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      const parts = [];
      current = new MediaRecorder(stream);
      current.addEventListener("dataavailable", (event) => parts.push(event.data));
      current.addEventListener("stop", async () => {
        current = null;
        button.textContent = "Record";
        stream.getTracks().forEach((track) => track.stop());
        onFile(await toWav(new Blob(parts)));
      });
      current.start();
      button.textContent = "Stop";
      setTimeout(() => current?.stop(), 1000 * MAX_SECONDS);
    } catch {
      button.textContent = "No microphone";
    }
  });
  return button;
}

async function toWav(blob) {
  const decoder = new OfflineAudioContext(1, 1, 24000);
  const buffer = await decoder.decodeAudioData(await blob.arrayBuffer());
  return encodeWav({ samples: buffer.getChannelData(0), rate: buffer.sampleRate });
}
