"""The tokenizer objective for videos: repeated frames have no influence, every discriminator
contributes, and metrics have the meaning of their names.

The examples are synthetic videos of 9 frames, of which some are valid; the last valid frame is
repeated after it, as in every dataset of videos. A video of length 1 is an image.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tessera.engine.modes import eval_mode, hash_seed
from tessera.engine.task import Batch
from tessera.losses.adversarial import gradient_penalty
from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
from tessera.modalities.image.perceptual import PerceptualConfig
from tessera.modalities.video.discriminator import TemporalDiscriminatorConfig
from tessera.modalities.video.magvit2 import VideoTokenizerConfig
from tessera.modalities.video.media import VideoExample, collate
from tessera.modalities.video.reconstruction import (
    VideoAdversaryConfig,
    VideoReconstructionConfig,
    VideoReconstructionLoss,
    VideoTokenizerTaskConfig,
    select_random_frame,
)
from tessera.modalities.video.synthetic import SyntheticVideos
from tessera.nn.quantize import FSQConfig
from tessera.objectives.reconstruction import TokenizerTask
from tests.runs import engine_in, tiny

FRAMES, SIZE = 9, 16
MODEL = VideoTokenizerConfig(
    dim=8,
    max_channels=16,
    layers=("compress_space", "compress_time", "compress_time", "residual"),
    input_kernel=3,
    quantizer=FSQConfig(levels=(4, 4, 4)),
)
FRAME_ONLY = VideoAdversaryConfig(frames=PatchDiscriminatorConfig(dim=8, layers=2), motion=None)
ALL = replace(FRAME_ONLY, motion=TemporalDiscriminatorConfig(dim=8, layers=2), motion_weight=0.5)
MOTION_ONLY = replace(ALL, frames=None)
ONE_MOTION = replace(MOTION_ONLY, rates=(2,))


class FakePerceptualNetwork(nn.Module):
    """Stand-in for a pretrained network, with one layer of features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def features(self, images: Tensor) -> list[Tensor]:
        return [self.conv(images)]


@pytest.fixture(autouse=True)
def fake_perceptual_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PerceptualConfig, "build", lambda config: FakePerceptualNetwork())


def build_task(adversary: VideoAdversaryConfig | None = None, **choices: Any) -> TokenizerTask:
    """Build a task in double precision."""
    reconstruction = VideoReconstructionConfig(
        chroma_weight=0.5, motion_weight=2.0, perceptual=PerceptualConfig(weight=0.1)
    )
    fields = {"model": MODEL, "reconstruction": reconstruction, "adversary": adversary, **choices}
    return VideoTokenizerTaskConfig(**fields).build().double()


def build_batch(*lengths: int, first: int = 0, frames: int = FRAMES) -> Batch[Any]:
    """Return synthetic examples of which the given numbers of frames are valid."""
    dataset = SyntheticVideos(count=first + len(lengths), size=SIZE, frames=FRAMES, seed=3)
    examples = []
    for i, length in enumerate(lengths, start=first):
        whole = dataset.item(i, np.random.default_rng(0))
        padded = whole.video[:, np.minimum(np.arange(frames), length - 1)].astype(np.float64)
        examples.append(VideoExample(padded, length, 4.0 + i, whole.caption))
    indices = range(first, first + len(lengths))
    return Batch(collate(examples), [str(i) for i in indices], [hash_seed(7, i) for i in indices])


def with_random_padding(batch: Batch[Any]) -> Batch[Any]:
    videos = batch.examples.videos.clone()
    for video, length in zip(videos, batch.examples.lengths.tolist(), strict=True):
        video[:, length:] = torch.rand_like(video[:, length:]) * 2 - 1
    return Batch(replace(batch.examples, videos=videos), batch.names, batch.seeds)


# ---- padding


@pytest.mark.parametrize("adversary", [None, FRAME_ONLY], ids=["no adversary", "adversary"])
def test_padding_does_not_change_any_loss(adversary: VideoAdversaryConfig | None) -> None:
    """With lengths of 1, 5 and 9 all frames of a token are valid, and the model is causal."""
    task, batch = build_task(adversary), build_batch(1, 5, 9)
    other = with_random_padding(batch)
    assert not torch.equal(batch.examples.videos, other.examples.videos)
    for update in task.updates:
        terms, others = update.loss(batch, 0).terms, update.loss(other, 0).terms
        assert terms.keys() == others.keys()
        for name, term in terms.items():
            torch.testing.assert_close(
                others[name], term, rtol=1e-10, atol=1e-12, msg=f"{update.name}: {name}"
            )


