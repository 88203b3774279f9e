"""Codecs of others: the same surface as ours, the same symbols as their own library gives, and
nothing that comes from chance.

EnCodec and DAC are tiny random ones, made here.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from tessera.modalities.audio.pretrained_codec import PretrainedCodecConfig
from tessera.run.config import decode, encode

ENCODEC = {
    "sampling_rate": 8000, "hidden_size": 8, "num_filters": 4, "upsampling_ratios": [5, 4], "codebook_size": 16,
    "target_bandwidths": [1.6, 4.8], "num_lstm_layers": 1, "compress": 2,
}  # fmt: skip
DAC = {
    "sampling_rate": 8000, "encoder_hidden_size": 4, "downsampling_ratios": [4, 5], "decoder_hidden_size": 16, "n_codebooks": 3,
    "codebook_size": 16, "codebook_dim": 4,
}  # fmt: skip


@torch.no_grad()
def network(kind: str) -> transformers.PreTrainedModel:
    """Its tables are filled with what they will meet: as they begin, all symbols of a level are
    nearly or exactly one."""
    torch.manual_seed(0)
    if kind == "encodec":
        made = transformers.EncodecModel(transformers.EncodecConfig(**ENCODEC))
        rest = made.encoder(sounds(count=8, seed=9))
        for layer in made.quantizer.layers:
            layer.codebook.embed.copy_(some_of(rest))
            rest = rest - layer.decode(layer.encode(rest))
    else:
        made = transformers.DacModel(transformers.DacConfig(**DAC))
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        rest = made.encoder(sounds(count=8, seed=9))
        for table in made.quantizer.quantizers:
            table.codebook.weight.copy_(some_of(table.in_proj(rest)))
            rest = rest - table(rest)[0]
    return made.eval()


def some_of(latent_BDT: Tensor) -> Tensor:
    return latent_BDT.mT.flatten(0, 1)[torch.randperm(len(latent_BDT) * latent_BDT.shape[2])[:16]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("codecs")
    for kind in ("encodec", "dac"):
        network(kind).save_pretrained(root / kind)
    return {kind: str(root / kind) for kind in ("encodec", "dac")}


every_kind = pytest.mark.parametrize("kind", ["encodec", "dac"])


def sounds(samples: int = 400, count: int = 3, seed: int = 0) -> Tensor:
    return 0.5 * torch.randn(count, 1, samples, generator=torch.Generator().manual_seed(seed))


@dataclass
class AudioDataConfig:
    length: int
    rate_hz: int = 8000


def theirs(kind: str, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (B, T, L) and the sound that the library itself makes of them."""
    with torch.no_grad():
        if kind == "encodec":
            encoded = network(kind).encode(samples, bandwidth=4.8)
            return encoded.audio_codes[0].mT, network(kind).decode(
                encoded.audio_codes, encoded.audio_scales
            ).audio_values
        codes = network(kind).encode(samples).audio_codes
        return codes.mT, network(kind).decode(audio_codes=codes).audio_values[:, None]


@every_kind
def test_symbols_and_sounds_are_those_of_their_own_library(kind, folders):
    codec = PretrainedCodecConfig(path=folders[kind]).build()
    codes, sound = theirs(kind, sounds())
    assert torch.equal(codec.encode(sounds()), codes) and codes.shape == (3, 20, 3)
    assert all(len(level.unique()) > 3 for level in codes.unbind(-1)), "this test would not notice"
    with torch.no_grad():
        ours = codec.decode(codes)
    assert ours.shape == (3, 1, 400)
    torch.testing.assert_close(ours[..., : sound.shape[-1]], sound[..., :400], rtol=1e-4, atol=1e-5)


@every_kind
def test_it_says_what_becomes_of_sounds(kind, folders):
    config = PretrainedCodecConfig(path=folders[kind])
    codec = config.build()
    assert (codec.hop, codec.levels, codec.vocab_size, codec.rate_hz) == (20, 3, 16, 8000)
    assert (
        codec.quantizer.levels == 3
        and not codec.quantizer.needs_global_stats
        and not codec.quantizer.has_quantizer_dropout
    )
    assert config.grid(AudioDataConfig(400)) == (20,) and config.grid(AudioDataConfig(401)) == (21,)
    config.validate_data(AudioDataConfig(400))
    with pytest.raises(
        ValueError, match="16000 samples a second.*knows 8000: set rate_hz of the data to 8000"
    ):
        config.validate_data(AudioDataConfig(400, rate_hz=16_000))


