"""Models that are handed on: folders that `tessera export` wrote, and repositories of the hub.

    tokenizer = Tokenizer.from_pretrained("exported")                     # a folder
    tokenizer = Tokenizer.from_pretrained("user/name", download=True)     # of Hugging Face's hub
    tokenizer.save_pretrained("copy")
    tokenizer.push_to_hub("user/name")

Only JSON and safetensors are downloaded; nothing is downloaded unless it is asked for.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Self

from tessera._optional import require
from tessera.run.errors import UserError, as_user_error
from tessera.run.export import REPOSITORY, export_run
from tessera.run.load import EXPORTED, TrainedRun

FILES = ["*.json", "*.safetensors", "README.md", "sample.*"]
"""What is downloaded of a repository."""
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class Pretrained:
    """The methods of classes that use a trained run."""

    trained: TrainedRun

    @classmethod
    def load(cls, run: str | Path) -> Self:
        raise NotImplementedError

    @classmethod
    def from_pretrained(
        cls, name: str | Path, *, download: bool = False, revision: str | None = None
    ) -> Self:
        """Load an export or a run directory, or a repository of the hub.

        Args:
            name: A folder, or `user/name` on the hub.
            download: Whether files may be downloaded; otherwise earlier downloads are used, and no
                connection is made.
            revision: The branch, tag or commit of the repository.
        """
        return cls.load(find_pretrained(name, download=download, revision=revision))

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write an export, as `tessera export` does, to a new folder, and return it."""
        return export_run(self.trained, Path(folder))

    def push_to_hub(
        self,
        name: str,
        *,
        private: bool = True,
        token: str | None = None,
        message: str = "Upload a model of Tessera",
    ) -> str:
        """Upload an export to a repository of the hub, created if it is missing; return its commit.

        Args:
            name: `user/name`.
            private: Whether a new repository is private.
            token: The token of the hub; by default that of `hf auth login`.
            message: The message of the commit.
        """
        if NAME.fullmatch(name) is None:
            raise UserError(f"{name!r} is no name of a repository: give it as user/name.")
        hub = import_hub("Uploading models")
        with tempfile.TemporaryDirectory() as folder:
            out = self.save_pretrained(Path(folder) / name.partition("/")[2])
            card = out / "README.md"
            card.write_text(card.read_text(encoding="utf-8").replace(REPOSITORY, name))
            api = hub.HfApi(endpoint=endpoint(), token=token)
            with explain_hub_errors(name):
                api.create_repo(name, private=private, exist_ok=True)
                done = api.upload_folder(repo_id=name, folder_path=out, commit_message=message)
        return str(done.oid)


def find_pretrained(
    name: str | Path, *, download: bool = False, revision: str | None = None
) -> Path:
    """Return the folder of an export, a run, or a repository of the hub that is here."""
    if Path(name).is_dir():
        return Path(name)
    text = str(name)
    if NAME.fullmatch(text) is None:
        raise UserError(
            f"{text} is neither a folder nor the name of a repository on the hub (user/name): give "
            "a folder that `tessera export` wrote, or a run directory."
        )
    hub = import_hub("Loading models of the hub")
    if download:
        with explain_hub_errors(text):
            api = hub.HfApi(endpoint=endpoint())
            return Path(api.snapshot_download(text, revision=revision, allow_patterns=FILES))
    # Looked up in the cache, since `local_files_only` still sends a request (huggingface_hub 2.4).
    for file in ("config.json", EXPORTED):
        found = hub.try_to_load_from_cache(text, file, revision=revision)
        if not isinstance(found, str):
            raise UserError(
                f"{text} is no folder, and it was not downloaded from the hub before: nothing is "
                "downloaded by default. Use from_pretrained(..., download=True), or give a folder."
            )
    return Path(found).parent


def endpoint() -> str | None:
    """Return the address of the hub, which the environment may replace by that of a mirror."""
    return os.environ.get("HF_ENDPOINT") or None


def import_hub(purpose: str) -> ModuleType:
    with as_user_error(ModuleNotFoundError):
        return require("huggingface_hub", extra="hub", purpose=purpose)


@contextmanager
def explain_hub_errors(name: str) -> Iterator[None]:
    """Turn every error of the hub and of the connection to it into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of the hub, of its client, or of the connection
        first = str(error).strip().splitlines()[:1]
        reason = f"{type(error).__name__}: {first[0]}" if first else type(error).__name__
        raise UserError(
            f"{name} could not be reached on the hub ({reason}). Check the name, the connection "
            "and the token."
        ) from None
