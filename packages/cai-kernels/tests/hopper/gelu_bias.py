import torch

from cai_kernels import gelu_bias


def case(dtype: torch.dtype, columns: int, approximate: str) -> None:
    x = torch.zeros(256, columns, dtype=dtype, requires_grad=True)
    bias = torch.zeros(columns, dtype=dtype, requires_grad=True)
    gelu_bias(x, bias, approximate=approximate, backend="triton").backward(x.detach())


CASES = [
    lambda dtype=dtype, form=form: case(dtype, 8192, form)
    for dtype in (torch.bfloat16, torch.float32)
    for form in ("tanh", "none")
]
