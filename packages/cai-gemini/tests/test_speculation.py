"""Steps taken during backward stand or are undone: training is always that of the plain loop, bit for bit."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from dataclasses import replace

import pytest
import torch
from offloaded import SLOW_HOST, adamw, groups
from plain import Failed, Plain, assert_same, fragile, loss_of
from torch import nn

from cai_gemini import Speculation, Tiers, Tuning, offload
from cai_gemini.policy import Early, Plan, Sizes, early_steps
from cai_gemini.simulate import Rates, Step, floor, simulate
from cai_gemini.speculation import Image, same
from cai_gemini.trace import Trace, Use
from cai_mesh.errors import PlanError

OPTIMIZERS = {
    "adamw": adamw,
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=False),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=False),
}
CHUNKS = 4  # blocks that are trained; a step that leaves one out has one less


def both(name="adamw", residency="host", compute=torch.float32, speculate="1GB", tuning=None):
    """An offloaded model, its optimizer and the plain loop beside them."""
    model = fragile()
    plain = Plain(model, OPTIMIZERS[name], compute)
    optimizer = OPTIMIZERS[name](groups(model))
    tuning = tuning or Tuning(rates=SLOW_HOST, speculate=speculate)
    model, optimizer = offload(
        model, optimizer, residency=residency, device_memory="80KB", tuning=tuning, compute=compute
    )
    return model, optimizer, plain


def backward(model, plain, seed, skip=False, factor=1.0):
    loss = loss_of(model, seed, skip, factor)
    loss.backward()
    assert loss.item() == pytest.approx(plain.backward(seed, skip, factor), rel=0, abs=0, nan_ok=True)


def clip(optimizer, plain, most):
    norm = optimizer.clip_grad_norm_(most)
    assert float(norm) == pytest.approx(float(plain.norm()), rel=1e-4)
    plain.scale(float((most / (norm + 1e-6)).clamp(max=1.0)))


def caught_up(optimizer):
    """Every early step that was submitted has been taken."""
    optimizer._engine.worker.submit(lambda: None).result()


def step(optimizer, plain):
    optimizer.step()
    plain.step()
    optimizer.zero_grad()


def warm(model, optimizer, plain, micro=1):
    """The steps until early ones are taken: two are traced, the second tells how many backwards there are."""
    for at in range(2):
        for part in range(micro):
            backward(model, plain, 100 * at + part)
        step(optimizer, plain)
    assert optimizer.speculation == Speculation()


def pending(optimizer):
    return [h.name for h in optimizer._engine.helds if h.early._step is not None]


# -- what stands and what does not ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_clipping_every_early_step_stands(name):
    model, optimizer, plain = both(name)
    warm(model, optimizer, plain)
    for at in range(3):
        backward(model, plain, at)
        assert len(pending(optimizer)) == CHUNKS
        caught_up(optimizer)
        clip(optimizer, plain, 1e9)
        step(optimizer, plain)
    assert optimizer.speculation == Speculation(3 * CHUNKS, 0)
    assert_same(model, optimizer, plain)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clipped_steps_are_undone_and_taken_again(name):
    model, optimizer, plain = both(name)
    warm(model, optimizer, plain)
    for at in range(4):
        backward(model, plain, at, skip=at == 2)
        caught_up(optimizer)
        clip(optimizer, plain, 1e-2 if at % 2 else 1e9)
        step(optimizer, plain)
    assert optimizer.speculation == Speculation(2 * CHUNKS - 1, 2 * CHUNKS)
    assert_same(model, optimizer, plain)


def test_a_step_that_has_not_begun_is_not_taken_early():
    model, optimizer, plain = both()
    warm(model, optimizer, plain)
    gate = threading.Event()
    optimizer._engine.worker.submit(gate.wait)
    backward(model, plain, 0)
    optimizer.step()
    plain.step()
    gate.set()
    assert optimizer.speculation == Speculation()
    assert_same(model, optimizer, plain)


def change_lr(_, optimizer, plain):
    for opt in (optimizer, plain.optimizer):
        for group in opt.param_groups:
            group["lr"] *= 0.5


def change_betas(_, optimizer, plain):
    for opt in (optimizer, plain.optimizer):
        opt.param_groups[0]["betas"] = (0.5, 0.9)


def change_decay(_, optimizer, plain):
    for opt in (optimizer, plain.optimizer):
        opt.param_groups[1]["weight_decay"] = 0.3


@pytest.mark.parametrize(
    ("change", "undone"), [(change_lr, CHUNKS), (change_betas, CHUNKS), (change_decay, CHUNKS)]
)
def test_other_hyperparameters_undo_it(change, undone):
    model, optimizer, plain = both()
    warm(model, optimizer, plain)
    backward(model, plain, 0)
    caught_up(optimizer)
    change(model, optimizer, plain)
    step(optimizer, plain)
    assert optimizer.speculation == Speculation(CHUNKS - undone, undone)
    assert_same(model, optimizer, plain)


def read_gradients(model, _, plain):
    for param, wanted in zip(model.parameters(), plain.gradients, strict=True):
        assert (param.grad is None) == (wanted is None)
        assert wanted is None or torch.equal(param.grad.view(wanted.shape), wanted)


def write_gradients(model, _, plain):
    for param, theirs in zip(model.parameters(), plain.gradients, strict=True):
        if theirs is not None:
            param.grad.data.mul_(0.5)  # unseen by version counters
            theirs.mul_(0.5)


def put_gradients(model, _, plain):
    for i, param in enumerate(model.parameters()):
        if plain.gradients[i] is not None:
            param.grad = torch.full_like(param, 0.1)
            plain.gradients[i] = torch.full_like(plain.gradients[i], 0.1)


def drop_some_gradients(model, _, plain):
    for i, (name, param) in enumerate(model.named_parameters()):
        if "up" in name or "embed" in name:
            param.grad, plain.gradients[i] = None, None


def torchs_clip(model, _, plain):
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    theirs = [g for g in plain.gradients if g is not None]
    for holder, gradient in zip(holders := [torch.empty_like(g) for g in theirs], theirs, strict=True):
        holder.grad = gradient
    nn.utils.clip_grad_norm_(holders, 0.05)


def read_parameters(model, _, plain):
    for param, master in zip(model.parameters(), plain.masters, strict=True):
        assert torch.equal(param.detach().view(master.shape), master.detach())


def write_parameters(model, _, plain):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
        for param in plain.masters:
            param.mul_(0.5)
    plain.show(plain.masters)


def read_state(model, optimizer, plain):
    assert_same(model, optimizer, plain)
    assert optimizer.state


def write_state(_, optimizer, plain):
    for opt in (optimizer, plain.optimizer):
        for state in opt.state.values():
            state["exp_avg"].mul_(0.25)


def load_state(_, optimizer, plain):
    for opt in (optimizer, plain.optimizer):
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))


def evaluate(model, _, plain):
    with torch.no_grad():
        assert loss_of(model, 77, False).item() == loss_of(plain.model, 77, False).item()


def one_more_backward(model, _, plain):
    backward(model, plain, 55)


@pytest.mark.parametrize(
    "meddle",
    [
        read_gradients,
        write_gradients,
        put_gradients,
        drop_some_gradients,
        torchs_clip,
        read_parameters,
        write_parameters,
        read_state,
        write_state,
        load_state,
        evaluate,
        one_more_backward,
    ],
)
@pytest.mark.parametrize("residency", ["host", Tiers(1.0, 0.0)], ids=str)
def test_who_looks_between_backward_and_step_sees_what_was_before(meddle, residency):
    model, optimizer, plain = both(residency=residency)
    warm(model, optimizer, plain)
    backward(model, plain, 0)
    caught_up(optimizer)
    meddle(model, optimizer, plain)
    assert not pending(optimizer)
    assert optimizer.speculation == Speculation(0, CHUNKS)
    step(optimizer, plain)
    assert_same(model, optimizer, plain)
    for at in range(1, 3):
        backward(model, plain, at)
        step(optimizer, plain)
    assert_same(model, optimizer, plain)


def test_a_gradient_that_somebody_holds_is_not_stepped_with_early():
    """What was read between the backwards of a step may be written to after the last of them."""
    model, optimizer, plain = both()
    warm(model, optimizer, plain, micro=2)
    backward(model, plain, 0)
    held = [p.grad for p in model.parameters() if p.grad is not None]
    backward(model, plain, 1)
    assert not pending(optimizer)
    caught_up(optimizer)  # with the sum
    for gradient in held:
        gradient.mul_(0.5)
    plain.scale(0.5)
    step(optimizer, plain)
    assert_same(model, optimizer, plain)


def test_the_first_step_of_a_chunk_is_not_taken_early():
    """It makes Adam's state, which a parameter that was never stepped does not have."""
    model, optimizer, plain = both()
    for at in range(2):
        backward(model, plain, at)
        for i, (name, param) in enumerate(model.named_parameters()):
            if "layers.2" in name:
                param.grad, plain.gradients[i] = None, None
        step(optimizer, plain)
    backward(model, plain, 2)
    assert pending(optimizer) == [f"layers.{i}.up.weight" for i in (0, 3, 4)]
    caught_up(optimizer)
    assert_same(model, optimizer, plain)
    assert optimizer.state_dict()["state"].keys() == plain.optimizer.state_dict()["state"].keys()
    step(optimizer, plain)
    assert_same(model, optimizer, plain)


