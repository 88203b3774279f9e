"""Quality and speaker similarity of speech that a codec reconstructs, or that is generated from
prompts.

    python bench/speech_quality.py RUN [--data DIR] [--count 64] [--num-quantizers 1 2 4 8]
    python bench/speech_quality.py --generated DIR --prompts DIR

The first form reads the held-out audio of a codec's run, or of DIR, and reports for reconstructions
from the given numbers of quantizers: SI-SDR, mel distance, STOI and PESQ against the original;
the correlation of the level in each third of an octave, which shows what part of the spectrum is
lost; DNSMOS, and that of the original; and speaker similarity (the cosine of Resemblyzer's
embeddings).
The second form reads generated audio and the prompts of the same name, and reports DNSMOS of both
and speaker similarity. Speaker similarity by chance is reported too: each file against the original
of another. `speech_metrics.py` lists the packages to install.
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
from speech_metrics import (
    DNSMOS,
    ENVELOPE_BANDS_HZ,
    RATE_HZ,
    SpeakerEncoder,
    envelope_correlations,
)

from tessera.api.tokenizer import Tokenizer
from tessera.data.discovery import find_files
from tessera.losses.spectral import mel_distance_B
from tessera.metrics.audio import si_sdr_B
from tessera.metrics.speech import stoi_B
from tessera.modalities.audio.io.files import SUFFIXES
from tessera.modalities.audio.media import Audio
from tessera.modalities.audio.speech_quality import MODES, PESQ_MISSING, pesq, pesq_available

MIN_SECONDS = 1.0
"""Shorter audio has no reliable speaker embedding."""


# ---- audio


def load_held_out(codec: Tokenizer, data: str | None, count: int) -> list[Audio]:
    """Load held-out audio, whole and at the codec's rate, evenly spaced over all files."""
    config: Any = codec.run.data
    if data is not None:
        config = replace(config, path=data)
    dataset = config.build().validation
    if config.path is None:
        every: Iterable[Audio] = (
            load_synthetic(dataset, index) for index in evenly_spaced(len(dataset), count)
        )
    else:
        every = (load_audio(dataset.files.file(i), config.rate_hz) for i in range(len(dataset)))
    long = [audio for audio in every if audio.seconds >= MIN_SECONDS]
    if not long:
        raise SystemExit(
            f"No held-out audio is at least {MIN_SECONDS:g} s long: give longer files with --data."
        )
    return [long[index] for index in evenly_spaced(len(long), count)]


