"""Text to speech on held-out sentences: what the recogniser reads, the voice, and the time.

    python bench/speaking.py RUN --data DIR [--voices NAME ...] [--sentences 12] [--soundstorm RUN]
        [--held-out]

RUN is of audio-text2semantic, with SoundStorm in its directory or in another one, and DIR has one
folder for each voice with recordings and transcripts that were not trained on, such as `OUT/test`
of examples/voices.py; with `--held-out`, of those in DIR that the run held out. Each voice speaks
other sentences, with another recording of that voice as the prompt. Reported are, for the
recordings ("real"), their reconstructions by the codec, and the speech that is generated: the
character error of the run's own recogniser; the error of the median pitch against that of the
prompt; how often the nearest voice by speaker embedding is the right one, among all voices, each of
which is the mean of 8 recordings that are neither spoken nor prompts; and DNSMOS. The last line is
the CPU time per second of speech. `speech_metrics.py` lists the packages to install.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speech_metrics import DNSMOS, RATE_HZ, SpeakerEncoder, median_pitch_hz

from tessera.api.speaker import Speaker
from tessera.metrics.text import character_error
from tessera.modalities.audio.media import Audio
from tessera.text.characters import normalize_text

REFERENCES = 8
"""Recordings of a voice whose mean embedding is its reference."""
MIN_SECONDS = 1.0
"""Shorter recordings, which have no reliable speaker embedding, are left out."""


@dataclass(frozen=True)
class Example:
    voice: str
    path: str
    text: str


def read_examples(
    speaker: Speaker, folder: str, voices: list[str], held_out: bool = False
) -> list[Example]:
    data: Any = replace(speaker.trained.run.data, path=folder)
    dataset = data.build(captions=True).validation if held_out else data.full(captions=True)
    found = [
        Example(str(Path(dataset.name(i)).parent), dataset.location(i), dataset.caption(i))
        for i in range(len(dataset))
    ]
    return [
        one
        for one in found
        if (not voices or one.voice in voices) and read_seconds(one.path) >= MIN_SECONDS
    ]


def read_seconds(path: str) -> float:
    return Audio.load(path).seconds


@dataclass(frozen=True)
class VoiceSet:
    """The recordings of a voice: sentences to speak, a prompt for each, and a reference."""

    voice: str
    sentences: list[Example]
    prompts: list[Example]
    reference: list[Example]

    @classmethod
    def choose(cls, voice: str, recordings: list[Example], count: int, first: int) -> VoiceSet:
        """Choose `count` sentences from number `first` on, so that voices speak different ones.

        The prompt of a sentence is the next recording; those after the last prompt are the
        reference.
        """
        check_enough(voice, len(recordings), count)
        ordered = recordings[first:] + recordings[:first]
        reference = ordered[count + 1 :][:REFERENCES]
        return cls(voice, ordered[:count], ordered[1 : count + 1], reference)


def choose_sets(examples: list[Example], num_sentences: int) -> list[VoiceSet]:
    by_voice: dict[str, list[Example]] = {}
    for one in examples:
        by_voice.setdefault(one.voice, []).append(one)
    return [
        VoiceSet.choose(voice, recordings, num_sentences, number * num_sentences)
        for number, (voice, recordings) in enumerate(by_voice.items())
    ]


@dataclass
class Kind:
    """What is measured of the recordings, of their reconstructions, or of generated speech."""

    texts: list[str] = field(default_factory=list)
    embeddings: list[torch.Tensor] = field(default_factory=list)
    pitch_errors: list[float] = field(default_factory=list)
    dnsmos: list[float] = field(default_factory=list)


class Evaluation:
    """Speaks sentences, and measures speech, recordings and reconstructions in the same way."""

    def __init__(self, speaker: Speaker, settings: dict[str, Any], out: Path | None):
        self.speaker, self.settings, self.out = speaker, settings, out
        self.encode_speaker, self.rate = SpeakerEncoder(), DNSMOS()
        self.kinds = {"real": Kind(), "codec": Kind(), "speech": Kind()}
        self.expected: list[str] = []
        self.voices: list[str] = []
        self.references: dict[str, torch.Tensor] = {}
        self.cpu_seconds, self.spoken_seconds = 0.0, 0.0

    def run(self, sets: list[VoiceSet]) -> dict[str, float]:
        for one in sets:
            embeddings = [self.encode_speaker(load(example.path)) for example in one.reference]
            self.references[one.voice] = torch.stack(embeddings).mean(0)
            pairs = zip(one.sentences, one.prompts, strict=True)
            for number, (example, prompt) in enumerate(pairs):
                self.measure_sentence(number, example, prompt)
        return self.results()

    def measure_sentence(self, number: int, example: Example, prompt: Example) -> None:
        speech = self.speak(number, example, prompt)
        real, codec = Audio.load(example.path), self.speaker.codec
        [reconstruction] = codec.to_media(codec.encode(real))
        self.expected.append(normalize_text(example.text))
        self.voices.append(example.voice)
        pitch = median_pitch_hz(load(prompt.path), RATE_HZ)
        for kind, audio in zip(self.kinds.values(), (real, reconstruction, speech), strict=True):
            assert isinstance(audio, Audio)
            samples = audio.to_mono().resample(RATE_HZ).samples[0]
            kind.texts.append(self.speaker.transcribe(audio))
            kind.embeddings.append(self.encode_speaker(samples))
            kind.pitch_errors.append(abs(median_pitch_hz(samples, RATE_HZ) / pitch - 1))
            kind.dnsmos.append(self.rate(samples))

    def speak(self, number: int, example: Example, prompt: Example) -> Audio:
        """Speak a sentence in the voice of a prompt, and note the time."""
        start = time.process_time()
        generated = self.speaker.speak(
            example.text, voice=prompt.path, seed=number, **self.settings
        )
        self.cpu_seconds += time.process_time() - start
        [speech] = generated.media
        assert isinstance(speech, Audio)
        self.spoken_seconds += speech.seconds
        if self.out is not None:
            speech.save(self.out / example.voice / f"{number:02d}.wav")
        return speech

    def results(self) -> dict[str, float]:
        results: dict[str, float] = {
            "sentences": len(self.expected),
            "voices": len(self.references),
        }
        for name, kind in self.kinds.items():
            measured = summarize(kind, self.expected)
            measured |= compare_voices(kind.embeddings, self.voices, self.references)
            results |= {f"{key}_{name}": value for key, value in measured.items()}
        return results | {
            "nearest_voice_chance": 1 / len(self.references),
            "cpu_seconds_per_second": self.cpu_seconds / self.spoken_seconds,
        }

    def print_texts(self, count: int) -> None:
        """Print what the recogniser reads in some sentences."""
        rows = {"expected": self.expected} | {name: kind.texts for name, kind in self.kinds.items()}
        for line in range(min(count, len(self.expected))):
            print(*(f"{name:9}{row[line]}" for name, row in rows.items()), sep="\n", end="\n\n")


def check_enough(voice: str, recordings: int, num_sentences: int) -> None:
    """Exit with a message if a voice has no recordings left for its reference."""
    if recordings < num_sentences + 2:
        raise SystemExit(
            f"{voice} has {recordings} recordings, but {num_sentences} sentences, a prompt and a "
            f"reference need {num_sentences + 2}: use fewer --sentences."
        )


def summarize(kind: Kind, expected: list[str]) -> dict[str, float]:
    # NaN is the pitch of audio without any voiced part: it counts as a large error.
    errors = np.nan_to_num(kind.pitch_errors, nan=1.0)
    return {
        "character_error": character_error(kind.texts, expected),
        "median_pitch_error": float(np.median(errors)),
        "dnsmos": float(np.mean(kind.dnsmos)),
    }


def compare_voices(
    embeddings: list[torch.Tensor], voices: list[str], references: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Return how often the nearest reference is that of the own voice, and the similarity to it."""
    names = list(references)
    similarity = torch.stack(embeddings) @ torch.stack([references[name] for name in names]).T
    own = torch.tensor([names.index(voice) for voice in voices])
    return {
        "nearest_voice": float((similarity.argmax(1) == own).double().mean()),
        "speaker_similarity": float(similarity.gather(1, own[:, None]).mean()),
    }


