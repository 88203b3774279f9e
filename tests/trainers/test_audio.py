"""The trainer for audio: parameters of the research package, tokens in memory, generation, errors.

This file is also the script of one process of several, see its end.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tessera.cli.launch import exit_process, find_free_port
from tessera.data.errors import UnreadableFile
from tessera.modalities.audio.external_tokens import TokenStream, TokenStreams
from tessera.modalities.audio.media import Audio
from tessera.modalities.audio.recipes import audio_codec, audio_semantic
from tessera.modalities.audio.synthetic import SyntheticAudio
from tessera.nn.masked_transformer import CriticConfig, CriticHeadConfig, MaskedModel
from tessera.run.errors import UserError
from tessera.sampling.maskgit import MaskedSampling
from tessera.trainers import SoundStormConfig, SoundStormTrainer
from tessera.trainers.audio import CONFORMER
from tessera.trainers.in_memory_audio import InMemoryTokenPairs, InMemoryWaveforms
from tests.cli_runner import run_invalid
from tests.runs import assert_same_run, read_metrics, tokenizer, train_once

FRAMES, LEVELS, CODES = 20, 3, 16
ACOUSTIC = TokenStream(vocab_size=CODES, num_quantizers=LEVELS, frames=FRAMES, seconds=0.02)
SEMANTIC = TokenStream(vocab_size=5, frames=FRAMES // 2, seconds=0.04)
NETWORK = replace(CONFORMER, dim=16, depth=1, heads=2)


def expected_acoustic(semantic: Tensor) -> Tensor:
    """Return the acoustic tokens of semantic tokens in the synthetic pairs."""
    return semantic.repeat_interleave(2, dim=-1)[..., None] * torch.tensor([1, 2, 3])


def make_pairs(count: int = 12) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of different lengths whose acoustic tokens follow from the semantic ones."""
    pairs = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        length = SEMANTIC.frames - number % 3
        semantic = torch.randint(SEMANTIC.vocab_size, (length,), generator=generator)
        pairs.append((semantic, expected_acoustic(semantic)))
    return pairs


def build_model(**choices: Any) -> MaskedModel:
    torch.manual_seed(0)
    return SoundStormConfig(**({"network": NETWORK} | choices)).build(ACOUSTIC, SEMANTIC)


CRITIC_HEAD = CriticHeadConfig(dim=8)
SMALL = {
    "num_train_steps": 4,
    "num_warmup_steps": 2,
    "batch_size": 4,
    "save_results_every": 2,
    "save_model_every": 2,
}


def build_trainer(folder: Path, **settings: Any) -> SoundStormTrainer:
    defaults = {"dataset": make_pairs(), "valid_frac": 0.25, "results_folder": folder}
    arguments = SMALL | defaults | settings
    return SoundStormTrainer(arguments.pop("model", None) or build_model(), **arguments)


def read_train_records(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder) if record["kind"] == "train"]


# ---- parameters


def test_parameters_and_defaults_are_those_of_the_research_package() -> None:
    documented = {
        "dataset": None,
        "only_train_generator": False,
        "only_train_critic": False,
        "lr": 3e-4,
        "initial_lr": 1e-5,
        "grad_accum_every": 1,
        "wd": 0.0,
        "max_grad_norm": 0.5,
        "valid_frac": 0.05,
        "random_split_seed": 42,
        "save_results_every": 100,
        "save_model_every": 1000,
        "results_folder": "./results",
        "accelerate_kwargs": None,
        "split_batches": False,
        "drop_last": False,
        "force_clear_prev_results": None,
    }
    parameters = inspect.signature(SoundStormTrainer).parameters
    assert {name: parameters[name].default for name in documented} == documented
    for required in ("model", "num_train_steps", "num_warmup_steps", "batch_size"):
        assert parameters[required].default is inspect.Parameter.empty


SCHEDULE = {
    "num_train_steps": 9,
    "num_warmup_steps": 3,
    "lr": 4e-3,
    "initial_lr": 1e-3,
    "save_results_every": 9,
    "save_model_every": 9,
}
EXPECTED_LR = [2e-3, 3e-3, 4e-3] + [2e-3 * (1 + math.cos(math.pi * k / 6)) for k in range(6)]
"""From the initial learning rate to the peak, then a cosine to 0 at the step after the last."""


