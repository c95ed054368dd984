"""cai plan RECIPE|FILE.toml [--ranks N] [--section.key value]"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cai_apps.cli import config_arguments
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from cai_apps.planner.plan import Plan, StagePlan

DESCRIPTION = (
    "Print what a run will need per rank, without weights. --ranks N: ranks the run is meant for "
    "(default: as many as the degrees make)."
)


def run(arguments: list[str]) -> int:
    ranks, arguments = _take_ranks(arguments)
    config, label = config_arguments.parse(arguments, command="plan", description=DESCRIPTION)
    from cai_apps.planner.plan import plan

    print(render(plan(config, ranks=ranks), label))
    return 0


def _take_ranks(arguments: list[str]) -> tuple[int | None, list[str]]:
    joined = [part for argument in arguments for part in _split_flag(argument)]
    if "--ranks" not in joined:
        return None, arguments
    at = joined.index("--ranks")
    value = joined[at + 1] if at + 1 < len(joined) else ""
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(
            "--ranks is not a number of ranks", got=repr(value), expected="an integer of at least 1"
        )
    return int(value), joined[:at] + joined[at + 2 :]


def _split_flag(argument: str) -> list[str]:
    return argument.split("=", 1) if argument.startswith("--ranks=") else [argument]


def render(plan: Plan, label: str) -> str:
    """The plan as text: the mesh, a row per pipeline stage, and what the columns mean."""
    config = plan.config
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.axes.items())
    batch = f"{config.parallel.pipeline.microbatches} microbatches of {config.train.microbatch_size}"
    return "\n".join(
        [
            f"{label}: {config.model.name}, {plan.parameters:,} parameters",
            f"mesh      {mesh}  ({plan.ranks} ranks)",
            f"training  ZeRO-{config.parallel.zero}, {config.precision.compute},"
            f" recompute {config.memory.recompute}, {config.parallel.pipeline.schedule}",
            f"batch     {config.train.global_batch} sequences of {config.data.sequence_length} a step;"
            f" {batch} on each data rank",
            "",
            "bytes on each rank of a pipeline stage:",
            *_table(plan.stages),
            "",
            "elements: of the stage's tensor shard, before ZeRO. optimizer: with master weights. gathered: what ZeRO-3",
            "holds unsharded at once. activations: estimate of what is kept for backward at the fullest moment.",
            "Communication buffers and the allocator's slack come on top.",
            *_offload(plan),
        ]
    )


def _offload(plan: Plan) -> list[str]:
    """What one rank needs where its training state may be on the host, or would need if it were."""
    needs, memory = plan.offload, plan.config.memory
    if needs is None:
        return []
    works = f"works from about {size(needs.smallest)} of device memory, all stays there from {size(needs.everything)}"
    if memory.residency == "device":
        return ["", f"with memory.residency auto: {works}, and takes at most {size(needs.host)} on the host"]
    given = "all of the device" if needs.device is None else size(needs.device)
    lines = [f"device    {given} may be used; {works}"]
    if needs.device is not None and needs.device < needs.smallest:
        lines.append("          memory.device_memory is likely too small: take smaller batches, or recompute")
    lines.append(f"host      at most {size(needs.host)}")
    if needs.disk:
        lines.append(f"disk      {size(needs.disk)} in {memory.nvme}")
    return ["", f"memory.residency {memory.residency}:", *lines]


def _table(stages: tuple[StagePlan, ...]) -> list[str]:
    header = [
        "stage",
        "blocks",
        "elements",
        "parameters",
        "gradients",
        "optimizer",
        "gathered",
        "activations",
        "total",
    ]
    rows = [header]
    for stage in stages:
        state = stage.state
        held = [state.parameters, state.gradients, state.optimizer, stage.gathered, stage.activations]
        counts = [str(stage.stage), str(len(stage.blocks)), f"{stage.parameters:,}"]
        rows.append([*counts, *map(size, held), size(sum(held))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def size(count: int) -> str:
    """Bytes for people: "1.50 GiB"."""
    unit = "GiB" if count >= 2**30 else "MiB"
    return f"{count / (2**30 if unit == 'GiB' else 2**20):.2f} {unit}"