def test_gradients_that_were_read_in_the_dtype_of_computation_are_stepped_with_in_that_of_masters():
    model, optimizer, plain = both("sgd", compute=torch.bfloat16)
    for at in range(4):
        backward(model, plain, at)
        read_gradients(model, optimizer, plain)
        step(optimizer, plain)
    assert_same(model, optimizer, plain)


def test_dropped_gradients_undo_it():
    model, optimizer, plain = both()
    warm(model, optimizer, plain)
    for drop in (optimizer.zero_grad, model.zero_grad):
        backward(model, plain, 0, factor=float("inf"))  # as an overflow that a loss scale skips
        assert len(pending(optimizer)) == CHUNKS
        caught_up(optimizer)
        assert not torch.isfinite(optimizer.clip_grad_norm_(1.0))
        drop()
        plain.zero_grad()
        assert not pending(optimizer)
        assert_same(model, optimizer, plain)
    optimizer.zero_grad()
    backward(model, plain, 1)
    assert len(pending(optimizer)) == CHUNKS, "a step that was skipped counts no backward"
    step(optimizer, plain)
    assert_same(model, optimizer, plain)


def test_a_clip_by_a_norm_that_is_not_finite_destroys_nothing_early():
    model, optimizer, plain = both()
    warm(model, optimizer, plain)
    saved = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in model.parameters()]
    backward(model, plain, 0, factor=float("nan"))
    caught_up(optimizer)
    optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(saved[1], model.parameters(), strict=True))
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(v, after[i][k]) for i, s in saved[0]["state"].items() for k, v in s.items())


