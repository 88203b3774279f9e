"""Write videos as MP4 and GIF."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import PIL.Image

from tessera.modalities.video.io.base import import_av

if TYPE_CHECKING:  # media.py imports this module
    from tessera.modalities.video.media import Video

ENCODERS = ("libx264", "libopenh264", "mpeg4")
"""Encoders in order of preference; builds of PyAV differ in which they contain."""
X264_OPTIONS = {"crf": "18", "mbtree": "0"}
"""mbtree reads uninitialized memory where a side is not a multiple of 16: the same video then gave
different files from time to time, and so did the samples of one run."""
KEY_FRAME_INTERVAL = 24
"""Frames between two key frames, so that any part can be read without decoding much before it."""
MAX_GIF_HZ = 50
"""The maximum frame rate of GIFs; browsers play faster ones far too slowly."""


def write_mp4(video: Video, path: Path) -> None:
    """Write an MP4, with H.264 if PyAV contains an encoder."""
    write_mp4_pieces([video], path)


def write_mp4_pieces(pieces: Iterable[Video], path: Path) -> None:
    """Write a video that arrives in pieces of one size and rate.

    The chroma of an MP4 is stored per 2 x 2 pixels, so odd sides are padded with a copy of the last
    row or column.
    """
    av = import_av()
    remaining = iter(pieces)
    first = next(remaining)
    _, height, width, _ = first.frames.shape
    rate = Fraction(first.rate_hz).limit_denominator(1001)
    encoder = next(name for name in ENCODERS if name in av.codecs_available)
    with av.open(f"file:{path}", "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream = container.add_stream(
            encoder, rate=rate, options=X264_OPTIONS if encoder == "libx264" else {}
        )
        stream.height, stream.width = height + height % 2, width + width % 2
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = KEY_FRAME_INTERVAL
        frames = (pixels for piece in chain([first], remaining) for pixels in piece.frames)
        for number, pixels in enumerate(frames):
            padded = np.pad(pixels, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
            frame = av.VideoFrame.from_ndarray(padded, format="rgb24")
            frame.pts, frame.time_base = number, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def write_gif(video: Video, file: Path | BinaryIO) -> None:
    """Write a GIF that loops forever.

    GIF times are multiples of 10 ms, so durations differ by one unit if the rate does not divide
    100.
    """
    step = math.ceil(video.rate_hz / MAX_GIF_HZ)
    images = [PIL.Image.fromarray(pixels) for pixels in video.frames[::step]]
    ends = np.rint(np.arange(len(images) + 1) * step * 100 / video.rate_hz).astype(int)
    durations = (np.diff(ends) * 10).tolist()
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0)
