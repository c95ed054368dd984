"""The choice of the form that runs: Triton, or the reference in plain torch."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Literal

import torch

from cai_kernels.compiler import INSTALLED
from cai_kernels.errors import KernelError

Backend = Literal["auto", "triton", "reference"]

_warned: set[str] = set()
_planned: ContextVar[bool] = ContextVar("planned", default=False)


@contextlib.contextmanager
def planning_for(device: torch.device) -> Iterator[None]:
    """Inside, tensors without values (`FakeTensorMode`) on the CPU stand for tensors on `device`.

    "auto" takes the form that would run there, so that a plan sees what that form keeps for backward: on a GPU of this
    machine, or on one elsewhere where this machine has none.
    """
    before = _planned.set(device.type == "cuda" and plans_kernels())
    try:
        yield
    finally:
        _planned.reset(before)


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; a constant in a compiled graph.

    Tests that pretend another GPU replace this and not torch's function: Dynamo looks torch's functions up once, when
    it is imported (by the first fake tensor, say), and would not know the real one afterwards.
    """
    return torch.cuda.get_device_capability(device)


def plans_kernels() -> bool:
    """Whether a plan for a GPU counts Triton kernels: always but where this machine has GPUs that cannot run them."""
    return not torch.cuda.is_available() or why_not_triton(torch.device("cuda")) is None


def _on_paper() -> bool:
    """Whether a plan is made of kernels. Not to be asked under Dynamo, which cannot trace context variables."""
    return _planned.get()


def why_not_triton(device: torch.device) -> str | None:
    """The reason why Triton kernels cannot run on a device, or None when they can."""
    if not INSTALLED:
        return "triton is not installed (pip install cai-kernels[triton])"
    if device.type == "cuda":
        major, minor = capability(device)
        return None if major >= 8 else f"compute capability {major}.{minor} is below 8.0"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"tensors are on {device.type}; Triton runs on CUDA, or on the CPU under TRITON_INTERPRET=1"


def choose(backend: Backend, device: torch.device) -> Literal["triton", "reference"]:
    """The form that runs for tensors on `device`.

    "auto" takes Triton on a CUDA device that can run it, else the reference (never the interpreter); on a GPU that
    cannot, it warns once with the reason. An explicit "triton" where it cannot run is a `KernelError`, never a
    fallback.
    """
    if backend == "reference":
        return "reference"
    if backend == "auto":
        if device.type == "cpu" and not torch.compiler.is_dynamo_compiling() and _on_paper():
            return "triton"
        if device.type != "cuda":
            return "reference"
        reason = why_not_triton(device)
        if reason is not None and reason not in _warned:
            _warned.add(reason)
            warnings.warn(f"cai_kernels runs its plain torch forms: {reason}", stacklevel=3)
        return "triton" if reason is None else "reference"
    if backend == "triton":
        reason = why_not_triton(device)
        if reason is not None:
            raise KernelError(
                "the Triton backend cannot run here", got=reason, fix='use backend="auto" or "reference"'
            )
        return "triton"
    raise KernelError("unknown backend", got=repr(backend), expected="'auto', 'triton' or 'reference'")


def require(
    argument: str, tensor: torch.Tensor, *, dtypes: tuple[torch.dtype, ...], like: torch.Tensor | None = None
) -> None:
    """Check dtype and device of an argument. Raises `KernelError` that names it."""
    if tensor.dtype not in dtypes:
        raise KernelError(
            f"{argument} has an unsupported dtype", got=tensor.dtype, expected=", ".join(map(str, dtypes))
        )
    if like is not None and tensor.device != like.device:
        raise KernelError(f"{argument} is on another device", got=tensor.device, expected=like.device)
