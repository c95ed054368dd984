"""Device and host memory as one: residencies for sharded models, `offload` for one device, and cached embeddings.

Names load their file on first use, so that the room `planning` needs no more than it plans with.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cai_gemini.activations import ActivationOffload, offload_activations
    from cai_gemini.chunk.placement import Placement
    from cai_gemini.embedding import CachedEmbedding, RowwiseAdagrad, ShardedEmbedding, lookahead
    from cai_gemini.engine.planner import Tuning
    from cai_gemini.forward_only import HostModel
    from cai_gemini.memory.timeline import Timeline
    from cai_gemini.one_device import offload
    from cai_gemini.optimizer import OffloadedOptimizer
    from cai_gemini.planning import Tiers
    from cai_gemini.residency import ChunkResidency

__version__ = "0.1.0"

_HOMES = {
    "ActivationOffload": "activations",
    "CachedEmbedding": "embedding",
    "ChunkResidency": "residency",
    "HostModel": "forward_only",
    "OffloadedOptimizer": "optimizer",
    "Placement": "chunk.placement",
    "RowwiseAdagrad": "embedding",
    "ShardedEmbedding": "embedding",
    "Tiers": "planning",
    "Timeline": "memory.timeline",
    "Tuning": "engine.planner",
    "lookahead": "embedding",
    "offload": "one_device",
    "offload_activations": "activations",
}

__all__ = [
    "ActivationOffload",
    "CachedEmbedding",
    "ChunkResidency",
    "HostModel",
    "OffloadedOptimizer",
    "Placement",
    "RowwiseAdagrad",
    "ShardedEmbedding",
    "Tiers",
    "Timeline",
    "Tuning",
    "lookahead",
    "offload",
    "offload_activations",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cai_gemini' has no attribute {name!r}")
    return getattr(importlib.import_module(f"cai_gemini.{_HOMES[name]}"), name)
