"""Rows of several documents: the rule by which a language model attends, and the proof that it keeps them apart.

Which models do is not a list: a small model of the same kind is given rows of several documents, and each document
alone to the model as transformers has it. A model with a state that runs over the row, a convolution or positions that
it counts itself says other things of the two.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cai_kernels import attention, document_attention
from cai_mesh.attention import masked_attention, route_attention
from cai_mesh.errors import CaiError, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cai_mesh.protocols import AttentionCall

APART = 1e-5
"""How far a document's logits in a row may be from those of the document alone, as a part of the largest. Float64
gives 1e-15, or 1e-7 where parts of a model compute in float32; documents that are mixed 1e-2 and more."""
LENGTHS = ((5, 7), (3, 9))
"""Documents of the rows that are tried."""


def document_rule(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Attend by the fastest form: an `AttentionRule` of cai_kernels."""
    options: dict[str, Any] = {"causal": call.causal, "scale": call.scale, "window": call.window}
    options |= {"softcap": call.softcap, "dropout": call.dropout}
    if call.mask is not None or query.shape[-2] != key.shape[-2]:
        return masked_attention(query, key, value, call)
    if call.cu_seqlens is None:
        return attention(query, key, value, **options)
    return document_attention(query, key, value, call.cu_seqlens, **options)


def check_keeps_documents_apart(model: PreTrainedModel, name: str) -> None:
    """Raise ConfigError where a model of this kind mixes the documents of a row, or it cannot be tried.

    Args:
        model: a model on the meta device, as transformers makes it.
        name: the name of its config.
    """
    kind, otherwise = (
        f"a small {type(model).__name__}",
        'take another model; of texts, data.boundaries = "ignore" lets them be mixed',
    )
    try:
        moved = _moved(model)
    except Exception as error:  # whatever its code meets in a config made small, or in rows of documents
        cause = (error.cause if isinstance(error, CaiError) else "") or str(error)
        raise ConfigError(
            f"nothing shows that {name} keeps apart the documents of a row",
            got=f"{kind}, which cannot be tried: {error.what if isinstance(error, CaiError) else type(error).__name__}",
            cause=(cause.splitlines() or [""])[0],
            fix=otherwise,
        ) from error
    if moved > APART:
        raise ConfigError(
            f"{name} does not keep apart the documents of a row",
            got=f"{kind}, whose logits differ by {moved:.1e} from those of each document alone",
            cause="a part of it mixes them: a state that runs over the row, a convolution, positions that it counts",
            fix=otherwise,
        )


def _moved(model: PreTrainedModel) -> float:
    """Return the largest difference of a document's logits in a row and alone, as a part of the largest logit."""
    from cai_mesh.trial import arguments_of, shrunk

    small = shrunk(model, labelled=False)
    plain, routed = small.build(), small.build()
    route_attention(routed, document_rule)
    ids = small.inputs()["input_ids"]
    places = torch.tensor([[place for length in row for place in range(length)] for row in LENGTHS])
    starts = torch.nn.functional.pad(torch.tensor(LENGTHS).cumsum(1), (1, 0)).int()
    inputs = {"input_ids": ids, "position_ids": places, "cu_seqlens": starts}
    with torch.no_grad(), torch.device("cpu"):
        rows = routed(**arguments_of(routed, inputs)).logits
        differences, sizes = [], []
        for row, bounds in enumerate(starts.tolist()):
            for first, end in itertools.pairwise(bounds):
                alone = plain(**arguments_of(plain, {"input_ids": ids[row : row + 1, first:end]})).logits
                differences.append((rows[row, first:end] - alone[0]).abs().max())
                sizes.append(alone.abs().max())
    return float(torch.stack(differences).max() / torch.stack(sizes).max())
