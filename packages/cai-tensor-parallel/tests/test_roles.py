"""Experts, key/value heads that ranks share, sinks and the like in 1d: equal to one process, forward to parameters."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from role_models import MODELS, build
from small_models import full

from cai_mesh.layout import BoxedTensor, layout_of
from cai_mesh.testing import assert_names_kept, assert_same_as_one_device, run_ranks
from cai_tensor_parallel import parallelize


def train(model):
    """Loss of each of three steps; logits and gradients of the first; parameters at the end."""
    opt, losses, first = torch.optim.AdamW(model.parameters(), lr=1e-2), [], None
    for step in range(3):
        ids = torch.randint(1, 101, (2, 9), generator=torch.Generator().manual_seed(step))
        out = model(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        if first is None:
            grads = {
                n: BoxedTensor.like(p, torch.zeros_like(p) if p.grad is None else p.grad.clone())
                for n, p in model.named_parameters()
            }
            first = out.logits.detach(), grads
        opt.step()
        opt.zero_grad()
        losses.append(float(out.loss.detach()))
    return losses, *first, {n: BoxedTensor.from_param(p) for n, p in model.named_parameters()}


def parallel(name, plan, options):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = build(name, **options)
    names = [n for n, _ in model.named_parameters()]
    parallelize(model, mesh, plan)
    assert_names_kept(names, [n for n, _ in model.named_parameters()])
    cut = {n for n, p in model.named_parameters() if tuple(p.shape) != layout_of(p).global_shape}
    losses, logits, grads, final = train(model)
    group = mesh.get_group()
    return losses, logits, full(grads, group), full(final, group), cut


def compare(name, ranks, plan=None, **options):
    """The names of the parameters that are cut."""
    losses, logits, grads, final = train(build(name, **options))
    grads, final = full(grads), full(final)
    tolerance = 1e-5 if name == "llama4_text" else 1e-6  # parts of them compute in float32
    results = run_ranks(ranks, parallel, name, plan, options, timeout=240)
    for got in results:
        torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(losses), rtol=tolerance, atol=0)
        torch.testing.assert_close(got[1], logits, rtol=tolerance, atol=tolerance)
        assert_same_as_one_device(got[2], grads, tolerance=10 * tolerance)
        assert_same_as_one_device(got[3], final, tolerance=10 * tolerance)
    return results[0][4]


EXPERT_MODELS = [name for name in MODELS if name not in ("llama", "qwen2", "qwen3", "gpt_oss", "dbrx")]
"""Those whose experts tensor ranks share; DBRX's have their rows one expert after the other, and are refused there."""


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_experts_equal_one_process(name):
    cut = compare(name, 2)
    assert any("experts" in parameter and "shared" not in parameter for parameter in cut)
    if name == "mimo_v2_flash":
        assert "model.layers.1.self_attn.sinks" in cut
    if name == "beam":
        assert "model.layers.0.self_attn.gate_bias" in cut


def test_experts_with_biases_and_gates_that_alternate_equal_one_process():
    cut = compare("gpt_oss", 2)
    experts = {parameter.rpartition(".")[2] for parameter in cut if ".experts." in parameter}
    assert experts == {"gate_up_proj", "gate_up_proj_bias", "down_proj"}
    assert "model.layers.1.self_attn.sinks" in cut


@pytest.mark.parametrize(
    ("name", "heads", "ranks"),
    [("llama", 1, 2), ("qwen2", 2, 4), ("qwen3", 1, 4), ("mimo_v2_flash", 1, 4), ("llama", 3, 2)],
)
def test_ranks_share_key_value_heads(name, heads, ranks):
    """Queries are cut, keys and values whole; qwen2 has biases on them, qwen3 a norm of every head after them."""
    options = {"num_attention_heads": 12, "hidden_size": 96} if heads == 3 else {}
    cut = compare(name, ranks, num_key_value_heads=heads, **options)
    assert "model.layers.0.self_attn.q_proj.weight" in cut
    assert "model.layers.0.self_attn.k_proj.weight" not in cut
