"""Bytes that a forward keeps for backward, found by running it on tensors without storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from cai_apps.compose.sharding import DTYPES
from cai_apps.compose.workload import Batch, Workload
from cai_apps.config.sections import RunConfig
from cai_kernels import convert_to_fp8
from cai_mesh.storage import blocks
from cai_tensor_parallel import parallelize

REST = ""
"""Key of what is kept outside all blocks: final norm, head and loss."""


def saved_bytes(
    config: RunConfig, workload: Workload, batch: Callable[[], Batch], mesh: DeviceMesh
) -> dict[str, int]:
    """Bytes saved for backward by one microbatch on a tensor-parallel rank, by name of the block that saves them.

    Parameters and what another block has saved already are not counted. Nothing is split over stages, swapped or
    recomputed.
    """
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
        with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda tensor: tensor):
            found = loss(model(**workload.inputs(example)), workload.target(example))
        del found  # held until here: the graph keeps what the counter has seen alive
    return dict(counter.bytes)


class _Counter:
    def __init__(self, model: nn.Module):
        self.bytes: Counter[str] = Counter()
        self._block = REST
        self._seen = {_storage(parameter) for parameter in model.parameters()}
        names = {module: name for name, module in model.named_modules()}
        for block in blocks(model):
            if block is not model:
                block.register_forward_pre_hook(lambda module, _: self._enter(names[module]))
                block.register_forward_hook(lambda *_: self._enter(REST))

    def _enter(self, block: str) -> None:
        self._block = block

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        if storage not in self._seen:
            self._seen.add(storage)
            self.bytes[self._block] += tensor.untyped_storage().nbytes()
        return tensor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
