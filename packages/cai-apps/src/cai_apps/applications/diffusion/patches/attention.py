"""Attention whose queries are those of a strip: over its own keys while those of other strips travel, then over them.

Softmax is put together from parts by their log-sum-exps, as ring attention does (Liu et al., arXiv:2310.01889). So no
rank waits before it has something to do, and keys are never put in one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cai_apps.applications.diffusion.patches.exchange import Exchange
from cai_kernels import attention_with_lse, merge_attention
from cai_mesh.errors import PlanError


def in_parts(attention: nn.Module, name: str, index: int, exchange: Exchange) -> Callable[..., Any]:
    """A forward of an attention of diffusers on tokens of a strip, whose queries see the keys of all strips.

    Args:
        attention: self-attention of the picture's tokens; others (a prompt's) may follow them, alike on all ranks. Its
            processor calls `torch.nn.functional.scaled_dot_product_attention` once, without a mask.
        name: in messages.
        index: of one's own strip.
        exchange: of its keys and values.

    The forward raises `PlanError` where the processor does otherwise.
    """
    whole = attention.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens = hidden_states.shape[1] if hidden_states.dim() == 3 else hidden_states[0, 0].numel()
        with _Parts(name, tokens, index, exchange) as parts:
            out = whole(hidden_states, *args, **kwargs)
        if parts.calls != 1:
            raise PlanError(
                f"the attention {name} works in an unknown way",
                got=f"{parts.calls} calls of scaled_dot_product_attention",
                expected="one",
            )
        return out

    return forward


class _Parts(TorchFunctionMode):
    """Inside, `scaled_dot_product_attention` sees the first `tokens` keys of all strips, and one's own other keys."""

    def __init__(self, name: str, tokens: int, index: int, exchange: Exchange):
        super().__init__()
        self._name, self._tokens, self._index, self._exchange = name, tokens, index, exchange
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if attn_mask is not None or dropout_p or is_causal or enable_gqa or k.shape[2] < self._tokens:
            raise PlanError(
                f"the attention {self._name} cannot be computed in parts",
                cause="it has a mask, dropout or groups of heads, or fewer keys than tokens",
            )
        own = torch.stack([t[:, :, : self._tokens] for t in (k, v)])
        arriving = self._exchange.begin(own)
        out, lse = attention_with_lse(q, k, v, scale=scale)
        others = [part for i, part in enumerate(arriving()) if i != self._index]
        for i, (keys, values) in enumerate(others):
            last = i + 1 == len(others)
            part = attention_with_lse(q, keys, values, scale=scale)
            out, lse = merge_attention(out, lse, *part, dtype=q.dtype if last else None)
        return out
