"""The optimizer of an offloaded model: steps each chunk where its state is, the host's in the background."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cai_gemini.checkpointing import (
    GROUPS,
    OneLoaded,
    boxed_slots,
    check_groups,
    restore_groups,
    saved_groups,
    state_to_load,
    state_to_save,
)
from cai_gemini.chunk.optimizer_step import has_two_moments
from cai_gemini.chunk.placement import Placement
from cai_gemini.engine.engine import Engine
from cai_gemini.memory.timeline import Timeline
from cai_mesh import checkpoint
from cai_mesh.comm import AnyMesh
from cai_mesh.errors import PlanError
from cai_mesh.gradients import clip_factor, norm_of_squares
from cai_mesh.layout import BoxedTensor


class OffloadedOptimizer(torch.optim.Optimizer):
    """The optimizer that `offload` returns beside the model, and `ChunkResidency.optimizer` for shards.

    `param_groups`, learning-rate schedulers and `zero_grad` work as on the optimizer it was made from. `step` returns
    once the chunks on the device are stepped; those on the host are stepped while the next forward runs, each awaited
    where it is used. Whatever reads a parameter, a gradient or the optimizer's state waits for what it reads, and sees
    the newest.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        engine: Engine,
        overlap: bool,
        device: torch.device,
        mesh: AnyMesh | None = None,
    ):
        self.inner, self._engine, self._overlap, self._device = inner, engine, overlap, device
        self._mesh = mesh
        self.defaults = inner.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._patch_step_function()
        self._scale: float | torch.Tensor = 1.0
        self._loaded = OneLoaded()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients in the coming step so that their norm is at most `max_norm`; returns the norm before.

        The norm, for shards that of all ranks, is taken on the device as gradients leave it; they are scaled when they
        are stepped with. `torch.nn.utils.clip_grad_norm_` (for shards `cai_mesh.clip_grad_norm_`) works too, but reads
        and writes every gradient on the host.
        """
        self._engine.complete_gradients()
        squares = (square for chunk in self._engine.chunks for square in chunk.gradients.squares().items())
        norm = norm_of_squares(squares, self._mesh, self._device)
        self._scale = clip_factor(norm, max_norm)
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step with the gradients, which are consumed: their memory is given back.

        Until `zero_grad`, a further step or backward and whoever reads their values raise `PlanError`. A loss scale
        that has found an overflow leaves the step out. Raises what an earlier step in the background raised.
        """
        if closure is not None:
            raise PlanError("an offloaded optimizer takes no closure", fix="run the backward before step()")
        found_inf = getattr(self.inner, "found_inf", None)  # put there by a loss scale
        if found_inf is not None and found_inf.item():
            return
        self._engine.check_cleared()
        scale, self._scale = self._scale, 1.0
        self._engine.step(scale)
        if not self._overlap:
            self._engine.finish()

    def wait(self) -> None:
        """Return once the last step is done, everywhere."""
        self._engine.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient; or let those that there are, or were until the step, be zero."""
        self._scale = 1.0
        if not set_to_none:
            self._engine.complete_gradients()
        self._engine.drop_gradients(zeros=not set_to_none)

    # -- a look at it --------------------------------------------------------------------------------------------

    def record_timeline(self) -> None:
        """Take down, until `timeline()`, what happens when on the device, the link and the host."""
        self._engine.record()

    def timeline(self) -> Timeline:
        """Return the timeline since `record_timeline()`, usually of a step; waits until the step is done everywhere.

        Raises `PlanError` where nothing was recorded.
        """
        return self._engine.recorded()

    def placement(self) -> Placement:
        """The placement from now on: as planned after the first steps; before, little is on the device."""
        return Placement.of(self._engine.chunks, planned=self._engine.planned)

    # -- what it holds -------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the inner optimizer, over the flat parameters of master weights."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the inner optimizer, after the last step."""
        self._engine.settle()
        return self.inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add more parameters of the model, with options of their own, as torch's does.

        Raises `PlanError` for others, and for a group whose options change how all are stepped (`amsgrad`).
        """
        params, chunks = param_group["params"], self._engine.chunks
        group_params = [params] if isinstance(params, torch.Tensor) else list(params)
        members = {id(p) for chunk in chunks for p in chunk.unit.kept}
        if any(id(p[1] if isinstance(p, tuple) else p) not in members for p in group_params):
            raise PlanError(
                "the group holds parameters the model does not have",
                fix="add those of model.parameters(), as they are after offload",
            )
        self._engine.finish()
        fused = has_two_moments(self.inner)
        self.inner.add_param_group({**param_group, "params": group_params})
        if has_two_moments(self.inner) != fused:
            self.inner.param_groups.pop()
            raise PlanError(
                "a group's options would change how all parameters are stepped",
                got="amsgrad or differentiable in one group only",
                fix="give it to all groups, before offload",
            )
        for chunk in chunks:
            chunk.regroup()

    def boxed_state(self, param: torch.Tensor, name: str = "") -> dict[str, BoxedTensor]:
        """Return what `cai_mesh.checkpoint` saves and loads of a flat parameter, by `NAME.SLOT`: views of where it is.

        Waits for the parameter's last step. The moments of Adam and AdamW are there before the first step too; what
        another optimizer makes in its first step is not. Empty for a parameter that is not trained.
        """
        keeper = getattr(param, "cai_keeper", None)
        if keeper is None:
            return {}
        if keeper.disk is None:
            keeper.settle()
        return boxed_slots(keeper, param.cai_index, name, self._loaded)  # type: ignore[attr-defined]

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def checkpoint_state(self) -> dict[str, BoxedTensor | list[dict[str, Any]]]:
        """Return what `cai_mesh.checkpoint` saves, and loads where this optimizer has stepped before or is Adam.

        `model.NAME` (master weights), `optimizer.NAME.SLOT` and `optimizer.param_groups`. One chunk of the disk is in
        memory at a time, the last one until the next step.
        """
        return {**state_to_save(self._engine.chunks, self._loaded), GROUPS: saved_groups(self.inner)}

    def save(self, directory: str | os.PathLike[str], *, step: int, keep_last: int | None = None) -> Path:
        """Write `directory/step-N` with master weights, state and hyperparameters, by `cai_mesh.checkpoint`.

        Tensors are `model.NAME` and `optimizer.NAME.SLOT`, of the parameters' own names and shapes, so whatever loads
        such a checkpoint loads this one. One chunk of the disk is in memory at a time. Buffers of the model are not in
        it. Returns the committed directory; raises `CheckpointError` as `cai_mesh.checkpoint.save`.
        """
        try:
            return checkpoint.save(directory, self.checkpoint_state(), step=step, keep_last=keep_last).wait()
        finally:
            self._loaded.close()

    @torch.no_grad()
    def load(self, directory: str | os.PathLike[str], *, verify: bool = True) -> None:
        """Load what `save` wrote, of this model offloaded in any way: wherever a chunk lives now, there it goes.

        Args:
            directory: `step-N`, or a directory of them, of which the newest is taken.
            verify: check sizes and digests of the files first.

        Raises `CheckpointError` where there is none, it is damaged, or of another model or optimizer; nothing has been
        changed then.
        """
        contents = checkpoint.contents(directory)
        groups = contents.values.get(GROUPS) or []
        check_groups(self.inner, groups, str(directory))
        self._engine.finish()
        state = state_to_load(self._engine.chunks, contents.tensors, self._loaded)
        try:
            checkpoint.load(directory, state, verify=verify)
        finally:
            self._loaded.close()
        restore_groups(self.inner, groups)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the inner optimizer, after the last step."""
        self._engine.settle()
        return self.inner.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, of this model offloaded in any way."""
        self._engine.settle()
        self.inner.load_state_dict(state_dict)
        for chunk in self._engine.chunks:
            if chunk.step is not None:
                chunk.step.adopt_state()
