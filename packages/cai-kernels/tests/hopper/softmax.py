import torch

from cai_kernels import softmax


def plain(dtype: torch.dtype, columns: int, **options) -> None:
    x = torch.zeros(64, columns, dtype=dtype, requires_grad=True)
    softmax(x, backend="triton", **options).backward(x.detach())


def pairs(dtype: torch.dtype, length: int, both: bool = False) -> None:
    x = torch.zeros(1, 8, 4, length, length, dtype=dtype, requires_grad=True)
    mask = torch.zeros(1, 8, 1, 1, length, dtype=dtype, requires_grad=both)
    pair = torch.zeros(1, 1, 4, length, length, dtype=dtype, requires_grad=True)
    softmax(x, bias=(mask, pair), scale=0.2, backend="triton").backward(x.detach())


CASES = [lambda d=d, c=c: plain(d, c) for d in (torch.bfloat16, torch.float32) for c in (4096, 16384, 65536)]
CASES += [
    lambda: pairs(torch.bfloat16, 256),
    lambda: pairs(torch.bfloat16, 384, True),
    lambda: pairs(torch.float32, 384),
    lambda: pairs(torch.bfloat16, 500),
    lambda: pairs(torch.bfloat16, 768),
    lambda: pairs(torch.float32, 300),
    lambda: pairs(torch.float32, 512),
    lambda: plain(torch.bfloat16, 8192, bias=torch.zeros(8192, requires_grad=True)),
    lambda: plain(torch.float32, 8192, bias=torch.zeros(8192, requires_grad=True)),
    lambda: plain(torch.bfloat16, 8192, mask=torch.ones(64, 8192, dtype=torch.bool)),
    lambda: plain(torch.bfloat16, 2048, causal=True),
]
