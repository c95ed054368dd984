import torch

from cai_kernels import sample


def case(dtype: torch.dtype, columns: int) -> None:
    logits = torch.zeros(8, columns, dtype=dtype)
    each = torch.ones(8)
    seeds = torch.zeros(8, dtype=torch.int64)
    sample(logits, seed=0, backend="triton")
    sample(logits, temperature=0.7, top_k=50, top_p=0.9, min_p=0.02, seed=0, backend="triton")
    limits = {"temperature": each, "top_k": torch.ones(8, dtype=torch.int32), "top_p": each, "min_p": each}
    penalty = {"repetition_penalty": each, "seen": logits > 0}
    sample(logits, **limits, **penalty, seed=seeds, backend="triton")


CASES = [
    lambda dtype=dtype, columns=columns: case(dtype, columns)
    for dtype in (torch.bfloat16, torch.float32)
    for columns in (50257, 128256)
]
