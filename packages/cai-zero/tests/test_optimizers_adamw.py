"""AdamW: exact in float64 however divided; moments of fewer bits, their errors, and weights rounded without bias."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import toy
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.layout import Layout, Shard, attach
from cai_mesh.testing import run_ranks
from cai_zero import MixedPrecision, shard_optimizer
from cai_zero.optimizers import AdamW, adamw, codes, low_bits, rounding
from cai_zero.optimizers.pieces import parts_of

OPTIONS = {"lr": 0.02, "betas": (0.9, 0.99), "weight_decay": 0.1}
BF16 = torch.bfloat16


def exact(model, mesh):
    return AdamW(toy.groups_of(model, lr=0.05, weight_decay=0.0), **OPTIONS)


def torchs(params):
    rest = [p for n, p in params.items() if n != "embed"]
    groups = [{"params": rest}, {"params": [params["embed"]], "lr": 0.05, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, **OPTIONS)]


def half(model, mesh):
    return AdamW(model.parameters(), **OPTIONS, state_dtype=BF16, seed=5)


MAKERS = {"exact": exact, "bfloat16": half}


def sharded(name, stages, shape):
    return toy.sharded(MAKERS[name], stages, shape)


def test_one_process():
    toy.compare(toy.one_process(exact), toy.torch_twin(torchs))


@pytest.mark.parametrize("name", list(MAKERS))
@pytest.mark.parametrize(("shape", "stages"), toy.LAYOUTS)
def test_equals_full_tensors(name, shape, stages):
    """With bfloat16 moments too: random bits belong to elements, not to ranks."""
    expected = toy.torch_twin(torchs) if name == "exact" else toy.one_process(half)
    for found in run_ranks(toy.ranks(shape), sharded, name, stages, shape):
        for stage in stages:
            toy.compare(found[stage], expected)


def test_random_bits_belong_to_elements():
    full = torch.arange(24 * 13).view(24, 13)
    for index in range(2):
        param = nn.Parameter(torch.zeros(12, 13))
        attach(param, Layout((24, 13)).then("tp", 2, index, Shard(0, (16, 8))))
        (part,) = parts_of(param)
        expected = torch.cat(
            [full[8 * index : 8 * index + 8], full[16 + 4 * index : 20 + 4 * index]]
        ).flatten()
        assert torch.equal(rounding.positions(part, 0, 156, torch.device("cpu")), expected)
        assert torch.equal(rounding.positions(part, 95, 141, torch.device("cpu")), expected[95:141])


# -- codes -------------------------------------------------------------------------------------------------------


def tables():
    return {"signed": codes.signed_levels(), "unsigned": codes.unsigned_levels()}


def sample(kind, n=1000):
    torch.manual_seed(2)
    values = torch.randn(n) * torch.logspace(-6, 2, n)
    return values if kind == "signed" else values.square()


@pytest.mark.parametrize("kind", ["signed", "unsigned"])
def test_levels(kind):
    levels = tables()[kind]
    assert len(levels) == (255 if kind == "signed" else 256)
    assert bool((levels.diff() > 0).all()) and float(levels[-1]) == 1.0
    assert float(levels[codes.zero_number(levels)]) == 0.0
    if kind == "signed":
        assert torch.equal(levels, -levels.flip(0))


@pytest.mark.parametrize("kind", ["signed", "unsigned"])
@pytest.mark.parametrize("n", [1, 255, 256, 1000])
def test_codes_equal_the_reference(kind, n):
    levels, values = tables()[kind], sample(kind, n)
    numbers, scales = codes.encode(values, levels, None)
    expected, expected_scales = codes.encode_reference(values, levels)
    assert torch.equal(scales, expected_scales)
    got, best = codes.decode(numbers, scales, levels), codes.decode(expected, scales, levels)
    worse = (got - values).abs() - (best - values).abs()
    assert float(worse.max()) <= 1e-7 * float(scales.max())
    assert float((numbers != expected).float().mean()) < 0.01


@pytest.mark.parametrize("kind", ["signed", "unsigned"])
def test_errors_are_less_than_a_step_between_levels(kind):
    levels, values = tables()[kind], sample(kind, 4096)
    gap = levels.diff()
    for noise, share in ((None, 0.5), (torch.rand(4096), 1.0)):
        numbers, scales = codes.encode(values, levels, noise)
        quotients = (values.view(-1, 256) / scales.unsqueeze(1)).flatten()
        above = torch.bucketize(quotients, levels).clamp(1, len(levels) - 1)
        bound = gap[above - 1] * share
        if kind == "unsigned":
            bound = torch.where(above == 1, gap[0], bound)
        error = (levels[numbers.int()] - quotients).abs()
        assert bool((error <= bound * (1 + 1e-4) + 1e-12).all())


def test_second_moments_never_become_zero_and_nothing_hides_nan():
    levels = codes.unsigned_levels()
    values = torch.tensor([1.0, 1e-30, 0.0, 1e-12])
    for noise in (None, torch.zeros(4), torch.full((4,), 0.9999)):
        numbers, scales = codes.encode(values, levels, noise)
        assert [bool(x) for x in codes.decode(numbers, scales, levels)] == [True, True, False, True]
    numbers, scales = codes.encode(torch.tensor([1.0, float("nan")]), codes.signed_levels(), None)
    assert bool(codes.decode(numbers, scales, codes.signed_levels()).isnan().all())
    numbers, scales = codes.encode(torch.zeros(300), codes.signed_levels(), torch.rand(300))
    assert not codes.decode(numbers, scales, codes.signed_levels()).any()


@pytest.mark.parametrize("kind", ["signed", "unsigned"])
def test_codes_are_unbiased(kind):
    levels = tables()[kind]
    value = 0.637 if kind == "signed" else 3.1e-4
    values = torch.full((256 * 400,), value)
    values[::256] = 1.0
    torch.manual_seed(0)
    numbers, scales = codes.encode(values, levels, torch.rand_like(values))
    got = codes.decode(numbers, scales, levels).view(-1, 256)[:, 1:].double()
    spread = float(got.std()) / math.sqrt(got.numel())
    assert spread > 0
    assert abs(float(got.mean()) - value) < 5 * spread


# -- rounding ----------------------------------------------------------------------------------------------------


def test_rounding_is_unbiased():
    torch.manual_seed(0)
    values = torch.randn(64).repeat(4096, 1)
    random = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32)
    got = rounding.round_to_bfloat16(values, random).double()
    spread = got.std(0) / 64
    assert bool(((got.mean(0) - values[0]).abs() <= 5 * spread + 1e-12).all())
    assert bool(((got - values).abs() <= values.abs() * 2.0**-7).all())


def test_rounding_keeps_what_it_cannot_improve():
    odd = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1.5])
    got = rounding.round_to_bfloat16(odd, torch.full((6,), 0xFFFF, dtype=torch.int32))
    assert torch.equal(got[[0, 1, 3, 4, 5]].float(), odd[[0, 1, 3, 4, 5]]) and bool(got[2].isnan())


def constant_steps(stochastic):
    """200 steps of 1e-4 down from 1, where bfloat16 has steps of 4e-3."""
    param = nn.Parameter(torch.ones(4096, dtype=BF16))
    optimizer = AdamW([param], lr=1e-4, weight_decay=0.0, state_dtype=BF16, stochastic_rounding=stochastic)
    for _ in range(200):
        param.grad = torch.ones_like(param)
        optimizer.step()
    return param.detach().double()


def test_small_steps_add_up_where_rounding_to_the_nearest_stalls():
    assert float(constant_steps(False).min()) == 1.0
    moved = constant_steps(True)
    assert abs(float(moved.mean()) - 0.98) < 4 * float(moved.std()) / 64
    assert float(moved.std()) < 0.01


# -- the optimizer -----------------------------------------------------------------------------------------------


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def trained(make, dtype=torch.float32, steps=250):
    model = net().to(dtype)
    optimizer = make(model.parameters())
    teacher = torch.randn(16, 4, generator=toy.generator("teacher"))
    losses = []
    for step in range(steps):
        x = torch.randn(64, 16, generator=toy.generator("x", step))
        loss = (model(x.to(dtype)).float() - torch.sin(x @ teacher)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return sum(losses[-25:]) / 25


@pytest.mark.parametrize(("state_dtype", "within"), [(torch.float32, 1e-3), (BF16, 0.03), ("int8", 0.06)])
def test_trains_to_nearly_the_same_loss(state_dtype, within):
    expected = trained(lambda p: torch.optim.AdamW(p, lr=3e-3))
    assert trained(lambda p: AdamW(p, lr=3e-3, state_dtype=state_dtype)) == pytest.approx(
        expected, rel=within
    )


def test_bfloat16_weights_train_with_rounding_and_not_without():
    expected = trained(lambda p: torch.optim.AdamW(p, lr=3e-4), steps=400)
    options = {"lr": 3e-4, "state_dtype": BF16}
    rounded = trained(lambda p: AdamW(p, **options, stochastic_rounding=True), BF16, 400)
    nearest = trained(lambda p: AdamW(p, **options), BF16, 400)
    assert rounded == pytest.approx(expected, rel=0.05)
    assert abs(nearest - expected) > abs(rounded - expected)


def stored(optimizer, param):
    """The moments as float32."""
    boxed = optimizer.boxed_state(param, "p")
    return [boxed[f"p.{slot}"].pieces[0][1].float().clone() for slot in adamw.MOMENTS]


@pytest.mark.parametrize("state_dtype", [BF16, "int8"])
def test_moments_follow_those_of_float32(state_dtype):
    """Every step's rounding is bounded by a step between levels; over many steps nothing drifts."""
    param = nn.Parameter(torch.zeros(20, 256))
    optimizer = AdamW([param], lr=0.0, state_dtype=state_dtype)
    sizes = torch.logspace(-2, 0, 20).unsqueeze(1)
    first, second = torch.zeros(20, 256), torch.zeros(20, 256)
    for step in range(400):
        param.grad = sizes * torch.randn(20, 256, generator=toy.generator(step))
        before = stored(optimizer, param) if step else None
        optimizer.step()
        got = stored(optimizer, param)
        if before is not None:
            m, v = before
            m, v = m * 0.9 + param.grad * 0.1, v * 0.999 + param.grad.square() * 0.001
            bound_m = m.abs() * 2.0**-7 if state_dtype == BF16 else m.abs().amax(1, keepdim=True) * 0.015
            bound_v = v * (2.0**-7 if state_dtype == BF16 else 0.0914)
            arithmetic = 1e-6 * param.grad.abs().max()  # of float32 in another order
            assert bool(((got[0] - m).abs() <= bound_m + arithmetic).all())
            assert bool(((got[1] - v).abs() <= bound_v * (1 + 1e-5)).all())
        first, second = first * 0.9 + param.grad * 0.1, second * 0.999 + param.grad.square() * 0.001
    ratio = (got[1] / second).double()
    assert abs(float(ratio.mean()) - 1) < 0.02
    assert float(ratio.std()) < (0.04 if state_dtype == BF16 else 0.3)
    assert float((got[0] - first).norm() / first.norm()) < (0.01 if state_dtype == BF16 else 0.06)


