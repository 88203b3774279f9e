"""Who may use the page: checks of Host, Origin and token, and the headers of every response.

A page of another site that is open in the same browser can send requests to a local server. It is
kept out by three checks: the Host header must name this machine (against DNS rebinding), a request
that states its origin must come from this page, and the browser's statement that a request is
cross-site is believed. Scripts run only from this server's own files.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "media-src 'self' blob:",
        "connect-src 'self'",
        "font-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(self)",
}
COOKIE = "tessera-token"
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_host(value: str) -> str:
    """Return the name in a Host header: `localhost` for `localhost:7860`."""
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0]


class Guard:
    """The middleware in front of everything."""

    def __init__(self, app: ASGIApp, host: str = "127.0.0.1", token: str | None = None):
        self.app, self.token = app, token
        self.names = {*LOCAL_NAMES, host.lower()}
        self.is_local = is_loopback(host)
        if not self.is_local:
            self.names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no web sockets
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        denied = self.deny(scope)
        app: ASGIApp = denied if denied is not None else self.app
        await app(scope, receive, send_with_headers)

    def deny(self, scope: Scope) -> Response | None:
        """Return the response to a request that must not be answered, or None."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self.is_known_host(split_host(host).lower()):
            return PlainTextResponse("The Host header does not name this server.", 403)
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return PlainTextResponse("Requests of other sites are not answered.", 403)
        is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if is_foreign and headers.get("sec-fetch-mode") != "navigate":
            return PlainTextResponse("Requests of other sites are not answered.", 403)
        if is_foreign and scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("Requests of other sites are not answered.", 403)
        return self.check_token(scope, headers)

    def is_known_host(self, name: str) -> bool:
        if name in self.names:
            return True
        if self.is_local:
            return is_loopback(name)
        # An address cannot be rebound; a name could.
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def check_token(self, scope: Scope, headers: Headers) -> Response | None:
        if self.token is None:
            return None
        query = parse_qs(scope["query_string"].decode("latin-1"))
        given = query.pop("token", [""])[0]
        if given and same_text(given, self.token):
            # The token leaves the address bar, so that it is not copied with a link by accident.
            rest = urlencode(query, doseq=True)
            response = RedirectResponse(scope["path"] + (f"?{rest}" if rest else ""), 303)
            response.set_cookie(COOKIE, self.token, httponly=True, samesite="strict", path="/")
            return response
        if same_text(read_cookie(headers.get("cookie", "")), self.token):
            return None
        return PlainTextResponse(
            "This page needs a token: open the address that `tessera view` printed, which ends in "
            "?token=...",
            403,
        )


def same_text(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


def read_cookie(header: str) -> str:
    try:
        cookies = SimpleCookie(header)
    except CookieError:
        return ""
    return cookies[COOKIE].value if COOKIE in cookies else ""
