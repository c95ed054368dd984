"""State that lives on the host and is stepped on the device, piece by piece, trains as anywhere else."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offloaded import SLOW_HOST, assert_equal, build, groups, moved, torchs_clip, train
from plain import Plain, assert_same, fragile, loss_of
from stored_shards import shards_of, trained
from traces import RATES, palindrome, problems

from cai_gemini import ChunkResidency, Tiers, Tuning, offload
from cai_gemini.chunk.optimizer_step import AdamBlock
from cai_gemini.planning.policy import Plan, Sizes, Streamable, fits, fractions, on_device
from cai_gemini.planning.simulation import Step, best_plan, floor, simulate
from cai_gemini.steps.pieces import GRAIN, buffer_bytes, pieces
from cai_mesh.errors import PlanError

ALL, MIXED = Tiers(streamed=1.0), Tiers(0.6, 0.2, streamed=0.4)
FAST_LINK = replace(SLOW_HOST, to_device=1e9, to_host=1e9, both=2e9)


def small_pieces(monkeypatch, size):
    for where in ("pieces", "streaming"):
        monkeypatch.setattr(f"cai_gemini.steps.{where}.PIECE", size)


@pytest.fixture
def steady(monkeypatch):
    """Every use of a chunk takes as long, however busy the machine is: what "auto" plans is the same each time."""
    monkeypatch.setattr("cai_gemini.engine.clock.Clock._between", lambda *_: 1e-4)


@pytest.fixture(params=[64, 128, None])
def piece(request, monkeypatch):
    """Several pieces a parameter, several parameters a piece, and a chunk at once."""
    if request.param:
        small_pieces(monkeypatch, request.param)
    return request.param


# -- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("residency", [ALL, MIXED], ids=str)
@pytest.mark.parametrize(("micro", "clip"), [(1, False), (2, True)])
def test_training_is_that_without_offload_bit_for_bit(residency, micro, clip, piece):
    twin, theirs = build()
    expected = train(twin, theirs, micro=micro, clip=torchs_clip if clip else None)
    model, ours = moved(*build(), residency)
    assert train(model, ours, micro=micro, clip=torchs_clip if clip else None) == expected
    assert_equal(model, twin)
    chunks = ours._engine.chunks
    assert [chunk.place for chunk in chunks] == [ours._engine.plan.place(i) for i in range(len(chunks))]
    ours.wait()
    assert not any(chunk.host_weights.is_old for chunk in chunks), "the host weights are those of the step"
    assert ours.placement().state_streamed == (5 if residency == ALL else 2)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_it_equals_master_weights_by_hand(kind, compute, piece):
    """With gradients of one and two backwards, unused parameters, other learning rates, and a scale of the step's."""

    def optimizer(params):
        return kind(params, lr=1e-2, weight_decay=0.1, fused=True)

    model = fragile()
    plain = Plain(model, optimizer, compute)
    tuning = Tuning(rates=SLOW_HOST)
    model, ours = offload(
        model,
        optimizer(groups(model)),
        residency=MIXED,
        device_memory="80KB",
        compute=compute,
        tuning=tuning,
    )
    for step in range(7):
        for part in range(1 + step % 2):
            loss = loss_of(model, 10 * step + part, skip=step % 3 == 1)
            loss.backward()
            assert loss.item() == plain.backward(10 * step + part, step % 3 == 1)
        if step == 4:
            plain.scale(0.5)
            ours._engine.step(0.5)
        else:
            ours.step()
        plain.step()
        ours.zero_grad()
        for group in (*ours.param_groups, *plain.optimizer.param_groups):
            group["lr"] *= 0.7
    assert ours._engine.plan.streamed
    assert_same(model, ours, plain)


def test_chunks_that_the_optimizer_leaves_out_are_not_waited_for():
    def of_some(params):
        return torch.optim.AdamW([p for g in params for p in g["params"]][:5], lr=1e-2, fused=True)

    twin, theirs = build(optimizer=of_some)
    model, ours = moved(*build(optimizer=of_some), ALL)
    for _ in range(4):
        for opt, net in ((theirs, twin), (ours, model)):
            loss_of(net, 1, skip=False).backward()
            opt.step()
            opt.zero_grad()
    assert ours._engine.plan.streamed
    assert_equal(model, twin)


