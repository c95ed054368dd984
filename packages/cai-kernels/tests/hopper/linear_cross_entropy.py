import torch

from cai_kernels import linear_cross_entropy, linear_log_probs
from cai_kernels.linear_cross_entropy import kept


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


def all_kept(vocabulary: int, numbers: list[float]) -> None:
    from cai_kernels.linear_cross_entropy import triton

    tokens, width = 64, 32
    plan = kept.plan(tokens, vocabulary, width)
    gradient = torch.empty(vocabulary, width, dtype=torch.bfloat16)
    rest = torch.empty(tokens, vocabulary - plan.slices * plan.columns, dtype=torch.bfloat16)
    of_rows = torch.zeros(tokens, dtype=torch.int64), torch.ones(()), torch.empty(2, tokens)
    triton.loss_and_gradient_kept(gradient, rest, plan, of_rows, -100, numbers)


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
    lambda: all_kept(128256, [0.0] * 3),
    lambda: all_kept(151936, [0.1, 1e-4, 30.0]),
]
