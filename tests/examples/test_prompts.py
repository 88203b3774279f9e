"""examples/prompts.py, with small archives instead of the downloaded packages."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path, PurePosixPath

import av
import numpy as np
import pytest

from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.media import Audio

EXAMPLE = Path(__file__).parents[2] / "examples" / "prompts.py"
VOICE = "usr/share/asterisk/sounds/en_US_f_Allison"
TEXT = """; a comment: not a prompt
hello: Hello,   world!
digits/1: one
beep: [a simple beep tone]
silence/1: (1 second of silence)
missing: This prompt has no audio.
broken: This audio is broken.
"""


@pytest.fixture
def prompts(monkeypatch):
    """The example as a module; it imports examples/debian.py, as the script does."""
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    spec = importlib.util.spec_from_file_location("prompts_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def g722(hertz: float = 440.0, seconds: float = 0.2) -> bytes:
    """Encode a tone as G.722: two samples per byte, and no header."""
    samples = (
        8000 * np.sin(2 * np.pi * hertz * np.arange(round(16_000 * seconds)) / 16_000)
    ).astype(np.int16)
    encoder = av.CodecContext.create("g722", "w")
    encoder.sample_rate, encoder.layout, encoder.format = 16_000, "mono", "s16"
    frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
    frame.rate = 16_000
    return b"".join(bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)])


def files(**data: bytes) -> list[tuple[PurePosixPath, bytes]]:
    return [(PurePosixPath(name), content) for name, content in data.items()]


def transcripts(prompts, text: str = TEXT) -> dict[str, str]:
    path = "usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz"
    return prompts.read_transcripts(
        files(**{path: gzip.compress(text.encode()), "usr/share/doc/other.txt": b"a: b"})
    )


def test_transcripts_are_those_of_speech_only(prompts):
    expected = {
        "hello": "Hello, world!",
        "digits/1": "one",
        "missing": "This prompt has no audio.",
        "broken": "This audio is broken.",
    }
    assert transcripts(prompts) == expected
    latin = files(**{"core-sounds-fr.txt": "un: déjà".encode("latin-1")})
    assert prompts.read_transcripts(latin) == {"un": "déjà"}


def test_prompts_become_audio_files_with_transcripts(tmp_path, prompts, capsys):
    entries = files(
        **{
            f"./{VOICE}/hello.g722": g722(),
            f"./{VOICE}/digits/1.g722": g722(880),
            f"./{VOICE}/beep.g722": g722(),
            f"./{VOICE}/unlisted.g722": g722(),
            f"./{VOICE}/broken.g722": b"",
            "./usr/share/doc/readme": b"hello",
        }
    )
    out = tmp_path / "out"
    lines = prompts.write_prompts(entries, transcripts(prompts), "en", out)
    prompts.write_metadata(lines, ["en"], out)
    written = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    assert written == ["CREDITS.md", "en/digits-1.flac", "en/hello.flac", "metadata.jsonl"]
    assert [json.loads(line) for line in (out / "metadata.jsonl").read_text().splitlines()] == [
        {"file_name": "en/digits-1.flac", "text": "one"},
        {"file_name": "en/hello.flac", "text": "Hello, world!"},
    ]
    assert "CC-BY-SA-3.0" in (out / "CREDITS.md").read_text()
    assert "skipped en/broken.flac: " in capsys.readouterr().out
    audio = Audio.load(out / "en" / "hello.flac")
    assert (audio.rate_hz, audio.samples.shape) == (16_000, (1, 3200))
    assert abs(np.fft.rfft(audio.samples[0])).argmax() == 440 * 3200 // 16_000


def test_the_written_folder_is_a_dataset(tmp_path, prompts):
    entries = files(**{f"{VOICE}/hello.g722": g722(), f"{VOICE}/digits/1.g722": g722(880)})
    lines = prompts.write_prompts(entries, transcripts(prompts), "en", tmp_path)
    prompts.write_metadata(lines, ["en"], tmp_path)
    dataset = AudioDataConfig(path=str(tmp_path), seconds=0.1).full()
    assert [dataset.item(i, np.random.default_rng(0)).caption for i in range(2)] == [
        "one",
        "Hello, world!",
    ]


def test_an_archive_cannot_write_outside_the_folder(tmp_path, prompts):
    names = ["../../evil", "/evil", "..\\evil", "..", "a/../../../b"]
    known = {prompts.prompt_name(PurePosixPath(f"{VOICE}/{name}.g722")): "evil" for name in names}
    entries = [(PurePosixPath(f"{VOICE}/{name}.g722"), g722()) for name in names] + files(
        **{"../../../x.g722": g722()}
    )
    prompts.write_prompts(entries, {**known, "../../../x": "evil"}, "en", tmp_path / "deep" / "out")
    written = [
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    ]
    assert written and all(Path(path).parent.as_posix() == "deep/out/en" for path in written)
