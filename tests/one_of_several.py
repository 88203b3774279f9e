"""One process of a run of several, for tests: FOLDER CASE ENGINE_SETTINGS_AS_JSON TELL_REPLICAS."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tessera.launch import leave
from tests.runs import tiny, train_in_double


def main() -> None:
    folder, case, settings, tell_replicas = sys.argv[1:]
    engine = train_in_double(Path(folder), tiny(case, **json.loads(settings)))
    if tell_replicas == "1":
        digest = hashlib.sha256()
        for name, tensor in engine.task.state_dict().items():
            digest.update(name.encode() + tensor.numpy().tobytes())
        Path(folder, f"replica-{os.environ['RANK']}.txt").write_text(digest.hexdigest())


if __name__ == "__main__":
    main()
    leave(0)
