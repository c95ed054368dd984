from __future__ import annotations

import pytest

from cai_mesh.errors import PlanError
from cai_pipeline.plans.actions import to_text
from cai_pipeline.plans.placement import Held, place
from cai_pipeline.plans.schedules import SCHEDULES, program
from cai_pipeline.plans.schedules.interleaved import _rounds


def test_gpipe_turns_once() -> None:
    assert [to_text(actions) for actions in program("gpipe", place(2), 3)] == [
        "0F0 0F1 0F2 0B0 0B1 0B2",
        "1F0 1F1 1F2 1B0 1B1 1B2",
    ]


def test_1f1b_alternates_after_running_ahead() -> None:
    assert [to_text(actions) for actions in program("1f1b", place(3), 4)] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_one_stage_is_plain_accumulation() -> None:
    assert to_text(program("1f1b", place(1), 2)[0]) == "0F0 0B0 0F1 0B1"


def test_interleaved_takes_rounds_of_microbatches_through_all_chunks() -> None:
    assert [to_text(actions) for actions in program("interleaved", place(2, 2), 4)] == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_breadth_first_takes_a_stage_at_a_time() -> None:
    assert [to_text(actions) for actions in program("bfs", place(2, 2, "v"), 2)] == [
        "0F0 0F1 3F0 3F1 3B0 3B1 0B0 0B1",
        "1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1",
    ]


@pytest.mark.parametrize("microbatches", range(1, 14))
def test_rounds_are_even_and_not_smaller_than_the_ranks(microbatches: int) -> None:
    sizes = [len(of_round) for of_round in _rounds(microbatches, 4)]
    assert sum(sizes) == microbatches
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(4, microbatches)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("arguments", [((), 1, 0), (place(2), 0, 0), (place(2), 1, 2), (place(2), 1, -1)])
def test_arguments_out_of_range_are_refused(name: str, arguments: tuple[Held, int, int]) -> None:
    with pytest.raises(PlanError):
        SCHEDULES[name](*arguments)


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("1f1b", place(2, 2)),
        ("gpipe", place(2, 2, "v")),
        ("interleaved", place(2, 2, "v")),
        ("zb-h1", place(2, 2)),
        ("zb-v", place(2, 2)),
        ("v-half", place(2, 2)),
        ("v-min", place(4)),
    ],
)
def test_placements_that_a_schedule_does_not_take_are_refused(name: str, held: Held) -> None:
    with pytest.raises(PlanError, match=r"one chunk|in a loop|in a V"):
        program(name, held, 4)


def test_an_unknown_schedule_is_suggested() -> None:
    with pytest.raises(PlanError, match="did you mean '1f1b'"):
        program("1f1", place(2), 2)
