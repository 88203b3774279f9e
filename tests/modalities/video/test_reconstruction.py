"""The tokenizer task on clips: what is padding stays out, every judge has its say, and the measures
are what they are called.

B clips of T frames. Examples here are toys of 9 frames; clips with a `length` of 1 are pictures,
and what comes after the real frames is the last of them repeated, as every source of clips has it.
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
from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
from tessera.modalities.image.perceptual import PerceptualConfig
from tessera.modalities.video.discriminator import TemporalDiscriminatorConfig
from tessera.modalities.video.magvit2 import VideoTokenizerConfig
from tessera.modalities.video.media import VideoExample, collate
from tessera.modalities.video.reconstruction import (
    VideoAdversaryConfig,
    VideoReconstructionConfig,
    VideoTokenizerTaskConfig,
    drawn_frame,
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
IMAGE_SUFFIXES = VideoAdversaryConfig(frames=PatchDiscriminatorConfig(dim=8, layers=2), motion=None)
ALL = replace(IMAGE_SUFFIXES, motion=TemporalDiscriminatorConfig(dim=8, layers=2), motion_weight=0.5)
MOTION = replace(ALL, frames=None)
ONE_MOTION = replace(MOTION, rates=(2,))


class Seer(nn.Module):
    """Stands in for a pretrained network: one depth of features."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Conv2d(3, 4, 3)

    def features(self, pictures: Tensor) -> list[Tensor]:
        return [self.look(pictures)]


@pytest.fixture(autouse=True)
def seer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PerceptualConfig, "build", lambda config: Seer())


def build_task(adversary: VideoAdversaryConfig | None = None, **choices: Any) -> TokenizerTask:
    """In double precision, where equal is equal to many digits."""
    reconstruction = VideoReconstructionConfig(perceptual=PerceptualConfig(weight=0.1))
    return (
        VideoTokenizerTaskConfig(
            **{"model": MODEL, "fidelity": reconstruction, "adversary": adversary, **choices}
        )
        .build()
        .double()
    )


def batch_of(*lengths: int, first: int = 0, frames: int = FRAMES) -> Batch:
    """Toys number `first` and following, of which so many frames are real."""
    num_synthetic = SyntheticVideos(count=first + len(lengths), size=SIZE, frames=FRAMES, seed=3)
    examples = []
    for i, length in enumerate(lengths, start=first):
        whole = num_synthetic.item(i, np.random.default_rng(0))
        padded = whole.video[:, np.minimum(np.arange(frames), length - 1)].astype(np.float64)
        examples.append(VideoExample(padded, length, 4.0 + i, whole.caption))
    numbers = range(first, first + len(lengths))
    return Batch(collate(examples), [str(i) for i in numbers], [hash_seed(7, i) for i in numbers])


def with_other_padding(batch: Batch) -> Batch:
    clips = batch.examples.videos.clone()
    for clip, length in zip(clips, batch.examples.lengths.tolist()):
        clip[:, length:] = torch.rand_like(clip[:, length:]) * 2 - 1
    return Batch(replace(batch.examples, videos=clips), batch.names, batch.seeds)


# ---- what is padding, and what is real


@pytest.mark.parametrize("adversary", [None, IMAGE_SUFFIXES], ids=["alone", "judged"])
def test_frames_after_the_last_real_one_change_no_loss(
    adversary: VideoAdversaryConfig | None,
) -> None:
    """Lengths of 1, 5 and 9 fill whole symbols, so a causal model rebuilds their real frames from
    real ones only."""
    task, batch = build_task(adversary), batch_of(1, 5, 9)
    other = with_other_padding(batch)
    assert not torch.equal(batch.examples.videos, other.examples.videos)
    for update in task.updates:
        terms, others = update.loss(batch, 0).terms, update.loss(other, 0).terms
        assert terms.keys() == others.keys()
        for name, term in terms.items():
            torch.testing.assert_close(
                others[name], term, rtol=1e-10, atol=1e-12, msg=f"{update.name}: {name}"
            )


def test_frames_after_the_last_real_one_change_no_measure() -> None:
    """Whatever stands there in the originals, and whatever the model makes of it; lengths that fill
    no symbol included."""
    reconstruction, batch = build_task().reconstruction, batch_of(1, 2, 6, 9)
    other = with_other_padding(batch)
    output = torch.rand_like(batch.examples.videos) * 2 - 1
    rebuilt = replace(batch, examples=replace(batch.examples, videos=output))
    other_output = with_other_padding(rebuilt).examples.videos
    assert not torch.equal(output, other_output)
    seen, again = (
        reconstruction.batch_stats(output, batch),
        reconstruction.batch_stats(other_output, other),
    )
    assert seen.keys() == again.keys() == {"pixel", "psnr", "ssim", "moving", "motion", "pixels"}
    for name, value in seen.items():
        torch.testing.assert_close(again[name], value, msg=name)
    terms, others = reconstruction.terms(output, batch), reconstruction.terms(other_output, other)
    assert terms == others and terms.keys() == {"pixel", "perceptual"}


