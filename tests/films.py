"""Clips whose frames tell which ones they are, and films of them that others wrote."""

from __future__ import annotations

from fractions import Fraction

import av
import numpy as np
import PIL.Image

from tessera.modalities.video.media import Video


def levels(count: int, height: int = 16, width: int = 32) -> np.ndarray:
    """Frame k is a grey of 8 k, so that a frame tells which one it is."""
    frames = (
        np.arange(count, dtype=np.uint8).repeat(height * width * 3).reshape(count, height, width, 3)
    )
    return frames * 8


def numbers(clip: Video) -> list[int]:
    """Which of the `levels` each frame is."""
    return np.rint(clip.frames.mean(axis=(1, 2, 3)) / 8).astype(int).tolist()


def write(
    path,
    frames,
    codec="libx264",
    form="yuv420p",
    rate=10,
    stamps=None,
    key_frame_every=12,
    **options,
):
    """A film by PyAV itself; `stamps` are the milliseconds at which frames begin."""
    muxer = {"fflags": "+bitexact"} | (
        {"movflags": "faststart"} if path.suffix in (".mp4", ".mov") else {}
    )
    with av.open(str(path), "w", options=muxer) as film:
        stream = film.add_stream(codec, rate=rate, options=options)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = form
        stream.codec_context.gop_size = key_frame_every
        if stamps is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(
                pixels, format="rgba" if pixels.shape[2] == 4 else "rgb24"
            )
            frame.pts = number if stamps is None else stamps[number]
            frame.time_base = Fraction(1, rate) if stamps is None else Fraction(1, 1000)
            film.mux(stream.encode(frame))
        film.mux(stream.encode())
    return path


def animate(path, frames, pauses, **options):
    first, *others = [PIL.Image.fromarray(pixels) for pixels in frames]
    first.save(path, save_all=True, append_images=others, duration=pauses, **options)
    return path


def cut_short(path, share: float):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path
