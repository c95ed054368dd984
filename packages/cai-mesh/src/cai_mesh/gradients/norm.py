"""Gradient norms and clipping over any mix of layouts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh

from cai_mesh.comm import groups
from cai_mesh.comm.collectives import all_reduce
from cai_mesh.errors import CaiError, MeshError
from cai_mesh.layout.attached import layout_of, reduce_of


def _parts(param: torch.Tensor) -> list[tuple[torch.Tensor, frozenset[str]]]:
    grad = param.grad
    assert grad is not None
    if hasattr(grad, "to_local"):
        grad = grad.to_local()
    spans = getattr(param, "cai_spans", None)
    if spans is not None:
        return [(grad[s.start : s.stop], s.axes) for s in spans if s.owner]
    return [(grad, layout_of(param).sharded_axes)] if reduce_of(param).owner else []


def grad_norm(
    parameters: Iterable[torch.Tensor], mesh: DeviceMesh | None = None, norm_type: float = 2.0
) -> torch.Tensor:
    """Norm of all gradients of the model, each global element counted once.

    Parameters without a gradient are left out. Every element is counted on the ranks along its layout's sharded
    axes (and along `pp`, where stages hold different parameters) and once along all others. Accumulated in float32,
    or float64 where a gradient is float64. `norm_type` is 2.0 or math.inf. Collective over the mesh.

    Raises `CaiError` for another norm, `MeshError` where a gradient is sharded along an axis the mesh lacks.
    """
    if norm_type not in (2.0, math.inf):
        raise CaiError("unknown norm for gradients", got=norm_type, expected="2.0 or inf")
    parts: dict[frozenset[str], list[torch.Tensor]] = defaultdict(list)
    for param in parameters:
        if param.grad is not None:
            for grad, axes in _parts(param):
                _check_axes(axes, mesh)
                if grad.numel():
                    parts[axes].append(grad)
    device = _device((g for grads in parts.values() for g in grads), mesh)
    double = any(g.dtype == torch.float64 for grads in parts.values() for g in grads)
    dtype = torch.float64 if double else torch.float32
    values = {axes: _local(grads, norm_type, dtype, device) for axes, grads in parts.items()}
    total = _combine(values, mesh, norm_type, device)
    return (total.sqrt() if norm_type == 2.0 else total).to(dtype)


def norm_of_squares(
    squares: Iterable[tuple[frozenset[str], torch.Tensor]], mesh: DeviceMesh | None, device: torch.device
) -> torch.Tensor:
    """`grad_norm` from sums of squares that were taken before, as gradients passed by. Collective over the mesh.

    Args:
        squares: (mesh axes along which the elements differ, the sum of their squares, 0-d on any device). What counts
            on another rank (copies of tied parameters) is left out.
        mesh: of all ranks; None: one process.
        device: where the norm is put together; nothing waits for it.

    Returns the norm, 0-d on `device`, in float64 where a sum is, else float32. Raises `MeshError` as `grad_norm`.
    """
    values: dict[frozenset[str], torch.Tensor] = {}
    dtype = torch.float32
    for axes, square in squares:
        _check_axes(axes, mesh)
        dtype = torch.promote_types(dtype, square.dtype)
        here = square.to(device, torch.float64, non_blocking=True)
        values[axes] = values[axes] + here if axes in values else here
    return _combine(values, mesh, 2.0, device).sqrt().to(dtype)


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """By what gradients of norm `norm` are multiplied so that it is at most `max_norm`; at most 1."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _device(grads: Iterable[torch.Tensor], mesh: DeviceMesh | None) -> torch.device:
    """Where a norm is put together: with the first gradient, or where the ranks meet if that is in host memory."""
    held = {g.device: None for g in grads}
    away = [device for device in held if device.type != "cpu"]
    if away or mesh is None:
        return (away or [*held, torch.device("cpu")])[0]
    return torch.device(mesh.device_type)


def _check_axes(axes: frozenset[str], mesh: DeviceMesh | None) -> None:
    names = groups.axis_names(mesh) if mesh is not None else ()
    if not axes <= set(names):
        raise MeshError(
            "a gradient is sharded along an axis that the mesh given for its norm lacks",
            got=f"{sorted(axes)} on a mesh of {names}",
            fix="pass the whole mesh",
        )


def _local(
    grads: list[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    norms = [n.to(dtype) for n in torch._foreach_norm(grads, norm_type, dtype=dtype)]
    stacked = torch.stack([n.to(device) for n in norms])
    return stacked.square().sum() if norm_type == 2.0 else stacked.max()


def _combine(
    values: dict[frozenset[str], torch.Tensor],
    mesh: DeviceMesh | None,
    norm_type: float,
    device: torch.device,
) -> torch.Tensor:
    """Fold the values of each set of axes over those axes, one collective an axis, in float64.

    Ranks may hold different sets (a stage without sharded parameters), so sets are enumerated alike everywhere, in a
    table with one dimension of two for each of the mesh's axes: does the set contain it? The dtype is the same on all
    ranks too: one without gradients does not know that of the others. Indices are numbers, never tensors, which the
    host would have to wait for.
    """
    axes = [a for a in groups.axis_names(mesh) if groups.degree(mesh, a) > 1] if mesh is not None else []
    table = torch.zeros([2] * len(axes), dtype=torch.float64, device=device)
    for held, value in values.items():
        entry = table[tuple(int(axis in held or axis == "pp") for axis in axes)] if axes else table
        value = value.double()
        entry.copy_(entry + value if norm_type == 2.0 else torch.maximum(entry, value))
    for i, axis in enumerate(axes):
        assert mesh is not None
        with_axis = table.select(i, 1)
        folded = with_axis.contiguous()
        all_reduce(folded, groups.group(mesh, axis), op="sum" if norm_type == 2.0 else "max")
        with_axis.copy_(folded)
    return table.sum() if norm_type == 2.0 else table.max()


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    mesh: DeviceMesh | None = None,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm before, a scalar tensor.

    Like `torch.nn.utils.clip_grad_norm_`, for parameters of any mix of layouts over `mesh` (None: one process).
    Nothing waits for the device unless `error_if_nonfinite`, which raises `CaiError` for NaN or infinite norms.
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = grad_norm(params, mesh, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise CaiError(
            "the gradient norm is not finite",
            got=float(norm),
            fix="lower the learning rate or check the data",
        )
    scale = clip_factor(norm, max_norm)
    grads: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for p in params:
        if p.grad is not None:
            grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            grads[grad.device].append(grad)
    for device, held in grads.items():
        torch._foreach_mul_(held, scale.to(device))
    return norm