def train_and_record_lr(trainer: SoundStormTrainer) -> dict[str, list[float]]:
    """Train, and return the learning rate of each optimizer at each of its steps."""
    recorded: dict[str, list[float]] = {name: [] for name in trainer.engine.updates}
    for name, state in trainer.engine.updates.items():
        groups = state.optimizer.param_groups
        state.optimizer.register_step_pre_hook(
            lambda *_, name=name, groups=groups: recorded[name].append(groups[0]["lr"])
        )
    trainer.train()
    return recorded


def test_every_optimizer_uses_the_requested_learning_rate(tmp_path: Path) -> None:
    """In the research package it stays below the peak and never decreases."""
    trainer = build_trainer(tmp_path, model=build_model(critic=CRITIC_HEAD), **SCHEDULE)
    recorded = train_and_record_lr(trainer)
    assert recorded == {"model": pytest.approx(EXPECTED_LR), "critic": pytest.approx(EXPECTED_LR)}
    logged = [record["model/lr"] for record in read_train_records(tmp_path)]
    assert logged == pytest.approx(EXPECTED_LR)


def test_a_warm_up_of_one_step_or_none_starts_at_the_peak(tmp_path: Path) -> None:
    for steps in (0, 1):
        trainer = build_trainer(tmp_path / f"{steps}", num_warmup_steps=steps, lr=4e-3)
        assert train_and_record_lr(trainer)["model"][0] == pytest.approx(4e-3)


def test_two_processes_have_the_learning_rates_and_losses_of_one(tmp_path: Path) -> None:
    """In the research package the schedule ends half way, and validation blocks one process."""
    port, children = find_free_port(), []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, "-W", "error", __file__, str(tmp_path / "two")]
        children.append(
            subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        )
    errors = [child.communicate(timeout=1200)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], "\n".join(errors)
    one_process = train_and_record_lr(build_distributed_trainer(tmp_path / "one"))
    assert one_process == {
        "model": pytest.approx(EXPECTED_LR),
        "critic": pytest.approx(EXPECTED_LR),
    }
    generated = build_distributed_trainer(tmp_path / "one").generate(make_pairs(1)[0][0][None])
    for rank in range(2):
        results = json.loads((tmp_path / f"two/results-{rank}.json").read_text())
        assert results["lr"] == one_process
        assert results["generated"] == generated.tolist()
    one, two = (
        [record["model/cross_entropy"] for record in read_train_records(tmp_path / name)]
        for name in ("one", "two")
    )
    assert two == pytest.approx(one, rel=1e-4)


def test_optimizer_settings_are_used_and_default_to_the_research_package(tmp_path: Path) -> None:
    optimizer = build_trainer(tmp_path / "a").run.task.optimizer
    assert (optimizer.name, optimizer.betas) == ("adam", (0.9, 0.99))
    assert (optimizer.weight_decay, optimizer.max_grad_norm) == (0.0, 0.5)
    trainer = build_trainer(tmp_path / "b", wd=0.5, max_grad_norm=None)
    groups = trainer.engine.updates["model"].optimizer.param_groups
    assert {group["weight_decay"] for group in groups} == {0.5, 0.0}
    assert trainer.run.task.optimizer.max_grad_norm is None


def test_gradient_accumulation_multiplies_the_pairs_of_a_step(tmp_path: Path) -> None:
    build_trainer(tmp_path, dataset=make_pairs(24), grad_accum_every=2, num_train_steps=1).train()
    assert read_train_records(tmp_path)[0]["examples"] == 8


# ---- pairs of tokens


