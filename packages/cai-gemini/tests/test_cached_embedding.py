"""A cached table trains as torch's plain sparse one, bit for bit, whatever is evicted on the way."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as checkpointed

from cai_gemini import CachedEmbedding, RowwiseAdagrad, lookahead
from cai_mesh import checkpoint
from cai_mesh.errors import DataError, PlanError

ROWS, DIM, BAGS = 120, 6, 5

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(
        params, lr=0.3, lr_decay=0.01, initial_accumulator_value=0.2
    ),
    "adam": lambda params: torch.optim.SparseAdam(params, lr=0.1),
    "rowwise": lambda params: RowwiseAdagrad(params, lr=0.3, initial_accumulator_value=0.1),
}


def zipf(generator, *shape, rows=ROWS):
    weights = 1.0 / torch.arange(1, rows + 1)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(7))
    count = torch.Size(shape).numel()
    return order[torch.multinomial(weights, count, True, generator=generator)].view(shape)


def batches(steps, seed=0):
    """(ids [T], offsets [B], weights [T], targets [B, DIM]) with an empty bag and repeated ids."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        lengths = torch.randint(0, 7, (BAGS,), generator=generator)
        lengths[1] = 0
        lengths[2] = 3
        ids = zipf(generator, int(lengths.sum()))
        ids[-1] = ids[0]
        offsets = lengths.cumsum(0) - lengths
        weights = torch.rand(len(ids), generator=generator)
        yield ids, offsets, weights, torch.randn(BAGS, DIM, generator=generator)


def table(dtype=torch.float32):
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(3)).to(dtype)


def plain(mode, padding_idx=None):
    if mode is None:
        return nn.Embedding(ROWS, DIM, sparse=True, padding_idx=padding_idx, _weight=table(), _freeze=False)
    return nn.EmbeddingBag(ROWS, DIM, sparse=True, mode=mode, padding_idx=padding_idx, _weight=table())


def step(module, optimizer, batch, *, weighted=False):
    ids, offsets, weights, targets = batch
    if module.mode is None if isinstance(module, CachedEmbedding) else isinstance(module, nn.Embedding):
        out = module(ids)
        targets = targets[torch.arange(len(ids)) % BAGS]
    else:
        out = module(ids, offsets, per_sample_weights=weights if weighted else None)
    loss = (out.tanh() - targets).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def assert_state_equal(cached, optimizer, reference, reference_optimizer):
    state = cached.optimizer_state(optimizer)
    expected = reference_optimizer.state[reference.weight]
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(
            torch.as_tensor(state[key]), torch.as_tensor(value).to(torch.as_tensor(state[key]).dtype)
        )


@pytest.mark.parametrize("mode", ["sum", "mean", None])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("policy", ["lfu", "lru", "known"])
def test_training_is_equal_bit_for_bit(name, mode, policy):
    padding = 11 if policy == "lru" else None
    twin = plain(mode, padding)
    frequencies = torch.bincount(zipf(torch.Generator().manual_seed(1), 500), minlength=ROWS)
    cached = CachedEmbedding(
        ROWS,
        DIM,
        cache=30,
        device="cpu",
        mode=mode,
        padding_idx=padding,
        policy="lru" if policy == "lru" else "lfu",
        frequencies=frequencies if policy == "known" else None,
        weight=table(),
    )
    optimizers = [OPTIMIZERS[name](module.parameters()) for module in (twin, cached)]
    weighted = mode == "sum"
    for batch in batches(25):
        assert step(twin, optimizers[0], batch, weighted=weighted) == step(
            cached, optimizers[1], batch, weighted=weighted
        )
    assert cached.cache_stats().evicted > 20
    assert torch.equal(cached.table, twin.weight)
    assert_state_equal(cached, optimizers[1], twin, optimizers[0])


def test_initial_values_are_those_of_the_plain_module():
    torch.manual_seed(4)
    twin = nn.EmbeddingBag(ROWS, DIM, padding_idx=-1)
    torch.manual_seed(4)
    cached = CachedEmbedding(ROWS, DIM, mode="mean", padding_idx=-1, device="cpu")
    assert torch.equal(cached.table, twin.weight)
    assert cached.cache_rows == 6 and cached.weight.shape == (6, DIM)


