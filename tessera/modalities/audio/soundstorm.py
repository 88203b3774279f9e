"""SoundStorm: masked generation of acoustic tokens from semantic tokens.

Borsos et al. 2023, arXiv 2305.09636.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from tessera.data.dataset import ExampleDataset, FileDataset
from tessera.data.tokens import TokenDataset
from tessera.engine.task import Batch, DataSettings, Media, Source
from tessera.modalities.audio.external_tokens import TokenStreams
from tessera.modalities.audio.joined_recordings import JoinedRecordings
from tessera.modalities.audio.media import Audio
from tessera.modalities.audio.voice_prompt import check_voice
from tessera.objectives.generation import (
    MediaInputs,
    PromptEncoder,
    TokenizerProtocol,
    TokenPrompt,
)
from tessera.objectives.masked import MaskedConfig, MaskedTask
from tessera.sampling.guidance import Guidance


@dataclass(frozen=True)
class AudioInputs(MediaInputs):
    like: str | None = None
    prompt_audio: str | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class SoundStormTaskConfig(MaskedConfig):
    inputs_class: ClassVar[type[MediaInputs]] = AudioInputs

    tokenizer: str = "runs/audio-codec"
    """The run of the codec whose tokens are generated; it is copied into the run directory."""
    semantic: str = "runs/audio-semantic"
    """The run of the semantic tokenizer whose tokens are the condition."""
    streams: TokenStreams | None = None
    """A description of tokens that were computed elsewhere, instead of these runs."""

    guidance: Guidance = field(default_factory=lambda: Guidance(scale=1.0))
    """Guidance on the voice prompt: above 1, samples are led away from those without the prompt, at
    twice the cost."""
    prompts: Literal["auto", "recording", "speaker"] = "auto"
    """What the voice prompt of a training example is: the beginning of the same recording, or
    another recording of its speaker and the beginning of it; auto is speaker where there are
    several speakers."""
    speaker_by: str = "folder"
    """What the recordings of a speaker have in common: folder, prefix (of the file name, up to the
    first "-", "_" or "."), or a column of the metadata, such as speaker."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts == "speaker" and self.tokens == "live":
            raise ValueError(
                "Recordings of a speaker are joined as tokens, which must be made in advance: use "
                "--task.tokens cache, or --task.prompts recording."
            )

    def prepare_dataset(
        self,
        dataset: TokenDataset,
        tokenizers: Mapping[str, TokenizerProtocol],
        source: Source,
    ) -> ExampleDataset:
        """Join each example with another one of its speaker, where speakers are known."""
        if self.prompts == "recording":
            return dataset
        speakers = self.find_speakers(source)
        if self.prompts == "auto" and len(set(speakers.values())) < 2:
            return dataset
        hops = {name: getattr(one, "hop", None) for name, one in tokenizers.items()}
        return JoinedRecordings(dataset, {name: hop or 1 for name, hop in hops.items()}, speakers)

    def find_speakers(self, source: Source) -> dict[str, str]:
        """Return the speaker of each example by its name."""
        if isinstance(source, FileDataset):
            return source.groups(self.speaker_by, "--task.speaker-by")
        names = [source.name(index) for index in range(len(source))]
        return {name: posixpath.dirname(name) for name in names}

    def validate_dependency(self, name: str, data: DataSettings) -> None:
        if getattr(data, "channels", 1) != 1:
            path = self.dependencies().get(name)
            raise ValueError(
                f"The codec in {path} is stereo, but SoundStorm generates mono audio: train a "
                "codec with --data.channels 1, which averages the channels."
            )

    def conditioning(self) -> dict[str, str]:
        return {"semantic": self.semantic}

    def dependencies(self) -> dict[str, str]:
        return {} if self.streams is not None else super().dependencies()

    def build(self, **dependencies: TokenizerProtocol) -> SoundStormTask:
        if self.streams is not None:
            acoustic, semantic = self.streams.acoustic.build(), self.streams.semantic.build()
            return SoundStormTask(self, tokenizer=acoustic, semantic=semantic)
        return SoundStormTask(self, **dependencies)

    def encode_prompt(self, inputs: MediaInputs, encoder: PromptEncoder) -> TokenPrompt | None:
        """Return the semantic tokens of `like` after those of the voice prompt."""
        assert isinstance(inputs, AudioInputs)
        if inputs.like is None:
            if inputs.prompt_audio is not None or inputs.seconds is not None:
                raise ValueError(
                    "--prompt-audio and --seconds need a recording to follow: give it with --like "
                    "RECORDING."
                )
            return None
        if inputs.data is not None:
            raise ValueError("--like and --data cannot be combined: leave one out.")
        codes, semantic = self.encode_recording(inputs.like, inputs.seconds, encoder)
        prompt, prompt_semantic = codes[:, :0], semantic[:, :0]
        if inputs.prompt_audio is not None:
            check_voice(inputs.prompt_audio)
            prompt, prompt_semantic = self.encode_recording(inputs.prompt_audio, None, encoder)
        trim = prompt.shape[1]
        start = torch.cat([prompt, torch.zeros_like(codes)], dim=1)
        generated = torch.arange(start.shape[1], device=start.device) >= trim
        return TokenPrompt(
            codes=start,
            mask=generated[None, :, None].expand_as(start),
            cond_codes=torch.cat([prompt_semantic, semantic], dim=1),
            trim=trim,
        )

    def encode_recording(
        self, path: str, seconds: float | None, encoder: PromptEncoder
    ) -> list[torch.Tensor]:
        """Return acoustic and semantic codes of a recording, as far as it fills whole frames."""
        names = ("tokenizer", "semantic")
        step = math.lcm(*(encoder.tokenizers[name].hop for name in names))
        return encoder.encode_with(names, encoder.data.whole_recording(path, seconds, step))


class SoundStormTask(MaskedTask):
    def sample(self, batch: Batch) -> Sequence[Media]:
        """Return held-out audio as the codec reconstructs it, followed by the audio that is
        generated from its semantic tokens."""
        samples = super().sample(batch)
        tokenizer = self.tokenizers["tokenizer"]
        if tokenizer.is_external:
            return samples
        originals = tokenizer.to_media(self.get_codes(batch.examples))
        pairs = zip(originals, samples, strict=True)
        return [
            Audio.side_by_side(original, sample)
            for original, sample in pairs
            if isinstance(original, Audio) and isinstance(sample, Audio)
        ]
