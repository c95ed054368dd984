"""Rows of several documents: the rule by which a language model attends, and the proof that it keeps them apart.

Which models do is not a list: a small model of the same kind is given rows of several documents, and each document
alone to the model as transformers has it. A model with a state that runs over the row, a convolution or positions that
it counts itself says other things of the two.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cai_kernels import (
    attention,
    attention_backward,
    attention_with_lse,
    document_attention,
    document_tail_attention,
    last_queries_attention,
    merge_attention,
    sink_attention,
)
from cai_mesh.attention import masked_attention, prefix_mask, route_attention
from cai_mesh.errors import CaiError, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cai_mesh.protocols import AttentionCall

APART = 1e-5
"""How far a document's logits in a row may be from those of the document alone, as a part of the largest. Float64
gives 1e-15, or 1e-7 where parts of a model compute in float32; documents that are mixed 1e-2 and more."""


def document_rule(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Attend by the fastest form: an `AttentionRule` of cai_kernels.

    Documents that go on from others attend under a mask [B, 1, S, S]: no packed form has keys of two places.
    """
    starts, query_starts = _boundaries(query, key, call)
    if call.mask is not None or _has_no_kernel(call, query_starts):
        return masked_attention(query, key, value, call)
    options: dict[str, Any] = {"causal": call.causal, "scale": call.scale, "window": call.window}
    if call.sinks is not None:
        boundaries = {"cu_seqlens": starts, "query_cu_seqlens": query_starts}
        return sink_attention(query, key, value, call.sinks, **options, **boundaries)
    options |= {"softcap": call.softcap, "dropout": call.dropout}
    if starts is None:
        return attention(query, key, value, **options)
    if call.prefixes is not None:
        length, window = query.shape[-2], call.window
        mask = prefix_mask(starts, call.prefixes, length, causal=call.causal, window=window)
        return attention(query, key, value, **(options | {"mask": mask, "causal": False, "window": None}))
    if query_starts is None:
        return document_attention(query, key, value, starts, **options)
    if call.cu_seqlens is None and call.causal and call.window is None and call.softcap is None:
        return last_queries_attention(query, key, value, scale=call.scale)
    del options["dropout"]
    return document_tail_attention(query, key, value, starts, query_starts, **options)


def _has_no_kernel(call: AttentionCall, query_starts: Tensor | None) -> bool:
    """Return whether a call asks for two things that no kernel has together."""
    if call.sinks is not None:
        return bool(call.dropout) or call.softcap is not None or call.prefixes is not None
    return query_starts is not None and (bool(call.dropout) or call.prefixes is not None)


def _boundaries(query: Tensor, key: Tensor, call: AttentionCall) -> tuple[Tensor | None, Tensor | None]:
    """Return where documents begin, of keys and, where they are fewer, of queries; None: each row is one document."""
    starts, query_starts, earlier = call.cu_seqlens, call.query_cu_seqlens, key.shape[-2] - query.shape[-2]
    if starts is None and earlier:
        ends = torch.arange(0, 2 * key.shape[-2], key.shape[-2], dtype=torch.int32, device=key.device)
        starts = ends.repeat(len(key), 1)
    if starts is not None and earlier and query_starts is None:  # the last queries of a row
        query_starts = (starts - earlier).clamp_min(0)
    return starts, query_starts


