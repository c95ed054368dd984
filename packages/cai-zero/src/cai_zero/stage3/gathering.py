"""Gathering of stage 3: units are unsharded before their use, the next ones while they are used.

Gathers have a communicator of their own and one order on all ranks (`GatherOrder`); reductions have theirs. So a rank
whose data skip a block takes part in its gather and its reduction all the same, and nothing waits for ever.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from cai_mesh.comm import PeerGather, SideStream
from cai_mesh.errors import PlanError
from cai_mesh.layout import ReduceSpec, count_writes
from cai_mesh.protocols import CommHandle, Residency
from cai_mesh.storage import FlatUnit, StoredShard
from cai_zero.reduction.compression import Compression, gather_weights
from cai_zero.reduction.reducer import Reducible
from cai_zero.stage3.order import GatherOrder


@dataclass(frozen=True)
class Gather:
    """The times and means of stage 3's gathers.

    Args:
        reshard_after_forward: False keeps parameters unsharded until their backward: one gather less, the memory of
            an unsharded model in compute dtype more.
        prefetch_bytes: parameters gathered ahead of their use, in bytes; the next unit always is.
        copy_engines: gather and reduce by copies between the GPUs of one host, not by kernels on multiprocessors.

    Raises `PlanError` for a negative budget.
    """

    reshard_after_forward: bool = True
    prefetch_bytes: int = 0
    copy_engines: bool = False

    def __post_init__(self) -> None:
        if self.prefetch_bytes < 0:
            raise PlanError("prefetch_bytes is negative", got=self.prefetch_bytes, expected="0 or more")


@dataclass(eq=False)
class Part:
    """One chunk of a unit.

    Args:
        unit: its shard and its unsharded parameters.
        spec: the axes over which its gradients are summed.
        stored: the shard, as its residency knows it.
        group: ranks that share the chunk, for gathers alone (None: one).
        reducible: its gradients on their way to their sum (None: frozen).
        peer: gathers by copy engines instead of collectives.
        still: places of the parameters that have been frozen until now.
    """

    unit: FlatUnit
    spec: ReduceSpec
    stored: StoredShard
    group: dist.ProcessGroup | None
    reducible: Reducible | None
    peer: PeerGather | None = None
    still: list[int] = field(default_factory=list)

    @property
    def unfrozen(self) -> list[int]:
        """Places of those that somebody has unfrozen since."""
        return [i for i in self.still if self.unit.kept[i].requires_grad]


@dataclass(eq=False)
class Sharded:
    """The chunks of one module (one per dtype, reduce spec and whether it trains) and where they stand.

    Args:
        module: the unit.
        parts: its chunks; none for a model whose parameters all lie in blocks.
        handles: gathers under way.
        versions: the versions of the shards when they were gathered.
        is_unsharded: whether the module sees unsharded parameters.
    """

    module: nn.Module
    parts: list[Part]
    handles: list[CommHandle] | None = None
    versions: tuple[int, ...] = ()
    is_unsharded: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded parameters."""
        return sum(part.unit.unsharded.numel() * part.unit.unsharded.element_size() for part in self.parts)


