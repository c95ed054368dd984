"""The schedule is a function of requests, free blocks and limits: its rules, and a simulation of many requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cai_apps.engine.blocks import BlockPool
from cai_apps.engine.request import Request
from cai_apps.engine.sampling import Sampling
from cai_apps.engine.schedule import Chunk, Demand, Limits, schedule
from cai_mesh.errors import ConfigError

LIMITS = Limits(tokens=16, requests=4, block_size=4)


def running(number: int, length: int, computed: int, blocks: int, **more) -> Demand:
    return Demand(number, length, computed, blocks, blocks, running=True, arrival=number, **more)


def waiting(number: int, length: int, **more) -> Demand:
    return Demand(number, length, 0, 0, 0, running=False, arrival=number, **more)


def test_what_goes_on_comes_before_prompts_and_before_what_waits():
    plan = schedule([waiting(2, 6), running(1, 20, 8, 2), running(0, 9, 8, 3)], 20, LIMITS)
    assert plan.chunks == (Chunk(0, 8, 1, 0), Chunk(1, 8, 12, 3), Chunk(2, 0, 3, 1))
    assert plan.admitted == (2,) and not plan.preempted


def test_the_last_one_gives_its_blocks_to_one_that_goes_on():
    plan = schedule([running(0, 9, 8, 2), running(1, 9, 8, 2), running(2, 9, 8, 2)], 0, LIMITS)
    assert plan.preempted == (2,) and [chunk.number for chunk in plan.chunks] == [0, 1]


def test_a_lower_number_of_priority_goes_first():
    plan = schedule([running(0, 9, 8, 2, priority=1), running(1, 9, 8, 2)], 0, LIMITS)
    assert plan.preempted == (0,) and [chunk.number for chunk in plan.chunks] == [1]
    plan = schedule([waiting(0, 16, priority=1), waiting(1, 16)], 4, LIMITS)
    assert plan.admitted == (1,)


def test_a_prompt_waits_while_others_go_on():
    plan = schedule([running(0, 8, 7, 2), running(1, 40, 8, 2)], 0, LIMITS)
    assert [chunk.number for chunk in plan.chunks] == [0] and not plan.preempted


def test_a_prompt_takes_what_there_is_room_for():
    plan = schedule([running(1, 40, 6, 2)], 1, LIMITS)
    assert plan.chunks == (Chunk(1, 6, 6, 1),)


def test_nobody_overtakes_one_that_waits():
    plan = schedule([waiting(0, 40), waiting(1, 4)], 5, LIMITS)
    assert not plan.chunks


def test_no_more_run_than_may():
    plan = schedule([waiting(number, 1) for number in range(9)], 50, LIMITS)
    assert plan.admitted == (0, 1, 2, 3)


def test_what_waits_for_others_gives_way_to_those():
    """As beams do whose tokens are all computed, while one of theirs waits for room."""
    paused = [running(number, 8, 8, 2) for number in range(2)]
    plan = schedule([*paused, waiting(5, 12)], 1, LIMITS)
    assert plan.preempted == (1,) and plan.admitted == (5,)
    assert not schedule(paused, 0, LIMITS).chunks


def test_a_copy_needs_a_block():
    assert schedule([running(0, 7, 6, 2, copies=True)], 1, LIMITS).chunks == (Chunk(0, 6, 1, 1),)
    assert schedule([running(0, 7, 6, 2, copies=True)], 0, LIMITS).preempted == (0,)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 2)), min_size=1, max_size=12),
    st.integers(15, 40),
    st.integers(1, 20),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_every_request_ends_and_no_block_is_lost(asked, blocks, tokens, most, random):
    """All invariants of a batch hold in every step, whatever comes and goes."""
    pool, limits = BlockPool(blocks, 4), Limits(tokens, most, 4)
    requests = [
        Request(number, tuple(random.choices(range(2), k=length)), Sampling(max_tokens=answer), 0, priority)
        for number, (length, answer, priority) in enumerate(asked)
    ]
    live = {request.number: request for request in requests}
    for _ in range(6000):
        if not live:
            break
        plan = schedule([request.demand(pool, is_tight=True) for request in live.values()], pool.free, limits)
        assert plan.chunks and sum(chunk.tokens for chunk in plan.chunks) <= tokens
        assert not {chunk.number for chunk in plan.chunks} & {*plan.preempted}
        for number in plan.preempted:
            give_back(pool, live[number])
        for number in plan.admitted:
            live[number].blocks, live[number].running = live[number].reusable(pool), True
            pool.share(live[number].blocks)
        assert sum(request.running for request in live.values()) <= most
        for chunk in plan.chunks:
            step(pool, live[chunk.number], chunk)
            if (
                len(live[chunk.number].answer) == live[chunk.number].sampling.max_tokens
                or random.random() < 0.02
            ):
                give_back(pool, live.pop(chunk.number))
    assert not live and pool.free == blocks


def step(pool: BlockPool, request: Request, chunk: Chunk) -> None:
    end = chunk.start + chunk.tokens
    while len(request.blocks) * pool.size < end:
        request.blocks.append(pool.take())
    request.computed = end
    count = end // pool.size
    for block, digest in zip(request.blocks, request.digests(count, pool.size), strict=False):
        pool.publish(block, digest)
    if end == request.length:
        request.answer.append(1)


def give_back(pool: BlockPool, request: Request) -> None:
    pool.give_back(request.blocks)
    request.blocks, request.computed, request.running = [], 0, False


def test_blocks_are_found_by_all_tokens_up_to_their_end():
    pool = BlockPool(4, 2)
    first = Request(0, (1, 2, 3, 4, 5), Sampling(), 0)
    first.blocks = [pool.take(), pool.take()]
    for block, digest in zip(first.blocks, first.digests(2, 2), strict=True):
        pool.publish(block, digest)
    assert Request(1, (1, 2, 3, 4, 9), Sampling(), 0).reusable(pool) == first.blocks
    assert (
        Request(2, (1, 2, 3, 4), Sampling(), 0).reusable(pool) == first.blocks[:1]
    )  # the last token is computed
    assert Request(3, (7, 2, 3, 4, 5), Sampling(), 0).reusable(pool) == []


def test_the_least_recently_used_block_is_taken_and_forgotten():
    pool = BlockPool(2, 1)
    blocks = [pool.take(), pool.take()]
    pool.publish(blocks[0], b"a")
    pool.publish(blocks[1], b"b")
    pool.give_back(blocks)  # the last one is used again first
    assert pool.take() == blocks[1]
    assert pool.lookup([b"b"]) == [] and pool.lookup([b"a"]) == [blocks[0]]


def test_a_block_that_nobody_can_ask_for_is_taken_first():
    pool = BlockPool(2, 1)
    named, nameless = pool.take(), pool.take()
    pool.publish(named, b"a")
    pool.give_back([named])
    pool.give_back([nameless])
    assert pool.take() == nameless


@pytest.mark.parametrize("count, size", [(0, 4), (4, 0)])
def test_a_pool_without_room_is_refused(count, size):
    with pytest.raises(ConfigError, match="a cache needs blocks"):
        BlockPool(count, size)
