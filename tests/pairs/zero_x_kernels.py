"""Models that run kernels (`swap`) train under every ZeRO stage as they do on one process, and as plain ones do."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
import twin
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from cai_kernels import FusedAdamW, swap
from cai_kernels.adamw import halves as kernel_halves
from cai_kernels.swap.logits import Logits
from cai_mesh import BoxedTensor, clip_grad_norm_
from cai_mesh.gradients import defer, raw_grad, routed
from cai_mesh.testing import run_ranks
from cai_zero import MixedPrecision, shard_module, shard_optimizer
from cai_zero.replicated import halves as zero_halves


def step_through(model, optimizer, clip, ids_of):
    losses, norms, formed = [], [], []
    for step in range(twin.STEPS):
        ids = ids_of(step)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = twin.loss_of(logits, ids)
        loss.backward()
        formed.append(not isinstance(logits, Logits) or logits.formed is not None)
        norms.append(float(clip()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, norms, formed


def build(name: str):
    model = twin.build(name).train()
    return model, sorted({r.kind for r in swap(model).replaced})


def alone(name: str):
    """The swapped model in a plain loop."""
    model, _ = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms, _ = step_through(
        model, optimizer, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), twin.CLIP), twin.batch
    )
    return [float(x) for x in losses], norms, {n: p.detach().clone() for n, p in model.named_parameters()}


def train(name: str, ranks: int, stage: int):
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
    model, replaced = build(name)
    if stage == 3:
        model = shard_module(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        clip = partial(clip_grad_norm_, list(model.parameters()), twin.CLIP, mesh)
    else:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = shard_optimizer(inner, mesh, model=model, stage=stage)
        clip = partial(optimizer.clip_grad_norm_, twin.CLIP)
    losses, norms, formed = step_through(
        model, optimizer, clip, lambda step: twin.batch(step, mesh.get_local_rank(), mesh.size())
    )
    boxed = {n: BoxedTensor.from_param(p) for n, p in model.named_parameters()}
    return [twin.mean_over(mesh.get_group(), x) for x in losses], norms, twin.full(boxed), replaced, formed


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", list(twin.MODELS))
def test_equals_one_process(name: str, stage: int):
    losses, norms, final = alone(name)
    plain, _, _ = twin.reference(name)
    assert losses == pytest.approx(plain, rel=1e-6)  # LLaMA's own norm multiplies in float32
    for got in run_ranks(2, train, name, 2, stage):
        twin.assert_same_run(got, (losses, norms, final))
        assert got[3] == (["loss", "norm"] if name == "gpt2" else ["activation", "loss", "norm", "rope"])
        assert got[4] == [False] * twin.STEPS, "logits were formed"


class Tiny(nn.Module):
    """An embedding, a layer and a head, with a bias or tied to the embedding."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer = nn.Embedding(29, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 29, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids):
        return self.head(torch.tanh(self.layer(self.embed(ids))))


REDUCTIONS = {
    "mean": F.cross_entropy,
    "parts": lambda logits, ids: F.cross_entropy(logits, ids, reduction="none")[1:].mean() * 3,
    "formed": lambda logits, ids: -logits.log_softmax(-1).gather(1, ids[:, None]).mean(),
}


def gradients_of(model, loss):
    for step in range(3):
        ids = torch.randint(0, 29, (11,), generator=torch.Generator().manual_seed(step))
        REDUCTIONS[loss](model(ids), ids).backward()


