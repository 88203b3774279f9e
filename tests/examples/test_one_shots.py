"""examples/one_shots.py, with a few files instead of the downloaded package."""

from __future__ import annotations

import importlib.util
import json
import sys
from io import BytesIO
from pathlib import Path, PurePosixPath
from types import ModuleType

import numpy as np
import pytest
import soundfile

from tessera.data.split import group_names
from tessera.modalities.audio.dataset import AudioDataConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_shots.py"


@pytest.fixture
def one_shots(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    spec = importlib.util.spec_from_file_location("one_shots_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def flac(seconds: float) -> bytes:
    buffer = BytesIO()
    tone = np.sin(np.arange(round(44_100 * seconds)) / 9)
    soundfile.write(buffer, 0.5 * tone, 44_100, format="FLAC")
    return buffer.getvalue()


def entries(folder: str, files: dict[str, bytes]) -> list[tuple[PurePosixPath, bytes]]:
    return [(PurePosixPath(folder) / name, data) for name, data in files.items()]


def test_one_shots_have_captions_and_kinds(one_shots: ModuleType, tmp_path: Path) -> None:
    sonic_pi = {
        "drum_cowbell.flac": flac(0.3),
        "tabla_na_s.flac": flac(0.2),
        "loop_amen.flac": flac(1.0),
        "perc_broken.flac": b"fLaC",
        "../../escape.flac": flac(0.2),
        "README.md": b"text",
    }
    kits = {"Kit 1.0/EE Snare_1.flac": flac(0.2), "Kit 1.0/drumkit.xml": b"<xml/>"}
    lmms = {"basses/bass01.ogg": flac(0.2), "beats/break01.ogg": flac(1.0)}
    files = {
        one_shots.SONIC_PI: entries("usr/share/sonic-pi/samples", sonic_pi),
        one_shots.HYDROGEN: entries("usr/share/hydrogen/data/drumkits", kits),
        one_shots.LMMS: entries("usr/share/lmms/samples", lmms),
    }
    out = tmp_path / "out"
    train, test = one_shots.write_sets(files, out)
    assert (train, test) == (4, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert {path.name for path in out.iterdir()} == {"train", "test", "CREDITS.md"}
    names = {path.name for path in out.rglob("*.*") if path.suffix in (".flac", ".ogg")}
    assert names == {
        "drum_cowbell.flac",
        "tabla_na_s.flac",
        "escape.flac",
        "kit_1_0_ee_snare_1.flac",
        "basses_bass01.ogg",
    }
    lines = [
        json.loads(line)
        for part in ("train", "test")
        for line in (out / part / "metadata.jsonl").read_text().splitlines()
    ]
    drum = {"file_name": "drum_cowbell.flac", "text": "drum cowbell", "kind": "drum"}
    assert drum in lines
    dataset = AudioDataConfig(path=str(out / "train")).full()
    assert len(dataset) == 4 and "kit 1 0 ee snare 1" in [dataset.caption(i) for i in range(4)]
    assert {"basses", "kit_1_0"} <= set(group_names(dataset.files, "kind"))


def test_only_sounds_of_sonic_pi_are_held_out(one_shots: ModuleType, tmp_path: Path) -> None:
    sound = flac(0.05)
    own = {f"tone_{number}.flac": sound for number in range(60)}
    kits = {f"kit/tom_{number}.flac": sound for number in range(60)}
    files = {
        one_shots.SONIC_PI: entries("usr/share/sonic-pi/samples", own),
        one_shots.HYDROGEN: entries("usr/share/hydrogen/data/drumkits", kits),
    }
    train, test = one_shots.write_sets(files, tmp_path)
    assert train + test == 120 and 1 <= test <= 15
    held_out = {path.name for path in (tmp_path / "test").glob("*.flac")}
    assert all(name.startswith("tone_") for name in held_out)
    assert not held_out & {path.name for path in (tmp_path / "train").glob("*.flac")}
