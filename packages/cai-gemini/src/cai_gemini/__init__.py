"""Device and host memory as one: residencies for sharded models, `offload` for one device, and cached embeddings."""

from cai_gemini.activations import ActivationOffload, offload_activations
from cai_gemini.embedding import CachedEmbedding, RowwiseAdagrad, ShardedEmbedding, lookahead
from cai_gemini.forward_only import HostModel
from cai_gemini.offload import Tiers, Tuning, offload
from cai_gemini.optimizer import OffloadedOptimizer
from cai_gemini.placement import Placement
from cai_gemini.residency import ChunkResidency
from cai_gemini.timeline import Timeline

__version__ = "0.1.0"

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
