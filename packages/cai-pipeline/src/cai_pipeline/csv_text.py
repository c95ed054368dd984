"""Programs as the CSV files of torch.distributed.pipelining: a line for each rank, a cell for each action.

torch writes an idle moment as an empty cell, and REDUCE as REDUCE_GRAD; all else has the same name in both.
"""

from __future__ import annotations

import csv
import io

from cai_mesh.errors import PlanError
from cai_pipeline.actions import Action, Kind, Program

OVERLAPPED = "OVERLAP"
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

    Raises PlanError for a cell that is no action, and for a forward and a backward that torch runs as one.
    """
    program: Program = []
    for cells in csv.reader(io.StringIO(text)):
        for cell in cells:
            if OVERLAPPED in cell:
                raise PlanError(
                    "torch runs two actions of this schedule as one", got=cell, expected="one action a cell"
                )
        program.append([_action(cell.strip()) for cell in cells if cell.strip()])
    return program


def _cell(action: Action) -> str:
    return f"{action.stage}{REDUCE_THERE}" if action.kind is Kind.REDUCE else str(action)


def _action(cell: str) -> Action:
    return Action.parse(cell.replace(REDUCE_THERE, Kind.REDUCE.value))
