"""Heads that do not divide over the ranks: runs of whole heads, the last rank has fewer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from small_models import build, full, in_float64
from torch import nn
from torch.nn import functional as F

from cai_mesh import BoxedTensor, clip_grad_norm_
from cai_mesh.errors import PlanError
from cai_mesh.layout import layout_of
from cai_mesh.testing import RankError, assert_same_as_one_device, run_ranks
from cai_mesh.trial import Trial
from cai_tensor_parallel import Plan, parallelize
from cai_tensor_parallel.modes.head_runs import own_heads, picked_heads, queries_per_pick

STEPS = 3
KINDS = {
    "alike": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}),
    "groups": ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}),
    "one key": ("llama", {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 56}),
    "norms": ("qwen3", {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 24}),
    "packed": ("gpt2", {"n_head": 7, "n_embd": 28}),
}


def loop(model: nn.Module, clip) -> list[float]:
    model.loss_function = in_float64
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = []
    for step in range(STEPS):
        ids = torch.randint(0, 101, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        numbers += [loss.item(), float(clip(model))]
        optimizer.step()
        optimizer.zero_grad()
    return numbers


def cut(kind: str, sequence: bool):
    name, options = KINDS[kind]
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallelize(build(name, **options), mesh, sequence=sequence)
    numbers = loop(model, lambda m: clip_grad_norm_(m.parameters(), 0.5, mesh))
    attention = [p for n, p in model.named_parameters() if "attn" in n and "weight" in n]
    sizes = [p.numel() for p in attention if layout_of(p).sharded_axes]
    boxed = {n: BoxedTensor.from_param(p) for n, p in model.named_parameters()}
    return numbers, full(boxed, dist.group.WORLD), sizes


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("kind", "ranks"), [*((kind, 2) for kind in KINDS), ("one key", 4), ("packed", 4)])
def test_equals_one_process(kind, ranks, sequence):
    name, options = KINDS[kind]
    whole = build(name, **options)
    expected = loop(whole, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5))
    found = run_ranks(ranks, cut, kind, sequence)
    for numbers, parameters, _ in found:
        assert numbers == pytest.approx(expected, rel=1e-7)
        assert_same_as_one_device(
            parameters, {n: p.detach() for n, p in whole.named_parameters()}, tolerance=1e-6
        )
    first, last = found[0][2], found[-1][2]
    assert first
    assert sum(last) < sum(first)


def test_runs_of_heads():
    assert [len(own_heads(14, 4, rank)) for rank in range(4)] == [4, 4, 4, 2]
    assert [len(own_heads(9, 4, rank)) for rank in range(4)] == [3, 3, 3, 0]
    assert [picked_heads(9, 3, 2, rank) for rank in range(2)] == [(0, 0, 0, 1, 1), (1, 2, 2, 2)]
    assert queries_per_pick(14, 2, 4) == 1
    assert queries_per_pick(12, 2, 5) == 3


class Attention(nn.Module):
    """Four heads, or as many as it is told; keys and values of its own for each."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q, self.k, self.v = (nn.Linear(12, 4 * heads) for _ in range(3))
        self.o = nn.Linear(4 * heads, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Own(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = Attention(heads).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x)


PLAN = Plan(
    {**dict.fromkeys(("attention.q", "attention.k", "attention.v"), "colwise"), "attention.o": "rowwise"},
    {"attention": ("num_heads",)},
)


def data() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


def own(heads: int, tried: int | None):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    trial = None if tried is None else Trial(lambda: Own(tried), data, lambda out: out.square().mean())
    model = parallelize(Own(heads), mesh, PLAN, trial=trial)
    return model(**data()).detach(), model.get_submodule("attention").num_heads


def test_a_model_of_ones_own_with_a_trial_of_odd_heads():
    expected = Own(5)(**data()).detach()
    found = run_ranks(2, own, 5, 3)
    for got, _ in found:
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert [heads for _, heads in found] == [3, 2]


def refused():
    mesh = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    flat = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp_row", "tp_col"))
    with pytest.raises(PlanError, match=r"the last one has none(.|\n)*among 2, 3, 5, 9"):
        parallelize(build("llama", **KINDS["groups"][1]), mesh)
    with pytest.raises(PlanError, match=r'cuts all features alike(.|\n)*mode="1d"'):
        parallelize(build("llama", **KINDS["alike"][1]), flat, mode="2d")


def test_what_cannot_be_cut_is_refused():
    run_ranks(4, refused)
    for tried in (4, None):
        with pytest.raises(RankError, match="an odd number of heads"):
            run_ranks(2, own, 5, tried)
