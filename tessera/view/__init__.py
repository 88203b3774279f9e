"""`tessera view`: a page for runs, samples and prompts.

The server reads run directories without torch (`runs.py`, `metrics.py`, `samples.py`). Only the
playground loads a model, in one worker process (`jobs.py`, `worker.py`).
"""

from __future__ import annotations
