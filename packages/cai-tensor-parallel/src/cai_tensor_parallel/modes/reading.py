"""The column-cut layers that may read the same input: those directly inside one module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

from cai_mesh.gradients import Readers
from cai_tensor_parallel.plans.plan import Role

COLUMNS = ("colwise", "packed_colwise", "colwise_gather_output", "classifier", "vocab_head")


def watch_readers(
    model: nn.Module, roles: dict[str, Role], gathered: Iterable[str] = ()
) -> dict[str, Readers]:
    """Install what sees which column-cut layers read the same; returns it by the name of the module around them.

    Args:
        gathered: modules before which the sequence is gathered, for themselves or for the layers inside.
    """
    layers = [name for name, role in roles.items() if role.kind in COLUMNS and not role.parameter]
    around = Counter(name.rpartition(".")[0] for name in layers)
    several = {name for name, count in around.items() if count > 1}
    called = {
        name for name in several if not isinstance(model.get_submodule(name), nn.ModuleList | nn.ModuleDict)
    }
    readers_by_module = {name: Readers() for name in sorted(called.union(gathered))}
    for name, readers in readers_by_module.items():
        readers.watch(model.get_submodule(name))
    return readers_by_module


def readers_of(name: str, readers: dict[str, Readers]) -> Readers | None:
    """Return the readers a layer belongs to: its own, where it is by itself, or those of the module around it."""
    return readers.get(name) or readers.get(name.rpartition(".")[0])
