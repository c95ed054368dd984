"""What a mode needs to know to change one module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cai_tensor_parallel.shard import Cutter

Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`matmul(x[..., in], weight[out, in]) -> [..., out]`, differentiable."""


@dataclass
class ModeContext:
    """Group, parameter cutter and matrix product of one `parallelize` call; `module_name` is for errors."""

    group: dist.ProcessGroup | None
    cutter: Cutter
    matmul: Matmul
    module_name: str = ""
