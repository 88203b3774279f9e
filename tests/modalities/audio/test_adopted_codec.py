"""A codec of others as a run of ours: taken over in one step, and then used as if it had been
trained here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tessera.api.tokenizer import Tokenizer
from tests.command import refused, tessera
from tests.modalities.audio.test_pretrained_codec import network, sounds


@pytest.mark.parametrize("kind", ["encodec", "dac"])
def test_a_codec_of_others_becomes_a_run_whose_symbols_are_its_own(
    kind: str, tmp_path: Path
) -> None:
    theirs = network(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    out = tmp_path / "run"
    assert (
        tessera(
            "train", "audio-codec", "--codec", tmp_path / "theirs", "--out", out, "--data.toys", "8"
        ).code
        == 0
    )
    tokenizer = Tokenizer.load(out)
    with torch.no_grad():
        heard = theirs.encode(
            sounds(), **({"bandwidth": 4.8} if kind == "encodec" else {})
        ).audio_codes
    expected = (heard[0] if kind == "encodec" else heard).movedim(1, 2)
    assert torch.equal(tokenizer.encode(sounds()), expected)
    assert (
        tessera("evaluate", out).code == 0
        and tessera("sample", out, "--count", "1", "--out", tmp_path / "made").code == 0
    )
    assert (tmp_path / "made/0000.wav").stat().st_size > 1000


def test_where_there_is_no_codec_a_letter_says_so(tmp_path: Path) -> None:
    letter = refused(
        "train", "audio-codec", "--codec", tmp_path / "nowhere", "--out", tmp_path / "run"
    )
    assert "there is no folder" in letter and not (tmp_path / "run").exists()
