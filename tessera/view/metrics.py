"""Read metrics.jsonl while it grows: whole columns, appended records, or only its end.

A run of a million steps has a file of a few hundred megabytes, so a table of runs reads only the
end of each file and a few lines in between, and curves are read once and then followed.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tessera.run.directory import Json

TAIL_BYTES = 1 << 15
MAX_TAIL_BYTES = 1 << 22
"""The end of a file in which the last validation is looked for."""
SPARK_POINTS = 24
LINE_BYTES = 4096
"""What is read at each point of a spark line; longer lines are left out."""


def parse_record(line: bytes) -> Json | None:
    """Parse one line; None if it was cut short or is no record."""
    try:
        record = json.loads(line, parse_constant=lambda name: None)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if is_record else None


def without_nonfinite(content: Any) -> Any:
    """Replace numbers that JSON lacks by None; files of runs may have them."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {name: without_nonfinite(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [without_nonfinite(value) for value in content]
    return content


# ---- curves


@dataclass
class Column:
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def sampled(self, points: int) -> Json:
        """Return at most `points` points as JSON: the lowest and the highest of each interval."""
        steps, values = np.array(self.steps), np.array(self.values, dtype=np.float64)
        if len(steps) > points:
            kept = select_extremes(values, points)
            steps, values = steps[kept], values[kept]
        plain = [value if np.isfinite(value) else None for value in values.tolist()]
        return {"steps": steps.tolist(), "values": plain}


def select_extremes(values: np.ndarray, points: int) -> np.ndarray:
    """Return the indices of the first, the last, and the extremes of equal intervals."""
    edges = np.linspace(0, len(values), max(1, (points - 2) // 2) + 1).astype(int)
    finite = np.where(np.isfinite(values), values, np.inf)
    lowest = [start + int(finite[start:end].argmin()) for start, end in zip(edges, edges[1:])]
    finite = np.where(np.isfinite(values), values, -np.inf)
    highest = [start + int(finite[start:end].argmax()) for start, end in zip(edges, edges[1:])]
    return np.unique([0, *lowest, *highest, len(values) - 1])


@dataclass
class MetricsFile:
    """The records of one metrics.jsonl as columns. `update` reads only what was appended."""

    path: Path
    columns: dict[str, Column] = field(default_factory=dict)
    histograms: list[Json] = field(default_factory=list)
    """The step of each validation with its histograms by name."""
    inode: int = 0
    offset: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self, points: int) -> Json:
        """Return the columns as they are now, also while another thread reads them."""
        with self._lock:
            self.update()
            return self.as_json(points)

    def read_histograms(self) -> list[Json]:
        with self._lock:
            self.update()
            return list(self.histograms)

    @property
    def cursor(self) -> str:
        """The position up to which the file was read."""
        return f"{self.inode}:{self.offset}"

    def update(self) -> None:
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                # A resumed run replaces the file by one without the records of later steps.
                if status.st_ino != self.inode or status.st_size < self.offset:
                    self.clear(status.st_ino)
                self.add(read_lines(file, self.offset))
        except FileNotFoundError:
            self.clear(0)

    def clear(self, inode: int) -> None:
        self.columns, self.histograms, self.inode, self.offset = {}, [], inode, 0

    def add(self, lines: list[bytes]) -> None:
        for line in lines:
            self.offset += len(line)
            record = parse_record(line)
            if record is None:
                continue
            step = record["step"]
            if histograms := read_histograms(record):
                self.histograms.append({"step": step, "histograms": histograms})
            for name, value in record.items():
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if name in ("step", "examples") or not (is_number or value is None):
                    continue
                column = self.columns.get(name)
                if column is None:
                    column = self.columns[name] = Column()
                column.steps.append(step)
                column.values.append(float("nan") if value is None else value)

    def as_json(self, points: int) -> Json:
        columns = {name: column.sampled(points) for name, column in self.columns.items()}
        return {"cursor": self.cursor, "columns": columns}


def read_histograms(record: Json) -> dict[str, list[float]]:
    """Return the histograms of a validation by name."""
    return {
        name.removeprefix("histogram/"): values
        for name, values in record.items()
        if name.startswith("histogram/") and isinstance(values, list)
    }


def read_lines(file: BinaryIO, offset: int) -> list[bytes]:
    """Return the complete lines after an offset, with their line breaks."""
    file.seek(offset)
    data = file.read()
    return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)


@dataclass(frozen=True)
class Appended:
    """What was written after a cursor."""

    cursor: str
    records: list[Json]
    is_new_file: bool
    """Whether the file was replaced, so that earlier records are void."""


def read_appended(path: Path, cursor: str) -> Appended:
    """Return the records after a cursor that `MetricsFile.cursor` gave."""
    inode, _, position = cursor.partition(":")
    offset = int(position) if position.isdigit() else 0
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            is_new = str(status.st_ino) != inode or status.st_size < offset
            lines = [] if is_new else read_lines(file, offset)
    except FileNotFoundError:
        return Appended(cursor, [], is_new_file=offset > 0)
    records = [record for record in map(parse_record, lines) if record is not None]
    end = 0 if is_new else offset + sum(map(len, lines))
    return Appended(f"{status.st_ino}:{end}", records, is_new)


# ---- the end of a file


@dataclass(frozen=True)
class LastRecords:
    train: Json = field(default_factory=dict)
    validation: Json = field(default_factory=dict)
    loss: str = ""
    """The loss of the spark line."""
    spark: list[float] = field(default_factory=list)


def read_last(path: Path) -> LastRecords:
    """Return the last records of a file and a few losses, without reading all of it."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            train, validation = find_last(file, size)
            loss = next((name for name in train if name.endswith("/loss")), "")
            spark = [record[loss] for record in sample_records(file, size) if loss in record]
    except FileNotFoundError:
        return LastRecords()
    if train.get(loss) is not None:
        spark.append(train[loss])
    return LastRecords(train, validation, loss, [value for value in spark if value is not None])


def find_last(file: BinaryIO, size: int) -> tuple[Json, Json]:
    """Return the last record of a step and the last validation, from as short an end as needed."""
    tail, train, validation = TAIL_BYTES, None, None
    while True:
        file.seek(max(0, size - tail))
        for line in reversed(file.read(tail).splitlines()):
            is_validation = b'"validation"' in line
            if (validation if is_validation else train) is None:
                record = parse_record(line)
                if is_validation:
                    validation = record
                else:
                    train = record
            if train is not None and validation is not None:
                return train, validation
        if tail >= min(size, MAX_TAIL_BYTES):
            return train or {}, validation or {}
        tail *= 8


def sample_records(file: BinaryIO, size: int) -> Iterator[Json]:
    """Yield records at equal distances over the file."""
    last_step = None
    for number in range(SPARK_POINTS):
        offset = size * number // SPARK_POINTS
        file.seek(offset)
        lines = file.read(LINE_BYTES).split(b"\n")
        # After a seek the first line is incomplete; a validation may precede a step.
        for line in lines[1 if offset else 0 : 3]:
            record = None if b'"validation"' in line else parse_record(line)
            if record is not None:
                if record["step"] != last_step:  # a short file has fewer lines than points
                    yield record
                last_step = record["step"]
                break
