"""PESQ, the perceptual evaluation of speech quality (ITU-T P.862), by the package pesq where it is
installed.

It knows two rates: 8 kHz, as a telephone sounds, and 16 kHz. Scores are about 1 (bad) to 4.6
(nothing can be told apart).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from types import ModuleType

MODES = {8_000: "nb", 16_000: "wb"}
SHORTEST_SECONDS = 0.25
"""Below this it has nothing to align."""
INSTALL = 'PESQ is left out: the package pesq is not installed (pip install "tessera[speech]").'


def library() -> ModuleType | None:
    """pesq, if it is there."""
    try:
        import pesq
    except ImportError:
        return None
    return pesq


def can_be_measured(rate_hz: int) -> bool:
    return rate_hz in MODES and library() is not None


def pesq(original_N: np.ndarray, made_N: np.ndarray, rate_hz: int) -> float | None:
    """None where nothing can be said: another rate, no package, too short, or no utterance found in
    it."""
    package = library()
    if package is None or rate_hz not in MODES or len(original_N) < SHORTEST_SECONDS * rate_hz:
        return None
    if not (np.any(original_N) and np.any(made_N)):  # it divides by the loudest sample
        return None
    quiet = package.PesqError.RETURN_VALUES
    score = package.pesq(
        rate_hz,
        original_N.astype(np.float32),
        made_N.astype(np.float32),
        MODES[rate_hz],
        on_error=quiet,
    )
    return None if score < 0 else float(score)
