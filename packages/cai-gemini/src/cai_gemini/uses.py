"""Tells an engine of the uses of a model's modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from cai_gemini.chunk import OffloadedChunk
from cai_gemini.engine import Engine
from cai_gemini.states import State
from cai_mesh.errors import PlanError
from cai_mesh.storage import FlatUnit, ModuleLifecycle


class ModuleUses:
    """A `LifecycleListener` over the units of a model on one device.

    Args:
        engine: what moves their chunks; its trace is a pass, forward and backward.
        root: the model, whose forward begins a pass.
        units: the chunks of every unit.
        chunks: and where they are.
    """

    def __init__(
        self,
        engine: Engine,
        root: nn.Module,
        units: Mapping[nn.Module, Sequence[FlatUnit]],
        chunks: Mapping[nn.Module, Sequence[OffloadedChunk]],
    ):
        self._engine, self._root, self._chunks = engine, root, chunks
        self._index = {chunk: i for i, chunk in enumerate(h for some in chunks.values() for h in some)}
        self._lifecycle = ModuleLifecycle(
            {module: [p for unit in some for p in unit.used] for module, some in units.items()}
        )
        self._lifecycle.listen(self)

    def before_use(self, unit: nn.Module, *, backward: bool) -> None:
        if unit is self._root and not backward:
            self._engine.begin()
        for chunk in self._chunks[unit]:
            if chunk.state is not State.COMPUTE:
                self._engine.prepare(self._index[chunk], backward=backward)
                chunk.arrive()
                chunk.use()
                self._engine.computing(chunk)

    def after_use(self, unit: nn.Module) -> None:
        for chunk in self._chunks[unit]:
            chunk.forward_over()

    def grads_ready(self, unit: nn.Module) -> None:
        for chunk in self._chunks[unit]:
            if chunk.buffer is not None:
                self._engine.sent(chunk, chunk.collect())
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
