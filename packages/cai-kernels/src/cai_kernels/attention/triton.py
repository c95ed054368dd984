"""The operators of the Triton attention: launches, shapes, autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from cai_kernels.attention import gradients
from cai_kernels.attention.kernels import Blocks, Flags, Operands, Sizes, Strides, forward
from cai_kernels.column_sums import column_sums_into
from cai_kernels.launch import dot_precision, power_of_2, waves
from cai_kernels.ops import define

MAX_HEAD = 256


def options(
    *, scale: float, causal: bool = False, window: int | None = None, softcap: float | None = None
) -> list[float]:
    """What the operators take beside tensors, as one list: scale, causal, window (0: none), softcap (0: none)."""
    return [scale, float(causal), float(window or 0), float(softcap or 0.0)]


def _flags(opts: Sequence[float]) -> Flags:
    return Flags(bool(opts[1]), int(opts[2]), float(opts[3]))


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


def _busy(given: Operands, opts: Sequence[float]) -> bool:
    return given.bias is not None or opts[3] != 0.0


def _strides(tensor: torch.Tensor | None) -> tuple[int, int, int]:
    """Over batch, head and position of [Z, N, S, H], or of packed [N, T, H]."""
    if tensor is None:
        return 0, 0, 0
    batch, head, position = (0, *tensor.stride()[:2]) if tensor.dim() == 3 else tensor.stride()[:3]
    return batch, head, position


def _last_contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _operands(*given: torch.Tensor | None) -> Operands:
    q, k, v, bias, mask, gate, query_starts, key_starts = given
    whole = [None if t is None else t.contiguous() for t in (bias, mask, query_starts, key_starts)]
    return Operands(
        _last_contiguous(q), _last_contiguous(k), _last_contiguous(v),
        whole[0], whole[1], _last_contiguous(gate), whole[2], whole[3],
    )  # fmt: skip


def _sizes(given: Operands, longest: Sequence[int]) -> tuple[Sizes, int]:
    """The kernels' sizes, and how many sequences there are."""
    q, k = given.q, given.k
    heads, group = q.shape[-3], q.shape[-3] // k.shape[-3]
    if given.query_starts is not None:
        return Sizes(longest[0], longest[1], heads, group, 1, 0, q.shape[1]), given.query_starts.shape[0] - 1
    rows = 1 if given.bias is None else q.shape[0] // given.bias.shape[0]
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
    longest: Sequence[int],
    opts: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out like q, lse [Z, N, Sq] or [N, T] in float32); see `kernels.Operands`. longest: of packed q and k."""
    given = _operands(q, k, v, bias, mask, gate, query_starts, key_starts)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    sizes, batch = _sizes(given, longest)
    if out.numel() == 0 or batch == 0:
        return out, lse
    tiles, warps, stages = blocks(q.shape[-1], q.dtype, "forward", _busy(given, opts))
    launch = forward[(triton.cdiv(sizes.queries, tiles.queries), batch * sizes.heads)]  # pyright: ignore[reportIndexIssue]
    strides = Strides(*(_strides(t) for t in (given.q, given.k, given.v, given.gate, out)))
    launch(
        given, out, lse, sizes, strides, opts[0],
        FLAGS=_flags(opts), BLOCKS=tiles, PRECISION=dot_precision(q.dtype), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse


def _attention_triton_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    inputs: Sequence[torch.Tensor | None],
    longest: Sequence[int],
    opts: Sequence[float],
    needs: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v, bias and gate; `needs` says of which (the others come empty)."""
    given = _operands(*inputs)
    results = _empty_gradients(dout, dlse, out, lse, inputs, longest, opts, needs)
    sizes, batch = _sizes(given, longest)
    if out.numel() == 0 or batch == 0 or given.k.numel() == 0:
        dq, dk, dv, dbias = (result.zero_() for result in results[:4])
        return dq, dk, dv, dbias, torch.zeros_like(out) if needs[4] else results[4]
    dattention = torch.empty_like(out) if given.gate is not None else dout
    gated = torch.empty_like(out) if given.gate is not None else results[4]
    delta = torch.empty_like(lse)
    prepared = gradients.Prepared(out, dout, dlse, delta, dattention, gated)
    strides = Strides(*(_strides(t) for t in (given.q, given.k, given.v, given.gate, out)))
    tiles, warps, _ = blocks(q_head := out.shape[-1], out.dtype, "queries")
    launch = gradients.prepare[(triton.cdiv(sizes.queries, tiles.queries), batch * sizes.heads)]  # pyright: ignore[reportIndexIssue]
    launch(given, prepared, sizes, strides, _strides(dout), BLOCKS=tiles, num_warps=warps)
    upstream = gradients.Upstream(dattention, lse, delta)
    strides = strides._replace(out=_strides(dattention))
    _launch_gradients(given, upstream, results, (sizes, batch, q_head), strides, opts, needs)
    dq, dk, dv, dbias = results[:4]
    return dq, dk, dv, dbias, gated if needs[4] else results[4]


