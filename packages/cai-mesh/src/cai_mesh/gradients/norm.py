"""Gradient norms and clipping over any mix of layouts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cai_mesh.comm.collectives import all_reduce
from cai_mesh.comm.groups import AnyMesh
from cai_mesh.comm.mesh import ParallelMesh, axis_names
from cai_mesh.errors import CaiError, MeshError
from cai_mesh.gradients.gradient_views.parameters import ShownParameter, local_gradient
from cai_mesh.gradients.gradient_views.place import largest
from cai_mesh.layout.record import NOTHING, layout_of, parts_by_axes, record_of, reduce_of, refresh


def _parts(param: torch.Tensor) -> list[tuple[torch.Tensor, frozenset[str]]]:
    if isinstance(param, ShownParameter) and param.cai_keeper is not None:
        entry = param.cai_keeper.held(param.cai_index)
        return [(entry[0], entry[1].axes)] if entry is not None and entry[1].owner else []
    grad = local_gradient(param)
    if grad is None:
        return []
    if record_of(param).slices is not None:
        return [(grad[start:stop], axes) for start, stop, axes in parts_by_axes(param)]
    return [(grad, layout_of(param).sharded_axes)] if reduce_of(param).owner else []


def grad_norm(
    parameters: Iterable[torch.Tensor], mesh: AnyMesh | None = None, norm_type: float = 2.0
) -> torch.Tensor:
    """Norm of all gradients of the model, each global element counted once.

    Parameters without a gradient are left out. Every element is counted on the ranks along its layout's sharded
    axes (and along `pp`, where stages hold different parameters) and once along all others. Accumulated in float32,
    or float64 where a gradient is float64. `norm_type` is 2.0 or math.inf. Collective over the mesh.

    Raises `CaiError` for another norm, `MeshError` where a gradient is sharded along an axis the mesh lacks.
    """
    if norm_type not in (2.0, math.inf):
        raise CaiError("unknown norm for gradients", got=norm_type, expected="2.0 or inf")
    mesh = ParallelMesh.of(mesh) if mesh is not None else None
    parts: dict[frozenset[str], list[torch.Tensor]] = defaultdict(list)
    for param in parameters:
        for grad, axes in _parts(param):
            _check_known(param, mesh)
            dims = _dims(axes, mesh)
            if grad.numel():
                parts[dims].append(grad)
    device = _device((g for grads in parts.values() for g in grads), mesh)
    double = any(g.dtype == torch.float64 for grads in parts.values() for g in grads)
    dtype = torch.float64 if double else torch.float32
    values = {axes: _local(grads, norm_type, dtype, device) for axes, grads in parts.items()}
    total = _combine(values, mesh, norm_type, device)
    return (total.sqrt() if norm_type == 2.0 else total).to(dtype)


def norm_of_squares(
    squares: Iterable[tuple[frozenset[str], torch.Tensor]], mesh: AnyMesh | None, device: torch.device
) -> torch.Tensor:
    """`grad_norm` from sums of squares that were taken before, as gradients passed by. Collective over the mesh.

    Args:
        squares: (mesh axes along which the elements differ, the sum of their squares, 0-d on any device). What counts
            on another rank (copies of tied parameters) is left out.
        mesh: the mesh of all ranks; None: one process.
        device: the device on which the norm is put together; nothing waits for it.

    Returns the norm, 0-d on `device`, in float64 where a sum is, else float32. Raises `MeshError` as `grad_norm`.
    """
    mesh = ParallelMesh.of(mesh) if mesh is not None else None
    values: dict[frozenset[str], torch.Tensor] = {}
    dtype = torch.float32
    for axes, square in squares:
        dims = _dims(axes, mesh)
        dtype = torch.promote_types(dtype, square.dtype)
        on_device = square.to(device, torch.float64, non_blocking=True)
        values[dims] = values[dims] + on_device if dims in values else on_device
    return _combine(values, mesh, 2.0, device).sqrt().to(dtype)


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor, at most 1, with which gradients of norm `norm` have a norm of at most `max_norm`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _device(grads: Iterable[torch.Tensor], mesh: ParallelMesh | None) -> torch.device:
    """Return the device of a norm: that of the first gradient, or where the ranks meet if that is in host memory."""
    devices = {g.device: None for g in grads}
    away = [device for device in devices if device.type != "cpu"]
    if away or mesh is None:
        return (away or [*devices, torch.device("cpu")])[0]
    return torch.device(mesh.device_type)


def _check_known(param: torch.Tensor, mesh: ParallelMesh | None) -> None:
    """A DTensor that `fully_shard` made of a cut parameter does not say that it is cut."""
    if mesh is None or not hasattr(param, "device_mesh") or record_of(param) is not NOTHING:
        return
    silent = set(mesh.leaves(("tp", "cp"))) - set(axis_names(param.device_mesh))
    if mesh.degree(tuple(silent)) > 1:
        raise MeshError(
            "a DTensor does not say whether it is cut along all axes of the mesh given for its norm",
            got=f"a DTensor over {axis_names(param.device_mesh)}, a mesh of {mesh.names}",
            cause="fully_shard replaced a parameter, and with it what was attached to it",
            fix="pass the model in place of its parameters: its modules have it recorded",
        )


def _dims(axes: frozenset[str], mesh: ParallelMesh | None) -> frozenset[str]:
    """The mesh's dimensions along which gradients with these axes differ."""
    try:
        dims = frozenset(mesh.leaves(tuple(axes))) if mesh is not None else frozenset[str]()
        lost = [axis for axis in axes if mesh is None or not mesh.has(axis)]
    except MeshError:
        dims, lost = frozenset(), sorted(axes)
    if lost:
        raise MeshError(
            "a gradient is sharded along an axis that the mesh given for its norm lacks",
            got=f"{sorted(axes)} on a mesh of {mesh.names if mesh is not None else ()}",
            fix="pass the whole mesh",
        )
    return dims


