"""The seam of attention: a model's layers compute by a rule, and what they ask for is what transformers would do."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from cai_mesh.attention import NAME, MaskedParts, attention_layers, masked_attention, route_attention
from cai_mesh.errors import PlanError
from cai_mesh.protocols import AttentionCall, AttentionRule

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "pad_token_id": 0,
}
KINDS = {
    "llama": {},
    "gemma2": {"sliding_window": 3, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"sliding_window": 3},
    "gpt_neox": {"attention_dropout": 0.0},
}


def model_of(kind, attention="eager"):
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})
    torch.manual_seed(0)
    return (
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_rule_is_what_transformers_does(kind):
    ids = torch.randint(1, 64, (2, 9))
    expected = model_of(kind)(input_ids=ids).logits
    model = model_of(kind)
    assert len(route_attention(model, masked_attention)) == 2
    torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-6)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 7:] = False
    expected = model_of(kind)(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(
        model(input_ids=ids, attention_mask=mask).logits[mask], expected[mask], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_a_row_are_alone(kind):
    ids, plain, model = torch.randint(1, 64, (1, 9)), model_of(kind), model_of(kind)
    route_attention(model, masked_attention)
    rows = model(
        input_ids=ids,
        position_ids=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]]),
        cu_seqlens=torch.tensor([[0, 5, 9, 9]], dtype=torch.int32),
    ).logits
    for first, end in ((0, 5), (5, 9)):
        torch.testing.assert_close(
            rows[:, first:end], plain(input_ids=ids[:, first:end]).logits, rtol=1e-5, atol=1e-6
        )


def test_layers_of_one_kind_take_another_rule():
    model, calls = model_of("gemma3_text"), []

    def rule(q, k, v, call: AttentionCall):
        calls.append(call.window)
        return masked_attention(q, k, v, call)

    assert isinstance(rule, AttentionRule)
    assert route_attention(model, rule, window=True) == ["model.layers.0.self_attn"]
    model(input_ids=torch.zeros(1, 4, dtype=torch.int64))
    assert calls == [3]
    route_attention(model, rule, window=False)
    model(input_ids=torch.zeros(1, 4, dtype=torch.int64))
    assert calls == [3, 3, None]
    assert all(layer.config._attn_implementation == NAME for _, layer in attention_layers(model))


def test_a_cache_of_earlier_keys():
    model, plain = model_of("llama"), model_of("llama")
    route_attention(model, masked_attention)
    ids = torch.randint(1, 64, (1, 9))
    first = model(input_ids=ids[:, :5], use_cache=True)
    rest = model(input_ids=ids[:, 5:], past_key_values=first.past_key_values, use_cache=True).logits
    torch.testing.assert_close(rest, plain(input_ids=ids).logits[:, 5:], rtol=1e-5, atol=1e-6)


def test_a_model_without_the_registry_is_refused():
    with pytest.raises(PlanError, match="cannot be exchanged"):
        route_attention(nn.Linear(2, 2), masked_attention)


def test_sinks_are_those_of_transformers():
    sizes = {**SIZES, "num_local_experts": 4, "sliding_window": 3}
    config = transformers.AutoConfig.for_model("gpt_oss", **sizes)
    config._experts_implementation = "eager"
    plain = transformers.AutoModelForCausalLM.from_config(config).double()
    for layer in plain.model.layers:
        nn.init.normal_(layer.self_attn.sinks, std=2.0)
    routed = copy.deepcopy(plain)
    route_attention(routed, masked_attention)
    ids = torch.randint(1, 64, (2, 9))
    logits, expected = routed(input_ids=ids).logits, plain(input_ids=ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    for each in (logits, expected):
        each.square().sum().backward()
    for (name, got), (_, want) in zip(routed.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("causal", [True, False])
def test_parts_are_merged_to_the_whole(causal, softcap):
    """Keys of three calls, the last of them causal; values and gradients of all scores at once."""
    random = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 4, 8, dtype=torch.float64, generator=random, requires_grad=True)
    key, value = (
        torch.randn(2, 2, 12, 8, dtype=torch.float64, generator=random, requires_grad=True) for _ in range(2)
    )
    call = AttentionCall(0.3, causal=causal, softcap=softcap)
    whole = masked_attention(query, key, value, call)
    dout = torch.randn(whole.shape, dtype=torch.float64, generator=random)
    wanted = torch.autograd.grad(whole, (query, key, value), dout)
    parts, found, gradients = MaskedParts(), None, []
    pieces = [(slice(first, first + 4), replace(call, causal=causal and first == 8)) for first in (0, 4, 8)]
    tensors = [(key[:, :, piece].detach(), value[:, :, piece].detach()) for piece, _ in pieces]
    for (_, part_call), part in zip(pieces, tensors, strict=True):
        share = parts.forward(query.detach(), *part, part_call)
        found = share if found is None else parts.merge(found, share)
    assert found is not None
    torch.testing.assert_close(found[0], whole)
    for (_, part_call), part in zip(pieces, tensors, strict=True):
        gradients.append(parts.backward(dout, query.detach(), *part, *(t.detach() for t in found), part_call))
    torch.testing.assert_close(sum(each[0] for each in gradients), wanted[0])
    for number in (1, 2):
        torch.testing.assert_close(torch.cat([each[number] for each in gradients], 2), wanted[number])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_documents_that_go_on_from_another_see_it_before_themselves(window, causal, softcap):
    """As though each stood alone behind a copy of what it goes on from; an empty one is nothing to go on from."""
    lengths, prefixes = ((4, 3, 5, 0, 2), (0, 6, 4, 2, 2)), ((0, 0, 0, 3, 4), (0, 0, 0, 3, 3))
    random = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 14, 8, dtype=torch.float64, generator=random, requires_grad=True)
    key, value = torch.randn(2, 2, 2, 14, 8, dtype=torch.float64, generator=random).requires_grad_().unbind()
    starts = nn.functional.pad(torch.tensor(lengths).cumsum(1), (1, 0)).int()
    call = AttentionCall(0.3, causal=causal, window=window, softcap=softcap, cu_seqlens=starts)
    call = replace(call, prefixes=torch.tensor(prefixes, dtype=torch.int32))
    whole = masked_attention(query, key, value, call)
    for row, bounds in enumerate(starts.tolist()):
        for document, (first, end) in enumerate(itertools.pairwise(bounds)):
            before = prefixes[row][document]
            seen = [*range(first, end)]
            if before != document:
                seen = [*range(bounds[before], bounds[before + 1]), *seen]
            if first == end:
                continue
            parts = (t[row : row + 1, :, seen] for t in (query, key, value))
            alone = AttentionCall(0.3, causal=causal, window=window, softcap=softcap)
            # of both ways of looking, what stands before sees nothing of what goes on from it
            expected = masked_attention(*parts, alone)[..., first - end :, :]
            torch.testing.assert_close(whole[row : row + 1, :, first:end], expected)
