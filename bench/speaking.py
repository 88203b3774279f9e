"""Text to speech on held-out sentences: what the recogniser reads, the voice, and the time.

    python bench/speaking.py RUN --data DIR [--voices NAME ...] [--sentences 12]

RUN is of audio-text2semantic, and DIR has one folder for each voice with recordings and transcripts
that were not trained on, such as `OUT/test` of examples/voices.py. For each voice, each sentence is
spoken with another recording of that voice as the prompt. Reported are the character error of the
run's own recogniser on the recordings, on their reconstruction by the codec and on the speech that
is generated; the error of the median pitch against that of the prompt; how often the nearest voice
by speaker embedding is that of the prompt, among all voices; DNSMOS; and the CPU time per second of
speech. `speech_metrics.py` lists the packages to install.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speech_metrics import DNSMOS, RATE_HZ, SpeakerEncoder, median_pitch_hz

from tessera.api.speaker import Speaker
from tessera.metrics.text import character_error
from tessera.modalities.audio.media import Audio
from tessera.text.characters import normalize_text


@dataclass(frozen=True)
class Example:
    voice: str
    path: str
    text: str


def read_examples(speaker: Speaker, folder: str, voices: list[str]) -> list[Example]:
    data: Any = replace(speaker.trained.run.data, path=folder)
    dataset = data.full(captions=True)
    found = [
        Example(str(Path(dataset.name(i)).parent), dataset.location(i), dataset.caption(i))
        for i in range(len(dataset))
    ]
    return [one for one in found if not voices or one.voice in voices]


def evaluate(
    speaker: Speaker, examples: list[Example], num_sentences: int, out: Path | None
) -> Any:
    by_voice: dict[str, list[Example]] = {}
    for one in examples:
        by_voice.setdefault(one.voice, []).append(one)
    encode_speaker, rate = SpeakerEncoder(), DNSMOS()
    texts: dict[str, list[str]] = {"expected": [], "real": [], "codec": [], "speech": []}
    embeddings: list[tuple[str, torch.Tensor]] = []
    pitch_errors, scores, cpu_seconds, spoken_seconds = [], [], 0.0, 0.0
    references = {
        voice: torch.stack([encode_speaker(load(one.path)) for one in some[:8]]).mean(0)
        for voice, some in by_voice.items()
    }
    for voice, some in by_voice.items():
        for number, example in enumerate(some[:num_sentences]):
            prompt = some[(number + 1) % len(some)]
            start = time.process_time()
            audio = speaker.speak(example.text, voice=prompt.path, seed=number).media[0]
            cpu_seconds += time.process_time() - start
            assert isinstance(audio, Audio)
            spoken_seconds += audio.seconds
            if out is not None:
                audio.save(out / voice / f"{number:02d}.wav")
            real = Audio.load(example.path)
            codes = speaker.codec.encode(real)
            texts["expected"].append(normalize_text(example.text))
            texts["real"].append(speaker.transcribe(real))
            texts["codec"].append(speaker.transcribe(speaker.codec.to_media(codes)[0]))  # type: ignore[arg-type]
            texts["speech"].append(speaker.transcribe(audio))
            samples = audio.resample(RATE_HZ).samples[0]
            embeddings.append((voice, encode_speaker(samples)))
            scores.append(rate(samples))
            pitch = median_pitch_hz(load(prompt.path), RATE_HZ)
            pitch_errors.append(abs(median_pitch_hz(samples, RATE_HZ) / pitch - 1))
    names = list(references)
    table = torch.stack([references[name] for name in names])
    nearest = [names[int((table @ embedding).argmax())] == voice for voice, embedding in embeddings]
    own = [float(references[voice] @ embedding) for voice, embedding in embeddings]
    for line in range(min(4, len(texts["expected"]))):
        print(*(f"{name:9}{texts[name][line]}" for name in texts), sep="\n", end="\n\n")
    return {
        "sentences": len(own),
        "voices": len(names),
        **{
            f"character_error_{name}": character_error(texts[name], texts["expected"])
            for name in ("real", "codec", "speech")
        },
        "median_pitch_error": float(np.median(pitch_errors)),
        "nearest_voice": float(np.mean(nearest)),
        "nearest_voice_chance": 1 / len(names),
        "speaker_similarity": float(np.mean(own)),
        "dnsmos": float(np.mean(scores)),
        "cpu_seconds_per_second": cpu_seconds / spoken_seconds,
    }


def load(path: str) -> np.ndarray:
    return Audio.load(path).to_mono().resample(RATE_HZ).samples[0]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="a run of audio-text2semantic")
    parser.add_argument("--data", required=True, help="a folder with a folder for each voice")
    parser.add_argument("--voices", nargs="*", default=[], help="only these voices")
    parser.add_argument("--sentences", type=int, default=12, help="sentences for each voice")
    parser.add_argument("--out", type=Path, help="write the speech to this folder")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    speaker = Speaker.load(args.run)
    examples = read_examples(speaker, args.data, args.voices)
    results = evaluate(speaker, examples, args.sentences, args.out)
    for name, value in results.items():
        print(f"{name:<26}{value:8.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
