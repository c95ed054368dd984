from __future__ import annotations

import json
from dataclasses import replace

import pytest
from torch import nn

from cai_apps import recipes
from cai_apps.applications.language import APPLICATION
from cai_apps.applications.language.plan import plan
from cai_apps.cli import main
from cai_apps.config.file import change
from cai_apps.planner.fit import Planner
from cai_apps.planner.memory import model_state, most_kept
from cai_apps.planner.plan import unsharded_bytes
from cai_apps.planner.text import notes, render
from cai_mesh.errors import ConfigError, MeshError, PlanError
from cai_pipeline import place, program

GIB = 2**30


@pytest.fixture
def tiny():
    return recipes.load("llama-tiny")


def test_stages_and_tensor_shards_make_the_model(tiny):
    planned = plan(tiny)
    assert planned.ranks == 8
    assert planned.axes == {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}
    names = [name for stage in planned.stages for name in stage.blocks]
    assert names == [f"model.layers.{index}" for index in range(4)]
    replicated = 9 * 128  # the norms are replicated on both tensor ranks
    assert 2 * sum(stage.parameters for stage in planned.stages) == planned.parameters + replicated


def test_tied_embedding_is_on_both_ends():
    planned = plan(recipes.load("gpt2-tiny"))
    tied = 512 * 128 // 2
    assert planned.stages[1].parameters > tied
    assert planned.stages[0].parameters > tied + 512 * 128


@pytest.mark.parametrize(
    "zero, compute, master, parameters, gradients, optimizer",
    [
        (0, "fp32", "auto", 400, 400, 800),
        (1, "fp32", "auto", 400, 400, 200),
        (2, "fp32", "auto", 400, 100, 200),
        (3, "fp32", "auto", 100, 100, 200),
        (0, "bf16", "whole", 200, 400, 1200),
        (1, "bf16", "whole", 200, 400, 300),
        (2, "bf16", "whole", 200, 100, 300),
        (0, "bf16", "auto", 200, 400, 1000),
        (1, "bf16", "auto", 200, 400, 250),
        (2, "bf16", "auto", 200, 100, 250),
        (3, "bf16", "auto", 100, 100, 200),
        (1, "fp64", "auto", 800, 800, 400),
    ],
)
def test_model_state_of_100_elements_on_4_ranks(
    tiny, zero, compute, master, parameters, gradients, optimizer
):
    config = replace(
        tiny,
        parallel=replace(tiny.parallel, zero=zero, shard=4),
        precision=replace(tiny.precision, compute=compute, master=master),
    )
    state = model_state(config, 100, 16.0 if compute == "fp64" else 8.0)
    assert (state.parameters, state.gradients, state.optimizer) == (parameters, gradients, optimizer)


@pytest.mark.parametrize(
    "schedule, ranks, chunks, microbatches, expected",
    [
        ("gpipe", 2, 1, 5, [5, 5]),
        ("1f1b", 4, 1, 8, [4, 3, 2, 1]),
        ("1f1b", 1, 1, 8, [1]),
        ("bfs", 2, 2, 3, [6, 6]),
        ("interleaved", 2, 2, 4, [5, 3]),
    ],
)
def test_microbatches_in_flight(schedule, ranks, chunks, microbatches, expected):
    held = place(ranks, chunks)
    kept = dict.fromkeys(range(len(held)), 1)
    assert [most_kept(order, kept) for order in program(schedule, held, microbatches)] == expected


def test_stages_of_several_chunks(tiny):
    """Every block once, and the parameters of the whole."""
    pipeline = {"parallel.pipeline.chunks": 2, "parallel.pipeline.schedule": "interleaved"}
    planned, one = plan(change(tiny, pipeline)), plan(tiny)
    assert [stage.blocks for stage in planned.stages] == [
        ("model.layers.0", "model.layers.2"),
        ("model.layers.1", "model.layers.3"),
    ]
    assert sum(s.parameters for s in planned.stages) == sum(s.parameters for s in one.stages)
    assert planned.stages[1].activations > one.stages[1].activations, "more is in flight"


def test_zero_1_holds_unsharded_gradients_only_to_accumulate(tiny):
    many, one = (
        replace(
            tiny, parallel=replace(tiny.parallel, pipeline=replace(tiny.parallel.pipeline, microbatches=n))
        )
        for n in (2, 1)
    )
    assert model_state(many, 100, 8.0).gradients == 400
    assert model_state(one, 100, 8.0).gradients == 200


