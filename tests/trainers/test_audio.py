"""The front door of sound: theirs in name and parameters, without the defects (shared facts: SEEDS
1.5)."""

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

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # this file is also one process of several, see the end

from tessera.cli.launch import find_free_port, exit_process
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
from tessera.trainers.in_memory_audio import InMemoryTokenPairs, InMemoryWaves
from tests.cli_runner import run_invalid
from tests.runs import assert_same_run, read_metrics, tokenizer, train_once

FRAMES, LEVELS, CODES = 20, 3, 16
HEARD = TokenStream(vocab_size=CODES, num_quantizers=LEVELS, frames=FRAMES, seconds=0.02)
SAID = TokenStream(vocab_size=5, frames=FRAMES // 2, seconds=0.04)
NETWORK = replace(CONFORMER, width=16, depth=1, heads=2)


def pairs(count: int = 12) -> list[tuple[Tensor, Tensor]]:
    """What is heard is a function of what is said, and sounds differ in length."""
    made = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        said = torch.randint(SAID.vocab_size, (SAID.frames - number % 3,), generator=generator)
        heard = said.repeat_interleave(2)[:, None] * torch.tensor([1, 2, 3])
        made.append((said, heard))
    return made


def model(**choices: Any) -> MaskedModel:
    torch.manual_seed(0)
    return SoundStormConfig(**({"network": NETWORK} | choices)).build(HEARD, SAID)


HEAD = CriticHeadConfig(width=8)
SMALL = {
    "num_train_steps": 4,
    "num_warmup_steps": 2,
    "batch_size": 4,
    "save_results_every": 2,
    "save_model_every": 2,
}


def trainer(folder: Path, **settings: Any) -> SoundStormTrainer:
    given = SMALL | {"dataset": pairs(), "valid_frac": 0.25, "results_folder": folder} | settings
    return SoundStormTrainer(given.pop("model", None) or model(), **given)


def trained(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder) if record["kind"] == "train"]


# ---- their parameters


def test_its_parameters_and_defaults_are_the_documented_ones() -> None:
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


RATES = {
    "num_train_steps": 9,
    "num_warmup_steps": 3,
    "lr": 4e-3,
    "initial_lr": 1e-3,
    "save_results_every": 9,
    "save_model_every": 9,
}
ASKED = [2e-3, 3e-3, 4e-3] + [2e-3 * (1 + math.cos(math.pi * k / 6)) for k in range(6)]
"""From the initial rate to the peak, and down to nothing at the step that would come after the
last."""


def rates_of(entry_point: SoundStormTrainer) -> dict[str, list[float]]:
    """Trains, and gives back what stood in each optimizer whenever it moved."""
    moved: dict[str, list[float]] = {name: [] for name in entry_point.engine.prepared}
    for name, prepared in entry_point.engine.prepared.items():
        groups = prepared.optimizer.param_groups
        prepared.optimizer.register_step_pre_hook(
            lambda *_, name=name, groups=groups: moved[name].append(groups[0]["lr"])
        )
    entry_point.train()
    return moved


def test_the_rate_in_the_optimizer_is_the_one_asked_for_at_every_step(tmp_path: Path) -> None:
    """Theirs stayed below the peak (with a warm-up of 1 at the initial rate), and never came
    down."""
    moved = rates_of(trainer(tmp_path, model=model(critic=HEAD), **RATES))
    assert moved == {"model": pytest.approx(ASKED), "critic": pytest.approx(ASKED)}
    assert [record["model/lr"] for record in trained(tmp_path)] == pytest.approx(ASKED)


def test_a_warm_up_of_one_step_or_none_reaches_the_peak_at_once(tmp_path: Path) -> None:
    for steps in (0, 1):
        entry_point = trainer(tmp_path / f"{steps}", num_warmup_steps=steps, lr=4e-3)
        assert rates_of(entry_point)["model"][0] == pytest.approx(4e-3)


