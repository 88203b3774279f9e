"""Points as symbols: the table follows the points, MuLan and the table stay as they are while a
generator learns."""

from __future__ import annotations

import pytest
import torch

from tessera.modalities.music.latent_quantizer import LatentQuantizerConfig, MuLaNEmbedQuantizer
from tessera.modalities.music.mulan import MuLaN, MuLaNConfig
from tessera.modalities.music.spectrogram_transformer import SpectrogramTransformerConfig
from tessera.text.encoder import LearnedTextConfig

TEXTS = ["a slow tune", "drums", "bells"]


def mulan() -> MuLaN:
    audio = SpectrogramTransformerConfig(
        rate_hz=8000, window=256, hop=128, bands=16, patch=(8, 4), width=16, depth=1, heads=2
    )
    return MuLaNConfig(
        audio=audio, text=LearnedTextConfig(width=16, depth=1, heads=2, tokens=300), latent=8
    ).build()


def points(count: int = 600) -> torch.Tensor:
    """Some clouds on the sphere."""
    centres = torch.randn(12, 8)
    return torch.nn.functional.normalize(
        centres[torch.arange(count) % 12] + 0.3 * torch.randn(count, 8), dim=-1
    )


@pytest.fixture
def quantizer() -> MuLaNEmbedQuantizer:
    return LatentQuantizerConfig(levels=4, codebook_size=32).build(
        mulan(), {"coarse": 6, "fine": 10}
    )


def test_more_levels_tell_more_of_a_point(quantizer: MuLaNEmbedQuantizer) -> None:
    some = points()
    told = quantizer.fit(some)
    assert 0.9 < told <= 1
    codes = quantizer.codes(some)
    assert codes.shape == (600, 4) and codes.max() < 32
    misses = [
        float((quantizer.latents(codes[:, :levels]) - some).square().mean())
        for levels in (1, 2, 3, 4)
    ]
    assert misses == sorted(misses, reverse=True) and misses[-1] < misses[0] / 3


def test_each_namespace_has_a_table_of_its_own(quantizer: MuLaNEmbedQuantizer) -> None:
    quantizer.fit(points())
    codes = quantizer.codes(points(5))
    coarse, fine = (quantizer.condition(codes, name) for name in ("coarse", "fine"))
    assert coarse.shape == (5, 4, 6) and fine.shape == (5, 4, 10)
    assert torch.equal(coarse[2, 3], quantizer.embeddings["coarse"][3, codes[2, 3]])
    coarse.sum().backward()
    assert (
        quantizer.embeddings["coarse"].grad is not None
        and quantizer.embeddings["fine"].grad is None
    )


def test_music_and_texts_are_conditions_of_one_kind(quantizer: MuLaNEmbedQuantizer) -> None:
    quantizer.fit(points())
    sounds = torch.randn(3, 2000) / 4
    assert (
        quantizer.of_audio(sounds, "fine").shape
        == quantizer.of_texts(TEXTS, "fine").shape
        == (3, 4, 10)
    )
    expected = quantizer.codes(quantizer.mulan.get_text_latents(TEXTS))
    assert torch.equal(quantizer.of_texts(TEXTS, "fine"), quantizer.condition(expected, "fine"))


def test_while_a_generator_learns_only_the_embeddings_move(quantizer: MuLaNEmbedQuantizer) -> None:
    quantizer.fit(points())
    assert {name.split(".")[0] for name, _ in quantizer.named_parameters()} == {"embeddings"}
    before = {
        name: value.clone()
        for name, value in quantizer.state_dict().items()
        if name.startswith("quantizer")
    }
    quantizer.train()
    quantizer.of_texts(TEXTS, "coarse").sum().backward()
    assert not quantizer.quantizer.training and not quantizer.mulan.training
    assert all(level.notes is None for level in quantizer.quantizer.cascade)
    assert all(torch.equal(quantizer.state_dict()[name], value) for name, value in before.items())
    assert not any(name.startswith("mulan") for name in quantizer.state_dict()), (
        "MuLan is kept where it was trained"
    )


def test_it_follows_to_another_precision_with_mulan(quantizer: MuLaNEmbedQuantizer) -> None:
    quantizer.double()
    assert next(quantizer.mulan.parameters()).dtype == torch.float64


def test_what_cannot_be_is_refused(quantizer: MuLaNEmbedQuantizer) -> None:
    with pytest.raises(ValueError, match="has not been fitted"):
        quantizer.codes(points(3))
    with pytest.raises(ValueError, match="there are 1"):
        quantizer.fit(points(1))
    quantizer.fit(points())
    with pytest.raises(ValueError, match="no namespace 'semantic': there are coarse, fine"):
        quantizer.of_texts(TEXTS, "semantic")
    with pytest.raises(ValueError, match="at least one namespace"):
        LatentQuantizerConfig().build(mulan(), {})