# -- how many backwards a step has ---------------------------------------------------------------------------------


def test_the_last_backward_is_that_of_the_step_before():
    model, optimizer, plain = both()
    warm(model, optimizer, plain, micro=2)
    early = []
    for at, micro in enumerate([2, 3, 1, 1, 3]):
        for part in range(micro):
            backward(model, plain, 10 * at + part)
            early.append(bool(pending(optimizer)))
        caught_up(optimizer)
        clip(optimizer, plain, 1e9)
        step(optimizer, plain)
        assert_same(model, optimizer, plain)
    assert early == [False, True, False, True, False, False, True, True, False, False]


def test_it_is_in_time_with_the_gradients():
    """The chunks of the last blocks are stepped while the first blocks' backward is still to come."""
    model, optimizer, plain = both()
    warm(model, optimizer, plain)
    seen = []
    model.layers[0].register_full_backward_pre_hook(lambda *_: seen.append(pending(optimizer)))
    backward(model, plain, 0)
    assert seen == [[f"layers.{i}.up.weight" for i in (2, 3, 4)]]


def test_a_backward_that_fails_half_way():
    model, optimizer, plain = both()
    warm(model, optimizer, plain)
    for fails in (3, 2, 0):
        model.fails = plain.model.fails = fails
        for run in (lambda: loss_of(model, 5, False).backward(), lambda: plain.backward(5, False)):
            with pytest.raises(Failed):
                run()
        model.fails = plain.model.fails = None
        optimizer.zero_grad()
        plain.zero_grad()
        assert_same(model, optimizer, plain)
        backward(model, plain, fails)
        step(optimizer, plain)
        assert_same(model, optimizer, plain)
    assert optimizer._engine.ledger.held["gradients"] == 0


def test_an_early_step_that_fails_is_undone_as_far_as_it_came(monkeypatch):
    model, optimizer, plain = both()
    warm(model, optimizer, plain)
    from cai_gemini import chunk_step

    whole, left = chunk_step.ChunkStep.adam, [7]

    def breaks(*args):
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError("no more")
        whole(*args)

    monkeypatch.setattr(chunk_step.ChunkStep, "adam", breaks)
    backward(model, plain, 0)
    caught_up(optimizer)
    step(optimizer, plain)
    assert optimizer.speculation == Speculation(CHUNKS - 1, 1)
    assert_same(model, optimizer, plain)


