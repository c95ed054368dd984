"""The engine on a GPU: graphs of decoding, and models of all kinds beside transformers' own forward."""

from __future__ import annotations

import operator

import pytest
import torch
from engine_toys import KINDS, prompts, small_model

from cai_apps.engine import LLM, EngineOptions
from cai_kernels.swap import swap

pytestmark = pytest.mark.gpu


def gaps(model, outputs) -> float:
    """How far the logit of a token is below the largest, at most, by a forward over prompt and answer."""
    worst = 0.0
    model.set_attn_implementation("eager")  # knows soft caps in every version of transformers
    for output in outputs:
        ids = torch.tensor([[*output.prompt_token_ids, *output.token_ids]], device="cuda")
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, len(output.prompt_token_ids) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(output.token_ids, device="cuda")[:, None])[:, 0]
        worst = max(worst, float((logits.max(1).values - chosen).max()))
    return worst


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_each_token_is_the_likeliest(kind, graphs):
    model, questions = small_model(kind).cuda(), prompts(20)
    if graphs:
        swap(model, kinds=("experts",))  # transformers' own wait for the GPU
    llm = LLM(model, options=EngineOptions(graphs=graphs, batch_tokens=64, memory=0.5))
    captured = []
    if graphs:
        used = llm.engine._model._graphs
        assert used is not None
        capture = used._capture
        used._capture = lambda size: (captured.append(size), capture(size))
    outputs = llm.generate(questions, temperature=0, max_tokens=24)
    assert gaps(model, outputs) < 1e-3
    if graphs:
        assert captured and used.refusal is None, used.refusal
        of_prompts = llm.engine._model._prompt_graphs
        assert of_prompts is not None and of_prompts.refusal is None, of_prompts.refusal


LENGTHS = (5, 90, 33, 17, 61, 200, 150, 34, 12, 77, 64, 65, 130, 96, 31, 180)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v3", "gpt2"])
def test_prompts_that_are_read_in_pieces(kind):
    """Prompts of sixteen lengths, in parts beside others and alone, have the logits of a forward without graphs."""
    model = small_model(kind).cuda()
    swap(model, kinds=("experts",))
    questions = [[(7 * place + length) % 100 + 3 for place in range(length)] for length in LENGTHS]
    llm = LLM(model, options=EngineOptions(batch_tokens=96, prompt_part=40, memory=0.5), trains=False)
    for _ in range(2):  # the second time most sizes are captured
        outputs = llm.generate(questions, temperature=0, max_tokens=24)
        assert gaps(model, outputs) < 1e-3
        llm.forget()
    for question in questions:
        assert gaps(model, llm.generate([question], temperature=0, max_tokens=2)) < 1e-3
    graphs = llm.engine._model._prompt_graphs
    assert graphs is not None and len(graphs._captured) >= 3 and graphs.refusal is None
    layers = sum(layer is not None for _, layer in next(iter(graphs._captured.values())))
    assert layers == model.config.num_hidden_layers


def test_a_model_that_waits_for_the_gpu_reads_prompts_as_ever():
    model, questions = small_model("mixtral").cuda(), prompts(20)
    llm = LLM(model, options=EngineOptions(batch_tokens=64, memory=0.5))
    with pytest.warns(UserWarning, match="no CUDA graph"):
        outputs = llm.generate(questions, temperature=0, max_tokens=24)
    graphs = llm.engine._model._prompt_graphs
    assert graphs is not None and graphs.refusal is not None and not graphs._captured
    assert gaps(model, outputs) < 1e-3


def test_drawn_tokens_are_those_without_graphs():
    model, questions = small_model("llama").cuda(), prompts(20)
    tokens = []
    for graphs in (True, False):
        llm = LLM(model, options=EngineOptions(graphs=graphs, memory=0.5))
        outputs = llm.generate(questions, temperature=0.8, top_k=20, top_p=0.9, max_tokens=24, seed=5)
        tokens.append([output.token_ids for output in outputs])
    same = sum(map(operator.eq, *tokens))
    assert same >= 19  # rounding may part one


def test_a_model_with_kernels_in_bfloat16():
    model, questions = small_model("qwen3").cuda().bfloat16(), prompts(20)
    plain = LLM(model, options=EngineOptions(memory=0.5, graphs=False))
    expected = plain.generate(questions, temperature=0, max_tokens=1)
    swap(model, kinds=("norm", "activation", "rope", "experts"))
    outputs = LLM(model, options=EngineOptions(memory=0.5)).generate(questions, temperature=0, max_tokens=24)
    assert gaps(model, outputs) < 0.05
    same = sum(
        first.token_ids[0] == other.token_ids[0] for first, other in zip(expected, outputs, strict=True)
    )
    assert same >= 18


def test_graphs_serve_later_calls_where_nobody_trains():
    model, questions = small_model("llama").cuda().bfloat16(), prompts(20)
    llm = LLM(model, options=EngineOptions(memory=0.5), trains=False)
    first = llm.generate(questions, temperature=0, max_tokens=24)
    graphs = llm.engine._model._graphs
    assert graphs is not None and graphs._captured
    graphs._capture = None  # none is made any more
    second = llm.generate(questions, temperature=0, max_tokens=24)
    assert gaps(model, [*first, *second]) < 0.05
    assert llm.engine.pool.hits > 0


def test_a_module_that_trains_has_graphs_in_every_call():
    """Its cache is freed after each, and its weights may be somewhere else."""
    model, questions = small_model("llama").cuda(), prompts(20)
    llm = LLM(model, options=EngineOptions(memory=0.5))
    graphs = llm.engine._model._graphs
    assert graphs is not None
    for _ in range(3):
        assert gaps(model, llm.generate(questions, temperature=0, max_tokens=24)) < 1e-3
        assert graphs.refusal is None and not graphs._captured
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.9


def test_weights_that_moved_between_two_tokens_are_read_where_they_are():
    model, (question,) = small_model("llama").cuda(), prompts(1, seed=5)
    pieces = []
    for piece in LLM(model, options=EngineOptions(memory=0.5)).stream(question, temperature=0, max_tokens=24):
        pieces.append(piece.token_id)
        for parameter in model.parameters():
            old, parameter.data = parameter.data, parameter.data.clone()
            old.fill_(torch.nan)
    (output,) = LLM(model, options=EngineOptions(graphs=False)).generate(
        question, temperature=0, max_tokens=24
    )
    assert pieces == list(output.token_ids)
