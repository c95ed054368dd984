"""Which places of a batch are text, and which fill its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def text_places(inputs: Mapping[str, Any]) -> Tensor | None:
    """Return 1 for places of documents and 0 for those that fill a row; nobody waits for the device.

    What fills a row of documents is its last one, of one id alone (`cai_apps.data.document_rows`). Of rows that do not
    say where documents begin, all places count.

    Args:
        inputs: `input_ids`, int64 [B, S], and where there are documents `cu_seqlens`, int32 [B, D + 1]; what a mask of
            padding says, `attention_mask` [B, S], counts in place of both.

    Returns float32 [B, S]; None: all places count.
    """
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask.float()
    ids, starts = inputs.get("input_ids"), inputs.get("cu_seqlens")
    if ids is None or starts is None:
        return None
    length = ids.shape[1]
    last = starts.masked_fill(starts >= length, 0).amax(1, keepdim=True)
    tail = torch.arange(length, device=ids.device) >= last
    of_one_id = (~tail | (ids == ids[:, -1:])).all(1, keepdim=True)
    return (~(tail & of_one_id)).float()
