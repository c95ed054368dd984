"""Master weights in halves: a float32 number as the bfloat16 one that the model computes with, and 16 bits more.

The two have the bits of the float32 number: nothing is lost, and master weights take two bytes an element beside
parameters in bfloat16, not four (apex and Transformer Engine: `store_param_remainders`). The lower half is signed, so
that the upper one is rounded to the nearest and not cut off; halfway between two, away from zero. There
`Tensor.to(torch.bfloat16)` takes the even one; of usual numbers one in 65,536 lies so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

AT_ONCE = 1 << 24
"""Elements that are split or joined at once: the bits between take a few times their memory."""
_NAN = 0x7FC0


def split(full: torch.Tensor, high: torch.Tensor, low: torch.Tensor | None = None) -> None:
    """Write the halves of `full`, float32 [n], into `high`, bfloat16 [n], and `low`, int16 [n] or None."""
    for start in range(0, full.numel(), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        bits, number = full[part].view(torch.int32), ~full[part].isnan()
        upper = (bits + 0x8000) >> 16
        if low is not None:
            low[part] = torch.where(number, bits - (upper << 16), 0)
        high.view(torch.int16)[part] = torch.where(number, upper, _NAN)


def join(high: torch.Tensor, low: torch.Tensor, full: torch.Tensor) -> None:
    """Write into `full`, float32 [n], the numbers that `split` gave the halves of; NaN for NaN.

    A zero that somebody has written to `high` unseen is taken as one: with a negative `low` it would be NaN.
    """
    for start in range(0, full.numel(), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        upper, lower = high[part].view(torch.int16).to(torch.int32) << 16, low[part]
        full.view(torch.int32)[part] = upper + torch.where(high[part] == 0, lower.clamp(min=0), lower)


class Halves:
    """The master weights of a shard, as one float32 tensor or as halves; in the beginning the tensor.

    Args:
        flat: float32 [n], the shard, with memory of its own. In halves it has none, and may not be read.
        ranges: each parameter's part of it.
        high: bfloat16 [n], this rank's shard of the parameters: the upper half, as long as nobody writes there.

    Attributes:
        joined: whether the numbers are in `flat`.
        parts: (upper, lower) half of each range.
    """

    def __init__(self, flat: nn.Parameter, ranges: Sequence[slice], high: torch.Tensor):
        self._flat, self._high = flat.detach(), high
        self._low = torch.empty(high.shape, dtype=torch.int16, device=high.device)
        self.joined = True
        self.parts = [(self._high[part], self._low[part]) for part in ranges]

    def split(self) -> None:
        """Have the numbers in halves, the upper ones rounded anew, and free the memory of `flat`."""
        if self.joined:
            split(self._flat, self._high, self._low)
            self._flat.untyped_storage().resize_(0)
            self.joined = False

    def fill(self, full: torch.Tensor) -> None:
        """Have other numbers, float32 [n]; the halves of those before may have been written to."""
        self.joined = True
        self._flat.untyped_storage().resize_(self._flat.numel() * self._flat.element_size())
        self._flat.copy_(full)
        self.split()

    def join(self) -> None:
        """Have the numbers in `flat`, where they may be written; views of it see them again."""
        if not self.joined:
            self._flat.untyped_storage().resize_(self._flat.numel() * self._flat.element_size())
            join(self._high, self._low, self._flat)
            self.joined = True
