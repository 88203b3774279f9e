"""The front door of clips: theirs in name and parameters, without the defects (shared facts: SEEDS
3.5)."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from tessera import Tokenizer
from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
from tessera.modalities.image.media import Image
from tessera.modalities.image.synthetic import SyntheticImages
from tessera.modalities.video.discriminator import TemporalDiscriminatorConfig
from tessera.modalities.video.magvit2 import VideoTokenizer, VideoTokenizerConfig
from tessera.modalities.video.reconstruction import VideoAdversaryConfig
from tessera.modalities.video.synthetic import SyntheticVideos, draw_video
from tessera.nn.quantize import FSQConfig
from tessera.run.errors import UserError
from tessera.trainers import VideoTokenizerTrainer
from tests.fake_tracker import FakeTracker
from tests.runs import assert_same_run, read_metrics

FRAMES_ONLY = VideoAdversaryConfig(frames=PatchDiscriminatorConfig(dim=8, layers=2), motion=None)
ALL = replace(FRAMES_ONLY, motion=TemporalDiscriminatorConfig(dim=8, layers=2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight clips of five frames."""
    place = tmp_path_factory.mktemp("clips")
    num_synthetic = SyntheticVideos(count=8, size=16, frames=5, seed=5)
    for i in range(len(num_synthetic)):
        draw_video(num_synthetic.scene(i), 16, 5).save(place / f"{i}")
        (place / f"{i}.gif").unlink()
    return place


def clips(count: int = 8, frames: int = 5) -> list[torch.Tensor]:
    """Clips as the research code had them: (3, T, H, W) in [0, 1]."""
    num_synthetic = SyntheticVideos(count=count, size=16, frames=frames, seed=5)
    return [
        torch.from_numpy(num_synthetic.item(i, np.random.default_rng(0)).video / 2 + 0.5)
        for i in range(count)
    ]


def model() -> VideoTokenizer:
    torch.manual_seed(0)
    layers = ("compress_space", "compress_space", "compress_time", "compress_time", "residual")
    return VideoTokenizer(
        VideoTokenizerConfig(
            dim=8, max_channels=16, layers=layers, quantizer=FSQConfig(levels=(4, 4, 4))
        )
    )


def trainer(results: Path, **settings: Any) -> VideoTokenizerTrainer:
    given = {
        "image_size": 16,
        "num_frames": 5,
        "batch_size": 2,
        "num_train_steps": 4,
        "validate_every_step": 2,
        "checkpoint_every_step": 2,
        "results_folder": results,
        "warmup_steps": 0,
        "valid_frac": 0.3,
        "judges": None,
    }
    where = {} if "dataset_folder" in settings or "dataset" in settings else {"dataset": clips()}
    return VideoTokenizerTrainer(model(), **(given | where | settings))


def trained(results: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(results) if record["kind"] == "train"]


# ---- its parameters


def test_its_parameters_and_defaults_are_the_documented_ones() -> None:
    parameters = inspect.signature(VideoTokenizerTrainer).parameters
    documented = {
        "learning_rate": 1e-5,
        "grad_accum_every": 1,
        "apply_gradient_penalty_every": 4,
        "max_grad_norm": None,
        "dataset": None,
        "dataset_folder": None,
        "dataset_type": "videos",
        "checkpoints_folder": "./checkpoints",
        "results_folder": "./results",
        "random_split_seed": 42,
        "valid_frac": 0.05,
        "validate_every_step": 100,
        "checkpoint_every_step": 100,
        "num_frames": 17,
        "use_wandb_tracking": False,
        "discr_start_after_step": 0.0,
        "warmup_steps": 1000,
        "scheduler": None,
        "scheduler_kwargs": None,
        "accelerate_kwargs": None,
        "ema_kwargs": None,
        "optimizer_kwargs": None,
        "dataset_kwargs": None,
    }
    assert {name: parameters[name].default for name in documented} == documented
    for required in ("model", "batch_size", "num_train_steps", "image_size"):
        assert parameters[required].default is inspect.Parameter.empty


def test_every_optimizer_moves_at_the_rate_asked_for_and_the_warm_up_is_its(tmp_path: Path) -> None:
    """Theirs moved the discriminator twice a step, the second time at a rate that no warm-up had
    touched."""
    entry_point = trainer(tmp_path, discriminators=ALL, learning_rate=8e-3, warmup_steps=4)
    asked = [2e-3, 4e-3, 6e-3, 8e-3]
    for expected in asked:
        entry_point.train_step()
        for prepared in entry_point.engine.prepared.values():
            assert [group["lr"] for group in prepared.optimizer.param_groups] == [
                pytest.approx(expected)
            ] * 2
    assert entry_point.engine.prepared.keys() == {"model", "discriminator", "motion-1", "motion-2"}
    for name in entry_point.engine.prepared:
        assert [record[f"{name}/rate"] for record in trained(tmp_path)] == pytest.approx(asked)
        assert {
            int(state["step"])
            for state in entry_point.engine.prepared[name].optimizer.state.values()
        } == {4}


