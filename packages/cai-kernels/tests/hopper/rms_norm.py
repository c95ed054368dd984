import torch

from cai_kernels import rms_norm


def case(dtype: torch.dtype, columns: int) -> None:
    x = torch.zeros(4, columns, dtype=dtype, requires_grad=True)
    weight = torch.zeros(columns, dtype=dtype, requires_grad=True)
    rms_norm(x, weight, backend="triton").sum().backward()


CASES = [
    lambda dtype=dtype, columns=columns: case(dtype, columns)
    for dtype in (torch.bfloat16, torch.float32)
    for columns in (2048, 8192, 16384)
]
