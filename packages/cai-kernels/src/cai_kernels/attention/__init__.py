"""Attention by the fastest available form, in parts with a log-sum-exp, and over packed sequences.

    out = softmax(scale q kᵀ + mask) v
    lse = log sum exp(scale q kᵀ + mask)

Softmax and sum are over the keys; the mask is -inf where a query does not see a key.
"""

from cai_kernels.attention.choice import AttentionChoice
from cai_kernels.attention.documents import document_attention, document_tail_attention
from cai_kernels.attention.function import attention, explain_attention, varlen_attention
from cai_kernels.attention.last_queries import last_queries_attention
from cai_kernels.attention.packed import why_not_packed
from cai_kernels.attention.partial import attention_backward, attention_with_lse, merge_attention
from cai_kernels.attention.prompt import prompt_attention
from cai_kernels.attention.sinks import sink_attention

__all__ = [
    "AttentionChoice",
    "attention",
    "attention_backward",
    "attention_with_lse",
    "document_attention",
    "document_tail_attention",
    "explain_attention",
    "last_queries_attention",
    "merge_attention",
    "prompt_attention",
    "sink_attention",
    "varlen_attention",
    "why_not_packed",
]
