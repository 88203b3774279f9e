"""Tests of the metrics of generated videos: sets, motion, flicker and prediction."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tessera.data.sample_metrics import Reference, Samples
from tessera.modalities.image import efficientnet_lite
from tessera.modalities.video.dataset import VideoDataConfig
from tessera.modalities.video.media import Video, VideoBatch
from tessera.modalities.video.prediction import (
    frames_to_give,
    measure_prediction,
    repeat_first,
)
from tessera.modalities.video.sample_metrics import (
    VideoSetMetric,
    flicker_of_B,
    motion_energy_B,
)

COUNT = 8
DATA = VideoDataConfig(size=32, frames=5, num_synthetic=16, val_fraction=0.5, synthetic_plain=True)
REFERENCE = Reference.choose(DATA, captions=True, count=COUNT)
PROMPTS = [REFERENCE.validation.caption(index) for index in REFERENCE.chosen]
HELD_OUT = [
    Video.from_floats(REFERENCE.validation.item(index, np.random.default_rng(0)).video, 12.0)
    for index in REFERENCE.chosen
]


def compute(videos: list[Video]) -> dict[str, float]:
    return VideoSetMetric()(Samples(videos, PROMPTS, [], REFERENCE)).values


def test_values_of_held_out_videos_are_those_of_real_ones():
    values = compute(HELD_OUT)
    assert values["frechet_lite0_frames"] == pytest.approx(0, abs=1e-3)
    assert values["frechet_lite0_motion"] == pytest.approx(0, abs=1e-3)
    assert values["frechet_lite0_frames_real"] > 10
    assert values["motion_energy"] == pytest.approx(values["motion_energy_real"], rel=1e-3)
    assert values["flicker"] == pytest.approx(values["flicker_real"], rel=1e-3)
    assert values["caption_R@1"] == values["caption_R@1_real"]


def test_frozen_and_flickering_videos_are_told_apart():
    frozen = [Video(np.repeat(one.frames[:1], 5, axis=0), 12.0) for one in HELD_OUT]
    rng = np.random.default_rng(0)
    noisy = [
        Video(
            (one.frames + rng.normal(0, 20, one.frames.shape)).clip(0, 255).astype(np.uint8), 12.0
        )
        for one in HELD_OUT
    ]
    still, shaking, real = compute(frozen), compute(noisy), compute(HELD_OUT)
    assert still["motion_energy"] == still["flicker"] == 0
    assert still["frechet_lite0_motion"] > real["frechet_lite0_motion_real"]
    assert shaking["flicker"] > 3 * real["flicker"]


def test_motion_energy_and_flicker_of_known_videos():
    ramp = torch.linspace(-1, 1, 5).view(1, 1, 5, 1, 1).expand(1, 3, 5, 4, 4)
    assert motion_energy_B(ramp).item() == pytest.approx(0.25**2)
    assert flicker_of_B(ramp).item() == pytest.approx(0, abs=1e-6)
    blink = torch.tensor([-1.0, 1.0, -1.0]).view(1, 1, 3, 1, 1)
    assert motion_energy_B(blink).item() == 1 and flicker_of_B(blink).item() == 2
    assert motion_energy_B(blink[:, :, :1]).item() == flicker_of_B(blink[:, :, :2]).item() == 0


def test_without_the_feature_network_a_notice_replaces_distances(monkeypatch):
    monkeypatch.setattr(
        "tessera.modalities.video.sample_metrics.is_installed", lambda: False, raising=True
    )
    result = VideoSetMetric()(Samples(HELD_OUT, PROMPTS, [], REFERENCE))
    assert "EfficientNet-Lite0" in result.notices[0] and "motion_energy" in result.values
    assert not any("frechet" in name for name in result.values)
    assert efficientnet_lite.is_installed()


def test_too_few_videos_leave_the_comparison_out():
    result = VideoSetMetric()(Samples(HELD_OUT[:1], PROMPTS[:1], [], REFERENCE))
    assert result.values == {} and "needs two of each" in result.notices[0]


# ---- prediction


def test_given_frames_fill_whole_latent_frames_after_the_repetition():
    videos = torch.arange(9.0).view(1, 1, 9, 1, 1)
    delayed, skip = repeat_first(videos, time_factor=4, num_given=4)
    assert skip == 1 and delayed.flatten().tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7]
    assert repeat_first(videos, 4, 1)[1] == 0
    assert frames_to_give(13, 4) == 4 and frames_to_give(5, 4) == 1


def test_prediction_is_measured_by_distance_beside_a_copy():
    real = torch.linspace(-1, 1, 6).view(1, 1, 6, 1, 1).expand(2, 3, 6, 4, 4)
    batch = VideoBatch(real, torch.tensor([6, 6]), [12.0] * 2, ["", ""])
    values = measure_prediction([batch], [real[:, :, :5]], num_given=2)
    distances = sorted(int(name.rsplit("_", 1)[1]) for name in values if "copy" in name)
    assert distances == [1, 2, 3]
    assert values["prediction_psnr_3"] == 100
    assert values["copy_psnr_1"] == pytest.approx(10 * np.log10(4 / 0.4**2))
    assert values["copy_psnr_1"] > values["copy_psnr_2"] > values["copy_psnr_3"]