def test_a_picture_in_company_costs_what_it_costs_alone_and_what_its_clips_first_frame_costs() -> (
    None
):
    task = build_task(reconstruction=VideoReconstructionConfig())
    [among_clips, alone, clip] = [batch_of(1), batch_of(1, frames=1), batch_of(9)]
    assert among_clips.examples.videos.shape[2] == 9 and alone.examples.videos.shape[2] == 1
    cost = task.reconstruction_loss(alone, 0).terms["pixel"]
    torch.testing.assert_close(task.reconstruction_loss(among_clips, 0).terms["pixel"], cost)
    target = clip.examples.videos
    torch.testing.assert_close(
        task.reconstruction.pixel_BT(task.model(target).output, target)[0, 0], cost
    )


def test_every_clip_counts_the_same_so_micro_batches_of_unequal_lengths_are_one_batch() -> None:
    task = build_task(IMAGE_SUFFIXES)
    whole, parts = batch_of(9, 1, 5, 9), [batch_of(9, 1), batch_of(5, 9, first=2)]
    assert torch.equal(whole.examples.videos, torch.cat([part.examples.videos for part in parts]))
    for update in task.updates:
        terms = update.loss(whole, 0).terms
        halves = [update.loss(part, 0).terms for part in parts]
        for name, term in terms.items():
            torch.testing.assert_close(
                sum(half[name] for half in halves) / 2, term, msg=f"{update.name}: {name}"
            )


# ---- the frame that is drawn


def numbered(batch: Batch) -> Tensor:
    """Clips whose every frame says which one it is."""
    return (
        torch.arange(FRAMES, dtype=torch.float64)
        .view(1, 1, FRAMES, 1, 1)
        .expand_as(batch.examples.videos)
    )


def test_the_drawn_frame_is_real_and_every_real_one_is_drawn() -> None:
    lengths = [1, 4, 9] * 60
    examples = batch_of(1, 4, 9).examples
    clips = examples.videos.repeat(60, 1, 1, 1, 1)
    many = Batch(
        replace(examples, videos=clips, lengths=torch.tensor(lengths)),
        [""] * 180,
        [hash_seed(1, i) for i in range(180)],
    )
    drawn = drawn_frame(numbered(many), many)[:, 0, 0, 0].tolist()
    for length in (1, 4, 9):
        seen = {moment for moment, real in zip(drawn, lengths) if real == length}
        assert seen == set(range(length))


def test_the_drawn_frame_is_the_same_of_original_and_reconstruction_and_another_in_another_step() -> (
    None
):
    batch = batch_of(9, 9, 9, 9, 9, 9)
    moments = drawn_frame(numbered(batch), batch)[:, 0, 0, 0].long()
    assert len(set(moments.tolist())) > 1, "each clip has its own"
    clips = batch.examples.videos
    originals = torch.stack([clip[:, moment] for clip, moment in zip(clips, moments)])
    assert torch.equal(drawn_frame(clips, batch), originals)
    assert torch.equal(drawn_frame(clips + 1, batch), originals + 1)
    later = replace(batch, seeds=[hash_seed(8, seed) for seed in batch.seeds])
    assert not torch.equal(drawn_frame(numbered(later), later)[:, 0, 0, 0].long(), moments)


def test_the_drawn_frame_does_not_depend_on_the_company() -> None:
    train_together, alone = batch_of(9, 9, 9), batch_of(9, first=2)
    assert torch.equal(
        drawn_frame(train_together.examples.videos, train_together)[2:], drawn_frame(alone.examples.videos, alone)
    )


# ---- the judges


def test_the_adversarial_term_is_what_all_judges_say_each_with_its_weight() -> None:
    """Theirs never asked the multiscale discriminators: it made its reconstructions brighter
    instead."""
    task, batch = build_task(ALL), batch_of(9, 5, 1)
    assert list(task.discriminators) == ["discriminator", "motion-1", "motion-2"]
    output = task.model(batch.examples.videos).output
    shown = {
        "discriminator": drawn_frame(output, batch),
        "motion-1": output,
        "motion-2": output[:, :, ::2],
    }
    shares = {
        name: -task.get_submodule(name)(view).mean() * (1.0 if name == "discriminator" else 0.5)
        for name, view in shown.items()
    }
    said = task.reconstruction_loss(batch, 0).terms["adversarial"]
    torch.testing.assert_close(said, ALL.weight * torch.stack(list(shares.values())).sum())
    for name, share in shares.items():
        assert abs(share) > 1e-4
        for parameter in task.get_submodule(name).logit.parameters():
            nn.init.zeros_(parameter)  # silent from here on
        said = said - ALL.weight * share
        torch.testing.assert_close(task.reconstruction_loss(batch, 0).terms["adversarial"], said)
    assert said.abs() < 1e-12


