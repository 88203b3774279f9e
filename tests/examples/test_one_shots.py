"""examples/one_shots.py, with a few files instead of the downloaded package."""

from __future__ import annotations

import importlib.util
import json
from io import BytesIO
from pathlib import Path, PurePosixPath
from types import ModuleType

import numpy as np
import pytest
import soundfile

from tessera.data.split import group_names
from tessera.modalities.audio.dataset import AudioDataConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_shots.py"
FOLDER = "usr/share/sonic-pi/samples"


@pytest.fixture
def one_shots(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    spec = importlib.util.spec_from_file_location("one_shots_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flac(seconds: float) -> bytes:
    buffer = BytesIO()
    tone = np.sin(np.arange(round(44_100 * seconds)) / 9)
    soundfile.write(buffer, 0.5 * tone, 44_100, format="FLAC")
    return buffer.getvalue()


def test_one_shots_have_captions_and_kinds(one_shots: ModuleType, tmp_path: Path) -> None:
    files = {
        "drum_cowbell.flac": flac(0.3),
        "tabla_na_s.flac": flac(0.2),
        "loop_amen.flac": flac(1.0),
        "perc_broken.flac": b"fLaC",
        "../../escape.flac": flac(0.2),
        "README.md": b"text",
    }
    entries = [(PurePosixPath(FOLDER) / name, data) for name, data in files.items()]
    assert one_shots.write_one_shots(entries, tmp_path / "out") == 3
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"drum_cowbell.flac", "tabla_na_s.flac", "escape.flac", "CREDITS.md"}
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    lines = (tmp_path / "out/metadata.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {
        "file_name": "drum_cowbell.flac",
        "text": "drum cowbell",
        "kind": "drum",
    }
    dataset = AudioDataConfig(path=str(tmp_path / "out")).full()
    assert len(dataset) == 3 and dataset.caption(2) == "tabla na s"
    assert group_names(dataset.files, "kind") == ["drum", "escape", "tabla"]
