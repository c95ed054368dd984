from __future__ import annotations

import pytest

from cai_mesh.errors import PlanError
from cai_pipeline.actions import to_text
from cai_pipeline.schedules import SCHEDULES, program


def test_gpipe_turns_once() -> None:
    assert [to_text(actions) for actions in program("gpipe", 2, 3)] == [
        "0F0 0F1 0F2 0B0 0B1 0B2",
        "1F0 1F1 1F2 1B0 1B1 1B2",
    ]


def test_1f1b_alternates_after_running_ahead() -> None:
    assert [to_text(actions) for actions in program("1f1b", 3, 4)] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_one_stage_is_plain_accumulation() -> None:
    assert to_text(program("1f1b", 1, 2)[0]) == "0F0 0B0 0F1 0B1"


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("arguments", [(0, 1, 0, 1), (2, 0, 0, 1), (2, 1, 2, 1), (2, 1, -1, 1), (2, 1, 0, 2)])
def test_arguments_out_of_range_are_refused(name: str, arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(PlanError):
        SCHEDULES[name](*arguments)


def test_an_unknown_schedule_is_suggested() -> None:
    with pytest.raises(PlanError, match="did you mean '1f1b'"):
        program("1f1", 2, 2)
