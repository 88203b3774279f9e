"""Tests of the MAGVIT-v2 network: encoding at once and in chunks, causality, layers, errors."""

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
from tessera.modalities.video.magvit2 import LayerSpec, VideoTokenizer, VideoTokenizerConfig
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
from tests.networks import perturb_weights

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
"""A small configuration with time factor 4 and stride 2."""

ALL_LAYERS = (
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
    "residual fsq": ResidualConfig(quantizer=FSQConfig(levels=(4, 4)), num_quantizers=3),
}

NETWORKS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "all layers": {"layers": ALL_LAYERS},
    "separate first frame": {"separate_first_frame": True},
    "decoder of its own": {
        "layers": ("compress_space", "compress_time", "compress_time", "factorized_residual"),
        "decoder_layers": (
            "compress_space",
            "factorized_residual",
            "compress_time",
            "compress_time",
            "factorized_residual:2",
        ),
        "overlapping_upsample": True,
    },
    "lfq": {"quantizer": LFQConfig(codebook_size=64)},
}
every_network = pytest.mark.parametrize("network", NETWORKS)


def build(**settings: Any) -> VideoTokenizer:
    torch.manual_seed(0)
    return perturb_weights(replace(TINY, **settings).build()).eval()


def videos(
    frames: int = 9, count: int = 2, side: int = 8, channels: int = 3, seed: int = 5
) -> Tensor:
    return (
        torch.rand(
            count, channels, frames, side, side, generator=torch.Generator().manual_seed(seed)
        )
        * 2
        - 1
    )


# ---- encode and decode


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_decoded_codes_equal_the_reconstruction(quantizer):
    model = build(quantizer=QUANTIZERS[quantizer])
    with torch.no_grad():
        reconstruction, codes = model(videos()), model.encode(videos())
        assert torch.equal(codes, reconstruction.codes)
        assert torch.equal(model.decode(codes), reconstruction.output)
        assert torch.equal(model.tokenize(videos()), codes)


@pytest.mark.parametrize(("frames", "latent_frames"), [(1, 1), (5, 2), (9, 3), (17, 5)])
@pytest.mark.parametrize("channels", [1, 3])
def test_frames_after_the_first_are_compressed_by_the_time_factor(frames, latent_frames, channels):
    model = build(channels=channels)
    video = torch.zeros(2, channels, frames, 8, 12)
    reconstruction = model(video)
    assert (
        reconstruction.codes.shape == (2, latent_frames, 4, 6)
        and reconstruction.codes.dtype == torch.int64
    )
    assert (
        reconstruction.output.shape == video.shape
        and reconstruction.output.dtype == torch.float32
        and reconstruction.output.is_contiguous()
    )
    assert model.encode_latent(video).shape == (2, latent_frames, 4, 6, 16)
    assert reconstruction.codes.min() >= 0 and reconstruction.codes.max() < model.vocab_size == 64


def test_residual_quantizers_give_several_codes_per_position():
    assert build(quantizer=QUANTIZERS["residual fsq"]).encode(videos()).shape == (2, 3, 4, 4, 3)


def test_last_layer_computes_the_output():
    for separate in (False, True):
        model = build(separate_first_frame=separate)
        (gradient,) = torch.autograd.grad(model(videos()).output.sum(), model.last_layer)
        assert model.last_layer.shape[0] == 3 and gradient.abs().sum() > 0


@dataclass
class VideoData:
    size: int
    frames: int


@dataclass
class ImageData:
    size: int


def test_grid_of_data_is_the_shape_of_its_codes():
    assert (
        TINY.grid(VideoData(size=8, frames=17))
        == (5, 4, 4)
        == tuple(build().encode(videos(17)).shape[1:])
    )
    assert TINY.grid(ImageData(size=8)) == (1, 4, 4)
    TINY.validate_data(VideoData(size=8, frames=17))
    TINY.validate_data(ImageData(size=8))
    for invalid in (VideoData(size=9, frames=17), VideoData(size=8, frames=16), ImageData(size=7)):
        with pytest.raises(ValueError, match="must be .*multiple"):
            TINY.validate_data(invalid)


# ---- flattened codes


