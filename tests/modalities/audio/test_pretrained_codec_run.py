"""A pretrained codec becomes a run in one step and is then used like a trained one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tessera.api.tokenizer import Tokenizer
from tests.cli_runner import run_invalid, tessera
from tests.modalities.audio.test_pretrained_codec import build_network, random_audio, run_library


@pytest.mark.parametrize("kind", ["encodec", "dac"])
def test_a_run_of_a_pretrained_codec_has_its_codes(kind: str, tmp_path: Path) -> None:
    build_network(kind).save_pretrained(tmp_path / "codec")
    out = tmp_path / "run"
    train = ("train", "audio-codec", "--codec", tmp_path / "codec", "--out", out)
    assert tessera(*train, "--data.num-synthetic", "8").code == 0
    audio = random_audio().clamp(-1, 1)
    expected, _ = run_library(kind, audio)
    assert torch.equal(Tokenizer.load(out).encode(audio), expected)
    assert tessera("evaluate", out).code == 0
    assert tessera("sample", out, "--count", "1", "--out", tmp_path / "samples").code == 0
    assert (tmp_path / "samples/0000.wav").stat().st_size > 1000


def test_a_missing_folder_gives_an_error_and_no_run(tmp_path: Path) -> None:
    message = run_invalid(
        "train", "audio-codec", "--codec", tmp_path / "nowhere", "--out", tmp_path / "run"
    )
    assert "there is no folder" in message and not (tmp_path / "run").exists()