def test_tensors_and_dictionaries_of_the_caller_are_never_modified(tmp_path: Path) -> None:
    """The research package writes masks into the batch that it is given."""
    dataset, kwargs = make_pairs(), {"mixed_precision": "no"}
    before = copy.deepcopy(dataset)
    trainer = build_trainer(tmp_path, dataset=dataset, accelerate_kwargs=kwargs, valid_frac=0.0)
    trainer.train()
    semantic = torch.stack([row for row, _ in dataset[::3]])
    prompt = dataset[0][1][:4].clone()
    semantic_before, prompt_before = semantic.clone(), prompt.clone()
    trainer.generate(semantic, prompt_acoustic_token_ids=prompt)
    assert torch.equal(semantic, semantic_before) and torch.equal(prompt, prompt_before)
    assert kwargs == {"mixed_precision": "no"}
    for pair, pair_before in zip(dataset, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, pair_before, strict=True))


def load_codes(item: Any) -> dict[str, Tensor]:
    streams = TokenStreams(acoustic=ACOUSTIC, semantic=SEMANTIC)
    return InMemoryTokenPairs([item], streams).item(0, np.random.default_rng(0)).codes


def test_tuples_dictionaries_arrays_and_padded_pairs_are_equivalent() -> None:
    semantic, acoustic = make_pairs(2)[1]
    pad = torch.nn.functional.pad
    items: list[Any] = [
        (semantic, acoustic),
        (acoustic, semantic),
        [semantic.numpy(), acoustic.to(torch.int16).numpy()],
        {"semantic": semantic, "acoustic": acoustic},
        {"acoustic_token_ids": acoustic.tolist(), "cond_semantic_token_ids": semantic.tolist()},
        (pad(semantic, (0, 3), value=-1), pad(acoustic, (0, 0, 0, 2), value=-1)),
    ]
    for item in items:
        codes = load_codes(item)
        assert torch.equal(codes["semantic"], torch.cat([semantic, torch.full((1,), -1)]))
        assert torch.equal(codes["tokenizer"], torch.cat([acoustic, torch.full((2, LEVELS), -1)]))


SEMANTIC_10, ACOUSTIC_20 = make_pairs(1)[0]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            (SEMANTIC_10[:7], ACOUSTIC_20),
            r"different durations, 0.40 s \(20 frames\) and 0.28 s \(7 frames\): cut both",
        ),
        ((SEMANTIC_10, ACOUSTIC_20[:15]), "different durations"),
        (
            (SEMANTIC_10, ACOUSTIC_20[:, :2]),
            r"acoustic tokens have the shape \(20, 2\), but the model was built for \(frames, 3\)$",
        ),
        (
            (SEMANTIC_10, ACOUSTIC_20.T),
            r"\(3, 20\), but the model was built for \(frames, 3\): transpose them",
        ),
        (
            (ACOUSTIC_20, ACOUSTIC_20),
            r"semantic tokens have the shape \(20, 3\), but the model was built for \(frames,\)",
        ),
        ((SEMANTIC_10, ACOUSTIC_20.float()), "the type torch.float32, but must be integers"),
        (
            (SEMANTIC_10, ACOUSTIC_20 + 10),
            "acoustic tokens range from 10 to 22, but must be between 0 and 15",
        ),
        ((SEMANTIC_10 - 6, ACOUSTIC_20), "semantic tokens are empty"),
        ((SEMANTIC_10, torch.where(ACOUSTIC_20 == 3, -1, ACOUSTIC_20)), "range from -1"),
        (
            (SEMANTIC_10.repeat(2), ACOUSTIC_20.repeat(2, 1)),
            "it has 40 frames, but the model was built for at most 20",
        ),
        (
            {"semantics": SEMANTIC_10, "acoustic": ACOUSTIC_20},
            "it has the unknown key 'semantics': did you mean 'semantic'",
        ),
        ({"semantic": SEMANTIC_10}, "it has no acoustic tokens"),
        (
            (SEMANTIC_10,),
            r"it has 1 value\(s\), but an item must be a pair .*tokenizer=RUN, semantic=RUN",
        ),
        (torch.zeros(100), "it is a Tensor, but an item must be a pair"),
        (("a", "b"), "are not a tensor of integers"),
    ],
)
def test_invalid_pairs_are_rejected_with_the_reason(item: Any, message: str) -> None:
    with pytest.raises(UnreadableFile, match=message):
        load_codes(item)


