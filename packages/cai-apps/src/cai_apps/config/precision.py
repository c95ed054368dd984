"""How a run keeps its master weights: whole, or as the parameters and the 16 bits that those lack. Needs no torch."""

from __future__ import annotations

from cai_apps.config.sections import RunConfig
from cai_mesh.errors import ConfigError


def check_master(config: RunConfig) -> None:
    """Raises ConfigError for master weights in halves where parameters are not the upper ones, or do not stay."""
    causes = _against_halves(config)
    if config.precision.master == "split" and causes:
        raise ConfigError(
            'precision.master = "split" keeps the upper half of master weights in the parameters',
            got=causes[0],
            expected='precision.compute "bf16", parallel.zero 0 to 2, wire_weights "full", residency "device"',
            fix="change that, or leave precision.master out",
        )


def splits_master(config: RunConfig) -> bool:
    """Whether a run keeps its master weights in halves, its ZeRO stage being settled.

    With "auto" where that costs nothing: AdamW's kernel steps halves as they are, and no moving average has to wait for
    numbers. Which it is stands in no checkpoint: a run may go on either way.
    """
    if config.precision.master != "auto":
        return config.precision.master == "split"
    return not _against_halves(config) and steps_halves(config) and config.optimizer.ema_decay is None


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
