"""The memory that a model's shards live in: what `offload` does for a model, done for one rank's shards.

Whoever shards the model (cai-zero, stage 3) gathers, frees and reduces chunks over ranks. What is decided here concerns
one rank's shards alone: whose optimizer state stays on the device, whose weights stay there, which come from the host
ahead of their gather, and which are stepped on the host while the next forward runs. So ranks need not agree on a plan,
and tensor and pipeline parallelism beside it change nothing: a step is a sequence of fetches, in whatever order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from cai_gemini.chunk.chunk import OffloadedChunk
from cai_gemini.engine.engine import Schedule
from cai_gemini.engine.planner import Tuning
from cai_gemini.engine.shards import Arriving, ShardEngine, ShardUnit, check_device, shard_bytes
from cai_gemini.factory import Factory, take_over
from cai_gemini.optimizer import OffloadedOptimizer
from cai_gemini.planning.policy import Plan
from cai_gemini.planning.tiers import Tiers, tiers_of
from cai_mesh.errors import PlanError
from cai_mesh.protocols import CommHandle
from cai_mesh.storage import StoredShard, check_elementwise

if TYPE_CHECKING:
    from cai_mesh.comm import AnyMesh


class ChunkResidency:
    """Keeps shards, gradients and optimizer state on device and host as one memory; a `cai_mesh.protocols.Residency`.

        residency = ChunkResidency("auto", device_memory="40GB")
        model = shard_module(model, mesh, residency=residency)
        optimizer = residency.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    and the loop as it is, with `optimizer.clip_grad_norm_`. Two steps run with as little on the device as possible and
    are traced, micro-batches and all; then what stays is decided, on every rank for itself.

    Without `optimizer` any optimizer may step the parameters, which live on the host then; nothing is planned or done
    in the background. That is for optimizers that are not elementwise.

    Args:
        residency: "auto" (the plan of the shortest predicted step that fits), "host", "device", "nvme", or `Tiers`.
        device_memory: bytes that torch may take on a rank, or such as "40GB" (10^9), as in `offload`, for
            unsharded parameters, which the plan leaves room for, and activations too. Default: what torch may take.
        host_memory: bytes that one rank's shards may take there; more goes to `nvme` or is refused. Default: no limit.
        nvme: a directory on a disk, of every rank's host, for shards as in `offload`. They are made in host memory: the
            disk is used from `optimizer` on.
        tuning: details.

    Raises `PlanError` for an unknown residency and a device whose memory is not known; and later for memory too small:
    for one chunk at once when the model is sharded, on the host or the disk when there is an optimizer, for activations
    after the traced steps, each with the smallest that works.
    """

    def __init__(
        self,
        residency: str | Tiers = "auto",
        *,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
        nvme: str | os.PathLike[str] | None = None,
        tuning: Tuning = Tuning(),  # noqa: B008 (frozen)
    ):
        self._factory = Factory(tiers_of(residency), device_memory, host_memory, nvme, tuning)
        tiers = self._factory.tiers
        if (tiers.disk or tiers.disk_weights) and nvme is None:
            raise PlanError(
                "no directory for state on the disk", got=repr(residency), fix="pass nvme='/path/on/a/disk'"
            )
        self._stored: list[StoredShard] = []
        self._index: dict[int, int] = {}
        self._optimizer: OffloadedOptimizer | None = None

    # -- Residency -----------------------------------------------------------------------------------------------

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, complete on return; the tensor itself when it is there already."""
        return tensor.to("cpu")

    def adopt(self, stored: Sequence[StoredShard], mesh: AnyMesh | None) -> None:
        """Take charge of a model's shards. Raises `PlanError` for a second model, and for too little device memory."""
        if self._stored:
            raise PlanError(
                "this residency already has a model's shards", fix="make a ChunkResidency for every model"
            )
        device = stored[0].device
        self._budget = self._factory.budget(device)
        check_device(stored, self._budget, self._factory.device_memory)
        self._stored, self._mesh = list(stored), mesh
        self._index = {id(shard): i for i, shard in enumerate(stored)}
        self._engine = ShardEngine(device)
        chunks = [OffloadedChunk(ShardUnit(shard), shard.gradients, self._engine) for shard in stored]
        nothing = Schedule(self._budget, lambda *_: Plan(frozenset()))
        self._engine.start(chunks, nothing, self._factory.tuning.observe)
        self._engine.recording = False  # until there is an optimizer whose steps part the traces

    def train(self, stored: StoredShard) -> None:
        """A shard that was frozen gets gradients from now on."""
        assert stored.gradients is not None
        chunk = self._engine.chunks[self._index[id(stored)]]
        chunk.train(stored.gradients)
        self._engine.trains_more([chunk])

    def fetch(self, stored: StoredShard) -> CommHandle:
        """Make room, begin to copy the shard to its device, and others ahead of their use."""
        index = self._index[id(stored)]
        chunk = self._engine.chunks[index]
        chunk.in_flight = True
        self._engine.prepare(index, backward=None)
        self._engine.computing(chunk)
        return Arriving(chunk)

    def release(self, stored: StoredShard) -> None:
        """The shard has been read; it leaves when room is needed."""
        chunk = self._engine.chunks[self._index[id(stored)]]
        chunk.in_flight = False
        chunk.forward_over()

    def version(self, stored: StoredShard) -> int:
        """Another number after every step and every write to the shard."""
        return self._engine.chunks[self._index[id(stored)]].version

    def keep_gradient(self, stored: StoredShard, shard: torch.Tensor) -> None:
        """Take a shard's gradient, [n], written by the current stream; it stays, or leaves for the host."""
        index = self._index[id(stored)]
        chunk = self._engine.chunks[index]
        chunk.gradients.expect()
        self._engine.sent(chunk, chunk.gradients.receive(shard, range(len(chunk.unit.kept))))
        self._engine.had_backward(index)

    def drop_gradient(self, stored: StoredShard, index: int) -> None:
        """Forget the gradient of kept parameter `index`, which no rank has."""
        self._engine.chunks[self._index[id(stored)]].gradients.put(index, None)

    # -- the optimizer -------------------------------------------------------------------------------------------

    def optimizer(self, optimizer: torch.optim.Optimizer) -> OffloadedOptimizer:
        """Return the optimizer that steps the shards where they are, those on the host in the background.

        Args:
            optimizer: any elementwise torch optimizer over the sharded model's parameters; its state comes along. Adam
                and AdamW run torch's fused kernels.

        Raises `PlanError` before the model is sharded, when called twice, for an optimizer that holds other parameters,
        communicates, or has state that cannot be streamed as asked, and for too little memory on the host or the disk;
        `NvmeError` for a bad directory.
        """
        if not self._stored:
            raise PlanError("there are no shards to step yet", fix="pass the residency to shard_module first")
        if self._optimizer is not None:
            raise PlanError("these shards already have an optimizer", fix="give it all parameters, in groups")
        if getattr(optimizer, "mesh", None) is not None:
            raise PlanError(
                "an optimizer that communicates cannot step chunk by chunk",
                got=type(optimizer).__name__,
                expected="an elementwise one, such as torch.optim.AdamW",
                fix="use it as it is, without residency.optimizer",
            )
        check_elementwise(optimizer)
        factory, engine = self._factory, self._engine
        params = [param for shard in self._stored for param in shard.unit.kept]
        factory.check(optimizer, params, "build it on model.parameters() after shard_module")
        sizes = shard_bytes(self._stored, optimizer)
        use_disk = factory.disk_user(engine, sizes, factory.on_disk(sizes))
        for i, chunk in enumerate(engine.chunks):
            use_disk(i, chunk)
        take_over(optimizer, engine.chunks, {id(param): param for param in params})
        engine.reschedule(factory.schedule(engine, engine.chunks, self._budget))
        engine.recording = True
        engine.begin()
        self._optimizer = factory.optimizer(optimizer, engine, self._mesh)
        return self._optimizer
