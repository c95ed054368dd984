import torch

from cai_kernels import gate_add, modulate


def case(dtype: torch.dtype, columns: int) -> None:
    x, residual = (torch.zeros(2, 256, columns, dtype=dtype, requires_grad=True) for _ in range(2))
    chunks = torch.zeros(2, 6 * columns, dtype=dtype, requires_grad=True).chunk(6, 1)
    y = modulate(x, chunks[1], chunks[0], backend="triton")
    gate_add(residual, y, chunks[2], backend="triton").backward(x.detach())


CASES = [
    lambda dtype=dtype, columns=columns: case(dtype, columns)
    for dtype in (torch.bfloat16, torch.float32)
    for columns in (384, 1152, 1536, 2432, 4096)
]
CASES += [lambda: case(torch.float16, 1536)]