def test_durations_of_a_pair_may_differ_by_incomplete_frames() -> None:
    assert (load_codes((SEMANTIC_10[:8], ACOUSTIC_20))["semantic"] == -1).sum() == 2
    assert (load_codes((SEMANTIC_10, ACOUSTIC_20[:16]))["tokenizer"] == -1).sum() == 4 * LEVELS


def test_invalid_pairs_are_skipped_and_listed_unless_all_are_invalid(tmp_path: Path) -> None:
    invalid = (SEMANTIC_10[:5], ACOUSTIC_20)
    dataset = [*make_pairs(7), invalid]
    build_trainer(tmp_path / "one", dataset=dataset, valid_frac=0.0, num_train_steps=8).train()
    rejected = (tmp_path / "one/rejected.jsonl").read_text()
    assert "the acoustic and the semantic tokens have different durations" in rejected
    with pytest.raises(UserError, match="different durations"):
        build_trainer(tmp_path / "all", dataset=[invalid] * 8).train()


def test_a_dataset_may_be_as_small_as_five_pairs(tmp_path: Path) -> None:
    """The research package needs 20 batches, so that one of them is held out."""
    trainer = build_trainer(tmp_path, dataset=make_pairs(5), valid_frac=0.05)
    trainer.train()
    assert len(trainer.engine.validation) == 1


# ---- training, resuming and saving


def test_train_starts_from_the_given_weights_and_calls_log_fn(tmp_path: Path) -> None:
    given = build_model(critic=CRITIC_HEAD)
    records: list[dict[str, Any]] = []
    trainer = build_trainer(tmp_path, model=given)
    assert trainer.model is given
    initial = {name: value.clone() for name, value in given.named_parameters()}
    trainer.train(records.append)
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2, 3, 4]
    validations = [record for record in records if record["kind"] == "validation"]
    assert [record["step"] for record in validations] == [2, 4]
    expected = {"val_ema/cross_entropy", "val_ema/accuracy_1", "val_ema/accuracy_3"}
    assert expected <= validations[0].keys()
    assert not all(
        torch.equal(value, initial[name]) for name, value in trainer.model.named_parameters()
    )
    assert (tmp_path / "samples/000004/sheet.png").is_file() and (tmp_path / "README.md").is_file()
    assert trainer.train_step() == {}


def test_a_run_that_trains_only_the_critic_is_evaluated_by_the_critic(tmp_path: Path) -> None:
    model = build_model(critic=CRITIC_HEAD)
    trainer = build_trainer(tmp_path, model=model, only_train_critic=True, lr=1e-2)
    assert trainer.engine.task.best_metric.name == "critic_bce"
    trainer.train()
    first, last = (one for one in read_metrics(tmp_path) if one["kind"] == "validation")
    assert first["val/cross_entropy"] == last["val/cross_entropy"], "the generator is frozen"
    assert first["val/critic_bce"] != last["val/critic_bce"]
    assert 0 <= last["val_ema/critic_accuracy"] <= 1
    everything = build_trainer(tmp_path / "all", model=build_model(critic=CRITIC_HEAD))
    assert everything.engine.task.best_metric.name == "cross_entropy"


@pytest.mark.parametrize("critic", [CRITIC_HEAD, CriticConfig(dim=8, depth=1, heads=2)])
def test_generator_or_critic_can_be_trained_alone(critic: Any, tmp_path: Path) -> None:
    for argument, part in (("only_train_generator", "network"), ("only_train_critic", "critic")):
        settings = {"model": build_model(critic=critic), "lr": 1e-2, argument: True}
        trainer = build_trainer(tmp_path / argument, **settings)
        before = {name: value.clone() for name, value in trainer.model.named_parameters()}
        trainer.train()
        changed = {
            name.split(".")[0]
            for name, value in trainer.model.named_parameters()
            if not torch.equal(value, before[name])
        }
        assert changed == {part}
        assert build_trainer(tmp_path / argument, **settings).steps == 4


