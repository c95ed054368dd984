import torch

from cai_kernels import AdamWOptions, adamw_steps_


def case(count: int, dtype: torch.dtype, offset: int, grad_scale: float | torch.Tensor) -> None:
    params, exp_avgs, exp_avg_sqs = ([torch.zeros(5000)[offset:] for _ in range(count)] for _ in range(3))
    grads = [torch.zeros(5000, dtype=dtype)[offset:] for _ in range(count)]
    adamw_steps_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        AdamWOptions(),
        steps=[1] * count,
        grad_scale=grad_scale,
        backend="triton",
    )


CASES = [
    lambda n=n, d=d, o=o, s=s: case(n, d, o, s)
    for n in (1, 3)
    for d in (torch.bfloat16, torch.float32)
    for o in (0, 1)
    for s in (0.5, torch.ones(()))
]
