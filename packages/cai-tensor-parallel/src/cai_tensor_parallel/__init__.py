"""Tensor parallelism from a plan of roles: `parallelize` an ordinary or Hugging Face model over a mesh axis."""

from cai_mesh.comm import sub_axes
from cai_tensor_parallel.cross_entropy import ColumnMaths, vocab_parallel_cross_entropy
from cai_tensor_parallel.loss import sharded_logits
from cai_tensor_parallel.parallelize import parallelize
from cai_tensor_parallel.plan import ROLES, Plan, plan_for
from cai_tensor_parallel.vocab import (
    ShardedLogits,
    gather_logits,
    vocab_parallel_embedding,
    vocab_start,
)

__version__ = "0.1.0"

__all__ = [
    "ROLES",
    "ColumnMaths",
    "Plan",
    "ShardedLogits",
    "gather_logits",
    "parallelize",
    "plan_for",
    "sharded_logits",
    "sub_axes",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "vocab_start",
]
