from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
from transformers import AutoConfig

from cai_apps import recipes
from cai_apps.applications.language.config import Config
from cai_apps.applications.language.rules import check_rotary
from cai_apps.applications.language.validation import resolve
from cai_apps.compose.causality import check_reads_forwards
from cai_apps.compose.models import check_causal, load_model_config, meta_model
from cai_apps.config.environment import launched
from cai_apps.config.memory import check_machine
from cai_apps.config.optimizer import RULES, Kind
from cai_apps.config.sections import Pipeline
from cai_mesh.errors import CaiError, ConfigError, MeshError, PlanError
from cai_pipeline.plans import SCHEDULES, limits_of


def changed(config: Config, **values) -> Config:
    """`changed(config, train__steps=3)` is the config with another value in one place."""
    for key, value in values.items():
        *path, leaf = key.split("__")
        owners = [config]
        for name in path:
            owners.append(getattr(owners[-1], name))
        for name, owner in zip([*path[1:], leaf][::-1], owners[1:][::-1], strict=True):
            value = replace(owner, **{name: value})
        config = replace(config, **{path[0]: value})
    return config


@pytest.fixture
def tiny():
    return recipes.load("llama-tiny")


def resolved(config, ranks=8):
    return resolve(config, load_model_config(config.model.name), ranks)


def test_every_optimizer_has_a_row():
    assert get_args(Kind) == tuple(RULES)


def test_every_schedule_has_limits():
    names = get_args(get_type_hints(Pipeline)["schedule"])
    assert names == (*SCHEDULES, "auto")
    assert [limits_of(name).stages for name in names if limits_of(name).microbatches] == ["two"]
    with pytest.raises(PlanError, match="unknown schedule"):
        limits_of("2f2b")


def test_fills_in_what_is_open(tiny):
    config = changed(tiny, parallel__shard=-1, parallel__pipeline__microbatches=None)
    config = resolved(config, ranks=16)
    assert config.parallel.shard == 4
    assert config.parallel.pipeline.microbatches == 1
    assert config.lr_schedule.decay_steps == tiny.train.steps
    assert resolve(config, load_model_config("llama-tiny"), 16) == config


@pytest.mark.parametrize(
    "change, kind, parts",
    [
        ({"parallel__replicate": 3}, MeshError, ["does not fit the number of ranks", "8 ranks"]),
        ({"parallel__shard": 0}, MeshError, ["parallel.shard"]),
        ({"parallel__tensor__size": 8, "parallel__shard": 1, "parallel__pipeline__size": 1}, ConfigError,
         ["4 attention heads", "parallel.tensor.size = 8", "1, 2, 4"]),
        ({"parallel__pipeline__size": 8, "parallel__shard": 1, "parallel__tensor__size": 1}, ConfigError,
         ["4 layers", "parallel.pipeline.size = 8", "at most 4 stages"]),
        ({"train__global_batch": 18}, ConfigError, ["batch sizes disagree", "global_batch = 18", "global_batch to 16"]),
        ({"parallel__pipeline__balance": (1, 1, 2)}, ConfigError, ["gives each stage its layers", "2 numbers"]),
        ({"parallel__pipeline__balance": (1, 2)}, ConfigError, ["does not divide the model's layers", "expected: 4"]),
        ({"parallel__tensor__size": 1, "parallel__pipeline__size": 4, "parallel__pipeline__chunks": 2,
          "parallel__pipeline__schedule": "dualpipe-v", "parallel__zero": 1, "model__name": "llama-1b"}, ConfigError,
         ["2 microbatches or more for each pipeline rank", "at least 8"]),
        ({"parallel__pipeline__microbatches": 4}, ConfigError, ["batch sizes disagree", "global_batch to 32"]),
        ({"data__sequence_length": 1024}, ConfigError, ["sequence_length", "at most 512"]),
        ({"model__weights": "pretrained", "data__tokenizer": "train"}, ConfigError,
         ["needs the tokenizer", "data.tokenizer"]),
        ({"parallel__tensor__mode": "2d"}, PlanError, ["mode 2d has no grid", "2 ranks", "q x q: 4"]),
        ({"parallel__tensor__depth": 2}, ConfigError, ["parallel.tensor.depth is for", "2.5d"]),
        ({"parallel__tensor__mode": "2d", "parallel__tensor__size": 4, "parallel__shard": 1,
          "parallel__tensor__sequence": True}, ConfigError, ["sequence = True", "no sequence", 'mode = "1d"']),
        ({"parallel__tensor__mode": "3d", "parallel__tensor__size": 8, "parallel__shard": 1,
          "parallel__pipeline__size": 1, "train__microbatch_size": 2}, ConfigError,
         ["over 4 ranks", "a multiple of 4"]),
        ({"parallel__tensor__mode": "2d", "parallel__tensor__size": 4, "parallel__shard": 2,
          "parallel__pipeline__size": 1, "train__compile": "on"}, ConfigError, ["one graph of a block"]),
        ({"parallel__tensor__mode": "2d", "parallel__tensor__size": 4, "parallel__shard": 1,
          "memory__recompute": "selective"}, ConfigError, ["keeps the results of products", 'to "most"']),
        ({"parallel__tensor__sequence": True, "data__sequence_length": 127}, ConfigError, ["127", "a multiple of 2"]),
        ({"parallel__context__size": 2, "parallel__shard": 1, "data__sequence_length": 126}, ConfigError,
         ["two pieces of each row", "126", "a multiple of 4", "to 128"]),
        ({"parallel__context__size": 2, "parallel__shard": 1, "parallel__tensor__sequence": True,
          "data__sequence_length": 132}, ConfigError, ["with sequence", "a multiple of 8", "to 136"]),
        ({"parallel__context__size": 2, "parallel__context__mode": "ulysses", "parallel__shard": 1,
          "parallel__tensor__size": 4, "parallel__pipeline__size": 1}, ConfigError,
         ["4 attention heads", "ulysses", 'mode to "gather"']),
        ({"parallel__context__size": 2, "parallel__tensor__size": 4, "parallel__tensor__mode": "2d",
          "parallel__shard": 1, "parallel__pipeline__size": 1}, ConfigError, ["a grid", 'mode = "1d"']),
        ({"parallel__context__size": 8, "parallel__tensor__size": 1, "parallel__pipeline__size": 1,
          "parallel__shard": 1, "model__neftune_alpha": 5.0}, ConfigError,
         ["noise on embeddings", "neftune_alpha to 0"]),
        ({"parallel__context__size": 4, "parallel__tensor__size": 1, "parallel__pipeline__size": 1,
          "optimizer__clip_samples": 1.0, "train__microbatch_size": 1}, ConfigError,
         ["context.size = 4", "whole on its rank"]),
        ({"parallel__context__size": 3}, MeshError, ["does not fit the number of ranks", "cp 3"]),
        ({"train__steps": 0}, ConfigError, ["train.steps", "at least 1"]),
        ({"data__validation_fraction": 1.0}, ConfigError, ["validation_fraction"]),
        ({"log__prompts": ("Hi",), "train__validate_every": 0}, ConfigError, ["log.prompts", "validate_every = 0"]),
        ({"log__prompts": ("Hi",), "log__sample_tokens": 0}, ConfigError, ["log.prompts", "sample_tokens = 0"]),
    ],
)  # fmt: skip
def test_what_cannot_work_says_so(tiny, change, kind, parts):
    with pytest.raises(kind) as caught:
        resolved(changed(tiny, **change))
    for part in parts:
        assert part in str(caught.value)


