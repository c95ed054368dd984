"""An offloaded model trains as an ordinary one, bit for bit, whatever stays on the device."""

from __future__ import annotations

import threading

import pytest
import torch
from offloaded import (
    SLOW_HOST,
    Net,
    adamw,
    assert_equal,
    build,
    groups,
    moved,
    torchs_clip,
    train,
    train_with_a_late_branch,
)

from cai_gemini import Tiers, Tuning, offload
from cai_gemini.chunk.states import State
from cai_gemini.planning.budget import memory_for, usable
from cai_gemini.planning.policy import StepPlace
from cai_mesh.errors import PlanError
from cai_mesh.gradients import flat_of

RESIDENCIES = ["host", "device", "auto", Tiers(0.5, 0.3), Tiers(1.0, 0.0), Tiers(0.5, 0.2, streamed=0.5)]


@pytest.mark.parametrize("residency", RESIDENCIES, ids=str)
@pytest.mark.parametrize(
    ("recompute", "micro", "clip"), [(False, 1, None), (True, 2, torchs_clip), (False, 2, None)]
)
def test_training_is_that_without_offload_bit_for_bit(residency, recompute, micro, clip):
    twin, theirs = build(recompute)
    expected = train(twin, theirs, micro=micro, clip=clip)
    model, ours = moved(*build(recompute), residency)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in twin.named_parameters()]
    assert train(model, ours, micro=micro, clip=clip) == expected
    assert_equal(model, twin)
    assert ours._engine.planned


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
        lambda p: torch.optim.RMSprop(p, lr=1e-2, foreach=False),
        lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=False),
        lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=False),
    ],
    ids=["sgd", "rmsprop", "adagrad", "adam", "amsgrad"],
)
def test_any_elementwise_optimizer(optimizer):
    twin, theirs = build(optimizer=optimizer)
    expected = train(twin, theirs)
    model, ours = moved(*build(optimizer=optimizer), Tiers(0.6, 0.4))
    assert train(model, ours) == expected
    assert_equal(model, twin)


def test_its_own_clipping_is_torchs_within_rounding():
    twin, theirs = build(dtype=torch.float64)
    expected = train(twin, theirs, clip=torchs_clip)
    for residency in ("host", Tiers(0.6, 0.4)):
        model, ours = moved(*build(dtype=torch.float64), residency)
        got = train(model, ours, clip=lambda _, opt: opt.clip_grad_norm_(0.5))
        assert got == pytest.approx(expected, rel=1e-12)


def test_gradients_can_be_read_and_written():
    twin, _ = build()
    model, ours = moved(*build(), "host")
    ids = torch.arange(6).view(2, 3)
    for net in (twin, model):
        net(ids, True).square().mean().backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    for name, param in twin.named_parameters():
        if param.grad is None:
            assert grads[name] is None, name
        else:
            assert torch.equal(grads[name].view(param.shape), param.grad), name
    before = model.head.weight.detach().clone()
    for param in model.parameters():
        if param.grad is not None:
            param.grad.zero_()
    ours.param_groups[0]["weight_decay"] = 0.0
    ours.step()
    assert torch.equal(model.head.weight, before), "the step did not see what was written"
    with pytest.raises(PlanError, match="given back"):
        model.head.weight.grad.sum()
    ours.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_weights_are_on_the_device_only_while_needed():
    model, ours = moved(*build(), "host")
    chunks, seen = ours._engine.chunks, []
    layer = model.layers[3]
    layer.register_forward_pre_hook(
        lambda *_: seen.append([h.name for h in chunks if h.state is not State.FREE]), prepend=False
    )
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long), False)
    assert seen == [["layers.3.up.weight", "embed.weight"]]
    assert all(flat_of(p).dim() == 1 for p in model.parameters())
    assert [p.shape for p in model.parameters()] == [p.shape for p in build()[0].parameters()]


@pytest.mark.parametrize("budget", [14_000, 20_000, 40_000])
def test_the_budget_is_never_passed(budget):
    """The ledger raises beyond its limit; the smallest budget is what one block at a time needs."""
    model, ours = offload(*build(), device_memory=budget, tuning=Tuning(rates=SLOW_HOST))
    ours._engine.ledger.limit = budget
    train(model, ours)
    used = ours._engine.ledger.peak
    assert used <= budget
    plan = ours._engine.plan
    if budget == 40_000:
        assert plan.state and used > 20_000, "memory that is there is used"


