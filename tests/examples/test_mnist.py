"""examples/mnist.py and examples/photos.py, with small inputs instead of the downloaded ones."""

from __future__ import annotations

import importlib
import struct
import sys
from pathlib import Path, PurePosixPath
from types import ModuleType

import numpy as np
import PIL.Image
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module(request.param)
    monkeypatch.delitem(sys.modules, request.param)
    return module


def idx(values: np.ndarray) -> bytes:
    shape = struct.pack(f">{values.ndim}i", *values.shape)
    return bytes([0, 0, 8, values.ndim]) + shape + values.astype(np.uint8).tobytes()


@pytest.mark.parametrize("example", ["mnist"], indirect=True)
def test_digits_are_written_into_a_folder_per_class(tmp_path: Path, example: ModuleType) -> None:
    images = np.arange(3 * 28 * 28).reshape(3, 28, 28) % 251
    entries = [
        (PurePosixPath(f"package/data/{prefix}-{kind}"), idx(values))
        for prefix in ("train", "t10k")
        for kind, values in (
            ("images-idx3-ubyte", images),
            ("labels-idx1-ubyte", np.array([7, 0, 7])),
        )
    ]
    files = example.read_files(iter([*entries, (PurePosixPath("package/index.js"), b"")]))
    assert example.write_dataset(files, example.DIGITS, tmp_path) == 6
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.png"))
    assert written[:3] == ["test/seven/00000.png", "test/seven/00002.png", "test/zero/00001.png"]
    with PIL.Image.open(tmp_path / "train/zero/00001.png") as image:
        assert image.mode == "L"
        np.testing.assert_array_equal(np.asarray(image), images[1])


@pytest.mark.parametrize("example", ["mnist"], indirect=True)
def test_a_file_that_is_not_idx_is_an_error(example: ModuleType) -> None:
    with pytest.raises(ValueError, match="No IDX file of bytes"):
        example.parse_idx(b"\x89PNG")


@pytest.mark.parametrize("example", ["photos"], indirect=True)
def test_tiles_without_contrast_are_skipped(tmp_path: Path, example: ModuleType) -> None:
    pixels = np.zeros((example.SHORT_SIDE, 2 * example.SHORT_SIDE, 3), np.uint8)
    pixels[:, example.SHORT_SIDE :: 2] = 255  # stripes on the right half
    count = example.write_tiles(PIL.Image.fromarray(pixels), tmp_path, "000")
    assert count == 36 == len(list(tmp_path.glob("000-*.png")))
    with PIL.Image.open(next(tmp_path.iterdir())) as tile:
        assert tile.size == (example.TILE, example.TILE)
