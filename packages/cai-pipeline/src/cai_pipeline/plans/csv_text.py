"""Programs as the CSV files of torch.distributed.pipelining: a line for each rank, a cell for each action.

torch writes an idle moment as an empty cell, REDUCE as REDUCE_GRAD, and a forward and a backward that it begins
together as one cell; all else has the same name in both.
"""

from __future__ import annotations

import csv
import io
import re

from cai_pipeline.plans.actions import Action, Kind, Program

_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")
REDUCE_THERE = "REDUCE_GRAD"


def to_csv(program: Program) -> str:
    """The text that torch's schedules load, compute alone or with communication as `program` has it."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        [_cell(action) for action in actions] for actions in program
    )
    return out.getvalue()


def from_csv(text: str) -> Program:
    """The program of a text that torch has written.

    Actions that torch begins together follow each other, in the order of their cell.

    Raises PlanError for a cell that is no action.
    """
    return [
        [_action(part) for cell in cells for part in _parts(cell.strip())]
        for cells in csv.reader(io.StringIO(text))
    ]


def _parts(cell: str) -> list[str]:
    match = _TOGETHER.fullmatch(cell)
    if match is not None:
        return match[1].split(";")
    return [cell] if cell else []


def _cell(action: Action) -> str:
    return f"{action.stage}{REDUCE_THERE}" if action.kind is Kind.REDUCE else str(action)


def _action(cell: str) -> Action:
    return Action.parse(cell.replace(REDUCE_THERE, Kind.REDUCE.value))
