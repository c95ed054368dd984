"""Log-probabilities of targets under a linear layer, for losses that need every one before any gradient is known."""

from __future__ import annotations

import torch

from cai_kernels.backend import Backend
from cai_kernels.cross_entropy.function import check_options
from cai_kernels.cross_entropy.options import ENTROPY, PLAIN, LossOptions
from cai_kernels.linear_cross_entropy import autograd
from cai_kernels.linear_cross_entropy.inputs import CHUNK_BYTES, prepare


def linear_log_probs(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    entropy: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    backend: Backend = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """log softmax(F.linear(x, weight, bias)) at the targets, a chunk of tokens at a time, forward and backward.

    Backward computes a chunk's logits again: four matrix products in all, and memory bounded by the chunk. For a
    temperature, divide x (and bias) by it.

    Args:
        x: [..., D], float32, bfloat16 or float16 (the reference takes float64 too).
        weight: [V, D] in the dtype of x; bias: [V] or None.
        target: [...], int64 or int32. Rows with `ignore_index` give zeros and take no gradient.
        softcap: as in `cross_entropy`.
        entropy: also return the entropy of every row's distribution.
        chunk_bytes: bytes of the logits of a chunk.
        backend: "auto" (Triton on CUDA, else the same in plain torch), "triton" or "reference".

    Returns [...] in float32 (float64 for float64); with `entropy` (log-probabilities, entropies). Differentiable once,
    both of them; one graph under torch.compile. Raises `KernelError` naming the argument that does not fit.
    """
    check_options("none", 0.0, 0.0, softcap)
    inputs = prepare(x, weight, bias, target, backend=backend, chunk_bytes=chunk_bytes)
    loss = LossOptions(ignore_index, softcap=float(softcap or 0.0))
    losses, _, entropies, _ = autograd.linear_scan(
        *inputs.tensors(),
        **loss.arguments(),
        statistic=ENTROPY if entropy else PLAIN,
        **inputs.execution.arguments(),
    )
    if entropy:
        return -losses.view(target.shape), entropies.view(target.shape)
    return -losses.view(target.shape)
