import torch

from cai_kernels import grouped_matmul


def case(dtype: torch.dtype, rows: int, inner: int, columns: int, held_transposed: bool) -> None:
    experts = min(8, rows)
    x = torch.zeros(rows, inner, dtype=dtype, requires_grad=True)
    shape = (experts, columns, inner) if held_transposed else (experts, inner, columns)
    weight = torch.zeros(shape, dtype=dtype, requires_grad=True)
    offsets = torch.arange(experts + 1, dtype=torch.int32) * (rows // experts)
    used = weight.transpose(1, 2) if held_transposed else weight
    grouped_matmul(x, used, offsets, backend="triton").sum().backward()


CASES = [
    lambda dtype=dtype, rows=rows, held=held: case(dtype, rows, 2048, 768, held)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for rows in (64, 384, 2048)
    for held in (False, True)
] + [
    lambda sizes=sizes, held=held: case(torch.bfloat16, *sizes, held)  # sizes of one are compiled in
    for sizes in ((1, 64, 128), (8, 64, 1), (8, 1, 64), (1, 1, 1))
    for held in (False, True)
]
