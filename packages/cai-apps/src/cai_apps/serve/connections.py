"""Connections, each held to what it may send before it asks for something, and to reading what it is told."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cai_apps.serve.options import Limits

UPGRADE = re.compile(rb"(\r\n)upgrade(?=[ \t]*:)", re.IGNORECASE)
"""A header by which clients offer another protocol, as Java's does with each request. The parser would take what comes
after it for that protocol, and the body be lost; here it is a header that nobody reads."""
BEGUN = re.compile(rb"\r(\n(u(p(g(r(a(d(e[ \t]*)?)?)?)?)?)?)?)?$", re.IGNORECASE)
"""The end of a packet that may be the beginning of that header."""


class Connections:
    """The open connections of a server.

    Args:
        limits: their number, and the time that they may take.

    Attributes:
        limits: as given.
    """

    def __init__(self, limits: Limits):
        self.limits = limits
        self._open: set[Connection] = set()
        self._silent: dict[Connection, None] = {}

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._open)

    def protocol(self, *arguments: Any, **options: Any) -> Connection:
        """Return the protocol of a new connection, as uvicorn asks for one."""
        return Connection(self, *arguments, **options)

    def add(self, connection: Connection) -> None:
        """Count a connection; where there are too many, the one that has been silent for longest is closed."""
        self._open.add(connection)
        self._silent[connection] = None
        if len(self._open) > self.limits.connections:
            oldest = next(iter(self._silent))
            self.speaks(oldest)
            oldest.abort()

    def speaks(self, connection: Connection) -> None:
        """Note that a connection asks for something."""
        self._silent.pop(connection, None)

    def is_silent(self, connection: Connection) -> None:
        """Note that a connection has been answered."""
        if connection in self._open:
            self._silent[connection] = None

    def remove(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        self._open.discard(connection)
        self._silent.pop(connection, None)


class Connection(HttpToolsProtocol):
    """A connection that is closed where headers do not come or have no end, or where nobody reads.

    Args:
        connections: all connections.
        arguments, options: those of uvicorn's protocol.
    """

    def __init__(self, connections: Connections, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._connections, self._limits = connections, connections.limits
        self._timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self._head_bytes, self._in_head, self._in_body = 0, True, False
        self._begun = b""

    def abort(self) -> None:
        """Close it at once."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connections.add(self)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connections.remove(self)
        for timer in (self._timer, self._reader_timer):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        if not self._in_body:
            data = self._without_offers(data)
        if data:
            super().data_received(data)
        if self._in_head and self._head_bytes > self._limits.head_bytes:
            self.abort()

    def _without_offers(self, data: bytes) -> bytes:
        """Return what has come of a head without offers of another protocol; what may begin one waits for the rest."""
        head, mark, body = (self._begun + data).partition(b"\r\n\r\n")
        begun = None if mark else BEGUN.search(head)
        self._begun = head[begun.start() :] if begun else b""
        return UPGRADE.sub(rb"\1ignored", head.removesuffix(self._begun)) + mark + body

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_head:  # the next request of the connection
            self._await_head()

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        self._connections.speaks(self)
        if self._timer is not None:
            self._timer.cancel()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        has_next = bool(self.pipeline)
        super().on_response_complete()
        if not has_next:
            self._connections.is_silent(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader_timer = self.loop.call_later(self._limits.unread_seconds, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader_timer is not None:
            self._reader_timer.cancel()

    def _await_head(self) -> None:
        """Wait for headers from now on."""
        self._in_head, self._head_bytes = True, 0
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(self._limits.head_seconds, self.abort)
