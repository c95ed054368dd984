"""Training is that of a plain loop, bit for bit, whatever is read and written between its backwards and steps."""

from __future__ import annotations

import contextlib
import copy
import random
import threading

import pytest
import torch
from offloaded import SLOW_HOST, adamw, groups
from plain import Failed, Plain, assert_same, fragile, loss_of
from torch import nn

from cai_gemini import Tiers, Tuning, offload
from cai_gemini.planning.disk_plan import OnDisk, chunk_bytes, host_bytes
from cai_mesh.errors import PlanError
from cai_mesh.storage import units

TUNING = Tuning(rates=SLOW_HOST)
OPTIMIZERS = {
    "adamw": adamw,
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=False),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=False),
}


def both(name="adamw", residency="host", compute=torch.float32, tuning=TUNING, **options):
    """An offloaded model, its optimizer and the plain loop beside them."""
    model = fragile()
    plain = Plain(model, OPTIMIZERS[name], compute)
    optimizer = OPTIMIZERS[name](groups(model))
    model, optimizer = offload(
        model, optimizer, residency=residency, device_memory="80KB", tuning=tuning, compute=compute, **options
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


def step(optimizer, plain):
    optimizer.step()
    plain.step()
    optimizer.zero_grad()


def warm(model, optimizer, plain):
    """The steps that are traced."""
    for at in range(2):
        backward(model, plain, at)
        step(optimizer, plain)


# -- what somebody does between a backward and its step ------------------------------------------------------------


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
        change_lr,
        change_betas,
        change_decay,
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
def test_what_is_done_between_backward_and_step_has_the_effect_it_has_without_offload(meddle, residency):
    model, optimizer, plain = both(residency=residency)
    warm(model, optimizer, plain)
    backward(model, plain, 0)
    meddle(model, optimizer, plain)
    step(optimizer, plain)
    assert_same(model, optimizer, plain)
    for at in range(1, 3):
        backward(model, plain, at)
        step(optimizer, plain)
    assert_same(model, optimizer, plain)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clipping_in_some_steps(name):
    model, optimizer, plain = both(name)
    for at in range(6):
        backward(model, plain, at, skip=at == 4)
        clip(optimizer, plain, 1e-2 if at % 2 else 1e9)
        step(optimizer, plain)
    assert_same(model, optimizer, plain)


class Signed(torch.optim.Optimizer):
    """Of nobody's library: state that appears late, an attribute of its own, one that is no tensor."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "after": 2})
        self.own = 0.5

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                if state["count"] > group["after"]:
                    before = state.get("before", torch.zeros_like(param))
                    state["before"] = param.grad.sign()  # another tensor in every step
                    param.add_(before, alpha=-group["lr"] * self.own)
                param.add_(param.grad, alpha=-group["lr"])


def of(kind, **options):
    return lambda params: kind(params, lr=1e-2, **options)


ELEMENTWISE = {
    "signed": Signed,
    "sgd": of(torch.optim.SGD),
    "nesterov": of(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adadelta": of(torch.optim.Adadelta),
    "adagrad": of(torch.optim.Adagrad, lr_decay=0.1),
    "adam without the fused kernel": of(torch.optim.Adam, amsgrad=True),
    "adamax": of(torch.optim.Adamax),
    "asgd": of(torch.optim.ASGD, t0=2),
    "nadam": of(torch.optim.NAdam),
    "radam": of(torch.optim.RAdam),
    "rmsprop": of(torch.optim.RMSprop, centered=True, momentum=0.5),
    "rprop": of(torch.optim.Rprop),
}


@pytest.mark.filterwarnings("ignore:.*is no disk but memory")
@pytest.mark.parametrize("residency", ["host", Tiers(0.5, 0.3), Tiers(disk=0.6)], ids=str)
@pytest.mark.parametrize("make", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_any_elementwise_optimizer(make, residency, tmp_path):
    """With hooks on the optimizer's steps, a schedule, unused parameters, and gradients of one and two backwards."""
    model = fragile()
    plain = Plain(model, make)
    model, optimizer = offload(
        model, make(groups(model)), residency=residency, device_memory="80KB", tuning=TUNING, nvme=tmp_path
    )
    seen = [], []
    for hooks, opt in zip(seen, (optimizer, plain.optimizer), strict=True):
        opt.register_step_pre_hook(lambda opt, *_, hooks=hooks: hooks.append(opt.param_groups[0]["lr"]))
        opt.register_step_post_hook(lambda opt, *_, hooks=hooks: hooks.append(len(opt.state)))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.7) for opt in (optimizer, plain.optimizer)]
    for at in range(5):
        for part in range(1 + at % 2):
            backward(model, plain, 10 * at + part, skip=at == 3)
        step(optimizer, plain)
        for schedule in schedules:
            schedule.step()
    assert_same(model, optimizer, plain)
    assert seen[0] == seen[1] and len(seen[0]) == 10


