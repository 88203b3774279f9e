"""One of several training processes for tests.

It reads runs as lines of JSON and trains them one after the other, because starting Python and
importing torch takes longer than a tiny run.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tessera.cli.launch import exit_process
from tests.garbage import freeze_for_good
from tests.runs import tiny, train_in_double


def main() -> None:
    freeze_for_good()
    replies, sys.stdout = sys.stdout, sys.stderr  # the output of a run is not a reply
    for line in sys.stdin:
        request = json.loads(line)
        if "function" in request:
            module, _, name = request["function"].partition(":")
            getattr(importlib.import_module(module), name)(**request["arguments"])
        else:
            train_one(**request)
        print("done", file=replies, flush=True)


def train_one(folder: str, case: str, engine: dict[str, Any], write_digest: bool) -> None:
    trained = train_in_double(Path(folder), tiny(case, **engine))
    if write_digest:
        digest = hashlib.sha256()
        for name, tensor in trained.task.state_dict().items():
            digest.update(name.encode() + tensor.numpy().tobytes())
        Path(folder, f"replica-{os.environ['RANK']}.txt").write_text(digest.hexdigest())


if __name__ == "__main__":
    main()
    exit_process(0)