@pytest.mark.parametrize(("zero", "parameters"), [(0, 2 * 1100), (1, 2 * 1100), (2, 2 * 1100), (3, 4 * 550)])
def test_frozen_parameters_take_their_values_alone(tiny, zero, parameters):
    config = replace(
        tiny,
        parallel=replace(tiny.parallel, zero=zero, shard=2),
        precision=replace(tiny.precision, compute="bf16"),
    )
    beside, alone = model_state(config, 100, 8.0, frozen=1000), model_state(config, 100, 8.0)
    assert beside.parameters == parameters
    assert (beside.gradients, beside.optimizer) == (alone.gradients, alone.optimizer)


def test_what_zero_holds_whole_is_two_units(tiny):
    """Two blocks of 10 and 20 elements and a root of 5: gathered and, in float32 here, reduced two at a time."""
    model = nn.Module()
    model.first = nn.ModuleList([nn.Linear(5, 2, bias=False), nn.Linear(5, 4, bias=False)])
    model.last = nn.Linear(5, 1, bias=False)

    def found(zero, shard=4, microbatches=2):
        pipeline = replace(tiny.parallel.pipeline, microbatches=microbatches)
        return unsharded_bytes(
            replace(tiny, parallel=replace(tiny.parallel, zero=zero, shard=shard, pipeline=pipeline)), model
        )

    assert found(zero=3) == (4 + 4) * 30
    assert found(zero=2) == 4 * 30
    assert found(zero=1, microbatches=1) == 4 * 30
    assert found(zero=1) == found(zero=0) == found(zero=3, shard=1) == 0


def test_recompute_keeps_less(tiny):
    some, full = (
        replace(tiny, memory=replace(tiny.memory, recompute=form)) for form in ("selective", "full")
    )
    # one stage of four blocks: the block that is run again weighs less than what the others do not keep
    some, full, none = (
        replace(
            c, parallel=replace(c.parallel, pipeline=replace(c.parallel.pipeline, size=1, microbatches=None))
        )
        for c in (some, full, tiny)
    )
    for kept, part, recomputed in zip(plan(none).stages, plan(some).stages, plan(full).stages, strict=True):
        assert recomputed.activations < part.activations < kept.activations
        assert recomputed.state == part.state == kept.state


def test_open_degree_takes_the_ranks_that_are_left():
    planned = plan(recipes.load("llama-1b"), ranks=8)
    assert planned.config.parallel.shard == 8
    assert plan(recipes.load("llama-1b")).ranks == 1


def test_same_errors_as_training(tiny):
    with pytest.raises(MeshError, match="does not fit"):
        plan(tiny, ranks=6)
    with pytest.raises(ConfigError, match="batch sizes disagree"):
        plan(replace(tiny, train=replace(tiny.train, global_batch=17)))


def test_rendered_plan_has_the_mesh_and_a_row_per_stage(tiny):
    text = APPLICATION.plan(tiny, None, "llama-tiny", None).text
    assert "pp 2 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 2  (8 ranks)" in text
    assert "869,504 parameters" in text
    assert len([line for line in text.splitlines() if line.endswith("MiB") and line.startswith("    ")]) == 2


def test_activations_on_the_host_leave_three_inputs_on_the_device():
    block_input = 4 * 128 * 128 * 4  # sequences, tokens, width, bytes
    here = recipes.load("llama-tiny-offload", {"memory.activations": "device"})
    kept, away = (plan(config).stages[0].activations for config in (here, recipes.load("llama-tiny-offload")))
    assert kept - away == (4 - 3) * block_input


def test_needs_of_an_8_billion_model_on_one_gpu():
    """16 bytes a parameter on the host, and a block with its gradients and the two largest on the device."""
    config = recipes.load("llama-8b", {"memory.residency": "auto", "memory.device_memory": "22GB"})
    planned = plan(config)
    assert planned.offload.host == pytest.approx(16 * planned.parameters, rel=1e-4)
    embedding = 128256 * 4096
    assert planned.offload.smallest - planned.stages[0].activations == pytest.approx(
        2 * 3 * embedding, rel=1e-3
    )
    text = APPLICATION.plan(config, None, "llama-8b", None).text
    assert "20.49 GiB may be used; works from about" in text
    assert "host      at most 119." in text


def test_a_disk_takes_what_the_host_lacks():
    changes = {"memory.residency": "auto", "memory.device_memory": "22GB", "memory.host_memory": "60GB"}
    with pytest.raises(PlanError, match="host memory is too small"):
        plan(recipes.load("llama-8b", changes))
    config = recipes.load("llama-8b", {**changes, "memory.nvme": "/fast"})
    planned = plan(config)
    assert planned.offload.host <= 60e9
    assert planned.offload.host + planned.offload.disk > 16 * planned.parameters
    assert "GiB in /fast" in APPLICATION.plan(config, None, "llama-8b", None).text


def test_too_little_device_memory():
    with pytest.raises(PlanError, match="too small for one layer at a time"):
        plan(recipes.load("llama-8b", {"memory.residency": "auto", "memory.device_memory": "2GB"}))
    tight = recipes.load("llama-8b", {"memory.residency": "auto", "memory.device_memory": "4GB"})
    assert "likely too small" in APPLICATION.plan(tight, None, "llama-8b", None).text


