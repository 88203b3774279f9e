"""Masked generation of videos: from text, from given frames, and around or inside a mask.

Latent frame 0 of a clip holds its first frame, and each later one `time_factor` frames. Given
frames therefore fill whole latent frames only if their number is 1 plus a multiple of the time
factor; otherwise the first frame is repeated before them, as the causal tokenizer pads a clip
anyway, and the repetitions are removed from the sample.

Videos that are longer than those of training are generated window by window. The last frames of a
window are decoded, encoded again as the beginning of the next one, and continued. Only one window
at a time is in memory besides the codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from tessera.engine.modes import hash_seed
from tessera.engine.task import Batch, DataSettings, Media
from tessera.modalities.video.dataset import VideoDataConfig
from tessera.modalities.video.io.base import DEFAULT_RATE_HZ
from tessera.modalities.video.magvit2 import VideoTokenizer
from tessera.modalities.video.masking import VideoMaskingConfig
from tessera.modalities.video.media import Video, VideoBatch
from tessera.modalities.video.prediction import (
    MAX_VIDEOS,
    frames_to_give,
    measure_prediction,
    repeat_first,
)
from tessera.objectives.generation import (
    GenerationRequest,
    MediaInputs,
    OnStep,
    PromptEncoder,
    TokenizerProtocol,
    TokenPrompt,
)
from tessera.objectives.masked import MaskedConfig, MaskedTask


class VideoCodec(TokenizerProtocol, Protocol):
    """A tokenizer of videos as tensors (B, 3, T, H, W) in [-1, 1]."""

    @property
    def model(self) -> VideoTokenizer: ...
    def encode(self, media: Tensor) -> Tensor: ...
    def decode(self, codes: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class VideoPrompt(TokenPrompt):
    """Codes that a video starts from, and how its frames are used."""

    skip_frames: int = 0
    """The number of leading frames that are not part of the sample."""
    num_frames: int | None = None
    """The number of frames of the sample after those; None for all."""
    rate_hz: float | None = None
    """The frame rate of the sample; None for that of the training data."""


@dataclass(frozen=True)
class VideoInputs(MediaInputs):
    mask: str | None = None
    first_frame: str | None = None
    last_frame: str | None = None
    frames_given: int | None = None
    frames: int | None = None


@dataclass(frozen=True, kw_only=True)
class VideoGeneratorConfig(MaskedConfig):
    inputs_class: ClassVar[type[MediaInputs]] = VideoInputs

    tokenizer: str = "runs/videos-magvit2"
    """The run of the tokenizer whose tokens are generated; it is copied into the run directory."""
    masking: VideoMaskingConfig = field(default_factory=VideoMaskingConfig)
    overlap: int = 2
    """The number of latent frames of a longer video that each window repeats from the one
    before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap < 1:
            raise ValueError(f"overlap must be at least 1 latent frame, got {self.overlap}.")

    def build(self, **dependencies: TokenizerProtocol) -> VideoGeneratorTask:
        return VideoGeneratorTask(self, **dependencies)

    def encode_prompt(self, inputs: MediaInputs, encoder: PromptEncoder) -> VideoPrompt | None:
        """Return the codes of the given frames, and which codes are generated."""
        assert isinstance(inputs, VideoInputs)
        if inputs == VideoInputs(data=inputs.data):
            return None
        return PromptBuilder(inputs, encoder).build()

    def finish_media(
        self, media: Sequence[Media], start: TokenPrompt | None, data: DataSettings
    ) -> list[Video]:
        """Remove frames that are not part of the samples, and set their frame rate."""
        rate_hz = cast(VideoDataConfig, data).frame_rate_hz(DEFAULT_RATE_HZ)
        frames = slice(None)
        if isinstance(start, VideoPrompt):
            stop = None if start.num_frames is None else start.skip_frames + start.num_frames
            rate_hz, frames = start.rate_hz or rate_hz, slice(start.skip_frames, stop)
        videos = cast(Sequence[Video], media)
        return [Video(video.frames[frames], rate_hz) for video in videos]