def test_what_the_second_taking_raises_is_raised(monkeypatch):
    model, optimizer, plain = both()
    warm(model, optimizer, plain)

    def broken(*_):
        raise OSError("no such memory")

    monkeypatch.setattr(optimizer._engine.helds[0].step, "run", broken)
    backward(model, plain, 0)
    caught_up(optimizer)
    optimizer.step()
    with pytest.raises(OSError, match="no such memory"):
        optimizer.wait()


def test_parameters_written_outside_a_step_are_copied_to_the_device():
    """Also where the next step leaves them out: those of the chunk that have no gradient."""
    model, optimizer, plain = both()
    warm(model, optimizer, plain)
    backward(model, plain, 0)
    write_parameters(model, optimizer, plain)
    drop_some_gradients(model, optimizer, plain)
    step(optimizer, plain)
    backward(model, plain, 1)  # compares losses
    assert_same(model, optimizer, plain)


# -- anything in any order -----------------------------------------------------------------------------------------

MEDDLING = [
    *[None] * 10, change_lr, change_decay, read_gradients, write_gradients, drop_some_gradients, torchs_clip,
    read_parameters, write_parameters, read_state, load_state, evaluate,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_any_loop_is_the_plain_one_bit_for_bit(seed):
    draw = random.Random(seed)
    compute = draw.choice([torch.float32, torch.bfloat16])
    residency = draw.choice(["host", "host", "auto", Tiers(0.5, 0.3), Tiers(1.0, 0.0)])
    model, optimizer, plain = both(
        draw.choice(list(OPTIMIZERS)), residency, compute, draw.choice([4000, "1GB", "1GB"])
    )
    micro, most = draw.choice([1, 2]), draw.choice([1e-2, 1.0, 1.5, 1e9])
    for at in range(9):
        for part in range(micro if draw.random() < 0.7 else draw.choice([1, 2, 3])):
            backward(model, plain, 100 * at + part, skip=draw.random() < 0.3)
        if draw.random() < 0.7:
            caught_up(optimizer)
        meddle = draw.choice(MEDDLING)
        if meddle is not None and (meddle is not read_state or at > 1):
            meddle(model, optimizer, plain)
        if draw.random() < 0.15:
            optimizer.zero_grad()
            plain.zero_grad()
            continue
        if meddle is not torchs_clip and draw.random() < 0.8:
            clip(optimizer, plain, most)
        step(optimizer, plain)
        if draw.random() < 0.3:
            assert_same(model, optimizer, plain)
    assert_same(model, optimizer, plain)


# -- memory --------------------------------------------------------------------------------------------------------


def images(optimizer):
    return {h.name: h.early._image.nbytes for h in optimizer._engine.helds if h.early._image is not None}


def test_before_images_keep_to_their_budget_and_are_used_again():
    sizes = {}
    for budget in ("1GB", 20000):
        model, optimizer, plain = both(speculate=budget)
        warm(model, optimizer, plain)
        for at in range(3):
            backward(model, plain, at)
            step(optimizer, plain)
            sizes[budget], earlier = images(optimizer), sizes.get(budget)
            assert earlier in (None, sizes[budget])
        assert_same(model, optimizer, plain)
    assert len(sizes["1GB"]) == CHUNKS
    assert list(sizes[20000]) == [f"layers.{i}.up.weight" for i in (3, 4)], "whose gradients come first"
    assert all(size >= 9216 for size in sizes[20000].values())
    slack = sum(64 * len(list(model.layers[i].parameters())) for i in (3, 4))
    assert sum(sizes[20000].values()) <= 20000 + slack


def test_a_chunk_that_is_not_stepped_early_any_more_keeps_no_image():
    model, optimizer, plain = both()
    warm(model, optimizer, plain)
    backward(model, plain, 0)
    step(optimizer, plain)
    engine = optimizer._engine
    engine._schedule = replace(engine._schedule, early=replace(engine._schedule.early, images=20000))
    engine._adopt(engine.plan)
    assert len(images(optimizer)) == 2


def test_off_by_default():
    model, optimizer, plain = both(tuning=Tuning(rates=SLOW_HOST))
    warm(model, optimizer, plain)
    backward(model, plain, 0)
    assert not pending(optimizer)


def test_host_memory_counts_them():
    def moved(host_memory, speculate):
        model, tuning = fragile(), Tuning(rates=SLOW_HOST, speculate=speculate)
        offload(model, adamw(groups(model)), device_memory="80KB", host_memory=host_memory, tuning=tuning)

    _, optimizer, _ = both()
    states = sum(held.sizes.state for held in optimizer._engine.helds)
    for speculate, images in ((0, 0), (10000, 10000), ("1GB", states)):
        least = 70_144 + images
        moved(least, speculate)
        with pytest.raises(PlanError, match=r"host memory is too small(.|\n)*"):
            moved(least - 1, speculate)


def test_errors():
    with pytest.raises(PlanError, match="not a size"):
        Tuning(speculate="much")
    with pytest.raises(PlanError, match="not a size"):
        Tuning(speculate=-1)


def test_images_restore_tensors_and_mappings():
    image, one, two = Image(64), torch.arange(5.0), torch.arange(100)
    state = {"a": {"sum": torch.ones(3), "step": 1}}
    image.keep(one)
    image.keep(two)  # more than there is room for
    image.keep_state(state, "a")
    image.keep_state(state, "b")
    one.zero_()
    image.keep(one)
    two.zero_()
    state["a"]["sum"].zero_()
    state["a"] |= {"step": 2, "more": 3}
    state["b"] = {}
    image.restore()
    assert torch.equal(one, torch.arange(5.0)) and torch.equal(two, torch.arange(100))
    assert torch.equal(state["a"].pop("sum"), torch.ones(3)) and state == {"a": {"step": 1}}
    one.zero_()
    image.restore()
    assert not one.any(), "an image is restored once"


def test_hyperparameters_are_compared_deeply():
    group = {"lr": torch.tensor(0.1), "betas": (0.9, torch.tensor(0.5)), "fused": None}
    assert same([(group, [0, 1])], [(copy.deepcopy(group), [0, 1])])
    assert not same([(group, [0, 1])], [(group, [0])])
    for name, value in [("lr", torch.tensor(0.2)), ("lr", 0.1), ("betas", (0.9, 0.4)), ("fused", True)]:
        assert not same(group, {**group, name: value})
    assert not same(group, {"lr": 0.1}) and not same((1,), (1, 2))


# -- time ----------------------------------------------------------------------------------------------------------

RATES = Rates(to_device=25.0, to_host=15.0, both=18.0, host_step=100.0, device_step=4000.0)


def palindrome(blocks, seconds):
    uses = [Use(c, False) for c in range(blocks)] + [Use(c, True) for c in reversed(range(blocks))]
    return Trace(tuple(uses), (0,) * len(uses), (seconds,) * len(uses))


def test_which_chunks_are_stepped_early():
    trace, sizes = palindrome(5, 1.0), [Sizes(10, 10, s) for s in (60, 60, 0, 60, 90)]
    nothing = Plan(frozenset(range(5)), frozenset())

    def found(images, able=range(5), plan=nothing):
        return early_steps(trace, sizes, plan, Early(images, frozenset(able)))

    assert found(0) == set()
    assert found(90) == {4}
    assert found(89) == {3}
    assert found(1000) == {0, 1, 3, 4}
    assert found(1000, [0, 2]) == {0}
    assert found(1000, plan=Plan(nothing.weights, frozenset({4}))) == {0, 1, 3}


def test_early_steps_shorten_a_step_that_waits_for_the_host():
    """Eight chunks of a second of compute a use; the host takes 1.5 seconds for each, 15/7 with an image."""
    trace, sizes = palindrome(8, 1.0), [Sizes(1, 1, 6)] * 8
    plan, parameters = Plan(frozenset(range(8)), frozenset()), [150 / 28] * 8
    times = []
    for images, expected in ((0, []), (12, [7, 6]), (48, [7, 6, 5, 4])):
        sized = Step(parameters, early=Early(images, frozenset(range(8))))
        seconds, lanes = simulate(trace, sizes, plan, 10**6, RATES, sized)
        assert seconds >= floor(trace, sizes, plan, RATES, sized) * (1 - 1e-9)
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(lanes.host))
        backward = next(span[0] for span in lanes.compute if span[2] == 7) + 1.0
        end = max(span[1] for span in lanes.compute)
        assert [chunk for begin, _, chunk in lanes.host if backward <= begin < end] == expected
        times.append(seconds)
    assert max(times[1:]) < times[0]


def test_a_gradient_that_comes_twice_is_stepped_with_when_it_is_complete():
    uses = [Use(0, False), Use(1, False), Use(1, True), Use(0, True), Use(1, True), Use(0, True)]
    trace, sizes = Trace(tuple(uses), (0,) * 6, (1.0,) * 6), [Sizes(1, 1, 6)] * 2
    plan, early = Plan(frozenset({0, 1}), frozenset()), Early(12, frozenset({0, 1}))
    _, lanes = simulate(trace, sizes, plan, 100, RATES, Step([1, 1], early=early))
    assert [chunk for *_, chunk in lanes.host] == [1, 0]
    assert lanes.host[0][0] >= 5.0
