"""Discovery of files: find out what a path is, and list a folder without opening a file.

A path is a folder of files, a single file, tar shards (`shards.py`), a table (`tables.py`) or a
text file that lists paths. Names are paths relative to the folder, with "/" on every system, in
sorted order.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from tessera.data.captions import METADATA, text_file
from tessera.data.collection import FileCollection, FolderFiles, count_by_suffix
from tessera.data.shard_index import SHARD_SUFFIX
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError

COMPRESSED_SUFFIXES = (".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2")
TABLE_SUFFIXES = (".parquet", ".arrow")
LIST_SUFFIX = ".txt"
MAX_EXPANDED = 1_000_000
"""The number of paths that braces may stand for."""


@dataclass(frozen=True)
class SourceOptions:
    """How data that are no folder are read."""

    columns: tuple[str, ...] = ()
    """The columns of a table: that of the files, then those of their captions."""
    download: bool = False
    """Whether data at an address may be downloaded to the cache."""


DEFAULT_OPTIONS = SourceOptions()


def find_files(
    path: str | Path,
    suffixes: tuple[str, ...],
    noun: str,
    options: SourceOptions = DEFAULT_OPTIONS,
) -> FileCollection:
    """Find the files of a modality at a path; `noun` is "images", say."""
    source = resolve_source(path, suffixes, noun, options)
    if isinstance(source, Shards):
        from tessera.data.shards import find_in_shards

        return find_in_shards(source.files, suffixes, noun)
    if isinstance(source, Tables):
        from tessera.data.tables import find_in_tables

        return find_in_tables(source.files, suffixes, noun, options.columns)
    if isinstance(source, PathList):
        return find_listed(source.file, suffixes, noun)
    return find_in_folder(source, path, suffixes, noun)


def list_names(path: str | Path, suffixes: tuple[str, ...], options: SourceOptions) -> list[str]:
    """List the names of what is at a path, to detect its modality by the suffixes."""
    source = resolve_source(path, suffixes, "files", options)
    if isinstance(source, Shards):
        from tessera.data.shards import list_suffixes

        return list_suffixes(source.files)
    if isinstance(source, Tables):
        from tessera.data.tables import list_pseudo_names

        return list_pseudo_names(source.files)
    if isinstance(source, PathList):
        return read_path_list(source.file)
    return [source.root.name] if source.files is None else source.files


# ---- what a path is


@dataclass(frozen=True)
class Shards:
    files: list[Path]


@dataclass(frozen=True)
class Tables:
    files: list[Path]


@dataclass(frozen=True)
class PathList:
    file: Path


@dataclass(frozen=True)
class Folder:
    root: Path
    """A folder, or a single file."""
    files: list[str] | None = None
    """All files below the folder; None for a single file."""


Source = Shards | Tables | PathList | Folder


def resolve_source(
    path: str | Path, suffixes: tuple[str, ...], noun: str, options: SourceOptions
) -> Source:
    """Find out what a path is; several paths are written with braces or wildcards."""
    text = str(path)
    if is_address(text):
        from tessera.data.remote import fetch_files

        return several_files(fetch_files(expand_braces(text), options.download), text)
    root = expand_path(path, noun)
    if not os.path.lexists(root) and (found := expand_pattern(str(root))):
        return several_files(found, text)
    if root.is_file():
        return single_file(root, suffixes)
    if root.is_dir():
        return inside_folder(root, suffixes)
    raise UserError(f"{path} does not exist (that is, {root.absolute()}): give a folder of {noun}.")


def is_address(text: str) -> bool:
    """Return whether a text is an address such as https://host/file, and no path."""
    return re.match(r"[a-z][a-z0-9+.-]+://", text) is not None


def single_file(file: Path, suffixes: tuple[str, ...]) -> Source:
    name = file.name.lower()
    if name.endswith(suffixes):
        return Folder(file)
    if name.endswith(SHARD_SUFFIX):
        return Shards([file])
    if name.endswith(TABLE_SUFFIXES):
        return Tables([file])
    return PathList(file) if name.endswith(LIST_SUFFIX) else Folder(file)


def several_files(files: list[Path], text: str) -> Source:
    """Return files that a pattern or an address stands for, all of one kind."""
    names = [file.name.lower() for file in files]
    if all(name.endswith(SHARD_SUFFIX) for name in names):
        return Shards(files)
    if all(name.endswith(TABLE_SUFFIXES) for name in names):
        return Tables(files)
    raise UserError(
        f"{text} stands for {len(files):,} files ({count_by_suffix(names)}), but several files "
        "must be tar shards or parquet files: give a folder for others."
    )


