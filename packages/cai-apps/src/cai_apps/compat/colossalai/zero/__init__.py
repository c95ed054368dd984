"""Contexts in which models are made for ZeRO."""

from __future__ import annotations

from typing import Any

import torch

from cai_apps.compat.colossalai.absent import answer
from cai_apps.compat.colossalai.lazy import LazyInitContext

__all__ = ["ColoInitContext", "ShardStrategy", "ZeroInitContext"]

__getattr__ = answer(
    "zero",
    {
        "GeminiAdamOptimizer": "GeminiPlugin with Booster",
        "GeminiDDP": "GeminiPlugin with Booster",
        "GeminiOptimizer": "GeminiPlugin with Booster",
        "LowLevelZeroOptimizer": "LowLevelZeroPlugin with Booster, or cai_zero.shard_optimizer",
        "zero_model_wrapper": "GeminiPlugin, LowLevelZeroPlugin with Booster",
        "zero_optim_wrapper": "GeminiPlugin, LowLevelZeroPlugin with Booster",
    },
    __all__,
)


class ShardStrategy:
    """How parameters are cut over ranks, which is the same whatever the strategy is called."""


class ZeroInitContext(LazyInitContext):
    """A context in which a model is made without memory; `colossalai.initialize` gives ranks their parts of the values.

    Args:
        target_device, shard_strategy, shard_param, options: unused: boost cuts parameters.
    """

    def __init__(
        self, target_device: Any = None, shard_strategy: Any = None, shard_param: bool = True, **options: Any
    ):
        super().__init__()
        self.model_numel_tensor = torch.zeros(1, dtype=torch.int64)


ColoInitContext = ZeroInitContext
