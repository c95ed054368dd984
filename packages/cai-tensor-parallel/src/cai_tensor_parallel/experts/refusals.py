"""What is said of a model in which no layers of experts are found, and why those that look like it are none."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator

from torch import nn

from cai_mesh.errors import PlanError


def arguments_of(module: nn.Module) -> list[str]:
    """Return the names of the arguments of a module's forward that may be given by their place."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds][1:]


def nothing_found(model: nn.Module, globs: Iterable[str] | None) -> PlanError:
    """Return the error for a model without layers of experts, or none where the globs of a plan say."""
    reason = next(_reasons(model), None)
    if globs is None and reason is not None:
        return PlanError(
            f"{type(model).__name__} has experts that cannot be spread over ranks",
            got=reason,
            expected="parameters that are stacked by expert, an attribute that counts them, and a forward of (tokens, "
            "ids, weights), or of rows of all experts",
            fix="leave its experts together, and divide the model by ZeRO, tensor or pipeline ranks",
        )
    stacked = {name: list(_stacked(module)) for name, module in model.named_modules()}
    likely = next((name for name, keys in stacked.items() if len(keys) > 1), "model.layers.*.mlp.experts")
    names = ", ".join(f'"{key}"' for key in stacked.get(likely) or ("gate_up_proj", "down_proj"))
    likely = re.sub(r"\.\d+(?=\.|$)", ".*", likely)
    return PlanError(
        f"{type(model).__name__} has no layers of experts" + (" where the plan says" if globs else ""),
        got=", ".join(globs)
        if globs
        else "no module with 3-dimensional parameters, one row an expert, an attribute that counts them, and a forward "
        "of (tokens, ids, weights)",
        fix=f'if it has experts, say where: plan={{"{likely}": ExpertsRole(parameters=({names}), '
        'count="num_experts")}',
    )


def _reasons(model: nn.Module) -> Iterator[str]:
    """Yield why modules that look like layers of experts cannot be spread."""
    for name, module in model.named_modules():
        counts = {
            value for key, value in vars(module).items() if key.endswith("experts") and type(value) is int
        }
        children, stacked = list(module.children()), _stacked(module)
        is_list = (
            isinstance(module, nn.ModuleList | nn.ModuleDict)
            and len({type(child) for child in children}) == 1
        )
        if is_list and len(children) > 1 and (len(children) in counts or name.endswith("experts")):
            yield (
                f"{name} holds {len(children)} experts as modules of their own: each has names of its own in "
                "checkpoints, which all ranks must have"
            )
        elif len(set(stacked.values())) > 1 and counts & set(stacked.values()):
            rows = ", ".join(f"{key} has {count} rows" for key, count in stacked.items())
            yield f"{name} has experts without weights: {rows}"
        elif stacked and counts & set(stacked.values()) and len(arguments_of(module)) not in (1, 3):
            yield (
                f"{name} is called with ({', '.join(arguments_of(module))}): tokens are sorted by expert before it, "
                "and nothing there says which token a row is"
            )


def _stacked(module: nn.Module) -> dict[str, int]:
    """Return the rows of each 3-dimensional parameter of a module itself."""
    params = module._parameters.items()
    return {key: len(param) for key, param in params if param is not None and param.dim() == 3}
