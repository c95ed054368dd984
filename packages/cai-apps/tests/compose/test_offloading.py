"""A run with memory beyond the device is the run on the device: values, checkpoints, and what it tells."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layouts import (
    DTYPES,
    Case,
    full,
    model_config,
    parameters_of,
    run_config,
    train_steps,
)

from cai_apps.applications.language.task import workload
from cai_apps.compose.apply import apply
from cai_apps.compose.materialize import InitialValues, materialize
from cai_apps.compose.models import initializer, meta_model
from cai_gemini.activations.blocks import BlockForward
from cai_mesh import checkpoint
from cai_mesh.testing import run_ranks

STEPS, HALF = 6, 3
BUDGETS = {
    "auto": {"residency": "auto", "device_memory": "250kB"},
    "host": {"residency": "host"},
    "recomputed": {
        "residency": "auto",
        "device_memory": "250kB",
        "recompute": "full",
        "activations": "host",
    },
}
LOOSE = 1e6
"""A norm that nothing reaches. Where gradients are clipped, their norm is summed chunk by chunk under offload and in
another order without: its last bits differ, and then all values."""


ALONE, PAIR = Case(zero=3), Case(data=2, zero=3)


def config_of(dtype="fp32", clip=LOOSE, case=ALONE, size=2, **memory):
    """Of a case, with sequences of a forward pass and settings of `memory`; float64 takes twice the device."""
    config = run_config(case, dtype, STEPS)
    if dtype == "fp64" and "device_memory" in memory:
        memory["device_memory"] = "500kB"
    return replace(
        config,
        memory=replace(config.memory, **memory),
        optimizer=replace(config.optimizer, clip=clip),
        train=replace(config.train, microbatch_size=size),
    )


def session_with(model, config):
    return apply(config, workload(config, model_config(model)), device=torch.device("cpu"))


def run(model, config):
    """Initial parameters, losses, final parameters and optimizer state, on one rank."""
    session = session_with(model, config)
    before = full(parameters_of(session))
    losses, _ = train_steps(session, ALONE, 0, STEPS)
    return before, losses, stored(session)


def planned(model, config):
    """What stays where after the plan, and the losses up to there."""
    session = session_with(model, config)
    train_steps(session, ALONE, 0, HALF)
    return session.weights.offloaded.placement()


def stored(session):
    return full({n: v for n, v in session.state().items() if n != "optimizer.param_groups"})


def assert_equal(one, two):
    assert one.keys() == two.keys()
    assert [n for n in one if not torch.equal(one[n], two[n])] == []


def initial(model, dtype):
    """Every value `InitialValues` gives, asked for backwards, and the model's buffers; and those of `materialize`."""
    options = {"seed": 3, "dtype": DTYPES[dtype], "device": torch.device("cpu")}
    empty, at_once = (meta_model(model_config(model)) for _ in range(2))
    values = InitialValues(empty, initializer, **options)
    found = {name: values(name, param) for name, param in reversed(list(empty.named_parameters()))}
    values.finish()
    assert all(param.is_meta for param in empty.parameters())
    materialize(at_once, initializer, **options)
    return (
        found | dict(empty.named_buffers()),
        {n: p.detach() for n, p in at_once.named_parameters()} | dict(at_once.named_buffers()),
    )


@pytest.mark.parametrize("model", ["llama", "gpt2", "mamba"])
def test_values_asked_for_one_by_one_are_those_of_materialize(model):
    found, expected = initial(model, "fp32")
    assert_equal(found, expected)


@pytest.mark.parametrize(
    ("model", "size", "memory"),
    [
        ("llama", 2, "auto"),
        ("gpt2", 8, "auto"),
        ("llama", 2, "host"),
        ("llama", 2, "nvme"),
        ("gpt2", 8, "recomputed"),
    ],
)
def test_it_is_bitwise_the_run_on_the_device(model, size, memory, tmp_path):
    """GPT-2 takes its batch at once: its tied embedding has two gradients a pass, which ZeRO adds to those of the
    passes before one after the other, and offload after adding them to each other, as torch does."""
    options = {**BUDGETS, "nvme": {"residency": "nvme", "nvme": str(tmp_path)}}[memory]
    before, losses, after = run_ranks(1, run, model, config_of(size=size))[0]
    got = run_ranks(1, run, model, config_of(size=size, **options))[0]
    assert_equal(got[0], before)
    assert got[1] == losses
    assert_equal(got[2], after)


def test_the_budget_makes_a_mixed_plan():
    """Or the tests above would compare one device with another."""
    found = run_ranks(1, planned, "gpt2", config_of(size=8, **BUDGETS["auto"]))[0]
    assert found.planned
    assert 0 < found.weights_stay < found.chunks == 5
    assert found.device_bytes < 250_000 < found.host_bytes


def test_clipped_it_differs_in_the_last_bits_of_the_norm_alone():
    _, expected, _ = run_ranks(1, run, "llama", config_of("fp64", clip=0.1))[0]
    _, losses, _ = run_ranks(1, run, "llama", config_of("fp64", clip=0.1, **BUDGETS["auto"]))[0]
    assert losses == pytest.approx(expected, rel=1e-12)
    _, loose, _ = run_ranks(1, run, "llama", config_of("fp64"))[0]
    assert loose[-1] != pytest.approx(expected[-1], rel=1e-6)


