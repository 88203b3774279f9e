"""Captions of the files of a folder, from three sources in this order:

1. `name.txt` beside `name.png`: its whole text is the caption.
2. `metadata.jsonl` or `metadata.csv` in the folder or a subfolder, in the "imagefolder" layout of
   Hugging Face's datasets: `file_name`, relative to the folder of the metadata, and `text` (or
   `caption`); or, without a text, `tags`.
3. Only if neither exists: the name of a file's folder, if the files are in two or more folders with
   different names ("golden_retriever/0001.jpg" is a golden retriever). Underscores are replaced by
   spaces, nothing else. Names without a character of the alphabet ("0001") and names such as train,
   val and test are not captions.

A file without a caption has the caption "". A file can have several captions: a list of texts in
the metadata (as JSON within CSV), the phrases made from tags, or the lines of its text file.
"""

from __future__ import annotations

import contextlib
import csv
import json
import posixpath
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tessera.data.errors import UnreadableFile
from tessera.run.errors import UserError

METADATA = ("metadata.jsonl", "metadata.csv")
UNINFORMATIVE = {
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
    """The files with a .txt file beside them; read on demand, since 100,000 files open slowly."""
    metadata: dict[str, tuple[str, ...]]
    by_folder: bool
    """Whether the names of folders are the captions."""
    unmatched: tuple[str, ...] = ()
    """The files that the metadata names and the folder does not have."""
    tags: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The tags of the files for which the metadata has some."""

    def get(self, name: str) -> str:
        """Return the first caption of a file, or ""; raise UnreadableFile if it cannot be read."""
        return next(iter(self.get_all(name)), "")

    def get_all(self, name: str, *, lines: bool = False) -> list[str]:
        """Return all captions of a file. With `lines`, each line of its text file is one."""
        if name in self.texts:
            text = read_text(self.root / text_file(name))
            captions = text.split("\n") if lines else [text]
        elif name in self.metadata:
            captions = list(self.metadata[name]) or tags_to_phrases(self.tags.get(name, ()))
        else:
            captions = [folder_caption(name)] if self.by_folder else []
        return [caption for one in captions if (caption := join_lines(one))]

    def source(self, name: str) -> str:
        if name in self.texts:
            return "text files"
        if self.metadata.get(name) or self.tags.get(name):
            return "metadata"
        return "folder names" if self.by_folder and folder_caption(name) else "none"


def read_captions(root: Path, names: Sequence[str], other_files: Sequence[str]) -> Captions:
    """Read the captions of `names`, given the other files of the folder."""
    others, known = set(other_files), set(names)
    texts = frozenset(name for name in names if text_file(name) in others)
    files = [other for other in other_files if posixpath.basename(other) in METADATA]
    rows = read_metadata(root, files)
    if rows and not known & rows.keys():
        raise UserError(
            f"{' and '.join(files)} in {root} names {len(rows):,} files, none of which exists (the "
            f"first is {next(iter(rows))!r}): file_name must be the path of a file, relative to "
            "the folder of the metadata"
        )
    folder_captions = {folder_caption(name) for name in names} - {""}
    return Captions(
        root=root,
        texts=texts,
        metadata={name: row.texts for name, row in rows.items() if name in known},
        by_folder=not texts and not files and len(folder_captions) >= 2,
        unmatched=tuple(name for name in rows if name not in known),
        tags={name: row.tags for name, row in rows.items() if name in known and row.tags},
    )


def find_unrelated(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the files that are neither among `names` nor captions of them."""
    texts = {text_file(name) for name in names}
    return [
        other
        for other in others
        if other not in texts and posixpath.basename(other) not in METADATA
    ]


def text_file(name: str) -> str:
    return posixpath.splitext(name)[0] + ".txt"


def folder_caption(name: str) -> str:
    folder = posixpath.basename(posixpath.dirname(name))
    if folder.lower() in UNINFORMATIVE or not any(one.isalpha() for one in folder):
        return ""
    return join_lines(folder.replace("_", " "))


def join_lines(text: str) -> str:
    """Return a text in one line; halves of surrogate pairs, which are no text, are replaced."""
    return " ".join(text.encode("utf-8", "replace").decode("utf-8").split())


def match_name(text: str, names: Sequence[str]) -> str | None:
    """Return the name that a text means, or None.

    Case, accents, spaces and punctuation do not matter ("T shirt" is "t-shirt"), unless several
    names are equal without them.
    """
    for simplify in (str, str.casefold, keep_letters):
        found = [name for name in names if simplify(name) == simplify(text)]
        if len(found) == 1:
            return found[0]
    return None


def keep_letters(text: str) -> str:
    """Return the letters and digits of a text in lower case, or all of it if it has none."""
    decomposed = unicodedata.normalize("NFKD", text).casefold()
    return "".join(one for one in decomposed if one.isalnum()) or text


def tags_to_phrases(tags: Sequence[str]) -> list[str]:
    """Return "piano, slow, minor", "with piano, slow and minor", "with minor, slow and piano"."""
    if len(tags) < 2:
        return list(tags)
    orders = (tags, tags[::-1])
    phrases = [f"with {', '.join(order[:-1])} and {order[-1]}" for order in orders]
    return [", ".join(tags), *phrases]


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise UnreadableFile(
            f"{file}: the caption cannot be read ({error}): save it as UTF-8 text"
        ) from error


@dataclass(frozen=True)
class MetadataLine:
    number: int
    fields: dict[str, object]


@dataclass(frozen=True)
class MetadataRow:
    texts: tuple[str, ...]
    tags: tuple[str, ...]


def read_metadata(root: Path, files: Sequence[str]) -> dict[str, MetadataRow]:
    """Read every file name in the metadata with its texts and tags."""
    rows: dict[str, MetadataRow] = {}
    origins: dict[str, str] = {}
    for name, line, origin in read_metadata_lines(root, files):
        if name in rows:
            raise UserError(
                f"{origin}: {name!r} was named before, in {origins[name]}: keep one line for each "
                "file"
            )
        rows[name], origins[name] = parse_metadata(line.fields, origin), origin
    return rows


def read_metadata_fields(root: Path, files: Sequence[str]) -> dict[str, dict[str, object]]:
    """Read every file name in the metadata with all fields of its line."""
    return {name: line.fields for name, line, _ in read_metadata_lines(root, files)}


def read_metadata_lines(
    root: Path, files: Sequence[str]
) -> Iterator[tuple[str, MetadataLine, str]]:
    """Yield the name of a file, its line, and the origin of the line for error messages."""
    for file in files:
        read = read_jsonl if file.endswith(".jsonl") else read_csv
        for line in read(root / file):
            origin = f"{root / file}, line {line.number}"
            name = posixpath.join(posixpath.dirname(file), get_file_name(line, origin))
            yield posixpath.normpath(name), line, origin


def parse_metadata(fields: object, origin: str) -> MetadataRow:
    """Parse the texts and tags of a JSON object; anything else has none."""
    if not isinstance(fields, dict):
        return MetadataRow((), ())
    texts = parse_texts(fields.get("text", fields.get("caption")), origin)
    return MetadataRow(texts, parse_tags(fields.get("tags"), origin))


def get_file_name(line: MetadataLine, origin: str) -> str:
    """Return the file name of a line; reject names that lead out of the folder."""
    name = line.fields.get("file_name")
    if not isinstance(name, str) or not name.strip():
        found = ", ".join(line.fields) or "nothing"
        raise UserError(
            f'{origin}: needs a "file_name", the path of a file beside this one, found {found}'
        )
    normalised = posixpath.normpath(name.replace("\\", "/"))
    leads_out = normalised.startswith(("/", "../")) or normalised in (".", "..")
    if leads_out or normalised[1:2] == ":":
        raise UserError(
            f"{origin}: {name!r} leads out of the folder: file_name must stay inside it"
        )
    return name


def parse_texts(value: object, origin: str) -> tuple[str, ...]:
    """Parse a caption or a list of captions; empty ones are dropped."""
    texts = parse_list(value)
    if texts is None:
        raise UserError(
            f"{origin}: the caption must be a text or a list of texts, got {json.dumps(value)[:60]}"
        )
    return tuple(caption for one in texts if (caption := join_lines(one)))


def parse_tags(value: object, origin: str) -> tuple[str, ...]:
    """Parse a list of words, or one text with commas between them."""
    words = parse_list(value)
    if words is None:
        raise UserError(f"{origin}: tags must be a list of words, got {json.dumps(value)[:60]}")
    if isinstance(value, str) and len(words) == 1:
        words = words[0].split(",")
    return tuple(dict.fromkeys(tag for one in words if (tag := join_lines(one))))


def parse_list(value: object) -> list[str] | None:
    """Return a list of texts, or None if it is something else. CSV has lists as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith('["'):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    texts = [one for one in values if isinstance(one, str)]
    return texts if len(texts) == len(values) else None


def read_jsonl(file: Path) -> Iterator[MetadataLine]:
    for number, line in enumerate(read_lines(file), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}, line {number}: is not JSON ({error})") from error
        if not isinstance(fields, dict):
            raise UserError(
                f'{file}, line {number}: must be an object like {{"file_name": "a.png", '
                '"text": "..."}'
            )
        yield MetadataLine(number, fields)


def read_csv(file: Path) -> Iterator[MetadataLine]:
    reader = csv.reader(read_lines(file), strict=True)
    try:
        header = next(reader, [])
        for values in reader:
            if values and len(values) != len(header):
                raise UserError(
                    f"{file}, line {reader.line_num}: has {len(values)} fields, but the first line "
                    f"has {len(header)}; put a caption with a comma into double quotes"
                )
            if values:
                yield MetadataLine(reader.line_num, dict(zip(header, values)))
    except csv.Error as error:
        raise UserError(f"{file}, line {reader.line_num}: is not CSV ({error})") from error


def read_lines(file: Path) -> list[str]:
    """Split at newlines only: str.splitlines would also split at Unicode line separators."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            return text.readlines()
    except (OSError, UnicodeError) as error:
        raise UserError(f"{file}: cannot be read ({error}): save it as UTF-8 text") from error
