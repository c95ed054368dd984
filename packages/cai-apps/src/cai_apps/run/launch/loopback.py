"""Ranks of one machine meet on 127.0.0.1: nothing of such a run listens where another machine can reach it.

torch's own store listens on every interface, and asks nobody who they are. Here the agent's store is given a socket
that is bound to loopback already; the ranks are its clients. gloo and NCCL are told to take the interface `lo`.
"""

from __future__ import annotations

import argparse
import os
import socket
from typing import TYPE_CHECKING

from cai_mesh.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

BACKEND, ADDRESS, WAITING = "cai_loopback", "127.0.0.1", 512
INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Where the transports of collectives listen. What the environment already says is kept."""


def register() -> str:
    """Makes the rendezvous known to torch's launcher; returns the name it has there."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(BACKEND, _handler)
    return BACKEND


def use_loopback() -> None:
    """Tells this process, and those it starts, to exchange data over `lo`."""
    for name, interface in INTERFACES.items():
        os.environ.setdefault(name, interface)


def confine(options: argparse.Namespace) -> None:
    """Changes options of torch.distributed.run that start one machine's ranks, so that these meet on loopback.

    Options that name several machines, an address or a rendezvous of their own stay as they are.
    """
    names_rendezvous = options.rdzv_endpoint or options.rdzv_backend not in ("static", "c10d")
    elsewhere = options.master_addr not in (None, "", ADDRESS, "localhost")
    if str(options.nnodes) not in ("1", "1:1") or (
        (names_rendezvous or elsewhere) and not options.standalone
    ):
        return
    from torch.distributed.run import get_args_parser

    usual = get_args_parser().get_default("master_port")  # a number in older torch, where runs would share it
    port = 0 if options.master_port in (None, usual) else options.master_port
    options.standalone = False
    options.rdzv_backend, options.rdzv_endpoint = register(), f"{ADDRESS}:{port}"
    use_loopback()


def listen(port: int = 0) -> socket.socket:
    """A socket that listens on loopback; port 0 takes a free one.

    Raises:
        MeshError: the port is taken.
    """
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((ADDRESS, port))
        listener.listen(WAITING)
    except OSError as error:
        listener.close()
        raise MeshError(
            f"port {port} of {ADDRESS} cannot be used", cause=error.strerror, fix="leave --master-port out"
        ) from None
    return listener


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    from torch.distributed import PrefixStore
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousStoreInfo,
    )

    seconds = parameters.get_as_int("timeout", 600) or 600
    first = [store(int(parameters.endpoint.rpartition(":")[2] or 0), seconds)]

    class Loopback(RendezvousHandler):
        """The rendezvous of one agent, which is complete at once."""

        def get_backend(self) -> str:
            return BACKEND

        @property
        def use_agent_store(self) -> bool:
            return True

        def next_rendezvous(self) -> RendezvousInfo:
            """Ranks that are started again meet in a new store: in the old one are addresses of those before them."""
            shared = first.pop() if first else store(0, seconds)
            prefixed_store = PrefixStore(parameters.run_id, shared)
            return RendezvousInfo(prefixed_store, 0, 1, RendezvousStoreInfo(ADDRESS, shared.port))

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            """Nobody else could join."""

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return parameters.run_id

        def shutdown(self) -> bool:
            return True

    return Loopback()


def store(port: int, seconds: int) -> TCPStore:
    """Return a store that listens on loopback.

    Args:
        port: its port; 0: one that is free.
        seconds: the time that ranks wait in it for each other.

    Raises:
        MeshError: the port is taken.
    """
    from datetime import timedelta

    from torch.distributed import TCPStore

    listener = listen(port)
    return TCPStore(
        ADDRESS,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
