"""The trainer for music and text: parameters of the research package, items in memory, errors."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.api.search import Search
from tessera.data.errors import UnreadableFile
from tessera.modalities.audio.media import Audio
from tessera.modalities.music.mulan import MuLaN, MuLaNConfig
from tessera.modalities.music.spectrogram_transformer import SpectrogramTransformerConfig
from tessera.modalities.music.synthetic import SyntheticMusic
from tessera.run.errors import UserError
from tessera.text.learned import LearnedTextConfig
from tessera.text.token_ids import TokenIdTextConfig
from tessera.trainers import MuLaNTrainer
from tessera.trainers.in_memory_music import ClippedWaveform, InMemoryMusic, find_max_samples
from tests.runs import assert_same_run, read_metrics

AUDIO = SpectrogramTransformerConfig(
    rate_hz=8000, window=256, hop=128, bands=16, patch=(8, 4), dim=16, depth=2, heads=2
)
TEXT = LearnedTextConfig(dim=16, depth=1, heads=2, vocab_size=300)
TOKEN_IDS = TokenIdTextConfig(vocab_size=50, dim=16, depth=1, heads=2)
SYNTHETIC = SyntheticMusic(12, samples=3000, rate_hz=8000)


def build_model(text: Any = TEXT, **settings: Any) -> MuLaN:
    torch.manual_seed(0)
    return MuLaNConfig(audio=AUDIO, text=text, latent=8).build(**settings)


def make_pairs(count: int = 12) -> list[tuple[torch.Tensor, str]]:
    examples = [SYNTHETIC.item(index, np.random.default_rng(index)) for index in range(count)]
    return [(torch.from_numpy(example.samples[0]), example.caption) for example in examples]


def make_token_id_pairs(count: int = 12) -> list[dict[str, Any]]:
    return [
        {"texts": torch.tensor([1 + index, 7, 0, 0]), "wavs": waveform}
        for index, (waveform, _) in enumerate(make_pairs(count))
    ]


def build_trainer(
    results: Path, dataset: Any = None, mulan: MuLaN | None = None, **settings: Any
) -> MuLaNTrainer:
    defaults = {
        "batch_size": 4,
        "num_train_steps": 4,
        "save_model_every": 2,
        "valid_frac": 0.3,
        "results_folder": results,
    }
    if dataset is None and "folder" not in settings:
        dataset = make_pairs()
    return MuLaNTrainer(mulan or build_model(), dataset, **(defaults | settings))


def test_parameters_and_defaults_are_those_of_the_research_package() -> None:
    documented = {
        "num_train_steps": None,
        "data_max_length": None,
        "folder": None,
        "lr": 3e-4,
        "grad_accum_every": 1,
        "betas": (0.9, 0.99),
        "max_grad_norm": 0.5,
        "valid_frac": 0.05,
        "random_split_seed": 42,
        "save_model_every": 1000,
        "results_folder": "./results",
        "use_lion": False,
        "force_clear_prev_results": None,
    }
    parameters = inspect.signature(MuLaNTrainer).parameters
    assert {name: parameters[name].default for name in documented} == documented


def test_a_resumed_run_equals_a_whole_one_and_can_be_searched(tmp_path: Path) -> None:
    whole = build_trainer(tmp_path / "whole")
    resumed = build_trainer(tmp_path / "resumed", num_train_steps=2)
    whole.train()
    resumed.train()
    again = build_trainer(tmp_path / "resumed")
    assert again.steps == 2
    again.train()
    assert again.steps == 4
    assert_same_run(tmp_path / "whole", tmp_path / "resumed", 4)
    records = read_metrics(tmp_path / "resumed")
    assert [r["step"] for r in records if r["kind"] == "validation"] == [2, 4]
    assert Search.load(tmp_path / "whole").embed_texts(["a harp"]).shape == (1, 8)


def test_all_held_out_pairs_are_evaluated(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path)
    trainer.train()
    [last] = [
        record
        for record in read_metrics(tmp_path)
        if record["kind"] == "validation" and record["step"] == 4
    ]
    assert last["examples"] == len(trainer.engine.validation) > 1
    assert "val_ema/text_to_media_R@1" in last


def test_training_starts_from_the_given_weights(tmp_path: Path) -> None:
    given = build_model()
    before = {name: value.clone() for name, value in given.named_parameters()}
    trainer = build_trainer(tmp_path, mulan=given)
    assert trainer.model is given
    assert all(torch.equal(value, before[name]) for name, value in given.named_parameters())
    trainer.train_step()
    assert not all(torch.equal(value, before[name]) for name, value in given.named_parameters())


def test_gradient_accumulation_increases_the_number_of_negatives(tmp_path: Path) -> None:
    settings = {"valid_frac": 0.0, "num_train_steps": 2}
    once = build_trainer(tmp_path / "once", batch_size=8, **settings).train_step()
    twice = build_trainer(
        tmp_path / "twice", batch_size=4, grad_accum_every=2, **settings
    ).train_step()
    assert once["model/contrastive"] == pytest.approx(twice["model/contrastive"], rel=1e-4)


def test_without_num_train_steps_training_takes_one_epoch(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, num_train_steps=None, valid_frac=0.0)
    assert trainer.run.engine.steps == 3


def test_lion_intermediate_layers_and_the_sigmoid_loss_are_supported(tmp_path: Path) -> None:
    text = LearnedTextConfig(dim=16, depth=2, heads=2, vocab_size=300)
    mulan = build_model(text, biased=True, layers=1)
    trainer = build_trainer(tmp_path, mulan=mulan, use_lion=True)
    task = trainer.run.task
    assert task.loss == "sigmoid" and task.layers == 1 and task.optimizer.name == "lion"
    assert "model/layers" in trainer.train_step()
    with pytest.raises(UserError, match="build it with biased=True"):
        build_trainer(tmp_path / "other", loss="sigmoid")


def test_training_on_a_folder_crops_to_the_requested_length(tmp_path: Path) -> None:
    for index, (waveform, caption) in enumerate(make_pairs()):
        path = tmp_path / "music" / f"{index}.wav"
        path.parent.mkdir(exist_ok=True)
        Audio(waveform[None].numpy(), 8000).write(path)
        path.with_suffix(".txt").write_text(caption)
    trainer = build_trainer(tmp_path / "results", folder=tmp_path / "music", data_max_length=2000)
    assert np.isfinite(trainer.train_step()["model/loss"])
    assert trainer.run.data.length == 2000


# ---- items in memory


def build_dataset(items: list[Any], takes_token_ids: bool = False, **how: Any) -> InMemoryMusic:
    return InMemoryMusic(items, 3000, 8000, takes_token_ids, **how)


def load_first(items: list[Any], **how: Any) -> Any:
    return build_dataset(items, **how).item(0, np.random.default_rng(0))


WAVEFORM = torch.linspace(-1, 1, 500)


@pytest.mark.parametrize(
    "item",
    [
        (WAVEFORM, "a harp"),
        ("a harp", WAVEFORM),
        (WAVEFORM.double().numpy(), "a harp"),
        (WAVEFORM[None].expand(2, -1), "a harp"),
        {"wavs": WAVEFORM, "raw_texts": "a harp"},
        {"caption": "a  harp", "audio": WAVEFORM},
        [WAVEFORM.half(), ["a harp", "a harp"]],
    ],
)
def test_values_are_identified_by_key_or_by_type(item: Any) -> None:
    example = load_first([item])
    assert example.caption == "a harp"
    assert example.length == 500 and example.samples.shape == (1, 3000)
    assert example.samples[0, :500] == pytest.approx(WAVEFORM.numpy(), abs=1e-3)
    assert not example.samples[0, 500:].any()


def test_an_example_with_several_captions_has_one_and_the_whole_set() -> None:
    dataset = build_dataset([(WAVEFORM, ["a harp", "slow strings"])])
    examples = [dataset.item(0, np.random.default_rng(seed)) for seed in range(8)]
    assert {example.caption for example in examples} == {"a harp", "slow strings"}
    assert {example.caption_set for example in examples} == {("a harp", "slow strings")}
    assert dataset.all_captions(0) == ["a harp", "slow strings"]


def test_token_ids_are_captions_of_a_model_that_takes_token_ids(tmp_path: Path) -> None:
    pairs = make_token_id_pairs()
    assert load_first(pairs, takes_token_ids=True).caption == "1 7", "zeros at the end are padding"
    items = [(torch.tensor([3, 4]), WAVEFORM)]
    assert load_first(items, takes_token_ids=True).caption == "3 4"
    assert build_trainer(tmp_path, pairs, build_model(TOKEN_IDS)).train_step()["model/loss"] < 10


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            (WAVEFORM, WAVEFORM, "a harp"),
            "two of its values can be the waveform, .*: give a dictionary with one of them as "
            "'wavs'",
        ),
        (("a harp", "a bell"), "two of its values can be the text"),
        ((WAVEFORM, "a harp", torch.tensor([1, 2])), "a text and token ids, but only one"),
        ((WAVEFORM,), "it has waveform, but an item must have a waveform and a text"),
        ((WAVEFORM, "  "), "its text is empty"),
        ((WAVEFORM, torch.tensor([1, 2])), "given as token ids, but the text encoder takes strin"),
        ({"wavs": WAVEFORM, "txt": "a harp"}, "it has the unknown key 'txt': did you mean"),
        ((WAVEFORM, torch.zeros(2, 3, 4)), "one of its values is torch.float32 of shape"),
        ((WAVEFORM, 3.5), "one of its values is a float, but values must be"),
        (WAVEFORM, "it is a Tensor"),
        ((torch.tensor([float("nan")] * 9), "a harp"), "NaN or infinite"),
        ((torch.zeros(500, 2), "a harp"), r"its waveform has the shape \(500, 2\)"),
    ],
)
def test_ambiguous_or_invalid_items_are_rejected_by_name(item: Any, message: str) -> None:
    with pytest.raises(UnreadableFile, match=message):
        load_first([item])


def test_long_waveforms_are_cropped_and_long_captions_are_not(tmp_path: Path) -> None:
    long = torch.arange(9000) / 9000
    assert find_max_samples([(WAVEFORM, "x"), (long, "y"), "not an item"]) == 9000
    dataset = build_dataset([(long, "x")])
    starts = {
        float(dataset.item(0, np.random.default_rng(seed)).samples[0, 0]) for seed in range(20)
    }
    assert len(starts) > 15
    centred = load_first([(long, "x")], crop="centre")
    assert centred.samples[0, 0] == pytest.approx(3000 / 9000, abs=1e-3)
    trainer = build_trainer(tmp_path, [*make_pairs(8), (WAVEFORM, "word " * 40)])
    assert trainer.engine.training.dataset.dataset.length == 3000
    captions = {
        caption
        for index in range(len(trainer.engine.training.dataset.dataset))
        for caption in trainer.engine.training.dataset.dataset.all_captions(index)
    }
    assert " ".join(["word"] * 40) in captions


# ---- invalid arguments


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 1}, r"A step has 1 pair\(s\), but the loss compares pairs"),
        ({"dataset": make_pairs(1)}, r"dataset has 1 pair\(s\), .*: give 2 or more"),
        ({"folder": "somewhere", "dataset": make_pairs(2)}, "both a dataset and a folder"),
        ({"force_clear_prev_results": True}, "earlier results are never deleted"),
        ({"accelerate_kwargs": {"split_batches": True}}, "split_batches=True, which is not supp"),
    ],
)
def test_invalid_arguments_are_rejected_before_anything_is_written(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        build_trainer(tmp_path, **settings)
    assert not list(tmp_path.iterdir())


def test_a_spectrogram_is_not_taken_for_a_waveform_of_many_channels() -> None:
    items = [(torch.rand(65, 200), "a harp")]
    with pytest.raises(UnreadableFile, match="65 rows, which looks like a spectrogram"):
        InMemoryMusic(items, 100, 8000, False).item(0, np.random.default_rng(0))


def test_clipping_of_loud_waveforms_is_announced() -> None:
    loud = InMemoryMusic([(torch.linspace(-2, 2, 100), "a harp")], 100, 8000, False)
    with pytest.warns(ClippedWaveform, match="beyond \\[-1, 1\\]"):
        example = loud.item(0, np.random.default_rng(0))
    assert np.abs(example.samples).max() == 1


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ((torch.rand(100) - 0.5, torch.tensor([1, 2])), "given as token ids, but"),
        ((torch.rand(100) - 0.5, ""), "its text is empty"),
        (("a harp", "two texts"), "two of its values can be the text"),
        (torch.rand(100), "an item must be a tuple or a dictionary"),
    ],
)
def test_unreadable_captions_are_reported_with_their_reason(
    item: Any, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=reason):
        build_trainer(tmp_path, [item] * 8, data_max_length=100)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_train_steps": "ten"}, "num_train_steps must be a whole number or None, got 'ten'"),
        ({"batch_size": 4.5}, "batch_size must be a whole number, got 4.5"),
        ({"use_lion": "yes"}, "use_lion must be True or False, got 'yes'"),
        ({"lr": True}, "lr must be a number, got True"),
    ],
)
def test_arguments_of_a_wrong_type_get_a_sentence(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        build_trainer(tmp_path, **settings)
