"""Start-up and memory of a run on tar shards of a million examples.

    python bench/shards.py [--examples 1000000] [--shards 100] [--folder FOLDER]

It writes shards of tiny images with captions, about 2 kB for each example, makes their indexes, and
starts a new process that opens them as `tessera train` does: the split into training and held-out
examples, and the first batch of the training set. Reported are the CPU time of that, and the growth
of the memory of the process for each example.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import deque
from pathlib import Path

import PIL.Image
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MAX_SECONDS = 10.0
MAX_BYTES = 100.0
"""The targets: CPU seconds of the start, and bytes of memory for each example."""
BATCH_SIZE = 16


def write_shards(folder: Path, examples: int, shards: int) -> None:
    """Write examples in folders of a thousand; every image is the same."""
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (8, 8), (200, 30, 30)).save(buffer, "PNG")
    content = buffer.getvalue()
    for shard in range(shards):
        with tarfile.open(folder / f"shards-{shard:05d}.tar", "w") as archive:
            for number in range(examples * shard // shards, examples * (shard + 1) // shards):
                caption = f"photo number {number}".encode()
                for suffix, data in ((".png", content), (".txt", caption)):
                    member = tarfile.TarInfo(f"{number // 1000:05d}/{number:09d}{suffix}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


def measure_start(folder: str) -> dict[str, float]:
    """Open the shards and load the first batch; imports are not measured."""
    from tessera.data.loader import TrainLoader
    from tessera.modalities.image.dataset import ImageDataConfig

    process = psutil.Process()
    gc.collect()
    memory, seconds = process.memory_info().rss, time.process_time()
    split = ImageDataConfig(path=folder, size=8, val_fraction=0.001).build()
    loader = TrainLoader(split.train, seed=0, batch_size=BATCH_SIZE)
    listed = time.process_time() - seconds
    batch = next(loader.micro_batches(1000, 2000, 0, 1))[0]
    assert len(batch) == BATCH_SIZE
    total = time.process_time() - seconds
    grown = process.memory_info().rss - memory
    examples = len(split.train) + len(split.validation)
    return {
        "examples": examples,
        "split_seconds": round(listed, 2),
        "start_seconds": round(total, 2),
        "bytes_per_example": round(grown / examples, 1),
        "array_bytes_per_example": round(split.train.files.members.num_bytes / examples, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--folder", help="where the shards are written; kept if it is given")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure_start(arguments.measure)))
        return 0
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="tessera-shards-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.glob("*.tar")):
            write_shards(folder, arguments.examples, arguments.shards)
        from tessera.data.shards import load_indexes

        seconds = time.process_time()
        deque(load_indexes(sorted(folder.glob("*.tar")), []), maxlen=0)
        print(f"indexing, or reading the indexes: {time.process_time() - seconds:.1f} CPU seconds")
        index_bytes = sum(file.stat().st_size for file in folder.glob("*.index"))
        command = [sys.executable, __file__, "--measure", str(folder)]
        result = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result | {"index_bytes_per_example": index_bytes / result["examples"]}))
    is_met = result["start_seconds"] < MAX_SECONDS and result["bytes_per_example"] < MAX_BYTES
    print(f"targets: {MAX_SECONDS:g} s and {MAX_BYTES:g} bytes: {'met' if is_met else 'missed'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