def test_bytes_of_state():
    sizes = {}
    for state_dtype in (torch.float32, BF16, "int8"):
        param = nn.Parameter(torch.zeros(64, 256))
        optimizer = AdamW([param], state_dtype=state_dtype)
        param.grad = torch.ones_like(param)
        optimizer.step()
        sizes[state_dtype] = sum(t.nbytes for t in optimizer.state[param].values()) - 4
    n = 64 * 256
    assert list(sizes.values()) == [8 * n, 4 * n, 2 * n + 2 * 4 * 64]


def stepped(chunk, monkeypatch, **options):
    monkeypatch.setattr(adamw, "CHUNK", chunk)
    params = [
        nn.Parameter(torch.randn(s, generator=toy.generator(s))) for s in ((700,), (31, 9), (), (256,), (0,))
    ]
    optimizer = AdamW(params, lr=0.1, **options)
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=toy.generator(i, step))
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("state_dtype", [BF16, "int8"])
def test_chunks_change_nothing(state_dtype, monkeypatch):
    expected = stepped(1 << 22, monkeypatch, state_dtype=state_dtype)
    for got, value in zip(stepped(256, monkeypatch, state_dtype=state_dtype), expected, strict=True):
        assert torch.equal(got, value)


def test_batches_cover_everything_once_on_block_boundaries(monkeypatch):
    monkeypatch.setattr(adamw, "CHUNK", 768)
    numels = [10, 2000, 256, 0, 1]
    found = adamw.batches(numels)
    cuts = [cut for batch in found for cut in batch]
    for i, numel in enumerate(numels):
        ends = [(low, high) for j, low, high, _ in cuts if j == i]
        assert [low for low, _ in ends] == [0, *(high for _, high in ends[:-1])] if numel else not ends
        assert not numel or ends[-1][1] == numel
    for batch in found:
        assert all(low % 256 == 0 and at % 256 == 0 for _, low, _, at in batch)
        assert sum(adamw.padded(high - low) for _, low, high, _ in batch) <= 768
        for (_, low, high, at), (_, _, _, following) in itertools.pairwise(batch):
            assert following == at + adamw.padded(high - low)


