"""Optimizers over parts: their param groups are signed at a step, so that state of other parts is told from theirs.

Torch's optimizers know nothing of parts: what one rank has saved, another loads, where shapes are alike in silence. A
saved state dict has the options of its groups, and so the signature; the step after a load compares.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch

from cai_mesh.errors import CheckpointError
from cai_mesh.layout.signature import SIGNATURE, check_signature, extent_of, signature_of
from cai_mesh.storage.elementwise import check_elementwise

FIX = (
    "let every rank load what it has saved; cai_zero.full_optimizer_state_dict and load_full_optimizer_state_dict move "
    "state between any ranks, stages and plain loops, as does cai_mesh.checkpoint"
)


class PartSteps:
    """Checks optimizers of parts before they step: each once for being elementwise, its groups for their state."""

    def __init__(self) -> None:
        self._signatures: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[tuple[int, int], str]]
        self._signatures = weakref.WeakKeyDictionary()

    def check(self, optimizer: torch.optim.Optimizer, *, elementwise: bool = True) -> None:
        """Sign groups that are not, by the number of parameters they have.

        Args:
            optimizer: the optimizer, before a step.
            elementwise: whether it has to be.

        Raises `PlanError` for an optimizer that is not elementwise, `CheckpointError` where state of other parts, or of
        whole parameters, was loaded.
        """
        says_its_boxes = getattr(optimizer, "boxed_state", None) is not None
        if elementwise and optimizer not in self._signatures and not says_its_boxes:
            check_elementwise(optimizer)
        signatures = self._signatures.setdefault(optimizer, {})
        for number, group in enumerate(optimizer.param_groups):
            key, signed = (number, len(group["params"])), group.get(SIGNATURE)
            if signed is not None and signed is signatures.get(key):
                continue
            if key not in signatures:
                signatures[key] = signature_of(_named(group["params"]))
            if signed is not None:
                check_signature("the optimizer's state", signed, signatures[key], FIX)
            elif not says_its_boxes:
                _check_shapes(optimizer, group["params"])
            group[SIGNATURE] = signatures[key]


def _check_shapes(optimizer: torch.optim.Optimizer, params: Iterable[torch.Tensor]) -> None:
    for param in params:
        _, (low, high) = extent_of(param)
        for slot, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() != high - low:
                raise CheckpointError(
                    "the optimizer has state of whole parameters, and steps parts of them",
                    got=f"{slot} of {tuple(value.shape)}",
                    expected=f"{high - low} elements",
                    cause="load_state_dict was given the state of an optimizer over the whole model",
                    fix="cai_zero.load_full_optimizer_state_dict(optimizer, model, state)",
                )


def _named(params: Iterable[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters with their names, where whoever keeps their gradients knows them; or with numbers."""
    for number, param in enumerate(params):
        keeper = getattr(param, "cai_keeper", None)
        yield getattr(keeper, "name", str(number)), param
