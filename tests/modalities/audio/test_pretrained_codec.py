"""Pretrained codecs have the interface of AudioCodec and the codes of their own library.

EnCodec and DAC are tiny and random here.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.pretrained_codec import PretrainedCodecConfig
from tessera.run.config import decode, encode

ENCODEC = {
    "sampling_rate": 8000,
    "hidden_size": 8,
    "num_filters": 4,
    "upsampling_ratios": [5, 4],
    "codebook_size": 16,
    "target_bandwidths": [1.6, 4.8],
    "num_lstm_layers": 1,
    "compress": 2,
}
DAC = {
    "sampling_rate": 8000,
    "encoder_hidden_size": 4,
    "downsampling_ratios": [4, 5],
    "decoder_hidden_size": 16,
    "n_codebooks": 3,
    "codebook_size": 16,
    "codebook_dim": 4,
}


@torch.no_grad()
def build_network(kind: str) -> transformers.PreTrainedModel:
    """Build a network whose codebooks are filled with latents.

    At initialization all codes of a codebook are nearly or exactly equal.
    """
    torch.manual_seed(0)
    if kind == "encodec":
        network = transformers.EncodecModel(transformers.EncodecConfig(**ENCODEC))
        residual = network.encoder(random_audio(count=8, seed=9))
        for layer in network.quantizer.layers:
            layer.codebook.embed.copy_(sample_latents(residual))
            residual = residual - layer.decode(layer.encode(residual))
    else:
        network = transformers.DacModel(transformers.DacConfig(**DAC))
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        residual = network.encoder(random_audio(count=8, seed=9))
        for quantizer in network.quantizer.quantizers:
            quantizer.codebook.weight.copy_(sample_latents(quantizer.in_proj(residual)))
            residual = residual - quantizer(residual)[0]
    return network.eval()


def sample_latents(latent_BDT: Tensor) -> Tensor:
    return latent_BDT.mT.flatten(0, 1)[torch.randperm(len(latent_BDT) * latent_BDT.shape[2])[:16]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("codecs")
    for kind in ("encodec", "dac"):
        build_network(kind).save_pretrained(root / kind)
    return {kind: str(root / kind) for kind in ("encodec", "dac")}


every_kind = pytest.mark.parametrize("kind", ["encodec", "dac"])


def random_audio(samples: int = 400, count: int = 3, seed: int = 0) -> Tensor:
    return 0.5 * torch.randn(count, 1, samples, generator=torch.Generator().manual_seed(seed))


@dataclass
class AudioData:
    length: int
    rate_hz: int = 8000
    channels: int = 1
    check_mono = AudioDataConfig.check_mono


def run_library(kind: str, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (B, T, L) of transformers, and the audio that it decodes from them."""
    network = build_network(kind)
    with torch.no_grad():
        if kind == "encodec":
            encoded = network.encode(samples, bandwidth=4.8)
            decoded = network.decode(encoded.audio_codes, encoded.audio_scales)
            return encoded.audio_codes[0].mT, decoded.audio_values
        codes = network.encode(samples).audio_codes
        return codes.mT, network.decode(audio_codes=codes).audio_values[:, None]


@every_kind
def test_codes_and_audio_equal_those_of_transformers(kind, folders):
    codec = PretrainedCodecConfig(path=folders[kind]).build()
    codes, expected = run_library(kind, random_audio())
    assert torch.equal(codec.encode(random_audio()), codes) and codes.shape == (3, 20, 3)
    assert all(len(level.unique()) > 3 for level in codes.unbind(-1)), "codes are not constant"
    with torch.no_grad():
        audio = codec.decode(codes)
    assert audio.shape == (3, 1, 400)
    length = min(400, expected.shape[-1])
    torch.testing.assert_close(audio[..., :length], expected[..., :length], rtol=1e-4, atol=1e-5)


@every_kind
def test_hop_codebooks_and_token_grid(kind, folders):
    config = PretrainedCodecConfig(path=folders[kind])
    codec = config.build()
    assert (codec.hop, codec.num_quantizers, codec.vocab_size, codec.rate_hz) == (20, 3, 16, 8000)
    assert codec.quantizer.num_quantizers == 3
    assert not codec.quantizer.needs_global_stats and not codec.quantizer.has_quantizer_dropout
    assert config.grid(AudioData(400)) == (20,) and config.grid(AudioData(401)) == (21,)
    config.validate_data(AudioData(400))
    with pytest.raises(
        ValueError, match="16000 Hz, .*needs 8000 Hz: set rate_hz of the data to 8000"
    ):
        config.validate_data(AudioData(400, rate_hz=16_000))


