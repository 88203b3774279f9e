"""The audio codec: the network on MDCT coefficients, and the one on samples as in SoundStream.

No package trains a codec of its own, so that the two networks of the recipe audio-codec are
compared. Both sides have the defaults of the preset small, the same recordings, 8 levels of 256
codes at 50 frames per second (3.2 kbit/s) and the same batches, each with its own losses and
learning rate.

soundstream: `--network soundstream --task.reconstruction.mel 1`. The 0.3 of the preset is for runs
of a few minutes, which must learn the phase first.
spectral: `--network spectral`, the default.
spectral-quarter: the same, with a schedule that ends after a quarter of the budget.

The outputs are the reconstructions of up to 128 held-out recordings, one second of each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from time_to_quality import Judge, Metric, Metrics, Outputs, Row, Setting, SideSpec

RATE_HZ, SECONDS = 16_000, 1.0
MAX_HELD_OUT, EVAL_BATCH_SIZE = 128, 16
VAL_FRACTION = 0.05
MIN_LEVEL = 1e-3
"""Held-out recordings with a lower root mean square are left out."""


# ---- what both sides get


@dataclass(frozen=True)
class Recordings:
    """The folder of the recordings, and the samples of held-out ones."""

    work: Path

    @property
    def path(self) -> Path:
        return self.work / "codec-held-out.npz"

    def load(self) -> tuple[str, Any]:
        """Return the folder and the samples (B, 1, N) of the held-out recordings."""
        import numpy as np
        import torch

        with np.load(self.path) as arrays:
            return str(arrays["folder"]), torch.from_numpy(arrays["samples"])


def prepare(data: Path, work: Path) -> None:
    """Read the held-out recordings, unless that has been done."""
    import numpy as np

    recordings = Recordings(work)
    if recordings.path.exists():
        return
    dataset = data_config(str(data)).build(captions=False).validation
    rng = np.random.default_rng(0)
    samples = [dataset.item(i, rng).samples for i in range(min(len(dataset), MAX_HELD_OUT))]
    audible = [one for one in samples if np.sqrt(np.mean(one**2)) > MIN_LEVEL]
    unfinished = work / "codec-held-out.part.npz"
    np.savez(unfinished, folder=str(data.resolve()), samples=np.stack(audible))
    unfinished.rename(recordings.path)


def data_config(folder: str) -> Any:
    from tessera.modalities.audio.dataset import AudioDataConfig

    return AudioDataConfig(path=folder, rate_hz=RATE_HZ, seconds=SECONDS, val_fraction=VAL_FRACTION)


# ---- the sides


def build_codec(setting: Setting, *, network: Literal["soundstream", "spectral"]) -> Any:
    import torch

    from quality_rows.engine_side import build_side
    from tessera.modalities.audio.recipes import audio_codec
    from tessera.run.directory import RunDirectory
    from tessera.run.train import build_engine

    folder, samples = Recordings(setting.work).load()
    run = replace(audio_codec(network=network), data=data_config(folder))
    if network == "soundstream":
        loss = replace(run.task.reconstruction, mel=1.0)
        run = replace(run, task=replace(run.task, reconstruction=loss))

    def build(config: Any, folder: Path) -> Any:
        return build_engine(replace(run, engine=config), RunDirectory(folder))

    def compute(task: Any, final: bool) -> Outputs:
        with torch.no_grad():
            made = [task.model(batch).output for batch in samples.split(EVAL_BATCH_SIZE)]
        return {"samples": torch.cat(made).numpy()}

    description = f"recipe audio-codec, preset small, network {network}"
    return build_side(run.engine, build, setting, compute, description)


# ---- metrics


@dataclass(frozen=True)
class AudioJudge:
    """Compares reconstructions with the held-out originals."""

    originals: Any

    def __call__(self, outputs: Outputs) -> Metrics:
        import torch

        from tessera.losses.spectral import mel_distance_B, stft_distance_B
        from tessera.metrics.audio import si_sdr_B
        from tessera.metrics.speech import stoi_B
        from tessera.modalities.audio.reconstruction import mel_windows, rms

        made, originals = torch.from_numpy(outputs["samples"]), self.originals
        lengths_B = torch.full((len(made),), made.shape[2])
        levels_B = rms(made, lengths_B) / rms(originals, lengths_B)
        windows = mel_windows(RATE_HZ)
        return {
            "si_sdr": mean(si_sdr_B(made, originals, lengths_B=lengths_B)),
            "mel_distance": mean(
                mel_distance_B(
                    made, originals, rate_hz=RATE_HZ, lengths_B=lengths_B, windows=windows
                )
            ),
            "stft_distance": mean(stft_distance_B(made, originals, lengths_B=lengths_B)),
            "stoi": mean(stoi_B(made, originals, rate_hz=RATE_HZ, lengths_B=lengths_B)),
            "pesq": mean(score_pesq(originals, made)),
            "rms_ratio": mean(levels_B),
        }


def mean(values_B: Any) -> float:
    """Return the mean of the values that are defined: STOI and PESQ need speech."""
    defined = values_B[values_B.isfinite()]
    return float(defined.double().mean())


def score_pesq(originals: Any, made: Any) -> Any:
    """Return PESQ of each pair, NaN where it finds no speech; empty if it is not installed."""
    import torch

    from tessera.modalities.audio.speech_quality import pesq, pesq_available

    if not pesq_available(RATE_HZ):
        return torch.zeros(0)
    pairs = zip(originals[:, 0].numpy(), made[:, 0].numpy(), strict=True)
    scores = [pesq(original, decoded, RATE_HZ) for original, decoded in pairs]
    return torch.tensor([float("nan") if score is None else score for score in scores])


def build_judge(work: Path) -> Judge:
    return AudioJudge(Recordings(work).load()[1])


ROW = Row(
    title="audio codec",
    package="soundstream",
    sides={
        "soundstream": SideSpec(partial(build_codec, network="soundstream")),
        "spectral": SideSpec(partial(build_codec, network="spectral"), is_optional=True),
        "spectral-quarter": SideSpec(partial(build_codec, network="spectral"), budget=1 / 4),
    },
    metrics=(
        Metric("si_sdr", "SI-SDR (dB)", higher_is_better=True, decimals=1),
        Metric("mel_distance", "mel distance", higher_is_better=False),
        Metric("stft_distance", "STFT distance", higher_is_better=False),
        Metric("stoi", "STOI", higher_is_better=True),
        Metric("pesq", "PESQ", higher_is_better=True, decimals=2),
        Metric("rms_ratio", "rms ratio", higher_is_better=True),
    ),
    prepare=prepare,
    build_judge=build_judge,
)