def evenly_spaced(total: int, count: int) -> list[int]:
    """Return at most `count` indices below `total`."""
    return [index * total // min(total, count) for index in range(min(total, count))]


def load_audio(path: str | Path, rate_hz: int) -> Audio:
    return Audio.load(path).to_mono().resample(rate_hz)


def load_synthetic(dataset: Any, index: int) -> Audio:
    example = dataset.item(index, np.random.default_rng(0))
    return Audio(example.samples[:, : example.length], example.rate_hz)


# ---- metrics


def mean_metrics(rows: Sequence[dict[str, float | None]]) -> dict[str, float]:
    """Average each metric over the files for which it is defined."""
    defined = {
        name: [value for row in rows if (value := row.get(name)) is not None] for name in rows[0]
    }
    return {name: float(np.mean(values)) for name, values in defined.items() if values}


def compare_signals(original: Audio, decoded: Audio) -> dict[str, float | None]:
    """Compute the metrics that need the original signal."""
    real, other = (torch.from_numpy(audio.samples)[None] for audio in (original, decoded))
    stoi = float(stoi_B(other, real, rate_hz=original.rate_hz))
    return {
        "si_sdr": float(si_sdr_B(other, real)),
        "mel_distance": float(mel_distance_B(other, real, rate_hz=original.rate_hz)),
        "stoi": stoi if np.isfinite(stoi) else None,
        "pesq": pesq(original.samples[0], decoded.samples[0], original.rate_hz),
    }


def compare_bands(original: Audio, decoded: Audio) -> dict[str, float | None]:
    """Compute the correlation of the level of each band."""
    pair = (audio.resample(RATE_HZ).samples[0] for audio in (original, decoded))
    values = zip(ENVELOPE_BANDS_HZ, envelope_correlations(*pair), strict=True)
    return {f"level_{round(hertz)}_hz": value for hertz, value in values}


@dataclass
class SpeechFeatures:
    """What the networks compute from some audio."""

    dnsmos: float
    """The mean over all files."""
    speakers: torch.Tensor
    """One speaker embedding per file."""


class SpeechNetworks:
    """The two networks that rate audio without its original signal."""

    def __init__(self) -> None:
        self.dnsmos, self.speaker_encoder = DNSMOS(), SpeakerEncoder()

    def extract(self, sounds: Sequence[Audio]) -> SpeechFeatures:
        samples = [audio.resample(RATE_HZ).samples[0] for audio in sounds]
        return SpeechFeatures(
            float(np.mean([self.dnsmos(one) for one in samples])),
            torch.stack([self.speaker_encoder(one) for one in samples]),
        )

    def compare(self, originals: SpeechFeatures, sounds: Sequence[Audio]) -> dict[str, float]:
        features = self.extract(sounds)
        similarity = features.speakers @ originals.speakers.T
        by_chance = similarity.roll(1, 0).diagonal().mean() if len(sounds) > 1 else float("nan")
        return {
            "dnsmos_original": originals.dnsmos,
            "dnsmos": features.dnsmos,
            "speaker_similarity": float(similarity.diagonal().mean()),
            "similarity_by_chance": float(by_chance),
        }


def reconstruct(codec: Tokenizer, audio: Audio, num_quantizers: int) -> Audio:
    """Encode and decode audio with the first quantizers only."""
    samples = torch.from_numpy(audio.samples)[None].to(next(codec.model.parameters()).device)
    with torch.no_grad():
        decoded = codec.model.decode(codec.model.encode(samples)[..., :num_quantizers])
    decoded = decoded[0, :, : samples.shape[2]].float().cpu().numpy().clip(-1, 1)
    return Audio(decoded, audio.rate_hz)


def evaluate_codec(args: argparse.Namespace, networks: SpeechNetworks) -> dict[str, Any]:
    codec = Tokenizer.load(args.run)
    originals = load_held_out(codec, args.data, args.count)
    seconds = sum(audio.seconds for audio in originals)
    print(f"{len(originals)} files, {seconds:.0f} s, codec at step {codec.trained.steps}")
    rate_hz = originals[0].rate_hz
    if not pesq_available(rate_hz):
        print(PESQ_MISSING if rate_hz in MODES else "PESQ is omitted: it needs 8 or 16 kHz.")
    features, results = networks.extract(originals), {}
    available = codec.num_quantizers
    for count in sorted({min(count, available) for count in args.num_quantizers or [available]}):
        decoded = [reconstruct(codec, audio, count) for audio in originals]
        pairs = zip(originals, decoded, strict=True)
        metrics = mean_metrics([compare_signals(*pair) | compare_bands(*pair) for pair in pairs])
        results[count] = metrics | networks.compare(features, decoded)
        print(format_metrics(f"{count} of {available} quantizers", results[count]), flush=True)
    return {"files": len(originals), "seconds": seconds, "num_quantizers": results}


def evaluate_generated(args: argparse.Namespace, networks: SpeechNetworks) -> dict[str, Any]:
    generated_files, prompt_files = find_by_stem(args.generated), find_by_stem(args.prompts)
    stems = sorted(generated_files.keys() & prompt_files.keys())
    if not stems:
        raise SystemExit(
            f"No file in {args.generated} has the same name as one in {args.prompts}: give folders "
            "in which generated audio and prompts have the same names."
        )
    prompts, generated = (
        [load_audio(files[stem], RATE_HZ) for stem in stems]
        for files in (prompt_files, generated_files)
    )
    metrics = networks.compare(networks.extract(prompts), generated)
    print(format_metrics(f"{len(stems)} generated files and their prompts", metrics))
    return {"files": len(stems)} | metrics


def find_by_stem(folder: Path) -> dict[str, Path]:
    found = find_files(str(folder), SUFFIXES, "audio files")
    return {Path(name).stem: Path(str(found.file(i))) for i, name in enumerate(found.names)}


def format_metrics(title: str, metrics: dict[str, float]) -> str:
    return "\n".join([title, *(f"  {name:<22}{value:8.3f}" for name, value in metrics.items())])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="the run of a codec")
    parser.add_argument(
        "--data", help="a folder of audio; its held-out files are chosen by name, as in the run"
    )
    parser.add_argument("--count", type=int, default=64, help="the most files to read")
    parser.add_argument(
        "--num-quantizers",
        type=int,
        nargs="+",
        help="reconstruct from the first so many quantizers (default: all)",
    )
    parser.add_argument("--generated", type=Path, metavar="DIR", help="a folder of generated audio")
    parser.add_argument(
        "--prompts", type=Path, metavar="DIR", help="a folder of their prompts, of the same names"
    )
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args(arguments)
    one_form = (args.run is None) != (args.generated is None)
    if not one_form or (args.generated is None) != (args.prompts is None):
        parser.error("give either the RUN of a codec, or both --generated and --prompts")
    torch.set_num_threads(1)
    evaluate = evaluate_codec if args.run is not None else evaluate_generated
    results = evaluate(args, SpeechNetworks())
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
