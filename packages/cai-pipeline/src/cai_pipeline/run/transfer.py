"""Tensors between neighbouring stages, point to point over the pp group.

Both ends make their calls in the order of a checked program, so messages need no tags. A transfer is of one tensor or
of several, whose number both ends know. The first forward transfer of new shapes is preceded by a message with shapes
and dtypes. What is sent may be packed in a byte an element (`wire`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from cai_mesh.comm import start_exchange
from cai_mesh.errors import PlanError
from cai_mesh.layout import attach, record_of
from cai_pipeline.run.wire import Wire, as_hidden, pack, packed_bytes, unpack

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MAX_DIMS = 8
ENCODED = 3 + MAX_DIMS
SENDS_IN_FLIGHT = 2
"""Sends that may overlap compute. One more waits for the oldest, which limits the memory that sends keep alive."""


@dataclass(frozen=True)
class TensorMeta:
    """Shape and dtype of a tensor that is sent between stages, and whether it is a part (`Record.part`)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    part: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """The description of `tensor`. Raises PlanError when it cannot be sent."""
        if tensor.dtype not in DTYPES or tensor.dim() > MAX_DIMS:
            raise PlanError(
                "the output of a pipeline stage cannot be sent",
                got=f"{tensor.dtype} of {tensor.dim()} dims",
                expected=f"a floating-point tensor of at most {MAX_DIMS} dims",
            )
        return cls(tuple(tensor.shape), tensor.dtype, record_of(tensor).part)

    def encode(self, device: torch.device) -> torch.Tensor:
        """As int64 [ENCODED]: dtype code, whether a part, number of dims, sizes, padding."""
        padding = [0] * (MAX_DIMS - len(self.shape))
        numbers = [DTYPES.index(self.dtype), self.part, len(self.shape), *self.shape, *padding]
        return torch.tensor(numbers, device=device)

    @classmethod
    def decode(cls, encoded: torch.Tensor) -> TensorMeta:
        """The description that `encode` wrote."""
        code, part, dims, *sizes = encoded.tolist()
        return cls(tuple(sizes[:dims]), DTYPES[code], bool(part))


Metas = tuple[TensorMeta, ...]
"""The descriptions of all tensors of a transfer."""


@dataclass
class PendingReceive:
    """The tensors of one transfer that are being received.

    Args:
        incoming: the tensors to receive, as they travel.
        works: the operations to wait for.
        metas: the descriptions of the tensors.
        packed: whether each comes packed.
    """

    incoming: Sequence[torch.Tensor]
    works: Sequence[dist.Work]
    metas: Metas
    packed: Sequence[bool]

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Wait for the tensors and return them."""
        for work in self.works:
            work.wait()
        return tuple(map(_taken_out, self.incoming, self.metas, self.packed))


def _taken_out(received: torch.Tensor, meta: TensorMeta, packed: bool) -> torch.Tensor:
    tensor = unpack(received, meta.shape, meta.dtype) if packed else received
    if meta.part:
        attach(tensor, part=True)
    return tensor


class P2PCommunicator:
    """Sends and receives tensors between this rank and its neighbours in the pipeline.

    Args:
        group: the pp group; all its ranks create their communicator at the same time.
        device: the device of the tensors.
        peers: the ranks in the group that this one exchanges tensors with.
        wire: "fp8": hidden states travel packed.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, peers: Iterable[int], wire: Wire = "full"
    ):
        self.group = group
        self.device = device
        self.wire = wire
        self._sending: deque[tuple[Sequence[dist.Work], Sequence[torch.Tensor]]] = deque()
        self._open_connections(sorted(peers))

    def _open_connections(self, peers: Sequence[int]) -> None:
        """Open the connections to all peers, in both directions.

        NCCL opens a connection on its first use and blocks the host until the peer uses it too. In a batch of a send
        and a receive, each rank could block on a connection that the peer opens only later: a deadlock.
        """
        out, into = ([(torch.zeros(1, device=self.device), peer) for peer in peers] for _ in range(2))
        for work in start_exchange(self.group, sends=out, receives=into):
            work.wait()

    def exchange_meta(self, peer: int, send: Metas | None, receive: int) -> Metas | None:
        """Send the shapes and dtypes of a transfer, receive those of one, or both at once; waits for the peer.

        Args:
            peer: rank in the pp group.
            send: the descriptions to send, or None.
            receive: the number of tensors that the peer sends.
        """
        incoming = [torch.empty(ENCODED, dtype=torch.int64, device=self.device) for _ in range(receive)]
        for work in self._start(peer, [meta.encode(self.device) for meta in send or ()], incoming):
            work.wait()
        return tuple(map(TensorMeta.decode, incoming)) or None

    def exchange(
        self, peer: int, send: Sequence[torch.Tensor], receive: Metas | None
    ) -> PendingReceive | None:
        """Start sending tensors, receiving some, or both at once; does not wait.

        Args:
            peer: rank in the pp group.
            send: contiguous tensors, none where nothing is sent; must not change until `finish`.
            receive: shapes and dtypes of the tensors to receive, or None.

        Returns:
            the tensors being received, or None.
        """
        send = [pack(t) if packed else t for t, packed in zip(send, self._packed(send), strict=True)]
        packed = self._packed(receive or ())
        incoming = [
            self._room(*meta_and_packed) for meta_and_packed in zip(receive or (), packed, strict=True)
        ]
        works = self._start(peer, send, incoming)
        separate = len(works) == len(send) + len(incoming)
        if send:
            self._sending.append((works[: len(send)] if separate else works, send))
            self._wait_until(SENDS_IN_FLIGHT)
        if not incoming:
            return None
        return PendingReceive(incoming, works[len(send) :] if separate else works, receive or (), packed)

    def _packed(self, tensors: Sequence[torch.Tensor | TensorMeta]) -> list[bool]:
        """Whether each tensor of a transfer travels packed."""
        if self.wire == "full":
            return [False] * len(tensors)
        return as_hidden([tuple(tensor.shape) for tensor in tensors])

    def _room(self, meta: TensorMeta, packed: bool) -> torch.Tensor:
        """An empty tensor to receive a tensor into."""
        if not packed:
            return torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
        return torch.empty(packed_bytes(meta.shape), dtype=torch.uint8, device=self.device)

    def finish(self) -> None:
        """Wait for all sends."""
        self._wait_until(0)

    def _wait_until(self, in_flight: int) -> None:
        while len(self._sending) > in_flight:
            works, _ = self._sending.popleft()
            for work in works:
                work.wait()

    def _start(
        self, peer: int, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]
    ) -> list[dist.Work]:
        return start_exchange(
            self.group,
            sends=[(tensor, peer) for tensor in send],
            receives=[(tensor, peer) for tensor in receive],
        )


def signature_of(inputs: Mapping[str, Any], device: torch.device) -> tuple[Any, ...]:
    """The key that the descriptions of tensors between stages depend on; equal on all ranks, as their inputs are.

    Without graphs nobody knows which of them are parts.
    """
    tensors = ((k, tuple(v.shape), v.dtype) for k, v in inputs.items() if isinstance(v, torch.Tensor))
    graphs, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled(device.type)
    return (graphs, autocast, *sorted(tensors, key=lambda entry: entry[0]))
