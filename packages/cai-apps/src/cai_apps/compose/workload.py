"""Workload: a model without memory, what a batch means to it, and its loss. It knows neither data nor run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cai_apps.compose.blocks import blocks_of
from cai_apps.compose.quantized_base import QuantizedBase
from cai_apps.config.sections import Experts
from cai_mesh.comm import AnyMesh, degree
from cai_mesh.errors import ConfigError
from cai_pipeline import Trial

Batch = dict[str, Tensor]
"""A microbatch: tensors by name, each with the samples along its first dimension."""
Loss = Callable[[Any, Any], Tensor]
"""(what the model returns, the batch's target) -> the sum of the loss over the batch, a scalar."""


def _as_it_is(batch: Batch) -> Batch:
    return batch


Score = Callable[[Any, Any, Any], Tensor]
"""(loss, what the model returns, the batch's target) -> any tensor, such as scores of the samples."""


class Forwards(Protocol):
    """A model on a mesh that can be run forward alone; `cai_apps.compose.session.Session` is one."""

    mesh: DeviceMesh
    model: nn.Module

    def scores(self, microbatches: Sequence[Batch], score: Score) -> list[Tensor]:
        """Return what a function says of each microbatch; nothing but on the last stage. Collective."""
        ...


def _without_more(forwards: Forwards, microbatches: Sequence[Batch]) -> Sequence[Batch]:
    return microbatches


def _none(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return []


def _all_count(inputs: Mapping[str, Any]) -> None:
    return None


@dataclass(frozen=True)
class Workload:
    """A model and its loss.

    Args:
        build: the model, on the device of the context it is called in (meta, mostly).
        inputs: keyword arguments of the model's forward, from a microbatch.
        target: the target of the loss, from a microbatch.
        correct: (loss, output, target) -> the number of targets that the output predicts, a scalar; None: they are no
            classes of which one is the likeliest.
        predicted: (loss, output) -> the class that is the likeliest at each place, of all samples; None likewise.
        ready: the microbatch that both are taken from, made of one on the device (frozen encoders, noise).
        loss: made once the model is cut over the ranks of a mesh.
        example: a microbatch of so many samples, ready, of any values, on the device of the context it is called in.
        initializer: (model) -> a function that fills the parameters and buffers of one of its modules, as
            transformers' `_init_weights` does.
        pretrained: fills the model's parameters, on any layout, from files. Collective. None: initial values stay.
        has_base: whether its frozen parameters are those of a base that the run knows by its content (`Task.base`):
            checkpoints lack them, and `pretrained` fills them again when a run goes on.
        quantized: the way frozen layers are quantized while it is filled, before `pretrained` fills the others; None:
            they are not.
        layers: the layers of the model, or of a stage's part of it: each is one graph where layers are compiled, and is
            run again as a whole in backward where they are recomputed; none is part of another.
        others: methods of its modules that are each compiled, beside the layers: (module, name of the method).
        sizes: the number of sizes of microbatches that come along in training, at most.
        running: a context of the model's forwards, those on tensors without values too.
        frozen_elements: those of models that do not learn and stay on the same ranks, cut as this one is.
        measures: names of what the loss measures beside, the first of which is shown while training: then it has a
            method `measured` with its arguments, which returns (loss, sums float64 [2, names]), a numerator and a
            denominator of each, summed over the batch.
        part: (a microbatch that is ready, mesh) -> this rank's tokens of it, where ranks of `cp` have rows together;
            None: rows stay whole.
        before_step: (forwards, microbatches) -> the microbatches with what forwards without gradients say of them;
            called before each step and each validation. Collective.
        chooses_places: whether its loss wants logits at places of its choice (`NextTokenLoss.log_probs`). An output
            layer that tensor ranks share then waits, where kernels take the loss, as one of one rank does anyway.
        experts: the options of the model's routers, resolved; None: nobody looks at routers.
        token_weights: keyword arguments of the model -> the weight of each place in what routers add up, [samples,
            places], 0 for what fills a row; None: all count.
        logits: the form of the logits of a model whose output layer tensor ranks cut: "sharded", for a loss that takes
            them so, or "whole", for one that knows nothing of ranks.
        trial: a small model of the same kind, on which `cai_pipeline.split` and `cai_tensor_parallel.parallelize` try
            themselves; None: made of a transformers config.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[Batch], Mapping[str, Any]]
    target: Callable[[Batch], Any]
    loss: Callable[[nn.Module, DeviceMesh], Loss]
    example: Callable[[int], Batch]
    initializer: Callable[[nn.Module], Callable[[nn.Module], None]]
    correct: Callable[[Any, Any, Any], Tensor] | None = None
    predicted: Callable[[Any, Any], Tensor] | None = None
    ready: Callable[[Batch], Batch] = _as_it_is
    pretrained: Callable[[nn.Module], None] | None = None
    has_base: bool = False
    quantized: QuantizedBase | None = None
    layers: Callable[[nn.Module], list[nn.Module]] = blocks_of
    others: Callable[[nn.Module], list[tuple[nn.Module, str]]] = _none
    sizes: int = 1
    running: Callable[[], AbstractContextManager] = nullcontext
    frozen_elements: int = 0
    measures: tuple[str, ...] = ()
    part: Callable[[Batch, AnyMesh], Batch] | None = None
    before_step: Callable[[Forwards, Sequence[Batch]], Sequence[Batch]] = _without_more
    chooses_places: bool = False
    experts: Experts | None = None
    token_weights: Callable[[Mapping[str, Any]], Tensor | None] = _all_count
    logits: Literal["sharded", "whole"] = "sharded"
    trial: Trial | None = None


def own_part(workload: Workload, mesh: AnyMesh, batch: Batch) -> Batch:
    """Return what a rank is given of a microbatch: its tokens of each row where ranks have rows together.

    Args:
        workload: the workload.
        mesh: the mesh.
        batch: the microbatch, ready.

    Raises:
        ConfigError: the mesh divides rows, and the workload has none.
    """
    if degree(mesh, "cp") == 1:
        return batch
    if workload.part is None:
        raise ConfigError(
            "a context divides rows of tokens over ranks, and this workload has none",
            got=f"parallel.context.size = {degree(mesh, 'cp')}",
            fix="leave it out, or give the Workload a `part`",
        )
    return workload.part(batch, mesh)


def on_meta(workload: Workload) -> nn.Module:
    """Return the model, unsharded, on the meta device."""
    with torch.device("meta"):
        return workload.build()
