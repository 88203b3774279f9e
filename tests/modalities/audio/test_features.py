"""Audio features: alignment of frames, independence of padding, and loading of speech networks.

The speech networks are tiny and random; the speech embedding is the real one from its package.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tessera.losses.spectrogram import append_deltas, mfcc
from tessera.modalities.audio.features import (
    AudioFeatures,
    MFCCFeaturesConfig,
    SpeechFeaturesConfig,
    VoiceFeaturesConfig,
)

TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": [8, 8],
    "conv_kernel": [10, 4],
    "conv_stride": [5, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 5,
}


def build_network(kind: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    if kind == "wav2vec2":
        return transformers.Wav2Vec2Model(
            transformers.Wav2Vec2Config(
                **TINY, do_stable_layer_norm=True, feat_extract_norm="layer"
            )
        )
    return transformers.HubertModel(transformers.HubertConfig(**TINY))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("speech")
    for kind in ("wav2vec2", "hubert"):
        build_network(kind).save_pretrained(root / kind)
    (root / "wav2vec2/preprocessor_config.json").write_text(
        json.dumps({"do_normalize": True, "sampling_rate": 16_000})
    )
    return {kind: str(root / kind) for kind in ("wav2vec2", "hubert")}


def speech_config(
    folders: dict[str, str], kind: str = "hubert", layer: int = 2
) -> SpeechFeaturesConfig:
    return SpeechFeaturesConfig(path=folders[kind], layer=layer, hop=20)


def random_audio(samples: int, count: int = 3, seed: int = 0) -> Tensor:
    return 0.3 * torch.randn(count, 1, samples, generator=torch.Generator().manual_seed(seed))


KINDS = ["mfcc", "wav2vec2", "hubert", "voice"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def build_features(kind: str, folders: dict[str, str]) -> AudioFeatures:
    if kind == "mfcc":
        return MFCCFeaturesConfig(
            token_rate_hz=800.0, window_seconds=0.0025, bands=8, coefficients=4
        ).build()
    if kind == "voice":
        return VoiceFeaturesConfig().build()
    return speech_config(folders, kind).build()


@every_kind
@pytest.mark.parametrize("hops", [0.001, 0.5, 1, 1.01, 4.5])
def test_there_is_one_frame_per_started_hop(kind, hops, folders):
    extractor = build_features(kind, folders)
    samples = max(1, int(hops * extractor.hop))
    features = extractor(random_audio(samples))
    assert features.shape == (3, -(-samples // extractor.hop), extractor.dim)
    assert features.isfinite().all() and not features.requires_grad


@every_kind
def test_features_do_not_depend_on_padding_or_other_examples(kind, folders):
    extractor = build_features(kind, folders)
    hop = extractor.hop
    lengths_B = torch.tensor([6 * hop, 3 * hop - 1, 5])
    batch = random_audio(6 * hop)
    features = extractor(batch, lengths_B)
    for row, length in enumerate(lengths_B.tolist()):
        single = extractor(batch[row : row + 1, :, :length])
        frames = single.shape[1]
        torch.testing.assert_close(features[row, :frames], single[0], rtol=1e-4, atol=1e-5)
        assert not features[row, frames:].any()
    batch[1, 0, 3 * hop - 1 :] = 7.0
    assert torch.equal(extractor(batch, lengths_B), features)


@pytest.mark.parametrize("kind", ["mfcc", "wav2vec2", "hubert"])
def test_frames_are_centred_on_their_samples(kind, folders):
    """A click in the middle of a frame changes that frame most."""
    if kind == "mfcc":
        extractor = MFCCFeaturesConfig(
            token_rate_hz=800.0, window_seconds=0.0025, normalize_recordings=False
        ).build()
    else:
        extractor = speech_config(folders, kind, layer=0).build()
    quiet = 1e-3 * random_audio(400, count=1)
    click = quiet.clone()
    click[0, 0, 9 * 20 + 10] += 1.0
    if kind == "wav2vec2":  # normalization would change all samples
        extractor.normalize = False
    if kind == "mfcc":
        change_T = (extractor(click) - extractor(quiet))[0, :, :13].norm(dim=1)
    else:  # before the positional convolution, whose kernel is long
        network = extractor.network.network
        outputs = [
            network.feature_extractor(F.pad(audio[:, 0], (5, 5)))[0].T for audio in (click, quiet)
        ]
        assert len(outputs[0]) == 20 and extractor.receptive_field == 25
        change_T = (outputs[0] - outputs[1]).norm(dim=1)
    if kind != "hubert":  # its first layer normalizes over time
        assert int(change_T.argmax()) == 9 and change_T[[0, 4, 14, 19]].max() == 0


def test_mfcc_features_are_mfcc_with_deltas():
    audio = random_audio(3200)
    features = MFCCFeaturesConfig(normalize_recordings=False).build()(audio)
    expected = append_deltas(mfcc(audio[:, 0], rate_hz=16_000, window=400, hop=320)).mT
    assert features.shape == (3, 10, 39) and torch.equal(features, expected)


def test_normalized_mfcc_do_not_depend_on_loudness_and_microphone():
    """A filter and a gain add a constant to each coefficient."""
    audio = 0.1 * random_audio(16_000, count=1)
    extractor = MFCCFeaturesConfig().build()
    assert extractor(audio)[0, :, :13].mean(0).abs().max() < 1e-5
    filtered = F.conv1d(audio, torch.tensor([[[0.4, 1.0, 0.3]]]), padding=1)
    plain = MFCCFeaturesConfig(normalize_recordings=False).build()
    assert (plain(3 * filtered) - plain(audio))[0, :, :13].abs().mean() > 0.3
    assert (extractor(3 * filtered) - extractor(audio))[0, :, :13].abs().mean() < 0.15


@pytest.mark.parametrize("kind", ["wav2vec2", "hubert"])
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_layer_equals_that_of_the_complete_network(kind, layer, folders):
    audio = random_audio(395)[:, 0]
    std = (audio.var(1, keepdim=True, correction=0) + 1e-7).sqrt()
    normalized = (audio - audio.mean(1, keepdim=True)) / std
    padded = F.pad(normalized if kind == "wav2vec2" else audio, (2, 8))
    with torch.no_grad():
        output = build_network(kind).eval()(padded, output_hidden_states=True)
    features = speech_config(folders, kind, layer).build()(audio[:, None])
    torch.testing.assert_close(features, output.hidden_states[layer], rtol=1e-4, atol=1e-5)


def test_the_speech_embedding_separates_vowels_more_than_pitches():
    extractor = VoiceFeaturesConfig().build()

    def embed_vowel(pitch_hz: float, formants: tuple[float, ...]) -> Tensor:
        time, audio = torch.arange(16_000) / 16_000, torch.zeros(16_000)
        for harmonic in range(1, int(4000 / pitch_hz)):
            hertz = harmonic * pitch_hz
            amplitude = sum(1 / (1 + ((hertz - formant) / 80) ** 2) for formant in formants)
            audio += amplitude * torch.sin(2 * torch.pi * hertz * time)
        return extractor((0.3 * audio / audio.abs().max())[None, None])[0, 6]

    low_a, high_a = embed_vowel(110, (730, 1090)), embed_vowel(140, (730, 1090))
    low_i = embed_vowel(110, (270, 2290))
    assert (low_a - high_a).norm() < (low_a - low_i).norm()


def test_pretrained_networks_are_frozen_and_follow_the_dtype(folders):
    extractor = speech_config(folders).build()
    assert not list(extractor.parameters()) and not extractor.state_dict()
    extractor.train()
    assert not extractor.network.network.training
    assert extractor.double()(random_audio(100).double()).dtype == torch.float64


def test_autocast_does_not_change_the_features(folders):
    for kind in ("mfcc", "hubert"):
        extractor = build_features(kind, folders)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            features = extractor(random_audio(100))
        assert features.dtype == torch.float32
        assert torch.equal(features, extractor(random_audio(100)))


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MFCCFeaturesConfig(token_rate_hz=20.0), "is shorter than a frame"),
        (lambda: MFCCFeaturesConfig(token_rate_hz=30.0), "must divide the rate of 16,000 Hz"),
        (lambda: MFCCFeaturesConfig(coefficients=41), "1 to 40, .* mel bands, but got 41"),
        (lambda: MFCCFeaturesConfig(rate_hz=0), "rate_hz must be at least 1"),
        (lambda: SpeechFeaturesConfig(path=" "), "path is empty"),
        (lambda: SpeechFeaturesConfig(path="x", layer=-1), "layer must be at least 0"),
    ],
)
def test_invalid_settings_give_an_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_network_that_does_not_match_gives_the_setting_to_change(folders, tmp_path):
    with pytest.raises(ValueError, match="no folder .*nowhere.*nothing is downloaded"):
        SpeechFeaturesConfig(path=str(tmp_path / "nowhere")).build()
    with pytest.raises(ValueError, match="20 samples per frame, but hop is 320: set it to 20"):
        SpeechFeaturesConfig(path=folders["hubert"], layer=2).build()
    with pytest.raises(ValueError, match="16000 Hz, but rate_hz is 8000: set it to 16000"):
        SpeechFeaturesConfig(path=folders["wav2vec2"], layer=2, hop=20, rate_hz=8000).build()
    with pytest.raises(ValueError, match="3 layers, but layer is 4"):
        speech_config(folders, layer=4).build()
    transformers.BertModel(
        transformers.BertConfig(
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            vocab_size=9,
        )
    ).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="is a bert, which does not take audio samples"):
        SpeechFeaturesConfig(path=str(tmp_path / "bert")).build()


def test_an_incomplete_network_gives_an_error(tmp_path):
    folder = tmp_path / "incomplete"
    weights = {
        name: tensor
        for name, tensor in build_network("hubert").state_dict().items()
        if "layers.1." not in name
    }
    build_network("hubert").save_pretrained(folder, state_dict=weights)
    with pytest.raises(ValueError, match="are missing.*Download it again"):
        SpeechFeaturesConfig(path=str(folder), layer=2, hop=20).build()
    (Path(folder) / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="could not be loaded.*The original error"):
        SpeechFeaturesConfig(path=str(folder), layer=2, hop=20).build()


@pytest.mark.parametrize(
    ("missing", "config", "message"),
    [
        (
            "transformers",
            SpeechFeaturesConfig(path="x"),
            r"transformers, which is not installed .*pip install \"tessera\[text\]\"",
        ),
        (
            "onnxruntime",
            VoiceFeaturesConfig(),
            r"onnxruntime, which is not installed .*pip install \"tessera\[voice\]\"",
        ),
        (
            "openwakeword",
            VoiceFeaturesConfig(),
            r"openwakeword 0.5, .*not installed .*--no-deps openwakeword==0.5.1",
        ),
    ],
)
def test_a_missing_package_gives_the_command_to_install_it(missing, config, message, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError, match=message):
        config.build()