def test_state_loaded_later_stays_where_copies_are_fast(monkeypatch):
    placed = []

    def place(tensor, _device):
        placed.append(tensor.clone())
        return placed[-1]

    monkeypatch.setattr("cai_gemini.steps.streaming.in_host_memory", place)
    twin, theirs = build()
    model, ours = moved(*build(), ALL)
    train(model, ours, steps=3)
    train(twin, theirs, steps=3)
    assert len(placed) == 3 * 5, "master weights and both moments of every chunk"
    ours.load_state_dict(ours.state_dict())
    assert len(placed) == (3 + 2) * 5
    assert train(model, ours, steps=2) == train(twin, theirs, steps=2)
    assert_equal(model, twin)


def test_reading_waits_and_writing_counts():
    twin, theirs = build()
    model, ours = moved(*build(), ALL)
    for step in range(4):
        assert train(model, ours, steps=1) == train(twin, theirs, steps=1), step
        assert_equal(model, twin)
        with torch.no_grad():
            for net in (model, twin):
                net.head.weight.mul_(0.5)


def test_a_step_that_fails_is_raised_where_its_weights_are_used(monkeypatch):
    model, ours = moved(*build(), ALL)
    train(model, ours, steps=3)
    third = ours._engine.chunks[2]

    def broken(*_):
        raise MemoryError("no more")

    monkeypatch.setattr(third.step, "adam", broken)
    with pytest.raises(MemoryError, match="no more"):
        train(model, ours, steps=2)


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("residency", [ALL, MIXED, "auto"], ids=str)
def test_pieces_count_in_the_budget(residency, steady, monkeypatch):
    small_pieces(monkeypatch, 64)
    model, ours = offload(*build(), residency=residency, device_memory="40KB", tuning=Tuning(rates=FAST_LINK))
    ours._engine.ledger.limit = 40_000
    train(model, ours)
    plan, nbytes = ours._engine.plan, ours._engine.ledger.nbytes
    assert plan.streamed
    assert plan.buffers == buffer_bytes([h for h in ours._engine.chunks if h.step is not None])
    state = sum(ours._engine.chunks[i].sizes.state for i in plan.state)
    assert nbytes["state"] == plan.buffers + state
    model, ours = offload(
        *build(), residency=ALL, device_memory=12_800 + plan.buffers // 2, tuning=Tuning(rates=SLOW_HOST)
    )
    with pytest.raises(PlanError, match="the plan does not fit"):
        train(model, ours)


def test_auto_streams_where_it_pays_and_only_there(steady, monkeypatch):
    small_pieces(monkeypatch, 64)

    def plan(rates, **options):
        model, ours = offload(*build(), device_memory="40KB", tuning=Tuning(rates=rates, **options))
        train(model, ours, steps=3)
        return ours._engine.plan

    assert plan(FAST_LINK).streamed
    assert not plan(FAST_LINK, stream=False).streamed
    assert not plan(replace(FAST_LINK, host_step=4e12)).streamed
    assert not plan(replace(FAST_LINK, to_device=1e5, to_host=1e5, both=1e5)).streamed


# -- plans ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.data(), st.integers(64, 400))
def test_pieces_hold_every_element_once(lengths, data, most):
    """Parameters one after the other, some left out; they are cut only at multiples of whole vectors."""
    ends = list(itertools.accumulate(lengths))
    spans = [(end - length, end) for length, end in zip(lengths, ends, strict=True)]
    chosen = data.draw(st.lists(st.sampled_from(spans), unique=True))
    groups = {low: {"of": low} for low, _ in chosen}
    blocks = [AdamBlock(groups[low], torch.ones(()), low, high) for low, high in chosen]
    found, covered = pieces(blocks, most), []
    for each in found:
        assert each.high - each.low <= most
        assert (each.low, each.high) == (each.blocks[0].low, each.blocks[-1].high)
        for block in each.blocks:
            assert (block.low - block.group["of"]) % GRAIN == 0
            covered += range(block.low, block.high)
    assert covered == [at for low, high in sorted(chosen) for at in range(low, high)]
    for a, b in itertools.pairwise(found):
        assert a.high < b.low or a.high - a.low > most - GRAIN, "a piece that is not full"


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=10), st.floats(0, 0.5), st.floats(0, 1))
def test_fractions_spread_what_is_streamed(states, state, share):
    sizes, trace = [Sizes(2, 2, s) for s in states], palindrome(len(states))
    able = frozenset(range(len(states)))
    plan = fractions(trace, sizes, 0.0, state, share, Streamable(able, 7))
    assert not plan.streamed & plan.state
    rest = sum(s for i, s in enumerate(states) if i not in plan.state)
    got = sum(states[i] for i in plan.streamed)
    assert abs(got - min(share * sum(states), rest)) <= max(states) / 2 + 1e-6
    assert plan.resident(sizes) - replace(plan, places=on_device(plan.state)).resident(sizes) == 7 * bool(
        plan.streamed
    )