ALONE = {"parallel__shard": 1, "parallel__tensor__size": 1, "parallel__pipeline__size": 1}


@pytest.mark.parametrize(
    "ranks, memory, parts",
    [
        (1, {"residency": "nvme"}, ["needs a directory", "set memory.nvme"]),
        (1, {"residency": "auto", "device_memory": "22 gigs"},
         ["memory.device_memory is not a size", "'22 gigs'", '"22GB"']),
        (1, {"residency": "auto", "host_memory": 0}, ["memory.host_memory is not a size", "got:      0"]),
        (1, {"device_memory": "22GB"},
         ["memory.device_memory does nothing", 'residency = "device"', "auto, host or nvme"]),
        (1, {"nvme": "/tmp"}, ["memory.nvme does nothing"]),
        (1, {"activations": "host"}, ['activations = "host"', 'recompute = "none"', "set memory.recompute to full"]),
        (2, {"residency": "auto"}, ['"auto" on several ranks', "parallel.zero = 1, 2 ranks", "parallel.zero to 3"]),
        (2, {"residency": "nvme", "nvme": "/tmp"}, ['"nvme" on several ranks', "set parallel.zero to 3"]),
        (2, {"residency": "host"}, ["needs parameters in shards", "set parallel.zero to 3"]),
    ],
)  # fmt: skip
def test_memory_that_cannot_be_says_so(tiny, ranks, memory, parts):
    alone = changed(tiny, **{**ALONE, "parallel__shard": ranks})
    with pytest.raises(ConfigError) as caught:
        resolved(changed(alone, **{f"memory__{key}": value for key, value in memory.items()}), ranks)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "ranks, memory",
    [
        (1, {"residency": "auto", "device_memory": "22GB", "host_memory": 10**11, "nvme": "/nowhere"}),
        (1, {"residency": "host"}),
        (2, {"residency": "host"}),
        (2, {"residency": "auto", "device_memory": "22GB", "host_memory": "100GB"}),
        (2, {"residency": "nvme", "nvme": "/nowhere"}),
        (1, {"recompute": "full", "activations": "host"}),
    ],
)
def test_memory_that_can_be(tiny, ranks, memory):
    alone = changed(tiny, **{**ALONE, "parallel__shard": ranks, "parallel__zero": 3 if ranks > 1 else 1})
    config = changed(alone, **{f"memory__{key}": value for key, value in memory.items()})
    assert resolved(config, ranks).memory == config.memory