@every_kind
@pytest.mark.parametrize("samples", [1, 19, 20, 21, 395])
def test_an_incomplete_frame_is_padded_with_zeros_and_cropped_again(kind, samples, folders):
    codec = PretrainedCodecConfig(path=folders[kind]).build()
    reconstruction = codec(random_audio(samples))
    assert reconstruction.output.shape == (3, 1, samples)
    assert reconstruction.codes.shape == (3, -(-samples // 20), 3)
    decoded = codec.decode(reconstruction.codes)
    assert torch.equal(decoded[..., :samples], reconstruction.output)
    assert reconstruction.penalties == {}


@every_kind
def test_a_padded_batch_equals_its_examples_one_by_one(kind, folders):
    codec = PretrainedCodecConfig(path=folders[kind]).build()
    lengths_B = torch.tensor([400, 130, 0])
    batch = codec(random_audio(), lengths_B)
    single = codec(random_audio()[1:2, :, :130])
    assert torch.equal(batch.codes[1, :7], single.codes[0])
    assert (batch.codes[1, 7:] == -1).all() and (batch.codes[2] == -1).all()
    torch.testing.assert_close(batch.output[1, :, :130], single.output[0], rtol=1e-4, atol=1e-5)
    assert not batch.output[1, :, 140:].any() and not batch.output[2].any()


@every_kind
def test_fewer_codebooks_can_be_decoded_or_encoded(kind, folders):
    codec = PretrainedCodecConfig(path=folders[kind]).build()
    codes = codec.encode(random_audio())
    with torch.no_grad():
        one, full = codec.decode(codes[..., :1]), codec.decode(codes)
        mixed = codec.decode(codes, num_quantizers_B=torch.tensor([1, 3, 1]))
    torch.testing.assert_close(mixed[[0, 2]], one[[0, 2]], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mixed[1], full[1], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(one, full, atol=1e-4)
    two = PretrainedCodecConfig(path=folders[kind], num_quantizers=2).build()
    assert two.num_quantizers == two.quantizer.num_quantizers == 2
    assert torch.equal(two.encode(random_audio()), codes[..., :2])


@every_kind
@pytest.mark.parametrize("training", [True, False])
def test_training_mode_changes_no_code_and_gradients_reach_only_the_decoder(
    kind, training, folders
):
    codec = PretrainedCodecConfig(path=folders[kind]).build().train(training)
    reconstruction = codec(random_audio())
    assert torch.equal(reconstruction.codes, run_library(kind, random_audio())[0])
    reconstruction.output.square().mean().backward()
    assert any(parameter.grad is not None for parameter in codec.network.decoder.parameters())
    assert all(parameter.grad is None for parameter in codec.network.encoder.parameters())


@every_kind
def test_a_checkpoint_replaces_the_original_folder(kind, folders, tmp_path):
    folder = tmp_path / "codec"
    shutil.copytree(folders[kind], folder)
    config = PretrainedCodecConfig(path=str(folder), num_quantizers=2)
    codec = config.build()
    shutil.rmtree(folder)
    stored = decode(PretrainedCodecConfig, encode(config))
    assert stored == config
    restored = stored.build()
    with torch.no_grad():
        audio = restored.decode(codec.encode(random_audio()))
        assert audio[..., :390].isnan().all(), "weights are NaN before a checkpoint is loaded"
        restored.load_state_dict(codec.state_dict())
        assert torch.equal(restored.encode(random_audio()), codec.encode(random_audio()))
        assert torch.equal(restored(random_audio()).output, codec(random_audio()).output)


def test_the_stored_configuration_has_no_path_or_version(folders):
    config = PretrainedCodecConfig(path=folders["dac"])
    assert folders["dac"] not in config.config_json and "version" not in config.config_json
    assert replace(config, num_quantizers=2).config_json == config.config_json


def test_unsupported_models_give_an_error(folders, tmp_path):
    with pytest.raises(ValueError, match="no folder ''"):
        PretrainedCodecConfig()
    with pytest.raises(ValueError, match="no folder .*nowhere"):
        PretrainedCodecConfig(path=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="num_quantizers must be 1 to 3 .*but got 4"):
        PretrainedCodecConfig(path=folders["dac"], num_quantizers=4)
    transformers.EncodecModel(
        transformers.EncodecConfig(
            **ENCODEC | {"audio_channels": 2}, normalize=True, chunk_length_s=1.0, overlap=0.01
        )
    ).save_pretrained(tmp_path / "stereo")
    with pytest.raises(ValueError, match="two channels.*24 kHz"):
        PretrainedCodecConfig(path=str(tmp_path / "stereo"))
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert/config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="is a bert, but only EnCodec and DAC"):
        PretrainedCodecConfig(path=str(tmp_path / "bert"))
    (tmp_path / "bert/config.json").write_text("{}")
    with pytest.raises(ValueError, match="could not be loaded.*The original error"):
        PretrainedCodecConfig(path=str(tmp_path / "bert"))


def test_an_incomplete_codec_gives_an_error(tmp_path):
    weights = {
        name: tensor
        for name, tensor in build_network("dac").state_dict().items()
        if "decoder" not in name
    }
    build_network("dac").save_pretrained(tmp_path / "half", state_dict=weights)
    with pytest.raises(ValueError, match="are missing.*Download it again"):
        PretrainedCodecConfig(path=str(tmp_path / "half")).build()
    Path(tmp_path / "half/model.safetensors").unlink()
    with pytest.raises(ValueError, match="could not be loaded.*safetensors"):
        PretrainedCodecConfig(path=str(tmp_path / "half")).build()


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (torch.zeros(2, 5, 4, dtype=torch.long), "codec with 3 quantizers"),
        (torch.zeros(2, 5, dtype=torch.long), "give .batch, frames, quantizers."),
        (torch.full((2, 5, 3), 16), "less than the codebook size of 16, but got 16"),
    ],
)
def test_codes_of_another_codec_give_an_error(codes, message, folders):
    with pytest.raises(ValueError, match=message):
        PretrainedCodecConfig(path=folders["dac"]).build().decode(codes)


def test_other_tensors_than_batches_of_audio_give_an_error(folders):
    codec = PretrainedCodecConfig(path=folders["dac"]).build()
    for tensor in (
        torch.zeros(2, 2, 100),
        torch.zeros(2, 100),
        torch.zeros(2, 1, 9, dtype=torch.long),
    ):
        with pytest.raises(ValueError, match=r"shape \(batch, 1, samples\)"):
            codec.encode(tensor)
    with pytest.raises(ValueError, match="0 samples cannot be tokenized"):
        codec.encode(torch.zeros(2, 1, 0))
