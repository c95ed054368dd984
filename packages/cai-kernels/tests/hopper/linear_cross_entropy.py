import torch

from cai_kernels import linear_cross_entropy, linear_log_probs


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
] + [lambda: log_probs(128256)]
