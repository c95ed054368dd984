"""Cases of token_permute, token_unpermute and grouped_matmul, at the shapes of Mixtral and Qwen3-MoE layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from case import Case

from cai_kernels import grouped_matmul, token_permute, token_unpermute


def routed(tokens: int, choices: int, experts: int, device: torch.device) -> torch.Tensor:
    """Distinct random experts for every token."""
    return torch.rand(tokens, experts, device=device).topk(choices).indices


def make_permute(tokens: int, columns: int, choices: int, experts: int) -> Callable:
    def inputs(device: torch.device) -> tuple:
        x = torch.randn(tokens, columns, device=device, dtype=torch.bfloat16, requires_grad=True)
        return x, routed(tokens, choices, experts, device), experts

    return inputs


def eager_permute(x: torch.Tensor, ids: torch.Tensor, _experts: int) -> torch.Tensor:
    return x[torch.argsort(ids.reshape(-1), stable=True) // ids.shape[1]]


def make_unpermute(tokens: int, columns: int, choices: int, experts: int) -> Callable:
    def inputs(device: torch.device) -> tuple:
        y = torch.randn(tokens * choices, columns, device=device, dtype=torch.bfloat16, requires_grad=True)
        ids = routed(tokens, choices, experts, device)
        index = token_permute(torch.empty(tokens, 8, device=device), ids, experts)[2]
        return y, index, torch.rand(tokens, choices, device=device, requires_grad=True)

    return inputs


def eager_unpermute(y: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (y[index.long()] * weights[..., None]).sum(1).to(y.dtype)


def make_grouped(rows: int, inner: int, columns: int, experts: int) -> Callable:
    def inputs(device: torch.device) -> tuple:
        x = torch.randn(rows, inner, device=device, dtype=torch.bfloat16, requires_grad=True)
        held = torch.randn(experts, columns, inner, device=device, dtype=torch.bfloat16) * inner**-0.5
        shares = torch.rand(experts - 1, generator=torch.Generator().manual_seed(0)).sort().values * rows
        offsets = torch.tensor([0, *shares.int().tolist(), rows], dtype=torch.int32, device=device)
        return x, held.requires_grad_(), offsets, offsets.tolist()

    return inputs


def ours_grouped(backend: str) -> Callable:
    def run(x: torch.Tensor, held: torch.Tensor, offsets: torch.Tensor, _bounds: list[int]) -> torch.Tensor:
        return grouped_matmul(x, held.transpose(1, 2), offsets, backend=backend)

    return run


def eager_grouped(
    x: torch.Tensor, held: torch.Tensor, _offsets: torch.Tensor, bounds: list[int]
) -> torch.Tensor:
    return torch.cat([x[a:b] @ held[e].t() for e, (a, b) in enumerate(itertools.pairwise(bounds))])


def cases(tiny: bool) -> Iterator[Case]:
    sizes = [(16, 32, 2, 4)] if tiny else [(16384, 4096, 2, 8), (16384, 2048, 8, 128), (8192, 7168, 8, 256)]
    for tokens, columns, choices, experts in sizes:
        shape, row = f"{tokens}x{columns} top {choices} of {experts}", 2 * columns * tokens
        both = (1 + choices) * row
        yield Case(
            "token_permute",
            shape,
            make_permute(tokens, columns, choices, experts),
            lambda x, ids, experts: token_permute(x, ids, experts)[0],
            eager_permute,
            None,
            both,
            both,
        )
        yield Case(
            "token_unpermute",
            shape,
            make_unpermute(tokens, columns, choices, experts),
            token_unpermute,
            eager_unpermute,
            None,
            both,
            both + choices * row,
        )
    products = [(64, 32, 48, 4)] if tiny else [(32768, 4096, 14336, 8), (65536, 2048, 768, 128)]
    for rows, inner, columns, experts in products:
        flops = 2 * rows * inner * columns
        for backend in ("auto",) if tiny else ("auto", "triton"):
            yield Case(
                f"grouped_matmul {backend}",
                f"{rows}x{inner}x{columns} of {experts}",
                make_grouped(rows, inner, columns, experts),
                ours_grouped(backend),
                eager_grouped,
                forward_flops=flops,
                backward_flops=2 * flops,
            )
