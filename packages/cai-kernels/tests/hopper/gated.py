import torch

from cai_kernels import geglu, sigmoid_gate, swiglu


def case(fn, dtype: torch.dtype, columns: int) -> None:
    gate, up = (torch.zeros(4, columns, dtype=dtype, requires_grad=True) for _ in range(2))
    fn(gate, up, backend="triton").backward(up.detach())


def packed(dtype: torch.dtype) -> None:
    both = torch.zeros(4, 2 * 14336, dtype=dtype, requires_grad=True)
    swiglu(both, backend="triton").backward(both.detach()[:, :14336])


CASES = [
    lambda fn=fn, dtype=dtype: case(fn, dtype, 14336)
    for fn in (swiglu, geglu, sigmoid_gate)
    for dtype in (torch.bfloat16, torch.float32)
]
CASES += [
    lambda: case(lambda *a, backend: geglu(*a, approximate="none", backend=backend), torch.bfloat16, 14336),
    lambda: packed(torch.bfloat16),
]
