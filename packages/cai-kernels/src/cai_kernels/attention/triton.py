"""The operators of the Triton attention: launches, shapes, autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from cai_kernels.attention import gradients
from cai_kernels.attention.kernels import Blocks, Flags, Operands, Sizes, Strides, forward
from cai_kernels.column_sums import column_sums_into
from cai_kernels.compiler import triton
from cai_kernels.launch import dot_precision, power_of_2, waves
from cai_kernels.ops import define

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Options:
    """The arguments of the operators besides tensors.

    Args:
        scale: factor on the scores.
        causal: a query sees keys up to its own position.
        window: number of keys that a query sees, 0 for all.
        softcap: cap of the scores, 0 for none.
        longest_query: the longest sequence of a packed q; not read otherwise.
        longest_key: the longest sequence of packed k and v; not read otherwise.
    """

    scale: float
    causal: bool = False
    window: int = 0
    softcap: float = 0.0
    longest_query: int = 0
    longest_key: int = 0

    def arguments(self) -> dict[str, float]:
        """The fields as keyword arguments of an operator."""
        return {
            "scale": self.scale,
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
            "longest_query": self.longest_query,
            "longest_key": self.longest_key,
        }

    def flags(self) -> Flags:
        """The options that are compiled in."""
        return Flags(self.causal, self.window, self.softcap)


class Needed(NamedTuple):
    """Whether each input needs a gradient."""

    q: bool
    k: bool
    v: bool
    bias: bool = False
    gate: bool = False

    def arguments(self) -> dict[str, bool]:
        """The fields as keyword arguments of an operator."""
        return {
            "need_q": self.q,
            "need_k": self.k,
            "need_v": self.v,
            "need_bias": self.bias,
            "need_gate": self.gate,
        }


class Gradients(NamedTuple):
    """Gradients of the inputs; one that is not needed has no elements."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor
    gate: torch.Tensor


def blocks(head: int, dtype: torch.dtype, kind: str, busy: bool = False) -> tuple[Blocks, int, int]:
    """(tiles, warps, stages) by head dim, dtype and kernel: "forward", "queries", "keys" or "bias".

    `busy`: scores take a bias or a soft cap, whose work hides better behind the products of another program than of
    another warp: with smaller tiles a soft cap of heads of 128 takes 0.27 ms in place of 0.30, a pair bias of heads of
    32 0.084 in place of 0.096. A tile of 64 rows is for 4 warps: with 8 dq takes 0.64 ms in place of 0.30, and keys of
    64 in place of 128 1.04 in place of 0.63 (H200, Triton 3.6).
    """
    wide = max(power_of_2(head), 16)
    if dtype == torch.float32:
        queries, keys = (16, 16) if wide > 128 else (32, 16) if wide > 64 and kind == "forward" else (32, 32)
        return Blocks(queries, keys, wide, head), 8 if wide == 128 else 4, 1
    if (
        wide <= 32
    ):  # of all tiles up to 128 x 64, at 256 and 512 keys with a pair bias and without (H200, Triton 3.6)
        queries, keys = {"keys": (32, 64), "bias": (64, 32), "queries": (128, 32)}.get(kind, (128, 32))
        return Blocks(queries, keys, wide, head), 4, 2 if kind == "forward" and busy else 3
    if kind == "forward":
        queries, keys = (64, 32) if wide > 128 else (64, 64) if busy else (128, 64)
        return (
            Blocks(queries, keys, wide, head),
            8 if wide == 128 and not busy else 4,
            3 if wide <= 128 else 2,
        )
    if wide <= 64:
        return Blocks(32 if kind == "keys" and busy else 64, 64, wide, head), 4, 2
    if wide == 128:
        return (Blocks(32, 128, wide, head), 8, 2) if kind == "keys" else (Blocks(64, 64, wide, head), 4, 2)
    return Blocks(32, 32, wide, head), 4, 1


def _busy(operands: Operands, options: Options) -> bool:
    return operands.bias is not None or options.softcap != 0.0


def _strides(tensor: torch.Tensor | None) -> tuple[int, int, int]:
    """Strides over batch, head and position of [Z, N, S, H], or of packed [N, T, H]; zeros for None."""
    if tensor is None:
        return 0, 0, 0
    batch, head, position = (0, *tensor.stride()[:2]) if tensor.dim() == 3 else tensor.stride()[:3]
    return batch, head, position


def _last_contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _operands(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    gate: torch.Tensor | None,
    query_starts: torch.Tensor | None,
    key_starts: torch.Tensor | None,
) -> Operands:
    """The operands with the strides that the kernels can read."""
    return Operands(
        q=_last_contiguous(q),
        k=_last_contiguous(k),
        v=_last_contiguous(v),
        bias=_contiguous(bias),
        mask=_contiguous(mask),
        gate=_last_contiguous(gate),
        query_starts=_contiguous(query_starts),
        key_starts=_contiguous(key_starts),
    )


