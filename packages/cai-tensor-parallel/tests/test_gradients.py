"""What loops read of the gradients of a cut model, and wrappers that would take its ranks for copies."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from small_models import build, full, in_float64
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cai_mesh.errors import LayoutError, PlanError
from cai_mesh.layout import BoxedTensor
from cai_mesh.testing import assert_same_as_one_device, run_ranks
from cai_tensor_parallel import parallelize

STEPS, CLIP = 3, 0.3


def batch(step):
    return torch.randint(0, 100, (4, 8), generator=torch.Generator().manual_seed(step))


def loop(model, **options):
    """An ordinary loop, with torch's own clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    losses, norms = [], []
    for step in range(STEPS):
        loss = model(input_ids=batch(step), labels=batch(step), use_cache=False).loss
        loss.backward()
        largest = max(float(p.grad.abs().max()) for p in model.parameters())
        norms += [largest, float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms


def small(name="llama"):
    model = build(name, vocab_size=100)
    model.loss_function = in_float64
    return model


def mesh_of(**axes):
    return dist.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def trained(name, axes, mode, copied, options):
    model = small(name)
    parallelize(model, mesh_of(**axes), mode=mode)
    if copied:
        model = copy.deepcopy(model)
    found = loop(model, **options)
    return *found, full(BoxedTensor.of_model(model), dist.group.WORLD)


@pytest.mark.parametrize(
    ("name", "axes", "mode", "copied", "options"),
    [
        ("llama", {"tp": 2}, "1d", False, {}),
        ("llama", {"tp": 2}, "1d", True, {"foreach": False}),
        ("llama", {"tp": 2}, "1d", False, {"fused": True}),
        ("gpt2", {"tp_row": 2, "tp_col": 2}, "2d", False, {}),
    ],
)
def test_an_ordinary_loop_clips_by_the_norm_of_the_model(name, axes, mode, copied, options):
    model = small(name)
    losses, norms = loop(model)
    expected = {n: p.detach() for n, p in model.named_parameters()}
    ranks = math.prod(axes.values())
    for got_losses, got_norms, parameters in run_ranks(ranks, trained, name, axes, mode, copied, options):
        assert got_losses == pytest.approx(losses, rel=1e-9)
        assert got_norms == pytest.approx(norms, rel=1e-9)
        assert_same_as_one_device(parameters, expected, tolerance=1e-7)


def mixing(kind):
    model = parallelize(small(), mesh_of(tp=2))
    model(input_ids=batch(0), labels=batch(0)).loss.backward()
    before = model.lm_head.weight.detach().clone()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    with pytest.raises(
        PlanError, match=r"does not treat elements independently|runs forward and backward itself"
    ):
        optimizer.step(lambda: 0.0)
    assert torch.equal(model.lm_head.weight, before)
    whole = [p for n, p in model.named_parameters() if "norm" in n]
    getattr(torch.optim, kind)(whole, lr=0.1).step(
        lambda: torch.zeros(())
    )  # of parameters that every rank has whole


@pytest.mark.parametrize("kind", ["Adafactor", "LBFGS"])
def test_optimizers_that_mix_elements_are_refused(kind):
    run_ranks(2, mixing, kind)


def materialized():
    with torch.device("meta"):
        model = build("llama", vocab_size=100)
    model.loss_function = in_float64
    parallelize(model, mesh_of(tp=2))
    model.to_empty(device="cpu")
    for p in (*model.parameters(), *model.buffers()):  # memory of any content, that of rotary frequencies too
        nn.init.constant_(p, 0.01)
    model(input_ids=batch(0), labels=batch(0)).loss.backward()
    return float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))


def test_a_model_that_got_its_memory_later():
    one, two = run_ranks(2, materialized)
    assert one == two > 0


def read():
    model = small()
    parallelize(model, mesh_of(tp=2))
    model(input_ids=batch(0), labels=batch(0)).loss.backward()
    weight = model.model.layers[0].mlp.up_proj.weight
    shape = weight.grad.shape
    weight.grad *= 2
    doubled = float(weight.grad.norm())
    weight.grad = torch.ones(shape, dtype=weight.dtype)
    replaced = float(weight.grad.sum())
    weight.grad = None
    return shape, doubled, replaced, weight.grad


def test_gradients_read_written_and_put_in_place():
    model = small()
    model(input_ids=batch(0), labels=batch(0)).loss.backward()
    weight = model.model.layers[0].mlp.up_proj.weight
    for shape, doubled, replaced, none in run_ranks(2, read):
        assert shape == (24, 32)
        assert doubled == pytest.approx(2 * float(weight.grad.norm()))
        assert replaced == weight.numel()
        assert none is None


def averaged_by_hand(form):
    mesh = mesh_of(dp=2, tp=2)
    group = mesh["dp"].get_group()
    model = parallelize(small(), mesh["tp"])
    ids = batch(0).chunk(2)[group.rank()]
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = [p.grad for p in model.parameters()]
    if form == "one by one":
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)
            gradient /= 2
    elif form == "waited for":
        for work in [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]:
            work.wait()
        torch._foreach_div_(gradients, 2)
    else:
        flat = torch._utils._flatten_dense_tensors(gradients)
        dist.all_reduce(flat, group=group)
        for gradient, mean in zip(
            gradients, torch._utils._unflatten_dense_tensors(flat / 2, gradients), strict=True
        ):
            gradient.copy_(mean)
    found = {n: BoxedTensor.like(p, p.grad) for n, p in model.named_parameters()}
    return full(found, mesh["tp"].get_group())


@pytest.mark.parametrize("form", ["one by one", "waited for", "in one message"])
def test_gradients_that_a_loop_averages_itself(form):
    model = small()
    for ids in batch(0).chunk(2):
        (model(input_ids=ids, labels=ids).loss / 2).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    for found in run_ranks(4, averaged_by_hand, form):
        assert_same_as_one_device(found, expected, tolerance=1e-9)


def in_stages():
    model = small()
    parallelize(model, mesh_of(pp=2, tp=2))
    model(input_ids=batch(0), labels=batch(0)).loss.backward()
    with pytest.raises(LayoutError, match="clip_grad_norm_"):
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def test_a_stage_has_no_norm_of_the_model():
    run_ranks(4, in_stages)


def wrapped(kind):
    mesh = mesh_of(dp=2, tp=2)
    model = parallelize(small(), mesh["tp"])
    group = mesh["dp"].get_group()
    if kind == "ddp":
        with pytest.raises(PlanError, match="DistributedDataParallel takes the tensor-parallel ranks"):
            DistributedDataParallel(model)(input_ids=batch(0))
        model = parallelize(small(), mesh["tp"])
        model = DistributedDataParallel(model, process_group=group)
    else:
        for unit in model.model.layers if kind == "units" else [model]:
            fully_shard(unit)
        with pytest.raises(PlanError, match="fully_shard takes the tensor-parallel ranks"):
            model(input_ids=batch(0))
        return None
    ids = batch(0).chunk(2)[mesh["dp"].get_local_rank()]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))


@pytest.mark.parametrize("kind", ["ddp", "units", "one unit"])
def test_wrappers_over_all_ranks_are_refused(kind):
    model = small()
    model(input_ids=batch(0), labels=batch(0)).loss.backward()
    norm = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    for found in run_ranks(4, wrapped, kind):
        assert found is None or found == pytest.approx(norm)
