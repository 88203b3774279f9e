"""The mesh autoencoder: corners at one vertex share tokens, and padding has no influence.

Layers that are zero at initialization get random weights, and results that are equal in exact
arithmetic are compared in double precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.engine.distributed import Distributed
from tessera.losses.smoothed_cross_entropy import smoothed_cross_entropy
from tessera.modalities.mesh.autoencoder import (
    MeshAutoencoder,
    MeshAutoencoderConfig,
    build_graph,
    compute_geometry,
    sinusoidal_embedding,
    target_bins,
    to_bins,
)
from tessera.nn.quantize import FSQConfig, LFQConfig, ResidualConfig, VQConfig

BINS = 16
TINY = MeshAutoencoderConfig(
    bins=BINS,
    coordinate_dim=6,
    angle_dim=4,
    area_dim=4,
    normal_dim=4,
    angle_bins=8,
    area_bins=8,
    normal_bins=8,
    encoder=(12, 16, 16),
    code_dim=8,
    decoder=(12, 12, 16),
    quantizer=ResidualConfig(quantizer=FSQConfig(levels=(4, 4)), num_quantizers=2),
)

QUANTIZERS = {
    "fsq": FSQConfig(levels=(4, 4, 4)),
    "lfq": LFQConfig(codebook_size=64),
    "vq": VQConfig(codebook_size=64, code_dim=4),
    "residual fsq": ResidualConfig(quantizer=FSQConfig(levels=(4, 4)), num_quantizers=2),
    "residual lfq": ResidualConfig(quantizer=LFQConfig(codebook_size=16), num_quantizers=2),
    "residual vq": ResidualConfig(
        quantizer=VQConfig(codebook_size=16, code_dim=8), num_quantizers=2
    ),
}


@dataclass
class Meshes:
    vertices: Tensor
    faces: Tensor
    edges: Tensor

    def select(self, number: int) -> Meshes:
        """Return one mesh without padding."""
        return Meshes(
            *(
                rows[number : number + 1, rows[number, :, 0] >= 0]
                for rows in (self.vertices, self.faces, self.edges)
            )
        )


def strip(faces: int, corners: int, seed: int) -> Meshes:
    """Return a strip of triangles or quads, each sharing an edge with the next."""
    generator = torch.Generator().manual_seed(seed)
    step = corners - 2
    vertices = torch.randint(BINS, (2 + step * faces, 3), generator=generator)
    order = torch.tensor([0, 1, 2] if corners == 3 else [0, 1, 3, 2])
    strip_faces = torch.arange(faces)[:, None] * step + order
    return Meshes(vertices[None], strip_faces[None], adjacent_pairs(strip_faces)[None])


def adjacent_pairs(faces: Tensor) -> Tensor:
    sets = [set(face) for face in faces.tolist()]
    pairs = [
        (i, j)
        for i, one in enumerate(sets)
        for j, other in enumerate(sets)
        if i != j and len(one & other) == 2
    ]
    return torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)


def collate(*meshes: Meshes) -> Meshes:
    return Meshes(
        *(
            pad([getattr(mesh, name)[0] for mesh in meshes])
            for name in ("vertices", "faces", "edges")
        )
    )


def pad(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def batch_of_four(corners: int = 3) -> Meshes:
    return collate(
        strip(7, corners, 1), strip(2, corners, 2), strip(1, corners, 3), strip(11, corners, 4)
    )


def build(**settings: Any) -> MeshAutoencoder:
    torch.manual_seed(0)
    model = replace(TINY, **settings).build()
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)
    return model.double().eval()


# ---- encoding and decoding


@pytest.mark.parametrize("corners", [3, 4])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_decoding_the_codes_equals_the_reconstruction(quantizer, corners):
    model, meshes = build(quantizer=QUANTIZERS[quantizer], corners=corners), batch_of_four(corners)
    reconstruction, codes = model(meshes), model.encode(meshes)
    num_quantizers = () if model.num_quantizers == 1 else (model.num_quantizers,)
    assert codes.shape == (4, 11, corners, *num_quantizers) and codes.dtype == torch.int64
    assert reconstruction.output.shape == (4, 11, 3 * corners, BINS)
    assert torch.equal(codes, reconstruction.codes)
    real = meshes.faces[..., 0] >= 0
    assert (
        (codes[real] >= 0).all() and (codes < model.vocab_size).all() and (codes[~real] == -1).all()
    )
    assert torch.allclose(model.decode(codes)[real], reconstruction.output[real])


def test_corners_at_the_same_vertex_have_the_same_tokens():
    model, meshes = build(), batch_of_four()
    codes = model.encode(meshes)
    for number in range(4):
        for vertex in range(int(meshes.faces[number].max()) + 1):
            here = codes[number][meshes.faces[number] == vertex]
            assert (here == here[0]).all()
    assert len(codes[3, :11].flatten(0, 1).unique(dim=0)) > 3, (
        "there must be several different tokens"
    )


def test_targets_are_the_bins_of_the_corners():
    meshes = batch_of_four()
    target = target_bins(meshes)
    for number in range(4):
        for index, face in enumerate(meshes.faces[number].tolist()):
            expected = (
                meshes.vertices[number][face].flatten() if face[0] >= 0 else torch.full((9,), -1)
            )
            assert torch.equal(target[number, index], expected)


def test_codes_decode_to_coordinates_between_minus_one_and_one():
    model, meshes = build(), batch_of_four()
    codes = model.encode(meshes)
    coordinates, mask = model.decode_from_codes_to_faces(codes)
    assert coordinates.shape == (4, 11, 3, 3) and torch.equal(mask, meshes.faces[..., 0] >= 0)
    bins = model.decode(codes).argmax(-1).view(4, 11, 3, 3)
    assert torch.allclose(coordinates[mask], bins[mask] / (BINS - 1) * 2 - 1)
    assert coordinates.min() >= -1 and coordinates.max() <= 1 and not coordinates[~mask].any()


def test_tokenize_changes_neither_mode_nor_codebook_statistics():
    model = build(quantizer=QUANTIZERS["vq"]).train()
    codes = model.tokenize(batch_of_four())
    assert model.training and model.quantizer.training and model.quantizer.stats is None
    assert torch.equal(codes, model.eval().encode(batch_of_four())) and not codes.requires_grad
    model.tokenize(batch_of_four())
    assert not model.training


# ---- padding


@pytest.mark.parametrize("corners", [3, 4])
@pytest.mark.parametrize("attention", [0, 1])
def test_a_mesh_gives_the_same_results_alone_and_in_a_batch(corners, attention):
    model = build(corners=corners, encoder_attention=attention, decoder_attention=attention)
    meshes = batch_of_four(corners)
    reconstruction, latent, decoded = (
        model(meshes),
        model.latent(meshes),
        model.decode(model.encode(meshes)),
    )
    losses = []
    for number in range(4):
        alone = meshes.select(number)
        faces, vertices = alone.faces.shape[1], alone.vertices.shape[1]
        single = model(alone)
        assert torch.allclose(model.latent(alone).values[0], latent.values[number, :vertices])
        assert torch.equal(single.codes[0], reconstruction.codes[number, :faces])
        assert torch.allclose(single.output[0], reconstruction.output[number, :faces])
        assert torch.allclose(model.decode(single.codes)[0], decoded[number, :faces])
        losses.append(smoothed_cross_entropy(single.output, target_bins(alone), 0.4))
    batch_loss = smoothed_cross_entropy(reconstruction.output, target_bins(meshes), 0.4)
    assert torch.allclose(batch_loss, torch.stack(losses).mean())


@pytest.mark.parametrize("quantizer", ["lfq", "residual lfq", "residual vq"])
def test_padding_changes_neither_penalties_nor_codebook_statistics(quantizer):
    meshes, padded = batch_of_four(), batch_of_four()
    padded.vertices, padded.faces, padded.edges = (
        torch.cat([rows, torch.full_like(rows[:, :5], -1)], dim=1)
        for rows in (padded.vertices, padded.faces, padded.edges)
    )
    one, other = (build(quantizer=QUANTIZERS[quantizer]).train() for _ in range(2))
    penalties, with_padding = one(meshes).penalties, other(padded).penalties
    assert penalties and penalties.keys() == with_padding.keys()
    assert all(torch.allclose(penalties[name], with_padding[name]) for name in penalties)
    for before, after in zip(one.quantizer.modules(), other.quantizer.modules(), strict=True):
        if getattr(before, "stats", None) is not None:
            assert torch.allclose(before.stats.total_VC, after.stats.total_VC)
            assert before.stats.total_VC[:, -1].sum() == 9 + 4 + 3 + 13, (
                "each vertex counts once, whatever its number of faces"
            )


@pytest.mark.parametrize("quantizer", ["lfq", "residual lfq", "residual vq"])
def test_micro_batches_of_uneven_meshes_have_the_penalties_of_the_batch(quantizer):
    model, meshes = build(quantizer=QUANTIZERS[quantizer]).train(), batch_of_four()
    expected = model(meshes).penalties
    micros = [
        collate(meshes.select(0), meshes.select(1)),
        collate(meshes.select(2), meshes.select(3)),
    ]
    assert model.quantizer.needs_global_stats
    model.quantizer.set_global_stats(
        Distributed().all_reduce_sum(
            torch.stack([model.batch_stats(micro) for micro in micros]).sum(0)
        )
    )
    penalties = [model(micro).penalties for micro in micros]
    for name, value in expected.items():
        assert torch.allclose(torch.stack([each[name] for each in penalties]).mean(), value)


def test_a_vertex_without_faces_is_masked():
    model, meshes = build(), strip(4, 3, 5)
    extended = Meshes(
        torch.cat([meshes.vertices, torch.zeros(1, 2, 3, dtype=torch.long)], dim=1),
        meshes.faces,
        meshes.edges,
    )
    assert model.latent(extended).mask[0].tolist() == [True] * 6 + [False] * 2
    assert torch.equal(model.encode(extended), model.encode(meshes))


# ---- graph


def test_the_mean_of_adjacent_faces_matches_a_loop():
    meshes = batch_of_four()
    graph, x = build_graph(meshes), torch.randn(7 + 2 + 1 + 11, 5, dtype=torch.float64)
    expected, first = torch.zeros_like(x), 0
    for number in range(4):
        alone = meshes.select(number)
        for face in range(alone.faces.shape[1]):
            others = [x[first + other] for one, other in alone.edges[0].tolist() if one == face]
            expected[first + face] = torch.stack(others).mean(0) if others else 0
        first += alone.faces.shape[1]
    assert torch.allclose(graph.mean_of_neighbours(x), expected)


def test_vertex_features_are_the_mean_over_their_corners():
    meshes = batch_of_four()
    graph, x = build_graph(meshes), torch.randn(7 + 2 + 1 + 11, 3, 5, dtype=torch.float64)
    found = graph.mean_at_vertices(x)
    corners = x.split([7, 2, 1, 11])
    for number, vertex in found.mask.nonzero().tolist():
        here = meshes.select(number).faces[0] == vertex
        assert torch.allclose(found.values[number, vertex], corners[number][here].mean(0))
    assert found.mask.sum(1).tolist() == [9, 4, 3, 13]


def test_the_position_of_a_vertex_is_encoded_directly():
    model, meshes = build(), strip(3, 3, 7)
    nn.init.zeros_(model.encoder.to_corners.weight)
    before = model.latent(meshes).values
    meshes.vertices[0, 2, 1] = (meshes.vertices[0, 2, 1] + 1) % BINS
    changed = (model.latent(meshes).values - before).abs().amax(-1)[0] > 0
    assert changed.tolist() == [False, False, True, False, False]


def test_the_receptive_field_grows_by_one_edge_per_layer():
    model, meshes = build(encoder=(16, 16)), strip(9, 3, 6)
    before = model.latent(meshes).values
    moved = Meshes(meshes.vertices.clone(), meshes.faces, meshes.edges)
    moved.vertices[0, 10] = (moved.vertices[0, 10] + 5) % BINS  # a corner of only the last face
    changed = (model.latent(moved).values - before).abs().amax(-1)[0] > 0
    # The change reaches faces 8, 7 and 6, and face 6 has the vertices 6, 7 and 8.
    assert changed.tolist() == [False] * 6 + [True] * 5


def test_the_order_of_edges_does_not_matter():
    model, meshes = build(), batch_of_four()
    shuffled = Meshes(
        meshes.vertices, meshes.faces, meshes.edges[:, torch.randperm(meshes.edges.shape[1])]
    )
    assert torch.allclose(model.latent(shuffled).values, model.latent(meshes).values)


# ---- geometry


def test_angles_area_and_normal_are_correct():
    triangle = torch.tensor([[[2, 2, 5], [5, 2, 5], [2, 6, 5]]])
    found = compute_geometry(triangle, BINS)
    angles = [math.pi / 2, math.atan2(4, 3), math.atan2(3, 4)]
    assert torch.allclose(found.angles_PK[0], torch.tensor(angles) / math.pi)
    assert torch.allclose(found.size_P[0] ** 2 * 1.5 * BINS**2, torch.tensor(6.0))
    assert found.normal_P3[0].tolist() == [0.5, 0.5, 1.0]
    square = torch.tensor([[[1, 1, 0], [1, 4, 0], [1, 4, 3], [1, 1, 3]]])
    found = compute_geometry(square, BINS)
    assert torch.allclose(found.angles_PK, torch.full((1, 4), 0.5))
    assert torch.allclose(found.size_P[0] ** 2 * 1.5 * BINS**2, torch.tensor(9.0))
    assert found.normal_P3[0].tolist() == [1.0, 0.5, 0.5]


def test_geometry_stays_in_range_for_degenerate_faces_too():
    corners = torch.randint(BINS, (500, 3, 3))
    corners[0] = 3
    corners[1:9] = torch.tensor([0, BINS - 1]).repeat(9)[torch.randperm(18)[:9]].view(3, 3)
    found = compute_geometry(corners, BINS)
    for values in (found.angles_PK, found.size_P, found.normal_P3):
        assert values.isfinite().all() and values.min() >= 0 and values.max() <= 1 + 1e-6


def test_right_angles_always_have_the_same_bin():
    """The last digit of an arc tangent depends on the position in the batch, so a right angle must
    not be at the border of two bins."""
    model = build().float()
    corner = torch.tensor([[1, 1, 1], [9, 1, 1], [1, 8, 1]]).expand(37, 3, 3)
    features = model.encoder.face_features(corner)
    assert torch.equal(features, features[:1].expand_as(features))
    nearly_right = torch.tensor([math.pi / 2 - 1e-6, math.pi / 2 + 1e-6]) / math.pi
    for bins in (8, 100, 127, 128):
        first, second = to_bins(nearly_right, bins).tolist()
        assert first == second
    assert to_bins(torch.tensor([0.0, 1.0]), 128).tolist() == [0, 127]


@pytest.mark.parametrize("dim", [2, 7, 32])
@pytest.mark.parametrize("bins", [2, 100, 128])
def test_initial_embeddings_are_distinct_and_similar_for_near_bins(bins, dim):
    table = sinusoidal_embedding(bins, dim)
    assert table.shape == (bins, dim) and table.isfinite().all()
    distances = torch.cdist(table, table)
    assert (distances + torch.eye(bins) > 1e-3).all()
    if dim == 32 and bins > 2:
        assert (
            distances.diagonal(1).mean() < 0.7 * distances.diagonal(bins // 4).mean()
        ) and 0.9 < table.square().mean() < 1.1


# ---- training


def test_every_parameter_receives_a_gradient():
    model = build(
        encoder_attention=1, decoder_attention=1, quantizer=QUANTIZERS["residual vq"]
    ).train()
    reconstruction = model(batch_of_four())
    loss = smoothed_cross_entropy(reconstruction.output, target_bins(batch_of_four()), 0.4) + sum(
        reconstruction.penalties.values()
    )
    loss.backward()
    without_gradient = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    assert not without_gradient


def test_bfloat16_is_close_and_gives_float32_logits():
    model = build().float()
    full = model(batch_of_four()).output
    with torch.autocast("cpu", dtype=torch.bfloat16):
        latent, half = model.latent(batch_of_four()), model.decode(model.encode(batch_of_four()))
    assert half.dtype == latent.values.dtype == torch.float32 and half.shape == full.shape
    assert torch.allclose(latent.values, model.latent(batch_of_four()).values, atol=0.1)


def test_the_model_overfits_a_few_meshes():
    torch.manual_seed(0)
    model = replace(
        TINY, encoder=(32, 32), code_dim=32, decoder=(48, 48), quantizer=FSQConfig(levels=(8, 8, 8))
    ).build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    meshes = batch_of_four()
    for _ in range(120):
        loss = smoothed_cross_entropy(model(meshes).output, target_bins(meshes), 0.4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    target = target_bins(meshes)
    correct = model(meshes).output.argmax(-1) == target
    assert correct[target >= 0].float().mean() > 0.95


# ---- errors


def test_a_wrong_number_of_corners_raises_an_error():
    with pytest.raises(ValueError, match="faces with 4 corners, but this model has triangles"):
        build()(batch_of_four(corners=4))
    with pytest.raises(ValueError, match=r"\(2, 5, 4, 2\), but this model has triangles"):
        build().decode(torch.zeros(2, 5, 4, 2, dtype=torch.long))


def test_a_vertex_outside_the_bins_raises_an_error():
    meshes = batch_of_four()
    meshes.vertices[0, 0, 0] = BINS
    with pytest.raises(
        ValueError, match="vertex in bin 16, but the bins of this model are 0 to 15"
    ):
        build()(meshes)


def test_incompatible_data_raises_an_error():
    TINY.validate_data(SimpleNamespace(bins=BINS, polygons="triangles"))
    with pytest.raises(ValueError, match="have 128 bins along each axis, but this model has 16"):
        TINY.validate_data(SimpleNamespace(bins=128, polygons="triangles"))
    with pytest.raises(ValueError, match="`polygons` to triangles, or `corners` to 4"):
        TINY.validate_data(SimpleNamespace(bins=BINS, polygons="quads"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"corners": 5}, "`corners` of a face must be 3 or 4, got 5"),
        ({"bins": 1}, "`bins` must be at least 2, got 1"),
        ({"angle_bins": 0}, "`angle_bins` must be at least 2, got 0"),
        ({"normal_dim": 0}, "`normal_dim` must be at least 1, got 0"),
        ({"encoder": ()}, "`encoder` must list the channels"),
        ({"decoder": (8, 0)}, "`decoder` must list the channels"),
        ({"decoder_attention": -1}, "`decoder_attention` must be at least 0, got -1"),
    ],
)
def test_invalid_settings_raise_an_error(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **settings)