def test_rowwise_adagrad_against_dense_arithmetic():
    weight = table(torch.float64)
    parameter, sums = nn.Parameter(weight.clone()), torch.full((ROWS,), 0.1, dtype=torch.float64)
    optimizer = RowwiseAdagrad([parameter], lr=0.3, initial_accumulator_value=0.1, eps=1e-8)
    for ids, *_ in batches(6):
        optimizer.zero_grad()
        nn.functional.embedding(ids, parameter, sparse=True).square().sum().backward()
        gradient = torch.zeros_like(weight).index_add_(0, ids, 2 * weight[ids])
        sums += gradient.square().mean(1)
        weight -= 0.3 * gradient / (sums.sqrt() + 1e-8)[:, None]
        optimizer.step()
    torch.testing.assert_close(parameter.data, weight, rtol=1e-12, atol=1e-12)
    parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(PlanError, match="sparse"):
        optimizer.step()


def test_gradient_weights_get_their_gradient():
    twin, cached = (
        plain("sum"),
        CachedEmbedding(ROWS, DIM, cache=40, device="cpu", mode="sum", weight=table()),
    )
    ids, offsets, values, targets = next(batches(1))
    gradients = []
    for module in (twin, cached):
        weights = values.clone().requires_grad_()
        out = module(ids, offsets, per_sample_weights=weights)
        if module is cached:
            cached.prefetch(zipf(torch.Generator().manual_seed(9), 12))
        (out * targets).sum().backward()
        gradients.append(weights.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)  # torch's dot depends on alignment


@pytest.mark.parametrize("depth", [1, 2])
def test_lookahead_changes_nothing_but_when_rows_come(depth):
    def run(ahead):
        cached = CachedEmbedding(ROWS, DIM, cache=90, device="cpu", mode="sum", weight=table())
        optimizer = OPTIMIZERS["adam"](cached.parameters())
        stream = batches(20)
        if ahead:
            stream = lookahead(stream, [cached], lambda batch: [batch[:2]], depth=depth)
        losses = [step(cached, optimizer, batch) for batch in stream]
        return losses, cached.table, cached.cache_stats()

    (losses, values, stats), (others, theirs, ahead) = run(False), run(True)
    assert losses == others and torch.equal(values, theirs)
    assert len(losses) == 20 == ahead.batches == stats.batches
    assert ahead.lookups == stats.lookups and ahead.refused == 0


def test_prefetch_takes_no_row_in_use():
    cached = CachedEmbedding(ROWS, DIM, cache=6, device="cpu", weight=table())
    optimizer = OPTIMIZERS["sgd"](cached.parameters())
    now, near, far = torch.arange(4), torch.tensor([4, 5]), torch.tensor([6])
    out = cached(now)
    assert cached.prefetch(near)
    assert cached.prefetch(near)  # asked for already
    assert not cached.prefetch(far)
    assert cached.cache_stats().refused == 1
    with pytest.raises(PlanError, match="at least 7: 1 distinct rows of the batch and 6 held"):
        cached(far)
    out.sum().backward()
    assert not cached.prefetch(far)  # the gradient still waits
    optimizer.step()
    assert cached.prefetch(far)
    before = cached.cache_stats()
    assert torch.equal(cached(near), table()[near])
    after = cached.cache_stats()
    assert (after.lookups, after.batches) == (before.lookups, before.batches)
    expected = table()
    expected[:4] -= 0.5
    assert torch.equal(cached.table, expected)


