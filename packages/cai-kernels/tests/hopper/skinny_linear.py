import torch

from cai_kernels import skinny_linears


def case(dtype: torch.dtype, rows: int, outputs: tuple[int, ...]) -> None:
    weights = [torch.zeros(count, 4096, dtype=dtype) for count in outputs]
    skinny_linears(torch.zeros(rows, 4096, dtype=dtype), weights, backend="triton")


CASES = [
    lambda dtype=dtype, rows=rows, outputs=outputs: case(dtype, rows, outputs)
    for dtype in (torch.bfloat16, torch.float16)
    for rows in (1, 8, 64)
    for outputs in ((4096, 1024, 1024), (14336,))
]
