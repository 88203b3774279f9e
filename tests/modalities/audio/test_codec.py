"""The codec's network: sounds to symbols and back, whole or in pieces, never looking ahead, better
the more levels are kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.losses.spectral import si_sdr_B
from tessera.modalities.audio.codec import AudioCodec, AudioCodecConfig, AudioConv, Snake, Spread
from tessera.nn.causal_conv import StreamingState
from tessera.nn.quantize import FSQConfig, LFQConfig, ResidualConfig, VQConfig
from tessera.run.config import decode, encode
from tests.networks import stirred

TINY = AudioCodecConfig(
    dim=4,
    max_channels=8,
    strides=(2, 5),
    dilations=(1, 3),
    quantizer=ResidualConfig(quantizer=FSQConfig(levels=(4, 4, 4)), levels=3, dropout=0.5),
)
"""One frame is 10 samples."""

QUANTIZERS = {
    "fsq": FSQConfig(levels=(4, 4, 4)),
    "lfq": LFQConfig(codebook_size=64),
    "vq": VQConfig(codebook_size=64, code_dim=4),
    "free vq": VQConfig(codebook_size=64, code_dim=4, normalised=False),
}
every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS)


def built(**settings: Any) -> AudioCodec:
    torch.manual_seed(0)
    return stirred(replace(TINY, **settings).build()).eval().double()


def cascade(kind: str) -> ResidualConfig:
    return ResidualConfig(quantizer=QUANTIZERS[kind], levels=3, dropout=0.5)


def sounds(samples: int = 60, count: int = 2, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, samples, generator=generator, dtype=torch.float64) * 2 - 1


# ---------------------------------------------------------------------------------------------------- encode and decode


@every_quantizer
def test_decoding_the_codes_of_a_sound_gives_its_reconstruction_exactly(quantizer):
    model = built(quantizer=cascade(quantizer))
    with torch.no_grad():
        rebuilt, codes = model(sounds()), model.encode(sounds())
        assert torch.equal(codes, rebuilt.codes)
        assert torch.equal(model.decode(codes), rebuilt.output)


@pytest.mark.parametrize(("samples", "frames"), [(1, 1), (9, 1), (10, 1), (11, 2), (60, 6)])
def test_an_unfinished_frame_is_filled_with_silence_and_cut_off_again(samples, frames):
    model, sound = built(), sounds(samples)
    rebuilt = model(sound)
    assert rebuilt.codes.shape == (2, frames, 3) and rebuilt.codes.dtype == torch.int64
    assert rebuilt.output.shape == sound.shape
    assert model.latent(sound).shape == (2, frames, 8)
    assert torch.equal(model.encode(F.pad(sound, (0, -samples % 10))), rebuilt.codes)
    assert model.decode(rebuilt.codes).shape == (2, 1, 10 * frames)


@dataclass
class AudioDataConfig:
    length: int


def test_it_says_what_becomes_of_sounds():
    model = built()
    assert (model.hop, model.levels, model.vocab_size) == (10, 3, 64)
    assert TINY.grid(AudioDataConfig(95)) == (10,) and TINY.grid(AudioDataConfig(100)) == (10,)
    TINY.validate_data(AudioDataConfig(10))
    assert AudioCodecConfig().hop == 320 and AudioCodecConfig().widths == [32, 64, 128, 256, 512]


def test_the_last_layer_is_the_one_that_plays():
    model = built()
    (gradient,) = torch.autograd.grad(model(sounds()).output.sum(), model.last_layer)
    assert model.last_layer.shape[0] == 1 and gradient.abs().sum() > 0


def test_every_parameter_takes_part():
    model = built()
    rebuilt = model(sounds())
    rebuilt.output.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_its_configuration_survives_json():
    assert decode(AudioCodecConfig, encode(TINY)) == TINY


def test_bare_stages_have_no_residual_blocks():
    sizes = [
        sum(parameter.numel() for parameter in built(bare=bare).parameters()) for bare in (0, 1, 2)
    ]
    assert (
        sizes[0]
        > sizes[1]
        > sizes[2]
        == sum(parameter.numel() for parameter in built(dilations=()).parameters())
    )


@pytest.mark.parametrize("activation", ["snake", "elu"])
def test_in_half_precision_it_comes_near(activation):
    model, sound = built(activation=activation).float(), sounds().float()
    with torch.no_grad():
        whole = model.sound(model.latent(sound))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = model.sound(model.latent(sound))
    assert half.dtype == torch.float32
    assert (half - whole).abs().mean() < 0.05 * whole.abs().mean()


# --------------------------------------------------------------------------------------------------------------- levels


@every_quantizer
def test_the_first_levels_are_decoded_by_themselves(quantizer):
    model = built(quantizer=cascade(quantizer))
    with torch.no_grad():
        codes = model.encode(sounds())
        two = model.decode(codes[..., :2])
        assert torch.equal(two, model.decode(codes, num_quantizers_B=torch.tensor([2, 2])))
        assert not torch.allclose(two, model.decode(codes))


def test_an_example_that_keeps_one_level_is_rebuilt_from_that_alone():
    model, keep = built(), torch.tensor([1, 3])
    with torch.no_grad():
        dropped, whole = model(sounds(), num_quantizers_B=keep), model(sounds())
        assert (dropped.codes[0, :, 1:] == 0).all() and torch.equal(
            dropped.codes[1], whole.codes[1]
        )
        torch.testing.assert_close(dropped.output, model.decode(whole.codes, num_quantizers_B=keep))


class Alone:
    """The meeting of one process."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def rows(self, tensor: Tensor) -> Tensor:
        return tensor


