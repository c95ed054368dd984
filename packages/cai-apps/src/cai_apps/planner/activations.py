"""Bytes that a forward keeps for backward, found by running it on tensors without storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from cai_apps.compose.blocks import is_product
from cai_apps.compose.sharding import DTYPES
from cai_apps.compose.workload import Batch, Workload
from cai_apps.config.sections import RunConfig
from cai_kernels import convert_to_fp8
from cai_mesh.storage import blocks
from cai_tensor_parallel import parallelize

REST = ""
"""Key of what is kept outside all blocks: final norm, head and loss."""


@dataclass(frozen=True)
class Saved:
    """What the forward of one microbatch on a tensor-parallel rank leaves, by name of the block that leaves it.

    Args:
        bytes: saved for backward. Parameters and what another block has saved already are not counted.
        products: bytes of the results of matrix products and attention, which selective recompute keeps.
    """

    bytes: dict[str, int]
    products: dict[str, int]


def saved_bytes(config: RunConfig, workload: Workload, batch: Callable[[], Batch], mesh: DeviceMesh) -> Saved:
    """What a forward leaves for backward. Nothing is split over stages, swapped or recomputed."""
    with FakeTensorMode():
        model = workload.build()
        for param in model.parameters():
            param.data = param.data.to(DTYPES[config.precision.compute])
        if config.precision.linear == "fp8":
            convert_to_fp8(model, scaling="row", cache_weight=False)
        parallelize(model, mesh)
        loss = workload.loss(model, mesh)
        example = batch()
        counter = _Counter(model)
        hooks = torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda tensor: tensor)
        with hooks, _Products(counter):
            found = loss(model(**workload.inputs(example)), workload.target(example))
        del found  # held until here: the graph keeps what the counter has seen alive
    return Saved(dict(counter.bytes), dict(counter.products))


class _Counter:
    def __init__(self, model: nn.Module):
        self.bytes: Counter[str] = Counter()
        self.products: Counter[str] = Counter()
        self.block = REST
        self._seen = {_storage(parameter) for parameter in model.parameters()}
        names = {module: name for name, module in model.named_modules()}
        for block in blocks(model):
            if block is not model:
                block.register_forward_pre_hook(lambda module, _: self._enter(names[module]))
                block.register_forward_hook(lambda *_: self._enter(REST))

    def _enter(self, block: str) -> None:
        self.block = block

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        if storage not in self._seen:
            self._seen.add(storage)
            self.bytes[self.block] += tensor.untyped_storage().nbytes()
        return tensor


class _Products(TorchDispatchMode):
    """Counts the results of products in the block that runs."""

    def __init__(self, counter: _Counter):
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if is_product(func):
            first = found[0] if isinstance(found, tuple) else found
            self._counter.products[self._counter.block] += first.untyped_storage().nbytes()
        return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
