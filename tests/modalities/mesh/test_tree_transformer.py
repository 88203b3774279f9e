"""The transformer along the edges: decoding equals training, and samples are well-formed meshes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tessera.engine.modes import hash_seed
from tessera.engine.task import Batch
from tessera.modalities.mesh import tree
from tessera.modalities.mesh.canonical import collate
from tessera.modalities.mesh.dataset import MeshDataConfig
from tessera.modalities.mesh.generation import TreeGeneratorConfig
from tessera.modalities.mesh.recipes import meshes_tree
from tessera.modalities.mesh.tree_transformer import TreeTransformerConfig
from tessera.objectives.autoregressive import AutoregressiveTask
from tessera.objectives.generation import GenerationRequest, TokenPrompt
from tessera.sampling.autoregressive import AutoregressiveSampling
from tessera.sampling.guidance import Guidance
from tessera.text.learned import LearnedTextConfig
from tests.networks import perturb_weights

BINS, MAX_LEN = 16, 110
TEXT = LearnedTextConfig(dim=16, depth=1, heads=2, vocab_size=300)
DATA = MeshDataConfig(bins=BINS, max_faces=80, num_synthetic=6).full()


def build_task(**model: Any) -> AutoregressiveTask:
    torch.manual_seed(1)
    settings = {"dim": 24, "depth": 2, "heads": 2, "bins": BINS, "max_len": MAX_LEN, "text": TEXT}
    config = TreeGeneratorConfig(model=TreeTransformerConfig(**settings | model))
    task = config.build().double()
    perturb_weights(task.model)
    if task.model.text is not None:
        task.model.text.prepare_text([DATA.caption(i) for i in range(len(DATA))])
    return task.eval()


def build_batch(*indices: int) -> Batch[Any]:
    examples = [DATA.item(index, np.random.default_rng(0)) for index in indices]
    names = [str(index) for index in indices]
    return Batch(collate(examples), names, [hash_seed(5, index) for index in indices])


def generate(task: AutoregressiveTask, prompts: list[str], **settings: Any) -> Tensor:
    settings = {"sampling": AutoregressiveSampling(), "guidance": Guidance(scale=1.0)} | settings
    seeds = settings.pop("seeds", [hash_seed(9, row) for row in range(len(prompts))])
    return task.generate(GenerationRequest(prompts=prompts, seeds=seeds, **settings))


@torch.no_grad()
def test_decoding_token_by_token_gives_the_logits_of_training():
    task, batch = build_task(), build_batch(0, 3)
    tokens_BNS = task.get_tokens(batch.examples)
    condition = task.model.condition(batch.examples.captions, [False, False])
    predictions = task.model.predict(tokens_BNS, condition)
    for row in range(2):
        one = task.model.condition(batch.examples.captions[row : row + 1], [False])
        expected_NV = predictions.logits_MV[predictions.example_M == row]
        decode = task.model.start_decoding(one, tokens_BNS[row : row + 1, :0])
        previous = None
        targets_N = predictions.targets_M[predictions.example_M == row]
        for target, expected_V in zip(targets_N, expected_NV, strict=True):
            logits_V = decode(previous)[0].double()
            while logits_V[tree.PAD] > -torch.inf:
                logits_V = decode(torch.tensor([tree.PAD]))[0].double()
            possible = logits_V > -torch.inf
            assert (expected_V > -torch.inf)[possible].all(), "decoding only excludes more"
            torch.testing.assert_close(
                logits_V[possible], expected_V[possible], rtol=1e-4, atol=1e-5
            )
            assert possible[target], "no token of a real mesh is excluded"
            previous = target[None]


def test_the_loss_is_the_mean_over_meshes_without_padding():
    task = build_task(dropout=0.0)
    task.config = replace(task.config, cond_drop_prob=0.0)
    indices = (0, 1, 2, 3, 4, 5)
    together = task.next_token_loss(build_batch(*indices), 0).total()
    singles = [task.next_token_loss(build_batch(index), 0).total() for index in indices]
    torch.testing.assert_close(together, torch.stack(singles).mean())


@torch.no_grad()
def test_dropout_depends_on_the_example_alone_and_is_off_in_evaluation():
    task, batch = build_task(dropout=0.5), build_batch(0, 1)
    losses = [float(task.next_token_loss(build_batch(0, 1), 0).total()) for _ in range(2)]
    singles = [float(task.next_token_loss(build_batch(index), 0).total()) for index in (0, 1)]
    assert losses[0] == losses[1] == pytest.approx(np.mean(singles))
    tokens = task.get_tokens(batch.examples)
    condition = task.model.condition(batch.examples.captions, [False, False])
    plain = task.model.predict(tokens, condition)
    dropped = task.model.predict(
        tokens, condition, task.model.prepare_inputs(tokens, batch.generators())
    )
    assert not torch.allclose(plain.logits_MV, dropped.logits_MV)
    assert torch.equal(plain.logits_MV, task.model.predict(tokens, condition).logits_MV)


@torch.no_grad()
def test_a_mesh_that_was_cut_off_has_no_end():
    short, batch = build_task(max_len=8), build_batch(0)
    predictions = short.predict(short.prepare_inputs(batch), [DATA.caption(0)])
    assert len(predictions.targets_M) == int((short.get_tokens(batch.examples) != tree.PAD).sum())
    assert short.model.eos_token_id not in predictions.targets_M.tolist()
    metrics = short.compute_metrics(
        {name: value.double() for name, value in short.eval_step(build_batch(0)).items()}
    )
    assert "eos_accuracy" not in metrics and metrics["cross_entropy"] > 0


# ---- sampling


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_samples_of_random_networks_are_well_formed_meshes(scale):
    """Every token was allowed, so that each decodes; none has a degenerate or double face."""
    task = build_task(max_len=40)
    sampling = AutoregressiveSampling(temperature=2.0)
    codes = generate(task, ["a table"] * 8, sampling=sampling, guidance=Guidance(scale=scale))
    assert codes.shape == (8, 40, 3) and int(codes.max()) < task.model.vocab_size
    for row in codes:
        length = int((row[:, 0] >= 0).sum())
        assert (row[:length] >= 0).all() and (row[length:] == -1).all()
        traversal = tree.Traversal(BINS)
        for token in row[(row >= 0) & (row != tree.PAD)].tolist():
            traversal.append(token)
        mesh = tree.build_mesh(traversal.faces)
        assert len(mesh.faces) == len(traversal.faces)
    assert len(task.tokenizers["tokenizer"].to_media(codes)) == 8


def test_a_sample_does_not_depend_on_its_batch():
    task = build_task(max_len=30)
    prompts, seeds = ["a table", "a chair", "", "a bed", "a lamp"], [3, 1, 4, 1, 5]
    together = generate(task, prompts, seeds=seeds, guidance=Guidance(scale=2.0))
    for row in range(5):
        alone = generate(
            task, prompts[row : row + 1], seeds=seeds[row : row + 1], guidance=Guidance(scale=2.0)
        )
        assert torch.equal(alone[0], together[row])


def has_ended(codes: Tensor) -> list[bool]:
    return (codes[:, -1, 0] < 0).tolist()


def test_samples_that_do_not_end_are_sampled_again_and_only_these():
    task = build_task(max_len=30)
    prompts, seeds = ["a table", "a chair", "", "a bed"] * 4, list(range(16))
    once = generate(task, prompts, seeds=seeds)
    assert 0 < sum(has_ended(once)) < 16, "the test needs both"
    steps: list[Tensor] = []
    again = generate(
        task,
        prompts,
        seeds=seeds,
        sampling=AutoregressiveSampling(retries=20),
        on_step=lambda step, steps_, codes: steps.append(codes.clone()),
    )
    assert sum(has_ended(again)) > sum(has_ended(once))
    for row, ended in enumerate(has_ended(once)):
        assert torch.equal(once[row], again[row]) == ended
    assert {len(codes) for codes in steps} == {16}, "the other samples are shown too"
    kept = has_ended(once).index(True)
    assert torch.equal(steps[-1][kept], again[kept])
    row = has_ended(once).index(False)
    sampling = AutoregressiveSampling(retries=20)
    alone = generate(task, prompts[row : row + 1], seeds=seeds[row : row + 1], sampling=sampling)
    assert torch.equal(alone[0], again[row])


def test_a_prefix_is_continued_and_open_edges_can_be_continued():
    task = build_task()
    codes = task.get_codes(build_batch(0).examples)
    prefix = codes.clone()
    prefix[:, 6:] = -1
    made = generate(task, ["", ""], start=TokenPrompt(prefix))
    assert torch.equal(made[:, :6], prefix[:, :6].expand(2, -1, -1))
    assert int((made[..., 0] >= 0).sum()) > 12


@pytest.mark.parametrize(
    "position",
    [
        [tree.STOP, tree.PAD, tree.PAD],
        [tree.FIRST_COORDINATE] * 3,
        [tree.vocab_size(BINS)] * 3,
        [*tree.coordinate_tokens((0, 0, 0), BINS)[:2], tree.PAD],
        [tree.PAD] * 3,
    ],
)
def test_a_prefix_that_cannot_be_continued_is_an_error(position):
    prefix = torch.full((1, MAX_LEN, 3), -1)
    prefix[0, 0] = torch.tensor(position)
    with pytest.raises(ValueError, match="not a valid mesh"):
        generate(build_task(), [""], start=TokenPrompt(prefix))


def test_a_model_without_text_ignores_prompts():
    task = build_task(text=None, max_len=20)
    one, other = (generate(task, [text], seeds=[1]) for text in ("a table", "a chair"))
    assert torch.equal(one, other)


# ---- configuration


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"bins": 1}, "bins must be at least 4"),
        ({"max_len": 2}, "max_len must be at least 3"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"depth": 0}, "depth of a mesh transformer must be at least 1"),
    ],
)
def test_impossible_settings_are_an_error(setting, message):
    with pytest.raises(ValueError, match=message):
        TreeTransformerConfig(**setting)


@pytest.mark.parametrize(
    ("setting", "message"),
    [({"bins": 64}, "set --data.bins 32"), ({"polygons": "quads"}, "triangles only")],
)
def test_data_that_do_not_fit_the_model_are_an_error(setting, message):
    run = meshes_tree("tiny")
    with pytest.raises(ValueError, match=message):
        replace(run, data=replace(run.data, **setting))


def test_a_mesh_longer_than_the_model_is_an_error():
    task = build_task(max_len=40)
    with pytest.raises(ValueError, match="a mesh of 41 positions, but the maximum"):
        task.model.predict(torch.zeros(1, 41, 3, dtype=torch.long), None)