class KernelParts:
    """`cai_mesh.protocols.AttentionParts` by kernels: cuDNN and flash, and Triton for soft caps and documents."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """Attend to these keys."""
        return attention_with_lse(query, key, value, **self._options(call))

    def merge(self, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Merge the attention to two sets of keys."""
        return merge_attention(*first, *second)

    def backward(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        call: AttentionCall,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiate by query, key and value."""
        return attention_backward(dout, query, key, value, out, lse, **self._options(call))

    def _options(self, call: AttentionCall) -> dict[str, Any]:
        boundaries = {"cu_seqlens": call.cu_seqlens, "query_cu_seqlens": call.query_cu_seqlens}
        return {"causal": call.causal, "scale": call.scale, "softcap": call.softcap} | boundaries


def check_keeps_documents_apart(model: PreTrainedModel, name: str) -> None:
    """Raise ConfigError where a model of this kind mixes the documents of a row, or it cannot be tried.

    Args:
        model: a model on the meta device, as transformers makes it.
        name: the name of its config.
    """
    otherwise = 'take another model; of texts, data.boundaries = "ignore" lets them be mixed'
    moved = _tried(model, name, APART_ROWS, otherwise)
    if moved > APART:
        raise ConfigError(
            f"{name} does not keep apart the documents of a row",
            got=f"a small {type(model).__name__}, whose logits differ by {moved:.1e} from those of each document alone",
            cause="a part of it mixes them: a state that runs over the row, a convolution, positions that it counts",
            fix=otherwise,
        )


def check_reads_prefixes(model: PreTrainedModel, name: str) -> None:
    """Raise ConfigError where documents of a model of this kind cannot go on from one that is computed once.

    Args:
        model: a model on the meta device, as transformers makes it.
        name: the name of its config.
    """
    otherwise = "leave alignment.share_prompts out"
    _check_goes_on(model, name, f"{name} does not compute a prompt once for both of its answers", otherwise)


def check_continues(model: PreTrainedModel, name: str) -> None:
    """Raise ConfigError where a model of this kind cannot go on from keys and values of tokens before.

    Args:
        model: a model on the meta device, as transformers makes it.
        name: the name of its config.
    """
    otherwise = "generate with transformers' own generate"
    _check_goes_on(model, name, f"{name} cannot go on from keys and values in a cache alone", otherwise)


def _check_goes_on(model: PreTrainedModel, name: str, what: str, otherwise: str) -> None:
    moved = _tried(model, name, PREFIX_ROWS, otherwise)
    if moved > APART:
        raise ConfigError(
            what,
            got=f"a small {type(model).__name__}, whose logits differ by {moved:.1e} from those of whole texts",
            cause="a part of it sees more than attention shows it: a state, a convolution, positions that it counts",
            fix=otherwise,
        )


@dataclass(frozen=True)
class _Rows:
    """Rows of 12 tokens on which a model is tried.

    Args:
        lengths: those of the documents of each row.
        prefixes: the document that each goes on from, or its own number.
    """

    lengths: tuple[tuple[int, ...], ...]
    prefixes: tuple[tuple[int, ...], ...] | None = None

    def starts(self) -> Tensor:
        """Return where documents begin and rows end, int32 [rows, documents + 1]."""
        return torch.nn.functional.pad(torch.tensor(self.lengths).cumsum(1), (1, 0)).int()

    def sources(self) -> list[list[list[int]]]:
        """Return the places of a row of which each document is made, whole."""
        rows = []
        for bounds, prefixes in zip(self.starts().tolist(), self._prefixes(), strict=True):
            spans = [list(range(first, end)) for first, end in itertools.pairwise(bounds)]
            rows.append(
                [
                    span if prefix == number else spans[prefix] + span
                    for number, (span, prefix) in enumerate(zip(spans, prefixes, strict=True))
                ]
            )
        return rows

    def _prefixes(self) -> tuple[tuple[int, ...], ...]:
        return self.prefixes or tuple(tuple(range(len(row))) for row in self.lengths)

    def inputs(self) -> dict[str, Tensor]:
        """Return what the model reads of the rows beside their ids."""
        places = [
            [
                position
                for document, length in zip(documents, lengths, strict=True)
                for position in range(len(document) - length, len(document))
            ]
            for documents, lengths in zip(self.sources(), self.lengths, strict=True)
        ]
        inputs = {"position_ids": torch.tensor(places), "cu_seqlens": self.starts()}
        return inputs if self.prefixes is None else inputs | {"prefixes": torch.tensor(self.prefixes).int()}


APART_ROWS = _Rows(((5, 7), (3, 9)))
PREFIX_ROWS = _Rows(((4, 3, 5, 0), (2, 3, 5, 2)), ((0, 0, 0, 3), (0, 0, 0, 3)))


def _tried(model: PreTrainedModel, name: str, rows: _Rows, otherwise: str) -> float:
    """Return how far a small model's logits move in rows; raises ConfigError where it cannot be tried."""
    try:
        return _moved(model, rows)
    except Exception as error:  # whatever its code meets in a config made small, or in rows of documents
        cause = (error.cause if isinstance(error, CaiError) else "") or str(error)
        what = error.what if isinstance(error, CaiError) else type(error).__name__
        raise ConfigError(
            f"nothing shows that {name} keeps apart the documents of a row",
            got=f"a small {type(model).__name__}, which cannot be tried: {what}",
            cause=(cause.splitlines() or [""])[0],
            fix=otherwise,
        ) from error


def _moved(model: PreTrainedModel, rows: _Rows) -> float:
    """Return the largest difference of a document's logits in a row and alone, as a part of the largest logit."""
    from cai_mesh.trial import arguments_of, shrunk

    small = shrunk(model, labelled=False)
    plain, routed = small.build(), small.build()
    plain.set_attn_implementation("eager")  # the form that knows soft caps in every version of transformers
    route_attention(routed, document_rule)
    ids = small.inputs()["input_ids"]
    with torch.no_grad(), torch.device("cpu"):
        logits = routed(**arguments_of(routed, {"input_ids": ids} | rows.inputs())).logits
        differences, sizes = [], []
        for row, documents in enumerate(rows.sources()):
            bounds = rows.starts()[row].tolist()
            for (first, end), places in zip(itertools.pairwise(bounds), documents, strict=True):
                if first == end:
                    continue
                alone = plain(**arguments_of(plain, {"input_ids": ids[row : row + 1, places]})).logits
                differences.append((logits[row, first:end] - alone[0, first - end :]).abs().max())
                sizes.append(alone.abs().max())
    return float(torch.stack(differences).max() / torch.stack(sizes).max())
