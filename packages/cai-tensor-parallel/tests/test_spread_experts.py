"""Experts spread over ranks equal one plain process: losses, every gradient, steps; tokens that all go one way, too."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from role_models import build
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from cai_mesh import BoxedTensor, ParallelMesh
from cai_mesh.comm import GRADIENT_AXES
from cai_mesh.errors import MeshError, PlanError
from cai_mesh.layout import record_of
from cai_mesh.testing import assert_names_kept, assert_same_as_one_device, run_ranks
from cai_mesh.trial import Trial
from cai_tensor_parallel import ExpertsRole, find_experts, parallelize, parallelize_experts
from cai_tensor_parallel.experts.batched import batched_forward, visited_rows
from cai_tensor_parallel.experts.trial import verify_experts

MODELS = (
    *("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe", "mimo_v2_flash", "beam"),
    *("qwen2_moe", "olmoe", "glm4_moe", "phimoe", "jamba", "llama4_text", "dbrx"),
)
FLOAT32 = ("deepseek_v2", "deepseek_v3", "mimo_v2_flash", "beam", "glm4_moe", "jamba")
"""Models that compute parts of themselves in float32, whatever they are given."""
BATCH, LENGTH, STEPS = 8, 6, 3


def samples(step):
    return torch.randint(0, 40, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def skew(model, kind):
    """Let the router of every layer choose nearly the same experts, or never the last, for all tokens."""
    for name in find_experts(model):
        block = model.get_submodule(name.rpartition(".")[0])
        router = getattr(block, "gate", None) or block.router
        with torch.no_grad():
            router.weight.zero_()
            router.weight[: 1 if kind == "one" else 2, 0] = 50.0


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def plainly(name, kind, steps):
    model = build(name)
    if kind:
        skew(model, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        loss = loss_of(model, samples(step))
        loss.backward()
        losses.append(float(loss.detach()))
        if step < steps - 1:
            optimizer.step()
            optimizer.zero_grad()
    return losses, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def reduce(model, mesh):
    """The sum over the ranks that each parameter's record names, divided by what it names."""
    for param in model.parameters():
        spec = record_of(param).reduce
        axes, divisor = (spec.sum_axes, spec.divisor) if spec else (GRADIENT_AXES, None)
        group = mesh.group(axes)
        grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
        if group is not None:
            dist.all_reduce(grad, group=group)
        param.grad = grad / (divisor or mesh.degree(axes))


def spread(name, ep, kind, steps, recompute):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    mesh = ParallelMesh.of(mesh, ep=ep)
    model = build(name)
    if kind:
        skew(model, kind)
    names = [n for n, _ in model.named_parameters()]
    parallelize_experts(model, mesh)
    assert_names_kept(names, [n for n, _ in model.named_parameters()])
    if recompute:
        model.train().gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        loss = loss_of(model, samples(step).chunk(dist.get_world_size())[dist.get_rank()])
        loss.backward()
        reduce(model, mesh)
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
        if step < steps - 1:
            optimizer.step()
            optimizer.zero_grad()
    grads = {
        n: BoxedTensor.like(p, p.grad.clone()).to_full(dist.group.WORLD) for n, p in model.named_parameters()
    }
    held = {n: p.numel() for n, p in model.named_parameters()}
    return losses, grads, held


def check(name, world, ep, kind="", steps=STEPS, recompute=""):
    results = run_ranks(world, spread, name, ep, kind, steps, recompute)
    losses, grads = plainly(name, kind, steps)
    tolerance = 3e-6 if name in FLOAT32 else 1e-9
    assert results[0][0] == pytest.approx(losses, rel=tolerance)
    assert_same_as_one_device(results[0][1], grads, tolerance=tolerance)
    return results[0][2]


@pytest.mark.parametrize("name", MODELS)
def test_equals_one_process(name):
    check(name, 2, 2)


@pytest.mark.parametrize("ep", [2, 4])
def test_four_ranks_equal_one_process(ep):
    held = check("mixtral", 4, ep)
    whole = {n: p.numel() for n, p in build("mixtral").named_parameters()}
    for name, count in held.items():
        assert count == whole[name] // (ep if ".experts." in name else 1)


@pytest.mark.parametrize("recompute", ["", "blocks", "reentrant"])
@pytest.mark.parametrize("kind", ["one", "some"])
def test_experts_without_tokens(kind, recompute):
    check("mixtral", 4, 4, kind, recompute=recompute)


@pytest.mark.parametrize("recompute", ["", "blocks"])
@pytest.mark.parametrize("kind", ["one", "some"])
def test_batched_experts_without_tokens(kind, recompute):
    check("llama4_text", 2, 2, kind, recompute=recompute)


def beside_tensor_ranks(name, shape, ep, sequence):
    mesh = ParallelMesh.of(init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "tp")), ep=ep)
    model = build(name)
    parallelize_experts(model, mesh)
    parallelize(model, mesh, sequence=sequence)
    loss = loss_of(model, samples(0).chunk(shape[0])[mesh.index("dp_shard")])
    loss.backward()
    reduce(model, mesh)
    total = loss.detach().clone()
    dist.all_reduce(total)
    grads = {
        n: BoxedTensor.like(p, p.grad.clone()).to_full(dist.group.WORLD) for n, p in model.named_parameters()
    }
    return float(total) / dist.get_world_size(), grads


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("shape, ep", [((2, 2), 4), ((2, 2), 2), ((1, 2), 2)], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_beside_tensor_ranks_equals_one_process(name, shape, ep, sequence):
    check_beside_tensor_ranks(name, shape, ep, sequence, 3e-6 if name in FLOAT32 else 1e-9)


@pytest.mark.parametrize("sequence", [False, True])
def test_batched_experts_beside_tensor_ranks(sequence):
    check_beside_tensor_ranks("llama4_text", (1, 2), 2, sequence, 1e-5)  # its norms compute in float32


def check_beside_tensor_ranks(name, shape, ep, sequence, tolerance):
    results = run_ranks(shape[0] * shape[1], beside_tensor_ranks, name, shape, ep, sequence)
    losses, grads = plainly(name, "", 1)
    for loss, got in results:
        assert loss == pytest.approx(losses[0], rel=tolerance)
        assert_same_as_one_device(got, grads, tolerance=tolerance)


class SharedNorm(nn.Module):
    """Experts of one's own, with a norm that all of them share."""

    def __init__(self):
        super().__init__()
        self.n_experts, self.w = 4, nn.Parameter(torch.randn(4, 8, 8))
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens, ids, weights):
        return self.norm(torch.einsum("td,tkdf,tk->tf", tokens, self.w[ids], weights))


