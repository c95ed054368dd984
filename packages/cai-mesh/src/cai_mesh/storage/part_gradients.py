"""The gradient of a cut parameter, or of one on a pipeline stage, as a loop reads it.

That of a cut one is a rank's part, whose norms and sums are those of the whole. So torch's own `clip_grad_norm_`, a
loss scale's search for infinities, and whoever logs a norm, see the model and not a rank of it. That of a stage's
parameter is whole, and refuses to be put together with others, for the norm would be one stage's. Inside an optimizer's
step gradients are plain tensors: it steps a part as any tensor. One that would step a part otherwise than the whole
(Adafactor, LBFGS, Muon) is refused.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from cai_mesh.comm.mesh import ParallelMesh
from cai_mesh.gradients.gradient_views.parameters import ShownParameter, hide, raw_grad, set_raw_grad, show
from cai_mesh.gradients.gradient_views.place import Place
from cai_mesh.gradients.gradient_views.shard_gradient import ShardGradient
from cai_mesh.layout.record import layout_of, reduce_of, sites
from cai_mesh.storage.part_groups import PartSteps


class PartKeeper:
    """The `GradientKeeper` of one cut parameter: autograd keeps its gradient, this says what it is a part of.

    Attributes:
        name: its name in the model, by which its optimizer's state is signed.
        axes: mesh axes over which the parameter is cut; none of one that is whole, on one stage of a pipeline.
    """

    steps = False

    def __init__(self, param: nn.Parameter, mesh: ParallelMesh, name: str):
        self._param, self.name = weakref.ref(param), name
        self.axes = layout_of(param).sharded_axes
        groups = (mesh.group(name) for name in mesh.leaves(tuple(self.axes)))
        self._place = functools.partial(
            Place,
            sums=tuple(group for group in groups if group is not None),
            beyond=mesh.has("pp") and mesh.degree("pp") > 1,
            axes=self.axes,
            owner=reduce_of(param).owner,
        )

    def leaf(self, index: int) -> nn.Parameter:
        """The parameter itself."""
        param = self._param()
        assert param is not None  # who asks holds it
        return param

    def held(self, index: int) -> tuple[torch.Tensor, Place] | None:
        """The gradient, flat, and where it lies; None where there is none, as on every rank then."""
        param = self.leaf(index)
        grad = raw_grad(param)
        if grad is None:
            return None
        if not grad.is_contiguous():  # what is written to the flat one must be written to this one
            grad = grad.contiguous()
            set_raw_grad(param, grad)
        return grad.view(-1), self._place(grad.shape, 0, grad.numel())

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        """Take another gradient: one that was shown, or this rank's part."""
        plain = gradient.part.view(gradient.shape) if isinstance(gradient, ShardGradient) else gradient
        set_raw_grad(self.leaf(index), None if plain is None else plain.as_subclass(torch.Tensor))

    def about_to_write(self, index: int) -> None:
        """There is no copy that would have to follow."""


def show_gradients(model: nn.Module, mesh: ParallelMesh) -> None:
    """Let the cut parameters of a model show their gradients as parts of a whole, replaced ones from a forward on.

    Sparse ones (an `Embedding` with `sparse=True`) are left as they are.
    """
    _adopt(model, mesh, parts=True)
    _hide_in_steps()

    def again(model: nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling() and any(
            type(param) is nn.Parameter and layout_of(param).sharded_axes for _, _, param in sites(model)
        ):
            _adopt(model, mesh, parts=True)

    model.register_forward_pre_hook(again)


def show_stage_gradients(model: nn.Module, mesh: ParallelMesh) -> None:
    """Let the parameters of a pipeline's stages that are whole refuse norms over several of them."""
    _adopt(model, mesh, parts=False)
    _hide_in_steps()


def _adopt(model: nn.Module, mesh: ParallelMesh, *, parts: bool) -> None:
    names = {id(param): name for name, param in model.named_parameters()}
    for module, _, param in sites(model):
        if param.is_meta or getattr(module, "sparse", False):
            continue
        is_free = type(param) is nn.Parameter or isinstance(getattr(param, "cai_keeper", None), PartKeeper)
        if is_free and bool(layout_of(param).sharded_axes) is parts:
            ShownParameter.adopt(param, PartKeeper(param, mesh, names[id(param)]), 0)


@functools.cache
def _hide_in_steps() -> None:
    """Hook every optimizer of the process: torch tells of a step nowhere else. One that mixes elements is refused."""
    part_steps = PartSteps()

    def before(optimizer: Optimizer, *_: Any) -> None:
        parts = _parts(optimizer)
        if parts:
            part_steps.check(optimizer, elementwise=any(param.cai_keeper.axes for param in parts))
        hide(parts)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(lambda optimizer, *_: show(_parts(optimizer)))


def _parts(optimizer: Optimizer) -> list[Any]:
    """Parameters with a keeper of this file, which they keep while they are hidden."""
    return [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if isinstance(getattr(param, "cai_keeper", None), PartKeeper)
    ]
