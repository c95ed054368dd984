"""Cases of token_permute, token_unpermute and grouped_matmul, and of a whole layer of experts.

The layer alone, beside the forward of transformers' class, which is "eager" here, and `own_forward` of
cai-tensor-parallel, by which spread experts compute without kernels:

    python benchmarks/kernels/run.py --only experts --ops expert_layer --forms ours,eager --compile none --out FILE
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from case import Case

from cai_kernels import expert_layer, grouped_matmul, token_permute, token_unpermute


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


class Layer(NamedTuple):
    """The sizes of a layer of experts.

    Args:
        tokens, wide: [T, D] of its input.
        inner: columns of one half of an expert's rows.
        choices, experts: experts that a token visits, and all of them.
    """

    tokens: int
    wide: int
    inner: int
    choices: int
    experts: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.wide} inner {self.inner} top {self.choices} of {self.experts}"

    @property
    def flops(self) -> int:
        """Of its products forward; twice as many backward."""
        return 2 * self.tokens * self.choices * self.wide * 3 * self.inner

    def inputs(self, device: torch.device) -> tuple:
        """Tokens, their experts and weights, and the parameters as transformers holds them."""
        bf16: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        x = torch.randn(self.tokens, self.wide, **bf16)
        gate_up = torch.randn(self.experts, 2 * self.inner, self.wide, **bf16).mul_(self.wide**-0.5)
        down = torch.randn(self.experts, self.wide, self.inner, **bf16).mul_(self.inner**-0.5)
        weights = torch.rand(self.tokens, self.choices, device=device)
        ids = routed(self.tokens, self.choices, self.experts, device)
        leaves = [tensor.requires_grad_() for tensor in (x, weights, gate_up, down)]
        return leaves[0], ids, *leaves[1:]


SHAPES = (  # SonicMoE's published one (arXiv:2512.14080), Qwen3-30B-A3B, Mixtral-8x7B
    Layer(32768, 4096, 512, 8, 128),
    Layer(32768, 2048, 768, 8, 128),
    Layer(32768, 4096, 14336, 2, 8),
)


def by_kernels(backend: str) -> Callable:
    def run(
        x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        return expert_layer(x, ids, weights, up, down, backend=backend)  # type: ignore[arg-type]

    return run


@functools.cache
def transformers_layer(experts: int) -> Any:
    """A layer of transformers without parameters, which multiplies by grouped products."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_local_experts": experts}
    config = MixtralConfig(**sizes, experts_implementation="grouped_mm")
    with torch.device("meta"):
        return MixtralExperts(config)


def by_layer(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The forward of transformers' class."""
    layer = transformers_layer(len(down))
    layer.__dict__["_parameters"] = {"gate_up_proj": gate_up, "down_proj": down}
    return type(layer).forward(layer, x, ids, weights)


def by_own_forward(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The same, given one choice a row."""
    from cai_tensor_parallel import own_forward

    layer = transformers_layer(len(down))
    layer.__dict__["_parameters"] = {"gate_up_proj": gate_up, "down_proj": down}
    return own_forward(layer, x, ids, weights, ids.numel())


def layers(tiny: bool) -> Iterator[Case]:
    for layer in (Layer(16, 32, 24, 2, 4),) if tiny else SHAPES:
        yield Case(
            "expert_layer",
            str(layer),
            layer.inputs,
            by_kernels("auto"),
            by_layer,
            forward_flops=layer.flops,
            backward_flops=2 * layer.flops,
            others={"own_forward": by_own_forward} | ({} if tiny else {"triton": by_kernels("triton")}),
        )


def cases(tiny: bool) -> Iterator[Case]:
    yield from layers(tiny)
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
