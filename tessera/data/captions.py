"""What is said about each file of a folder, whatever its medium. Three ways, the more particular
first:

1. `name.txt` beside `name.png`: its whole text is the caption.
2. `metadata.jsonl` or `metadata.csv` in the folder or any subfolder, in the "imagefolder" layout of
   Hugging Face's datasets: `file_name`, relative to the metadata's own folder, and `text` (or
   `caption`); or, where there is no text, `tags`.
3. Only where neither exists at all: the name of the folder that a file lies in, when the files lie
   in two or more differently named folders ("golden_retriever/0001.jpg" is a golden retriever).
   Names that sort files instead of describing them are no captions: names without a letter
   ("0001"), and train, val, test and the like.

A file about which nothing is said has the caption "". One may have several: a list of texts in the
metadata (in CSV a list as JSON writes it), the phrases that tags are turned into, or, for whoever
asks, the lines of its text file. `of` gives the first.
"""

from __future__ import annotations

import contextlib
import csv
import json
import posixpath
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tessera.data.errors import UnreadableFile
from tessera.run.directory import UserError

METADATA = ("metadata.jsonl", "metadata.csv")
SAYS_NOTHING = {
    "train",
    "training",
    "val",
    "valid",
    "validation",
    "dev",
    "test",
    "testing",
    "images",
    "data",
}


@dataclass(frozen=True)
class Captions:
    root: Path
    texts: frozenset[str]
    """the files with a .txt beside them; read when asked for, since 100,000 small files are slow to
    open"""
    metadata: dict[str, tuple[str, ...]]
    by_folder: bool
    unmatched: tuple[str, ...] = ()
    """what the metadata names and the folder does not hold"""
    tags: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """of the files for which the metadata has some"""

    def of(self, name: str) -> str:
        """The caption of a file, or "". Raises Unreadable if it stands in a text file that cannot
        be read."""
        return next(iter(self.all_of(name)), "")

    def all_of(self, name: str, *, lines: bool = False) -> list[str]:
        """All captions of a file, the first one first. With `lines`, each line of its text file is
        one."""
        if name in self.texts:
            text = read_text(self.root / beside(name))
            said = text.split("\n") if lines else [text]
        elif name in self.metadata:
            said = list(self.metadata[name]) or phrases(self.tags.get(name, ()))
        else:
            said = [folder_caption(name)] if self.by_folder else []
        return [caption for one in said if (caption := one_line(one))]

    def counts(self, names: Sequence[str]) -> dict[str, int]:
        """How many of these files have a caption, by where it stands."""
        where = Counter(self.where(name) for name in names)
        return {
            place: where[place]
            for place in ("text files", "metadata", "folder names")
            if where[place]
        }

    def unrelated(self, names: Sequence[str], others: Sequence[str]) -> list[str]:
        """The files that are neither these nor anything said about them."""
        texts = {beside(name) for name in names}
        return [
            other
            for other in others
            if other not in texts and posixpath.basename(other) not in METADATA
        ]

    def where(self, name: str) -> str:
        if name in self.texts:
            return "text files"
        if self.metadata.get(name) or self.tags.get(name):
            return "metadata"
        return "folder names" if self.by_folder and folder_caption(name) else "nowhere"


def read_captions(root: Path, names: Sequence[str], others: Sequence[str]) -> Captions:
    """The captions of `names`, given the other files of the same folder (`Found.names` and
    `Found.beside`)."""
    there, known = set(others), set(names)
    texts = frozenset(name for name in names if beside(name) in there)
    files = [other for other in others if posixpath.basename(other) in METADATA]
    told = read_metadata(root, files)
    if told and not known & told.keys():
        raise UserError(
            f"{' and '.join(files)} in {root} names {len(told):,} files, of which none is there (the first is "
            f"{next(iter(told))!r}): file_name must be the path of a file, relative to the metadata's own folder"
        )
    return Captions(
        root=root,
        texts=texts,
        metadata={name: said.texts for name, said in told.items() if name in known},
        by_folder=not texts
        and not files
        and len({folder_caption(name) for name in names} - {""}) >= 2,
        unmatched=tuple(name for name in told if name not in known),
        tags={name: said.tags for name, said in told.items() if name in known and said.tags},
    )


def beside(name: str) -> str:
    return posixpath.splitext(name)[0] + ".txt"


def folder_caption(name: str) -> str:
    folder = posixpath.basename(posixpath.dirname(name))
    if folder.lower() in SAYS_NOTHING or not any(letter.isalpha() for letter in folder):
        return ""
    return one_line(folder.replace("_", " ").replace("-", " "))


