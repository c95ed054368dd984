"""The section `optimizer`, and the update rules that it may name: one row each, with options, maker and state.

A row's maker imports what needs torch when it is called, for a config is checked before torch is loaded (decision 39).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cai_apps.config.ranges import FILLED, NATURAL, PART, POSITIVE, RATE, Range
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    import torch

Kind = Literal["adamw", "muon", "lamb", "lars", "adafactor", "came"]
"""Names of `RULES`."""


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters with options of their own: a table [optimizer.groups.NAME]. What is None is the optimizer's."""

    match: Annotated[str, FILLED] = "*"
    """Names of parameters, as shell patterns divided by commas: "*norm*, *.bias". The first group that fits wins."""
    lr: Annotated[float | None, RATE] = None
    """Peak learning rate."""
    weight_decay: Annotated[float | None, NATURAL] = None
    """Weight decay."""
    adamw: bool = False
    """muon: step these by AdamW, as embeddings, the output layer and what is no matrix always are."""


@dataclass(frozen=True)
class Optimizer:
    kind: Kind = "adamw"
    """Update rule. muon steps the matrices of blocks, and adamw what is left."""
    lr: Annotated[float, RATE] = 3e-4
    """Peak learning rate."""
    adamw_lr: Annotated[float | None, RATE] = None
    """muon: peak learning rate of what adamw steps; None: lr."""
    beta1: Annotated[float, PART] = 0.9
    """adamw, muon (what adamw steps), lamb, came."""
    beta2: Annotated[float, PART] = 0.95
    """As beta1."""
    eps: Annotated[float, POSITIVE] = 1e-8
    """adamw, muon (what adamw steps), lamb."""
    momentum: Annotated[float, PART] = 0.95
    """muon, lars."""
    weight_decay: Annotated[float, NATURAL] = 0.1
    """Decoupled weight decay: a step takes lr times this share of each weight away."""
    state: Literal["fp32", "bf16", "int8"] = "fp32"
    """adamw: how its moments are kept; fewer bits are rounded stochastically. With precision.compute = "fp64" fp32
    means fp64."""
    clip: Annotated[float, Range(above=0, infinite=True)] = 1.0
    """Largest global gradient norm; inf: no gradient is clipped."""
    clip_samples: Annotated[float | None, POSITIVE] = None
    """Largest gradient norm of each sample by itself, before they are summed; None: samples are not clipped. With
    train.microbatch_size = 1."""
    ema_decay: Annotated[float | None, PART] = None
    """Decay of a moving average of the weights, kept and saved beside them, usually 0.9999; None: there is none."""
    groups: dict[str, OptimizerGroup] = field(default_factory=dict)


Groups = list[dict[str, Any]]
"""The param groups of an optimizer."""


@dataclass(frozen=True)
class Rule:
    """An update rule.

    Args:
        make: (groups, options, mesh=, seed=, offloaded=) -> the optimizer. `offloaded`: `cai_gemini` will step its
            parameters chunk by chunk.
        options: keys of the section that it reads, beside rate and decay.
        slots: values that it keeps of an element, as wide as master weights unless `state` says otherwise. Rows and
            columns of factored moments count nothing.
        rest: the rule that steps what is no matrix of a block; None: this one steps all.
    """

    make: Callable[..., torch.optim.Optimizer]
    options: tuple[str, ...]
    slots: int
    rest: Kind | None = None


def _adam(options: Optimizer) -> dict[str, Any]:
    return {"lr": options.lr, "betas": (options.beta1, options.beta2), "eps": options.eps}


def _adamw(
    groups: Groups, options: Optimizer, *, seed: int, offloaded: bool, **_: Any
) -> torch.optim.Optimizer:
    """AdamW by its kernel, with narrow moments by chunks, and as torch's own class, which `cai_gemini` knows."""
    import torch

    from cai_kernels import FusedAdamW
    from cai_zero.optimizers import AdamW

    if options.state != "fp32":
        narrow = torch.bfloat16 if options.state == "bf16" else options.state
        return AdamW(groups, **_adam(options), state_dtype=narrow, seed=seed)
    if offloaded:
        return torch.optim.AdamW(groups, **_adam(options), fused=True)
    return FusedAdamW(groups, **_adam(options))


def _muon(groups: Groups, options: Optimizer, *, mesh: Any, **_: Any) -> torch.optim.Optimizer:
    from cai_zero.optimizers import Muon

    return Muon(groups, **_adam(options), momentum=options.momentum, mesh=mesh)


def _lamb(groups: Groups, options: Optimizer, *, mesh: Any, **_: Any) -> torch.optim.Optimizer:
    from cai_zero.optimizers import Lamb

    return Lamb(groups, **_adam(options), mesh=mesh)


def _lars(groups: Groups, options: Optimizer, *, mesh: Any, **_: Any) -> torch.optim.Optimizer:
    from cai_zero.optimizers import Lars

    return Lars(groups, lr=options.lr, momentum=options.momentum, mesh=mesh)


def _adafactor(groups: Groups, options: Optimizer, *, mesh: Any, **_: Any) -> torch.optim.Optimizer:
    from cai_zero.optimizers import Adafactor

    return Adafactor(groups, lr=options.lr, mesh=mesh)


def _came(groups: Groups, options: Optimizer, *, mesh: Any, **_: Any) -> torch.optim.Optimizer:
    from cai_zero.optimizers import Came

    return Came(groups, lr=options.lr, betas=(options.beta1, options.beta2, 0.9999), mesh=mesh)


RULES: dict[Kind, Rule] = {
    "adamw": Rule(_adamw, ("beta1", "beta2", "eps", "state"), slots=2),
    "muon": Rule(_muon, ("adamw_lr", "momentum", "beta1", "beta2", "eps"), slots=1, rest="adamw"),
    "lamb": Rule(_lamb, ("beta1", "beta2", "eps"), slots=2),
    "lars": Rule(_lars, ("momentum",), slots=1),
    "adafactor": Rule(_adafactor, (), slots=0),
    "came": Rule(_came, ("beta1", "beta2"), slots=1),
}


def check_optimizer(options: Optimizer) -> None:
    """Raises ConfigError for options that the kind of optimizer has no use for: none is silently left out."""
    usual, takes = Optimizer(), RULES[options.kind].options
    for name in sorted({name for rule in RULES.values() for name in rule.options}):
        if name not in takes and getattr(options, name) != getattr(usual, name):
            raise ConfigError(
                f'optimizer.{name} does nothing with optimizer.kind = "{options.kind}"',
                got=getattr(options, name),
                expected=f"options of {options.kind}: lr, weight_decay, {', '.join(takes)}".rstrip(", "),
            )
    for group, own in options.groups.items():
        if own.adamw and RULES[options.kind].rest is None:
            raise ConfigError(
                f'optimizer.groups.{group}.adamw does nothing with optimizer.kind = "{options.kind}"',
                expected='optimizer.kind = "muon"',
            )
