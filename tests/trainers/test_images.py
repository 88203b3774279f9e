"""The trainers for images: parameters of the research package, training, resuming and saving."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera import VQGAN, Generator, MaskGitTrainer, Tokenizer, VQGANConfig, VQGanVAETrainer
from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
from tessera.modalities.image.media import Image
from tessera.modalities.image.synthetic import SyntheticImages
from tessera.nn.masked_transformer import MaskedTransformerConfig
from tessera.run.errors import UserError
from tessera.text.learned import LearnedTextConfig
from tests.runs import read_checkpoint, read_metrics, tokenizer


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    dataset = SyntheticImages(count=24, size=24, seed=5)
    for i in range(len(dataset)):
        example = dataset.item(i, np.random.default_rng(0))
        Image.from_floats(example.pixels).save(folder / f"{i}")
    return folder


def build_vae() -> VQGAN:
    torch.manual_seed(0)
    return VQGAN(VQGANConfig(dim=8, layers=2, blocks=(0, 1)))


def build_trainer(images: Path, results: Path, **settings: Any) -> VQGanVAETrainer:
    defaults = {
        "folder": images,
        "image_size": 16,
        "batch_size": 4,
        "num_train_steps": 6,
        "save_results_every": 3,
        "save_model_every": 2,
        "results_folder": results,
        "discriminator": PatchDiscriminatorConfig(dim=8, layers=2),
    }
    vae = settings.pop("vae", None) or build_vae()
    return VQGanVAETrainer(vae, **(defaults | settings))


def test_parameters_and_defaults_are_those_of_the_research_package() -> None:
    parameters = inspect.signature(VQGanVAETrainer).parameters
    documented = {
        "lr": 3e-4,
        "grad_accum_every": 1,
        "max_grad_norm": None,
        "discr_max_grad_norm": None,
        "save_results_every": 100,
        "save_model_every": 1000,
        "results_folder": "./results",
        "valid_frac": 0.05,
        "random_split_seed": 42,
        "use_ema": True,
        "ema_beta": 0.995,
        "ema_update_after_step": 0,
        "ema_update_every": 1,
        "apply_grad_penalty_every": 4,
    }
    assert {name: parameters[name].default for name in documented} == documented
    for required in ("vae", "folder", "num_train_steps", "batch_size", "image_size"):
        assert parameters[required].default is inspect.Parameter.empty


def test_train_starts_from_the_given_weights_and_calls_log_fn(images: Path, tmp_path: Path) -> None:
    records: list[dict[str, Any]] = []
    initial, given = build_vae(), build_vae()
    trainer = build_trainer(images, tmp_path, vae=given)
    assert trainer.model is given
    assert all(
        torch.equal(a, b)
        for a, b in zip(trainer.model.parameters(), initial.parameters(), strict=True)
    )
    trainer.train(log_fn=records.append)
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in records if record["kind"] == "validation"] == [3, 6]
    assert not all(
        torch.equal(a, b)
        for a, b in zip(trainer.model.parameters(), initial.parameters(), strict=True)
    )
    assert (tmp_path / "samples/000006/sheet.png").is_file()


def test_training_step_by_step_gives_the_same_metrics(images: Path, tmp_path: Path) -> None:
    build_trainer(images, tmp_path / "whole").train()
    trainer = build_trainer(images, tmp_path / "stepped")
    losses = []
    while logs := trainer.train_step():
        losses.append(logs["model/loss"])
    assert len(losses) == 6
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "stepped")


def test_resuming_restores_step_optimizers_and_ema(images: Path, tmp_path: Path) -> None:
    build_trainer(images, tmp_path / "whole").train()
    trainer = build_trainer(images, tmp_path / "resumed")
    for _ in range(5):
        trainer.train_step()
    trainer.engine.saver.writer.wait()
    del trainer
    again = build_trainer(images, tmp_path / "resumed")
    assert again.steps == 4
    again.train()
    whole, resumed = (read_checkpoint(tmp_path / name, 6) for name in ("whole", "resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "resumed")


def test_a_saved_checkpoint_can_be_loaded_by_another_trainer(images: Path, tmp_path: Path) -> None:
    trainer = build_trainer(images, tmp_path / "run")
    for _ in range(3):
        trainer.train_step()
    trainer.save(tmp_path / "a checkpoint")
    saved = [p.clone() for p in trainer.model.parameters()]
    other = build_trainer(images, tmp_path / "other")
    other.load(tmp_path / "a checkpoint")
    assert other.steps == 3
    assert all(torch.equal(a, b) for a, b in zip(other.model.parameters(), saved, strict=True))
    other.train()
    assert other.steps == 6
    with pytest.raises(UserError, match="manifest is missing .* Give the folder of a complete"):
        other.load(tmp_path)


def test_ema_beta_is_the_decay_of_the_ema(images: Path, tmp_path: Path) -> None:
    trainer = build_trainer(images, tmp_path, ema_beta=0.5)
    assert trainer.engine.ema.decay_at(1000) == 0.5


def test_the_gradient_penalty_is_applied_as_often_as_requested(
    images: Path, tmp_path: Path
) -> None:
    build_trainer(images, tmp_path, apply_grad_penalty_every=3).train()
    records = read_metrics(tmp_path)
    assert [r["step"] for r in records if "discriminator/gradient_penalty" in r] == [1, 4]


def test_training_works_without_a_discriminator(images: Path, tmp_path: Path) -> None:
    trainer = build_trainer(images, tmp_path, discriminator=None)
    trainer.train()
    assert list(trainer.engine.updates) == ["model"]


def test_gradient_accumulation_multiplies_the_examples_of_a_step(
    images: Path, tmp_path: Path
) -> None:
    build_trainer(images, tmp_path, grad_accum_every=3, num_train_steps=1).train()
    assert read_metrics(tmp_path)[0]["examples"] == 12


def test_accelerate_kwargs_are_translated_or_rejected_and_never_modified(
    images: Path, tmp_path: Path
) -> None:
    kwargs = {"mixed_precision": "bf16"}
    trainer = build_trainer(images, tmp_path / "a", accelerate_kwargs=kwargs)
    assert trainer.engine.precision == "bf16"
    assert kwargs == {"mixed_precision": "bf16"}
    with pytest.raises(UserError, match="split_batches"):
        build_trainer(images, tmp_path / "b", accelerate_kwargs={"split_batches": True})


def test_the_results_folder_can_be_loaded_as_a_tokenizer(images: Path, tmp_path: Path) -> None:
    build_trainer(images, tmp_path).train()
    tokenizer = Tokenizer.load(tmp_path)
    batch = torch.zeros(2, 3, 16, 16)
    codes = tokenizer.encode(batch)
    assert codes.shape == (2, 4, 4)
    assert tokenizer.decode(codes).shape == batch.shape


def test_maskgit_trainer_trains_a_generator_on_captioned_images(
    images: Path, tmp_path: Path
) -> None:
    for image in images.glob("*.png"):
        image.with_suffix(".txt").write_text(f"image {image.stem}")
    settings = {
        "folder": images,
        "image_size": 16,
        "batch_size": 4,
        "num_train_steps": 4,
        "save_results_every": 2,
    }
    text = LearnedTextConfig(dim=16, depth=1, heads=2)
    transformer = MaskedTransformerConfig(dim=16, depth=1, heads=2, text=text)
    first, second = (
        MaskGitTrainer(
            tokenizer(),
            results_folder=tmp_path / name,
            transformer=transformer,
            lr=1e-3,
            **settings,
        )
        for name in ("first", "second")
    )
    records: list[dict[str, Any]] = []
    first.train(log_fn=records.append)
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2, 3, 4]
    assert records[0]["model/lr"] == 1e-3
    losses = second.train_step()
    assert losses["model/cross_entropy"] == pytest.approx(records[0]["model/cross_entropy"])
    [image] = Generator.load(tmp_path / "first").generate("image 3").media
    assert image.pixels.shape == (16, 16, 3)


def test_maskgit_trainer_trains_super_resolution_with_a_low_resolution_tokenizer(
    images: Path, tmp_path: Path
) -> None:
    trainer = MaskGitTrainer(
        tokenizer(32),
        low_res_tokenizer=tokenizer(16),
        folder=images,
        image_size=32,
        batch_size=4,
        num_train_steps=1,
        transformer=MaskedTransformerConfig(dim=16, depth=1, heads=2, text=None),
        results_folder=tmp_path,
    )
    trainer.train()
    assert trainer.run.recipe == "images-maskgit-superres"
    assert (tmp_path / "dependencies/low_res_tokenizer/config.json").is_file()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_ema": "yes"}, "use_ema must be True or False, got 'yes'"),
        ({"num_train_steps": "ten"}, "num_train_steps must be a whole number, got 'ten'"),
    ],
)
def test_arguments_of_a_wrong_type_get_a_sentence(
    settings: dict[str, Any], message: str, images: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        build_trainer(images, tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()
