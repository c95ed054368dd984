"""Where the parts of a model lie: found by observing a forward of a small instance, not by class name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.trial import SmallModel, Trial, arguments_of


@dataclass(frozen=True)
class ModelStructure:
    """The parts of a causal LM, by name.

    Args:
        layers: the `ModuleList` of decoder layers.
        before: modules with parameters that run before the first layer (embeddings), in model order.
        after: modules with parameters that run after the last layer (final norm, head).
        outputs: length of the tuple a layer returns, or None when it returns a tensor.
    """

    layers: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    outputs: int | None


def find_structure(model: nn.Module, trial: Trial | SmallModel) -> ModelStructure:
    """Run one forward of a small instance and record the order in which its modules run.

    Args:
        model: an instance of the trial, from `build`.
        trial: gives the inputs, and says which list the layers are in.

    Raises:
        PlanError: a module with parameters runs among the layers without being in one, or layers differ in what
            they return, so the model cannot be split between layers.
    """
    layers = trial.layers
    _check_layers(model, layers)
    seen: list[tuple[str, Any]] = []

    def record(name: str) -> Callable[..., None]:
        return lambda module, args, output: seen.append((name, output))

    outside = _modules_outside_layers(model, layers)
    stack = model.get_submodule(layers)
    hooks = [model.get_submodule(name).register_forward_hook(record(name)) for name in outside]
    hooks += [layer.register_forward_hook(record(layers)) for layer in stack.children()]
    try:
        model(**arguments_of(model, trial.inputs()))
    finally:
        for hook in hooks:
            hook.remove()
    order = [name for name, _ in seen]
    if order.count(layers) != len(list(stack.children())):
        raise PlanError(f"{type(model).__name__} does not run each of its layers once")
    first, last = order.index(layers), len(order) - 1 - order[::-1].index(layers)
    before = [name for name in outside if name in order[:first] or name not in order]
    after = [name for name in outside if name in order[last:]]
    for name in outside:
        if name in order[first:last] or (name in before and name in after):
            raise PlanError(
                f"cannot split {type(model).__name__} between its layers",
                cause=f"{name} has parameters and runs among the layers",
            )
    shapes = {len(out) if isinstance(out, tuple) else None for name, out in seen if name == layers}
    if len(shapes) != 1:
        raise PlanError(f"the layers of {type(model).__name__} return different things", got=shapes)
    return ModelStructure(layers, tuple(before), tuple(after), shapes.pop())


def _check_layers(model: nn.Module, layers: str) -> None:
    found = dict(model.named_modules()).get(layers)
    if not isinstance(found, nn.ModuleList) or not len(found):
        raise PlanError(
            f"{type(model).__name__} has no list of layers {layers!r}",
            got="nothing" if found is None else type(found).__name__,
            expected="an nn.ModuleList with the layers to divide",
        )


def _modules_outside_layers(model: nn.Module, layers: str) -> list[str]:
    """Names of the modules outside the layers that have parameters of their own."""
    outside = []
    for name, module in model.named_modules():
        if name.startswith(layers + ".") or not list(module.parameters(recurse=False)):
            continue
        if not name or layers.startswith(name + "."):
            raise PlanError(
                f"cannot split {type(model).__name__}",
                cause=f"{name or 'the model'} holds parameters beside its layers",
            )
        outside.append(name)
    return outside
