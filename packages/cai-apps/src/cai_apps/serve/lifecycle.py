"""The server from its start to its end.

A first SIGTERM or Ctrl-C ends it when what is under way has been answered, or at the end of the time that there is for
it; a second one ends it at once. Where the process of a model dies, all that is under way is told so and the server
ends, so that whoever watches over it starts it again.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from typing import NoReturn

import uvicorn

from cai_apps.run.exit_codes import FAILURE
from cai_apps.serve.app import make_app
from cai_apps.serve.connections import Connections
from cai_apps.serve.errors import ApiError
from cai_apps.serve.model import ServedModel, open_models
from cai_apps.serve.options import ServerOptions
from cai_apps.serve.processes import prepare_workers
from cai_apps.serve.state import State
from cai_mesh.errors import ConfigError

LOG = logging.getLogger("cai.serve")
FAREWELL_SECONDS = 1.5
"""Seconds in which clients are told that a model's process has died, before the server ends."""
LAST_SECONDS = 2.0
"""Seconds that connections have to close at the end."""
SPARE_FILES = 256
"""Open files beside connections."""
WAITING_CONNECTIONS = 2048
"""Connections that the system holds until they are accepted."""
ACCEPTED_TOGETHER = 64
"""Connections that are accepted before those that are open have their turn: each takes a third of a millisecond."""
IDLE_SECONDS = 30
"""Seconds that a connection stays open between two requests."""


def serve(options: ServerOptions) -> NoReturn:
    """Open the models and answer requests until a signal; then end the process, with its exit code.

    Raises:
        ConfigError: the address cannot be listened at, or a model cannot be served.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    with contextlib.closing(_bound(options)) as listener:
        prepare_workers()
        _allow_files(options.limits.connections + SPARE_FILES)
        lifecycle = _Lifecycle(options)
        models = open_models(options, lifecycle.fail)
        try:
            code = lifecycle.run(models, listener)
        finally:
            for model in models:
                model.stop()
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End the process at once: the interpreter's own end takes seconds where torch is loaded."""
    atexit._run_exitfuncs()  # folders of multiprocessing
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _bound(options: ServerOptions) -> socket.socket:
    """Return a socket that is bound to the address, which shows before anything is read whether it is free."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host.strip("[]"), options.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"nothing can listen at {options.host}:{options.port}",
            cause=error.strerror or str(error),
            fix="--port another one; 0 takes one that is free",
        ) from None
    return listener


def _allow_files(count: int) -> None:
    """Let the process have so many open files, if the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class _Lifecycle:
    """A server that runs, drains and ends."""

    def __init__(self, options: ServerOptions):
        self._options = options
        self._state: State | None = None
        self._server: uvicorn.Server | None = None
        self._ending: asyncio.Task[None] | None = None

    def run(self, models: list[ServedModel], listener: socket.socket) -> int:
        """Answer requests; return the exit code."""
        state = self._state = State(self._options, models)
        connections = Connections(self._options.limits)
        config = uvicorn.Config(
            make_app(state),
            http=connections.protocol,  # type: ignore[arg-type]  # a class, or what makes one of its kind
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=ACCEPTED_TOGETHER,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        asyncio.run(self._serve(self._server, models, listener))
        return 0 if state.failure is None else FAILURE

    async def _serve(
        self, server: uvicorn.Server, models: list[ServedModel], listener: socket.socket
    ) -> None:
        loop = asyncio.get_running_loop()
        for model in models:
            for replica in model.replicas:
                replica.listen(loop)
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        listener.listen(WAITING_CONNECTIONS)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end_by_signal)
        host, port = listener.getsockname()[:2]
        names = ", ".join(model.name for model in models)
        print(f"serving {names} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
        await serving

    def fail(self, reason: str) -> None:
        """End the server, as the process of a model has ended."""
        assert self._state is not None
        if self._state.failure is not None:
            return
        self._state.failure = reason
        print(f"error: the process of a model has ended: {reason}", file=sys.stderr, flush=True)
        self._end_after(FAREWELL_SECONDS)

    def _end_by_signal(self) -> None:
        assert self._state is not None and self._server is not None
        if self._state.is_draining:
            self._server.should_exit = self._server.force_exit = True
            return
        self._state.is_draining = True
        count = len(self._state.working)
        print(
            f"ends when {count} requests are answered; a second signal ends it now",
            file=sys.stderr,
            flush=True,
        )
        self._end_after(self._options.limits.drain_seconds)

    def _end_after(self, seconds: float) -> None:
        if self._ending is None or (self._state is not None and self._state.failure is not None):
            self._ending = asyncio.create_task(self._end(seconds))

    async def _end(self, seconds: float) -> None:
        """End the server when nothing is under way, or after some seconds, in which health still tells of it."""
        assert self._state is not None and self._server is not None
        working = self._state.working
        deadline = asyncio.get_running_loop().time() + seconds
        is_failed = self._state.failure is not None
        while (working or is_failed) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        for model in self._state.models.values():
            for replica in model.replicas:
                replica.give_up(ApiError(503, "the server has ended", code="server_ended"))
        if working:
            await asyncio.wait([*working], timeout=LAST_SECONDS)
        self._server.should_exit = True
