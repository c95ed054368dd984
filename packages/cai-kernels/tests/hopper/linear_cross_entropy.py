import torch

from cai_kernels import linear_cross_entropy, linear_log_probs
from cai_kernels.cross_entropy.options import LossOptions
from cai_kernels.linear_cross_entropy.slice_plan import plan_slices


def case(dtype: torch.dtype, columns: int, **options) -> None:
    x = torch.zeros(4, 16, dtype=dtype, requires_grad=True)
    weight = torch.zeros(columns, 16, dtype=dtype, requires_grad=True)
    target = torch.zeros(4, dtype=torch.int64)
    linear_cross_entropy(x, weight, target, backend="triton", **options).sum().backward()


def log_probs(columns: int) -> None:
    x = torch.zeros(4, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(columns, 16, dtype=torch.bfloat16)
    values = linear_log_probs(x, weight, torch.zeros(4, dtype=torch.int64), entropy=True, backend="triton")
    (values[0] + values[1]).sum().backward()


def in_slices(vocabulary: int, **options: float) -> None:
    from cai_kernels.linear_cross_entropy import triton

    tokens, width = 64, 32
    plan = plan_slices(tokens, vocabulary, width)
    gradient = torch.empty(vocabulary, width, dtype=torch.bfloat16)
    buffer = torch.empty(tokens, vocabulary - plan.slices * plan.columns, dtype=torch.bfloat16)
    target, out = torch.zeros(tokens, dtype=torch.int64), torch.empty(2, tokens)
    loss = LossOptions(-100, **options)
    triton.loss_and_gradient_sliced(gradient, buffer, plan, target, torch.ones(()), out, loss)


CASES = [
    lambda dtype=dtype, columns=columns, options=options: case(dtype, columns, **options)
    for dtype, columns, options in (
        (torch.bfloat16, 128256, {}),
        (torch.bfloat16, 32000, {"label_smoothing": 0.1}),
        (torch.float32, 128256, {}),
        (torch.float16, 50257, {}),
        (torch.bfloat16, 256000, {"softcap": 30.0, "z_loss": 1e-4}),
        (torch.bfloat16, 151936, {"backward": "split"}),
    )
] + [
    lambda: log_probs(128256),
    lambda: in_slices(128256),
    lambda: in_slices(151936, label_smoothing=0.1, z_loss=1e-4, softcap=30.0),
]
