"""The stages of a split model on one rank: the placeholders for the parts on other stages, and how a stage is run.

A stage is the whole model with the parts of other stages replaced by placeholders. The model's own forward still
builds masks and rotary tables, loops over all layers and keeps every name. Two placeholder layers connect the stage
to its neighbours. The one just before the stage's own layers returns the tensor received from the previous stage and
ignores its input. The one just after them stores its input, which is the output of the stage. Nothing computed
before the first or after the second changes a result.

A rank that holds several stages has one model with the parts of all of them, so that every transform sees each
parameter once. While one of its stages runs, placeholders stand in for the parts of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.trial import arguments_of
from cai_pipeline.outputs import without
from cai_pipeline.placement import Held

Check = Callable[[nn.Module, Mapping[str, Any]], frozenset[str]]
Role = Literal["input", "output", "pass"]
"""What a placeholder layer does with the hidden states."""


@dataclass
class StageIO:
    """The input and output of a stage during one forward.

    Args:
        running: whether `run_stage` is in the model's forward; both tensors are None otherwise.
        received_used: whether a layer has read `received` in this forward.
        received: output of the previous stage, [B, S, D].
        to_send: output of this stage, [B, S, D]; stays None on the last one.
    """

    running: bool = False
    received_used: bool = False
    received: torch.Tensor | None = None
    to_send: torch.Tensor | None = None

    def require_received(self) -> torch.Tensor:
        """The received tensor. Raises PlanError when the stage was called without one."""
        self.require_running()
        if self.received is None:
            raise PlanError(
                "a pipeline stage after the first was run without the output of the previous stage"
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
    """One part of a model that was split.

    Args:
        index: stage number, 0 <= index < count.
        count: number of stages.
        layers: the layers it owns, by their index in the whole model.
        parts: names of the modules it owns: its layers, and what comes before the first or after the last.
        others: placeholders by name, for the parts of the rank's other stages.
    """

    index: int
    count: int
    layers: range
    parts: tuple[str, ...] = ()
    io: StageIO = field(default_factory=StageIO, repr=False)
    others: dict[str, nn.Module] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @contextmanager
    def shown(self, model: nn.Module) -> Iterator[None]:
        """A context in which `model`, which holds several stages, is this one alone."""
        hidden: list[tuple[nn.Module, str, nn.Module | None]] = []
        try:
            for name, placeholder in self.others.items():
                parent, _, child = name.rpartition(".")
                home = model.get_submodule(parent)
                hidden.append((home, child, home._modules[child]))
                home._modules[child] = placeholder
            yield
        finally:
            for home, child, module in reversed(hidden):
                home._modules[child] = module


@dataclass
class Stages:
    """The stages of a split model that this rank holds; stored at `model.cai_stages`.

    Args:
        held: the rank of each stage of the whole model.
        own: this rank's stages by number, in order.
        check: (model, keyword arguments) -> the entries of what the model returns that only the whole model has, once
            such a call is tried on a small model; raises PlanError when it cannot be split. None: nothing is tried.
        running: the stage whose forward is under way.
    """

    held: Held
    own: dict[int, Stage]
    check: Check | None = field(default=None, repr=False, compare=False)
    running: Stage | None = field(default=None, repr=False, compare=False)

    @property
    def count(self) -> int:
        """Stages of the whole model."""
        return len(self.held)

    @property
    def has_last(self) -> bool:
        """Whether this rank computes what the model returns."""
        return self.count - 1 in self.own

    @property
    def hands_on(self) -> bool:
        """Whether the forward under way ends before the model's last layer, so that nobody reads what it returns."""
        return self.running is not None and not self.running.is_last

    def stand_ins(self) -> Iterator[nn.Module]:
        """The placeholders that are in the model only while one of several stages runs."""
        for stage in self.own.values():
            yield from stage.others.values()

    @staticmethod
    def of(model: nn.Module) -> Stages:
        """What `split` made of `model`; an unsplit model is stage 0 of 1."""
        found = getattr(model, "cai_stages", None)
        return found or Stages((0,), {0: Stage(0, 1, range(0))})


