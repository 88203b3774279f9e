"""A picture of a sound, drawn with numpy: its waveform, and below it how loud each mel band is, low
ones at the bottom.

Time goes to the right, and the whole sound is as wide as the picture. Loudness is in decibels of a
full-scale sine, on the same scale in every picture, so that an original and its reconstruction can
be compared.
"""

from __future__ import annotations

import numpy as np

from tessera.modalities.image.media import Image

WIDTH, WAVE, BANDS = 384, 56, 128  # pixels
WINDOW_SECONDS = 0.032
QUIETEST, LOUDEST = -85.0, -12.0  # decibels
LINE, GROUND = (68, 92, 140), 255
HEAT = np.array(
    [(0, 0, 4), (50, 16, 92), (133, 34, 107), (210, 66, 68), (248, 140, 40), (252, 250, 190)],
    dtype=np.float64,
)
"""From quiet to loud, evenly spaced; each is brighter than the one before."""


def draw(samples: np.ndarray, rate_hz: int) -> Image:
    """(N,) as a picture of WIDTH x (WAVE + BANDS) pixels."""
    samples = np.nan_to_num(samples.astype(np.float64)).clip(-1, 1)
    return Image(np.concatenate([waveform(samples), spectrogram(samples, rate_hz)]))


def waveform(samples: np.ndarray) -> np.ndarray:
    """(WAVE, WIDTH, 3): in each column the range of the samples there; full scale is the full
    height."""
    edges = np.linspace(0, len(samples), WIDTH + 1).astype(int)
    starts = np.minimum(edges[:-1], len(samples) - 1)
    highest, lowest = np.maximum.reduceat(samples, starts), np.minimum.reduceat(samples, starts)
    heights = np.linspace(1, -1, WAVE)[:, None]
    half = 1 / (WAVE - 1)  # so that silence is a line
    inside = (heights <= highest + half) & (heights >= lowest - half)
    return np.where(inside[..., None], np.array(LINE), GROUND).astype(np.uint8)


def spectrogram(samples: np.ndarray, rate_hz: int) -> np.ndarray:
    """(BANDS, WIDTH, 3)"""
    decibels = 10 * np.log10(mel_power(samples, rate_hz) + 1e-12)
    heat = ((decibels - QUIETEST) / (LOUDEST - QUIETEST)).clip(0, 1) * (len(HEAT) - 1)
    colours = np.stack(
        [np.interp(heat, np.arange(len(HEAT)), HEAT[:, channel]) for channel in range(3)], axis=-1
    )
    return np.rint(colours[::-1]).astype(np.uint8)


def mel_power(samples: np.ndarray, rate_hz: int) -> np.ndarray:
    """(BANDS, WIDTH): the power between the edges of bands that are evenly spaced in mel; a
    full-scale sine has 1 in all."""
    window = max(16, round(WINDOW_SECONDS * rate_hz))
    padded = np.pad(samples, window // 2 + 1)
    starts = np.linspace(0, max(0, len(samples) - 1), WIDTH).astype(int)
    hann = np.hanning(window)
    frames = np.lib.stride_tricks.sliding_window_view(padded, window)[starts] * hann
    power = np.abs(np.fft.rfft(frames, axis=1)) ** 2 * 4 / (hann @ hann) / window
    below = np.concatenate(
        [np.zeros((WIDTH, 1)), np.cumsum(power, axis=1)], axis=1
    )  # of each frequency, up to its lower end
    highest = 2595 * np.log10(1 + rate_hz / 2 / 700)
    edges_hz = 700 * (10 ** (np.linspace(0, highest, BANDS + 1) / 2595) - 1)
    places = edges_hz * window / rate_hz + 0.5
    left = np.minimum(places.astype(int), below.shape[1] - 2)
    up_to_edges = below[:, left] + (below[:, left + 1] - below[:, left]) * (places - left)
    return np.diff(up_to_edges, axis=1).T