def in_chunks(tied, loss, deferred, dtype):
    """Names of parameters that have a `.grad` after three microbatches, and the gradients in the chunks."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model = Tiny(tied).train()
    assert [r.kind for r in swap(model).replaced] == ["loss"]
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = shard_optimizer(inner, mesh, model=model, stage=0, precision=MixedPrecision(compute=dtype))
    assert routed(model.head) is not None
    with sync.defer():
        if deferred:
            with defer(model.parameters()) as kept:
                gradients_of(model, loss)
            kept.flush()
        else:
            gradients_of(model, loss)
        seen = [n for n, p in model.named_parameters() if raw_grad(p) is not None]
    found = sync.gradients()
    return seen, {n: found[n].pieces[0][1].view(p.shape) for n, p in model.named_parameters()}


@pytest.mark.parametrize("deferred", [False, True], ids=["", "deferred"])
@pytest.mark.parametrize("loss", list(REDUCTIONS))
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_the_loss_writes_the_heads_gradient_into_its_chunk(tied, loss, deferred):
    model = Tiny(tied)
    gradients_of(model, loss)
    wanted = {n: p.grad for n, p in model.named_parameters()}
    seen, got = run_ranks(2, in_chunks, tied, loss, deferred, torch.float32)[0]
    assert "head.weight" not in seen and "layer.weight" not in seen
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=2e-5, atol=1e-7, msg=name)


def test_a_head_in_bfloat16_has_float32_gradients():
    _, got = run_ranks(2, in_chunks, False, "mean", False, torch.bfloat16)[0]
    got = got["head.weight"]
    assert got.dtype == torch.float32
    assert (got != got.bfloat16()).float().mean() > 0.9  # sums of three bfloat16 numbers: about 0.7


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 96}
KV = {"num_key_value_heads": 1, "intermediate_size": 48}
FAMILIES = {
    "phi": {**SIZES, "intermediate_size": 48},  # a head with a bias
    "gemma2": {**SIZES, **KV, "head_dim": 16},  # a soft cap, a tied head
    "cohere": {**SIZES, **KV, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},  # logits are scaled
    "granite": {**SIZES, **KV, "logits_scaling": 2.0},  # logits are divided
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2, "vocab_size": 96},
    "qwen3_moe": {
        **SIZES,
        **KV,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96, "state_size": 4},
}


def family(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **FAMILIES[name])
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().train()


def family_gradients(model):
    losses = []
    for step in range(2):
        ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


def family_in_chunks(name, stage):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model = family(name)
    assert "loss" in {r.kind for r in swap(model).replaced}
    if stage == 3:
        model = shard_module(model, mesh)
        losses = family_gradients(model)
        found = {n: BoxedTensor.like(p, p.grad) for n, p in model.named_parameters() if p.grad is not None}
    else:
        optimizer = shard_optimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), mesh, model=model, stage=stage
        )
        with optimizer.defer():
            losses = family_gradients(model)
        found = optimizer.gradients()
    assert routed(model.get_output_embeddings()) is not None
    return losses, twin.full(found)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_other_models_of_transformers(name, stage):
    model = family(name)
    losses = family_gradients(model)
    for got_losses, got in run_ranks(2, family_in_chunks, name, stage):
        assert got_losses == pytest.approx(losses, rel=1e-5)
        for n, p in model.named_parameters():
            torch.testing.assert_close(got[n], p.grad, rtol=1e-3, atol=1e-6, msg=f"{name}: {n}")


# -- master weights in halves, which the kernel of AdamW steps as they are -------------------------------------------


def halved(stage: int, as_they_are: bool):
    """Master weights in halves after steps of `FusedAdamW`, and how often they became numbers for it."""
    os.environ["TRITON_INTERPRET"] = "1"
    joined = []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 41), nn.Tanh(), nn.Linear(41, 13))
    inner = FusedAdamW(model.parameters(), lr=1e-2, weight_decay=0.1, backend="triton")
    if not as_they_are:
        inner.takes_halves = lambda: False
    precision = MixedPrecision(compute=torch.bfloat16, split_master=True)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    optimizer = shard_optimizer(inner, mesh, model=model, stage=stage, precision=precision)
    for chunk in optimizer.chunks:
        halves = chunk.weights.halves
        halves.join = partial(_count, joined, halves.join)
    for step in range(4):
        x = torch.randn(6, 70, generator=torch.Generator().manual_seed(step)).bfloat16()
        model(x).float().square().mean().backward()
        inner.gradient_factor = 0.5 if step % 2 else torch.tensor(0.25)
        optimizer.step()
    times = len(joined)  # to see the weights they are joined
    return twin.full(optimizer.weights()), times


def _count(calls: list, call):
    calls.append(1)
    call()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_kernel_steps_halves_as_they_are(stage: int):
    """And steps numbers to the same ones."""
    for (numbers, often), (halves, never) in zip(
        run_ranks(2, halved, stage, False), run_ranks(2, halved, stage, True), strict=True
    ):
        assert often >= 4 and never == 0
        assert all(torch.equal(halves[name], value) for name, value in numbers.items())


def test_both_packages_split_alike():
    numbers = torch.randint(-(2**31), 2**31 - 1, (100_000,), generator=torch.Generator().manual_seed(0))
    full = numbers.to(torch.int32).view(torch.float32)
    high, low = torch.empty(full.shape, dtype=torch.bfloat16), torch.empty(full.shape, dtype=torch.int16)
    zero_halves.split(full, high, low)
    other = kernel_halves.split(full)
    assert torch.equal(high.view(torch.int16), other[0].view(torch.int16)) and torch.equal(low, other[1])
