"""AdamW in one pass: as torch's own, in any layout of memory, and an optimizer whose checkpoints are torch's."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from kernel_checks import DEVICE

from cai_kernels import AdamWOptions, FusedAdamW, KernelError, adamw_step_, adamw_steps_
from cai_kernels.adamw.halves import join, split

SIZES = [(1,), (7,), (0, 3), (), (2048,), (2049,), (3, 5, 401), (4096,)]
BACKENDS = ["triton", "reference"]
OPTIONS = AdamWOptions(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
SLOTS = ("step", "exp_avg", "exp_avg_sq")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def values(shape, random, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=random).to(DEVICE, dtype)


def state_of(shape, random) -> list[torch.Tensor]:
    """A parameter and its moments."""
    return [values(shape, random), values(shape, random) / 10, values(shape, random).square() / 10]


def exact(held, grad, options: AdamWOptions, step: int, scale: float = 1.0) -> list[torch.Tensor]:
    """`torch.optim.AdamW` in float64: parameter and moments after step number `step`."""
    param = torch.nn.Parameter(held[0].double())
    optimizer = torch.optim.AdamW(
        [param],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        foreach=False,
    )
    moments = {"exp_avg": held[1].double(), "exp_avg_sq": held[2].double()}
    optimizer.state[param] = {"step": torch.tensor(float(step - 1)), **moments}
    param.grad = grad.double() * scale
    optimizer.step()
    return [param.detach(), moments["exp_avg"], moments["exp_avg_sq"]]


def assert_steps(held, grad, options, step, backend, grad_scale=1.0):
    wanted = exact(held, grad, options, step, float(grad_scale))
    before = grad.clone()
    param, exp_avg, exp_avg_sq = held
    adamw_step_(param, grad, exp_avg, exp_avg_sq, options, step=step, grad_scale=grad_scale, backend=backend)
    for got, value in zip(held, wanted, strict=True):
        torch.testing.assert_close(got.double(), value, rtol=1e-6, atol=3e-7)
    assert torch.equal(grad, before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SIZES)
def test_a_step(shape, dtype, backend):
    random = generator()
    held = state_of(shape, random)
    assert_steps(held, values(shape, random, dtype), OPTIONS, 3, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [
        AdamWOptions(lr=1e-2, weight_decay=0.0),
        AdamWOptions(lr=1e-3, beta1=0.0, beta2=0.5, eps=1e-3, weight_decay=1.0),
        AdamWOptions(lr=0.0, weight_decay=0.5),
        AdamWOptions(lr=1, beta1=0.95, beta2=0.99999, eps=1, weight_decay=0),
    ],
)
@pytest.mark.parametrize("step", [1, 10_000_000])
def test_numbers(options, step, backend):
    random = generator(1)
    assert_steps(state_of((2500,), random), values((2500,), random), options, step, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_from_nothing(backend):
    random = generator(2)
    held = [values((1111,), random), torch.zeros(1111, device=DEVICE), torch.zeros(1111, device=DEVICE)]
    wanted = [value.double() for value in held]
    for step in range(1, 7):
        grad = values((1111,), random) * 10.0 ** (step - 4)
        wanted = exact(wanted, grad, OPTIONS, step)
        adamw_step_(held[0], grad, held[1], held[2], OPTIONS, step=step, backend=backend)
        for got, value in zip(held, wanted, strict=True):
            torch.testing.assert_close(got.double(), value, rtol=2e-6, atol=3e-7)


def test_a_small_decay_is_not_rounded_away():
    """1 - lr * weight_decay is 1 in float32 here, but a moved parameter is not."""
    held = [torch.full((4,), 1.0, device=DEVICE), *(torch.zeros(4, device=DEVICE) for _ in range(2))]
    held[0] += torch.tensor([0.0, 0.9, 3.0, 2e-7], device=DEVICE)
    options = AdamWOptions(lr=1e-3, weight_decay=1e-1)
    assert_steps(held, torch.zeros(4, device=DEVICE), options, 1, "triton")
    assert held[0][0] < 1.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["number", "float32", "bfloat16"])
def test_gradients_are_scaled_as_they_are_read(form, backend):
    random = generator(3)
    scale: float | torch.Tensor = 0.125
    if form != "number":
        scale = torch.tensor(scale, dtype=getattr(torch, form), device=DEVICE)
    assert_steps(state_of((2100,), random), values((2100,), random), OPTIONS, 2, backend, scale)


def test_slices_of_flat_storages_and_nothing_beside_them():
    random = generator(4)
    flats = state_of((9000,), random)
    grads = values((9000,), random, torch.bfloat16)
    for low, high in ((1, 2050), (2050, 2053), (2053, 8999)):
        before = [flat.clone() for flat in flats]
        assert_steps([flat[low:high] for flat in flats], grads[low:high], OPTIONS, 5, "triton")
        for flat, old in zip(flats, before, strict=True):
            assert torch.equal(flat[:low], old[:low]) and torch.equal(flat[high:], old[high:])
            assert not torch.equal(flat[low:high], old[low:high])


def test_many_parameters_each_at_its_own_step():
    random = generator(5)
    held = [state_of(shape, random) for shape in SIZES]
    grads = [values(shape, random) for shape in SIZES]
    steps = [i + 1 for i in range(len(SIZES))]
    wanted = [exact(h, g, OPTIONS, s, 0.5) for h, g, s in zip(held, grads, steps, strict=True)]
    params, exp_avgs, exp_avg_sqs = (list(each) for each in zip(*held, strict=True))
    adamw_steps_(params, grads, exp_avgs, exp_avg_sqs, OPTIONS, steps=steps, grad_scale=0.5, backend="triton")
    for got, values_ in zip(held, wanted, strict=True):
        for tensor, value in zip(got, values_, strict=True):
            torch.testing.assert_close(tensor.double(), value, rtol=1e-6, atol=1e-7)


MIXED = (0, 1, 7, 2047, 2048, 2049, 3 * 2048 + 5, 2048)


def flat_lists(offset: int, random) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters, two moments and gradients in flat storages, and slices of them with gaps, of the sizes MIXED."""
    total = sum(MIXED) + 3 * len(MIXED)
    flats = [*state_of((total,), random), values((total,), random)]
    slices, low = [], offset
    for size in MIXED:
        slices.append([flat[low : low + size] for flat in flats])
        low += size + 3
    return flats, slices


