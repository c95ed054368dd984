from __future__ import annotations

import pytest

from cai_mesh.errors import PlanError
from cai_pipeline.plans.actions import from_text, to_text
from cai_pipeline.plans.lowering import add_transfers, batches, lower
from cai_pipeline.plans.placement import place
from cai_pipeline.plans.schedules import program


def test_a_lowered_program_in_full() -> None:
    assert [to_text(actions) for actions in lower(program("1f1b", place(2), 2))] == [
        "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0RESHARD 0REDUCE",
        "1UNSHARD 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1RESHARD 1REDUCE",
    ]


def together(program: list[str]) -> list[list[str]]:
    grouped = batches([from_text(line) for line in program])
    return [[to_text(batch) for batch in of_rank if len(batch) > 1] for of_rank in grouped]


def test_a_send_and_a_receive_that_are_neighbours_on_both_ranks_form_a_batch() -> None:
    first, second = "0SEND_F1 0RECV_B0", "1SEND_B0 1RECV_F1"
    assert together([f"0F1 {first} 0B0", f"1B0 {second} 1F1"]) == [[first], [second]]
    assert together([f"0F1 {first} 0B0", "1B0 1SEND_B0 1F7 1RECV_F1"]) == [[], []], "not on the second"


def test_transfers_of_different_neighbours_form_no_batch() -> None:
    assert together(["0RECV_B0", "1SEND_B0 1RECV_B1", "2SEND_B1"]) == [[], [], []]


def test_a_batch_has_one_send_and_one_receive() -> None:
    ranks = together(["0RECV_B0 0SEND_F1 0RECV_B1", "1SEND_B0 1RECV_F1 1SEND_B1"])
    assert ranks == [["0RECV_B0 0SEND_F1"], ["1SEND_B0 1RECV_F1"]]


def test_a_receive_is_posted_when_it_is_sent() -> None:
    """The last rank has its second microbatch while it computes with the first."""
    lowered = add_transfers(program("1f1b", place(2), 3))
    assert to_text(lowered[1]).startswith("1RECV_F0 1F0 1RECV_F1 1B0")


def test_a_lowered_program_is_not_lowered_again() -> None:
    with pytest.raises(PlanError, match="0UNSHARD"):
        add_transfers(lower(program("gpipe", place(2), 1)))
