"""Tells an engine of the uses of a model's modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from cai_gemini.engine import Engine
from cai_gemini.held import Held
from cai_gemini.states import State
from cai_mesh.storage import FlatUnit, ModuleLifecycle


class ModuleUses:
    """A `LifecycleListener` over the units of a model on one device.

    Args:
        engine: what moves their chunks; its trace is a pass, forward and backward.
        root: the model, whose forward begins a pass.
        units: the chunks of every unit.
        helds: and where they are.
    """

    def __init__(
        self,
        engine: Engine,
        root: nn.Module,
        units: Mapping[nn.Module, Sequence[FlatUnit]],
        helds: Mapping[nn.Module, Sequence[Held]],
    ):
        self._engine, self._root, self._helds = engine, root, helds
        self._index = {held: i for i, held in enumerate(h for some in helds.values() for h in some)}
        self._lifecycle = ModuleLifecycle(
            {module: [p for unit in some for p in unit.used] for module, some in units.items()}
        )
        self._lifecycle.listen(self)

    def before_use(self, unit: nn.Module, *, backward: bool) -> None:
        if unit is self._root and not backward:
            self._engine.begin()
        for held in self._helds[unit]:
            if held.state is not State.COMPUTE:
                self._engine.prepare(self._index[held], backward=backward)
                held.arrive()
                held.use()
                self._engine.computing(held)

    def after_use(self, unit: nn.Module) -> None:
        for held in self._helds[unit]:
            held.forward_over()

    def grads_ready(self, unit: nn.Module) -> None:
        for held in self._helds[unit]:
            if held.buffer is not None:
                self._engine.sent(held, held.collect())
            held.backward_over()

    def backward_done(self) -> None:
        self._engine.end()