def test_padding_does_not_change_any_metric() -> None:
    """Neither padding of originals nor of reconstructions, for lengths within a token too."""
    reconstruction, batch = build_task().reconstruction, build_batch(1, 2, 6, 9)
    other = with_random_padding(batch)
    output = torch.rand_like(batch.examples.videos) * 2 - 1
    outputs = replace(batch, examples=replace(batch.examples, videos=output))
    other_output = with_random_padding(outputs).examples.videos
    assert not torch.equal(output, other_output)
    sums = reconstruction.eval_step(output, batch)
    again = reconstruction.eval_step(other_output, other)
    colour = {"real/chroma", "reconstruction/chroma", "chroma_error"}
    names = {"pixel", "psnr", "ssim", "videos", "motion", "pixels"}
    assert sums.keys() == again.keys() == names | colour
    for name, value in sums.items():
        torch.testing.assert_close(again[name], value, msg=name)
    terms, others = reconstruction.losses(output, batch), reconstruction.losses(other_output, other)
    assert terms == others and terms.keys() == {"pixel", "chroma", "motion", "perceptual"}


def test_colour_and_motion_losses_measure_only_those() -> None:
    config = VideoReconstructionConfig(chroma_weight=0.5, motion_weight=2.0)
    loss, batch = config.build(), build_batch(9, 5)
    target = batch.examples.videos
    lighter = loss.losses(target + 0.1, batch)  # the same in all channels and frames
    assert lighter["pixel"] == pytest.approx(0.01)
    assert lighter["chroma"] == pytest.approx(0, abs=1e-12)
    assert lighter["motion"] == pytest.approx(0, abs=1e-12)
    redder = loss.losses(target + torch.tensor([0.1, 0, 0]).view(3, 1, 1, 1), batch)
    assert redder["chroma"] > 5e-4 and redder["motion"] == pytest.approx(0, abs=1e-12)
    flicker = loss.losses(target + 0.1 * (torch.arange(9) % 2).view(9, 1, 1), batch)
    assert flicker["motion"] == pytest.approx(2 * 0.01)
    assert config.build().losses(target[:, :, :1], build_batch(1, 1, frames=1)).keys() == {
        "pixel",
        "chroma",
    }


def test_chroma_loss_is_squared_whatever_the_pixel_loss() -> None:
    batch = build_batch(9, 5)
    redder = batch.examples.videos + torch.tensor([0.1, 0, 0]).view(3, 1, 1, 1)
    losses = {
        pixel: VideoReconstructionConfig(pixel=pixel, chroma_weight=2.0).build()
        for pixel in ("l1", "l2")
    }
    terms = {pixel: float(loss.losses(redder, batch)["chroma"]) for pixel, loss in losses.items()}
    blue_and_red = ((0.0299 / 1.772) ** 2 + 0.05**2) / 2
    assert terms["l1"] == terms["l2"] == pytest.approx(2 * blue_and_red, rel=1e-3)


def test_chroma_is_that_of_reconstructions_relative_to_originals() -> None:
    task, batch = build_task(), build_batch(9, 5)
    target = batch.examples.videos
    grey = target.mean(1, keepdim=True).expand_as(target)
    half = compute_metrics(task, (target + grey) / 2, batch)
    assert half["chroma"] == pytest.approx(0.5, rel=1e-4)
    assert half["chroma_error"] == pytest.approx(0.5, rel=1e-4)
    grey_batch = replace(batch, examples=replace(batch.examples, videos=grey))
    assert "chroma" not in compute_metrics(task, grey, grey_batch)


def test_image_has_the_loss_of_the_first_frame_of_its_video() -> None:
    """In a batch of videos or alone."""
    task = build_task(reconstruction=VideoReconstructionConfig())
    padded, alone, video = build_batch(1), build_batch(1, frames=1), build_batch(9)
    assert padded.examples.videos.shape[2] == 9 and alone.examples.videos.shape[2] == 1
    expected = task.reconstruction_loss(alone, 0).terms["pixel"]
    torch.testing.assert_close(task.reconstruction_loss(padded, 0).terms["pixel"], expected)
    target = video.examples.videos
    assert isinstance(task.reconstruction, VideoReconstructionLoss)
    loss_BT = task.reconstruction.pixel_loss_BT(task.model(target).output, target)
    torch.testing.assert_close(loss_BT[0, 0], expected)


