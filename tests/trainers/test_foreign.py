"""The trainers with models of other packages: stand-ins that are called like the published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR

from tessera import __version__
from tessera.data.errors import UnreadableFile
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError
from tessera.trainers import foreign_audio, foreign_meshes, foreign_music, foreign_videos
from tessera.trainers.foreign import ForeignDataset
from tests.runs import read_metrics
from tests.trainers import stand_ins
from tests.trainers.stand_ins import CONTRACTS, build
from tests.worker_pool import call_together

EVERY_CONTRACT = pytest.mark.parametrize("contract", CONTRACTS)


def copy_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@EVERY_CONTRACT
def test_the_given_object_is_trained_under_the_names_of_the_package(
    contract: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = CONTRACTS[contract].build_model()
    before = copy_state(model)
    trainer = CONTRACTS[contract].build_trainer(model, tmp_path, num_train_steps=4, batch_size=4)
    assert trainer.model is model and trainer.unwrapped_model is model
    logs = [trainer.train_step() for _ in range(4)]
    assert set(CONTRACTS[contract].names) <= logs[-1].keys()
    assert trainer.train_step() == {} and trainer.steps == 4
    after = model.state_dict()
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    frozen = {name for name in before if "vgg" in name or "unused" in name or "autoencoder" in name}
    assert changed == set(before) - frozen
    assert trainer.valid_step().keys() & {"loss", "recon_loss"}


@EVERY_CONTRACT
def test_a_resumed_run_equals_one_without_interruption(contract: str, tmp_path: Path) -> None:
    whole = build(contract, tmp_path / "whole")
    whole.train()
    first = build(contract, tmp_path / "resumed")
    for _ in range(3):
        first.train_step()
    first.engine.saver.writer.wait()
    del first
    torch.manual_seed(77)  # nothing may depend on the state of the global generators
    again = build(contract, tmp_path / "resumed")
    assert again.steps == 2
    again.train()
    state = again.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in whole.model.state_dict().items())
    assert read_metrics(tmp_path / "whole/run") == read_metrics(tmp_path / "resumed/run")


@EVERY_CONTRACT
def test_two_processes_equal_one_with_twice_the_micro_batches(
    contract: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"batch_size": 2, "grad_accum_every": 2}
    one = build(contract, tmp_path / "one", **settings)
    one.train()
    if contract == "vqgan":
        stand_ins.write_images(tmp_path / "two/images")
    call_together(
        "tests.trainers.stand_ins:train_and_store",
        folder=str(tmp_path / "two"),
        contract=contract,
        settings={"batch_size": 4, "grad_accum_every": 1},
        nproc=2,
    )
    two = torch.load(tmp_path / "two/weights.pt", weights_only=True)
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5)


def test_frozen_parameters_of_a_given_model_stay_frozen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = stand_ins.VideoTokenizer()
    model.conv_in.weight.requires_grad_(False)
    before = copy_state(model)
    stand_ins.video(model, tmp_path, num_train_steps=2, batch_size=4).train()
    assert torch.equal(model.conv_in.weight, before["conv_in.weight"])
    assert not torch.equal(model.conv_in.bias, before["conv_in.bias"])
    assert not model.conv_in.weight.requires_grad


def test_a_vqgan_without_discriminator_is_trained(tmp_path: Path) -> None:
    trainer = stand_ins.vqgan(
        stand_ins.VQGanVAE(discriminator=False), tmp_path, num_train_steps=2, batch_size=4
    )
    trainer.train()
    assert (tmp_path / "run/samples/000002/sheet.png").is_file()


@pytest.mark.parametrize(
    ("trainer", "model", "message"),
    [
        ("soundstorm", nn.Linear(1, 1), "lacks the parameter 'cond_semantic_token_ids' of forward"),
        ("mulan", nn.Linear(1, 1), "MuLaNTrainer cannot train a Linear"),
        ("video", stand_ins.VQGanVAE(), "'return_recon_loss_only' of forward and the attribute"),
        ("vqgan", "a path", "VQGanVAETrainer got a str, but trains"),
        ("mesh-autoencoder", stand_ins.MeshTransformer(), "'return_loss_breakdown'"),
        ("mesh-transformer", nn.Linear(1, 1), "'vertices' of forward"),
    ],
)
def test_a_model_without_the_contract_gets_a_sentence(
    trainer: str, model: Any, message: str, tmp_path: Path
) -> None:
    settings = {"image_size": 8} if trainer == "video" else {}
    with pytest.raises(UserError, match=message):
        CONTRACTS[trainer].build_trainer(
            model, tmp_path, num_train_steps=2, batch_size=4, **settings
        )


def test_settings_and_version_are_stored_and_compared(tmp_path: Path) -> None:
    schedule = {"scheduler": StepLR, "scheduler_kwargs": {"step_size": 1}}
    build("video", tmp_path, **schedule).train_step()
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["tessera"] == __version__
    assert config["trainer"]["model"].endswith("stand_ins.VideoTokenizer")
    assert config["trainer"]["scheduler"] == "StepLR"
    with pytest.raises(UserError, match="trainer.optimizer.lr: 0.01 in the folder, 1.0 requested"):
        build("video", tmp_path, **schedule, learning_rate=1.0)


# ---- items of a dataset

SEMANTIC, ACOUSTIC = torch.arange(3), torch.arange(6).reshape(3, 2)
WAVE, IDS, VIDEO = torch.rand(16), torch.arange(4), torch.rand(3, 5, 8, 8)
VERTICES, FACES = torch.rand(4, 3), torch.tensor([[0, 1, 2], [1, 2, 3]])


def build_foreign_meshes(items: list[Any]) -> ForeignDataset:
    names = ("vertices", "faces", "face_edges", "texts")
    return foreign_meshes.build_meshes(items, names, -1, texts=True)


BUILDERS: dict[str, Any] = {
    "soundstorm": lambda items: foreign_audio.build_pairs(items, nn.Module()),
    "mulan": lambda items: foreign_music.build_pairs(items, None),
    "video": foreign_videos.build_videos,
    "mesh": build_foreign_meshes,
}
SAME_ITEMS: dict[str, list[Any]] = {
    "soundstorm": [
        (SEMANTIC, ACOUSTIC),
        (ACOUSTIC, SEMANTIC),
        {"acoustic_token_ids": ACOUSTIC, "cond_semantic_token_ids": SEMANTIC.numpy()},
    ],
    "mulan": [(WAVE, IDS), [IDS, WAVE], {"texts": IDS, "wavs": WAVE.numpy()}],
    "video": [VIDEO, (VIDEO, torch.rand(4)), [torch.rand(4), VIDEO], {"name": "x", "video": VIDEO}],
    "mesh": [
        (VERTICES, FACES, None, "a chair"),
        {"texts": "a chair", "faces": FACES.numpy(), "vertices": VERTICES},
    ],
}


@pytest.mark.parametrize("contract", BUILDERS)
def test_tuples_in_any_order_and_dictionaries_give_the_same_batch(contract: str) -> None:
    dataset = BUILDERS[contract](SAME_ITEMS[contract])
    items = [dataset.item(index, np.random.default_rng(0)) for index in range(len(dataset))]
    batches = [dataset.collate([item]).data for item in items]
    values = {json.dumps(one, default=torch.Tensor.tolist, sort_keys=True) for one in batches}
    assert len(values) == 1


@pytest.mark.parametrize(
    ("contract", "item", "reason"),
    [
        ("soundstorm", SEMANTIC, "is a Tensor, but an item must be a pair"),
        ("soundstorm", ("a", "b"), "acoustic tokens is a str, but must be a tensor"),
        ("soundstorm", (SEMANTIC, SEMANTIC), r"must be integers of shape \(frames, quantizers\)"),
        ("mulan", WAVE, "an item must be a tuple or a dictionary"),
        ("mulan", (WAVE, ["a", "b"]), "its text is a list, but must be one string"),
        ("video", "a path", "a str with no tensors, but must have a video"),
        ("video", (VIDEO * 255).byte(), "uint8 of shape .* of floats from 0 to 1"),
        ("mesh", (FACES, VERTICES), "its faces are torch.float32 .* with data_kwargs"),
        ("mesh", {"vertexes": VERTICES, "faces": FACES}, "did you mean 'vertices'"),
        ("mesh", (VERTICES, None), "it has no faces"),
    ],
)
def test_an_unusable_item_is_reported_with_its_reason(
    contract: str, item: Any, reason: str
) -> None:
    with pytest.raises(UnreadableFile, match=reason):
        BUILDERS[contract]([item]).item(0, np.random.default_rng(0))


def test_unusable_items_are_skipped_and_noted(tmp_path: Path) -> None:
    dataset = [*stand_ins.videos(), *["no video"] * 4]
    build("video", tmp_path, dataset=dataset, num_train_steps=8).train()
    notes = RunDirectory(tmp_path / "run").read_notes("rejected.jsonl")
    assert {note["example"] for note in notes} <= {f"item-{24 + i:06d}" for i in range(4)}
    assert "must have a video" in notes[0]["reason"]


@pytest.mark.parametrize(
    ("contract", "items", "message"),
    [
        ("video", [VIDEO, VIDEO[..., :4]], "The videos have different shapes"),
        ("mulan", [(WAVE, IDS), (WAVE, "a harp")], "Some items .* a text and others token ids"),
        ("mesh", [(VERTICES, FACES), (VERTICES, FACES, None, "x")], "'texts' and others have not"),
    ],
)
def test_items_that_do_not_fit_together_get_a_sentence(
    contract: str, items: list[Any], message: str
) -> None:
    dataset = BUILDERS[contract](items)
    with pytest.raises(UserError, match=message):
        dataset.collate([dataset.item(index, np.random.default_rng(0)) for index in (0, 1)])


def test_a_dataset_without_a_length_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a generator, but must have a length and items by index"):
        build("video", tmp_path, dataset=(one for one in stand_ins.videos()))


# ---- scheduler classes


def test_scheduler_classes_of_torch_set_the_learning_rate_by_step(tmp_path: Path) -> None:
    trainer = build(
        "video",
        tmp_path,
        scheduler=CosineAnnealingLR,
        scheduler_kwargs={"T_max": 4},
        warmup_steps=2,
        learning_rate=1.0,
    )
    rates = [trainer.engine.updates["model"].update.optimizer.lr_at(i, 4) for i in range(4)]
    assert rates == pytest.approx([0.5, 0.853553, 0.5, 0.146447], rel=1e-5)
    trainer.train()
    logged = [one["model/lr"] for one in read_metrics(tmp_path / "run") if one["kind"] == "train"]
    assert logged == pytest.approx(rates)


def test_schedulers_that_need_a_metric_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="function of the step"):
        build("video", tmp_path, scheduler=ReduceLROnPlateau)


# ---- attributes of the packages' trainers


def test_attributes_of_the_published_trainers_exist(tmp_path: Path, capsys: Any) -> None:
    trainer = build("video", tmp_path)
    assert trainer.device == torch.device("cpu")
    assert trainer.is_main and trainer.is_local_main and not trainer.is_distributed
    trainer.train_step()
    trainer.wait()
    trainer.print("a line")
    trainer.log(mine=3.0)
    assert "a line" in capsys.readouterr().out
    [mine] = [one for one in read_metrics(tmp_path / "run") if one["kind"] == "user"]
    assert (mine["step"], mine["mine"]) == (1, 3.0)
    ema = trainer.ema_tokenizer  # type: ignore[attr-defined]
    assert ema is not trainer.model and not any(one.requires_grad for one in ema.parameters())
    trainer.save(tmp_path / "kept")
    with pytest.raises(UserError, match="overwrite is False"):
        trainer.save(tmp_path / "kept", overwrite=False)
    trainer.load(tmp_path / "kept", restore_optimizer=False)
    assert trainer.steps == 0


def test_a_given_model_generates_and_tokenizes_by_its_own_methods(tmp_path: Path) -> None:
    soundstorm = build("soundstorm", tmp_path / "s")
    assert soundstorm.generate(num_latents=3).shape == (3,)  # type: ignore[attr-defined]
    video = build("video", tmp_path / "v")
    videos = torch.rand(2, 3, 3, 8, 8) * 2 - 1
    codes = video.tokenize(videos)  # type: ignore[attr-defined]
    assert torch.equal(codes, video.model.tokenize(videos)), "the values are not changed"