@pytest.fixture
def kernels(monkeypatch):
    """How many tensors a launch had, in order: of the kernel for one tensor, and of the one for many."""
    from cai_kernels.adamw import triton

    found, one, many = [], triton.run, triton._launch_many

    def counted_one(*args):
        found.append(1)
        one(*args)

    def counted_many(entries, *args):
        found.append(len(entries))
        many(entries, *args)

    monkeypatch.setattr(triton, "run", counted_one)
    monkeypatch.setattr(triton, "_launch_many", counted_many)
    return found


@pytest.mark.parametrize("form", ["number", "tensor"])
@pytest.mark.parametrize("dtypes", [("float32",), ("bfloat16",), ("float32", "bfloat16")])
def test_one_launch_for_many_tensors_of_any_size(dtypes, form, kernels):
    """Steps and dtypes of gradients in turn, in slices that no vector of 128 bits begins at."""
    flats, slices = flat_lists(1, generator(9))
    before = [flat.clone() for flat in flats]
    params, exp_avgs, exp_avg_sqs, grads = (list(each) for each in zip(*slices, strict=True))
    grads = [g.to(getattr(torch, dtypes[i % len(dtypes)])) for i, g in enumerate(grads)]
    steps = [1 + i % 3 * 1000 for i in range(len(grads))]
    scale = torch.tensor(0.5, device=DEVICE) if form == "tensor" else 0.5
    wanted = [exact(held, g, OPTIONS, n, 0.5) for held, g, n in zip(slices, grads, steps, strict=True)]
    adamw_steps_(
        params, grads, exp_avgs, exp_avg_sqs, OPTIONS, steps=steps, grad_scale=scale, backend="triton"
    )
    assert kernels == {1: [7], 2: [4, 3]}[len(dtypes)]
    for held, values_ in zip(slices, wanted, strict=True):
        for tensor, value in zip(held[:3], values_, strict=True):
            torch.testing.assert_close(tensor.double(), value, rtol=1e-6, atol=3e-7)
    written = torch.zeros(len(flats[0]), dtype=torch.bool, device=DEVICE)
    for held in slices:
        written[held[0].storage_offset() :][: len(held[0])] = True
    for flat, old in zip(flats[:3], before[:3], strict=True):
        assert torch.equal(flat[~written], old[~written])
        assert not torch.equal(flat[written], old[written])
    assert torch.equal(flats[3], before[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("aligned", [True, False])
def test_many_tensors_step_as_each_alone_bit_for_bit(aligned, dtype):
    """Several steps, with other gradients each time, and fewer tensors in one of them."""
    random = generator(10)
    together, alone = (
        [[t.clone() if aligned else flat_copy(t) for t in state_of((n,), generator(n))] for n in MIXED]
        for _ in range(2)
    )
    for step in (1, 2, 3):
        chosen = range(len(MIXED)) if step != 2 else range(2, len(MIXED))
        grads = [values((MIXED[i],), random, dtype) for i in chosen]
        columns = [list(each) for each in zip(*(together[i] for i in chosen), strict=True)]
        counts = [step + i for i in chosen]
        adamw_steps_(columns[0], grads, *columns[1:], OPTIONS, steps=counts, grad_scale=0.3, backend="triton")
        for i, grad in zip(chosen, grads, strict=True):
            param, exp_avg, exp_avg_sq = alone[i]
            adamw_step_(
                param, grad, exp_avg, exp_avg_sq, OPTIONS, step=step + i, grad_scale=0.3, backend="triton"
            )
    for one, other in zip(together, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def flat_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that begins 4 bytes into its storage."""
    return torch.cat([tensor.new_zeros(1), tensor])[1:]


def test_what_is_kept_of_sizes_is_not_taken_for_others():
    from cai_kernels.adamw import triton

    device = torch.device(DEVICE)
    for sizes in ((5, 2049), (2049, 5), (5, 2049), (2048, 1)):
        owners, spans = triton._kept(sizes, device)
        blocks = [-(-size // triton.BLOCK) for size in sizes]
        assert owners.tolist() == [i for i, count in enumerate(blocks) for _ in range(count)]
        assert spans.tolist() == [[0, blocks[0]], list(sizes)]


def test_no_tensors_are_no_step():
    adamw_steps_([], [], [], [], OPTIONS, steps=[], backend="triton")
    empty = [torch.ones(0, device=DEVICE) for _ in range(4)]
    adamw_steps_(*([t, t] for t in empty), OPTIONS, steps=[1, 1], backend="triton")
    beside, alone = ([torch.ones(3, device=DEVICE) for _ in range(4)] for _ in range(2))
    adamw_steps_(
        *([e, t] for e, t in zip(empty, beside, strict=True)), OPTIONS, steps=[1, 1], backend="triton"
    )
    adamw_step_(*alone, OPTIONS, step=1, backend="triton")
    for one, other in zip(beside, alone, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_counts_as_a_write(backend):
    random = generator(6)
    param, exp_avg, exp_avg_sq = state_of((5,), random)
    param.requires_grad_()
    grad, tensors = values((5,), random), (param, exp_avg, exp_avg_sq)
    before = [t._version for t in tensors]
    adamw_step_(param, grad, exp_avg, exp_avg_sq, OPTIONS, step=1, backend=backend)
    assert all(t._version > version for t, version in zip(tensors, before, strict=True))


def test_the_op_is_clean_for_the_compiler():
    from cai_kernels.adamw import triton

    random = generator(7)
    param, exp_avg, exp_avg_sq = state_of((70,), random)
    numbers = (0.5, 3, 1e-2, 0.9, 0.95, 1e-8, 0.1)
    high, low = split(param)
    for scale in (None, torch.ones((), device=DEVICE)):
        for weights in ((param, None), (high, low)):
            arguments = (weights[0], values((70,), random), exp_avg, exp_avg_sq, weights[1], scale, *numbers)
            torch.library.opcheck(triton.adamw_step, arguments)


def refused(match: str, *, step: int = 1, options: dict | None = None, **changed):
    tensors = {name: torch.ones(4, 2, device=DEVICE) for name in ("param", "grad", "exp_avg", "exp_avg_sq")}
    with pytest.raises(KernelError, match=match):
        adamw_step_(**(tensors | changed), options=AdamWOptions(**(options or {})), step=step)


def test_errors_name_the_argument():
    ones = torch.ones(4, 2, device=DEVICE)
    refused(r"params\[0\] has an unsupported dtype", param=ones.bfloat16())
    refused(r"grads\[0\] has an unsupported dtype", grad=ones.half())
    refused(r"exp_avgs\[0\] has an unsupported dtype", exp_avg=ones.bfloat16())
    refused(r"exp_avg_sqs\[0\] has another shape", exp_avg_sq=ones[:3])
    refused(r"grads\[0\] is on another device", grad=ones.to("meta"))
    refused(r"params\[0\] is not contiguous", param=torch.ones(2, 4, device=DEVICE).t())
    refused(r"exp_avgs\[0\] is not contiguous", exp_avg=torch.ones(2, 4, device=DEVICE).t())
    refused("grad_scale is not one number", grad_scale=ones)
    refused("grad_scale is not one number", grad_scale=torch.ones(1, dtype=torch.int32, device=DEVICE))
    refused("grad_scale is on another device", grad_scale=torch.ones((), device="meta"))
    refused(r"steps\[0\] is not positive", step=0)
    refused("beta2 is out of range", options={"beta2": 1.0})
    with pytest.raises(KernelError, match="differ in length"):
        adamw_steps_([ones], [ones], [], [ones], OPTIONS, steps=[1])


def test_nothing_is_written_where_one_of_many_does_not_fit():
    held = [state_of((4,), generator(i)) for i in range(2)]
    before = copy.deepcopy(held)
    params, exp_avgs, exp_avg_sqs = (list(each) for each in zip(*held, strict=True))
    grads = [torch.ones(4, device=DEVICE), torch.ones(5, device=DEVICE)]
    with pytest.raises(KernelError, match=r"grads\[1\] has another shape"):
        adamw_steps_(params, grads, exp_avgs, exp_avg_sqs, OPTIONS, steps=[1, 1], backend="triton")
    assert all(
        torch.equal(a, b) for x, y in zip(held, before, strict=True) for a, b in zip(x, y, strict=True)
    )


# -- the optimizer ---------------------------------------------------------------------------------------------------


def parameters(dtype=torch.float32) -> list[torch.nn.Parameter]:
    random = generator(8)
    return [torch.nn.Parameter(values(shape, random, dtype)) for shape in ((3, 7), (11,), (2100,), (5,))]


def groups_of(params) -> list[dict]:
    return [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:], "lr": 2e-2}]


def made(kind, params, **changed):
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1} | changed
    if kind is torch.optim.AdamW:
        return kind(groups_of(params), **{"fused": True} | options)
    return kind(groups_of(params), **{"backend": "triton"} | options)


def give_gradients(step: int, *lists, factor: float = 1.0):
    """The same for every list; the last parameter has none in even steps."""
    for params in lists:
        random = generator(100 + step)
        for param in params:
            param.grad = values(param.shape, random, param.dtype) * factor
        if step % 2 == 0:
            params[-1].grad = None


def assert_same(ours, theirs, one, other):
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        assert set(one.state[p]) == set(other.state[q]) == set(SLOTS)
        for slot in SLOTS:
            got, wanted = one.state[p][slot], other.state[q][slot]
            assert (got.dtype, got.device) == (wanted.dtype, wanted.device)
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)


@pytest.fixture
def launches(monkeypatch):
    """Numbers of parameters that the kernel stepped, a group each."""
    from cai_kernels.adamw import optimizer

    found, run = [], optimizer.launch

    def counted(entries, *args):
        found.append(len(entries))
        run(entries, *args)

    monkeypatch.setattr(optimizer, "launch", counted)
    return found


def test_five_steps_with_groups_and_a_schedule(launches):
    ours, theirs = parameters(), parameters()
    one, other = made(FusedAdamW, ours), made(torch.optim.AdamW, theirs)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.3) for each in (one, other)]
    for step in range(1, 6):
        give_gradients(step, ours, theirs)
        for each in (one, other, *schedules):
            each.step()
    assert_same(ours, theirs, one, other)
    assert one.param_groups[1]["lr"] == pytest.approx(2e-2 * 0.09)
    assert one.state[ours[-1]]["step"] == 3
    assert launches == [2, 2, 2, 1, 2, 2, 2, 1, 2, 2]


def test_a_parameter_that_never_has_a_gradient_stays():
    ours = parameters()
    before = ours[-1].detach().clone()
    one = made(FusedAdamW, ours)
    give_gradients(2, ours)
    one.step()
    assert torch.equal(ours[-1], before)
    assert ours[-1] not in one.state


@pytest.mark.parametrize("fused", [True, False])
def test_state_goes_to_torch_and_back(fused, launches):
    ours, theirs, again = parameters(), parameters(), parameters()
    one, other = made(FusedAdamW, ours), made(torch.optim.AdamW, theirs, fused=fused)
    for step in (1, 2):
        give_gradients(step, ours, theirs)
        one.step()
        other.step()
    with torch.no_grad():
        for p, q in zip(again, theirs, strict=True):
            p.copy_(q)
    back = made(FusedAdamW, again)
    back.load_state_dict(copy.deepcopy(other.state_dict()))
    other.load_state_dict(copy.deepcopy(one.state_dict()))  # fused from now on
    assert one.state_dict()["param_groups"] == other.state_dict()["param_groups"]
    for step in (3, 4, 5):
        give_gradients(step, ours, theirs, again)
        for each in (one, other, back):
            each.step()
    assert_same(ours, theirs, one, other)
    for p, q in zip(again, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert [int(back.state[p]["step"]) for p in again] == [5, 5, 5, 3]
    assert sum(launches) == 7 + 2 * 11


def test_a_group_is_one_launch(kernels):
    ours = parameters()
    one = made(FusedAdamW, ours)
    give_gradients(1, ours)
    one.step()
    assert kernels == [2, 2]


def test_state_that_somebody_clears_begins_anew():
    ours = parameters()
    one = made(FusedAdamW, ours)
    for _ in range(3):
        give_gradients(1, ours)
        one.step()
    one.state.clear()
    give_gradients(1, ours)
    one.step()
    assert {int(one.state[p]["step"]) for p in ours} == {1}


def test_a_count_that_somebody_writes_is_seen(launches):
    """As a checkpoint does that is loaded in place, and as `initialize_state` of cai-zero."""
    ours, theirs = parameters(), parameters()
    one, other = made(FusedAdamW, ours), made(torch.optim.AdamW, theirs)
    for step in (1, 3, 5):
        give_gradients(step, ours, theirs)
        one.step()
        other.step()
        if step == 1:
            for optimizer, params in ((one, ours), (other, theirs)):
                optimizer.state[params[0]]["step"].zero_()
                optimizer.state[params[2]]["step"].detach().copy_(torch.tensor(41.0))
    assert [int(one.state[p]["step"]) for p in ours] == [2, 3, 43, 3]
    assert_same(ours, theirs, one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tensor", [False, True])
def test_the_factor_of_the_gradients_lasts_a_step(tensor, backend, dtype, launches):
    ours, theirs = parameters(dtype), parameters(dtype)
    one, other = made(FusedAdamW, ours, backend=backend), made(torch.optim.AdamW, theirs)
    for step, factor in ((1, 0.25), (3, 1.0), (5, 4.0)):
        give_gradients(step, ours)
        give_gradients(step, theirs, factor=factor)
        one.gradient_factor = torch.tensor(factor, dtype=torch.float64, device=DEVICE) if tensor else factor
        one.step()
        other.step()
        assert one.gradient_factor == 1.0
    assert_same(ours, theirs, one, other)
    assert bool(launches) == (backend == "triton" and dtype == torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf])
def test_a_factor_that_is_not_finite_leaves_the_step_out(factor, tensor, backend, dtype):
    ours, theirs = parameters(dtype), parameters(dtype)
    one, other = made(FusedAdamW, ours, backend=backend), made(torch.optim.AdamW, theirs)
    for step in (1, 2, 3):
        if step == 2:
            give_gradients(7, ours)
            one.gradient_factor = torch.tensor(factor, device=DEVICE) if tensor else factor
            one.step()
        give_gradients(step, ours, theirs)
        one.step()
        other.step()
    assert_same(ours, theirs, one, other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tensor", [False, True])
def test_a_scale_that_is_not_finite_writes_nothing(tensor, backend):
    held = state_of((4099,), generator(3))
    before = [each.clone() for each in held]
    scale = torch.tensor(math.nan, device=DEVICE) if tensor else math.nan
    grad = values((4099,), generator(4))
    adamw_step_(held[0], grad, *held[1:], OPTIONS, step=3, grad_scale=scale, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))


def test_the_gradients_themselves_stay_as_they_are():
    ours = parameters()
    one = made(FusedAdamW, ours)
    give_gradients(1, ours)
    before = [p.grad.clone() for p in ours]
    one.gradient_factor = 0.5
    one.step()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(ours, before, strict=True))


def slanted() -> list[torch.nn.Parameter]:
    params = parameters()
    params[0] = torch.nn.Parameter(params[0].detach().t())
    return params


@pytest.mark.parametrize(
    ("change", "stepped"),
    [({"amsgrad": True}, 0), ({"maximize": True}, 0), ({"lr": torch.tensor(1e-2)}, 0), ({}, 2)],
)
def test_what_the_kernel_does_not_know_is_torchs_step(change, stepped, launches):
    """A group whose options it lacks, or with a parameter that is not contiguous; the other group is its own."""
    ours, theirs = (parameters(), parameters()) if change else (slanted(), slanted())
    one, other = made(FusedAdamW, ours), made(torch.optim.AdamW, theirs)
    for optimizer in (one, other):
        for group in optimizer.param_groups:
            group.update(change)
    for step in (1, 3):
        give_gradients(step, ours, theirs)
        one.step()
        other.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert launches == [stepped] * (2 if stepped else 0)


def test_a_scaler_that_found_infinity_skips_the_step():
    ours = parameters()
    before = [p.detach().clone() for p in ours]
    one = made(FusedAdamW, ours)
    give_gradients(1, ours)
    one.found_inf = torch.ones((), device=DEVICE)
    one.step()
    assert all(torch.equal(p, old) for p, old in zip(ours, before, strict=True))
    assert one.state[ours[0]]["step"] == 0
    del one.found_inf
    one.step()
    assert one.state[ours[0]]["step"] == 1
    assert not torch.equal(ours[0], before[0])


def test_closures_hooks_and_copies(launches):
    ours = parameters()
    one, hooked = made(FusedAdamW, ours), []
    made(torch.optim.AdamW, parameters())  # torch then wraps the step of its own class
    one.register_step_pre_hook(lambda *_: hooked.append("before"))
    one.register_step_post_hook(lambda *_: hooked.append("after"))

    def closure():
        for param in ours:
            param.grad = None
        loss = sum(p.square().sum() for p in ours)
        loss.backward()
        one.gradient_factor = 0.5
        return loss

    assert one.step(closure).requires_grad
    assert hooked == ["before", "after"]
    assert one.gradient_factor == 1.0
    again = pickle.loads(pickle.dumps(one))
    assert again.gradient_factor == 1.0
    for param in (p for group in again.param_groups for p in group["params"]):
        param.grad = torch.ones_like(param)
    again.step()
    assert {int(state["step"]) for state in again.state.values()} == {2}


def test_a_graph_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(KernelError, match="a CUDA graph does not ask again"):
        made(FusedAdamW, parameters()).step()


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_on_the_gpu_as_torchs_and_without_a_wait(factor, launches):
    ours, theirs = parameters(), parameters()
    one, other = made(FusedAdamW, ours, backend="auto"), made(torch.optim.AdamW, theirs)
    factors = [torch.tensor(each, dtype=torch.float64, device=DEVICE) for each in (math.nan, factor)]
    for step in range(1, 7):
        give_gradients(step, ours)
        give_gradients(step, theirs, factor=factor)
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            for one.gradient_factor in factors:  # the first leaves its step out
                one.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        other.step()
    assert_same(ours, theirs, one, other)
    assert len(launches) == 24


@pytest.mark.gpu
def test_many_tensors_on_the_gpu_without_a_wait():
    """Gradients are allocated anew and the host runs ahead, so tables of several steps are under way at once."""
    random = generator(11)
    together, alone = ([state_of((n,), generator(n)) for n in MIXED * 40] for _ in range(2))
    columns = [list(each) for each in zip(*together, strict=True)]
    steps = [[values((n,), random) for n in MIXED * 40] for _ in range(4)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, grads in enumerate(steps, 1):
            fresh = [grad.clone() for grad in grads]
            counts = [step] * len(fresh)
            adamw_steps_(columns[0], fresh, *columns[1:], OPTIONS, steps=counts, backend="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step, grads in enumerate(steps, 1):
        for held, grad in zip(alone, grads, strict=True):
            adamw_step_(held[0], grad, held[1], held[2], OPTIONS, step=step, backend="triton")
    for one, other in zip(together, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    count = 2**31 + 5
    held = [torch.ones(count, device="cuda"), *(torch.zeros(count, device="cuda") for _ in range(2))]
    grad = torch.ones(count, dtype=torch.bfloat16, device="cuda")
    grad[-1] = -3.0
    adamw_step_(held[0], grad, held[1], held[2], AdamWOptions(lr=0.5, weight_decay=0.0), step=1)
    wanted = torch.tensor([0.5, 0.5, 1.5], device="cuda")
    torch.testing.assert_close(held[0][torch.tensor([0, count - 2, count - 1], device="cuda")], wanted)
    assert held[0][:-1].eq(held[0][0]).all()


# -- in halves -----------------------------------------------------------------------------------------------------


def hard_numbers() -> torch.Tensor:
    """Where rounding is not usual: ties, the largest and smallest numbers, zeros, infinities, numbers that are none."""
    bits = [
        0,
        0x8000,
        0x7FFF,
        0x8001,
        0x3F808000,
        0x3F818000,
        0x7F7FFFFF,
        0x7F7F8000,
        1,
        0x7F800000,
        0x7FFFFFFF,
    ]
    bits += [0x7F800001, 0x7FC00000]
    return (
        torch.tensor(bits + [b - 0x80000000 for b in bits], dtype=torch.int64)
        .to(torch.int32)
        .view(torch.float32)
    )


def test_halves_are_the_number():
    full = torch.cat([hard_numbers(), values(100_001, generator()).cpu()])
    high, low = split(full)
    back = join(high, low)
    assert high.dtype is torch.bfloat16 and low.dtype is torch.int16
    numbers = ~full.isnan()
    assert torch.equal(back.view(torch.int32)[numbers], full.view(torch.int32)[numbers])
    assert back[~numbers].isnan().all() and high[~numbers].isnan().all()
    tie = (full.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(high[numbers & ~tie], full.to(torch.bfloat16)[numbers & ~tie])
    assert (high.float().abs() >= full.abs())[numbers & tie].all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_in_halves_is_that_of_the_number(dtype, backend):
    random = generator()
    whole = [state_of(shape, random) for shape in SIZES]
    grads = [values(shape, random, dtype) for shape in SIZES]
    highs, lows = zip(*(split(held[0]) for held in whole), strict=True)
    own = [[held[i].clone() for held in whole] for i in (1, 2)]
    params, *moments = zip(*whole, strict=True)
    for number in (3, 4):
        same = {"steps": [number] * len(SIZES), "grad_scale": 0.5, "backend": backend}
        adamw_steps_(params, grads, *moments, OPTIONS, **same)
        adamw_steps_(highs, grads, *own, OPTIONS, lows=lows, **same)
    assert all(torch.equal(join(*pair), param) for *pair, param in zip(highs, lows, params, strict=True))
    for mine, others in zip(own, moments, strict=True):
        assert all(map(torch.equal, mine, others))


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_that_are_none_stay_so_in_halves(backend):
    param = hard_numbers().to(DEVICE)
    high, low = split(param)
    first, second, grad = torch.zeros_like(param), torch.zeros_like(param), torch.zeros_like(param)
    still = AdamWOptions(lr=0.0)
    adamw_step_(high, grad, first, second, still, step=1, low=low, backend=backend)
    back, none = join(high, low), param.isnan()
    assert back[none].isnan().all() and high[none].isnan().all()
    finite = param.isfinite()
    assert torch.equal(back[finite], param[finite])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_zero_that_was_written_to_the_upper_half_is_one(backend):
    high, low = torch.tensor([0.0, -0.0]).bfloat16().to(DEVICE), torch.tensor([-5, -7]).short().to(DEVICE)
    zeros = [torch.zeros(2, device=DEVICE) for _ in range(3)]
    adamw_step_(high, *zeros, AdamWOptions(lr=0.0), step=1, low=low, backend=backend)
    assert (join(high, low) == 0).all() and (low == 0).all()


def test_bad_halves_are_named():
    param = values((4, 4), generator())
    high, low = split(param)
    moments = [torch.zeros_like(param), torch.zeros_like(param)]
    for arguments, text in (
        ((param, low), r"params\[0\]"),
        ((high, low.int()), r"lows\[0\]"),
        ((high, low[:2]), r"lows\[0\]"),
        ((high, None), r"params\[0\]"),
    ):
        with pytest.raises(KernelError, match=text):
            adamw_step_(arguments[0], param, *moments, OPTIONS, step=1, low=arguments[1])


def test_the_optimizer_steps_halves():
    random = generator()
    starts = [values(shape, random) for shape in ((3, 5), (2049,), (0,))]
    twin, split_up = ([torch.nn.Parameter(s.clone()) for s in starts] for _ in range(2))
    optimizers = [FusedAdamW(params, lr=1e-2, backend="triton") for params in (twin, split_up)]
    halves = {param: split(param.detach()) for param in split_up}
    for param in split_up:
        param.data = param.new_full((), math.nan).expand(param.shape)
    for factor in (1.0, torch.tensor(0.5, device=DEVICE)):
        grads = [values(s.shape, random) for s in starts]
        for optimizer, params in zip(optimizers, (twin, split_up), strict=True):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone()
            optimizer.gradient_factor = factor
        assert optimizers[1].takes_halves()
        optimizers[1].halves = halves
        for optimizer in optimizers:
            optimizer.step()
        assert optimizers[1].halves is None
    for whole, param in zip(twin, split_up, strict=True):
        assert torch.equal(join(*halves[param]), whole.detach())
    hook = optimizers[1].register_step_post_hook(lambda *_: None)
    assert not optimizers[1].takes_halves()
    hook.remove()
    assert optimizers[1].takes_halves()
    assert not type("Other", (FusedAdamW,), {})(split_up, backend="triton").takes_halves()
    optimizers[1].param_groups[0]["maximize"] = True
    assert not optimizers[1].takes_halves()
    optimizers[1].halves = halves
    with pytest.raises(KernelError, match="halves"):
        optimizers[1].step()