def test_flattened_codes_are_decoded_on_the_given_grid():
    model = build()
    with torch.no_grad():
        codes = model.encode(videos())
        video = model.decode(codes)
        assert torch.equal(model.decode_from_code_indices(codes), video)
        assert torch.equal(model.decode_from_code_indices(codes.flatten(1), shape=(3, 4, 4)), video)
        assert torch.equal(model.decode_from_code_indices(codes.flatten(1), shape=(4, 4)), video)
        small = model.encode(videos(17, side=2))  # 5 frames of 1 x 1, an unambiguous grid
        assert torch.equal(model.decode_from_code_indices(small.flatten(1)), model.decode(small))


def test_flattened_codes_of_several_quantizers_are_decoded():
    model = build(quantizer=QUANTIZERS["residual fsq"])
    with torch.no_grad():
        codes = model.encode(videos())
        video = model.decode(codes)
        assert torch.equal(
            model.decode_from_code_indices(codes.flatten(1, 3), shape=(3, 4, 4)), video
        )
        assert torch.equal(model.decode_from_code_indices(codes), video)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            None,
            r"48 flattened codes is ambiguous, it may be \(3, 4, 4\) or \(12, 2, 2\) or "
            r"\(48, 1, 1\): give shape=",
        ),
        ((3, 4, 5), r"48 flattened codes do not fill a grid of \(3, 4, 5\)"),
        ((5, 5), r"48 flattened codes do not fill a grid of \(5, 5\)"),
        ((48,), r"48 flattened codes do not fill a grid of \(48,\)"),
        ((0, 4), r"48 flattened codes do not fill a grid of \(0, 4\)"),
    ],
)
def test_ambiguous_or_wrong_grid_is_an_error(shape, message):
    with pytest.raises(ValueError, match=message):
        build().decode_from_code_indices(torch.zeros(1, 48, dtype=torch.int64), shape=shape)


# ---- causality


@every_network
@pytest.mark.parametrize("known", [1, 2])
def test_codes_do_not_depend_on_later_frames(network, known):
    model, video = build(**NETWORKS[network]), videos()
    other = video.clone()
    other[:, :, 1 + 4 * (known - 1) :] = videos(seed=6)[:, :, 1 + 4 * (known - 1) :]
    with torch.no_grad():
        one, two = model.encode_latent(video), model.encode_latent(other)
    assert torch.equal(one[:, :known], two[:, :known]) and not torch.equal(
        one[:, known], two[:, known]
    )
    assert torch.equal(model.encode(video)[:, :known], model.encode(other)[:, :known])


@every_network
@pytest.mark.parametrize("known", [1, 2])
def test_decoded_frames_do_not_depend_on_later_codes(network, known):
    model = build(**NETWORKS[network])
    codes = torch.randint(64, (2, 3, 4, 4))
    other = codes.clone()
    other[:, known:] = 63 - codes[:, known:]
    unchanged = 1 + 4 * (known - 1)
    with torch.no_grad():
        one, two = model.decode(codes), model.decode(other)
    assert torch.equal(one[:, :, :unchanged], two[:, :, :unchanged]) and not torch.equal(
        one[:, :, unchanged], two[:, :, unchanged]
    )


@every_network
def test_image_has_the_codes_of_a_first_frame(network):
    model, video = build(**NETWORKS[network]), videos()
    with torch.no_grad():
        codes = model.encode(video[:, :, 0])
        assert torch.equal(codes, model.encode(video[:, :, :1]))
        assert torch.equal(codes, model.encode(video)[:, :1])
        first = model.decode(codes)
        torch.testing.assert_close(first, model(video).output[:, :, :1], rtol=1e-4, atol=1e-5)
        assert first.shape == (2, 3, 1, 8, 8)


@every_network
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_reconstruction_is_independent_of_the_rest_of_the_batch(network, mode):
    model, batch = build(**NETWORKS[network]).train(mode == "train"), videos(count=3)
    changed = batch.clone()
    changed[1:] = 0.1 * batch[1:].flip(0, 4)
    with torch.no_grad():
        first, second, single = model(batch), model(changed), model(batch[:1])
    assert torch.equal(first.output[0], second.output[0])
    assert torch.equal(first.codes[0], single.codes[0])
    torch.testing.assert_close(first.output[:1], single.output, rtol=1e-4, atol=1e-5)


# ---- chunks


