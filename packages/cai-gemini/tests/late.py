"""The plain loop with delayed updates, by hand: gradients are kept for a step before masters are stepped with them."""

from __future__ import annotations

import torch
from plain import Plain


class Late(Plain):
    """As `Plain`, but that a step begins with the gradients kept by the one before, and keeps its own.

    Master weights that were stepped are shown to the model by the next `step`.
    """

    def __init__(self, model, optimizer, compute=torch.float32):
        super().__init__(model, optimizer, compute)
        self.kept = None

    def take(self):
        """Step master weights with the gradients that were kept, and the hyperparameters of then."""
        if self.kept is None:
            return
        (gradients, then), self.kept = self.kept, None
        groups = self.optimizer.param_groups
        now = [dict(group) for group in groups]
        self._apply(gradients, then)
        for group, values in zip(groups, now, strict=True):
            group.update(values)

    def _apply(self, gradients, hyperparameters):
        for group, values in zip(self.optimizer.param_groups, hyperparameters, strict=True):
            group.update(values)
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = None if gradient is None else gradient.to(master.dtype)
        self.optimizer.step()
        for master in self.masters:
            master.grad = None

    def step(self, at_once=()):
        """at_once: names of parameters that are not delayed."""
        self.take()
        groups = self.optimizer.param_groups
        now = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        pairs = list(zip(self.names, self.gradients, strict=True))
        self._apply([g if n in at_once else None for n, g in pairs], now)
        self.show(self.masters)
        self.kept = [None if n in at_once else g for n, g in pairs], now
        self.steps += 1
        self.zero_grad()

    def skip(self):
        """A step that a loss scale leaves out."""
        self.take()
        self.show(self.masters)
        self.zero_grad()

    def write(self, name, factor, chunk):
        """Somebody multiplies a master weight, and has its whole chunk shown."""
        self.take()
        with torch.no_grad():
            for n, master, param in zip(self.names, self.masters, self.model.parameters(), strict=True):
                if n == name:
                    master.mul_(factor)
                if n in chunk:
                    param.copy_(master)