def test_activations_count():
    """What lies beside the chunks, as observed, is left free."""
    model, ours = offload(
        *build(), device_memory=100_000, tuning=Tuning(rates=SLOW_HOST, observe=lambda: 60_000)
    )
    train(model, ours)
    assert ours._engine.ledger.peak <= 100_000 - 40_000
    cramped, opt = offload(
        *build(), device_memory=100_000, tuning=Tuning(rates=SLOW_HOST, observe=lambda: 105_000)
    )
    with pytest.raises(PlanError, match=r"too small for one layer at a time(.|\n)*at least [\d,]+ bytes"):
        train(cramped, opt)


def test_a_branch_taken_for_the_first_time():
    """The trace has no block 2; when it comes its chunk is brought on demand, and the next pass is traced."""
    twin, theirs = build()
    model, ours = moved(*build(), "auto")
    assert train_with_a_late_branch(model, ours) == train_with_a_late_branch(twin, theirs)
    assert_equal(model, twin)
    uses = [(ours._engine.chunks[use.chunk].name, use.backward) for use in ours._engine.trace.uses]
    assert uses[0] == ("embed.weight", False), "traced from the middle of a pass"
    blocks = [f"layers.{i}.up.weight" for i in range(5)]
    assert [name for name, backward in uses if name in blocks and not backward] == blocks
    assert {name for name, backward in uses if backward} >= set(blocks)


def test_host_memory_does_not_grow_with_steps():
    """Sums of several backwards are wider than what arrives; the memory of both is that of the step before."""
    model, ours = moved(*build(), "host", compute=torch.bfloat16)
    pool, trained = ours._engine.copies.host, [h for h in ours._engine.chunks if h.step is not None]
    for _ in range(12):
        train(model, ours, steps=1, micro=3)
        ours.wait()
        model(torch.zeros(1, 2, dtype=torch.long), False).sum().backward()
        ours.zero_grad()
    kept = sum(t.nbytes for free in pool._free.values() for t in free)
    # however far the loop runs ahead of the sums, a step's three backwards give a chunk three gradients, and one sum
    each = 3 * torch.bfloat16.itemsize + torch.float32.itemsize
    assert kept <= sum(h.unit.chunk.numel * each for h in trained)


def test_bfloat16_on_the_device_keeps_host_masters():
    model, opt = moved(*build(), "auto", compute=torch.bfloat16)
    losses = train(model, opt, steps=12)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(losses[-4:]) < sum(losses[:4])


def test_steps_run_while_the_next_forward_does():
    """`step` returns before the host is done; the block that needs a chunk waits for it."""
    model, ours = moved(*build(), "host")
    ids = torch.zeros(2, 3, dtype=torch.long)
    model(ids, False).square().mean().backward()
    gate, engine = threading.Event(), ours._engine
    engine.chunks[0].worker.submit(gate.wait)
    ours.step()
    assert any(h._stepping is not None and not h._stepping.done() for h in engine.chunks)
    threading.Timer(0.05, gate.set).start()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])  # waits
    assert gate.is_set()
    ours.wait()
    assert torch.equal(before, torch.cat([p.detach().flatten() for p in model.parameters()]))


def test_without_overlap_a_step_is_over_when_it_returns():
    model, ours = offload(*build(), residency="host", tuning=Tuning(overlap=False))
    train(model, ours, steps=1)
    assert all(h._stepping is None for h in ours._engine.chunks)


def test_what_a_step_raises_in_the_background_is_raised(monkeypatch):
    model, ours = moved(*build(), "host")
    train(model, ours, steps=1)

    def broken(*_):
        raise OSError("no such memory")

    monkeypatch.setattr(ours._engine.chunks[0].step, "run", broken)
    with pytest.raises(OSError, match="no such memory"):
        train(model, ours, steps=2)


@pytest.mark.parametrize("residency", ["host", Tiers(0.6, 0.4), Tiers(streamed=0.6)], ids=str)
def test_state_dicts_resume_and_loaded_weights_are_seen(residency):
    twin, theirs = build()
    train(twin, theirs, steps=3)
    model, ours = moved(*build(), residency)
    train(model, ours, steps=3)
    other, resumed = moved(*build(), "host" if residency == "host" else Tiers(0.3, 0.2, streamed=0.5))
    with torch.no_grad():
        for mine, saved in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(saved)
    resumed.load_state_dict(ours.state_dict())
    expected = train(twin, theirs, steps=4)
    assert train(other, resumed, steps=4) == expected
    assert_equal(other, twin)


