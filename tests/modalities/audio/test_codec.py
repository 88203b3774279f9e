"""The audio codec: encoding and decoding, whole or in chunks, causal, with residual quantizers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.metrics.audio import si_sdr_B
from tessera.modalities.audio.codec import AudioCodec, AudioCodecConfig
from tessera.modalities.audio.soundstream import SoundStreamConfig
from tessera.modalities.audio.spectral_codec import SpectralCodecConfig
from tessera.nn.causal_conv import StreamingState
from tessera.nn.quantize import FSQConfig, LFQConfig, ResidualConfig, VQConfig
from tessera.run.config import decode, encode
from tests.networks import perturb_weights
from tests.nn.test_quantize_vq import SingleProcess

LEVELS = ResidualConfig(quantizer=FSQConfig(levels=(4, 4, 4)), num_quantizers=3, dropout=0.5)
SOUNDSTREAM = SoundStreamConfig(
    dim=4, max_channels=8, strides=(2, 5), dilations=(1, 3), quantizer=LEVELS
)
SPECTRAL = SpectralCodecConfig(
    mdct_hop=5, dim=8, encoder_depth=1, decoder_depth=2, kernel_size=3, quantizer=LEVELS
)
NETWORKS: dict[str, AudioCodecConfig] = {"soundstream": SOUNDSTREAM, "spectral": SPECTRAL}
"""One frame is 10 samples in each."""


@pytest.fixture(params=NETWORKS)
def config(request) -> AudioCodecConfig:
    return NETWORKS[request.param]


QUANTIZERS = {
    "fsq": FSQConfig(levels=(4, 4, 4)),
    "lfq": LFQConfig(codebook_size=64),
    "vq": VQConfig(codebook_size=64, code_dim=4),
    "unnormalised vq": VQConfig(codebook_size=64, code_dim=4, normalised=False),
}
every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS)


def build_codec(config: AudioCodecConfig = SOUNDSTREAM, **settings: Any) -> AudioCodec:
    torch.manual_seed(0)
    return perturb_weights(replace(config, **settings).build()).eval().double()


def residual(kind: str) -> ResidualConfig:
    return ResidualConfig(quantizer=QUANTIZERS[kind], num_quantizers=3, dropout=0.5)


def random_audio(samples: int = 60, count: int = 2, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, samples, generator=generator, dtype=torch.float64) * 2 - 1


# ------------------------------------------------------------------------------- encode and decode


@every_quantizer
def test_decoding_the_codes_gives_exactly_the_reconstruction(config, quantizer):
    model = build_codec(config, quantizer=residual(quantizer))
    with torch.no_grad():
        reconstruction, codes = model(random_audio()), model.encode(random_audio())
        assert torch.equal(codes, reconstruction.codes)
        assert torch.equal(model.decode(codes), reconstruction.output)


@pytest.mark.parametrize(("samples", "frames"), [(1, 1), (9, 1), (10, 1), (11, 2), (60, 6)])
def test_an_incomplete_frame_is_padded_with_zeros_and_cropped_again(config, samples, frames):
    model, audio = build_codec(config), random_audio(samples)
    reconstruction = model(audio)
    assert reconstruction.codes.shape == (2, frames, 3)
    assert reconstruction.codes.dtype == torch.int64
    assert reconstruction.output.shape == audio.shape
    assert model.encode_latent(audio).shape == (2, frames, 8)
    assert torch.equal(model.encode(F.pad(audio, (0, -samples % 10))), reconstruction.codes)
    assert model.decode(reconstruction.codes).shape == (2, 1, 10 * frames)


@dataclass
class AudioData:
    length: int
    channels: int = 1


def test_hop_codebooks_and_token_grid(config):
    model = build_codec(config)
    assert (model.hop, model.num_quantizers, model.vocab_size) == (10, 3, 64)
    assert config.grid(AudioData(95)) == (10,) and config.grid(AudioData(100)) == (10,)
    config.validate_data(AudioData(10))


def test_the_last_layer_is_the_last_one_with_weights(config):
    model = build_codec(config)
    (gradient,) = torch.autograd.grad(model(random_audio()).output.sum(), model.last_layer)
    head = model.decoder[-2] if isinstance(config, SpectralCodecConfig) else model.decoder[-1]
    assert model.last_layer is head.weight and gradient.abs().sum() > 0


def test_every_parameter_has_a_gradient(config):
    model = build_codec(config)
    model(random_audio()).output.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_the_configuration_survives_json(config):
    assert decode(type(config), encode(config)) == config


@pytest.mark.parametrize("config", [SOUNDSTREAM, replace(SOUNDSTREAM, activation="elu"), SPECTRAL])
def test_bfloat16_autocast_is_close_to_float32(config):
    model, audio = build_codec(config).float(), random_audio().float()
    with torch.no_grad():
        full = model.decode_latent(model.encode_latent(audio))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = model.decode_latent(model.encode_latent(audio))
    assert half.dtype == torch.float32
    assert (half - full).abs().mean() < 0.05 * full.abs().mean()


# ----------------------------------------------------------------------------- residual quantizers


@every_quantizer
def test_the_first_codebooks_can_be_decoded_alone(config, quantizer):
    model = build_codec(config, quantizer=residual(quantizer))
    with torch.no_grad():
        codes = model.encode(random_audio())
        two = model.decode(codes[..., :2])
        assert torch.equal(two, model.decode(codes, num_quantizers_B=torch.tensor([2, 2])))
        assert not torch.allclose(two, model.decode(codes))


def test_quantizer_dropout_reconstructs_from_the_kept_codebooks_only(config):
    model, kept = build_codec(config), torch.tensor([1, 3])
    with torch.no_grad():
        dropped, full = model(random_audio(), num_quantizers_B=kept), model(random_audio())
        assert (dropped.codes[0, :, 1:] == 0).all()
        assert torch.equal(dropped.codes[1], full.codes[1])
        torch.testing.assert_close(dropped.output, model.decode(full.codes, num_quantizers_B=kept))


def test_training_improves_with_the_number_of_codebooks():
    torch.manual_seed(0)
    time = torch.arange(800) / 8000
    pitches = torch.tensor([[220.0], [330.0], [495.0], [700.0]])
    tones = torch.sin(2 * math.pi * pitches * time) * torch.sin(2 * math.pi * 15 * time)
    audio = (0.3 * tones)[:, None]
    quantizer = ResidualConfig(
        quantizer=VQConfig(codebook_size=16, code_dim=8), num_quantizers=4, dropout=1.0
    )
    model = SoundStreamConfig(
        dim=8, max_channels=32, strides=(4, 5), dilations=(1, 3), quantizer=quantizer
    ).build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(150):
        kept = model.quantizer.sample_num_quantizers(torch.rand(len(audio)))
        reconstruction = model(audio, num_quantizers_B=kept)
        optimizer.zero_grad()
        loss = 10 * F.l1_loss(reconstruction.output, audio)
        (loss + sum(reconstruction.penalties.values())).backward()
        optimizer.step()
        for level in model.quantizer.quantizers:
            level.commit(SingleProcess(), step)
    model.eval()
    with torch.no_grad():
        codes = model.encode(audio)
        si_sdr = [
            si_sdr_B(model.decode(codes[..., :count]), audio).mean().item() for count in (1, 2, 4)
        ]
    assert si_sdr[0] + 1 < si_sdr[1] and si_sdr[1] + 0.5 < si_sdr[2], si_sdr
    assert si_sdr[2] > 10, si_sdr


# --------------------------------------------------------------------------------------- causality


def test_no_frame_depends_on_later_samples(config):
    model, audio, begin = build_codec(config), random_audio(60), 30 - config.delay
    other = torch.cat([audio[..., :30], random_audio(30, seed=6)], dim=2)
    with torch.no_grad():
        a, b = model.encode_latent(audio), model.encode_latent(other)
        assert torch.equal(a[:, :3], b[:, :3]) and not torch.equal(a[:, 3], b[:, 3])
        one = model.decode_latent(a)
        two = model.decode_latent(torch.cat([a[:, :3], -a[:, 3:]], dim=1))
        assert torch.equal(one[..., :begin], two[..., :begin])
        assert not torch.equal(one[..., begin : begin + 5], two[..., begin : begin + 5])


def test_a_frame_depends_on_all_of_its_samples(config):
    model, audio = build_codec(config), random_audio(30).requires_grad_()
    model.encode_latent(audio)[:, 1].square().sum().backward()
    used = audio.grad.abs().sum((0, 1)) > 0
    assert used[10:20].all() and not used[20:].any()


def test_a_padded_batch_equals_its_examples_one_by_one(config):
    model, lengths = build_codec(config), [60, 34, 1]
    singles = [random_audio(length, 1, seed=length) for length in lengths]
    batch = torch.cat([F.pad(audio, (0, 60 - audio.shape[2])) for audio in singles])
    with torch.no_grad():
        batched = model(batch, torch.tensor(lengths))
        for row, (audio, length) in enumerate(zip(singles, lengths)):
            single, frames = model(audio), -(-length // 10)
            assert torch.equal(batched.codes[row, :frames], single.codes[0])
            assert (batched.codes[row, frames:] == -1).all()
            torch.testing.assert_close(batched.output[row, :, :length], single.output[0])
            assert torch.equal(model.encode(batch)[row, :frames], single.codes[0])


def test_padding_does_not_enter_losses_and_codebook_statistics(config):
    results = {}
    for padding in (0.0, 0.7):
        model = build_codec(config, quantizer=residual("vq")).train()
        batch = F.pad(random_audio(34), (0, 26), value=padding)
        batch[..., 34:40] = 0
        reconstruction = model(batch, torch.tensor([34, 34]))
        results[padding] = (
            reconstruction.penalties["commitment"],
            model.quantizer.quantizers[0].stats.total_VC,
        )
    torch.testing.assert_close(results[0.0], results[0.7])
    assert results[0.0][1][:, -1].sum() == 8


# --------------------------------------------------------------------------------------- streaming


@pytest.mark.parametrize("sizes", [[67], [1] * 67, [3, 0, 25, 10, 29], [10] * 6 + [7]])
@pytest.mark.parametrize("config", [SOUNDSTREAM, replace(SOUNDSTREAM, activation="elu"), SPECTRAL])
def test_encoding_in_chunks_gives_the_codes_of_the_whole(config, sizes):
    model, audio = build_codec(config), random_audio(67)
    chunks = list(model.encode_chunks(audio.split(sizes, dim=2)))
    assert torch.equal(torch.cat(chunks, dim=1), model.encode(audio))


@pytest.mark.parametrize("sizes", [[7], [1] * 7, [2, 4, 1]])
def test_decoding_in_chunks_gives_the_audio_of_the_whole(config, sizes):
    model = build_codec(config)
    codes = model.encode(random_audio(67))
    audio = torch.cat(list(model.decode_chunks(codes.split(sizes, dim=1))), dim=2)
    torch.testing.assert_close(audio, model.decode(codes), rtol=0, atol=1e-12)


def test_a_frame_is_encoded_as_soon_as_it_is_complete(config):
    model, audio = build_codec(config), random_audio(30)
    chunks = model.encode_chunks(iter([audio[..., :12], audio[..., 12:20], audio[..., 20:]]))
    assert [next(chunks).shape[1] for _ in range(3)] == [1, 1, 1]
    assert next(chunks, None) is None


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_streaming_uses_constant_memory(config, part):
    model = build_codec(config)
    network, dim = (model.encoder, 1) if part == "encoder" else (model.decoder, 8)
    stream, sizes = StreamingState(memory={}), []
    with torch.no_grad():
        for _ in range(8):
            network(torch.randn(1, 20, dim, dtype=torch.float64), stream)
            sizes.append(sum(state.untyped_storage().nbytes() for state in stream.memory.values()))
    assert sizes[0] > 0 and len(set(sizes)) == 1


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    "audio", [torch.zeros(1, 20), torch.zeros(1, 2, 20), torch.zeros(1, 1, 20, dtype=torch.int16)]
)
def test_other_tensors_than_batches_of_audio_give_an_error(config, audio):
    with pytest.raises(ValueError, match="batch, 1, samples"):
        build_codec(config).encode(audio)


def test_empty_and_too_short_audio_gives_an_error(config):
    with pytest.raises(ValueError, match="0 samples cannot be tokenized"):
        build_codec(config).encode(torch.zeros(1, 1, 0))
    with pytest.raises(ValueError, match="0 samples cannot be tokenized"):
        list(build_codec(config).encode_chunks([]))
    with pytest.raises(ValueError, match="shorter than one frame of 10 samples"):
        config.validate_data(AudioData(9))


@pytest.mark.parametrize("shape", [(1, 5), (1, 5, 4), (1, 0, 3), (1, 5, 3, 1)])
def test_codes_of_another_shape_give_an_error(config, shape):
    with pytest.raises(ValueError, match="codec with 3 quantizers"):
        build_codec(config).decode(torch.zeros(shape, dtype=torch.long))


def test_chunks_of_different_batch_sizes_give_an_error(config):
    model = build_codec(config)
    with pytest.raises(ValueError, match="same batch size"):
        list(model.encode_chunks([random_audio(20), random_audio(20, 1)]))
    with pytest.raises(ValueError, match="same batch size"):
        list(model.decode_chunks([torch.zeros(2, 1, 3).long(), torch.zeros(1, 1, 3).long()]))
