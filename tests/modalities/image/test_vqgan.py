"""The image tokenizer's network: pictures to symbols and back, each by itself, with any of the
quantizers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.engine.distributed import Distributed
from tessera.modalities.image.vqgan import VQGAN, Attention, Residual, VQGANConfig
from tessera.nn.quantize import FSQConfig, LFQConfig, ResidualConfig, VQConfig
from tests.networks import awake

TINY = VQGANConfig(
    dim=8, max_channels=16, layers=2, blocks=(0, 1), quantizer=FSQConfig(levels=(4, 4, 4))
)

QUANTIZERS = {
    "fsq": FSQConfig(levels=(4, 4, 4)),
    "lfq": LFQConfig(codebook_size=64),
    "bsq": LFQConfig(codebook_size=64, spherical=True),
    "vq": VQConfig(codebook_size=64, code_dim=4),
    "residual fsq": ResidualConfig(quantizer=FSQConfig(levels=(4, 4)), levels=3),
    "residual lfq": ResidualConfig(quantizer=LFQConfig(codebook_size=16), levels=3),
    "residual vq": ResidualConfig(quantizer=VQConfig(codebook_size=16, code_dim=8), levels=3),
}


def built(**settings: Any) -> VQGAN:
    torch.manual_seed(0)
    return replace(TINY, **settings).build()


def pictures(count: int = 2, high: int = 16, to_fp32: int = 16, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.rand(count, channels, high, to_fp32, generator=generator) * 2 - 1


# ------------------------------------------------------------------------------------------------ encode and decode


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_decoding_the_codes_of_a_picture_gives_its_reconstruction_exactly(quantizer):
    model = awake(built(quantizer=QUANTIZERS[quantizer], attention=True)).eval()
    with torch.no_grad():
        rebuilt = model(pictures())
        codes = model.encode(pictures())
        assert torch.equal(codes, rebuilt.codes)
        assert torch.equal(model.decode(codes), rebuilt.output)


@pytest.mark.parametrize(("high", "wide"), [(16, 16), (8, 24), (4, 4)])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_symbol_stands_for_a_square_of_pixels(high, to_fp32, channels):
    model = built(channels=channels)
    rebuilt = model(pictures(3, high, to_fp32, channels))
    assert (
        rebuilt.output.shape == (3, channels, high, to_fp32)
        and rebuilt.output.dtype == torch.float32
    )
    assert (
        rebuilt.codes.shape == (3, high // 4, to_fp32 // 4) and rebuilt.codes.dtype == torch.int64
    )
    assert model.latent(pictures(3, high, to_fp32, channels)).shape == (
        3,
        high // 4,
        to_fp32 // 4,
        16,
    )
    assert rebuilt.codes.min() >= 0 and rebuilt.codes.max() < model.vocab_size == 64


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_the_stride_doubles_with_each_layer(layers):
    config = replace(TINY, layers=layers, blocks=(1,) * layers)
    assert config.stride == 2**layers
    assert config.build().encode(pictures(1, 32, 32)).shape == (1, 32 // 2**layers, 32 // 2**layers)


def test_residual_quantizers_write_several_symbols_for_each_place():
    model = built(quantizer=QUANTIZERS["residual fsq"])
    assert model.encode(pictures()).shape == (2, 4, 4, 3)


def test_the_last_layer_is_the_one_that_paints():
    model = built()
    rebuilt = model(pictures()).output
    (gradient,) = torch.autograd.grad(rebuilt.sum(), model.last_layer)
    assert model.last_layer.shape[0] == 3 and gradient.abs().sum() > 0


# -------------------------------------------------------------------------------------------------- each by itself


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("attention", [False, True])
def test_a_picture_is_rebuilt_the_same_whoever_its_neighbours_are(attention, mode):
    """No statistic of the batch enters, in either mode. (Other batch sizes may round otherwise; the
    codes agree.)"""
    model = awake(built(attention=attention)).train(mode == "train")
    whole = pictures(4)
    others = whole.clone()
    others[1:] = torch.flip(others[1:], [0, 3]) * 0.1
    with torch.no_grad():
        together, elsewhere, alone = model(whole), model(others), model(whole[:1])
    assert torch.equal(together.output[0], elsewhere.output[0])
    assert torch.equal(together.codes[0], alone.codes[0])
    torch.testing.assert_close(together.output[:1], alone.output, rtol=1e-4, atol=1e-5)


def reach(model: VQGAN) -> Tensor:
    """How strongly the latent of the first place depends on each pixel of a large picture."""
    image = pictures(1, 64, 64).requires_grad_()
    model.latent(image)[0, 0, 0].square().sum().backward()
    assert image.grad is not None
    return image.grad.abs().sum(1)[0]


def test_only_with_attention_does_a_symbol_depend_on_what_is_far_away():
    """No norm may look at the whole picture: a generator could not foretell the symbols of a flat
    background."""
    for attention in (False, True):
        far = reach(awake(built(attention=attention)))[32:, 32:]
        assert bool((far > 0).all()) == attention and bool((far > 0).any()) == attention


@pytest.mark.parametrize("part", [Residual, Attention])
def test_what_is_added_to_a_layer_starts_as_nothing_and_learns(part):
    added = part(16)
    grid = torch.randn(2, 16, 3, 3)
    assert torch.equal(added(grid), grid)
    (added(grid) - torch.randn(2, 16, 3, 3)).square().sum().backward()
    assert any(parameter.grad.abs().sum() > 0 for parameter in added.parameters())


# ---------------------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_every_quantizer_builds_steps_and_learns(quantizer):
    model = built(quantizer=QUANTIZERS[quantizer])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    target, errors = pictures(4), []
    for step in range(12):
        rebuilt = model(target)
        error = (rebuilt.output - target).abs().mean()
        loss = error + sum(rebuilt.penalties.values())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        for module in model.modules():
            if hasattr(module, "settle"):
                module.commit(Distributed(), step)
        errors.append(error.item())
    assert all(torch.isfinite(torch.tensor(errors))) and errors[-1] < errors[0]


def test_gradients_pass_through_the_symbols_to_the_encoder():
    model = built()
    (model(pictures()).output - pictures()).abs().mean().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.encoder[0].parameters())


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("size", "works"),
    [(15, "12 or 16"), (17, "16 or 20"), (3, "Use 4."), (1, "Use 4."), (126, "124 or 128")],
)
def test_a_size_that_does_not_fit_the_grid_is_refused_with_those_that_do(size, works):
    with pytest.raises(ValueError) as refused:
        TINY.refuse_size(size)
    letter = str(refused.value)
    assert f"{size} x {size}" in letter and "halves them 2 times" in letter and works in letter


@pytest.mark.parametrize(("high", "wide"), [(18, 16), (16, 18)])
def test_pictures_that_do_not_fit_are_refused_by_the_network_too(high, to_fp32):
    with pytest.raises(ValueError, match="multiple of 4"):
        built().encode(pictures(1, high, to_fp32))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"layers": 0, "blocks": ()}, "halves its pictures at least once, but layers is 0"),
        ({"blocks": (1, 1, 1)}, "needs 2 numbers, but it has 3"),
        ({"dim": 0}, "dim is 0"),
        ({"channels": 0}, "channels is 0"),
        ({"dim": 6, "widest": 18, "attention": True}, "18 channels .* 4 heads.* use .* 16 or 20"),
    ],
)
def test_a_network_that_cannot_be_built_is_refused_by_its_configuration(settings, says):
    with pytest.raises(ValueError, match=says):
        replace(TINY, **settings)


@pytest.mark.parametrize("dim", [1, 3, 11, 22, 50])
def test_any_width_can_be_built(dim):
    model = replace(TINY, dim=dim, max_channels=4 * dim).build()
    assert model(pictures()).output.shape == (2, 3, 16, 16)


def test_the_width_may_begin_to_double_later():
    assert VQGANConfig(dim=8, layers=3, blocks=(0, 0, 1)).stage_channels == [8, 16, 32, 64]
    assert VQGANConfig(dim=8, late=1, layers=3, blocks=(0, 0, 1)).stage_channels == [8, 8, 16, 32]
