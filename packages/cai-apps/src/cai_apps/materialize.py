"""From a meta-device model to real weights that depend on names and a seed, not on the layout.

Each block is made whole on its own, initialized by the model's own `_init_weights`, and cut to this rank's parts.
While that runs, torch's random fills draw from `cai_mesh.rng` keyed by the seed and the parameter's name, so every
split over stages and ranks starts from the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cai_mesh import rng
from cai_mesh.errors import PlanError
from cai_mesh.layout import Layout, canonical_name
from cai_mesh.units import blocks

_FILLS = {
    torch.ops.aten.normal_.default: (rng.normal_, (0.0, 1.0)),
    torch.ops.aten.uniform_.default: (rng.uniform_, (0.0, 1.0)),
}


class _KeyedFills(TorchDispatchMode):
    """Replaces random fills of known tensors by draws keyed with their names."""

    def __init__(self, seed: int, names: dict[int, str]):
        super().__init__()
        self._seed, self._names = seed, names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _FILLS:
            return func(*args, **(kwargs or {}))
        target = args[0]
        name = self._names.get(target.untyped_storage().data_ptr())
        if name is None:
            raise PlanError(
                "a model's initialization draws random numbers for something that is not a parameter"
            )
        fill, defaults = _FILLS[func]
        low, high = (*args[1:3], *defaults[len(args) - 1 :])
        return fill(
            target, rng.key(self._seed, name, target.storage_offset()), low, high, layout=Layout(target.shape)
        )


@torch.no_grad()
def materialize(model: nn.Module, *, seed: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Give a Hugging Face model on the meta device real parameters and buffers, in place; returns the model.

    Args:
        model: whole, or split and parallelized; parameters carry their layouts and names.
        dtype: of the parameters. Buffers keep theirs.

    At most one block is whole at any time, and the layers outside blocks one by one.
    """
    units = blocks(model)
    in_blocks = {id(m) for block in units if block is not model for m in block.modules()}
    names = {p: canonical_name(name, p) for name, p in model.named_parameters()}
    made: dict[nn.Parameter, nn.Parameter] = {}
    for block in units:
        if block is not model:
            _materialize(model, list(_post_order(block)), names, made, seed, dtype, device)
    for module in _post_order(model):
        if id(module) not in in_blocks:
            _materialize(model, [module], names, made, seed, dtype, device)
    return model


def _post_order(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _post_order(child)
    yield module


def _materialize(
    model: nn.Module,
    modules: list[nn.Module],
    names: dict[nn.Parameter, str],
    made: dict[nn.Parameter, nn.Parameter],
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    sites = [(m, key, p) for m in modules for key, p in m._parameters.items() if p is not None]
    whole: dict[nn.Parameter, nn.Parameter] = {}
    for module, key, param in sites:
        if param not in whole:
            shape = Layout.of(param).global_shape
            whole[param] = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        module._parameters[key] = whole[param]
    for module in modules:
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=device)
    known = {whole[p].untyped_storage().data_ptr(): names[p] for _, _, p in sites}
    with _KeyedFills(seed, known):
        for module in modules:
            model._init_weights(module)  # type: ignore[operator]
    for module, key, param in sites:
        if param not in made:
            made[param] = _part(whole[param], param)
        module._parameters[key] = made[param]


def _part(whole: torch.Tensor, meta: nn.Parameter) -> nn.Parameter:
    """This rank's part of an initialized parameter, with everything that was attached to its meta twin."""
    layout = Layout.of(meta)
    values = whole.detach()
    if layout.sharded_axes:
        values = torch.empty(layout.local_shape, dtype=whole.dtype, device=whole.device)
        for index, box in layout.slices():
            values[index] = whole[box.slices()]
    part = nn.Parameter(values, requires_grad=meta.requires_grad)
    part.__dict__.update({k: v for k, v in meta.__dict__.items() if k.startswith("cai_")})
    return part
