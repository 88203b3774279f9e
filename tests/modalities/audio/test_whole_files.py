"""Whole recordings: codes of all of a file, audio from codes, and files that a codec rebuilds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from tessera.api.tokenizer import Tokenizer
from tessera.data.tokens import INDEX, StoredTokens, read_tokens
from tessera.modalities.audio import dataset as audio_dataset
from tessera.modalities.audio import reconstruction
from tessera.modalities.audio.media import Audio
from tests.cli_runner import run_invalid, tessera

RATE_HZ, HOP = 8_000, 20


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for recipe in ("audio-codec", "audio-semantic"):
        flags = ("--preset", "tiny", "--steps", "3", "--data.num-synthetic", "8")
        result = tessera("train", recipe, *flags, "--out", folder / recipe)
        assert result.code == 0, result
    return folder


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 2.5 s at 8 kHz, 3 s at 16 kHz as FLAC and 2 s at 44.1 kHz as MP3 and OGG."""
    folder = tmp_path_factory.mktemp("recordings")
    (folder / "speaker").mkdir()
    for name, seconds, rate_hz in (
        ("a.wav", 2.5, 8_000),
        ("speaker/b.flac", 3.0, 16_000),
        ("c.mp3", 2.0, 44_100),
        ("c.ogg", 2.0, 44_100),
    ):
        time = np.arange(round(seconds * rate_hz)) / rate_hz
        tone = 0.4 * np.sin(2 * np.pi * 330 * time) * np.sin(3 * time) ** 2
        Audio(tone[None].astype(np.float32), rate_hz).write(folder / name)
    return folder


def tokenize(run: Path, data: Path, out: Path, *flags: object) -> StoredTokens:
    result = tessera("tokenize", run, "--data", data, "--out", out, *flags)
    assert result.code == 0, result
    return read_tokens(out, Tokenizer.load(run).fingerprint)