def test_on_two_processes_the_rate_is_the_same_and_so_are_the_losses(tmp_path: Path) -> None:
    """Theirs fell to nothing half way and rose again; and the validation of one process alone left
    the other waiting."""
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
    complaints = [child.communicate(timeout=120)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], "\n".join(complaints)
    alone = rates_of(several(tmp_path / "one"))
    for rank in range(2):
        found = json.loads((tmp_path / f"two/rates-{rank}.json").read_text())
        assert (
            found["rates"]
            == alone
            == {"model": pytest.approx(ASKED), "critic": pytest.approx(ASKED)}
        )
        assert (
            found["generated"] == several(tmp_path / "one").generate(pairs(1)[0][0][None]).tolist()
        )
    one, two = (
        [record["model/cross_entropy"] for record in trained(tmp_path / name)]
        for name in ("one", "two")
    )
    assert two == pytest.approx(one, rel=1e-4)


def test_decay_clipping_and_moments_are_as_asked_and_else_theirs(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "a").run.task.optimizer
    assert (plain.kind, plain.betas, plain.decay, plain.clip) == ("adam", (0.9, 0.99), 0.0, 0.5)
    told = trainer(tmp_path / "b", wd=0.5, max_grad_norm=None)
    assert [
        group["weight_decay"] for group in told.engine.prepared["model"].optimizer.param_groups
    ] == [0.5, 0.0]
    assert told.run.task.optimizer.max_grad_norm is None


def test_accumulation_draws_as_many_pairs_as_it_says(tmp_path: Path) -> None:
    trainer(tmp_path, dataset=pairs(24), grad_accum_every=2, num_train_steps=1).train()
    assert trained(tmp_path)[0]["examples"] == 8


# ---- what it learns from


def test_a_caller_s_symbols_and_settings_are_never_changed(tmp_path: Path) -> None:
    """Theirs wrote masks into the batch that it was given."""
    dataset, settings = pairs(), {"mixed_precision": "no"}
    before = copy.deepcopy(dataset)
    entry_point = trainer(tmp_path, dataset=dataset, accelerate_kwargs=settings, valid_frac=0.0)
    entry_point.train()
    said, prompt = torch.stack([row for row, _ in dataset[::3]]), dataset[0][1][:4].clone()
    asked = copy.deepcopy((said, prompt))
    entry_point.generate(said, prompt_acoustic_token_ids=prompt)
    assert (
        torch.equal(said, asked[0])
        and torch.equal(prompt, asked[1])
        and settings == {"mixed_precision": "no"}
    )
    for one, other in zip(dataset, before, strict=True):
        assert all(torch.equal(now, then) for now, then in zip(one, other, strict=True))


def example(item: Any) -> dict[str, Tensor]:
    return (
        InMemoryTokenPairs([item], TokenStreams(acoustic=HEARD, semantic=SAID))
        .item(0, np.random.default_rng(0))
        .codes
    )


def test_tuples_dictionaries_arrays_and_padded_pairs_are_the_same_pair() -> None:
    said, heard = pairs(2)[1]
    pad = torch.nn.functional.pad
    same: list[Any] = [
        (said, heard),
        [said.numpy(), heard.to(torch.int16).numpy()],
        {"semantic": said, "acoustic": heard},
        {"acoustic_token_ids": heard.tolist(), "cond_semantic_token_ids": said.tolist()},
        (pad(said, (0, 3), value=-1), pad(heard, (0, 0, 0, 2), value=-1)),
    ]
    for item in same:
        codes = example(item)
        assert torch.equal(codes["semantic"], torch.cat([said, torch.full((1,), -1)]))
        assert torch.equal(codes["tokenizer"], torch.cat([heard, torch.full((2, LEVELS), -1)]))


