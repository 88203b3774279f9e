"""SoundStorm: masked generation of acoustic tokens from semantic tokens.

Borsos et al. 2023, arXiv 2305.09636.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from tessera.modalities.audio.external_tokens import TokenStreams
from tessera.objectives.generation import (
    MediaInputs,
    PromptEncoder,
    TokenizerProtocol,
    TokenPrompt,
)
from tessera.objectives.masked import MaskedConfig, MaskedTask


@dataclass(frozen=True, kw_only=True)
class SoundStormTaskConfig(MaskedConfig):
    tokenizer: str = "runs/audio-codec"
    """The run of the codec whose tokens are generated; it is copied into the run directory."""
    semantic: str = "runs/audio-semantic"
    """The run of the semantic tokenizer whose tokens are the condition."""
    streams: TokenStreams | None = None
    """A description of tokens that were computed elsewhere, instead of these runs."""

    def conditioning(self) -> dict[str, str]:
        return {"semantic": self.semantic}

    def dependencies(self) -> dict[str, str]:
        return {} if self.streams is not None else super().dependencies()

    def build(self, **dependencies: TokenizerProtocol) -> MaskedTask:
        if self.streams is not None:
            acoustic, semantic = self.streams.acoustic.build(), self.streams.semantic.build()
            return MaskedTask(self, tokenizer=acoustic, semantic=semantic)
        return super().build(**dependencies)

    def encode_prompt(self, inputs: MediaInputs, encoder: PromptEncoder) -> TokenPrompt | None:
        """Return the semantic tokens of `like` after those of the voice prompt."""
        if inputs.like is None:
            if inputs.prompt_audio is not None or inputs.seconds is not None:
                raise ValueError(
                    "--prompt-audio and --seconds need a recording to follow: give it with --like "
                    "RECORDING."
                )
            return super().encode_prompt(inputs, encoder)
        super().encode_prompt(replace(inputs, like=None, prompt_audio=None, seconds=None), encoder)
        if inputs.data is not None:
            raise ValueError("--like and --data cannot be combined: leave one out.")
        codes, semantic = self.encode_recording(inputs.like, inputs.seconds, encoder)
        prompt, prompt_semantic = codes[:, :0], semantic[:, :0]
        if inputs.prompt_audio is not None:
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