@every_network
@pytest.mark.parametrize(
    "lengths", [[1] * 17, [4, 4, 4, 4, 1], [3, 5, 7, 1, 1], [1, 16], [17]], ids=str
)
def test_encoding_in_chunks_gives_the_codes_of_the_whole_video(network, lengths):
    model, video = build(**NETWORKS[network]), videos(17)
    chunks = list(model.encode_chunks(video.split(lengths, dim=2)))
    assert all(chunk.shape[1] for chunk in chunks) and len(chunks) <= len(lengths)
    assert torch.equal(torch.cat(chunks, dim=1), model.encode(video))


@every_network
@pytest.mark.parametrize("lengths", [[1] * 5, [2, 2, 1], [3, 2], [1, 4], [5]], ids=str)
def test_decoding_in_chunks_gives_the_whole_video(network, lengths):
    model = build(**NETWORKS[network])
    codes = torch.randint(64, (2, 5, 4, 4))
    chunks = list(model.decode_chunks(codes.split(lengths, dim=1)))
    assert [chunk.shape[2] for chunk in chunks] == [
        4 * length - 3 * (number == 0) for number, length in enumerate(lengths)
    ]
    with torch.no_grad():
        torch.testing.assert_close(
            torch.cat(chunks, dim=2), model.decode(codes), rtol=1e-5, atol=1e-5
        )


def test_codes_are_yielded_as_soon_as_they_are_determined():
    """Latent frame 1 + k covers the frames up to 1 + 4k and is yielded with the last of them."""
    model, consumed = build(), []
    frames = (
        consumed.append(number) or frame for number, frame in enumerate(videos(9).split(1, dim=2))
    )
    counts = [len(consumed) for _ in model.encode_chunks(frames)]
    assert counts == [1, 5, 9]


def test_chunks_may_be_single_images():
    model, video = build(), videos(5)
    chunks = list(model.encode_chunks(video.unbind(2)))
    assert torch.equal(torch.cat(chunks, dim=1), model.encode(video))


def test_empty_chunks_have_no_effect():
    model, video = build(), videos(5)
    chunks = list(
        model.encode_chunks([video[:, :, :0], video[:, :, :2], video[:, :, :0], video[:, :, 2:]])
    )
    assert torch.equal(torch.cat(chunks, dim=1), model.encode(video))


class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.numel = max(
            [self.numel, *(one.numel() for one in tree_leaves(result) if isinstance(one, Tensor))]
        )
        return result