def inside_folder(root: Path, suffixes: tuple[str, ...]) -> Source:
    """Return a folder, or the shards or tables in it if it has no other files of the modality."""
    if (root / "dataset_dict.json").is_file():
        splits = [one.parent.name for one in root.glob("*/state.json")]
        splits.sort(key=lambda name: (name != "train", name))
        raise UserError(
            f"{root} is a dataset of several splits ({', '.join(splits) or 'none of them here'}): "
            f"give the folder of one, such as {root / (splits or ['train'])[0]}."
        )
    if (root / "dataset_info.json").is_file() and (root / "state.json").is_file():
        return Tables(fix_listing(sorted(root.glob("*.arrow"))))
    files = list_fixed_files(root)
    if not any(name.lower().endswith(suffixes) for name in files):
        for suffix, kind in ((SHARD_SUFFIX, Shards), (TABLE_SUFFIXES, Tables)):
            if found := [root / name for name in files if name.lower().endswith(suffix)]:
                return kind(found)
    return Folder(root, files)


def expand_pattern(pattern: str) -> list[Path]:
    """Return the files that a path with braces or wildcards stands for."""
    expanded = expand_braces(pattern)
    if len(expanded) > 1:
        missing = [one for one in expanded if not Path(one).is_file()]
        if missing:
            raise UserError(
                f"{pattern} stands for {len(expanded):,} files, and {len(missing):,} of them do "
                f"not exist, such as {missing[0]}: give the numbers of the files that exist."
            )
        return fix_listing([Path(one) for one in expanded])
    found = [Path(one) for one in sorted(glob.glob(pattern)) if Path(one).is_file()]
    return fix_listing(found) if found else []


def expand_braces(pattern: str) -> list[str]:
    """Expand {000..127} and {a,b} as a shell does; a text without them is returned alone."""
    match = re.search(r"\{([^{}]*,[^{}]*|\d+\.\.\d+)\}", pattern)
    if match is None:
        return [pattern]
    inner = match[1]
    if ".." in inner and "," not in inner:
        first, last = inner.split("..")
        width = len(first) if first.startswith("0") else 0
        if abs(int(last) - int(first)) >= MAX_EXPANDED:
            raise UserError(f"{pattern} stands for more than {MAX_EXPANDED:,} files.")
        options = [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
    else:
        options = inner.split(",")
    return [
        one
        for option in options
        for one in expand_braces(pattern[: match.start()] + option + pattern[match.end() :])
    ]


def fix_listing(files: list[Path]) -> list[Path]:
    """Return the files that a run was started with, if a listing is fixed."""
    return [Path(name) for name in list_fixed([str(file) for file in files])]


# ---- folders and lists


def find_in_folder(
    source: Folder, path: str | Path, suffixes: tuple[str, ...], noun: str
) -> FolderFiles:
    if source.files is None:
        return find_single_file(source.root, suffixes, noun)
    files = source.files
    names = [name for name in files if name.lower().endswith(suffixes)]
    if not names:
        instead = f"only {count_by_suffix(files)}" if files else "no files at all"
        raise UserError(
            f"{path} has no {noun}: expected files ending in {', '.join(suffixes)}, also in "
            f"subfolders, found {instead}."
        )
    wanted = set(names)
    return FolderFiles(source.root, names, [name for name in files if name not in wanted])


def find_listed(file: Path, suffixes: tuple[str, ...], noun: str) -> FolderFiles:
    """Find the files that the lines of a text file name, relative to its folder or absolute.

    A caption is the text file beside each, or in the metadata beside the list.
    """
    lines = list_fixed(read_path_list(file))
    names = [line for line in lines if line.lower().endswith(suffixes)]
    if not names:
        raise UserError(
            f"{file} lists no {noun}: expected a path in each line, ending in "
            f"{', '.join(suffixes)}, found {describe_lines(lines)}."
        )
    root = file.parent
    texts = [text for name in names if os.path.isfile(root / (text := text_file(name)))]
    wanted = set(names)
    others = [line for line in lines if line not in wanted]
    metadata = [name for name in METADATA if (root / name).is_file()]
    return FolderFiles(root, names, [*others, *texts, *metadata])


def read_path_list(file: Path) -> list[str]:
    """Return the lines of a list, each path once; empty lines and lines with # are left out."""
    try:
        text = file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror or error}).") from None
    lines = (line.strip("\r") for line in text.split("\n"))
    kept = (line for line in lines if line.strip() and not line.startswith("#"))
    return list(dict.fromkeys(line.removeprefix("./") for line in kept if "\0" not in line))


