"""The choice of the form of attention, and its reasons: shapes, dtypes and the device, before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cai_kernels import backend as forms

AttentionBackend = Literal[
    "auto", "cudnn", "flash", "efficient", "math", "flash_window", "triton", "reference"
]
SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AttentionChoice:
    """The form of attention that runs and the reason.

    Attributes:
        backend: "cudnn", "flash", "efficient" or "math" of torch's scaled_dot_product_attention; "flash_window",
            torch's flash operator called with a window; "triton" or "reference" of this package.
        reason: one sentence.
    """

    backend: str
    reason: str


@dataclass(frozen=True)
class Question:
    """The arguments besides q, k and v that the choice depends on."""

    mask: torch.Tensor | None = None
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0


def order(device: torch.device) -> list[SDPBackend]:
    """torch's backends, fastest first: cuDNN leads from Hopper on (measured 1.8 times flash's rate on an H200)."""
    newer = device.type == "cuda" and forms.capability(device) >= (9, 0)
    names = ("cudnn", "flash", "efficient", "math") if newer else ("flash", "efficient", "cudnn", "math")
    return [SDPA[name] for name in names]


def needs_mask(question: Question) -> bool:
    """Whether causality or a window has to be folded into a mask for torch's operators."""
    return question.window is not None or (question.mask is not None and question.causal)


def why_not_flash(q: torch.Tensor) -> str | None:
    """The reason why torch's flash operator cannot take q's device, dtype or head dim, or None."""
    if q.device.type != "cuda":
        return f"tensors are on {q.device.type}"
    if q.dtype not in _HALF:
        return f"dtype {q.dtype}; flash takes bfloat16 and float16"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"head dim {q.shape[-1]}; flash takes multiples of 8 up to 256"
    return None


def why_not_ours(q: torch.Tensor, v: torch.Tensor, question: Question) -> str | None:
    """The reason why the Triton attention cannot take the arguments, or None."""
    if (reason := forms.why_not_triton(q.device)) is not None:
        return reason
    if question.mask is not None:
        return "a mask is given; the Triton attention takes causal and window"
    if question.dropout:
        return "dropout is given; the Triton attention has none"
    if q.dtype == torch.float64:
        return "dtype float64"
    if q.shape[-1] > 256 or v.shape[-1] != q.shape[-1]:
        return f"head dims {q.shape[-1]} and {v.shape[-1]}; the Triton attention takes equal ones up to 256"
    return None


def decide(q: torch.Tensor, v: torch.Tensor, question: Question) -> AttentionChoice:
    """The form that "auto" takes; "sdpa" where torch chooses among its own operators."""
    on_gpu = q.device.type == "cuda"
    if question.softcap is not None:
        reason = why_not_ours(q, v, question) if on_gpu else f"tensors are on {q.device.type}"
        if reason is None:
            return AttentionChoice("triton", "torch's operators have no soft cap")
        return AttentionChoice(
            "reference", f"torch's operators have no soft cap, and Triton does not run: {reason}"
        )
    if question.window is not None and question.mask is None and on_gpu:
        if why_not_flash(q) is None and v.shape[-1] == q.shape[-1]:
            return AttentionChoice("flash_window", "flash skips the blocks outside a window")
        if why_not_ours(q, v, question) is None:
            return AttentionChoice("triton", f"flash does not take the window: {why_not_flash(q)}")
    folded = " with causality or window folded into a mask" if needs_mask(question) else ""
    return AttentionChoice("sdpa", f"torch's first operator that takes these arguments{folded}")


def torchs_choice(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scale: float,
    dropout: float,
    backends: list[SDPBackend],
) -> str | None:
    """The name of the operator torch takes among `backends`, or None when none takes the arguments."""
    try:
        with sdpa_kernel(backends, set_priority=True):
            backend_number = torch._fused_sdp_choice(
                q, k, v, mask, dropout, causal, scale=scale, enable_gqa=q.shape[-3] != k.shape[-3]
            )
    except RuntimeError:  # torch raises where none of the backends takes the arguments
        return None
    name_by_number = {int(backend): name for name, backend in SDPA.items()}
    return name_by_number.get(backend_number)