def test_a_meta_model_is_materialized_chunk_by_chunk():
    twin, theirs = build()
    values = {n: p.detach().clone() for n, p in twin.named_parameters()}
    with torch.device("meta"):
        model = Net()
    model.layers[1].requires_grad_(False)
    opt = adamw(groups(model))
    with pytest.raises(PlanError, match=r"'embed\.weight' has no values"):
        offload(model, opt, device="cpu", device_memory="80KB")
    with pytest.raises(PlanError, match="no device to run on"):
        offload(model, opt, device_memory="80KB", materialize=lambda name, _: values[name])
    model, ours = moved(model, opt, "auto", device="cpu", materialize=lambda name, _: values[name])
    assert train(model, ours) == train(twin, theirs)
    assert_equal(model, twin)


def test_an_optimizer_that_has_stepped_keeps_its_state():
    twin, theirs = build()
    model, opt = build()
    train(twin, theirs, steps=2)
    train(model, opt, steps=2)
    model, ours = moved(model, opt, "host")
    assert train(model, ours, steps=3) == train(twin, theirs, steps=3)
    assert_equal(model, twin)


def test_learning_rates_follow_a_scheduler():
    twin, theirs = build()
    model, ours = moved(*build(), "auto")
    for opt in (theirs, ours):
        opt.schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)

    def run(net, opt):
        found = []
        for _ in range(4):
            found += train(net, opt, steps=1)
            opt.schedule.step()
        return found

    assert run(model, ours) == run(twin, theirs)
    for opt in (theirs, ours):
        opt.load_state_dict(opt.state_dict())  # which makes new param groups
        opt.schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    assert run(model, ours) == run(twin, theirs)


def test_a_part_of_a_gpu_is_the_allocators():
    """What an error asks for is enough, and not a percent too much."""
    gpu = torch.device("cuda", 0)
    assert usable(10**9, torch.device("cpu")) == memory_for(10**9, torch.device("cpu")) == 10**9
    assert usable(6 * 2**30, gpu) == 6 * 2**30 - 2**29 and usable(40 * 10**9, gpu) == 388 * 10**8
    for nbytes in (1, 10**6, 10**9, 5_700_000_000, 6 * 10**9, 16_500_000_000, 17 * 10**9, 141 * 10**9):
        assert nbytes <= usable(memory_for(nbytes, gpu), gpu) <= nbytes * 1.001 + 2


def test_errors():
    model, opt = build()
    pointers = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(PlanError, match="residency"):
        offload(model, opt, residency="tape")
    with pytest.raises(PlanError, match="no fraction"):
        Tiers(1.5)
    with pytest.raises(PlanError, match="does not have"):
        offload(model, torch.optim.SGD(Net().parameters(), lr=0.1))
    with pytest.raises(PlanError, match="memory is not known"):
        offload(model, opt)
    with pytest.raises(PlanError, match=r"one layer at a time(.|\n)*more than [\d,]+ bytes(.|\n)*'layers.0'"):
        offload(model, opt, device_memory="5KB")
    with pytest.raises(PlanError, match=r"host memory is too small(.|\n)*[\d,]+ bytes"):
        offload(model, opt, device_memory="80KB", host_memory="1KB")
    assert [p.data_ptr() for p in model.parameters()] == pointers, "a refused model was touched"
    whole, plan = offload(*build(), residency="device", device_memory="15KB")
    with pytest.raises(PlanError, match="does not fit"):
        train(whole, plan)
    with pytest.raises(PlanError, match="no closure"):
        plan.step(lambda: None)


@pytest.mark.parametrize("residency", ["device", "host"])
def test_sums_of_several_backwards_are_counted_in_their_dtype(residency):
    model, ours = moved(*build(), residency, compute=torch.bfloat16)
    train(model, ours, steps=4, micro=1)
    trained = [h for h in ours._engine.chunks if h.step is not None]
    assert {h.sizes.sums for h in trained} == {0}
    train(model, ours, steps=1, micro=2)
    assert [h.sizes.sums for h in trained if h.name != "layers.2.up.weight"] == [
        4 * h.unit.chunk.numel for h in trained if h.name != "layers.2.up.weight"
    ]
    assert all((h.place is StepPlace.DEVICE) == (residency == "device") for h in trained)