def describe_lines(lines: Sequence[str]) -> str:
    return f"{len(lines):,} lines, such as {lines[0][:60]!r}" if lines else "nothing"


def expand_path(path: str | Path, noun: str = "files") -> Path:
    """Return a path with the home folder in place of ~; raise UserError if it cannot be one."""
    if not str(path).strip():
        raise UserError(f"The path of the data is empty: give a folder of {noun}.")
    try:
        root = Path(path).expanduser()
        root.is_file()  # fails for names that are too long, or contain a zero
        return root
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{str(path)[:200]} cannot be opened ({reason}): give a folder of {noun}."
        ) from None


@dataclass
class Listing:
    """The files of a folder as they were when a run started."""

    files: list[str] | None = None
    """None until the folder is listed."""
    checksums: dict[str, str] = field(default_factory=dict)
    """Those of archives and tables, by their names."""


_LISTING: ContextVar[Listing | None] = ContextVar("listing", default=None)


@contextmanager
def fixed_listing(listing: Listing) -> Iterator[None]:
    """Use a listing instead of the present files of the folder, or fill it if it has none."""
    token = _LISTING.set(listing)
    try:
        yield
    finally:
        _LISTING.reset(token)


def list_fixed_files(root: Path) -> list[str]:
    """List a folder, unless a run was started with other files than those that are there now."""
    listing = _LISTING.get()
    if listing is None:
        return list_files(root)
    if listing.files is None:
        listing.files = list_files(root)
    return listing.files


def list_fixed(present: list[str]) -> list[str]:
    """Return the files that a run was started with; the present ones if it starts now."""
    listing = _LISTING.get()
    if listing is None:
        return present
    if listing.files is None:
        listing.files = present
    return listing.files


def check_unchanged(name: str, checksum: str, kind: str) -> None:
    """Raise UserError if an archive is another one than when the run was started."""
    listing = _LISTING.get()
    if listing is None:
        return
    before = listing.checksums.setdefault(name, checksum)
    if before != checksum:
        raise UserError(
            f"{name} has other content than when the run was started, so its examples would be "
            f"others: put the earlier {kind} back, add --data.rescan to go on with the new one, or "
            "start another run with --fresh."
        )


def find_single_file(file: Path, suffixes: tuple[str, ...], noun: str) -> FolderFiles:
    if file.name.lower().endswith(COMPRESSED_SUFFIXES):
        raise UserError(
            f"{file} is a compressed archive, in which no member can be read without those before "
            f"it: decompress it to a {SHARD_SUFFIX} file, or unpack it."
        )
    if not file.name.lower().endswith(suffixes):
        raise UserError(
            f"{file} is a file of another kind than the {noun} that can be read "
            f"({', '.join(suffixes)}): give such a file, a folder of {noun}, tar shards, a parquet "
            "file or a text file that lists paths (unpack other archives first)."
        )
    text = file.with_suffix(".txt")
    return FolderFiles(file.parent, [file.name], [text.name] if text.is_file() else [])


def list_files(folder: str | Path) -> list[str]:
    """List all visible files below a folder, sorted; 100,000 files take about a second.

    Links to folders are followed, each folder once and real folders first, so a link that leads
    back up ends there. A link that leads nowhere is listed, so that it can be reported. Folders of
    runs are left out: a run must not read its own samples.
    """
    names: list[str] = []
    visited: set[tuple[int, int]] = set()
    folders: list[str] = [""]
    linked: list[str] = []
    while folders or linked:
        prefix = folders.pop() if folders else linked.pop(0)
        entries = list_entries(os.path.join(folder, prefix), visited)
        has_config = any(entry.name == "config.json" for entry in entries)
        if prefix and has_config and RunDirectory(os.path.join(folder, prefix)).is_run():
            continue
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if is_folder(entry):
                (linked if entry.is_symlink() else folders).append(f"{prefix}{entry.name}/")
            elif entry.is_symlink() or entry.is_file():  # no pipe or socket: reading would block
                names.append(prefix + entry.name)
    return sorted(names)


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or into a folder that may not be entered
        return False


def list_entries(folder: str, visited: set[tuple[int, int]]) -> list[os.DirEntry[str]]:
    """List a folder by name, or return nothing if it was visited under any name."""
    try:
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in visited:
            return []
        visited.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"The folder {folder} cannot be listed ({reason}).") from error
