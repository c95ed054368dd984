import torch

from cai_kernels import dequantize, quantize, quantized_linear


def case(kind: str, dtype: torch.dtype, rows: int) -> None:
    codes, scales = quantize(torch.zeros(256, 4096), kind)
    x = torch.zeros(rows, 4096, dtype=dtype)
    quantized_linear(x, codes, scales, torch.zeros(256), kind=kind, backend="triton")
    dequantize(codes, scales, kind, dtype, backend="triton")


KINDS, ROWS = (
    ("nf4", "int8"),
    {torch.bfloat16: (1, 17, 64, 256), torch.float16: (16,), torch.float32: (1, 32)},
)
CASES = [
    lambda kind=kind, dtype=dtype, rows=rows: case(kind, dtype, rows)
    for kind in KINDS
    for dtype in ROWS
    for rows in ROWS[dtype]
]
