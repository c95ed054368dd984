"""Models without memory (on the meta device): their first values are made while `boost` divides them over ranks.

A value depends on the seed of the first rank and on its parameter's name, so that every plugin begins alike.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from cai_apps.compose.lora import initialize, is_adapter
from cai_apps.compose.materialize import InitialValues
from cai_apps.compose.models import without_values
from cai_mesh.errors import ConfigError

FILES = "cai_files"
"""The attribute of a model without memory with the directory of its weights, which `boost` reads."""


def is_lazy(model: nn.Module) -> bool:
    """Return whether a model has no memory.

    Raises:
        ConfigError: it has memory for some of its parameters.
    """
    without = [name for name, param in model.named_parameters() if param.is_meta]
    rest = [name for name, param in model.named_parameters() if not param.is_meta]
    if without and rest:
        raise ConfigError(
            "some parameters of the model are on the meta device, and others are not",
            got=f"{without[0]} is, {rest[0]} is not ({len(without)} and {len(rest)} of such)",
            fix='make all of it, adapters and heads too, under `with torch.device("meta"):`, or nothing',
        )
    return bool(without)


def initial_values(model: nn.Module, device: torch.device) -> InitialValues:
    """Return the first values of a model without memory, after its transforms. Collective.

    Args:
        model: the model: of transformers, or of layers with `reset_parameters`, as torch's have.
        device: the device on which they are made.

    Raises:
        ConfigError: its parameters have several dtypes.
        PlanError: a parameter has no initialization but that of its class's constructor, as is seen once it is made.
    """
    trained = {param.dtype for param in model.parameters() if param.requires_grad}
    frozen = {param.dtype for param in model.parameters() if not param.requires_grad}
    if max(len(trained), len(frozen)) > 1:
        raise ConfigError(
            "the parameters of a model on the meta device have several dtypes",
            got=", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in trained | frozen)),
            fix="make it in one dtype (dtype=... of from_config); a plugin's precision chooses that of computation",
        )
    dtype = next(iter(trained or frozen))
    return InitialValues(
        model,
        _initializer,
        seed=_common_seed(device),
        dtype=dtype,
        frozen=next(iter(frozen), dtype),
        device=device,
    )


def filled_from(directory: Path, model: nn.Module) -> nn.Module:
    """Return a model on the meta device that `boost` fills from a directory.

    Args:
        directory: a directory of Hugging Face with weights in safetensors.
        model: the model of transformers that it holds.
    """
    setattr(model, FILES, directory)
    return without_values(model)


def files_of(model: nn.Module) -> Path | None:
    """Return the directory with the weights of a model without memory; None: it starts anew."""
    return getattr(model, FILES, None)


def _common_seed(device: torch.device) -> int:
    """Return the first rank's seed."""
    seed = torch.tensor([torch.initial_seed() % 2**63], dtype=torch.int64, device=device)
    dist.broadcast(seed, 0)
    return int(seed)


def _initializer(model: nn.Module) -> Callable[[nn.Module], None]:
    """Return what fills one module: `_init_weights` of the model of transformers that it is in, or its own reset."""
    names = {module: name for name, module in model.named_modules()}
    rules: dict[nn.Module, Callable[[nn.Module], None]] = {}

    def visit(module: nn.Module, above: Callable[[nn.Module], None]) -> None:
        rule = getattr(module, "_init_weights", None) or above
        rules.setdefault(module, rule)
        for child in module.children():
            visit(child, rule)

    def fill(module: nn.Module) -> None:
        if is_adapter(f"{names[module]}."):
            initialize(module, names[module])
        else:
            rules[module](module)

    visit(model, _reset)
    return fill


def _reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]
