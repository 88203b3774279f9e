"""The front door of music and texts: theirs in name and parameters, without the defects (shared
facts: SEEDS 2.5)."""

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
from tessera.trainers.in_memory_music import InMemoryMusic, max_len
from tests.runs import assert_same_run, read_metrics

AUDIO = SpectrogramTransformerConfig(
    rate_hz=8000, window=256, hop=128, bands=16, patch=(8, 4), width=16, depth=2, heads=2
)
WORDS = LearnedTextConfig(dim=16, depth=1, heads=2, vocab_size=300)
NUMBERS = TokenIdTextConfig(vocab_size=50, dim=16, depth=1, heads=2)
TOYS = SyntheticMusic(12, samples=3000, rate_hz=8000)


def model(text: Any = WORDS, **how: Any) -> MuLaN:
    torch.manual_seed(0)
    return MuLaNConfig(audio=AUDIO, text=text, latent=8).build(**how)


def pairs(count: int = 12) -> list[tuple[torch.Tensor, str]]:
    examples = [TOYS.item(number, np.random.default_rng(number)) for number in range(count)]
    return [(torch.from_numpy(example.samples[0]), example.caption) for example in examples]


def numbered(count: int = 12) -> list[dict[str, Any]]:
    return [
        {"texts": torch.tensor([1 + number, 7, 0, 0]), "wavs": wave}
        for number, (wave, _) in enumerate(pairs(count))
    ]


def trainer(
    results: Path, dataset: Any = None, mulan: MuLaN | None = None, **settings: Any
) -> MuLaNTrainer:
    given = {
        "batch_size": 4,
        "num_train_steps": 4,
        "save_model_every": 2,
        "valid_frac": 0.3,
        "results_folder": results,
    }
    return MuLaNTrainer(
        mulan or model(),
        dataset if dataset is not None or "folder" in settings else pairs(),
        **(given | settings),
    )


def test_the_defaults_are_those_of_the_research_code() -> None:
    theirs = {
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
    ours = {
        name: parameter.default
        for name, parameter in inspect.signature(MuLaNTrainer).parameters.items()
    }
    assert {name: ours[name] for name in theirs} == theirs


def test_a_run_can_be_searched_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole, cut = trainer(tmp_path / "whole"), trainer(tmp_path / "cut", num_train_steps=2)
    whole.train()
    cut.train()
    again = trainer(tmp_path / "cut")
    assert again.steps == 2
    again.train()
    assert again.steps == 4
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 4)
    assert [r["step"] for r in read_metrics(tmp_path / "cut") if r["kind"] == "validation"] == [2, 4]
    assert Search.load(tmp_path / "whole").texts(["a harp"]).shape == (1, 8)


