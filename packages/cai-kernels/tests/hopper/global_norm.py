import math

import torch

from cai_kernels import global_norm


def case(dtype: torch.dtype, p: float) -> None:
    global_norm([torch.zeros(100, dtype=dtype), torch.zeros(30000, dtype=dtype)], p, backend="triton")


CASES = [lambda d=d, p=p: case(d, p) for d in (torch.bfloat16, torch.float32) for p in (2.0, 3.0, math.inf)]
