"""Norms of gradients in a loop over a bare pipeline count every stage, or are refused."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from odd_llamas import build
from pipeline_families import sum_tied_gradients, token_ids
from torch.distributed.device_mesh import init_device_mesh

from cai_mesh import clip_grad_norm_
from cai_mesh.errors import CaiError
from cai_mesh.gradients import grad_norm
from cai_mesh.layout import canonical_name
from cai_mesh.testing import run_ranks
from cai_pipeline import PipelineRunner, split


def grads(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


def by_halves(model, *_):
    """A list of one's own, as a loop that clips groups apart."""
    params = list(model.parameters())
    torch.nn.utils.clip_grad_norm_(params[: len(params) // 2], 0.1)
    torch.nn.utils.clip_grad_norm_(params[len(params) // 2 :], 0.1)


OVER_A_STAGE = {
    "torch's clip": lambda model, *_: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "torch's clip, foreach": lambda model, *_: torch.nn.utils.clip_grad_norm_(
        model.parameters(), 0.1, foreach=True
    ),
    "torch's clip by the largest": lambda model, *_: torch.nn.utils.clip_grad_norm_(
        model.parameters(), 0.1, math.inf
    ),
    "torch's total norm": lambda model, *_: torch.nn.utils.get_total_norm(grads(model)),
    "torch's clip of the optimizer's": lambda model, optimizer: torch.nn.utils.clip_grad_norm_(
        [p for group in optimizer.param_groups for p in group["params"]], 0.1
    ),
    "in two halves": by_halves,
    "stacked norms": lambda model, *_: torch.stack([grad.norm() for grad in grads(model)]).norm(),
    "stacked detached norms": lambda model, *_: torch.norm(
        torch.stack([torch.norm(grad.detach(), 2.0).to("cpu") for grad in grads(model)]), 2.0
    ),
    "sum of squares": lambda model, *_: sum(grad.pow(2).sum() for grad in grads(model)).sqrt(),
    "sum of products": lambda model, *_: sum((grad * grad).sum() for grad in grads(model)).sqrt(),
    "added in a loop": lambda model, *_: functools.reduce(
        lambda a, b: a + b.data.norm(2) ** 2, grads(model), 0.0
    ),
    "added as numbers": lambda model, *_: sum(grad.data.norm(2).item() ** 2 for grad in grads(model)) ** 0.5,
    "as one vector": lambda model, *_: torch.cat([grad.flatten() for grad in grads(model)]).norm(),
    "the largest": lambda model, *_: max(grad.abs().max() for grad in grads(model)),
    "torch's loss scale": lambda model, optimizer: unscaled(optimizer),
}
"""As published: torch's utilities, nanoGPT's and fairseq's loops, Megatron's and FairScale's sums, GradScaler."""

OF_ONE_PARAMETER = {
    "norm": lambda grad: float(grad.norm()),
    "norm as torch has it": lambda grad: torch.linalg.vector_norm(grad).item(),
    "its norm and its mean": lambda grad: float(grad.norm() / grad.numel() ** 0.5 - grad.mean()),
    "largest": lambda grad: float(grad.abs().max()),
    "scaled": lambda grad: float(grad.mul_(0.5).sum()),
    "by value": lambda grad: float(grad.clamp_(-1e-3, 1e-3).sum()),
    "finite": lambda grad: float(torch.isfinite(grad).all()),
    "kept": lambda grad: float(grad.clone().sum()),
    "a row": lambda grad: float(grad[0].sum()),
}


def unscaled(optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones((), requires_grad=True))
    scaler.unscale_(optimizer)


def looked_at():
    """What each loop over a stage raises; how values of one parameter and cai's norms differ from the whole model's."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    inputs = {"input_ids": token_ids(1), "labels": token_ids(2)}
    model, whole = split(build("llama", 4), mesh), build("llama", 4)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, whole)]
    loss = PipelineRunner(model, mesh, microbatches=2, loss_fn=lambda output, _: output.loss / 2)
    loss.step([inputs, inputs], [None, None])
    sum_tied_gradients(model)
    whole(**inputs).loss.backward()
    said = {}
    for name, look in OVER_A_STAGE.items():
        try:
            said[name] = f"{look(model, optimizers[0])}"
        except CaiError as error:
            said[name] = str(error)
    off = {
        "norm of all": float(
            grad_norm(model.parameters(), mesh) / torch.nn.utils.get_total_norm(grads(whole)) - 1
        )
    }
    clip_grad_norm_(model.parameters(), 0.1, mesh)
    torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    wanted = dict(whole.named_parameters())
    for what, value in OF_ONE_PARAMETER.items():
        off[what] = max(
            abs(value(p.grad) - value(wanted[canonical_name(n, p)].grad)) for n, p in model.named_parameters()
        )
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    off["weights"] = max(
        float((p - wanted[canonical_name(n, p)]).detach().abs().max()) for n, p in model.named_parameters()
    )
    return said, off


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, looked_at)


@pytest.mark.parametrize("loop", OVER_A_STAGE)
def test_a_norm_of_one_stage_is_refused(loop, ranks):
    for said, _ in ranks:
        assert "cai_mesh.clip_grad_norm_(model.parameters(), max_norm, mesh)" in said[loop]


@pytest.mark.parametrize("what", [*OF_ONE_PARAMETER, "norm of all", "weights"])
def test_what_is_of_one_parameter_is_right(what, ranks):
    for _, off in ranks:
        assert abs(off[what]) < 1e-6
