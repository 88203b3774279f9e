"""Masked generation of images: text to image, super-resolution and inpainting."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from tessera.objectives.generation import MediaInputs, PromptEncoder, TokenPrompt
from tessera.objectives.masked import MaskedConfig


@dataclass(frozen=True)
class ImageInputs(MediaInputs):
    mask: str | None = None


@dataclass(frozen=True, kw_only=True)
class ImageGeneratorConfig(MaskedConfig):
    inputs_class: ClassVar[type[MediaInputs]] = ImageInputs

    tokenizer: str = "runs/images-vqgan"
    """The run of the tokenizer whose tokens are generated; it is copied into the run directory."""
    low_res_tokenizer: str | None = None
    """The run of the tokenizer of low-resolution images that condition super-resolution; None
    generates from text alone."""

    def conditioning(self) -> dict[str, str]:
        if self.low_res_tokenizer is None:
            return {}
        return {"low_res_tokenizer": self.low_res_tokenizer}

    def encode_prompt(self, inputs: MediaInputs, encoder: PromptEncoder) -> TokenPrompt | None:
        """Return the codes of an image of which the white part of a mask is generated again."""
        assert isinstance(inputs, ImageInputs)
        if inputs.mask is None:
            return None
        if inputs.data is None:
            raise ValueError("--mask needs an image: give it with --data IMAGE.")
        white = replace(encoder.data, path=inputs.data).read_mask(inputs.mask)
        mask = cover_cells(torch.from_numpy(white), encoder.tokenizers["tokenizer"].grid)[None]
        if not mask.any():
            raise ValueError(f"{inputs.mask} has no white pixel: white marks the part to generate.")
        return TokenPrompt(encoder.encode_file(inputs.data), mask)


def cover_cells(white: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Return the cells of a grid in which any pixel is white."""
    height, width = (side // cells for side, cells in zip(white.shape, grid, strict=True))
    cells = white.unflatten(1, (grid[1], width)).unflatten(0, (grid[0], height))
    return cells.any(3).any(1)
