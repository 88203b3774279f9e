"""Tests of the VQGAN network with every quantizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.engine.distributed import Distributed
from tessera.modalities.image.vqgan import VQGAN, ResidualBlock, SelfAttention, VQGANConfig
from tessera.nn.quantize import FSQConfig, LFQConfig, ResidualConfig, SimVQConfig, VQConfig
from tests.networks import randomize_zero_weights

TINY = VQGANConfig(
    dim=8, max_channels=16, layers=2, blocks=(0, 1), quantizer=FSQConfig(levels=(4, 4, 4))
)

QUANTIZERS = {
    "fsq": FSQConfig(levels=(4, 4, 4)),
    "lfq": LFQConfig(codebook_size=64),
    "bsq": LFQConfig(codebook_size=64, spherical=True),
    "vq": VQConfig(codebook_size=64, code_dim=4),
    "simvq": SimVQConfig(codebook_size=64, code_dim=4),
    "residual fsq": ResidualConfig(quantizer=FSQConfig(levels=(4, 4)), num_quantizers=3),
    "residual lfq": ResidualConfig(quantizer=LFQConfig(codebook_size=16), num_quantizers=3),
    "residual vq": ResidualConfig(
        quantizer=VQConfig(codebook_size=16, code_dim=8), num_quantizers=3
    ),
}


def build(**settings: Any) -> VQGAN:
    torch.manual_seed(0)
    return replace(TINY, **settings).build()


def images(count: int = 2, height: int = 16, width: int = 16, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.rand(count, channels, height, width, generator=generator) * 2 - 1


# ---- encode and decode


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_decoded_codes_equal_the_reconstruction(quantizer):
    model = randomize_zero_weights(build(quantizer=QUANTIZERS[quantizer], attention=True)).eval()
    with torch.no_grad():
        reconstruction = model(images())
        codes = model.encode(images())
        assert torch.equal(codes, reconstruction.codes)
        assert torch.equal(model.decode(codes), reconstruction.output)


@pytest.mark.parametrize(("height", "width"), [(16, 16), (8, 24), (4, 4)])
@pytest.mark.parametrize("channels", [1, 3])
def test_one_code_covers_stride_by_stride_pixels(height, width, channels):
    model, pixels = build(channels=channels), images(3, height, width, channels)
    output, codes = model(pixels).output, model(pixels).codes
    assert output.shape == (3, channels, height, width) and output.dtype == torch.float32
    assert codes.shape == (3, height // 4, width // 4) and codes.dtype == torch.int64
    assert model.encode_latent(pixels).shape == (3, height // 4, width // 4, 16)
    assert codes.min() >= 0 and codes.max() < model.vocab_size == 64


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_stride_doubles_with_each_layer(layers):
    config = replace(TINY, layers=layers, blocks=(1,) * layers)
    assert config.stride == 2**layers
    assert config.build().encode(images(1, 32, 32)).shape == (1, 32 // 2**layers, 32 // 2**layers)


def test_residual_quantizers_give_several_codes_per_position():
    model = build(quantizer=QUANTIZERS["residual fsq"])
    assert model.encode(images()).shape == (2, 4, 4, 3)


def test_last_layer_computes_the_output():
    model = build()
    output = model(images()).output
    (gradient,) = torch.autograd.grad(output.sum(), model.last_layer)
    assert model.last_layer.shape[0] == 3 and gradient.abs().sum() > 0


# ---- independence


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("attention", [False, True])
def test_reconstruction_is_independent_of_the_rest_of_the_batch(attention, mode):
    """There are no batch statistics. Another batch size may round differently; codes agree."""
    model = randomize_zero_weights(build(attention=attention)).train(mode == "train")
    batch = images(4)
    changed = batch.clone()
    changed[1:] = torch.flip(changed[1:], [0, 3]) * 0.1
    with torch.no_grad():
        first, second, single = model(batch), model(changed), model(batch[:1])
    assert torch.equal(first.output[0], second.output[0])
    assert torch.equal(first.codes[0], single.codes[0])
    torch.testing.assert_close(first.output[:1], single.output, rtol=1e-4, atol=1e-5)


def receptive_field(model: VQGAN) -> Tensor:
    """Return how strongly the first position of the latent depends on each pixel, (64, 64)."""
    image = images(1, 64, 64).requires_grad_()
    model.encode_latent(image)[0, 0, 0].square().sum().backward()
    assert image.grad is not None
    return image.grad.abs().sum(1)[0]


def test_codes_depend_on_distant_pixels_only_with_attention():
    """A norm over the whole image would make the codes of a flat background unpredictable."""
    for attention in (False, True):
        far = receptive_field(randomize_zero_weights(build(attention=attention)))[32:, 32:]
        assert bool((far > 0).all()) == attention and bool((far > 0).any()) == attention


@pytest.mark.parametrize("block_class", [ResidualBlock, SelfAttention])
def test_blocks_start_as_the_identity_and_receive_gradients(block_class):
    block = block_class(16)
    grid = torch.randn(2, 16, 3, 3)
    assert torch.equal(block(grid), grid)
    (block(grid) - torch.randn(2, 16, 3, 3)).square().sum().backward()
    assert any(parameter.grad.abs().sum() > 0 for parameter in block.parameters())


# ---- training


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_every_quantizer_trains(quantizer):
    model = build(quantizer=QUANTIZERS[quantizer])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    target, errors = images(4), []
    for step in range(12):
        reconstruction = model(target)
        error = (reconstruction.output - target).abs().mean()
        loss = error + sum(reconstruction.penalties.values())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        for module in model.modules():
            if hasattr(module, "commit"):
                module.commit(Distributed(), step)
        errors.append(error.item())
    assert all(torch.isfinite(torch.tensor(errors))) and errors[-1] < errors[0]


def test_gradients_pass_through_the_quantizer_to_the_encoder():
    model = build()
    (model(images()).output - images()).abs().mean().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.encoder[0].parameters())


# ---- errors


@pytest.mark.parametrize(
    ("size", "valid"),
    [(15, "12 or 16"), (17, "16 or 20"), (3, "use 4."), (1, "use 4."), (126, "124 or 128")],
)
def test_invalid_size_is_an_error_that_lists_valid_ones(size, valid):
    with pytest.raises(ValueError) as caught:
        TINY.validate_size(size)
    message = str(caught.value)
    assert f"size is {size}," in message and "downsamples 2 times" in message and valid in message


@pytest.mark.parametrize(("height", "width"), [(18, 16), (16, 18)])
def test_encode_rejects_images_of_invalid_size(height, width):
    with pytest.raises(ValueError, match="multiple of 4"):
        build().encode(images(1, height, width))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 0, "blocks": ()}, "layers must be at least 1, got 0"),
        ({"blocks": (1, 1, 1)}, "blocks has 3 numbers, but with layers=2 it needs 2"),
        ({"dim": 0}, "dim must be at least 1, got 0"),
        ({"channels": 0}, "channels must be at least 1, got 0"),
        ({"max_channels": 0}, "max_channels must be at least 1, got 0"),
        (
            {"dim": 6, "max_channels": 18, "attention": True},
            "18 channels .* 4 heads.* max_channels to 16 or 20",
        ),
    ],
)
def test_invalid_configurations_are_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **settings)


@pytest.mark.parametrize("dim", [1, 3, 11, 22, 50])
def test_any_dim_can_be_built(dim):
    model = replace(TINY, dim=dim, max_channels=4 * dim).build()
    assert model(images()).output.shape == (2, 3, 16, 16)


def test_channels_are_constant_in_the_first_stages():
    assert VQGANConfig(dim=8, layers=3, blocks=(0, 0, 1)).stage_channels == [8, 16, 32, 64]
    assert VQGANConfig(dim=8, constant_stages=1, layers=3, blocks=(0, 0, 1)).stage_channels == [
        8,
        8,
        16,
        32,
    ]