def inputs_leave(config):
    """Whether blocks send their inputs away when they are called."""
    session = session_with("llama", config)
    return [isinstance(layer.forward, BlockForward) for layer in session.model.model.layers]


@pytest.mark.parametrize("where", ["device", "host"])
def test_inputs_of_blocks_wait_where_they_are_told_to(where):
    options = {**BUDGETS["recomputed"], "activations": where}
    assert run_ranks(1, inputs_leave, config_of(**options))[0] == [where == "host"] * 4


def first_half(config, directory):
    session = session_with("gpt2", config)
    train_steps(session, ALONE, 0, HALF)
    checkpoint.save(directory, session.state(), step=HALF)


def second_half(config, directory, case=ALONE):
    session = session_with("gpt2", config)
    session.loaded(checkpoint.load(directory, session.state()), HALF)
    losses, _ = train_steps(session, case, HALF, STEPS)
    return losses, stored(session)


@pytest.mark.parametrize(
    ("saved", "loaded"), [("auto", "auto"), ("device", "auto"), ("auto", "device"), ("nvme", "host")]
)
def test_resumed_it_is_bitwise_the_run_that_went_on(saved, loaded, tmp_path):
    memory = {
        **BUDGETS,
        "device": {},
        "nvme": {"residency": "nvme", "nvme": str(tmp_path)},
    }
    one, two = (config_of(size=8, **memory[which]) for which in (saved, loaded))
    _, losses, after = run_ranks(1, run, "gpt2", config_of(size=8))[0]
    run_ranks(1, first_half, one, str(tmp_path / "saved"))
    resumed, again = run_ranks(1, second_half, two, str(tmp_path / "saved"))[0]
    assert resumed == losses[HALF:]
    assert_equal(again, after)


def opened(model, config):
    session = session_with(model, config)
    before = full(parameters_of(session))
    return before, train_steps(session, ALONE, 0, HALF)[0]


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_pretrained_weights_are_read_into_host_memory(model, tmp_path):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    saved = AutoModelForCausalLM.from_config(model_config(model))
    saved.save_pretrained(tmp_path, max_shard_size="20KB")
    losses = []
    for memory in ({}, BUDGETS["auto"]):
        config = config_of(size=8, **memory)
        config = replace(config, model=replace(config.model, name=str(tmp_path), weights="pretrained"))
        before, found = run_ranks(1, opened, model, config)[0]
        assert_equal(before, {n: p.detach() for n, p in saved.named_parameters()})
        losses.append(found)
    assert losses[0] == losses[1]


MANY = {
    "data2": Case(data=2, zero=3),
    "data2-tensor2": Case(data=2, tensor=2, zero=3),
    "data2-pipeline2": Case(data=2, pipeline=2, zero=3),
}


def on_ranks(model, config, case):
    """Losses, what stays where, parameters and state, of every rank together."""
    session = session_with(model, config)
    losses, _ = train_steps(session, case, 0, STEPS)
    return losses, session.weights.offloaded.placement(), stored(session)


@pytest.mark.parametrize(
    ("layout", "memory"),
    [
        ("data2", "auto"),
        ("data2-tensor2", "host"),
        ("data2-pipeline2", "recomputed"),
        ("data2-tensor2", "nvme"),
    ],
)
def test_on_several_ranks_it_is_the_same_run(layout, memory, tmp_path):
    known = {**BUDGETS, "nvme": {"residency": "nvme", "nvme": str(tmp_path)}}
    case, options = MANY[layout], known[memory] | {"device_memory": "500kB"}
    _, losses, after = run_ranks(1, run, "llama", config_of("fp64", clip=0.1))[0]
    config = config_of("fp64", clip=0.1, case=case, size=1, **options)
    found, placed, again = run_ranks(case.world, on_ranks, "llama", config, case)[0]
    assert found == pytest.approx(losses, abs=1e-9)
    assert again.keys() == after.keys()
    assert all(torch.allclose(again[n], after[n], rtol=0, atol=1e-8) for n in after)
    assert placed.planned
    assert placed.host_bytes > 0


@pytest.mark.parametrize("memory", ["device", "auto", "nvme"])
def test_a_checkpoint_goes_on_on_several_ranks(memory, tmp_path):
    options = {"device": {}, **BUDGETS, "nvme": {"residency": "nvme", "nvme": str(tmp_path)}}
    _, losses, after = run_ranks(1, run, "gpt2", config_of("fp64"))[0]
    run_ranks(1, first_half, config_of("fp64", **BUDGETS["auto"]), str(tmp_path / "saved"))
    config = config_of("fp64", case=PAIR, **options[memory])
    resumed, again = run_ranks(2, second_half, config, str(tmp_path / "saved"), PAIR)[0]
    assert resumed == pytest.approx(losses[HALF:], abs=1e-9)
    assert all(torch.allclose(again[n], after[n], rtol=0, atol=1e-9) for n in after)