class Gatherer:
    """Unshards units and frees them.

    Args:
        units: all units, in the order of their first use; the model itself first.
        residency: the memory the shards live in.
        device: the device of the unsharded parameters.
        options: the times of gathers, and the means.
        compression: the compression of parameters in flight.
        passed: told, one by one, of the units that this rank's backward passes by.
        unexpected: told of a gather that the order does not have, before it, by the name of a parameter.
    """

    def __init__(
        self,
        units: Sequence[Sharded],
        residency: Residency,
        device: torch.device,
        *,
        options: Gather = Gather(),
        compression: Compression = Compression(),  # noqa: B008 (frozen)
        passed: Callable[[Sharded], None] = lambda unit: None,
        unexpected: Callable[[str], None] = lambda name: None,
    ):
        self.units, self.device, self._residency = list(units), device, residency
        self._stream, self._compression = SideStream(device), compression
        self._ahead, self._keep = options.prefetch_bytes, not options.reshard_after_forward
        self.order: GatherOrder[Sharded] = GatherOrder(self.units, [self.units[0], *reversed(self.units[1:])])
        self._prefetched: deque[Sharded] = deque()
        self._backward = False
        self._in_backward: set[Sharded] = set()  # used in the backward under way and not free again
        self._passed, self._unexpected = passed, unexpected
        self._begun = False  # a forward, by what `begin_step` has gathered
        self.keeps_last = False  # after a forward without gradients too
        self._holds_all = False

    # -- one unit ------------------------------------------------------------------------------------------------

    def start(self, unit: Sharded) -> None:
        """Begin to gather a unit that is neither unsharded nor on its way."""
        if unit.is_unsharded or unit.handles is not None:
            return
        coming = [self._residency.fetch(part.stored) for part in unit.parts]
        for part in unit.parts:
            part.unit.allocate_storage()
        with self._stream.after_compute():
            unit.handles = [
                self._gather(part, handle) for part, handle in zip(unit.parts, coming, strict=True)
            ]
        unit.versions = self._versions(unit)
        if self._stream.stream is not None:
            unit.handles = [self._stream.mark()]

    @torch.no_grad()
    def _gather(self, part: Part, coming: CommHandle) -> CommHandle:
        unit = part.unit
        coming.wait()
        shard, asynchronous = part.stored.on_device, self._stream.stream is None
        assert shard is not None
        return gather_weights(
            self._compression, unit.unsharded, shard, part.group, async_op=asynchronous, peer=part.peer
        )

    def _versions(self, unit: Sharded) -> tuple[int, ...]:
        return (count_writes(), *(self._residency.version(part.stored) for part in unit.parts))

    def is_stale(self, unit: Sharded) -> bool:
        """Whether the shards have changed since they were gathered last."""
        return unit.versions != self._versions(unit)

    def finish(self, unit: Sharded) -> None:
        """Return with the unit unsharded, gathering it now if nobody has begun to."""
        if unit.is_unsharded:
            return
        self.start(unit)
        for handle in unit.handles or ():
            handle.wait()
        unit.handles = None
        for part in unit.parts:
            self._residency.release(part.stored)
            part.unit.swap_in()
        unit.is_unsharded = True

    def free(self, unit: Sharded) -> None:
        """Back to shards alone, unless all units are held."""
        if self._holds_all:
            return
        if unit.handles is not None:
            self.finish(unit)
        self._in_backward.discard(unit)
        if unit.is_unsharded:
            unit.is_unsharded = False
            for part in unit.parts:
                part.unit.free_storage()

    # -- a pass --------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """The shards have new values: nothing stays unsharded, whatever versions say.

        torch's fused steps do not count as writes to their tensors.
        """
        self._reset(stepped=True)

    def begin_step(self) -> None:
        """Do as `end_step` does; then gather what the next forward uses first, before it is asked for."""
        self.end_step()
        self.order.begin(backward=False)
        root = self.units[0]
        self.order.use(root)
        self.start(root)
        self._prefetch()
        self._begun = True

    def begin_forward(self) -> None:
        """A forward of the model starts. What was gathered before is dropped if shards have changed since."""
        if not self._begun or any(self.is_stale(u) for u in [self.units[0], *self._prefetched]):
            self._reset()
            self.order.begin(backward=False)
        self._begun = False

    def _reset(self, *, stepped: bool = False) -> None:
        self._prefetched.clear()
        self._backward = self._begun = False
        self._in_backward.clear()
        for unit in self.units:
            if unit.handles is not None or (unit.is_unsharded and (stepped or self.is_stale(unit))):
                self.free(unit)

    @contextlib.contextmanager
    def last_unsharded(self) -> Iterator[None]:
        """Leave what forwards without gradients use last unsharded until the next one, or the end of this."""
        self.keeps_last = True
        try:
            yield
        finally:
            self.keeps_last = False
            self.end_step()

    @contextlib.contextmanager
    def all_unsharded(self) -> Iterator[None]:
        """Gather all units once, and hold them until the end of this."""
        self.end_step()
        for unit, following in itertools.zip_longest(self.units, self.units[1:]):
            self.start(unit)
            if following is not None:
                self.start(following)
            self.finish(unit)
        self._holds_all = True
        try:
            yield
        finally:
            self._holds_all = False
            self.end_step()

    def use(self, unit: Sharded, *, backward: bool) -> None:
        """Return with `unit` unsharded; ranks pass by the same units on the way. Then gather ahead."""
        if backward and not self._backward:
            self._drop_prefetched()
            self._backward = True
            self.order.begin(backward=True)
        if backward:
            self._in_backward.add(unit)
        elif unit.is_unsharded and self.is_stale(unit):
            self.free(unit)  # a forward that did not begin with the model's
        if not self._reached_prefetched(unit):  # the order may hold it once more, further on
            if unit.parts and not (unit.is_unsharded or unit.handles or self.order.is_ahead(unit)):
                self._unexpected(unit.parts[0].unit.chunk.names[0])
            for passed in self.order.use(unit):
                self._pass_by(passed)
        self.finish(unit)
        self._prefetch()

    def _reached_prefetched(self, unit: Sharded) -> bool:
        """Whether `unit` was gathered ahead. What was gathered before it, or is now left behind, is passed by."""
        ahead = unit in self._prefetched
        while self._prefetched and (ahead or self.order.is_ahead(unit)):
            first = self._prefetched.popleft()
            if first is unit:
                break
            self._pass_by(first)
        return ahead

    def _drop_prefetched(self) -> None:
        """Pass by all that was gathered ahead."""
        while self._prefetched:
            self._pass_by(self._prefetched.popleft())

    def _pass_by(self, unit: Sharded) -> None:
        """Do to a unit that this rank does not use what happens to it where it is used."""
        if unit in self._in_backward:
            return
        self.finish(unit)
        if self._backward:
            self.free(unit)
            self._passed(unit)
        elif not self.stays(unit):
            self.free(unit)

    def stays(self, unit: Sharded) -> bool:
        """Whether a unit stays unsharded after its forward, for the backward: by choice, and the model's last one."""
        is_last = unit is self.units[0] or unit is self.order.last
        return (torch.is_grad_enabled() and (self._keep or is_last)) or (self.keeps_last and is_last)

    def _prefetch(self) -> None:
        pending = sum(unit.nbytes for unit in self._prefetched)
        following = self.order.peek()
        while following is not None and not following.is_unsharded and following.handles is None:
            if self._prefetched and pending + following.nbytes > self._ahead:
                return
            self.start(following)
            self.order.use(following)
            self._prefetched.append(following)
            pending += following.nbytes
            following = self.order.peek()

    def end_pass(self) -> None:
        """Pass by what is left of the order; a backward leaves nothing unsharded."""
        self._drop_prefetched()
        for unit in self.order.end():
            self._pass_by(unit)
        if self._backward:
            for unit in self.units:
                self.free(unit)
            self._backward = False


class Gathering:
    """The `CommHandle` of an `unshard`."""

    def __init__(self, gatherer: Gatherer, units: list[Sharded]):
        self._gatherer, self._units = gatherer, units

    def wait(self) -> None:
        for unit in self._units:
            self._gatherer.finish(unit)
