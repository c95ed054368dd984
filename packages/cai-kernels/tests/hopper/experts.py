import torch

from cai_kernels.experts.triton import expert_gate, expert_gate_backward, sums_by_expert


def case(dtype: torch.dtype, kind: str, inner: int, biased: bool) -> None:
    rows, experts = 32, 8
    hidden, by_row = torch.zeros(rows, 2 * inner, dtype=dtype), torch.zeros(rows)
    bias = torch.zeros(experts, 2 * inner, dtype=dtype) if biased else None
    expert = torch.zeros(rows, dtype=torch.int32) if biased else None
    options = (kind, kind == "clamped", 1.702, 7.0)
    expert_gate(hidden, by_row, bias, expert, *options)
    expert_gate_backward(torch.zeros(rows, inner, dtype=dtype), hidden, by_row, bias, expert, *options)
    sums_by_expert(hidden, torch.arange(experts + 1, dtype=torch.int32) * (rows // experts))


CASES = [
    lambda kind=kind, biased=biased: case(torch.bfloat16, kind, 512, biased)
    for kind in ("silu", "gelu", "gelu_tanh", "clamped")
    for biased in (False, True)
] + [
    lambda dtype=dtype, inner=inner: case(dtype, "clamped", inner, True)
    for dtype in (torch.float32, torch.float16)
    for inner in (1, 24, 1024)
]
