"""Responses of the server and bodies of requests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tessera.run.directory import Json
from tessera.run.errors import UserError
from tessera.view.metrics import without_nonfinite

MAX_BODY = 1_000_000


def json_response(content: Json) -> JSONResponse:
    return JSONResponse(without_nonfinite(content), headers={"cache-control": "no-store"})


def event_stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


def format_event(name: str, content: Any, event_id: str = "") -> bytes:
    prefix = f"id: {event_id}\n" if event_id else ""
    data = json.dumps(without_nonfinite(content))
    return f"{prefix}event: {name}\ndata: {data}\n\n".encode()


async def read_body(request: Request) -> Json:
    """Return the JSON object of a request of limited size."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise HTTPException(415, "The body must be JSON.")
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY:
            raise HTTPException(413, f"The body has more than {MAX_BODY:,} bytes.")
    try:
        content = json.loads(data)
    except ValueError:
        raise HTTPException(400, "The body is not valid JSON.") from None
    if not isinstance(content, dict):
        raise HTTPException(400, "The body must be a JSON object.")
    return content


# ---- errors


async def explain_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)


async def explain_invalid(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400)


async def explain_unreadable(request: Request, error: Exception) -> Response:
    """Answer when a file of a run cannot be read, or the disk is full."""
    assert isinstance(error, OSError)
    reason = error.strerror or error
    return JSONResponse({"error": f"A file cannot be used ({reason})."}, 500)


ERROR_HANDLERS = {
    HTTPException: explain_http,
    UserError: explain_invalid,
    OSError: explain_unreadable,
}
