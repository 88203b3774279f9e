"""Make a folder of synthetic voices that speak known sentences, for the speech recipes.

    python examples/voices.py OUT [--sentences 10] [--test-sentences 50] [--dev-sentences 0]

OUT/train has one folder for each of 312 voices, with `--sentences` FLAC files at 16 kHz and a
metadata.jsonl with their transcripts. OUT/test has `--test-sentences` sentences that are not in
OUT/train, spoken by 8 voices: 4 of OUT/train, and 4 that are in OUT/test only. All of them speak
the same sentences, so that it can be measured what tokens contain of the content and of the
speaker. OUT/dev, for choices, has `--dev-sentences` further sentences by 8 voices of OUT/train. The
voices are those of the programs espeak-ng, with its variants at several pitches, and flite; for
training each is also spoken with lower and with higher frequencies, as by a longer and a shorter
vocal tract. `apt-get install espeak-ng flite`
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tessera.modalities.audio.media import Audio

RATE_HZ = 16_000
SILENCE = 0.01
"""Samples below this amplitude before and after a sentence are cut."""
MARGIN_SECONDS = 0.08
"""What is left of the silence."""

DETERMINERS = ("the", "a", "my", "your", "this", "every", "one", "no", "his", "their")
ADJECTIVES = (
    "small", "green", "quiet", "young", "heavy", "bright", "old", "thin", "strange", "warm",
    "yellow", "broken", "empty", "gentle", "huge", "round", "sharp", "wooden", "fresh", "cheap",
)  # fmt: skip
NOUNS = (
    "dog", "river", "teacher", "window", "garden", "ship", "child", "market", "bridge", "apple",
    "doctor", "mountain", "letter", "horse", "kitchen", "voice", "judge", "tower", "chair", "fish",
    "village", "singer", "box", "thunder", "page", "boat", "king", "clock", "wolf", "jacket",
)  # fmt: skip
VERBS = (
    "finds", "carries", "watches", "follows", "changes", "moves", "paints", "loves", "breaks",
    "opens", "sells", "forgets", "hears", "pushes", "shows", "brings", "throws", "wants", "catches",
    "helps",
)  # fmt: skip
PLACES = (
    "near", "behind", "above", "under", "beside", "without", "through", "after", "before", "with",
)  # fmt: skip
ADVERBS = ("today", "slowly", "again", "never", "at night", "in the morning", "too soon", "there")


@dataclass(frozen=True)
class Voice:
    name: str
    """The name of its folder."""
    program: str
    voice: str
    pitch: int = 50
    """From 0 to 99, for espeak-ng."""
    words_per_minute: int = 165
    scale: float = 1.0
    """Factor of all frequencies, those of the formants and the pitch, at the same tempo."""


def espeak(voice: str, pitch: int, words_per_minute: int = 165) -> Voice:
    """Return a voice of espeak-ng, of a language or with a variant ("en-us+f1").

    Variants of British English are those of "en": espeak-ng 1.51 ignores the variant of "en-gb+f1",
    without an error.
    """
    name = f"{voice.replace('+', '-').lower()}-{pitch}"
    return Voice(name, "espeak-ng", voice, pitch, words_per_minute)


def scaled(voice: Voice, scale: float) -> Voice:
    """Return the voice of another vocal tract: all frequencies times `scale`."""
    speed = round(voice.words_per_minute / scale)
    return replace(
        voice, name=f"{voice.name}-x{round(100 * scale)}", words_per_minute=speed, scale=scale
    )


def other_pitch(pitch: int) -> int:
    """Return a pitch half of the range away."""
    return pitch + 35 if pitch < 50 else pitch - 40


# Variants of espeak-ng that sound like people. Each is two voices, at this pitch and at another
# one, so that a timbre does not determine the pitch.
AMERICAN_VARIANTS = (
    ("Alex", 45), ("Andrea", 75), ("Annie", 90), ("adam", 35), ("aunty", 45), ("benjamin", 30),
    ("caleb", 50), ("david", 40), ("Denis", 25), ("edward", 55), ("Gene", 20), ("Henrique", 40),
    ("iven", 30), ("Jacky", 65), ("john", 35), ("Lee", 50), ("Marco", 45), ("michel", 30),
    ("Mike", 60), ("paul", 25),
)  # fmt: skip
BRITISH_VARIANTS = (
    ("antonio", 35), ("Diogo", 50), ("ed", 40), ("gustave", 25), ("Hugo", 55), ("marcelo", 45),
    ("Mario", 30), ("miguel", 60), ("pablo", 40), ("pedro", 20), ("quincy", 55), ("rob", 35),
    ("robert", 50), ("steph2", 85), ("travis", 30), ("victor", 45), ("zac", 65), ("anika", 70),
    ("sandro", 40), ("shelby", 80),
)  # fmt: skip

PROGRAM_VOICES = (
    espeak("en-us", 30),
    espeak("en-us", 60, 150),
    espeak("en-gb", 45),
    espeak("en-gb", 15, 155),
    espeak("en-gb-scotland", 50),
    espeak("en-us+f1", 50),
    espeak("en-us+f2", 40, 175),
    espeak("en-us+f3", 65),
    espeak("en+f4", 50),
    espeak("en+f5", 75),
    espeak("en-us+m1", 40),
    espeak("en-us+m2", 25),
    espeak("en-us+m3", 55, 150),
    espeak("en+m4", 35),
    espeak("en+m5", 60),
    espeak("en-us+m7", 45),
    espeak("en-us+Andy", 50),
    espeak("en-us+linda", 50),
    espeak("en+Michael", 40),
    espeak("en-us+steph", 55),
    Voice("slt", "flite", "slt"),
    Voice("rms", "flite", "rms"),
    Voice("awb", "flite", "awb"),
    Voice("kal16", "flite", "kal16"),
    *(espeak(f"en-us+{name}", pitch) for name, pitch in AMERICAN_VARIANTS),
    *(espeak(f"en+{name}", pitch) for name, pitch in BRITISH_VARIANTS),
    *(espeak(f"en-us+{name}", other_pitch(pitch)) for name, pitch in AMERICAN_VARIANTS),
    *(espeak(f"en+{name}", other_pitch(pitch)) for name, pitch in BRITISH_VARIANTS),
)
SCALES = (0.88, 1.13)
"""Each voice is trained on with these factors of its frequencies too, so that there are more
timbres than the programs have."""
TRAIN_VOICES = (
    *PROGRAM_VOICES,
    *(scaled(voice, scale) for scale in SCALES for voice in PROGRAM_VOICES),
)
TEST_VOICES = (
    espeak("en-us+m6", 20),
    espeak("en+Alicia", 55),
    espeak("en-us+belinda", 80),
    espeak("en+max", 40),
)
"""Voices of OUT/test only."""
DEV_VOICES = tuple(TRAIN_VOICES[i] for i in (1, 12, 7, 8, 14, 21, 18, 19))
"""Voices of OUT/train that speak the sentences of OUT/dev."""
SHARED_VOICES = (TRAIN_VOICES[0], TRAIN_VOICES[6], TRAIN_VOICES[13], TRAIN_VOICES[20])
"""Voices of OUT/train that also speak the sentences of OUT/test."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write to")
    parser.add_argument("--sentences", type=int, default=10, help="for each voice of OUT/train")
    parser.add_argument("--test-sentences", type=int, default=50, help="for each voice of OUT/test")
    parser.add_argument("--dev-sentences", type=int, default=0, help="for each voice of OUT/dev")
    args = parser.parse_args()
    check_tools()
    check_variants()
    rng = random.Random(0)
    train_count = len(TRAIN_VOICES) * args.sentences
    dev_start = train_count + args.test_sentences
    sentences = make_sentences(rng, dev_start + args.dev_sentences)
    for_test, for_dev = sentences[train_count:dev_start], sentences[dev_start:]
    by_voice = {
        voice: sentences[i * args.sentences : (i + 1) * args.sentences]
        for i, voice in enumerate(TRAIN_VOICES)
    }
    count = write_voices(by_voice, args.out / "train")
    by_test_voice = dict.fromkeys((*SHARED_VOICES, *TEST_VOICES), for_test)
    count += write_voices(by_test_voice, args.out / "test")
    if for_dev:
        count += write_voices(dict.fromkeys(DEV_VOICES, for_dev), args.out / "dev")
    print(
        f"{count:,} recordings with transcripts are in {args.out}: try `tessera train ... --data "
        f"{args.out / 'train'}`"
    )