@pytest.mark.parametrize("state_dtype", [torch.float32, BF16, "int8"])
def test_parameters_that_are_not_row_major(state_dtype):
    results = []
    for transposed in (False, True):
        values = torch.randn(40, 30, generator=toy.generator("t"))
        param = nn.Parameter(values.t().contiguous().t() if transposed else values)
        optimizer = AdamW([param], lr=0.1, state_dtype=state_dtype)
        for step in range(2):
            param.grad = torch.randn(40, 30, generator=toy.generator(step))
            optimizer.step()
        results.append(param.detach())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("state_dtype", [BF16, "int8"])
def test_compiles_once_and_whole(state_dtype):
    torch._dynamo.reset()
    results = []
    for compiled in (False, "aot_eager"):
        param = nn.Parameter(torch.randn(512, generator=toy.generator("c")).to(BF16))
        options = {"state_dtype": state_dtype, "stochastic_rounding": True, "compile": compiled}
        optimizer = AdamW([param], lr=0.01, **options)
        torch._dynamo.utils.counters.clear()
        for step in range(4):
            param.grad = torch.randn(512, generator=toy.generator(step)).to(BF16)
            optimizer.step()
        results.append(param.detach().clone())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert float((results[0] - results[1]).abs().max()) <= 2.0**-6
    assert float((results[0] != results[1]).float().mean()) < 0.01


