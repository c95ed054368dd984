"""Bytes that a forward keeps for backward, found by running it on tensors without storage."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import nn

from cai_mesh.storage import blocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PretrainedConfig

REST = ""
"""Key of what is kept outside all blocks: final norm, head and loss."""


def saved_bytes(
    config: PretrainedConfig,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    *,
    linear: str = "compute",
    microbatch_size: int,
    sequence_length: int,
) -> dict[str, int]:
    """Bytes saved for backward by one microbatch on a tensor-parallel rank, by name of the block that saves them.

    Parameters and what another block has saved already are not counted.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoModelForCausalLM

    from cai_kernels import convert_to_fp8
    from cai_tensor_parallel import parallelize

    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if linear == "fp8":
            convert_to_fp8(model, scaling="row", cache_weight=False)
        parallelize(model, mesh)
        ids = torch.zeros(microbatch_size, sequence_length, dtype=torch.int64)
        counter = _Counter(model)
        with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda tensor: tensor):
            logits = model(input_ids=ids, use_cache=False).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
        del loss  # held until here: the graph keeps what the counter has seen alive
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
