"""The tokenizer and the autoregressive objective for meshes: all meshes count equally, there is no
target after the end, and samples are whole meshes.

Weights that start at zero are randomized, and everything is in double precision.
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
from tessera.engine.evaluation import Sample, save_samples
from tessera.engine.modes import eval_mode, hash_seed
from tessera.engine.task import Batch
from tessera.modalities.mesh.autoencoder import MeshAutoencoderConfig, target_bins
from tessera.modalities.mesh.canonical import MeshExample, collate
from tessera.modalities.mesh.generation import MeshGeneratorConfig
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.reconstruction import (
    MeshAdapter,
    MeshReconstructionConfig,
    MeshTokenizerConfig,
    bins_to_mesh,
)
from tessera.modalities.mesh.synthetic import SyntheticMeshes
from tessera.modalities.mesh.transformer import MeshTransformerConfig
from tessera.nn.quantize import FSQConfig, ResidualConfig
from tessera.objectives.autoregressive import AutoregressiveTask
from tessera.objectives.generation import GenerationRequest, TokenPrompt
from tessera.objectives.reconstruction import TokenizerTask
from tessera.sampling.autoregressive import AutoregressiveSampling
from tessera.sampling.guidance import Guidance
from tessera.text.learned import LearnedTextConfig
from tests.networks import randomize_zero_weights

BINS, FACES, CORNERS, LEVELS = 32, 12, 3, 2
TOKENS_PER_FACE = CORNERS * LEVELS
VOCAB_SIZE = 16
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
TEXT = LearnedTextConfig(dim=16, depth=1, heads=2, vocab_size=300, max_len=16)
TEXTS = ["a table", "a chair with four legs", "x"]
GREEDY = AutoregressiveSampling(temperature=0)
NO_GUIDANCE = Guidance(scale=1.0)


# ---- the tokenizer objective


def build_tokenizer_task(**choices: Any) -> TokenizerTask:
    torch.manual_seed(0)
    task = MeshTokenizerConfig(model=replace(MODEL, **choices)).build()
    return randomize_zero_weights(task).double()


def build_mesh_batch(*indices: int, polygons: Any = "triangles") -> Batch[Any]:
    dataset = SyntheticMeshes(count=100, bins=BINS, polygons=polygons, max_faces=200, seed=4)
    examples = [dataset.item(i, np.random.default_rng(0)) for i in indices]
    return Batch(collate(examples), [str(i) for i in indices], [hash_seed(5, i) for i in indices])


def select_mesh(batch: Batch[Any], row: int) -> Batch[Any]:
    """Return one mesh of a batch, without padding."""
    examples = batch.examples
    vertices, faces, edges = (
        padded[row, :count].numpy()
        for padded, count in (
            (examples.vertices, examples.vertex_counts[row]),
            (examples.faces, examples.face_counts[row]),
            (examples.edges, examples.edge_counts[row]),
        )
    )
    alone = collate([MeshExample(vertices, faces, edges, examples.captions[row])])
    return Batch(alone, [batch.names[row]], [batch.seeds[row]])


@pytest.mark.parametrize("polygons", ["triangles", "quads"])
def test_loss_of_a_padded_batch_is_the_mean_over_its_meshes(polygons):
    task = build_tokenizer_task(corners=3 if polygons == "triangles" else 4)
    batch = build_mesh_batch(0, 1, 2, 3, polygons=polygons)
    assert len(set(batch.examples.face_counts.tolist())) > 2, "meshes of different sizes"
    terms = task.reconstruction_loss(batch, 0).terms
    singles = [task.reconstruction_loss(select_mesh(batch, row), 0).terms for row in range(4)]
    assert terms.keys() == {"coordinates"}
    expected = torch.stack([one["coordinates"] for one in singles]).mean()
    torch.testing.assert_close(terms["coordinates"], expected)


def test_eval_sums_of_a_padded_batch_are_those_of_its_meshes():
    task, batch = build_tokenizer_task(), build_mesh_batch(0, 1, 2, 3)
    with eval_mode(task):
        sums = task.eval_step(batch)
        singles = [task.eval_step(select_mesh(batch, row)) for row in range(4)]
    assert sums.keys() == {"examples", "codes", "coordinates", "triangles", "chamfer"}
    for name, value in sums.items():
        expected = torch.stack([one[name] for one in singles]).sum(0)
        torch.testing.assert_close(value, expected, check_dtype=False)


def perfect_logits(batch: Batch[Any]) -> Tensor:
    """Return confident logits of the true bins, and random ones for padding."""
    bins = target_bins(batch.examples)
    one_hot = F.one_hot(bins.clamp_min(0), BINS).double()
    return 20 * one_hot + (bins < 0)[..., None] * torch.randn(BINS).double()


def compute_metrics(output: Tensor, batch: Batch[Any]) -> dict[str, float]:
    reconstruction = MeshReconstructionConfig().build()
    examples = {"examples": torch.tensor(len(batch))}
    return reconstruction.compute_metrics(examples | reconstruction.eval_step(output, batch))


def test_metrics_are_means_over_meshes():
    batch = build_mesh_batch(0, 1)
    few, many = batch.examples.face_counts.tolist()
    assert compute_metrics(perfect_logits(batch), batch) == {
        "triangle_accuracy": 1.0,
        "coordinate_accuracy": 1.0,
        "chamfer_bins": 0.0,
    }
    wrong = perfect_logits(batch)
    wrong[0, 0, 4] = wrong[0, 0, 4].roll(1)
    wrong[1, :2, 0] = wrong[1, :2, 0].roll(1, dims=-1)
    metrics = compute_metrics(wrong, batch)
    assert metrics["triangle_accuracy"] == pytest.approx(1 - (1 / few + 2 / many) / 2)
    assert metrics["coordinate_accuracy"] == pytest.approx(1 - (1 / (9 * few) + 2 / (9 * many)) / 2)
    assert 0 < metrics["chamfer_bins"] <= 1, "corners are at most one bin off"


def test_pairs_are_meshes_beside_reconstructions_without_padding():
    batch = build_mesh_batch(0, 1)
    pairs = MeshAdapter().show_pairs(perfect_logits(batch), batch)
    for pair, count in zip(pairs, batch.examples.face_counts.tolist(), strict=True):
        assert len(pair.faces) == 2 * count
        left, right = pair.vertices[pair.faces[:count]], pair.vertices[pair.faces[count:]]
        np.testing.assert_allclose(
            right - left, np.broadcast_to([1.2, 0.0, 0.0], left.shape), atol=1e-12
        )


# ---- the autoregressive objective


class UntrainedTokenizer:
    """An untrained autoencoder as a generator uses it; the examples are codes already."""

    is_external = False
    vocab_size, grid, num_quantizers = VOCAB_SIZE, (FACES, CORNERS), LEVELS
    features = seconds = None

    def __init__(self) -> None:
        self.network = build_tokenizer_task().eval()

    def encode_examples(self, examples: Any) -> Tensor:
        raise AssertionError("the examples are codes already")

    @torch.no_grad()
    def to_media(self, codes: Tensor) -> list[Any]:
        return self.network.adapter.to_media(self.network.model.decode(codes))


def build_task(text: LearnedTextConfig | None = TEXT, **choices: Any) -> AutoregressiveTask:
    torch.manual_seed(1)
    model = MeshTransformerConfig(
        dim=24,
        depth=2,
        heads=2,
        fine_dim=16,
        fine_depth=1,
        fine_heads=2,
        max_len=FACES,
        text=text,
    )
    config = MeshGeneratorConfig(model=model, **choices)
    task = randomize_zero_weights(config.build(tokenizer=UntrainedTokenizer())).double()
    nn.init.normal_(task.model.head.weight, std=0.5)
    if text is not None:
        task.model.text.prepare_text(TEXTS)
    return task.eval()


def random_codes(*num_faces: int) -> Tensor:
    """Return meshes of some numbers of faces, (B, FACES, CORNERS, LEVELS), padded with -1."""
    codes = torch.randint(VOCAB_SIZE, (len(num_faces), FACES, CORNERS, LEVELS))
    for row, count in enumerate(num_faces):
        codes[row, count:] = -1
    return codes


def build_batch(codes: Tensor, texts: list[str] = TEXTS) -> Batch[Any]:
    rows = range(len(codes))
    examples = TokenizedBatch({"tokenizer": codes}, texts[: len(codes)])
    return Batch(examples, [str(row) for row in rows], [hash_seed(5, row) for row in rows])


def test_targets_end_with_the_end_token_of_each_mesh():
    task, codes = build_task(), random_codes(7, 2, 4)
    predictions = task.predict(task.prepare_inputs(build_batch(codes)), TEXTS)
    for row, count in enumerate([7, 2, 4]):
        targets = predictions.targets_M[predictions.example_M == row].tolist()
        assert targets == [*codes[row, :count].flatten().tolist(), task.model.eos_token_id]


def test_next_token_loss_is_the_mean_over_meshes_without_padding():
    task, codes = build_task(cond_drop_prob=0.0), random_codes(7, 2, 4)
    loss = task.next_token_loss(build_batch(codes), 0).total()
    singles = [
        task.next_token_loss(build_batch(codes[n : n + 1, :count], TEXTS[n : n + 1]), 0).total()
        for n, count in enumerate([7, 2, 4])
    ]
    torch.testing.assert_close(loss, torch.stack(singles).mean())
    torch.testing.assert_close(loss, task.next_token_loss(build_batch(codes[:, :7]), 0).total())


def test_metrics_count_every_token_and_every_end_once():
    task, batch = build_task(), build_batch(random_codes(7, 2, 4))
    codes = batch.examples.codes["tokenizer"]
    with eval_mode(task):
        sums = task.eval_step(batch)
        singles = [
            task.eval_step(build_batch(codes[n : n + 1], TEXTS[n : n + 1])) for n in range(3)
        ]
    assert (int(sums["tokens"]), int(sums["eos"])) == (13 * TOKENS_PER_FACE + 3, 3)
    for name in ("tokens", "eos", "cross_entropy", "correct", "eos_correct"):
        torch.testing.assert_close(sums[name], torch.stack([one[name] for one in singles]).sum())
    metrics = task.compute_metrics({name: value.double() for name, value in sums.items()})
    assert metrics.keys() == {
        "cross_entropy",
        "perplexity",
        "accuracy",
        "eos_accuracy",
        "condition_gain",
    }
    assert metrics["perplexity"] == pytest.approx(np.exp(metrics["cross_entropy"]))


def test_loss_does_not_depend_on_a_dropped_caption():
    codes, others = random_codes(3, 2, 4), TEXTS[1:] + TEXTS[:1]
    always, never = build_task(cond_drop_prob=0.999999), build_task(cond_drop_prob=0.0)
    losses = [
        [task.next_token_loss(build_batch(codes, texts), 0).total() for texts in (TEXTS, others)]
        for task in (always, never)
    ]
    torch.testing.assert_close(*losses[0])
    assert not torch.allclose(*losses[1])


# ---- sampling


def generate(
    task: AutoregressiveTask,
    sampling: AutoregressiveSampling = GREEDY,
    guidance: Guidance = NO_GUIDANCE,
    *,
    texts: list[str] = TEXTS,
    prefix: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    request = GenerationRequest(
        prompts=texts,
        seeds=[hash_seed(9, first + row) for row in range(len(texts))],
        start=None if prefix is None else TokenPrompt(prefix),
        sampling=sampling,
        guidance=guidance,
    )
    return task.generate(request)


def count_faces(codes: Tensor) -> list[int]:
    """Return the number of faces of each mesh, which must be complete and come first."""
    valid = codes.flatten(2) >= 0
    assert (valid.all(2) == valid.any(2)).all(), "faces are complete"
    counts = valid.all(2).sum(1)
    expected = torch.arange(codes.shape[1]) < counts[:, None]
    assert torch.equal(valid.all(2), expected), "only padding after the end"
    return counts.tolist()


def test_guidance_scale_one_is_a_single_pass():
    task = build_task()
    batch_sizes: list[int] = []
    start_decoding = task.model.start_decoding

    def record(condition: Any, prefix_BNS: Tensor) -> Any:
        batch_sizes.append(len(prefix_BNS))
        return start_decoding(condition, prefix_BNS)

    task.model.start_decoding = record
    plain, almost_one, guided = (
        generate(task, guidance=Guidance(scale=scale)) for scale in (1.0, 1 + 1e-9, 4.0)
    )
    assert batch_sizes == [3, 6, 6], "other scales have two passes"
    assert torch.equal(plain, almost_one) and not torch.equal(plain, guided)
    prefix = random_codes(2, 2, 2)
    continued = [
        generate(task, guidance=Guidance(scale=scale), prefix=prefix) for scale in (1.0, 1 + 1e-9)
    ]
    assert torch.equal(*continued) and count_faces(plain)


def test_model_without_text_has_no_guidance():
    task = build_task(text=None)
    assert torch.equal(generate(task), generate(task, guidance=Guidance(scale=4.0)))


@pytest.mark.parametrize(
    "guidance",
    [Guidance(start=0.5), Guidance(end=0.5), Guidance(ramp="linear")],
    ids=["start", "end", "ramp"],
)
def test_guidance_that_depends_on_progress_is_an_error(guidance):
    with pytest.raises(ValueError, match="supports only a constant guidance scale"):
        generate(build_task(), guidance=guidance)


@pytest.mark.parametrize("sampling", [GREEDY, AutoregressiveSampling()], ids=["greedy", "random"])
def test_samples_continue_the_given_faces_with_whole_faces(sampling):
    task, num_faces = build_task(), [2, 5, 1]
    prefix = random_codes(*num_faces)
    codes = generate(task, sampling, prefix=prefix)
    assert codes.shape == (3, FACES, CORNERS, LEVELS) and int(codes.max()) < VOCAB_SIZE
    for row, (given, count) in enumerate(zip(num_faces, count_faces(codes), strict=True)):
        assert count >= given and torch.equal(codes[row, :given], prefix[row, :given])


def test_one_prefix_is_continued_by_all_samples():
    task, prefix = build_task(), random_codes(4)
    codes = generate(task, AutoregressiveSampling(), prefix=prefix)
    assert min(count_faces(codes)) >= 4
    assert torch.equal(codes[:, :4], prefix[:, :4].expand(3, -1, -1, -1))
    assert torch.equal(
        codes, generate(task, AutoregressiveSampling(), prefix=prefix.expand(3, -1, -1, -1))
    )


def test_mesh_with_the_maximum_number_of_faces_is_returned_unchanged():
    task, prefix = build_task(), random_codes(FACES, FACES, FACES)
    assert torch.equal(generate(task, prefix=prefix), prefix)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_sample_of_a_seed_does_not_depend_on_the_batch(scale):
    task = build_task()
    sampling, guidance = AutoregressiveSampling(top_k=8), Guidance(scale=scale)
    for prefix in (None, random_codes(2, 5, 1)):
        together = generate(task, sampling, guidance, prefix=prefix)
        for row in range(3):
            texts = TEXTS[row : row + 1]
            own = prefix[row : row + 1] if prefix is not None else None
            alone = generate(task, sampling, guidance, texts=texts, prefix=own, first=row)
            assert torch.equal(alone[0], together[row])
        assert len({row.numpy().tobytes() for row in together}) > 1


def test_samples_depend_on_text_and_seed():
    task, sampling = build_task(), AutoregressiveSampling()
    one = generate(task, sampling)
    assert not torch.equal(one, generate(task, sampling, texts=TEXTS[1:] + TEXTS[:1]))
    assert not torch.equal(one, generate(task, sampling, first=50))


# ---- meshes from samples


def test_saved_meshes_have_no_duplicate_vertices_or_faces(tmp_path: Path):
    task = build_task()
    sampled = task.tokenizers["tokenizer"].to_media(generate(task, AutoregressiveSampling()))
    bins = np.array(
        [
            [[0, 0, 0], [5, 0, 0], [0, 5, 0]],
            [[0, 5, 0], [0, 0, 0], [5, 0, 0]],
            [[1, 1, 1], [1, 1, 1], [2, 3, 4]],
        ]
    )
    constructed = bins_to_mesh(bins.reshape(3, 9), BINS)
    assert len(constructed.faces) == 1 and len(constructed.vertices) == 3
    for number, mesh in enumerate([*sampled, constructed]):
        vertices = [tuple(vertex) for vertex in mesh.vertices.tolist()]
        assert len(set(vertices)) == len(vertices), "equal corners are one vertex"
        faces = [frozenset(face) for face in mesh.faces.tolist()]
        assert all(len(face) == CORNERS for face in faces) and len(set(faces)) == len(faces)
        if faces:
            mesh.save(tmp_path / f"{number}")
            for suffix in ("obj", "glb"):
                assert len(Mesh.load(tmp_path / f"{number}.{suffix}").faces) == len(faces)


def test_faces_without_area_are_dropped():
    collinear = [0, 0, 0, 1, 1, 1, 3, 3, 3]
    mesh = bins_to_mesh(np.array([[0, 0, 0, 5, 0, 0, 0, 5, 0], collinear]), BINS)
    assert len(mesh.faces) == 1 and len(mesh.vertices) == 3
    assert bins_to_mesh(np.array([collinear]), BINS).faces.shape == (0, 3)


@pytest.mark.parametrize("corners", [3, 4])
def test_no_faces_are_an_empty_mesh(corners: int):
    assert bins_to_mesh(np.zeros((0, 3 * corners), np.int64), BINS).faces.shape == (0, corners)


def test_sample_without_faces_can_be_saved_and_rendered(tmp_path: Path):
    task = build_task()
    task.model.impossible_SV[0, : task.model.eos_token_id] = True
    assert count_faces(generate(task, AutoregressiveSampling())) == [0, 0, 0]
    batch = build_batch(random_codes(3, 2, 4))
    meshes = task.sample(batch)
    assert [len(mesh.faces) for mesh in meshes] == [0, 0, 0]
    samples = [Sample(mesh, name) for mesh, name in zip(meshes, batch.names, strict=True)]
    assert save_samples(samples, tmp_path) == tmp_path / "sheet.png"
    assert {path.name for path in tmp_path.glob("0000.*")} == {"0000.glb", "0000.obj"}
    assert (meshes[0].render().pixels == 255).all()
    triangle = bins_to_mesh(np.array([[0, 0, 0, 5, 0, 0, 0, 5, 0]]), BINS)
    assert len(Mesh.side_by_side(meshes[0], triangle).faces) == 1


def test_empty_mesh_does_not_change_others_of_the_batch():
    tokenizer = build_task().tokenizers["tokenizer"]
    codes = random_codes(3, 2, 4)
    codes[1] = -1
    alone = tokenizer.to_media(codes[:1])[0]
    first, empty, _ = tokenizer.to_media(codes)
    assert len(empty.faces) == 0 and np.array_equal(first.faces, alone.faces)