def test_all_videos_count_equally_so_micro_batches_are_one_batch() -> None:
    task = build_task(FRAME_ONLY)
    whole, parts = build_batch(9, 1, 5, 9), [build_batch(9, 1), build_batch(5, 9, first=2)]
    assert torch.equal(whole.examples.videos, torch.cat([part.examples.videos for part in parts]))
    for update in task.updates:
        terms = update.loss(whole, 0).terms
        halves = [update.loss(part, 0).terms for part in parts]
        for name, term in terms.items():
            expected = torch.stack([half[name] for half in halves]).mean()
            torch.testing.assert_close(expected, term, msg=f"{update.name}: {name}")


# ---- the random frame


def frame_numbers(batch: Batch[Any]) -> Tensor:
    """Return videos in which every pixel is the number of its frame."""
    numbers = torch.arange(FRAMES, dtype=torch.float64).view(1, 1, FRAMES, 1, 1)
    return numbers.expand_as(batch.examples.videos)


def selected_frames(batch: Batch[Any]) -> Tensor:
    return select_random_frame(frame_numbers(batch), batch)[:, 0, 0, 0].long()


def test_every_valid_frame_is_selected_and_no_other() -> None:
    lengths = [1, 4, 9] * 60
    examples = build_batch(1, 4, 9).examples
    videos = examples.videos.repeat(60, 1, 1, 1, 1)
    examples = replace(examples, videos=videos, lengths=torch.tensor(lengths))
    batch: Batch[Any] = Batch(examples, [""] * 180, [hash_seed(1, i) for i in range(180)])
    selected = selected_frames(batch).tolist()
    for length in (1, 4, 9):
        frames = {frame for frame, one in zip(selected, lengths, strict=True) if one == length}
        assert frames == set(range(length))


def test_same_frame_of_original_and_reconstruction_is_selected() -> None:
    """In another step it is another frame."""
    batch = build_batch(9, 9, 9, 9, 9, 9)
    frames = selected_frames(batch)
    assert len(set(frames.tolist())) > 1, "each video has its own"
    videos = batch.examples.videos
    originals = torch.stack([video[:, t] for video, t in zip(videos, frames, strict=True)])
    assert torch.equal(select_random_frame(videos, batch), originals)
    assert torch.equal(select_random_frame(videos + 1, batch), originals + 1)
    later = replace(batch, seeds=[hash_seed(8, seed) for seed in batch.seeds])
    assert not torch.equal(selected_frames(later), frames)


def test_selected_frame_does_not_depend_on_the_batch() -> None:
    together, alone = build_batch(9, 9, 9), build_batch(9, first=2)
    frames = [select_random_frame(batch.examples.videos, batch) for batch in (together, alone)]
    assert torch.equal(frames[0][2:], frames[1])


# ---- discriminators


def test_adversarial_term_is_the_weighted_sum_over_discriminators() -> None:
    task, batch = build_task(ALL), build_batch(9, 5, 1)
    assert list(task.discriminators) == ["discriminator", "motion-1", "motion-2"]
    output = task.model(batch.examples.videos).output
    views = {
        "discriminator": select_random_frame(output, batch),
        "motion-1": output,
        "motion-2": output[:, :, ::2],
    }
    weights = {"discriminator": 1.0, "motion-1": 0.5, "motion-2": 0.5}
    expected = {
        name: -weights[name] * task.get_submodule(name)(view).mean() for name, view in views.items()
    }
    term = task.reconstruction_loss(batch, 0).terms["adversarial"]
    torch.testing.assert_close(term, ALL.weight * torch.stack(list(expected.values())).sum())
    for name, value in expected.items():
        assert abs(value) > 1e-4
        network: Any = task.get_submodule(name)
        for parameter in network.logit.parameters():
            nn.init.zeros_(parameter)  # all logits of this one are zero from here on
        term = term - ALL.weight * value
        torch.testing.assert_close(task.reconstruction_loss(batch, 0).terms["adversarial"], term)
    assert term.abs() < 1e-12


def test_every_discriminator_contributes_to_the_gradient_of_the_model() -> None:
    task, batch = build_task(ALL), build_batch(9, 9)

    def gradient() -> Tensor:
        term = task.reconstruction_loss(batch, 0).terms["adversarial"]
        return torch.autograd.grad(term, task.model.last_layer)[0]

    before = gradient()
    for name in task.discriminators:
        network: Any = task.get_submodule(name)
        with torch.no_grad():
            network.logit.weight.neg_()
        after = gradient()
        assert not torch.allclose(after, before), name
        before = after


