"""Cross-entropy of a vocabulary in parts, for callers that split it over ranks and reduce between the calls."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.cross_entropy import reference
from cai_kernels.cross_entropy.function import DTYPES, check_options, check_target, rows_of
from cai_kernels.cross_entropy.options import LOGIT_SUM, PLAIN, LossOptions
from cai_kernels.errors import KernelError


class CrossEntropyParts(NamedTuple):
    """Statistics of every row, [...], float32 (float64 for float64 logits).

    To merge parts of a vocabulary: `maximum` by max; then `sum_exp` times exp(maximum - merged maximum), summed;
    `target_logit` and `logit_sum`, summed. Rows that are ignored hold the lowest number and zeros.
    """

    maximum: torch.Tensor
    sum_exp: torch.Tensor
    target_logit: torch.Tensor
    logit_sum: torch.Tensor


def cross_entropy_parts(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    vocab_start: int = 0,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_sum: bool = False,
    backend: Backend = "auto",
) -> CrossEntropyParts:
    """The statistics of some columns that the cross-entropy needs, in one pass. Not differentiable.

    Args:
        logits: [..., columns], the columns `vocab_start` and following of the vocabulary.
        target: [...], int64 or int32, of the whole vocabulary; `target_logit` is 0 where it is not
            among these columns.
        vocab_start: the first class among these columns.
        ignore_index: rows with this target are not read.
        softcap: as in `cross_entropy`.
        logit_sum: also sum the logits, which label smoothing needs; otherwise `logit_sum` holds zeros.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Raises `KernelError` naming the argument that does not fit.
    """
    form = choose(backend, logits.device)
    require("logits", logits, dtypes=DTYPES if form == "triton" else (*DTYPES, torch.float64))
    check_target(logits, target)
    check_options("none", 0.0, 0.0, softcap)
    logits = logits.detach()
    if form == "reference":
        rows, flat = logits.reshape(-1, logits.shape[-1]), target.reshape(-1).long()
        row_statistics = reference.parts(rows, flat, vocab_start, ignore_index, softcap)
        if not logit_sum:
            maximum, sum_exp, target_logit, sums = row_statistics
            row_statistics = (maximum, sum_exp, target_logit, torch.zeros_like(sums))
    else:
        from cai_kernels.cross_entropy import triton

        stats = triton.cross_entropy_scan(
            rows_of(logits),
            target.contiguous(),
            first=vocab_start,
            ignore_index=ignore_index,
            softcap=softcap or 0.0,
            statistic=LOGIT_SUM if logit_sum else PLAIN,
        )
        row_statistics = stats.unbind(0)
    return CrossEntropyParts(*(part.view(target.shape) for part in row_statistics))


def cross_entropy_from_parts(
    parts: CrossEntropyParts,
    target: torch.Tensor,
    vocab_size: int,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss with the z-loss in it, z-loss) of every row, [...], from the merged parts; zeros where ignored."""
    check_options("none", label_smoothing, z_loss, None)
    log_sum = parts.sum_exp.log()
    z = z_loss * (parts.maximum + log_sum).square()
    loss = log_sum + (1 - label_smoothing) * (parts.maximum - parts.target_logit) + z
    if label_smoothing:
        loss = loss + label_smoothing * (parts.maximum - parts.logit_sum / vocab_size)
    ignored = target == ignore_index
    return loss.masked_fill(ignored, 0.0), z.masked_fill(ignored, 0.0)


def _check_rows(logits: torch.Tensor, target: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
    for name, value in values.items():
        require(name, value, dtypes=(*DTYPES, torch.float64), like=logits)
        if value.shape != target.shape:
            raise KernelError(
                f"{name} does not fit target", got=tuple(value.shape), expected=tuple(target.shape)
            )


def _check_out(logits: torch.Tensor, out: torch.Tensor | None) -> None:
    if out is not None and (
        (out.shape, out.dtype) != (logits.shape, logits.dtype)
        or not (out.is_contiguous() or (out.dim() in (2, 3) and out.stride(-1) == 1))
    ):
        raise KernelError(
            "out does not fit logits",
            got=f"{tuple(out.shape)} {out.dtype}, strides {out.stride()}",
            expected=f"{tuple(logits.shape)} {logits.dtype}, contiguous or of 2 or 3 dims with contiguous columns",
        )


def cross_entropy_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    parts: CrossEntropyParts,
    dloss: torch.Tensor,
    *,
    vocab: tuple[int, int] | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """The gradient of the logits of some columns, given the merged parts of the whole vocabulary.

    Args:
        logits: [..., columns], what `cross_entropy_parts` was given.
        target: classes of the whole vocabulary, [...].
        parts: merged over the vocabulary; `maximum` and `sum_exp` are read.
        dloss: [...], the gradient of every row's loss; a row with 0 (as an ignored one must have) is not read.
        vocab: (first class among these columns, size of the vocabulary); by default the columns are all of it.
        label_smoothing, z_loss, softcap: as in `cross_entropy`.
        out: tensor to write it to, like logits in shape and dtype, with contiguous columns; may be `logits` itself.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns [..., columns] in the dtype of logits; `out` if it was given. Raises `KernelError` naming the argument that
    does not fit.
    """
    form = choose(backend, logits.device)
    require("logits", logits, dtypes=DTYPES if form == "triton" else (*DTYPES, torch.float64))
    check_target(logits, target)
    check_options("none", label_smoothing, z_loss, softcap)
    _check_rows(
        logits, target, {"dloss": dloss, "parts.maximum": parts.maximum, "parts.sum_exp": parts.sum_exp}
    )
    _check_out(logits, out)
    logits, vocab = logits.detach(), vocab or (0, logits.shape[-1])
    loss = LossOptions(-1, label_smoothing, z_loss, softcap or 0.0)
    if form == "reference":
        rows, flat = logits.reshape(-1, logits.shape[-1]), target.reshape(-1).long()
        stats = (parts.maximum.reshape(-1), parts.sum_exp.reshape(-1))
        gradient = reference.gradient(
            rows, flat, stats, dloss.reshape(-1), loss, first=vocab[0], vocabulary=vocab[1]
        ).view(logits.shape)
        return gradient if out is None else out.detach().copy_(gradient)
    return _gradient_in_triton(logits, target, parts, dloss, vocab, loss, out)


def _gradient_in_triton(
    logits: torch.Tensor,
    target: torch.Tensor,
    parts: CrossEntropyParts,
    dloss: torch.Tensor,
    vocab: tuple[int, int],
    loss: LossOptions,
    out: torch.Tensor | None,
) -> torch.Tensor:
    from cai_kernels.cross_entropy import triton

    maximum, sum_exp = (part.reshape(-1).float() for part in (parts.maximum, parts.sum_exp))
    stats = torch.stack((maximum, sum_exp, maximum, sum_exp))  # the last two are not used
    rows = rows_of(logits)
    result = torch.empty_like(rows, memory_format=torch.contiguous_format) if out is None else out.detach()
    triton.cross_entropy_gradient_(
        dloss.reshape(-1).float().contiguous(),
        rows,
        target.contiguous(),
        stats,
        rows_of(result),
        first=vocab[0],
        vocabulary=vocab[1],
        label_smoothing=loss.label_smoothing,
        z_loss=loss.z_loss,
        softcap=loss.softcap,
    )
    return result.view(logits.shape)