def check_tools() -> None:
    """Exit with a message if a program is missing."""
    for tool in ("espeak-ng", "flite"):
        if shutil.which(tool) is None:
            sys.exit(
                f"The voices are those of espeak-ng and flite, but {tool} is not installed: "
                "apt-get install espeak-ng flite"
            )


def check_variants() -> None:
    """Exit with a message if espeak-ng ignores the variant of a voice."""
    for voice in (*PROGRAM_VOICES, *TEST_VOICES):
        base, plus, _ = voice.voice.partition("+")
        if plus and sounds_like(voice, replace(voice, voice=base)):
            sys.exit(
                f"espeak-ng speaks {voice.voice} as it speaks {base}, but all voices must differ: "
                "choose another variant from `espeak-ng --voices=variant`."
            )


def sounds_like(voice: Voice, other: Voice) -> bool:
    first, second = (synthesize(one, "one two").samples for one in (voice, other))
    return np.array_equal(first, second)


def make_sentences(rng: random.Random, count: int) -> list[str]:
    """Return different sentences of four to eight words."""
    sentences: dict[str, None] = {}
    while len(sentences) < count:
        sentences[make_sentence(rng)] = None
    return list(sentences)


def make_sentence(rng: random.Random) -> str:
    words = [rng.choice(DETERMINERS), rng.choice(NOUNS), rng.choice(VERBS)]
    if rng.random() < 0.5:
        words.insert(1, rng.choice(ADJECTIVES))
    words += [rng.choice(DETERMINERS), rng.choice(NOUNS)]
    ending = rng.random()
    if ending < 0.35:
        words.append(rng.choice(ADVERBS))
    elif ending < 0.6:
        words += [rng.choice(PLACES), rng.choice(DETERMINERS), rng.choice(NOUNS)]
    return " ".join(words)


