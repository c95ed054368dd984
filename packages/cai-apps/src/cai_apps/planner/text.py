"""A plan as text."""

from __future__ import annotations

from cai_apps.planner.plan import Plan, StagePlan


def render(plan: Plan, title: str, batch: str) -> str:
    """The plan as text: the mesh, a row per pipeline stage, and what the columns mean.

    Args:
        title: what is trained, the first line.
        batch: what a step takes.
    """
    config = plan.config
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.axes.items())
    parts = f"{config.parallel.pipeline.microbatches} microbatches of {config.train.microbatch_size}"
    return "\n".join(
        [
            f"{title}, {plan.parameters:,} parameters",
            f"mesh      {mesh}  ({plan.ranks} ranks)",
            f"training  ZeRO-{config.parallel.zero}, {config.precision.compute},"
            f" recompute {config.memory.recompute}, {config.parallel.pipeline.schedule}",
            f"batch     {batch} a step; {parts} on each data rank",
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
