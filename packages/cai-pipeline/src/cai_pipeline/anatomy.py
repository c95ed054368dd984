"""Where a model's parts lie, found by watching a small instance run rather than by its class name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from cai_mesh.errors import PlanError
from cai_pipeline.miniature import Miniature


@dataclass(frozen=True)
class Anatomy:
    """The parts of a causal LM, by name.

    Args:
        layers: the `ModuleList` of decoder layers.
        before: modules with parameters that run before the first layer (embeddings), in the order of the model.
        after: modules with parameters that run after the last layer (final norm, head).
        outputs: length of the tuple a layer returns, or None when it returns a tensor.
    """

    layers: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    outputs: int | None


def layers_of(model: nn.Module) -> str:
    """The name of the model's list of decoder layers.

    It is the largest `ModuleList` with as many entries as the config has layers. Raises PlanError when there is
    none, and for an encoder-decoder, which has two.
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


def examine(model: nn.Module, twin: Miniature) -> Anatomy:
    """Watch a small instance take one forward and note what runs when.

    Args:
        model: an instance of `twin`, as it came from `build`.
        twin: what it was built from; gives the inputs.

    Raises:
        PlanError: a module with parameters runs among the layers without being in one, or layers differ in what
            they return, so the model cannot be cut between layers.
    """
    layers = layers_of(model)
    seen: list[tuple[str, Any]] = []

    def watch(name: str) -> Callable[..., None]:
        return lambda module, args, output: seen.append((name, output))

    owners = _outer_owners(model, layers)
    stack = model.get_submodule(layers)
    hooks = [model.get_submodule(name).register_forward_hook(watch(name)) for name in owners]
    hooks += [layer.register_forward_hook(watch(layers)) for layer in stack.children()]
    try:
        model(**twin.inputs(), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    order = [name for name, _ in seen]
    if order.count(layers) != len(list(stack.children())):
        raise PlanError(f"{type(model).__name__} does not run each of its layers once")
    first, last = order.index(layers), len(order) - 1 - order[::-1].index(layers)
    before = [name for name in owners if name in order[:first] or name not in order]
    after = [name for name in owners if name in order[last:]]
    for name in owners:
        if name in order[first:last] or (name in before and name in after):
            raise PlanError(
                f"cannot split {type(model).__name__} between its layers",
                cause=f"{name} has parameters and runs among the layers",
            )
    shapes = {len(out) if isinstance(out, tuple) else None for name, out in seen if name == layers}
    if len(shapes) != 1:
        raise PlanError(f"the layers of {type(model).__name__} return different things", got=shapes)
    return Anatomy(layers, tuple(before), tuple(after), shapes.pop())


def _outer_owners(model: nn.Module, layers: str) -> list[str]:
    """Modules outside the layers that hold parameters themselves."""
    owners = []
    for name, module in model.named_modules():
        if name.startswith(layers + ".") or not list(module.parameters(recurse=False)):
            continue
        if not name or layers.startswith(name + "."):
            raise PlanError(
                f"cannot split {type(model).__name__}",
                cause=f"{name or 'the model'} holds parameters beside its layers",
            )
        owners.append(name)
    return owners
