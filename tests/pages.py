"""The documentation as text: code blocks, prose and tables."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
"""The pages whose examples are run."""
PAGES = [*RUN_PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "bench/README.md"]
LANGUAGES = {"sh", "python", "console", "py", "text"}


def recipe_page(recipe: str) -> Path:
    return ROOT / f"docs/{recipe}.md"


def relative_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    """The line of the page at which the block starts."""
    language: str
    text: str

    def __str__(self) -> str:
        return f"{relative_name(self.page)}:{self.line}"

    def commands(self) -> Iterator[list[str]]:
        """Yield the words of each command; a backslash at the end of a line continues it."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        for line in lines:
            if words := shlex.split(line, comments=True):
                yield words


FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@functools.cache
def read_blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match[1].strip(), match[2])
        for match in FENCE.finditer(text)
    ]


@functools.cache
def read_prose(page: Path) -> str:
    """Return a page without its blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def code_spans(page: Path) -> list[str]:
    """Return the text between backticks in prose, where it may span two lines."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", read_prose(page))]


def blocks_in_language(language: str) -> list[Block]:
    blocks = [block for page in PAGES for block in read_blocks(page) if block.language == language]
    assert blocks, f"No page has a block in the language {language}, so nothing would be tested."
    return blocks


def read_table(page: Path, first_heading: str) -> list[list[str]]:
    """Return the rows of the table with this first heading, headings included."""
    lines = iter(page.read_text(encoding="utf-8").splitlines())
    rows = [next(line for line in lines if line.startswith(f"| {first_heading} |"))]
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(line)
    headings, _, *rest = rows
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in (headings, *rest)]