@every_kind
@pytest.mark.parametrize("samples", [1, 19, 20, 21, 395])
def test_an_unfinished_frame_is_filled_with_silence_and_cut_off_again(kind, samples, folders):
    codec = PretrainedCodecConfig(path=folders[kind]).build()
    rebuilt = codec(sounds(samples))
    assert rebuilt.output.shape == (3, 1, samples) and rebuilt.codes.shape == (
        3,
        -(-samples // 20),
        3,
    )
    assert (
        torch.equal(codec.decode(rebuilt.codes)[..., :samples], rebuilt.output)
        and rebuilt.penalties == {}
    )


@every_kind
def test_a_sound_is_the_same_alone_and_beside_longer_ones(kind, folders):
    codec = PretrainedCodecConfig(path=folders[kind]).build()
    lengths_B = torch.tensor([400, 130, 0])
    batch = codec(sounds(), lengths_B)
    alone = codec(sounds()[1:2, :, :130])
    assert torch.equal(batch.codes[1, :7], alone.codes[0])
    assert (batch.codes[1, 7:] == -1).all() and (batch.codes[2] == -1).all()
    torch.testing.assert_close(batch.output[1, :, :130], alone.output[0], rtol=1e-4, atol=1e-5)
    assert not batch.output[1, :, 140:].any() and not batch.output[2].any()


@every_kind
def test_the_first_levels_are_decoded_by_themselves_and_fewer_can_be_asked_for(kind, folders):
    codec = PretrainedCodecConfig(path=folders[kind]).build()
    codes = codec.encode(sounds())
    with torch.no_grad():
        one, all_of_them = codec.decode(codes[..., :1]), codec.decode(codes)
        hash_seed = codec.decode(codes, num_quantizers_B=torch.tensor([1, 3, 1]))
    torch.testing.assert_close(hash_seed[[0, 2]], one[[0, 2]], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(hash_seed[1], all_of_them[1], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(one, all_of_them, atol=1e-4)
    two = PretrainedCodecConfig(path=folders[kind], levels=2).build()
    assert two.levels == two.quantizer.levels == 2 and torch.equal(
        two.encode(sounds()), codes[..., :2]
    )


@every_kind
@pytest.mark.parametrize("training", [True, False])
def test_training_mode_changes_no_symbol_and_only_the_decoder_has_gradients(
    kind, training, folders
):
    codec = PretrainedCodecConfig(path=folders[kind]).build().train(training)
    rebuilt = codec(sounds())
    assert torch.equal(rebuilt.codes, theirs(kind, sounds())[0])
    rebuilt.output.square().mean().backward()
    assert any(parameter.grad is not None for parameter in codec.network.decoder.parameters())
    assert all(parameter.grad is None for parameter in codec.network.encoder.parameters())


@every_kind
def test_with_the_weights_of_a_checkpoint_the_folder_may_be_gone(kind, folders, tmp_path):
    place = tmp_path / "codec"
    shutil.copytree(folders[kind], place)
    config = PretrainedCodecConfig(path=str(place), levels=2)
    codec = config.build()
    shutil.rmtree(place)
    stored = decode(PretrainedCodecConfig, encode(config))
    assert stored == config
    again = stored.build()
    with torch.no_grad():
        assert again.decode(codec.encode(sounds()))[..., :390].isnan().all(), (
            "no sound comes from chance"
        )
        again.load_state_dict(codec.state_dict())
        assert torch.equal(again.encode(sounds()), codec.encode(sounds()))
        assert torch.equal(again(sounds()).output, codec(sounds()).output)


def test_the_facts_say_nothing_of_where_it_lies_or_who_wrote_it(folders):
    config = PretrainedCodecConfig(path=folders["dac"])
    assert folders["dac"] not in config.facts and "version" not in config.facts
    assert replace(config, levels=2).facts == config.facts


def test_what_is_no_codec_of_one_channel_is_refused_with_a_letter(folders, tmp_path):
    with pytest.raises(ValueError, match="no folder ''"):
        PretrainedCodecConfig()
    with pytest.raises(ValueError, match="no folder .*nowhere"):
        PretrainedCodecConfig(path=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="1 to 3 levels, but 4 are asked for"):
        PretrainedCodecConfig(path=folders["dac"], levels=4)
    transformers.EncodecModel(
        transformers.EncodecConfig(
            **ENCODEC | {"audio_channels": 2}, normalize=True, chunk_length_s=1.0, overlap=0.01
        )
    ).save_pretrained(tmp_path / "stereo")
    with pytest.raises(ValueError, match="two channels.*24 kHz"):
        PretrainedCodecConfig(path=str(tmp_path / "stereo"))
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert/config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="is a bert, and only EnCodec and DAC"):
        PretrainedCodecConfig(path=str(tmp_path / "bert"))
    (tmp_path / "bert/config.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read.*The reader said"):
        PretrainedCodecConfig(path=str(tmp_path / "bert"))


def test_half_a_codec_is_refused(folders, tmp_path):
    weights = {
        name: tensor
        for name, tensor in network("dac").state_dict().items()
        if "decoder" not in name
    }
    network("dac").save_pretrained(tmp_path / "half", state_dict=weights)
    with pytest.raises(ValueError, match="missing.*Fetch it again, whole"):
        PretrainedCodecConfig(path=str(tmp_path / "half")).build()
    Path(tmp_path / "half/model.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot be read.*weights as .safetensors"):
        PretrainedCodecConfig(path=str(tmp_path / "half")).build()


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        (torch.zeros(2, 5, 4, dtype=torch.long), "codec of 3 levels"),
        (torch.zeros(2, 5, dtype=torch.long), "give .batch, frames, levels."),
        (torch.full((2, 5, 3), 16), "A code of 16.*16 symbols"),
    ],
)
def test_codes_of_another_codec_are_refused(codes, words, folders):
    with pytest.raises(ValueError, match=words):
        PretrainedCodecConfig(path=folders["dac"]).build().decode(codes)


def test_what_is_no_sound_is_refused(folders):
    codec = PretrainedCodecConfig(path=folders["dac"]).build()
    for tensor in (
        torch.zeros(2, 2, 100),
        torch.zeros(2, 100),
        torch.zeros(2, 1, 9, dtype=torch.long),
    ):
        with pytest.raises(ValueError, match="no batch of sounds"):
            codec.encode(tensor)
    with pytest.raises(ValueError, match="sound of 0 samples.*nothing to write"):
        codec.encode(torch.zeros(2, 1, 0))
