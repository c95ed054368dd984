"""Where NaN come from is named, on any layout; and a gradient below the limit is not scaled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from layouts import Case, microbatches_of, model_config, run_config

from cai_apps.applications.language.task import workload
from cai_apps.compose.apply import apply
from cai_mesh.layout import BoxedTensor
from cai_mesh.testing import run_ranks

LAYOUTS = {
    "one": Case(),
    "data2-zero1": Case(data=2, zero=1),
    "data2-zero3": Case(data=2, zero=3),
    "pipeline2": Case(pipeline=2),
}


def session_of(case, residency="device", optimizer="adamw"):
    config = run_config(case, "fp32", 2)
    config = replace(
        config,
        memory=replace(config.memory, residency=residency),
        optimizer=replace(config.optimizer, kind=optimizer),
    )
    return apply(config, workload(config, model_config("llama")), device=torch.device("cpu"))


def broken(case, where, residency="device"):
    """What every rank names after a step in which the third layer's MLP made an infinity on the last rank."""
    session = session_of(case, residency)
    batches, total = microbatches_of(session, case, 0)
    mlp = dict(session.model.named_modules()).get("model.layers.2.mlp")
    if mlp is not None and dist.get_rank() == dist.get_world_size() - 1:
        if where == "forward":
            mlp.register_forward_hook(lambda module, args, output: output * float("inf"))
        else:
            mlp.register_forward_hook(lambda module, args, output: _infinite_backward(output))
    session.step(batches, total=total)
    norm = session.norm()
    session.update(1e-2, norm)
    return float(norm), session.find_broken(batches, total=total)


def _infinite_backward(output):
    if output.requires_grad:
        output.register_hook(lambda grad: grad * float("inf"))
    return output


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_module_whose_output_is_not_finite_is_named(layout):
    found = run_ranks(LAYOUTS[layout].world, broken, LAYOUTS[layout], "forward")
    norms, names = zip(*found, strict=True)
    assert not any(torch.isfinite(torch.tensor(norm)) for norm in norms)
    assert names[-1] == "the output of model.layers.2.mlp"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_that_is_not_finite_is_named_where_backward_met_it(layout):
    found = run_ranks(LAYOUTS[layout].world, broken, LAYOUTS[layout], "backward")
    assert not any(torch.isfinite(torch.tensor(norm)) for norm, _ in found)
    assert found[-1][1] == "the gradient of model.layers.2.post_attention_layernorm.weight"


def stepped_with_infinity(case):
    """Whether parameters are still finite after a step that nobody stopped."""
    session = session_of(case)
    batches, total = microbatches_of(session, case, 0)
    for module in session.model.modules():
        if type(module).__name__ == "LlamaMLP":
            module.register_forward_hook(lambda module, args, output: output * float("inf"))
    session.step(batches, total=total)
    session.update(1e-2, float(session.norm()))
    return all(bool(torch.isfinite(p).all()) for p in session.model.parameters())


@pytest.mark.parametrize("layout", ["one", "data2-zero3"])
def test_a_step_is_never_left_out_in_silence(layout):
    assert run_ranks(LAYOUTS[layout].world, stepped_with_infinity, LAYOUTS[layout]) == [
        False for _ in range(LAYOUTS[layout].world)
    ]


def stepped_unseen(case, optimizer):
    """Whether a step changes state whose norm nobody has looked at: with infinite gradients, and without."""
    changed = []
    for bad in (True, False):
        session = session_of(case, optimizer=optimizer)
        batches, total = microbatches_of(session, case, 0)
        if bad:
            session.model.get_submodule("model.layers.2.mlp").register_forward_hook(
                lambda module, args, output: _infinite_backward(output)
            )
        before = {name: value.clone() for name, value in tensors_of(session).items()}
        session.step(batches, total=total)
        session.update(1e-2, session.norm())
        now = tensors_of(session)
        changed.append(any(not torch.equal(before[name], value) for name, value in now.items()))
    return changed


def tensors_of(session):
    boxed = {n: v for n, v in session.state().items() if isinstance(v, BoxedTensor)}
    return {f"{n}{i}": view for n, value in boxed.items() for i, (_, view) in enumerate(value.pieces)}


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [("one", "adamw"), ("one", "lamb"), ("data2-zero3", "adamw"), ("data2-zero3", "lamb")],
)
def test_a_step_that_is_not_finite_and_that_nobody_has_seen_changes_nothing(layout, optimizer):
    case = LAYOUTS[layout]
    found = run_ranks(case.world, stepped_unseen, case, optimizer)
    assert found == [[False, True] for _ in range(case.world)]


def test_under_offload_too():
    assert run_ranks(1, broken, Case(), "forward", "host")[0][1] == "the output of model.layers.2.mlp"


def weights_after(case, clip):
    """The optimizer's scaling of gradients, counted, in two steps."""
    config = run_config(case, "fp32", 2)
    config = replace(config, optimizer=replace(config.optimizer, clip=clip))
    session = apply(config, workload(config, model_config("llama")), device=torch.device("cpu"))
    calls, scale = [], torch._foreach_mul_

    def counted(*args):
        calls.append(args)
        return scale(*args)

    for step in range(2):
        batches, total = microbatches_of(session, case, step)
        session.step(batches, total=total)
        norm = float(session.norm())
        torch._foreach_mul_ = counted
        session.weights.step(norm, clip)
        torch._foreach_mul_ = scale
    return len(calls)


@pytest.mark.parametrize("layout", ["data2-zero1", "data2-zero3"])
def test_gradients_below_the_limit_are_not_touched(layout):
    case = LAYOUTS[layout]
    assert run_ranks(case.world, weights_after, case, 0.1) == [2, 2]
    assert run_ranks(case.world, weights_after, case, 1e6) == [0, 0]