@pytest.mark.matrix
@pytest.mark.parametrize("state_dtype", [BF16, "int8"])
def test_inductor(state_dtype):
    expected = trained(lambda p: AdamW(p, lr=3e-3, state_dtype=state_dtype))
    got = trained(lambda p: AdamW(p, lr=3e-3, state_dtype=state_dtype, compile=True))
    assert got == pytest.approx(expected, rel=0.05)


# -- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", [torch.float16, torch.int8, "int4", None, 8])
def test_moments_that_cannot_be_stored(state_dtype):
    with pytest.raises(PlanError, match="moments cannot be stored") as caught:
        AdamW([nn.Parameter(torch.zeros(2))], state_dtype=state_dtype)
    assert "'int8'" in str(caught.value)


def test_rounding_of_weights_that_need_none():
    model = nn.Linear(3, 3)
    optimizer = AdamW(model.parameters(), stochastic_rounding=True)
    model(torch.ones(1, 3)).sum().backward()
    before = model.weight.detach().clone()
    with pytest.raises(PlanError, match="for bfloat16 parameters"):
        optimizer.step()
    assert torch.equal(model.weight, before) and not optimizer.state[model.weight]
    for master, good in ((None, False), (BF16, True)):
        model = nn.Linear(3, 3)
        inner = AdamW(model.parameters(), stochastic_rounding=True)
        precision = MixedPrecision(compute=BF16, master=master)
        sharded = shard_optimizer(inner, None, model=model, precision=precision)
        model(torch.ones(1, 3, dtype=BF16)).sum().backward()
        if good:
            sharded.step()
        else:
            with pytest.raises(PlanError, match="float32"):
                sharded.step()


def test_options_out_of_range():
    with pytest.raises(PlanError, match="AdamW: betas"):
        AdamW([nn.Parameter(torch.zeros(2))], betas=(1.0, 0.9))
    by = low_bits.scalars({"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.5, "eps": 1e-8}, 1)
    assert (by.rate, by.decay, by.root) == pytest.approx((1.0, 0.95, 0.1))
