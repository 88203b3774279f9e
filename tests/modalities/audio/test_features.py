"""Features of sounds: where frames stand, that padding changes nothing, and that networks of others
are read whole or refused.

The speech network is a tiny random one, made here; the voice network is the real one, from its
package.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from tessera.losses.spectra import mfcc, with_deltas
from tessera.modalities.audio.features import Features, MelFeatures, SpeechFeatures, VoiceFeatures

TINY = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24, "conv_dim": [8, 8],
    "conv_kernel": [10, 4], "conv_stride": [5, 4], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "vocab_size": 5,
}  # fmt: skip


def network(kind: str) -> transformers.PreTrainedModel:
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
        network(kind).save_pretrained(root / kind)
    (root / "wav2vec2/preprocessor_config.json").write_text(
        json.dumps({"do_normalize": True, "sampling_rate": 16_000})
    )
    return {kind: str(root / kind) for kind in ("wav2vec2", "hubert")}


def speech(folders: dict[str, str], kind: str = "hubert", layer: int = 2) -> SpeechFeatures:
    return SpeechFeatures(path=folders[kind], layer=layer, hop=20)


def sounds(samples: int, count: int = 3, seed: int = 0) -> Tensor:
    return 0.3 * torch.randn(count, 1, samples, generator=torch.Generator().manual_seed(seed))


KINDS = ["mel", "wav2vec2", "hubert", "voice"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def build(kind: str, folders: dict[str, str]) -> Features:
    if kind == "mel":
        return MelFeatures(window=40, hop=20, bands=8, coefficients=4).build()
    return VoiceFeatures().build() if kind == "voice" else speech(folders, kind).build()


@every_kind
@pytest.mark.parametrize("hops", [0.001, 0.5, 1, 1.01, 4.5])
def test_every_hop_of_samples_has_a_frame_and_the_last_may_be_filled_in_part(kind, hops, folders):
    features = build(kind, folders)
    samples = max(1, int(hops * features.hop))
    heard = features(sounds(samples))
    assert heard.shape == (3, -(-samples // features.hop), features.width)
    assert heard.isfinite().all() and not heard.requires_grad


@every_kind
def test_a_sound_is_heard_alike_alone_and_beside_longer_ones_whatever_follows_it(kind, folders):
    features = build(kind, folders)
    hop = features.hop
    lengths_B = torch.tensor([6 * hop, 3 * hop - 1, 5])
    padded = sounds(6 * hop)
    heard = features(padded, lengths_B)
    for number, length in enumerate(lengths_B.tolist()):
        alone = features(padded[number : number + 1, :, :length])
        torch.testing.assert_close(heard[number, : alone.shape[1]], alone[0], rtol=1e-4, atol=1e-5)
        assert not heard[number, alone.shape[1] :].any()
    padded[1, 0, 3 * hop - 1 :] = 7.0
    assert torch.equal(features(padded, lengths_B), heard)


@pytest.mark.parametrize("kind", ["mel", "wav2vec2", "hubert"])
def test_a_frame_is_heard_around_its_own_samples(kind, folders):
    """A click in the middle of a frame changes that frame and those near it most alike before and
    after."""
    features = (
        MelFeatures(window=40, hop=20).build()
        if kind == "mel"
        else speech(folders, kind, layer=0).build()
    )
    quiet = 1e-3 * sounds(400, count=1)
    click = quiet.clone()
    click[0, 0, 9 * 20 + 10] += 1.0
    if kind == "wav2vec2":  # what is evened is changed as a whole
        features.evened = False
    if kind == "mel":
        changed_T = (features(click) - features(quiet))[0, :, :13].norm(dim=1)
    else:  # before positions are added, which look far
        network = features.network.network
        seen = [
            network.feature_extractor(torch.nn.functional.pad(one[:, 0], (5, 5)))[0].T
            for one in (click, quiet)
        ]
        assert len(seen[0]) == 20 and features.reach == 25
        changed_T = (seen[0] - seen[1]).norm(dim=1)
    if kind != "hubert":  # whose first layer norms over time
        assert int(changed_T.argmax()) == 9 and changed_T[[0, 4, 14, 19]].max() == 0


def test_mel_features_are_mfcc_with_their_deltas():
    heard = MelFeatures().build()(sounds(3200))
    expected = with_deltas(mfcc(sounds(3200)[:, 0], rate_hz=16_000, window=400, hop=320)).mT
    assert heard.shape == (3, 10, 39) and torch.equal(heard, expected)


@pytest.mark.parametrize("kind", ["wav2vec2", "hubert"])
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_layer_is_what_the_whole_network_says_of_it(kind, layer, folders):
    sound = sounds(395)[:, 0]
    even = (sound - sound.mean(1, keepdim=True)) / (
        sound.var(1, keepdim=True, correction=0) + 1e-7
    ).sqrt()
    padded = torch.nn.functional.pad(even if kind == "wav2vec2" else sound, (2, 8))
    with torch.no_grad():
        expected = network(kind).eval()(padded, output_hidden_states=True).hidden_states[layer]
    heard = speech(folders, kind, layer).build()(sound[:, None])
    torch.testing.assert_close(heard, expected, rtol=1e-4, atol=1e-5)


def test_the_voice_network_hears_who_speaks_less_than_what_is_said():
    """Two vowels, each at two pitches: a vowel is nearer to itself at another pitch than to the
    other one."""
    features = VoiceFeatures().build()

    def vowel(pitch_hz: float, formants: tuple[float, ...]) -> Tensor:
        time, sound = torch.arange(16_000) / 16_000, torch.zeros(16_000)
        for harmonic in range(1, int(4000 / pitch_hz)):
            hertz = harmonic * pitch_hz
            loud = sum(1 / (1 + ((hertz - formant) / 80) ** 2) for formant in formants)
            sound += loud * torch.sin(2 * torch.pi * hertz * time)
        return (0.3 * sound / sound.abs().max())[None, None]

    low_a, high_a, low_i = (
        features(one)[0, 6]
        for one in (vowel(110, (730, 1090)), vowel(140, (730, 1090)), vowel(110, (270, 2290)))
    )
    assert (low_a - high_a).norm() < (low_a - low_i).norm()


def test_networks_of_others_are_held_and_not_trained_and_follow_to_another_precision(folders):
    features = speech(folders).build()
    assert not list(features.parameters()) and not features.state_dict()
    features.train()
    assert not features.network.network.training
    assert features.double()(sounds(100).double()).dtype == torch.float64


def test_under_autocast_nothing_is_heard_differently(folders):
    for kind in ("mel", "hubert"):
        features = build(kind, folders)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            heard = features(sounds(100))
        assert heard.dtype == torch.float32 and torch.equal(heard, features(sounds(100)))


# --------------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MelFeatures(window=100, hop=101), "at most the window"),
        (lambda: MelFeatures(coefficients=41), "41 coefficients.*40 mel bands"),
        (lambda: MelFeatures(rate_hz=0), "samples a second"),
        (lambda: SpeechFeatures(path=" "), "folder that holds it"),
        (lambda: SpeechFeatures(path="x", layer=-1), "counted from 0"),
    ],
)
def test_an_impossible_setting_is_refused_with_a_letter(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_speech_network_that_does_not_fit_is_refused_with_what_to_set(folders, tmp_path):
    with pytest.raises(ValueError, match="no folder .*nowhere.*nothing is downloaded"):
        SpeechFeatures(path=str(tmp_path / "nowhere")).build()
    with pytest.raises(ValueError, match="frame of every 20 samples, but hop is 320: set it to 20"):
        SpeechFeatures(path=folders["hubert"], layer=2).build()
    with pytest.raises(ValueError, match="16000 samples a second, but rate_hz is 8000"):
        SpeechFeatures(path=folders["wav2vec2"], layer=2, hop=20, rate_hz=8000).build()
    with pytest.raises(ValueError, match="3 layers, but layer 4"):
        speech(folders, layer=4).build()
    transformers.BertModel(
        transformers.BertConfig(
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            vocab_size=9,
        )
    ).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="is a bert, which does not listen to samples"):
        SpeechFeatures(path=str(tmp_path / "bert")).build()


def test_half_a_speech_network_and_one_that_is_no_network_are_refused(folders, tmp_path):
    half = tmp_path / "half"
    weights = {
        name: tensor
        for name, tensor in network("hubert").state_dict().items()
        if "layers.1." not in name
    }
    network("hubert").save_pretrained(half, state_dict=weights)
    with pytest.raises(ValueError, match="missing.*Fetch it again, whole"):
        SpeechFeatures(path=str(half), layer=2, hop=20).build()
    (Path(half) / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read.*The reader said"):
        SpeechFeatures(path=str(half), layer=2, hop=20).build()


@pytest.mark.parametrize(
    ("missing", "config", "words"),
    [
        (
            "transformers",
            SpeechFeatures(path="x"),
            r"transformers, which is not installed: pip install \"tessera\[text\]\"",
        ),
        (
            "onnxruntime",
            VoiceFeatures(),
            r"onnxruntime, which is not installed: pip install \"tessera\[voice\]\"",
        ),
        ("openwakeword", VoiceFeatures(), r"openwakeword 0.5.*tessera\[voice\]"),
    ],
)
def test_a_missing_library_is_named_with_what_to_install(missing, config, words, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError, match=words):
        config.build()
