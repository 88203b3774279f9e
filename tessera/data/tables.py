"""The examples of tables: parquet files, and datasets that Hugging Face's `save_to_disk` wrote.

A row is an example. One column has the files, as bytes or as Hugging Face stores images, audio and
videos (`bytes` and `path`), and others may have captions. They are chosen by the features in the
schema and by their names, or by `--data.columns`. Arrow files are mapped into memory and read row
by row; of a parquet file, the row group of an example is read, so that small row groups are faster.

pyarrow is used and not `datasets`, which could run code of the dataset. No torch is imported.
"""

from __future__ import annotations

import hashlib
import io
import json
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO, Self

import numpy as np

from tessera._optional import require
from tessera.data.captions import join_lines
from tessera.data.collection import NO_CAPTION, FileCollection, RowNames
from tessera.data.discovery import check_unchanged
from tessera.data.errors import UnreadableFile, is_defect
from tessera.data.files import FileSignature, StoredFile, file_signature, open_file
from tessera.run.errors import UserError, as_user_error

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.parquet import ParquetFile

FEATURES = {"images": ("Image",), "videos": ("Video", "Image"), "audio files": ("Audio",)}
"""The features of Hugging Face that hold the files of a modality, by what these are called."""
SUFFIX_BY_FEATURE = {"Image": ".png", "Video": ".mp4", "Audio": ".wav"}
TEXT_COLUMNS = ("text", "caption", "captions", "prompt", "transcription", "sentence", "description")
"""Names of columns with captions, the preferred ones first."""
MAGIC = {
    b"\x89PNG": ".png",
    b"\xff\xd8\xff": ".jpg",
    b"GIF8": ".gif",
    b"BM": ".bmp",
    b"fLaC": ".flac",
    b"OggS": ".ogg",
    b"ID3": ".mp3",
    b"glTF": ".glb",
    b"ply": ".ply",
    b"OFF": ".off",
    b"\x1aE\xdf\xa3": ".mkv",
}
"""The beginning of a file and its suffix, for cells without a path."""


def import_pyarrow() -> ModuleType:
    return require("pyarrow", extra="datasets", purpose="Reading parquet files and datasets")


def import_parquet() -> ModuleType:
    return require("pyarrow.parquet", extra="datasets", purpose="Reading parquet files")


# ---- one table


@dataclass(frozen=True)
class TableInfo:
    """The columns of a table; `Column.kind` is the type that matters here."""

    path: str
    modified_ns: int
    num_rows: int
    columns: tuple[Column, ...]

    @property
    def checksum(self) -> str:
        content = json.dumps([self.num_rows, [str(column) for column in self.columns]])
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Column:
    name: str
    kind: str
    """file, text, class or other."""
    feature: str
    """The feature of Hugging Face, or "" if there is none."""
    classes: tuple[str, ...] = ()
    """The names of the classes of a `ClassLabel`."""


def is_parquet(path: str) -> bool:
    return path.lower().endswith(".parquet")


@lru_cache(maxsize=256)
def open_parquet(path: str, modified_ns: int) -> ParquetFile:
    return import_parquet().ParquetFile(path, memory_map=True)


@lru_cache(maxsize=256)
def open_arrow(path: str, modified_ns: int) -> pyarrow.Table:
    """Map an Arrow file into memory."""
    pyarrow = import_pyarrow()
    source = pyarrow.memory_map(path)
    try:
        return pyarrow.ipc.open_stream(source).read_all()
    except pyarrow.ArrowInvalid:  # written as a file and not as a stream
        source.seek(0)
        return pyarrow.ipc.open_file(source).read_all()