class Placeholder(nn.Module):
    """Stands for a module of another stage: the same plain attributes, no parameters."""

    def __init__(self, replaced: nn.Module, io: StageIO):
        super().__init__()
        self.io = io
        self.replaced = type(replaced).__name__
        for name, value in vars(replaced).items():
            taken = name.startswith("_") or name in self.__dict__ or name == "forward"
            if not taken and not isinstance(value, torch.Tensor):
                self.__dict__[name] = value

    def extra_repr(self) -> str:
        return self.replaced


class PlaceholderLayer(Placeholder):
    """A decoder layer of another stage: returns its hidden states, or connects the stage to a neighbour.

    Args:
        outputs: length of the tuple the real layer returns, or None when it returns a tensor.
        role: "input" for the layer just before the stage's own: it returns the received tensor. "output" for the
            layer just after them: it stores its hidden states as the stage's output. "pass" for all others.
    """

    def __init__(self, replaced: nn.Module, io: StageIO, outputs: int | None, role: Role):
        super().__init__(replaced, io)
        self.outputs = outputs
        self.role = role

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if self.role == "input":
            hidden = self.io.require_received()
            self.io.received_used = True
        elif self.role == "output":
            self.io.require_running()
            self.io.to_send = hidden
            hidden = hidden.detach()
        return hidden if self.outputs is None else (hidden,) + (None,) * (self.outputs - 1)


class PlaceholderEmbedding(Placeholder):
    """An embedding of another stage: returns zeros of the right shape, which take no memory."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        ids = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        return self.io.require_received().new_zeros(()).expand(*ids.shape, self.embedding_dim)


class PlaceholderLinear(Placeholder):
    """A linear layer of another stage before the decoder layers: returns zeros of the right shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(()).expand(*x.shape[:-1], self.out_features)


class PlaceholderPassThrough(Placeholder):
    """A norm or head of another stage: returns its input."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x


def run_stage(
    model: nn.Module, received: torch.Tensor | None, inputs: Mapping[str, Any], *, index: int | None = None
) -> Any:
    """One forward of a stage.

    Args:
        model: a model that `split` returned, or an unsplit one.
        received: output of the previous stage, [B, S, D]; None on the first stage.
        inputs: keyword arguments of the whole model (input_ids, attention_mask, ...); every stage gets the same.
            `use_cache` defaults to False, and `labels` reach only the last stage.
        index: number of the stage; None: the only one of this rank.

    Returns:
        the hidden states to send to the next stage, [B, S, D]; on the last stage what the model returns, with a
        `NotHere` for each entry that only the whole model has.

    Raises:
        PlanError: a model called like this cannot be split, or its forward skipped the layer that reads this stage's
            input or stores its output; or this rank does not hold the stage.
    """
    stages = Stages.of(model)
    stage = _chosen(stages, index)
    missing = stages.check(model, inputs) if stages.check is not None else frozenset()
    arguments = arguments_of(model, inputs)
    if not stage.is_last:
        arguments.pop("labels", None)
    io = stage.io
    io.running, io.received_used, io.received = True, stage.is_first, received
    stages.running = stage
    try:
        with stage.shown(model):
            output = model(**arguments)
        received_used, to_send = io.received_used, io.to_send
    finally:
        io.running, io.received, io.to_send = False, None, None
        stages.running = None
    if not received_used or (to_send is None and not stage.is_last):
        raise PlanError(
            f"the forward of {type(model).__name__} skipped a layer next to those of stage {stage.index}",
            cause="an option that leaves out layers, such as layerdrop",
            fix="turn it off when training in a pipeline",
        )
    if not stage.is_last:
        return to_send
    return output if stages.check is None else without(output, missing)


def _chosen(stages: Stages, index: int | None) -> Stage:
    if index is None and len(stages.own) == 1:
        return next(iter(stages.own.values()))
    if index not in stages.own:
        raise PlanError(
            "this rank does not hold the stage",
            got=f"stage {index}",
            expected=f"one of {', '.join(map(str, stages.own))}",
        )
    return stages.own[index]
