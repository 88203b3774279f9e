"""The mesh autoencoder: corners that meet have the same symbols, a face hears of its neighbours,
and padding is seen by nobody.

Layers that start as nothing are given something to say, and what is equal in exact arithmetic is
compared in double precision.
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
    binned,
    graph_of,
    measures,
    true_bins,
    waves,
)
from tessera.nn.quantize import FSQConfig, LFQConfig, ResidualConfig, VQConfig

BINS = 16
TINY = MeshAutoencoderConfig(
    bins=BINS, coordinate_dim=6, angle_dim=4, area_dim=4, normal_dim=4, angle_bins=8, area_bins=8, normal_bins=8,
    encoder=(12, 16, 16), code_dim=8, decoder=(12, 12, 16),
    quantizer=ResidualConfig(quantizer=FSQConfig(levels=(4, 4)), levels=2),
)  # fmt: skip

QUANTIZERS = {
    "fsq": FSQConfig(levels=(4, 4, 4)),
    "lfq": LFQConfig(codebook_size=64),
    "vq": VQConfig(codebook_size=64, code_dim=4),
    "residual fsq": ResidualConfig(quantizer=FSQConfig(levels=(4, 4)), levels=2),
    "residual lfq": ResidualConfig(quantizer=LFQConfig(codebook_size=16), levels=2),
    "residual vq": ResidualConfig(quantizer=VQConfig(codebook_size=16, code_dim=8), levels=2),
}


@dataclass
class MeshDataConfig:
    vertices: Tensor
    faces: Tensor
    edges: Tensor

    def only(self, number: int) -> MeshDataConfig:
        """One of them by itself, without padding."""
        return MeshDataConfig(
            *(
                rows[number : number + 1, rows[number, :, 0] >= 0]
                for rows in (self.vertices, self.faces, self.edges)
            )
        )


def strip(faces: int, corners: int, seed: int) -> MeshDataConfig:
    """A band of triangles or quads, each sharing an edge with the next."""
    chance = torch.Generator().manual_seed(seed)
    step = corners - 2
    vertices = torch.randint(BINS, (2 + step * faces, 3), generator=chance)
    order = torch.tensor([0, 1, 2] if corners == 3 else [0, 1, 3, 2])
    made = torch.arange(faces)[:, None] * step + order
    return MeshDataConfig(vertices[None], made[None], neighbours(made)[None])


def neighbours(faces: Tensor) -> Tensor:
    sets = [set(face) for face in faces.tolist()]
    pairs = [
        (i, j)
        for i, one in enumerate(sets)
        for j, other in enumerate(sets)
        if i != j and len(one & other) == 2
    ]
    return torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)


def together(*meshes: MeshDataConfig) -> MeshDataConfig:
    return MeshDataConfig(
        *(
            padded([getattr(mesh, name)[0] for mesh in meshes])
            for name in ("vertices", "faces", "edges")
        )
    )


def padded(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def several(corners: int = 3) -> MeshDataConfig:
    return together(
        strip(7, corners, 1), strip(2, corners, 2), strip(1, corners, 3), strip(11, corners, 4)
    )


def built(**settings: Any) -> MeshAutoencoder:
    torch.manual_seed(0)
    network = replace(TINY, **settings).build()
    for parameter in network.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)
    return network.double().eval()


# --------------------------------------------------------------------------------------------------- symbols and back


@pytest.mark.parametrize("corners", [3, 4])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_decoding_the_codes_of_a_mesh_gives_its_reconstruction(quantizer, corners):
    model, meshes = built(quantizer=QUANTIZERS[quantizer], corners=corners), several(corners)
    rebuilt, codes = model(meshes), model.encode(meshes)
    levels = () if model.levels == 1 else (model.levels,)
    assert codes.shape == (4, 11, corners, *levels) and codes.dtype == torch.int64
    assert rebuilt.output.shape == (4, 11, 3 * corners, BINS)
    assert torch.equal(codes, rebuilt.codes)
    real = meshes.faces[..., 0] >= 0
    assert (
        (codes[real] >= 0).all() and (codes < model.vocab_size).all() and (codes[~real] == -1).all()
    )
    assert torch.allclose(model.decode(codes)[real], rebuilt.output[real])


def test_corners_that_meet_in_a_vertex_have_the_same_symbols():
    model, meshes = built(), several()
    codes = model.encode(meshes)
    for number in range(4):
        for vertex in range(int(meshes.faces[number].max()) + 1):
            here = codes[number][meshes.faces[number] == vertex]
            assert (here == here[0]).all()
    assert len(codes[3, :11].flatten(0, 1).unique(dim=0)) > 3, "they must not all be the same"


def test_the_targets_are_the_bins_of_the_corners_one_by_one():
    meshes = several()
    target = true_bins(meshes)
    for number in range(4):
        for place, face in enumerate(meshes.faces[number].tolist()):
            true = meshes.vertices[number][face].flatten() if face[0] >= 0 else torch.full((9,), -1)
            assert torch.equal(target[number, place], true)


def test_codes_become_faces_with_coordinates_from_end_to_end():
    model, meshes = built(), several()
    codes = model.encode(meshes)
    coordinates, mask = model.decode_from_codes_to_faces(codes)
    assert coordinates.shape == (4, 11, 3, 3) and torch.equal(mask, meshes.faces[..., 0] >= 0)
    bins = model.decode(codes).argmax(-1).view(4, 11, 3, 3)
    assert torch.allclose(coordinates[mask], bins[mask] / (BINS - 1) * 2 - 1)
    assert coordinates.min() >= -1 and coordinates.max() <= 1 and not coordinates[~mask].any()


def test_tokenizing_in_the_middle_of_training_notes_nothing_and_leaves_the_mode_as_it_was():
    model = built(quantizer=QUANTIZERS["vq"]).train()
    codes = model.tokenize(several())
    assert model.training and model.quantizer.training and model.quantizer.notes is None
    assert torch.equal(codes, model.eval().encode(several())) and not codes.requires_grad
    model.tokenize(several())
    assert not model.training


# ------------------------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("corners", [3, 4])
@pytest.mark.parametrize("attention", [0, 1])
def test_a_mesh_in_a_padded_batch_is_what_it_is_by_itself(corners, attention):
    model = built(corners=corners, encoder_attention=attention, decoder_attention=attention)
    meshes = several(corners)
    rebuilt, latent, decoded = (
        model(meshes),
        model.latent(meshes),
        model.decode(model.encode(meshes)),
    )
    losses = []
    for number in range(4):
        alone = meshes.only(number)
        faces, vertices = alone.faces.shape[1], alone.vertices.shape[1]
        single = model(alone)
        assert torch.allclose(model.latent(alone).values[0], latent.values[number, :vertices])
        assert torch.equal(single.codes[0], rebuilt.codes[number, :faces])
        assert torch.allclose(single.output[0], rebuilt.output[number, :faces])
        assert torch.allclose(model.decode(single.codes)[0], decoded[number, :faces])
        losses.append(smoothed_cross_entropy(single.output, true_bins(alone), 0.4))
    whole = smoothed_cross_entropy(rebuilt.output, true_bins(meshes), 0.4)
    assert torch.allclose(whole, torch.stack(losses).mean())


@pytest.mark.parametrize("quantizer", ["lfq", "residual lfq", "residual vq"])
def test_padding_changes_no_penalty_and_no_note(quantizer):
    meshes, more = several(), several()
    more.vertices, more.faces, more.edges = (
        torch.cat([rows, torch.full_like(rows[:, :5], -1)], dim=1)
        for rows in (more.vertices, more.faces, more.edges)
    )
    one, other = (built(quantizer=QUANTIZERS[quantizer]).train() for _ in range(2))
    penalties, with_more = one(meshes).penalties, other(more).penalties
    assert penalties and penalties.keys() == with_more.keys()
    assert all(torch.allclose(penalties[name], with_more[name]) for name in penalties)
    for before, after in zip(one.quantizer.modules(), other.quantizer.modules(), strict=True):
        if getattr(before, "notes", None) is not None:
            assert torch.allclose(before.notes.total_VC, after.notes.total_VC)
            assert before.notes.total_VC[:, -1].sum() == 9 + 4 + 3 + 13, (
                "each vertex counts once, however many faces it has"
            )


@pytest.mark.parametrize("quantizer", ["lfq", "residual lfq", "residual vq"])
def test_two_micro_batches_of_uneven_meshes_have_the_penalty_of_the_whole_batch(quantizer):
    model, meshes = built(quantizer=QUANTIZERS[quantizer]).train(), several()
    whole = model(meshes).penalties
    micros = [together(meshes.only(0), meshes.only(1)), together(meshes.only(2), meshes.only(3))]
    assert model.quantizer.needs_global_stats
    model.quantizer.set_global_stats(
        Distributed().sum(torch.stack([model.batch_stats(micro) for micro in micros]).sum(0))
    )
    shares = [model(micro).penalties for micro in micros]
    for name, value in whole.items():
        assert torch.allclose(torch.stack([share[name] for share in shares]).mean(), value)


def test_a_vertex_without_a_face_is_no_place_of_the_mosaic():
    model, meshes = built(), strip(4, 3, 5)
    more = MeshDataConfig(
        torch.cat([meshes.vertices, torch.zeros(1, 2, 3, dtype=torch.long)], dim=1),
        meshes.faces,
        meshes.edges,
    )
    assert model.latent(more).mask[0].tolist() == [True] * 6 + [False] * 2
    assert torch.equal(model.encode(more), model.encode(meshes))


# --------------------------------------------------------------------------------------------------------------- graph


def test_the_mean_of_the_neighbours_is_what_a_slow_loop_makes_of_it():
    meshes = several()
    graph, x = graph_of(meshes), torch.randn(7 + 2 + 1 + 11, 5, dtype=torch.float64)
    slow, first = torch.zeros_like(x), 0
    for number in range(4):
        alone = meshes.only(number)
        for face in range(alone.faces.shape[1]):
            heard = [x[first + other] for one, other in alone.edges[0].tolist() if one == face]
            slow[first + face] = torch.stack(heard).mean(0) if heard else 0
        first += alone.faces.shape[1]
    assert torch.allclose(graph.mean_of_neighbours(x), slow)


def test_what_is_said_of_a_vertex_is_the_mean_over_the_faces_around_it():
    meshes = several()
    graph, x = graph_of(meshes), torch.randn(7 + 2 + 1 + 11, 3, 5, dtype=torch.float64)
    found = graph.mean_at_vertices(x)
    corners = x.split([7, 2, 1, 11])
    for number, vertex in found.mask.nonzero().tolist():
        here = meshes.only(number).faces[0] == vertex
        assert torch.allclose(found.values[number, vertex], corners[number][here].mean(0))
    assert found.mask.sum(1).tolist() == [9, 4, 3, 13]


def test_where_a_vertex_is_has_a_say_of_its_own():
    model, meshes = built(), strip(3, 3, 7)
    nn.init.zeros_(model.encoder.to_corners.weight)
    before = model.latent(meshes).values
    meshes.vertices[0, 2, 1] = (meshes.vertices[0, 2, 1] + 1) % BINS
    changed = (model.latent(meshes).values - before).abs().amax(-1)[0] > 0
    assert changed.tolist() == [False, False, True, False, False]


def test_a_face_hears_of_faces_as_far_away_as_there_are_layers():
    model, meshes = built(encoder=(16, 16)), strip(9, 3, 6)
    before = model.latent(meshes).values
    moved = MeshDataConfig(meshes.vertices.clone(), meshes.faces, meshes.edges)
    moved.vertices[0, 10] = (moved.vertices[0, 10] + 5) % BINS  # a corner of the last face alone
    changed = (model.latent(moved).values - before).abs().amax(-1)[0] > 0
    # Faces 8, then 7, then 6 hear of it, and face 6 has the vertices 6, 7 and 8.
    assert changed.tolist() == [False] * 6 + [True] * 5


def test_faces_in_another_order_of_edges_are_the_same():
    model, meshes = built(), several()
    shuffled = MeshDataConfig(
        meshes.vertices, meshes.faces, meshes.edges[:, torch.randperm(meshes.edges.shape[1])]
    )
    assert torch.allclose(model.latent(shuffled).values, model.latent(meshes).values)


# ------------------------------------------------------------------------------------------------------------ measures


def test_angles_area_and_direction_are_those_of_the_face():
    right = torch.tensor([[[2, 2, 5], [5, 2, 5], [2, 6, 5]]])
    found = measures(right, BINS)
    angles = [math.pi / 2, math.atan2(4, 3), math.atan2(3, 4)]
    assert torch.allclose(found.angles_PK[0], torch.tensor(angles) / math.pi)
    assert torch.allclose(found.size_P[0] ** 2 * 1.5 * BINS**2, torch.tensor(6.0))
    assert found.direction_P3[0].tolist() == [0.5, 0.5, 1.0]
    square = torch.tensor([[[1, 1, 0], [1, 4, 0], [1, 4, 3], [1, 1, 3]]])
    found = measures(square, BINS)
    assert torch.allclose(found.angles_PK, torch.full((1, 4), 0.5))
    assert torch.allclose(found.size_P[0] ** 2 * 1.5 * BINS**2, torch.tensor(9.0))
    assert found.direction_P3[0].tolist() == [1.0, 0.5, 0.5]


def test_no_measure_leaves_its_range_and_a_face_of_nothing_has_measures_too():
    corners = torch.randint(BINS, (500, 3, 3))
    corners[0] = 3
    corners[1:9] = torch.tensor([0, BINS - 1]).repeat(9)[torch.randperm(18)[:9]].view(3, 3)
    found = measures(corners, BINS)
    for share in (found.angles_PK, found.size_P, found.direction_P3):
        assert share.isfinite().all() and share.min() >= 0 and share.max() <= 1 + 1e-6


def test_right_angles_fall_into_one_bin_wherever_they_stand():
    """The last digit of an arc tangent depends on the place in a batch, so a right angle may not
    lie between two bins."""
    model = built().float()
    corner = torch.tensor([[1, 1, 1], [9, 1, 1], [1, 8, 1]]).expand(37, 3, 3)
    described = model.encoder.description(corner)
    assert torch.equal(described, described[:1].expand_as(described))
    bent = torch.tensor([math.pi / 2 - 1e-6, math.pi / 2 + 1e-6]) / math.pi
    for bins in (8, 100, 127, 128):
        first, second = binned(bent, bins).tolist()
        assert first == second
    assert binned(torch.tensor([0.0, 1.0]), 128).tolist() == [0, 127]


@pytest.mark.parametrize("width", [2, 7, 32])
@pytest.mark.parametrize("bins", [2, 100, 128])
def test_near_bins_look_alike_to_begin_with_and_no_two_the_same(bins, width):
    table = waves(bins, width)
    assert table.shape == (bins, width) and table.isfinite().all()
    apart = torch.cdist(table, table)
    assert (apart + torch.eye(bins) > 1e-3).all()
    if width == 32 and bins > 2:
        assert (
            apart.diagonal(1).mean() < 0.7 * apart.diagonal(bins // 4).mean()
        ) and 0.9 < table.square().mean() < 1.1


# ------------------------------------------------------------------------------------------------------------ learning


def test_every_parameter_takes_part():
    model = built(
        encoder_attention=1, decoder_attention=1, quantizer=QUANTIZERS["residual vq"]
    ).train()
    rebuilt = model(several())
    loss = smoothed_cross_entropy(rebuilt.output, true_bins(several()), 0.4) + sum(
        rebuilt.penalties.values()
    )
    loss.backward()
    still = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    assert not still


def test_half_precision_comes_near_and_gives_logits_in_float32():
    model = built().float()
    whole = model(several()).output
    with torch.autocast("cpu", dtype=torch.bfloat16):
        latent, half = model.latent(several()), model.decode(model.encode(several()))
    assert half.dtype == latent.values.dtype == torch.float32 and half.shape == whole.shape
    assert torch.allclose(latent.values, model.latent(several()).values, atol=0.1)


def test_it_learns_a_few_meshes_by_heart():
    torch.manual_seed(0)
    model = replace(
        TINY, encoder=(32, 32), code_dim=32, decoder=(48, 48), quantizer=FSQConfig(levels=(8, 8, 8))
    ).build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    meshes = several()
    for _ in range(120):
        loss = smoothed_cross_entropy(model(meshes).output, true_bins(meshes), 0.4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    target = true_bins(meshes)
    right = model(meshes).output.argmax(-1) == target
    assert right[target >= 0].float().mean() > 0.95


# -------------------------------------------------------------------------------------------------------------- letters


def test_faces_with_another_number_of_corners_are_refused():
    with pytest.raises(ValueError, match="Faces with 4 corners came to a network of triangles"):
        built()(several(corners=4))
    with pytest.raises(ValueError, match=r"\(2, 5, 4, 2\) came to a network of triangles"):
        built().decode(torch.zeros(2, 5, 4, 2, dtype=torch.long))


def test_meshes_with_more_bins_are_refused():
    meshes = several()
    meshes.vertices[0, 0, 0] = BINS
    with pytest.raises(ValueError, match="lies in bin 16, but this network knows 16 bins, 0 to 15"):
        built()(meshes)


def test_data_of_another_kind_is_refused():
    TINY.validate_data(SimpleNamespace(bins=BINS, polygons="triangles"))
    with pytest.raises(ValueError, match="have 128 bins along each axis and this network knows 16"):
        TINY.validate_data(SimpleNamespace(bins=128, polygons="triangles"))
    with pytest.raises(ValueError, match="`polygons` to triangles, or `corners` to 4"):
        TINY.validate_data(SimpleNamespace(bins=BINS, polygons="quads"))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"corners": 5}, "3 or 4 corners"),
        ({"bins": 1}, "one bin tells nothing"),
        ({"angle_bins": 0}, "`angle_bins` is 0"),
        ({"normal_dim": 0}, "`normal_dim` is a width"),
        ({"encoder": ()}, "`encoder` is the width of each of its layers"),
        ({"decoder": (8, 0)}, "`decoder` is the width of each of its layers"),
        ({"decoder_attention": -1}, "`decoder_attention` is a number of blocks"),
    ],
)
def test_a_wrong_setting_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        replace(TINY, **wrong)