def one_line(text: str) -> str:
    return " ".join(text.split())


def phrases(tags: Sequence[str]) -> list[str]:
    """Tags in words: "piano, slow, minor", "with piano, slow and minor", "with minor, slow and
    piano"."""
    if len(tags) < 2:
        return list(tags)
    rows = (tags, tags[::-1])
    return [", ".join(tags), *(f"with {', '.join(row[:-1])} and {row[-1]}" for row in rows)]


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise UnreadableFile(
            f"{file}: the caption cannot be read ({error}): save it as UTF-8 text"
        ) from error


@dataclass(frozen=True)
class Row:
    line: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class Said:
    texts: tuple[str, ...]
    tags: tuple[str, ...]


def read_metadata(root: Path, files: Sequence[str]) -> dict[str, Said]:
    """Every file that the metadata names, with what its line says."""
    told: dict[str, Said] = {}
    said_at: dict[str, str] = {}
    for file in files:
        rows = rows_of_json(root / file) if file.endswith(".jsonl") else rows_of_csv(root / file)
        for row in rows:
            at = f"{root / file}, line {row.line}"
            name = posixpath.normpath(posixpath.join(posixpath.dirname(file), file_name(row, at)))
            if name in told:
                raise UserError(
                    f"{at}: {name!r} was named before, in {said_at[name]}: keep one line for each file"
                )
            texts = texts_of(row.fields.get("text", row.fields.get("caption")), at)
            tags = tags_of(row.fields.get("tags"), at)
            told[name], said_at[name] = Said(texts, tags), at
    return told


def file_name(row: Row, at: str) -> str:
    """Refuses names that lead out of the metadata's folder: nobody's metadata may point at other
    people's files."""
    name = row.fields.get("file_name")
    if not isinstance(name, str) or not name.strip():
        has = ", ".join(row.fields) or "nothing"
        raise UserError(
            f'{at}: needs a "file_name", the path of a file beside this one, but has {has}'
        )
    flat = posixpath.normpath(name.replace("\\", "/"))
    if flat.startswith(("/", "../")) or flat in (".", "..") or flat[1:2] == ":":
        raise UserError(f"{at}: {name!r} leads out of the folder: file_name must stay inside it")
    return name


def texts_of(value: Any, at: str) -> tuple[str, ...]:
    """A caption, or a list of them; those of nothing are left out."""
    found = listed(value)
    if found is None:
        raise UserError(
            f"{at}: the caption must be a text, or a list of texts, but is {json.dumps(value)[:60]}"
        )
    return tuple(caption for one in found if (caption := one_line(one)))


def tags_of(value: Any, at: str) -> tuple[str, ...]:
    """A list of words; or one text, in which commas stand between them."""
    found = listed(value)
    if found is None:
        raise UserError(f"{at}: tags must be a list of words, but are {json.dumps(value)[:60]}")
    if isinstance(value, str) and len(found) == 1:
        found = found[0].split(",")
    return tuple(dict.fromkeys(tag for one in found if (tag := one_line(one))))


def listed(value: Any) -> list[str] | None:
    """As a list of texts, or None if it is none. In CSV, where all is text, a list is written as
    JSON writes it."""
    if isinstance(value, str) and value.lstrip().startswith('["'):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    return values if all(isinstance(one, str) for one in values) else None


def rows_of_json(file: Path) -> Iterator[Row]:
    for number, line in enumerate(lines_of(file), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}, line {number}: is not JSON ({error})") from error
        if not isinstance(fields, dict):
            raise UserError(
                f'{file}, line {number}: must be an object like {{"file_name": "a.png", "text": "..."}}'
            )
        yield Row(number, fields)


def rows_of_csv(file: Path) -> Iterator[Row]:
    reader = csv.reader(lines_of(file), strict=True)
    try:
        header = next(reader, [])
        for values in reader:
            if values and len(values) != len(header):
                raise UserError(
                    f"{file}, line {reader.line_num}: has {len(values)} fields where the first line has {len(header)}; "
                    "a caption with a comma in it must stand in double quotes"
                )
            if values:
                yield Row(reader.line_num, dict(zip(header, values)))
    except csv.Error as error:
        raise UserError(f"{file}, line {reader.line_num}: is not CSV ({error})") from error


def lines_of(file: Path) -> list[str]:
    """Split at newlines only: str.splitlines would also cut a caption at a Unicode line
    separator."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            return text.readlines()
    except (OSError, UnicodeError) as error:
        raise UserError(f"{file}: cannot be read ({error}): save it as UTF-8 text") from error
