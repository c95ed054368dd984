"""Eight bits for an element of optimizer state: tables of levels, and a scale for every block.

Block-wise quantization of Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861. A block
of `BLOCK` consecutive elements is divided by its largest magnitude, and every quotient stored as the number of a
level. Levels of first moments are dense near 1 and reach down by decades (their dynamic tree code), levels of second
moments are geometric: Adam divides by their root, so what matters is their relative error, and a small one must not
become 0.
"""

from __future__ import annotations

import torch

from cai_mesh.errors import PlanError

BLOCK = 256
"""Elements that share a scale."""

DECADES = 7
OCTAVES = 32


def signed_levels() -> torch.Tensor:
    """[255] float32 from -1 to 1, symmetric, 0 among them: 64 levels in the top decade, half as many in each below."""
    positive = [
        10.0**-decade * (0.1 + 0.9 * (i + 1) / count)
        for decade in range(DECADES)
        for count in [1 << (DECADES - 1 - decade)]
        for i in range(count)
    ]
    half = torch.tensor(sorted(positive), dtype=torch.float64)
    return torch.cat([-half.flip(0), torch.zeros(1), half]).float()


def unsigned_levels() -> torch.Tensor:
    """[256] float32: 0, and 255 levels in equal ratios from 2**-32 to 1."""
    exponents = torch.linspace(-OCTAVES, 0, 255, dtype=torch.float64)
    return torch.cat([torch.zeros(1), torch.exp2(exponents)]).float()


def blocks_of(numel: int) -> int:
    """Scales of a tensor of `numel` elements."""
    return -(-numel // BLOCK)


def encode(
    values: torch.Tensor, levels: torch.Tensor, noise: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a 1-d float32 tensor.

    Args:
        values: [n]; no smaller than the least level times the scale, that is not negative for unsigned levels.
        levels: [255 or 256], ascending, float32, on the device of `values`.
        noise: [n], uniform in [0, 1): rounds up with the probability that makes the result unbiased. None: nearest.

    Returns (numbers of levels [n] uint8, largest magnitudes of the blocks [blocks_of(n)] float32). Values that are
    not 0 never become 0 where the levels are unsigned.
    """
    n, blocks = values.numel(), blocks_of(values.numel())
    padded = torch.nn.functional.pad(values, (0, blocks * BLOCK - n)).view(blocks, BLOCK)
    scales = padded.abs().amax(1)
    quotients = (padded / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)).view(-1)[:n]
    last = levels.numel() - 1
    above = torch.bucketize(quotients, levels, right=False).clamp_(1, last)
    low, high = levels[above - 1], levels[above]
    fraction = (quotients - low) / (high - low)
    up = fraction > (0.5 if noise is None else noise)
    if last == 255:
        up = up | ((above == 1) & (quotients > 0))
    return (above - 1 + up).to(torch.uint8), scales


def decode(numbers: torch.Tensor, scales: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Return what `encode` gave, as float32 [n]."""
    n = numbers.numel()
    padded = torch.nn.functional.pad(levels[numbers.int()], (0, scales.numel() * BLOCK - n))
    return (padded.view(-1, BLOCK) * scales.unsqueeze(1)).view(-1)[:n]


def encode_reference(values: torch.Tensor, levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`encode` to the nearest, element by element: the slow form that says what it does."""
    numbers, scales = [], []
    table = levels.tolist()
    for first in range(0, values.numel(), BLOCK):
        block = values[first : first + BLOCK].tolist()
        scale = max(abs(v) for v in block)
        scales.append(scale)
        for v in block:
            quotient = v / scale if scale else 0.0
            candidates = range(1 if len(table) == 256 and quotient > 0 else 0, len(table))
            numbers.append(min(candidates, key=lambda i: abs(table[i] - quotient)))
    return torch.tensor(numbers, dtype=torch.uint8), torch.tensor(scales, dtype=torch.float32)


def zero_number(levels: torch.Tensor | None) -> int:
    """The number of level 0; 0 where there are no levels."""
    return 127 if levels is not None and levels.numel() == 255 else 0


def check_state_dtype(state_dtype: object) -> None:
    """Raise `PlanError` for what moments cannot be stored in."""
    if state_dtype not in (torch.float32, torch.bfloat16, "int8"):
        raise PlanError(
            "AdamW: moments cannot be stored so",
            got=state_dtype,
            expected="torch.float32, torch.bfloat16 or 'int8'",
        )