def test_every_judge_is_heard_in_the_models_gradient() -> None:
    task, batch = build_task(ALL), batch_of(9, 9)
    last = task.model.last_layer

    def pull() -> Tensor:
        [gradient] = torch.autograd.grad(
            task.reconstruction_loss(batch, 0).terms["adversarial"], last
        )
        return gradient

    before = pull()
    for name in task.discriminators:
        with torch.no_grad():
            task.get_submodule(name).logit.weight.neg_()
        after = pull()
        assert not torch.allclose(after, before), name
        before = after


@pytest.mark.parametrize(
    "adversary",
    [None, IMAGE_SUFFIXES, MOTION, ONE_MOTION, ALL],
    ids=["none", "frames", "motion", "one", "all"],
)
def test_each_update_gives_all_of_its_own_network_a_gradient_whoever_judges(
    adversary: VideoAdversaryConfig | None,
) -> None:
    task, batch = build_task(adversary), batch_of(9, 9)
    assert [update.name for update in task.updates] == ["model", *task.discriminators]
    for update in task.updates:
        task.zero_grad()
        update.loss(batch, 0).total().backward()
        assert [
            name for name, parameter in update.trains.named_parameters() if parameter.grad is None
        ] == []
        pulled = {
            name.split(".")[0]
            for name, parameter in task.named_parameters()
            if parameter.grad is not None
        }
        assert update.name == "model" or pulled == {update.name}, (
            "what a judge loses pulls at nobody else"
        )


def test_a_judge_that_has_not_started_is_not_asked() -> None:
    """Theirs computed the adversarial terms and weighed them with 0."""
    task, batch = build_task(replace(ALL, starts=3)), batch_of(9)
    asked: list[str] = []
    for name, judge in task.discriminators.items():
        discriminate = judge.network.discriminate
        judge.network.discriminate = lambda clips, name=name, discriminate=discriminate: (
            asked.append(name) or discriminate(clips)
        )
    assert "adversarial" not in task.reconstruction_loss(batch, 2).terms and asked == []
    assert "adversarial" in task.reconstruction_loss(batch, 3).terms and asked == list(
        task.discriminators
    )


