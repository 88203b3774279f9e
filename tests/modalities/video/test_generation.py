"""Tests of video generation: what may depend on what, windows, prompts and bad input."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from tessera.api.generator import Generator
from tessera.modalities.video.generation import VideoPrompt
from tessera.modalities.video.media import Video
from tessera.modalities.video.recipes import videos_magvit2, videos_maskgit
from tessera.modalities.video.synthetic import SyntheticVideos, draw_video
from tessera.objectives.generation import GenerationRequest, TokenPrompt
from tessera.run.config import Run
from tessera.run.errors import UserError
from tests.networks import perturb_weights
from tests.runs import train, train_once

FRAMES = 9
"""Of the generator; its tokenizer was trained on 5."""


def build_run(**choices: str) -> Run:
    tokenizer = train_once("videos-magvit2", videos_magvit2("tiny"))
    run = videos_maskgit("tiny", tokenizer=tokenizer, **choices)
    engine = dataclasses.replace(run.engine, steps=1, sample_count=1)
    data = dataclasses.replace(run.data, frames=FRAMES)
    return dataclasses.replace(run, engine=engine, data=data)


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    folder = tmp_path_factory.mktemp("runs") / "generator"
    train(folder, build_run())
    loaded = Generator.load(folder)
    perturb_weights(loaded.task.model)
    return loaded


@pytest.fixture(scope="module")
def unconditional(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    folder = tmp_path_factory.mktemp("runs") / "unconditional"
    train(folder, build_run(text="none"))
    return Generator.load(folder)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a clip of 13 frames, images and masks."""
    folder = tmp_path_factory.mktemp("files")
    scene = SyntheticVideos(1, size=32, frames=13).scene(0)
    video = draw_video(scene, 32, 13)
    video.save(folder / "clip.mp4")
    Video(video.frames[:5], 12.0).save(folder / "short.mp4")
    PIL.Image.fromarray(video.frames[0]).save(folder / "first.png")
    PIL.Image.fromarray(video.frames[-1]).save(folder / "last.png")
    PIL.Image.fromarray(np.zeros((8, 12, 3), np.uint8)).save(folder / "small.png")
    mask = np.zeros((32, 32), np.uint8)
    mask[8:20, 8:20] = 255
    PIL.Image.fromarray(mask).save(folder / "mask.png")
    PIL.Image.fromarray(mask[:16]).save(folder / "half.png")
    PIL.Image.fromarray(mask * 0).save(folder / "black.png")
    return folder


def make_prompt(generator: Generator, **inputs: object) -> VideoPrompt:
    prompt = generator.encode_prompt(**inputs)
    assert isinstance(prompt, VideoPrompt)
    return prompt


# ---- leakage and causality


