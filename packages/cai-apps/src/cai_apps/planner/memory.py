"""Bytes of parameters, gradients and optimizer state on a rank, from the number of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from cai_apps.compose.optimizers import parameter_groups
from cai_apps.config.optimizer import RULES
from cai_apps.config.precision import splits_master, steps_halves
from cai_apps.config.sections import RunConfig
from cai_pipeline import Action, Kind

COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
MASTER_BYTES = {"fp32": 4, "bf16": 4, "fp16": 4, "fp64": 8}
STATE_BYTES = {"bf16": 2.0, "int8": 1 + 4 / 256}
"""Bytes of a value of `optimizer.state` with fewer bits than master weights: an eight-bit code has a scale for 256."""


@dataclass(frozen=True)
class ModelState:
    """Bytes on one rank that last from step to step, and its gradients at the end of backward."""

    parameters: int
    gradients: int
    optimizer: int
    """Adam's moments, a moving average of the weights, and master weights where they are not the parameters."""
    joined: int = 0
    """Master weights that are in halves, as numbers, while an optimizer steps them that cannot step halves."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def accumulates(config: RunConfig) -> bool:
    """Whether a step has several microbatches, whose gradients add up."""
    return config.parallel.pipeline.microbatches != 1


def clips_samples(config: RunConfig) -> bool:
    """Whether gradients stay unsharded until the step's last sample is clipped."""
    return config.optimizer.clip_samples is not None and config.train.global_batch > 1


def moment_bytes(config: RunConfig, model: nn.Module) -> float:
    """Bytes an element that the optimizer of a stage keeps, on average, beside master weights.

    Args:
        model: the stage's tensor shard, on the meta device.
    """
    options, rule = config.optimizer, RULES[config.optimizer.kind]
    value = STATE_BYTES.get(options.state, MASTER_BYTES[config.precision.compute])
    if rule.rest is None:
        return rule.slots * value
    slots, sizes = {True: rule.slots, False: RULES[rule.rest].slots}, {True: 0, False: 0}
    for group in parameter_groups(options, model):
        sizes[group["use_muon"]] += sum(param.numel() for param in group["params"])
    return value * sum(slots[by_rule] * sizes[by_rule] for by_rule in sizes) / max(1, sum(sizes.values()))


def model_state(
    config: RunConfig,
    trained: int,
    moments: float,
    *,
    frozen: int = 0,
    sharded: tuple[int, int] | None = None,
) -> ModelState:
    """The state of a rank.

    Args:
        trained: elements of its stage's tensor shard that learn.
        moments: bytes an element that the optimizer keeps beside master weights.
        frozen: elements that do not. They have neither gradients nor state, and no master weights but in stage 3.
        sharded: elements that learn, and that do not, of the part that ZeRO leaves to a rank. None: all ranks of
            ZeRO divide all of them; experts are divided among fewer.

    ZeRO (Rajbhandari et al., arXiv:1910.02054): stage 1 divides the optimizer's state over `shard` ranks, stage 2
    gradients too, stage 3 parameters too. Stage 1 holds unsharded gradients only while microbatches accumulate; where
    samples are clipped, every stage does.
    """
    zero, ranks = config.parallel.zero, config.parallel.zero_ranks
    compute, master = COMPUTE_BYTES[config.precision.compute], MASTER_BYTES[config.precision.compute]
    local_trained, local_frozen = sharded or (-(-trained // ranks), -(-frozen // ranks))
    stepped = trained if zero == 0 else local_trained
    split = splits_master(config)
    masters = master - compute if split else master if master != compute else 0
    average = master if config.optimizer.ema_decay is not None else 0
    unsharded_gradients = zero == 0 or (zero == 1 and accumulates(config)) or clips_samples(config)
    return ModelState(
        parameters=(local_trained + local_frozen) * master if zero == 3 else (trained + frozen) * compute,
        gradients=(trained if unsharded_gradients else local_trained) * master,
        optimizer=int(stepped * (moments + average + (0 if zero == 3 else masters))),
        joined=stepped * master if split and not steps_halves(config) else 0,
    )


def beside_bytes(config: RunConfig, elements: int) -> int:
    """Return the bytes of a rank's part of a model that does not learn: in the compute dtype, sharded in stage 3.

    Args:
        config: the resolved config.
        elements: those of its part, before ZeRO.
    """
    ranks = config.parallel.zero_ranks if config.parallel.zero == 3 else 1
    return -(-elements // ranks) * COMPUTE_BYTES[config.precision.compute]


def most_kept(actions: Sequence[Action], stage_bytes: Mapping[int, int]) -> int:
    """Most bytes that microbatches keep which a rank's actions have run forward and not yet backward.

    Of a backward that is split, what weight gradients are made from counts as much as all that was kept.

    Args:
        stage_bytes: bytes of one microbatch, by stage.
    """
    most = now = 0
    for action in actions:
        ends = action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        now += ((action.kind is Kind.FORWARD) - ends) * stage_bytes[action.stage]
        most = max(most, now)
    return most
