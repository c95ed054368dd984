"""Training kernels as functions on plain tensors: Triton where it runs, plain torch beside it."""

from cai_kernels.adamw import AdamWOptions, FusedAdamW, adamw_step_, adamw_steps_
from cai_kernels.add_rms_norm import add_rms_norm
from cai_kernels.attention import (
    AttentionChoice,
    attention,
    attention_backward,
    attention_with_lse,
    document_attention,
    document_tail_attention,
    explain_attention,
    last_queries_attention,
    merge_attention,
    prompt_attention,
    sink_attention,
    varlen_attention,
    why_not_packed,
)
from cai_kernels.backend import Backend, choose, planning_for, plans_kernels, why_not_triton
from cai_kernels.cross_entropy import (
    CrossEntropyParts,
    cross_entropy,
    cross_entropy_from_parts,
    cross_entropy_gradient,
    cross_entropy_parts,
)
from cai_kernels.dropout_add import dropout_add
from cai_kernels.embedding import embedding
from cai_kernels.errors import KernelError
from cai_kernels.experts import AdaptedExperts, ExpertGate, expert_layer
from cai_kernels.fp8_linear import Fp8Linear, WeightCache, convert_to_fp8, fp8_linear
from cai_kernels.gated import geglu, sigmoid_gate, swiglu
from cai_kernels.gelu_bias import gelu_bias
from cai_kernels.global_norm import global_norm
from cai_kernels.group_norm import group_norm
from cai_kernels.grouped_matmul import grouped_matmul
from cai_kernels.layer_norm import layer_norm
from cai_kernels.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_forward,
    linear_cross_entropy_input_grad,
    linear_cross_entropy_weight_grad,
    linear_log_probs,
)
from cai_kernels.modulate import gate_add, modulate
from cai_kernels.paged_attention import paged_append_, paged_attention
from cai_kernels.pair_bias_attention import pair_bias_attention
from cai_kernels.preference import (
    DpoForm,
    GrpoMetrics,
    KtoMetrics,
    PreferenceMetrics,
    dpo_loss,
    grpo_loss,
    kto_loss,
    linear_sequence_log_probs,
    orpo_loss,
    reward_loss,
    sequence_log_probs,
    simpo_loss,
)
from cai_kernels.quantized_linear import (
    QuantizedKind,
    QuantizedLinear,
    convert_to_quantized,
    dequantize,
    quantize,
    quantized_linear,
)
from cai_kernels.rms_norm import rms_norm
from cai_kernels.rope import rope
from cai_kernels.sampling import sample
from cai_kernels.skinny_linear import skinny_linears, skinny_pays
from cai_kernels.softmax import softmax
from cai_kernels.swap import Swapped, swap
from cai_kernels.token_permute import token_permute, token_unpermute

__version__ = "0.1.0"

__all__ = [
    "AdamWOptions",
    "AdaptedExperts",
    "AttentionChoice",
    "Backend",
    "CrossEntropyParts",
    "DpoForm",
    "ExpertGate",
    "Fp8Linear",
    "FusedAdamW",
    "GrpoMetrics",
    "KernelError",
    "KtoMetrics",
    "PreferenceMetrics",
    "QuantizedKind",
    "QuantizedLinear",
    "Swapped",
    "WeightCache",
    "adamw_step_",
    "adamw_steps_",
    "add_rms_norm",
    "attention",
    "attention_backward",
    "attention_with_lse",
    "choose",
    "convert_to_fp8",
    "convert_to_quantized",
    "cross_entropy",
    "cross_entropy_from_parts",
    "cross_entropy_gradient",
    "cross_entropy_parts",
    "dequantize",
    "document_attention",
    "document_tail_attention",
    "dpo_loss",
    "dropout_add",
    "embedding",
    "expert_layer",
    "explain_attention",
    "fp8_linear",
    "gate_add",
    "geglu",
    "gelu_bias",
    "global_norm",
    "group_norm",
    "grouped_matmul",
    "grpo_loss",
    "kto_loss",
    "last_queries_attention",
    "layer_norm",
    "linear_cross_entropy",
    "linear_cross_entropy_forward",
    "linear_cross_entropy_input_grad",
    "linear_cross_entropy_weight_grad",
    "linear_log_probs",
    "linear_sequence_log_probs",
    "merge_attention",
    "modulate",
    "orpo_loss",
    "paged_append_",
    "paged_attention",
    "pair_bias_attention",
    "planning_for",
    "plans_kernels",
    "prompt_attention",
    "quantize",
    "quantized_linear",
    "reward_loss",
    "rms_norm",
    "rope",
    "sample",
    "sequence_log_probs",
    "sigmoid_gate",
    "simpo_loss",
    "sink_attention",
    "skinny_linears",
    "skinny_pays",
    "softmax",
    "swap",
    "swiglu",
    "token_permute",
    "token_unpermute",
    "varlen_attention",
    "why_not_packed",
    "why_not_triton",
]