@pytest.mark.parametrize("network", ["tiny", "all layers"])
def test_memory_of_chunked_processing_does_not_grow_with_length(network):
    model = build(**NETWORKS[network])

    def largest(frames: int) -> tuple[int, int]:
        with LargestTensor() as encoding:
            codes = list(
                model.encode_chunks(
                    itertools.chain(
                        [videos(1, count=1)], itertools.repeat(videos(4, count=1), frames // 4)
                    )
                )
            )
        with LargestTensor() as decoding:
            assert sum(chunk.shape[2] for chunk in model.decode_chunks(codes)) == frames
        return encoding.numel, decoding.numel

    assert largest(101) == largest(21)


@every_network
def test_streaming_state_does_not_grow(network):
    model = build(**NETWORKS[network])
    stream, sizes = StreamingState(memory={}), []
    with torch.no_grad():
        for chunk in [videos(1), *[videos(4)] * 20]:
            model.encoder(model.to_channels_last(chunk), stream)
            sizes.append(sum(kept.untyped_storage().nbytes() for kept in stream.memory.values()))
    assert len(set(sizes[4:])) == 1


def test_chunked_processing_changes_neither_graph_nor_state():
    model, video = build(), videos()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    codes = list(model.encode_chunks(video.split(3, dim=2)))
    again = list(model.encode_chunks(video.split(3, dim=2)))
    frames = list(model.decode_chunks(codes))
    assert all(map(torch.equal, codes, again)) and not any(chunk.requires_grad for chunk in frames)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.is_grad_enabled()


def test_invalid_total_number_of_frames_is_an_error_at_the_end():
    chunks = build().encode_chunks(videos(8).split(4, dim=2))
    assert next(chunks).shape[1] == 1 and next(chunks).shape[1] == 1
    with pytest.raises(ValueError, match="video has 8 frames, but .*: use 5 or 9"):
        next(chunks)


@pytest.mark.parametrize("other", [videos(4, count=3), videos(4, side=10)])
def test_chunks_of_different_videos_are_an_error(other):
    with pytest.raises(
        ValueError, match="follows one of .* may differ only in their number of frames"
    ):
        list(build().encode_chunks([videos(5), other]))
    model = build()
    with pytest.raises(ValueError, match="may differ only in their number of frames"):
        list(
            model.decode_chunks(
                [model.encode(videos(5)), torch.zeros(*other.shape[:1], 1, 5, 5, dtype=torch.int64)]
            )
        )


# ---- layers


def test_layer_names_are_parsed():
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
    assert config.layer_specs == [
        LayerSpec("residual", 16, 16),
        LayerSpec("compress_space", 16, 32),
        LayerSpec("consecutive_residual", 32, 32, repeats=3),
        LayerSpec("compress_time", 32, 40),
        LayerSpec("compress_space", 40, 12),
    ]
    assert (config.stride, config.time_factor, config.latent_dim) == (4, 2, 12)
    assert VideoTokenizerConfig(dim=16, layers=()).latent_dim == 16


def test_layers_may_be_pairs_of_a_name_and_a_number():
    pairs = VideoTokenizerConfig(layers=("residual", ("consecutive_residual", 2), ("residual",)))
    names = VideoTokenizerConfig(layers=("residual", "consecutive_residual:2", "residual"))
    assert pairs == names


def test_decoder_mirrors_the_encoder():
    model = build(layers=(*ALL_LAYERS, "compress_space:12"))
    encoder, decoder = (
        [type(layer).__name__.replace("Downsample", "Upsample") for layer in half]
        for half in (model.encoder, model.decoder)
    )
    assert encoder[1:-1] == decoder[:-1][::-1] and len(encoder) == 13
    assert model(videos()).output.shape == videos().shape


@pytest.mark.parametrize("dim", [1, 3, 11, 22])
def test_any_dim_can_be_built(dim):
    assert build(dim=dim, max_channels=4 * dim)(videos()).output.shape == videos().shape


def test_network_without_compression_keeps_the_resolution():
    assert build(layers=("residual",)).encode(videos(6)).shape == (2, 6, 8, 8)


def test_config_can_be_encoded_and_decoded():
    config = replace(TINY, layers=ALL_LAYERS, quantizer=LFQConfig(codebook_size=256))
    assert decode(VideoTokenizerConfig, encode(config)) == config


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (("residul",), "no layer 'residul': did you mean 'residual'"),
        (("compres_space:32",), "no layer 'compres_space:32': did you mean 'compress_space'"),
        (("cond_atend_time",), "did you mean 'attend_time'"),
        (
            ("xyzzy",),
            r"no layer 'xyzzy'\. The layers are residual, consecutive_residual, factorized",
        ),
        (("residual:two",), "no layer 'residual:two': did you mean 'residual'"),
        (("",), "no layer ''"),
        (("residual:2",), "'residual:2' takes no number: use 'residual'"),
        (
            ("consecutive_residual",),
            "needs a number of at least 1 after its name, such as consecutive_residual:2",
        ),
        (("consecutive_residual:0",), "needs a number of at least 1"),
        (
            ("compress_time:0",),
            "needs a number of at least 1 after its name, such as compress_time:2",
        ),
        (
            ("cond_compress_space",),
            "'cond_compress_space' has no conditioned form: use 'compress_space'",
        ),
        (
            ("cond_residual",),
            "'cond_residual' is conditioned on a vector, but cond_dim is None: .* use 'residual'",
        ),
    ],
)
def test_invalid_layer_names_are_errors_with_suggestions(layers, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, layers=layers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 0}, "dim must be at least 1, got 0"),
        ({"channels": 0}, "channels must be at least 1, got 0"),
        ({"max_channels": 0}, "max_channels must be at least 1, got 0"),
        ({"attend_time_window": 0}, "attend_time_window must be at least 1, got 0"),
        ({"input_kernel": 4}, "input_kernel must be odd and at least 1, got 4"),
        ({"output_kernel": -1}, "output_kernel must be odd and at least 1, got -1"),
        ({"head_dim": 7}, "head_dim must be even and at least 4, .* got 7: use 6"),
        ({"linear_head_dim": 2}, "linear_head_dim must be even and at least 4, .* got 2: use 4"),
        ({"cond_dim": 5}, "cond_dim is 5, but no layer is conditioned"),
    ],
)
def test_invalid_configurations_are_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **settings)


