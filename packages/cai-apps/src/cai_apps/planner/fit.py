"""Whether a plan fits a device, what is chosen where the config leaves it to that, and what to change otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from cai_apps.compose.workload import Workload
from cai_apps.config.file import change
from cai_apps.config.optimizer import RULES
from cai_apps.config.sections import RunConfig
from cai_apps.config.validation import STAGES
from cai_apps.planner.activations import Saved, saved_bytes
from cai_apps.planner.plan import Models, Plan, device_of, plan_run
from cai_mesh.errors import CaiError, ConfigError, PlanError

OVERHEAD = 2 * 2**30
"""Bytes of a GPU that no tensor can have: the CUDA context, NCCL's buffers, symmetric memory."""
SLACK = 1.05
"""What the allocator takes for a byte of tensors, with pieces too small to be used again, and what plans are off by."""
RECOMPUTE = ("none", "selective", "most", "full")
UNSHARD = ("step", "pass")
"""Both are ordered from the fastest to the smallest."""


def needed(peak: int) -> int:
    """Return the bytes that a device must have for a plan's peak."""
    return int(peak * SLACK) + OVERHEAD


@dataclass(frozen=True)
class Choice:
    """What `memory.recompute`, `parallel.zero` and `parallel.pipeline.unshard` became where they were "auto".

    Args:
        config: the config with all three chosen.
        reason: the reason for the choice, in a few words.
    """

    config: Any
    reason: str


def is_open(config: Any) -> bool:
    """Return whether a resolved config leaves something to the plan."""
    return "auto" in (config.memory.recompute, config.parallel.zero, config.parallel.pipeline.unshard)


def chosen(before: Any, after: Any) -> str:
    """Return what was chosen, in a few words."""
    parallel, names = after.parallel, []
    if before.memory.recompute == "auto":
        names.append(f"recompute {after.memory.recompute}")
    if before.parallel.zero == "auto":
        names.append(f"ZeRO-{parallel.zero}")
    if before.parallel.pipeline.unshard == "auto" and parallel.pipeline.size > 1 and parallel.zero == 3:
        names.append(f"unshard {parallel.pipeline.unshard}")
    return ", ".join(names)


@dataclass
class Planner:
    """Plans configs of one application. What a forward keeps is worked out once for all configs that share it.

    Args:
        resolve: (config, ranks) -> the config with everything worked out.
        workload: (resolved config) -> the workload that it trains.
    """

    resolve: Callable[[Any, int], Any]
    workload: Callable[[Any], Workload]
    _saved_by_config: dict[str, Saved] = field(default_factory=dict)
    _transformed: dict[str, tuple[Workload, Models]] = field(default_factory=dict)

    def plan(self, config: Any, *, ranks: int, memory: int | None = None) -> Plan:
        """Return the plan of a config as it was given; what is "auto" is chosen for devices of so many bytes.

        Raises what `train` would raise before its ranks start.
        """
        config = self.resolve(config, ranks)
        if is_open(config):
            config = self.choose(config, ranks=ranks, memory=memory).config
        return self._plan(config, ranks)

    def peaks(self, config: Any, *, ranks: int) -> dict[str, int]:
        """Return the peaks of a resolved config by form of recompute, from the fastest form to the smallest."""
        unshard = config.parallel.pipeline.unshard
        return {form: self._plan(settled(config, form, unshard), ranks).peak for form in _forms(config)}

    def choose(self, config: Any, *, ranks: int, memory: int | None) -> Choice:
        """Settle what a resolved config leaves to the plan: the fastest choice that fits, else the smallest.

        Args:
            memory: bytes of a rank's device; None: there is no limit.

        Training state that is not all on the device, and inputs of blocks that wait on the host, take full recompute.
        """
        choices = self._choices(config, ranks)
        if len(choices) == 1:
            return Choice(choices[0], "the config keeps on the device what it must")
        if memory is None:
            return Choice(choices[0], "the device's memory is not known")
        planned: list[tuple[int, Any]] = []
        for choice in choices:
            try:
                planned.append((self._plan(choice, ranks).peak, choice))
            except PlanError as error:
                return Choice(choices[-1], str(error).splitlines()[0])
            if needed(planned[-1][0]) <= memory:
                peak, verdict = planned[-1][0], "fits"
                break
        else:
            peak, choice = min(planned, key=lambda candidate: candidate[0])
            verdict = "may not fit, and nothing takes less:"
        return Choice(
            choice, f"its planned peak of {peak / 2**30:.1f} GiB {verdict} {memory / 2**30:.1f} GiB"
        )

    def _choices(self, config: Any, ranks: int) -> list[Any]:
        """Return the config settled in each way, the fastest first: recompute costs most time, then sharding."""
        forms, memory = (config.memory.recompute,), config.memory
        if memory.recompute == "auto":
            offloads = memory.residency != "device" or memory.activations == "host"
            forms = RECOMPUTE[-1:] if offloads else _forms(config)
        sharded = []
        for stage in self._stages(config, ranks):
            unshard = stage.parallel.pipeline.unshard
            sharded += [
                (stage, unshard_form) for unshard_form in (UNSHARD if unshard == "auto" else (unshard,))
            ]
        return [settled(stage, form, unshard) for form in forms for stage, unshard in sharded]

    def _stages(self, config: Any, ranks: int) -> list[Any]:
        """Return the config in each ZeRO stage in which it can run."""
        if config.parallel.zero != "auto":
            return [config]
        staged_configs = []
        for zero in STAGES:
            with suppress(ConfigError):
                staged_configs.append(
                    self.resolve(replace(config, parallel=replace(config.parallel, zero=zero)), ranks)
                )
        return staged_configs

    def _plan(self, config: Any, ranks: int) -> Plan:
        key = repr(settled(config, RECOMPUTE[0], UNSHARD[-1]))
        if key not in self._transformed:
            self._transformed = {key: (self.workload(config), Models())}  # models of one config at a time
        workload, models = self._transformed[key]
        key = repr(_what_forwards_depend_on(config))
        if key not in self._saved_by_config:
            self._saved_by_config[key] = saved_bytes(config, workload, device_of(config))
        return plan_run(config, workload, ranks=ranks, saved=self._saved_by_config[key], models=models)


