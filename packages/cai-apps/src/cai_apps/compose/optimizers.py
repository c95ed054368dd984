"""The optimizer that a config asks for, over a model's parameters."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cai_apps.config.sections import Optimizer, OptimizerGroup, RunConfig
from cai_kernels import FusedAdamW
from cai_mesh.errors import ConfigError
from cai_mesh.layout import BoxedTensor, canonical_name
from cai_mesh.storage import blocks
from cai_zero.optimizers import Adafactor, AdamW, Came, Lamb, Lars, Muon

Groups = list[dict[str, Any]]
REST = ""
"""Name of the group of parameters that no group of the config matches."""


def make_optimizer(
    config: RunConfig, model: nn.Module, mesh: DeviceMesh, *, offloaded: bool = False
) -> torch.optim.Optimizer:
    """The optimizer over what trains.

    Its groups are those of the config and one for the rest, on every rank alike, empty ones too; `lr_scale` of a group
    is its peak rate over `optimizer.lr`.

    Args:
        offloaded: whether `cai_gemini` will step its parameters chunk by chunk, which knows AdamW as torch's own class.
    """
    options = config.optimizer
    groups = parameter_groups(options, model)
    if options.kind == "adamw" and options.state == "fp32":
        if offloaded:
            return torch.optim.AdamW(groups, **_adam(options), fused=True)  # type: ignore[arg-type]
        return FusedAdamW(groups, **_adam(options))
    return MAKERS[options.kind](groups, options, config.train.seed, mesh)


def parameter_groups(options: Optimizer, model: nn.Module) -> Groups:
    """The param groups of an optimizer, with every parameter that trains in one of them."""
    named = [(canonical_name(name, p), p) for name, p in model.named_parameters() if p.requires_grad]
    inside = {p for block, held in blocks(model).items() if block is not model for _, p in held}
    found: dict[tuple[str, bool], list[nn.Parameter]] = {
        (name, by_muon): []
        for name in (*options.groups, REST)
        for by_muon in ((True, False) if options.kind == "muon" else (False,))
    }
    for name, param in named:
        group = group_of(options, name)
        own = options.groups.get(group, OptimizerGroup())
        by_muon = options.kind == "muon" and param in inside and _is_matrix(param) and not own.adamw
        found[group, by_muon].append(param)
    return [_group(options, name, by_muon, params) for (name, by_muon), params in found.items()]


def group_of(options: Optimizer, name: str) -> str:
    """The name of the first group that a parameter's name matches, or `REST`."""
    for group, own in options.groups.items():
        if any(fnmatch.fnmatchcase(name, pattern.strip()) for pattern in own.match.split(",")):
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


def _group(options: Optimizer, name: str, by_muon: bool, params: list[nn.Parameter]) -> dict[str, Any]:
    own = options.groups.get(name, OptimizerGroup())
    usual = options.lr if by_muon or options.kind != "muon" or options.adamw_lr is None else options.adamw_lr
    lr = usual if own.lr is None else own.lr
    decay = options.weight_decay if own.weight_decay is None else own.weight_decay
    group = {
        "params": params,
        "lr": lr,
        "weight_decay": decay,
        "lr_scale": lr / options.lr if options.lr else 1.0,
    }
    return group | ({"use_muon": by_muon} if options.kind == "muon" else {})


def _adam(options: Optimizer) -> dict[str, Any]:
    return {"lr": options.lr, "betas": (options.beta1, options.beta2), "eps": options.eps}


STATES: dict[str, Any] = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": "int8"}


def _adamw(groups: Groups, options: Optimizer, seed: int, mesh: DeviceMesh) -> torch.optim.Optimizer:
    return AdamW(groups, **_adam(options), state_dtype=STATES[options.state], seed=seed)


def _muon(groups: Groups, options: Optimizer, seed: int, mesh: DeviceMesh) -> torch.optim.Optimizer:
    return Muon(groups, **_adam(options), momentum=options.momentum, mesh=mesh)


def _lamb(groups: Groups, options: Optimizer, seed: int, mesh: DeviceMesh) -> torch.optim.Optimizer:
    return Lamb(groups, **_adam(options), mesh=mesh)


def _lars(groups: Groups, options: Optimizer, seed: int, mesh: DeviceMesh) -> torch.optim.Optimizer:
    return Lars(groups, lr=options.lr, momentum=options.momentum, mesh=mesh)


def _adafactor(groups: Groups, options: Optimizer, seed: int, mesh: DeviceMesh) -> torch.optim.Optimizer:
    return Adafactor(groups, lr=options.lr, mesh=mesh)


def _came(groups: Groups, options: Optimizer, seed: int, mesh: DeviceMesh) -> torch.optim.Optimizer:
    return Came(groups, lr=options.lr, betas=(options.beta1, options.beta2, 0.9999), mesh=mesh)


MAKERS: dict[str, Callable[[Groups, Optimizer, int, DeviceMesh], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "muon": _muon,
    "lamb": _lamb,
    "lars": _lars,
    "adafactor": _adafactor,
    "came": _came,
}
