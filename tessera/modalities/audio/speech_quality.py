"""PESQ, the perceptual evaluation of speech quality (ITU-T P.862), with the package pesq.

It is defined for two rates, 8 kHz (narrow band) and 16 kHz (wide band). Scores range from about 1
(bad) to 4.6 (no audible difference).
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from tessera._optional import require

MODES = {8_000: "nb", 16_000: "wb"}
MIN_SECONDS = 0.25
"""Shorter audio cannot be aligned."""
PESQ_MISSING = 'PESQ is omitted: the package pesq is not installed (pip install "tessera[speech]").'


def import_pesq() -> ModuleType | None:
    """Import pesq; return None if it is not installed."""
    try:
        return require("pesq", extra="speech", purpose="PESQ")
    except ModuleNotFoundError:
        return None


def pesq_available(rate_hz: int) -> bool:
    """Return whether PESQ is installed and defined for the rate."""
    return rate_hz in MODES and import_pesq() is not None


def pesq(original_N: np.ndarray, decoded_N: np.ndarray, rate_hz: int) -> float | None:
    """Compute PESQ; None if it is undefined.

    It is undefined at other rates, without the package, and for audio that is too short, silent or
    without a detected utterance.
    """
    package = import_pesq()
    if package is None or rate_hz not in MODES or len(original_N) < MIN_SECONDS * rate_hz:
        return None
    if not (np.any(original_N) and np.any(decoded_N)):  # pesq divides by the peak
        return None
    score = package.pesq(
        rate_hz,
        original_N.astype(np.float32),
        decoded_N.astype(np.float32),
        MODES[rate_hz],
        on_error=package.PesqError.RETURN_VALUES,
    )
    return None if score < 0 else float(score)
