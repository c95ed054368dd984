"""`precision.master = "split"`: the run of whole master weights, their checkpoints and averages, on any layout."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from layouts import Case, full, run_config, session_of, train_steps
from safetensors.torch import load_file

from cai_apps.compose.weights import MODEL
from cai_apps.config.validation import resolve
from cai_apps.planner.memory import model_state
from cai_mesh import checkpoint
from cai_mesh.checkpoint import save_hf
from cai_mesh.errors import ConfigError
from cai_mesh.layout import FlatChunk
from cai_mesh.testing import run_ranks
from cai_zero.replicated import halves, optimizer

STEPS, HALF = 6, 3
LAYOUTS = {
    "one": Case(average=0.9),
    "data2-zero0": Case(data=2, zero=0),
    "data2-zero2": Case(data=2, zero=2, average=0.9),
    "2x2x2": Case(data=2, tensor=2, pipeline=2),
    "dualpipe-v": Case(pipeline=2, chunks=2, schedule="dualpipe-v"),
}


def split(layout: str) -> Case:
    return replace(LAYOUTS[layout], master="split")


def model_of(session):
    """Master weights, and what else a checkpoint has but steps and param groups."""
    state = {n: v for n, v in session.state().items() if n.startswith((MODEL, "average."))}
    return full(state)


def bytes_of(session):
    """Of master weights as numbers."""
    return sum(chunk.weights.flat.untyped_storage().nbytes() for chunk in session.weights.optimizer.chunks)


@contextlib.contextmanager
def rounding_away_from_zero():
    """Inside, whole master weights round as halves do: halfway between two numbers, to the one farther from zero."""
    fill, gather = FlatChunk.fill, optimizer.gather_weights

    def filled(chunk, out, tensors):
        wide = out.float() if out.dtype is torch.bfloat16 else out
        fill(chunk, wide, tensors)
        if wide is not out:
            halves.split(wide, out)

    def gathered(compression, unsharded, shard, group, **options):
        mine = unsharded if group is None else unsharded.view(group.size(), -1)[group.rank()]
        halves.split(shard.detach(), mine)
        return gather(compression, unsharded, mine, group, **options)

    with (
        patch.object(FlatChunk, "fill", filled),
        patch.object(optimizer, "gather_weights", gathered),
    ):
        yield


def through(model, case):
    with rounding_away_from_zero() if case.master == "whole" else contextlib.nullcontext():
        session = session_of(model, case, "bf16", STEPS)
        losses, _ = train_steps(session, case, 0, STEPS)
        held = bytes_of(session)
        return losses, model_of(session), held


@functools.cache
def run_of(model, layout, master):
    case = replace(LAYOUTS[layout], master=master)
    return run_ranks(case.world, through, model, case)[0]


@pytest.mark.parametrize(
    ("model", "layout"), [*(("llama", name) for name in LAYOUTS), ("gpt2", "dualpipe-v")]
)
def test_it_is_the_run_of_whole_ones(model, layout):
    losses, expected, _ = run_of(model, layout, "whole")
    got_losses, got, held = run_of(model, layout, "split")
    assert got_losses == losses and got.keys() == expected.keys()
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in got.values())
    assert held == 0 or LAYOUTS[layout].average  # an average has looked at them; the next forward frees them


def first_half(model, case, directory):
    session = session_of(model, case, "bf16", STEPS)
    train_steps(session, case, 0, HALF)
    checkpoint.save(directory, session.state(), step=HALF)
    return model_of(session)


def second_half(model, case, directory):
    session = session_of(model, case, "bf16", STEPS)
    session.loaded(checkpoint.load(directory, session.state()), HALF)
    loaded = model_of(session)
    losses, _ = train_steps(session, case, HALF, STEPS)
    return loaded, losses, model_of(session)


def test_a_resume_is_bitwise(tmp_path):
    case = split("data2-zero2")
    run_ranks(case.world, first_half, "gpt2", case, tmp_path)
    _, losses, ended = run_ranks(case.world, second_half, "gpt2", case, tmp_path)[0]
    expected_losses, expected, _ = run_of("gpt2", "data2-zero2", "split")
    assert losses == expected_losses[HALF:]
    assert all(torch.equal(ended[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("before", "after"),
    [(split("2x2x2"), LAYOUTS["data2-zero0"]), (Case(data=2, zero=3), split("dualpipe-v"))],
)
def test_checkpoints_go_both_ways(before, after, tmp_path):
    saved = run_ranks(before.world, first_half, "gpt2", before, tmp_path)[0]
    loaded, losses, _ = run_ranks(after.world, second_half, "gpt2", after, tmp_path)[0]
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    assert losses == pytest.approx(run_of("gpt2", "data2-zero0", "whole")[0][HALF:], abs=5e-3)


def exported(case, directory):
    session = session_of("gpt2", case, "bf16", 2)
    train_steps(session, case, 0, 2)
    save_hf(session.model, directory / "masters", weights=session.weights.masters())
    save_hf(session.model, directory / "rounded", weights=session.weights.masters(), dtype=torch.bfloat16)
    return full({n.removeprefix(MODEL): v for n, v in session.state().items() if n.startswith(MODEL)})


def test_exports_have_the_numbers(tmp_path):
    case = split("2x2x2")
    masters = run_ranks(case.world, exported, case, tmp_path)[0]
    found, rounded = (load_file(tmp_path / kind / "model.safetensors") for kind in ("masters", "rounded"))
    assert found.keys() == rounded.keys() == masters.keys()
    assert all(torch.equal(found[name], value) for name, value in masters.items())
    assert all(torch.equal(rounded[name], value.bfloat16()) for name, value in masters.items())


@pytest.mark.parametrize(
    ("case", "dtype", "got"),
    [
        (Case(data=2, zero=3), "bf16", "parallel.zero = 3"),
        (Case(), "fp32", 'precision.compute = "fp32"'),
        (Case(), "fp16", 'precision.compute = "fp16"'),
    ],
)
def test_what_cannot_be_is_refused(case, dtype, got):
    with pytest.raises(ConfigError, match="upper half") as caught:
        resolve(run_config(replace(case, master="split"), dtype), case.world)
    assert got in str(caught.value)


def test_a_plan_counts_two_bytes_less():
    config = resolve(run_config(Case(), "bf16"), 1)
    halved = replace(config, precision=replace(config.precision, master="split"))
    on_gpu = replace(halved, train=replace(halved.train, device="cuda"))
    by_lamb = replace(on_gpu, optimizer=replace(on_gpu.optimizer, kind="lamb"))
    states = [model_state(c, 100, 8.0) for c in (config, on_gpu, by_lamb)]
    assert [state.total for state in states] == [1800, 1600, 1600]
    assert [state.joined for state in states] == [0, 0, 400]