@pytest.mark.parametrize(
    "adversary",
    [None, FRAME_ONLY, MOTION_ONLY, ONE_MOTION, ALL],
    ids=["none", "frames", "motion", "one motion", "all"],
)
def test_each_update_has_gradients_for_its_whole_network(
    adversary: VideoAdversaryConfig | None,
) -> None:
    task, batch = build_task(adversary), build_batch(9, 9)
    assert [update.name for update in task.updates] == ["model", *task.discriminators]
    for update in task.updates:
        task.zero_grad()
        update.loss(batch, 0).total().backward()
        assert [name for name, p in update.trains.named_parameters() if p.grad is None] == []
        named = task.named_parameters()
        parts = {name.split(".")[0] for name, parameter in named if parameter.grad is not None}
        assert update.name == "model" or parts == {update.name}, (
            "the loss of a discriminator has no gradients for other networks"
        )


def test_discriminators_are_not_called_before_the_start_step() -> None:
    task, batch = build_task(replace(ALL, start_step=3)), build_batch(9)
    called: list[str] = []
    for name, discriminator in task.discriminators.items():

        def record(
            videos: Tensor, name: str = name, method: Any = discriminator.network.discriminate
        ) -> Any:
            called.append(name)
            return method(videos)

        discriminator.network.discriminate = record
    assert "adversarial" not in task.reconstruction_loss(batch, 2).terms and called == []
    assert "adversarial" in task.reconstruction_loss(batch, 3).terms
    assert called == list(task.discriminators)


