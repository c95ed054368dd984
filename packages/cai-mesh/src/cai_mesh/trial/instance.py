"""What an instance of a model has and its class does not: rebuilt on a small model, or refused by name.

Somebody may have put another activation into it, a hook on a module, a forward of their own. A small model made of
class and config knows nothing of that, and would prove another model than the one that is transformed. What cai itself
has put there is passed over: its own transforms answer for it.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from cai_mesh.adapters import BASE, MAGNITUDES, adapters, scales_rows
from cai_mesh.errors import PlanError

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_ABSENT = object()
_PLAIN = (bool, int, float, str, type(None))
_OPTIONS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


@dataclass(frozen=True)
class Change:
    """One difference of a module from what its class and config make.

    Args:
        name: the module's name; "" is the model.
        attribute: the attribute in which it differs; "" where another module stands there.
        value: a module, a function, a number; hooks as pairs of number and function.
        options: pairs of a table of the module's and the number of a hook that stands in it.
    """

    name: str
    attribute: str
    value: Any
    options: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        kind = (
            "hooks on"
            if self.attribute in HOOKS
            else f"{self.attribute} of"
            if self.attribute
            else "the module"
        )
        return f"{kind} {self.name or 'the model'}"

    def apply(self, model: nn.Module) -> None:
        """Rebuild it on a small model. Raises `PlanError` where that has no such module."""
        names = dict(model.named_modules())
        if self.name not in names:
            raise self.refusal(f"the small model has no {self.name}")
        small = names[self.name]
        if not self.attribute:
            parent, _, child = self.name.rpartition(".")
            setattr(names[parent], child, self._moved_to(small))
        elif self.attribute in HOOKS:
            getattr(small, self.attribute).update((key, _bound(hook, small)) for key, hook in self.value)
            for option, key in self.options:
                getattr(small, option)[key] = True
        else:
            setattr(small, self.attribute, _bound(self.value, small))

    def _moved_to(self, small: nn.Module) -> nn.Module:
        """The module with the parameters of the one that stands in its place, or small values of its own."""
        moved = copy.copy(self.value)
        moved.__dict__ = dict(self.value.__dict__)
        moved._modules = _children(self.value)
        moved._parameters, moved._buffers = dict(small._parameters), dict(small._buffers)
        for name, param in self.value._parameters.items():
            if param is not None and name not in moved._parameters:
                values = torch.linspace(0.1, 0.4, param.numel(), dtype=torch.float64).view(param.shape)
                moved._parameters[name] = nn.Parameter(values)
        for key, value in small.__dict__.items():
            if type(value) is int and key in moved.__dict__:
                moved.__dict__[key] = value
        return moved.train(small.training)

    def refusal(self, got: str) -> PlanError:
        """The error that names it."""
        return PlanError(
            f"this instance has {self}, which its class and config do not make, and it cannot be tried small",
            got=got,
            cause="it was changed after it was built",
            fix="change it after the transform, or pass trial=Trial(...) with a small model that has it too",
        )


class AdapterChange(Change):
    """Adapters beside a linear layer, which stays as the class made it."""

    def __str__(self) -> str:
        return f"adapters of {self.name}"

    def apply(self, model: nn.Module) -> None:
        """Put adapters of the same rank beside the small layer."""
        layers = dict(model.named_modules())
        if self.name not in layers:
            raise self.refusal(f"the small model has no {self.name}")
        parent, _, child = self.name.rpartition(".")
        setattr(layers[parent], child, self._beside(layers[self.name]))

    def _beside(self, layer: nn.Module) -> nn.Module:
        moved = copy.copy(self.value)
        moved.__dict__ = dict(self.value.__dict__)
        moved._modules = _children(self.value) | {BASE: layer}
        for kind in ("lora_A", "lora_B"):
            moved._modules[kind] = nn.ModuleDict()
        for pair in adapters(self.value):
            up = self.value.get_submodule(pair.up)
            width_in, width_out = _features(layer, self.value)
            small_down = nn.Linear(width_in, up.in_features, bias=False)
            small_up = nn.Linear(up.in_features, width_out, bias=up.bias is not None)
            for name, small in ((pair.down, small_down), (pair.up, small_up)):
                kind, _, key = name.partition(".")
                moved._modules[kind].add_module(key, _filled(small))
        if scales_rows(self.value):
            lengths = self.value.get_submodule(MAGNITUDES).named_children()
            small_lengths = {key: _row_lengths(module, layer, self.value) for key, module in lengths}
            moved._modules[MAGNITUDES] = nn.ModuleDict(small_lengths)
        return moved.train(layer.training)


def _children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return copies of the modules inside a module: those of a model that is tried would leave training with it."""
    copies: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        if child is not None:
            copied = copy.copy(child)
            copied.__dict__ = dict(child.__dict__) | {"_modules": _children(child)}
            child = copied
        copies[name] = child
    return copies