def test_it_learns_a_sound_and_rebuilds_it_better_the_more_levels_are_kept():
    torch.manual_seed(0)
    time = torch.arange(800) / 8000
    pitches = torch.tensor([[220.0], [330.0], [495.0], [700.0]])
    sound = (0.3 * torch.sin(2 * math.pi * pitches * time) * torch.sin(2 * math.pi * 15 * time))[
        :, None
    ]
    quantizer = ResidualConfig(
        quantizer=VQConfig(codebook_size=16, code_dim=8), levels=4, dropout=1.0
    )
    model = AudioCodecConfig(
        dim=8, max_channels=32, strides=(4, 5), dilations=(1, 3), quantizer=quantizer
    ).build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(150):
        keep = model.quantizer.num_quantizers_to_keep(torch.rand(len(sound)))
        rebuilt = model(sound, num_quantizers_B=keep)
        optimizer.zero_grad()
        (10 * F.l1_loss(rebuilt.output, sound) + sum(rebuilt.penalties.values())).backward()
        optimizer.step()
        for level in model.quantizer.cascade:
            level.commit(Alone(), step)
    model.eval()
    with torch.no_grad():
        codes = model.encode(sound)
        decibels = [
            si_sdr_B(model.decode(codes[..., :kept]), sound).mean().item() for kept in (1, 2, 4)
        ]
    assert decibels[0] + 1 < decibels[1] and decibels[1] + 1 < decibels[2], decibels
    assert decibels[2] > 10, decibels


# --------------------------------------------------------------------------------------------------- nothing looks ahead


def test_no_frame_hears_what_comes_after_it():
    model, sound = built(), sounds(60)
    other = torch.cat([sound[..., :30], sounds(30, seed=6)], dim=2)
    with torch.no_grad():
        a, b = model.latent(sound), model.latent(other)
        assert torch.equal(a[:, :3], b[:, :3]) and not torch.equal(a[:, 3], b[:, 3])
        one, two = model.sound(a), model.sound(torch.cat([a[:, :3], -a[:, 3:]], dim=1))
        assert torch.equal(one[..., :30], two[..., :30]) and not torch.equal(
            one[..., 30:40], two[..., 30:40]
        )