def test_what_is_prefetched_stays_over_a_step():
    cached = CachedEmbedding(ROWS, DIM, cache=4, device="cpu", weight=table())
    optimizer = OPTIMIZERS["sgd"](cached.parameters())
    near = torch.arange(2)
    cached.prefetch(near)
    cached(torch.arange(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(PlanError, match="at least 5: 3 distinct rows of the batch and 2 held"):
        cached(torch.tensor([4, 5, 6]))
    cached(torch.tensor([4, 5]))
    assert torch.equal(cached(near), table()[near])


def test_a_table_read_before_a_step_is_right_after_it():
    cached = CachedEmbedding(ROWS, DIM, cache=4, device="cpu", weight=table())
    optimizer = OPTIMIZERS["sgd"](cached.parameters())
    out = cached(torch.arange(4))
    assert torch.equal(cached.table, table())
    out.sum().backward()
    assert torch.equal(cached.table, table())
    optimizer.step()
    assert torch.equal(cached.table[:4], table()[:4] - 0.5)


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_calls(seed):
    """Equal but for rounding: torch adds sparse gradients of several backwards in an order that depends on indices."""
    generator = torch.Generator().manual_seed(seed)
    twin, policy = plain(None).double(), ("lfu", "lru")[seed % 2]
    cached = CachedEmbedding(ROWS, DIM, cache=24, device="cpu", policy=policy, weight=table(torch.float64))
    optimizers = [OPTIMIZERS["adagrad"](module.parameters()) for module in (twin, cached)]
    coming, served = [], 0
    for kind in torch.randint(0, 9, (120,), generator=generator).tolist():
        ids = zipf(generator, 7)
        if kind <= 1:
            coming.append(ids)
            cached.prefetch(ids)
        elif kind <= 5:
            ids = coming.pop(0) if coming and kind > 3 else ids
            with torch.set_grad_enabled(kind != 2):
                try:
                    out = cached(ids)
                except PlanError:
                    continue
                expected = twin(ids)
            torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
            served += 1
            if kind > 3:
                out.square().sum().backward()
                expected.square().sum().backward()
        elif kind == 6:
            torch.testing.assert_close(cached.table, twin.weight.data, rtol=1e-12, atol=1e-12)
        else:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert served > 20 and cached.cache_stats().evicted > 20
    torch.testing.assert_close(cached.table, twin.weight.data, rtol=1e-12, atol=1e-12)


def test_a_batch_prefetched_and_forgotten_lets_go():
    cached = CachedEmbedding(ROWS, DIM, cache=4, device="cpu", weight=table())
    ids = torch.arange(4)
    assert cached.prefetch(ids)
    assert not cached.prefetch(torch.tensor([9]))
    del ids
    gc.collect()
    assert torch.equal(cached(torch.tensor([9])), table()[[9]])


def test_ids_changed_after_the_prefetch_are_looked_up_anew():
    cached = CachedEmbedding(ROWS, DIM, cache=8, device="cpu", weight=table())
    ids = torch.arange(4)
    cached.prefetch(ids)
    ids += 50
    assert torch.equal(cached(ids), table()[50:54])


def test_accumulated_gradients_keep_their_rows():
    twin = plain(None)
    cached = CachedEmbedding(ROWS, DIM, cache=9, device="cpu", weight=table())
    optimizers = [OPTIMIZERS["adagrad"](module.parameters()) for module in (twin, cached)]
    for first in (0, 20, 40):
        for micro in range(2):
            for module in (twin, cached):
                module(torch.arange(first + 4 * micro, first + 4 * micro + 4)).square().sum().backward()
            with torch.no_grad():  # one free row is left, and reading through it harms nothing
                for row in (100, 101):
                    assert torch.equal(cached(torch.tensor([row]))[0], table()[row])
        if first == 40:
            with pytest.raises(PlanError, match=r"at least 10: 2 distinct rows of the batch and 8 held"):
                cached(torch.tensor([110, 111, 110]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(cached.table, twin.weight)


def test_recompute_finds_its_rows():
    def backward(module):
        late = checkpointed(module, torch.tensor([2, 3]), use_reentrant=False)
        (module(torch.tensor([0, 1])).square().sum() + late.square().sum()).backward()

    with pytest.raises(PlanError, match="at least 4: 2 distinct rows of the batch and 2 held"):
        backward(CachedEmbedding(ROWS, DIM, cache=3, device="cpu", weight=table()))
    twin, cached = plain(None), CachedEmbedding(ROWS, DIM, cache=4, device="cpu", weight=table())
    for module in (twin, cached):
        optimizer = OPTIMIZERS["sgd"](module.parameters())
        backward(module)
        optimizer.step()
    assert torch.equal(cached.table, twin.weight)


def test_two_forwards_before_a_backward_and_a_graph_that_is_dropped():
    cached = CachedEmbedding(ROWS, DIM, cache=4, device="cpu", weight=table())
    dropped, kept = cached(torch.arange(2, 4)), cached(torch.arange(2))
    with pytest.raises(PlanError, match="at least 5"):
        cached(torch.tensor([7]))
    del dropped
    gc.collect()
    cached(torch.tensor([7]))
    kept.sum().backward()
    with torch.no_grad():
        cached.weight.add_(cached.weight.grad, alpha=-1)  # a loop's own optimizer
    cached.weight.grad = None
    cached(torch.arange(10, 14))
    expected = table()
    expected[:2] -= 1
    assert torch.equal(cached.table, expected)


def test_lfu_keeps_what_is_frequent_and_lru_what_is_recent():
    for policy, gone in (("lfu", 2), ("lru", 0)):
        cached = CachedEmbedding(ROWS, DIM, cache=3, device="cpu", policy=policy)
        for ids in ([0, 0, 0], [1, 1], [2], [1], [2]):
            cached(torch.tensor(ids))
        cached(torch.tensor([3]))
        cached.reset_cache_stats()
        hits = []
        with torch.no_grad():
            for row in ({0, 1, 2} - {gone}) | {3}:
                hits.append(cached(torch.tensor([row])) is not None and cached.cache_stats().misses == 0)
        assert all(hits), policy


def test_a_count_outlives_an_eviction():
    cached = CachedEmbedding(ROWS, DIM, cache=2, device="cpu")
    for ids in ([0] * 9, [1] * 5, [2] * 20, [3] * 20, [0]):  # 0 and 1 leave, 0 comes back for 2 or 3
        cached(torch.tensor(ids))
    cached(torch.tensor([4]))  # 0 has count 10 and leaves, though it is the latest
    cached.reset_cache_stats()
    cached(torch.tensor([3]))
    assert cached.cache_stats().hits == 1


def test_known_frequencies_fill_the_cache_and_decide():
    frequencies = torch.zeros(ROWS)
    frequencies[[5, 50, 90]] = torch.tensor([0.2, 0.5, 0.3])
    cached = CachedEmbedding(ROWS, DIM, cache=3, device="cpu", frequencies=frequencies, padding_idx=8)
    cached(torch.tensor([50, 90, 8]))
    assert cached.cache_stats().misses == 0
    cached(torch.tensor([5]))  # takes the place of 90
    cached.reset_cache_stats()
    cached(torch.tensor([50, 8]))
    assert cached.cache_stats().misses == 0


def test_errors_come_before_any_change():
    cached = CachedEmbedding(ROWS, DIM, cache=4, device="cpu", weight=table())
    cached(torch.arange(4))
    before = cached.cache_stats()
    for ids in ([0, ROWS], [-1, 3]):
        with pytest.raises(DataError, match=r"1 of 2 ids"):
            cached(torch.tensor(ids))
        with pytest.raises(DataError, match=r"0 to 119"):
            cached.prefetch(torch.tensor(ids))
    with pytest.raises(PlanError, match="at least 5: 5 distinct"):
        cached(torch.tensor([0, 1, 2, 7, 8, 8]))
    assert cached.cache_stats() == before
    with torch.no_grad():
        cached(torch.arange(4))
    assert cached.cache_stats().hits == before.hits + 4


@pytest.mark.parametrize(
    "change, message",
    [
        ({"cache": 0}, "at least 1"),
        ({"cache": 1, "padding_idx": 0}, "at least 2"),
        ({"cache": 1.5}, "part of the table"),
        ({"mode": "max"}, "mode"),
        ({"policy": "fifo"}, "policy"),
        ({"padding_idx": ROWS}, "padding_idx"),
        ({"frequencies": torch.ones(3)}, "frequencies"),
        ({"frequencies": torch.ones(ROWS), "policy": "lru"}, "frequencies"),
        ({"weight": torch.zeros(3, DIM)}, "host table"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(PlanError, match=message):
        CachedEmbedding(ROWS, DIM, device="cpu", **change)


def test_calls_that_make_no_sense_are_refused():
    bags = CachedEmbedding(ROWS, DIM, device="cpu", mode="mean")
    rows = CachedEmbedding(ROWS, DIM, device="cpu")
    ids, offsets = torch.arange(3), torch.tensor([0, 1])
    for call in (
        lambda: bags(ids),
        lambda: bags(ids[None], offsets),
        lambda: bags(ids, offsets, torch.ones(3)),
        lambda: rows(ids, offsets),
        lambda: rows(ids.float()),
        lambda: bags.to(torch.float16),
        lambda: bags.to("meta"),
        lambda: lookahead([], [rows], lambda ids: [ids], depth=0),
        lambda: next(lookahead([ids], [rows, bags], lambda ids: [ids])),
    ):
        with pytest.raises((PlanError, DataError)):
            call()
    assert bags.to("cpu") is bags and bags.float() is bags


def test_optimizers_whose_state_is_not_by_rows_are_refused():
    cached = CachedEmbedding(ROWS, DIM, cache=8, device="cpu", weight=table())
    optimizer = torch.optim.SGD(cached.parameters(), lr=1, momentum=0.9)
    cached(torch.arange(4)).sum().backward()
    with pytest.raises(PlanError, match="momentum"):
        optimizer.step()
    assert torch.equal(cached.table, table())
    first = OPTIMIZERS["adagrad"](cached.parameters())
    first.step()
    with pytest.raises(PlanError, match="two optimizers"):
        OPTIMIZERS["sgd"](cached.parameters()).step()
    del first, optimizer
    gc.collect()
    second = OPTIMIZERS["adam"](cached.parameters())
    second.step()
    assert set(cached.optimizer_state(second)) == {"exp_avg", "exp_avg_sq", "step"}
    with pytest.raises(PlanError, match="does not hold"):
        cached.optimizer_state(OPTIMIZERS["sgd"](nn.Linear(2, 2).parameters()))
    second.load_state_dict(copy.deepcopy(second.state_dict()))
    with pytest.raises(PlanError, match="replaced"):
        cached(torch.arange(3))


def test_a_state_dict_of_slots_is_refused():
    cached = CachedEmbedding(ROWS, DIM, cache=8, device="cpu", weight=table())
    optimizer = OPTIMIZERS["adagrad"](cached.parameters())
    cached(torch.arange(4)).square().sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    del optimizer
    fresh = OPTIMIZERS["adagrad"](cached.parameters())
    fresh.load_state_dict(saved)
    with pytest.raises(PlanError, match="which rows"):
        fresh.step()


class LateOnes(torch.optim.Optimizer):
    """Makes its state in the first step, at one."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("sum", torch.ones_like(p)).add_(p.grad)


def test_state_that_starts_late_and_not_at_zero_is_refused():
    cached = CachedEmbedding(ROWS, DIM, cache=8, device="cpu", weight=table())
    optimizer = LateOnes(cached.parameters(), {})
    cached(torch.arange(4)).sum().backward()
    optimizer.step()
    with pytest.raises(PlanError, match="starts neither"):
        cached(torch.arange(4))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_holds_whole_tables_and_training_goes_on(name, tmp_path):
    twin = plain("sum")
    reference = OPTIMIZERS[name](twin.parameters())
    expected = [step(twin, reference, batch) for batch in batches(12)]

    def build(cache):
        torch.manual_seed(5)
        module = CachedEmbedding(ROWS, DIM, cache=cache, device="cpu", mode="sum")
        return module, OPTIMIZERS[name](module.parameters())

    module, optimizer = build(30)
    module.load_state_dict(plain("sum").state_dict())
    losses = [step(module, optimizer, batch) for batch in list(batches(12))[:6]]
    checkpoint.save(tmp_path, module.state_dict() | module.optimizer_state(optimizer), step=6)

    other, optimizer = build(50)  # another cache, already in use
    with torch.no_grad():
        other(torch.arange(40)[None])
    state = other.optimizer_state(optimizer)
    values = checkpoint.load(tmp_path, other.state_dict() | state)
    other.load_optimizer_state(optimizer, state | values)
    losses += [step(other, optimizer, batch) for batch in list(batches(12))[6:]]
    assert losses == expected
    assert torch.equal(other.table, twin.weight)
    assert_state_equal(other, optimizer, twin, reference)
    with pytest.raises(PlanError, match="another optimizer or table"):
        other.load_optimizer_state(optimizer, {"sum": torch.ones(3)})


def test_state_dicts_go_both_ways_and_copies_are_apart():
    cached = CachedEmbedding(ROWS, DIM, cache=20, device="cpu", mode="sum", weight=table())
    optimizer = OPTIMIZERS["adagrad"](cached.parameters())
    for batch in list(batches(3)):
        step(cached, optimizer, batch)
    twin = plain("sum")
    twin.load_state_dict(cached.state_dict())
    assert torch.equal(twin.weight, cached.table)
    other = copy.deepcopy(cached)
    value = cached.table.clone()
    with torch.no_grad():
        other.table.zero_()
        ids, offsets, *_ = next(batches(1))
        assert not other(ids, offsets).any()
        assert torch.equal(cached.table, value)
        assert torch.equal(cached(ids, offsets), twin(ids, offsets))
    step(other, OPTIMIZERS["rowwise"](other.parameters()), next(batches(1)))
    assert other.table.any() and torch.equal(cached.table, value)
    keys = nn.ModuleDict({"a": cached}).load_state_dict({"a.bias": torch.ones(2)}, strict=False)
    assert keys.missing_keys == ["a.weight"] and keys.unexpected_keys == ["a.bias"]
    with pytest.raises(RuntimeError, match="shape"):
        cached.load_state_dict({"weight": torch.zeros(2, 2)})


def test_inference_mode():
    cached = CachedEmbedding(ROWS, DIM, cache=8, device="cpu", weight=table())
    with torch.inference_mode():
        asked = [torch.arange(first, first + 4) for first in (0, 4, 8, 12)]
        for ids in lookahead(asked, [cached], lambda ids: [ids]):
            assert torch.equal(cached(ids), table()[ids])
    assert cached.cache_stats().evicted == 8
    optimizer = OPTIMIZERS["adagrad"](cached.parameters())
    cached(torch.arange(4)).sum().backward()
    optimizer.step()
    assert not torch.equal(cached.table[:4], table()[:4]) and torch.equal(cached.table[4:], table()[4:])


def test_bytes_are_counted():
    cached = CachedEmbedding(ROWS, DIM, cache=4, device="cpu", policy="lru", weight=table())
    optimizer = OPTIMIZERS["rowwise"](cached.parameters())
    for first in (0, 4, 8):
        cached(torch.arange(first, first + 4).repeat(2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = cached.cache_stats()
    assert (stats.lookups, stats.hits, stats.misses, stats.hit_rate) == (24, 0, 24, 0.0)
    assert (stats.fetched, stats.evicted) == (12, 8)
    assert stats.bytes_in == 12 * DIM * 4 + 8 * 4  # the first batch came before the optimizer's state
    assert stats.bytes_out == 8 * (DIM + 1) * 4
    assert cached.device_bytes() == 4 * DIM * 4 + (ROWS + 1) * 4 + 4 * 5 * 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    cached = CachedEmbedding(ROWS, DIM, cache=7, device="cpu", weight=table(dtype))
    twin = nn.Embedding.from_pretrained(table(dtype), freeze=False, sparse=True)
    optimizers = [OPTIMIZERS["sgd"](module.parameters()) for module in (cached, twin)]
    for first in (0, 7, 3):
        for module, optimizer in zip((cached, twin), optimizers, strict=True):
            module(torch.arange(first, first + 7, dtype=torch.int32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(cached.table, twin.weight)