def test_one_rank_is_told_what_offload_would_do(tiny):
    assert plan(tiny).offload is None
    assert (
        "with memory.residency auto: works from about"
        in APPLICATION.plan(recipes.load("llama-1b"), None, "llama-1b", None).text
    )


@pytest.mark.parametrize("recipe", ["llama-tiny", "sd-v1-tiny", "alphafold-tiny", "dlrm-tiny"])
def test_a_plan_for_programs(recipe, capsys):
    """Standard output holds one JSON object, and nothing else."""
    assert main(["plan", recipe, "--json", "--gpu-memory=80GiB"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["fits"] is True
    assert facts["memory"] == 80 * GIB
    assert facts["title"].startswith(recipe)
    assert recipes.load(recipe).application == facts["config"]["application"]


@pytest.mark.parametrize(("recipe", "learned"), [("qlora-70b", 207_093_760), ("sft-8b", 8_030_261_248)])
def test_recipes_for_fine_tuning_fit_gpus_of_80_gb(recipe, learned, capsys):
    """They name a shape, which is all that a plan reads; a run asks for a model."""
    assert main(["plan", recipe, "--gpu-memory", "80GB", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["fits"] is True
    assert facts["parameters"] - facts["frozen"] == learned


def test_a_base_in_codes_makes_a_small_gpu_enough(capsys):
    """What is too large for a GPU of 16 GB is told to be quantized, and fits then."""
    assert main(["plan", "lora-8b", "--gpu-memory", "16GB"]) == 0
    assert "it fits with lora.base = nf4 on 1 rank" in capsys.readouterr().out
    assert main(["plan", "lora-8b", "--gpu-memory", "16GB", "--lora.base", "nf4"]) == 0
    text = capsys.readouterr().out
    assert "fits 14.90 GiB" in text and "memory.residency" not in text


def test_what_makes_it_fit_for_programs(capsys):
    assert main(["plan", "llama-8b", "--json", "--ranks", "1", "--gpu-memory", "40GiB"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["fits"] is False
    assert facts["peak"] == max(stage["peak"] for stage in facts["stages"])
    assert facts["peak"] == min(facts["recompute_peaks"].values())
    assert facts["advice"], "more ranks"
    assert all(advised["peak"] < facts["peak"] for advised in facts["advice"])


def test_a_pipeline_is_drawn_on_request(capsys):
    flags = [
        "--parallel.tensor.size=1",
        "--parallel.pipeline.size=2",
        "--parallel.shard=1",
        "--train.global_batch=4",
    ]
    more = ["--train.microbatch_size=1", "--parallel.pipeline.schedule=zb-h1"]
    assert main(["plan", "llama-tiny", *flags, *more, "--pipeline"]) == 0
    assert capsys.readouterr().out.endswith("\n  0  01.aA2bB3cCdD\n  1  .0a1bA2cB3dCD\n")
    assert main(["plan", "llama-1b", "--pipeline"]) == 2
    assert "this run has none" in capsys.readouterr().err


def test_a_plan_says_where_what_it_is_for_is_not_here(tiny):
    planned = plan(tiny)
    assert planned.config.train.device == "auto" and planned.device == "cuda"
    assert notes(planned, gpus=8, kernels=True) == []
    (no_gpu,) = notes(planned, gpus=0, kernels=True)
    assert "kernels are counted" in no_gpu and "--train.device cpu" in no_gpu
    (no_kernels,) = notes(planned, gpus=8, kernels=False)
    assert "plain torch is counted" in no_kernels and "cai-kernels[triton]" in no_kernels
    on_cpu = plan(change(tiny, {"train.device": "cpu"}))
    assert notes(on_cpu, gpus=0, kernels=True) == []
    assert "on a CPU" in render(on_cpu, "title", "batch") and "on a GPU" in render(planned, "title", "batch")


def test_a_reference_that_stays_beside_the_model_counts():
    from cai_apps.applications.alignment.task import ALIGNMENT
    from cai_apps.recipes import load

    planner = Planner(ALIGNMENT.resolve, ALIGNMENT.workload)
    changes = {"model.name": "llama-tiny", "model.weights": "random", "train.device": "cpu"}
    for zero, ranks in ((1, 1), (3, 2)):
        plans = {
            form: planner.plan(
                load("dpo-tiny", {**changes, "parallel.zero": zero, "reference.form": form}), ranks=ranks
            )
            for form in ("computed", "model")
        }
        added = plans["model"].peak - plans["computed"].peak
        assert added == -(-plans["model"].parameters // (2 if zero == 3 else 1)) * 4
