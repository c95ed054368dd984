"""One stage of a split model: what stands in for the parts it lacks, and how it is run.

A stage is the whole model with its absent parts replaced, so the model's own forward still builds masks and rotary
tables, loops over all layers and keeps every name. Two of the stand-ins are taps: the absent layer just before the
stage's own returns the tensor received from the stage before, whatever it is given, and the absent layer just
behind them keeps what it is given, which is what the stage hands over. Nothing computed before the first tap or
after the second reaches a result.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cai_mesh.errors import PlanError


@dataclass
class Tap:
    """Where a stage's input enters its forward and its output leaves it.

    Args:
        running: whether `run_stage` is in the model's forward; both tensors are None otherwise.
        entered: whether the received tensor has taken its place in this forward.
        received: output of the stage before, [B, S, D].
        handed_over: output of the stage, [B, S, D].
    """

    running: bool = False
    entered: bool = False
    received: torch.Tensor | None = None
    handed_over: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """The received tensor. Raises PlanError when the stage was called without one."""
        self.require_running()
        if self.received is None:
            raise PlanError(
                "a pipeline stage behind the first was run without the output of the stage before"
            )
        return self.received

    def require_running(self) -> None:
        """Raise PlanError when the model was called by itself."""
        if not self.running:
            raise PlanError(
                "the model is one stage of a pipeline and cannot be called by itself",
                cause="split() left on this rank only a part of its layers",
                fix="use PipelineRunner's step, evaluate or forward on all ranks of the pipeline",
            )


@dataclass
class Stage:
    """Which part of the model a split model is; found at `model.cai_stage`.

    Args:
        index: stage number, 0 <= index < count.
        count: number of stages.
        layers: the decoder layers it owns, by their index in the whole model.
    """

    index: int
    count: int
    layers: range
    tap: Tap = field(default_factory=Tap, repr=False)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @staticmethod
    def of(model: nn.Module) -> Stage:
        """The stage that `split` made of `model`; an unsplit model is the only stage of one."""
        return getattr(model, "cai_stage", None) or Stage(0, 1, range(0))


class Absent(nn.Module):
    """A module that another stage owns. It has the plain attributes of the one it replaces, and no parameters."""

    cai_absent = True

    def __init__(self, replaced: nn.Module, tap: Tap):
        super().__init__()
        self.tap = tap
        self.replaced = type(replaced).__name__
        for name, value in vars(replaced).items():
            taken = name.startswith("_") or name in self.__dict__ or name == "forward"
            if not taken and not isinstance(value, torch.Tensor):
                self.__dict__[name] = value

    def extra_repr(self) -> str:
        return self.replaced


class AbsentLayer(Absent):
    """A decoder layer of another stage: hands its hidden states on, or is one of the two taps.

    Args:
        outputs: length of the tuple the real layer returns, or None when it returns a tensor.
        place: "enter" for the layer before the stage's own, "leave" for the one behind them, else "pass".
    """

    def __init__(self, replaced: nn.Module, tap: Tap, outputs: int | None, place: str):
        super().__init__(replaced, tap)
        self.outputs = outputs
        self.place = place

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if self.place == "enter":
            hidden = self.tap.take()
            self.tap.entered = True
        elif self.place == "leave":
            self.tap.require_running()
            self.tap.handed_over = hidden
            hidden = hidden.detach()
        return hidden if self.outputs is None else (hidden,) + (None,) * (self.outputs - 1)


class AbsentEmbedding(Absent):
    """An embedding of another stage: zeros of the right shape, without memory, for code that reads the shape."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        ids = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        return self.tap.take().new_zeros(()).expand(*ids.shape, self.embedding_dim)


class AbsentProjection(Absent):
    """A linear layer of another stage ahead of the decoder: zeros with the last dim it would give."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(()).expand(*x.shape[:-1], self.out_features)


class AbsentPassThrough(Absent):
    """A norm or head of another stage: returns what it is given."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x


def run_stage(model: nn.Module, received: torch.Tensor | None, inputs: Mapping[str, Any]) -> Any:
    """One forward of a stage.

    Args:
        model: a model that `split` returned, or an unsplit one.
        received: output of the stage before, [B, S, D]; None on the first stage.
        inputs: keyword arguments of the whole model (input_ids, attention_mask, ...); every stage gets the same.
            `use_cache` defaults to False, and `labels` reach only the last stage.

    Returns:
        the hidden states to hand over, [B, S, D], or on the last stage what the model returns.

    Raises:
        PlanError: the model's forward left out the layer at which this stage's input enters or its output leaves.
    """
    stage = Stage.of(model)
    arguments = dict(inputs)
    if "use_cache" in inspect.signature(type(model).forward).parameters:
        arguments.setdefault("use_cache", False)
    if not stage.is_last:
        arguments.pop("labels", None)
    tap = stage.tap
    tap.running, tap.entered, tap.received = True, stage.is_first, received
    try:
        output = model(**arguments)
        entered, handed_over = tap.entered, tap.handed_over
    finally:
        tap.running, tap.received, tap.handed_over = False, None, None
    if not entered or (handed_over is None and not stage.is_last):
        raise PlanError(
            f"the forward of {type(model).__name__} skipped a layer next to those of stage {stage.index}",
            cause="an option that leaves out layers, such as layerdrop",
            fix="turn it off when training in a pipeline",
        )
    return output if stage.is_last else handed_over
