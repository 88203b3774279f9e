"""Layouts: each code has one token of one position, and `unpatchify` restores the grid."""

from __future__ import annotations

import pytest
import torch

from tessera.nn.token_layout import Layout

LAYOUTS = [
    Layout((4, 4)),
    Layout((4, 6), patch=2),
    Layout((6, 3), patch=3),
    Layout((5,), num_quantizers=3),
    Layout((4, 4), num_quantizers=2, patch=2),
    Layout((2, 4, 6), patch=2),
    Layout((2, 4, 6), num_quantizers=2),
]


def distinct_codes(layout: Layout, batch: int = 2) -> torch.Tensor:
    levels = () if layout.num_quantizers == 1 else (layout.num_quantizers,)
    shape = (batch, *layout.grid, *levels)
    return torch.arange(torch.Size(shape).numel()).view(shape)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_unpatchify_inverts_patchify(layout):
    codes = distinct_codes(layout)
    tokens = layout.patchify(codes)
    assert tokens.shape == (2, layout.num_positions, layout.tokens_per_position)
    assert torch.equal(layout.unpatchify(tokens), codes)
    assert tokens.unique().numel() == codes.numel()


def test_a_patch_holds_neighboring_tokens_row_by_row():
    codes = torch.arange(16).view(1, 4, 4)
    assert Layout((4, 4), patch=2).patchify(codes)[0].tolist() == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
        [8, 9, 12, 13],
        [10, 11, 14, 15],
    ]


def test_the_codes_of_a_cell_stay_together():
    codes = torch.arange(6).view(1, 3, 2)
    assert Layout((3,), num_quantizers=2).patchify(codes)[0].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_last_axis_of_one_code_is_optional():
    layout, codes = Layout((4, 4), patch=2), torch.arange(16).view(1, 4, 4)
    assert torch.equal(layout.patchify(codes[..., None]), layout.patchify(codes))
    assert layout.unpatchify(layout.patchify(codes)).shape == (1, 4, 4)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_cell_coordinates_locate_each_token(layout):
    cells = layout.cell_coordinates()
    assert cells.shape == (layout.num_positions, layout.tokens_per_position, len(layout.grid))
    codes = distinct_codes(layout, 1)
    tokens = layout.patchify(codes)[0]
    for position, index in [
        (0, 0),
        (layout.num_positions - 1, layout.tokens_per_position - 1),
        (layout.num_positions // 2, layout.tokens_per_position // 2),
    ]:
        coordinates = tuple(cells[position, index].tolist())
        assert tokens[position, index] in codes[0][coordinates].flatten()


def test_masks_are_patchified_like_codes():
    layout = Layout((4, 4), patch=2)
    mask = torch.zeros(1, 4, 4, dtype=torch.bool)
    mask[0, 1, 2] = True
    tokens = layout.patchify(mask)
    assert tokens.dtype == torch.bool and tokens.nonzero().tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(("grid", "patch"), [((4, 5), 2), ((16, 16), 3), ((7,), 2)])
def test_a_patch_must_divide_the_grid(grid, patch):
    with pytest.raises(ValueError, match="cannot be divided into patches"):
        Layout(grid, patch=patch)


@pytest.mark.parametrize("shape", [(1, 4, 5), (1, 5, 4), (1, 16), (1, 4, 4, 2)])
def test_codes_of_another_grid_raise_an_error(shape):
    with pytest.raises(ValueError, match="do not match a grid"):
        Layout((4, 4)).patchify(torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("patch", [0, -1])
def test_a_patch_must_be_positive(patch):
    with pytest.raises(ValueError, match="patch"):
        Layout((4, 4), patch=patch)
