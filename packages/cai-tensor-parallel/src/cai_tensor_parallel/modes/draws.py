"""Random numbers of ranks that compute different parts, for dropout: theirs differ, those of what is whole do not.

Where ranks begin to hold different parts, the generators are set to a seed made of the common one and the rank; where
they hold the same again, they go on where the common numbers were. The seed is a function of the common state, so a
block that is recomputed draws what it drew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cai_mesh.rng import key

BETWEEN = 4
"""Numbers of the common sequence that a GPU's generator passes over: it counts in fours."""


class Draws:
    """The generators of one rank of a group.

    Args:
        rank: its place among the ranks that compute different parts.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._common: tuple[torch.Tensor, tuple[int, int] | None] | None = None
        self._is_paused = False

    def __deepcopy__(self, memo: dict) -> Draws:
        return self  # hooks of a copied model hold this one

    def enter(self, *, again: bool = False) -> None:
        """Draw numbers of this rank's own from here on; nothing more where it does so already, unless `again`."""
        if self._common is not None and not again:
            return
        seed = key(int(torch.randint(1 << 62, ()).item()), self.rank)
        self._common = (torch.get_rng_state(), self._enter_gpu())
        torch.default_generator.manual_seed(seed)

    def _enter_gpu(self) -> tuple[int, int] | None:
        if not torch.cuda.is_initialized():
            return None
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.manual_seed(key(seed, offset, self.rank))
        return seed, offset + BETWEEN

    def leave(self) -> None:
        """Draw the common numbers again from here on."""
        if self._common is None:
            return
        (state, on_gpu), self._common = self._common, None
        torch.set_rng_state(state)
        if on_gpu is not None:
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.manual_seed(on_gpu[0])
            generator.set_offset(on_gpu[1])

    def pause(self) -> None:
        """Draw the common numbers until `resume`."""
        self._is_paused = self._common is not None
        self.leave()

    def resume(self) -> None:
        """Go on with numbers of this rank's own, where `pause` met such."""
        if self._is_paused:
            self.enter()
        self._is_paused = False


def drops(model: nn.Module) -> bool:
    """Whether a model draws anything in training: a module with a probability of dropout that is not zero."""
    return any(
        "drop" in name and isinstance(value, float) and value > 0
        for module in model.modules()
        for name, value in (*vars(module).items(), *_dropout(module))
    )


def _dropout(module: nn.Module) -> list[tuple[str, Any]]:
    return [("dropout", module.p)] if isinstance(module, nn.modules.dropout._DropoutNd) else []


def draw_between(first: nn.Module, last: nn.Module, model: nn.Module, draws: Draws) -> None:
    """Own numbers from before `first` to after `last`, in training."""

    def enter(module: nn.Module, *_: Any) -> None:
        if model.training:
            draws.enter(again=True)

    first.register_forward_pre_hook(enter)
    last.register_forward_hook(lambda *_: draws.leave(), always_call=True)
    if last is not model:
        model.register_forward_hook(lambda *_: draws.leave(), always_call=True)


def draw_inside(columns: list[nn.Module], rows: list[nn.Module], model: nn.Module, draws: Draws) -> None:
    """Own numbers from after a column-cut layer to after the row-cut one, in training."""

    def enter(module: nn.Module, *_: Any) -> None:
        if model.training:
            draws.enter()

    for module in columns:
        module.register_forward_hook(enter)
    for module in rows:
        module.register_forward_hook(lambda *_: draws.leave())
    model.register_forward_hook(lambda *_: draws.leave(), always_call=True)


def draw_in_adapters(shared: list[nn.Module], parts: list[nn.Module], model: nn.Module, draws: Draws) -> None:
    """Common numbers in dropout whose input each rank has whole, own ones where ranks have parts of it, in training.

    Args:
        shared: dropout of adapters beside layers that are whole, or cut by columns.
        parts: dropout of adapters beside layers that are cut by rows, whose forward ends with the common numbers.
        model: the model.
        draws: the generators.
    """

    def enter(module: nn.Module, *_: Any) -> None:
        if model.training:
            draws.enter()

    for module in shared:
        module.register_forward_pre_hook(lambda *_: draws.pause())
        module.register_forward_hook(lambda *_: draws.resume(), always_call=True)
    for module in parts:
        module.register_forward_pre_hook(enter)
