"""Modules and parameters that a model has been given since it was transformed: nobody cut, sharded or reduces them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from cai_mesh.errors import PlanError
from cai_mesh.layout.record import layout_of, record_of

KEY = "cai_structure"
"""The key of a module's `_Site` in its `__dict__`."""

Check = Callable[[nn.Module, list[str]], None]
"""Called with a model and the names of parameters that are new in it; raises where it could not train them."""


@dataclass(eq=False)
class _Structure:
    """One model as its transform has left it.

    Args:
        check: judges new parameters.
        shapes: local shapes of cut parameters, by name.
        changed: whether a module has been given something since the last look.
    """

    check: Check
    shapes: dict[str, tuple[int, ...]]
    changed: bool = False


@dataclass(eq=False)
class _Site:
    """What is known of one module: the names of its parameters."""

    structure: _Structure
    names: frozenset[str]


def follow_structure(model: nn.Module, check: Check) -> None:
    """Look at a model at the first forward after one of its modules was given a module or a parameter.

    A forward of a model that was given nothing reads a flag. Cut parameters that are gone, or have another shape, raise
    `PlanError`.

    Args:
        model: the model, after its transform.
        check: raises where new parameters could not be trained. One that trains them all alike returns.
    """
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters() if _is_cut(param)}
    structure = _Structure(check, shapes)
    is_followed = KEY in model.__dict__
    for module in model.modules():
        module.__dict__[KEY] = _Site(structure, frozenset(module._parameters))
    _tell_of_registrations()
    if not is_followed:
        model.register_forward_pre_hook(_look)


def is_followed(module: nn.Module) -> bool:
    """Whether a module was there when its model was transformed."""
    return KEY in module.__dict__


@functools.cache
def _tell_of_registrations() -> None:
    """Hook every module of the process: torch tells of a new child or parameter nowhere else."""

    def told(module: nn.Module, name: str, value: Any) -> None:
        site = module.__dict__.get(KEY)
        if site is not None and value is not None:
            site.structure.changed = True

    register_module_module_registration_hook(told)
    register_module_parameter_registration_hook(told)


def _is_cut(param: torch.Tensor) -> bool:
    record = record_of(param)
    return record.layout is not None and record.slices is None and bool(record.layout.sharded_axes)


def _look(model: nn.Module, _: Any) -> None:
    if torch.compiler.is_compiling() or not model.__dict__[KEY].structure.changed:
        return
    structure: _Structure = model.__dict__[KEY].structure
    new: list[str] = []
    for prefix, module in model.named_modules():
        site = module.__dict__.get(KEY)
        names = site.names if site is not None and site.structure is structure else frozenset[str]()
        new += [
            f"{prefix}.{name}".lstrip(".")
            for name, param in module._parameters.items()
            if name not in names and param is not None
        ]
    params = dict(model.named_parameters())
    for name, shape in structure.shapes.items():
        if (
            name not in params
            or tuple(params[name].shape) != shape
            or not layout_of(params[name]).sharded_axes
        ):
            raise exchanged(model, name)
    structure.check(model, new)
    structure.changed = bool(new)  # those that may be there now may not be in the next forward, unfrozen


def exchanged(model: nn.Module, name: str) -> PlanError:
    """The error for a parameter in whose place there is another."""
    return PlanError(
        f"{type(model).__name__} was changed after it was cut or sharded: {name}",
        cause="its module was exchanged, resized or wrapped since (resize_token_embeddings, an adapter, a new head): "
        "ranks have parts of what was there, and nobody cuts or reduces what is there now",
        fix="change the model first, add adapters first, then parallelize or shard it",
    )
