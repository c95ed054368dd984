"""The module that trains on ranks answers there: tensor ranks together, data ranks of ZeRO each alone."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from engine_toys import COMMON, KINDS, prompts, small_model, written
from torch.distributed.device_mesh import init_device_mesh

from cai_apps.engine import LLM, BeamOptions, Engine, EngineOptions
from cai_mesh.errors import ConfigError
from cai_mesh.testing import run_ranks
from cai_pipeline import PipelineRunner, split
from cai_tensor_parallel import parallelize
from cai_zero import shard_module, shard_optimizer, sharding_of


def by_tensor_ranks(kind: str, asked, sequence: bool):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallelize(small_model(kind), mesh, sequence=sequence)
    llm = LLM(
        model, options=EngineOptions(block_size=4, batch_tokens=8, requests=4), ranks=mesh.get_group("tp")
    )
    llm.engine = Engine(
        model, llm.engine.limits, llm.engine.limits.blocks_of(96), (), layout=llm.engine.layout
    )
    greedy = llm.generate(asked, temperature=0, max_tokens=8)
    drawn = llm.generate(asked, temperature=1.0, max_tokens=8)  # seeds are those of the first rank
    return [[output.token_ids for output in outputs] for outputs in (greedy, drawn)]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("llama", 2),
        ("gemma3_text", 2),
        pytest.param("gpt2", 4, marks=pytest.mark.matrix),
        pytest.param("mixtral", 4, marks=pytest.mark.matrix),
    ],
)
def test_tensor_ranks_write_what_one_process_does(kind, ranks):
    asked = prompts(5)
    (greedy, drawn), *others = run_ranks(ranks, by_tensor_ranks, kind, asked, False, timeout=240)
    assert all(other == [greedy, drawn] for other in others)
    model = small_model(kind)
    assert [list(tokens) for tokens in greedy] == [written(model, prompt, 8) for prompt in asked]


def between_steps(stage: int, asked):
    """Train, answer, train on: on data ranks, with other prompts on each."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model, rank = small_model("llama").train(), dist.get_rank()
    optimizer = shard_optimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2), mesh, model=model, stage=stage
    )
    ids, answers, losses = torch.tensor([[5, 6, 7, 8 + rank]]), [], []
    llm = LLM(model)
    for step in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        if asked:
            own = asked[rank : rank + 1 + rank]  # one on the first rank, two on the second
            outputs = llm.generate(own, temperature=0, max_tokens=4 + step)
            answers.append([list(output.token_ids) for output in outputs])
            expected = [written(model.eval(), prompt, 4 + step) for prompt in own]
            assert answers[-1] == expected
            model.train()
    return losses


@pytest.mark.parametrize("stage", [1, 2])
def test_data_ranks_answer_between_steps_and_train_on(stage):
    answering = run_ranks(2, between_steps, stage, prompts(4), timeout=240)
    assert answering == run_ranks(2, between_steps, stage, [], timeout=240)


def by_stages(kind, asked, degrees, options):
    """Answers of a model that is split into stages, and cut over tensor ranks where there are any; then it trains."""
    mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    model = split(deep_model(kind), mesh, **options)
    if "tp" in degrees:
        model = parallelize(model, mesh)
    sizes = EngineOptions(block_size=4, batch_tokens=8, requests=4, memory=24 * 4 * 1024 / 2**30)
    llm = LLM(model, options=sizes, ranks=mesh)
    greedy = llm.generate(asked, temperature=0, max_tokens=6)
    drawn = llm.generate(asked, max_tokens=6, seed=4)
    beams = llm.beam_search(asked[:1], BeamOptions(width=2, max_tokens=5))
    runner = PipelineRunner(
        model, mesh, microbatches=1, schedule="auto", loss_fn=lambda output, _: output.loss
    )
    ids = torch.tensor([asked[0]])
    loss = runner.step([{"input_ids": ids, "labels": ids}], [None])
    answers = [[list(output.token_ids) for output in outputs] for outputs in (greedy, drawn, beams)]
    return [*answers, float(loss)]


def deep_model(kind):
    layers = {
        "num_hidden_layers": 4,
        "n_layer": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    return small_model(kind, **{name: layers[name] for name in layers if name in (COMMON | KINDS[kind])})


STAGES = [
    ("llama", {"pp": 2}, {}),
    ("gemma3_text", {"pp": 2}, {"chunks": 2, "placement": "v"}),
    ("gpt2", {"pp": 2, "tp": 2}, {}),
    pytest.param("mixtral", {"pp": 4}, {}, marks=pytest.mark.matrix),
]


@pytest.mark.parametrize(("kind", "degrees", "options"), STAGES)
def test_pipeline_stages_write_what_one_process_does_and_train_on(kind, degrees, options):
    asked, model = prompts(5, seed=8, longest=20), deep_model(kind)
    first, *others = run_ranks(
        math.prod(degrees.values()), by_stages, kind, asked, degrees, options, timeout=400
    )
    assert all(other[:3] == first[:3] for other in others)
    assert first[0] == [written(model, prompt, 6) for prompt in asked]
    alone = LLM(model)
    assert first[1] == [list(output.token_ids) for output in alone.generate(asked, max_tokens=6, seed=4)]
    searched = model.generate(
        torch.tensor([asked[0]]),
        num_beams=2,
        max_new_tokens=5,
        do_sample=False,
        attention_mask=torch.ones(1, len(asked[0])),
    )
    assert first[2] == [searched[0, len(asked[0]) :].tolist()]
    ids = torch.tensor([asked[0]])
    assert first[3] == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-5)


def one_stage_alone():
    model = split(small_model("llama"), init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)))
    with pytest.raises(ConfigError, match="one stage of a pipeline"):
        LLM(model)


def test_a_stage_alone_is_refused():
    run_ranks(2, one_stage_alone)


def in_stage_3(asked, driver):
    """Each data rank answers its own prompts between steps, by weights that are gathered once a call."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    model, rank = deep_model("llama"), mesh.get_local_rank("dp_shard")
    pipeline = driver == "actions"
    if pipeline:
        split(model, mesh["pp"])
    shard_module(model, mesh["dp_shard"], driver=driver)
    own = asked[rank : rank + 1 + rank]
    llm = LLM(model, ranks=mesh["pp"] if pipeline else None)
    gathers = []
    sharding_of(model)._gatherer._gather = counted(sharding_of(model)._gatherer._gather, gathers)
    outputs = llm.generate(own, temperature=0, max_tokens=4 + rank)
    once = len(gathers)
    stream = list(llm.stream(own, temperature=0, max_tokens=4 + rank))
    assert [piece.token_id for piece in stream if piece.prompt == 0] == list(outputs[0].token_ids)
    assert len(gathers) == 2 * once
    ids = torch.tensor([asked[0]])
    if not pipeline:
        model(input_ids=ids, labels=ids).loss.backward()
    return [list(output.token_ids) for output in outputs], once


def counted(gather, gathers):
    def wrapped(*args):
        gathers.append(1)
        return gather(*args)

    return wrapped


@pytest.mark.parametrize("driver", ["hooks", "actions"])
def test_ranks_of_stage_3_gather_weights_once_and_answer_their_own_prompts(driver):
    asked, model = prompts(3, seed=5, longest=20), deep_model("llama")
    answers = run_ranks(4, in_stage_3, asked, driver, timeout=240)
    for place, (written_there, gathers) in enumerate(answers):
        rank = place % 2
        assert written_there == [written(model, prompt, 4 + rank) for prompt in asked[rank : rank + 1 + rank]]
        assert gathers == (5 if driver == "hooks" else 3)  # the layers here, and what is around them
