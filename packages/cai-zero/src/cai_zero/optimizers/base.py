"""The common part of the optimizers over parts: state, the step's bookkeeping, checkpoints."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from cai_mesh.comm import AnyMesh, ParallelMesh
from cai_mesh.errors import PlanError
from cai_mesh.layout import BoxedTensor
from cai_zero.optimizers.pieces import Part, check_params, local, parts_of
from cai_zero.optimizers.sums import Axes, resolve

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


@dataclass(eq=False)
class Entry:
    """One part in one step.

    Args:
        group: its param group.
        part, axes: its place in its parameter, and the axes of the mesh over which that is divided.
        weight: this part of the parameter, a view.
        grad: this part of the gradient in the dtype of the maths; None where there is none.
        state: the state of the tensor the part lies in; `entry[slot]` is the part's own.
        index: the part's number in its tensor.
        step: number of this step, from 1.
    """

    group: dict[str, Any]
    part: Part
    axes: Axes
    weight: torch.Tensor
    grad: torch.Tensor | None
    state: dict[str, Any]
    index: int
    step: int

    def __getitem__(self, slot: str) -> torch.Tensor:
        return self.state[slot][self.index]

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient, where there is one."""
        assert self.grad is not None
        return self.grad

    @property
    def boxes(self):
        """Boxes of a segment, as `Part.boxes`."""
        return self.part.boxes


def maths_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype of state and arithmetic: float64 for float64 parameters, else float32."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


