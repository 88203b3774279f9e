"""The trainer for videos: parameters of the research package, items in memory, tracking, errors."""

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

from tessera import Generator, Tokenizer
from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
from tessera.modalities.image.media import Image
from tessera.modalities.image.synthetic import SyntheticImages
from tessera.modalities.video.discriminator import TemporalDiscriminatorConfig
from tessera.modalities.video.magvit2 import VideoTokenizer, VideoTokenizerConfig
from tessera.modalities.video.recipes import videos_magvit2
from tessera.modalities.video.reconstruction import VideoAdversaryConfig
from tessera.modalities.video.synthetic import SyntheticVideos, draw_video
from tessera.nn.masked_transformer import MaskedTransformerConfig
from tessera.nn.quantize import FSQConfig
from tessera.run.errors import UserError
from tessera.text.learned import LearnedTextConfig
from tessera.trainers import VideoGeneratorTrainer, VideoTokenizerTrainer
from tessera.trainers.videos import PACKAGE_ADVERSARY
from tests.fake_tracker import FakeTracker
from tests.runs import assert_same_run, read_metrics, train_once

FRAMES_ONLY = VideoAdversaryConfig(frames=PatchDiscriminatorConfig(dim=8, layers=2), motion=None)
FRAMES_AND_MOTION = replace(FRAMES_ONLY, motion=TemporalDiscriminatorConfig(dim=8, layers=2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of eight videos of five frames."""
    path = tmp_path_factory.mktemp("videos")
    dataset = SyntheticVideos(count=8, size=16, frames=5, seed=5)
    for i in range(len(dataset)):
        draw_video(dataset.scene(i), 16, 5).save(path / f"{i}")
        (path / f"{i}.gif").unlink()
    return path


def make_videos(count: int = 8, frames: int = 5) -> list[torch.Tensor]:
    """Return tensors (3, T, H, W) in [0, 1], the items of the research package."""
    dataset = SyntheticVideos(count=count, size=16, frames=frames, seed=5)
    examples = [dataset.item(i, np.random.default_rng(0)) for i in range(count)]
    return [torch.from_numpy(example.video / 2 + 0.5) for example in examples]


def build_model() -> VideoTokenizer:
    torch.manual_seed(0)
    layers = ("compress_space", "compress_space", "compress_time", "compress_time", "residual")
    return VideoTokenizer(
        VideoTokenizerConfig(
            dim=8, max_channels=16, layers=layers, quantizer=FSQConfig(levels=(4, 4, 4))
        )
    )


def build_trainer(results: Path, **settings: Any) -> VideoTokenizerTrainer:
    defaults = {
        "image_size": 16,
        "num_frames": 5,
        "batch_size": 2,
        "num_train_steps": 4,
        "validate_every_step": 2,
        "checkpoint_every_step": 2,
        "results_folder": results,
        "warmup_steps": 0,
        "valid_frac": 0.3,
        "discriminators": None,
    }
    if "dataset_folder" not in settings and "dataset" not in settings:
        defaults["dataset"] = make_videos()
    model = settings.pop("model", None) or build_model()
    return VideoTokenizerTrainer(model, **(defaults | settings))


def read_train_records(results: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(results) if record["kind"] == "train"]


# ---- parameters


def test_parameters_and_defaults_are_those_of_the_research_package() -> None:
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
    for required in ("model", "batch_size", "num_train_steps"):
        assert parameters[required].default is inspect.Parameter.empty


def test_every_optimizer_takes_one_step_with_the_requested_learning_rate(tmp_path: Path) -> None:
    """The research package updates the discriminator twice a step, once without the warm-up."""
    trainer = build_trainer(
        tmp_path, discriminators=FRAMES_AND_MOTION, learning_rate=8e-3, warmup_steps=4
    )
    expected = [2e-3, 4e-3, 6e-3, 8e-3]
    updates = trainer.engine.updates
    for lr in expected:
        trainer.train_step()
        for state in updates.values():
            lrs = [group["lr"] for group in state.optimizer.param_groups]
            assert lrs == [pytest.approx(lr)] * 2
    assert updates.keys() == {"model", "discriminator", "motion-1", "motion-2"}
    for name, state in updates.items():
        logged = [record[f"{name}/lr"] for record in read_train_records(tmp_path)]
        assert logged == pytest.approx(expected)
        assert {int(one["step"]) for one in state.optimizer.state.values()} == {4}


def test_optimizer_settings_are_used_and_default_to_the_research_package(tmp_path: Path) -> None:
    default = build_trainer(tmp_path / "a", discriminators=FRAMES_ONLY).run.task
    optimizer = default.optimizer
    assert (optimizer.name, optimizer.betas, optimizer.weight_decay) == ("adamw", (0.9, 0.99), 1e-2)
    assert default.adversary.optimizer == optimizer
    trainer = build_trainer(
        tmp_path / "b",
        optimizer_kwargs={"wd": 0.5, "betas": (0.5, 0.9), "eps": 1e-6},
        max_grad_norm=0.25,
    )
    groups = trainer.engine.updates["model"].optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]  # matrices, and the rest
    assert {(group["betas"], group["eps"]) for group in groups} == {((0.5, 0.9), 1e-6)}
    assert trainer.run.task.optimizer.max_grad_norm == 0.25


def test_gradients_of_model_and_discriminators_are_clipped_to_max_grad_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []
    monkeypatch.setattr(
        "tessera.engine.engine.clip_grad_norm",
        lambda parameters, norm, max_grad_norm: limits.append(max_grad_norm),
    )
    build_trainer(
        tmp_path, discriminators=FRAMES_AND_MOTION, max_grad_norm=0.25, num_train_steps=1
    ).train()
    assert limits == [0.25] * 4


def test_a_schedule_is_given_by_its_name(tmp_path: Path) -> None:
    trainer = build_trainer(
        tmp_path,
        learning_rate=1e-3,
        scheduler="cosine",
        scheduler_kwargs={"min_lr_ratio": 0.5},
        warmup_steps=2,
    )
    trainer.train()
    assert [record["model/lr"] for record in read_train_records(tmp_path)] == pytest.approx(
        [5e-4, 1e-3, 1e-3, 7.5e-4]
    )


def test_discriminators_start_and_are_penalised_as_requested(tmp_path: Path) -> None:
    build_trainer(
        tmp_path,
        discriminators=FRAMES_AND_MOTION,
        discr_start_after_step=1.0,
        apply_gradient_penalty_every=2,
    ).train()
    records = read_train_records(tmp_path)
    started, penalised = [False, True, True, True], [False, False, True, False]
    assert ["model/adversarial" in record for record in records] == started
    for name in ("discriminator", "motion-1", "motion-2"):
        assert [f"{name}/d_loss" in record for record in records] == started
        assert [f"{name}/gradient_penalty" in record for record in records] == penalised


def test_ema_settings_are_used_and_default_to_the_research_package(tmp_path: Path) -> None:
    default = build_trainer(tmp_path / "a").engine.ema.config
    assert (default.decay, default.update_after, default.update_every) == (0.9999, 100, 10)
    kwargs = {"beta": 0.5, "update_after_step": 0, "update_every": 1}
    config = build_trainer(tmp_path / "b", ema_kwargs=kwargs).engine.ema.config
    assert (config.decay, config.update_after, config.update_every) == (0.5, 0, 1)


def test_gradient_accumulation_multiplies_the_examples_of_a_step(tmp_path: Path) -> None:
    build_trainer(tmp_path, grad_accum_every=2, num_train_steps=1).train()
    assert read_train_records(tmp_path)[0]["examples"] == 4


def test_dictionaries_of_the_caller_are_never_modified(tmp_path: Path) -> None:
    """The research package modifies its own default dictionaries, which later trainers get."""
    given: dict[str, dict[str, Any]] = {
        "accelerate_kwargs": {"mixed_precision": "no"},
        "ema_kwargs": {"beta": 0.9},
        "optimizer_kwargs": {"wd": 0.0},
        "scheduler_kwargs": {"min_lr_ratio": 0.1},
        "dataset_kwargs": {},
    }
    before = json.dumps(given)
    build_trainer(tmp_path, **given)
    assert json.dumps(given) == before


# ---- datasets


def test_training_on_a_folder_leaves_a_complete_run_directory(folder: Path, tmp_path: Path) -> None:
    trainer = build_trainer(
        tmp_path,
        dataset_folder=folder,
        dataset_kwargs={"flip": True},
        ema_kwargs={"beta": 0.0},
        learning_rate=1e-3,
    )
    initial = build_model().state_dict()
    assert all(
        torch.equal(value, initial[name]) for name, value in trainer.model.state_dict().items()
    )
    assert trainer.run.data.flip
    trainer.train()
    assert not all(
        torch.equal(value, initial[name]) for name, value in trainer.model.state_dict().items()
    )
    validations = [record for record in read_metrics(tmp_path) if record["kind"] == "validation"]
    assert [record["step"] for record in validations] == [2, 4]
    assert (tmp_path / "samples/000004/sheet.mp4").is_file()
    batch = torch.rand(2, 3, 5, 16, 16)
    assert torch.equal(Tokenizer.load(tmp_path).encode(batch * 2 - 1), trainer.tokenize(batch))


def test_videos_and_images_in_memory_are_preprocessed_like_files(tmp_path: Path) -> None:
    video = make_videos()[0]
    trainer = build_trainer(
        tmp_path, dataset=[*make_videos(6), video[:, 0], video[:, :3]], valid_frac=0.0
    )
    dataset = trainer.engine.training.dataset
    examples = [dataset.item(i, np.random.default_rng(0)) for i in range(len(dataset))]
    assert [example.length for example in examples] == [5] * 6 + [1, 3]
    videos = [example.video for example in examples]
    assert all(one.shape == (3, 5, 16, 16) for one in videos)
    assert all(one.min() >= -1 and one.max() <= 1 for one in videos)
    assert min(one.min() for one in videos) < -0.5 and max(one.max() for one in videos) > 0.5
    for t in range(5):
        assert np.array_equal(videos[6][:, t], videos[0][:, 0])
        assert np.array_equal(videos[7][:, t], videos[0][:, min(t, 2)])


def test_unusable_videos_are_skipped_and_listed_unless_all_are_unusable(tmp_path: Path) -> None:
    dataset = [*make_videos(7), torch.rand(3, 5, 8, 8)]
    build_trainer(tmp_path / "one", dataset=dataset, valid_frac=0.0, num_train_steps=4).train()
    [line] = (tmp_path / "one/rejected.jsonl").read_text().splitlines()
    assert "clip-000007" in line and "(3, 5, 8, 8)" in line
    for number, (unusable, message) in enumerate(
        [
            ([video * 2 - 1 for video in make_videos()], "videos must be floats from 0 to 1"),
            ([(video * 255).byte() for video in make_videos()], "torch.uint8 from"),
            (make_videos(frames=9), "with 1 to 5 frames"),
        ]
    ):
        with pytest.raises(UserError, match=message):
            build_trainer(tmp_path / f"{number}", dataset=unusable).train()


def test_images_are_videos_of_one_frame(tmp_path: Path) -> None:
    dataset = SyntheticImages(count=8, size=16, seed=5)
    for i in range(len(dataset)):
        example = dataset.item(i, np.random.default_rng(0))
        Image.from_floats(example.pixels).save(tmp_path / f"images/{i}")
    trainer = build_trainer(
        tmp_path / "run",
        dataset_folder=tmp_path / "images",
        dataset_type="images",
        discriminators=FRAMES_ONLY,
    )
    trainer.train()
    assert trainer.run.data.frames == 1
    assert trainer.tokenize(torch.zeros(2, 3, 16, 16)).shape == (2, 1, 4, 4)


# ---- training, resuming and saving


def test_a_trainer_constructed_again_resumes_the_same_run(tmp_path: Path) -> None:
    """The research package cannot resume with its default loss and restarts the data order."""
    settings: dict[str, Any] = {
        "discriminators": FRAMES_AND_MOTION,
        "learning_rate": 1e-3,
        "ema_kwargs": {"beta": 0.9, "update_after_step": 0},
    }
    build_trainer(tmp_path / "whole", **settings).train()
    first = build_trainer(tmp_path / "resumed", **settings)
    for _ in range(3):
        first.train_step()
    first.engine.saver.writer.wait()
    del first
    again = build_trainer(tmp_path / "resumed", **settings)
    assert again.steps == 2
    again.train()
    assert_same_run(tmp_path / "whole", tmp_path / "resumed", 4)


def test_save_writes_to_checkpoints_folder_and_load_restores(tmp_path: Path) -> None:
    trainer = build_trainer(
        tmp_path / "run",
        checkpoints_folder=tmp_path / "saved",
        discriminators=FRAMES_ONLY,
        learning_rate=1e-3,
    )
    for _ in range(3):
        trainer.train_step()
    trainer.save()
    trainer.save(tmp_path / "elsewhere")
    saved = {name: value.clone() for name, value in trainer.engine.task.state_dict().items()}
    for path in ("saved/000003", "elsewhere"):
        other = build_trainer(
            tmp_path / f"of {path.replace('/', ' ')}",
            discriminators=FRAMES_ONLY,
            learning_rate=1e-3,
        )
        other.load(tmp_path / path)
        assert other.steps == 3
        assert all(
            torch.equal(value, saved[name])
            for name, value in other.engine.task.state_dict().items()
        )
        other.train()
        assert other.steps == 4


def test_training_works_with_one_discriminator_or_none(tmp_path: Path) -> None:
    """The research package fails with exactly one multiscale discriminator."""
    motion_only = replace(FRAMES_AND_MOTION, frames=None, rates=(2,))
    for discriminators, updates in (
        (None, ["model"]),
        (FRAMES_ONLY, ["model", "discriminator"]),
        (motion_only, ["model", "motion-2"]),
    ):
        trainer = build_trainer(
            tmp_path / "-".join(updates), discriminators=discriminators, num_train_steps=1
        )
        trainer.train()
        assert list(trainer.engine.updates) == updates


def test_tokenize_and_ema_tokenizer_use_the_ema_weights(tmp_path: Path) -> None:
    trainer = build_trainer(
        tmp_path,
        learning_rate=0.02,
        ema_kwargs={"beta": 0.9, "update_after_step": 0, "update_every": 1},
    )
    trainer.train()
    videos = torch.stack(make_videos(3))
    batch = videos * 2 - 1
    codes = trainer.tokenize(videos)
    assert codes.shape == (3, 2, 4, 4) and not codes.requires_grad
    ema_tokenizer = trainer.ema_tokenizer
    assert torch.equal(codes, ema_tokenizer.tokenize(batch))
    assert not torch.equal(codes, trainer.model.tokenize(batch)), "the raw weights differ"
    assert not ema_tokenizer.training
    assert not any(parameter.requires_grad for parameter in ema_tokenizer.parameters())
    assert torch.equal(trainer.tokenize(videos[:, :, 0]), codes[:, :1])
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    for parameter in ema_tokenizer.parameters():
        parameter.zero_()
    assert all(
        torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items()
    ), "ema_tokenizer is a copy"
    assert torch.equal(trainer.tokenize(videos), codes)


def test_tokenize_takes_the_range_of_the_dataset_and_checks_it(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path)
    videos = make_videos(3)
    [batch] = trainer.engine.validation.batches(0, 1, [0])
    index = int(batch.names[0].rpartition("-")[2])
    codes = trainer.tokenize(make_videos()[index][None])
    assert torch.equal(codes, trainer.model.tokenize(batch.examples.videos[:1]))
    for wrong in (torch.stack(videos) * 2 - 1, (torch.stack(videos) * 255).byte()):
        with pytest.raises(UserError, match="must be floats from 0 to 1"):
            trainer.tokenize(wrong)


def test_the_given_model_itself_is_trained(tmp_path: Path) -> None:
    model = build_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.decoder.requires_grad_(False)
    trainer = build_trainer(tmp_path, model=model, learning_rate=1e-2, discriminators=FRAMES_ONLY)
    assert trainer.model is model
    trainer.train()
    frozen = {name for name, _ in model.decoder.named_parameters(prefix="decoder")}
    changed = {name for name, value in model.named_parameters() if not value.equal(before[name])}
    assert changed == {name for name, _ in model.named_parameters()} - frozen


def test_differences_to_the_weights_of_the_package_are_stated() -> None:
    assert VideoTokenizerTrainer.__doc__ is not None
    text = " ".join(VideoTokenizerTrainer.__doc__.split())
    ours, theirs = VideoAdversaryConfig(), PACKAGE_ADVERSARY
    assert f"weight of {ours.weight:g} and a gradient penalty of {ours.gp_weight:g}" in text
    assert f"have {theirs.weight:g} and {theirs.gp_weight:g}, on reconstructions too" in text


# ---- trackers


def test_records_are_tracked_inside_trackers_and_rejected_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = type("OneTracker", (FakeTracker,), {"calls": []})
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", tracker)
    trainer = build_trainer(tmp_path, use_wandb_tracking=True)
    for train in (trainer.train, trainer.train_step):
        with pytest.raises(UserError, match="no project was given"):
            train()
    assert tracker.calls == []
    with trainer.trackers("magvit", run_name="baseline", hps={"why": "to see"}):
        trainer.train()
    assert tracker.calls[0] == ("project", "magvit", "baseline")
    settings = tracker.calls[1][1]
    assert (settings["run_name"], settings["why"], settings["engine.steps"]) == (
        "baseline",
        "to see",
        4,
    )
    logged = [(step, "val_ema/psnr" in values) for _, step, values in tracker.calls[2:-1]]
    assert logged == [(1, False), (2, False), (2, True), (3, False), (4, False), (4, True)]
    assert tracker.calls[-1] == ("finish",)


def test_trackers_are_rejected_without_use_wandb_tracking(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="without use_wandb_tracking=True"),
        build_trainer(tmp_path).trackers("magvit"),
    ):
        pass


# ---- invalid arguments


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": None, "dataset_folder": None}, "neither a dataset nor a dataset_folder"),
        ({"dataset": [], "dataset_folder": "videos"}, "both a dataset and a dataset_folder"),
        ({"dataset_type": "audio"}, "must be 'videos' or 'images', got 'audio'"),
        ({"dataset_kwargs": {"flip": True}}, "a dataset was given"),
        (
            {"dataset_folder": "videos", "dataset_kwargs": {"fliip": True}},
            "fliip=True.*did you mean 'flip'",
        ),
        (
            {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
            "ReduceLROnPlateau.*'constant', 'warmup', 'cosine', 'wsd'",
        ),
        ({"scheduler": torch.optim.lr_scheduler.StepLR}, "StepLR.*missing.*'step_size'"),
        ({"image_size": None}, "image_size is missing"),
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
        (
            {"discriminators": replace(FRAMES_AND_MOTION, start_step=7)},
            "start_step=7.*discr_start_after_step",
        ),
        (
            {"discriminators": replace(FRAMES_AND_MOTION, gp_every=7)},
            "gp_every=7.*apply_gradient_penalty_every",
        ),
    ],
)
def test_invalid_arguments_are_rejected_before_anything_is_written(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        build_trainer(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_an_invalid_number_of_frames_is_rejected_with_valid_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use 5 or 9"):
        build_trainer(tmp_path / "run", num_frames=6)


def test_generator_trainer_trains_and_its_run_is_sampled(folder: Path, tmp_path: Path) -> None:
    for number in range(8):
        (folder / f"{number}.txt").write_text(f"video {number}", encoding="utf-8")
    run = videos_magvit2("tiny")
    tokenizer = train_once("videos-magvit2", run)
    text = LearnedTextConfig(dim=16, depth=1, heads=2)
    settings: dict[str, Any] = {
        "folder": folder,
        "image_size": 16,
        "num_frames": 5,
        "batch_size": 4,
        "num_train_steps": 2,
        "save_results_every": 2,
        "transformer": MaskedTransformerConfig(dim=16, depth=1, heads=2, text=text),
    }
    first, second = (
        VideoGeneratorTrainer(tokenizer, results_folder=tmp_path / name, **settings)
        for name in ("first", "second")
    )
    records: list[dict[str, Any]] = []
    first.train(log_fn=records.append)
    losses = second.train_step()
    assert losses["model/cross_entropy"] == pytest.approx(records[0]["model/cross_entropy"])
    assert first.run.recipe == "videos-maskgit"
    [video] = Generator.load(tmp_path / "first").generate("video 3").media
    assert video.frames.shape == (5, 16, 16, 3)
