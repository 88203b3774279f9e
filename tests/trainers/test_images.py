"""The front doors: theirs in name and parameters, without the defects (shared facts: SEEDS 4.5)."""

from __future__ import annotations

import inspect
from pathlib import Path

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
from tests.runs import read_metrics, read_checkpoint, tokenizer


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    num_synthetic = SyntheticImages(count=24, size=24, seed=5)
    for i in range(len(num_synthetic)):
        Image.from_floats(num_synthetic.item(i, np.random.default_rng(0)).pixels).save(folder / f"{i}")
    return folder


def vae() -> VQGAN:
    torch.manual_seed(0)
    return VQGAN(VQGANConfig(dim=8, layers=2, blocks=(0, 1)))


def trainer(pictures: Path, results: Path, **settings) -> VQGanVAETrainer:
    given = {
        "folder": pictures,
        "image_size": 16,
        "batch_size": 4,
        "num_train_steps": 6,
        "save_results_every": 3,
        "save_model_every": 2,
        "results_folder": results,
        "discriminator": PatchDiscriminatorConfig(dim=8, layers=2),
    }
    return VQGanVAETrainer(vae(), **(given | settings))


def test_its_parameters_and_defaults_are_the_documented_ones() -> None:
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


def test_it_trains_the_network_it_was_given_and_tells_log_fn(
    pictures: Path, tmp_path: Path
) -> None:
    heard: list[dict] = []
    given = vae()
    entry_point = trainer(pictures, tmp_path)
    assert all(
        torch.equal(a, b)
        for a, b in zip(entry_point.model.parameters(), given.parameters(), strict=True)
    )
    entry_point.train(log_fn=heard.append)
    assert [record["step"] for record in heard if record["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in heard if record["kind"] == "validation"] == [3, 6]
    assert not all(
        torch.equal(a, b)
        for a, b in zip(entry_point.model.parameters(), given.parameters(), strict=True)
    )
    assert (tmp_path / "samples/000006/sheet.png").is_file()


def test_one_step_at_a_time_is_the_same_run(pictures: Path, tmp_path: Path) -> None:
    trainer(pictures, tmp_path / "whole").train()
    entry_point = trainer(pictures, tmp_path / "stepped")
    losses = []
    while logs := entry_point.train_step():
        losses.append(logs["model/loss"])
    assert len(losses) == 6
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "stepped")


def test_its_periodic_checkpoints_resume_step_optimizers_and_average(
    pictures: Path, tmp_path: Path
) -> None:
    trainer(pictures, tmp_path / "whole").train()
    entry_point = trainer(pictures, tmp_path / "cut")
    for _ in range(5):
        entry_point.train_step()
    entry_point.engine.writer.wait()
    del entry_point
    again = trainer(pictures, tmp_path / "cut")
    assert again.steps == 4
    again.train()
    whole, cut = read_checkpoint(tmp_path / "whole", 6), read_checkpoint(tmp_path / "cut", 6)
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "cut")


def test_save_and_load_by_hand(pictures: Path, tmp_path: Path) -> None:
    entry_point = trainer(pictures, tmp_path / "run")
    for _ in range(3):
        entry_point.train_step()
    entry_point.save(tmp_path / "by hand")
    remembered = [p.clone() for p in entry_point.model.parameters()]
    other = trainer(pictures, tmp_path / "other")
    other.load(tmp_path / "by hand")
    assert other.steps == 3
    assert all(torch.equal(a, b) for a, b in zip(other.model.parameters(), remembered, strict=True))
    other.train()
    assert other.steps == 6
    with pytest.raises(UserError, match="manifest is missing"):
        other.load(tmp_path)


def test_the_rate_of_averaging_asked_for_is_the_rate_used(pictures: Path, tmp_path: Path) -> None:
    entry_point = trainer(pictures, tmp_path, ema_beta=0.5)
    assert entry_point.engine.ema.decay_at(1000) == 0.5


def test_the_gradient_penalty_comes_as_often_as_asked(pictures: Path, tmp_path: Path) -> None:
    trainer(pictures, tmp_path, apply_grad_penalty_every=3).train()
    assert [r["step"] for r in read_metrics(tmp_path) if "discriminator/penalty" in r] == [1, 4]


def test_it_trains_without_a_discriminator(pictures: Path, tmp_path: Path) -> None:
    entry_point = trainer(pictures, tmp_path, discriminator=None)
    entry_point.train()
    assert list(entry_point.engine.prepared) == ["model"]


def test_accumulation_draws_as_many_examples_as_it_says(pictures: Path, tmp_path: Path) -> None:
    trainer(pictures, tmp_path, grad_accum_every=3, num_train_steps=1).train()
    assert read_metrics(tmp_path)[0]["examples"] == 12


def test_what_was_meant_for_accelerate_is_understood_or_refused_and_never_changed(
    pictures: Path, tmp_path: Path
) -> None:
    asked = {"mixed_precision": "bf16"}
    assert trainer(pictures, tmp_path / "a", accelerate_kwargs=asked).engine.precision == "bf16"
    assert asked == {"mixed_precision": "bf16"}
    with pytest.raises(UserError, match="split_batches"):
        trainer(pictures, tmp_path / "b", accelerate_kwargs={"split_batches": True})


def test_its_folder_is_a_run_that_the_tokenizer_opens(pictures: Path, tmp_path: Path) -> None:
    trainer(pictures, tmp_path).train()
    tokenizer = Tokenizer.load(tmp_path)
    images = torch.zeros(2, 3, 16, 16)
    codes = tokenizer.encode(images)
    assert codes.shape == (2, 4, 4)
    assert tokenizer.decode(codes).shape == images.shape


def test_text_to_image_has_a_trainer_too(pictures: Path, tmp_path: Path) -> None:
    """The research system left this one to its users."""
    for picture in pictures.glob("*.png"):
        picture.with_suffix(".txt").write_text(f"toy {picture.stem}")
    settings = {
        "folder": pictures,
        "image_size": 16,
        "batch_size": 4,
        "num_train_steps": 4,
        "save_results_every": 2,
    }
    network = MaskedTransformerConfig(
        width=16, depth=1, heads=2, text=LearnedTextConfig(dim=16, depth=1, heads=2)
    )
    doors = [
        MaskGitTrainer(
            tokenizer(), results_folder=tmp_path / name, transformer=network, lr=1e-3, **settings
        )
        for name in ("whole", "again")
    ]
    heard: list[dict] = []
    doors[0].train(log_fn=heard.append)
    assert [record["step"] for record in heard if record["kind"] == "train"] == [1, 2, 3, 4]
    assert heard[0]["model/lr"] == 1e-3
    losses = doors[1].train_step()
    assert losses["model/cross_entropy"] == pytest.approx(heard[0]["model/cross_entropy"])
    [picture] = Generator.load(tmp_path / "whole").generate("toy 3")
    assert picture.pixels.shape == (16, 16, 3)