def refusals():
    ranks = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    mesh = ParallelMesh.of(ranks, ep=2)
    model = parallelize_experts(build("mixtral").float(), mesh)
    with pytest.raises(PlanError, match=r"(?s)has a forward of its own.*spread already"):
        parallelize_experts(model, mesh)
    wrapped = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(PlanError, match=r"(?s)takes the expert-parallel ranks.*cai_zero\.shard_optimizer"):
        wrapped(input_ids=samples(0), use_cache=False)
    later = parallelize_experts(build("mixtral"), mesh)
    later.model.layers[0].mlp.experts.scale = nn.Parameter(torch.ones(8))
    with pytest.raises(PlanError, match=r"experts\.scale"):
        later(input_ids=samples(0), use_cache=False)
    with pytest.raises(MeshError, match="without an expert view"):
        parallelize_experts(build("mixtral"), ranks)
    tensor = ParallelMesh.of(init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp")), ep=2)
    with pytest.raises(PlanError, match=r"(?s)that all experts share.*norm\.weight"):
        parallelize_experts(nn.Sequential(SharedNorm()), tensor)


def test_what_would_go_wrong_in_silence_is_refused():
    run_ranks(2, refusals)


class BatchedExperts(nn.Module):
    """Experts of one's own, all of which compute for all tokens."""

    def __init__(self, bias):
        super().__init__()
        self.num_experts, self.bias, self.w = 4, bias, nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, rows):
        return (torch.bmm(rows.view(self.num_experts, -1, 8), self.w) + self.bias).tanh().view(-1, 8)


class BatchedLayer(nn.Module):
    """A token visits one expert; weights of zero learn where the slope is not zero."""

    def __init__(self, bias=0.0, slope=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.slope, self.router, self.experts = slope, nn.Linear(8, 4), BatchedExperts(bias)

    def forward(self, x):
        scores = self.router(x)
        others = self.slope * (scores - scores.detach())
        scores = torch.where(scores == scores.amax(1, keepdim=True), scores, others)
        return self.experts(x.repeat(4, 1) * scores.T.reshape(-1, 1)).view(4, *x.shape).sum(0)


@pytest.mark.parametrize(
    "options, error",
    [
        ({}, ""),
        ({"bias": 0.5}, r"(?s)computes something else in two parts.*output off by"),
        ({"slope": 0.5}, r"(?s)experts learns from rows of zeros.*the gradient of router"),
    ],
    ids=["right", "bias", "slope"],
)
def test_a_batched_layer_is_tried(options, error):
    def inputs():
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x[2] = 0  # such a token visits all experts, and has a gradient by way of each
        return {"x": x}

    trial = Trial(partial(BatchedLayer, **options), inputs, lambda output: output.square().sum())
    if not error:
        verify_experts(trial)
        return
    with pytest.raises(PlanError, match=error):
        verify_experts(trial)


def test_rows_of_a_token_that_is_zero_stay_together():
    rows = torch.ones(6, 2)
    rows[[1, 3, 4]] = 0  # three experts, two tokens: the first visits 0 and 1, the other 2 and 0
    assert visited_rows(rows, 3, 1).tolist() == [0, 2, 5]
    rows[5] = 0
    assert visited_rows(rows, 3, 1).tolist() == [0, 1, 2, 3, 5]


def test_batched_experts_compute_what_comes_to_them():
    layer, role = BatchedExperts(0.0).double(), ExpertsRole(("w",), "num_experts", "batched")
    tokens = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[3], [0], [-1], [3], [1]])
    weights = torch.rand(5, 1, dtype=torch.float64)
    outputs = batched_forward(role, layer, tokens, ids, weights)
    plain = torch.stack(
        [(token @ layer.w[i]).tanh() * w for token, i, w in zip(tokens, ids[:, 0], weights, strict=True)]
    )
    plain = plain * (ids >= 0)
    torch.testing.assert_close(outputs, plain, rtol=0, atol=1e-12)
    got, expected = (torch.autograd.grad(x.square().sum(), [tokens, layer.w]) for x in (outputs, plain))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("jetmoe", r"is called with \(inputs, expert_size\): tokens are sorted by expert before it"),
        ("longcat_flash", r"has experts without weights: gate_up_proj has 6 rows, down_proj has 4 rows"),
        ("switch_transformers", r"mlp\.experts holds 4 experts as modules of their own"),
    ],
)
def test_experts_of_other_forms_are_refused_with_the_reason(name, reason):
    sizes = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "zero_expert_num": 2}
    config = AutoConfig.for_model(
        name, **{"num_hidden_layers": 2, "num_layers": 2, "num_sparse_encoder_layers": 1, **sizes}
    )
    kind = AutoModelForSeq2SeqLM if name == "switch_transformers" else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    with pytest.raises(PlanError, match=r"(?s)has experts that cannot be spread over ranks.*" + reason):
        find_experts(model)
