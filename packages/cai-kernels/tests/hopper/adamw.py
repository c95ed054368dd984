import torch

from cai_kernels import AdamWOptions, adamw_steps_


def case(count: int, dtype: torch.dtype, offset: int, grad_scale: float | torch.Tensor, halves: bool) -> None:
    def zeros(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [torch.zeros(5000, dtype=dtype)[offset:] for _ in range(count)]

    adamw_steps_(
        zeros(torch.bfloat16 if halves else torch.float32),
        zeros(dtype),
        zeros(),
        zeros(),
        AdamWOptions(),
        steps=[1] * count,
        grad_scale=grad_scale,
        lows=zeros(torch.int16) if halves else None,
        backend="triton",
    )


CASES = [
    lambda n=n, d=d, o=o, s=s, h=h: case(n, d, o, s, h)
    for n in (1, 3)
    for d in (torch.bfloat16, torch.float32)
    for o in (0, 1)
    for s in (0.5, torch.ones(()))
    for h in (False, True)
]