class BoxedOptimizer(torch.optim.Optimizer, abc.ABC):
    """An optimizer that knows the parts of its tensors and says itself how checkpoints hold its state.

    Args:
        mesh: the mesh the parameters are divided over, or several (the dense one and the experts'); None where
            every tensor is full, or where `elementwise`: a step then never communicates.
    """

    elementwise = False

    def __init__(self, params: Params, defaults: dict[str, Any], mesh: AnyMesh | None = None):
        self.mesh = None if mesh is None else ParallelMesh.of(mesh, alone="dp_shard")
        self._planned: tuple[tuple[int, ...], dict[torch.Tensor, list[tuple[Part, Axes]]]] | None = None
        self._borrowed: list[tuple[torch.Tensor, list[tuple[torch.Tensor, int]]]] = []
        super().__init__(params, defaults)
        check_params(self._params(), type(self).__name__)

    # -- what a subclass says ------------------------------------------------------------------------------------

    @abc.abstractmethod
    def slots(self, part: Part, group: dict[str, Any]) -> dict[str, tuple[int, ...] | None]:
        """Names of the state of a part: None for one laid out as the part, else the shape of a statistic."""

    @abc.abstractmethod
    def state_of(self, group: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
        """The state of a tensor, allocated on first use, `step` (a float32 scalar on the CPU) among it."""

    @abc.abstractmethod
    def exposed(self, param: torch.Tensor, slot: str, index: int) -> torch.Tensor:
        """The tensor a checkpoint saves of a slot of part number `index`, and loads into."""

    @abc.abstractmethod
    def step_groups(self) -> None:
        """Step what every param group holds."""

    # -- the step ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Collective over the ranks that share a parameter; nothing waits for the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.state_loaded()
        self.step_groups()
        return loss

    def _params(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def plan(self) -> dict[torch.Tensor, list[tuple[Part, Axes]]]:
        """The parts of every tensor of the param groups, found anew when those have changed."""
        params = self._params()
        key = tuple(map(id, params))
        if self._planned is None or self._planned[0] != key:
            check_params(params, type(self).__name__)
            parts = {p: [(part, self._axes(part)) for part in parts_of(p)] for p in params}
            self._planned = (key, parts)
        return self._planned[1]

    def _axes(self, part: Part) -> Axes:
        return () if self.elementwise else resolve(part.axes, self.mesh)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def boxed_state(self, param: torch.Tensor, name: str = "") -> dict[str, BoxedTensor]:
        """Return what `cai_mesh.checkpoint` saves of a tensor of the param groups, by `NAME.SLOT`; none for a stranger.

        Args:
            name: the parameter's name, where the tensor is of one and does not carry it.

        Tensors are views, or borrowed copies that the next `state_loaded` takes back if they were written to.
        """
        group = next((g for g in self.param_groups if any(p is param for p in g["params"])), None)
        if group is None:
            return {}
        state, boxes = self.state_of(group, param), {}
        steps = []
        for i, (part, _) in enumerate(self.plan()[param]):
            steps.append(state["step"].clone())
            boxes[f"{part.name or name}.step"] = part.full(steps[-1])
            for slot, shape in self.slots(part, group).items():
                value = self.exposed(param, slot, i)
                boxes[f"{part.name or name}.{slot}"] = (
                    part.boxed(value) if shape is None else part.full(value)
                )
        self._borrowed.append((state["step"], [(s, s._version) for s in steps]))
        return boxes

    @torch.no_grad()
    def state_loaded(self) -> None:
        """Take back what a checkpoint has loaded into copies; `restore_groups` and every step call it.

        Parameters of one flat shard count their steps together; from a checkpoint where they differ (one was not
        used) the largest count is taken.
        """
        borrowed, self._borrowed = self._borrowed, []
        for step, copies in borrowed:
            written = [value for value, version in copies if value._version != version]
            if written:
                step.copy_(torch.stack(written).max())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave on the same rank of the same mesh; dtypes of state are kept as saved."""
        super().load_state_dict(state_dict)
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        for i, param in zip(ids, self._params(), strict=True):
            if i in state_dict["state"]:
                saved = copy.deepcopy(state_dict["state"][i])
                self.state[param] = {slot: _moved(value, param) for slot, value in saved.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "mesh": self.mesh, "_planned": None, "_borrowed": []}


class PartOptimizer(BoxedOptimizer):
    """An optimizer whose state belongs to parts: `state[param][slot]` is a list with one tensor a part.

    A slot is elementwise (laid out as the part) or a statistic in global index space, the same on all ranks that
    share the parameter. All ranks list the same parts, so a collective never depends on what a rank holds.
    """

    @abc.abstractmethod
    def update(self, entries: list[Entry]) -> None:
        """Step the weights of all entries that have a gradient."""

    def step_groups(self) -> None:
        """Step what every param group holds."""
        entries = [
            entry for group in self.param_groups for p in group["params"] for entry in self._enter(group, p)
        ]
        if entries:
            self.update(entries)

    def _enter(self, group: dict[str, Any], param: torch.Tensor) -> list[Entry]:
        state, grad = self.state_of(group, param), dense_gradient(param)
        if grad is not None:
            state["step"] += 1
            grad = grad.to(maths_dtype(param))
        step = int(state["step"])
        return [
            Entry(
                group,
                part,
                axes,
                part.segment(param.detach()),
                grad if grad is None else part.segment(grad),
                state,
                i,
                step,
            )
            for i, (part, axes) in enumerate(self.plan()[param])
        ]

    def state_of(self, group: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
        """The state of a tensor, allocated on first use."""
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            parts = [part for part, _ in self.plan()[param]]
            kinds = [self.slots(part, group) for part in parts]
            for slot in dict.fromkeys(slot for kind in kinds for slot in kind):
                state[slot] = [
                    self.allocate(slot, part, kind.get(slot, (0,)), param)
                    for part, kind in zip(parts, kinds, strict=True)
                ]
        return state

    def allocate(
        self, slot: str, part: Part, shape: tuple[int, ...] | None, param: torch.Tensor
    ) -> torch.Tensor:
        """Zeros for one slot of one part."""
        if shape is not None:
            return torch.zeros(shape, dtype=maths_dtype(param), device=param.device)
        return torch.zeros_like(part.segment(param.detach()), dtype=maths_dtype(param))

    def exposed(self, param: torch.Tensor, slot: str, index: int) -> torch.Tensor:
        return self.state[param][slot][index]


def dense_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """The local gradient of a tensor, or None. Raises `PlanError` for a sparse one."""
    if param.grad is not None and param.grad.layout is not torch.strided:
        raise PlanError(
            "a gradient is sparse", got=param.grad.layout, fix="use sparse=False in the embedding"
        )
    return None if param.grad is None else local(param.grad)


def _segment(part: Part, grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else part.segment(grad)


def _moved(value: Any, param: torch.Tensor) -> Any:
    return [v.to(param.device) for v in value] if isinstance(value, list) else value
