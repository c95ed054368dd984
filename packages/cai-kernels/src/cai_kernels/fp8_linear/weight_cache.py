"""The cast of a weight, kept between uses."""

from __future__ import annotations

import functools

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from cai_kernels.fp8_linear import quantized
from cai_kernels.fp8_linear.reference import Cast


class _OptimizerSteps:
    """The number of steps of all optimizers in this process."""

    count = 0


@functools.cache
def _count_optimizer_steps() -> None:
    """Start counting; only the first call has an effect."""

    def stepped(*_: object) -> None:
        _OptimizerSteps.count += 1

    register_optimizer_step_post_hook(stepped)


class WeightCache:
    """The FP8 cast of one weight, for the micro-batches of a step.

    The cast is computed again after a step of any optimizer, and when the weight has changed in place or has other
    memory. torch does not notice when a gather of sharded weights changes values: after loading values into a sharded
    model, call `clear`. Copies of a cache start empty. A compiled graph does not use it.
    """

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        """Forget the cast."""
        self._key: tuple[object, ...] | None = None
        self._cast: Cast | None = None

    def __deepcopy__(self, memo: dict) -> WeightCache:
        return WeightCache()

    def __reduce__(self):
        return WeightCache, ()

    def get(self, weight: torch.Tensor, scaling: int, triton: bool) -> Cast:
        """The cast of weight [out, in], and transposed."""
        _count_optimizer_steps()
        weight_key = (weight.data_ptr(), weight._version, weight.shape, weight.dtype, weight.device)
        key = (_OptimizerSteps.count, *weight_key, scaling, triton)
        if self._cast is None or key != self._key:
            self._cast = cast_weight(weight, scaling, triton)
            self._key = key
        return self._cast


def cast_weight(weight: torch.Tensor, scaling: int, triton: bool) -> Cast:
    """The cast of weight [out, in], and transposed, made now."""
    return Cast(
        *quantized.fp8_cast(
            weight.detach().contiguous(),
            quantized.weight_scaling(scaling),
            quantized.NUMBERS,
            transposed=True,
            triton=triton,
        )
    )
