"""The worker process of the playground: the only one that loads models.

It reads one JSON object per line from its standard input and writes events as lines to its standard
output. It runs the functions of the command line, so a job gives the files that the command gives,
and keeps loaded runs until it is ended.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from tessera.run.directory import Json
from tessera.run.errors import UserError
from tessera.view.uploads import check_size

PREVIEW_SECONDS = 0.3
"""Previews are made at most this often, and take at most a quarter of the time."""
MAX_LOADED = 4
"""Runs and dependencies that stay loaded; beyond that all are dropped."""
MAX_CODES = 4096
"""The number of tokens that are shown."""


class Cancelled(Exception):
    """The user cancelled the job."""


class Worker:
    def __init__(self, output: TextIO):
        self.output = output
        self.jobs: queue.SimpleQueue[Json] = queue.SimpleQueue()
        self.cancelled: set[str] = set()
        self.loaded: dict[Any, Any] = {}
        self.next_preview = 0.0

    def send(self, job: str, event: str, **values: object) -> None:
        self.output.write(json.dumps({"job": job, "event": event, **values}) + "\n")
        self.output.flush()

    def read_requests(self, source: TextIO) -> None:
        """Receive jobs and cancellations while a job runs; end with the server."""
        for line in source:
            request = json.loads(line)
            if "cancel" in request:
                self.cancelled.add(request["cancel"])
            else:
                self.jobs.put(request)
        os._exit(0)

    def run_forever(self) -> None:
        while True:
            self.run(self.jobs.get())

    def run(self, request: Json) -> None:
        """Run one job; whatever happens ends in an event."""
        job, notices = request["job"], io.StringIO()
        try:
            with contextlib.redirect_stdout(notices), contextlib.redirect_stderr(notices):
                self.check_cancelled(job)
                for upload in request["uploads"]:
                    check_size(upload["path"], upload["modality"])
                self.run_command(job, request)
        except Cancelled:
            self.send(job, "cancelled")
        except UserError as error:
            self.send(job, "failed", message=str(error))
        except Exception as error:
            traceback.print_exc(file=sys.__stderr__)
            message = f"{type(error).__name__}: {error}"
            self.send(job, "failed", message=f"An unexpected error ended this job ({message}).")
        else:
            self.send(job, "done", notices=notices.getvalue().splitlines())

    def run_command(self, job: str, request: Json) -> None:
        self.send(job, "loading")
        from tessera.api.generator import DecodingProgress, observe_decoding
        from tessera.cli.commands import COMMANDS
        from tessera.run.load import keep_loaded

        def on_progress(progress: DecodingProgress) -> None:
            self.check_cancelled(job)
            preview = None
            if time.monotonic() >= self.next_preview and progress.step < progress.steps:
                start = time.monotonic()
                preview = encode_preview(progress.preview())
                spent = time.monotonic() - start
                self.next_preview = start + max(PREVIEW_SECONDS, 4 * spent)
            self.send(job, "progress", step=progress.step, steps=progress.steps, preview=preview)

        self.next_preview = 0.0
        if len(self.loaded) > MAX_LOADED:
            self.loaded.clear()
        with keep_loaded(self.loaded), observe_decoding(on_progress):
            command, positional, options = (
                request[name] for name in ("command", "positional", "options")
            )
            out = Path(request["out"])
            if command == "search":
                write_hits(positional, options, out)
                return
            if command == "index":
                # Read in this process, which is replaced if a file ends it. A fork of it would
                # wait forever for the lock of the input that `read_requests` holds.
                options = options | {"num_workers": 0}
            COMMANDS[command](*positional, **options, out=str(out))
            if command == "sample" and request["kind"] == "tokenizer":
                write_tokens(positional[0], options, out)

    def check_cancelled(self, job: str) -> None:
        if job in self.cancelled:
            raise Cancelled


def encode_preview(media: Sequence[Any]) -> str | None:
    """Return a contact sheet of unfinished samples as a PNG, in base64."""
    import PIL.Image

    try:
        sheet = type(media[0]).sheet(list(media))
    except ValueError:  # a mesh without any face yet
        return None
    pixels = sheet.frames[0] if hasattr(sheet, "frames") else sheet.pixels
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def write_tokens(run: str, options: Json, out: Path) -> None:
    """Write tokens.json: the codes of the reconstructed examples and how small they are."""
    import math

    import torch

    from tessera.api.generator import open_dataset
    from tessera.api.tokenizer import Tokenizer
    from tessera.data.loader import EvalLoader

    tokenizer = Tokenizer.load(run, options.get("weights", "ema"))
    dataset = open_dataset(tokenizer.trained, options.get("data"))
    loader = EvalLoader(dataset, seed=tokenizer.run.engine.seed, batch_size=4)
    counts, num_bytes, first = torch.zeros(tokenizer.vocab_size, dtype=torch.long), 0, None
    for batch in loader.batches(indices=loader.spread(options.get("count", 16))):
        if not len(batch):
            continue
        examples = batch.to(tokenizer.device).examples
        codes = tokenizer.encode_examples(examples).cpu()
        valid = codes[codes >= 0].flatten()
        counts += torch.bincount(valid, minlength=len(counts))
        num_bytes += tokenizer.network.adapter.num_bytes(examples)
        first = codes[0] if first is None else first
    if first is None:
        return
    bits = int(counts.sum()) * math.log2(tokenizer.vocab_size)
    content = {
        "vocab_size": tokenizer.vocab_size,
        "shape": list(first.shape),
        "codes": first.flatten()[:MAX_CODES].tolist(),
        "counts": counts.tolist(),
        "tokens": int(counts.sum()),
        "bytes": num_bytes,
        "token_bytes": bits / 8,
        "compression": 8 * num_bytes / max(bits, 1),
    }
    (out / "tokens.json").write_text(json.dumps(content) + "\n", encoding="utf-8")


def write_hits(positional: Sequence[str], options: Json, out: Path) -> None:
    """Search an index and write the results, each with its recording for the players."""
    from dataclasses import asdict

    import numpy as np

    from tessera.api.search import Index
    from tessera.modalities.audio.media import Audio

    path, query = positional
    index = Index.load(path)
    hits = index.search(query, options.get("top", 10))
    data = index.model.trained.run.data
    if index.info.data != "data of the run":
        from dataclasses import replace

        data = replace(data, path=index.info.data)
    out.mkdir(parents=True, exist_ok=True)
    notices = []
    try:
        dataset = data.full()
        numbers = {dataset.name(i): i for i in range(len(dataset))}
    except (UserError, ValueError) as error:
        numbers, notices = {}, [f"The recordings cannot be played: {error}"]
    for position, hit in enumerate(hits):
        if hit.name in numbers:
            with contextlib.suppress(ValueError):
                example: Any = dataset.item(numbers[hit.name], np.random.default_rng(0))
                samples = example.samples[:, : example.length]
                Audio(samples, example.rate_hz).write(out / f"{position:04d}.wav")
    found = {"query": query, "hits": [asdict(hit) for hit in hits], "notices": notices}
    (out / "hits.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    settings = {
        "run": path,
        "query": query,
        "count": len(hits),
        "examples": [f"{hit.similarity:.3f}  {hit.caption or hit.name}" for hit in hits],
    }
    (out / "settings.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def main(worker_type: type[Worker] = Worker) -> None:
    # The standard output carries events; whatever else prints goes to the standard error.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = worker_type(output)
    threading.Thread(target=worker.read_requests, args=[sys.stdin], daemon=True).start()
    worker.run_forever()


if __name__ == "__main__":
    main()