def test_each_judge_moves_once_a_step_at_its_rate_by_the_gradient_of_its_own_loss(
    tmp_path: Path,
) -> None:
    """Theirs moved one twice a step, and the others by whatever gradients were left on them."""
    run = tiny("videos-magvit2 judged", steps=6)
    asked = run.task.adversary.optimizer
    engine = engine_in(
        tmp_path,
        replace(run, task=replace(run.task, adversary=replace(run.task.adversary, starts=0))),
    )
    moved: dict[str, list[tuple[float, dict[str, Tensor]]]] = {name: [] for name in engine.prepared}

    def listen(name: str) -> None:
        prepared = engine.prepared[name]

        def hear(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            gradients = {
                key: value.grad.clone() for key, value in prepared.update.trains.named_parameters()
            }
            moved[name].append((optimizer.param_groups[0]["lr"], gradients))

        prepared.optimizer.register_step_pre_hook(hear)

    for name in engine.prepared:
        listen(name)
    micros = next(iter(engine.batches()))
    first = {name: value.clone() for name, value in engine.task.state_dict().items()}
    engine.step(4, micros)
    assert list(moved) == ["model", "discriminator", "motion-1", "motion-2"]
    assert {name: len(steps) for name, steps in moved.items()} == dict.fromkeys(moved, 1)
    rebuilt = [batch.kept["rebuilt"] for batch in micros]
    engine.task.load_state_dict(first)
    for name in ("discriminator", "motion-1", "motion-2"):
        [(rate, gradients)] = moved[name]
        assert rate == pytest.approx(asked.lr_at(4, 6))
        engine.task.zero_grad()
        for batch, output in zip(micros, rebuilt, strict=True):
            batch.kept["rebuilt"] = output
            (engine.prepared[name].update.loss(batch, 4).total() / len(micros)).backward()
        own = dict(engine.prepared[name].update.trains.named_parameters())
        norm = torch.stack([value.grad.norm() for value in own.values()]).norm()
        clipped = min(1.0, asked.clip / (float(norm) + 1e-6))
        for key, gradient in gradients.items():
            torch.testing.assert_close(
                gradient, own[key].grad * clipped, rtol=1e-3, atol=1e-6, msg=f"{name}: {key}"
            )


def test_an_adversary_without_a_judge_or_with_two_of_one_rate_is_refused() -> None:
    for nobody in ({"frames": None, "motion": None}, {"frames": None, "rates": ()}):
        with pytest.raises(ValueError, match="There is no judge"):
            VideoAdversaryConfig(**nobody)
    for rates in ((0, 1), (2, 2)):
        with pytest.raises(ValueError, match="every n-th frame"):
            VideoAdversaryConfig(rates=rates)


# ---- measures


def concluded(task: TokenizerTask, output: Tensor, batch: Batch) -> dict[str, float]:
    """The medium's numbers for an output that a test has made."""
    totals = {"examples": torch.tensor(len(batch)), "codes": torch.ones(64, dtype=torch.long)}
    return task.reconstruction.compute_metrics(
        totals | task.reconstruction.batch_stats(output, batch)
    )


def test_flicker_shows_in_the_differences_of_frames_and_hardly_in_psnr() -> None:
    task, batch = build_task(), batch_of(9, 9)
    target = batch.examples.videos * 0.8  # room on both sides, so that nothing is clamped
    batch = replace(batch, examples=replace(batch.examples, videos=target))
    sign_T = torch.tensor([1.0, -1.0] * 5, dtype=torch.float64)[:FRAMES].view(1, 1, FRAMES, 1, 1)
    pad_for_batch_invariance, flickering = (
        concluded(task, target + 0.05 * sign, batch) for sign in (torch.ones_like(sign_T), sign_T)
    )
    assert pad_for_batch_invariance["psnr"] == pytest.approx(flickering["psnr"])
    assert flickering["psnr"] == pytest.approx(10 * np.log10(4 / 0.05**2))
    assert pad_for_batch_invariance["frame_difference_psnr"] == 100
    assert flickering["frame_difference_psnr"] == pytest.approx(10 * np.log10(4 / 0.1**2), abs=0.5)


def test_pictures_have_no_motion_to_be_measured_and_do_not_water_it_down() -> None:
    task, clips, mixture = build_task(), batch_of(9), batch_of(9, 1, 1)
    noise = 0.1 * torch.randn_like(mixture.examples.videos)
    alone = concluded(task, clips.examples.videos + noise[:1], clips)
    train_together = concluded(task, mixture.examples.videos + noise, mixture)
    assert train_together["frame_difference_psnr"] == pytest.approx(alone["frame_difference_psnr"])
    for frames in (1, 9):
        pictures = batch_of(1, 1, frames=frames)
        assert "frame_difference_psnr" not in concluded(task, pictures.examples.videos, pictures)


def test_bits_per_pixel_are_counted_by_hand() -> None:
    """3 x 8 x 8 symbols of 64, which are 6 bits, for 9 frames of 16 x 16; over any number of
    batches."""
    task = build_task()
    with eval_mode(task):
        seen = [task.batch_stats(batch_of(9, 9)), task.batch_stats(batch_of(9, first=2))]
    numbers = task.compute_metrics({name: seen[0][name] + seen[1][name] for name in seen[0]})
    assert numbers["bits_per_pixel"] == pytest.approx(3 * 8 * 8 * 6 / (9 * 16 * 16))
    assert numbers.keys() == {
        "psnr",
        "ssim",
        "pixel",
        "frame_difference_psnr",
        "bits_per_pixel",
        "usage",
        "perplexity",
    }


# ---- what is shown


def frames_of(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_what_is_shown_opens_with_its_real_frames_and_is_not_black(tmp_path: Path) -> None:
    """Theirs wrote black films."""
    task, batch = build_task(), batch_of(9, 4, 1)
    clips = batch.examples.videos
    shown = task.reconstruction.shown(
        clips.flip(1), batch
    )  # the "reconstruction" has red and blue exchanged
    for video, length, clip in zip(shown, (9, 4, 1), clips):
        written = video.save(tmp_path / f"{length}")
        assert written.suffix == ".mp4"
        film, animation = frames_of(written), frames_of(tmp_path / f"{length}.gif")
        assert len(film) == len(animation) == length
        bright = ((clip[:, :length].permute(1, 2, 3, 0).numpy() + 1) * 127.5).clip(0, 255)
        for frames in (film, animation):
            left, right = frames[:, :SIZE, :SIZE], frames[:, :SIZE, -SIZE:]
            assert abs(left.mean((0, 1, 2)) - bright.mean((0, 1, 2))).max() < 12
            assert abs(right.mean((0, 1, 2)) - bright.mean((0, 1, 2))[::-1]).max() < 12
        assert bright.mean() > 25, "the toy itself is not black"


def test_samples_are_each_clip_beside_its_reconstruction_at_its_own_speed() -> None:
    task, batch = build_task(), batch_of(9, 1)
    with eval_mode(task):
        samples = task.sample(batch)
    assert [len(sample.frames) for sample in samples] == [9, 1]
    assert [sample.rate_hz for sample in samples] == batch.examples.rates_hz == [4.0, 5.0]
    assert all(sample.frames.shape[2] > 2 * SIZE for sample in samples)
