"""The tasks of meshes: every mesh counts for itself, none has a target beyond its end, and what is
made is whole meshes.

Networks that start as nothing are given something to say, in double precision, where equal is equal
to many digits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.data.tokens import TokenizedBatch
from tessera.engine.evaluation import save_samples
from tessera.engine.modes import eval_mode, hash_seed
from tessera.engine.task import Batch
from tessera.modalities.mesh.autoencoder import MeshAutoencoderConfig, target_bins
from tessera.modalities.mesh.canonical import MeshExample, collate
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.reconstruction import (
    MeshReconstructionConfig,
    MeshTokenizerConfig,
    mesh_of,
)
from tessera.modalities.mesh.synthetic import SyntheticMeshes
from tessera.modalities.mesh.transformer import MeshTransformerConfig
from tessera.nn.quantize import FSQConfig, ResidualConfig
from tessera.objectives.autoregressive import AutoregressiveConfig, AutoregressiveTask
from tessera.objectives.generation import GenerationRequest
from tessera.objectives.reconstruction import TokenizerTask
from tessera.sampling.autoregressive import AutoregressiveSampling
from tessera.sampling.guidance import Guidance
from tessera.text.learned import LearnedTextConfig
from tests.networks import randomize_zero_weights

BINS, FACES, CORNERS, LEVELS = 32, 12, 3, 2
SLOTS = CORNERS * LEVELS
MODEL = MeshAutoencoderConfig(
    bins=BINS,
    coordinate_dim=8,
    angle_dim=4,
    area_dim=4,
    normal_dim=4,
    encoder=(12, 12),
    code_dim=8,
    decoder=(12,),
    quantizer=ResidualConfig(quantizer=FSQConfig(levels=(4, 4)), num_quantizers=LEVELS),
)
VOCABULARY = 16
TEXT = LearnedTextConfig(dim=16, depth=1, heads=2, vocab_size=300, max_len=16)
TEXTS = ["a table", "a chair with four legs", "x"]
GREEDY = AutoregressiveSampling(temperature=0)
ALONE = Guidance(scale=1.0)


# ------------------------------------------------------------------------------------------------------------ tokenizer


def tokenizer_task(**choices: Any) -> TokenizerTask:
    torch.manual_seed(0)
    return randomize_zero_weights(MeshTokenizerConfig(model=replace(MODEL, **choices)).build()).double()


def num_synthetic(*numbers: int, polygons: str = "triangles") -> Batch:
    source = SyntheticMeshes(count=100, bins=BINS, polygons=polygons, max_faces=200, seed=4)
    examples = [source.item(number, np.random.default_rng(0)) for number in numbers]
    return Batch(
        collate(examples),
        [str(number) for number in numbers],
        [hash_seed(5, number) for number in numbers],
    )


def part_of(batch: Batch, number: int) -> Batch:
    """One mesh of a batch, by itself."""
    examples = batch.examples
    rows = [
        page[number, :count].numpy()
        for page, count in (
            (examples.vertices, examples.vertex_counts[number]),
            (examples.faces, examples.face_counts[number]),
            (examples.edges, examples.edge_counts[number]),
        )
    ]
    alone = collate([MeshExample(*rows, examples.captions[number])])
    return Batch(alone, [batch.names[number]], [batch.seeds[number]])


@pytest.mark.parametrize("polygons", ["triangles", "quads"])
def test_a_padded_batch_loses_what_its_meshes_lose_by_themselves(polygons):
    task, batch = (
        tokenizer_task(corners=3 if polygons == "triangles" else 4),
        num_synthetic(0, 1, 2, 3, polygons=polygons),
    )
    assert len(set(batch.examples.face_counts.tolist())) > 2, "of different sizes"
    whole = task.reconstruction_loss(batch, 0).terms
    alone = [task.reconstruction_loss(part_of(batch, number), 0).terms for number in range(4)]
    assert whole.keys() == {"coordinates"}
    torch.testing.assert_close(
        whole["coordinates"], torch.stack([terms["coordinates"] for terms in alone]).mean()
    )


def test_a_padded_batch_measures_what_its_meshes_measure_by_themselves():
    task, batch = tokenizer_task(), num_synthetic(0, 1, 2, 3)
    with eval_mode(task):
        whole = task.batch_stats(batch)
        alone = [task.batch_stats(part_of(batch, number)) for number in range(4)]
    assert whole.keys() == {"examples", "codes", "coordinates", "triangles", "chamfer"}
    for name, value in whole.items():
        torch.testing.assert_close(
            value, torch.stack([one[name] for one in alone]).sum(0), check_dtype=False
        )


def guessed(batch: Batch) -> Tensor:
    """The truth, as a network that is sure would say it; anything at padding."""
    bins = target_bins(batch.examples)
    return (
        20 * F.one_hot(bins.clamp_min(0), BINS).double()
        + (bins < 0)[..., None] * torch.randn(BINS).double()
    )


def concluded(output: Tensor, batch: Batch) -> dict[str, float]:
    reconstruction = MeshReconstructionConfig().build()
    return reconstruction.compute_metrics(
        {"examples": torch.tensor(len(batch))} | reconstruction.batch_stats(output, batch)
    )


def test_the_measures_are_means_over_meshes_counted_by_hand():
    batch = num_synthetic(0, 1)
    few, many = batch.examples.face_counts.tolist()
    assert concluded(guessed(batch), batch) == {
        "triangle_accuracy": 1.0,
        "coordinate_accuracy": 1.0,
        "chamfer_bins": 0.0,
    }
    wrong = guessed(batch)
    wrong[0, 0, 4] = wrong[0, 0, 4].roll(1)
    wrong[1, :2, 0] = wrong[1, :2, 0].roll(1, dims=-1)
    numbers = concluded(wrong, batch)
    assert numbers["triangle_accuracy"] == pytest.approx(1 - (1 / few + 2 / many) / 2)
    assert numbers["coordinate_accuracy"] == pytest.approx(1 - (1 / (9 * few) + 2 / (9 * many)) / 2)
    assert 0 < numbers["chamfer_bins"] <= 1, "a corner is one bin off at most"


def test_what_is_shown_is_each_mesh_beside_its_reconstruction_without_padding():
    batch = num_synthetic(0, 1)
    for shown, faces in zip(
        MeshReconstructionConfig().build().shown(guessed(batch), batch),
        batch.examples.face_counts.tolist(),
    ):
        assert len(shown.faces) == 2 * faces
        left, right = shown.vertices[shown.faces[:faces]], shown.vertices[shown.faces[faces:]]
        np.testing.assert_allclose(
            right - left, np.broadcast_to([1.2, 0.0, 0.0], left.shape), atol=1e-12
        )


# ------------------------------------------------------------------------------------------------------- autoregressive


class Beneath:
    """An untrained autoencoder as a finished one would be used."""

    def __init__(self) -> None:
        self.network = tokenizer_task().eval()
        self.vocab_size, self.grid, self.num_quantizers, self.features = (
            VOCABULARY,
            (FACES, CORNERS),
            LEVELS,
            None,
        )
        self.seconds = None

    def codes(self, examples: Any) -> Tensor:
        raise AssertionError("these examples are codes already")

    @torch.no_grad()
    def media(self, codes: Tensor) -> list[Any]:
        return self.network.reconstruction.media(self.network.model.decode(codes))


def writer(text: LearnedTextConfig | None = TEXT, **choices: Any) -> AutoregressiveTask:
    torch.manual_seed(1)
    model = MeshTransformerConfig(
        width=24,
        depth=2,
        heads=2,
        fine_dim=16,
        fine_depth=1,
        fine_heads=2,
        max_len=FACES,
        text=text,
    )
    task = randomize_zero_weights(AutoregressiveConfig(model=model, **choices).build(Beneath())).double()
    nn.init.normal_(task.model.head.weight, std=0.5)
    if text is not None:
        task.model.text.meet(TEXTS)
    return task.eval()


def codes_of(*faces: int, room: int = FACES) -> Tensor:
    """Random meshes of so many faces: (B, room, K, L), and -1 behind their last."""
    codes = torch.randint(VOCABULARY, (len(faces), room, CORNERS, LEVELS))
    for mesh, count in enumerate(faces):
        codes[mesh, count:] = -1
    return codes


def coded(codes: Tensor, texts: list[str] = TEXTS) -> Batch:
    numbers = range(len(codes))
    examples = TokenizedBatch({"tokenizer": codes}, texts[: len(codes)])
    return Batch(
        examples, [str(number) for number in numbers], [hash_seed(5, number) for number in numbers]
    )


def test_there_is_no_target_beyond_a_meshs_own_end():
    """Theirs taught every mesh but the longest to write symbol 0 at the last place."""
    task, codes = writer(), codes_of(7, 2, 4)
    predictions = task.predict(coded(codes), TEXTS)
    for number, faces in enumerate([7, 2, 4]):
        targets = predictions.targets_M[predictions.example_M == number].tolist()
        assert targets == [*codes[number, :faces].flatten().tolist(), task.model.eos_token_id]


def test_a_batch_loses_what_its_meshes_lose_by_themselves_whatever_room_there_is():
    task, codes = writer(cond_drop_prob=0.0), codes_of(7, 2, 4)
    whole = task.next_token_loss(coded(codes), 0).total()
    alone = [
        task.next_token_loss(coded(codes[n : n + 1, :faces], TEXTS[n : n + 1]), 0).total()
        for n, faces in enumerate([7, 2, 4])
    ]
    torch.testing.assert_close(whole, torch.stack(alone).mean())
    torch.testing.assert_close(whole, task.next_token_loss(coded(codes[:, :7]), 0).total())


def test_measures_count_every_symbol_and_every_end_once():
    task, batch = writer(), coded(codes_of(7, 2, 4))
    with eval_mode(task):
        whole = task.batch_stats(batch)
        alone = [
            task.batch_stats(coded(batch.examples.codes["tokenizer"][n : n + 1], TEXTS[n : n + 1]))
            for n in range(3)
        ]
    assert (int(whole["symbols"]), int(whole["ends"])) == (13 * SLOTS + 3, 3)
    for name in ("symbols", "ends", "cross_entropy", "right", "ends_right"):
        torch.testing.assert_close(whole[name], torch.stack([one[name] for one in alone]).sum())
    numbers = task.compute_metrics({name: value.double() for name, value in whole.items()})
    assert numbers.keys() == {
        "cross_entropy",
        "perplexity",
        "accuracy",
        "end_accuracy",
        "condition_gain",
    }
    assert numbers["perplexity"] == pytest.approx(np.exp(numbers["cross_entropy"]))


def test_a_dropped_caption_does_not_enter_the_loss():
    codes, others = codes_of(3, 2, 4), TEXTS[1:] + TEXTS[:1]
    always, never = writer(cond_drop_prob=0.999999), writer(cond_drop_prob=0.0)
    losses = [
        [task.next_token_loss(coded(codes, texts), 0).total() for texts in (TEXTS, others)]
        for task in (always, never)
    ]
    torch.testing.assert_close(*losses[0])
    assert not torch.allclose(*losses[1])


# ------------------------------------------------------------------------------------------------------------- sampling


def wanted(
    texts: list[str] = TEXTS, codes: Tensor | None = None, first: int = 0
) -> GenerationRequest:
    return GenerationRequest(
        texts, [hash_seed(9, first + number) for number in range(len(texts))], codes=codes
    )


def faces_in(codes: Tensor) -> list[int]:
    """How many faces each has, if all are whole and stand at the beginning."""
    real = codes.flatten(2) >= 0
    assert (real.all(2) == real.any(2)).all(), "a face is there or not"
    counts = real.all(2).sum(1)
    assert torch.equal(real.all(2), torch.arange(codes.shape[1]) < counts[:, None]), (
        "nothing after the end"
    )
    return counts.tolist()


def test_guidance_of_one_is_none_at_all_and_costs_nothing():
    task = writer()
    begun: list[int] = []
    start = task.model.start_decoding

    def noted(condition: Any, faces_BFS: Tensor) -> Any:
        begun.append(len(faces_BFS))
        return start(condition, faces_BFS)

    task.model.start_decoding = noted
    without_augmentation = task.generate(wanted(), GREEDY, ALONE)
    nearly = task.generate(wanted(), GREEDY, Guidance(scale=1 + 1e-9))
    with_cfg = task.generate(wanted(), GREEDY, Guidance(scale=4.0))
    assert begun == [3, 6, 6], "only beside 1 there are two passes"
    assert torch.equal(without_augmentation, nearly) and not torch.equal(
        without_augmentation, with_cfg
    )
    prompt = codes_of(2, 2, 2)
    begun_with = [
        task.generate(wanted(codes=prompt), GREEDY, Guidance(scale=scale))
        for scale in (1.0, 1 + 1e-9)
    ]
    assert torch.equal(*begun_with) and faces_in(without_augmentation)


def test_without_captions_guidance_changes_nothing():
    task = writer(text=None)
    assert torch.equal(
        task.generate(wanted(), GREEDY, ALONE), task.generate(wanted(), GREEDY, Guidance(scale=4.0))
    )


def test_a_completion_begins_with_the_faces_given_and_is_a_whole_number_of_faces():
    task, given = writer(), [2, 5, 1]
    prompt = codes_of(*given)
    for sampling in (GREEDY, AutoregressiveSampling()):
        made = task.generate(wanted(codes=prompt), sampling, ALONE)
        assert made.shape == (3, FACES, CORNERS, LEVELS)
        for number, (faces, count) in enumerate(zip(given, faces_in(made), strict=True)):
            assert count >= faces and torch.equal(made[number, :faces], prompt[number, :faces])
        assert int(made.max()) < VOCABULARY


def test_a_mesh_that_is_full_already_comes_back_as_it_is():
    task, prompt = writer(), codes_of(FACES, FACES, FACES)
    assert torch.equal(task.generate(wanted(codes=prompt), GREEDY, ALONE), prompt)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_batch_of_prompts_gives_each_the_mesh_that_it_has_alone(scale):
    task, prompt = writer(), codes_of(2, 5, 1)
    sampling, guidance = AutoregressiveSampling(top_k=8), Guidance(scale=scale)
    for codes in (None, prompt):
        train_together = task.generate(wanted(codes=codes), sampling, guidance)
        for number in range(3):
            begun = codes[number : number + 1] if codes is not None else None
            alone = task.generate(
                wanted(TEXTS[number : number + 1], begun, first=number), sampling, guidance
            )
            assert torch.equal(alone[0], train_together[number])
        assert len({row.numpy().tobytes() for row in train_together}) > 1


def test_another_text_is_another_mesh_and_another_seed_too():
    task = writer()
    first, texts, seeds = (
        task.generate(one, AutoregressiveSampling(), ALONE)
        for one in (wanted(), wanted(TEXTS[1:] + TEXTS[:1]), wanted(first=50))
    )
    assert not torch.equal(first, texts) and not torch.equal(first, seeds)


# --------------------------------------------------------------------------------------------------- what is written


def test_meshes_that_are_written_have_no_face_twice_and_no_corner_twice_in_a_face(tmp_path):
    task = writer()
    made = task.tokenizers["tokenizer"].media(
        task.generate(wanted(), AutoregressiveSampling(), ALONE)
    )
    bins = np.array(
        [
            [[0, 0, 0], [5, 0, 0], [0, 5, 0]],
            [[0, 5, 0], [0, 0, 0], [5, 0, 0]],
            [[1, 1, 1], [1, 1, 1], [2, 3, 4]],
        ]
    )
    by_hand = mesh_of(bins.reshape(3, 9), BINS)
    assert len(by_hand.faces) == 1 and len(by_hand.vertices) == 3
    for number, mesh in enumerate([*made, by_hand]):
        places = [tuple(vertex) for vertex in mesh.vertices.tolist()]
        assert len(set(places)) == len(places), "corners at one place are one vertex"
        faces = [frozenset(face) for face in mesh.faces.tolist()]
        assert all(len(face) == CORNERS for face in faces) and len(set(faces)) == len(faces)
        if faces:
            mesh.save(tmp_path / f"{number}")
            for ending in ("obj", "glb"):
                assert len(Mesh.load(tmp_path / f"{number}.{ending}").faces) == len(faces)


def test_a_face_whose_corners_lie_on_a_line_is_not_written():
    on_a_line = [0, 0, 0, 1, 1, 1, 3, 3, 3]
    mesh = mesh_of(np.array([[0, 0, 0, 5, 0, 0, 0, 5, 0], on_a_line]), BINS)
    assert len(mesh.faces) == 1 and len(mesh.vertices) == 3
    assert mesh_of(np.array([on_a_line]), BINS).faces.shape == (0, 3)


@pytest.mark.parametrize("corners", [3, 4])
def test_no_faces_at_all_are_a_mesh_of_none(corners: int):
    assert mesh_of(np.zeros((0, 3 * corners), np.int64), BINS).faces.shape == (0, corners)


def test_a_sample_of_no_face_at_all_can_be_saved_and_shown(tmp_path: Path):
    task = writer()
    task.model.impossible_SV[0, : task.model.eos_token_id] = True
    codes = task.generate(wanted(), AutoregressiveSampling(), ALONE)
    assert faces_in(codes) == [0, 0, 0]
    made = task.sample(coded(codes_of(3, 2, 4)))
    assert [len(mesh.faces) for mesh in made] == [0, 0, 0]
    assert save_samples(made, tmp_path) == tmp_path / "sheet.png"
    assert {path.name for path in tmp_path.glob("0000.*")} == {"0000.glb", "0000.obj"}
    assert (made[0].render().pixels == 255).all()
    assert (
        len(Mesh.side_by_side(made[0], mesh_of(np.array([[0, 0, 0, 5, 0, 0, 0, 5, 0]]), BINS)).faces) == 1
    )


def test_an_empty_mesh_among_others_is_an_empty_one_in_the_batch():
    task = writer()
    codes = codes_of(3, 2, 4)
    codes[1] = -1
    alone = task.tokenizers["tokenizer"].media(codes[:1])[0]
    first, empty, _ = task.tokenizers["tokenizer"].media(codes)
    assert len(empty.faces) == 0 and np.array_equal(first.faces, alone.faces)