def test_a_trainer_constructed_again_resumes_the_same_run(tmp_path: Path) -> None:
    """The research package asks whether to delete it and reads the step from the file name."""
    build_trainer(tmp_path / "whole").train()
    first = build_trainer(tmp_path / "resumed-7")
    for _ in range(3):
        first.train_step()
    first.engine.saver.writer.wait()
    del first
    again = build_trainer(tmp_path / "resumed-7")
    assert again.steps == 2
    again.train()
    assert_same_run(tmp_path / "whole", tmp_path / "resumed-7", 4)


def test_a_saved_checkpoint_can_be_loaded_by_another_trainer(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path / "run")
    trainer.train_step()
    trainer.save(tmp_path / "run7/best")
    other = build_trainer(tmp_path / "other")
    other.load(tmp_path / "run7/best")
    assert other.steps == 1
    assert all(
        torch.equal(a, b)
        for a, b in zip(trainer.model.parameters(), other.model.parameters(), strict=True)
    )


# ---- generation


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SoundStormTrainer:
    """A trainer whose model has learned the acoustic tokens of semantic tokens."""
    trainer = build_trainer(
        tmp_path_factory.mktemp("trained"),
        model=build_model(network=replace(NETWORK, dim=32)),
        dataset=make_pairs(24),
        num_train_steps=150,
        num_warmup_steps=10,
        batch_size=12,
        lr=2e-2,
        valid_frac=0.0,
        save_results_every=150,
        save_model_every=150,
    )
    trainer.train()
    return trainer


def test_generated_tokens_follow_the_semantic_tokens(trained: SoundStormTrainer) -> None:
    generator = torch.Generator().manual_seed(99)
    semantic = torch.randint(SEMANTIC.vocab_size, (4, SEMANTIC.frames), generator=generator)
    expected = expected_acoustic(semantic)
    generated = trained.generate(semantic, seed=1)
    assert generated.shape == (4, FRAMES, LEVELS)
    assert (generated == expected).float().mean() > 0.95
    assert (generated == expected.roll(1, 0)).float().mean() < 0.5


def test_samples_of_different_lengths_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """The model is untrained, so that every token depends on the random numbers."""
    trainer = build_trainer(tmp_path)
    rows = [torch.arange(length) % SEMANTIC.vocab_size for length in (4, 10, 23)]
    together = trainer.generate(rows, seed=3)
    assert together.shape == (3, 46, LEVELS)
    assert [int((one[:, 0] >= 0).sum()) for one in together] == [8, 20, 46]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    assert torch.equal(trainer.generate(padded, seed=3), together)
    assert torch.equal(trainer.generate(rows[:1], seed=3)[0], together[0, :8])
    assert not torch.equal(trainer.generate(rows[:1], seed=4)[0], together[0, :8])


def test_generated_tokens_start_with_the_prompt(trained: SoundStormTrainer) -> None:
    semantic = torch.arange(10)[None] % SEMANTIC.vocab_size
    prompt = torch.full((6, LEVELS), 7)
    generated = trained.generate(semantic.repeat(2, 1), prompt_acoustic_token_ids=prompt)
    assert (generated[:, :6] == 7).all() and not (generated[:, 6:] == 7).all()
    coarse = trained.generate(semantic, prompt_acoustic_token_ids=prompt[None, :, :1])
    assert (coarse[:, :6, 0] == 7).all() and not (coarse[:, :6, 1:] == 7).all()


def test_seconds_limits_the_generated_tokens(trained: SoundStormTrainer) -> None:
    semantic = torch.arange(10)[None] % SEMANTIC.vocab_size
    assert trained.generate(semantic, seconds=0.1).shape == (1, 5, LEVELS)
    assert trained.generate(semantic, seconds=0.4).shape == (1, FRAMES, LEVELS)


