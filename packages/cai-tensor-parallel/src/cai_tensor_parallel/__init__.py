"""Tensor parallelism from a plan of roles: `parallelize` an ordinary or Hugging Face model over a mesh axis."""

from cai_mesh.comm import sub_axes
from cai_tensor_parallel.context.batches import cut_batch, own_rows, whole_rows
from cai_tensor_parallel.context.parallelization import parallelize_context
from cai_tensor_parallel.cut.loss import sharded_logits
from cai_tensor_parallel.experts.finding import ExpertsRole, find_experts
from cai_tensor_parallel.experts.layer import ExpertMaths, own_forward
from cai_tensor_parallel.experts.parallelization import parallelize_experts
from cai_tensor_parallel.finding.default_plan import plan_for
from cai_tensor_parallel.log_probs import ChunkMaths, TorchChunks, head_log_probs, is_cut_by_columns
from cai_tensor_parallel.modes.cross_entropy import ColumnMaths, vocab_parallel_cross_entropy
from cai_tensor_parallel.modes.vocab import (
    ShardedLogits,
    gather_logits,
    vocab_parallel_embedding,
    vocab_start,
)
from cai_tensor_parallel.parallelization import parallelize
from cai_tensor_parallel.plans.plan import ROLES, Plan

__version__ = "0.1.0"

__all__ = [
    "ROLES",
    "ChunkMaths",
    "ColumnMaths",
    "ExpertMaths",
    "ExpertsRole",
    "Plan",
    "ShardedLogits",
    "TorchChunks",
    "cut_batch",
    "find_experts",
    "gather_logits",
    "head_log_probs",
    "is_cut_by_columns",
    "own_forward",
    "own_rows",
    "parallelize",
    "parallelize_context",
    "parallelize_experts",
    "plan_for",
    "sharded_logits",
    "sub_axes",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "vocab_start",
    "whole_rows",
]
