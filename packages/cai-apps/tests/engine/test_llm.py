"""Answers are, token for token, those of transformers' generate, whatever runs beside them."""

from __future__ import annotations

import math

import pytest
import torch
from engine_toys import KINDS, WORDS, prompts, small_model, written

from cai_apps.compose.pretrained import check_room
from cai_apps.engine import LLM, BeamOptions, Engine, EngineOptions, Sampling
from cai_apps.engine.schedule import Limits
from cai_mesh.errors import CaiError, ConfigError

TIGHT = EngineOptions(block_size=4, batch_tokens=7, requests=5)


def tight(model, tokens: int = 96) -> LLM:
    """An engine whose blocks do not suffice, so that requests give theirs back, and with prompts in chunks of 7."""
    llm = LLM(model, options=TIGHT)
    limits = llm.engine.limits
    llm.engine = Engine(model, limits, limits.blocks_of(tokens), llm.engine.ends, layout=llm.engine.layout)
    return llm


def assert_likeliest(model, outputs) -> None:
    """Each token is the likeliest by transformers' own forward over prompt and answer.

    A token whose logit is within 1e-4 of the largest passes: rounding decides between the two.
    """
    for output in outputs:
        ids = torch.tensor([[*output.prompt_token_ids, *output.token_ids]])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, len(output.prompt_token_ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert float((logits.max(1).values - chosen).max()) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_is_the_likeliest(kind):
    model, asked = small_model(kind), prompts(6)
    for llm in (LLM(model), tight(model)):
        outputs = llm.generate(asked, temperature=0, max_tokens=12)
        assert_likeliest(model, outputs)
        assert {output.answers[0].ending for output in outputs} == {"length"}
        assert llm.engine.pool.free == llm.engine.pool.count and not llm.engine.requests
    assert llm.engine.pool.hits > 0  # what was given back, or another prompt had


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_equals_generate(kind):
    """200 uneven prompts, token for token; where they part, transformers' two logits differ by less than 1e-4."""
    model, asked = small_model(kind), prompts(200)
    expected = [written(model, prompt, 16) for prompt in asked]
    for llm in (LLM(model), tight(model)):
        outputs = llm.generate(asked, temperature=0, max_tokens=16)
        parted = [o for o, tokens in zip(outputs, expected, strict=True) if list(o.token_ids) != tokens]
        assert_likeliest(model, parted)
        assert len(parted) <= 2


def test_prompts_that_begin_alike_are_computed_once(monkeypatch):
    model = small_model("llama")
    llm = LLM(model, options=EngineOptions(block_size=4))
    llm._is_live = False  # the weights stay
    prompt = prompts(1, seed=5)[0] + [7] * 20
    lengths = []
    model.register_forward_pre_hook(
        lambda module, args, inputs: lengths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    first = llm.generate([prompt], temperature=0, max_tokens=4)
    second = llm.generate([[*prompt, 9]], temperature=0, max_tokens=4)
    assert lengths[0] == len(prompt) and lengths[4] <= 5
    assert list(second[0].token_ids) == written(model, [*prompt, 9], 4)
    assert list(first[0].token_ids) == written(model, prompt, 4)


def test_new_weights_compute_their_own_keys():
    model, (prompt,) = small_model("llama"), prompts(1, seed=5)
    llm = LLM(model, options=EngineOptions(block_size=4))
    llm.generate([prompt], temperature=0, max_tokens=8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    assert list(llm.generate([prompt], temperature=0, max_tokens=8)[0].token_ids) == written(model, prompt, 8)


def test_the_model_trains_on_as_though_nothing_had_been():
    model = small_model("llama", attention_dropout=0.1).train()
    model.model.layers[1].eval()
    ids = torch.tensor(prompts(1))
    before = model.config._attn_implementation

    def step():
        torch.manual_seed(4)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters()]

    expected = step()
    model.zero_grad()
    llm = LLM(model)
    answers = llm.generate(ids.tolist(), temperature=0, max_tokens=5)
    assert model.training and not model.model.layers[1].training
    assert model.config._attn_implementation == before
    loss, gradients = step()
    assert torch.equal(loss, expected[0])
    assert all(map(torch.equal, gradients, expected[1]))
    assert list(answers[0].token_ids) == written(model.eval(), ids[0].tolist(), 5)


def test_an_error_in_a_forward_leaves_the_model_as_it_was():
    model = small_model("llama")
    before, llm = model.config._attn_implementation, LLM(model)
    handle = model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate([[1, 2, 3]])
    handle.remove()
    assert model.config._attn_implementation == before
    assert llm.engine.pool.free == llm.engine.pool.count and not llm.engine.requests
    assert list(llm.generate([[1, 2, 3]], temperature=0, max_tokens=3)[0].token_ids) == written(
        model, [1, 2, 3], 3
    )


def test_answers_end_at_the_models_end():
    model, asked = small_model("llama"), prompts(4)
    plain = [written(model, prompt, 10) for prompt in asked]
    model.generation_config.eos_token_id = [plain[0][5], plain[3][2]]
    outputs = LLM(model).generate(asked, temperature=0, max_tokens=10)
    for output, prompt in zip(outputs, asked, strict=True):
        expected = written(model, prompt, 10)
        assert list(output.token_ids) == expected
        assert output.answers[0].ending == ("length" if len(expected) == 10 else "stop")
    longer = LLM(model).generate(asked, temperature=0, max_tokens=10, ignore_eos=True)
    assert [list(output.token_ids) for output in longer] == plain
    stopped = LLM(model).generate(
        asked[:1], temperature=0, max_tokens=10, ignore_eos=True, stop_token_ids=[plain[0][3]]
    )
    assert list(stopped[0].token_ids) == plain[0][: plain[0].index(plain[0][3]) + 1]


def test_a_seeded_request_is_the_same_alone_and_among_others():
    model, asked = small_model("llama"), prompts(5)
    options = {"temperature": 1.3, "top_k": 50, "top_p": 0.95, "seed": 11, "max_tokens": 12}
    together = tight(model).generate(asked, **options)
    llm = LLM(model)
    for prompt, output in zip(asked, together, strict=True):
        assert llm.generate([prompt], **options)[0].token_ids == output.token_ids
    others = llm.generate(asked, **(options | {"seed": 12}))
    assert [output.token_ids for output in others] != [output.token_ids for output in together]
    each = [
        Sampling(seed=11, temperature=1.3, top_k=50, top_p=0.95, max_tokens=1 + number) for number in range(5)
    ]
    for number, output in enumerate(llm.generate(asked, each)):
        assert output.token_ids == together[number].token_ids[: 1 + number]
    with pytest.raises(ConfigError, match="not as many samplings"):
        llm.generate(asked, each[:2])


def test_n_answers_share_a_prompt_and_are_those_of_their_own_seeds():
    model, prompt = small_model("llama"), prompts(1)[0]
    options = {"temperature": 1.0, "max_tokens": 10}
    for llm in (LLM(model), tight(model, tokens=160)):
        (output,) = llm.generate([prompt], n=4, seed=20, **options)
        alone = [llm.generate([prompt], seed=20 + number, **options)[0].token_ids for number in range(4)]
        assert [answer.token_ids for answer in output.answers] == alone
        assert llm.engine.pool.free == llm.engine.pool.count


def test_logprobs_are_those_of_a_forward_over_all_tokens():
    model, asked = small_model("llama"), prompts(4)
    outputs = tight(model).generate(asked, temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=0)
    for output in outputs:
        ids = torch.tensor([[*output.prompt_token_ids, *output.token_ids]])
        logprobs = model(ids).logits[0].detach().log_softmax(-1)
        told = [*output.prompt_logprobs, *output.logprobs]
        assert [entry.token for entry in told] == ids[0, 1:].tolist()
        expected = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor([entry.logprob for entry in told]), expected, atol=1e-5, rtol=0
        )
        for place, entry in enumerate(output.logprobs, len(output.prompt_token_ids) - 1):
            values, places = logprobs[place].topk(3)
            assert [token for token, _ in entry.top] == places.tolist()
            assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-5)
        assert all(entry.top == () for entry in output.prompt_logprobs)


