import torch

from cai_kernels import rope


def case(dtype: torch.dtype, heads: tuple[int, int], size: int = 128, width: int = 128, **options) -> None:
    q, k = (torch.zeros(1, 8, n, size, dtype=dtype).transpose(1, 2).requires_grad_() for n in heads)
    table = torch.zeros(8, width, dtype=dtype)
    outputs = rope(q, k, table, table, backend="triton", **options)
    torch.autograd.backward(outputs, [o.detach() for o in outputs])


CASES = [
    lambda: case(torch.bfloat16, (32, 8)),
    lambda: case(torch.float32, (32, 8)),
    lambda: case(torch.bfloat16, (64, 8)),
    lambda: case(torch.bfloat16, (32, 8), position_ids=torch.arange(8)),
    lambda: case(torch.bfloat16, (32, 8), interleaved=True),
    lambda: case(torch.bfloat16, (32, 2), width=32, rotary_dim=64, interleaved=True),
    lambda: case(torch.bfloat16, (32, 32), size=96, width=48),
]
