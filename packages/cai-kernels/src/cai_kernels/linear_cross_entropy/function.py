"""The public door: arguments checked, backend and form of the backward chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.cross_entropy.function import DTYPES, Reduction, check_options, check_target
from cai_kernels.cross_entropy.reference import reduce
from cai_kernels.errors import KernelError
from cai_kernels.linear_cross_entropy.chunked import B, W, X, chunk_rows
from cai_kernels.linear_cross_entropy.rows import LOGIT_SUM, PLAIN

CHUNK_BYTES = 512 << 20


class How(TypedDict, total=False):
    """How `linear_cross_entropy` computes; see there."""

    return_z_loss: bool
    backward: Literal["auto", "fused", "split"]
    accumulate: Literal["float32", "weight"]
    chunk_bytes: int
    backend: Backend


@dataclass(frozen=True)
class _How:
    return_z_loss: bool = False
    backward: str = "auto"
    accumulate: str = "float32"
    chunk_bytes: int = CHUNK_BYTES
    backend: Backend = "auto"

    def form_of_backward(self, reduction: str) -> str:
        for name, value, known in (
            ("backward", self.backward, ("auto", "fused", "split")),
            ("accumulate", self.accumulate, ("float32", "weight")),
        ):
            if value not in known:
                raise KernelError(f"unknown {name}", got=repr(value), expected=" or ".join(map(repr, known)))
        if self.backward == "fused" and reduction == "none":
            raise KernelError(
                'backward="fused" computes gradients before it knows those of the rows',
                got='reduction="none"',
                fix='use backward="split" or "auto"',
            )
        if self.backward == "auto":
            return "split" if reduction == "none" else "fused"
        return self.backward


@dataclass(frozen=True)
class Rows:
    """Checked arguments as the operators take them: x [T, D], weight, bias, target [T]."""

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]
    wanted: int
    how: list[int]


def prepare(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *,
    backend: Backend,
    chunk_bytes: int,
    low: bool = False,
) -> Rows:
    """Check the tensors, flatten and, under autocast, cast them. `low`: accumulate in the weight's dtype."""
    form = choose(backend, x.device)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    require("x", x, dtypes=DTYPES if form == "triton" else (*DTYPES, torch.float64))
    require("weight", weight, dtypes=(x.dtype,), like=x)
    if x.dim() == 0 or weight.dim() != 2 or weight.shape[1] != x.shape[-1] or 0 in weight.shape:
        raise KernelError(
            "weight does not fit x",
            got=f"weight {tuple(weight.shape)}, x {tuple(x.shape)}",
            expected="x [..., D] and weight [V, D], V and D of at least 1",
        )
    if bias is not None:
        require("bias", bias, dtypes=(x.dtype,), like=x)
        if bias.shape != weight.shape[:1]:
            raise KernelError(
                "bias does not fit weight", got=tuple(bias.shape), expected=f"({weight.shape[0]},)"
            )
    check_target(x, target)
    if chunk_bytes < 1:
        raise KernelError("chunk_bytes is too small", got=chunk_bytes, expected="1 or more")
    leaves = zip((X, W, B), (x, weight, bias), strict=True)
    wanted = sum(bit for bit, t in leaves if t is not None and t.requires_grad) * torch.is_grad_enabled()
    traced = torch.compiler.is_compiling()  # which cannot read grad_dtype
    wide = not (low or traced) and weight.is_leaf and getattr(weight, "grad_dtype", None) == torch.float32
    rows = chunk_rows(target.numel(), weight.shape[0], x.element_size(), chunk_bytes)
    how = [rows, int(form == "triton"), int(low), int(wide), int(traced), 0]
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    return Rows((flat, weight, bias, target.reshape(-1).contiguous()), wanted, how)


def _keeps_logits(rows: Rows) -> bool:
    """Whether logits wait in the memory of the weight's gradient; see `kept`."""
    from cai_kernels.linear_cross_entropy import kept

    _, triton, low, wide, *_ = rows.how
    summed = bool(rows.wanted & W and triton) and not (low or wide)
    return summed and kept.pays(rows.inputs[3].numel(), rows.inputs[1])


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    **how: Unpack[How],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`cross_entropy(F.linear(x, weight, bias), target)` without the logits of all tokens ever in memory.

    Logits are of a chunk of tokens at a time, in the dtype of x; the softmax is in float32. See `cross_entropy` for
    the options of the loss. Under autocast, x, weight and bias are cast first.

    Args:
        x: [..., D], float32, bfloat16 or float16 (the reference takes float64 too).
        weight: [V, D] in the dtype of x; bias: [V] or None.
        target: [...], int64 or int32.
        how: return_z_loss: also return the z-loss within the loss.
            backward: "fused" computes the gradients in forward, chunk by chunk, three matrix products in all;
            backward only scales them, and may run once where the weight's gradient keeps the dtype it was
            accumulated in. "split" keeps four numbers a token and computes the logits again in backward, four
            products. "auto" (the default) is "fused", but "split" for reduction "none".
            accumulate: "float32" (the default) sums the weight's gradient in float32: over chunks, for a weight of
            16 bits in a buffer of 4 bytes a parameter beside the gradient; or, on Triton, for a large bfloat16 weight
            where it takes less memory, in one product over all tokens, whose logits wait in the gradient's own memory
            and a buffer for what does not fit (`chunk_bytes` bounds neither; backward may run once). Outside
            compiled graphs a weight whose `grad_dtype` is float32 gets the sum over chunks as its gradient. "weight"
            adds chunks in the weight's dtype, with no such buffer.
            chunk_bytes: of the logits of a chunk, by default 512 MiB.
            backend: "auto" (Triton on CUDA, else the same in plain torch), "triton" or "reference".

    Returns the loss in float32 (float64 for float64), a scalar or [...]; with return_z_loss (loss, z-loss). Nothing is
    computed for inputs that need no gradient. Differentiable once, in x, weight and bias; one graph under
    torch.compile. Raises `KernelError` naming the argument that does not fit.
    """
    chosen = _How(**how)
    form = chosen.form_of_backward(reduction)
    check_options(reduction, label_smoothing, z_loss, softcap)
    room, low = chosen.chunk_bytes, chosen.accumulate == "weight"
    rows = prepare(x, weight, bias, target, backend=chosen.backend, chunk_bytes=room, low=low)
    from cai_kernels.linear_cross_entropy import autograd

    numbers = [float(label_smoothing), float(z_loss), float(softcap or 0.0)]
    if form == "fused" and rows.wanted:
        rows.how[5] = int(_keeps_logits(rows))
        loss, z, *_ = autograd.linear_loss_fused(
            *rows.inputs, ignore_index, reduction == "mean", numbers, rows.wanted, rows.how
        )
        return (loss, z) if chosen.return_z_loss else loss
    aux = LOGIT_SUM if label_smoothing else PLAIN
    losses, zs, _, _ = autograd.linear_scan(*rows.inputs, ignore_index, numbers, aux, rows.how)
    loss, z = (reduce(v, rows.inputs[3] != ignore_index, reduction) for v in (losses, zs))
    if reduction == "none":
        loss, z = loss.view(target.shape), z.view(target.shape)
    return (loss, z) if chosen.return_z_loss else loss
