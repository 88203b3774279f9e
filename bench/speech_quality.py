"""How good is speech that a codec has rebuilt, and whose voice is it? And that which was generated
after a prompt?

    python bench/speech_quality.py RUN [--data DIR] [--count 64] [--levels 1 2 4 8] [--json FILE]
    python bench/speech_quality.py --made DIR --after DIR [--json FILE]

The first takes the recordings that were held out from a codec's run, or those of DIR, whole, and
tells of reconstructions from so many levels: SI-SDR, mel distance, STOI and PESQ against the
original; DNSMOS, beside the original's; and how alike the voices are (the cosine of Resemblyzer's
vectors). The second takes recordings that were made, and those of the same name in the other
folder, the prompts: DNSMOS of both, and how alike the voices are. What chance would reach stands
beside it: the same recordings, each against the original of another. `speech_judges.py` says what
is to be installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speech_judges import RATE_HZ, Listener, Voices

from tessera.data.discovery import find
from tessera.losses.spectral import mel_distance_B, si_sdr_B
from tessera.metrics.speech import stoi_B
from tessera.modalities.audio.io.files import ENDINGS
from tessera.modalities.audio.media import Audio
from tessera.modalities.audio.speech_quality import INSTALL, can_be_measured, pesq
from tessera.run.load import Codec, load_run

SHORTEST_SECONDS = 1.0
"""Of what is shorter no voice can be told."""


# ---- recordings


def held_out(codec: Codec, data: str | None, count: int) -> list[Audio]:
    """So many recordings of those that were held out, spread over all, whole and at the codec's
    rate."""
    config = codec.run.data if data is None else replace(codec.run.data, path=data)
    source = config.build().validation
    if config.path is None:
        each: Iterable[Audio] = (toy(source, index) for index in spread(len(source), count))
    else:
        each = (
            whole(source.path(index), config.rate_hz) for index in spread(len(source), len(source))
        )
    long = [sound for sound in each if sound.seconds >= SHORTEST_SECONDS]
    if not long:
        raise SystemExit(
            f"No recording of at least {SHORTEST_SECONDS:g} s was held out: give --data with longer ones."
        )
    return [long[index] for index in spread(len(long), count)]


def spread(among: int, count: int) -> list[int]:
    return [index * among // min(among, count) for index in range(min(among, count))]


def whole(path: str | Path, rate_hz: int) -> Audio:
    return Audio.load(path).mono().resampled(rate_hz)


def toy(source: Any, index: int) -> Audio:
    example = source.item(index, np.random.default_rng(0))
    return Audio(example.samples[:, : example.length], example.rate_hz)


# ---- what is told


def means(rows: Sequence[dict[str, float | None]]) -> dict[str, float]:
    """Over the recordings of which something could be said."""
    said = {name: [row[name] for row in rows if row.get(name) is not None] for name in rows[0]}
    return {name: float(np.mean(values)) for name, values in said.items() if values}


def against(original: Audio, made: Audio) -> dict[str, float | None]:
    real, other = (torch.from_numpy(sound.samples)[None] for sound in (original, made))
    understood = float(stoi_B(other, real, rate_hz=original.rate_hz))
    return {
        "si_sdr": float(si_sdr_B(other, real)),
        "mel_distance": float(mel_distance_B(other, real, rate_hz=original.rate_hz)),
        "stoi": understood if np.isfinite(understood) else None,
        "pesq": pesq(original.samples[0], made.samples[0], original.rate_hz),
    }


@dataclass
class Heard:
    quality: float
    """The mean over recordings."""
    voices: torch.Tensor
    """One vector each."""


class Judges:
    def __init__(self) -> None:
        self.listener, self.voices = Listener(), Voices()

    def quality(self, sound: Audio) -> float:
        return self.listener(sound.resampled(RATE_HZ).samples[0])

    def voice(self, sound: Audio) -> torch.Tensor:
        return self.voices(sound.resampled(RATE_HZ).samples[0])

    def hear(self, sounds: Sequence[Audio]) -> Heard:
        return Heard(
            float(np.mean([self.quality(sound) for sound in sounds])),
            torch.stack([self.voice(sound) for sound in sounds]),
        )

    def compare(self, originals: Heard, sounds: Sequence[Audio]) -> dict[str, float]:
        made = self.hear(sounds)
        alike = made.voices @ originals.voices.T
        return {
            "dnsmos_original": originals.quality,
            "dnsmos": made.quality,
            "voice": float(alike.diagonal().mean()),
            "voice_by_chance": float(alike.roll(1, 0).diagonal().mean())
            if len(sounds) > 1
            else float("nan"),
        }


def rebuilt(codec: Codec, sound: Audio, levels: int) -> Audio:
    samples = torch.from_numpy(sound.samples)[None].to(next(codec.model.parameters()).device)
    with torch.no_grad():
        made = codec.model.decode(codec.model.encode(samples)[..., :levels])
    return Audio(made[0, :, : samples.shape[2]].float().cpu().numpy().clip(-1, 1), sound.rate_hz)


def of_codec(asked: argparse.Namespace, judges: Judges) -> dict[str, Any]:
    codec = Codec(load_run(asked.run))
    originals = held_out(codec, asked.data, asked.count)
    seconds = sum(sound.seconds for sound in originals)
    print(f"{len(originals)} recordings, {seconds:.0f} s, codec of step {codec.steps}")
    if not can_be_measured(originals[0].rate_hz):
        print(
            INSTALL
            if originals[0].rate_hz in (8_000, 16_000)
            else "PESQ is left out: it knows 8 and 16 kHz only."
        )
    heard, found = judges.hear(originals), {}
    for levels in sorted({min(level, codec.levels) for level in asked.levels or [codec.levels]}):
        made = [rebuilt(codec, sound, levels) for sound in originals]
        found[levels] = means([against(*pair) for pair in zip(originals, made)]) | judges.compare(
            heard, made
        )
        print(logs(f"{levels} of {codec.levels} levels", found[levels]), flush=True)
    return {"recordings": len(originals), "seconds": seconds, "levels": found}


def of_prompts(asked: argparse.Namespace, judges: Judges) -> dict[str, Any]:
    made, after = (by_name(folder) for folder in (asked.made, asked.after))
    names = sorted(made.keys() & after.keys())
    if not names:
        raise SystemExit(f"No recording in {asked.made} has the name of one in {asked.after}.")
    prompts, answers = ([whole(paths[name], RATE_HZ) for name in names] for paths in (after, made))
    found = judges.compare(judges.hear(prompts), answers)
    print(logs(f"{len(names)} recordings beside their prompts", found))
    return {"recordings": len(names)} | found


def by_name(folder: Path) -> dict[str, Path]:
    found = find(str(folder), ENDINGS, "recordings")
    return {Path(name).stem: Path(found.root, name) for name in found.names}


def logs(name: str, numbers: dict[str, float]) -> str:
    return "\n".join([name, *(f"  {what:<18}{value:8.3f}" for what, value in numbers.items())])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="a codec's run")
    parser.add_argument("--data", help="recordings; those held out of them by name, as in the run")
    parser.add_argument("--count", type=int, default=64, help="at most so many recordings")
    parser.add_argument(
        "--levels",
        type=int,
        nargs="+",
        help="rebuilt from the first so many levels; all, unless it is said",
    )
    parser.add_argument("--made", type=Path, metavar="DIR", help="recordings that were generated")
    parser.add_argument(
        "--after", type=Path, metavar="DIR", help="their prompts, of the same names"
    )
    parser.add_argument("--json", type=Path, help="write the numbers here as well")
    asked = parser.parse_args(arguments)
    if (asked.run is None) == (asked.made is None) or (asked.made is None) != (asked.after is None):
        parser.error("give a codec's RUN, or --made and --after")
    torch.set_num_threads(1)
    found = (of_codec if asked.run is not None else of_prompts)(asked, Judges())
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
