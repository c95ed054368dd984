"""The clipped policy-gradient loss on groups of responses: GRPO and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from cai_kernels.backend import require
from cai_kernels.errors import KernelError
from cai_kernels.preference.checks import FLOATING, alike, known, masked_mean, truth, within
from cai_kernels.preference.sequences import sequence_log_probs


@dataclass(frozen=True)
class GrpoMetrics:
    """Scalars over the tokens that count (0 if there are none); no gradient flows through them.

    Args:
        ratio: mean importance ratio, new over old policy.
        clipped_low: share of tokens whose gradient is cut because the ratio fell below its range (advantage below 0).
        clipped_high: share of tokens whose gradient is cut because it rose above (advantage above 0).
        kl: mean estimate of the divergence from the reference; None without a reference.
    """

    ratio: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor
    kl: torch.Tensor | None


def grpo_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    ref_log_probs: torch.Tensor | None = None,
    beta: float = 0.0,
    clip: tuple[float, float] = (0.2, 0.2),
    importance: Literal["token", "sequence"] = "token",
    normalize: Literal["sequence", "tokens", "constant"] = "sequence",
    constant: float | None = None,
) -> tuple[torch.Tensor, GrpoMetrics]:
    """Group relative policy optimization (Shao et al., arXiv:2402.03300), with the options of its successors.

    A token's loss is -min(r A, clamp(r, 1 - low, 1 + high) A) + beta * kl, with r = exp(log_probs - old_log_probs) and
    kl = exp(d) - d - 1 for d = ref_log_probs - log_probs.

    Args:
        log_probs: [N, T], of the responses' tokens under the policy. float32, float64, bfloat16 or float16.
        old_log_probs: [N, T], under the policy that wrote them; None: this one, so that r is 1. No gradient flows in.
        advantages: [N], or [N, T] of tokens; no gradient flows in.
        mask: bool [N, T], the tokens that count; all by default. What lies outside is not used.
        ref_log_probs: [N, T], under the reference model; no gradient flows in. With beta 0 its kl is only reported.
        beta: weight of the kl, 0 or more.
        clip: (low, high), 0 or more each: equal in GRPO, a larger high in DAPO (Yu et al., arXiv:2503.14476).
        importance: "token", or "sequence": r is exp of the mean over a sequence's tokens, the same for all of them
            (GSPO, Zheng et al., arXiv:2507.18071, where clips are about 3e-4).
        normalize: "sequence": mean over the tokens of a sequence, then over sequences; "tokens": mean over all tokens
            (DAPO); "constant": sum over the tokens of a sequence over `constant`, then mean over sequences (Dr. GRPO,
            Liu et al., arXiv:2503.20783, where it is the longest response allowed).
        constant: more than 0, with normalize "constant" alone.

    Returns (loss, metrics): a scalar in float32 (float64 if log-probabilities are); 0 without tokens. Raises
    `KernelError` naming the argument that does not fit.
    """
    _check_options(beta, clip, importance, normalize, constant)
    if beta and ref_log_probs is None:
        raise KernelError("beta weighs a divergence from nothing", got=beta, fix="give ref_log_probs")
    old = log_probs if old_log_probs is None else old_log_probs
    ref = log_probs if ref_log_probs is None else ref_log_probs
    new, old, ref = alike("N, T", log_probs=log_probs, old_log_probs=old.detach(), ref_log_probs=ref.detach())
    if mask is None:
        mask = torch.ones_like(new, dtype=torch.bool)
    truth("mask", mask, "log_probs", new)
    gain = torch.where(mask, _advantages(advantages, new), 0.0)
    change = torch.where(mask, new - old, 0.0)
    if importance == "sequence":
        change = sequence_log_probs(change, mask, average=True)[:, None].expand_as(change)
    ratio = change.exp()
    low, high = clip
    losses = -torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)
    kl = None
    if ref_log_probs is not None:
        apart = torch.where(mask, ref - new, 0.0)
        kl = torch.expm1(apart) - apart
        losses = losses + beta * kl if beta else losses
    metrics = _metrics(ratio, gain, mask, clip, kl)
    return _normalized(losses, mask, normalize, constant), metrics


def _check_options(
    beta: float, clip: tuple[float, float], importance: str, normalize: str, constant: float | None
) -> None:
    within("beta", beta, 0)
    if len(clip) != 2:
        raise KernelError("clip is not a pair", got=clip, expected="(low, high)")
    for name, value in zip(("clip's low", "clip's high"), clip, strict=True):
        within(name, value, 0)
    known("importance", importance, ("token", "sequence"))
    known("normalize", normalize, ("sequence", "tokens", "constant"))
    if (constant is not None) != (normalize == "constant"):
        raise KernelError(
            'constant and normalize="constant" go together',
            got=f"constant={constant}, normalize={normalize!r}",
        )
    if constant is not None:
        within("constant", constant, 0, open_=True)


def _advantages(advantages: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """[N, 1] or [N, T], without gradient, in the dtype of the loss."""
    require("advantages", advantages, dtypes=FLOATING, like=new)
    if advantages.shape not in (new.shape[:1], new.shape):
        raise KernelError(
            "advantages do not fit log_probs",
            got=tuple(advantages.shape),
            expected=f"{tuple(new.shape[:1])} or {tuple(new.shape)}",
        )
    gain = advantages.detach().to(new.dtype)
    return gain[:, None] if gain.dim() == 1 else gain


@torch.no_grad()
def _metrics(
    ratio: torch.Tensor,
    gain: torch.Tensor,
    mask: torch.Tensor,
    clip: tuple[float, float],
    kl: torch.Tensor | None,
) -> GrpoMetrics:
    low, high = clip
    clipped_low, clipped_high = (ratio < 1 - low) & (gain < 0), (ratio > 1 + high) & (gain > 0)
    numbers = [masked_mean(value.to(ratio.dtype), mask) for value in (ratio, clipped_low, clipped_high)]
    return GrpoMetrics(*numbers, None if kl is None else masked_mean(kl, mask))


def _normalized(
    losses: torch.Tensor, mask: torch.Tensor, normalize: str, constant: float | None
) -> torch.Tensor:
    """One number from losses [N, T] that are 0 outside the mask."""
    if normalize == "tokens":
        return losses.sum() / mask.sum().clamp_min(1)
    divisor = mask.sum(-1).clamp_min(1) if constant is None else constant
    return (losses.sum(-1) / divisor).sum() / max(mask.shape[0], 1)
