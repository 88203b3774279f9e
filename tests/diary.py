"""What stands in for Weights & Biases in tests."""

from __future__ import annotations

from typing import Any

from accelerate.tracking import GeneralTracker


class Diary(GeneralTracker):
    """Stands in for Weights & Biases and writes down what it is told."""

    name = "wandb"
    requires_logging_directory = False
    told: list[tuple[Any, ...]]

    def __init__(self, run_name: str):
        super().__init__()
        self.told.append(("project", run_name))

    @property
    def tracker(self) -> list[Any]:
        return self.told

    def start(self) -> None:
        pass

    def store_init_configuration(self, values: dict) -> None:
        self.told.append(("settings", values))

    def log(self, values: dict, step: int | None = None, **_: Any) -> None:
        self.told.append(("log", step, sorted(values)))

    def finish(self) -> None:
        self.told.append(("finish",))
