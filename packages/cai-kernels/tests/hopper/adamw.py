import torch

from cai_kernels import AdamWOptions, adamw_step_


def case(dtype: torch.dtype, offset: int, grad_scale: float | torch.Tensor) -> None:
    tensors = [torch.zeros(5000)[offset:] for _ in range(3)]
    grad = torch.zeros(5000, dtype=dtype)[offset:]
    param, exp_avg, exp_avg_sq = tensors
    adamw_step_(
        param, grad, exp_avg, exp_avg_sq, AdamWOptions(), step=1, grad_scale=grad_scale, backend="triton"
    )


CASES = [
    lambda d=d, o=o, s=s: case(d, o, s)
    for d in (torch.bfloat16, torch.float32)
    for o in (0, 1)
    for s in (0.5, torch.ones(()))
]
