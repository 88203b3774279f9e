"""What lies in a Debian package, without installing it: apt-get downloads it, and it is read in
memory, entry by entry."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path, PurePosixPath


def require_tools(what: str) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        sys.exit(
            f"{what} as a Debian package, but there is no apt-get and dpkg-deb on this machine."
        )


def download(package: str, folder: Path) -> Path:
    """The package, as Debian packed it."""
    print(f"downloading {package} ...")
    loaded = subprocess.run(
        ["apt-get", "download", package], cwd=folder, capture_output=True, text=True
    )
    packages = list(folder.glob(f"{package}_*.deb"))
    if loaded.returncode != 0 or not packages:
        sys.exit(
            f"apt-get could not download {package}:\n{loaded.stderr.strip() or loaded.stdout.strip()}"
        )
    return packages[0]


def entries(package: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    """The files in a package, each with its path there."""
    unpacked = subprocess.run(
        ["dpkg-deb", "--fsys-tarfile", str(package)], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(unpacked)) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None:
                yield PurePosixPath(member.name), file.read()
