"""An optimizer's step on one chunk, with that optimizer's own arithmetic, wherever the chunk's state is.

Adam and AdamW run torch's fused kernel over blocks that stay in the processor's cache, so that gradients are widened
and scaled on the way and the new weights written in the dtype of computation: 28 bytes of memory a parameter. Any other
optimizer runs its own `step`, on stand-ins for the chunk's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cai_gemini.chunk.stand_ins import step_stand_ins
from cai_gemini.chunk.unit import Unit
from cai_mesh.errors import PlanError

HOST_BLOCK = 2**20
DEVICE_BLOCK = 2**24

Group = dict[str, Any]
Groups = list[tuple[Group, list[int]]]


def has_two_moments(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is Adam or AdamW with two moments a parameter, which torch's fused kernels step."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not any(
        group["amsgrad"] or group["differentiable"] for group in optimizer.param_groups
    )


@dataclass(frozen=True)
class AdamBlock:
    """A part of one parameter.

    Args:
        group: its options.
        step: the number of steps the parameter has made with this one, 0-d, where the step is taken.
        low, high: its elements of the chunk.
    """

    group: Group
    step: torch.Tensor
    low: int
    high: int


def _forgotten(name: str) -> PlanError:
    return PlanError(
        "the state of an optimizer of an offloaded model was taken away",
        got=f"none of {name!r}",
        cause="optimizer.state.clear(), pop or del: the moments lie in the buffers of chunks, which stay",
        fix="state[param]['exp_avg'].zero_(), state[param]['exp_avg_sq'].zero_() and state[param]['step'].zero_() "
        "begin anew",
    )


class ChunkStep:
    """Steps the kept parameters of one chunk.

    Args:
        optimizer: the optimizer whose param groups hold them.
        unit: the chunk.

    Attributes:
        fused: whether torch's fused Adam steps it, over flat moments.
        members: places of the parameters that the optimizer has.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, unit: Unit):
        self._optimizer, self._unit = optimizer, unit
        self.fused = has_two_moments(optimizer)
        self._moments: tuple[torch.Tensor, torch.Tensor] | None = None
        self._placed: Callable[[torch.Tensor], torch.Tensor] = _as_it_is
        self.regroup()

    @torch.no_grad()
    def regroup(self) -> None:
        """Look again which of the parameters the optimizer has, and in which groups."""
        index_of = {id(p): i for i, p in enumerate(self._unit.kept)}
        # places of groups, not groups: loading a state dict makes new ones
        self._groups: list[tuple[int, list[int]]] = []
        for place, group in enumerate(self._optimizer.param_groups):
            indices = [index_of[id(p)] for p in group["params"] if id(p) in index_of]
            if indices:
                self._groups.append((place, sorted(indices)))
        self.members = {i for _, indices in self._groups for i in indices}
        if self._moments is not None:
            with torch._C.DisableTorchFunctionSubclass():
                self._point_state(new=False)

    @property
    def state_bytes(self) -> int:
        """The bytes of master weights and optimizer state, as far as they are known before the first step."""
        elements = self._unit.shard.numel() * self._unit.shard.element_size()
        if self.fused:
            return 3 * elements
        state = sum(
            value.numel() * value.element_size()
            for param in self._unit.kept
            for value in list(self._optimizer.state.get(param, {}).values())  # steps run in another thread
            if isinstance(value, torch.Tensor)
        )
        return elements + state

    def state_of(self, index: int) -> dict[str, Any]:
        """The optimizer's state of kept parameter `index`; {} where it has none."""
        return self._optimizer.state.get(self._unit.kept[index], {})

    def put_state(self, index: int, state: dict[str, Any]) -> None:
        """Let `state` be, or be among, the optimizer's state of kept parameter `index`."""
        self._optimizer.state[self._unit.kept[index]].update(state)

    @property
    def has_state(self) -> bool:
        """Whether the optimizer has state of any parameter of the chunk."""
        return any(self._optimizer.state.get(param) for param in self._unit.kept)

    def groups(self, touched: Collection[int]) -> Groups:
        """The param groups as they are now, with those of the chunk's parameters that are to be stepped.

        A step in the background runs with these, whatever a learning-rate schedule does meanwhile.
        """

        def now(value: Any) -> Any:
            return value.clone() if isinstance(value, torch.Tensor) else value

        pairs = [(self._optimizer.param_groups[place], indices) for place, indices in self._groups]
        return [
            ({k: now(v) for k, v in group.items() if k != "params"}, [i for i in indices if i in touched])
            for group, indices in pairs
        ]

    @torch.no_grad()
    def run(
        self,
        groups: Groups,
        gradient: torch.Tensor,
        scale: float | torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Step with `gradient * scale` and write the new weights.

        Args:
            groups: param groups, as `groups` returns them.
            gradient: [n], as the unit's shard, where the state is, any float dtype.
            scale: the factor of the gradient.
            weights: [n] in the dtype of computation; the new values go there.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if self.fused:
                first, second = self._adam_state()
                state = (self._unit.shard, first, second)
                self.run_adam(groups, gradient, scale, weights, state)
            else:
                new_states = self.run_any(groups, gradient, scale, weights, self._unit.shard, {})
                for i, state in new_states.items():
                    self.put_state(i, state)

    # -- Adam ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run_adam(
        self,
        groups: Groups,
        gradient: torch.Tensor,
        scale: float | torch.Tensor,
        weights: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Adam on `state`: master weights and both moments, flat, which need not be where the chunk's are."""
        master, first, second = state
        scaled = not (isinstance(scale, float) and scale == 1.0)
        size = DEVICE_BLOCK if master.is_cuda else HOST_BLOCK
        apart = scaled or gradient.dtype != master.dtype
        scratch = master.new_empty(min(size, master.numel())) if apart else None
        for block in self.blocks(groups, size, master.device):
            part = slice(block.low, block.high)
            grad = gradient[part]
            if scratch is not None:
                grad = scratch[: grad.numel()].copy_(grad)
                grad = grad.mul_(scale) if scaled else grad
            self.adam(block, master[part], grad, first[part], second[part])
            if weights.data_ptr() != master.data_ptr():
                weights[part].copy_(master[part])

    def blocks(self, groups: Groups, size: int, device: torch.device) -> list[AdamBlock]:
        """Return the blocks of a step of Adam, at most `size` elements each, and count that step.

        One parameter after the other: the host's kernel rounds the last few elements of a tensor in its own way.
        """
        blocks = []
        for group, indices in groups:
            for i in indices:
                count = self._optimizer.state.get(self._unit.kept[i], {}).get("step")
                if count is None:
                    raise _forgotten(self._unit.chunk.names[i])
                count += 1
                step = torch.full((), float(count), device=device)
                low, high = self._unit.ranges[i]
                blocks += [AdamBlock(group, step, at, min(at + size, high)) for at in range(low, high, size)]
        return blocks

    def adam(
        self,
        block: AdamBlock,
        param: torch.Tensor,
        grad: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
    ) -> None:
        """Adam on the tensors of a block, in place, wherever they are."""
        kernel = torch._fused_adamw_ if _decoupled(self._optimizer, block.group) else torch._fused_adam_
        beta1, beta2 = block.group["betas"]
        kernel(
            [param],
            [grad],
            [first],
            [second],
            [],
            [block.step],
            lr=float(block.group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=block.group["weight_decay"],
            eps=block.group["eps"],
            amsgrad=False,
            maximize=block.group["maximize"],
        )

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Adam's moments of the chunk, flat."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return self._adam_state()

    def put_moments(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Let other tensors be the moments."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._moments = (first, second)
            self._point_state(new=False)

    def _adam_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat moments; the optimizer's state are views of them."""
        if self._moments is None:
            self._moments = self._zeros()
            self._point_state(new=True)
        return self._moments

    def move_moments(self, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Let Adam's moments be what `place` makes of them, those of state that is loaded later too."""
        first, second = self.moments()
        self.put_moments(place(first), place(second))
        self._placed = place

    def _zeros(self) -> tuple[torch.Tensor, torch.Tensor]:
        shard = self._unit.shard
        return self._placed(torch.zeros_like(shard)), self._placed(torch.zeros_like(shard))

    def _point_state(self, *, new: bool) -> None:
        assert self._moments is not None
        first, second = self._moments
        for _, indices in self._groups:
            for i in indices:
                (low, high), param = self._unit.ranges[i], self._unit.kept[i]
                state = self._optimizer.state[param]
                loaded = dict(state) if new else {}
                step = loaded.get("step", state.get("step", torch.zeros((), dtype=torch.float32)))
                state["step"] = step.cpu()  # the host reads it; loading may have put it on the device
                for name, flat in (("exp_avg", first), ("exp_avg_sq", second)):
                    view = flat[low:high]
                    if name in loaded:
                        view.copy_(loaded[name].flatten())
                    state[name] = view

    # -- any other -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run_any(
        self,
        groups: Groups,
        gradient: torch.Tensor,
        scale: float | torch.Tensor,
        weights: torch.Tensor,
        master: torch.Tensor,
        tensors: Mapping[int, dict[str, torch.Tensor]],
    ) -> dict[int, dict[str, Any]]:
        """The optimizer's own step on `master`, master weights that need not be where the chunk's are.

        Args:
            master: [n], stepped in place.
            tensors: state that is not where the optimizer says, by parameter.

        Returns the state that the step left, by parameter.
        """
        wide = gradient.to(master.dtype, copy=True).mul_(scale)
        parts = {i: slice(*self._unit.ranges[i]) for _, indices in groups for i in indices}
        states = {i: {**self.state_of(i), **tensors.get(i, {})} for i in parts}
        with torch._C.DisableTorchFunctionSubclass():
            new_states = step_stand_ins(
                self._optimizer,
                groups,
                {i: (master[part], wide[part]) for i, part in parts.items()},
                {i: state for i, state in states.items() if state},
            )
        if weights.data_ptr() != master.data_ptr():
            weights.copy_(master)
        return new_states

    @torch.no_grad()
    def adopt_state(self) -> None:
        """The optimizer's state was loaded: let it be views of the chunk's moments again."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.fused and (self._moments is not None or self.has_state):
                self._moments = self._zeros()
                self._point_state(new=True)

    # -- moving --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def move_state(self, device: torch.device) -> None:
        """Bring the optimizer's state to where the chunk's master weights now are."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._moments is not None:
                self._moments = (self._moments[0].to(device), self._moments[1].to(device))
                self._point_state(new=False)
                return
            for place, indices in self._groups:
                group = self._optimizer.param_groups[place]
                with_counters = group.get("fused") or group.get("capturable")
                for i in indices:
                    state = self._optimizer.state.get(self._unit.kept[i], {})
                    for name, value in state.items():
                        if isinstance(value, torch.Tensor) and (value.dim() or with_counters):
                            state[name] = value.to(device)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _decoupled(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    return isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay", False)
