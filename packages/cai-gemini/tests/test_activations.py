"""Block inputs on the host change where activations wait, not a bit of losses and gradients."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from offloaded import SLOW_HOST, adamw
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from cai_gemini import Tuning, offload, offload_activations
from cai_gemini.activations.host_store import HostStore, is_dense
from cai_gemini.memory.copies import Copies
from cai_mesh.errors import PlanError
from cai_mesh.storage import blocks

DEPTH = 4


class Block(nn.Module):
    """Several inputs: positional, by keyword, inside a tuple, of integers, and one that is no tensor."""

    def __init__(self, dropout):
        super().__init__()
        self.inner, self.mix = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.calls, self.inputs = 0, []

    def forward(self, x, *, pair=(None, None), ids=None, name=""):
        self.calls += 1
        self.inputs.append(StorageWeakRef(x.untyped_storage()))
        assert name == "block"
        scale, memory = pair
        y = self.dropout(torch.tanh(self.inner(x)))
        if memory is not None:
            y = y * scale + self.mix(memory) + ids.unsqueeze(-1)
        return x + y


class Net(nn.Module):
    def __init__(self, dropout=0.0, twice=False, several=True):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 6)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(DEPTH))
        self.twice, self.several = twice, several

    def forward(self, ids):
        x = self.embed(ids)
        memory, scale = x.sin(), torch.full((6,), 0.5)
        options = {"pair": (scale, memory), "ids": ids} if self.several else {}
        for layer in self.layers:
            x = layer(x, name="block", **options)
            if self.twice:
                x = layer(x.transpose(0, 1), name="block").transpose(0, 1)
        return x.square().mean()


def plain_recompute(model):
    for block in blocks(model):
        if block is not model:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def batch(seed=0, length=5):
    return torch.randint(0, 9, (3, length), generator=torch.Generator().manual_seed(seed))


def passes(model, autocast=False, microbatches=2):
    """Losses, gradients and the random state after two steps' backwards, all forwards of a step first."""
    torch.manual_seed(1)
    losses = []
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            now = [model(batch(microbatches * step + i)) for i in range(microbatches)]
        for loss in now:
            loss.backward()
        losses += [loss.item() for loss in now]
    return losses, [p.grad for p in model.parameters()], torch.get_rng_state()


