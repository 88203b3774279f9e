"""Networks of others in the Hugging Face layout, folders with config.json and .safetensors, read
with the library transformers.

They are read whole and in silence or refused with what to do; only safetensors are read, no code
that comes with a model runs, and nothing is downloaded here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LOCAL = {"local_files_only": True, "trust_remote_code": False}


def library(what: str, instead: str) -> Any:
    """transformers, or how to get it."""
    try:
        import transformers
    except ModuleNotFoundError as problem:
        raise ModuleNotFoundError(
            f'{what} needs the package {problem.name}, which is not installed: pip install "tessera[text]", or {instead}.'
        ) from problem
    return transformers


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Its progress bars and reports go to a terminal where a run shows its own; what they tell is
    asked for and refused."""
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
def told(transformers: Any, what: str, parts: str = "config.json") -> Iterator[None]:
    """In silence. The library has many kinds of errors, and few of them say what to do."""
    try:
        with quiet(transformers):
            yield
    except Exception as problem:
        raise ValueError(
            f"{what} cannot be read. One is {parts}, and its weights as .safetensors: other weights are not read, because they "
            f"may hold code that runs, and nor is a model that brings code of its own. The reader said: {problem}"
        ) from problem


@dataclass
class Weights:
    """A network as it was read, and which of its weights were not there."""

    network: Any
    report: dict[str, Any]

    def refuse_half(self, what: str, *, unused: Sequence[str] = ()) -> Any:
        """The network, if it is whole; the library would fill in chance and go on. What has one of
        the words of `unused` in its name may be missing."""
        missing = sorted(
            name for name in self.report["missing_keys"] if not any(word in name for word in unused)
        )
        other = sorted(name for name, *_ in self.report["mismatched_keys"])
        if missing or other:
            named = ", ".join((missing + other)[:5])
            raise ValueError(
                f"{what} has weights that are not those of its config.json: {len(missing)} are missing and {len(other)} have "
                f"another shape ({named}). Fetch it again, whole."
            )
        return self.network


def read_weights(kind: Any, place: str, **how: Any) -> Weights:
    """In float32. What does not fit is told to us, who refuse it."""
    asked = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    return Weights(
        *kind.from_pretrained(place, use_safetensors=True, dtype=torch.float32, **asked, **how)
    )


def refuse_no_folder(path: str, what: str) -> None:
    if not Path(path, "config.json").is_file():
        raise ValueError(
            f"{what}: there is no folder {path!r} with a config.json in it. Give the folder of a model in the Hugging Face "
            "layout (config.json and .safetensors); nothing is downloaded."
        )
