"""From skewed routers, each way of balancing evens loads; a bias moves as the paper has it, and is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layouts import VOCAB, Case, microbatches_of, rate, run_config
from routed_toys import routed_config, routed_session
from torch import nn

from cai_apps.applications.language.task import workload
from cai_apps.compose.apply import apply
from cai_apps.compose.routing.finding import routers_of
from cai_apps.config.sections import Experts
from cai_mesh import checkpoint
from cai_mesh.testing import run_ranks

STEPS = 200


def skewed_session(name: str, experts: Experts):
    """A session whose tokens share a direction that the routers send to two experts."""
    config = replace(run_config(Case(microbatches=1), "fp32", STEPS), experts=experts)
    plain = workload(config, routed_config(name, 2, **EXPERTS[name]))

    def initializer(model: nn.Module):
        fill, routers = plain.initializer(model), {router.module for router in routers_of(model)}

        def skewed(module: nn.Module) -> None:
            fill(module)
            with torch.no_grad():
                if isinstance(module, nn.Embedding):
                    module.weight += 0.2
                if module in routers:
                    module.weight[:2] += 0.15

        return skewed

    return apply(config, replace(plain, initializer=initializer), device=torch.device("cpu"))


def loads(name: str, experts: Experts, steps: int = STEPS):
    """The load of the busiest expert over the mean, of the first and of the last ten steps."""
    torch.set_num_threads(1)
    session, worst = skewed_session(name, experts), []
    for step in range(steps):
        ids = torch.randint(0, VOCAB, (8, 48), generator=torch.Generator().manual_seed(step))
        session.step([{"input_ids": ids, "labels": (7 * ids + 3) % VOCAB}], total=ids.numel())
        worst.append(float(session.routing()["load_worst"]))
        session.update(2e-3, session.norm())
    return worst[0], sum(worst[-10:]) / 10


EXPERTS = {"olmoe": {"num_experts": 12}, "deepseek_v3": {"n_routed_experts": 12}}
WAYS = {
    "olmoe": Experts(aux_loss=0.3),
    "deepseek_v3": Experts(aux_loss=0.0, bias_update=0.01),
}


@pytest.mark.parametrize("name", list(WAYS))
def test_from_a_skewed_router_loads_become_even(name):
    (_, without), (first, balanced) = (
        run_ranks(1, loads, name, experts)[0] for experts in (Experts(aux_loss=0.0), WAYS[name])
    )
    assert first > 2.5
    assert balanced < without / 2


RATE = 0.01
MOVING = Experts(aux_loss=0.0, bias_update=RATE)


def biased(case: Case, steps: int, directory: str | None = None):
    """Biases after some steps of a layout, and the loads of the first step; a checkpoint of them where asked."""
    session = routed_session("deepseek_v3", case, MOVING)
    loads = []
    for step in range(steps):
        batches, total = microbatches_of(session, case, step)
        session.step(batches, total=total)
        loads.append(session.balance.totals()[0].clone())
        session.update(rate(step), session.norm())
    if directory is not None:
        checkpoint.save(directory, session.state(), step=steps)
    held = {name: boxed.pieces[0][1].clone() for name, boxed in session.biases().items()}
    return held, loads


def test_a_bias_moves_against_the_load_of_all_ranks():
    (alone, loads), *_ = run_ranks(1, biased, Case(microbatches=2), 2)
    assert len(alone) == 3
    for number, bias in enumerate(alone.values()):
        moved = sum((load[number, :6].mean() - load[number, :6]).sign() for load in loads) * RATE
        assert torch.allclose(bias.double(), moved, atol=1e-7)
        assert moved.abs().max() > 0
    spread = run_ranks(4, biased, Case(data=2, pipeline=2, microbatches=1), 2)
    together = {name: bias for held, _ in spread for name, bias in held.items()}
    assert together.keys() == alone.keys()
    assert all(torch.equal(together[name], bias) for name, bias in alone.items())


def loaded_biases(case: Case, directory: str):
    session = routed_session("deepseek_v3", case, MOVING)
    session.loaded(checkpoint.load(directory, session.state()), 2)
    return {name: boxed.pieces[0][1].clone() for name, boxed in session.biases().items()}


def test_a_checkpoint_has_biases_for_any_layout(tmp_path):
    run_ranks(1, biased, Case(microbatches=2), 2, str(tmp_path))
    saved, _ = run_ranks(1, biased, Case(microbatches=2), 2)[0]
    stages = run_ranks(2, loaded_biases, Case(pipeline=2, microbatches=2), str(tmp_path / "step-2"))
    together = {name: bias for held in stages for name, bias in held.items()}
    assert together.keys() == saved.keys()
    assert all(torch.equal(together[name], bias) for name, bias in saved.items())


def of_a_norm(norm: float):
    session = routed_session("deepseek_v3", Case(microbatches=1), MOVING)
    batches, total = microbatches_of(session, Case(microbatches=1), 0)
    session.step(batches, total=total)
    session.balance.update_bias(torch.tensor(norm))
    return [boxed.pieces[0][1].abs().max().item() for boxed in session.biases().values()]


def test_a_step_that_is_left_out_moves_no_bias():
    assert run_ranks(1, of_a_norm, float("nan"))[0] == [0, 0, 0]
    assert run_ranks(1, of_a_norm, 1.0)[0] == pytest.approx([RATE] * 3)


def numbers_after(evaluates: bool):
    """What a step with recompute says of its routers, with an evaluation before that is read or without."""
    case = Case(microbatches=2, recompute="full")
    session = routed_session("olmoe", case, Experts(aux_loss=0.1))
    batches, total = microbatches_of(session, case, 0)
    session.step(batches, total=total)
    if evaluates:
        session.evaluate(microbatches_of(session, case, 1)[0], total=total)
    return {name: float(value) for name, value in session.routing().items()}


def test_an_evaluation_does_not_count():
    assert run_ranks(1, numbers_after, True) == run_ranks(1, numbers_after, False)