def test_generation_takes_one_forward_pass_per_decoding_step(trained: SoundStormTrainer) -> None:
    passes: list[int] = []
    norm = trained.model.network.transformer.norm
    hook = norm.register_forward_hook(lambda *_: passes.append(1))
    trained.generate(SEMANTIC_10[None])
    assert len(passes) == 16 + LEVELS - 1
    passes.clear()
    sampling = MaskedSampling(decoding_steps_per_level=(4, 2, 1))
    trained.generate(SEMANTIC_10[None], sampling=sampling)
    hook.remove()
    assert len(passes) == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cond_semantic_token_ids": torch.zeros(0, 4).long()}, "cond_semantic_token_ids is empty"),
        ({"cond_semantic_token_ids": SEMANTIC_10}, r"\(10,\), but must be \(examples, frames\)"),
        (
            {"cond_semantic_token_ids": [SEMANTIC_10, SEMANTIC_10 + 5]},
            r"cond_semantic_token_ids\[1\]: the tokens range from 5 .* must be between 0 and 4",
        ),
        ({"seconds": 2.0}, r"seconds is 2, but cond_semantic_token_ids\[0\] covers 0.40 s"),
        (
            {"prompt_acoustic_token_ids": ACOUSTIC_20},
            "The prompt has 20 frames, but the semantic tokens cover 20",
        ),
        (
            {"prompt_acoustic_token_ids": torch.zeros(3, 4, 3)},
            r"shape \(3, 4, 3\), but must be \(1, frames, up to 3",
        ),
        ({"prompt_acoustic_token_ids": torch.full((2, 3), 18)}, "The prompt has the token 18"),
    ],
)
def test_invalid_arguments_of_generate_are_rejected(
    trained: SoundStormTrainer, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        trained.generate(**({"cond_semantic_token_ids": SEMANTIC_10[None]} | arguments))


def test_a_run_without_a_codec_can_neither_read_nor_write_audio(
    trained: SoundStormTrainer, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="has no codec"):
        trained.to_audio(trained.generate(SEMANTIC_10[None]))
    run, recording = str(trained.engine.directory.path), tmp_path / "recording.wav"
    Audio(np.zeros((1, 8000), np.float32), 8000).write(recording)
    out = ["--out", str(tmp_path / "out")]
    for command in (
        ["sample", run, "--like", recording, *out],
        ["sample", run, *out],
        ["evaluate", run, "--data", tmp_path],
    ):
        assert "has no codec" in run_invalid(*command)


# ---- recordings


@pytest.fixture(scope="module")
def runs() -> dict[str, str]:
    return {
        "tokenizer": train_once("audio-codec", audio_codec("tiny")),
        "semantic": train_once("audio-semantic", audio_semantic("tiny")),
    }


def make_waveforms(count: int = 8) -> list[Tensor]:
    dataset = SyntheticAudio(count, samples=4000, rate_hz=8000, seed=1)
    examples = [dataset.item(index, np.random.default_rng(0)) for index in range(count)]
    return [torch.from_numpy(example.samples[0]) for example in examples]


def build_audio_trainer(folder: Path, runs: dict[str, str], **settings: Any) -> SoundStormTrainer:
    model = SoundStormConfig(network=NETWORK).build(**runs)
    defaults = {"model": model, "dataset": make_waveforms(), **runs}
    return build_trainer(folder, **(defaults | settings))


def test_waveforms_and_folders_are_trained_on_and_decoded(
    runs: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "recordings").mkdir()
    for number, waveform in enumerate(make_waveforms()):
        Audio(waveform[None].numpy(), 8000).write(tmp_path / f"recordings/{number}.wav")
    for name, dataset in (("waveforms", make_waveforms()), ("folder", tmp_path / "recordings")):
        trainer = build_audio_trainer(tmp_path / name, runs, dataset=dataset)
        trainer.train()
        assert (tmp_path / name / "samples/000004/sheet.png").is_file()
        semantic = trainer.engine.validation.dataset.codes["semantic"]
        acoustic = trainer.generate(semantic, seconds=0.25)
        assert acoustic.shape == (len(semantic), 100, 2)
        decoded = trainer.to_audio(acoustic)
        assert all(audio.seconds == 0.25 and audio.rate_hz == 8000 for audio in decoded)
    assert build_audio_trainer(tmp_path / "waveforms", runs).steps == 4


def test_waveforms_are_mixed_to_mono_and_cut_to_their_middle(
    runs: dict[str, str], tmp_path: Path
) -> None:
    data = build_audio_trainer(tmp_path, runs).run.data
    ramp = torch.linspace(-1, 1, 6000)
    items = [ramp, ramp[:1000].numpy(), (ramp[None].expand(2, -1).double(),)]
    dataset = InMemoryWaveforms(items, data)
    long, short, stereo = (dataset.item(index, np.random.default_rng(0)) for index in range(3))
    assert long.samples[0] == pytest.approx(ramp[1000:5000].numpy()) and long.rate_hz == 8000
    assert short.length == 1000 and short.samples.shape == (1, 4000)
    assert not short.samples[0, 1000:].any()
    assert stereo.samples == pytest.approx(long.samples)
    assert dataset.signature(0) == dataset.signature(2) != dataset.signature(1)
    for invalid, message in (
        ((SEMANTIC_10, ACOUSTIC_20), "its type is tuple"),
        (SEMANTIC_10, "its type is torch.int64"),
        (ramp * math.nan, "NaN or infinite"),
    ):
        with pytest.raises(UnreadableFile, match=message):
            InMemoryWaveforms([invalid], data).item(0, np.random.default_rng(0))
        assert InMemoryWaveforms([invalid], data).signature(0) == "unreadable"


def test_data_max_length_is_the_length_of_examples(runs: dict[str, str], tmp_path: Path) -> None:
    trainer = build_audio_trainer(tmp_path, runs, data_max_length=2000)
    assert trainer.engine.training.dataset.codes["tokenizer"].shape == (6, 100, 2)


# ---- invalid arguments


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": None}, "dataset is None"),
        ({"dataset": []}, "dataset is empty"),
        ({"dataset": "recordings"}, "dataset is the folder recordings, but no runs are given"),
        ({"tokenizer": "runs/audio-codec"}, "semantic is missing"),
        ({"data_max_length": 100}, "build the model for the number of frames"),
        ({"force_clear_prev_results": True}, "earlier results are never deleted"),
        ({"only_train_critic": True}, "the model has no critic"),
        (
            {"only_train_critic": True, "only_train_generator": True},
            "nothing would be trained",
        ),
        ({"accelerate_kwargs": {"split_batches": True}}, "split_batches=True, which is not supp"),
        (
            {"model": MaskedModel(NETWORK.build(ACOUSTIC.to_spec()), None)},
            "built for acoustic tokens only",
        ),
        (
            {
                "model": MaskedModel(
                    NETWORK.build(ACOUSTIC.to_spec(), replace(SEMANTIC.to_spec(), seconds=None)),
                    None,
                )
            },
            "None seconds",
        ),
        (
            {
                "model": SoundStormConfig(network=NETWORK).build(
                    ACOUSTIC, replace(SEMANTIC, frames=30)
                )
            },
            "must have the same duration",
        ),
    ],
)
def test_invalid_arguments_are_rejected_before_anything_is_written(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        build_trainer(tmp_path, **settings)
    assert not list(tmp_path.iterdir())


def test_models_and_runs_of_other_tokens_are_rejected(runs: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"built for acoustic tokens \(16 codes, 3 quant.* has acoustic tokens \(64 codes, 2 ",
    ):
        build_audio_trainer(tmp_path, runs, model=build_model())
    with pytest.raises(
        UserError, match="of the recipe 'images-vqgan', but SoundStorm needs a semantic tokenizer"
    ):
        build_audio_trainer(tmp_path, runs, semantic=tokenizer())
    with pytest.raises(UserError, match="has no audio tokens"):
        SoundStormConfig(network=NETWORK).build(tokenizer(), runs["semantic"])


# ---- one process of several


def build_distributed_trainer(folder: Path) -> SoundStormTrainer:
    return build_trainer(folder, model=build_model(critic=CRITIC_HEAD), **SCHEDULE)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    trainer = build_distributed_trainer(folder)
    results = {
        "lr": train_and_record_lr(trainer),
        "generated": trainer.generate(make_pairs(1)[0][0][None]).tolist(),
    }
    (folder / f"results-{os.environ['RANK']}.json").write_text(json.dumps(results))
    exit_process(0)