def _launch_gradients(
    given: Operands,
    upstream: gradients.Upstream,
    results: Sequence[torch.Tensor],
    shape: tuple[Sizes, int, int],
    strides: Strides,
    opts: Sequence[float],
    needs: Sequence[bool],
) -> None:
    (sizes, batch, head), dtype = shape, upstream.dout.dtype
    fixed = {"FLAGS": _flags(opts), "PRECISION": dot_precision(dtype)}
    dq, dk, dv, dbias, _ = results
    if needs[0]:
        tiles, warps, stages = blocks(head, dtype, "queries")
        launch = gradients.queries_backward[(triton.cdiv(sizes.queries, tiles.queries), batch * sizes.heads)]  # pyright: ignore[reportIndexIssue]
        launch(
            given, upstream, dq, sizes, strides, _strides(dq), opts[0],
            BLOCKS=tiles, num_warps=warps, num_stages=stages, **fixed,
        )  # fmt: skip
    if needs[1] or needs[2]:
        tiles, warps, stages = blocks(head, dtype, "keys", _busy(given, opts))
        heads = sizes.heads // sizes.group
        launch = gradients.keys_backward[(triton.cdiv(sizes.keys, tiles.keys), batch * heads)]  # pyright: ignore[reportIndexIssue]
        launch(
            given, upstream, (dk, dv), sizes, strides, (_strides(dk), _strides(dv)), opts[0],
            BLOCKS=tiles, num_warps=warps, num_stages=stages, **fixed,
        )  # fmt: skip
    if needs[3]:
        tiles, warps, stages = blocks(head, dtype, "bias")
        across = triton.cdiv(sizes.queries, tiles.queries) * triton.cdiv(sizes.keys, tiles.keys)
        entries = batch // sizes.rows
        # one part of 256 rows leaves half a GPU idle: 0.45 ms in place of 0.17 (H200, Triton 3.6)
        parts = waves(dbias.device, 4) // (across * sizes.heads * entries)
        parts = min(max(parts, 1), sizes.rows)
        partial = dbias if parts == 1 else dbias.new_empty(parts, dbias.numel(), dtype=torch.float32)
        launch = gradients.bias_backward[(across, sizes.heads, entries * parts)]  # pyright: ignore[reportIndexIssue]
        launch(
            given, upstream, partial, sizes, strides, opts[0], parts,
            BLOCKS=tiles, num_warps=warps, num_stages=stages, **fixed,
        )  # fmt: skip
        if parts > 1:
            column_sums_into((partial,), (dbias.view(-1),))


def _empty(q, k, v, bias, mask, gate, query_starts, key_starts, longest, opts):
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _empty_gradients(dout, dlse, out, lse, inputs, longest, opts, needs):
    q, k, v, bias, _, gate, _, _ = inputs
    keys = needs[1] or needs[2]
    wanted = ((q, needs[0]), (k, keys), (v, keys), (bias, needs[3]), (gate, False))
    results = [torch.empty_like(t) if need else dout.new_empty(0) for t, need in wanted]
    if needs[3]:
        results[3] = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    return tuple(results)


def _fake_gradients(dout, dlse, out, lse, inputs, longest, opts, needs):
    results = _empty_gradients(dout, dlse, out, lse, inputs, longest, opts, needs)
    return (*results[:4], torch.empty_like(out)) if needs[4] else results


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.longest, ctx.opts = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse):
    *tensors, out, lse = ctx.saved_tensors
    need = ctx.needs_input_grad
    if dout is None and dlse is None:
        return (None,) * 10
    dout = torch.zeros_like(out) if dout is None else _last_contiguous(dout)
    dlse = None if dlse is None else dlse.contiguous()
    needs = [need[0], need[1], need[2], need[3], need[5]]
    found = attention_backward(dout, dlse, out, lse, tensors, ctx.longest, ctx.opts, needs)
    dq, dk, dv, dbias, dgate = (g if n else None for g, n in zip(found, needs, strict=True))
    return dq, dk, dv, dbias, None, dgate, None, None, None, None


attention_backward = define(_attention_triton_backward, _fake_gradients)
attention = define(_attention_triton, _empty, save=_save, backward=_differentiate)
