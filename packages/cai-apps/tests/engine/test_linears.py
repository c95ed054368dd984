"""Linear layers of one input in one launch: as one by one, whatever happens to the layers in between."""

from __future__ import annotations

import pytest
import torch
from engine_toys import small_model
from torch.nn import functional as F

from cai_apps.engine import linears
from cai_apps.engine.graphs import DecodeGraphs
from cai_apps.engine.linears import SharedInputs
from cai_apps.engine.schedule import Limits
from cai_apps.engine.step import CachedAttention, Rows, Slab
from cai_mesh.protocols import AttentionCall


@pytest.fixture
def launches(monkeypatch) -> list[int]:
    """How many layers each launch has."""
    counts, compute = [], linears.skinny_linears

    def counted(hidden, weights, biases):
        counts.append(len(weights))
        return compute(hidden, weights, biases)

    monkeypatch.setattr(linears, "skinny_linears", counted)
    return counts


def computed(model, shared: SharedInputs) -> torch.Tensor:
    with torch.no_grad(), shared.together():
        return model(input_ids=torch.tensor([[7]]), use_cache=False).logits


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "opt", "deepseek_v3"])
def test_a_model_computes_the_same(kind, launches):
    model = small_model(kind).bfloat16()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[7]]), use_cache=False).logits
    shared = SharedInputs(model)
    for _ in range(3):
        assert torch.equal(computed(model, shared), expected)
    if kind in ("llama", "qwen3"):
        assert launches == ([3, 1, 2, 1] * 3 + [1]) * 2
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_layer_that_was_given_another_forward_keeps_it(launches):
    model = small_model("llama").bfloat16()
    shared = SharedInputs(model)
    computed(model, shared)
    layer = model.model.layers[0].self_attn.k_proj
    layer.forward = lambda hidden: 2 * F.linear(hidden, layer.weight)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[7]]), use_cache=False).logits
    own = layer.forward
    for _ in range(2):
        assert torch.equal(computed(model, shared), expected)
        assert layer.forward is own


def test_a_forward_that_goes_another_way_is_right():
    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (torch.nn.Linear(8, 4, dtype=torch.bfloat16) for _ in range(2))

        def forward(self, hidden, apart: bool):
            return self.first(hidden), self.second(hidden * 2 if apart else hidden)

    model, hidden = Branches(), torch.randn(1, 8).bfloat16()
    shared = SharedInputs(model)
    for apart in (False, False, True, False):
        with torch.no_grad():
            expected = model(hidden, apart)
            with shared.together():
                assert all(map(torch.equal, model(hidden, apart), expected))


def test_a_graph_of_heads_that_no_kernel_reads_is_refused():
    rule = CachedAttention(Slab(2, 4), 0, None)  # type: ignore[arg-type]
    one = torch.zeros(1, dtype=torch.int64)
    rule.rows = Rows(one[None], one[None], one.int() + 1, (one,), (one[None].int(),))
    heads = torch.zeros(1, 1, 1, 320)
    with pytest.raises(RuntimeError, match="heads of 320"):
        rule(heads, heads, heads, AttentionCall(scale=1.0, causal=True))


def test_graphs_are_forgotten_where_weights_are_somewhere_else(monkeypatch):
    from cai_apps.engine.forward import CachedModel

    model, forgotten = small_model("llama"), []
    cached = CachedModel(model, Limits(8, 2, 4), 4, None, graphs=True)
    cached._graphs = DecodeGraphs.__new__(DecodeGraphs)
    monkeypatch.setattr(DecodeGraphs, "forget", lambda self: forgotten.append(None))
    for _ in range(2):
        with cached.computing():
            assert len(forgotten) == 1
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    with cached.computing():
        assert len(forgotten) == 2