def test_each_discriminator_takes_one_step_along_its_own_gradient(tmp_path: Path) -> None:
    run: Any = tiny("videos-magvit2 adversarial", steps=6)
    adversary = replace(run.task.adversary, start_step=0)
    optimizer_config = adversary.optimizer
    engine = engine_in(tmp_path, replace(run, task=replace(run.task, adversary=adversary)))
    steps: dict[str, list[tuple[float, dict[str, Tensor]]]] = {name: [] for name in engine.updates}

    def record_steps(name: str) -> None:
        state = engine.updates[name]

        def record(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            gradients = {}
            for key, value in state.update.trains.named_parameters():
                assert value.grad is not None, key
                gradients[key] = value.grad.clone()
            steps[name].append((optimizer.param_groups[0]["lr"], gradients))

        state.optimizer.register_step_pre_hook(record)

    for name in engine.updates:
        record_steps(name)
    micro_batches = next(iter(engine.load_batches()))
    initial = {name: value.clone() for name, value in engine.task.state_dict().items()}
    engine.run_step(4, micro_batches)
    assert list(steps) == ["model", "discriminator", "motion-1", "motion-2"]
    assert {name: len(recorded) for name, recorded in steps.items()} == dict.fromkeys(steps, 1)
    engine.task.load_state_dict(initial)
    for name in ("discriminator", "motion-1", "motion-2"):
        [(lr, gradients)] = steps[name]
        assert lr == pytest.approx(optimizer_config.lr_at(4, 6))
        engine.task.zero_grad()
        update = engine.updates[name].update
        for batch in micro_batches:  # which still hold the reconstructions of the step
            (update.loss(batch, 4).total() / len(micro_batches)).backward()
        expected = {key: value.grad for key, value in update.trains.named_parameters()}
        norm = torch.stack([grad.norm() for grad in expected.values() if grad is not None]).norm()
        clip = min(1.0, optimizer_config.max_grad_norm / (float(norm) + 1e-6))
        for key, gradient in gradients.items():
            torch.testing.assert_close(
                gradient, expected[key] * clip, rtol=1e-3, atol=1e-6, msg=f"{name}: {key}"
            )


def test_invalid_discriminators_are_errors() -> None:
    no_discriminators: list[dict[str, Any]] = [
        {"frames": None, "motion": None},
        {"frames": None, "rates": ()},
    ]
    for fields in no_discriminators:
        with pytest.raises(ValueError, match="This adversary has no discriminator"):
            VideoAdversaryConfig(**fields)
    for rates in ((0, 1), (2, 2)):
        with pytest.raises(ValueError, match="rates must be different integers of at least 1"):
            VideoAdversaryConfig(rates=rates)


# ---- metrics


def compute_metrics(task: TokenizerTask, output: Tensor, batch: Batch[Any]) -> dict[str, float]:
    """Return the metrics of an output that a test has made."""
    totals = {"examples": torch.tensor(len(batch)), "codes": torch.ones(64, dtype=torch.long)}
    return task.reconstruction.compute_metrics(
        totals | task.reconstruction.eval_step(output, batch)
    )


def test_flicker_lowers_the_frame_difference_psnr_only() -> None:
    task, batch = build_task(), build_batch(9, 9)
    target = batch.examples.videos * 0.8  # so that nothing is clamped
    batch = replace(batch, examples=replace(batch.examples, videos=target))
    sign_T = torch.tensor([1.0, -1.0] * 5, dtype=torch.float64)[:FRAMES].view(1, 1, FRAMES, 1, 1)
    constant, flickering = (
        compute_metrics(task, target + 0.05 * sign, batch)
        for sign in (torch.ones_like(sign_T), sign_T)
    )
    assert constant["psnr"] == pytest.approx(flickering["psnr"])
    assert flickering["psnr"] == pytest.approx(10 * np.log10(4 / 0.05**2))
    assert constant["frame_difference_psnr"] == 100
    assert flickering["frame_difference_psnr"] == pytest.approx(10 * np.log10(4 / 0.1**2), abs=0.5)


def test_frame_difference_psnr_excludes_images() -> None:
    task, video, mixed = build_task(), build_batch(9), build_batch(9, 1, 1)
    noise = 0.1 * torch.randn_like(mixed.examples.videos)
    alone = compute_metrics(task, video.examples.videos + noise[:1], video)
    together = compute_metrics(task, mixed.examples.videos + noise, mixed)
    assert together["frame_difference_psnr"] == pytest.approx(alone["frame_difference_psnr"])
    for frames in (1, 9):
        images = build_batch(1, 1, frames=frames)
        assert "frame_difference_psnr" not in compute_metrics(task, images.examples.videos, images)


def test_bits_per_pixel_are_those_of_the_codes() -> None:
    """3 x 8 x 8 codes of 6 bits for 9 frames of 16 x 16 pixels; over any batches."""
    task = build_task()
    with eval_mode(task):
        sums = [task.eval_step(build_batch(9, 9)), task.eval_step(build_batch(9, first=2))]
    metrics = task.compute_metrics({name: sums[0][name] + sums[1][name] for name in sums[0]})
    assert metrics["bits_per_pixel"] == pytest.approx(3 * 8 * 8 * 6 / (9 * 16 * 16))
    assert metrics.keys() == {
        "psnr",
        "ssim",
        "pixel",
        "chroma",
        "chroma_error",
        "frame_difference_psnr",
        "bits_per_pixel",
        "codebook_usage",
        "codebook_perplexity",
    }


# ---- samples


def read_frames(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_saved_pairs_have_the_valid_frames_and_colours(tmp_path: Path) -> None:
    task, batch = build_task(), build_batch(9, 4, 1)
    videos = batch.examples.videos
    pairs = task.adapter.show_pairs(videos.flip(1), batch)  # red and blue are exchanged
    for pair, length, video in zip(pairs, (9, 4, 1), videos, strict=True):
        path = pair.save(tmp_path / f"{length}")
        assert path.suffix == ".mp4"
        saved, animation = read_frames(path), read_frames(tmp_path / f"{length}.gif")
        assert len(saved) == len(animation) == length
        expected = ((video[:, :length].permute(1, 2, 3, 0).numpy() + 1) * 127.5).clip(0, 255)
        colour = expected.mean((0, 1, 2))
        for frames in (saved, animation):
            left, right = frames[:, :SIZE, :SIZE], frames[:, :SIZE, -SIZE:]
            assert abs(left.mean((0, 1, 2)) - colour).max() < 12
            assert abs(right.mean((0, 1, 2)) - colour[::-1]).max() < 12
        assert expected.mean() > 25, "the original is not black"


def test_samples_are_videos_beside_reconstructions_at_their_frame_rates() -> None:
    task, batch = build_task(), build_batch(9, 1)
    with eval_mode(task):
        samples = task.sample(batch)
    assert [len(sample.frames) for sample in samples] == [9, 1]
    assert [sample.rate_hz for sample in samples] == batch.examples.rates_hz == [4.0, 5.0]
    assert all(sample.frames.shape[2] > 2 * SIZE for sample in samples)


def test_the_gradient_penalty_can_include_reconstructions() -> None:
    penalties = {}
    for where in ("real", "both"):
        torch.manual_seed(0)
        task = build_task(replace(FRAME_ONLY, gp_on=where))
        batch = build_batch(5, 9)
        model, discriminator = task.updates
        model.loss(batch, 0)
        penalties[where] = discriminator.loss(batch, 0).terms["gradient_penalty"]
        network = task.discriminators["discriminator"]
        view = network.view(batch.scratch["reconstruction"], batch)
        fake = gradient_penalty(network.network, view)
    factor = FRAME_ONLY.gp_weight * FRAME_ONLY.gp_every
    expected = penalties["real"] + factor * fake
    torch.testing.assert_close(penalties["both"], expected)
