from __future__ import annotations

import pytest

from cai_mesh.errors import PlanError
from cai_pipeline.actions import from_text, holders, to_text
from cai_pipeline.lower import add_transfers, batches, lower
from cai_pipeline.schedules import program


def test_a_lowered_program_in_full() -> None:
    assert [to_text(actions) for actions in lower(program("1f1b", 2, 2))] == [
        "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0RESHARD 0REDUCE",
        "1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RESHARD 1REDUCE",
    ]


def test_a_send_and_a_receive_of_one_neighbour_form_a_batch() -> None:
    lowered = lower(program("1f1b", 2, 2))
    held = holders(lowered)
    together = [[to_text(batch) for batch in batches(actions, held) if len(batch) > 1] for actions in lowered]
    assert together == [["0SEND_F1 0RECV_B0"], ["1SEND_B0 1RECV_F1"]]


def test_transfers_of_different_neighbours_form_no_batch() -> None:
    actions = from_text("1SEND_F0 1RECV_F1")
    assert batches(actions, {0: 0, 1: 1, 2: 2}) == [(action,) for action in actions]


def test_a_batch_has_one_send_and_one_receive() -> None:
    actions = from_text("1SEND_B0 1RECV_F1 1SEND_B1")
    assert [to_text(batch) for batch in batches(actions, {0: 0, 1: 1})] == ["1SEND_B0 1RECV_F1", "1SEND_B1"]


def test_a_lowered_program_is_not_lowered_again() -> None:
    with pytest.raises(PlanError, match="0UNSHARD"):
        add_transfers(lower(program("gpipe", 2, 1)))
