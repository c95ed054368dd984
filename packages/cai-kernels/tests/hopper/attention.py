import torch

from cai_kernels import attention, varlen_attention


def case(dtype: torch.dtype, head: int, causal: bool, window: int | None, softcap: float | None) -> None:
    q = torch.zeros(1, 4, 256, head, dtype=dtype, requires_grad=True)
    k, v = (torch.zeros(1, 2, 256, head, dtype=dtype, requires_grad=True) for _ in range(2))
    form = {"causal": causal, "window": window, "softcap": softcap}
    attention(q, k, v, backend="triton", **form).sum().backward()


def packed(dtype: torch.dtype, head: int) -> None:
    q = torch.zeros(256, 4, head, dtype=dtype, requires_grad=True)
    k, v = (torch.zeros(256, 2, head, dtype=dtype, requires_grad=True) for _ in range(2))
    starts = torch.tensor([0, 100, 256], dtype=torch.int32)
    varlen_attention(q, k, v, starts, causal=True, backend="triton").sum().backward()


CASES = [
    *(
        lambda dtype=dtype, head=head: case(dtype, head, True, 128, 30.0)
        for dtype, heads in ((torch.bfloat16, (64, 128, 256)), (torch.float32, (64, 128, 256)))
        for head in heads
    ),
    *(lambda head=head: packed(torch.float32, head) for head in (64, 128)),
    lambda: case(torch.bfloat16, 128, False, None, None),
]
