"""Tensors from one rank of a group to another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from cai_mesh.comm._exit import ran_on

Message = tuple[torch.Tensor, int]
"""A tensor and the rank in the group that it goes to or comes from."""


def send(tensor: torch.Tensor, to: int, group: dist.ProcessGroup | None) -> None:
    """Send a contiguous tensor to rank `to` of the group (None: all ranks); waits until it may be changed again."""
    ran_on(tensor.device)
    dist.send(tensor, group=group, group_dst=to)


def receive(tensor: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    """Fill a contiguous tensor with what rank `source` of the group sends; waits for it."""
    ran_on(tensor.device)
    dist.recv(tensor, group=group, group_src=source)


def start_exchange(
    group: dist.ProcessGroup, *, sends: Sequence[Message] = (), receives: Sequence[Message] = ()
) -> list[dist.Work]:
    """Start sends, then receives, as one batch that no order of the peers can block; does not wait.

    Returns a handle each, in that order, or fewer where the backend has one for all of them.
    """
    moves = [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for tensor, peer in sends]
    moves += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for tensor, peer in receives]
    if moves:
        ran_on(moves[0].tensor.device)
    return dist.batch_isend_irecv(moves)
