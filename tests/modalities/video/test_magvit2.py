"""The video tokenizer's network: clips and pictures to symbols and back, whole or in pieces, never
looking ahead."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tessera.engine.distributed import Distributed
from tessera.modalities.video.magvit2 import Layer, VideoTokenizer, VideoTokenizerConfig
from tessera.nn.causal_conv import (
    GateLoop,
    LinearSpaceAttention,
    Residual,
    SeparateFirstFrameConv,
    StreamingState,
    TimeAttention,
)
from tessera.nn.quantize import FSQConfig, LFQConfig, ResidualConfig, VQConfig
from tessera.run.config import decode, encode
from tests.networks import stirred

TINY = VideoTokenizerConfig(
    dim=8,
    max_channels=16,
    layers=(
        "residual",
        "compress_space",
        "compress_time",
        "residual",
        "compress_time",
        "attend_time",
    ),
    quantizer=FSQConfig(levels=(4, 4, 4)),
    input_kernel=3,
    heads=2,
    head_dim=8,
    linear_heads=2,
    linear_head_dim=4,
    attend_time_window=3,
)
"""Time factor 4, stride 2."""

EVERYTHING = (
    "residual",
    "compress_space",
    "linear_attend_space",
    "consecutive_residual:2",
    "compress_time",
    "attend_space",
    "gateloop_time",
    "compress_time",
    "attend_time",
)

QUANTIZERS = {
    "fsq": FSQConfig(levels=(4, 4, 4)),
    "lfq": LFQConfig(codebook_size=64),
    "bsq": LFQConfig(codebook_size=64, spherical=True),
    "vq": VQConfig(codebook_size=64, code_dim=4),
    "residual fsq": ResidualConfig(quantizer=FSQConfig(levels=(4, 4)), levels=3),
}

NETWORKS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "every layer": {"layers": EVERYTHING},
    "first frame apart": {"separate_first_frame": True},
    "lfq": {"quantizer": LFQConfig(codebook_size=64)},
}
every_network = pytest.mark.parametrize("network", NETWORKS)


def built(**settings: Any) -> VideoTokenizer:
    torch.manual_seed(0)
    return stirred(replace(TINY, **settings).build()).eval()


def clips(
    frames: int = 9, count: int = 2, side: int = 8, channels: int = 3, seed: int = 5
) -> Tensor:
    return (
        torch.rand(
            count, channels, frames, side, side, generator=torch.Generator().manual_seed(seed)
        )
        * 2
        - 1
    )


# ---------------------------------------------------------------------------------------------------- encode and decode


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_decoding_the_codes_of_a_clip_gives_its_reconstruction_exactly(quantizer):
    model = built(quantizer=QUANTIZERS[quantizer])
    with torch.no_grad():
        rebuilt, codes = model(clips()), model.encode(clips())
        assert torch.equal(codes, rebuilt.codes)
        assert torch.equal(model.decode(codes), rebuilt.output)
        assert torch.equal(model.tokenize(clips()), codes)


@pytest.mark.parametrize(("frames", "latent"), [(1, 1), (5, 2), (9, 3), (17, 5)])
@pytest.mark.parametrize("channels", [1, 3])
def test_seventeen_frames_at_time_factor_four_give_five(frames, latent, channels):
    model = built(channels=channels)
    clip = torch.zeros(2, channels, frames, 8, 12)
    rebuilt = model(clip)
    assert rebuilt.codes.shape == (2, latent, 4, 6) and rebuilt.codes.dtype == torch.int64
    assert (
        rebuilt.output.shape == clip.shape
        and rebuilt.output.dtype == torch.float32
        and rebuilt.output.is_contiguous()
    )
    assert model.latent(clip).shape == (2, latent, 4, 6, 16)
    assert rebuilt.codes.min() >= 0 and rebuilt.codes.max() < model.vocab_size == 64


def test_residual_quantizers_write_several_symbols_for_each_place():
    assert built(quantizer=QUANTIZERS["residual fsq"]).encode(clips()).shape == (2, 3, 4, 4, 3)


def test_the_last_layer_is_the_one_that_paints():
    for apart in (False, True):
        model = built(separate_first_frame=apart)
        (gradient,) = torch.autograd.grad(model(clips()).output.sum(), model.last_layer)
        assert model.last_layer.shape[0] == 3 and gradient.abs().sum() > 0


@dataclass
class Clips:
    size: int
    frames: int


@dataclass
class Pictures:
    size: int


def test_the_grid_of_data_is_that_of_their_codes():
    assert (
        TINY.grid(Clips(size=8, frames=17))
        == (5, 4, 4)
        == tuple(built().encode(clips(17)).shape[1:])
    )
    assert TINY.grid(Pictures(size=8)) == (1, 4, 4)
    TINY.validate_data(Clips(size=8, frames=17))
    TINY.validate_data(Pictures(size=8))
    for unfit in (Clips(size=9, frames=17), Clips(size=8, frames=16), Pictures(size=7)):
        with pytest.raises(ValueError, match="fit"):
            TINY.validate_data(unfit)


# ------------------------------------------------------------------------------------------- codes in a row, and shaped


def test_codes_in_a_row_are_decoded_on_the_grid_that_is_named():
    model = built()
    with torch.no_grad():
        codes = model.encode(clips())
        clip = model.decode(codes)
        assert torch.equal(model.decode_from_code_indices(codes), clip)
        assert torch.equal(model.decode_from_code_indices(codes.flatten(1), shape=(3, 4, 4)), clip)
        assert torch.equal(model.decode_from_code_indices(codes.flatten(1), shape=(4, 4)), clip)
        alone = model.encode(clips(17, side=2))  # 5 frames of 1 x 1
        assert torch.equal(model.decode_from_code_indices(alone.flatten(1)), model.decode(alone))


def test_codes_of_several_levels_in_a_row_are_decoded_too():
    model = built(quantizer=QUANTIZERS["residual fsq"])
    with torch.no_grad():
        codes = model.encode(clips())
        clip = model.decode(codes)
        assert torch.equal(
            model.decode_from_code_indices(codes.flatten(1, 3), shape=(3, 4, 4)), clip
        )
        assert torch.equal(model.decode_from_code_indices(codes), clip)


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (
            None,
            r"48 codes in a row may be a grid of \(3, 4, 4\) or \(12, 2, 2\) or \(48, 1, 1\): say which, as shape=",
        ),
        ((3, 4, 5), r"48 codes in a row do not fill a grid of \(3, 4, 5\)"),
        ((5, 5), r"48 codes in a row do not fill a grid of \(5, 5\)"),
        ((48,), r"48 codes in a row do not fill a grid of \(48,\)"),
        ((0, 4), r"48 codes in a row do not fill a grid of \(0, 4\)"),
    ],
)
def test_a_grid_that_cannot_be_known_or_filled_is_asked_for(shape, says):
    with pytest.raises(ValueError, match=says):
        built().decode_from_code_indices(torch.zeros(1, 48, dtype=torch.int64), shape=shape)


# -------------------------------------------------------------------------------------------------- nothing looks ahead


@every_network
@pytest.mark.parametrize("known", [1, 2])
def test_codes_of_the_first_frames_do_not_change_with_later_frames(network, known):
    model, clip = built(**NETWORKS[network]), clips()
    other = clip.clone()
    other[:, :, 1 + 4 * (known - 1) :] = clips(seed=6)[:, :, 1 + 4 * (known - 1) :]
    with torch.no_grad():
        one, two = model.latent(clip), model.latent(other)
    assert torch.equal(one[:, :known], two[:, :known]) and not torch.equal(
        one[:, known], two[:, known]
    )
    assert torch.equal(model.encode(clip)[:, :known], model.encode(other)[:, :known])


@every_network
@pytest.mark.parametrize("known", [1, 2])
def test_decoded_frames_do_not_change_with_later_codes(network, known):
    model = built(**NETWORKS[network])
    codes = torch.randint(64, (2, 3, 4, 4))
    other = codes.clone()
    other[:, known:] = 63 - codes[:, known:]
    certain = 1 + 4 * (known - 1)
    with torch.no_grad():
        one, two = model.decode(codes), model.decode(other)
    assert torch.equal(one[:, :, :certain], two[:, :, :certain]) and not torch.equal(
        one[:, :, certain], two[:, :, certain]
    )


@every_network
def test_a_picture_has_the_codes_that_it_has_as_first_frame_of_a_clip(network):
    model, clip = built(**NETWORKS[network]), clips()
    with torch.no_grad():
        picture = model.encode(clip[:, :, 0])
        assert torch.equal(picture, model.encode(clip[:, :, :1]))
        assert torch.equal(picture, model.encode(clip)[:, :1])
        first = model.decode(picture)
        torch.testing.assert_close(first, model(clip).output[:, :, :1], rtol=1e-4, atol=1e-5)
        assert first.shape == (2, 3, 1, 8, 8)


@every_network
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_clip_is_rebuilt_the_same_whoever_its_neighbours_are(network, mode):
    model, whole = built(**NETWORKS[network]).train(mode == "train"), clips(count=3)
    others = whole.clone()
    others[1:] = 0.1 * whole[1:].flip(0, 4)
    with torch.no_grad():
        together, elsewhere, alone = model(whole), model(others), model(whole[:1])
    assert torch.equal(together.output[0], elsewhere.output[0])
    assert torch.equal(together.codes[0], alone.codes[0])
    torch.testing.assert_close(together.output[:1], alone.output, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------ clips of any length


@every_network
@pytest.mark.parametrize(
    "lengths", [[1] * 17, [4, 4, 4, 4, 1], [3, 5, 7, 1, 1], [1, 16], [17]], ids=str
)
def test_a_clip_encoded_in_pieces_has_the_codes_of_the_whole(network, lengths):
    model, clip = built(**NETWORKS[network]), clips(17)
    pieces = list(model.encode_chunks(clip.split(lengths, dim=2)))
    assert all(piece.shape[1] for piece in pieces) and len(pieces) <= len(lengths)
    assert torch.equal(torch.cat(pieces, dim=1), model.encode(clip))


@every_network
@pytest.mark.parametrize("lengths", [[1] * 5, [2, 2, 1], [3, 2], [1, 4], [5]], ids=str)
def test_a_clip_decoded_in_pieces_is_the_whole(network, lengths):
    model = built(**NETWORKS[network])
    codes = torch.randint(64, (2, 5, 4, 4))
    pieces = list(model.decode_chunks(codes.split(lengths, dim=1)))
    assert [piece.shape[2] for piece in pieces] == [
        4 * length - 3 * (number == 0) for number, length in enumerate(lengths)
    ]
    with torch.no_grad():
        torch.testing.assert_close(
            torch.cat(pieces, dim=2), model.decode(codes), rtol=1e-5, atol=1e-5
        )


def test_codes_come_as_soon_as_they_are_certain():
    """The latent frame 1 + k stands for the frames up to 1 + 4k, so it comes with the last of
    these."""
    model, asked = built(), []
    frames = (
        asked.append(number) or frame for number, frame in enumerate(clips(9).split(1, dim=2))
    )
    came = [len(asked) for _ in model.encode_chunks(frames)]
    assert came == [1, 5, 9]


def test_single_pictures_may_be_the_pieces():
    model, clip = built(), clips(5)
    pieces = list(model.encode_chunks(clip.unbind(2)))
    assert torch.equal(torch.cat(pieces, dim=1), model.encode(clip))


def test_a_piece_without_frames_changes_nothing():
    model, clip = built(), clips(5)
    pieces = list(
        model.encode_chunks([clip[:, :, :0], clip[:, :, :2], clip[:, :, :0], clip[:, :, 2:]])
    )
    assert torch.equal(torch.cat(pieces, dim=1), model.encode(clip))


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.numbers = max(
            [self.numbers, *(one.numel() for one in tree_leaves(made) if isinstance(one, Tensor))]
        )
        return made


@pytest.mark.parametrize("network", ["tiny", "every layer"])
def test_a_clip_five_times_as_long_needs_no_more_memory_in_pieces(network):
    model = built(**NETWORKS[network])

    def largest(frames: int) -> tuple[int, int]:
        with Largest() as encoding:
            codes = list(
                model.encode_chunks(
                    itertools.chain(
                        [clips(1, count=1)], itertools.repeat(clips(4, count=1), frames // 4)
                    )
                )
            )
        with Largest() as decoding:
            assert sum(piece.shape[2] for piece in model.decode_chunks(codes)) == frames
        return encoding.numbers, decoding.numbers

    assert largest(101) == largest(21)


@every_network
def test_what_is_remembered_between_pieces_does_not_grow(network):
    model = built(**NETWORKS[network])
    passage, sizes = StreamingState(memory={}), []
    with torch.no_grad():
        for piece in [clips(1), *[clips(4)] * 20]:
            model.encoder(model.frames(piece), passage)
            sizes.append(sum(kept.untyped_storage().nbytes() for kept in passage.memory.values()))
    assert len(set(sizes[4:])) == 1


def test_pieces_leave_no_graph_and_no_trace_in_the_network():
    model, clip = built(), clips()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    codes = list(model.encode_chunks(clip.split(3, dim=2)))
    again = list(model.encode_chunks(clip.split(3, dim=2)))
    frames = list(model.decode_chunks(codes))
    assert all(map(torch.equal, codes, again)) and not any(piece.requires_grad for piece in frames)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.is_grad_enabled()


def test_pieces_that_end_in_the_middle_of_a_symbol_are_refused_at_their_end():
    pieces = built().encode_chunks(clips(8).split(4, dim=2))
    assert next(pieces).shape[1] == 1 and next(pieces).shape[1] == 1
    with pytest.raises(ValueError, match="A clip of 8 frames does not fit.* Use 5 or 9"):
        next(pieces)


@pytest.mark.parametrize("other", [clips(4, count=3), clips(4, side=10)])
def test_pieces_of_another_clip_are_refused(other):
    with pytest.raises(
        ValueError, match="came after one of .* differ in their number of frames only"
    ):
        list(built().encode_chunks([clips(5), other]))
    model = built()
    with pytest.raises(ValueError, match="differ in their number of frames only"):
        list(
            model.decode_chunks(
                [model.encode(clips(5)), torch.zeros(*other.shape[:1], 1, 5, 5, dtype=torch.int64)]
            )
        )


# ------------------------------------------------------------------------------------------------------------- layers


def test_the_layers_are_planned_as_they_are_written():
    config = VideoTokenizerConfig(
        dim=16,
        max_channels=40,
        layers=(
            "residual",
            "compress_space",
            "consecutive_residual:3",
            "compress_time",
            "compress_space:12",
        ),
    )
    assert config.plan == [
        Layer("residual", 16, 16),
        Layer("compress_space", 16, 32),
        Layer("consecutive_residual", 32, 32, repeats=3),
        Layer("compress_time", 32, 40),
        Layer("compress_space", 40, 12),
    ]
    assert (config.stride, config.time_factor, config.deepest) == (4, 2, 12)
    assert VideoTokenizerConfig(dim=16, layers=()).deepest == 16


def test_the_decoder_mirrors_the_encoder():
    model = built(layers=(*EVERYTHING, "compress_space:12"))
    named = {
        "CausalConv": "compression",
        "DoubledSpace": "compression",
        "DoubledTime": "compression",
    }
    down, up = (
        [named.get(type(layer).__name__, type(layer).__name__) for layer in half]
        for half in (model.encoder, model.decoder)
    )
    assert down[1:-1] == up[:-1][::-1] and len(down) == 13
    assert model(clips()).output.shape == clips().shape


@pytest.mark.parametrize("dim", [1, 3, 11, 22])
def test_any_width_can_be_built(dim):
    assert built(dim=dim, max_channels=4 * dim)(clips()).output.shape == clips().shape


def test_a_network_without_compression_keeps_every_place():
    assert built(layers=("residual",)).encode(clips(6)).shape == (2, 6, 8, 8)


def test_the_configuration_survives_being_written_down():
    config = replace(TINY, layers=EVERYTHING, quantizer=LFQConfig(codebook_size=256))
    assert decode(VideoTokenizerConfig, encode(config)) == config


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        (("residul",), "no layer 'residul': did you mean 'residual'"),
        (("compres_space:32",), "no layer 'compres_space:32': did you mean 'compress_space'"),
        (("cond_atend_time",), "did you mean 'attend_time'"),
        (
            ("xyzzy",),
            r"no layer 'xyzzy'\. There are residual, consecutive_residual, compress_space",
        ),
        (("residual:two",), "no layer 'residual:two': did you mean 'residual'"),
        (("",), "no layer ''"),
        (("residual:2",), "'residual:2' takes no number: write 'residual'"),
        (
            ("consecutive_residual",),
            "needs a number of 1 or more after its name, such as consecutive_residual:2",
        ),
        (("consecutive_residual:0",), "needs a number of 1 or more"),
        (
            ("compress_time:0",),
            "needs a number of 1 or more after its name, such as compress_time:2",
        ),
        (
            ("cond_compress_space",),
            "'cond_compress_space' has no conditioned form: write 'compress_space'",
        ),
        (
            ("cond_residual",),
            "'cond_residual' is conditioned on a vector, but condition_width is None: .* or write 'residual'",
        ),
    ],
)
def test_layers_that_mean_nothing_are_refused_with_what_may_be_meant(layers, says):
    with pytest.raises(ValueError, match=says):
        replace(TINY, layers=layers)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dim": 0}, "dim of 0"),
        ({"channels": 0}, "channels of 0"),
        ({"attend_time_window": 0}, "attend_time_window of 0: use 1 or more"),
        ({"input_kernel": 4}, "input_kernel is odd, not 4"),
        ({"output_kernel": -1}, "output_kernel is odd, not -1"),
        ({"head_width": 7}, "head_width is even and 4 or more, not 7: use 6"),
        ({"linear_head_width": 2}, "linear_head_width is even and 4 or more, not 2: use 4"),
        ({"condition_width": 5}, "condition_width is 5, but no layer is conditioned"),
    ],
)
def test_a_network_that_cannot_be_built_is_refused_by_its_configuration(settings, says):
    with pytest.raises(ValueError, match=says):
        replace(TINY, **settings)


# ---------------------------------------------------------------------------------------------------------- conditions

CONDITIONED = (
    "cond_residual",
    "compress_space",
    "cond_linear_attend_space",
    "cond_attend_space",
    "compress_time",
)
CONDITIONED += ("cond_attend_time", "cond_gateloop_time", "compress_time")


@pytest.mark.parametrize("layer", [name for name in CONDITIONED if name.startswith("cond_")])
def test_every_conditioned_layer_heeds_its_condition_in_both_directions(layer):
    model = built(layers=("compress_space", layer, "compress_time", "compress_time"), cond_dim=5)
    one, two = torch.randn(2, 5), torch.randn(2, 5)
    with torch.no_grad():
        codes = model.encode(clips(), one)
        assert not torch.equal(model.latent(clips(), one), model.latent(clips(), two))
        assert not torch.equal(model.decode(codes, one), model.decode(codes, two))
        assert torch.equal(model(clips(), one).output, model.decode(codes, one))


def test_conditioned_pieces_are_the_conditioned_whole():
    model, condition = built(layers=CONDITIONED, cond_dim=5), torch.randn(2, 5)
    with torch.no_grad():
        codes = model.encode(clips(), condition)
        assert torch.equal(
            torch.cat(list(model.encode_chunks(clips().split(2, dim=2), condition)), dim=1), codes
        )
        frames = torch.cat(list(model.decode_chunks(codes.split(1, dim=1), condition)), dim=2)
        torch.testing.assert_close(frames, model.decode(codes, condition), rtol=1e-5, atol=1e-5)


def test_a_condition_that_is_missing_misshapen_or_idle_is_refused():
    model = built(layers=CONDITIONED, cond_dim=5)
    with pytest.raises(ValueError, match=r"shape \(batch, 5\), but none was given"):
        model(clips())
    with pytest.raises(
        ValueError, match=r"shape \(batch, 5\), but one of shape \(2, 4\) was given"
    ):
        list(model.encode_chunks([clips()], torch.zeros(2, 4)))
    with pytest.raises(ValueError, match="no layer of this tokenizer looks at one"):
        built().decode(torch.zeros(1, 1, 4, 4, dtype=torch.int64), torch.zeros(1, 5))


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("frames", "works"),
    [
        (16, "Use 13 or 17: 17 frames at time factor 4 give 5 latent frames"),
        (2, "Use 1 or 5"),
        (0, "Use 1 or 5"),
    ],
)
def test_a_number_of_frames_that_does_not_fit_is_refused_with_those_that_do(frames, works):
    with pytest.raises(ValueError, match=f"clip of {frames} frames does not fit.*{works}"):
        built().encode(clips(frames))


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((1, 3, 1, 7, 8), "7 x 8 do not fit.* multiples of 2. Instead of 7, use 6 or 8"),
        ((1, 3, 1, 8, 1), "8 x 1 do not fit.* Instead of 1, use 2"),
        ((1, 3, 1, 8, 0), "8 x 0 do not fit.* use 2"),
        (
            (1, 1, 1, 8, 8),
            r"shape \(1, 1, 1, 8, 8\) .* no batch of clips: .* \(batch, 3, frames, height, width\)",
        ),
        ((3, 8, 8), "no batch of clips"),
    ],
)
def test_clips_that_do_not_fit_are_refused(shape, says):
    with pytest.raises(ValueError, match=says):
        built().encode(torch.zeros(shape))


def test_bytes_are_no_clip():
    with pytest.raises(
        ValueError, match=r"torch.uint8 is no batch of clips: give floats in \[-1, 1\]"
    ):
        built().encode(torch.zeros(1, 3, 1, 8, 8, dtype=torch.uint8))


@pytest.mark.parametrize("shape", [(1, 48), (1, 3, 4), (1, 3, 4, 4, 2), (1, 0, 4, 4)])
def test_codes_on_no_grid_are_refused(shape):
    for ask in (built().decode, lambda codes: list(built().decode_chunks([codes]))):
        with pytest.raises(ValueError, match=r"give \(batch, frames, height, width\)"):
            ask(torch.zeros(shape, dtype=torch.int64))


# ------------------------------------------------------------------------------------------------------------ learning


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_every_quantizer_builds_steps_and_learns(quantizer):
    torch.manual_seed(0)
    model = replace(TINY, quantizer=QUANTIZERS[quantizer]).build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    target, errors = clips(5), []
    for step in range(12):
        rebuilt = model(target)
        error = (rebuilt.output - target).abs().mean()
        loss = error + sum(rebuilt.penalties.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for module in model.modules():
            if hasattr(module, "settle"):
                module.commit(Distributed(), step)
        errors.append(error.item())
    assert all(torch.isfinite(torch.tensor(errors))) and errors[-1] < errors[0]


@every_network
@pytest.mark.parametrize("frames", [1, 9])
def test_every_parameter_has_a_gradient_from_clips_and_from_pictures(network, frames):
    """A parameter without one fails on several processes, and a batch may be all pictures."""
    model = built(**NETWORKS[network]).train()
    rebuilt = model(clips(frames))
    ((rebuilt.output - clips(frames)).square().mean() + sum(rebuilt.penalties.values())).backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not without
    idle = [
        name for name, parameter in model.named_parameters() if not parameter.grad.abs().sum() > 0
    ]
    assert frames == 1 or not idle


def test_a_fresh_network_passes_gradients_through_the_symbols_to_its_first_layer():
    torch.manual_seed(0)
    model = TINY.build()
    (model(clips()).output - clips()).abs().mean().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.encoder[0].parameters())


def test_a_quarter_of_a_million_symbols_need_no_tensor_so_wide():
    """The entropies of LFQ are taken in groups of bits: 2^18 symbols, forward and backward, and
    nothing near 2^18 numbers."""
    model = built(dim=4, max_channels=8, quantizer=LFQConfig(codebook_size=2**18)).train()
    with Largest() as seen:
        rebuilt = model(clips(5))
        (rebuilt.output.square().mean() + sum(rebuilt.penalties.values())).backward()
    assert model.vocab_size == 2**18 and "entropy" in rebuilt.penalties
    assert seen.numbers < 2**18 // 8


def test_in_half_precision_the_output_is_wide_and_near():
    model = built(layers=EVERYTHING)
    with torch.no_grad():
        codes = model.encode(clips())
        exact = model.decode(codes)
        with torch.autocast("cpu", torch.bfloat16):
            coarse = model.decode(codes)
            assert model.encode(clips()).shape == codes.shape
    assert coarse.dtype == torch.float32
    assert (coarse - exact).abs().mean() < 0.03 * exact.abs().mean() + 0.01


def test_the_window_and_the_kinds_of_layers_come_from_the_configuration():
    model = built(layers=EVERYTHING, separate_first_frame=True, attend_time_window=7)
    kinds = [type(module) for module in model.modules()]
    assert {SeparateFirstFrameConv, GateLoop, LinearSpaceAttention} <= set(kinds) and kinds.count(
        Residual
    ) == 6
    assert [module.window for module in model.modules() if isinstance(module, TimeAttention)] == [
        7,
        7,
    ]
    assert not any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()
    )