def _sizes(operands: Operands, options: Options) -> tuple[Sizes, int]:
    """The kernels' sizes, and how many sequences there are."""
    q, k = operands.q, operands.k
    heads, group = q.shape[-3], q.shape[-3] // k.shape[-3]
    if operands.query_starts is not None:
        sizes = Sizes(options.longest_query, options.longest_key, heads, group, 1, 0, q.shape[1])
        return sizes, operands.query_starts.shape[0] - 1
    rows = 1 if operands.bias is None else q.shape[0] // operands.bias.shape[0]
    queries = q.shape[2]
    return Sizes(queries, k.shape[2], heads, group, rows, heads * queries, queries), q.shape[0]


def _attention_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    gate: torch.Tensor | None,
    query_starts: torch.Tensor | None,
    key_starts: torch.Tensor | None,
    *,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    longest_query: int,
    longest_key: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out like q, lse [Z, N, Sq] or [N, T] in float32); see `kernels.Operands` and `Options`."""
    options = Options(scale, causal, window, softcap, longest_query, longest_key)
    operands = _operands(q, k, v, bias, mask, gate, query_starts, key_starts)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    sizes, batch = _sizes(operands, options)
    if out.numel() == 0 or batch == 0:
        return out, lse
    tiles, warps, stages = blocks(q.shape[-1], q.dtype, "forward", _busy(operands, options))
    launch = forward[(triton.cdiv(sizes.queries, tiles.queries), batch * sizes.heads)]  # pyright: ignore[reportIndexIssue]
    strides = Strides(*(_strides(t) for t in (operands.q, operands.k, operands.v, operands.gate, out)))
    launch(
        operands, out, lse, sizes, strides, options.scale,
        FLAGS=options.flags(), BLOCKS=tiles, PRECISION=dot_precision(q.dtype), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse


def _attention_triton_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    gate: torch.Tensor | None,
    query_starts: torch.Tensor | None,
    key_starts: torch.Tensor | None,
    *,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    longest_query: int,
    longest_key: int,
    need_q: bool,
    need_k: bool,
    need_v: bool,
    need_bias: bool,
    need_gate: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v, bias and gate; those that are not needed come empty."""
    options = Options(scale, causal, window, softcap, longest_query, longest_key)
    needed = Needed(need_q, need_k, need_v, need_bias, need_gate)
    operands = _operands(q, k, v, bias, mask, gate, query_starts, key_starts)
    results = _new_gradients(dout, q, k, v, bias, needed)
    sizes, batch = _sizes(operands, options)
    if out.numel() == 0 or batch == 0 or operands.k.numel() == 0:
        for gradient in results:
            gradient.zero_()
        gate_gradient = torch.zeros_like(out) if needed.gate else results.gate
        return results.q, results.k, results.v, results.bias, gate_gradient
    dattention = torch.empty_like(out) if operands.gate is not None else dout
    dgate = torch.empty_like(out) if operands.gate is not None else results.gate
    delta = torch.empty_like(lse)
    prepared = gradients.Prepared(out, dout, dlse, delta, dattention, dgate)
    strides = Strides(*(_strides(t) for t in (operands.q, operands.k, operands.v, operands.gate, out)))
    upstream = gradients.Upstream(dattention, lse, delta)
    fused = needed.q and _fuses(out)
    if not fused:
        tiles, warps, _ = blocks(out.shape[-1], out.dtype, "queries")
        launch = gradients.prepare[(triton.cdiv(sizes.queries, tiles.queries), batch * sizes.heads)]  # pyright: ignore[reportIndexIssue]
        launch(operands, prepared, sizes, strides, _strides(dout), BLOCKS=tiles, num_warps=warps)
    elsewhere = strides._replace(out=_strides(dattention))
    if needed.q:
        _launch_queries(
            operands, prepared, upstream, results.q, sizes, batch,
            strides if fused else elsewhere, _strides(dout), options, fused=fused,
        )  # fmt: skip
    _launch_others(operands, upstream, results, sizes, batch, elsewhere, options, needed)
    return results.q, results.k, results.v, results.bias, dgate if needed.gate else results.gate


def _fuses(out: torch.Tensor) -> bool:
    """Whether the kernel of dq does what `prepare` does, too: for narrow heads; wide ones would spill registers."""
    return out.shape[-1] <= 32 and out.dtype != torch.float32


