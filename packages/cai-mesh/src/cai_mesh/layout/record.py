"""The record attached to a parameter: one record a parameter, on the module that owns it, by its local name.

The record stays when the `nn.Parameter` object does not: after `copy.deepcopy`, `load_state_dict(assign=True)`, or
`fully_shard`. What is attached to the tensor itself is a cache, so that functions that see only tensors (norms,
optimizers, checkpoints) need no module. `refresh` brings the caches of a model up to date.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from cai_mesh.errors import LayoutError
from cai_mesh.layout.layout import Layout
from cai_mesh.layout.reduce import ReduceSpec

KEY = "cai_records"
"""The key of the records in a module's `__dict__`."""

ALL = "cai_records_below"
"""The key of the list of all records below a module that keeps them fresh."""


@dataclass(frozen=True)
class Slice:
    """The part of one parameter that a flat tensor holds.

    Args:
        name: canonical name of the parameter; None where the tensor is of one and its name is known from elsewhere.
        layout: the layout of the local tensor.
        range: elements of the row-major local tensor that are held; may be empty.
        start: element of the flat tensor at which they begin.
        axes: mesh axes along which ranks hold different elements of the parameter.
        owner: whether this copy is the one that counts in norms and is written to checkpoints.
    """

    name: str | None
    layout: Layout
    range: tuple[int, int]
    start: int
    axes: frozenset[str]
    owner: bool = True

    @property
    def stop(self) -> int:
        """Element of the flat tensor after the last."""
        return self.start + self.range[1] - self.range[0]


@dataclass(frozen=True)
class Record:
    """The facts attached to one parameter, or to a tensor that pipeline stages send each other.

    Args:
        name: canonical name: that of its owner when it is a tied copy. None: the one the model gives it.
        layout: the layout of the local tensor. None: the tensor is full.
        reduce: the way its gradient is reduced. None: the default.
        slices: the parts of parameters that a flat tensor holds, in an order that is the same on all ranks.
        part: whether each tensor-parallel rank has its own part of a tensor between stages, as of its heads alone, and
            the gradient is of that.
    """

    name: str | None = None
    layout: Layout | None = None
    reduce: ReduceSpec | None = None
    slices: tuple[Slice, ...] | None = None
    part: bool = False


NOTHING = Record()


def record_of(tensor: torch.Tensor) -> Record:
    """Return the record attached to a tensor."""
    return getattr(tensor, "cai_record", NOTHING)


def _checked(record: Record, shape: torch.Size) -> Record:
    if record.layout is not None and tuple(shape) != record.layout.local_shape:
        raise LayoutError(
            "a layout does not describe this tensor", got=tuple(shape), expected=record.layout.local_shape
        )
    return record


def attach(tensor: torch.Tensor, layout: Layout | None = None, **changes: Any) -> Record:
    """Attach something to a tensor, keeping what is there already; `attach_to` is for a module's parameter.

    Args:
        layout: the layout of the local tensor.
        changes: other fields of `Record`: `name`, `reduce`, `slices`, `part`.

    Returns the record. Raises `LayoutError` when the shapes disagree.
    """
    if layout is not None:
        changes["layout"] = layout
    record = _checked(replace(record_of(tensor), **changes), tensor.shape)
    tensor.cai_record = record  # type: ignore[attr-defined]
    return record


def attach_to(module: nn.Module, local: str, layout: Layout | None = None, **changes: Any) -> Record:
    """Attach something to the parameter that `module` holds as `local`, in the module's records; see `attach`.

    A parameter that several modules hold is attached to in each of them.
    """
    param = module._parameters[local]
    assert param is not None
    record = attach(param, layout, **changes)
    _records(module).of[local] = record
    return record


@dataclass(eq=False)
class _Records:
    """A module's records by local name. A copy of the module gets its own, and its parameters their caches.

    Args:
        params: the module's `_parameters`.
    """

    params: dict[str, nn.Parameter | None]
    of: dict[str, Record] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict) -> _Records:
        for name, param in self.params.items():
            if name in self.of and param is not None and _is_plain(param):
                self.of[name] = param.cai_record  # another module that shares it may have attached more
        copied = _Records(copy.deepcopy(self.params, memo), dict(self.of))  # the copies that are made anyway
        copied.refresh()
        return copied

    @property
    def is_fresh(self) -> bool:
        """Whether every parameter has its cache."""
        return all(p is None or hasattr(p, "cai_record") for p in map(self.params.get, self.of))

    def refresh(self) -> None:
        for name, record in self.of.items():
            param = self.params.get(name)
            if param is not None and record_of(param).slices is None:
                param.cai_record = _of_now(name, record, param)  # type: ignore[attr-defined]


