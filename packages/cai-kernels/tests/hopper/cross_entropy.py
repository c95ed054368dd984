import torch

from cai_kernels import cross_entropy


def case(dtype: torch.dtype, columns: int, **options) -> None:
    logits = torch.zeros(4, columns, dtype=dtype, requires_grad=True)
    target = torch.zeros(4, dtype=torch.int64)
    cross_entropy(logits, target, backend="triton", **options).sum().backward()


CASES = [
    lambda dtype=dtype, columns=columns, options=options: case(dtype, columns, **options)
    for dtype, columns, options in (
        (torch.bfloat16, 128256, {}),
        (torch.bfloat16, 32000, {"reduction": "none"}),
        (torch.bfloat16, 50257, {}),
        (torch.float32, 128256, {}),
        (torch.bfloat16, 256000, {"softcap": 30.0}),
        (torch.bfloat16, 151936, {"label_smoothing": 0.1, "z_loss": 1e-4}),
        (torch.float32, 128256, {"label_smoothing": 0.1}),
        (torch.float32, 64, {"label_smoothing": 0.1}),
        (torch.float32, 1, {"label_smoothing": 0.1, "softcap": 3.0}),
        (torch.bfloat16, 1, {}),
    )
]
