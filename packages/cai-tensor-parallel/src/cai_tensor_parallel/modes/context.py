"""What a mode needs to know to change one module."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from cai_tensor_parallel.shard import Cutter


@dataclass
class ModeContext:
    """Group and parameter cutter of one `parallelize` call.

    Args:
        sharded_logits: an output layer cut by vocabulary leaves its results cut.
        module_name: for errors.
    """

    group: dist.ProcessGroup
    cutter: Cutter
    sharded_logits: bool = False
    module_name: str = ""
