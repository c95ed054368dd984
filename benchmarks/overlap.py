"""How much communication a traced step leaves beside compute: intervals of GPU kernels, from a torch profiler."""

from __future__ import annotations

from typing import Any

Interval = tuple[float, float]


def union(intervals: list[Interval]) -> list[Interval]:
    """The same time as disjoint intervals, in order."""
    merged: list[Interval] = []
    for low, high in sorted(intervals):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


def length(intervals: list[Interval]) -> float:
    return sum(high - low for low, high in intervals)


def without(intervals: list[Interval], covered: list[Interval]) -> list[Interval]:
    """The parts of disjoint `intervals` that no interval of disjoint `covered` covers."""
    left, at = [], 0
    for low, high in intervals:
        while at < len(covered) and covered[at][1] <= low:
            at += 1
        i = at
        while low < high and i < len(covered) and covered[i][0] < high:
            if covered[i][0] > low:
                left.append((low, covered[i][0]))
            low = max(low, covered[i][1])
            i += 1
        if low < high:
            left.append((low, high))
    return left


def summary(profile: Any, steps: int) -> dict[str, Any]:
    """Seconds a step: from the first kernel to the last, of compute, of communication, of communication alone, idle.

    Args:
        profile: a finished `torch.profiler.profile` with CUDA activity over `steps` steps.
    """
    compute, communication, kinds = [], [], {}
    for event in profile.events():
        if event.device_type.name != "CUDA" or event.name.startswith(("ProfilerStep", "nccl:")):
            continue
        interval = (event.time_range.start, event.time_range.end)
        if "nccl" in event.name.lower():
            communication.append(interval)
            kind = event.name.split("(")[0][:60]
            kinds[kind] = kinds.get(kind, 0.0) + (interval[1] - interval[0]) / 1e6 / steps
        else:
            compute.append(interval)
    compute, communication = union(compute), union(communication)
    everything = union(compute + communication)
    whole = everything[-1][1] - everything[0][0]
    alone = length(without(communication, compute))
    return {
        "step_seconds": whole / 1e6 / steps,
        "compute_seconds": length(compute) / 1e6 / steps,
        "communication_seconds": length(communication) / 1e6 / steps,
        "exposed_seconds": alone / 1e6 / steps,
        "exposed_fraction": alone / whole,
        "idle_seconds": (whole - length(everything)) / 1e6 / steps,
        "communication_by_kernel": kinds,
    }
