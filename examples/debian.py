"""Download Debian packages and read the files in them, without installing anything."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path, PurePosixPath


def check_tools() -> None:
    """Exit with a message if the tools for Debian packages are missing."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            sys.exit(
                f"The data is in Debian packages, but {tool} is not installed: run this script on "
                "Debian or Ubuntu."
            )


def download(package: str, folder: Path) -> Path:
    """Download a package with apt-get and return its file."""
    print(f"downloading {package} ...")
    done = subprocess.run(
        ["apt-get", "download", package], cwd=folder, capture_output=True, text=True
    )
    files = list(folder.glob(f"{package}_*.deb"))
    if done.returncode != 0 or not files:
        output = done.stderr.strip() or done.stdout.strip()
        sys.exit(f"apt-get could not download {package}:\n{output}")
    return files[0]


def read_entries(package: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Read the files in a package, in memory: yields path and content."""
    archive = subprocess.run(
        ["dpkg-deb", "--fsys-tarfile", str(package)], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None:
                yield PurePosixPath(member.name), file.read()