def _launch_queries(
    operands: Operands,
    prepared: gradients.Prepared,
    upstream: gradients.Upstream,
    dq: torch.Tensor,
    sizes: Sizes,
    batch: int,
    strides: Strides,
    dout_strides: tuple[int, int, int],
    options: Options,
    *,
    fused: bool,
) -> None:
    tiles, warps, stages = blocks(dq.shape[-1], dq.dtype, "queries")
    launch = gradients.queries_backward[(triton.cdiv(sizes.queries, tiles.queries), batch * sizes.heads)]  # pyright: ignore[reportIndexIssue]
    launch(
        operands, prepared, upstream, dq, sizes, strides, dout_strides, _strides(dq), options.scale,
        FLAGS=options.flags(), BLOCKS=tiles, PRECISION=dot_precision(dq.dtype), FUSED=fused,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _launch_others(
    operands: Operands,
    upstream: gradients.Upstream,
    results: Gradients,
    sizes: Sizes,
    batch: int,
    strides: Strides,
    options: Options,
    needed: Needed,
) -> None:
    """Gradients of keys, values and the bias."""
    head, dtype = upstream.dout.shape[-1], upstream.dout.dtype
    fixed = {"FLAGS": options.flags(), "PRECISION": dot_precision(dtype)}
    dk, dv, dbias = results.k, results.v, results.bias
    if needed.k or needed.v:
        tiles, warps, stages = blocks(head, dtype, "keys", _busy(operands, options))
        heads = sizes.heads // sizes.group
        launch = gradients.keys_backward[(triton.cdiv(sizes.keys, tiles.keys), batch * heads)]  # pyright: ignore[reportIndexIssue]
        launch(
            operands, upstream, (dk, dv), sizes, strides, (_strides(dk), _strides(dv)), options.scale,
            BLOCKS=tiles, num_warps=warps, num_stages=stages, **fixed,
        )  # fmt: skip
    if needed.bias:
        tiles, warps, stages = blocks(head, dtype, "bias")
        across = triton.cdiv(sizes.queries, tiles.queries) * triton.cdiv(sizes.keys, tiles.keys)
        entries = batch // sizes.rows
        # one part of 256 rows leaves half a GPU idle: 0.45 ms in place of 0.17 (H200, Triton 3.6)
        parts = waves(dbias.device, 4) // (across * sizes.heads * entries)
        parts = min(max(parts, 1), sizes.rows)
        partial = dbias if parts == 1 else dbias.new_empty(parts, dbias.numel(), dtype=torch.float32)
        launch = gradients.bias_backward[(across, sizes.heads, entries * parts)]  # pyright: ignore[reportIndexIssue]
        launch(
            operands, upstream, partial, sizes, strides, options.scale, parts,
            BLOCKS=tiles, num_warps=warps, num_stages=stages, **fixed,
        )  # fmt: skip
        if parts > 1:
            column_sums_into((partial,), (dbias.view(-1),))


def _empty(q, k, v, bias, mask, gate, query_starts, key_starts, **_):
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _new_gradients(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    needed: Needed,
) -> Gradients:
    """Memory for the gradients, but that of the gate, which comes with the delta of softmax."""
    dq, dk, dv, dbias, dgate = (dout.new_empty(0) for _ in range(5))
    if needed.q:
        dq = torch.empty_like(q)
    if needed.k or needed.v:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
    if needed.bias and bias is not None:
        dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    return Gradients(dq, dk, dv, dbias, dgate)


def _empty_gradients(
    dout,
    dlse,
    out,
    lse,
    q,
    k,
    v,
    bias,
    mask,
    gate,
    query_starts,
    key_starts,
    *,
    need_q,
    need_k,
    need_v,
    need_bias,
    need_gate,
    **_,
):
    needed = Needed(need_q, need_k, need_v, need_bias, need_gate)
    results = _new_gradients(dout, q, k, v, bias, needed)
    return tuple(results._replace(gate=torch.empty_like(out)) if need_gate else results)


def _save(ctx, inputs, keyword_only_inputs, output) -> None:
    ctx.options = keyword_only_inputs
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse):
    *inputs, out, lse = ctx.saved_tensors
    need_q, need_k, need_v, need_bias, _, need_gate, _, _ = ctx.needs_input_grad
    if dout is None and dlse is None:
        return (None,) * len(inputs)
    dout = torch.zeros_like(out) if dout is None else _last_contiguous(dout)
    dlse = None if dlse is None else dlse.contiguous()
    needed = Needed(need_q, need_k, need_v, need_bias, need_gate)
    all_gradients = attention_backward(dout, dlse, out, lse, *inputs, **ctx.options, **needed.arguments())
    dq, dk, dv, dbias, dgate = (g if need else None for g, need in zip(all_gradients, needed, strict=True))
    return dq, dk, dv, dbias, None, dgate, None, None


attention_backward = define(_attention_triton_backward, _empty_gradients)
attention_forward = define(_attention_triton, _empty, save=_save, backward=_differentiate)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    *,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    query_starts: torch.Tensor | None = None,
    key_starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, log-sum-exp); differentiable in q, k, v, bias and gate. See `kernels.Operands` for the shapes."""
    return attention_forward(q, k, v, bias, mask, gate, query_starts, key_starts, **options.arguments())