def test_the_optimizer_is_theirs_until_told_otherwise(tmp_path: Path) -> None:
    ours = trainer(tmp_path / "a", discriminators=FRAMES_ONLY).run.task
    assert (ours.optimizer.name, ours.optimizer.betas, ours.optimizer.weight_decay) == (
        "adamw",
        (0.9, 0.99),
        1e-2,
    )
    assert ours.adversary.optimizer == ours.optimizer
    entry_point = trainer(
        tmp_path / "b",
        optimizer_kwargs={"wd": 0.5, "betas": (0.5, 0.9), "eps": 1e-6},
        max_grad_norm=0.25,
    )
    groups = entry_point.engine.prepared["model"].optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]  # matrices, and the rest
    assert {(group["betas"], group["eps"]) for group in groups} == {((0.5, 0.9), 1e-6)}
    assert entry_point.run.task.optimizer.max_grad_norm == 0.25


def test_gradients_are_clipped_as_asked_for_the_model_and_for_each_judge(
    tmp_path: Path, monkeypatch: Any
) -> None:
    asked: list[float | None] = []
    monkeypatch.setattr(
        "tessera.engine.engine.clip_gradients", lambda parameters, norm, clip: asked.append(clip)
    )
    trainer(tmp_path, discriminators=ALL, max_grad_norm=0.25, num_train_steps=1).train()
    assert asked == [0.25] * 4


def test_the_schedule_goes_by_its_name(tmp_path: Path) -> None:
    entry_point = trainer(
        tmp_path,
        learning_rate=1e-3,
        scheduler="cosine",
        scheduler_kwargs={"floor": 0.5},
        warmup_steps=2,
    )
    entry_point.train()
    assert [record["model/lr"] for record in trained(tmp_path)] == pytest.approx(
        [5e-4, 1e-3, 1e-3, 7.5e-4]
    )


def test_judges_start_after_the_step_asked_for_and_are_penalised_as_often_as_asked(
    tmp_path: Path,
) -> None:
    trainer(
        tmp_path, discriminators=ALL, discr_start_after_step=1.0, apply_gradient_penalty_every=2
    ).train()
    read_records = trained(tmp_path)
    assert ["model/adversarial" in record for record in read_records] == [False, True, True, True]
    for judge in ("discriminator", "motion-1", "motion-2"):
        assert [f"{judge}/apart" in record for record in read_records] == [False, True, True, True]
        assert [f"{judge}/penalty" in record for record in read_records] == [False, False, True, False]


def test_the_average_is_theirs_until_told_otherwise(tmp_path: Path) -> None:
    theirs = trainer(tmp_path / "a").engine.ema.config
    assert (theirs.decay, theirs.update_after, theirs.update_every) == (0.9999, 100, 10)
    ours = trainer(
        tmp_path / "b", ema_kwargs={"beta": 0.5, "update_after_step": 0, "update_every": 1}
    ).engine.ema.config
    assert (ours.decay, ours.update_after, ours.update_every) == (0.5, 0, 1)


def test_accumulation_draws_as_many_examples_as_it_says(tmp_path: Path) -> None:
    trainer(tmp_path, grad_accum_every=2, num_train_steps=1).train()
    assert trained(tmp_path)[0]["examples"] == 4


def test_what_a_caller_gives_is_never_written_to(tmp_path: Path) -> None:
    """Theirs wrote into its own default dictionaries, and the next trainer inherited it."""
    given: dict[str, dict[str, Any]] = {
        "accelerate_kwargs": {"mixed_precision": "no"},
        "ema_kwargs": {"beta": 0.9},
        "optimizer_kwargs": {"wd": 0.0},
        "scheduler_kwargs": {"floor": 0.1},
        "dataset_kwargs": {},
    }
    before = json.dumps(given)
    trainer(tmp_path, **given)
    assert json.dumps(given) == before


# ---- what it learns from


def test_it_learns_from_a_folder_of_clips_and_its_folder_is_a_run(
    folder: Path, tmp_path: Path
) -> None:
    entry_point = trainer(
        tmp_path,
        dataset_folder=folder,
        dataset_kwargs={"flip": True},
        ema_kwargs={"beta": 0.0},
        learning_rate=1e-3,
    )
    given = model().state_dict()
    assert all(
        torch.equal(value, given[name]) for name, value in entry_point.model.state_dict().items()
    )
    assert entry_point.run.data.flip
    entry_point.train()
    assert not all(
        torch.equal(value, given[name]) for name, value in entry_point.model.state_dict().items()
    )
    assert [
        record["step"] for record in read_metrics(tmp_path) if record["kind"] == "validation"
    ] == [2, 4]
    assert (tmp_path / "samples/000004/sheet.mp4").is_file()
    batch = torch.rand(2, 3, 5, 16, 16) * 2 - 1
    assert torch.equal(Tokenizer.load(tmp_path).encode(batch), entry_point.tokenize(batch))


