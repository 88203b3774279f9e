"""A replacement for the tracker of Weights & Biases."""

from __future__ import annotations

from typing import Any

from accelerate.tracking import GeneralTracker


class FakeTracker(GeneralTracker):
    """Records its calls instead of sending them. Subclasses define the list `calls`.

    Of samples, `calls` has the keys and `values` the media.
    """

    name = "wandb"
    requires_logging_directory = False
    calls: list[tuple[Any, ...]]

    values: list[dict[str, Any]]

    def __init__(self, run_name: str, name: str | None = None):
        super().__init__()
        type(self).values = []
        self.calls.append(("project", run_name, *([name] if name is not None else [])))

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    def start(self) -> None:
        pass

    def store_init_configuration(self, values: dict) -> None:
        self.calls.append(("settings", values))

    def log(self, values: dict, step: int | None = None, **_: Any) -> None:
        self.calls.append(("log", step, sorted(values)))
        if any(name.startswith("samples/") for name in values):
            self.values.append(values)

    def finish(self) -> None:
        self.calls.append(("finish",))
