import torch

from cai_kernels import token_permute, token_unpermute


def case(dtype: torch.dtype, columns: int, choices: int, experts: int) -> None:
    x = torch.zeros(4, columns, dtype=dtype, requires_grad=True)
    ids = torch.zeros(4, choices, dtype=torch.int64)
    weights = torch.zeros(4, choices, requires_grad=True)
    permuted, _, index = token_permute(x, ids, experts, backend="triton")
    token_unpermute(permuted, index, weights, backend="triton").sum().backward()


CASES = [
    lambda dtype=dtype, shape=shape: case(dtype, *shape)
    for dtype in (torch.bfloat16, torch.float32)
    for shape in ((2048, 8, 128), (4096, 2, 8), (7168, 8, 256), (16384, 4, 64))
]