@pytest.mark.parametrize("is_late", [False, True])
def test_logprobs_of_a_prompt_that_is_computed_again_are_told_once(is_late):
    """Blocks run out in the midst of the prompt, or while the first token is on its way to the host."""
    model, prompt = small_model("llama"), prompts(1, seed=5)[0]
    engine = tight(model).engine
    request = engine.add(prompt, Sampling(temperature=0, max_tokens=2, prompt_logprobs=0), seed=0)
    with engine.computing():
        for _ in range(-(-len(prompt) // 7) if is_late else 1):
            engine.step()
        assert (request.pending is not None) == is_late
        engine._give_back(request)  # as where blocks run out
        while engine.requests:
            engine.step()
    assert [entry.token for entry in request.prompt_logprobs] == prompt[1:]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_heads_too_wide_for_the_kernel_that_reads_blocks(kind, monkeypatch):
    monkeypatch.setattr("cai_apps.engine.step.PAGED_WIDTH", 1)
    monkeypatch.setattr("cai_apps.engine.step.paged_attention", None)
    model, asked = small_model(kind), prompts(5)
    assert_likeliest(model, LLM(model).generate(asked, temperature=0, max_tokens=8))


def test_a_model_in_float64():
    model, questions = small_model("llama").double(), prompts(3)
    assert_likeliest(model, LLM(model).generate(questions, temperature=0, max_tokens=6))


def test_tokens_are_drawn_with_the_models_probabilities():
    """Chi-square of 1,500 first tokens against the exact distribution of the filtered softmax."""
    model, prompt, count = small_model("llama"), prompts(1)[0], 1500
    options = {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "max_tokens": 1}
    (output,) = LLM(model).generate([prompt], n=count, seed=1, **options)
    logits = model(torch.tensor([prompt])).logits[0, -1].detach().double() / 0.7
    values, tokens = logits.topk(12)
    share = values.softmax(0)
    stays = share.cumsum(0) - share < 0.9
    share = share[stays] / share[stays].sum()
    drawn = torch.tensor([answer.token_ids[0] for answer in output.answers])
    counts = torch.stack([(drawn == token).sum() for token in tokens[stays]]).double()
    assert counts.sum() == count
    freedom = len(share) - 1
    chi = float(((counts - count * share).square() / (count * share)).sum())
    assert chi < freedom + 5 * math.sqrt(2 * freedom)


def test_penalties_and_bias_are_those_of_transformers():
    model, asked = small_model("llama"), prompts(4)
    outputs = LLM(model).generate(asked, temperature=0, max_tokens=12, repetition_penalty=1.7)
    expected = [written(model, prompt, 12, repetition_penalty=1.7) for prompt in asked]
    assert [list(output.token_ids) for output in outputs] == expected
    (banned,) = LLM(model).generate(
        asked[:1], temperature=0, max_tokens=12, logit_bias={expected[0][0]: -100.0}
    )
    assert expected[0][0] not in banned.token_ids
    (once,) = LLM(model).generate(asked[:1], temperature=0, max_tokens=12, presence_penalty=1e3)
    assert len({*once.token_ids}) == 12
    (twice,) = LLM(model).generate(asked[:1], temperature=0, max_tokens=12, frequency_penalty=1e3)
    assert twice.token_ids == once.token_ids


@pytest.mark.parametrize("options", [{}, {"length_penalty": 0.3}, {"early_stopping": True}])
def test_beam_search_is_that_of_transformers(options):
    model, asked = small_model("llama"), prompts(4)
    plain = [written(model, prompt, 10, num_beams=3) for prompt in asked]
    ends = [plain[0][4], plain[1][6], plain[3][3]]  # so that some answers end before others
    model.generation_config.eos_token_id = ends
    for llm in (LLM(model), tight(model, tokens=280)):
        outputs = llm.beam_search(asked, BeamOptions(width=3, max_tokens=10, **options), count=2)
        for prompt, output in zip(asked, outputs, strict=True):
            ids = torch.tensor([prompt])
            how = {
                "num_beams": 3,
                "num_return_sequences": 2,
                "max_new_tokens": 10,
                "do_sample": False,
            } | options
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **how)
            for answer, row in zip(output.answers, expected[:, len(prompt) :].tolist(), strict=True):
                assert list(answer.token_ids) == row[: len(answer.token_ids)]
                assert {*row[len(answer.token_ids) :]} <= {0, *ends}  # with which transformers fills up
        assert llm.engine.pool.free == llm.engine.pool.count and not llm.engine.requests


def test_beams_that_cannot_be_are_refused():
    llm = tight(small_model("llama"))
    for options, count, words in (
        (BeamOptions(width=8, max_tokens=40), 1, "the beams of a prompt are longer"),
        (BeamOptions(width=2), 3, "not as many beams"),
    ):
        with pytest.raises(ConfigError, match=words):
            llm.beam_search([[1, 2]], options, count)
    with pytest.raises(ConfigError, match="width is out of range"):
        BeamOptions(width=0)


def test_tokens_stream_and_who_stops_listening_cancels_the_rest():
    model, asked = small_model("llama"), prompts(3)
    llm = tight(model)
    expected = [written(model, prompt, 8) for prompt in asked]
    pieces = list(llm.stream(asked, temperature=0, max_tokens=8))
    for number, tokens in enumerate(expected):
        assert [piece.token_id for piece in pieces if piece.prompt == number] == tokens
    stream = llm.stream(asked, temperature=0, max_tokens=8)
    next(stream)
    stream.close()
    assert llm.engine.pool.free == llm.engine.pool.count and not llm.engine.requests


def test_streams_of_one_engine_do_not_disturb_each_other():
    model, asked = small_model("llama"), prompts(3)
    llm = tight(model, tokens=240)
    expected = [written(model, prompt, 6) for prompt in asked]
    first, second = (llm.stream([prompt], temperature=0, max_tokens=6) for prompt in asked[:2])
    pieces = [next(first), next(second)]
    (between,) = llm.generate([asked[2]], temperature=0, max_tokens=6)
    assert list(between.token_ids) == expected[2]
    assert [pieces[0].token_id, *(piece.token_id for piece in first)] == expected[0]
    assert [pieces[1].token_id, *(piece.token_id for piece in second)] == expected[1]
    assert llm.engine.pool.free == llm.engine.pool.count and not llm.engine.requests


def test_what_cannot_be_computed_is_refused():
    model = small_model("llama")
    llm = tight(model)
    for asked, options, words in (
        ([[]], {}, "the prompt is empty"),
        ([[1], [WORDS]], {}, f"(.|\n)*got: +{WORDS}"),
        ([[1] * 250], {}, "longer than the model's positions"),
        ([[1] * 60], {"max_tokens": 60}, "longer than the cache"),
        (["text"], {}, "there is no tokenizer"),
        ([[1]], {"stop": ["a"]}, "there is no tokenizer"),
        ([[1]], {"temperature": -1.0}, "temperature is out of range"),
        ([[1]], {"temperature": 1e-5}, "too small"),
        ([[1]], {"top_p": 1.5}, "top_p is out of range"),
        ([[1]], {"n": 0}, "n is out of range"),
        ([[1]], {"logit_bias": {-1: 5.0}}, "logit_bias has ids"),
        ([[1]], {"stop_token_ids": [WORDS]}, "stop_token_ids has ids"),
        ([[1]], {"stop": [""]}, "a stop text is empty"),
    ):
        with pytest.raises(ConfigError, match=words):
            llm.generate(asked, **options)
        assert not llm.engine.requests


@pytest.mark.parametrize("kind", ["bloom", "mamba", "jamba"])
def test_models_that_look_along_a_row_otherwise_are_refused_by_name(kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 64, "n_layer": 2, "n_head": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options))
    with pytest.raises(ConfigError, match=kind):
        LLM(model)