def test_the_held_out_pairs_are_measured(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.train()
    [last] = [
        record
        for record in read_metrics(tmp_path)
        if record["kind"] == "validation" and record["step"] == 4
    ]
    assert last["examples"] == len(made.engine.validation) > 1 and "val_ema/by_text_r1" in last


def test_the_network_begins_with_the_weights_it_was_given(tmp_path: Path) -> None:
    given = model()
    made = trainer(tmp_path, mulan=given)
    assert all(
        torch.equal(made.model.state_dict()[name], value)
        for name, value in given.state_dict().items()
        if "merges" not in name
    )


def test_accumulation_enlarges_what_a_text_is_told_apart_from(tmp_path: Path) -> None:
    once = trainer(tmp_path / "once", batch_size=8, valid_frac=0.0, num_train_steps=2).train_step()
    twice = trainer(
        tmp_path / "twice", batch_size=4, grad_accum_every=2, valid_frac=0.0, num_train_steps=2
    ).train_step()
    assert once["model/contrast"] == pytest.approx(twice["model/contrast"], rel=1e-4)


def test_one_pass_is_one_pass(tmp_path: Path) -> None:
    assert trainer(tmp_path, num_train_steps=None, valid_frac=0.0).run.engine.steps == 3


def test_lion_and_layers_and_sigmoid(tmp_path: Path) -> None:
    mulan = model(LearnedTextConfig(dim=16, depth=2, heads=2, vocab_size=300), biased=True, layers=1)
    made = trainer(tmp_path, mulan=mulan, use_lion=True)
    assert (
        made.run.task.loss == "sigmoid"
        and made.run.task.layers == 1
        and made.run.task.optimizer.name == "lion"
    )
    assert "model/layers" in made.train_step()
    with pytest.raises(UserError, match="build it with biased=True"):
        trainer(tmp_path / "other", loss="sigmoid")


def test_a_folder_will_do_as_well(tmp_path: Path) -> None:
    for number, (wave, caption) in enumerate(pairs()):
        place = tmp_path / "music" / f"{number}.wav"
        place.parent.mkdir(exist_ok=True)
        Audio(wave[None].numpy(), 8000).write(place)
        place.with_suffix(".txt").write_text(caption)
    made = trainer(tmp_path / "results", folder=tmp_path / "music", data_max_length=2000)
    assert np.isfinite(made.train_step()["model/loss"])
    assert made.run.data.length == 2000


# ---- what an item may be


def source(items: list[Any], numbers: bool = False, **how: Any) -> InMemoryMusic:
    return InMemoryMusic(items, 3000, 8000, numbers, **how)


def drawn(items: list[Any], **how: Any) -> Any:
    return source(items, **how).item(0, np.random.default_rng(0))


WAVE = torch.linspace(-1, 1, 500)


@pytest.mark.parametrize(
    "item",
    [
        (WAVE, "a harp"),
        ("a harp", WAVE),
        (WAVE.double().numpy(), "a harp"),
        (WAVE[None].expand(2, -1), "a harp"),
        {"wavs": WAVE, "raw_texts": "a harp"},
        {"caption": "a  harp", "audio": WAVE},
        [WAVE.half(), ["a harp", "a harp"]],
    ],
)
def test_values_are_known_by_name_or_by_type(item: Any) -> None:
    example = drawn([item])
    assert (
        example.caption == "a harp" and example.length == 500 and example.samples.shape == (1, 3000)
    )
    assert (
        example.samples[0, :500] == pytest.approx(WAVE.numpy(), abs=1e-3)
        and not example.samples[0, 500:].any()
    )


def test_texts_in_numbers_are_read_by_a_network_that_reads_numbers(tmp_path: Path) -> None:
    assert drawn(numbered(), numbers=True).caption == "1 7", "zeros at the end are padding"
    assert drawn([(torch.tensor([3, 4]), WAVE)], numbers=True).caption == "3 4"
    assert trainer(tmp_path, numbered(), model(NUMBERS)).train_step()["model/loss"] < 10


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (
            (WAVE, WAVE, "a harp"),
            "two of its values could be the wave: give a dictionary, with one of them as 'wavs'",
        ),
        (("a harp", "a bell"), "two of its values could be the text"),
        ((WAVE, "a harp", torch.tensor([1, 2])), "a text in words and one in numbers"),
        ((WAVE,), "it has wave, but an item is a wave and what is said"),
        ((WAVE, "  "), "nothing is said about it"),
        ((WAVE, torch.tensor([1, 2])), "its text is in numbers, but the network reads words"),
        ({"wavs": WAVE, "txt": "a harp"}, "it has 'txt': did you mean"),
        ((WAVE, torch.zeros(2, 3, 4)), "nobody knows what torch.float32 of shape"),
        ((WAVE, 3.5), "nobody knows what a float is"),
        (WAVE, "it is a Tensor"),
        ((torch.tensor([float("nan")] * 9), "a harp"), "not numbers"),
        ((torch.zeros(500, 2), "a harp"), r"its wave is \(500, 2\)"),
    ],
)
def test_what_is_unclear_is_refused_by_name(item: Any, says: str) -> None:
    with pytest.raises(UnreadableFile, match=f"clip-000000: .*{says}"):
        drawn([item])


def test_longer_clips_are_cut_and_captions_are_not(tmp_path: Path) -> None:
    long = torch.arange(9000) / 9000
    assert max_len([(WAVE, "x"), (long, "y"), "no clip"]) == 9000
    starts = {
        float(source([(long, "x")]).item(0, np.random.default_rng(seed)).samples[0, 0])
        for seed in range(20)
    }
    assert len(starts) > 15
    assert drawn([(long, "x")], crop="centre").samples[0, 0] == pytest.approx(3000 / 9000, abs=1e-3)
    assert (
        trainer(tmp_path, [*pairs(8), (WAVE, "word " * 40)]).engine.training.source.source.length
        == 3000
    )


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"batch_size": 1}, "A batch of one pair has nothing to be told apart from"),
        ({"dataset": pairs(1)}, "can be learnt from 2 pairs or more, but the dataset has 1"),
        ({"folder": "somewhere", "dataset": pairs(2)}, "both a dataset and a folder"),
        ({"force_clear_prev_results": True}, "nothing here deletes what somebody trained"),
        ({"accelerate_kwargs": {"split_batches": True}}, "which this engine does not know"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        trainer(tmp_path, **settings)
    assert not list(tmp_path.iterdir())
