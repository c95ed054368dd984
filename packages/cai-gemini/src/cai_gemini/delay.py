"""Host steps that take effect a step later, and so have all of the next forward and backward to run.

ZeRO-Offload's delayed parameter update (Ren et al., arXiv:2101.06840). The step with the gradients of one pass runs
while the next computes with the weights as they were before it; `publish`, at the next `step()`, lets the device see
what it has made. New weights are written over the gradient, block by block as it is consumed, so that a chunk has one
host tensor more than without delay: weights to copy, a gradient on its way, and what turns from the one into the other.
"""

from __future__ import annotations

import torch

from cai_gemini.copies import Scalar
from cai_gemini.gradient import Gradient
from cai_gemini.held import Held, Taken
from cai_gemini.states import State
from cai_gemini.timeline import host_span


class DelayedHeld(Held):
    """A chunk whose steps are delayed while they are taken on the host; on the device they are taken at once.

    Master weights and optimizer state are always those of the newest step; whoever reads them waits for it. Whoever
    writes to them has them published with the next use.
    """

    def publish(self) -> None:
        """Let the weights be those of the last step, once it is done, or what somebody has made of them since."""
        if self.on_device or not (self.home.is_behind or self.home.is_old):
            return
        self.forward_over()
        if self.stays:
            self.arrive()
        elif self.state is not State.FREE:
            self.free()
        self.finish_step()  # the one before
        self.home.refresh()
        self._stepping = self.home.publish()
        if self.stays:
            self._renew()

    def begin_step(self, scale: float | Scalar) -> None:
        """Step with the gradient, which is consumed: at once on the device, on the host for the next `publish`."""
        if self.on_device:
            super().begin_step(scale)
        elif (taken := self.take_gradient()) is not None:
            self._step_later(taken, scale)

    def _step_later(self, taken: Taken, scale: float | Scalar) -> None:
        gradient, groups, step = taken
        weights = self._room(gradient)
        partly = sum(len(indices) for _, indices in groups) < len(self.unit.kept)

        def run() -> None:
            ready = gradient.settled()
            with host_span(self.copies.recorder, self.name):
                step.run(groups, ready, float(scale), weights)
                if partly:
                    self.home.copy_to(weights)
            self.home.adopt()
            if ready is not weights:
                self.copies.host.give(ready)

        self.home.delay(self.worker.submit(run), weights)

    def _room(self, gradient: Gradient) -> torch.Tensor:
        """Where a step puts new weights: where its gradient is, unless that is wider, or may yet change place."""
        tensor, home, host = gradient.tensor, self.home.weights, self.copies.host
        own = gradient.adding is None and host.is_lent(tensor) and tensor.dtype == home.dtype
        return tensor if own else host.take(home.numel(), home.dtype)

    def finish_writing(self) -> None:
        """Return once the last step is done, published or not."""
        super().finish_writing()
        self.home.finish()

    # An optimizer that runs its own `step` puts gradients into the parameters meanwhile.

    def gradient_of(self, index: int) -> torch.Tensor | None:
        self._leave_parameters()
        return super().gradient_of(index)

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        self._leave_parameters()
        super().set_gradient(index, gradient)

    def _leave_parameters(self) -> None:
        if self.step is not None and not self.step.fused:
            self.finish_writing()
