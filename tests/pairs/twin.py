"""The one-process twin that every pair is compared with: small models in float64, batches, a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from cai_mesh import BoxedTensor
from cai_mesh.testing import assert_same_as_one_device

STEPS, SEQUENCES, VOCAB, CLIP = 4, 8, 101, 0.5
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": VOCAB}
QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 32, **QUIET},
}
DEEP = {
    "llama, 4 layers": MODELS["llama"] | {"num_hidden_layers": 4},
    "gpt2, 4 layers": MODELS["gpt2"] | {"n_layer": 4},
}
"""For two pipeline ranks with two stages each."""
EXPERTS = {
    "mixtral": {**MODELS["llama"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**MODELS["llama"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
IN_FLOAT64 = {f"{name}, sdpa": MODELS[name] for name in ("llama", "gpt2")}
"""With torch's attention, whose softmax is not float32's."""
PAIRS: dict[str, dict[str, Any]] = {
    "bart": {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "dropout": 0.0,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": VOCAB,
        "max_position_embeddings": 32,
    },
    "t5": {
        "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 1, "num_decoder_layers": 3,
        "vocab_size": VOCAB, "dropout_rate": 0.0, "relative_attention_num_buckets": 8,
    },
}  # fmt: skip
"""Encoder-decoders; their embeddings are in three places. Of two stages of T5 the first makes the position bias."""


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        name.partition(",")[0], **(MODELS | DEEP | EXPERTS | IN_FLOAT64 | PAIRS)[name]
    )
    config._experts_implementation = "eager"  # torch's grouped product has no float64
    auto = AutoModelForSeq2SeqLM if name in PAIRS else AutoModelForCausalLM
    attention = "sdpa" if name in IN_FLOAT64 else "eager"
    return auto.from_config(config, attn_implementation=attention).to(torch.float64)


def batch(step: int, index: int = 0, count: int = 1) -> torch.Tensor:
    """Part `index` of `count` of the sequences of a step, [SEQUENCES / count, 9]."""
    ids = torch.randint(0, VOCAB, (SEQUENCES, 9), generator=torch.Generator().manual_seed(step))
    return ids.chunk(count)[index]


def inputs_of(name: str, ids: torch.Tensor) -> dict[str, Any]:
    """What a model is called with. BART makes its decoder's ids of the encoder's."""
    return {"input_ids": ids, "use_cache": False} | ({"decoder_input_ids": ids} if name == "t5" else {})


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Mean over the predicted tokens; the models' own loss computes in float32."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def reference(name: str, device: str = "cpu") -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final parameters of a plain loop in this process.

    device: that trains. LLaMA's norms compute in float32, which another device rounds in its own way.
    """
    model = build(name).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        ids = batch(step).to(device)
        loss = loss_of(model(**inputs_of(name, ids)).logits, ids)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}


def full(boxed: dict[str, BoxedTensor]) -> dict[str, torch.Tensor]:
    """Full tensors from every rank's boxes; pipeline stages hold parts of different names."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, {name: (box.global_shape, box.dtype) for name, box in boxed.items()})
    known = {name: what for names in held for name, what in names.items()}
    return {
        name: boxed.get(name, BoxedTensor(*known[name], ())).to_full(dist.group.WORLD)
        for name in sorted(known)
    }


def mean_over(group: dist.ProcessGroup, loss: torch.Tensor) -> float:
    total = loss.detach().clone().double()
    dist.all_reduce(total, group=group)
    return float(total) / group.size()


def own_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The model's own; in float64 where tensor parallelism has made it vocabulary-parallel."""
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def in_microbatches(runner: Any, count: int, name: str = "") -> Callable[[torch.Tensor], torch.Tensor]:
    """A pipeline's way to a loss and its gradients."""

    def backward(ids: torch.Tensor) -> torch.Tensor:
        parts = list(ids.chunk(count))
        return runner.step([inputs_of(name, part) for part in parts], parts)

    return backward


def train(backward: Callable, clip: Callable, optimizer: Any, data: DeviceMesh) -> tuple[list, list]:
    """Losses of the job and gradient norms of a plain loop over this rank's parts of the batches.

    Args:
        backward: from token ids to a loss whose gradients are there.
        clip: them; returns their norm.
        data: the ranks that share a batch.
    """
    losses, norms = [], []
    for step in range(STEPS):
        loss = backward(batch(step, data.get_local_rank(), data.size()))
        norms.append(float(clip()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over(data.get_group(), loss))
    return losses, norms


def assert_same_run(got: tuple, expected: tuple) -> None:
    """Losses, gradient norms and final parameters."""
    assert got[0] == pytest.approx(expected[0], rel=1e-9)
    assert got[1] == pytest.approx(expected[1], rel=1e-9)
    assert_same_as_one_device(got[2], expected[2], tolerance=1e-8)


def assert_equals_one_process(name: str, results: list[tuple], device: str = "cpu") -> None:
    expected = reference(name, device)
    for got in results:
        assert_same_run(got, expected)
