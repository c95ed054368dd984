"""Tells an engine of the uses of a model's modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from cai_gemini.chunk.chunk import OffloadedChunk
from cai_gemini.chunk.parameter import UsedParameters
from cai_gemini.chunk.states import State
from cai_gemini.engine.engine import Engine
from cai_mesh.errors import PlanError
from cai_mesh.gradients import GradBuffer, ShownParameter, direct_linears
from cai_mesh.storage import FlatUnit, ModuleLifecycle, no_backward


def unfrozen(chunk: OffloadedChunk) -> list[int]:
    """Places of parameters that were frozen and are to be trained now."""
    return [i for i in chunk.still if chunk.unit.kept[i].requires_grad]


def collect_gradients(chunk: OffloadedChunk) -> None:
    """Let the gradients of a chunk that is trained come together in a buffer."""
    unit, dtype = chunk.unit, chunk.unit.weights.dtype
    room = chunk.gradients.expect
    chunk.gradients.buffer = GradBuffer(unit.chunk, unit.used, dtype, unit.weights.device, before_open=room)
    for index, param in enumerate(unit.used):
        ShownParameter.adopt(param, UsedParameters(chunk), index)


class ModuleUses:
    """A `LifecycleListener` over the units of a model on one device.

    Args:
        engine: the engine that moves their chunks; its trace is a pass, forward and backward.
        root: the model, whose forward begins a pass.
        units: the chunks of every unit.
        chunks: the same chunks, each with the places of its parts.
    """

    def __init__(
        self,
        engine: Engine,
        root: nn.Module,
        units: Mapping[nn.Module, Sequence[FlatUnit]],
        chunks: Mapping[nn.Module, Sequence[OffloadedChunk]],
    ):
        self._engine, self._root, self._units, self._chunks = engine, root, units, chunks
        self._index = {chunk: i for i, chunk in enumerate(h for some in chunks.values() for h in some)}
        self._lifecycle = ModuleLifecycle(self._used(), substitutes=True)
        self._lifecycle.listen(self)

    def check_backward(self) -> None:
        """Raise `PlanError` before a step without any gradient, where a forward was run for some."""
        if self._lifecycle.may_lack_gradients and not any(chunk.gradients.touched for chunk in self._index):
            raise no_backward()

    def _used(self) -> dict[nn.Module, list[nn.Parameter]]:
        return {module: [p for unit in some for p in unit.used] for module, some in self._units.items()}

    def _admit(self) -> None:
        """Train what has been unfrozen since."""
        indices_of = {chunk: indices for chunk in self._index if (indices := unfrozen(chunk))}
        for chunk, indices in indices_of.items():
            unit = chunk.unit
            for i in indices:
                unit.used[i].requires_grad_(True)
            chunk.still = [i for i in chunk.still if i not in indices]
            if chunk.gradients.buffer is None:
                chunk.train(unit.weights.dtype)
                collect_gradients(chunk)
            else:
                chunk.gradients.buffer.watch()
            direct_linears(self._root, [*unit.kept, *unit.used])
        self._lifecycle.watch(self._used())
        self._engine.trains_more(indices_of)

    def before_use(self, unit: nn.Module, *, backward: bool) -> None:
        chunks = self._index if unit is self._root else self._chunks[unit]
        if not backward and any(unfrozen(chunk) for chunk in chunks):
            self._admit()
        if unit is self._root and not backward:
            self._engine.begin()
        for chunk in self._chunks[unit]:
            if chunk.state is not State.COMPUTE:
                self._engine.prepare(self._index[chunk], backward=backward)
                chunk.arrive()
                chunk.use()
                self._engine.computing(chunk)

    def after_use(self, unit: nn.Module) -> None:
        for flat_unit in self._units[unit]:
            flat_unit.check_unwritten()
        for chunk in self._chunks[unit]:
            chunk.forward_over()

    def grads_ready(self, unit: nn.Module) -> None:
        for chunk in self._chunks[unit]:
            if chunk.gradients.buffer is not None:
                self._engine.sent(chunk, chunk.gradients.collect())
            chunk.backward_over()

    def before_graph(self, unit: nn.Module) -> None:
        raise PlanError(
            "second derivatives were asked for of an offloaded model",
            cause="create_graph=True: a block's weights would be used again after they have left the device",
            fix="leave out create_graph=True, or train without offload",
        )

    def before_copy(self) -> None:
        raise PlanError(
            "an offloaded model cannot be copied",
            cause="its parameters come and go with the uses of its blocks",
            fix="copy the model before offload, or read its weights from the optimizer's checkpoint_state; for an "
            "average of the weights, cai_zero.Ema",
        )

    def backward_done(self) -> None:
        self._engine.end()