# ---- conditions

CONDITIONED = (
    "cond_residual",
    "compress_space",
    "cond_linear_attend_space",
    "cond_attend_space",
    "compress_time",
)
CONDITIONED += ("cond_attend_time", "cond_gateloop_time", "compress_time")


@pytest.mark.parametrize("layer", [name for name in CONDITIONED if name.startswith("cond_")])
def test_conditioned_layers_depend_on_the_condition(layer):
    model = build(layers=("compress_space", layer, "compress_time", "compress_time"), cond_dim=5)
    one, two = torch.randn(2, 5), torch.randn(2, 5)
    with torch.no_grad():
        codes = model.encode(videos(), one)
        assert not torch.equal(
            model.encode_latent(videos(), one), model.encode_latent(videos(), two)
        )
        assert not torch.equal(model.decode(codes, one), model.decode(codes, two))
        assert torch.equal(model(videos(), one).output, model.decode(codes, one))


def test_conditioned_chunks_equal_the_whole_video():
    model, condition = build(layers=CONDITIONED, cond_dim=5), torch.randn(2, 5)
    with torch.no_grad():
        codes = model.encode(videos(), condition)
        assert torch.equal(
            torch.cat(list(model.encode_chunks(videos().split(2, dim=2), condition)), dim=1), codes
        )
        frames = torch.cat(list(model.decode_chunks(codes.split(1, dim=1), condition)), dim=2)
        torch.testing.assert_close(frames, model.decode(codes, condition), rtol=1e-5, atol=1e-5)


def test_missing_misshaped_or_unused_condition_is_an_error():
    model = build(layers=CONDITIONED, cond_dim=5)
    with pytest.raises(ValueError, match=r"condition of shape \(batch, 5\), got None"):
        model(videos())
    with pytest.raises(
        ValueError, match=r"condition of shape \(batch, 5\), got the shape \(2, 4\)"
    ):
        list(model.encode_chunks([videos()], torch.zeros(2, 4)))
    with pytest.raises(ValueError, match="no layer of this tokenizer is conditioned"):
        build().decode(torch.zeros(1, 1, 4, 4, dtype=torch.int64), torch.zeros(1, 5))


# ---- errors


@pytest.mark.parametrize(
    ("frames", "valid"),
    [
        (16, "use 13 or 17, for example 17 frames for 5 latent frames"),
        (2, "use 1 or 5"),
        (0, "use 1 or 5"),
    ],
)
def test_invalid_number_of_frames_is_an_error_that_lists_valid_ones(frames, valid):
    with pytest.raises(ValueError, match=f"video has {frames} frames, but .*{valid}"):
        build().encode(videos(frames))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 3, 1, 7, 8), "7 x 8, but .* multiples of 2: instead of 7, use 6 or 8"),
        ((1, 3, 1, 8, 1), "8 x 1, but .* instead of 1, use 2"),
        ((1, 3, 1, 8, 0), "8 x 0, but .* use 2"),
        (
            (1, 1, 1, 8, 8),
            r"shape \(1, 1, 1, 8, 8\) .* of shape \(batch, 3, frames, height, width\)",
        ),
        ((3, 8, 8), r"shape \(3, 8, 8\) .* but videos are floats"),
    ],
)
def test_videos_of_invalid_shape_are_an_error(shape, message):
    with pytest.raises(ValueError, match=message):
        build().encode(torch.zeros(shape))


def test_uint8_videos_are_an_error():
    with pytest.raises(ValueError, match=r"torch.uint8, but videos are floats in \[-1, 1\]"):
        build().encode(torch.zeros(1, 3, 1, 8, 8, dtype=torch.uint8))


@pytest.mark.parametrize("shape", [(1, 48), (1, 3, 4), (1, 3, 4, 4, 2), (1, 0, 4, 4)])
def test_codes_of_invalid_shape_are_an_error(shape):
    for method in (build().decode, lambda codes: list(build().decode_chunks([codes]))):
        with pytest.raises(ValueError, match=r"but \(batch, frames, height, width\) is expected"):
            method(torch.zeros(shape, dtype=torch.int64))