SAID_10, HEARD_20 = pairs(1)[0]


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (
            (SAID_10[:7], HEARD_20),
            r"not of the same time, .* last 0.40 s \(20 frames\) and 0.28 s \(7 frames\): cut both",
        ),
        ((SAID_10, HEARD_20[:15]), "not of the same time"),
        (
            (SAID_10, HEARD_20[:, :2]),
            r"acoustic symbols are \(20, 2\), but the model was built for \(frames, 3\)$",
        ),
        (
            (SAID_10, HEARD_20.T),
            r"\(3, 20\), but the model was built for \(frames, 3\): turn it over",
        ),
        (
            (HEARD_20, SAID_10),
            r"semantic symbols are \(20, 3\), but the model was built for \(frames,\)",
        ),
        ((SAID_10, HEARD_20.float()), "are torch.float32, but symbols are whole numbers"),
        (
            (SAID_10, HEARD_20 + 10),
            "acoustic symbols are numbers from 10 to 22, but there are those from 0 to 15",
        ),
        ((SAID_10 - 6, HEARD_20), "semantic symbols are none at all"),
        ((SAID_10, torch.where(HEARD_20 == 3, -1, HEARD_20)), "numbers from -1"),
        (
            (SAID_10.repeat(2), HEARD_20.repeat(2, 1)),
            "it has 40 frames, but the model was built for at most 20",
        ),
        (
            {"semantics": SAID_10, "acoustic": HEARD_20},
            "it has 'semantics': did you mean 'semantic'",
        ),
        ({"semantic": SAID_10}, "it has no acoustic symbols"),
        ((SAID_10,), r"it is 1 values, but an item is a pair, .* tokenizer=RUN, semantic=RUN"),
        (torch.zeros(100), "it is a Tensor, but an item is a pair"),
        (("a", "b"), "no tensor of whole numbers"),
    ],
)
def test_what_is_no_pair_is_refused_by_name(item: Any, says: str) -> None:
    with pytest.raises(UnreadableFile, match=f"pair-000000: .*{says}"):
        example(item)


def test_streams_may_differ_by_what_tokenizers_round_away() -> None:
    assert (example((SAID_10[:8], HEARD_20))["semantic"] == -1).sum() == 2
    assert (example((SAID_10, HEARD_20[:16]))["tokenizer"] == -1).sum() == 4 * LEVELS


def test_a_bad_pair_is_left_out_and_said_and_a_whole_set_of_them_is_refused(tmp_path: Path) -> None:
    bad = (SAID_10[:5], HEARD_20)
    trainer(tmp_path / "one", dataset=[*pairs(7), bad], valid_frac=0.0, num_train_steps=8).train()
    assert (
        "pair-000007: its two streams are not of the same time"
        in (tmp_path / "one/rejected.jsonl").read_text()
    )
    with pytest.raises(UserError, match="not of the same time"):
        trainer(tmp_path / "all", dataset=[bad] * 8).train()


def test_few_pairs_are_enough(tmp_path: Path) -> None:
    """Theirs wanted 20 batches of them, for the sake of the held-out share."""
    entry_point = trainer(tmp_path, dataset=pairs(5), valid_frac=0.05)
    entry_point.train()
    assert len(entry_point.engine.validation) == 1


# ---- its life


def test_it_trains_the_network_it_was_given_and_tells_log_fn(tmp_path: Path) -> None:
    given, heard = model(critic=HEAD), []
    entry_point = trainer(tmp_path, model=given)
    start = dict(given.named_parameters())
    assert all(
        torch.equal(value, start[name]) for name, value in entry_point.model.named_parameters()
    )
    entry_point.train(heard.append)
    assert [record["step"] for record in heard if record["kind"] == "train"] == [1, 2, 3, 4]
    validations = [record for record in heard if record["kind"] == "validation"]
    assert [record["step"] for record in validations] == [2, 4]
    assert {"val_ema/cross_entropy", "val_ema/accuracy_1", "val_ema/accuracy_3"} <= validations[
        0
    ].keys()
    assert not all(
        torch.equal(value, start[name]) for name, value in entry_point.model.named_parameters()
    )
    assert (tmp_path / "samples/000004/sheet.png").is_file() and (tmp_path / "README.md").is_file()
    assert entry_point.train_step() == {}


