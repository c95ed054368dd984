"""Linear layers with low-rank adapters beside them, as the peft library wraps them; found by their form.

Such a layer is a module around a `base_layer`, with one or several pairs in `lora_A` and `lora_B`
(Hu et al., "LoRA", arXiv:2106.09685). It computes base_layer(x) + scale B(A(x)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

__all__ = [
    "BASE",
    "DROPOUT",
    "MAGNITUDES",
    "Pair",
    "RowRanks",
    "adapters",
    "base_layer",
    "drops_inputs",
    "scales_rows",
    "shareable_lengths",
]

BASE = "base_layer"
DROPOUT = "lora_dropout"
MAGNITUDES = "lora_magnitude_vector"
"""Where DoRA (arXiv:2402.09353) has a length for every row of the weight."""


@dataclass(frozen=True)
class Pair:
    """The two layers of an adapter, by their names below the layer that has it.

    Args:
        down: the layer A [rank, in].
        up: the layer B [out, rank].
    """

    down: str
    up: str


@runtime_checkable
class RowRanks(Protocol):
    """How ranks that share a layer measure its rows together (DoRA), and which of the rows each of them uses."""

    def summed(self, sums: Tensor) -> Tensor:
        """Return sums over all inputs of the layer [..., rows], from those over the inputs that this rank has."""
        ...

    def used(self, numbers: Tensor) -> Tensor:
        """Return what the layer's results are multiplied with here [features], from a number for each row it has."""
        ...


def base_layer(module: nn.Module) -> nn.Module:
    """Return the layer that stands inside a layer with adapters, else the module itself."""
    return module.get_submodule(BASE) if adapters(module) else module


def adapters(module: nn.Module) -> tuple[Pair, ...]:
    """Return the adapters of a module; none of a module that is no layer with adapters."""
    down, up = module._modules.get("lora_A"), module._modules.get("lora_B")
    if module._modules.get(BASE) is None or down is None or up is None:
        return ()
    names = [name for name, _ in up.named_children()]
    return tuple(Pair(f"lora_A.{name}", f"lora_B.{name}") for name in names)


def drops_inputs(module: nn.Module) -> bool:
    """Return whether an adapter of a module drops a part of its inputs in training."""
    dropout = module._modules.get(DROPOUT)
    return dropout is not None and any(getattr(layer, "p", 0.0) > 0 for layer in dropout.children())


def scales_rows(module: nn.Module) -> bool:
    """Return whether a module is a layer of DoRA, whose weight is computed of all its parameters."""
    magnitudes = module._modules.get(MAGNITUDES)
    return magnitudes is not None and next(magnitudes.parameters(), None) is not None


def shareable_lengths(module: nn.Module) -> dict[str, nn.Module]:
    """Return the lengths of rows of a layer of DoRA that ranks can share, by their names below the layer.

    Such a module has the lengths as its `weight` [rows], and in `ranks` a place for `RowRanks`.
    """
    if not scales_rows(module):
        return {}
    named = module.get_submodule(MAGNITUDES).named_children()
    return {f"{MAGNITUDES}.{name}": lengths for name, lengths in named if hasattr(lengths, "ranks")}
