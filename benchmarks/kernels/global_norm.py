"""Cases of global_norm: the gradients of a LLaMA, one tensor a parameter."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from case import Case

from cai_kernels import global_norm


def shapes(width: int, hidden: int, layers: int) -> list[tuple[int, ...]]:
    block = [(width, width), (width // 4, width), (width // 4, width), (width, width), (width,), (width,)]
    return [
        shape for _ in range(layers) for shape in [*block, (hidden, width), (hidden, width), (width, hidden)]
    ]


def eager(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors, 2.0, torch.float32)))


def cases(tiny: bool) -> Iterator[Case]:
    for width, hidden, layers in [(32, 64, 2)] if tiny else [(2048, 8192, 16), (4096, 14336, 16)]:
        sizes = shapes(width, hidden, layers)

        def make(device: torch.device, sizes=sizes) -> tuple:
            return tuple(torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in sizes)

        yield Case(
            "global_norm",
            f"{len(sizes)} tensors, {width} wide",
            make,
            ours=lambda *tensors: global_norm(tensors),
            eager=eager,
            forward_bytes=2 * sum(torch.Size(shape).numel() for shape in sizes),
        )
