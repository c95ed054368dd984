"""What a run will need, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from cai_apps.config.precision import splits_master
from cai_apps.config.sections import Pipeline, RunConfig
from cai_apps.planner.drawing import bars, holdings
from cai_apps.planner.fit import Planner, Verdict, judge, needed
from cai_apps.planner.plan import Plan, StagePlan
from cai_apps.planner.shown import Shown
from cai_kernels import plans_kernels
from cai_pipeline import begin_with, draw, place, placement_of, simulate


def show_plan(
    planner: Planner, config: Any, *, ranks: int, memory: int | None, title: str, batch: str
) -> Shown:
    """Return what a run will need, whether it fits, and what to change if it does not.

    Args:
        config: as it was given.
        memory: bytes of a rank's device; None: not known.
        title: the name of what is trained, for the first line.
        batch: the size of a step's batch, as text.

    Raises what `train` would raise before its ranks start.
    """
    verdict = judge(planner, config, ranks=ranks, memory=memory)
    differences = notes(verdict.plan, gpus=torch.cuda.device_count(), kernels=plans_kernels())
    facts = {"title": title, "batch": batch, "notes": differences} | _facts(verdict)
    lines = [*_lines(verdict, title, batch), *(f"note      {note}" for note in differences)]
    return Shown("\n".join(lines), facts, _chart(verdict.plan.config.parallel.pipeline))


DEVICES = {"cuda": "GPU", "cpu": "CPU"}
"""Words for what a run is planned for."""


def notes(plan: Plan, *, gpus: int, kernels: bool) -> list[str]:
    """Return how what a plan is for differs from what it was made on.

    Args:
        plan: the plan.
        gpus: the GPUs of this machine.
        kernels: whether Triton kernels are counted.
    """
    if plan.device == "cpu":
        return []
    if not gpus:
        line = "no GPU here: Triton kernels are counted, as GPUs from compute capability 8.0 on run them"
        if plan.config.train.device == "auto":
            line += "; `cai train` would take the CPU on this machine, which --train.device cpu plans for"
        return [line]
    if not kernels:
        return [
            "plain torch is counted in place of Triton kernels, as a run here takes it, for AlphaFold up to three"
            " times what kernels keep: `cai doctor` says why (pip install 'cai-kernels[triton]' if Triton is missing)"
        ]
    return []


def _chart(pipeline: Pipeline) -> str:
    if pipeline.size == 1:
        return ""
    placement = place(pipeline.size, pipeline.chunks, placement_of(pipeline.schedule, pipeline.chunks))
    begun = begin_with(pipeline.schedule, placement, pipeline.microbatches or 1)
    return f"a step, if a backward takes twice as long as a forward: {draw.text(simulate(begun))}"


def _lines(verdict: Verdict, title: str, batch: str) -> list[str]:
    plan = verdict.plan
    lines = [render(plan, title, batch)]
    if not verdict.peaks:
        return lines
    peaks = ", ".join(f"{size(peak)} with {form}" for form, peak in verdict.peaks.items())
    lines += ["", f"recompute peak {peaks}", _fits(plan, verdict.memory)]
    lines += [f"          it fits with {change}: peak {size(peak)}" for change, peak in verdict.advice]
    if verdict.fits is False and not verdict.advice:
        lines.append(
            "          nothing that was tried makes it fit: take a smaller model, or memory.residency"
        )
    return lines


def _facts(verdict: Verdict) -> dict[str, Any]:
    plan = verdict.plan
    stages = [asdict(stage) | {"peak": stage.peak} for stage in plan.stages]
    return {
        "device": plan.device,
        "ranks": plan.ranks,
        "mesh": plan.axes,
        "parameters": plan.parameters,
        "frozen": plan.frozen,
        "stages": stages,
        "peak": plan.peak,
        "needed": needed(plan.peak),
        "memory": verdict.memory,
        "fits": verdict.fits,
        "recompute_peaks": verdict.peaks,
        "advice": [{"change": change, "peak": peak} for change, peak in verdict.advice],
        "offload": None if plan.offload is None else asdict(plan.offload),
        "config": asdict(plan.config),
    }


def render(plan: Plan, title: str, batch: str) -> str:
    """Return the plan as text: the mesh, a row per pipeline rank, and what the columns mean."""
    config = plan.config
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.axes.items())
    parts = f"{config.parallel.pipeline.microbatches} microbatches of {config.train.microbatch_size}"
    return "\n".join(
        [
            f"{title}, {plan.parameters:,} parameters{_learn(plan)}",
            f"mesh      {mesh}  ({plan.ranks} ranks)",
            f"training  ZeRO-{config.parallel.zero}, {config.precision.compute}{_halves(config)},"
            f" recompute {config.memory.recompute}, {_schedule(config.parallel.pipeline)}, on a {DEVICES[plan.device]}",
            f"batch     {batch} a step; {parts} on each data rank",
            "",
            *holdings(plan),
            "",
            *bars(plan),
            "",
            "bytes on each rank, by its place in the pipeline:",
            *_table(plan.stages),
            "",
            "elements: of the rank's tensor shard, before ZeRO. optimizer: with master weights. unsharded: what ZeRO",
            "holds whole for a while, parameters and gradients. activations: kept for backward at the fullest moment,",
            "and what backward or the loss takes beside. peak: of all tensors; in a step of one microbatch gradients",
            "come as activations go.",
            *_offload(plan),
        ]
    )


def _halves(config: RunConfig) -> str:
    return ", master weights in halves" if splits_master(config) else ""


def _schedule(pipeline: Pipeline) -> str:
    chunks = f" with {pipeline.chunks} chunks" if pipeline.chunks > 1 else ""
    gathered = ", weights gathered once a step" if pipeline.unshard == "step" else ""
    return f"{pipeline.schedule}{chunks}{gathered}"


def _learn(plan: Plan) -> str:
    return f", of which {plan.parameters - plan.frozen:,} learn" if plan.frozen else ""


def _fits(plan: Plan, memory: int | None) -> str:
    least = needed(plan.peak)
    what = f"device    peak {size(plan.peak)}, {size(least)} with what the allocator and communication take"
    if memory is None:
        return f"{what}; --gpu-memory 80GiB says whether that fits"
    return f"{what}: {'fits' if least <= memory else 'does NOT fit'} {size(memory)}"


def _offload(plan: Plan) -> list[str]:
    """Return what one rank needs where its training state may be on the host, or would need if it were."""
    needs, memory = plan.offload, plan.config.memory
    if needs is None:
        return []
    works = f"works from about {size(needs.smallest)} of device memory, all stays there from {size(needs.everything)}"
    if memory.residency == "device":
        return ["", f"with memory.residency auto: {works}, and takes at most {size(needs.host)} on the host"]
    device_limit = "all of the device" if needs.device is None else size(needs.device)
    lines = [f"device    {device_limit} may be used; {works}"]
    if needs.device is not None and needs.device < needs.smallest:
        lines.append("          memory.device_memory is likely too small: take smaller batches, or recompute")
    lines.append(f"host      at most {size(needs.host)}")
    if needs.disk:
        lines.append(f"disk      {size(needs.disk)} in {memory.nvme}")
    return ["", f"memory.residency {memory.residency}:", *lines]


HEADER = (
    *(
        "place",
        "blocks",
        "elements",
        "parameters",
        "gradients",
        "optimizer",
        "unsharded",
        "activations",
        "peak",
    ),
)


def _table(stages: tuple[StagePlan, ...]) -> list[str]:
    rows = [list(HEADER)]
    for stage in stages:
        state = stage.state
        stage_bytes = [
            state.parameters,
            state.gradients,
            state.optimizer,
            stage.unsharded,
            stage.activations,
            stage.peak,
        ]
        rows.append(
            [str(stage.rank), str(len(stage.blocks)), f"{stage.parameters:,}", *map(size, stage_bytes)]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def size(count: int) -> str:
    """Bytes for people: "1.50 GiB"."""
    unit = "GiB" if count >= 2**30 else "MiB"
    return f"{count / (2**30 if unit == 'GiB' else 2**20):.2f} {unit}"
