"""Shows on a small model of the same kind that nothing but attention looks along a row.

The model is run on whole rows as transformers has it; then with the attention of ranks and positions from 0 on, and its
keys and values are kept; then on the tokens of each of two ranks, each layer being given the keys and values that the
other rank would have. A convolution, a state that runs over the row, attention in chunks or positions of another
beginning (RoBERTa) give other logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cai_mesh.attention import masked_attention, route_attention
from cai_mesh.errors import CaiError, PlanError
from cai_mesh.protocols import AttentionCall
from cai_mesh.trial import SmallModel, Trial, arguments_of
from cai_tensor_parallel.context.cutting import Cut
from cai_tensor_parallel.context.pieces import attend_pieces

RANKS = 2
CLOSE = 1e-5
"""How far logits may be from those of whole rows, as a part of the largest. Float64 gives 1e-15, or 1e-7 where parts of
a model compute in float32."""
LENGTH = 16
"""Tokens of a row."""


class _Kept:
    """A rule that attends on whole rows and keeps keys and values; then on those of one rank.

    Args:
        row_cut: the rank's part; None: whole rows.
        memory: keys and values of whole rows, call by call.
    """

    def __init__(self, row_cut: Cut | None, memory: list[tuple[Tensor, Tensor]]):
        self._row_cut, self._memory, self._calls = row_cut, memory, 0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        if self._row_cut is None:
            self._memory.append((key.detach(), value.detach()))
            return masked_attention(query, key, value, call)
        whole_key, whole_value = self._memory[self._calls]
        self._calls += 1
        if key.shape[2] * self._row_cut.ranks != whole_key.shape[2]:
            raise PlanError("a layer attends to other tokens than those of its rows")
        (places,) = self._row_cut.places(whole_key.shape[2], key.device)
        keys, values = whole_key.index_copy(2, places, key), whole_value.index_copy(2, places, value)
        keys, values = self._row_cut.by_rank(keys, 2), self._row_cut.by_rank(values, 2)
        return attend_pieces(self._row_cut, masked_attention, query, keys, values, call)


def verify_context(trial: Trial | SmallModel) -> None:
    """Raise `PlanError` where a small model has other logits on parts of rows than on whole ones, or does not run."""
    try:
        moved = _moved(trial)
    except Exception as error:  # whatever its code meets in a config made small, or in parts of rows
        what = error.what if isinstance(error, CaiError) else f"{type(error).__name__}: {error}"
        raise PlanError(
            "nothing shows that rows of this model can be cut over ranks",
            got="a small model of its kind, which cannot be tried",
            cause=(what.splitlines() or [""])[0],
            fix="take a model whose layers attend by transformers' registry, and give it whole rows",
        ) from error
    if moved > CLOSE:
        raise PlanError(
            "rows of this model cannot be cut over ranks",
            got=f"a small model of its kind, whose logits differ by {moved:.1e} from those of whole rows",
            cause="a part of it besides attention looks along a row, or its attention is another: a state, a "
            "convolution, chunks, positions that it counts",
            fix="give it whole rows",
        )


def _moved(trial: Trial | SmallModel) -> float:
    with torch.device("cpu"), torch.no_grad():
        memory: list[tuple[Tensor, Tensor]] = []
        model = trial.build().double().eval()
        ids = _rows(trial.inputs()["input_ids"])
        logits = _called(model, ids, None)  # with its own attention and the positions that it counts
        places = torch.arange(LENGTH).expand_as(ids)
        differences = [(_logits(model, None, memory, ids, places) - logits).abs().max()]
        for index in range(RANKS):
            row_cut = Cut(RANKS, index)
            part = _logits(model, row_cut, memory, row_cut.own(ids, 1), row_cut.own(places, 1))
            differences.append((part - row_cut.own(logits, 1)).abs().max())
    return float(torch.stack(differences).max() / logits.abs().max())


def _rows(ids: Tensor) -> Tensor:
    """Two rows of `LENGTH` ids, of those that the trial has."""
    return ids.flatten().repeat(2 * LENGTH)[: 2 * LENGTH].view(2, LENGTH)


def _logits(
    model: nn.Module, row_cut: Cut | None, memory: list[tuple[Tensor, Tensor]], ids: Tensor, places: Tensor
) -> Tensor:
    route_attention(model, _Kept(row_cut, memory))
    return _called(model, ids, places)


def _called(model: nn.Module, ids: Tensor, places: Tensor | None) -> Tensor:
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if places is not None:
        inputs["position_ids"] = places
    output = model(**arguments_of(model, inputs))
    if isinstance(output, Sequence):
        return output[0]
    return next(iter(output.values()))