def _forms(config: Any) -> tuple[str, ...]:
    """Return the forms of recompute that a config may have."""
    return tuple(form for form in RECOMPUTE if form != "selective" or config.parallel.tensor.mode == "1d")


def settled(config: Any, recompute: str, unshard: str) -> Any:
    """Return the config with this form of recompute and this `parallel.pipeline.unshard`."""
    pipeline = replace(config.parallel.pipeline, unshard=unshard)
    parallel = replace(config.parallel, pipeline=pipeline)
    return replace(config, parallel=parallel, memory=replace(config.memory, recompute=recompute))


def _what_forwards_depend_on(config: Any) -> Any:
    """Return the config without what changes nothing in the forward of a microbatch."""
    usual, parallel = RunConfig(), config.parallel
    return replace(
        config,
        parallel=replace(usual.parallel, tensor=parallel.tensor, experts=parallel.experts),
        memory=usual.memory,
        optimizer=usual.optimizer,
        lr_schedule=usual.lr_schedule,
        train=replace(config.train, global_batch=1, steps=1),
    )


@dataclass(frozen=True)
class Verdict:
    """A plan, whether it fits, and what to change where it does not.

    Args:
        plan: the plan of the config.
        memory: bytes of a rank's device; None: not known.
        peaks: peak bytes by form of recompute; empty where training state may leave the device.
        advice: changes with which the config would fit, each with its peak in bytes.
    """

    plan: Plan
    memory: int | None
    peaks: dict[str, int]
    advice: tuple[tuple[str, int], ...]

    @property
    def fits(self) -> bool | None:
        """Whether the plan fits; None: the device's memory is not known, or training state may leave it."""
        if self.memory is None or not self.peaks:
            return None
        return needed(self.plan.peak) <= self.memory


def judge(planner: Planner, config: Any, *, ranks: int, memory: int | None) -> Verdict:
    """Return the verdict on a config as it was given. Raises what `train` would raise before its ranks start."""
    plan = planner.plan(config, ranks=ranks, memory=memory)
    if plan.config.memory.residency != "device":
        return Verdict(plan, memory, {}, ())
    verdict = Verdict(plan, memory, planner.peaks(plan.config, ranks=ranks), ())
    if memory is None or verdict.fits:
        return verdict
    return replace(verdict, advice=tuple(advice(planner, config, ranks=ranks, memory=memory)))


def advice(planner: Planner, config: Any, *, ranks: int, memory: int) -> list[tuple[str, int]]:
    """Return changes with which a config that does not fit would: what to set, and the peak then.

    Args:
        config: as it was given, not resolved.

    Changes alone come first; where none is enough, all of them together, then with more ranks.
    """
    alone = list(_changes(config))
    suggestions = [tried for changes in alone for tried in _tried(planner, config, changes, ranks, memory)]
    together = {key: value for changes in alone for key, value in changes.items()}
    shared = together | {"parallel.shard": -1, "parallel.zero": 3}
    for changes, count in ((together, ranks), *((shared, ranks * more) for more in (2, 4, 8))):
        if not suggestions:
            suggestions = _tried(planner, config, changes, count, memory)
    return suggestions


def _changes(config: Any) -> Iterator[dict[str, Any]]:
    memory, train, parallel = config.memory, config.train, config.parallel
    if memory.recompute in RECOMPUTE[:-1]:
        yield {"memory.recompute": "full"}
    if train.microbatch_size > 1:
        yield {"train.microbatch_size": 1}
    if parallel.pipeline.unshard == "step":
        yield {"parallel.pipeline.unshard": "pass"}
    if config.precision.compute == "fp32":
        yield {"precision.compute": "bf16"}
    if parallel.zero_ranks != 1 and parallel.zero in (0, 1, 2):
        yield {"parallel.zero": 3}
    if parallel.zero != 3 and config.precision.compute == "bf16" and config.precision.master == "whole":
        yield {"precision.master": "auto"}
    if parallel.zero == 3 and parallel.zero_ranks == 1 and parallel.pipeline.size > 1:
        # nobody to share shards with, and unsharded for a whole step
        yield {"parallel.zero": "auto", "parallel.pipeline.unshard": "auto"}
    if "state" in RULES[config.optimizer.kind].options and config.optimizer.state == "fp32":
        yield {"optimizer.state": "int8"}
    if getattr(getattr(config, "lora", None), "base", None) == "compute" and config.lora.rank:
        yield {"lora.base": "nf4"}


def _tried(
    planner: Planner, config: Any, changes: dict[str, Any], ranks: int, memory: int
) -> list[tuple[str, int]]:
    """Return the changes and their peak, if they can be made and are enough."""
    try:
        peak = planner.plan(change(config, changes), ranks=ranks, memory=memory).peak
    except CaiError:
        return []
    values = ", ".join(f"{key} = {value}" for key, value in changes.items())
    return [(f"{values} on {ranks} rank{'s' * (ranks > 1)}", peak)] if needed(peak) <= memory else []
