"""Write the files of a collection as tar shards in the WebDataset convention.

Examples keep their order and their names, so that a run on the shards equals one on the folder. The
archives do not depend on the time or the user. No torch is imported.
"""

from __future__ import annotations

import io
import json
import posixpath
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tessera.data.captions import tags_to_phrases
from tessera.data.collection import FileCollection
from tessera.data.errors import UnreadableFile, guard_reading
from tessera.data.files import AnyFile, file_signature, file_suffix, open_file
from tessera.data.shard_index import SHARD_SUFFIX, build_index, escape, write_index
from tessera.data.split import CAPTION_COLUMNS
from tessera.run.directory import PARTIAL
from tessera.run.errors import UserError

Progress = Callable[[int, int], None]


@dataclass
class PackReport:
    """What was written."""

    shards: list[Path] = field(default_factory=list)
    examples: int = 0
    captions: int = 0
    bytes: int = 0
    renamed: list[tuple[str, str]] = field(default_factory=list)
    """Files that differ from another one in the suffix only, with their names in the shards."""
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """Names and reasons."""


@dataclass(frozen=True)
class PackedExample:
    key: str
    """The name of its members without suffixes."""
    file: AnyFile
    size: int
    suffix: str
    caption: tuple[str, bytes] | None
    """The suffix and the content of the caption."""


def pack_files(
    files: FileCollection, out: Path, max_bytes: int, progress: Progress | None = None
) -> PackReport:
    """Write shards of about `max_bytes` to a new folder, which appears when it is complete."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty: give a new folder as --out.")
    report = PackReport()
    temporary = out.with_name(f".{out.name}{PARTIAL}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write_shards(iterate_examples(files, report, progress), temporary, max_bytes, report)
        if not report.shards:
            reasons = "\n  ".join(f"{name}: {why}" for name, why in report.skipped[:3])
            raise UserError(f"No file could be packed:\n  {reasons}")
        for shard in report.shards:
            write_index(build_index(temporary / shard.name))
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    report.shards = [out / shard.name for shard in report.shards]
    return report


def iterate_examples(
    files: FileCollection, report: PackReport, progress: Progress | None
) -> Iterator[PackedExample]:
    """Yield what can be read; the rest is noted in the report."""
    keys: set[str] = set()
    metadata = files.metadata()
    for index in range(len(files)):
        name = files.names[index]
        try:
            example = read_example(files, index, metadata[index])
        except UnreadableFile as error:
            report.skipped.append((name, str(error)))
            continue
        if example.key in keys:  # a.jpg and a.png would be one example
            key = f"{example.key}{escape(example.suffix)}"
            report.renamed.append((name, key + example.suffix))
            example = PackedExample(
                key, example.file, example.size, example.suffix, example.caption
            )
        keys.add(example.key)
        yield example
        if progress is not None:
            progress(index + 1, len(files))


def read_example(
    files: FileCollection, index: int, metadata: Mapping[str, object]
) -> PackedExample:
    file = files.file(index)
    with guard_reading(file):
        size, suffix = file_signature(file).bytes, file_suffix(file)
        with open_file(file):
            pass
        caption = write_caption(files, index, metadata)
    folder, base = posixpath.split(files.names[index])
    stem, written = posixpath.splitext(base)
    key = posixpath.join(folder, escape(stem if written.lower() == suffix else base))
    key = posixpath.normpath(key).lstrip("/")
    while key.startswith("../"):  # of a list of paths
        key = key.removeprefix("../")
    return PackedExample(key, file, size, written or suffix, caption)


def write_caption(
    files: FileCollection, index: int, metadata: Mapping[str, object]
) -> tuple[str, bytes] | None:
    """Return the suffix and the content of a caption, with other fields of the metadata.

    Names of folders are in the name of the example already.
    """
    source = files.caption_source(index)
    content: dict[str, object] = {
        name: value
        for name, value in metadata.items()
        if name not in CAPTION_COLUMNS and isinstance(value, (str, int, float))
    }
    lines = [] if source == "folder names" else files.captions(index, lines=True)
    if not content and source in ("text files", "class labels"):
        suffix = ".txt" if source == "text files" else ".cls"
        return suffix, "\n".join(lines).encode()
    texts, tags = (files.captions(index) if lines else []), files.tags(index)
    if texts and texts != tags_to_phrases(tags):
        content["text"] = texts
    if tags:
        content["tags"] = list(tags)
    if not content:
        return None
    return ".json", json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")


def write_shards(
    examples: Iterator[PackedExample], folder: Path, max_bytes: int, report: PackReport
) -> None:
    archive: tarfile.TarFile | None = None
    filled = 0
    try:
        for example in examples:
            size = example.size + (len(example.caption[1]) if example.caption else 0)
            if archive is not None and filled + size > max_bytes:
                archive.close()
                archive = None
            if archive is None:
                path = folder / f"shards-{len(report.shards):05d}{SHARD_SUFFIX}"
                archive = tarfile.open(path, "w", errors="surrogateescape")  # noqa: SIM115
                report.shards.append(path)
                filled = 0
            add_example(archive, example)
            filled += size
            report.examples += 1
            report.captions += example.caption is not None
            report.bytes += size
    finally:
        if archive is not None:
            archive.close()


def add_example(archive: tarfile.TarFile, example: PackedExample) -> None:
    with open_file(example.file) as content:
        add_member(archive, example.key + example.suffix, example.size, content)
    if example.caption is not None:
        suffix, text = example.caption
        add_member(archive, example.key + suffix, len(text), io.BytesIO(text))


def add_member(archive: tarfile.TarFile, name: str, size: int, content: object) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    archive.addfile(member, content)  # type: ignore[arg-type]