def _local(
    grads: list[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    norms = [n.to(dtype) for n in torch._foreach_norm(grads, norm_type, dtype=dtype)]
    stacked = torch.stack([n.to(device) for n in norms])
    return stacked.square().sum() if norm_type == 2.0 else stacked.max()


def _combine(
    values: dict[frozenset[str], torch.Tensor],
    mesh: ParallelMesh | None,
    norm_type: float,
    device: torch.device,
) -> torch.Tensor:
    """Fold the values of each set of dimensions over those, in float64, on the first view that has them."""
    views = mesh.views if mesh is not None else (None,)
    everywhere = frozenset(mesh.leaves("pp")) if mesh is not None else frozenset[str]()
    remaining, totals = dict(values), []
    for view in views:
        names = axis_names(view) if view is not None else ()
        view_values = {dims: remaining.pop(dims) for dims in list(remaining) if dims <= set(names)}
        totals.append(_fold(view_values, view, everywhere, norm_type, device))
    for dims in remaining:
        assert mesh is not None
        mesh.view(tuple(dims))  # raises: no view has them all
    total = torch.stack(totals)
    return total.sum() if norm_type == 2.0 else total.max()


def _fold(
    values: dict[frozenset[str], torch.Tensor],
    view: DeviceMesh | None,
    everywhere: frozenset[str],
    norm_type: float,
    device: torch.device,
) -> torch.Tensor:
    """One collective a dimension of a view.

    Ranks may hold different sets (a stage without sharded parameters), so sets are enumerated alike everywhere, in a
    table with one dimension of two for each of the mesh's: does the set contain it? The dtype is the same on all ranks
    too: one without gradients does not know that of the others. Indices are numbers, never tensors, which the host
    would have to wait for.
    """
    names = axis_names(view) if view is not None else ()
    axes = [a for i, a in enumerate(names) if view is not None and view.size(i) > 1]
    table = torch.zeros([2] * len(axes), dtype=torch.float64, device=device)
    for dims, value in values.items():
        entry = table[tuple(int(axis in dims or axis in everywhere) for axis in axes)] if axes else table
        value = value.double()
        entry.copy_(entry + value if norm_type == 2.0 else torch.maximum(entry, value))
    for i, axis in enumerate(axes):
        assert view is not None
        with_axis = table.select(i, 1)
        group = view.get_group(axis) if view.ndim > 1 else view.get_group()
        if norm_type == 2.0:
            folded = with_axis.contiguous()
            all_reduce(folded, group)
        else:
            folded = largest(with_axis, [group])
        with_axis.copy_(folded)
    return table.sum() if norm_type == 2.0 else table.max()


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    mesh: AnyMesh | None = None,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm before, a scalar tensor.

    Like `torch.nn.utils.clip_grad_norm_`, for parameters of any mix of layouts over `mesh` (None: one process). Given
    the model itself, what its modules record of replaced parameters is known too (`fully_shard` after `parallelize`).
    Nothing waits for the device unless `error_if_nonfinite`, which raises `CaiError` for NaN or infinite norms.
    """
    if isinstance(parameters, nn.Module):
        parameters = refresh(parameters).parameters()
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
        grad = local_gradient(p)
        if grad is not None:
            grads[grad.device].append(grad)
    for device, device_grads in grads.items():
        torch._foreach_mul_(device_grads, scale.to(device))
    return norm