def test_within_its_frame_every_sample_is_heard():
    model, sound = built(), sounds(30).requires_grad_()
    model.latent(sound)[:, 1].square().sum().backward()
    heard = sound.grad.abs().sum((0, 1)) > 0
    assert heard[10:20].all() and not heard[20:].any()


def test_a_padded_batch_is_its_sounds_one_by_one():
    model, lengths = built(), [60, 34, 1]
    alone = [sounds(length, 1, seed=length) for length in lengths]
    batch = torch.cat([F.pad(sound, (0, 60 - sound.shape[2])) for sound in alone])
    with torch.no_grad():
        together = model(batch, torch.tensor(lengths))
        for row, (sound, length) in enumerate(zip(alone, lengths)):
            single, frames = model(sound), -(-length // 10)
            assert torch.equal(together.codes[row, :frames], single.codes[0])
            assert (together.codes[row, frames:] == -1).all()
            torch.testing.assert_close(together.output[row, :, :length], single.output[0])
            assert torch.equal(model.encode(batch)[row, :frames], single.codes[0])


def test_the_table_learns_nothing_from_padding():
    noted = {}
    for padding in (0.0, 0.7):
        model = built(quantizer=cascade("vq")).train()
        batch = F.pad(sounds(34), (0, 26), value=padding)
        batch[..., 34:40] = 0
        rebuilt = model(batch, torch.tensor([34, 34]))
        noted[padding] = (
            rebuilt.penalties["commitment"],
            model.quantizer.cascade[0].notes.total_VC,
        )
    torch.testing.assert_close(noted[0.0], noted[0.7])
    assert noted[0.0][1][:, -1].sum() == 8


# ------------------------------------------------------------------------------------------------------------- in pieces


@pytest.mark.parametrize("activation", ["snake", "elu"])
@pytest.mark.parametrize("pieces", [[67], [1] * 67, [3, 0, 25, 10, 29], [10] * 6 + [7]])
def test_a_sound_in_pieces_has_the_codes_of_the_whole(pieces, activation):
    model, sound = built(activation=activation), sounds(67)
    chunks = list(model.encode_chunks(sound.split(pieces, dim=2)))
    assert torch.equal(torch.cat(chunks, dim=1), model.encode(sound))


@pytest.mark.parametrize("pieces", [[7], [1] * 7, [2, 4, 1]])
def test_codes_in_pieces_are_played_as_the_whole(pieces):
    model = built()
    codes = model.encode(sounds(67))
    played = torch.cat(list(model.decode_chunks(codes.split(pieces, dim=1))), dim=2)
    torch.testing.assert_close(played, model.decode(codes), rtol=0, atol=1e-12)


def test_a_frame_is_written_as_soon_as_it_is_full():
    model, sound = built(), sounds(30)
    writing = model.encode_chunks(iter([sound[..., :12], sound[..., 12:20], sound[..., 20:]]))
    assert [next(writing).shape[1] for _ in range(3)] == [1, 1, 1]
    assert next(writing, None) is None


@pytest.mark.parametrize("way", ["encoder", "decoder"])
def test_a_long_sound_takes_no_more_memory_than_a_short_one(way):
    model = built()
    network, width = (model.encoder, 1) if way == "encoder" else (model.decoder, 8)
    passage, held = StreamingState(memory={}), []
    with torch.no_grad():
        for _ in range(8):
            network(torch.randn(1, 20, width, dtype=torch.float64), passage)
            held.append(sum(kept.untyped_storage().nbytes() for kept in passage.memory.values()))
    assert held[0] > 0 and len(set(held)) == 1


# --------------------------------------------------------------------------------------------------------------- layers


def test_spreading_is_a_transposed_convolution_of_twice_the_stride():
    spread, x = Spread(3, 2, 5).double(), torch.randn(2, 4, 3, dtype=torch.float64)
    weight, bias = (
        spread.convolution.weight.detach()[:, :, 0],
        spread.convolution.convolution.bias.detach(),
    )
    newest, before = (weight[:, :, tap].unflatten(0, (5, 2)).permute(2, 1, 0) for tap in (1, 0))
    transposed = F.conv_transpose1d(x.mT, torch.cat([newest, before], dim=2), stride=5)[..., :20].mT
    torch.testing.assert_close(
        spread(x, StreamingState()), transposed + bias.view(5, 2).repeat(4, 1)
    )


def test_a_convolution_that_shortens_makes_a_frame_of_every_stride():
    layer, x = AudioConv(1, 1, 4, stride=2).double(), sounds(8).mT
    weight, bias = layer.weight.detach()[:, :, 0], layer.convolution.bias.detach()
    by_hand = F.conv1d(F.pad(x.mT, (2, 0)), weight, bias, stride=2).mT
    torch.testing.assert_close(layer(x, StreamingState()), by_hand)


def test_snake_bends_with_a_period_of_its_own_and_never_turns_back():
    snake, x = (
        Snake(2).double(),
        torch.linspace(-9, 9, 400, dtype=torch.float64)[:, None].repeat(1, 2),
    )
    with torch.no_grad():
        snake.log_frequency.copy_(torch.tensor([0.0, math.log(2)]))
        y = snake(x, StreamingState())
        assert (y.diff(dim=0) > -1e-9).all()
        torch.testing.assert_close(
            snake(x + math.pi / 2, StreamingState())[:, 1], y[:, 1] + math.pi / 2
        )
        half = torch.full((1, 2), math.pi / 4, dtype=torch.float64)
        torch.testing.assert_close(
            snake(half, StreamingState()) - half, torch.tensor([[0.5, 0.5]], dtype=torch.float64)
        )


def test_loudness_is_neither_lost_nor_blown_up_on_the_way():
    torch.manual_seed(0)
    model, sound = AudioCodecConfig(dim=16, max_channels=64).build(), 0.1 * torch.randn(2, 1, 3200)
    with torch.no_grad():
        latent = model.latent(sound)
        loudness = [part.square().mean().sqrt().item() for part in (latent, model.sound(latent))]
    assert all(0.02 < size < 0.5 for size in loudness), loudness


# -------------------------------------------------------------------------------------------------------------- letters


@pytest.mark.parametrize(
    ("settings", "letter"),
    [
        ({"strides": ()}, "such as 2 4 5 8"),
        ({"strides": (2, 0)}, "1 or more"),
        ({"dilations": (1, 0)}, "1 3 9"),
        ({"dim": 0}, "dim is 0"),
        ({"bare": 3}, "0 to 2"),
    ],
)
def test_a_network_that_cannot_be_is_refused(settings, letter):
    with pytest.raises(ValueError, match=letter):
        replace(TINY, **settings)


@pytest.mark.parametrize(
    "sound", [torch.zeros(1, 20), torch.zeros(1, 2, 20), torch.zeros(1, 1, 20, dtype=torch.int16)]
)
def test_what_is_no_batch_of_sounds_is_refused(sound):
    with pytest.raises(ValueError, match="batch, 1, samples"):
        built().encode(sound)


def test_a_sound_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing to write"):
        built().encode(torch.zeros(1, 1, 0))
    with pytest.raises(ValueError, match="nothing to write"):
        list(built().encode_chunks([]))
    with pytest.raises(ValueError, match="one of every 10 samples"):
        TINY.validate_data(AudioDataConfig(9))


@pytest.mark.parametrize("shape", [(1, 5), (1, 5, 4), (1, 0, 3), (1, 5, 3, 1)])
def test_codes_of_another_codec_are_refused(shape):
    with pytest.raises(ValueError, match="codec of 3 levels"):
        built().decode(torch.zeros(shape, dtype=torch.long))


def test_pieces_of_different_batches_are_refused():
    model = built()
    with pytest.raises(ValueError, match="as many sounds each"):
        list(model.encode_chunks([sounds(20), sounds(20, 1)]))
    with pytest.raises(ValueError, match="as many sounds each"):
        list(model.decode_chunks([torch.zeros(2, 1, 3).long(), torch.zeros(1, 1, 3).long()]))