def write_voices(by_voice: dict[Voice, list[str]], out: Path) -> int:
    """Write the sentences of each voice; return the number of recordings."""
    lines = []
    for voice, sentences in by_voice.items():
        (out / voice.name).mkdir(parents=True, exist_ok=True)
        for number, sentence in enumerate(sentences):
            name = f"{voice.name}/{number:04d}.flac"
            synthesize(voice, sentence).write(out / name)
            lines.append(json.dumps({"file_name": name, "text": sentence}))
    (out / "metadata.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return len(lines)


def synthesize(voice: Voice, sentence: str) -> Audio:
    """Speak a sentence, without silence at its ends, at RATE_HZ and the same loudness."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "speech.wav"
        if voice.program == "flite":
            command = ["flite", "-voice", voice.voice, "-t", sentence, "-o", str(file)]
            command += ["--setf", f"duration_stretch={voice.scale}"]
        else:
            command = ["espeak-ng", "-v", voice.voice, "-p", str(voice.pitch)]
            command += ["-s", str(voice.words_per_minute), "-w", str(file), sentence]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0 or not file.exists():
            sys.exit(f"{' '.join(command)} failed: {done.stderr.strip()}")
        audio = Audio.load(file).to_mono()
        scaled_audio = Audio(audio.samples, round(voice.scale * audio.rate_hz))
        return trim(scaled_audio.resample(RATE_HZ))


def trim(audio: Audio) -> Audio:
    """Cut the silence at both ends, and scale the samples to a peak of 0.7."""
    samples = audio.samples[0] * (0.7 / max(float(np.abs(audio.samples).max()), 1e-9))
    [loud] = np.nonzero(np.abs(samples) > SILENCE)
    margin = round(MARGIN_SECONDS * RATE_HZ)
    start, end = max(0, int(loud[0]) - margin), int(loud[-1]) + margin
    return Audio(samples[None, start:end].astype(np.float32), RATE_HZ)


if __name__ == "__main__":
    main()
