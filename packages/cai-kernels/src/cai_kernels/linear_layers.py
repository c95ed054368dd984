"""Linear layers of a model that are exchanged for layers of another class, in place."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from cai_kernels.errors import KernelError

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)

Places = list[tuple[nn.Module, str]]
"""The modules that have a layer, each with the name it has there."""


def check_unchanged(name: str, layer: nn.Linear, omission: str) -> None:
    """Raise `KernelError` for a layer that has more than an `nn.Linear` has, which a new layer would lose.

    Args:
        omission: the end of the advice, "or leave it out with ...".
    """
    change = None
    if "forward" in layer.__dict__:
        change = "its forward was replaced"
    elif any(getattr(layer, hooks) for hooks in HOOKS):
        change = "it has hooks"
    elif getattr(layer, "_compiled_call_impl", None) is not None:
        change = "it is compiled"
    elif set(layer._parameters) != {"weight", "bias"} or layer._buffers or layer._modules:
        change = "it has parameters, buffers or modules of its own besides weight and bias"
    if change is not None:
        raise KernelError(
            f"linear layer {name!r} was changed by another transform",
            got=change,
            fix=f"convert before other transforms, or leave it out with {omission}",
        )


def places_of(model: nn.Module, layers: Collection[nn.Linear]) -> dict[nn.Linear, Places]:
    """Return every place of some layers in a model; a layer under several names has several."""
    places: dict[nn.Linear, Places] = {layer: [] for layer in layers}
    for parent in model.modules():
        for name, child in parent._modules.items():  # named_children leaves out second names
            if isinstance(child, nn.Linear) and child in places:
                places[child].append((parent, name))
    return places


def replace(places: Places, layer: nn.Linear, new: nn.Module) -> None:
    """Put a new layer into all places of another, with its mode and those of its attributes that it has not."""
    for name, value in vars(layer).items():
        if name not in vars(new):
            new.__dict__[name] = value
    new.train(layer.training)
    for parent, name in places:
        setattr(parent, name, new)
