"""Tensors between neighbouring stages, point to point over the pp group.

The order of calls on both ends is that of a checked program, so no message carries a label. On the wire a forward
transfer whose shape the receiver cannot know yet is preceded by its shape and dtype.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cai_mesh.comm import start_exchange
from cai_mesh.errors import PlanError

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MAX_DIMS = 8
SENDS_IN_FLIGHT = 2
"""Sends that may run beside compute; one more waits for the oldest, which bounds what they keep alive."""


@dataclass(frozen=True)
class Meta:
    """Shape and dtype of a tensor that crosses a stage boundary."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Meta:
        """Of a tensor. Raises PlanError when it cannot be sent."""
        if tensor.dtype not in DTYPES or tensor.dim() > MAX_DIMS:
            raise PlanError(
                "a pipeline stage handed over something that cannot be sent",
                got=f"{tensor.dtype} of {tensor.dim()} dims",
                expected=f"a floating-point tensor of at most {MAX_DIMS} dims",
            )
        return cls(tuple(tensor.shape), tensor.dtype)

    def encode(self, device: torch.device) -> torch.Tensor:
        """As int64 [2 + MAX_DIMS]: dtype code, number of dims, sizes, padding."""
        padding = [0] * (MAX_DIMS - len(self.shape))
        return torch.tensor([DTYPES.index(self.dtype), len(self.shape), *self.shape, *padding], device=device)

    @classmethod
    def decode(cls, encoded: torch.Tensor) -> Meta:
        """What `encode` wrote."""
        code, dims, *sizes = encoded.tolist()
        return cls(tuple(sizes[:dims]), DTYPES[code])


@dataclass
class Arrival:
    """A tensor on its way in; `take` returns it once it may be used."""

    tensor: torch.Tensor
    works: Sequence[dist.Work]

    def take(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.tensor


class Wire:
    """One rank's end of all transfers of a pipeline.

    Args:
        group: the pp group. All of its ranks create their Wire at the same time.
        device: where the tensors live.
        peers: the ranks in the group that this one exchanges tensors with.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, peers: Iterable[int]):
        self.group = group
        self.device = device
        self._sending: deque[tuple[Sequence[dist.Work], torch.Tensor]] = deque()
        self._greet(sorted(peers))

    def _greet(self, peers: Sequence[int]) -> None:
        """Open the connections to all peers, in both directions.

        NCCL opens a connection on its first use and holds the host until the peer gets there. In a batch of a send
        and a receive, the send would then wait for the peer's later answer, and both ranks for ever.
        """
        out, into = ([(torch.zeros(1, device=self.device), peer) for peer in peers] for _ in range(2))
        for work in start_exchange(self.group, sends=out, receives=into):
            work.wait()

    def exchange_meta(self, peer: int, send: Meta | None, receive: bool) -> Meta | None:
        """Send and receive a Meta, both at once when both are asked for; waits for the peer.

        Args:
            peer: rank in the pp group.
            send: what to send, if anything.
            receive: whether the peer sends one.
        """
        incoming = torch.empty(2 + MAX_DIMS, dtype=torch.int64, device=self.device) if receive else None
        works = self._start(peer, send.encode(self.device) if send else None, incoming)
        for work in works:
            work.wait()
        return Meta.decode(incoming) if incoming is not None else None

    def exchange(self, peer: int, send: torch.Tensor | None, receive: Meta | None) -> Arrival | None:
        """Start sending and receiving a tensor, both at once when both are asked for; does not wait.

        Args:
            peer: rank in the pp group.
            send: contiguous tensor; must not change until `finish`.
            receive: what to expect, if anything.

        Returns:
            the tensor to come, if one was asked for.
        """
        incoming = torch.empty(receive.shape, dtype=receive.dtype, device=self.device) if receive else None
        works = self._start(peer, send, incoming)
        separate = len(works) == (send is not None) + (incoming is not None)
        if send is not None:
            self._sending.append((works[:1] if separate else works, send))
            self._wait_until(SENDS_IN_FLIGHT)
        return Arrival(incoming, works[-1:] if separate else works) if incoming is not None else None

    def finish(self) -> None:
        """Wait for all sends."""
        self._wait_until(0)

    def _wait_until(self, in_flight: int) -> None:
        while len(self._sending) > in_flight:
            works, _ = self._sending.popleft()
            for work in works:
                work.wait()

    def _start(self, peer: int, send: torch.Tensor | None, receive: torch.Tensor | None) -> list[dist.Work]:
        return start_exchange(
            self.group,
            sends=[] if send is None else [(send, peer)],
            receives=[] if receive is None else [(receive, peer)],
        )
