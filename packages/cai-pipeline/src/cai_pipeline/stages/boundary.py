"""The tensors that travel between two stages in a forward, and where a stage reads and stores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cai_mesh.errors import PlanError
from cai_mesh.layout import attach, record_of

Tensors = tuple[torch.Tensor, ...]
"""The tensors that one stage sends to the next for a microbatch: the hidden states first, [B, S, D]."""


def tensors_in(boundary: torch.Tensor | Tensors | None) -> Tensors:
    """The tensors that stages send each other, as a tuple."""
    if boundary is None:
        return ()
    return (boundary,) if isinstance(boundary, torch.Tensor) else boundary


def without_graph(sent: Tensors) -> Tensors:
    """The tensors that a stage sends, detached; what the next one must know of them stays attached."""
    detached = tuple(tensor.detach() for tensor in sent)
    for tensor, source in zip(detached, sent, strict=True):
        if record_of(source).part:
            attach(tensor, part=True)
    return detached


def gradients_to_send(received: Tensors) -> Tensors:
    """The gradients of what a stage received, after its backward."""
    return tuple(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in received)


@dataclass
class StageIO:
    """The input and output of a stage during one forward.

    Args:
        running: whether `run_stage` is in the model's forward; there are no tensors otherwise.
        received: output of the previous stage.
        to_send: output of this stage; stays empty on the last one.
        memory: the encoder's output, received or made here, once it is there.
        was_read: names of the parts of `received` that the forward has read.
    """

    running: bool = False
    received: Tensors = ()
    to_send: Tensors = ()
    memory: torch.Tensor | None = None
    was_read: set[str] = field(default_factory=set)

    def read(self, what: str) -> Tensors:
        """The received tensors. Raises PlanError when the stage was called without them."""
        self.require_running()
        if not self.received:
            raise PlanError(
                "a pipeline stage after the first was run without the output of the previous stage"
            )
        self.was_read.add(what)
        return self.received

    def send(self, *tensors: torch.Tensor) -> None:
        """Take tensors as the stage's output; the encoder's output follows them once it is there."""
        self.to_send = tensors if self.memory is None else (*tensors, self.memory)

    @property
    def travelling(self) -> Tensors:
        """The tensors whose dtype and device zeros take: what the stage sends, or before that what it received."""
        return self.to_send or self.received

    def zeros(self, shape: Sequence[int]) -> torch.Tensor:
        """Zeros that take no memory. Raises PlanError where nothing has been received or sent."""
        like = self.travelling or self.read("dtype")
        return like[0].new_zeros(()).expand(tuple(shape))

    def require_running(self) -> None:
        """Raise PlanError when the model was called by itself."""
        if not self.running:
            raise PlanError(
                "the model is one stage of a pipeline and cannot be called by itself",
                cause="split() left on this rank only a part of its layers",
                fix="use PipelineRunner's step, evaluate or forward on all ranks of the pipeline",
            )


@dataclass(frozen=True)
class EncoderEnd:
    """The place where a model's encoder returns, and what a stage does there.

    Args:
        name: the encoder.
        entry: the index or key, in what it returns, of the output that the decoder's layers read; None for a tensor.
        receives: the output was made on a stage before.
        sends: it is what this stage sends, which ends with the encoder's last layer.
    """

    name: str
    entry: str | int | None
    receives: bool
    sends: bool

    def pass_through(self, io: StageIO, output: Any) -> Any:
        """The encoder's return value, with its output as received; it is kept for the next stage."""
        if not self.receives:
            io.memory = output if self.entry is None else output[self.entry]
        else:
            io.memory = io.read("output of the encoder")[-1]
            output = _with(output, self.entry, io.memory)
        if self.sends:
            io.to_send = (io.memory,)
        return output


def _with(output: Any, entry: str | int | None, value: torch.Tensor) -> Any:
    if entry is None:
        return value
    if isinstance(output, tuple):
        return tuple(value if place == entry else element for place, element in enumerate(output))
    output[entry] = value
    return output
