import torch

from cai_kernels import paged_append_, paged_attention


def case(dtype: torch.dtype, heads: int, head: int) -> None:
    caches = [torch.zeros(8, 16, 8, head, dtype=dtype) for _ in range(2)]
    q, rows = torch.zeros(2, heads, head, dtype=dtype), torch.zeros(2, 8, head, dtype=dtype)
    tables = torch.zeros(2, 4, dtype=torch.int32)
    paged_append_(*caches, rows, rows, torch.zeros(2, dtype=torch.int64), backend="triton")
    paged_attention(q, *caches, tables, torch.ones(2, dtype=torch.int32), backend="triton")


CASES = [
    lambda dtype=dtype, heads=heads, head=head: case(dtype, heads, head)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for heads, head in ((32, 128), (8, 64), (8, 256))
]