@pytest.mark.parametrize("critic", [HEAD, CriticConfig(width=8, depth=1, heads=2)])
def test_one_of_the_two_networks_can_be_trained_alone(critic: Any, tmp_path: Path) -> None:
    for alone, part in (("only_train_generator", "network"), ("only_train_critic", "critic")):
        entry_point = trainer(
            tmp_path / alone, model=model(critic=critic), lr=1e-2, **{alone: True}
        )
        before = {name: value.clone() for name, value in entry_point.model.named_parameters()}
        entry_point.train()
        moved = {
            name.split(".")[0]
            for name, value in entry_point.model.named_parameters()
            if not torch.equal(value, before[name])
        }
        assert moved == {part}
        assert (
            trainer(tmp_path / alone, model=model(critic=critic), lr=1e-2, **{alone: True}).steps
            == 4
        )


def test_a_second_construction_goes_on_and_is_the_same_run(tmp_path: Path) -> None:
    """Theirs asked whether to delete it, and read the step out of the file's name."""
    trainer(tmp_path / "whole").train()
    first = trainer(tmp_path / "cut-7")
    for _ in range(3):
        first.train_step()
    first.engine.writer.wait()
    del first
    again = trainer(tmp_path / "cut-7")
    assert again.steps == 2
    again.train()
    assert_same_run(tmp_path / "whole", tmp_path / "cut-7", 4)


def test_what_was_saved_can_be_loaded(tmp_path: Path) -> None:
    entry_point = trainer(tmp_path / "run")
    entry_point.train_step()
    entry_point.save(tmp_path / "run7/best")
    other = trainer(tmp_path / "other")
    other.load(tmp_path / "run7/best")
    assert other.steps == 1
    assert all(
        torch.equal(a, b)
        for a, b in zip(entry_point.model.parameters(), other.model.parameters(), strict=True)
    )


# ---- what it makes


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> SoundStormTrainer:
    """One that has understood what is heard when something is said."""
    entry_point = trainer(
        tmp_path_factory.mktemp("learnt"),
        model=model(network=replace(NETWORK, width=32)),
        dataset=pairs(24),
        num_train_steps=150,
        num_warmup_steps=10,
        batch_size=12,
        lr=2e-2,
        valid_frac=0.0,
        save_results_every=150,
        save_model_every=150,
    )
    entry_point.train()
    return entry_point


def test_what_is_generated_is_what_is_said(learnt: SoundStormTrainer) -> None:
    said = torch.randint(
        SAID.vocab_size, (4, SAID.frames), generator=torch.Generator().manual_seed(99)
    )
    wanted = said.repeat_interleave(2, dim=1)[..., None] * torch.tensor([1, 2, 3])
    made = learnt.generate(said, seed=1)
    assert made.shape == (4, FRAMES, LEVELS)
    assert (made == wanted).float().mean() > 0.95
    assert (made == wanted.roll(1, 0)).float().mean() < 0.5


def test_sounds_of_any_length_in_one_batch_are_those_made_alone(tmp_path: Path) -> None:
    """By one that has learnt nothing yet, so that chance decides everything."""
    entry_point = trainer(tmp_path)
    rows = [torch.arange(length) % SAID.vocab_size for length in (4, 10, 23)]
    train_together = entry_point.generate(rows, seed=3)
    assert train_together.shape == (3, 46, LEVELS)
    assert [int((one[:, 0] >= 0).sum()) for one in train_together] == [8, 20, 46]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    assert torch.equal(entry_point.generate(padded, seed=3), train_together)
    assert torch.equal(entry_point.generate(rows[:1], seed=3)[0], train_together[0, :8])
    assert not torch.equal(entry_point.generate(rows[:1], seed=4)[0], train_together[0, :8])


def test_a_prompt_is_what_the_result_begins_with(learnt: SoundStormTrainer) -> None:
    said = torch.arange(10)[None] % SAID.vocab_size
    prompt = torch.full((6, LEVELS), 7)
    made = learnt.generate(said.repeat(2, 1), prompt_acoustic_token_ids=prompt)
    assert (made[:, :6] == 7).all() and not (made[:, 6:] == 7).all()
    coarse = learnt.generate(said, prompt_acoustic_token_ids=prompt[None, :, :1])
    assert (coarse[:, :6, 0] == 7).all() and not (coarse[:, :6, 1:] == 7).all()


