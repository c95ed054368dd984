import torch

from cai_kernels import pair_bias_attention


def case(dtype: torch.dtype, head: int, length: int) -> None:
    rows, heads = 2, 4
    q, k, v, gate = (
        torch.zeros(1, rows, heads, length, head, dtype=dtype, requires_grad=True) for _ in range(4)
    )
    bias = torch.zeros(1, heads, length, length, dtype=dtype, requires_grad=True)
    mask = torch.zeros(1, rows, length)
    pair_bias_attention(q, k, v, bias, mask, gate, backend="triton").sum().backward()


CASES = [
    lambda dtype=dtype, head=head: case(dtype, head, 256)
    for dtype in (torch.bfloat16, torch.float32)
    for head in (8, 24, 32, 64, 128)
]
