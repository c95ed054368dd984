"""Check a lowered program: that it has the right actions in the right order, and that it cannot deadlock.

`check` returns what the program needs (live activations per stage), or raises PlanError that names the wrong action.
It checks each rank alone (counts, local order, sharding), then each pair of ranks (sends and receives in the same
order, since messages have no tags). Then it runs the transfers of all ranks under the strictest assumptions: a batch
of transfers blocks its rank until every partner is reached, and so does the exchange of shapes before a forward
transfer. A program that ends under these assumptions also ends when sends overlap compute.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from cai_mesh.errors import PlanError
from cai_pipeline.plans.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    SHARDING,
    TOWARDS_START,
    TRANSFERS,
    Action,
    Kind,
    Program,
    holders,
)
from cai_pipeline.plans.lowering import batches


@dataclass(frozen=True)
class Report:
    """The number of microbatches that a correct program holds at most.

    Args:
        peak_live: the largest number of microbatches at one time, for each stage, that have run forward and not yet
            backward to the stage's input. Their activations are all held.
        peak_stashed: the largest number that wait for their weight gradients after that. What these are made from is
            held.
    """

    peak_live: tuple[int, ...]
    peak_stashed: tuple[int, ...]


def check(program: Program, microbatches: int, *, backward: bool = True) -> Report:
    """Check a lowered program.

    Args:
        program: each rank's actions, after `lower`.
        microbatches: microbatches per step.
        backward: whether each microbatch also needs a backward (False for evaluation).

    Raises:
        PlanError: names the first action, in rank order, that is missing, repeated, too early or in a deadlock.
    """
    stage_ranks = holders(program)
    stages = len(stage_ranks)
    if sorted(stage_ranks) != list(range(stages)) or not stages:
        raise PlanError("stages are not counted from 0 without gaps", got=sorted(stage_ranks))
    _check_counts(program, stage_ranks, microbatches, backward)
    live, stashed = Counter[int](), Counter[int]()
    for rank, actions in enumerate(program):
        _check_rank(rank, actions, stage_ranks, backward)
        live |= _peaks(actions, Kind.FORWARD, TOWARDS_START if backward else {Kind.FORWARD})
        stashed |= _peaks(actions, Kind.BACKWARD_INPUT, {Kind.BACKWARD_WEIGHT})
    _check_message_order(program, stage_ranks)
    _check_deadlock(program)
    return Report(
        tuple(live[stage] for stage in range(stages)), tuple(stashed[stage] for stage in range(stages))
    )


def _peaks(actions: Sequence[Action], begins: Kind, ends: Collection[Kind]) -> Counter[int]:
    """The most microbatches at one time between one kind of action and others, by stage."""
    now, most = Counter[int](), Counter[int]()
    for action in actions:
        now[action.stage] += action.kind is begins
        most[action.stage] = max(most[action.stage], now[action.stage])
        now[action.stage] -= action.kind in ends
    return most


def _refuse(action: Action, rank: int, why: str, position: int | None = None) -> PlanError:
    where = f"rank {rank}" if position is None else f"rank {rank}, position {position}"
    return PlanError(f"action {action} ({where}) {why}")


def _check_counts(
    program: Program, stage_ranks: Mapping[int, int], microbatches: int, backward: bool
) -> None:
    stages = len(stage_ranks)
    halves = {(a.stage, a.microbatch) for actions in program for a in actions if a.kind in SPLIT}
    expected_counts: Counter[Action] = Counter()
    for stage in range(stages):
        expected_counts.update([Action(Kind.UNSHARD, stage), Action(Kind.RESHARD, stage)])
        expected_counts.update([Action(Kind.REDUCE, stage)] if backward else [])
        for m in range(microbatches):
            expected_counts[Action(Kind.FORWARD, stage, m)] += 1
            kinds = SPLIT if (stage, m) in halves else (Kind.BACKWARD,)
            expected_counts.update([Action(kind, stage, m) for kind in kinds] if backward else [])
            if stage + 1 < stages and stage_ranks[stage] != stage_ranks[stage + 1]:
                sends = [Action(Kind.SEND_F, stage, m)] + [Action(Kind.SEND_B, stage + 1, m)] * backward
                expected_counts.update(sends + [send.partner for send in sends])
    actual_counts = Counter(action for actions in program for action in actions)
    for rank, actions in enumerate(program):
        for position, action in enumerate(actions):
            if action not in expected_counts:
                raise _refuse(action, rank, "does not belong to this program", position)
    for action, count in expected_counts.items():
        if action.kind in SHARDING and action.kind is not Kind.REDUCE:
            continue
        if actual_counts[action] != count:
            why = "is missing" if not actual_counts[action] else f"occurs {actual_counts[action]} times"
            raise _refuse(action, stage_ranks[action.stage], why)


def _check_rank(rank: int, actions: Sequence[Action], stage_ranks: Mapping[int, int], backward: bool) -> None:
    """Check one rank's order."""
    done: set[Action] = set()
    unsharded: set[int] = set()
    remaining_computes = Counter(action.stage for action in actions if action.kind in COMPUTE)
    for position, action in enumerate(actions):
        for either in _prerequisites(action, stage_ranks):
            if not done.intersection(either):
                raise _refuse(action, rank, f"comes before {either[0]}", position)
        stage = action.stage
        if action.kind in COMPUTE:
            if stage not in unsharded:
                raise _refuse(action, rank, "uses a stage that is not unsharded", position)
            remaining_computes[stage] -= 1
        elif action.kind is Kind.UNSHARD:
            if stage in unsharded:
                raise _refuse(action, rank, "comes when the stage is already unsharded", position)
            unsharded.add(stage)
        elif action.kind is Kind.RESHARD:
            if stage not in unsharded:
                raise _refuse(action, rank, "comes when the stage is not unsharded", position)
            unsharded.remove(stage)
        elif action.kind is Kind.REDUCE and remaining_computes[stage]:
            raise _refuse(action, rank, "comes before the stage's last backward", position)
        done.add(action)
    for stage in sorted(unsharded):
        raise _refuse(Action(Kind.RESHARD, stage), rank, "is missing at the end")


