"""Tests of the evaluator of synthetic videos, and of plain synthetic videos."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.data.sample_metrics import Reference, Samples
from tessera.modalities.image.synthetic import COLOURS
from tessera.modalities.video.dataset import VideoDataConfig
from tessera.modalities.video.media import Video
from tessera.modalities.video.prompt_match import (
    RequestedShape,
    VideoPromptMatch,
    locate_in_frames,
    match,
    match_prompts,
    parse_prompt,
)
from tessera.modalities.video.synthetic import SyntheticVideos, draw_video
from tessera.modalities.video.synthetic_plain import DISTANCES, sample_plain_scene

SCENES = [sample_plain_scene(0, number) for number in range(24)]
VIDEOS = [draw_video(scene, 32, 9) for scene in SCENES]
CAPTIONS = [scene.caption for scene in SCENES]


def check(video: Video, caption: str) -> dict[str, bool | None]:
    requests = parse_prompt(caption)
    assert requests is not None
    return match(locate_in_frames(video), requests)


def find(*words: str) -> int:
    """Return the number of the first scene whose caption has these words."""
    return next(i for i, text in enumerate(CAPTIONS) if all(word in text for word in words))


# ---- plain videos


def test_first_plain_videos_are_unchanged():
    assert CAPTIONS[:2] == [
        "a black ring moving down quickly and shrinking on a light blue background",
        "a yellow heart moving left slowly on a black background",
    ]


def test_plain_scenes_move_as_far_as_their_captions_state():
    for scene in SCENES:
        (actor,) = scene.actors
        assert actor.goal is not None
        right, down = np.subtract(actor.goal, actor.shape.centre).tolist()
        speed = "quickly" if "quickly" in scene.caption else "slowly"
        along = {"right": right, "left": -right, "down": down, "up": -down}[actor.direction]
        assert along == pytest.approx(DISTANCES[speed])
        assert ("growing" in scene.caption) == (actor.growth > 1)
        assert ("shrinking" in scene.caption) == (actor.growth < 1)
        assert ("becoming" in scene.caption) == (actor.final_rgb is not None)
        if actor.final_rgb is not None:
            assert actor.at(1).rgb == COLOURS[scene.caption.split("becoming ")[1].split(" ")[0]]


def test_plain_videos_are_a_setting_of_the_data():
    plain = VideoDataConfig(size=16, frames=5, synthetic_plain=True).build().train
    assert plain.caption(0) == CAPTIONS[0]
    assert plain.signature(0) != SyntheticVideos(1, size=16, frames=5).signature(0)


# ---- prompts


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (
            "a red star moving up quickly and becoming pink on a light blue background",
            [RequestedShape("star", "red", "up", "quickly", "pink")],
        ),
        (
            "A blue ring moving left slowly and growing",
            [RequestedShape("ring", "blue", "left", "slowly", "growing")],
        ),
        ("a small circle", [RequestedShape("circle", None, "")]),
        (
            "a pink ring bouncing left, passing behind a shaded green circle",
            [RequestedShape("ring", "pink", "left"), RequestedShape("circle", "green", "")],
        ),
        ("a large yellow square turning clockwise", None),
        ("fireworks", None),
    ],
)
def test_prompts_are_parsed(prompt, expected):
    assert parse_prompt(prompt) == expected


# ---- videos


def test_rendered_videos_match_their_captions_and_not_others():
    values = match_prompts(VIDEOS, CAPTIONS)
    for name in ("prompt", "kind", "colour", "direction", "speed", "change"):
        assert values[f"{name}_match"] >= 0.95, name
    assert values["prompt_match_chance"] < 0.02
    assert 0.1 < values["direction_match_chance"] < 0.4


def test_reversed_videos_have_the_wrong_direction():
    for video, caption in list(zip(VIDEOS, CAPTIONS))[:8]:
        result = check(Video(video.frames[::-1].copy(), 12.0), caption)
        assert not result["direction"] and not result["prompt"]
        assert result["kind"] or "becoming" in caption


def test_frozen_videos_rest():
    video = VIDEOS[1]
    frozen = Video(np.repeat(video.frames[:1], 9, axis=0), 12.0)
    result = check(frozen, CAPTIONS[1])
    assert result["kind"] and result["colour"] and not result["direction"]
    assert check(frozen, "a yellow heart")["direction"]


def test_speed_and_change_are_read_from_the_frames():
    quick = find("quickly", "growing")
    caption = CAPTIONS[quick]
    half = Video(VIDEOS[quick].frames[:4].repeat(2, axis=0), 12.0)
    assert check(VIDEOS[quick], caption)["speed"] and not check(half, caption)["speed"]
    assert check(VIDEOS[quick], caption)["change"]
    assert not check(VIDEOS[quick], caption.replace("growing", "shrinking"))["change"]
    becoming = find("becoming")
    other = CAPTIONS[becoming].replace("becoming", "growing in")
    assert check(VIDEOS[becoming], CAPTIONS[becoming])["change"]
    assert not check(VIDEOS[becoming], other)["change"]


def test_noise_matches_nothing():
    rng = np.random.default_rng(0)
    noise = [Video(rng.integers(0, 255, (9, 32, 32, 3), dtype=np.uint8), 12.0) for _ in range(6)]
    assert match_prompts(noise, CAPTIONS[:6])["prompt_match"] == 0


def test_metric_compares_samples_and_real_videos():
    data = VideoDataConfig(
        size=32, frames=5, num_synthetic=8, val_fraction=0.5, synthetic_plain=True
    )
    reference = Reference.choose(data, captions=True, count=4)
    prompts = [reference.validation.caption(index) for index in reference.chosen]
    blank = [Video(np.full((5, 32, 32, 3), 200, np.uint8), 12.0)] * 4
    result = VideoPromptMatch()(Samples(blank, prompts, [], reference))
    assert result.values["prompt_match"] == 0 and result.values["prompt_match_real"] == 1
    assert result.protocol == {"evaluated_prompts": 4}
