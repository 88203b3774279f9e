"""Two networks that listen to speech: how good it sounds, and whose voice it is. Both lie inside
packages with their weights.

    pip install onnxruntime && pip install --no-deps speechmos==0.0.1.1 Resemblyzer==0.1.4

DNSMOS (Reddy 2022, arXiv 2110.01763) says how a listener would rate a recording, 1 to 5.
Resemblyzer's encoder (Wan 2018, arXiv 1710.10467) makes a vector of a voice; of two recordings of
one person the cosine is about 0.9. Only their weights are used: the packages' own code needs
several others, one of which cannot be installed beside a new scipy.

N samples at 16 kHz, F frames, M mel bands.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

RATE_HZ = 16_000

DNSMOS_SAMPLES = int(9.01 * RATE_HZ)
DNSMOS_SCALE = np.poly1d([-0.06766283, 1.11546468, 0.04602535])
"""From what the network says to what listeners said on average, as it was published."""

VOICE_WINDOW, VOICE_HOP, VOICE_BANDS, VOICE_WIDTH = 400, 160, 40, 256
PART_FRAMES, PART_STEP = 160, 77
"""A voice is listened to for 1.6 s at a time, 1.3 times a second."""
QUIETEST_DB = -30.0


def file_of(package: str, name: str) -> Path:
    found = importlib.util.find_spec(package)
    path = Path(found.origin).parent / name if found and found.origin else Path()
    if not path.is_file():
        raise SystemExit(
            f"This needs the package {package}, which is not installed:\n{__doc__.splitlines()[2]}"
        )
    return path


class Listener:
    """DNSMOS: the overall quality."""

    def __init__(self) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        network = file_of("speechmos", "dnsmos_models/sig_bak_ovr.onnx")
        self.session = onnxruntime.InferenceSession(
            str(network), options, providers=["CPUExecutionProvider"]
        )

    def __call__(self, samples_N: np.ndarray) -> float:
        """Nine seconds at a time, a second apart; what is shorter is repeated."""
        times = math.ceil(DNSMOS_SAMPLES / len(samples_N))
        samples_N = (
            np.tile(samples_N, times).astype(np.float32).clip(-1, 1) if times > 1 else samples_N
        )
        starts = range(0, len(samples_N) - DNSMOS_SAMPLES + 1, RATE_HZ)
        pieces = np.stack([samples_N[start : start + DNSMOS_SAMPLES] for start in starts])
        heard = [
            self.session.run(None, {"input_1": piece[None].astype(np.float32)})[0][0][2]
            for piece in pieces
        ]
        return float(np.mean(DNSMOS_SCALE(np.array(heard))))


class Voices(nn.Module):
    """Resemblyzer's encoder of speakers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(VOICE_BANDS, VOICE_WIDTH, 3, batch_first=True)
        self.linear = nn.Linear(VOICE_WIDTH, VOICE_WIDTH)
        weights = torch.load(file_of("resemblyzer", "pretrained.pt"), "cpu", weights_only=True)[
            "model_state"
        ]
        self.load_state_dict(
            {
                name: tensor
                for name, tensor in weights.items()
                if name.split(".")[0] in ("lstm", "linear")
            }
        )
        self.filters_MK = slaney_filters()

    @torch.no_grad()
    def forward(self, samples_N: np.ndarray) -> Tensor:
        """(256,), of length 1."""
        heard_FM = self.spectrum(torch.from_numpy(as_loud(samples_N)).float())
        heard_FM = F.pad(heard_FM, (0, 0, 0, max(0, PART_FRAMES - len(heard_FM))))
        parts = heard_FM.unfold(0, PART_FRAMES, PART_STEP).mT
        _, (hidden, _) = self.lstm(parts)
        each = F.normalize(F.relu(self.linear(hidden[-1])), dim=1)
        return F.normalize(each.mean(0), dim=0)

    def spectrum(self, samples_N: Tensor) -> Tensor:
        """(F, M) power in mel bands."""
        spectrum = torch.stft(
            samples_N, VOICE_WINDOW, VOICE_HOP, window=torch.hann_window(VOICE_WINDOW), center=True, pad_mode="constant",
            return_complex=True,
        )  # fmt: skip
        return (self.filters_MK @ spectrum.abs().square()).T


def as_loud(samples_N: np.ndarray) -> np.ndarray:
    """Quiet recordings are made louder, as the encoder is used to."""
    level = 20 * math.log10(
        max(1e-9, float(np.sqrt(np.mean(np.square(samples_N, dtype=np.float64)))))
    )
    return samples_N * 10 ** (max(0.0, QUIETEST_DB - level) / 20)


def slaney_filters() -> Tensor:
    """(M, K): mel bands after Slaney's Auditory Toolbox (1998), straight below 1 kHz and
    logarithmic above, of equal area."""
    step, knee, growth = 200 / 3, 1000.0, math.log(6.4) / 27
    highest = knee / step + math.log(RATE_HZ / 2 / knee) / growth
    mels = torch.linspace(0, highest, VOICE_BANDS + 2, dtype=torch.float64)
    edges = torch.where(
        mels < knee / step, mels * step, knee * torch.exp((mels - knee / step) * growth)
    )
    frequencies = torch.linspace(0, RATE_HZ / 2, VOICE_WINDOW // 2 + 1, dtype=torch.float64)
    low, peak, high = (edges[at : at + VOICE_BANDS, None] for at in range(3))
    triangles = torch.minimum(
        (frequencies - low) / (peak - low), (high - frequencies) / (high - peak)
    ).clamp(min=0)
    return (triangles * 2 / (high - low)).float()
