"""When stage 3 gathers, how often and how far ahead; ranks that use different blocks train as one process does."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from over_ranks import full_parameters
from torch import nn

import cai_mesh.comm.collectives
import cai_zero.reduction.compression
import cai_zero.stage3.gathering
from cai_mesh.errors import PlanError
from cai_mesh.gradients import flat_of
from cai_mesh.layout import record_of
from cai_mesh.storage import finding
from cai_mesh.testing import assert_same_as_one_device, run_ranks
from cai_zero import Gather, no_sync, shard_module, shard_optimizer, sharding_of

STEPS, WORLD, VOCAB, WIDTH = 4, 2, 9, 6


def on_ranks(fn, *args):
    return run_ranks(WORLD, fn, *args, timeout=60)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.line(self.norm(x)))


class Net(nn.Module):
    """An embedding, blocks that a call uses in the order it is told, and a head."""

    def __init__(self, blocks: int = 4):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, route):
        x = self.embed(ids)
        for i in route:
            x = self.layers[i](x)
        return self.head(x)


def build() -> Net:
    torch.manual_seed(3)
    return Net().double()


def mesh():
    return dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))


def loss_of(model, route, step, rank):
    ids = torch.randint(0, VOCAB, (3, 5), generator=torch.Generator().manual_seed(10 * step + rank))
    return nn.functional.cross_entropy(model(ids, route).flatten(0, 1), ids.flatten())


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained_in_one_process(routes, micro=1):
    """Parameters after training in one process; `routes[step][rank]` are the blocks used."""
    model = build()
    optimizer = adam(model)
    for step, rank_routes in enumerate(routes):
        for part in range(micro):
            for rank, route in enumerate(rank_routes):
                (loss_of(model, route, step + 100 * part, rank) / WORLD / micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def check(got, routes, micro=1):
    expected = trained_in_one_process(routes, micro)
    for final in got:
        assert_same_as_one_device(final, expected, tolerance=1e-9)


# -- a log of gathers and collectives ---------------------------------------------------------------------------------


@dataclass
class Log:
    """What a rank has done since the last `take`: gathers by the name of their unit, and collectives."""

    names: dict[int, str] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=dict)

    def take(self) -> list[str]:
        events, self.events = self.events, []
        return events


@contextlib.contextmanager
def logged(model):
    """Count the gathers of a sharded model, and note when its blocks run."""
    log, kept = Log(), cai_zero.stage3.gathering.gather_weights
    sharding = sharding_of(model)
    for name, module in model.named_modules():
        held = sharding._units.get(module)
        if held is not None:
            log.bytes[name] = held.nbytes
            log.names.update({id(part.unit.unsharded): name for part in held.parts})
    for name, module in model.named_modules():
        if module in sharding._units and module is not model:
            module.register_forward_pre_hook(lambda m, a, name=name: log.events.append(f"use {name}"))

    def gather(compression, unsharded, *args, **kwargs):
        log.events.append(f"gather {log.names[id(unsharded)]}")
        return kept(compression, unsharded, *args, **kwargs)

    cai_zero.stage3.gathering.gather_weights = gather
    try:
        yield log
    finally:
        cai_zero.stage3.gathering.gather_weights = kept


def gathers(events):
    return [event.removeprefix("gather ") for event in events if event.startswith("gather")]


@contextlib.contextmanager
def collectives():
    """The names of torch.distributed's collectives called inside."""
    found: list[str] = []
    kept = {}
    for module, name in (
        (cai_mesh.comm.collectives, "_all_gather"),
        (cai_mesh.comm.collectives, "_reduce_scatter"),
        (cai_mesh.comm.collectives, "_all_to_all"),
        (dist, "all_reduce"),
        (dist, "broadcast"),
        (dist, "all_gather_object"),
    ):
        kept[module, name] = getattr(module, name)

        def count(*args, name=name, fn=kept[module, name], **kwargs):
            found.append(name.removeprefix("_"))
            return fn(*args, **kwargs)

        setattr(module, name, count)
    try:
        yield found
    finally:
        for (module, name), fn in kept.items():
            setattr(module, name, fn)