class Watching(torch.optim.SGD):
    """Looks, in every step, at what is in the parameters of the model."""

    watched, seen = (), []  # of those that are tried, too

    def step(self, closure=None):
        with torch._C.DisableTorchFunctionSubclass():
            found = [torch.Tensor.grad.__get__(param) for param in self.watched]
        self.seen += [any(gradient is not None for gradient in found)]
        return super().step(closure)


@pytest.mark.filterwarnings("ignore:.*is no disk but memory")
@pytest.mark.parametrize("residency", ["host", Tiers(1.0, 0.5), Tiers(disk=0.6)], ids=str)
def test_no_step_puts_a_gradient_into_a_parameter_or_calls_its_hooks(residency, tmp_path):
    model, calls = fragile(), []
    inner = Watching(groups(model), lr=0.1)
    inner.register_step_pre_hook(lambda *_: calls.append(1))
    model, optimizer = offload(
        model, inner, residency=residency, device_memory="80KB", tuning=TUNING, nvme=tmp_path
    )
    inner.watched, inner.seen = list(model.parameters()), []
    for at in range(3):
        loss_of(model, at, False).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    assert len(inner.seen) == 3 * 5 and not any(inner.seen)
    assert not calls


def test_a_gradient_that_somebody_holds_is_stepped_with_as_he_leaves_it():
    """What was read between the backwards of a step may be written to after the last of them."""
    model, optimizer, plain = both()
    warm(model, optimizer, plain)
    backward(model, plain, 0)
    views = [p.grad for p in model.parameters() if p.grad is not None]
    backward(model, plain, 1)
    optimizer._engine.worker.submit(lambda: None).result()  # the sum is there
    for gradient in views:
        gradient.mul_(0.5)
    plain.scale(0.5)
    step(optimizer, plain)
    assert_same(model, optimizer, plain)


def test_gradients_that_were_read_in_the_dtype_of_computation_are_stepped_with_in_that_of_masters():
    model, optimizer, plain = both("sgd", compute=torch.bfloat16)
    for at in range(4):
        backward(model, plain, at)
        read_gradients(model, optimizer, plain)
        step(optimizer, plain)
    assert_same(model, optimizer, plain)


def test_dropped_gradients_leave_everything_as_it_was():
    """As a loss scale drops them after an overflow."""
    model, optimizer, plain = both()
    warm(model, optimizer, plain)
    for drop in (optimizer.zero_grad, model.zero_grad):
        for factor in (float("inf"), float("nan")):
            backward(model, plain, 0, factor=factor)
            assert not torch.isfinite(optimizer.clip_grad_norm_(1.0))
            drop()
            plain.zero_grad()
            assert_same(model, optimizer, plain)
    optimizer.zero_grad()
    backward(model, plain, 1)
    step(optimizer, plain)
    assert_same(model, optimizer, plain)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_steps_with_any_number_of_backwards(compute):
    model, optimizer, plain = both(compute=compute)
    for at, micro in enumerate([2, 3, 1, 1, 3]):
        for part in range(micro):
            backward(model, plain, 10 * at + part)
        step(optimizer, plain)
        assert_same(model, optimizer, plain)


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
    assert optimizer._engine.ledger.nbytes["gradients"] == 0


def test_what_a_step_raises_in_the_background_is_raised(monkeypatch):
    model, optimizer, plain = both()
    warm(model, optimizer, plain)

    def broken(*_):
        raise OSError("no such memory")

    backward(model, plain, 0)
    monkeypatch.setattr(optimizer._engine.chunks[0].step, "run", broken)
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
    model, optimizer, plain = both(draw.choice(list(OPTIMIZERS)), residency, compute)
    micro, most = draw.choice([1, 2]), draw.choice([1e-2, 1.0, 1.5, 1e9])
    for at in range(9):
        for part in range(micro if draw.random() < 0.7 else draw.choice([1, 2, 3])):
            backward(model, plain, 100 * at + part, skip=draw.random() < 0.3)
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


# -- host memory ---------------------------------------------------------------------------------------------------


