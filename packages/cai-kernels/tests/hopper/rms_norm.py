import torch

from cai_kernels import rms_norm


def case(dtype: torch.dtype, columns: int, casting: str = "llama", rows: int = 64) -> None:
    x = torch.zeros(rows, columns, dtype=dtype, requires_grad=True)
    weight = torch.zeros(columns, dtype=dtype, requires_grad=True)
    rms_norm(x, weight, casting=casting, backend="triton").backward(x.detach())


CASES = [
    lambda dtype=dtype, columns=columns: case(dtype, columns)
    for dtype in (torch.bfloat16, torch.float32)
    for columns in (128, 2048, 4096, 8192, 16384, 65536)
]
CASES += [lambda: case(torch.bfloat16, 3072, "gemma"), lambda: case(torch.bfloat16, 14336)]
CASES += [lambda: case(torch.bfloat16, 5120), lambda: case(torch.float16, 14336)]
