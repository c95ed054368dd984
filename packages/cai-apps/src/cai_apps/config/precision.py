"""How a run keeps its master weights: whole, or as the parameters and the 16 bits that those lack. Needs no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from cai_apps.config.sections import RunConfig
from cai_mesh.errors import ConfigError

R = TypeVar("R", bound=RunConfig)


def with_master(config: R) -> R:
    """The config with `precision.master` filled in, its ZeRO stage being known.

    "auto" becomes "split" where that costs nothing: AdamW's kernel steps halves as they are, and no moving average has
    to wait for numbers.

    Raises:
        ConfigError: halves are asked for where parameters are not the upper ones, or do not stay.
    """
    master, causes = config.precision.master, _against_halves(config)
    if master == "auto":
        free = not causes and steps_halves(config) and config.optimizer.ema_decay is None
        return replace(config, precision=replace(config.precision, master="split" if free else "whole"))
    if master == "split" and causes:
        raise ConfigError(
            'precision.master = "split" keeps the upper half of master weights in the parameters',
            got=causes[0],
            expected='precision.compute "bf16", parallel.zero 0 to 2, wire_weights "full", residency "device"',
            fix="change that, or leave precision.master out",
        )
    return config


def _against_halves(config: RunConfig) -> list[str]:
    compute, parallel, residency = config.precision.compute, config.parallel, config.memory.residency
    causes = {
        f'precision.compute = "{compute}"': compute != "bf16",
        f"parallel.zero = {parallel.zero}": parallel.zero == 3,
        f'parallel.wire_weights = "{parallel.wire_weights}"': parallel.wire_weights != "full",
        f'memory.residency = "{residency}"': residency != "device",
    }
    return [cause for cause, wrong in causes.items() if wrong]


def steps_halves(config: RunConfig) -> bool:
    """Whether the optimizer steps master weights in halves as they are: the kernel of AdamW does, on a GPU."""
    options = config.optimizer
    return (options.kind, options.state) == ("adamw", "fp32") and config.train.device != "cpu"
