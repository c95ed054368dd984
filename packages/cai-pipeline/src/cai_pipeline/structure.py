"""Where the parts of a model lie: found by observing a forward of a small instance, not by class name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from cai_mesh.errors import PlanError
from cai_pipeline.small_model import SmallModel


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


def find_layers(model: nn.Module) -> str:
    """The name of the model's list of decoder layers: the largest `ModuleList` of `num_hidden_layers` entries.

    Raises PlanError when there is none, and for an encoder-decoder, which has two.
    """
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise PlanError(
            f"cannot split {type(model).__name__}", got="an encoder-decoder", expected="a causal LM"
        )
    wanted = config.get_text_config().num_hidden_layers
    found = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == wanted
    }
    outer = {name: size for name, size in found.items() if not any(name.startswith(o + ".") for o in found)}
    if not outer:
        raise PlanError(
            f"cannot find the decoder layers of {type(model).__name__}",
            expected=f"a ModuleList of {wanted} layers, as config.num_hidden_layers says",
        )
    return max(outer, key=lambda name: outer[name])


def find_structure(model: nn.Module, small: SmallModel) -> ModelStructure:
    """Run one forward of a small instance and record the order in which its modules run.

    Args:
        model: an instance of `small`, from `build`.
        small: gives the inputs.

    Raises:
        PlanError: a module with parameters runs among the layers without being in one, or layers differ in what
            they return, so the model cannot be split between layers.
    """
    layers = find_layers(model)
    seen: list[tuple[str, Any]] = []

    def record(name: str) -> Callable[..., None]:
        return lambda module, args, output: seen.append((name, output))

    outside = _modules_outside_layers(model, layers)
    stack = model.get_submodule(layers)
    hooks = [model.get_submodule(name).register_forward_hook(record(name)) for name in outside]
    hooks += [layer.register_forward_hook(record(layers)) for layer in stack.children()]
    try:
        model(**small.inputs(), use_cache=False)
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
