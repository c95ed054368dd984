"""1d tensor parallelism equals one process: logits, loss, every gradient and several steps, for HF models."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from small_models import MODELS, build, full, in_float64
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cai_mesh.errors import PlanError
from cai_mesh.gradients import clip_grad_norm_, share_in_graphs
from cai_mesh.layout import BoxedTensor
from cai_mesh.testing import assert_names_kept, assert_same_as_one_device, run_ranks
from cai_tensor_parallel import Plan, gather_logits, parallelize, plan_for, vocab_parallel_cross_entropy
from cai_tensor_parallel.modes import cross_entropy


def batch(step):
    ids = torch.randint(0, 101, (2, 9), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[0, :4] = -100
    return ids, labels


def train(model, clip, logits_of):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms, first, grads = [], [], None, None
    for step in range(3):
        ids, labels = batch(step)
        out = model(input_ids=ids, use_cache=False)
        logits = logits_of(out.logits)
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        loss = model.loss_function(logits=out.logits, labels=labels, vocab_size=101) if step else None
        if loss is None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), shifted)
            first = logits.detach().clone()
        loss.backward()
        if step == 0:
            grads = {n: BoxedTensor.like(p, p.grad.clone()) for n, p in model.named_parameters()}
        norms.append(float(clip(model)))
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, first, grads


def one(name):
    model = build(name)
    model.loss_function = in_float64
    losses, norms, first, grads = train(
        model, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5), lambda x: x
    )
    return (
        losses,
        norms,
        first,
        full(grads),
        full({n: BoxedTensor.from_param(p) for n, p in model.named_parameters()}),
    )


def parallel(name):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = build(name)
    names = [n for n, _ in model.named_parameters()]
    parallelize(model, mesh, logits="sharded")
    assert_names_kept(names, [n for n, _ in model.named_parameters()])
    assert len(names) == len(list(model.named_parameters()))
    group = mesh.get_group()
    losses, norms, first, grads = train(
        model, lambda m: clip_grad_norm_(m.parameters(), 0.5, mesh), lambda x: gather_logits(x, 101, group)
    )
    final = full({n: BoxedTensor.from_param(p) for n, p in model.named_parameters()}, group)
    whole = sum(p.numel() for p in model.parameters())
    return losses, norms, first, full(grads, group), final, whole


@pytest.mark.parametrize("name", list(MODELS))
def test_equals_one_process(name):
    losses, norms, first, grads, final = one(name)
    tolerance = 1e-6 if name == "gemma3_text" else 1e-9  # Gemma multiplies its norm weights in float32
    for got in run_ranks(2, parallel, name):
        assert torch.allclose(torch.tensor(got[0]), torch.tensor(losses), rtol=tolerance, atol=0)
        assert torch.allclose(torch.tensor(got[1]), torch.tensor(norms), rtol=tolerance, atol=0)
        assert torch.allclose(got[2], first, rtol=tolerance, atol=tolerance)
        assert_same_as_one_device(got[3], grads, tolerance=10 * tolerance)
        assert_same_as_one_device(got[4], final, tolerance=10 * tolerance)
        assert got[5] < 0.65 * sum(v.numel() for v in final.values()), "the parameters were not cut"


def equals_whole_logits(dtype, tokens=13, columns=10):
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    logits, target = torch.randn(tokens, columns, dtype=dtype), torch.randint(0, columns, (tokens,))
    target[3:4] = -100
    part = -(-columns // world)
    local = logits[:, rank * part : (rank + 1) * part].clone().requires_grad_()
    start = min(rank * part, columns)
    for reduction in ("none", "sum", "mean"):
        local.grad = None
        loss = vocab_parallel_cross_entropy(local, target, group, vocab_start=start, reduction=reduction)
        exact = logits.clone().requires_grad_()
        wide = exact if dtype == torch.float64 else exact.float()
        expected = nn.functional.cross_entropy(wide, target, reduction=reduction)
        torch.testing.assert_close(loss, expected, equal_nan=True)  # the mean of nothing
        loss.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(local.grad, exact.grad[:, start : start + local.shape[1]])


@pytest.mark.parametrize(
    ("world", "dtype"), [(2, torch.float64), (3, torch.float32), (4, torch.float64), (2, torch.bfloat16)]
)
def test_vocab_parallel_cross_entropy(world, dtype):
    run_ranks(world, equals_whole_logits, dtype)


def few_rows_at_once(tokens):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "WIDE_BYTES", 5 * 4 * 4)  # five rows of 4 of 20 columns
        equals_whole_logits(torch.float32, tokens, 20)
        return made_by_a_loss(torch.randn(tokens, 4, requires_grad=True))


def made_by_a_loss(logits):
    """Operators whose result is as large as the logits, forward and backward, beside the gradient of the logits."""
    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype.is_floating_point:
                largest.append((out.untyped_storage().nbytes() // 4, str(func)))
            return out

    target = torch.zeros(logits.shape[0], dtype=torch.int64)
    with Watch():
        vocab_parallel_cross_entropy(logits, target, None, vocab_start=0).backward()
    as_large = {name.split(".")[1] for size, name in largest if size >= logits.numel() > 20}
    return as_large - {"empty_like", "slice", "copy_", "detach"}


@pytest.mark.parametrize("tokens", [0, 1, 5, 13])
def test_a_cross_entropy_of_a_cut_vocabulary_widens_few_rows_at_once(tokens):
    """Of the size of all logits there is their gradient and nothing else."""
    assert all(not found for found in run_ranks(5, few_rows_at_once, tokens))


def compiled(sequence, overlap):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    whole = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True)
    expected = torch.tanh(x @ whole[0].t() + whole[1]) @ whole[2].t() + whole[3]
    parallelize(model, mesh, Plan({"0": "colwise", "2": "rowwise"}), sequence=sequence, overlap=overlap)
    y = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, expected)
    (g,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(g, torch.autograd.grad(expected.sum(), x)[0])


@pytest.mark.parametrize(("sequence", "overlap"), [(False, False), (True, False), (True, True)])
def test_compiles_to_one_graph(sequence, overlap):
    run_ranks(2, compiled, sequence, overlap)


def errors():
    mesh = dist.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    with pytest.raises(PlanError, match=r"4 attention heads of (.*) over 3 ranks"):
        parallelize(build("llama"), mesh)
    toy = nn.Sequential(nn.Linear(6, 8))
    with pytest.raises(PlanError, match="8 features over 3 ranks"):
        parallelize(toy, mesh, Plan({"0": "colwise"}))
    with pytest.raises(PlanError, match="matches no module"):
        parallelize(toy, mesh, Plan({"1": "colwise"}))
    with pytest.raises(PlanError, match="did you mean 'colwise'"):
        parallelize(toy, mesh, Plan({"0": "colwize"}))
    with pytest.raises(PlanError, match="parameters that are not cut"):
        parallelize(toy, mesh, Plan({"0": "moe_tp_experts"}))
    with pytest.raises(PlanError, match="no tensor-parallel plan"):
        parallelize(toy, mesh)
    with pytest.raises(PlanError, match="mode"):
        parallelize(toy, mesh, Plan({"0": "colwise"}), mode="4d")


def test_errors_name_the_module():
    run_ranks(3, errors)


def test_plans_come_from_the_model():
    assert plan_for(build("llama")).roles["model.layers.*.self_attn.q_proj"] == "colwise"
    gpt2 = plan_for(build("gpt2"))
    assert gpt2.roles["transformer.h.*.attn.c_attn"] == "packed_colwise:3"
    assert gpt2.roles["lm_head"] == "vocab_head"


@pytest.mark.parametrize(
    ("device", "sequence", "overlap"),
    [
        ("cpu", False, False),
        ("cpu", True, False),
        ("cpu", True, True),
        pytest.param("cuda", False, False, marks=pytest.mark.gpu),
        pytest.param("cuda", True, False, marks=pytest.mark.gpu),
    ],
)
def test_blocks_of_transformers_are_one_graph(device, sequence, overlap):
    """On simulated ranks: what is computed means nothing, the graph is the one of real ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = dist.init_device_mesh(device, (2,), mesh_dim_names=("tp",))
        model = parallelize(build("llama"), mesh, sequence=sequence, overlap=overlap).to(device)
        share_in_graphs(model)
        block = model.model.layers[0]
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
        model(input_ids=torch.zeros(2, 12, dtype=torch.int64, device=device)).logits.sum().backward()
    finally:
        dist.destroy_process_group()
