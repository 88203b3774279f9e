"""What can be trained: each recipe is a function that returns a Run, and its name is the command's.

The functions import their networks when they are called, so that listing them costs nothing and needs no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera.folder import Refused, RunFolder
from tessera.recipes import images, meshes, music, sounds, videos

if TYPE_CHECKING:
    from tessera.config import Run

RECIPES: tuple[Callable[..., Run], ...] = (
    images.images_vqgan,
    images.images_maskgit,
    images.images_maskgit_superres,
    videos.videos_magvit2,
    sounds.sounds_codec,
    sounds.sounds_semantic,
    sounds.sounds_soundstorm,
    music.music_mulan,
    meshes.meshes_autoencoder,
    meshes.meshes_transformer,
)


def name_of(recipe: Callable[..., Run]) -> str:
    return recipe.__name__.replace("_", "-")


def summary_of(recipe: Callable[..., Run]) -> str:
    return (recipe.__doc__ or "").strip().splitlines()[0]


def named(name: str) -> Callable[..., Run]:
    """The recipe of this name, or a letter with the nearest one."""
    known = {name_of(recipe): recipe for recipe in RECIPES}
    if name in known:
        return known[name]
    import difflib

    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else "`tessera recipes` lists them."
    raise Refused(f"There is no recipe {name!r}: {hint}")


def beneath(recipe: str, part: str) -> str:
    """The recipe whose runs another stands on by default: its `tokenizer` is runs/images-vqgan, say."""
    return Path(inspect.signature(named(recipe)).parameters[part].default).name


def stored(folder: RunFolder) -> Run:
    """The run whose folder this is, as its config.json says."""
    from tessera.config import decode_like

    values: dict[str, Any] = folder.read_config()
    return decode_like(named(str(values.get("recipe")))(), values)