def test_a_disk_and_a_host_copy_of_all_of_it(tiny):
    config = changed(
        tiny, **ALONE, memory__residency="nvme", memory__nvme="/tmp", checkpoint__background="on"
    )
    with pytest.raises(ConfigError, match=r'keeps out of it(.|\n)*set checkpoint.background to "auto"'):
        resolved(config, 1)


def test_what_the_machine_lacks(tiny, tmp_path):
    auto = changed(tiny, memory__residency="auto")
    with pytest.raises(ConfigError, match=r"the CPU has no memory of its own(.|\n)*memory.device_memory"):
        check_machine(auto, "cpu")
    check_machine(auto, "cuda")
    check_machine(changed(auto, memory__device_memory=10**9), "cpu")
    check_machine(changed(auto, memory__nvme=str(tmp_path)), "cuda")
    with pytest.raises(ConfigError, match="not a directory that can be written to") as caught:
        check_machine(changed(auto, memory__nvme=str(tmp_path / "gone")), "cuda")
    assert str(tmp_path / "gone") in str(caught.value)


@pytest.mark.parametrize("name", [n for n in recipes.names() if recipes.load(n).application == "language"])
def test_recipes_resolve_on_8_ranks_or_their_own_number(name):
    config = recipes.load(name)
    parallel = config.parallel
    ranks = 8 if parallel.shard == -1 else parallel.shard * parallel.tensor.size * parallel.pipeline.size
    assert resolved(config, ranks).parallel.shard >= 1


def test_unknown_model_suggests_a_preset(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CaiError, match="did you mean 'llama-tiny'"):
        load_model_config("llama-tinny")


def test_launcher_variables():
    whole = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert launched(whole)
    assert not launched({"MASTER_ADDR": "localhost"})
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        with pytest.raises(ConfigError, match=f"{name} is not"):
            launched({key: value for key, value in whole.items() if key != name})


def test_tasks_of_srun_that_would_be_runs_of_their_own_are_refused():
    one = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "2"}
    assert not launched(one)
    assert not launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}), "a batch script, which is no task"
    with pytest.raises(ConfigError, match="one task a machine"):
        launched(one | {"SLURM_STEP_NUM_TASKS": "8"})
    assert launched(
        one
        | {"SLURM_STEP_NUM_TASKS": "2", "RANK": "0", "WORLD_SIZE": "2"}
        | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    )


@pytest.mark.parametrize("kind", ["bert", "roberta", "reformer", "xlm", "xlnet", "cpmant", "bert-generation"])
def test_models_that_read_in_both_directions_are_refused(kind):
    with pytest.raises(ConfigError, match="both directions"):
        check_causal(AutoConfig.for_model(kind), kind)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bart", "opt", "mamba"])
def test_causal_models_are_not(kind):
    check_causal(AutoConfig.for_model(kind), kind)
    if kind == "bart":
        check_causal(AutoConfig.for_model("bert", is_decoder=True), "bert")


BOTH_WAYS = [
    ("gemma3_text", {"use_bidirectional_attention": True}),
    ("bert", {}),
    ("roberta-prelayernorm", {}),
    ("xlm", {}),
]
FORWARDS = [
    ("gemma3_text", {}),
    ("bert", {"is_decoder": True}),
    ("falcon_h1", {}),
    ("beam", {}),
    ("mamba", {}),
]


@pytest.mark.parametrize(("kind", "values"), BOTH_WAYS)
def test_what_a_value_lets_read_both_ways_is_refused(kind, values):
    """Whatever the value is named: a small model is tried."""
    with pytest.raises(ConfigError, match="both directions"):
        check_reads_forwards(meta_model(AutoConfig.for_model(kind, **values)), kind)


@pytest.mark.parametrize(("kind", "values"), FORWARDS)
def test_what_reads_forwards_is_not(kind, values):
    check_reads_forwards(meta_model(AutoConfig.for_model(kind, **values)), kind)


@pytest.mark.parametrize(
    ("length", "boundaries", "is_refused"),
    [(64, "keep", False), (128, "keep", True), (128, "ignore", False)],
)
def test_documents_that_would_change_each_others_rotary_factors_are_refused(length, boundaries, is_refused):
    """Longrope, as Phi-3 of 128k has it: factors are those of the longest position of a batch."""
    rotary = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    model = SimpleNamespace(rope_parameters=rotary, max_position_embeddings=256)
    config = replace(Config(), data=replace(Config().data, sequence_length=length, boundaries=boundaries))
    with pytest.raises(ConfigError, match="rotary factors") if is_refused else nullcontext():
        check_rotary(config, model)