def test_clips_and_pictures_in_memory_become_examples_as_files_do(tmp_path: Path) -> None:
    source = trainer(
        tmp_path, dataset=[*clips(6), clips()[0][:, 0], clips()[0][:, :3]], valid_frac=0.0
    ).engine.training.source
    items = [source.item(i, np.random.default_rng(0)) for i in range(len(source))]
    assert [item.length for item in items] == [5] * 6 + [1, 3]
    assert all(
        item.video.shape == (3, 5, 16, 16) and item.video.min() >= -1 and item.video.max() <= 1
        for item in items
    )
    assert (
        min(item.video.min() for item in items) < -0.5
        and max(item.video.max() for item in items) > 0.5
    )
    assert all(np.array_equal(items[6].video[:, t], items[0].video[:, 0]) for t in range(5))
    assert all(np.array_equal(items[7].video[:, t], items[0].video[:, min(t, 2)]) for t in range(5))


def test_a_clip_that_does_not_fit_is_left_out_and_said_and_a_whole_set_of_them_is_refused(
    tmp_path: Path,
) -> None:
    some = [*clips(7), torch.rand(3, 5, 8, 8)]
    trainer(tmp_path / "some", dataset=some, valid_frac=0.0, num_train_steps=4).train()
    [line] = (tmp_path / "some/rejected.jsonl").read_text().splitlines()
    assert "clip-000007" in line and "(3, 5, 8, 8)" in line
    for number, (wrong, letter) in enumerate(
        [
            ([clip * 2 - 1 for clip in clips()], "a clip is floats from 0 to 1"),
            ([(clip * 255).byte() for clip in clips()], "torch.uint8 from"),
            (clips(frames=9), "with 1 to 5 frames here"),
        ]
    ):
        with pytest.raises(UserError, match=letter):
            trainer(tmp_path / f"{number}", dataset=wrong).train()


def test_pictures_are_clips_of_one_frame(tmp_path: Path) -> None:
    num_synthetic = SyntheticImages(count=8, size=16, seed=5)
    for i in range(len(num_synthetic)):
        Image.from_floats(num_synthetic.item(i, np.random.default_rng(0)).pixels).save(
            tmp_path / f"pictures/{i}"
        )
    entry_point = trainer(
        tmp_path / "run",
        dataset_folder=tmp_path / "pictures",
        dataset_type="images",
        discriminators=FRAMES_ONLY,
    )
    entry_point.train()
    assert entry_point.run.data.frames == 1
    assert entry_point.tokenize(torch.zeros(2, 3, 16, 16)).shape == (2, 1, 4, 4)


# ---- its life


def test_a_second_construction_goes_on_and_is_the_same_run(tmp_path: Path) -> None:
    """Theirs could not resume with its default loss, and forgot the order of its data."""
    settings: dict[str, Any] = {
        "judges": ALL,
        "learning_rate": 1e-3,
        "ema_kwargs": {"beta": 0.9, "update_after_step": 0},
    }
    trainer(tmp_path / "whole", **settings).train()
    first = trainer(tmp_path / "cut", **settings)
    for _ in range(3):
        first.train_step()
    first.engine.writer.wait()
    del first
    again = trainer(tmp_path / "cut", **settings)
    assert again.steps == 2
    again.train()
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 4)


def test_save_goes_to_the_folder_of_checkpoints_and_load_comes_back_from_it(tmp_path: Path) -> None:
    entry_point = trainer(
        tmp_path / "run",
        checkpoints_folder=tmp_path / "kept",
        discriminators=FRAMES_ONLY,
        learning_rate=1e-3,
    )
    for _ in range(3):
        entry_point.train_step()
    entry_point.save()
    entry_point.save(tmp_path / "elsewhere")
    remembered = {
        name: value.clone() for name, value in entry_point.engine.task.state_dict().items()
    }
    for place in ("kept/000003", "elsewhere"):
        other = trainer(
            tmp_path / place.replace("/", "-"), discriminators=FRAMES_ONLY, learning_rate=1e-3
        )
        other.load(tmp_path / place)
        assert other.steps == 3
        assert all(
            torch.equal(value, remembered[name])
            for name, value in other.engine.task.state_dict().items()
        )
        other.train()
        assert other.steps == 4


