"""State moves with its parameters: stage 1 on two ranks, stage 3 on three, stage 2 with tp, one process."""

from __future__ import annotations

import copy

import pytest
import torch
import toy
from over_ranks import full_parameters

from cai_mesh import checkpoint
from cai_mesh.layout import BoxedTensor
from cai_mesh.testing import run_ranks
from cai_zero import ShardedOptimizer, optimizer_state, restore_groups
from cai_zero.optimizers import Adafactor, AdamW, Came, Lamb, Lars, Muon, NewtonSchulz

MAKERS = {
    "lamb": lambda model, mesh: Lamb(model.parameters(), lr=0.02, mesh=mesh),
    "lars": lambda model, mesh: Lars(model.parameters(), trust=0.02, mesh=mesh),
    "adafactor": lambda model, mesh: Adafactor(model.parameters(), lr=0.05, mesh=mesh),
    "came": lambda model, mesh: Came(model.parameters(), lr=0.02, mesh=mesh),
    "muon": lambda model, mesh: Muon(
        toy.groups_of(model, use_muon=False), lr=0.02, newton_schulz=NewtonSchulz(dtype=None), mesh=mesh
    ),
    "adamw": lambda model, mesh: AdamW(model.parameters(), lr=0.02),
    "bfloat16": lambda model, mesh: AdamW(model.parameters(), lr=0.02, state_dtype=torch.bfloat16, seed=3),
}


def state_of(model, optimizer):
    if isinstance(optimizer, ShardedOptimizer):
        weights, held = optimizer.weights(), optimizer.state_for_checkpoint()
    else:
        weights = {n: BoxedTensor.from_param(p) for n, p in model.named_parameters()}
        held = optimizer_state(optimizer, model)
    return {**{f"model.{n}": b for n, b in weights.items()}, **{f"optimizer.{n}": b for n, b in held.items()}}


def leg(name, stage, shape, directory, first, last):
    """Load what the leg before saved, train steps [first, last), save; the final parameters."""
    make = MAKERS[name]
    if shape is None:
        model, mesh = toy.Toy(), None
        optimizer = make(model, None)
    else:
        model, optimizer, mesh = toy.built(make, stage, shape)
    if first:
        values = checkpoint.load(directory, state_of(model, optimizer))
        restore_groups(optimizer, values["optimizer.param_groups"])
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.publish()
    toy.advance(model, optimizer, mesh, range(first, last))
    checkpoint.save(directory, state_of(model, optimizer), step=last).wait()
    return full_parameters(model)


@pytest.mark.parametrize("name", list(MAKERS))
def test_resharding_changes_nothing(name, tmp_path):
    run_ranks(2, leg, name, 1, (2,), tmp_path, 0, 3)
    run_ranks(3, leg, name, 3, (3,), tmp_path, 3, 6)
    run_ranks(4, leg, name, 2, (2, 2), tmp_path, 6, 9)
    got = leg(name, None, None, tmp_path, 9, 12)
    toy.compare(got, toy.one_process(MAKERS[name]))


def eight_bit(stage, shape, directory, save):
    """Train and save, or load and say what was loaded, by name, before and after it is put in eight bits."""
    model, optimizer, mesh = toy.built(
        lambda model, mesh: AdamW(model.parameters(), lr=0.02, state_dtype="int8"), stage, shape
    )
    if save:
        toy.advance(model, optimizer, mesh, range(4))
        state = state_of(model, optimizer)
        checkpoint.save(directory, state, step=4).wait()
    else:
        values = checkpoint.load(directory, state_of(model, optimizer))
        restore_groups(optimizer, values["optimizer.param_groups"])
        state = state_of(model, optimizer)
    inner = getattr(optimizer, "inner", optimizer)
    kinds = {t.dtype for s in inner.state.values() for n, t in s.items() if n in ("exp_avg", "exp_avg_sq")}
    steps = [float(s["step"]) for s in inner.state.values()]
    return {n: gathered(b) for n, b in sorted(state.items()) if "exp_avg" in n}, kinds, steps


def gathered(boxed):
    return boxed.to_full(torch.distributed.group.WORLD)


def test_eight_bits_are_saved_as_float32_and_loaded_in_other_blocks(tmp_path):
    saved = run_ranks(2, eight_bit, 3, (2,), tmp_path, True)[0][0]
    assert all(value.dtype == torch.float32 for value in saved.values())
    assert any(value.abs().max() > 0 for value in saved.values())
    for loaded, kinds, steps in run_ranks(3, eight_bit, 3, (3,), tmp_path, False):
        assert kinds == {torch.uint8} and set(steps) == {0.0, 4.0}  # of what is never used, too
        assert loaded.keys() == saved.keys()
        for name, value in saved.items():
            error = (loaded[name] - value).abs()
            if name.endswith("exp_avg_sq"):
                assert bool((error <= 0.046 * value + 1e-9 * value.max()).all())
            else:
                assert float(error.max()) <= 0.0075 * float(value.abs().max())