# -- ranks that use different blocks -------------------------------------------------------------------------------

ROUTES = {
    "same": [[(0, 1, 2, 3)] * 2] * STEPS,
    # already in the first step, before an order is learned
    "skips-at-once": [[(0, 2), (1, 3)], [(0, 1, 2, 3), (3,)], [(), (0, 1, 2, 3)], [(1, 2), (0, 3)]],
    "skips-later": [[(0, 1, 2, 3)] * 2, [(0, 2), (1, 3)], [(), (0, 1, 2, 3)], [(3,), (0,)]],
    "first-rank-uses-none": [[(), (0, 1, 2, 3)]] * STEPS,
    # in an order that is not the registered one
    "reversed": [[(3, 2, 1, 0)] * 2, [(3, 1), (2, 0)], [(3, 2, 1, 0)] * 2, [(), (3, 0)]],
    "twice": [
        [(0, 1, 0, 2, 3)] * 2,
        [(0, 1, 0), (0, 1, 0, 2, 3)],
        [(0, 1, 0, 3), (2,)],
        [(0, 1, 0, 2, 3)] * 2,
    ],
}


def train(routes, gather=None):
    model, rank = shard_module(build(), mesh(), gather=gather), dist.get_rank()
    optimizer = adam(model)
    for step, rank_routes in enumerate(routes):
        loss_of(model, rank_routes[rank], step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


@pytest.mark.parametrize("routes", ROUTES.values(), ids=ROUTES)
def test_ranks_that_skip_blocks_train_as_one_process(routes):
    check(on_ranks(train, routes), routes)


@pytest.mark.parametrize("options", [{"reshard_after_forward": False}, {"prefetch_bytes": 10**6}], ids=str)
def test_ranks_that_skip_blocks_train_as_one_process_with_every_option(options):
    routes = ROUTES["skips-at-once"]
    check(on_ranks(train, routes, Gather(**options)), routes)


class Experts(nn.Module):
    """Experts are blocks of their own: an outermost `nn.ModuleList`."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids, route):
        x = self.embed(ids)
        return x + sum(torch.tanh(self.experts[i](x)) for i in route)


def build_experts():
    torch.manual_seed(3)
    return Experts().double()


def loss_of_experts(model, route, step, rank):
    ids = torch.randint(0, VOCAB, (7,), generator=torch.Generator().manual_seed(10 * step + rank))
    return model(ids, route).square().sum()


EXPERTS = [[(), (0, 2)], [(), ()], [(1,), ()], [(0, 1, 2), (1,)]]


def train_experts(routes):
    model, rank = shard_module(build_experts(), mesh()), dist.get_rank()
    optimizer = adam(model)
    for step, rank_routes in enumerate(routes):
        loss_of_experts(model, rank_routes[rank], step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


def test_a_rank_may_use_no_expert():
    model = build_experts()
    optimizer = adam(model)
    for step, rank_routes in enumerate(EXPERTS):
        for rank, route in enumerate(rank_routes):
            (loss_of_experts(model, route, step, rank) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {n: p.detach() for n, p in model.named_parameters()}
    for final in on_ranks(train_experts, EXPERTS):
        assert_same_as_one_device(final, expected, tolerance=1e-9)


# -- how often and how far ahead -----------------------------------------------------------------------------------


def passes(route, gather):
    """Events of every forward and backward of three steps without an optimizer; the units still gathered after them."""
    model, found = shard_module(build(), mesh(), gather=gather), []
    units = sharding_of(model)._units
    with logged(model) as log:
        for step in range(3):
            loss = loss_of(model, route, step, 0)
            forward = log.take()
            loss.backward()
            found.append(
                (forward, log.take(), [n for n, m in model.named_modules() if _is_unsharded(units, m)])
            )
    return found, log.bytes


def _is_unsharded(units, module):
    return module in units and units[module].is_unsharded


def names(*blocks):
    return [f"layers.{i}" for i in blocks]


def test_the_order_is_learned_in_the_first_backward():
    """Blocks run in the reverse of their registration: then nothing is gathered twice in a pass."""
    for found, _ in on_ranks(passes, (3, 2, 1, 0), Gather()):
        for step, (forward, backward, unsharded) in enumerate(found):
            assert unsharded == []
            if step:
                assert gathers(forward) == ["", *names(3, 2, 1, 0)]
                assert gathers(backward) == names(1, 2, 3)  # the model and its last block are still unsharded
        assert len(gathers(found[0][0])) > 5  # the registered order was wrong


def test_registered_order_is_right_from_the_start():
    for found, _ in on_ranks(passes, (0, 1, 2, 3), Gather()):
        for forward, backward, unsharded in found:
            assert gathers(forward) == ["", *names(0, 1, 2, 3)]
            assert gathers(backward) == names(2, 1, 0)
            assert unsharded == []


def test_kept_unsharded_until_backward_units_are_gathered_once():
    for found, _ in on_ranks(passes, (0, 1, 2, 3), Gather(reshard_after_forward=False)):
        for forward, backward, unsharded in found:
            assert gathers(forward) == ["", *names(0, 1, 2, 3)]
            assert gathers(backward) == []
            assert unsharded == []


def largest_prefetch(events):
    """Largest number of blocks gathered and not yet used, the one about to be used among them."""
    ahead, most = 0, 0
    for event in events:
        if event.startswith("gather layers"):
            ahead += 1
        elif event.startswith("use"):
            ahead -= 1
        most = max(most, ahead)
    return most


@pytest.mark.parametrize(("blocks", "expected"), [(0, 2), (1.5, 2), (2, 3), (3.5, 4), (9, 4)])
def test_prefetch_bytes_bound_what_is_gathered_ahead(blocks, expected):
    nbytes = _block_bytes()
    gather = Gather(prefetch_bytes=int(blocks * nbytes))
    ((found, sizes),) = {str(r): r for r in on_ranks(passes, (0, 1, 2, 3), gather)}.values()
    assert sizes["layers.0"] == nbytes
    for forward, _, _ in found:
        assert largest_prefetch(forward) == expected


def _block_bytes():
    """Of a block in its chunk: three vectors and one matrix, each of one unit of 128 elements, in float64."""
    return 4 * 128 * 8


def test_a_negative_budget_is_refused():
    with pytest.raises(PlanError, match="prefetch_bytes"):
        Gather(prefetch_bytes=-1)


def without_gradients():
    model = shard_module(build(), mesh(), gather=Gather(reshard_after_forward=False))
    with logged(model) as log, torch.no_grad():
        for _ in range(2):
            loss_of(model, (0, 1, 2, 3), 0, 0)
        units = sharding_of(model)._units
        return gathers(log.take()), [n for n, m in model.named_modules() if _is_unsharded(units, m)]


def test_a_forward_without_gradients_leaves_nothing_unsharded():
    for found, unsharded in on_ranks(without_gradients):
        assert found == ["", *names(0, 1, 2, 3)] * 2
        assert unsharded == []


def copy_engines():
    model = build()
    before = {n: p.data_ptr() for n, p in model.named_parameters()}
    with collectives() as found, pytest.raises(PlanError, match="copy engines"):
        shard_module(model, mesh(), gather=Gather(copy_engines=True))
    same = {n: p.data_ptr() for n, p in model.named_parameters()} == before
    loss_of(model, (0, 1), 0, 0).backward()
    return same, hasattr(model, "cai_sharding"), [n for n in found if n != "all_gather_object"]


def test_copy_engines_need_a_gpu_and_leave_the_model_alone():
    assert on_ranks(copy_engines) == [(True, False, [])] * WORLD


# -- no_sync -------------------------------------------------------------------------------------------------------


def accumulate(stage, routes):
    model, rank = build(), dist.get_rank()
    if stage == 3:
        sharded = shard_module(model, mesh())
        optimizer = adam(model)
    else:
        optimizer = sharded = shard_optimizer(adam(model), mesh(), model=model, stage=stage)
    inside, outside = [], []
    for step, rank_routes in enumerate(routes):
        for part in range(3):
            unsynced = part < 2
            with no_sync(sharded) if unsynced else contextlib.nullcontext():
                loss = loss_of(model, rank_routes[rank], step + 100 * part, rank) / 3
                with collectives() as found:
                    loss.backward()
            (inside if unsynced else outside).append([name for name in found if name != "all_gather"])
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters_of(model, stage), inside, outside


def full_parameters_of(model, stage):
    return full_parameters(model) if stage == 3 else {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_sync_communicates_no_gradient_and_equals_accumulation(stage):
    routes = ROUTES["skips-later"]
    found = on_ranks(accumulate, stage, routes)
    check([final for final, _, _ in found], routes, micro=3)
    reduction = "reduce_scatter" if stage else "all_reduce"
    for _, inside, outside in found:
        # the first backward of stage 3 agrees on an order; after it a backward in no_sync communicates nothing
        assert all(set(names) <= {"all_gather_object"} for names in inside[:1]) and not any(inside[1:])
        assert all(reduction in names for names in outside)


def finish_after_no_sync(stage):
    """A last backward under `no_sync` is reduced by `finish`."""
    model, rank = build(), dist.get_rank()
    if stage == 3:
        sharded = sharding_of(shard_module(model, mesh()))
        optimizer = adam(model)
    else:
        optimizer = sharded = shard_optimizer(adam(model), mesh(), model=model, stage=stage)
    with sharded.no_sync():
        loss_of(model, (0, 2), 0, rank).backward()
    sharded.finish()
    optimizer.step()
    return full_parameters_of(model, stage)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_finish_reduces_what_no_sync_left(stage):
    check(on_ranks(finish_after_no_sync, stage), [[(0, 2)] * 2])


# -- models on the meta device -------------------------------------------------------------------------------------


def train_from_meta(values):
    with torch.device("meta"):
        model = Net().double()
    seen = []

    def materialize(name, param):
        assert param.is_meta
        seen.append((name, tuple(param.shape)))
        return values[name]

    shard_module(model, mesh(), materialize=materialize, device="cpu")
    optimizer, rank = adam(model), dist.get_rank()
    start = full_parameters(model)
    loss_of(model, (0, 1, 2, 3), 0, rank).backward()
    optimizer.step()
    return start, full_parameters(model), seen


def test_a_meta_model_is_materialized():
    values = {n: p.detach() for n, p in build().named_parameters()}
    for start, final, seen in on_ranks(train_from_meta, values):
        assert sorted(seen) == sorted((n, tuple(v.shape)) for n, v in values.items())
        assert_same_as_one_device(start, values, tolerance=1e-15)
        assert_same_as_one_device(final, trained_in_one_process([[(0, 1, 2, 3)] * 2]), tolerance=1e-9)


def meta_without_values(values):
    with torch.device("meta"):
        model = Net().double()
    shard_module(model, mesh(), device="cpu")
    nan = {n: bool(p.isnan().all()) for n, p in model.named_parameters() if p.numel()}
    with torch.no_grad():
        for n, p in model.named_parameters():
            low, high = record_of(p).slices[0].range
            flat_of(p).copy_(values[n].flatten()[low:high])
    return nan, float(loss_of(model, (0, 1, 2, 3), 0, 0).detach())


def test_without_values_shards_are_nan_until_loaded():
    model = build()
    values = {n: p.detach() for n, p in model.named_parameters()}
    expected = float(loss_of(model, (0, 1, 2, 3), 0, 0).detach())
    for nan, loss in on_ranks(meta_without_values, values):
        assert nan and all(nan.values())
        assert loss == pytest.approx(expected, rel=1e-12)


def test_a_meta_model_must_be_told_its_device():
    with torch.device("meta"):
        model = Net()
    with pytest.raises(PlanError, match="device"):
        shard_module(model, None)


# -- the gather after a step ---------------------------------------------------------------------------------------


def train_with_overlap_gather(stage, routes):
    model, rank = build(), dist.get_rank()
    optimizer = shard_optimizer(adam(model), mesh(), model=model, stage=stage, overlap_gather=True)
    seen = []
    for step, rank_routes in enumerate(routes):
        loss_of(model, rank_routes[rank], step, rank).backward()
        optimizer.step()
        waiting = [chunk.weights.gathering is not None for chunk in optimizer.chunks]
        if step == len(routes) - 1:
            seen = {n: v.clone() for n, v in model.state_dict().items()}
        optimizer.zero_grad()
    return seen, any(waiting)


@pytest.mark.parametrize("stage", [1, 2])
def test_overlap_gather_trains_the_same_and_state_dict_waits(stage):
    routes = ROUTES["skips-later"]
    found = on_ranks(train_with_overlap_gather, stage, routes)
    assert all(waiting for _, waiting in found)
    check([seen for seen, _ in found], routes)


def after_a_step():
    """Gathers during a step, in the forward after it, and in one after new weights were loaded."""
    model, rank = shard_module(build(), mesh()), dist.get_rank()
    optimizer = adam(model)
    with logged(model) as log:
        loss_of(model, (0, 1, 2, 3), 0, rank).backward()
        log.take()
        optimizer.step()
        stepped = gathers(log.take())
        kept = full_parameters(model)
        before = float(loss_of(model, (0, 1, 2, 3), 1, 0).detach())
        forward = gathers(log.take())
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        log.take()
        after = float(loss_of(model, (0, 1, 2, 3), 1, 0).detach())
        return stepped, forward, before, after, kept, gathers(log.take()), full_parameters(model)


def test_a_step_prefetches_for_the_next_forward_but_nothing_stale():
    for stepped, forward, before, after, kept, again, loaded in on_ranks(after_a_step):
        assert stepped == ["", "layers.0"]
        assert forward == names(1, 2, 3)
        assert again[-5:] == ["", *names(0, 1, 2, 3)]
        for weights, loss in ((kept, before), (loaded, after)):
            model = build()
            model.load_state_dict(weights)
            expected = float(loss_of(model, (0, 1, 2, 3), 1, 0).detach())
            assert loss == pytest.approx(expected, rel=1e-12)
        assert before != pytest.approx(after, rel=1e-3)


def train_by_actions():
    """Which units are gathered after a step that a schedule drives, the parameters, and the loss after it."""
    model, rank = shard_module(build(), mesh(), driver="actions"), dist.get_rank()
    sharding, optimizer = sharding_of(model), torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    sharding.unshard(model).wait()
    loss_of(model, (0, 1, 2, 3), 0, rank).backward()
    sharding.reduce(model)
    sharding.finish()
    optimizer.step()
    unsharded = [unit.is_unsharded for unit in sharding._units.values()]
    kept = full_parameters(model)
    sharding.unshard(model).wait()
    return unsharded, kept, float(loss_of(model, (0, 1, 2, 3), 1, 0).detach())


def test_a_fused_step_leaves_nothing_unsharded_that_actions_gathered():
    for unsharded, kept, loss in on_ranks(train_by_actions):
        assert not any(unsharded)
        model = build()
        model.load_state_dict(kept)
        expected = float(loss_of(model, (0, 1, 2, 3), 1, 0).detach())
        assert loss == pytest.approx(expected, rel=1e-12)


# -- large layers outside blocks -----------------------------------------------------------------------------------


def train_with_large_units(routes, limit):
    kept, finding.ALONE_ELEMENTS = finding.ALONE_ELEMENTS, limit
    try:
        model, rank = shard_module(build(), mesh()), dist.get_rank()
        held = [n for n, m in model.named_modules() if m in sharding_of(model)._units]
        optimizer = adam(model)
        with logged(model) as log:
            for step, rank_routes in enumerate(routes):
                events = []
                loss = loss_of(model, rank_routes[rank], step, rank)
                events += log.take()
                loss.backward()
                log.take()
                optimizer.step()
                optimizer.zero_grad()
        return full_parameters(model), held, events
    finally:
        finding.ALONE_ELEMENTS = kept


def test_large_layers_are_units_of_their_own():
    routes = ROUTES["skips-later"]
    found = on_ranks(train_with_large_units, routes, 50)
    check([final for final, _, _ in found], routes)
    for _, held, _ in found:
        assert sorted(held) == sorted(["", "embed", "head", *names(0, 1, 2, 3)])
    found = on_ranks(train_with_large_units, routes[:1], 10**6)
    assert all("embed" not in held and "head" not in held for _, held, _ in found)
