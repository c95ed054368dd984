"""What a mode needs to know to change one module."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from cai_tensor_parallel.shard import Cutter


@dataclass
class ModeContext:
    """Group and parameter cutter of one `parallelize` call; `module_name` is for errors."""

    group: dist.ProcessGroup
    cutter: Cutter
    module_name: str = ""
