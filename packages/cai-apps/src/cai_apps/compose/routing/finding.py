"""The routers of a model, found by what it records and by its structure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cai_mesh.errors import ConfigError
from cai_mesh.experts import COUNTS, VISITED

RECORDS = "_can_record_outputs"
"""The attribute in which models of transformers name the modules whose outputs they record."""
LOGITS = "router_logits"
"""The name of routers in it."""
CHOSEN = ("top_k", *VISITED)
"""Names of the number of experts that a token visits."""


@dataclass(frozen=True)
class Router:
    """A module that says which experts a token visits.

    Args:
        name: its name in the model.
        module: the module. It returns logits, alone or among others.
        place: the place of the logits, [tokens, experts], in what it returns.
        experts: the number of experts.
        visited: the number of them that a token visits.
        bias: the module and the name of the buffer that corrects the choice, [experts]; None: there is none.
    """

    name: str
    module: nn.Module
    place: int
    experts: int
    visited: int
    bias: tuple[nn.Module, str] | None = None

    def logits(self, output: Any) -> Tensor:
        """Return the logits in what the module returns, [tokens, experts]."""
        logits = output if isinstance(output, Tensor) else output[self.place]
        return logits.flatten(0, -2)

    def choice(self, output: Any) -> Tensor:
        """Return the experts that each token visits, int64 [tokens, visited]: those returned, or the likeliest.

        A router that drops a token gives it an expert that there is not.
        """
        logits = self.logits(output)
        shape = (logits.shape[0], self.visited)
        for value in () if isinstance(output, Tensor) else output:
            if _is_integer(value) and tuple(value.shape) == shape:
                return value
        return logits.detach().topk(self.visited, dim=-1).indices

    def correction(self) -> Tensor:
        """Return the buffer that corrects the choice, as it is now. For routers that have one."""
        assert self.bias is not None
        module, name = self.bias
        return module._buffers[name]  # type: ignore[return-value]


def routers_of(model: nn.Module) -> list[Router]:
    """Return the routers of a whole model, in the order of their layers; nothing of a model without experts.

    A router is a module that the model records as `router_logits`, or one beside the experts of a block that has a
    matrix with one row for each of them.

    Args:
        model: the model as transformers makes it, before any transform; may be on the meta device.
    """
    names = {module: name for name, module in model.named_modules()}
    places = dict(_recorded(model)) or dict(_beside_experts(model))
    return [_router(model, names, module, place) for module, place in places.items()]


def need_routers(model: nn.Module, what: str) -> list[Router]:
    """Return the routers of a model that is to have some, all with as many experts.

    Args:
        model: the model, as for `routers_of`.
        what: the key that needs them, for the error.

    Raises:
        ConfigError: there are none, or they differ in their number of experts.
    """
    routers = routers_of(model)
    if not routers:
        raise ConfigError(
            f"{what} is of routers, and {type(model).__name__} has none",
            got=f"no module recorded as {LOGITS!r}, none beside experts with a row for each of them",
            expected="a mixture of experts, such as Mixtral, Qwen3-MoE or OLMoE",
            fix="leave it out, or choose another model",
        )
    counts = sorted({router.experts for router in routers})
    if len(counts) > 1:
        raise ConfigError(
            f"{what} adds up routers of all layers, and they differ in their experts",
            got=f"layers of {' and '.join(map(str, counts))} experts",
            fix="leave it out",
        )
    return routers


def _is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)


def _recorded(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yield the modules that the model, or a part of it, records as routers, and the place of their logits."""
    recorders: dict[int, Any] = {}
    for part in model.modules():
        entry = (getattr(part, RECORDS, None) or {}).get(LOGITS)
        for recorder in entry if isinstance(entry, list | tuple) else [entry]:
            if recorder is not None:
                recorders.setdefault(id(recorder), recorder)
    for name, module in model.named_modules():
        for recorder in recorders.values():
            kind, layer = getattr(recorder, "target_class", recorder), getattr(recorder, "layer_name", None)
            if isinstance(kind, type) and isinstance(module, kind) and (layer is None or layer in name):
                yield module, getattr(recorder, "index", 0)
                break


def _beside_experts(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yield the modules with a matrix of one row for each expert of the block that they are in; logits come first.

    Something has to say how many experts there are, or are visited: stacks of matrices alone may be convolutions.
    """
    text = _text_config(model)
    for block in model.modules():
        children = dict(block.named_children())
        for experts in children.values():
            count = _stacked(experts)
            rows = [child for child in children.values() if child is not experts and _rows(child) == count]
            if not count or len(rows) != 1:
                continue
            if _number((experts, rows[0], block, text), COUNTS) or _number((rows[0], block), CHOSEN):
                yield rows[0], 0


def _stacked(module: nn.Module) -> int:
    """Return the number of experts whose matrices a module stacks, [experts, ...]; 0: it does not."""
    if isinstance(module, nn.Conv1d):
        return 0
    counts = {
        param.shape[0] for param in module._parameters.values() if param is not None and param.ndim == 3
    }
    return counts.pop() if len(counts) == 1 else 0


def _rows(module: nn.Module) -> int:
    """Return the number of rows of the only matrix of a module; 0: it has none, or several."""
    matrices = [param for param in module.parameters() if param.ndim == 2]
    return matrices[0].shape[0] if len(matrices) == 1 else 0


def _router(model: nn.Module, names: dict[nn.Module, str], module: nn.Module, place: int) -> Router:
    name = names[module]
    block = model.get_submodule(name.rpartition(".")[0])
    text = _text_config(model)
    experts = _number((module, block), COUNTS) or _rows(module) or _number((text,), COUNTS)
    visited = _number((module, block, text), CHOSEN)
    if not experts or not visited:
        raise ConfigError(
            f"{name} is a router, and nothing says how many experts it has or a token visits",
            got=type(module).__name__,
            expected=f"a number {' or '.join(COUNTS[:2])}, and one top_k or {VISITED[0]}",
        )
    return Router(name, module, place, experts, visited, _correction(module, block, experts))


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _number(sources: tuple[Any, ...], names: tuple[str, ...]) -> int | None:
    for source in sources:
        for name in names:
            if isinstance(number := getattr(source, name, None), int):
                return number
    return None


def _correction(module: nn.Module, block: nn.Module, experts: int) -> tuple[nn.Module, str] | None:
    """Return the buffer of one floating-point number an expert, in a router or in its block, that is a bias."""
    for owner in (*module.modules(), block):
        for name, buffer in owner._buffers.items():
            is_number = buffer is not None and buffer.is_floating_point() and buffer.numel() == experts
            if is_number and "bias" in name:
                return owner, name
    return None
