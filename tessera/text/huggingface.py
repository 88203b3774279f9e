"""Load pretrained networks in the Hugging Face layout: folders with config.json and .safetensors.

They are loaded completely, without output, or an error states what to do. Only safetensors are
read, no code that comes with a model is executed, and nothing is downloaded here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

import torch

LOCAL_ONLY = {"local_files_only": True, "trust_remote_code": False}


@contextmanager
def silence_transformers(transformers: ModuleType) -> Iterator[None]:
    """Disable the progress bars and reports of transformers, which would disturb those of a run."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def translate_errors(
    transformers: ModuleType, what: str, files: str = "config.json"
) -> Iterator[None]:
    """Silence transformers, and turn its errors into one that states what to do."""
    try:
        with silence_transformers(transformers):
            yield
    except Exception as error:
        raise ValueError(
            f"{what} could not be loaded. It needs {files}, and its weights as .safetensors: other"
            " formats may contain code and are not loaded, and neither are models that require"
            f" their own code. The original error: {error}"
        ) from error


class LoadingInfo(TypedDict):
    """The entries that are used of the loading report of transformers."""

    missing_keys: Collection[str]
    mismatched_keys: Collection[tuple[str, torch.Size, torch.Size]]
    """Names, with the shape in the checkpoint and that in the model."""


@dataclass
class LoadedWeights:
    """A loaded network, and which of its weights were missing."""

    network: Any
    report: LoadingInfo

    def check_complete(self, what: str, *, unused: Sequence[str] = ()) -> Any:
        """Return the network if it is complete, else raise a ValueError.

        transformers would initialize missing weights randomly and continue. Weights whose name
        contains one of the words of `unused` may be missing.
        """
        missing = sorted(
            name for name in self.report["missing_keys"] if not any(word in name for word in unused)
        )
        mismatched = sorted(name for name, *_ in self.report["mismatched_keys"])
        if missing or mismatched:
            names = ", ".join((missing + mismatched)[:5])
            raise ValueError(
                f"{what} has weights that do not match its config.json: {len(missing)} are missing"
                f" and {len(mismatched)} have another shape ({names}). Download it again, with all"
                " of its files."
            )
        return self.network


def load_weights(model_class: Any, path: str, **options: bool) -> LoadedWeights:
    """Load a model in float32. Mismatches are reported instead of raised by transformers."""
    report = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    return LoadedWeights(
        *model_class.from_pretrained(
            path, use_safetensors=True, dtype=torch.float32, **report, **options
        )
    )


def check_model_folder(path: str, what: str) -> None:
    """Raise a ValueError unless `path` is a folder with a config.json."""
    if not Path(path, "config.json").is_file():
        raise ValueError(
            f"{what}: there is no folder {path!r} with a config.json. Give the folder of a model in"
            " the Hugging Face layout (config.json and .safetensors); nothing is downloaded."
        )
