"""The table of adversary.py: one row a kind of attack, summed over several calls."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Row:
    """One line of the table."""

    what: str
    unit: str
    tried: int = 0
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Further numbers of attempts, which parts add up."""
    peaks: dict[str, float] = field(default_factory=dict)
    """The largest values, by their name with a unit."""
    cpu_seconds: float = 0.0
    seeds: list[int] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)

    def fail(self, problem: str) -> None:
        self.problems.append(problem)

    def measure(self, **values: float) -> None:
        """Keep the largest of each value; the name ends in its unit."""
        for name, value in values.items():
            self.peaks[name] = max(value, self.peaks.get(name, value))

    def add(self, other: Row) -> None:
        """Add what another part of the same attack found."""
        self.tried += other.tried
        self.problems += other.problems
        self.counts.update(other.counts)
        self.measure(**other.peaks)
        self.cpu_seconds += other.cpu_seconds
        self.seeds = sorted({*self.seeds, *other.seeds})
        self.commits = list(dict.fromkeys([*self.commits, *other.commits]))

    @property
    def remark(self) -> str:
        parts = [f"{number:,} {name}" for name, number in self.counts.items()]
        for name, value in self.peaks.items():
            *words, unit = name.split("_")
            parts.append(f"{' '.join(words)} {value:,.{1 if value < 100 else 0}f} {unit}")
        return ", ".join(parts)


def save_rows(file: Path, rows: list[Row]) -> list[Row]:
    """Add rows to those of a file; return all of them, in the order of their first part."""
    found = [Row(**entry) for entry in json.loads(file.read_text())] if file.exists() else []
    merged = {row.what: row for row in found}
    for row in merged.values():
        row.counts = Counter(row.counts)
    for row in rows:
        merged.setdefault(row.what, Row(row.what, row.unit)).add(row)
    file.write_text(json.dumps([vars(row) for row in merged.values()], indent=1))
    return list(merged.values())


def format_table(rows: list[Row]) -> str:
    lines = [
        "| attack | tried | broken | remark | CPU time | seeds | commits |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.what} | {row.tried:,} {row.unit} | {len(row.problems)} | {row.remark} | "
        f"{row.cpu_seconds / 60:.1f} min | {', '.join(map(str, row.seeds))} | "
        f"{', '.join(row.commits)} |"
        for row in rows
    ]
    return "\n".join(lines)


def current_commit(folder: Path) -> str:
    """Return the short hash of the commit in a folder; empty outside of a repository."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip()