# ---- training


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_every_quantizer_trains(quantizer):
    torch.manual_seed(0)
    model = replace(TINY, quantizer=QUANTIZERS[quantizer]).build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    target, errors = videos(5), []
    for step in range(12):
        reconstruction = model(target)
        error = (reconstruction.output - target).abs().mean()
        loss = error + sum(reconstruction.penalties.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for module in model.modules():
            if hasattr(module, "commit"):
                module.commit(Distributed(), step)
        errors.append(error.item())
    assert all(torch.isfinite(torch.tensor(errors))) and errors[-1] < errors[0]


@every_network
@pytest.mark.parametrize("frames", [1, 9])
def test_every_parameter_receives_a_gradient(network, frames):
    """DDP fails for parameters without a gradient, and a batch may contain only images."""
    model = build(**NETWORKS[network]).train()
    reconstruction = model(videos(frames))
    (
        (reconstruction.output - videos(frames)).square().mean()
        + sum(reconstruction.penalties.values())
    ).backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not without
    zero = [
        name for name, parameter in model.named_parameters() if not parameter.grad.abs().sum() > 0
    ]
    assert frames == 1 or not zero


def test_gradients_pass_through_the_quantizer_to_the_first_layer():
    torch.manual_seed(0)
    model = TINY.build()
    (model(videos()).output - videos()).abs().mean().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.encoder[0].parameters())


def test_large_lfq_codebook_needs_no_tensor_of_its_size():
    """The entropies of LFQ are computed in groups of bits: no tensor has close to 2^18 elements."""
    model = build(dim=4, max_channels=8, quantizer=LFQConfig(codebook_size=2**18)).train()
    with LargestTensor() as largest:
        reconstruction = model(videos(5))
        (reconstruction.output.square().mean() + sum(reconstruction.penalties.values())).backward()
    assert model.vocab_size == 2**18 and "entropy" in reconstruction.penalties
    assert largest.numel < 2**18 // 8


def test_output_under_autocast_is_float32_and_close():
    model = build(layers=ALL_LAYERS)
    with torch.no_grad():
        codes = model.encode(videos())
        exact = model.decode(codes)
        with torch.autocast("cpu", torch.bfloat16):
            approximate = model.decode(codes)
            assert model.encode(videos()).shape == codes.shape
    assert approximate.dtype == torch.float32
    assert (approximate - exact).abs().mean() < 0.03 * exact.abs().mean() + 0.01


def test_layers_and_window_follow_the_configuration():
    model = build(layers=ALL_LAYERS, separate_first_frame=True, attend_time_window=7)
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


# ---- layers of the decoder


def test_decoder_layers_change_the_decoder_only():
    layers = ("compress_space", "compress_time", "residual")
    plain, other = (
        build(layers=layers, decoder_layers=decoder)
        for decoder in (None, ("compress_space", "residual", "compress_time", "residual"))
    )
    assert list(plain.encoder.state_dict()) == list(other.encoder.state_dict())
    assert len(other.decoder) == len(plain.decoder) + 1
    assert plain.config.grid(DataSize(size=8, frames=5)) == (3, 4, 4)


@dataclass
class DataSize:
    size: int
    frames: int


def test_decoder_layers_with_other_compressions_are_an_error():
    with pytest.raises(ValueError, match="must have the compressions of layers"):
        replace(TINY, decoder_layers=("compress_time", "compress_space", "compress_time"))


def test_a_frame_kernel_of_one_pixel_equals_the_convolution():
    layer = build(layers=("factorized_residual",)).encoder[1].time
    x = torch.randn(2, 5, 4, 4, 8, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([x[:, :1], x[:, :1], x], dim=1).movedim(-1, 1)
    expected = layer.convolution(padded).movedim(1, -1)
    torch.testing.assert_close(layer(x, StreamingState()), expected)


def test_long_videos_are_decoded_in_chunks_without_gradients():
    model = build()
    codes = torch.randint(0, 64, (1, 20, 4, 4), generator=torch.Generator().manual_seed(0))
    whole = model.decode(codes)  # with gradients, at once
    sizes = []
    model.decoder.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[1]))
    with torch.no_grad():
        torch.testing.assert_close(model.decode(codes), whole)
    assert sizes == [8, 8, 4]