def read_info(file: Path) -> TableInfo:
    """Read the schema of a table and the number of its rows; UserError if it is none."""
    with as_user_error(ModuleNotFoundError):
        pyarrow = import_pyarrow()
    status = file.stat()
    try:
        if is_parquet(str(file)):
            opened = open_parquet(str(file), status.st_mtime_ns)
            schema, num_rows = opened.schema_arrow, opened.metadata.num_rows
        else:
            table = open_arrow(str(file), status.st_mtime_ns)
            schema, num_rows = table.schema, table.num_rows
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{file} cannot be read as a table ({reason}): it may be truncated or of another kind."
        ) from None
    columns = tuple(describe_column(field, read_features(schema)) for field in schema)
    return TableInfo(str(file), status.st_mtime_ns, num_rows, columns)


def read_features(schema: pyarrow.Schema) -> dict[str, object]:
    """Return the features that Hugging Face stores in the metadata of a schema."""
    try:
        stored = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = stored["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


def describe_column(field: pyarrow.Field, features: dict[str, object]) -> Column:
    types = import_pyarrow().types
    feature = features.get(field.name)
    feature = feature if isinstance(feature, dict) else {}
    name, labels = str(feature.get("_type", "")), feature.get("names")
    kind = "other"
    is_binary = types.is_binary(field.type) or types.is_large_binary(field.type)
    is_stored = types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0
    if is_binary or is_stored:
        kind = "file"
    elif is_text(field.type):
        kind = "text"
    elif name == "ClassLabel" and types.is_integer(field.type) and isinstance(labels, list):
        return Column(field.name, "class", name, tuple(map(str, labels)))
    return Column(field.name, kind, name)


def is_text(kind: pyarrow.DataType) -> bool:
    """Return whether a type is a text, or a list of texts."""
    types = import_pyarrow().types
    inner = kind.value_type if types.is_list(kind) or types.is_large_list(kind) else kind
    return types.is_string(inner) or types.is_large_string(inner)


@lru_cache(maxsize=8)
def read_rows(path: str, modified_ns: int, group: int, column: str) -> pyarrow.ChunkedArray:
    """Return a column of a row group of a parquet file; a few of them are kept."""
    return open_parquet(path, modified_ns).read_row_group(group, columns=[column]).column(0)


@lru_cache(maxsize=256)
def group_starts(path: str, modified_ns: int) -> np.ndarray:
    """Return the first row of each row group of a parquet file, and the number of all rows."""
    metadata = open_parquet(path, modified_ns).metadata
    sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    return np.cumsum([0, *sizes])


def read_cell(path: str, modified_ns: int, row: int, column: str) -> object:
    """Return the value of a cell."""
    if not is_parquet(path):
        return open_arrow(path, modified_ns).column(column)[row].as_py()
    starts = group_starts(path, modified_ns)
    group = int(np.searchsorted(starts, row, side="right")) - 1
    return read_rows(path, modified_ns, group, column)[row - int(starts[group])].as_py()


# ---- cells as files


@dataclass(frozen=True)
class TableCell(StoredFile):
    path: str
    modified_ns: int
    row: int
    column: str

    def __str__(self) -> str:
        return f"{self.path}/row {self.row}"

    @property
    def suffix(self) -> str:
        """The suffix of the path in the cell, or the one that its bytes suggest."""
        value = read_cell(self.path, self.modified_ns, self.row, self.column)
        name = value.get("path") if isinstance(value, dict) else None
        suffix = posixpath.splitext(name)[1] if isinstance(name, str) else ""
        return suffix or guess_suffix(self.content()[:64])

    def signature(self) -> FileSignature:
        return FileSignature(self, len(self.content()), self.modified_ns)

    def open(self) -> BinaryIO:
        return io.BytesIO(self.content())

    def content(self) -> bytes:
        value = read_cell(self.path, self.modified_ns, self.row, self.column)
        if isinstance(value, bytes):
            return value
        if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
            return value["bytes"]
        if isinstance(value, dict) and isinstance(value.get("path"), str):
            return self.read_beside(value["path"])
        raise UnreadableFile("the cell is empty")

    def read_beside(self, name: str) -> bytes:
        """Read a file that the cell names; only files below the folder of the table are read."""
        folder = Path(self.path).parent.resolve()
        file = (folder / name).resolve()
        if not file.is_relative_to(folder):
            raise UnreadableFile(
                f"the cell has no bytes, and refers to {name!r} outside the folder of the table"
            )
        file_signature(file)  # raises an error that names the file if it is missing
        with open_file(file) as content:
            return content.read()


def guess_suffix(start: bytes) -> str:
    """Return the suffix of a file by its first bytes, or ""."""
    if start[:4] == b"RIFF":
        return {b"WEBP": ".webp", b"WAVE": ".wav", b"AVI ": ".avi"}.get(start[8:12], "")
    if start[4:8] == b"ftyp":
        return ".mp4"
    return next((suffix for magic, suffix in MAGIC.items() if start.startswith(magic)), "")


# ---- the collection


@dataclass(frozen=True, eq=False)
class TableFiles(FileCollection):
    tables: tuple[TableInfo, ...]
    starts: np.ndarray
    """The first row of each table, and the number of all rows."""
    rows: np.ndarray
    """The examples of this collection among all rows."""
    file_column: str
    caption_columns: tuple[Column, ...]
    notices: tuple[str, ...] = ()
    reads_captions: bool = False

    @property
    def names(self) -> RowNames:  # type: ignore[override]
        return RowNames(self.rows, self.name_of_row)

    def name_of_row(self, row: int) -> str:
        number = int(np.searchsorted(self.starts, row, side="right")) - 1
        return f"{Path(self.tables[number].path).stem}/{row - int(self.starts[number]):08d}"

    def __len__(self) -> int:
        return len(self.rows)

    def cell(self, index: int, column: str) -> TableCell:
        row = int(self.rows[index])
        number = int(np.searchsorted(self.starts, row, side="right")) - 1
        table = self.tables[number]
        return TableCell(table.path, table.modified_ns, row - int(self.starts[number]), column)

    def file(self, index: int) -> TableCell:
        return self.cell(index, self.file_column)

    def select(self, indices: Iterable[int]) -> Self:
        return replace(self, rows=self.rows[np.fromiter(indices, dtype=np.int64)])

    def with_captions(self) -> Self:
        return replace(self, reads_captions=True)

    def without_captions(self) -> Self:
        return replace(self, reads_captions=False)

    def signature(self, index: int) -> str:
        cell = self.file(index)
        return f"{cell.row} {cell.modified_ns}"

    def captions(self, index: int, *, lines: bool = False) -> list[str]:
        if not self.reads_captions:
            return []
        texts: list[str] = []
        for column in self.caption_columns:
            cell = self.cell(index, column.name)
            try:
                value = read_cell(cell.path, cell.modified_ns, cell.row, column.name)
            except Exception as error:  # damaged pages raise nearly every type of exception
                if is_defect(error):
                    raise
                raise UnreadableFile(f"{cell}: the caption cannot be read ({error})") from error
            texts += column_texts(column, value)
        split = [line for text in texts for line in text.split("\n")] if lines else texts
        return [caption for one in split if (caption := join_lines(one))]

    def metadata(self) -> Sequence[Mapping[str, object]]:
        """Return the columns of each row that hold a text, a class or a number."""
        return [self.read_fields(index) for index in range(len(self))]

    def read_fields(self, index: int) -> dict[str, object]:
        fields: dict[str, object] = {}
        for column in self.tables[0].columns:
            if column.kind == "file":
                continue
            cell = self.cell(index, column.name)
            value = read_cell(cell.path, cell.modified_ns, cell.row, column.name)
            if isinstance(value, (str, int)):
                fields[column.name] = value
        return fields

    def caption_source(self, index: int) -> str:
        if not self.reads_captions or not self.caption_columns:
            return NO_CAPTION
        return "class labels" if self.caption_columns[0].kind == "class" else "columns"

    def classes(self) -> list[str]:
        if self.reads_captions and [one.kind for one in self.caption_columns] == ["class"]:
            return sorted(join_lines(name) for name in self.caption_columns[0].classes)
        return []


def column_texts(column: Column, value: object) -> list[str]:
    """Return the texts of a cell: of a text, a list of texts, or the number of a class."""
    if column.kind == "class":
        if not isinstance(value, int) or not 0 <= value < len(column.classes):
            return []
        return [column.classes[value].replace("_", " ")]
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, str)]


