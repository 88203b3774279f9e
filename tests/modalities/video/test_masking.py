"""Tests of the masking of videos for several tasks."""

from __future__ import annotations

import pytest
import torch

from tessera.modalities.video.masking import VideoMaskingConfig, build_region
from tessera.nn.token_layout import Layout
from tests.masking import mask_example

LAYOUT = Layout((3, 8, 8), patch=2)
SHAPE = (LAYOUT.num_positions, LAYOUT.tokens_per_position)
MASK = 50


def mask_one(config: VideoMaskingConfig, seed: int, tokens: torch.Tensor | None = None):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.full(SHAPE, 7) if tokens is None else tokens
    region = config.draw_region(LAYOUT, generator)
    return region, mask_example(config, tokens, MASK, generator, region)


def frames_of(mask_NS: torch.Tensor) -> torch.Tensor:
    """Return the grid of codes, (t, h, w)."""
    return LAYOUT.unpatchify(mask_NS[None])[0]


def test_positions_hold_squares_within_one_frame():
    codes = torch.arange(3 * 8 * 8).view(1, 3, 8, 8)
    tokens = LAYOUT.patchify(codes)
    assert tokens.shape == (1, 48, 4)
    assert tokens[0, 0].tolist() == [0, 1, 8, 9]
    assert torch.equal(LAYOUT.unpatchify(tokens), codes)
    assert Layout((3, 8, 8)).with_max_positions(50).patch == 2


def test_prediction_generates_all_later_frames_and_only_those():
    for u, given in ((0.0, 1), (0.49, 1), (0.5, 2), (0.99, 2)):
        grid = frames_of(build_region("prediction", LAYOUT, [u, 0, 0, 0, 0]))
        assert not grid[:given].any() and grid[given:].all()


def test_interpolation_and_boxes_divide_the_grid_as_named():
    between = frames_of(build_region("interpolation", LAYOUT, [0.5] * 5))
    assert between[1].all() and not between[0].any() and not between[2].any()
    u = [0.5, 0.2, 0.6, 0.9, 0.3]
    inside, outside = (
        frames_of(build_region(task, LAYOUT, u)) for task in ("inpainting", "outpainting")
    )
    assert torch.equal(inside, ~outside)
    assert torch.equal(inside[0], inside[2]) and 0 < inside[0].float().mean() < 0.6
    rows, columns = inside[0].any(1), inside[0].any(0)
    assert torch.equal(inside[0], rows[:, None] & columns)


def test_given_tokens_are_shown_and_never_predicted():
    config = VideoMaskingConfig(prediction=0.4, interpolation=0.2, inpainting=0.2, outpainting=0.2)
    for seed in range(50):
        region, masked = mask_one(config, seed)
        assert not masked.loss_mask[~region].any()
        assert (masked.input_ids[~region] == 7).all()
        assert masked.loss_mask.any() and (masked.input_ids[masked.loss_mask] == MASK).all()


def test_noisy_given_tokens_are_replaced_and_predicted_too():
    config = VideoMaskingConfig(prediction=1.0, interpolation=0, inpainting=0, outpainting=0)
    noisy = VideoMaskingConfig(
        prediction=1.0, interpolation=0, inpainting=0, outpainting=0, given_noise=0.3
    )
    region, clean = mask_one(config, 3)
    same, masked = mask_one(noisy, 3)
    assert torch.equal(region, same)
    assert torch.equal(clean.loss_mask[region], masked.loss_mask[region])
    given = masked.loss_mask[~region]
    assert 0.15 < given.float().mean() < 0.45
    assert (masked.input_ids[~region][given] != MASK).all()
    assert (masked.input_ids[~region][~given] == 7).all()


def test_draws_depend_on_shape_and_generator_only():
    config = VideoMaskingConfig()
    other = torch.randint(0, 50, SHAPE, generator=torch.Generator().manual_seed(1))
    for seed in range(20):
        one, two = mask_one(config, seed), mask_one(config, seed, other)
        assert torch.equal(one[0], two[0]) and torch.equal(one[1].loss_mask, two[1].loss_mask)


@pytest.mark.parametrize("given_noise", [0.0, 0.4])
def test_expected_number_is_the_mean_number_of_predicted_tokens(given_noise):
    config = VideoMaskingConfig(
        prediction=0.3,
        interpolation=0.1,
        inpainting=0.2,
        outpainting=0.2,
        given_noise=given_noise,
    )
    counts = [mask_one(config, seed)[1].loss_mask.sum().item() for seed in range(3000)]
    expected = config.expected_num_masked(LAYOUT)
    assert sum(counts) / len(counts) == pytest.approx(expected, rel=0.03)


def test_a_grid_of_one_frame_is_only_generated_or_painted():
    layout = Layout((1, 4, 4))
    config = VideoMaskingConfig(prediction=0.5, interpolation=0.5, inpainting=0, outpainting=0)
    assert config.probabilities(layout)["generation"] == 1
    assert config.draw_region(layout, torch.Generator().manual_seed(0)).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prediction": 0.9, "inpainting": 0.2}, "at most 1 together"),
        ({"outpainting": -0.1}, "at least 0"),
        ({"given_noise": 1.0}, "given_noise must be at least 0 and below 1, got 1"),
    ],
)
def test_invalid_fractions_are_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        VideoMaskingConfig(**settings)
