"""Two pretrained networks for speech: DNSMOS for quality, and Resemblyzer's speaker encoder.

    pip install onnxruntime && pip install --no-deps speechmos==0.0.1.1 Resemblyzer==0.1.4

The weights of both are part of these packages. DNSMOS (Reddy 2022, arXiv 2110.01763) predicts the
rating of a listener, 1 to 5. Resemblyzer's encoder (Wan 2018, arXiv 1710.10467) computes a speaker
embedding; two files of one speaker have a cosine of about 0.9. Only the weights are used: the code
of the packages has several dependencies, one of which cannot be installed with a current scipy.

Shapes: N samples at 16 kHz, F frames, M mel bands, K frequencies.
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
DNSMOS_CALIBRATION = np.poly1d([-0.06766283, 1.11546468, 0.04602535])
"""The published polynomial that maps the output of the network to mean ratings of listeners."""

WINDOW, HOP, MEL_BANDS, EMBED_DIM = 400, 160, 40, 256
SEGMENT_FRAMES, SEGMENT_HOP = 160, 77
"""The speaker encoder reads segments of 1.6 s, 1.3 per second."""
MIN_LEVEL_DB = -30.0


def find_package_file(package: str, name: str) -> Path:
    """Return the path of a file inside a package, without importing the package."""
    spec = importlib.util.find_spec(package)
    path = Path(spec.origin).parent / name if spec and spec.origin else Path()
    if not path.is_file():
        install = (__doc__ or "").splitlines()[2]
        raise SystemExit(f"The package {package} is needed but not installed:\n{install}")
    return path


class DNSMOS:
    """Predicts the overall quality of speech."""

    def __init__(self) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        model = find_package_file("speechmos", "dnsmos_models/sig_bak_ovr.onnx")
        self.session = onnxruntime.InferenceSession(
            str(model), options, providers=["CPUExecutionProvider"]
        )

    def __call__(self, samples_N: np.ndarray) -> float:
        """Average over segments of 9 s with a hop of 1 s; shorter audio is repeated."""
        repeats = math.ceil(DNSMOS_SAMPLES / len(samples_N))
        if repeats > 1:
            samples_N = np.tile(samples_N, repeats).astype(np.float32).clip(-1, 1)
        starts = range(0, len(samples_N) - DNSMOS_SAMPLES + 1, RATE_HZ)
        segments = np.stack([samples_N[start : start + DNSMOS_SAMPLES] for start in starts])
        scores = [
            self.session.run(None, {"input_1": segment[None].astype(np.float32)})[0][0][2]
            for segment in segments
        ]
        return float(np.mean(DNSMOS_CALIBRATION(np.array(scores))))


class SpeakerEncoder(nn.Module):
    """Resemblyzer's speaker encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(MEL_BANDS, EMBED_DIM, 3, batch_first=True)
        self.linear = nn.Linear(EMBED_DIM, EMBED_DIM)
        file = find_package_file("resemblyzer", "pretrained.pt")
        weights = torch.load(file, "cpu", weights_only=True)["model_state"]
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
        """Return the speaker embedding, (256,), of norm 1."""
        mel_FM = self.mel_spectrogram(torch.from_numpy(raise_level(samples_N)).float())
        mel_FM = F.pad(mel_FM, (0, 0, 0, max(0, SEGMENT_FRAMES - len(mel_FM))))
        segments = mel_FM.unfold(0, SEGMENT_FRAMES, SEGMENT_HOP).mT
        _, (hidden, _) = self.lstm(segments)
        embeddings = F.normalize(F.relu(self.linear(hidden[-1])), dim=1)
        return F.normalize(embeddings.mean(0), dim=0)

    def mel_spectrogram(self, samples_N: Tensor) -> Tensor:
        """Return the power in mel bands, (F, M)."""
        spectrum = torch.stft(
            samples_N,
            WINDOW,
            HOP,
            window=torch.hann_window(WINDOW),
            center=True,
            pad_mode="constant",
            return_complex=True,
        )
        return (self.filters_MK @ spectrum.abs().square()).T


def raise_level(samples_N: np.ndarray) -> np.ndarray:
    """Amplify quiet audio to the minimum level that the encoder was trained with."""
    level_db = 20 * math.log10(
        max(1e-9, float(np.sqrt(np.mean(np.square(samples_N, dtype=np.float64)))))
    )
    return samples_N * 10 ** (max(0.0, MIN_LEVEL_DB - level_db) / 20)


