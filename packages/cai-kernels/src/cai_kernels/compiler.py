"""Triton, as kernels import it; where it is not installed, what lets their text be read and nothing run.

A plan for a GPU asks operators for shapes and for what they keep, on machines without Triton too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

INSTALLED = importlib.util.find_spec("triton") is not None
"""Whether Triton is installed. Kernels run nowhere else."""


class _Language:
    """Stands for `triton.language`, and for all in it: the text of kernels may name it."""

    def __getattr__(self, name: str) -> _Language:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> _Language:
        return self


class _Compiler:
    """Stands for `triton`: kernels stay the functions that they are, and launches are counted as ever."""

    @staticmethod
    def jit(function: Callable[..., Any] | None = None, **_: Any) -> Any:
        """Return a kernel as it is."""
        return function if function is not None else lambda decorated: decorated

    @staticmethod
    def cdiv(dividend: int, divisor: int) -> int:
        """Return the quotient, rounded up."""
        return -(-dividend // divisor)


if TYPE_CHECKING or INSTALLED:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
else:
    triton, tl, TensorDescriptor = _Compiler(), _Language(), _Language()

__all__ = ["INSTALLED", "TensorDescriptor", "tl", "triton"]