def load(path: str) -> np.ndarray:
    return Audio.load(path).to_mono().resample(RATE_HZ).samples[0]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="a run of audio-text2semantic")
    parser.add_argument("--data", required=True, help="a folder with a folder for each voice")
    parser.add_argument("--soundstorm", metavar="RUN", help="a run of audio-soundstorm")
    parser.add_argument(
        "--held-out", action="store_true", help="only recordings that the run held out"
    )
    parser.add_argument("--voices", nargs="*", default=[], help="only these voices")
    parser.add_argument("--sentences", type=int, default=12, help="sentences for each voice")
    parser.add_argument("--guidance", type=float, help="guidance on the prompt")
    parser.add_argument("--candidates", type=int, help="candidates of each sentence")
    parser.add_argument("--out", type=Path, help="write the speech to this folder")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    speaker = Speaker.load(args.run, args.soundstorm)
    examples = read_examples(speaker, args.data, args.voices, args.held_out)
    sets = choose_sets(examples, args.sentences)
    settings = {name: getattr(args, name) for name in ("guidance", "candidates")}
    settings = {name: value for name, value in settings.items() if value is not None}
    evaluation = Evaluation(speaker, settings, args.out)
    results = evaluation.run(sets)
    evaluation.print_texts(4)
    for name, value in results.items():
        print(f"{name:<28}{value:8.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
