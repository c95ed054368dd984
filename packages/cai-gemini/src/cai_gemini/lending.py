"""What a checkpoint holds of an offloaded model: one chunk of a disk in memory at a time, saving and loading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from cai_gemini.held import Held
from cai_mesh.errors import CheckpointError
from cai_mesh.layout import BoxedTensor

MODEL, OPTIMIZER = "model.", "optimizer."
GROUPS = OPTIMIZER + "param_groups"


class Lending:
    """Lends chunks whose master weights and state are on a disk, each until the next one is asked for."""

    def __init__(self) -> None:
        self._held: Held | None = None

    def chunk(self, held: Held) -> None:
        """Have the chunk in memory, as its last step has left it."""
        if held is self._held and held.disk is not None and held.disk.in_memory:
            return
        self.close()
        if held.disk is not None and not held.disk.in_memory:
            self._held = held
        held.settle()

    def close(self) -> None:
        """Let go of the last one; what was written to it goes to the disk."""
        held, self._held = self._held, None
        if held is not None:
            held.unload()


def parameters(helds: Sequence[Held]) -> Iterator[tuple[str, Held, int]]:
    """Name, chunk and index of every parameter."""
    for held in helds:
        for index, name in enumerate(held.unit.chunk.names):
            yield name, held, index


def boxed_master(held: Held, index: int, lending: Lending) -> BoxedTensor:
    """Master weights of parameter `index` of a chunk, with values when they are asked for."""

    def value() -> torch.Tensor:
        return held.unit.kept[index].detach()

    return _lent(held, index, held.unit.shard.dtype, value, lending)


def boxed_slots(held: Held, index: int, name: str, lending: Lending) -> dict[str, BoxedTensor]:
    """The optimizer's state of parameter `index` of a chunk by `NAME.SLOT`, with values when they are asked for."""
    step = held.step
    if step is None:
        return {}
    if held.disk is None:
        held.settle()  # counters, which are not lent, are the last step's
    else:
        held.finish_writing()
    if step.fused:
        step.moments()
    found, param = {}, held.unit.kept[index]
    for slot, value in step.state_of(index).items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.dim() and value.numel() == param.numel():
            found[f"{name}.{slot}"] = boxed_slot(held, index, slot, value.dtype, lending)
        else:
            found[f"{name}.{slot}"] = BoxedTensor.from_param(value)
    return found


def boxed_slot(held: Held, index: int, slot: str, dtype: torch.dtype, lending: Lending) -> BoxedTensor:
    """One tensor of the optimizer's state, as large as its parameter; made when asked for, if it is not there."""

    def value() -> torch.Tensor:
        assert held.step is not None
        if slot not in held.step.state_of(index):
            held.step.put_state(index, {slot: torch.zeros_like(held.unit.kept[index].detach(), dtype=dtype)})
        return held.step.state_of(index)[slot]

    return _lent(held, index, dtype, value, lending)


def _lent(held: Held, index: int, dtype: torch.dtype, value: Any, lending: Lending) -> BoxedTensor:
    param = held.unit.kept[index]

    def lend() -> BoxedTensor:
        lending.chunk(held)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return BoxedTensor.like(param, value().flatten())

    with torch._C.DisableTorchFunctionSubclass():
        shapes = BoxedTensor.like(param, torch.empty(param.numel(), dtype=dtype, device="meta"))
    return replace(shapes, lend=lend)


def state_to_save(helds: Sequence[Held], lending: Lending) -> dict[str, BoxedTensor]:
    """`model.NAME` and `optimizer.NAME.SLOT`, chunk by chunk, so that each is lent once."""
    found: dict[str, BoxedTensor] = {}
    for name, held, index in parameters(helds):
        found[MODEL + name] = boxed_master(held, index, lending)
        slots = boxed_slots(held, index, name, lending)
        found |= {OPTIMIZER + slot: boxed for slot, boxed in slots.items()}
    return found


def state_to_load(
    helds: Sequence[Held], saved: Mapping[str, tuple[tuple[int, ...], torch.dtype]], lending: Lending
) -> dict[str, BoxedTensor]:
    """As `state_to_save`, with what the saved optimizer had of a parameter and this one has not made yet.

    Args:
        saved: shape and dtype by name.
    """
    found = state_to_save(helds, lending)
    for name, held, index in parameters(helds):
        for key, (shape, dtype) in saved.items():
            prefix, _, slot = key.rpartition(".")
            if prefix == OPTIMIZER + name and key not in found and held.step is not None:
                found[key] = _missing(held, index, slot, (shape, dtype), lending)
    return found


def _missing(
    held: Held, index: int, slot: str, like: tuple[tuple[int, ...], torch.dtype], lending: Lending
) -> BoxedTensor:
    shape, dtype = like
    if shape:
        return boxed_slot(held, index, slot, dtype, lending)
    assert held.step is not None
    step, scalar = held.step, torch.zeros((), dtype=dtype)

    def lend() -> BoxedTensor:
        if slot not in step.state_of(index):
            step.put_state(index, {slot: scalar})
        return BoxedTensor.from_param(scalar)

    return replace(BoxedTensor.from_param(scalar), lend=lend)


def saved_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Hyperparameters of every group, without its parameters."""

    def plain(value: Any) -> Any:
        return value.item() if isinstance(value, torch.Tensor) else value

    return [{k: plain(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def check_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise `CheckpointError` where `saved_groups`, of a checkpoint at `where`, cannot be this optimizer's."""
    what, own = f"the checkpoint {where} is of another optimizer", optimizer.param_groups
    if len(groups) != len(own):
        raise CheckpointError(what, got=f"{len(groups)} param groups", expected=f"{len(own)}")
    for saved in groups:
        if not optimizer.defaults.keys() <= saved.keys():
            raise CheckpointError(what, got=", ".join(saved), expected=", ".join(optimizer.defaults))


def restore_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Take over hyperparameters of `saved_groups`; sequences and tensors stay what they were."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            now = group.get(key)
            if isinstance(now, torch.Tensor):
                now.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(now, tuple) else value
