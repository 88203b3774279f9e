"""Clips as files: an MP4, and a GIF, which shows everywhere."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import PIL.Image

from tessera.modalities.video.io.pyav import library

if TYPE_CHECKING:  # a Video saves itself with what stands here
    from tessera.modalities.video.media import Video

ENCODERS = ("libx264", "libopenh264", "mpeg4")
X264 = {"crf": "18", "mbtree": "0"}
"""mbtree looks at memory that nobody has written where a side is no multiple of 16: the same clip
then gave files that differed from time to time, and so did the samples of one and the same run."""
KEY_FRAME_EVERY = 24  # what is written can be read from any place without decoding much before it
GIF_HZ = 50  # browsers slow faster GIFs down to a crawl


def write_mp4(video: Video, path: Path) -> None:
    """H.264 where PyAV's build has it. Its colours stand for 2 x 2 pixels, so odd sides gain a copy
    of their last row."""
    av = library()
    _, height, width, _ = video.frames.shape
    even = np.pad(video.frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    rate = Fraction(video.rate_hz).limit_denominator(1001)
    encoder = next(name for name in ENCODERS if name in av.codecs_available)
    with av.open(f"file:{path}", "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream = container.add_stream(
            encoder, rate=rate, options=X264 if encoder == "libx264" else {}
        )
        stream.height, stream.width = even.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = KEY_FRAME_EVERY
        for number, pixels in enumerate(even):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def write_gif(video: Video, path: Path) -> None:
    """Endlessly. A GIF counts hundredths of a second, so pauses differ by one where the rate does
    not divide 100."""
    step = math.ceil(video.rate_hz / GIF_HZ)
    pictures = [PIL.Image.fromarray(pixels) for pixels in video.frames[::step]]
    ends = np.rint(np.arange(len(pictures) + 1) * step * 100 / video.rate_hz).astype(int)
    pauses = (np.diff(ends) * 10).tolist()
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=pauses, loop=0)
