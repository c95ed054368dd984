"""Preference losses from hidden states: DPO over a policy and a reference head, GRPO on the policy's tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from case import Case
from torch.nn import functional as F

from cai_kernels import dpo_loss, grpo_loss, linear_log_probs, linear_sequence_log_probs


def dpo(x, weight, target, ref_x, ref_weight):
    with torch.no_grad():
        ref = linear_sequence_log_probs(ref_x, ref_weight, target)
    return dpo_loss(*linear_sequence_log_probs(x, weight, target).chunk(2), *ref.chunk(2))[0]


def plain(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logs = F.linear(x, weight).float().log_softmax(-1)
    return logs.gather(-1, target[..., None]).squeeze(-1)


def eager_dpo(x, weight, target, ref_x, ref_weight):
    with torch.no_grad():
        ref = plain(ref_x, ref_weight, target).sum(-1)
    chosen, rejected = (plain(x, weight, target).sum(-1) - ref).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def liger_dpo():
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

    loss = LigerFusedLinearDPOLoss(beta=0.1, use_ref_model=True)

    def call(x, weight, target, ref_x, ref_weight):
        return loss(weight, x, target, ref_input=ref_x, ref_weight=ref_weight)[0]

    return call


def grpo(x, weight, target, old, advantages):
    log_probs = linear_log_probs(x, weight, target)
    assert isinstance(log_probs, torch.Tensor)
    return grpo_loss(log_probs, old, advantages, normalize="tokens")[0]


def eager_grpo(x, weight, target, old, advantages):
    ratio, gain = (plain(x, weight, target) - old).exp(), advantages[:, None]
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


def cases(tiny: bool) -> Iterator[Case]:
    sizes = [(4, 6, 8, 64)] if tiny else [(8, 1024, 4096, 128256), (16, 1024, 2048, 128256)]
    for sequences, tokens, width, vocab in sizes:
        shape = (sequences, tokens)

        def bf16(device: torch.device, *dims: int) -> torch.Tensor:
            return torch.randn(*dims, device=device, dtype=torch.bfloat16) / dims[-1] ** 0.5

        def policy(device: torch.device, shape=shape, width: int = width, vocab: int = vocab) -> tuple:
            x, weight = bf16(device, *shape, width), bf16(device, vocab, width)
            return x.requires_grad_(), weight.requires_grad_(), torch.randint(0, vocab, shape, device=device)

        def pairs(device: torch.device, policy=policy, shape=shape, width: int = width, vocab: int = vocab):
            return *policy(device), bf16(device, *shape, width), bf16(device, vocab, width)

        def group(device: torch.device, policy=policy, shape=shape) -> tuple:
            x, weight, target = policy(device)
            with torch.no_grad():
                old = linear_log_probs(x, weight, target)
            assert isinstance(old, torch.Tensor)
            return x, weight, target, old + 0.1 * torch.randn_like(old), torch.randn(shape[0], device=device)

        label, product = f"{sequences}x{tokens}x{width}x{vocab}", 2 * sequences * tokens * width * vocab
        flops = {"forward_flops": 2 * product, "backward_flops": 2 * product}
        yield Case("dpo_loss", label, pairs, ours=dpo, eager=eager_dpo, liger=liger_dpo, **flops)
        flops["forward_flops"] = product
        yield Case("grpo_loss", label, group, ours=grpo, eager=eager_grpo, **flops)
