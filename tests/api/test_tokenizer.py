"""Tests of `Tokenizer`: everything that `encode` accepts has the codes of the same content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor

from tessera import Tokenizer
from tessera.data.loader import EvalLoader
from tessera.modalities.audio.media import Audio
from tessera.modalities.image.media import Image
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.synthetic import generate_object
from tessera.modalities.video.media import Video
from tessera.run.errors import UserError
from tests.runs import tiny_dependency


def write_image(path: Path, seed: int) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 30, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(path.with_suffix(".png"))
    return path.with_suffix(".png")


def write_video(path: Path, seed: int) -> Path:
    """Write a lossless animation, so that it can be compared with its frames."""
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 256, (12, 24, 30, 3), dtype=np.uint8)
    first, *others = [PIL.Image.fromarray(frame) for frame in frames]
    path = path.with_suffix(".webp")
    first.save(path, save_all=True, append_images=others, duration=100, lossless=True)
    return path


def write_audio(path: Path, seed: int) -> Path:
    """Write audio that is shorter than an example of the tiny preset."""
    samples = np.random.default_rng(seed).uniform(-0.5, 0.5, (1, 2000 - 450 * seed))
    return Audio(samples.astype(np.float32), 8000).write(path.with_suffix(".wav"))


def write_mesh(path: Path, seed: int) -> Path:
    mesh = generate_object(0, seed).mesh
    return Mesh(mesh.vertices, mesh.triangles()).save(path.with_suffix(".obj"))


@dataclass(frozen=True)
class Case:
    recipe: str
    write: Callable[[Path, int], Path]
    load: Callable[[Path], Any]
    to_array: Callable[[Any], Any]
    to_tensor: Callable[[Tokenizer, Path], Any]


def load_tensor(tokenizer: Tokenizer, path: Path) -> Tensor:
    """Return a preprocessed file as the model input, (1, ...)."""
    batch = tokenizer.data.collate([tokenizer.data.example_from_file(str(path))])
    return tokenizer.network.adapter.target(batch)


def load_mesh_tensors(tokenizer: Tokenizer, path: Path) -> tuple[Tensor, Tensor]:
    mesh = Mesh.load(path)
    return torch.from_numpy(mesh.vertices), torch.from_numpy(mesh.faces)


CASES = {
    "image": Case("images-vqgan", write_image, Image.load, lambda one: one.pixels, load_tensor),
    "video": Case("videos-magvit2", write_video, Video.load, lambda one: one.frames, load_tensor),
    "audio": Case("audio-codec", write_audio, Audio.load, lambda one: one.samples, load_tensor),
    "mesh": Case(
        "meshes-autoencoder",
        write_mesh,
        Mesh.load,
        lambda one: (one.vertices, one.faces),
        load_mesh_tensors,
    ),
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def tokenizer(case: Case) -> Tokenizer:
    return Tokenizer.load(tiny_dependency(case.recipe))


def encode_folder(tokenizer: Tokenizer, folder: Path) -> dict[str, Tensor]:
    """Return the codes of the files of a folder, as the command line computes them."""
    data = type(tokenizer.data)(**(vars(tokenizer.data) | {"path": str(folder)}))
    batches = tokenizer.with_data(data).encode_dataset(data.full(captions=False), batch_size=2)
    return {
        name: row for batch, codes in batches for name, row in zip(batch.names, codes, strict=True)
    }


# ---- inputs of encode


def test_path_medium_array_and_tensor_have_the_same_codes(case, tokenizer, tmp_path):
    path = case.write(tmp_path / "a", 0)
    codes = tokenizer.encode(path)
    assert codes.dtype == torch.int64 and len(codes) == 1 and not codes.requires_grad
    assert 0 <= codes.max() < tokenizer.vocab_size
    medium = case.load(path)
    inputs = {
        "text path": str(path),
        "medium": medium,
        "array": case.to_array(medium),
        "tensor": case.to_tensor(tokenizer, path),
        "list": [path],
    }
    different = [
        name for name, one in inputs.items() if not torch.equal(tokenizer.encode(one), codes)
    ]
    assert different == []


# The same content as bytes or floats, of one example or of several, first as it is decoded.
IMAGES = {
    "uint8 array": lambda one: one.pixels,
    "float array": lambda one: one.to_floats(),
    "float array, channels last": lambda one: one.to_floats().transpose(1, 2, 0),
    "uint8 tensor": lambda one: torch.tensor(one.pixels).permute(2, 0, 1),
    "uint8 tensor, channels last": lambda one: torch.tensor(one.pixels),
    "float tensor": lambda one: torch.tensor(one.to_floats()),
    "PIL image": lambda one: one.to_pillow(),
    "batch of bytes": lambda one: one.pixels[None],
    "batch of floats": lambda one: one.to_floats()[None],
    "batch of uint8 tensors": lambda one: torch.tensor(one.pixels).permute(2, 0, 1)[None],
    "list of tensors": lambda one: [torch.tensor(one.to_floats())],
}
VIDEOS = {
    "uint8 array": lambda one: one.frames,
    "float array": lambda one: one.to_floats(),
    "uint8 tensor": lambda one: torch.tensor(one.frames).permute(3, 0, 1, 2),
    "float tensor": lambda one: torch.tensor(one.to_floats()),
    "batch of bytes": lambda one: one.frames[None],
    "batch of uint8 tensors": lambda one: torch.tensor(one.frames).permute(3, 0, 1, 2)[None],
}
SOUNDS = {
    "float array": lambda one: one.samples[0],
    "doubles": lambda one: one.samples.astype(np.float64),
    "int16": lambda one: np.rint(one.samples * 2**15).astype(np.int16),
    "float tensor": lambda one: torch.tensor(one.samples[0]),
    "batch of floats": lambda one: one.samples[None],
    "batch of double tensors": lambda one: torch.tensor(one.samples[None]).double(),
}
FORMS = {"image": IMAGES, "video": VIDEOS, "audio": SOUNDS}


@pytest.mark.parametrize("modality", FORMS)
def test_bytes_and_floats_have_the_same_codes(modality, tmp_path):
    case = CASES[modality]
    tokenizer = Tokenizer.load(tiny_dependency(case.recipe))
    medium = case.load(case.write(tmp_path / "a", 0))
    expected = tokenizer.encode(medium)
    different = [
        name
        for name, convert in FORMS[modality].items()
        if not torch.equal(tokenizer.encode(convert(medium)), expected)
    ]
    assert different == []


@pytest.mark.parametrize("modality", FORMS)
def test_an_array_of_several_examples_has_a_row_for_each(modality, tmp_path):
    case = CASES[modality]
    tokenizer = Tokenizer.load(tiny_dependency(case.recipe))
    one = case.load(case.write(tmp_path / "a", 0))
    array = case.to_array(one)
    both = tokenizer.encode(np.stack([array, array[..., ::-1]]))
    assert len(both) == 2 and torch.equal(both[:1], tokenizer.encode(one))
    assert torch.equal(both[1:], tokenizer.encode(np.ascontiguousarray(array[..., ::-1])))


def test_floats_of_the_right_size_are_not_rounded(tmp_path):
    """They give the codes of the same tensor, also where bytes would not."""
    for modality in ("image", "video"):
        tokenizer = Tokenizer.load(tiny_dependency(CASES[modality].recipe))
        target = load_tensor(tokenizer, CASES[modality].write(tmp_path / modality, 0))
        example = tokenizer.load_example((target[0] * 0.9987).numpy())
        stacked = tokenizer.network.adapter.target(tokenizer.data.collate([example]))
        assert torch.equal(stacked, target * 0.9987)


def test_grey_and_transparent_images_are_converted():
    tokenizer = Tokenizer.load(tiny_dependency("images-vqgan"))
    levels = np.random.default_rng(0).integers(0, 256, (20, 20), dtype=np.uint8)
    grey = levels[..., None].repeat(3, axis=2)
    opaque = np.concatenate([grey, np.full((20, 20, 1), 255, np.uint8)], axis=2)
    forms = [levels, levels[..., None], opaque, PIL.Image.fromarray(levels)]
    assert all(torch.equal(tokenizer.encode(one), tokenizer.encode(grey)) for one in forms)


def test_pil_image_is_rotated_as_its_file(tmp_path):
    tokenizer = Tokenizer.load(tiny_dependency("images-vqgan"))
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "photo.png"
    with PIL.Image.open(write_image(tmp_path / "a", 0)) as image:
        image.save(path, exif=exif)
    with PIL.Image.open(path) as image:
        assert torch.equal(tokenizer.encode(image), tokenizer.encode(path))


def test_list_has_one_row_for_each_of_its_members(case, tokenizer, tmp_path):
    first, second = (case.write(tmp_path / name, seed) for seed, name in enumerate("ab"))
    medium = case.load(second)
    mixed = tokenizer.encode([first, medium, case.to_array(medium), str(first)])
    assert len(mixed) == 4
    assert torch.equal(mixed[0], mixed[3]) and torch.equal(mixed[1], mixed[2])
    assert not torch.equal(mixed[0], mixed[1])
    for row, path in ((0, first), (1, second)):
        (single,) = tokenizer.encode(path)
        assert torch.equal(mixed[row, : len(single)], single)
        assert (mixed[row, len(single) :] == -1).all(), "shorter members are padded with -1"


def test_codes_are_those_of_a_folder(case, tokenizer, tmp_path):
    paths = [case.write(tmp_path / name, seed) for seed, name in enumerate("ab")]
    stored = encode_folder(tokenizer, tmp_path)
    assert list(stored) == [path.name for path in paths]
    for path in paths:
        (codes,) = tokenizer.encode(path)
        row = stored[path.name]
        assert torch.equal(row[: len(codes)], codes) and (row[len(codes) :] == -1).all()


def test_codes_can_be_decoded_to_media(case, tokenizer, tmp_path):
    path = case.write(tmp_path / "a", 0)
    codes = tokenizer.encode([path, path])
    media = tokenizer.to_media(codes)
    assert len(media) == 2 and all(isinstance(one, type(case.load(path))) for one in media)
    assert len(tokenizer.decode(codes)) == 2 and not tokenizer.decode(codes).requires_grad
    assert media[0].save(tmp_path / "out").exists()


def test_codes_of_one_example_can_be_decoded_from_an_array(case, tokenizer, tmp_path):
    codes = tokenizer.encode(case.write(tmp_path / "a", 0))
    expected = tokenizer.decode(codes)
    for given in (codes[0], codes.numpy(), codes[0].numpy(), codes.int(), codes[0].tolist()):
        assert torch.equal(tokenizer.decode(given), expected)
        assert len(tokenizer.to_media(given)) == 1
    for wrong, message in ((codes + tokenizer.vocab_size, "odes"), (codes.float(), "integers")):
        with pytest.raises(UserError, match=message):
            tokenizer.decode(wrong)


@pytest.mark.parametrize("modality", FORMS)
def test_decoded_media_are_in_range_and_can_be_encoded(modality, tmp_path):
    case = CASES[modality]
    tokenizer = Tokenizer.load(tiny_dependency(case.recipe))
    decode = tokenizer.model.decode
    tokenizer.model.decode = lambda codes: 9 * decode(codes)
    output = tokenizer.decode(tokenizer.encode(case.write(tmp_path / "a", 0)))
    assert output.abs().max() == 1 and len(tokenizer.encode(output)) == 1


def test_audio_is_encoded_as_a_whole(tmp_path):
    tokenizer = Tokenizer.load(tiny_dependency("audio-codec"))
    hop, length = tokenizer.hop, tokenizer.data.length
    assert hop is not None
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 3 * length + 1).astype(np.float32)
    path = Audio(noise[None], tokenizer.data.rate_hz).write(tmp_path / "long")
    for media in (path, noise):
        assert tokenizer.encode(media).shape[1] == 3 * length // hop + 1


def test_mesh_of_quads_is_encoded_as_triangles():
    tokenizer = Tokenizer.load(tiny_dependency("meshes-autoencoder"))
    quads = generate_object(0, 0).mesh
    triangles = Mesh(quads.vertices, quads.triangles())
    assert quads.faces.shape[1] == 4
    assert torch.equal(tokenizer.encode(quads), tokenizer.encode(triangles))


# ---- errors


@pytest.mark.parametrize("media", [None, 3, {"pixels": 1}, b"bytes", object])
def test_other_types_are_rejected(case, tokenizer, media):
    for given in (media, [media]):
        with pytest.raises(UserError, match=rf"^Expected an? .*, got a {type(media).__name__}\.$"):
            tokenizer.encode(given)


def test_array_of_another_shape_is_rejected(case, tokenizer):
    array = np.zeros((2, 2, 2, 2, 2), np.float32)
    with pytest.raises(UserError, match="shape|Expected a Mesh"):
        tokenizer.encode(array)


@pytest.mark.parametrize("modality", FORMS)
@pytest.mark.parametrize("factor", [3.0, 127.5, np.nan])
def test_floats_outside_of_the_range_are_rejected(modality, factor, tmp_path):
    case = CASES[modality]
    tokenizer = Tokenizer.load(tiny_dependency(case.recipe))
    path = case.write(tmp_path / "a", 0)
    target = load_tensor(tokenizer, path) * factor
    for given in (target, target[0], target.numpy(), target[0].numpy(), [target[0].numpy()]):
        with pytest.raises(UserError, match=r"Floats must be in \[-1, 1\], got values from "):
            tokenizer.encode(given)


@pytest.mark.parametrize(("modality", "channels"), [("image", 1), ("image", 4), ("audio", 2)])
def test_float_batch_with_other_channels_is_converted(modality, channels, tmp_path):
    case = CASES[modality]
    tokenizer = Tokenizer.load(tiny_dependency(case.recipe))
    first = load_tensor(tokenizer, case.write(tmp_path / "a", 0))[:, :1]
    batch = first.expand(2, channels, *first.shape[2:])
    expected = tokenizer.encode([row.numpy() for row in batch])
    assert torch.equal(tokenizer.encode(batch), expected)


def test_float_batch_of_images_may_have_its_channels_last(tmp_path):
    tokenizer = Tokenizer.load(tiny_dependency("images-vqgan"))
    batch = load_tensor(tokenizer, write_image(tmp_path / "a", 0))
    assert torch.equal(tokenizer.encode(batch.movedim(1, -1)), tokenizer.encode(batch))


def test_codes_with_a_wrong_number_of_dimensions_are_rejected(case, tokenizer, tmp_path):
    codes = tokenizer.encode(case.write(tmp_path / "a", 0))
    for given in (codes[None], codes.new_zeros(())):
        for decode in (tokenizer.decode, tokenizer.to_media):
            with pytest.raises(UserError, match=r"Codes must have \d dimensions, or \d for one"):
                decode(given)


def test_unreadable_file_is_rejected_by_name(case, tokenizer, tmp_path):
    path = case.write(tmp_path / "a", 0)
    path.write_bytes(b"dear reader")
    with pytest.raises(UserError, match=path.name):
        tokenizer.encode(path)
    with pytest.raises(UserError, match="nowhere"):
        tokenizer.encode(tmp_path / f"nowhere{path.suffix}")


def test_empty_list_is_rejected(case, tokenizer):
    with pytest.raises(UserError, match="nothing to encode"):
        tokenizer.encode([])


def test_single_tensor_is_not_a_mesh():
    tokenizer = Tokenizer.load(tiny_dependency("meshes-autoencoder"))
    message = r"Expected a Mesh, a path or a pair of arrays .*, got a Tensor\."
    with pytest.raises(UserError, match=message):
        tokenizer.encode(torch.zeros(1, 8, 3))


def test_run_of_a_generator_is_rejected():
    with pytest.raises(UserError, match="'music-mulan', which trains no tokenizer"):
        Tokenizer.load(tiny_dependency("music-mulan"))


# ---- properties


def test_fingerprint_depends_on_weights_and_preprocessing(case, tokenizer):
    again = Tokenizer.load(tiny_dependency(case.recipe))
    assert tokenizer.fingerprint == again.fingerprint
    assert tokenizer.info().fingerprint == tokenizer.fingerprint
    assert tokenizer.info().preprocessing == tokenizer.data.preprocessing()
    with torch.no_grad():
        next(again.model.parameters()).add_(1)
    changed = Tokenizer(again.trained)
    assert changed.fingerprint != tokenizer.fingerprint


def test_repr_names_the_run_and_its_codes(case, tokenizer):
    start = f"Tokenizer({tiny_dependency(case.recipe)!r}, recipe={case.recipe!r}, step="
    assert repr(tokenizer).startswith(start)
    assert f"grid={tokenizer.grid}, vocab_size={tokenizer.vocab_size}" in repr(tokenizer)


def test_model_can_be_moved_to_a_device(case):
    tokenizer = Tokenizer.load(tiny_dependency(case.recipe))
    assert tokenizer.to("meta") is tokenizer and tokenizer.device.type == "meta"


def test_grid_is_the_shape_of_the_codes_of_an_example(case, tokenizer):
    dataset = tokenizer.data.build(captions=False).validation
    batch = next(EvalLoader(dataset, seed=0, batch_size=2).batches())
    codes = tokenizer.encode_examples(batch.examples)
    assert codes.shape[1 : 1 + len(tokenizer.grid)] == tokenizer.grid
    quantizers = codes.shape[1 + len(tokenizer.grid) :]
    assert quantizers == (() if tokenizer.num_quantizers == 1 else (tokenizer.num_quantizers,))