def slaney_filters() -> Tensor:
    """Return mel filters of equal area, (M, K), as in Slaney's Auditory Toolbox (1998).

    Their spacing is linear below 1 kHz and logarithmic above.
    """
    step, knee, growth = 200 / 3, 1000.0, math.log(6.4) / 27
    highest = knee / step + math.log(RATE_HZ / 2 / knee) / growth
    mels = torch.linspace(0, highest, MEL_BANDS + 2, dtype=torch.float64)
    edges = torch.where(
        mels < knee / step, mels * step, knee * torch.exp((mels - knee / step) * growth)
    )
    frequencies = torch.linspace(0, RATE_HZ / 2, WINDOW // 2 + 1, dtype=torch.float64)
    low, peak, high = (edges[at : at + MEL_BANDS, None] for at in range(3))
    triangles = torch.minimum(
        (frequencies - low) / (peak - low), (high - frequencies) / (high - peak)
    ).clamp(min=0)
    return (triangles * 2 / (high - low)).float()


ENVELOPE_WINDOW, ENVELOPE_HOP = 512, 256
ENVELOPE_BANDS_HZ = tuple(150 * 2 ** (number / 3) for number in range(16))
"""The centres of bands of a third of an octave, from 150 Hz to 4.8 kHz."""


def envelope_correlations(original_N: np.ndarray, decoded_N: np.ndarray) -> list[float | None]:
    """Return the correlation over time of the levels of two signals at 16 kHz in each band.

    Bands that a codec leaves out, or fills with something else, have a low one. STOI is a mean of
    such correlations over short segments. It is None in bands in which a signal is constant.
    """
    pair = zip(band_levels(original_N), band_levels(decoded_N), strict=True)
    return [float(np.corrcoef(a, b)[0, 1]) if min(a.std(), b.std()) > 0 else None for a, b in pair]


def band_levels(samples_N: np.ndarray) -> list[np.ndarray]:
    """Return the root of the energy of each band in each frame."""
    window = torch.hann_window(ENVELOPE_WINDOW)
    spectrum_KF = torch.stft(
        torch.from_numpy(samples_N),
        ENVELOPE_WINDOW,
        ENVELOPE_HOP,
        window=window,
        return_complex=True,
    ).abs()
    hertz_K = torch.linspace(0, RATE_HZ / 2, ENVELOPE_WINDOW // 2 + 1)
    edge = 2 ** (1 / 6)
    return [
        spectrum_KF[(hertz_K >= hertz / edge) & (hertz_K < hertz * edge)].norm(dim=0).numpy()
        for hertz in ENVELOPE_BANDS_HZ
    ]


PITCH_RANGE_HZ = (60.0, 400.0)
PITCH_WINDOW_SECONDS, PITCH_HOP_SECONDS = 0.04, 0.02
MIN_PERIODICITY = 0.5
"""The normalized autocorrelation above which a frame is voiced."""


def median_pitch_hz(samples_N: np.ndarray, rate_hz: int) -> float:
    """Return the median pitch of voiced frames, by the normalized autocorrelation; NaN if there
    are none."""
    window, hop = round(PITCH_WINDOW_SECONDS * rate_hz), round(PITCH_HOP_SECONDS * rate_hz)
    shortest, longest = (round(rate_hz / hertz) for hertz in reversed(PITCH_RANGE_HZ))
    pitches = []
    threshold = 0.1 * float(np.abs(samples_N).max())
    for start in range(0, len(samples_N) - window - longest, hop):
        frame = samples_N[start : start + window + longest].astype(np.float64)
        frame = frame - frame.mean()
        if np.abs(frame).max() < threshold:
            continue
        lagged = np.lib.stride_tricks.sliding_window_view(frame, window)[: longest + 1]
        energy = np.sqrt(np.square(lagged).sum(1) * np.square(frame[:window]).sum()) + 1e-12
        periodicity = lagged @ frame[:window] / energy
        candidates = periodicity[shortest : longest + 1]
        # The first peak that is nearly as high as the highest one: its multiples are as periodic.
        high = candidates > 0.9 * candidates.max()
        best = int(np.argmax(high))
        while best + 1 < len(candidates) and candidates[best + 1] > candidates[best]:
            best += 1
        if candidates[best] > MIN_PERIODICITY:
            pitches.append(rate_hz / (shortest + best))
    return float(np.median(pitches)) if pitches else math.nan