def test_logits_of_later_frames_do_not_depend_on_their_tokens(generator: Generator) -> None:
    """The prediction task, with the masks of the objective: later tokens never reach the input."""
    task = generator.task
    shape = (1, *task.layout.grid)
    codes = torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(0))
    changed = codes.clone()
    changed[:, 1:] = (changed[:, 1:] + 1) % 64
    logits = []
    for one in (codes, changed):
        tokens = task.layout.patchify(one)
        masked = task.layout.patchify(torch.ones_like(one, dtype=torch.bool)).clone()
        masked[:, : masked.shape[1] // task.layout.grid[0]] = False
        inputs = tokens.masked_fill(masked, task.network.mask_token_id)
        condition = task.network.condition(["a red circle"], [False])
        with torch.no_grad():
            logits.append(task.network.logits_at(inputs, masked, condition))
    assert torch.equal(*logits)
    assert logits[0].std(0).max() > 0.01  # and they are no constants


def test_training_loss_depends_on_masked_tokens_as_targets_only(generator: Generator) -> None:
    """The gradient of the loss through the input of a masked token is zero."""
    task = generator.task
    codes = torch.randint(0, 64, (1, *task.layout.grid))
    tokens = task.layout.patchify(codes)[0]
    for seed in range(8):
        draws = [torch.Generator().manual_seed(seed) for _ in range(2)]
        one = task.draw_mask(len(tokens), draws[0]).apply(tokens, 64)
        other = torch.where(one.loss_mask, (tokens + 1) % 64, tokens)
        assert torch.equal(
            one.input_ids, task.draw_mask(len(other), draws[1]).apply(other, 64).input_ids
        )


@pytest.mark.parametrize("count", [1, 4, 5])
def test_codes_of_given_frames_depend_on_no_later_frame(
    generator: Generator, files: Path, tmp_path: Path, count: int
) -> None:
    clip = Video.load(files / "clip.mp4")
    changed = clip.frames.copy()
    changed[count:] = 255 - changed[count:]
    prompts = []
    for name, frames in (("one", clip.frames), ("other", changed)):
        folder = tmp_path / name  # PNG files, since MP4 is lossy
        folder.mkdir()
        for number, frame in enumerate(frames):
            PIL.Image.fromarray(frame).save(folder / f"{number:03d}.png")
        data = dataclasses.replace(generator.data, folders="videos")
        video = data.read_beginning(str(folder), count)
        assert len(video.frames) == count
        prompts.append(video.frames)
    assert np.array_equal(*prompts)
    prompt = make_prompt(generator, data=str(files / "clip.mp4"), frames_given=count)
    given = ~prompt.mask[0].flatten(1).any(1)
    assert given.tolist() == [True] + [count > 1] + [False]
    assert prompt.skip_frames == -(count - 1) % 4


def test_given_frames_are_those_of_the_clip(generator: Generator, files: Path) -> None:
    """Four frames fill latent frames 0 and 1 after the first one is repeated."""
    path = str(files / "clip.mp4")
    prompt = make_prompt(generator, data=path, frames_given=4)
    clip = generator.data.read_beginning(path, 4)
    frames = np.concatenate([clip.frames[:1], clip.frames])
    codec = generator.tokenizers["tokenizer"]
    expected = codec.encode(torch.from_numpy(Video(frames, 1.0).to_floats())[None])
    assert torch.equal(prompt.codes[:, :2], expected)
    assert prompt.num_frames == FRAMES - 1


# ---- generation


def test_given_codes_are_kept_and_others_generated(generator: Generator, files: Path) -> None:
    prompt = make_prompt(generator, data=str(files / "clip.mp4"), frames_given=5)
    request = GenerationRequest(prompts=["", ""], seeds=[1, 2], start=prompt)
    codes = generator.task.generate(request)
    assert torch.equal(codes[:, :2], prompt.codes[:, :2].expand(2, -1, -1, -1))
    assert not torch.equal(codes[0, 2], codes[1, 2])


@pytest.mark.parametrize("frames", [1, 9, 10, 33])
def test_videos_have_the_requested_number_of_frames(generator: Generator, frames: int) -> None:
    made = generator.generate(["a red circle moving left"], count=2, frames=frames)
    assert [len(video.frames) for video in made.media] == [frames, frames]


def test_a_longer_video_begins_with_the_shorter_one(generator: Generator) -> None:
    short, long = (
        generator.generate("a red circle", frames=frames, seed=4).codes[0] for frames in (17, 33)
    )
    assert short.shape == (5, 8, 8) and long.shape == (9, 8, 8)
    assert torch.equal(long[:5], short)
    assert not torch.equal(long[5:8], long[2:5])


def test_windows_continue_the_frames_before_them(generator: Generator) -> None:
    """Each window after the first is given the end of the one before."""
    starts = []
    task = generator.task
    generate = type(task).__mro__[1].generate

    def record(self: object, request: GenerationRequest) -> torch.Tensor:
        starts.append(request.start)
        return generate(self, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(task).__mro__[1], "generate", record)
        made = generator.generate("a red circle", frames=17, seed=4)
    assert len(starts) == 3 and all(isinstance(one, TokenPrompt) for one in starts)
    assert starts[0].mask.all()
    codec = generator.tokenizers["tokenizer"]
    window = made.codes[0][None, :3]
    context = codec.encode(codec.decode(window)[:, :, -5:])
    assert torch.equal(starts[1].codes[:, :2], context)
    assert not starts[1].mask[:, :2].any() and starts[1].mask[:, 2:].all()


def test_samples_do_not_depend_on_the_batch(generator: Generator) -> None:
    prompts = ["a red circle", "a blue square", ""]
    together = generator.generate(prompts, frames=17, seed=2).codes
    request = generator.build_request(prompts=prompts, count=1, seed=2, inputs={"frames": 17})
    alone = generator.run(request.slice(1, 2)).codes[0]
    assert torch.equal(together[1], alone)


def test_progress_is_reported_over_all_windows(generator: Generator) -> None:
    steps: list[tuple[int, int]] = []
    request = dataclasses.replace(
        generator.build_request(prompts=["a red circle"], count=1, inputs={"frames": 17}),
        on_step=lambda step, total, codes: steps.append((step, total)),
    )
    generator.task.generate(request)
    assert steps == [(step, 12) for step in range(1, 13)]


def test_first_frame_last_frame_and_mask(generator: Generator, files: Path) -> None:
    first, last = str(files / "first.png"), str(files / "last.png")
    start = make_prompt(generator, first_frame=first)
    assert start.mask[0].flatten(1).all(1).tolist() == [False, True, True]
    between = make_prompt(generator, first_frame=first, last_frame=last)
    assert between.mask[0].flatten(1).all(1).tolist() == [False, True, False]
    assert torch.equal(between.codes[:, 0], start.codes[:, 0])
    painted = make_prompt(generator, data=str(files / "clip.mp4"), mask=str(files / "mask.png"))
    assert painted.mask[0, :, 2:5, 2:5].all()
    assert painted.mask.sum() == 3 * 9  # 12 of 32 pixels become 6 of 16, in cells of 2 x 2
    made = generator.generate(
        "a red circle", data=str(files / "clip.mp4"), mask=str(files / "mask.png"), count=2
    )
    assert all(len(video.frames) == FRAMES for video in made.media)
    assert made.media[0].rate_hz == 12
    outside = ~painted.mask[0]
    assert torch.equal(made.codes[0][outside], painted.codes[0][outside])


def test_a_mask_that_changes_over_time_covers_its_latent_frames(
    generator: Generator, files: Path, tmp_path: Path
) -> None:
    masks = np.zeros((13, 32, 32, 3), np.uint8)
    masks[6, :16] = 255
    Video(masks, 12.0).save(tmp_path / "mask.mp4")
    painted = make_prompt(generator, data=str(files / "clip.mp4"), mask=str(tmp_path / "mask.mp4"))
    assert painted.mask[0].flatten(1).any(1).tolist() == [False, False, True]
    assert painted.mask[0, 2, :4].all() and not painted.mask[0, 2, 4:].any()


# ---- bad input


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"first_frame": "small.png"}, "is 12 x 8, but this model has frames of 16 x 16"),
        ({"first_frame": "missing.png"}, "missing.png"),
        ({"last_frame": "last.png"}, "--last-frame needs the first one too"),
        ({"frames_given": 3}, "--frames-given needs a video"),
        ({"frames_given": 0, "data": "clip.mp4"}, "--frames-given must be at least 1, got 0"),
        (
            {"frames_given": 20, "data": "clip.mp4", "frames": 40},
            "has 13 frames at 12 per second, fewer than --frames-given 20",
        ),
        ({"frames_given": 9, "data": "clip.mp4", "frames": 5}, "nothing to generate"),
        ({"frames": 0}, "--frames must be at least 1, got 0"),
        ({"mask": "mask.png"}, "--mask needs a video"),
        ({"mask": "half.png", "data": "clip.mp4"}, "is 32 x 16, but the video is 32 x 32"),
        ({"mask": "black.png", "data": "clip.mp4"}, "has no white pixel"),
        ({"mask": "short.mp4", "data": "clip.mp4"}, "has 5 frames, but 9 are generated"),
        ({"mask": "mask.png", "data": "short.mp4"}, "has 5 frames at 12 per second, but this"),
        ({"mask": "mask.png", "data": "clip.mp4", "frames": 9}, "cannot be combined"),
        ({"first_frame": "first.png", "last_frame": "last.png", "frames": 30}, "of 9 frames"),
        ({"like": "clip.mp4"}, "This run does not support --like"),
        ({"temprature": 0.5}, "keyword 'temprature': did you mean 'temperature'?"),
        ({"frames_givn": 4}, "keyword 'frames_givn': did you mean 'frames_given'?"),
    ],
)
def test_invalid_inputs_are_errors_with_a_remedy(
    generator: Generator, files: Path, inputs: dict[str, object], message: str
) -> None:
    paths = {
        name: str(files / value) if isinstance(value, str) else value
        for name, value in inputs.items()
    }
    with pytest.raises(UserError, match=message):
        generator.encode_prompt(**paths)


def test_a_prompt_for_a_model_without_text_is_an_error(unconditional: Generator) -> None:
    with pytest.raises(UserError, match="supports no prompt"):
        unconditional.generate("a red circle")
    assert len(unconditional.generate(count=2).media) == 2