def find_in_tables(
    files: Sequence[Path], suffixes: tuple[str, ...], noun: str, columns: Sequence[str] = ()
) -> TableFiles:
    """Find the files of a modality in tables, all of which have the same columns."""
    tables: list[TableInfo] = []
    notices: list[str] = []
    for file in files:
        try:
            info = read_info(file)
        except UserError as error:
            if len(files) == 1:
                raise
            notices.append(f"{error} The table is left out.")
            continue
        check_unchanged(str(file), info.checksum, "table")
        if tables and not {one.name for one in tables[0].columns} <= {c.name for c in info.columns}:
            notices.append(f"{file} has other columns than {tables[0].path} and is left out.")
            continue
        tables.append(info)
    if not tables:
        raise UserError("\n".join(notices) or f"There is no table of {noun}.")
    file_column, captions = choose_columns(tables[0], noun, columns)
    starts = np.cumsum([0, *(table.num_rows for table in tables)])
    if not starts[-1]:
        raise UserError(f"{tables[0].path} has no rows: give a table of {noun}.")
    rows = np.arange(starts[-1])
    return TableFiles(tuple(tables), starts, rows, file_column, captions, tuple(notices))


def choose_columns(
    table: TableInfo, noun: str, columns: Sequence[str]
) -> tuple[str, tuple[Column, ...]]:
    """Return the column of the files and those of the captions, named or found."""
    by_name = {column.name: column for column in table.columns}
    for name in columns:
        if name not in by_name:
            raise UserError(f"{table.path} has no column {name!r}: {describe_columns(table)}.")
    if columns:
        if by_name[columns[0]].kind != "file":
            raise UserError(
                f"The column {columns[0]!r} of {table.path} has no files: give one with bytes "
                f"first ({describe_columns(table)})."
            )
        return columns[0], tuple(by_name[name] for name in columns[1:])
    found = [column for column in table.columns if column.kind == "file"]
    wanted = FEATURES.get(noun, ())
    matching = [one for one in found if one.feature in wanted] or [
        one for one in found if one.feature not in SUFFIX_BY_FEATURE
    ]
    if len(matching) != 1:
        raise UserError(
            f"{table.path} has {len(matching)} columns that may hold {noun}: "
            f"{describe_columns(table)}. Give the one to use with --data.columns NAME."
        )
    return matching[0].name, choose_caption_columns(table)


def choose_caption_columns(table: TableInfo) -> tuple[Column, ...]:
    """Return the column of texts with a known name, else the only one, else that of classes."""
    texts = [column for column in table.columns if column.kind == "text"]
    for name in TEXT_COLUMNS:
        if named := [column for column in texts if column.name.lower() == name]:
            return (named[0],)
    if len(texts) == 1:
        return (texts[0],)
    return tuple(column for column in table.columns if column.kind == "class")[:1]


def describe_columns(table: TableInfo) -> str:
    if not table.columns:
        return "it has no columns"
    shown = (f"{column.name} ({column.feature or column.kind})" for column in table.columns[:12])
    return f"its columns are {', '.join(shown)}"


def list_pseudo_names(files: Sequence[Path]) -> list[str]:
    """Return a name with the suffix of each column of files, to detect the modality."""
    names = []
    for column in read_info(files[0]).columns:
        if column.kind == "file":
            info = read_info(files[0])
            cell = TableCell(info.path, info.modified_ns, 0, column.name)
            suffix = SUFFIX_BY_FEATURE.get(column.feature, "")
            names.append(f"{column.name}{suffix or (cell.suffix if info.num_rows else '')}")
    return names
