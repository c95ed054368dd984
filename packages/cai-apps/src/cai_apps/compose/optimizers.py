"""The optimizer that a config asks for, over a model's parameters."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cai_apps.config.optimizer import RULES, Groups, Optimizer, OptimizerGroup
from cai_apps.config.sections import RunConfig
from cai_mesh.errors import ConfigError
from cai_mesh.layout import BoxedTensor, canonical_name
from cai_mesh.storage import blocks

REST = ""
"""Name of the group of parameters that no group of the config matches."""


def make_optimizer(
    config: RunConfig, model: nn.Module, mesh: DeviceMesh, *, offloaded: bool = False
) -> torch.optim.Optimizer:
    """The optimizer over what trains.

    Its groups are those of the config and one for the rest, on every rank alike, empty ones too; `lr_scale` of a group
    is its peak rate over `optimizer.lr`.

    Args:
        offloaded: whether `cai_gemini` will step its parameters chunk by chunk.
    """
    options = config.optimizer
    make = RULES[options.kind].make
    groups = parameter_groups(options, model)
    return make(groups, options, mesh=mesh, seed=config.train.seed, offloaded=offloaded)


def parameter_groups(options: Optimizer, model: nn.Module) -> Groups:
    """The param groups of an optimizer, with every parameter that trains in one of them."""
    named = [(canonical_name(name, p), p) for name, p in model.named_parameters() if p.requires_grad]
    inside = {
        p for block, block_params in blocks(model).items() if block is not model for _, p in block_params
    }
    divided = RULES[options.kind].rest is not None
    members: dict[tuple[str, bool], list[nn.Parameter]] = {
        (name, by_rule): []
        for name in (*options.groups, REST)
        for by_rule in ((True, False) if divided else (False,))
    }
    for name, param in named:
        group = group_of(options, name)
        group_options = options.groups.get(group, OptimizerGroup())
        by_rule = divided and param in inside and _is_matrix(param) and not group_options.adamw
        members[group, by_rule].append(param)
    return [_group(options, name, by_rule, params) for (name, by_rule), params in members.items()]


def group_of(options: Optimizer, name: str) -> str:
    """The name of the first group that a parameter's name matches, or `REST`."""
    for group, group_options in options.groups.items():
        if any(fnmatch.fnmatchcase(name, pattern.strip()) for pattern in group_options.match.split(",")):
            return group
    return REST


def check_groups(options: Optimizer, names: Iterable[str]) -> None:
    """Raises ConfigError for a group that no parameter of the whole model belongs to."""
    names = list(names)
    used = {group_of(options, name) for name in names}
    for group in options.groups:
        if group not in used:
            raise ConfigError(
                f"no parameter belongs to optimizer.groups.{group}",
                got=f"match = {options.groups[group].match!r}",
                expected=f"names such as {names[len(names) // 2]!r}",
                cause="no name fits, or the groups before it take all that do",
            )


def _is_matrix(param: nn.Parameter) -> bool:
    """Whether the whole parameter is a matrix; what a rank holds of it may be flat."""
    return len(BoxedTensor.from_param(param).global_shape) == 2


def _group(options: Optimizer, name: str, by_rule: bool, params: list[nn.Parameter]) -> dict[str, Any]:
    group_options = options.groups.get(name, OptimizerGroup())
    divided = RULES[options.kind].rest is not None
    usual = options.adamw_lr if divided and not by_rule and options.adamw_lr is not None else options.lr
    lr = usual if group_options.lr is None else group_options.lr
    decay = options.weight_decay if group_options.weight_decay is None else group_options.weight_decay
    group = {
        "params": params,
        "lr": lr,
        "weight_decay": decay,
        "lr_scale": lr / options.lr if options.lr else 1.0,
    }
    return group | ({"use_muon": by_rule} if divided else {})
