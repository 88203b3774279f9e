"""`tessera pack`: write a folder of files, a table or a list as tar shards."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tessera.data.discovery import SourceOptions
from tessera.run.errors import UserError, printable

MAX_SHOWN = 5
"""The number of skipped or renamed files that are printed."""


def pack(
    path: str,
    /,
    *,
    out: str,
    medium: Literal["auto", "image", "video", "audio", "mesh"] = "auto",
    shard_mb: float = 500.0,
    columns: tuple[str, ...] = (),
    download: bool = False,
) -> int:
    """Write files with their captions as tar shards in the WebDataset convention.

    The files are copied as they are. Names, order and captions stay the same, so that a run on the
    shards equals a run on the folder.

    Args:
        path: A folder, a table, a list of paths, or shards.
        out: The new folder of the shards.
        medium: The kind of files; auto takes the kind of most files.
        shard_mb: The size of a shard in megabytes.
        columns: The columns of a table to read: that of the files, then those of the captions.
        download: Download data at an address to the cache.
    """
    from tessera.data.pack import pack_files
    from tessera.modalities import MODALITIES, data_class, detect_modality

    if not 0 < shard_mb < 1e9:
        raise UserError(f"--shard-mb must be above 0, got {shard_mb:g}.")
    options = SourceOptions(columns, download)
    modality = detect_modality(path, options) if medium == "auto" else MODALITIES[medium]
    config = data_class(modality)(path=path, columns=columns, download=download)
    files = config.find_files().with_captions()
    report = pack_files(files, Path(out), round(shard_mb * 1e6))
    lines = [*files.notices]
    lines += [f"Skipped {name}: {reason}" for name, reason in report.skipped[:MAX_SHOWN]]
    if len(report.skipped) > MAX_SHOWN:
        lines.append(f"and {len(report.skipped) - MAX_SHOWN:,} more")
    if report.renamed:
        old, new = report.renamed[0]
        lines.append(
            f"{len(report.renamed):,} file(s) differ from others in the suffix only and have new "
            f"names, such as {old}: {new}"
        )
    lines.append(
        f"{report.examples:,} {config.noun}, {report.captions:,} with a caption of their own, in "
        f"{len(report.shards):,} shard(s) of {out} ({report.bytes / 1e6:,.1f} MB): use --data {out}"
    )
    print(printable("\n".join(lines)))
    return 0
