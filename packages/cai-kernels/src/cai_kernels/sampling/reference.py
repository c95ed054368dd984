"""Sampling in plain torch: filters by a sort, the draw by Gumbel noise of Philox numbers (Salmon et al., SC 2011)."""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(seed: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Philox 4x32 of ten rounds: key `seed` (int64), counter (first, second, 0, 0) -> [..., 4] int64 of 32 bits."""
    key = [seed & _LOW, (seed >> 32) & _LOW]
    zero = torch.zeros_like(first + second + seed)
    a, b, c, d = first + zero, second + zero, zero, zero
    for _ in range(10):
        product_a, product_c = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # 64 bits, of which the sign is one
        a, c = ((product_c >> 32) & _LOW) ^ b ^ key[0], ((product_a >> 32) & _LOW) ^ d ^ key[1]
        b, d = product_c & _LOW, product_a & _LOW
        key = [(k + step) & _LOW for k, step in zip(key, _STEPS, strict=True)]
    return torch.stack((a, b, c, d), -1)


def gumbel(seed: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Gumbel noise [rows, columns] in float64: of one seed [] and the row, or of a seed a row [rows]."""
    row = torch.arange(rows, device=seed.device)[:, None] * (seed.dim() == 0)
    four = torch.arange((columns + 3) // 4, device=seed.device)[None, :]
    bits = philox(seed.reshape(-1, 1), four, row).flatten(1)[:, :columns]
    uniform = (bits >> 1).double() * 2.0**-31 + 2.0**-32
    return -torch.log(-torch.log1p(-uniform))


def kept(
    z: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Mask of the values of z [B, V] that pass every filter: bool. Filters are [B, 1] or [1, 1]."""
    columns = z.shape[1]
    ordered = z.sort(1, descending=True).values
    last = torch.where((top_k > 0) & (top_k < columns), top_k, columns) - 1
    least = ordered.gather(1, last.long().expand(z.shape[0], 1))
    highest = ordered[:, :1]
    weight = torch.exp((ordered - highest) / torch.where(temperature > 0, temperature, 1.0))
    mass = torch.where(ordered >= least, weight, 0.0).double().cumsum(1)
    needed = (mass < top_p * mass[:, -1:]).sum(1, keepdim=True).clamp(max=columns - 1)
    least = torch.where(top_p < 1.0, torch.maximum(least, ordered.gather(1, needed)), least)
    floor = torch.where(min_p > 0.0, highest + temperature * torch.log(min_p), -torch.inf)
    return (z >= least) & (z >= floor)


def sample(
    logits: torch.Tensor,
    seen_mask: torch.Tensor | None,
    seed: torch.Tensor,
    temperature: float | torch.Tensor,
    top_k: float | torch.Tensor,
    top_p: float | torch.Tensor,
    min_p: float | torch.Tensor,
    penalty: float | torch.Tensor,
) -> torch.Tensor:
    """logits [B, V] -> tokens [B] int64; filters are numbers or [B], seed is [] or [B]."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))

    def column(value: float | torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(value, device=z.device, dtype=z.dtype).reshape(-1, 1)

    if seen_mask is not None:
        z = torch.where(seen_mask, torch.where(z > 0, z / column(penalty), z * column(penalty)), z)
    stays = kept(z, column(temperature), column(top_k), column(top_p), column(min_p))
    noisy = z + column(temperature) * gumbel(seed, *z.shape).to(z.dtype)
    return noisy.masked_fill(~stays, -torch.inf).argmax(1)