def _prerequisites(action: Action, stage_ranks: Mapping[int, int]) -> list[tuple[Action, ...]]:
    """The actions that the same rank must do before `action`, one or the other of each tuple."""
    stage, m, last = action.stage, action.microbatch, len(stage_ranks) - 1

    def of(*kinds: Kind, at: int = stage) -> tuple[Action, ...]:
        return tuple(Action(kind, at, m) for kind in kinds)

    needs: list[tuple[Action, ...]] = []
    if action.kind is Kind.FORWARD and stage > 0:
        same = stage_ranks[stage - 1] == stage_ranks[stage]
        needs.append(of(Kind.FORWARD, at=stage - 1) if same else of(Kind.RECV_F))
    elif action.kind in TOWARDS_START:
        needs.append(of(Kind.FORWARD))
        if stage < last:
            same = stage_ranks[stage + 1] == stage_ranks[stage]
            needs.append(of(*TOWARDS_START, at=stage + 1) if same else of(Kind.RECV_B))
    elif action.kind is Kind.BACKWARD_WEIGHT:
        needs.append(of(Kind.BACKWARD_INPUT))
    elif action.kind in (Kind.SEND_F, Kind.RECV_B):
        needs.append(of(Kind.FORWARD))
    elif action.kind is Kind.SEND_B:
        needs.append(of(*TOWARDS_START))
    return needs


SPLIT = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def _check_message_order(program: Program, stage_ranks: Mapping[int, int]) -> None:
    """Raise PlanError unless the k-th send between two ranks matches the k-th receive."""
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for rank, actions in enumerate(program):
        for action in actions:
            if action.kind in SENDS:
                sent.setdefault((rank, stage_ranks[action.partner.stage]), []).append(action)
            elif action.kind in RECEIVES:
                received.setdefault((stage_ranks[action.partner.stage], rank), []).append(action)
    for ranks, sends in sent.items():
        for send, receive in zip(sends, received[ranks], strict=True):
            if send.partner != receive:
                why = f"would receive what {send} (rank {ranks[0]}) sends; sends and receives differ in order"
                raise _refuse(receive, ranks[1], why)


class _Rank:
    """A rank in the run with blocking transfers: where it is, and which transfers it waits for."""

    def __init__(self, grouped: Sequence[tuple[Action, ...]]):
        self.phases: list[tuple[Action, list[tuple[str, Action]]]] = []
        for batch in grouped:
            moves = [(a if a.kind in SENDS else a.partner) for a in batch if a.kind in TRANSFERS]
            shapes = [("shape", move) for move in moves if move.kind is Kind.SEND_F]
            if shapes:
                self.phases.append((batch[0], shapes))
            if moves:
                self.phases.append((batch[0], [("data", move) for move in moves]))
        self.at = -1
        self.waiting: set[tuple[str, Action]] = set()


def _check_deadlock(program: Program) -> None:
    """Run all ranks' transfers as if they were blocking; raise when some never end.

    Compute only waits for earlier actions of its own rank, so only transfers can block a rank.
    """
    ranks = [_Rank(grouped) for grouped in batches(program)]
    posted: dict[tuple[str, Action], int] = {}
    ready = deque(range(len(ranks)))
    while ready:
        index = ready.popleft()
        rank = ranks[index]
        while not rank.waiting and rank.at + 1 < len(rank.phases):
            rank.at += 1
            for move in rank.phases[rank.at][1]:
                if move not in posted:
                    posted[move] = index
                    rank.waiting.add(move)
                    continue
                other = ranks[posted[move]]
                other.waiting.discard(move)
                if not other.waiting:
                    ready.append(posted[move])
    stuck = [(i, rank.phases[rank.at][0]) for i, rank in enumerate(ranks) if rank.waiting]
    if stuck:
        raise PlanError(
            f"action {stuck[0][1]} (rank {stuck[0][0]}) waits forever: the program deadlocks",
            got=", ".join(f"rank {i} waits at {action}" for i, action in stuck),
            expected="an order in which each transfer is reached by both of its ranks",
        )