class PromptBuilder:
    """Turns frames, clips and masks into codes."""

    def __init__(self, inputs: VideoInputs, encoder: PromptEncoder):
        self.inputs = inputs
        self.data = cast(VideoDataConfig, encoder.data).without_augmentation()
        self.codec = cast(VideoCodec, encoder.tokenizers["tokenizer"])
        self.time_factor = self.codec.model.config.time_factor

    def build(self) -> VideoPrompt:
        inputs = self.inputs
        if inputs.frames is not None and inputs.frames < 1:
            raise ValueError(f"--frames must be at least 1, got {inputs.frames}.")
        if inputs.mask is not None:
            self.check_alone("mask", ("first_frame", "last_frame", "frames_given", "frames"))
            return self.inpaint(inputs.mask)
        if inputs.frames_given is not None:
            self.check_alone("frames_given", ("first_frame", "last_frame"))
            return self.predict(self.read_given(inputs.frames_given))
        if inputs.first_frame is None:
            if inputs.last_frame is not None:
                raise ValueError("--last-frame needs the first one too: add --first-frame IMAGE.")
            return self.predict(None)
        first = self.read_still(inputs.first_frame)
        if inputs.last_frame is None:
            return self.predict(first)
        if inputs.frames is not None and inputs.frames > self.data.frames:
            raise ValueError(
                f"--last-frame ends a video of {self.data.frames} frames, but --frames is "
                f"{inputs.frames}: leave --frames out, or continue a video with --frames-given."
            )
        return self.interpolate(first, self.read_still(inputs.last_frame))

    def check_alone(self, name: str, others: Sequence[str]) -> None:
        """Raise a ValueError for inputs that cannot be combined."""
        found = [other for other in others if getattr(self.inputs, other) is not None]
        if found:
            flags = [f"--{one.replace('_', '-')}" for one in (name, found[0])]
            raise ValueError(f"{flags[0]} and {flags[1]} cannot be combined: leave one out.")

    # ---- prompts

    def predict(self, given: Video | None) -> VideoPrompt:
        """Continue given frames, or none, for as many frames as are requested."""
        count = 0 if given is None else len(given.frames)
        skip = -(count - 1) % self.time_factor if count else 0
        num_frames = self.inputs.frames or self.data.frames - skip
        if self.inputs.frames is None and count >= num_frames:
            num_frames = self.data.frames  # which takes a second window
        if count >= num_frames:
            raise ValueError(
                f"{count} frames are given, but the video has {num_frames}, so that there is "
                f"nothing to generate: use --frames {count + 1} or more, or give fewer."
            )
        needed = -(-(skip + num_frames - 1) // self.time_factor) + 1
        total = max(needed, self.codec.grid[0])
        num_given = 0 if given is None else 1 + (skip + count - 1) // self.time_factor
        codes = torch.zeros((1, total, *self.codec.grid[1:]), dtype=torch.long)
        if given is not None:
            padded = np.concatenate([given.frames[:1]] * skip + [given.frames])
            codes[:, :num_given] = self.encode(padded)
        mask = torch.ones_like(codes, dtype=torch.bool)
        mask[:, :num_given] = False
        rate_hz = None if given is None or count == 1 else given.rate_hz
        return VideoPrompt(codes, mask, skip_frames=skip, num_frames=num_frames, rate_hz=rate_hz)

    def interpolate(self, first: Video, last: Video) -> VideoPrompt:
        """Generate the frames between two images."""
        repeats = self.time_factor
        held = [first.frames] * (self.data.frames - repeats) + [last.frames] * repeats
        codes = self.encode(np.concatenate(held))
        if codes.shape[1] < 3:
            raise ValueError(
                f"There is no latent frame between the first and the last of {self.data.frames} "
                f"frames: this needs a model of {2 * repeats + 1} frames or more."
            )
        mask = torch.ones_like(codes, dtype=torch.bool)
        mask[:, 0], mask[:, -1] = False, False
        return VideoPrompt(codes, mask)

    def inpaint(self, path: str) -> VideoPrompt:
        """Generate the white part of a mask, an image for all frames or a video, again."""
        if self.inputs.data is None:
            raise ValueError("--mask needs a video: give it with --data VIDEO.")
        clip = self.data.read_beginning(self.inputs.data, self.data.frames)
        if len(clip.frames) < self.data.frames:
            raise ValueError(
                f"{self.inputs.data} has {len(clip.frames)} frames at {clip.rate_hz:g} per second, "
                f"but this model generates {self.data.frames}: give a longer video."
            )
        white = self.data.read_mask(path, self.inputs.data)
        cells = self.cover_cells(torch.from_numpy(white))
        if not cells.any():
            raise ValueError(f"{path} has no white pixel: white marks the part to generate.")
        return VideoPrompt(self.encode(clip.frames), cells[None], rate_hz=clip.rate_hz)

    def cover_cells(self, white_THW: Tensor) -> Tensor:
        """Return the cells of the grid in which any pixel of any frame is white."""
        frames, height, width = self.codec.grid
        whole = white_THW.unflatten(2, (width, -1)).unflatten(1, (height, -1)).any(4).any(2)
        later = whole[1:].unflatten(0, (frames - 1, self.time_factor)).any(1)
        return torch.cat([whole[:1], later])

    # ---- files

    def read_given(self, count: int) -> Video:
        if count < 1:
            raise ValueError(f"--frames-given must be at least 1, got {count}.")
        if self.inputs.data is None:
            raise ValueError("--frames-given needs a video: give it with --data VIDEO.")
        clip = self.data.read_beginning(self.inputs.data, count)
        if len(clip.frames) < count:
            raise ValueError(
                f"{self.inputs.data} has {len(clip.frames)} frames at {clip.rate_hz:g} per second, "
                f"fewer than --frames-given {count}: give a longer video or fewer frames."
            )
        return clip

    def read_still(self, path: str) -> Video:
        frame = self.data.read_beginning(path, 1)
        return Video(frame.frames, self.data.frame_rate_hz(DEFAULT_RATE_HZ))

    def encode(self, frames_THWC: np.ndarray) -> Tensor:
        """Encode whole latent frames, (1, t, h, w)."""
        floats = torch.from_numpy(Video(frames_THWC, 1.0).to_floats())
        return self.codec.encode(floats[None]).cpu()


class VideoGeneratorTask(MaskedTask):
    config: VideoGeneratorConfig

    @torch.inference_mode()
    def generate(self, request: GenerationRequest) -> Tensor:
        """Generate codes (B, t, h, w), window by window where there are more than in training."""
        start, window = request.start, self.layout.grid[0]
        if start is None or start.mask is None or start.codes.shape[1] <= window:
            return super().generate(request)
        overlap, total = min(self.config.overlap, window - 1), start.codes.shape[1]
        num_windows = 1 + -(-(total - window) // (window - overlap))
        codes = super().generate(self.window_request(request, None, 0, 0, num_windows))
        last = codes
        for number in range(1, num_windows):
            context = self.encode_end(last, overlap)
            last = super().generate(
                self.window_request(request, context, codes.shape[1], number, num_windows)
            )
            codes = torch.cat([codes, last[:, overlap:]], dim=1)
        return codes[:, :total]

    def measure_conditions(self, batches: Iterable[Batch], seed: int) -> dict[str, float]:
        """Predict the frames of held-out videos from the first ones (`prediction.py`)."""
        codec = cast(VideoCodec, self.tokenizers["tokenizer"])
        time_factor, window = codec.model.config.time_factor, self.layout.grid[0]
        num_given = frames_to_give(1 + time_factor * (window - 1), time_factor)
        num_latent = -(-(num_given - 1) // time_factor) + 1
        if num_latent >= window:
            return {}
        real: list[VideoBatch] = []
        generated: list[Tensor] = []
        for batch in batches:
            if not len(batch) or sum(len(one.captions) for one in real) >= MAX_VIDEOS:
                continue
            delayed, skip = repeat_first(batch.examples.videos, time_factor, num_given)
            codes = codec.encode(delayed)
            mask = torch.zeros_like(codes, dtype=torch.bool)
            mask[:, num_latent:] = True
            has_text = self.network.text is not None
            request = GenerationRequest(
                prompts=batch.examples.captions if has_text else [""] * len(batch),
                seeds=[hash_seed(seed, one) for one in batch.seeds],
                start=TokenPrompt(codes, mask),
                sampling=replace(self.config.sampling, temperature=0.0),
            )
            real.append(batch.examples)
            generated.append(codec.decode(self.generate(request))[:, :, skip:])
        return measure_prediction(real, generated, num_given) if real else {}

    def encode_end(self, codes: Tensor, overlap: int) -> Tensor:
        """Encode the last frames of a window as the first `overlap` latent frames of a clip."""
        codec = cast(VideoCodec, self.tokenizers["tokenizer"])
        count = 1 + (overlap - 1) * codec.model.config.time_factor
        return codec.encode(codec.decode(codes)[:, :, -count:])

    def window_request(
        self,
        request: GenerationRequest,
        context: Tensor | None,
        first: int,
        number: int,
        num_windows: int,
    ) -> GenerationRequest:
        """Return the request for one window, whose new latent frames begin with `first`."""
        assert request.start is not None and request.start.mask is not None
        count, window = len(request), self.layout.grid[0]
        overlap = 0 if context is None else context.shape[1]
        stop = first + window - overlap
        codes, mask = (
            one[:, first:stop].expand(count, -1, -1, -1)
            for one in (request.start.codes, request.start.mask)
        )
        missing = window - overlap - codes.shape[1]
        if missing:  # the last window generates more than is used
            filler = codes[:, :1].expand(-1, missing, -1, -1)
            codes = torch.cat([codes, filler], dim=1)
            mask = torch.cat([mask, torch.ones_like(filler, dtype=torch.bool)], dim=1)
        if context is not None:
            codes = torch.cat([context.to(codes.device), codes], dim=1)
            mask = torch.cat([torch.zeros_like(context, dtype=torch.bool).to(mask), mask], dim=1)
        return replace(
            request,
            start=TokenPrompt(codes, mask),
            seeds=[hash_seed(seed, number) if number else seed for seed in request.seeds],
            on_step=shift_steps(request.on_step, number, num_windows),
        )


def shift_steps(on_step: OnStep | None, number: int, parts: int) -> OnStep | None:
    """Return the callback for one of several parts, whose steps are counted together."""
    if on_step is None:
        return None

    def report(step: int, steps: int, codes: Tensor) -> None:
        on_step(number * steps + step, parts * steps, codes)

    return report