def _is_plain(param: torch.Tensor) -> bool:
    """Whether a parameter carries the record that its module should have: it is no shard made of one."""
    record = record_of(param)
    return record is not NOTHING and record.slices is None and not hasattr(param, "placements")


def _of_now(name: str, record: Record, param: torch.Tensor) -> Record:
    """A record for the tensor that now stands in the place of the one it was made for."""
    if not hasattr(param, "placements"):
        try:
            return _checked(record, param.shape)
        except LayoutError as error:
            raise LayoutError(
                f"parameter {name!r} was replaced by one of another shape",
                got=tuple(param.shape),
                expected=record.layout.local_shape if record.layout else None,
                fix="replace it by a tensor of the local shape, or load before the model is cut",
            ) from error
    from cai_mesh.layout.dtensor import layout_of_dtensor  # here: it imports torch.distributed.tensor

    layout = layout_of_dtensor(param)
    if record.layout is None:
        return replace(record, layout=layout)
    if layout.global_shape != record.layout.local_shape:
        raise LayoutError(
            f"parameter {name!r} was sharded from another tensor than it was cut to",
            got=layout.global_shape,
            expected=record.layout.local_shape,
        )
    return replace(record, layout=replace(record.layout, steps=(*record.layout.steps, *layout.steps)))


def _refresh_after_loading(module: nn.Module, _incompatible: Any) -> None:
    """Renew the records: after `load_state_dict(assign=True)` the parameters are other objects."""
    module.__dict__[KEY].refresh()


def _records(module: nn.Module) -> _Records:
    if KEY not in module.__dict__:
        module.__dict__[KEY] = _Records(module._parameters)
        module.register_load_state_dict_post_hook(_refresh_after_loading)
    return module.__dict__[KEY]


def _refresh_before_use(model: nn.Module, _args: Any) -> None:
    if not torch.compiler.is_compiling() and not all(records.is_fresh for records in model.__dict__[ALL]):
        refresh(model)


def keep_attached(model: nn.Module) -> None:
    """Let every forward of `model` refresh what was attached below it, if parameters have been replaced since."""
    if ALL not in model.__dict__:
        model.register_forward_pre_hook(_refresh_before_use)
    model.__dict__[ALL] = [module.__dict__[KEY] for module in model.modules() if KEY in module.__dict__]


def sites(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """(module, local name, parameter) for every place that holds a parameter, shared ones more than once."""
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                yield module, name, param


def refresh(model: nn.Module) -> nn.Module:
    """Bring records and tensors of a model together; returns the model.

    What was attached to tensors alone is recorded on their modules. Parameters that were replaced get what is
    recorded; DTensors that `fully_shard` made of cut parameters get both cuts. Call it after such a change; functions
    of cai that are given a model do it themselves. Raises `LayoutError` where a replaced parameter has another shape.
    """
    for module in model.modules():
        if KEY in module.__dict__:
            module.__dict__[KEY].refresh()
    for module, name, param in sites(model):
        if record_of(param) is NOTHING and hasattr(param, "placements"):
            attach(param)  # nothing more is to be known of this DTensor
        elif _is_plain(param):
            _records(module).of[name] = record_of(param)
    return model


def layout_of(tensor: torch.Tensor) -> Layout:
    """The attached layout of a tensor, that of a DTensor, or that of a full tensor."""
    attached = record_of(tensor).layout
    if attached is not None:
        return attached
    if hasattr(tensor, "placements") and hasattr(tensor, "device_mesh"):
        from cai_mesh.layout.dtensor import layout_of_dtensor

        return layout_of_dtensor(tensor)
    return Layout(tuple(tensor.shape))


def reduce_of(tensor: torch.Tensor) -> ReduceSpec:
    """The attached reduce spec of a tensor, or the default one."""
    return record_of(tensor).reduce or ReduceSpec()


def canonical_name(name: str, tensor: torch.Tensor) -> str:
    """The name under which a parameter is saved and initialized: that of its owner when it is a tied copy."""
    return record_of(tensor).name or name


def parts_by_axes(tensor: torch.Tensor) -> list[tuple[int, int, frozenset[str]]]:
    """(start, stop, axes) of the elements of a flat tensor that count here, runs of the same axes as one."""
    runs: list[tuple[int, int, frozenset[str]]] = []
    for part in record_of(tensor).slices or ():
        if not part.owner or part.start == part.stop:
            continue
        if runs and runs[-1][2] == part.axes:
            runs[-1] = (runs[-1][0], part.stop, part.axes)  # between them lies padding
        else:
            runs.append((part.start, part.stop, part.axes))
    return runs
