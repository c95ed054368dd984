"""What stands before every route: whom the server answers, from where, and how much they may send.

A page of another site that a browser on this machine shows can send requests here. So a request names this server as
its host, and a page that sends one is the server's own.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import logging
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cai_apps.serve.bodies import as_json
from cai_apps.serve.errors import ApiError
from cai_apps.serve.options import Limits, ServerOptions

LOG = logging.getLogger("cai.serve")
LINGER_SECONDS, LINGER_BYTES = 2.0, 2**25
"""The most that is read of a body after its answer, before the connection is closed."""
LOCAL = ("localhost", "127.0.0.1", "[::1]")
"""Names of this machine in its own browsers."""
SAFE = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
"""Headers of every answer."""


class Guard:
    """An application of ASGI that lets through what may be asked.

    Args:
        app: the routes.
        options: the token, the hosts and the limits.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions):
        self._app, self._limits = app, options.limits
        self._digest = None if options.token is None else _digest(options.token.encode())
        self._hosts = _hosts(options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer with the reason against it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        exchange = _Exchange(scope, receive, send, self._limits)
        try:
            self._check(scope)
            await self._app(scope, exchange.receive, exchange.send)
        except ApiError as error:
            await exchange.refuse(error)
        except Exception:
            LOG.exception("a request failed: %s %s", scope["method"], ascii(scope["path"])[:200])
            await exchange.refuse(ApiError(500, "the server failed at this request; its log says why"))

    def _check(self, scope: Scope) -> None:
        """Raise ApiError for a request whose host, origin, token or length is wrong."""
        headers = _single(scope["headers"])
        host = _host_of(headers.get(b"host", b""))
        if self._hosts and host not in self._hosts:
            raise ApiError(403, f"this server is not {host[:80]!r}", code="wrong_host")
        origin = headers.get(b"origin")
        if (
            origin is not None
            and origin.decode("latin-1").partition("://")[2].lower()
            != headers.get(b"host", b"").decode("latin-1").lower()
        ):
            raise ApiError(403, "a page of another site asks", code="wrong_origin")
        if self._digest is not None and not self._knows(headers.get(b"authorization", b"")):
            raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._limits.body_bytes:
            raise _too_large(self._limits.body_bytes)

    def _knows(self, authorization: bytes) -> bool:
        """Return whether a client says the token, in the same time whatever it says: as a bearer, or, as a browser can
        that opens the page, as the password of whatever user.
        """
        kind, _, value = authorization.partition(b" ")
        value = value.strip()
        if kind.lower() == b"basic":
            try:
                value = base64.b64decode(value, validate=True).partition(b":")[2]
            except binascii.Error:
                value = b""
        elif kind.lower() != b"bearer":
            value = b""
        assert self._digest is not None
        return hmac.compare_digest(_digest(value), self._digest)


class _Exchange:
    """A request and its answer: a body that is no longer than it may be, and the headers of every answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits):
        self._receive, self._send, self._most = receive, send, limits.body_bytes
        names = {name for name, _ in scope["headers"]}
        self._is_read = not names & {b"content-length", b"transfer-encoding"}
        self._bytes, self._has_started = 0, False
        self._deadline = asyncio.get_running_loop().time() + limits.body_seconds

    async def receive(self) -> Message:
        """Return a part of the body.

        Raises:
            ApiError: it is too long, or does not come.
        """
        if self._is_read:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, "the body did not come", code="timeout") from None
        if message["type"] == "http.request":
            self._bytes += len(message.get("body", b""))
            self._is_read = not message.get("more_body", False)
        if self._bytes > self._most:
            self._is_read = False
            raise _too_large(self._most)
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the answer. A connection with a body that nobody has read is closed after it."""
        if message["type"] == "http.response.start":
            self._has_started = True
            close = () if self._is_read else ((b"connection", b"close"),)
            message = {**message, "headers": [*message.get("headers", ()), *SAFE, *close]}
        elif not self._is_read and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._linger()
            message = {"type": "http.response.body"}
        await self._send(message)

    async def _linger(self) -> None:
        """Read on for a while, and keep nothing: many clients read an answer only when they have sent all."""
        count = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while not self._is_read and count < LINGER_BYTES:
                    message = await self._receive()
                    count += len(message.get("body", b""))
                    self._is_read = not message.get("more_body", False)

    async def refuse(self, error: ApiError) -> None:
        """Send an error, unless an answer has begun."""
        if self._has_started:
            return
        content = as_json(error.body)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
        headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
        if error.status == 401:
            headers += [(b"www-authenticate", kind + b' realm="cai"') for kind in (b"Bearer", b"Basic")]
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": content})


def _hosts(options: ServerOptions) -> frozenset[str]:
    """Return the names by which the server may be called; none: by any, as a token is asked for."""
    if options.is_local:
        return frozenset((*LOCAL, _bracketed(options.host), *(host.lower() for host in options.hosts)))
    return frozenset(host.lower() for host in options.hosts)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host.lower()


def _host_of(value: bytes) -> str:
    """Return the name in a Host header, without its port."""
    try:
        parts = urlsplit("//" + value.decode("ascii"))
        parts.port  # noqa: B018  raises where it is no number
        name = parts.hostname or ""
    except (ValueError, UnicodeDecodeError):
        return ""
    is_plain = parts.username is None and not parts.path and not parts.query and not parts.fragment
    return _bracketed(name) if is_plain else ""


def _single(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return headers by name; raise ApiError where one that is checked comes twice."""
    values: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in values and name in (b"host", b"origin", b"authorization", b"content-length"):
            raise ApiError(400, f"two headers {name.decode('latin-1')}", code="invalid_header")
        values[name] = value
    return values


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"a body has {limit} bytes at most", code="body_too_large")
