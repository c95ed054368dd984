"""Random numbers that depend on where in a model they are drawn, so that a model and its stages can be compared.

Inside a layer the place is the layer. Outside it is also the stage: a number that several stages would have to share,
each drawing its own, makes the stages differ from the whole model.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cai_pipeline.stages.structure import ModelStructure

_UNIFORM = ("rand", "rand_like", "uniform", "uniform_")


class _Draws(TorchDispatchMode):
    """Seeds torch before every random operation.

    Args:
        stage: that runs; None for the whole model, of which every place outside layers belongs to one.
        owners: stage of each layer.
        lowest: numbers between 0 and 1 are all 0, as they may be in any step.
    """

    def __init__(self, stage: int | None, owners: Sequence[int], *, lowest: bool):
        super().__init__()
        self.stage, self.owners, self.lowest = stage, owners, lowest
        self.layers_run: list[int] = []
        self.leave(-1)

    def enter(self, layer: int) -> None:
        self.layers_run.append(layer)
        self.place, self.drawn = f"in layer {layer}", 0

    def leave(self, layer: int) -> None:
        owner = self.owners[max(layer, 0)] if self.stage is None else self.stage
        self.place, self.drawn = f"after layer {layer} on stage {owner}", 0

    def begin(self, layer: int) -> None:
        """Assign what runs now to the modules before a layer, as a decoder's embeddings run after its encoder."""
        owner = self.owners[layer] if self.stage is None else self.stage
        self.place, self.drawn = f"before layer {layer} on stage {owner}", 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        torch.manual_seed(zlib.crc32(f"{self.place}, number {self.drawn}".encode()))
        self.drawn += 1
        result = func(*args, **(kwargs or {}))
        return result.zero_() if self.lowest and func.overloadpacket.__name__ in _UNIFORM else result


@contextlib.contextmanager
def draws_by_place(
    model: nn.Module,
    structure: ModelStructure,
    stage: int | None,
    owners: Sequence[int],
    *,
    lowest: bool = False,
) -> Iterator[list[int]]:
    """A context for one forward of a model or stage with these layers; the layers that have run.

    Python's own generator starts anew. The state of all generators is as before afterwards.
    """
    mode, hooks, state = _Draws(stage, owners, lowest=lowest), [], random.getstate()
    for index, layer in enumerate(structure.layers(model)):
        hooks.append(layer.register_forward_pre_hook(lambda *_, index=index: mode.enter(index)))
        hooks.append(layer.register_forward_hook(lambda *_, index=index: mode.leave(index)))
    if structure.encoder is not None:
        decoder = structure.ranges(model)[-1][1].start
        encoder = model.get_submodule(structure.encoder.name)
        hooks.append(encoder.register_forward_hook(lambda *_: mode.begin(decoder)))
    try:
        with torch.random.fork_rng(devices=[]), mode:
            random.seed(0)
            yield mode.layers_run
    finally:
        random.setstate(state)
        for hook in hooks:
            hook.remove()
