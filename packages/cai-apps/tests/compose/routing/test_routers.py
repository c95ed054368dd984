"""Routers are found in models of many kinds, and their losses, decisions and numbers are by hand what they say."""

from __future__ import annotations

import math

import pytest
import torch
from routed_toys import routed_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from cai_apps.compose.routing.entry import routers_for
from cai_apps.compose.routing.finding import need_routers, routers_of
from cai_apps.compose.routing.losses import balance_loss, entropy, loads_of, sums_of, z_loss
from cai_apps.compose.routing.places import text_places
from cai_apps.compose.routing.precision import in_float32
from cai_apps.compose.routing.replay import recorded, replayed
from cai_apps.config.sections import Experts
from cai_mesh.errors import ConfigError, DataError

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 8,
}  # fmt: skip
KINDS = {
    "mixtral": (2, "mlp.gate", 0, 8, 2, None),
    "qwen2_moe": (2, "mlp.gate", 0, 60, 4, None),
    "gpt_oss": (2, "mlp.router", 0, 128, 4, None),
    "granitemoe": (2, "block_sparse_moe.router", 0, 8, 2, None),
    "phimoe": (2, "mlp.router", 0, 16, 2, None),
    "llama4_text": (2, "feed_forward.router", 1, 16, 1, None),
    "jetmoe": (4, "router", 4, 8, 2, None),
    "glm4_moe": (1, "mlp.gate", 0, 128, 8, "e_score_correction_bias"),
    "minimax_m2": (2, "mlp.gate", 0, 256, 8, "e_score_correction_bias"),
}
"""Routers, the end of their names, place of logits, experts, visited, bias."""


def model_of(name: str, **sizes: int):
    config = AutoConfig.for_model(name, **{**SIZES, **sizes})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", list(KINDS))
def test_routers_are_found(name):
    count, end, *numbers, bias = KINDS[name]
    routers = routers_of(model_of(name))
    assert len(routers) == count
    for router in routers:
        assert router.name.endswith(end)
        assert [router.place, router.experts, router.visited] == numbers
        assert (router.bias and router.bias[1]) == bias


class Block(nn.Module):
    """Experts in one tensor and a linear layer beside them, as a model might have them that records nothing."""

    def __init__(self):
        super().__init__()
        self.gate, self.norm, self.experts = nn.Linear(6, 5), nn.LayerNorm(6), nn.Module()
        self.experts.up = nn.Parameter(torch.randn(5, 6, 6))
        self.top_k = 2


def test_a_router_is_found_beside_experts():
    (router,) = routers_of(nn.Sequential(nn.Linear(6, 5), Block()))
    assert (router.name, router.experts, router.visited) == ("1.gate", 5, 2)
    logits = torch.randn(2, 3, 5)
    assert torch.equal(router.choice(logits), logits.view(6, 5).topk(2).indices)


class Recurrence(nn.Module):
    """A matrix a head, and a layer with a row for each head; nothing here counts experts."""

    def __init__(self):
        super().__init__()
        self.gates, self.heads = nn.Module(), nn.Linear(6, 5)
        self.gates.weight = nn.Parameter(torch.randn(5, 6, 6))


class Hybrid(nn.Module):
    """A convolution over 5 channels beside a layer of 5 rows, in a block that says how many experts there are."""

    def __init__(self):
        super().__init__()
        self.conv, self.steps = nn.Conv1d(5, 5, 4, groups=5), nn.Linear(6, 5)
        self.num_experts = self.top_k = 5


@pytest.mark.parametrize("block", [Recurrence, Hybrid])
def test_stacks_that_are_no_experts(block):
    assert routers_of(nn.Sequential(block())) == []


@pytest.mark.parametrize("kind", ["mamba", "recurrent_gemma", "falcon_mamba", "bamba", "xlstm"])
def test_convolutions_and_recurrences_are_no_experts(kind):
    """A convolution over channels is a stack of matrices too, and a layer beside it may have a row for each."""
    config = AutoConfig.for_model(kind)
    config.num_hidden_layers = 3
    with torch.device("meta"):
        assert routers_of(AutoModelForCausalLM.from_config(config)) == []


@pytest.mark.parametrize(
    "options", [Experts(aux_loss=0.1), Experts(z_loss=0.1), Experts(bias_update=0.1), Experts(show=True)]
)
def test_what_is_asked_of_a_model_without_routers_is_refused(options):
    llama = model_of("llama")
    assert routers_for(Experts(aux_loss=0.0), llama) == []
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has none(.|\n)*recorded as 'router_logits'"):
        routers_for(options, llama)


def test_a_bias_asked_of_routers_without_one_is_refused():
    with pytest.raises(ConfigError, match=r"this model has none(.|\n)*mlp.gate, a MixtralTopKRouter"):
        routers_for(Experts(bias_update=1e-3), model_of("mixtral"))
    assert len(routers_for(Experts(bias_update=1e-3), model_of("glm4_moe"))) == 1


