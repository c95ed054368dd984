"""A model's forwards on a GPU, recorded as CUDA graphs and replayed.

A denoiser's forward starts a thousand kernels and more. For a few pictures each takes some microseconds, less than the
host needs to start it; a graph starts all of them with one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Forward = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class _Recorded:
    """Args:
    inputs: the tensors that the graph reads.
    result: the tensor that it writes.
    """

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    result: Tensor


class Graphed:
    """A forward that is recorded when it is called with tensors of the same shapes for the second time.

    From then on such calls copy their tensors to where the graph reads, and replay it: results are those of the
    forward, bit for bit. Between calls the weights must stay where they are, and the forward must do the same things
    for the same shapes without waiting for the device. The memory of its intermediate results is held until this
    object is dropped.

    Args:
        forward: a function from tensors on a GPU, by name, to one tensor, in inference mode.
    """

    def __init__(self, forward: Forward):
        self._forward = forward
        self._known: dict[tuple, _Recorded | None] = {}

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The forward's result, a tensor of its own."""
        key = tuple((name, x.shape, x.stride(), x.dtype) for name, x in inputs.items())
        if key not in self._known:  # libraries set themselves up in a first call, which cannot be recorded
            self._known[key] = None
            return self._forward(inputs)
        recorded = self._known[key]
        if recorded is None:
            recorded = self._known[key] = self._record(inputs)
        for name, static_input in recorded.inputs.items():
            static_input.copy_(inputs[name])
        recorded.graph.replay()
        return recorded.result.clone()

    def _record(self, inputs: Mapping[str, Tensor]) -> _Recorded:
        static_inputs = {name: x.clone() for name, x in inputs.items()}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = self._forward(static_inputs)
        return _Recorded(graph, static_inputs, result)
