"""Layouts: every symbol has one slot of one place, and finds its way back."""

from __future__ import annotations

import pytest
import torch

from tessera.nn.token_layout import Layout

LAYOUTS = [
    Layout((4, 4)), Layout((4, 6), patch=2), Layout((6, 3), patch=3), Layout((5,), levels=3), Layout((4, 4), levels=2, patch=2),
    Layout((2, 4, 6), patch=2), Layout((2, 4, 6), levels=2),
]  # fmt: skip


def numbered(layout: Layout, batch: int = 2) -> torch.Tensor:
    """Codes of which each is another."""
    shape = (batch, *layout.grid) if layout.levels == 1 else (batch, *layout.grid, layout.levels)
    return torch.arange(torch.Size(shape).numel()).view(shape)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_folded_comes_back(layout):
    codes = numbered(layout)
    patchify = layout.patchify(codes)
    assert patchify.shape == (2, layout.count, layout.slots)
    assert torch.equal(layout.unpatchify(patchify), codes)
    assert patchify.unique().numel() == codes.numel()


def test_a_patch_holds_neighbours_row_by_row():
    codes = torch.arange(16).view(1, 4, 4)
    assert Layout((4, 4), patch=2).patchify(codes)[0].tolist() == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
        [8, 9, 12, 13],
        [10, 11, 14, 15],
    ]


def test_the_levels_of_a_cell_stay_together():
    codes = torch.arange(6).view(1, 3, 2)
    assert Layout((3,), levels=2).patchify(codes)[0].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_level_axis_of_one_may_be_there_or_not():
    layout, codes = Layout((4, 4), patch=2), torch.arange(16).view(1, 4, 4)
    assert torch.equal(layout.patchify(codes[..., None]), layout.patchify(codes))
    assert layout.unpatchify(layout.patchify(codes)).shape == (1, 4, 4)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_cells_say_where_a_symbol_came_from(layout):
    cells = layout.cells()
    assert cells.shape == (layout.count, layout.slots, len(layout.grid))
    codes = numbered(layout, 1)
    patchify = layout.patchify(codes)[0]
    for place, slot in [
        (0, 0),
        (layout.count - 1, layout.slots - 1),
        (layout.count // 2, layout.slots // 2),
    ]:
        assert patchify[place, slot] in codes[0][tuple(cells[place, slot].tolist())].flatten()


def test_truth_values_fold_like_codes():
    layout = Layout((4, 4), patch=2)
    hidden = torch.zeros(1, 4, 4, dtype=torch.bool)
    hidden[0, 1, 2] = True
    patchify = layout.patchify(hidden)
    assert patchify.dtype == torch.bool and patchify.nonzero().tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(("grid", "patch"), [((4, 5), 2), ((16, 16), 3), ((7,), 2)])
def test_a_patch_that_does_not_divide_the_grid_is_refused(grid, patch):
    with pytest.raises(ValueError, match="cannot be cut into patches"):
        Layout(grid, patch=patch)


@pytest.mark.parametrize("shape", [(1, 4, 5), (1, 5, 4), (1, 16), (1, 4, 4, 2)])
def test_codes_of_another_grid_are_refused(shape):
    with pytest.raises(ValueError, match="do not lie on a grid"):
        Layout((4, 4)).patchify(torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("patch", [0, -1])
def test_a_patch_of_nothing_is_refused(patch):
    with pytest.raises(ValueError, match="patch"):
        Layout((4, 4), patch=patch)
