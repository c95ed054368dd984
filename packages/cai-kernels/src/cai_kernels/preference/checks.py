"""The argument checks of the preference losses."""

from __future__ import annotations

import torch

from cai_kernels.backend import require
from cai_kernels.cross_entropy.function import DTYPES, REDUCTIONS
from cai_kernels.errors import KernelError

FLOATING = (*DTYPES, torch.float64)


def alike(dims: str, **tensors: torch.Tensor) -> list[torch.Tensor]:
    """Floating tensors of the first one's shape and device, named by keyword, in float32 (float64 if any is).

    dims: "N" or "N, T", the shape they must have.
    """
    (first, like), *_ = tensors.items()
    for name, tensor in tensors.items():
        require(name, tensor, dtypes=FLOATING, like=like)
    if like.dim() != len(dims.split(",")):
        raise KernelError(f"{first} has another number of dims", got=tuple(like.shape), expected=f"[{dims}]")
    for name, tensor in tensors.items():
        fits(name, tensor, first, like)
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors.values()) else torch.float32
    return [tensor.to(wide) for tensor in tensors.values()]


def fits(name: str, tensor: torch.Tensor, first: str, like: torch.Tensor) -> None:
    """Raise `KernelError` unless a tensor has the shape of another."""
    if tensor.shape != like.shape:
        raise KernelError(
            f"{name} does not fit {first}", got=tuple(tensor.shape), expected=str(tuple(like.shape))
        )


def truth(name: str, tensor: torch.Tensor, first: str, like: torch.Tensor) -> torch.Tensor:
    """Check a bool tensor of the shape and device of another."""
    if tensor.dtype != torch.bool:
        raise KernelError(
            f"{name} has an unsupported dtype", got=tensor.dtype, expected=torch.bool, fix=f"{name}.bool()"
        )
    require(name, tensor, dtypes=(torch.bool,), like=like)
    fits(name, tensor, first, like)
    return tensor


def within(
    name: str, value: float, least: float, below: float = float("inf"), *, open_: bool = False
) -> None:
    """Raise `KernelError` unless least <= value < below; `open_` leaves out least too."""
    if not (least < value if open_ else least <= value) or not value < below:
        bound = f"more than {least}" if open_ else f"{least} or more"
        limit = "" if below == float("inf") else f", below {below}"
        raise KernelError(f"{name} is out of range", got=value, expected=bound + limit)


def known(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise `KernelError` for a value that is not one of the choices."""
    if value not in choices:
        raise KernelError(f"unknown {name}", got=repr(value), expected=" or ".join(map(repr, choices)))


def reduced(losses: torch.Tensor, reduction: str) -> torch.Tensor:
    """The mean (0 of no losses), the sum or the losses [N] themselves."""
    known("reduction", reduction, REDUCTIONS)
    if reduction == "none":
        return losses
    return losses.sum() / max(losses.numel(), 1) if reduction == "mean" else losses.sum()


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the places of the mask; 0 where it has none."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp_min(1)
