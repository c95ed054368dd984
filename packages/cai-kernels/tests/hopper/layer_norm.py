import torch

from cai_kernels import layer_norm


def case(dtype: torch.dtype, columns: int) -> None:
    x = torch.zeros(64, columns, dtype=dtype, requires_grad=True)
    weight, bias = (torch.zeros(columns, dtype=dtype, requires_grad=True) for _ in range(2))
    layer_norm(x, weight, bias, backend="triton").backward(x.detach())


CASES = [
    lambda dtype=dtype, columns=columns: case(dtype, columns)
    for dtype in (torch.bfloat16, torch.float32)
    for columns in (1600, 2048, 8192, 14336, 16384, 65536)
]
CASES += [lambda c=c: case(torch.float16, c) for c in (8192, 16384)]
CASES += [lambda c=c: case(torch.bfloat16, c) for c in (5120, 6144, 7168)] + [
    lambda: case(torch.float16, 14336)
]