def test_sizes_that_are_none_are_refused():
    with pytest.raises(ConfigError, match="block_size is out of range"):
        EngineOptions(block_size=0)
    with pytest.raises(ConfigError, match="memory is out of range"):
        EngineOptions(memory=0)
    with pytest.raises(ConfigError, match="no memory for a block"):
        LLM(small_model("llama"), options=EngineOptions(memory=1e-6))


class Guesses(Engine):
    """An engine whose logits are random numbers."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._model.logits = self._guess

    def _guess(self, step, rows):
        slots = [slot for group in step.rows.slots for slot in group.tolist()]
        assert len(slots) == len(step.rows.slots) * sum(len(part.ids) for part in step.parts)
        assert len(set(slots)) == len(slots)  # no two tokens are written to one place
        return torch.rand(max(1, len(rows)), WORDS)


@pytest.mark.parametrize(
    "kind, count, blocks",
    [
        ("llama", 400, 90),
        ("llama", 200, 32),
        ("gemma3_text", 400, 110),
        *(pytest.param(kind, 24_000, 120, marks=pytest.mark.matrix) for kind in ("llama", "gemma3_text")),
    ],
)
def test_requests_that_come_go_and_are_cancelled_leave_no_block(kind, count, blocks):
    """Cancelled while they wait, in the midst of a prompt, while they write; with `n` answers and prompts alike."""
    import random

    draw = random.Random(count)
    layout = LLM(small_model(kind)).engine.layout
    engine = Guesses(small_model(kind), Limits(tokens=64, requests=24, block_size=4), blocks, layout=layout)
    beginning = draw.choices(range(1, WORDS), k=30)
    asked = ended = 0
    while asked < count or engine.requests:
        while asked < count and len(engine.requests) < 200 and draw.random() < 0.6:
            prompt = beginning[: draw.randrange(30)] + draw.choices(range(1, WORDS), k=draw.randrange(1, 60))
            sampling = Sampling(
                max_tokens=draw.randrange(1, 40),
                temperature=0,
                n=draw.choice((1, 1, 1, 3)),
                priority=draw.randrange(2),
            )
            engine.add(prompt, sampling, seed=asked)
            asked += 1
        ended += sum(chosen.request.ending is not None for chosen in engine.step())
        if engine.requests and draw.random() < 0.05:  # any of them, whatever it does
            engine.cancel(draw.choice(list(engine.requests)))
    assert ended > count / 2 and (engine.pool.hits > 0 or blocks < 90)
    assert engine.pool.free == engine.pool.count
    assert not any(engine.pool.holders(block) for block in range(engine.pool.count))


@pytest.mark.parametrize("most", [3, 30])
def test_beams_of_many_prompts_never_wait_for_each_other_for_ever(most):
    """Blocks suffice for the beams of one prompt, and those of six are searched."""
    llm = LLM(small_model("llama"), options=EngineOptions(block_size=4, batch_tokens=9, requests=most))
    llm.engine = Guesses(llm.model, llm.engine.limits, 4 * 10, ())
    outputs = llm.beam_search(prompts(6, longest=28), BeamOptions(width=4, max_tokens=12), count=4)
    assert all(len(answer.token_ids) == 12 for output in outputs for answer in output.answers)
    assert llm.engine.pool.free == llm.engine.pool.count and not llm.engine.requests


def test_a_module_that_trains_on_has_the_memory_of_the_cache():
    llm = LLM(small_model("llama"))
    llm.generate([[1, 2, 3]], temperature=0, max_tokens=2)
    assert all(slab._caches is None for slab in llm.engine._model._slabs)


def test_the_lowest_priority_is_computed_first():
    llm, told = LLM(small_model("llama"), options=EngineOptions(requests=1)), []
    samplings = [Sampling(temperature=0, max_tokens=3, priority=priority) for priority in (2, -1, 1)]
    llm.generate(prompts(3), samplings, on_output=lambda number, _: told.append(number))
    assert told == [1, 2, 0]


def test_answers_are_told_as_soon_as_they_are_complete():
    llm, lengths, told = LLM(small_model("llama")), [9, 2, 5], []
    samplings = [Sampling(temperature=0, max_tokens=length) for length in lengths]
    outputs = llm.generate(prompts(3), samplings, on_output=lambda *pair: told.append(pair))
    assert [number for number, _ in told] == [1, 2, 0]
    assert [output for _, output in sorted(told, key=lambda pair: pair[0])] == outputs
    assert [len(output.token_ids) for output in outputs] == lengths


def test_a_model_that_no_gpu_has_room_for_is_refused_before_it_is_read(tmp_path):
    small_model("llama").save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    check_room(tmp_path, size)
    with pytest.raises(ConfigError, match="larger than what is free") as raised:
        check_room(tmp_path, size // 3)
    assert "4 tensor ranks" in raised.value.fix


def test_what_is_no_number_is_no_token():
    model = small_model("llama")
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    with pytest.raises(CaiError, match="not finite"):
        LLM(model).generate([[1, 2, 3]], temperature=0)


def test_prompts_may_be_arrays_and_tensors():
    llm = LLM(small_model("llama"))
    expected = llm.generate([[1, 2, 3]], temperature=0, max_tokens=3)[0].token_ids
    for asked in (torch.tensor([1, 2, 3]), torch.tensor([[1, 2, 3]]), [*torch.tensor([1, 2, 3]).numpy()]):
        (output,) = llm.generate(asked, temperature=0, max_tokens=3)
        assert output.token_ids == expected