def test_torchs_own_state_loads_into_eight_bits_at_the_next_step(tmp_path):
    """Without `restore_groups` the step itself takes back what was written."""
    model = toy.Toy(dtype=torch.float32)
    theirs = torch.optim.AdamW(model.parameters(), lr=0.02)
    toy.advance(model, theirs, None, range(3), torch.float32)
    checkpoint.save(tmp_path, optimizer_state(theirs, model), step=3).wait()
    mine = AdamW(model.parameters(), lr=0.0, weight_decay=0.0, betas=(0.9, 0.999), state_dtype="int8")
    checkpoint.load(tmp_path, optimizer_state(mine, model))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    mine.step()
    assert {float(s["step"]) for s in mine.state.values()} == {
        1.0,
        4.0,
    }  # of what was never used, and the rest
    for name, p in model.named_parameters():
        found = mine.boxed_state(p, name)[f"{name}.exp_avg"].to_full()
        value = 0.9 * theirs.state[p]["exp_avg"]
        torch.testing.assert_close(found, value, rtol=0, atol=0.03 * float(value.abs().max()) + 1e-12)


def test_a_save_leaves_no_copies_behind_and_changes_nothing():
    results = []
    for looks in (False, True):
        model = toy.Toy(dtype=torch.float32)
        optimizer = AdamW(model.parameters(), lr=0.02, state_dtype="int8")
        for step in range(3):
            if looks:
                optimizer_state(optimizer, model)
                assert optimizer._lent
            toy.advance(model, optimizer, None, [step], torch.float32)
            assert not optimizer._lent and not optimizer._borrowed
        results.append(full_parameters(model))
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_different_counts_of_steps_in_one_shard(tmp_path):
    """Parameters of a flat shard count their steps each for itself, before and after a checkpoint."""
    model = toy.Toy()
    optimizer = MAKERS["lamb"](model, None)
    values = toy.values(0, 0, 1, torch.float64)
    for first_or_last in ("embed", "layers.0.up"):  # of a shard
        del values[first_or_last]
    model(values).backward()
    optimizer.step()
    checkpoint.save(tmp_path, state_of(model, optimizer), step=1).wait()
    assert float(optimizer.state[model.layers[1].unused]["step"]) == 0.0
    expected = [float(optimizer.state[p]["step"]) for p in model.parameters()]
    assert set(expected) == {0.0, 1.0}
    for counts in run_ranks(2, counted, tmp_path):
        assert counts == expected


def counted(directory):
    model, optimizer, _ = toy.built(MAKERS["lamb"], 1, (2,))
    values = checkpoint.load(directory, state_of(model, optimizer))
    optimizer.restore_groups(values["optimizer.param_groups"])
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [float(optimizer.state[p]["step"]) for p in params]


@pytest.mark.parametrize("name", [*MAKERS, "int8"])
def test_state_dict_on_the_same_ranks(name):
    make = MAKERS.get(name) or (lambda model, mesh: AdamW(model.parameters(), lr=0.02, state_dtype="int8"))
    models = [toy.Toy(dtype=torch.bfloat16) for _ in range(2)]
    first, second = (make(model, None) for model in models)
    toy.advance(models[0], first, None, range(3), torch.bfloat16)
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        mine, theirs = first.state[p], second.state[q]
        assert mine.keys() == theirs.keys()
        for slot, value in mine.items():
            listed = isinstance(value, list)
            pairs = zip(value, theirs[slot], strict=True) if listed else [(value, theirs[slot])]
            assert all(a.dtype == b.dtype and torch.equal(a, b) and a is not b for a, b in pairs)
    for model, optimizer in zip(models, (first, second), strict=True):
        toy.advance(model, optimizer, None, range(3, 5), torch.bfloat16)
    results = [full_parameters(model) for model in models]
    assert all(torch.equal(value, results[1][n]) for n, value in results[0].items())


def test_a_stranger_has_no_state():
    model = toy.Toy()
    optimizer = Lamb([model.embed])
    found = optimizer_state(optimizer, model)
    assert {n for n in found if n != "param_groups"} == {"embed.step", "embed.exp_avg", "embed.exp_avg_sq"}