def test_seconds_are_the_first_of_what_is_said(learnt: SoundStormTrainer) -> None:
    said = torch.arange(10)[None] % SAID.vocab_size
    assert learnt.generate(said, seconds=0.1).shape == (1, 5, LEVELS)
    assert learnt.generate(said, seconds=0.4).shape == (1, FRAMES, LEVELS)


def test_as_many_passes_as_rounds(learnt: SoundStormTrainer) -> None:
    passes: list[int] = []
    hook = learnt.model.network.transformer.norm.register_forward_hook(lambda *_: passes.append(1))
    learnt.generate(SAID_10[None])
    assert len(passes) == 16 + LEVELS - 1
    passes.clear()
    learnt.generate(SAID_10[None], sampling=MaskedSampling(decoding_steps_per_level=(4, 2, 1)))
    hook.remove()
    assert len(passes) == 7


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"cond_semantic_token_ids": torch.zeros(0, 4).long()}, "cond_semantic_token_ids is empty"),
        ({"cond_semantic_token_ids": SAID_10}, r"are \(10,\), but they are \(examples, frames\)"),
        (
            {"cond_semantic_token_ids": [SAID_10, SAID_10 + 5]},
            "Semantic symbols 1 are numbers from 5 .* those from 0 to 4",
        ),
        ({"seconds": 2.0}, r"2 s are asked for, but cond_semantic_token_ids\[0\] lasts 0.40 s"),
        (
            {"prompt_acoustic_token_ids": HEARD_20},
            "The prompt has 20 frames, and the semantic symbols last for 20",
        ),
        (
            {"prompt_acoustic_token_ids": torch.zeros(3, 4, 3)},
            r"are \(3, 4, 3\), but a prompt is \(1, frames, up to 3",
        ),
        ({"prompt_acoustic_token_ids": torch.full((2, 3), 18)}, "The prompt has the symbol 18"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    learnt: SoundStormTrainer, asked: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        learnt.generate(**({"cond_semantic_token_ids": SAID_10[None]} | asked))


def test_without_a_codec_nothing_can_be_heard_and_that_is_said(
    learnt: SoundStormTrainer, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="knows no codec"):
        learnt.sounds(learnt.generate(SAID_10[None]))
    run, recording = str(learnt.engine.folder.path), tmp_path / "recording.wav"
    Audio(np.zeros((1, 8000), np.float32), 8000).write(recording)
    out = ["--out", str(tmp_path / "out")]
    for verb in (
        ["sample", run, "--like", recording, *out],
        ["sample", run, *out],
        ["evaluate", run, "--data", tmp_path],
    ):
        assert "knows no codec" in run_invalid(*verb)


# ---- recordings


@pytest.fixture(scope="module")
def runs() -> dict[str, str]:
    return {
        "tokenizer": train_once("audio-codec", audio_codec("tiny")),
        "semantic": train_once("audio-semantic", audio_semantic("tiny")),
    }


def waves(count: int = 8) -> list[Tensor]:
    num_synthetic = SyntheticAudio(count, samples=4000, rate_hz=8000, seed=1)
    return [
        torch.from_numpy(num_synthetic.item(number, np.random.default_rng(0)).samples[0])
        for number in range(count)
    ]


def over(folder: Path, runs: dict[str, str], **settings: Any) -> SoundStormTrainer:
    given = {
        "model": SoundStormConfig(network=NETWORK).build(**runs),
        "dataset": waves(),
        **runs,
    } | settings
    return trainer(folder, **given)


def test_waves_and_a_folder_of_them_are_learnt_from_and_heard(
    runs: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "recordings").mkdir()
    for number, wave in enumerate(waves()):
        Audio(wave[None].numpy(), 8000).write(tmp_path / f"recordings/{number}.wav")
    for name, dataset in (("waves", waves()), ("folder", tmp_path / "recordings")):
        entry_point = over(tmp_path / name, runs, dataset=dataset)
        entry_point.train()
        assert (tmp_path / name / "samples/000004/sheet.png").is_file()
        semantic = entry_point.engine.validation.source.codes["semantic"]
        acoustic = entry_point.generate(semantic, seconds=0.25)
        assert acoustic.shape == (len(semantic), 100, 2)
        assert all(
            sound.seconds == 0.25 and sound.rate_hz == 8000
            for sound in entry_point.sounds(acoustic)
        )
    assert over(tmp_path / "waves", runs).steps == 4


def test_waves_are_those_of_files_and_longer_ones_are_cut_in_their_middle(
    runs: dict[str, str], tmp_path: Path
) -> None:
    data = over(tmp_path, runs).run.data
    wave = torch.linspace(-1, 1, 6000)
    source = InMemoryWaves([wave, wave[:1000].numpy(), (wave[None].expand(2, -1).double(),)], data)
    long, short, stereo = (source.item(number, np.random.default_rng(0)) for number in range(3))
    assert long.samples[0] == pytest.approx(wave[1000:5000].numpy()) and long.rate_hz == 8000
    assert (
        short.length == 1000
        and short.samples.shape == (1, 4000)
        and not short.samples[0, 1000:].any()
    )
    assert stereo.samples == pytest.approx(long.samples)
    assert source.signature(0) == source.signature(2) != source.signature(1)
    for strange, says in (
        ((SAID_10, HEARD_20), "it is tuple"),
        (SAID_10, "it is torch.int64"),
        (wave * math.nan, "not numbers"),
    ):
        with pytest.raises(UnreadableFile, match=f"wave-000000: .*{says}"):
            InMemoryWaves([strange], data).item(0, np.random.default_rng(0))
        assert InMemoryWaves([strange], data).signature(0) == "unusable"


def test_clips_are_as_long_as_asked(runs: dict[str, str], tmp_path: Path) -> None:
    assert over(tmp_path, runs, data_max_length=2000).engine.training.source.codes[
        "tokenizer"
    ].shape == (6, 100, 2)


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dataset": None}, "There is no dataset"),
        ({"dataset": []}, "The dataset is empty"),
        ({"dataset": "recordings"}, "To learn from the recordings in recordings takes the runs"),
        ({"tokenizer": "runs/audio-codec"}, "semantic is missing"),
        ({"data_max_length": 100}, "build the model for as many frames"),
        ({"force_clear_prev_results": True}, "nothing here deletes what somebody trained"),
        ({"only_train_critic": True}, "the model has no critic"),
        ({"only_train_critic": True, "only_train_generator": True}, "nothing would learn"),
        ({"accelerate_kwargs": {"split_batches": True}}, "which this engine does not know"),
        (
            {"model": MaskedModel(NETWORK.build(HEARD.to_spec()), None)},
            "built for acoustic symbols alone",
        ),
        (
            {
                "model": MaskedModel(
                    NETWORK.build(HEARD.to_spec(), replace(SAID.to_spec(), seconds=None)), None
                )
            },
            "None seconds",
        ),
        (
            {"model": SoundStormConfig(network=NETWORK).build(HEARD, replace(SAID, frames=30))},
            "must have the same duration",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        trainer(tmp_path, **settings)
    assert not list(tmp_path.iterdir())


def test_a_model_for_other_symbols_than_the_runs_write_is_refused(
    runs: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(
        UserError,
        match=r"built for 16 acoustic symbols in 3 level.* has 64 acoustic symbols in 2 level",
    ):
        over(tmp_path, runs, model=model())
    with pytest.raises(
        UserError, match="of recipe 'images-vqgan', but SoundStorm stands on audio-semantic"
    ):
        over(tmp_path, runs, semantic=tokenizer())
    with pytest.raises(UserError, match="writes no symbols of sound"):
        SoundStormConfig(network=NETWORK).build(tokenizer(), runs["semantic"])


# ---- one process of several


def several(folder: Path) -> SoundStormTrainer:
    return trainer(folder, model=model(critic=HEAD), **RATES)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    entry_point = several(place)
    found = {
        "rates": rates_of(entry_point),
        "generated": entry_point.generate(pairs(1)[0][0][None]).tolist(),
    }
    (place / f"rates-{os.environ['RANK']}.json").write_text(json.dumps(found))
    exit_process(0)
