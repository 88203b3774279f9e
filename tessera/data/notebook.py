"""HTML of media in notebooks; files are embedded, so a notebook can be moved."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class HasHTML(Protocol):
    """An object that a notebook shows as HTML."""

    def _repr_html_(self) -> str: ...


@runtime_checkable
class HasPNG(Protocol):
    """An object that a notebook shows as an image."""

    def _repr_png_(self) -> bytes: ...


def data_uri(content: bytes, mime_type: str) -> str:
    """Return a URI that contains the file."""
    return f"data:{mime_type};base64,{base64.b64encode(content).decode('ascii')}"


def to_html(item: object) -> str:
    """Return the HTML of an object, from its PNG or its repr if it has none."""
    if isinstance(item, HasHTML):
        return item._repr_html_()
    if isinstance(item, HasPNG):
        return f'<img src="{data_uri(item._repr_png_(), "image/png")}">'
    return f"<code>{html.escape(repr(item))}</code>"


def figures_to_html(items: Sequence[object], captions: Sequence[str]) -> str:
    """Return the items in rows, with captions below them."""
    figures = "".join(
        '<figure style="margin: 4px; width: min-content">'
        f"{to_html(item)}<figcaption>{html.escape(caption)}</figcaption></figure>"
        for item, caption in zip(items, captions, strict=True)
    )
    return f'<div style="display: flex; flex-wrap: wrap">{figures}</div>'
