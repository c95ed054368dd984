"""Losses of routers on plain tensors.

Both are of all routers and tokens of one forward, as transformers has them: sums over layers come first, and the loss
is of the sums. So they can be added up along the layers, wherever those are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def sums_of(logits: Tensor, choice: Tensor, weights: Tensor | None = None, *, squares: bool = True) -> Tensor:
    """Return what both losses need of a router, summed over tokens.

    Args:
        logits: [tokens, experts], any floating dtype.
        choice: experts that each token visits, int64 [tokens, visited]; those from `experts` on are dropped.
        weights: the weight of each token, [tokens], 0 for what fills a row; None: 1.
        squares: whether the z loss is needed; its sum is 0 otherwise.

    Returns [2 * experts + 2], float32 or wider: the probabilities of each expert, the squares of the logarithm of the
    sum of exponentials, and without gradients the tokens of each expert and all tokens.
    """
    wide = _wide(logits)
    probabilities = wide.softmax(-1)
    square = wide.logsumexp(-1).square() if squares else None
    if weights is not None:
        weights = weights.to(wide.dtype)
        probabilities = probabilities * weights[:, None]
        square = None if square is None else square * weights
    loads = loads_of(choice, logits.shape[-1], weights, wide.dtype)
    tokens = wide.new_full((1,), len(logits)) if weights is None else weights.sum()[None]
    total = wide.new_zeros(1) if square is None else square.sum()[None]
    return torch.cat([probabilities.sum(0), total, loads, tokens])


def loads_of(choice: Tensor, experts: int, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the tokens that each expert is given, [experts]; nobody waits for the device.

    Args:
        choice: experts that each token visits, int64 [tokens, visited].
        experts: the number of experts.
        weights: the weight of each token, [tokens]; None: 1.
        dtype: the dtype of the counts.
    """
    present = ((choice >= 0) & (choice < experts)).to(dtype)
    if weights is not None:
        present = present * weights[:, None].to(dtype)
    counts = torch.zeros(experts, dtype=dtype, device=choice.device)
    return counts.scatter_add_(0, choice.clamp(0, experts - 1).flatten().long(), present.flatten())


def balance_loss(sums: Tensor) -> Tensor:
    """Return the load-balancing loss of Switch Transformers (arXiv:2101.03961, equations 4 to 6), a scalar.

    It is E times the dot product of the share of tokens of each expert, which sum to the experts that a token visits,
    and of its mean probability; balanced it is that number.

    Args:
        sums: those of `sums_of`, added up over layers, [2 * experts + 2].
    """
    experts = (len(sums) - 2) // 2
    probabilities, _, loads, tokens = sums.split([experts, 1, experts, 1])
    tokens = tokens.detach().clamp_min(1)
    return experts * torch.dot(probabilities / tokens, loads.detach() / tokens)


def z_loss(sums: Tensor) -> Tensor:
    """Return the router z loss of ST-MoE (arXiv:2202.08906, equation 5), a mean over tokens and layers, a scalar.

    Args:
        sums: as for `balance_loss`.
    """
    experts = (len(sums) - 2) // 2
    return sums[experts] / sums[-1].detach().clamp_min(1)


@torch.no_grad()
def entropy(logits: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the entropy of each token's probabilities in nats, summed over tokens, a scalar.

    Args:
        logits: [tokens, experts].
        weights: the weight of each token, [tokens]; None: 1.
    """
    logs = F.log_softmax(_wide(logits), -1)
    of_tokens = -(logs.exp() * logs).sum(-1)
    return of_tokens.sum() if weights is None else (of_tokens * weights.to(of_tokens.dtype)).sum()


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