def test_what_is_streamed_is_stepped_beside_the_host():
    """Eight chunks of no compute: the host takes 28 / 10 s each, the link 4 / 1 s; together two thirds of the host."""
    trace, sizes = palindrome(8, seconds=1e-6), [Sizes(10, 10, 60)] * 8
    rates = replace(RATES, to_device=35.0, to_host=35.0, both=70.0, host_step=100.0)
    whole = frozenset(range(8))
    step = Step([10] * 8, streamable=Streamable(whole, 5))
    alone, _ = simulate(trace, sizes, Plan(whole), 10**6, rates, step)
    both = Plan(whole, on_device((), {1, 3, 5}), 5)
    seconds, lanes = simulate(trace, sizes, both, 10**6, rates, step)
    assert alone > 8 * 2.8 and 5 * 2.8 < seconds < 5 * 2.8 + 3
    assert {chunk for *_, chunk in lanes.host} == whole - both.streamed
    slower, _ = simulate(trace, sizes, both, 10**6, replace(rates, host_beside=50.0), step)
    assert slower > seconds + 5
    for plan, took in ((Plan(whole), alone), (both, seconds)):
        assert took >= floor(trace, sizes, plan, rates, step) * (1 - 1e-9)
    assert floor(trace, sizes, both, rates, step) < floor(trace, sizes, Plan(whole), rates, step)


@settings(deadline=None, max_examples=200)
@given(problems(), st.floats(1.0, 1000.0), st.sampled_from([None, 0.5]))
def test_a_step_is_never_shorter_than_its_floor(problem, host, share):
    trace, sizes, budget, plan = problem
    if not fits(trace, sizes, plan, budget) or {use.chunk for use in trace.uses} != set(range(len(sizes))):
        return
    rates = replace(RATES, host_step=host, host_beside=share and share * host)
    step = Step([s.state for s in sizes])
    seconds, lanes = simulate(trace, sizes, plan, budget, rates, step)
    assert seconds >= floor(trace, sizes, plan, rates, step) * (1 - 1e-9)
    for lane in (lanes.compute, lanes.host):
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(lane))


@pytest.mark.parametrize("budget", [120, 300, 600, 2000])
@pytest.mark.parametrize("both", [5.0, 20.0, 80.0, 10**4])
def test_the_search_never_takes_longer_with_pieces_than_without(budget, both):
    trace, sizes = palindrome(8, seconds=0.1), [Sizes(20, 20, 120)] * 8
    rates = replace(RATES, to_device=both / 2, to_host=both / 2, both=both)
    found = []
    for able in (frozenset[int](), frozenset(range(8))):
        step = Step([10] * 8, streamable=Streamable(able, 20))
        plan = best_plan(trace, sizes, budget, rates, step)
        assert fits(trace, sizes, plan, budget)
        found.append(simulate(trace, sizes, plan, budget, rates, step)[0])
    assert found[1] <= found[0]


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), r"SGD(.|\n)*leave streamed out"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "without amsgrad"),
    ],
)
def test_what_cannot_be_streamed_is_refused_before_anything_is_moved(optimizer, said):
    model, opt = build(optimizer=optimizer)
    with pytest.raises(PlanError, match=said):
        moved(model, opt, MIXED)
    assert all(p.dim() != 1 for n, p in model.named_parameters() if "weight" in n and "norm" not in n)
    with pytest.raises(PlanError, match="more state than there is"):
        Tiers(state=0.5, streamed=0.6)
    with pytest.raises(PlanError, match="streamed is no fraction"):
        Tiers(streamed=1.5)


def test_shards_refuse_it_too():
    residency = ChunkResidency(MIXED, device_memory=10**6, tuning=Tuning(rates=SLOW_HOST))
    stored = shards_of(residency, torch.float32)
    with pytest.raises(PlanError, match="leave streamed out"):
        residency.optimizer(torch.optim.SGD(trained(stored), lr=0.1))