def copied_through(optimizer):
    """Bytes of host memory for copies, in use or not; what is in use is gradients and weights."""
    pool, chunks = optimizer._engine.copies.host, optimizer._engine.chunks
    free = sum(t.nbytes for (_, _, copies), some in pool._free.items() for t in some if copies)
    found = {}
    for chunk in chunks:
        for tensor in (
            chunk.host_weights.tensor,
            chunk.gradients.gradient and chunk.gradients.gradient.tensor,
        ):
            if tensor is not None:
                found[tensor.data_ptr()] = tensor.nbytes
    assert set(found) >= {at for at, copies in pool._taken.items() if copies}
    return free + sum(found.values())


@pytest.mark.parametrize("residency", ["host", Tiers(1.0, 0.0)], ids=str)
def test_host_memory_is_what_was_counted(residency):
    model, optimizer, _ = both(residency=residency)
    sizes, most = chunk_bytes(units(fragile()), torch.float32, optimizer.inner), 0
    for at in range(4):
        loss_of(model, at, False).backward()
        most = max(most, copied_through(optimizer))
        optimizer.step()
        optimizer.zero_grad()
        optimizer.wait()
    state = sum(c.master + c.state for c in sizes)
    assert most == host_bytes(sizes, OnDisk()) - state
    assert optimizer.placement().host_bytes == most + state


def test_host_memory_is_asked_for_it():
    least = host_bytes(chunk_bytes(units(fragile()), None, adamw(groups(fragile()))), OnDisk())
    both(host_memory=least)
    with pytest.raises(PlanError, match=r"host memory is too small(.|\n)*" + f"{least:,}"):
        both(host_memory=least - 1)


def test_host_memory_does_not_grow_with_steps():
    """Weights, and of each backward of a step what comes of it: sums lie elsewhere and are given back."""
    model, optimizer, plain = both(compute=torch.bfloat16)
    most = 0
    for at in range(16):
        for part in range(1 + at % 2):
            backward(model, plain, 10 * at + part)
        if at % 3 == 0:
            assert model.head.weight.grad is not None
        step(optimizer, plain)
        optimizer.wait()
        most = max(most, copied_through(optimizer))
        assert all(optimizer._engine.copies.host._taken.values()), "sums are given back"
    chunks = optimizer._engine.chunks
    assert most <= sum(chunk.sizes.weights * (3 if chunk.trains else 1) for chunk in chunks)


# -- what is late or fails -----------------------------------------------------------------------------------------


def test_sums_that_are_not_there_yet():
    """What comes first of a gradient is given up once the sum is there."""
    model, optimizer, plain = both(compute=torch.bfloat16)
    for at in range(5):
        gate = threading.Event()
        optimizer.wait()
        optimizer._engine.worker.submit(gate.wait)
        for part in range(2):
            backward(model, plain, 10 * at + part)
        step(optimizer, plain)
        gate.set()
    assert_same(model, optimizer, plain)


def test_steps_that_are_awaited_at_once_and_steps_without_gradients():
    model, optimizer, plain = both(tuning=Tuning(rates=SLOW_HOST, overlap=False))
    for at in range(5):
        backward(model, plain, at)
        step(optimizer, plain)
        assert all(chunk._stepping is None for chunk in optimizer._engine.chunks)
        optimizer.step()
    assert_same(model, optimizer, plain)


def test_a_forward_that_fails_half_way():
    model, optimizer, plain = both()
    for at in range(4):
        backward(model, plain, at)
        step(optimizer, plain)
        with pytest.raises(RuntimeError), torch.no_grad():
            model.layers[3](torch.zeros(1, 2))
        optimizer.step()
    assert_same(model, optimizer, plain)


@pytest.mark.parametrize("residency", ["host", Tiers(streamed=1.0)], ids=str)
def test_what_a_step_raised_is_not_lost_where_its_weights_are_not_used(residency, monkeypatch):
    model, optimizer, plain = both(residency=residency)
    warm(model, optimizer, plain)
    chunk = next(chunk for chunk in optimizer._engine.chunks if chunk.trains)

    def broken(*_):
        raise OSError("no such memory")

    backward(model, plain, 0)
    with monkeypatch.context() as patch:
        patch.setattr(chunk.step, "adam", broken)
        optimizer.step()
        with contextlib.suppress(OSError):
            chunk._stepping.result()
    optimizer.zero_grad()
    chunk.set_gradient(0, torch.zeros(chunk.unit.kept[0].numel()))
    with pytest.raises(OSError, match="no such memory"):
        optimizer.step()
