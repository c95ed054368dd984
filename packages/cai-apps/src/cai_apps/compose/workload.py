"""What an application hands over to be trained: a model without memory, what a batch means to it, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cai_pipeline import Trial

Batch = dict[str, Tensor]
"""A microbatch: tensors by name, each with the samples along its first dimension."""
Loss = Callable[[Any, Any], Tensor]
"""(what the model returns, the batch's target) -> the sum of the loss over the batch, a scalar."""


@dataclass(frozen=True)
class Workload:
    """A model and its loss.

    Args:
        build: the model, on the device of the context it is called in (meta, mostly).
        inputs: keyword arguments of the model's forward, from a microbatch.
        target: what the loss compares with, from a microbatch.
        loss: made once the model is cut over the ranks of a mesh.
        example: a microbatch of so many samples, of any values, on the device of the context it is called in.
        initializer: of the model: what fills the parameters and buffers of one of its modules, as transformers'
            `_init_weights` does.
        pretrained: directory of safetensors with the model's parameters by name; None: initial values.
        running: a context of the model's forwards, those on tensors without values too.
        trial: a small model of the same kind for `cai_pipeline.split`; None: made of a transformers config.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[Batch], Mapping[str, Any]]
    target: Callable[[Batch], Any]
    loss: Callable[[nn.Module, DeviceMesh], Loss]
    example: Callable[[int], Batch]
    initializer: Callable[[nn.Module], Callable[[nn.Module], None]]
    pretrained: Path | None = None
    running: Callable[[], AbstractContextManager] = nullcontext
    trial: Trial | None = None


def on_meta(workload: Workload) -> nn.Module:
    """The model, unsharded, on the meta device."""
    with torch.device("meta"):
        return workload.build()
