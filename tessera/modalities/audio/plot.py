"""Plot audio with numpy: the waveform, and below it a mel spectrogram with low bands at the bottom.

Time runs to the right over the whole width. Levels are decibels of a full-scale sine on the same
scale in every plot, so that an original and its reconstruction can be compared.
"""

from __future__ import annotations

import numpy as np

from tessera.modalities.image.media import Image

WIDTH, WAVEFORM_HEIGHT, MEL_BANDS = 384, 56, 128  # pixels
WINDOW_SECONDS = 0.032
MIN_DB, MAX_DB = -85.0, -12.0
LINE_COLOR, BACKGROUND = (68, 92, 140), 255
COLORMAP = np.array(
    [(0, 0, 4), (50, 16, 92), (133, 34, 107), (210, 66, 68), (248, 140, 40), (252, 250, 190)],
    dtype=np.float64,
)
"""RGB from quiet to loud, evenly spaced, of increasing brightness."""


def plot_audio(samples: np.ndarray, rate_hz: int) -> Image:
    """Plot (N,) as an image of WIDTH x (WAVEFORM_HEIGHT + MEL_BANDS) pixels."""
    samples = np.nan_to_num(samples.astype(np.float64)).clip(-1, 1)
    return Image(np.concatenate([draw_waveform(samples), draw_spectrogram(samples, rate_hz)]))


def draw_waveform(samples: np.ndarray) -> np.ndarray:
    """Return (WAVEFORM_HEIGHT, WIDTH, 3): each column shows the range of its samples.

    Full scale is the full height.
    """
    edges = np.linspace(0, len(samples), WIDTH + 1).astype(int)
    starts = np.minimum(edges[:-1], len(samples) - 1)
    highest, lowest = np.maximum.reduceat(samples, starts), np.minimum.reduceat(samples, starts)
    heights = np.linspace(1, -1, WAVEFORM_HEIGHT)[:, None]
    half = 1 / (WAVEFORM_HEIGHT - 1)  # so that silence is a line
    inside = (heights <= highest + half) & (heights >= lowest - half)
    return np.where(inside[..., None], np.array(LINE_COLOR), BACKGROUND).astype(np.uint8)


def draw_spectrogram(samples: np.ndarray, rate_hz: int) -> np.ndarray:
    """Return (MEL_BANDS, WIDTH, 3)."""
    level_db = 10 * np.log10(mel_power(samples, rate_hz) + 1e-12)
    position = ((level_db - MIN_DB) / (MAX_DB - MIN_DB)).clip(0, 1) * (len(COLORMAP) - 1)
    colors = np.stack(
        [
            np.interp(position, np.arange(len(COLORMAP)), COLORMAP[:, channel])
            for channel in range(3)
        ],
        axis=-1,
    )
    return np.rint(colors[::-1]).astype(np.uint8)


def mel_power(samples: np.ndarray, rate_hz: int) -> np.ndarray:
    """Return (MEL_BANDS, WIDTH): the power in bands of equal width in mel.

    The bands are rectangular, and those of a full-scale sine sum to 1.
    """
    window = max(16, round(WINDOW_SECONDS * rate_hz))
    padded = np.pad(samples, window // 2 + 1)
    starts = np.linspace(0, max(0, len(samples) - 1), WIDTH).astype(int)
    hann = np.hanning(window)
    frames = np.lib.stride_tricks.sliding_window_view(padded, window)[starts] * hann
    power = np.abs(np.fft.rfft(frames, axis=1)) ** 2 * 4 / (hann @ hann) / window
    # Power below the lower edge of each frequency bin.
    cumulative = np.concatenate([np.zeros((WIDTH, 1)), np.cumsum(power, axis=1)], axis=1)
    highest_mel = 2595 * np.log10(1 + rate_hz / 2 / 700)
    edges_hz = 700 * (10 ** (np.linspace(0, highest_mel, MEL_BANDS + 1) / 2595) - 1)
    bins = edges_hz * window / rate_hz + 0.5
    left = np.minimum(bins.astype(int), cumulative.shape[1] - 2)
    slope = cumulative[:, left + 1] - cumulative[:, left]
    return np.diff(cumulative[:, left] + slope * (bins - left), axis=1).T
