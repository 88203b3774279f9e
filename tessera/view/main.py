"""Start the server of `tessera view`, or export a report."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import webbrowser
from pathlib import Path
from types import FrameType

from tessera.run.errors import UserError
from tessera.view.safety import is_loopback


def serve(
    folders: list[Path], *, host: str, port: int, token: str | None, open_browser: bool
) -> None:
    """Serve the page until the process is interrupted."""
    import uvicorn

    from tessera.view.server import build_app

    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    listener = bind(host, port)
    port = listener.getsockname()[1]
    address = f"http://{shown_host(host)}:{port}/" + (f"?token={token}" if token else "")
    print(f"Showing {', '.join(map(str, folders))} at {address}  (Ctrl-C stops it)", flush=True)
    if open_browser and has_browser():
        threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
    app = build_app(folders, host=host, token=token)

    class PageServer(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            app.state.view.events.end()
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    PageServer(config).run(sockets=[listener])


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address, or raise UserError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{host}:{port} cannot be used ({reason}). Give another --port, or --port 0 for any."
        ) from None
    return listener


def shown_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def has_browser() -> bool:
    """Return whether a window can be opened; a browser in the terminal would disturb."""
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