def test_losses_by_hand():
    torch.manual_seed(0)
    layers = [torch.randn(7, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mask = torch.tensor([1.0, 1, 0, 1, 1, 0, 1])
    for weights in (None, mask):
        sums = sum(sums_of(x, x.topk(2).indices, weights) for x in layers)
        wanted = load_balancing_loss_func(tuple(layers), 4, 2, None if weights is None else weights)
        assert balance_loss(sums).item() == pytest.approx(wanted.item(), rel=1e-6)
        got = torch.autograd.grad(balance_loss(sums), layers, retain_graph=True)
        for a, b in zip(got, torch.autograd.grad(wanted, layers), strict=True):
            assert torch.allclose(a, b, atol=1e-6)
        rows = torch.stack(layers)[:, torch.ones(7).bool() if weights is None else mask.bool()]
        assert z_loss(sums).item() == pytest.approx(float(rows.exp().sum(-1).log().square().mean().detach()))
        p = rows.softmax(-1)
        entropies = sum(entropy(x, weights) for x in layers)
        assert float(entropies) == pytest.approx(-(p * p.log()).sum().item())


def test_an_expert_that_there_is_not_counts_nowhere():
    choice = torch.tensor([[0, 3], [4, 1], [1, -1]])
    assert loads_of(choice, 4, None, torch.float64).tolist() == [1, 2, 0, 1]


def test_what_fills_a_row_does_not_count():
    ids = torch.tensor([[5, 6, 0, 0, 0, 0], [5, 0, 6, 7, 8, 9], [0, 0, 0, 0, 0, 0], [5, 6, 7, 0, 0, 0]])
    starts = torch.tensor([[0, 3, 6, 6], [0, 2, 6, 6], [0, 6, 6, 6], [0, 6, 6, 6]], dtype=torch.int32)
    places = text_places({"input_ids": ids, "cu_seqlens": starts})
    assert places.tolist() == [[1, 1, 1, 0, 0, 0], [1] * 6, [0] * 6, [1] * 6]
    assert text_places({"input_ids": ids}) is None


def test_in_float32_a_router_of_a_narrow_model_rounds_nothing():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(routed_config("qwen3_moe", 2)).bfloat16()
    (router, _), x = routers_of(model), torch.randn(50, 32, dtype=torch.bfloat16)
    narrow = router.module(x)[0]
    in_float32([router])
    logits, scores, choice = router.module(x)
    exact = x.double() @ router.module.weight.double().t()
    assert logits.dtype == scores.dtype == torch.float32
    assert (logits - exact).abs().max() < 1e-6 < 1e-3 < (narrow - exact).abs().max()
    assert torch.equal(choice, exact.topk(2).indices)
    logits.sum().backward()
    assert router.module.weight.grad.dtype == torch.bfloat16
    model(input_ids=torch.randint(0, 96, (1, 5)))  # the experts take its weights


def replay_of(name: str):
    torch.manual_seed(0)
    config = routed_config(name)
    first = AutoModelForCausalLM.from_config(config).double().eval()
    torch.manual_seed(1)
    second = AutoModelForCausalLM.from_config(config).double().eval()
    ids = torch.randint(0, 96, (2, 7))
    with recorded(routers_of(first)) as decisions:
        first(input_ids=ids), first(input_ids=ids.flip(1))
    return second, ids, decisions


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_decisions_are_taken_again(name):
    model, ids, decisions = replay_of(name)
    routers = need_routers(model, "")
    assert len(decisions) == 2
    assert decisions[0].keys() == {router.name for router in routers}
    own = model(input_ids=ids).logits
    with recorded(routers) as again, replayed(routers, decisions[0]):
        other = model(input_ids=ids).logits
    assert all(torch.equal(again[0][key], choice) for key, choice in decisions[0].items())
    assert (own - other).abs().max() > 1e-4
    with recorded(routers) as its_own:
        assert torch.equal(model(input_ids=ids).logits, own), "outside, it decides by itself again"
    with replayed(routers, its_own[0]):
        assert torch.allclose(model(input_ids=ids).logits, own, atol=1e-12), "weights are those of the choice"


def test_replayed_experts_are_weighed_by_the_routers_own_scores():
    model, ids, decisions = replay_of("mixtral")
    routers, outputs = routers_of(model), []
    hook = routers[0].module.register_forward_hook(lambda module, args, output: outputs.append(output))
    with replayed(routers, decisions[0]):
        model(input_ids=ids)
    hook.remove()
    logits, scores, choice = outputs[0]
    wanted = logits.softmax(-1).gather(1, choice)
    assert torch.equal(choice, decisions[0][routers[0].name])
    assert torch.allclose(scores.double(), wanted / wanted.sum(1, keepdim=True), atol=1e-6)


def test_decisions_of_other_tokens_or_models_are_refused():
    model, ids, decisions = replay_of("mixtral")
    routers = routers_of(model)
    with replayed(routers, decisions[0]), pytest.raises(DataError, match="other tokens"):
        model(input_ids=ids[:1])
    del decisions[0][routers[1].name]
    with pytest.raises(DataError, match=routers[1].name), replayed(routers, decisions[0]):
        pass


def test_even_routing_has_the_entropy_of_its_experts():
    assert float(entropy(torch.zeros(3, 8))) == pytest.approx(3 * math.log(8))
