"""The module that trains on ranks answers there: tensor ranks together, data ranks of ZeRO each alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from engine_toys import prompts, small_model, written

from cai_apps.engine import LLM, Engine, EngineOptions
from cai_mesh.errors import ConfigError
from cai_mesh.testing import run_ranks
from cai_tensor_parallel import parallelize
from cai_zero import shard_module, shard_optimizer


def by_tensor_ranks(kind: str, asked, sequence: bool):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallelize(small_model(kind), mesh, sequence=sequence)
    llm = LLM(
        model, options=EngineOptions(block_size=4, batch_tokens=8, requests=4), ranks=mesh.get_group("tp")
    )
    llm.engine = Engine(model, llm.engine.limits, 24, ())
    greedy = llm.generate(asked, temperature=0, max_tokens=8)
    drawn = llm.generate(asked, temperature=1.0, max_tokens=8)  # seeds are those of the first rank
    return [[output.token_ids for output in outputs] for outputs in (greedy, drawn)]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_tensor_ranks_write_what_one_process_does(kind):
    asked = prompts(5)
    (greedy, drawn), (others, drawn_by_others) = run_ranks(
        2, by_tensor_ranks, kind, asked, False, timeout=240
    )
    assert greedy == others and drawn == drawn_by_others
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


def in_stage_3(asked):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model = small_model("llama")
    shard_module(model, mesh)
    with pytest.raises(ConfigError, match="ZeRO-3 divides"):
        LLM(model)
    outputs = LLM(model, ranks=mesh.get_group()).generate(asked, temperature=0, max_tokens=5)
    model(input_ids=torch.tensor([asked[0]]), labels=torch.tensor([asked[0]])).loss.backward()
    return [list(output.token_ids) for output in outputs]


def test_ranks_of_stage_3_write_together():
    asked, model = prompts(3, seed=5), small_model("llama")
    expected = [written(model, prompt, 5) for prompt in asked]
    assert run_ranks(2, in_stage_3, asked, timeout=240) == [expected, expected]
