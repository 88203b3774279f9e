"""CPU time of one generated video, with the networks of the presets at initialization.

    python bench/video_sampling.py [--preset small] [--frames 17] [--count 4]

A tokenizer and a generator are trained for one step on synthetic videos, since the weights do not
change the time, and videos are sampled with the settings of the preset. Time is CPU time of one
thread and includes decoding.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import timing
from comparison import PROJECT

PROMPT = "a red circle moving left"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="small", help="the preset of both runs")
    parser.add_argument("--frames", type=int, default=17, help="the frames of the generator")
    parser.add_argument("--count", type=int, default=4, help="the videos of the second call")
    args = parser.parse_args(arguments)
    timing.set_threads(1)
    sys.path.insert(0, str(PROJECT))
    with tempfile.TemporaryDirectory() as folder:
        generator = build_generator(Path(folder), args.preset, args.frames)
        sampling = generator.task.config.sampling
        print(f"{timing.describe_machine()}")
        print(f"{generator.task.layout}, {sampling.decoding_steps} decoding steps")
        generator.generate(PROMPT)  # warms up
        for count in (1, args.count):
            start = time.process_time()
            made = generator.generate(PROMPT, count=count, seed=1)
            seconds = (time.process_time() - start) / count
            print(f"{count} x {made.media[0]}: {seconds:.2f} s of CPU time each")
    return 0


def build_generator(folder: Path, preset: Any, frames: int) -> Any:
    from tessera.api.generator import Generator
    from tessera.modalities.video.recipes import videos_magvit2, videos_maskgit
    from tessera.run.directory import RunDirectory
    from tessera.run.train import build_engine

    tokenizer = shorten(videos_magvit2(preset))
    build_engine(tokenizer, RunDirectory(folder / "tokenizer")).run()
    run = shorten(videos_maskgit(preset, tokenizer=str(folder / "tokenizer")))
    run = replace(run, data=replace(run.data, frames=frames))
    build_engine(run, RunDirectory(folder / "generator")).run()
    return Generator.load(folder / "generator")


def shorten(run: Any) -> Any:
    """Return a run of one step on four synthetic videos."""
    engine = replace(run.engine, steps=1, batch_size=2, sample_count=1)
    data = replace(run.data, num_synthetic=4, val_fraction=0.5)
    return replace(run, engine=engine, data=data)


if __name__ == "__main__":
    raise SystemExit(main())
