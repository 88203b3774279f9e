"""Shards and tables at addresses: whole files are copied to the local cache through fsspec.

Nothing is downloaded unless a command asks for it; without that, only what is in the cache is read,
and no connection is made. Random access needs all shards here anyway, so that a run reads its
examples in the same order as from the disk. No torch is imported.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tessera._optional import require
from tessera.data.cache import cache_folder
from tessera.run.directory import read_json, replacing_file, write_atomically
from tessera.run.errors import UserError, as_user_error

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PROTOCOLS = ("http", "https", "s3", "gs", "gcs", "az", "abfs")
"""Addresses that are opened. fsspec supports more, among them those of files on this computer."""
IDLE_SECONDS = 60.0
"""A download ends with an error if nothing arrives for so long."""


def fetch_files(addresses: Sequence[str], download: bool) -> list[Path]:
    """Return the local copies of files; with `download`, missing and changed ones are fetched."""
    for address in addresses:
        check_address(address)
    missing = [one for one in addresses if not cached_file(one).is_file()]
    if missing and not download:
        raise UserError(
            f"{len(missing):,} of {len(addresses):,} files are not in the cache "
            f"({cache_folder('downloads')}), the first of them {missing[0]}: add --data.download "
            "(--download of other commands) to download them."
        )
    if download:
        for number, address in enumerate(addresses, start=1):
            fetch_file(address, f"{number:,} of {len(addresses):,}")
    return [cached_file(address) for address in addresses]


def check_address(address: str) -> None:
    protocol = urlsplit(address).scheme
    if protocol not in PROTOCOLS or "::" in address:
        raise UserError(
            f"{address} has the protocol {protocol}, but only {', '.join(PROTOCOLS)} are supported."
        )
    if "*" in address or "?" in address:
        raise UserError(
            f"{address} has a wildcard, but files at an address cannot be listed: write their "
            "numbers in braces, as in shards-{000..127}.tar."
        )


def cached_file(address: str) -> Path:
    """Return the place of a file in the cache, whose name cannot lead out of it."""
    key = hashlib.sha256(address.encode(errors="surrogateescape")).hexdigest()[:24]
    name = os.path.basename(urlsplit(address).path)
    return cache_folder("downloads") / key / ("file" if name in ("", ".", "..") else name)


def fetch_file(address: str, label: str) -> None:
    """Download one file, unless the copy in the cache has the size and tag of the original."""
    file = cached_file(address)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.parent / "lock"):  # other processes of this computer wait for the file
            with as_user_error(ModuleNotFoundError):
                system = open_filesystem(address)
            try:
                remote = describe_remote(system, address)
                if file.is_file() and read_json(file.parent / "origin.json") == remote:
                    return
                print(f"Downloading {address} ({label}).", file=sys.stderr, flush=True)
                with replacing_file(file) as temporary:
                    system.get_file(address, str(temporary))
                    check_complete(temporary, remote)
            except UserError:
                raise
            except Exception as error:  # every protocol has its own exceptions
                shown = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                raise UserError(f"{address} cannot be downloaded ({shown}).") from None
            write_atomically(file.parent / "origin.json", json.dumps(remote) + "\n")
    except OSError as error:
        raise UserError(
            f"{file} cannot be written ({error.strerror or error}). Free some disk space, or set "
            "TESSERA_CACHE to another folder."
        ) from None


def describe_remote(system: AbstractFileSystem, address: str) -> dict[str, object]:
    """Return the address of a file with its size and tag, where the server has them."""
    info = system.info(address)
    tag = info.get("ETag") or info.get("etag") or ""
    return {"address": address, "bytes": info.get("size"), "tag": str(tag)}


def check_complete(file: Path, remote: dict[str, object]) -> None:
    expected, found = remote["bytes"], file.stat().st_size
    if isinstance(expected, int) and found != expected:
        raise UserError(
            f"{remote['address']} has {expected:,} bytes, but {found:,} arrived: the connection "
            "ended early. The same command tries again."
        )


def open_filesystem(address: str) -> AbstractFileSystem:
    protocol = urlsplit(address).scheme
    fsspec = require("fsspec", extra="remote", purpose=f"Downloading from {protocol} addresses")
    options: dict[str, object] = {}
    if protocol in ("http", "https"):
        aiohttp = require("aiohttp", extra="remote", purpose="Downloading from http addresses")
        # The default limits a download to five minutes.
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=IDLE_SECONDS, sock_read=IDLE_SECONDS
        )
        options["client_kwargs"] = {"timeout": timeout}
    try:
        return fsspec.filesystem(protocol, skip_instance_cache=True, **options)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"Downloading from {protocol} addresses needs another package ({error})."
        ) from None


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Wait until no other process of this computer has the lock, and hold it."""
    with open(file, "ab") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        yield
