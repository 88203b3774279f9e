"""Small examples of every modality that a small model can learn (`readme_examples.py`)."""

from __future__ import annotations

from pathlib import Path

import torch
from peers.adapters import ExampleList
from PIL import Image


def token_pairs() -> ExampleList:
    """Acoustic tokens that follow from the semantic token of the frame and the quantizer."""
    pairs = []
    for number in range(96):
        generator = torch.Generator().manual_seed(number)
        semantic = torch.randint(0, 10, (16,), generator=generator)
        acoustic = (semantic[:, None] * torch.tensor([1, 3]) + 11) % 32
        pairs.append((semantic, acoustic))
    return ExampleList(pairs)


def music() -> ExampleList:
    """Tones whose pitch is the first token of the text."""
    time = torch.arange(1024) / 4096
    pairs = []
    for number in range(96):
        generator = torch.Generator().manual_seed(number)
        pitch = number % 40
        wave = torch.sin(2 * torch.pi * (40 + 30 * pitch) * time)
        wave = 0.8 * wave + 0.1 * torch.randn(1024, generator=generator)
        others = torch.randint(900, 1000, (31,), generator=generator)
        text = torch.cat([torch.tensor([1 + pitch]), others])
        pairs.append((wave, text))
    return ExampleList(pairs)


def videos() -> ExampleList:
    """Squares that move over a coloured ground."""
    items = []
    for number in range(96):
        generator = torch.Generator().manual_seed(number)
        colours = torch.rand(2, 3, 1, 1, 1, generator=generator)
        video = colours[0].expand(3, 5, 16, 16).clone()
        x, y = torch.randint(0, 5, (2,), generator=generator).tolist()
        for frame in range(5):
            video[:, frame, y + frame : y + frame + 6, x + frame : x + frame + 6] = colours[1][:, 0]
        items.append(video)
    return ExampleList(items)


def meshes() -> ExampleList:
    """Boxes of random sizes, divided into 12 triangles."""
    corners = torch.tensor([[i & 1, i >> 1 & 1, i >> 2 & 1] for i in range(8)]).float() * 2 - 1
    faces = torch.tensor(
        [[0, 1, 3], [0, 3, 2], [4, 6, 7], [4, 7, 5], [0, 4, 5], [0, 5, 1]]
        + [[2, 3, 7], [2, 7, 6], [0, 2, 6], [0, 6, 4], [1, 5, 7], [1, 7, 3]]
    )
    items = []
    for number in range(96):
        generator = torch.Generator().manual_seed(number)
        items.append((corners * (0.2 + 0.7 * torch.rand(3, generator=generator)), faces))
    return ExampleList(items)


def write_images(folder: Path) -> Path:
    """Write images of one square on a coloured ground."""
    folder.mkdir(parents=True)
    for number, video in enumerate(videos().examples):
        pixels = (video[:, 0] * 255).byte()
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / f"{number:03d}.png")
    return folder
