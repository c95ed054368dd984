import torch

from cai_kernels import add_rms_norm


def case(dtype: torch.dtype, columns: int) -> None:
    x, residual = (torch.zeros(64, columns, dtype=dtype, requires_grad=True) for _ in range(2))
    weight = torch.zeros(columns, dtype=dtype, requires_grad=True)
    outputs = add_rms_norm(x, residual, weight, backend="triton")
    torch.autograd.backward(outputs, [x.detach(), x.detach()])


CASES = [
    lambda dtype=dtype, columns=columns: case(dtype, columns)
    for dtype in (torch.bfloat16, torch.float32)
    for columns in (2048, 4096, 5120, 8192, 14336, 16384, 65536)
]