def _features(layer: nn.Module, wrapper: Any) -> tuple[int, int]:
    """Return the features into a small layer and out of it, whose weight is turned round where the large one's is."""
    weight = layer.get_parameter("weight")
    turned = getattr(wrapper, "fan_in_fan_out", False)
    rows, columns = weight.shape
    return (rows, columns) if turned else (columns, rows)


def _row_lengths(lengths: nn.Module, layer: nn.Module, wrapper: Any) -> nn.Module:
    """Return lengths of the rows of a small layer (DoRA), of the class of those of the large one."""
    small = copy.copy(lengths)
    _, rows = _features(layer, wrapper)
    values = torch.linspace(0.5, 1.5, rows, dtype=layer.get_parameter("weight").dtype)
    small._parameters = {"weight": nn.Parameter(values.to(layer.get_parameter("weight").device))}
    return small


def _filled(layer: nn.Linear) -> nn.Linear:
    """Return the layer with values that are the same at every call."""
    with torch.no_grad():
        for param in layer.parameters():
            values = torch.linspace(-0.3, 0.3, param.numel(), dtype=torch.float64).sin()
            param.data = values.roll(param.shape[-1] // 2).view(param.shape).to(param.device)
    return layer


def changes_of(model: nn.Module) -> tuple[Change, ...]:
    """Return the differences of a model from what its class makes of its config, those that can be rebuilt.

    Raises `PlanError` for a module with other parameters than the class has there.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        plain_modules = dict(type(model)(copy.deepcopy(model.config)).named_modules())  # type: ignore[operator]
    changes: list[Change] = []
    replaced: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(prefix + ".") for prefix in replaced)
        if name not in plain_modules or _is_ours(type(module)) or inside:
            continue
        if adapters(module):
            replaced.append(name)
            changes.append(_adapters(name, module, plain_modules[name]))
        elif type_before_parametrizations(module) is not type_before_parametrizations(plain_modules[name]):
            replaced.append(name)
            changes.append(_exchange(name, module, plain_modules[name]))
        else:
            changes += _differences(name, module, plain_modules[name])
    return tuple(changes)


def _adapters(name: str, module: nn.Module, plain: nn.Module) -> Change:
    change = AdapterChange(name, "", module)
    layer = module.get_submodule(BASE)
    if type(layer) is not type(plain) and not _is_ours(type(layer)):
        raise change.refusal(f"beside {type(layer).__name__} in place of {type(plain).__name__}")
    layers = [module.get_submodule(name) for pair in adapters(module) for name in (pair.down, pair.up)]
    if not all(isinstance(layer, nn.Linear) for layer in layers):
        raise change.refusal(f"beside {type(layer).__name__}, which is no linear layer")
    return change


def _exchange(name: str, module: nn.Module, plain: nn.Module) -> Change:
    change = Change(name, "", module)
    shapes, plain_shapes = _shapes(module), _shapes(plain)
    children = [child for child, _ in module.named_children()]
    if shapes and ((plain_shapes and shapes != plain_shapes) or children):
        raise change.refusal(f"{type(module).__name__} in place of {type(plain).__name__}")
    return change


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in module.named_parameters()}


def _differences(name: str, module: nn.Module, plain: nn.Module) -> Iterator[Change]:
    for kind in HOOKS:
        plain_codes = {_code(hook) for hook in getattr(plain, kind).values()}
        hooks = {
            key: _unbound(hook, module)
            for key, hook in getattr(module, kind).items()
            if not _is_ours(hook) and _code(hook) not in plain_codes
        }
        options = ((option, key) for option in _OPTIONS for key in getattr(module, option) if key in hooks)
        if hooks:
            yield Change(name, kind, tuple(hooks.items()), tuple(options))
    functions = [
        Change(name, key, _unbound(value, module))
        for key, value in module.__dict__.items()
        if key not in HOOKS and _is_function(value) and not _is_ours(value)
        if _code(value) != _code(plain.__dict__.get(key))
    ]
    for key, value in module.__dict__.items():
        plain_value = plain.__dict__.get(key, _ABSENT)
        scaled = isinstance(value, float) and isinstance(plain_value, float) and value != plain_value
        # a forward of one's own reads what was put there for it
        for_function = functions and plain_value is _ABSENT and isinstance(value, _PLAIN)
        if scaled or for_function:
            yield Change(name, key, value)
    yield from functions


def _is_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType)


def _code(value: Any) -> Any:
    """What makes two functions the same: their code, where they have some."""
    function = getattr(value, "__func__", value)
    return getattr(function, "__code__", function)


def _is_ours(value: Any) -> bool:
    function = getattr(value, "__func__", getattr(value, "func", value))
    return str(getattr(function, "__module__", "")).split(".")[0].startswith("cai_")


def _unbound(value: Any, module: nn.Module) -> Any:
    return _Method(value.__func__) if getattr(value, "__self__", None) is module else value


@dataclass(frozen=True)
class _Method:
    """A function that is bound to whatever module it is of."""

    function: Callable[..., Any]


def _bound(value: Any, module: nn.Module) -> Any:
    return types.MethodType(value.function, module) if isinstance(value, _Method) else value
