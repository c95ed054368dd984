from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from cai_mesh.errors import PlanError
from cai_pipeline import check, from_csv, lower, place, program, to_csv
from cai_pipeline.plans.actions import SHARDING, Action, Kind, from_text, holders, to_text

actions = st.builds(
    lambda kind, stage, m: Action(kind, stage, None if kind in SHARDING else m),
    st.sampled_from(Kind),
    st.integers(0, 999),
    st.integers(0, 999),
)


@settings(deadline=None)
@given(st.lists(actions))
def test_what_is_printed_is_parsed_back(listed: list[Action]) -> None:
    assert from_text(to_text(listed)) == listed


def test_the_written_form_is_short() -> None:
    assert to_text([Action(Kind.FORWARD, 1, 0), Action(Kind.SEND_F, 1, 0), Action(Kind.REDUCE, 12)]) == (
        "1F0 1SEND_F0 12REDUCE"
    )


@pytest.mark.parametrize("word", ["", "F0", "1F", "1REDUCE0", "1X0", "1F0x", "-1F0"])
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(PlanError):
        Action.parse(word)


@settings(deadline=None)
@given(actions.filter(lambda action: action.kind.name[:4] in ("SEND", "RECV")))
def test_the_partner_of_a_partner_is_the_action(action: Action) -> None:
    assert action.partner != action
    assert action.partner.partner == action


def test_compute_has_no_partner() -> None:
    with pytest.raises(PlanError, match="1F0"):
        _ = Action(Kind.FORWARD, 1, 0).partner


def test_a_stage_is_on_one_rank() -> None:
    assert holders([from_text("0F0 2F0"), from_text("1F0")]) == {0: 0, 2: 0, 1: 1}
    with pytest.raises(PlanError, match="0F1"):
        holders([from_text("0F0"), from_text("0F1")])


@pytest.mark.parametrize(
    ("name", "held"), [("zb-v", place(4, 2, "v")), ("1f1b", place(3)), ("bfs", place(2, 3))]
)
def test_torch_reads_every_cell_of_a_csv(name: str, held: tuple[int, ...]) -> None:
    whole = lower(program(name, held, 8))
    text = to_csv(whole)
    assert from_csv(text) == whole
    for line, actions in zip(text.splitlines(), whole, strict=True):
        read = [schedules._Action.from_str(cell) for cell in line.split(",")]
        assert [each and (each.stage_index, each.microbatch_index) for each in read] == [
            (action.stage, action.microbatch) for action in actions
        ]
        assert ",".join(map(str, read)) == line


def test_a_csv_of_torch_is_its_program() -> None:
    theirs = object.__new__(schedules.ScheduleInterleaved1F1B)
    theirs.pp_group_size, theirs.n_local_stages, theirs._n_microbatches = 2, 2, 8
    theirs.number_of_rounds, theirs.microbatches_per_round = 4, 2
    ranks = [theirs._calculate_single_rank_operations(rank) for rank in range(2)]
    text = "\n".join(
        ",".join("" if action is None else str(action) for action in of_rank) for of_rank in ranks
    )
    found = from_csv(text)
    assert [len(actions) for actions in found] == [32, 32]
    check(lower(found), 8)


def test_actions_that_torch_begins_together_follow_each_other() -> None:
    assert from_csv("0F0,(0F1;1B0)OVERLAP_F_B,,0B1") == [from_text("0F0 0F1 1B0 0B1")]


@pytest.mark.parametrize("text", ["0F0,what", "(0F1;1B0)OVERLAP", "(0F1;)OVERLAP_F_B", "0F"])
def test_what_a_csv_cannot_say_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        from_csv(text)
