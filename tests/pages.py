"""The pages as text: their blocks, their prose and their tables."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
"""The pages whose examples are run."""
PAGES = [*RUN, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "bench/README.md"]
LANGUAGES = {"sh", "python", "console", "py", "text"}


def page_of(recipe: str) -> Path:
    return ROOT / f"docs/{recipe}.md"


def of_the_project(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    """Where it begins in its page."""
    language: str
    text: str

    def __str__(self) -> str:
        return f"{of_the_project(self.page)}:{self.line}"

    def commands(self) -> Iterator[list[str]]:
        """The words of each command; lines that end in a backslash are one with the next."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        for line in lines:
            if words := shlex.split(line, comments=True):
                yield words


FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@functools.cache
def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1].strip(), found[2])
        for found in FENCE.finditer(text)
    ]


@functools.cache
def prose(page: Path) -> str:
    """A page without its blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def spans(page: Path) -> list[str]:
    """What stands between backticks in running text; it may go over the end of a line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def blocks_in(language: str) -> list[Block]:
    found = [block for page in PAGES for block in blocks(page) if block.language == language]
    assert found, f"no page has a block marked {language}, so nothing was tested"
    return found


def table(page: Path, first_heading: str) -> list[list[str]]:
    """The rows of the table whose first heading this is, without the line below the headings."""
    lines = iter(page.read_text(encoding="utf-8").splitlines())
    rows = [next(line for line in lines if line.startswith(f"| {first_heading} |"))]
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(line)
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in (rows[0], *rows[2:])]
