"""The worker of the playground, in which some jobs last until they are cancelled or killed.

How long a job of many decoding steps takes depends on the machine. A job of `ENDLESS` decoding
steps waits after its second step instead, so that a test can cancel it at any time.
"""

from __future__ import annotations

import threading
from typing import Any, TextIO

from tessera.view.worker import Worker, main

ENDLESS = 2000


class Cancellations(set[str]):
    """The cancelled jobs, which a job can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._added = threading.Event()

    def add(self, job: str) -> None:
        super().add(job)
        self._added.set()

    def wait(self, job: str) -> None:
        while True:
            self._added.clear()
            if job in self:
                return
            self._added.wait()


class EndlessWorker(Worker):
    def __init__(self, output: TextIO):
        super().__init__(output)
        self.cancelled: Cancellations = Cancellations()

    def send(self, job: str, event: str, **values: Any) -> None:
        super().send(job, event, **values)
        if event == "progress" and (values["step"], values["steps"]) == (2, ENDLESS):
            self.cancelled.wait(job)


if __name__ == "__main__":
    main(EndlessWorker)
