"""The schedule is a function of requests, free blocks and limits: its rules, and a simulation of many requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cai_apps.engine.blocks import BlockPool, BlockTable
from cai_apps.engine.request import Request
from cai_apps.engine.sampling import Sampling
from cai_apps.engine.schedule import Chunk, Demand, Limits
from cai_apps.engine.schedule import schedule as next_forward
from cai_mesh.errors import ConfigError

LIMITS = Limits(tokens=16, requests=4, block_size=4)


def running(number: int, length: int, computed: int, blocks: int, **more) -> Demand:
    return Demand(number, length, computed, blocks, blocks, running=True, arrival=number, **more)


def waiting(number: int, length: int, **more) -> Demand:
    needs = LIMITS.blocks_of(length)
    return Demand(number, length, 0, 0, 0, running=False, arrival=number, needs=needs, **more)


def schedule(demands, free, limits):
    going = [demand for demand in demands if demand.running]
    others = sorted((demand for demand in demands if not demand.running), key=lambda demand: demand.order)
    return next_forward(going, others, free, limits)


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


def test_a_prompt_beside_others_takes_few_tokens_and_many_prompts_take_all():
    limits = Limits(tokens=16, requests=9, block_size=4, prompt_part=3)
    plan = schedule([running(0, 9, 8, 3), running(1, 40, 8, 2)], 50, limits)
    assert plan.chunks == (Chunk(0, 8, 1, 0), Chunk(1, 8, 3, 1))
    alone = schedule([running(1, 40, 8, 2), waiting(2, 20)], 50, limits)
    assert [chunk.tokens for chunk in alone.chunks] == [16]
    plan = schedule([running(0, 9, 8, 3), *(waiting(number, 20) for number in range(2, 9))], 50, limits)
    assert [chunk.tokens for chunk in plan.chunks] == [1, 3, 3, 3, 3, 3]
    assert plan.admitted == (2, 3, 4, 5, 6)


@pytest.mark.parametrize(("part", "most"), [(None, 2048), (256, 64 + 256)])
def test_a_long_prompt_adds_no_more_than_its_part_to_each_step_of_others(part, most):
    """64 that go on, and a prompt of 32,768 tokens: the tokens of the largest step, and the steps that it takes."""
    limits, computed, steps, largest = Limits(2048, 256, 16, prompt_part=part), 0, 0, 0
    others = [running(number, 1001, 1000, 63) for number in range(64)]
    while computed < 32768:
        prompt = running(64, 32768, computed, -(-computed // 16))
        plan = schedule([*others, prompt], 10_000, limits)
        largest = max(largest, sum(chunk.tokens for chunk in plan.chunks))
        assert len(plan.chunks) == 65  # nobody waits
        computed, steps = computed + plan.chunks[-1].tokens, steps + 1
    assert largest == most and steps == -(-32768 // (most - 64))


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
    st.lists(st.sampled_from([None, 1, 3, 8, 200]), min_size=1, max_size=3),
    st.sampled_from([None, 1, 2, 7]),
    st.randoms(use_true_random=False),
)
def test_every_request_ends_and_no_block_is_lost(asked, blocks, tokens, most, windows, part, random):
    """All invariants of a batch hold in every step, whatever comes and goes."""
    limits = Limits(tokens, most, 4, tuple(windows), part)
    blocks += limits.blocks_of(60) - limits.blocks_of(15)
    pool = BlockPool(blocks, 4)
    requests = [
        Request(number, tuple(random.choices(range(2), k=length)), Sampling(max_tokens=answer), 0, priority)
        for number, (length, answer, priority) in enumerate(asked)
    ]
    live = {request.number: request for request in requests}
    for _ in range(6000):
        if not live:
            break
        for request in live.values():
            request.blocks.pass_by(pool, request.computed)
        demands = [request.demand(pool, limits, is_tight=True) for request in live.values()]
        plan = schedule(demands, pool.free, limits)
        assert plan.chunks and sum(chunk.tokens for chunk in plan.chunks) <= tokens
        assert not {chunk.number for chunk in plan.chunks} & {*plan.preempted}
        missing = {demand.number: demand.missing for demand in demands if demand.running}
        if part is not None and any(missing.get(chunk.number) == 1 for chunk in plan.chunks):
            assert max(chunk.tokens for chunk in plan.chunks) <= part
        for number in plan.preempted:
            give_back(pool, live[number], limits)
        for number in plan.admitted:
            live[number].blocks, live[number].running = live[number].reusable(pool, limits), True
            pool.share(live[number].blocks.held())
        assert sum(request.running for request in live.values()) <= most
        for chunk in plan.chunks:
            step(pool, live[chunk.number], chunk)
            if (
                len(live[chunk.number].answer) == live[chunk.number].sampling.max_tokens
                or random.random() < 0.02
            ):
                give_back(pool, live.pop(chunk.number), limits)
    assert not live and pool.free == blocks


def step(pool: BlockPool, request: Request, chunk: Chunk) -> None:
    end = chunk.start + chunk.tokens
    before = pool.free
    request.blocks.grow(pool, -(-end // pool.size))
    assert before - pool.free == chunk.blocks
    request.computed = end
    for window, column, passed in zip(
        request.blocks.windows, request.blocks.columns, request.blocks.passed, strict=True
    ):  # what the chunk sees is there
        assert passed * pool.size <= max(0, chunk.start - (window or end) + 1)
        assert all(pool.holders(block) for block in column[passed:])
    request.blocks.publish(pool, 0, request.digests(end // pool.size, pool.size))
    if end == request.length:
        request.answer.append(1)


def give_back(pool: BlockPool, request: Request, limits: Limits) -> None:
    request.blocks.give_back(pool)
    request.blocks, request.computed, request.running = BlockTable(limits.windows), 0, False


def reusable(pool: BlockPool, limits: Limits, *tokens: int) -> list[list[int]]:
    found = Request(1, tokens, Sampling(), 0).reusable(pool, limits)
    return [[*column[passed:]] for column, passed in zip(found.columns, found.passed, strict=True)]


def computed(pool: BlockPool, limits: Limits, *tokens: int) -> Request:
    request = Request(0, tokens, Sampling(), 0)
    request.blocks = BlockTable(limits.windows)
    request.blocks.grow(pool, len(tokens) // pool.size)
    request.blocks.publish(pool, 0, request.digests(len(tokens) // pool.size, pool.size))
    return request


def test_blocks_are_found_by_all_tokens_up_to_their_end():
    pool, limits = BlockPool(4, 2), Limits(16, 4, 2)
    blocks = [*computed(pool, limits, 1, 2, 3, 4, 5).blocks.columns[0]]
    assert reusable(pool, limits, 1, 2, 3, 4, 9) == [blocks]
    assert reusable(pool, limits, 1, 2, 3, 4) == [blocks[:1]]  # the last token is computed
    assert reusable(pool, limits, 7, 2, 3, 4, 5) == [[]]


def test_a_window_needs_the_last_blocks_alone():
    pool, limits = BlockPool(12, 2), Limits(16, 4, 2, (None, 3))
    first = computed(pool, limits, *range(11))
    whole, sliding = ([*column] for column in first.blocks.columns)
    first.blocks.pass_by(pool, 10)
    assert first.blocks.passed == [0, 4] and pool.free == 2 + 4
    assert reusable(pool, limits, *range(11)) == [whole, sliding[4:]]
    assert reusable(pool, limits, *range(7)) == [whole[:3], sliding[2:3]]  # left behind, and still there
    taken = [pool.take() for _ in range(3)]
    assert sliding[3] not in taken  # the last one was given back last
    assert reusable(pool, limits, *range(7)) == [whole[:3], sliding[2:3]]
    while sliding[2] not in taken:
        taken.append(pool.take())
    assert reusable(pool, limits, *range(7)) == [[], []]
    assert reusable(pool, limits, *range(11)) == [whole, sliding[4:]]


@pytest.mark.parametrize("windows", [(None,), (None, 3), (None, 8, 8), (3, 8), (200, None)])
@pytest.mark.parametrize("most", [None, 17, 400])
def test_the_longest_request_that_blocks_have_room_for(windows, most):
    limits = Limits(7, 4, 4, windows)
    for blocks in range(60):
        longest = limits.longest(blocks, most)
        assert limits.blocks_of(longest) <= blocks
        is_longest = limits.blocks_of(longest + 1) > blocks or longest in (most, blocks * 4)
        assert is_longest and longest <= (most or longest)


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
