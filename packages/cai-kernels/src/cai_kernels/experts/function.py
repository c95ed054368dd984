"""Public entry point: argument checks and the choice of the form."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError
from cai_kernels.experts import reference
from cai_kernels.experts.reference import AdaptedExperts, ExpertGate, Matrices, weight_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WHOLE = (torch.int32, torch.int64)


def expert_layer(
    tokens: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: Matrices,
    down: Matrices,
    *,
    gate: ExpertGate | Callable[[torch.Tensor], torch.Tensor] = ExpertGate(),  # noqa: B008
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    rows: int | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Compute what a token's experts make of it, weighed and summed up (Shazeer et al., arXiv:1701.06538).

    Tokens are copied to rows in the order of their experts (`token_permute`), multiplied by one grouped product, gated
    and weighed in one pass, multiplied by another, and summed up. Nothing waits for the device. With an `ExpertGate`,
    Triton keeps the input and the result of the first product for backward; rows and gated rows are made again, as a
    weight can stand before the second product, which is linear (as in SonicMoE, arXiv:2512.14080).

    Args:
        tokens: [T, D], float32, bfloat16 or float16 (the reference takes float64 too).
        ids: [T, K], int32 or int64, the experts of each token; one outside 0..E-1, such as -1, adds nothing.
        weights: [T, K], floating, the weight of each choice.
        up: [E, D, F] in tokens' dtype, any strides, as in `grouped_matmul`; with adapters as `AdaptedExperts`, and then
            the layer is computed in parts.
        down: [E, I, D] in tokens' dtype, any strides, with adapters or without.
        gate: the function between the products: an `ExpertGate` (F = 2 I), or any differentiable function of rows, of
            [N, F] to [N, I].
        up_bias: [E, F] in tokens's dtype. down_bias: [E, D] in tokens's dtype.
        rows: the number of choices that are an expert's, where the host knows it; more take memory. None: T * K.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns [T, D] in tokens's dtype. Differentiable, once, in all floating arguments; an expert without tokens has a
    gradient of zeros. Raises `KernelError` naming the argument that does not fit.
    """
    form, matrices = choose(backend, tokens.device), (weight_of(up), weight_of(down))
    _check(form, tokens, ids, weights, *matrices)
    _check_biases(tokens, *matrices, up_bias, down_bias, gate)
    _check_adapters("up", up)
    _check_adapters("down", down)
    rows = ids.numel() if rows is None else rows
    if not 0 <= rows <= ids.numel():
        raise KernelError("rows does not fit ids", got=rows, expected=f"0 to {ids.numel()}, T * K")
    alone = isinstance(up, torch.Tensor) and isinstance(down, torch.Tensor)
    if form == "triton" and isinstance(gate, ExpertGate) and alone:
        from cai_kernels.experts import layer

        out = layer.expert_layer(tokens, ids, weights, *matrices, up_bias, gate, rows, backend)
    else:
        out = reference.expert_layer(tokens, ids, weights, up, down, gate, up_bias, rows, backend)
    return out if down_bias is None else out + _bias(ids, weights, down_bias)


def _bias(ids: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The sum of the biases of each token's experts [T, D], weighed: a product with [T, E] weights, mostly zeros."""
    experts = len(bias)
    is_expert = (ids >= 0) & (ids < experts)
    of_all = torch.zeros(len(ids), experts, dtype=weights.dtype, device=weights.device)
    of_all = of_all.scatter_add(
        1, torch.where(is_expert, ids, 0).long(), torch.where(is_expert, weights, 0.0)
    )
    return of_all.to(bias.dtype) @ bias


def _check(
    form: str,
    tokens: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> None:
    require("tokens", tokens, dtypes=_DTYPES if form == "triton" else (*_DTYPES, torch.float64))
    require("ids", ids, dtypes=_WHOLE, like=tokens)
    require("weights", weights, dtypes=(*_DTYPES, torch.float64), like=tokens)
    if tokens.dim() != 2 or ids.dim() != 2 or len(ids) != len(tokens) or weights.shape != ids.shape:
        raise KernelError(
            "ids or weights do not fit tokens",
            got=f"tokens {tuple(tokens.shape)}, ids {tuple(ids.shape)}, weights {tuple(weights.shape)}",
            expected="tokens [T, D], ids [T, K], weights [T, K]",
        )
    for name, weight in (("up", up), ("down", down)):
        require(name, weight, dtypes=(tokens.dtype,), like=tokens)
    if up.dim() != 3 or down.dim() != 3 or up.shape[1] != tokens.shape[1] or down.shape[::2] != up.shape[:2]:
        raise KernelError(
            "up or down do not fit tokens",
            got=f"tokens {tuple(tokens.shape)}, up {tuple(up.shape)}, down {tuple(down.shape)}",
            expected="tokens [T, D], up [E, D, F], down [E, I, D]",
            fix="pass up.transpose(1, 2) where experts are held as [E, F, D]",
        )


def _check_biases(
    tokens: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    gate: ExpertGate | Callable[[torch.Tensor], torch.Tensor],
) -> None:
    for name, bias, weight in (("up_bias", up_bias, up), ("down_bias", down_bias, down)):
        if bias is None:
            continue
        require(name, bias, dtypes=(tokens.dtype,), like=tokens)
        if bias.shape != weight.shape[::2]:
            raise KernelError(
                f"{name} does not fit", got=tuple(bias.shape), expected=tuple(weight.shape[::2])
            )
    if isinstance(gate, ExpertGate) and up.shape[2] != 2 * down.shape[1]:
        raise KernelError(
            "up and down do not fit a gate of two halves",
            got=f"up {tuple(up.shape)}, down {tuple(down.shape)}",
            expected="up [E, D, 2 I], down [E, I, D]",
        )


def _check_adapters(name: str, matrices: Matrices) -> None:
    if not isinstance(matrices, AdaptedExperts):
        return
    for part, matrix in (("first", matrices.first), ("second", matrices.second)):
        require(f"{name}.{part}", matrix, dtypes=(matrices.weight.dtype,), like=matrices.weight)
    experts, width_in, width_out = matrices.weight.shape
    rank = matrices.second.shape[-1]
    expected = {"first": (experts, rank, width_in), "second": (experts, width_out, rank)}
    shapes = {"first": tuple(matrices.first.shape), "second": tuple(matrices.second.shape)}
    if shapes != expected:
        raise KernelError(f"the adapters of {name} do not fit its matrices", got=shapes, expected=expected)
