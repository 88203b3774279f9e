"""Mirrors of metrics.jsonl in TensorBoard, Weights & Biases or Trackio, through Accelerate's trackers.

A mirror may fail; the run it mirrors may not. So whatever a tracker raises is said once, and that tracker is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

TRACKERS = ("tensorboard", "wandb", "trackio")


class Mirrors:
    def __init__(self, names: tuple[str, ...], folder: Path, config: dict[str, Any], say: Callable[[str], None]):
        self._say = say
        self._trackers: dict[str, GeneralTracker] = {}
        for name in names:
            self._guarded(name, partial(self._open, name, folder, config))

    def _open(self, name: str, folder: Path, config: dict[str, Any]) -> None:
        kind = LOGGER_TYPE_TO_CLASS[name]
        tracker = kind(folder.name, logging_dir=folder) if kind.requires_logging_directory else kind(folder.name)
        tracker.start()
        self._trackers[name] = tracker
        # TensorBoard takes only plain values: a list or a None in the configuration would cost the whole mirror.
        tracker.store_init_configuration(
            {key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in config.items()}
        )

    def log(self, record: dict[str, Any]) -> None:
        values = {key: value for key, value in record.items() if isinstance(value, (int, float)) and key != "step"}
        for name, tracker in list(self._trackers.items()):
            self._guarded(name, partial(tracker.log, values, step=record["step"]))

    def close(self) -> None:
        for name, tracker in list(self._trackers.items()):
            self._guarded(name, tracker.finish)

    def _guarded(self, name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:  # whatever it is, it is not worth a run
            self._trackers.pop(name, None)
            self._say(f"The tracker {name} failed and is left alone from here on ({error}); metrics.jsonl has everything.")
