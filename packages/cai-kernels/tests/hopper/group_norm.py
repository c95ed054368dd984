import torch

from cai_kernels import group_norm


def case(dtype: torch.dtype, channels: int, side: int, last: bool) -> None:
    x = torch.zeros(1, channels, side, side, dtype=dtype)
    x = (x.to(memory_format=torch.channels_last) if last else x).requires_grad_()
    weight, bias = (torch.zeros(channels, dtype=dtype, requires_grad=True) for _ in range(2))
    group_norm(x, 32, weight, bias, silu=True, backend="triton").backward(x.detach())


CASES = [
    lambda dtype=dtype, channels=channels, side=side, last=last: case(dtype, channels, side, last)
    for dtype in (torch.bfloat16, torch.float32)
    for channels, side in ((320, 64), (320, 32), (1280, 16), (2560, 8))
    for last in (False, True)
]
CASES += [lambda: case(torch.float16, 640, 16, True), lambda: case(torch.float16, 640, 32, True)]