def test_one_judge_or_none_trains_too(tmp_path: Path) -> None:
    """With exactly one multiscale discriminator theirs crashed."""
    motion_only = replace(ALL, frames=None, rates=(2,))
    for discriminators, updates in (
        (None, ["model"]),
        (FRAMES_ONLY, ["model", "discriminator"]),
        (motion_only, ["model", "motion-2"]),
    ):
        entry_point = trainer(
            tmp_path / "-".join(updates), discriminators=discriminators, num_train_steps=1
        )
        entry_point.train()
        assert list(entry_point.engine.prepared) == updates


def test_tokenize_gives_a_grid_in_time_and_space_with_the_averaged_weights(tmp_path: Path) -> None:
    entry_point = trainer(
        tmp_path,
        learning_rate=0.02,
        ema_kwargs={"beta": 0.9, "update_after_step": 0, "update_every": 1},
    )
    entry_point.train()
    batch = torch.stack(clips(3)) * 2 - 1
    codes = entry_point.tokenize(batch)
    assert codes.shape == (3, 2, 4, 4) and not codes.requires_grad
    averaged = entry_point.ema_tokenizer
    assert torch.equal(codes, averaged.tokenize(batch))
    assert not torch.equal(codes, entry_point.model.tokenize(batch)), "the live weights are others"
    assert not averaged.training and not any(
        parameter.requires_grad for parameter in averaged.parameters()
    )
    assert torch.equal(entry_point.tokenize(batch[:, :, 0]), codes[:, :1])
    before = {name: value.clone() for name, value in entry_point.model.state_dict().items()}
    for parameter in averaged.parameters():
        parameter.zero_()
    assert all(
        torch.equal(value, before[name]) for name, value in entry_point.model.state_dict().items()
    ), "it is a copy"
    assert torch.equal(entry_point.tokenize(batch), codes)


# ---- trackers


def test_inside_trackers_every_record_goes_to_the_project_and_outside_none_is_lost_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type("OneTracker", (FakeTracker,), {"calls": []})
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", kind)
    entry_point = trainer(tmp_path, use_wandb_tracking=True)
    for start in (entry_point.train, entry_point.train_step):
        with pytest.raises(UserError, match="no project was named"):
            start()
    assert kind.calls == []
    with entry_point.trackers("magvit", run_name="baseline", hps={"why": "to see"}):
        entry_point.train()
    assert kind.calls[0] == ("project", "magvit")
    settings = kind.calls[1][1]
    assert (settings["run_name"], settings["why"], settings["engine.steps"]) == (
        "baseline",
        "to see",
        4,
    )
    logged = [(step, "val_ema/psnr" in values) for what, step, values in kind.calls[2:-1]]
    assert logged == [(1, False), (2, False), (2, True), (3, False), (4, False), (4, True)]
    assert kind.calls[-1] == ("finish",)


def test_trackers_that_nobody_asked_for_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="without use_wandb_tracking=True"),
        trainer(tmp_path).trackers("magvit"),
    ):
        pass


# ---- refusals


@pytest.mark.parametrize(
    ("settings", "letter"),
    [
        ({"dataset": None, "dataset_folder": None}, "neither a dataset nor a dataset_folder"),
        ({"dataset": [], "dataset_folder": "clips"}, "both a dataset and a dataset_folder"),
        ({"dataset_type": "audio"}, "only 'videos' and 'images'"),
        ({"dataset_kwargs": {"flip": True}}, "a dataset was given"),
        (
            {"dataset_folder": "clips", "dataset_kwargs": {"fliip": True}},
            "fliip=True.*did you mean 'flip'",
        ),
        (
            {"scheduler": torch.optim.lr_scheduler.StepLR},
            "StepLR.*'constant', 'warmup', 'cosine', 'wsd'",
        ),
        ({"scheduler": "cosin"}, "'constant', 'warmup', 'cosine', 'wsd'"),
        (
            {"scheduler": "cosine", "scheduler_kwargs": {"T_max": 10}},
            "scheduler_kwargs has T_max=10",
        ),
        ({"optimizer_kwargs": {"weight_decay": 0.1}}, "optimizer_kwargs has weight_decay=0.1"),
        (
            {"ema_kwargs": {"power": 0.75}},
            "ema_kwargs has power=0.75.*beta, update_after_step, update_every",
        ),
        ({"accelerate_kwargs": {"split_batches": True}}, "split_batches"),
        ({"judges": replace(ALL, starts=7)}, "starts=7.*discr_start_after_step"),
        ({"judges": replace(ALL, gp_every=7)}, "penalty_every=7.*apply_gradient_penalty_every"),
    ],
)
def test_what_has_no_meaning_here_is_refused_by_name_and_nothing_is_written(
    settings: dict[str, Any], letter: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=letter):
        trainer(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_a_wrong_number_of_frames_is_refused_with_the_right_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Use 5 or 9"):
        trainer(tmp_path / "run", num_frames=6)
