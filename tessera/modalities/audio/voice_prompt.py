"""What a recording must have to be the prompt of a voice."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tessera.data.errors import UnreadableFile
from tessera.modalities.audio.media import Audio
from tessera.run.errors import UserError, as_user_error

MIN_VOICE_SECONDS = 0.5
"""The length of the shortest recording of a voice."""
SILENCE_RMS = 1e-3
"""A recording below this root mean square has no voice."""


def check_voice(path: str | Path) -> Audio:
    """Return a recording of a voice, averaged to one channel; raise UserError if it has none."""
    with as_user_error(UnreadableFile):
        audio = Audio.load(path).to_mono()
    if audio.seconds < MIN_VOICE_SECONDS:
        raise UserError(
            f"{path} has {audio.seconds:.2f} s, too little for a voice: give a recording of at "
            f"least {MIN_VOICE_SECONDS:g} s."
        )
    if float(np.sqrt(np.mean(np.square(audio.samples)))) < SILENCE_RMS:
        raise UserError(f"{path} is silent: give a recording of somebody speaking.")
    return audio
