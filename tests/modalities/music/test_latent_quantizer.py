"""The latent quantizer: codebooks fit the embeddings, and training changes only the namespaces."""

from __future__ import annotations

import pytest
import torch

from tessera.modalities.music.latent_quantizer import LatentQuantizerConfig, MuLaNEmbedQuantizer
from tessera.modalities.music.mulan import MuLaN, MuLaNConfig
from tessera.modalities.music.spectrogram_transformer import SpectrogramTransformerConfig
from tessera.text.learned import LearnedTextConfig

TEXTS = ["a slow tune", "drums", "bells"]


def build_mulan() -> MuLaN:
    audio = SpectrogramTransformerConfig(
        rate_hz=8000, window=256, hop=128, bands=16, patch=(8, 4), dim=16, depth=1, heads=2
    )
    return MuLaNConfig(
        audio=audio, text=LearnedTextConfig(dim=16, depth=1, heads=2, vocab_size=300), latent=8
    ).build()


def sample_embeddings(count: int = 600) -> torch.Tensor:
    """Sample clusters on the unit sphere."""
    centres = torch.randn(12, 8)
    return torch.nn.functional.normalize(
        centres[torch.arange(count) % 12] + 0.3 * torch.randn(count, 8), dim=-1
    )


@pytest.fixture
def quantizer() -> MuLaNEmbedQuantizer:
    return LatentQuantizerConfig(num_quantizers=4, codebook_size=32).build(
        build_mulan(), {"coarse": 6, "fine": 10}
    )


def test_more_quantizers_explain_more_of_an_embedding(quantizer: MuLaNEmbedQuantizer) -> None:
    latents = sample_embeddings()
    explained = quantizer.fit(latents)
    assert 0.9 < explained <= 1
    codes = quantizer.codes(latents)
    assert codes.shape == (600, 4) and codes.max() < 32
    errors = [
        float((quantizer.latents(codes[:, :num_quantizers]) - latents).square().mean())
        for num_quantizers in (1, 2, 3, 4)
    ]
    assert errors == sorted(errors, reverse=True) and errors[-1] < errors[0] / 3


def test_each_namespace_has_its_own_embeddings(quantizer: MuLaNEmbedQuantizer) -> None:
    quantizer.fit(sample_embeddings())
    codes = quantizer.codes(sample_embeddings(5))
    coarse, fine = (quantizer.condition(codes, name) for name in ("coarse", "fine"))
    assert coarse.shape == (5, 4, 6) and fine.shape == (5, 4, 10)
    assert torch.equal(coarse[2, 3], quantizer.embeddings["coarse"][3, codes[2, 3]])
    coarse.sum().backward()
    assert (
        quantizer.embeddings["coarse"].grad is not None
        and quantizer.embeddings["fine"].grad is None
    )


def test_audio_and_text_give_conditions_of_the_same_shape(quantizer: MuLaNEmbedQuantizer) -> None:
    quantizer.fit(sample_embeddings())
    audio = torch.randn(3, 2000) / 4
    assert (
        quantizer.condition_on_audio(audio, "fine").shape
        == quantizer.condition_on_text(TEXTS, "fine").shape
        == (3, 4, 10)
    )
    expected = quantizer.codes(quantizer.mulan.get_text_latents(TEXTS))
    assert torch.equal(
        quantizer.condition_on_text(TEXTS, "fine"), quantizer.condition(expected, "fine")
    )


def test_training_updates_only_the_namespaces(quantizer: MuLaNEmbedQuantizer) -> None:
    quantizer.fit(sample_embeddings())
    assert {name.split(".")[0] for name, _ in quantizer.named_parameters()} == {"embeddings"}
    before = {
        name: value.clone()
        for name, value in quantizer.state_dict().items()
        if name.startswith("quantizer")
    }
    quantizer.train()
    quantizer.condition_on_text(TEXTS, "coarse").sum().backward()
    assert not quantizer.quantizer.training and not quantizer.mulan.training
    assert all(level.stats is None for level in quantizer.quantizer.quantizers)
    assert all(torch.equal(quantizer.state_dict()[name], value) for name, value in before.items())
    assert not any(name.startswith("mulan") for name in quantizer.state_dict()), (
        "MuLan is not saved with the quantizer"
    )


def test_mulan_follows_a_change_of_dtype(quantizer: MuLaNEmbedQuantizer) -> None:
    quantizer.double()
    assert next(quantizer.mulan.parameters()).dtype == torch.float64


def test_invalid_calls_raise_an_error(quantizer: MuLaNEmbedQuantizer) -> None:
    with pytest.raises(ValueError, match="codebooks are not fitted"):
        quantizer.codes(sample_embeddings(3))
    with pytest.raises(ValueError, match="at least 2 embeddings, got 1"):
        quantizer.fit(sample_embeddings(1))
    quantizer.fit(sample_embeddings())
    with pytest.raises(ValueError, match="no namespace 'semantic': use one of coarse, fine"):
        quantizer.condition_on_text(TEXTS, "semantic")
    with pytest.raises(ValueError, match="at least one generator"):
        LatentQuantizerConfig().build(build_mulan(), {})
