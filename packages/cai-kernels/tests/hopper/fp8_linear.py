import torch

from cai_kernels import fp8_linear
from cai_kernels.fp8_linear import reference, triton


def case(scaling: str, tokens: int = 32) -> None:
    x = torch.zeros(tokens, 4096, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(256, 4096, dtype=torch.bfloat16, requires_grad=True)
    fp8_linear(x, weight, scaling=scaling, backend="triton").sum().backward()


def product(columns: int) -> None:
    t = torch.zeros(128, columns, dtype=torch.bfloat16)
    a = reference.empty_cast(t, reference.BLOCK, torch.float8_e4m3fn, False)
    for scaling in (reference.BLOCK, reference.SQUARE):
        b = reference.empty_cast(t, scaling, torch.float8_e4m3fn, False)
        triton.block_matmul(a.matrix, a.scale, b.matrix, b.scale, torch.bfloat16)


CASES = [lambda scaling=scaling: case(scaling) for scaling in ("tensor", "row", "block")]
CASES += [lambda: product(8192), lambda: product(4112)]
