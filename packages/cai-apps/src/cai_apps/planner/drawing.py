"""Which rank holds what, as lines of text: the layers of each pipeline place over its ranks, and bars of memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from cai_apps.planner.plan import Plan, StagePlan

COLUMNS, BAR = 4, 48
"""Data ranks that are drawn, and letters of the longest bar."""
MARKS = (
    ("weights", "W"),
    ("optimizer state", "O"),
    ("gradients", "G"),
    ("gathered", "U"),
    ("activations", "A"),
)
"""Kinds of bytes, with the letters of a bar."""


def holdings(plan: Plan) -> list[str]:
    """Return a table of ranks: a row for each pipeline place, a column for each data rank."""
    sizes, inside = plan.axes, plan.axes["cp"] * plan.axes["tp"]
    data = sizes["dp_replicate"] * sizes["dp_shard"]
    columns = [*range(data)] if data <= COLUMNS else [*range(COLUMNS - 1), data - 1]
    rows = [["", *(f"data {column}" for column in columns)]]
    for stage in plan.stages:
        first = stage.rank * data * inside
        rows.append([layers_of(stage), *(_ranks(first + column * inside, inside) for column in columns)])
    if data > COLUMNS:
        rows = [[*row[:-1], "...", row[-1]] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return ["which rank holds what:", *(f"  {line}" for line in lines), *_notes(plan)]


def _ranks(first: int, count: int) -> str:
    return f"rank {first}" if count == 1 else f"ranks {first}-{first + count - 1}"


def _notes(plan: Plan) -> Iterator[str]:
    """Yield what the ranks of a cell, and those of a row, have in common."""
    sizes, zero = plan.axes, plan.config.parallel.zero
    if sizes["tp"] > 1:
        yield f"  {sizes['tp']} tensor ranks in a cell: each has a part of every layer"
    if sizes["cp"] > 1:
        yield f"  {sizes['cp']} ranks of a context in a cell: each has a part of the tokens of every row"
    shards = sizes["dp_shard"] * sizes["cp"]
    if shards > 1:
        parts = (
            "nothing",
            "optimizer state",
            "optimizer state and gradients",
            "weights, gradients and optimizer state",
        )
        yield f"  ZeRO-{zero} divides {parts[int(zero)]} over {shards} ranks of a row"
    if sizes["dp_replicate"] > 1:
        yield f"  {sizes['dp_replicate']} such groups in a row hold the same"


def layers_of(stage: StagePlan) -> str:
    """Return the layers of a pipeline place in a few words: "layers 0-3, 28-31"."""
    numbered = [re.fullmatch(r"(?:.*\.)?(\w+)\.(\d+)", name) for name in stage.blocks]
    if not numbered or not all(numbered):
        return f"{len(stage.blocks)} blocks"
    by_list: dict[str, list[int]] = {}
    for match in numbered:
        assert match is not None
        by_list.setdefault(match[1], []).append(int(match[2]))
    return "; ".join(f"{name} {_runs(sorted(numbers))}" for name, numbers in by_list.items())


def _runs(numbers: Sequence[int]) -> str:
    """Return increasing numbers with those that follow each other as "0-3"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def bars(plan: Plan) -> list[str]:
    """Return a bar of memory for each pipeline place, and what its letters mean."""
    parts_by_rank = {stage.rank: kinds_of(stage) for stage in plan.stages}
    longest = max(sum(parts.values()) for parts in parts_by_rank.values()) or 1
    lines = [
        f"  place {rank}  {_bar(parts, longest).ljust(BAR)}  {_size(plan.stages[rank].peak)}"
        for rank, parts in parts_by_rank.items()
    ]
    used = [f"{mark} {kind}" for kind, mark in MARKS if any(parts[kind] for parts in parts_by_rank.values())]
    return ["memory of a rank at its fullest moment:", *lines, f"  {', '.join(used)}"]


def kinds_of(stage: StagePlan) -> dict[str, int]:
    """Return the bytes of a rank by the kinds of `MARKS`."""
    growing = 0 if stage.accumulates else stage.state.gradients  # these come while activations go
    numbers = (
        stage.state.parameters,
        stage.state.optimizer,
        stage.state.gradients,
        stage.unsharded,
        max(stage.activations - growing, 0),
    )
    return {kind: nbytes for (kind, _), nbytes in zip(MARKS, numbers, strict=True)}


def _bar(parts: dict[str, int], longest: int) -> str:
    """Return the letters of a bar, rounded so that they are together as many as the whole takes."""
    ends = [*accumulate(parts[kind] for kind, _ in MARKS)]
    columns = [round(end / longest * BAR) for end in ends]
    widths = [end - begin for begin, end in pairwise([0, *columns])]
    return "".join(mark * width for (_, mark), width in zip(MARKS, widths, strict=True))


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
