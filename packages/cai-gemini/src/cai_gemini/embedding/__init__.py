"""Embedding tables in host memory with a software cache on the device.

After Fang et al., "A Frequency-aware Software Cache for Large Recommendation System Embeddings" (arXiv:2208.05321).
`slots` decides what is cached where, `rows` moves it, `following` lets optimizer state move along;
`sharded` cuts a table over ranks and `exchange` is how they talk.
"""

from cai_gemini.embedding.cached import CachedEmbedding, CacheStats
from cai_gemini.embedding.prefetch import lookahead
from cai_gemini.embedding.rowwise import RowwiseAdagrad
from cai_gemini.embedding.sharded import ShardedEmbedding

__all__ = ["CacheStats", "CachedEmbedding", "RowwiseAdagrad", "ShardedEmbedding", "lookahead"]
