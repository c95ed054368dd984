"""Steps on the device of chunks whose state stays there: at once, in the stream of computation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cai_gemini.chunk.chunk import OffloadedChunk
from cai_gemini.memory.copies import Scalar, there
from cai_gemini.planning.policy import StepPlace


@torch.no_grad()
def keep_on_device(chunk: OffloadedChunk) -> None:
    """Let master weights, optimizer state and gradients live on the device from now on; the weights stay."""
    step, device = chunk.step, chunk.copies.device
    assert step is not None
    chunk.settle()
    chunk.show_writes()
    chunk.arrive()
    chunk.disk = chunk.host_weights.disk = None
    sizes = chunk.sizes
    chunk.ledger.change("state", sizes.state)
    chunk.ledger.change("gradients", max(sizes.gradients, sizes.sums))
    with torch._C.DisableTorchFunctionSubclass():
        chunk.unit.move_shard(chunk.unit.shard.to(device, copy=True))
    chunk.host_weights.adopt()
    step.move_state(device)
    chunk.gradients.move(device)
    chunk.place, chunk.stays = StepPlace.DEVICE, True


class DeviceSteps:
    """The `Stepper` of chunks whose state stays on the device."""

    def step(self, chunks: Sequence[OffloadedChunk], scale: float | Scalar) -> None:
        """Step chunks in order; the steps are queued on return."""
        for chunk in chunks:
            job = chunk.take_gradient()
            if job is not None:
                gradient, groups, step = job
                step.run(groups, gradient.tensor, there(scale), chunk.unit.weights.data)
                chunk.host_weights.adopt()