def test_codes_of_a_recording_are_those_of_the_whole(
    runs: Path, recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of 3,001 samples end within frames, and change nothing."""
    monkeypatch.setattr(audio_dataset.AudioFolderDataset, "piece_length", 3_001)
    for recipe in ("audio-codec", "audio-semantic"):
        tokenizer = Tokenizer.load(runs / recipe)
        flags = ("--num-workers", "0")
        stored = tokenize(runs / recipe, recordings, tmp_path / recipe, *flags)
        assert stored.names == ["a.wav", "c.mp3", "c.ogg", "speaker/b.flac"]
        for name, row, extent in zip(stored.names, stored.rows, stored.extents, strict=True):
            whole = tokenizer.encode(recordings / name)[0]
            assert extent.rate_hz == RATE_HZ
            assert extent.seconds == pytest.approx(Audio.load(recordings / name).seconds, abs=0.06)
            if not name.startswith("c."):  # resampled compressed files may end a little later
                assert torch.equal(row, whole), name
            assert len(row) >= 2 * RATE_HZ // tokenizer.hop


def test_models_without_chunks_encode_long_recordings_in_parts(
    runs: Path, recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconstruction, "MAX_WHOLE_SAMPLES", 7_000)
    monkeypatch.setattr(audio_dataset.AudioFolderDataset, "piece_length", 3_001)
    run = runs / "audio-semantic"
    stored = tokenize(run, recordings / "a.wav", tmp_path / "codes", "--num-workers", "0")
    [row] = stored.rows
    [whole] = Tokenizer.load(run).encode(recordings / "a.wav")
    assert row.shape == whole.shape
    assert (row == whole).float().mean() > 0.8, "only frames at the ends of parts may differ"


def test_decoded_audio_has_the_length_and_name_of_its_original(
    runs: Path, recordings: Path, tmp_path: Path
) -> None:
    run = runs / "audio-codec"
    stored = tokenize(run, recordings, tmp_path / "codes")
    result = tessera("decode", run, tmp_path / "codes", "--out", tmp_path / "decoded")
    assert result.code == 0 and "4 of 4 examples" in result.out, result
    tokenizer = Tokenizer.load(run)
    for name, row, extent in zip(stored.names, stored.rows, stored.extents, strict=True):
        decoded = Audio.load(tmp_path / "decoded" / name)
        assert decoded.rate_hz == RATE_HZ
        if not name.endswith(("mp3", "ogg")):  # lossy encoders add a little silence
            assert decoded.samples.shape[1] == extent.length
            whole = tokenizer.decode(row)[0, :, : extent.length].numpy()
            assert abs(decoded.samples - whole).max() < 1e-3


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3"])
def test_format_of_decoded_audio_can_be_chosen(
    suffix: str, runs: Path, recordings: Path, tmp_path: Path
) -> None:
    run = runs / "audio-codec"
    tokenize(run, recordings / "a.wav", tmp_path / "codes")
    out = tmp_path / "decoded"
    assert tessera("decode", run, tmp_path / "codes", "--out", out, "--format", suffix).code == 0
    single = tmp_path / f"one.{suffix}"
    assert tessera("decode", run, tmp_path / "codes", "--out", single).code == 0
    for path in (out / f"a.{suffix}", single):
        assert soundfile.info(path).format == suffix.upper()
        assert Audio.load(path).seconds == pytest.approx(2.5, abs=0.2)


def test_files_in_formats_that_cannot_be_written_are_errors_and_no_folders(
    runs: Path, recordings: Path, tmp_path: Path
) -> None:
    run, codes = runs / "audio-codec", tmp_path / "codes"
    tokenize(run, recordings / "a.wav", codes)
    message = run_invalid("decode", run, codes, "--out", tmp_path / "one.aac")
    assert "one.aac ends in .aac, but the formats that can be written are .wav, .flac, " in message
    flags = ("--out", tmp_path / "one.mp3", "--format", "wav")
    assert "one.mp3 ends in .mp3, but --format is wav" in run_invalid("decode", run, codes, *flags)
    assert not list(tmp_path.glob("one.*"))


def test_folders_with_a_dot_in_their_names_are_folders(
    runs: Path, recordings: Path, tmp_path: Path
) -> None:
    run, codes = runs / "audio-codec", tmp_path / "codes"
    tokenize(run, recordings / "a.wav", codes)
    (tmp_path / "old.aac").mkdir()
    for out in (tmp_path / "out" / "v1.2", tmp_path / "old.aac"):
        assert tessera("decode", run, codes, "--out", out).code == 0
        assert (out / "a.wav").is_file()


def test_files_of_equal_stems_do_not_overwrite_each_other(
    runs: Path, recordings: Path, tmp_path: Path
) -> None:
    run, out = runs / "audio-codec", tmp_path / "decoded"
    tokenize(run, recordings, tmp_path / "codes")
    assert tessera("decode", run, tmp_path / "codes", "--out", out, "--format", "wav").code == 0
    names = {path.relative_to(out).as_posix() for path in out.rglob("*.wav")}
    assert names == {"a.wav", "c.wav", "c.ogg.wav", "speaker/b.wav"}


def test_codec_rebuilds_whole_files_and_parts_of_them(
    runs: Path, recordings: Path, tmp_path: Path
) -> None:
    run, whole, cut = runs / "audio-codec", tmp_path / "whole", tmp_path / "cut"
    assert tessera("sample", run, "--data", recordings, "--out", whole).code == 0
    assert Audio.load(whole / "a.wav").seconds == 2.5
    assert Audio.load(whole / "speaker/b.flac").seconds == 3.0
    assert (whole / "sheet.png").is_file()
    settings = json.loads((whole / "settings.json").read_text())
    assert settings["files"] == ["a.wav", "c.mp3", "c.ogg", "speaker/b.flac"]
    flags = ("--start", "1.5", "--seconds", "0.75", "--format", "flac", "--out", cut)
    assert tessera("sample", run, "--data", recordings / "a.wav", *flags).code == 0
    assert Audio.load(cut / "a.flac").samples.shape == (1, 6_000)
    part = tokenize(run, recordings / "a.wav", tmp_path / "part", *flags[:4])
    assert part.rows[0].shape == (6_000 // HOP, 2) and part.extents[0].length == 6_000


def test_gain_of_a_recording_is_the_same_in_all_pieces(
    recordings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = audio_dataset.AudioDataConfig(
        path=str(recordings / "a.wav"), rate_hz=RATE_HZ, loudness_db=-20.0
    )
    [dataset] = [config.full()]
    assert isinstance(dataset, audio_dataset.AudioFolderDataset)
    whole = config.example_from_file(str(recordings / "a.wav")).samples
    pieces = [dataset.load_piece(0, start, 4_000).samples for start in range(0, 20_000, 4_000)]
    assert abs(np.concatenate(pieces, axis=1) - whole).max() < 1e-6


def test_damaged_recording_is_encoded_up_to_the_damage_and_reported(
    runs: Path, tmp_path: Path
) -> None:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 40_000)
    soundfile.write(tmp_path / "noise.flac", noise, RATE_HZ)
    content = (tmp_path / "noise.flac").read_bytes()
    (tmp_path / "noise.flac").write_bytes(content[: len(content) // 2])
    run, codes = runs / "audio-codec", tmp_path / "codes"
    result = tessera("tokenize", run, "--data", tmp_path / "noise.flac", "--out", codes)
    assert result.code == 0 and "noise.flac ends after" in result.err, result
    [extent] = read_tokens(codes, Tokenizer.load(run).fingerprint).extents
    assert 1 < extent.seconds < 4


def test_recording_that_was_cut_short_is_reported(runs: Path, tmp_path: Path) -> None:
    Audio(np.full((1, 40_000), 0.1, np.float32), RATE_HZ).write(tmp_path / "cut.wav")
    content = (tmp_path / "cut.wav").read_bytes()
    (tmp_path / "cut.wav").write_bytes(content[: 44 + 2 * 10_000])
    run, data = runs / "audio-codec", ("--data", tmp_path / "cut.wav")
    notice = "cut.wav ends after 1.25 of 5.00 s"
    assert notice in tessera("tokenize", run, *data, "--out", tmp_path / "codes").err
    assert notice in tessera("sample", run, *data, "--out", tmp_path / "whole").err
    part = tessera("sample", run, *data, "--seconds", "1", "--out", tmp_path / "part")
    assert part.code == 0 and "ends after" not in part.err


def test_several_recordings_are_not_decoded_to_one_file(
    runs: Path, recordings: Path, tmp_path: Path
) -> None:
    run, codes = runs / "audio-codec", tmp_path / "codes"
    tokenize(run, recordings, codes)
    message = run_invalid("decode", run, codes, "--out", tmp_path / "all.mp3")
    assert "all.mp3 is the name of a file, but there are 4 examples" in message
    assert not (tmp_path / "all.mp3").exists()


def test_invalid_requests_for_whole_files_have_messages(
    runs: Path, recordings: Path, tmp_path: Path
) -> None:
    codec, semantic, codes = runs / "audio-codec", runs / "audio-semantic", tmp_path / "codes"
    tokenize(codec, recordings / "a.wav", codes)
    out = ("--out", tmp_path / "out")
    assert "another tokenizer" in run_invalid("decode", semantic, codes, *out)
    assert "no index.json" in run_invalid("decode", codec, recordings, *out)
    assert "give one of them: codes" in run_invalid("decode", codec, tmp_path, *out)
    assert "its formats are wav, flac, ogg, mp3" in run_invalid(
        "decode", codec, codes, *out, "--format", "m4a"
    )
    data = ("--data", recordings / "a.wav")
    assert "--start must be at least 0" in run_invalid(
        "tokenize", codec, *data, *out, "--start", "-1"
    )
    assert "--seconds must be above 0" in run_invalid(
        "sample", codec, *data, *out, "--seconds", "0"
    )
    result = tessera("tokenize", codec, *data, *out, "--start", "9")
    assert result.code == 2 and "it has 2.50 s, but --start is 9" in result.err


def test_names_that_lead_out_of_the_folder_are_rejected(
    runs: Path, recordings: Path, tmp_path: Path
) -> None:
    codec, codes = runs / "audio-codec", tmp_path / "codes"
    tokenize(codec, recordings / "a.wav", codes)
    index = json.loads((codes / INDEX).read_text())
    (codes / INDEX).write_text(json.dumps(index | {"names": ["../../a.wav"]}))
    message = run_invalid("decode", codec, codes, "--out", tmp_path / "out")
    assert "leads out of the output folder" in message
