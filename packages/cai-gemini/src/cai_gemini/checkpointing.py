"""The contents of an offloaded model's checkpoint, with one chunk of a disk in memory at a time.

Values of a chunk on a disk are not there when a checkpoint begins. `BoxedTensor.lend` is called for each tensor when it
is written or filled, and loads its chunk then; the chunk before it goes back to the disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from cai_gemini.chunk.chunk import OffloadedChunk
from cai_mesh.errors import CheckpointError
from cai_mesh.layout import SIGNATURE, BoxedTensor

MODEL, OPTIMIZER = "model.", "optimizer."
GROUPS = OPTIMIZER + "param_groups"


class OneLoaded:
    """Keeps at most one chunk of those on a disk in memory."""

    def __init__(self) -> None:
        self._chunk: OffloadedChunk | None = None

    def load(self, chunk: OffloadedChunk) -> None:
        """Have a chunk in memory, as its last step has left it; the one before goes back to the disk."""
        if chunk is self._chunk and chunk.disk is not None and chunk.disk.in_memory:
            return
        self.close()
        if chunk.disk is not None and not chunk.disk.in_memory:
            self._chunk = chunk
        chunk.settle()

    def close(self) -> None:
        """Let go of the last one; what was written to it goes to the disk."""
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            chunk.unload()


def parameters(chunks: Sequence[OffloadedChunk]) -> Iterator[tuple[str, OffloadedChunk, int]]:
    """Name, chunk and index of every parameter."""
    for chunk in chunks:
        for index, name in enumerate(chunk.unit.chunk.names):
            yield name, chunk, index


def boxed_master(chunk: OffloadedChunk, index: int, loaded: OneLoaded) -> BoxedTensor:
    """Master weights of parameter `index` of a chunk, with values when they are asked for."""

    def value() -> torch.Tensor:
        return chunk.unit.kept[index].detach()

    return _boxed(chunk, index, chunk.unit.shard.dtype, value, loaded)


def boxed_slots(chunk: OffloadedChunk, index: int, name: str, loaded: OneLoaded) -> dict[str, BoxedTensor]:
    """The optimizer's state of parameter `index` of a chunk by `NAME.SLOT`, with values when they are asked for."""
    step = chunk.step
    if step is None:
        return {}
    if chunk.disk is None:
        chunk.settle()  # counters, which are not on the disk, are the last step's
    else:
        chunk.finish_writing()
    if step.fused:
        step.moments()
    low, high = chunk.unit.ranges[index]
    boxed, size = {}, high - low
    for slot, value in step.state_of(index).items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.dim() and value.numel() == size:
            boxed[f"{name}.{slot}"] = boxed_slot(chunk, index, slot, value.dtype, loaded)
        else:
            boxed[f"{name}.{slot}"] = BoxedTensor.from_param(value)
    return boxed


def boxed_slot(
    chunk: OffloadedChunk, index: int, slot: str, dtype: torch.dtype, loaded: OneLoaded
) -> BoxedTensor:
    """One tensor of the optimizer's state, as large as its parameter; made when asked for, if it is not there."""

    def value() -> torch.Tensor:
        assert chunk.step is not None
        if slot not in chunk.step.state_of(index):
            chunk.step.put_state(
                index, {slot: torch.zeros_like(chunk.unit.kept[index].detach(), dtype=dtype)}
            )
        return chunk.step.state_of(index)[slot]

    return _boxed(chunk, index, dtype, value, loaded)


def _boxed(
    chunk: OffloadedChunk, index: int, dtype: torch.dtype, value: Any, loaded: OneLoaded
) -> BoxedTensor:
    param = chunk.unit.kept[index]

    def lend() -> BoxedTensor:
        loaded.load(chunk)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return BoxedTensor.like(param, value().flatten())

    with torch._C.DisableTorchFunctionSubclass():
        shapes = BoxedTensor.like(param, torch.empty(param.numel(), dtype=dtype, device="meta"))
    return replace(shapes, lend=lend)


def state_to_save(chunks: Sequence[OffloadedChunk], loaded: OneLoaded) -> dict[str, BoxedTensor]:
    """`model.NAME` and `optimizer.NAME.SLOT`, chunk by chunk, so that each is loaded once."""
    state: dict[str, BoxedTensor] = {}
    for name, chunk, index in parameters(chunks):
        state[MODEL + name] = boxed_master(chunk, index, loaded)
        slots = boxed_slots(chunk, index, name, loaded)
        state |= {OPTIMIZER + slot: boxed for slot, boxed in slots.items()}
    return state


def state_to_load(
    chunks: Sequence[OffloadedChunk],
    saved: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    loaded: OneLoaded,
) -> dict[str, BoxedTensor]:
    """Return `state_to_save`, with what the saved optimizer had of a parameter and this one has not made yet.

    Args:
        saved: shape and dtype by name.
    """
    state = state_to_save(chunks, loaded)
    for name, chunk, index in parameters(chunks):
        for key, (shape, dtype) in saved.items():
            prefix, _, slot = key.rpartition(".")
            if prefix == OPTIMIZER + name and key not in state and chunk.step is not None:
                state[key] = _missing(chunk, index, slot, (shape, dtype), loaded)
    return state


def _missing(
    chunk: OffloadedChunk,
    index: int,
    slot: str,
    like: tuple[tuple[int, ...], torch.dtype],
    loaded: OneLoaded,
) -> BoxedTensor:
    shape, dtype = like
    if shape:
        return boxed_slot(chunk, index, slot, dtype, loaded)
    assert chunk.step is not None
    step, scalar = chunk.step, torch.zeros((), dtype=dtype)

    def lend() -> BoxedTensor:
        if slot not in step.state_of(index):
            step.put_state(index, {slot: scalar})
        return BoxedTensor.from_param(scalar)

    return replace(BoxedTensor.from_param(scalar), lend=lend)


def saved_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Hyperparameters of every group, without its parameters."""

    def plain(value: Any) -> Any:
        return value.item() if isinstance(value, torch.Tensor) else value

    return [
        {k: plain(v) for k, v in g.items() if k not in ("params", SIGNATURE)} for g in optimizer.param_groups
    ]


def check_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise `CheckpointError` where `saved_groups`, of a checkpoint at `where`, cannot be this optimizer's."""
    what, param_groups = f"the checkpoint {where} is of another optimizer", optimizer.param_groups
    if len(groups) != len(param_groups):
        raise CheckpointError(what, got=f"{len(groups)} param groups", expected=f"{len(param_groups)}")
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
