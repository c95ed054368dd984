"""Log-probabilities under an output layer whose vocabulary is cut, a chunk of places at a time."""

from cai_tensor_parallel.log_probs.chunks import ChunkMaths, TorchChunks
from cai_tensor_parallel.log_probs.rule import head_log_probs, is_cut_by_columns

__all__ = ["ChunkMaths", "TorchChunks", "head_log_probs", "is_cut_by_columns"]