def assert_same(got, expected):
    assert got[0] == expected[0]
    for a, b in zip(got[1], expected[1], strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
    assert torch.equal(got[2], expected[2])


@pytest.mark.parametrize("kind", [{}, {"dropout": 0.4}, {"twice": True}, {"several": False}], ids=str)
@pytest.mark.parametrize(("keep", "in_flight"), [(0, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("autocast", [False, True])
def test_bit_for_bit_plain_recompute(kind, keep, in_flight, autocast):
    twin, model = Net(**kind), Net(**kind)
    plain_recompute(twin)
    done = offload_activations(model, keep=keep, in_flight=in_flight, smallest=0)
    assert_same(passes(model, autocast), passes(twin, autocast))
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in twin.named_parameters()]
    assert [layer.calls for layer in model.layers] == [layer.calls for layer in twin.layers]
    assert done.host_bytes > 0


def test_inputs_need_no_gradient_and_blocks_are_frozen():
    twin, model = Net(), Net()
    for net in (twin, model):
        net.embed.requires_grad_(False)
        net.layers[0].requires_grad_(False)
        net.layers[2].requires_grad_(False)
    plain_recompute(twin)
    offload_activations(model, smallest=0)
    assert_same(passes(model), passes(twin))


def alive_inputs(model):
    return [not layer.inputs[0].expired() for layer in model.layers]


@pytest.mark.parametrize(
    ("keep", "in_flight", "alive"),
    [
        (0, 1, [0, 0, 0, 1]),  # the last one still leaves
        (1, 1, [0, 0, 0, 1]),
        (1, 2, [0, 0, 1, 1]),
        (2, 1, [0, 0, 1, 1]),
        (DEPTH, 1, [1, 1, 1, 1]),
    ],
)
def test_inputs_leave_the_device_in_forward(keep, in_flight, alive):
    model = Net(several=False)
    offload_activations(model, keep=keep, in_flight=in_flight, smallest=0)
    loss = model(batch())
    assert alive_inputs(model) == [bool(a) for a in alive]
    loss.backward()
    del loss
    assert not any(alive_inputs(model))


def test_small_inputs_stay():
    model = Net(several=False)
    done = offload_activations(model, smallest=3 * 5 * 6 * 4 + 1)
    loss = model(batch())
    assert all(alive_inputs(model)) and done.host_bytes == 0
    loss.backward()


@pytest.fixture
def log(monkeypatch):
    """What is copied, in order: pieces of host memory are numbered as they are filled."""
    events, numbers = [], {}

    def logged(kind, original, host):
        def copy_(self, *args, **kwargs):
            piece = args[host].data_ptr()
            if kind == "leave":
                numbers[piece] = len(events)
            events.append((kind, numbers[piece]))
            return original(self, *args, **kwargs)

        return copy_

    monkeypatch.setattr(Copies, "to_host", logged("leave", Copies.to_host, 0))
    monkeypatch.setattr(Copies, "to_device", logged("bring", Copies.to_device, 1))
    return events


@pytest.mark.parametrize(
    ("in_flight", "expected"),
    [
        (1, ["run 3", "bring 2", "run 2", "bring 1", "run 1", "bring 0", "run 0"]),
        (2, ["bring 2", "run 3", "bring 1", "run 2", "bring 0", "run 1", "run 0"]),
        (3, ["bring 2", "bring 1", "run 3", "bring 0", "run 2", "run 1", "run 0"]),
    ],
)
def test_the_block_before_comes_while_one_recomputes(log, in_flight, expected):
    model = Net(several=False)
    offload_activations(model, in_flight=in_flight, smallest=0)
    for step in range(2):
        loss = model(batch(step))
        assert log == [("leave", 0), ("leave", 1), ("leave", 2)]
        log.clear()
        handles = [
            layer.inner.register_forward_pre_hook(lambda _m, _a, i=i: log.append(("run", i)))
            for i, layer in enumerate(model.layers)
        ]
        loss.backward()
        assert [f"{kind} {i}" for kind, i in log] == expected
        for handle in handles:
            handle.remove()
        log.clear()


def test_what_all_blocks_are_given_is_copied_once_each_way(log):
    model = Net()
    offload_activations(model, keep=0, smallest=3 * 5 * 6 * 4)
    model(batch()).backward()
    # the inputs of four blocks, and the memory they share
    assert sum(kind == "leave" for kind, _ in log) == sum(kind == "bring" for kind, _ in log) == DEPTH + 1


def test_host_memory_is_reused():
    model = Net(several=False)
    done = offload_activations(model, keep=0, smallest=0)
    model(batch()).backward()
    held = done.host_bytes
    assert held == DEPTH * 3 * 5 * 6 * 4
    for step in range(3):
        model(batch(step)).backward()
        assert done.host_bytes == held
    for length in (9, 4, 3, 9, 7):  # never more than the longest would need
        model(batch(0, length)).backward()
    assert done.host_bytes == DEPTH * 3 * 9 * 6 * 4
    model(batch(0, 9))  # a forward without a backward
    model(batch(0, 9)).backward()
    assert done.host_bytes == DEPTH * 3 * 9 * 6 * 4


def test_nothing_happens_without_gradients_or_in_eval():
    model = Net(dropout=0.4)
    done = offload_activations(model, smallest=0)
    with torch.no_grad():
        model(batch())
    model.eval()
    model(batch()).backward()
    assert done.host_bytes == 0
    assert [layer.calls for layer in model.layers] == [2] * DEPTH


def test_backward_twice_and_a_pass_that_ends_half_way():
    twin, model = Net(dropout=0.4), Net(dropout=0.4)
    plain_recompute(twin)
    offload_activations(model, keep=0, smallest=0)
    for net in (twin, model):
        torch.manual_seed(3)
        loss = net(batch())
        loss.backward(retain_graph=True)
        loss.backward()
        loss = net(batch())
        torch.autograd.grad(loss, net.layers[-1].inner.weight)  # the other blocks never come
        net(batch()).backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


class Changing(nn.Module):
    """Changes the input of a block in place, after the block."""

    def __init__(self, when):
        super().__init__()
        self.layers, self.when = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), when

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            before, x = x * 1, layer(x * 1) if i != self.when else None
            if x is None:
                x = layer(before)
                before.add_(1)
        return x.sum()


@pytest.mark.parametrize("when", [0, 1, 2])
def test_an_input_changed_in_place_is_an_error(when):
    model = Changing(when)
    offload_activations(model, smallest=0)
    with pytest.raises((PlanError, RuntimeError), match="changed in place"):
        model(torch.randn(2, 4)).backward()


def test_it_is_undone_and_copied():
    model, twin = Net(), Net()
    plain_recompute(twin)
    model.layers[1].forward = own = model.layers[1].forward
    done = offload_activations(model, smallest=0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.layers[0].inner.weight.zero_()
    assert_same(passes(other), passes(twin))
    done.remove()
    assert model.layers[1].forward is own and "forward" not in model.layers[0].__dict__
    done = offload_activations(model)
    model.layers[2].forward = own
    with pytest.raises(PlanError, match="was replaced"):
        done.remove()


def test_the_pass_before_is_none_of_its_business(log):
    model = Net(several=False)
    offload_activations(model, keep=0, smallest=0)
    first, second = model(batch(0)), model(batch(1))
    log.clear()
    second.backward()
    assert [kind for kind, _ in log] == ["bring"] * DEPTH
    first.backward()


class Strided(nn.Module):
    """Gives its blocks inputs of many strides, with gaps and without, and notes those they see."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.seen: list[tuple[int, ...]] = []
        for layer in self.layers:
            layer.forward = functools.partial(self.noted, layer.forward)

    def noted(self, forward, x):
        self.seen.append(x.stride())
        return forward(x)

    def forward(self, x):
        for layer, change in zip(self.layers, (transposed, sliced, expanded, transposed), strict=True):
            x = layer(change(x)).tanh()
        return x.sum()


def transposed(x):
    return x.sin().transpose(0, 1)


def sliced(x):
    return torch.cat([x, x], dim=-1)[..., 2:6]


def expanded(x):
    return x.sum(0, keepdim=True).expand(3, 3, 4)


def test_inputs_of_any_strides():
    twin, model = Strided(), Strided()
    offload_activations(model, keep=0, in_flight=1, smallest=0)
    for net in (twin, model):
        net(torch.arange(36.0).view(3, 3, 4)).backward()
    assert model.seen == twin.seen + twin.seen[::-1]
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


class Scaled(nn.Module):
    def forward(self, x, scale):
        return (self.weight * x * scale).tanh()

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.7))


class Rescaling(nn.Module):
    """Writes to what two blocks are given, once its first copy is over."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, x):
        scale = torch.ones(4)
        x = self.layers[1](self.layers[0](x, scale), torch.ones(4))
        scale += 1
        return self.layers[2](x, scale).sum()


def test_what_is_written_between_two_blocks_is_another_input():
    model = Rescaling()
    offload_activations(model, keep=0, in_flight=1, smallest=0)
    x = torch.linspace(-1, 1, 4, requires_grad=True)
    model(x).backward()
    y, w = x.detach().requires_grad_(), 0.7
    ((y * w).tanh() * w).tanh().mul(w * 2).tanh().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("options", [{"keep": -1}, {"in_flight": 0}, {"smallest": -1}])
def test_numbers_out_of_range_are_errors(options):
    with pytest.raises(PlanError, match="cannot work with this"):
        offload_activations(Net(), **options)


def test_it_wants_blocks_that_are_not_recomputed_yet():
    with pytest.raises(PlanError, match="no blocks"):
        offload_activations(nn.Linear(2, 2))
    model = Net()
    plain_recompute(model)
    with pytest.raises(PlanError, match="recomputed already"):
        offload_activations(model)
    model = Net()
    offload_activations(model)
    with pytest.raises(PlanError, match="recomputed already"):
        offload_activations(model)


@pytest.mark.parametrize("first", ["weights", "activations"])
@pytest.mark.parametrize("residency", ["host", "auto"])
def test_beside_offloaded_weights(first, residency):
    def train(model, optimizer):
        losses = []
        for step in range(4):
            loss = model(batch(step))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    twin = Net(dropout=0.4)
    torch.manual_seed(1)
    expected = train(twin, adamw(twin.parameters()))
    model = Net(dropout=0.4)
    if first == "activations":
        offload_activations(model, smallest=0)
    model, optimizer = offload(
        model,
        adamw(model.parameters()),
        residency=residency,
        device_memory="20KB",
        tuning=Tuning(rates=SLOW_HOST),
    )
    if first == "weights":
        offload_activations(model, smallest=0)
    torch.manual_seed(1)
    assert train(model, optimizer) == expected
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.view(b.shape), b)


def test_the_store_takes_the_smallest_piece_that_fits():
    store = HostStore(torch.device("cpu"), 1)
    store.begin()
    pieces = [store.send(torch.zeros(n)) for n in (4, 16, 8)]
    del pieces
    offloaded = store.send(torch.zeros(6))
    assert offloaded._piece.numel() == 8 * 4
    larger = store.send(torch.zeros(32))  # in place of the one of 16
    turned = store.send(torch.zeros(2, 2).t())
    assert turned.host.stride() == (1, 2)  # else the copy would have to turn it
    assert larger._piece.numel() == 32 * 4 and store.nbytes == (4 + 8 + 32) * 4


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).t(), True),
        (torch.zeros(2, 3, 4).permute(1, 2, 0), True),
        (torch.zeros(3, 1, 4)[:, :, :], True),
        (torch.zeros(3, 4)[:, :2], False),
        (torch.zeros(3, 1).expand(3, 4), False),
        (torch.zeros(8)[::2], False),
    ],
)
def test_what_fills_its_memory(tensor, dense):
    assert is_dense(tensor.shape, tensor.stride()) is dense


def test_memory_comes_back_while_another_is_taken():
    """Finalizers run anywhere, also where the thread that runs one has the store's lock."""
    store = HostStore(torch.device("cpu"), 1)
    store.begin()
    offloaded = [store.send(torch.zeros(8))]
    with store._lock:
        offloaded.clear()
    assert store.send(torch.zeros(8))._piece.numel() == store.nbytes == 32
