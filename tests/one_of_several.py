"""One of several processes that train together, for tests: it does the runs that it is told of in
lines of JSON, until there are no more. To start and to import torch takes longer than a tiny run,
so one process does many."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tessera.cli.launch import leave
from tests.runs import tiny, train_in_double


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what a run says of itself is no answer
    for line in sys.stdin:
        train_one(**json.loads(line))
        print("done", file=answers, flush=True)


def train_one(folder: str, case: str, engine: dict[str, Any], tell_replicas: bool) -> None:
    trained = train_in_double(Path(folder), tiny(case, **engine))
    if tell_replicas:
        digest = hashlib.sha256()
        for name, tensor in trained.task.state_dict().items():
            digest.update(name.encode() + tensor.numpy().tobytes())
        Path(folder, f"replica-{os.environ['RANK']}.txt").write_text(digest.hexdigest())


if __name__ == "__main__":
    main()
    leave(0)
