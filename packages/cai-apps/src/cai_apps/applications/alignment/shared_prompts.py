"""Prompts that are computed once for both answers of a pair: which models can, what that leaves out, and its FLOPs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from cai_apps.applications.alignment.config import Config
from cai_apps.compose.documents import check_keeps_documents_apart, check_reads_prefixes
from cai_apps.compose.models import load_model_config, meta_model
from cai_apps.data.document_rows import lengths_of
from cai_apps.data.preference.rows import PreferenceRows


def check_rows(config: Config, name: str) -> None:
    """Raise ConfigError where a model of this name mixes the documents of a row, or the answers of a shared prompt."""
    model = meta_model(load_model_config(name))
    check_keeps_documents_apart(model, name)
    if config.alignment.share_prompts:
        check_reads_prefixes(model, name)


def flops_of(count: Callable[[np.ndarray], float], batch: dict[str, torch.Tensor]) -> float:
    """Return the FLOPs of a batch: of what goes on from another document, those of both less those of that one."""
    if "prefixes" not in batch:
        return count(lengths_of(batch))
    lengths, prefixes = np.diff(batch["cu_seqlens"].numpy().astype(np.int64)), batch["prefixes"].numpy()
    goes_on = prefixes != np.arange(prefixes.shape[1])
    before = np.where(goes_on, np.take_along_axis(lengths, prefixes.astype(np.int64), 1), 0)
    return count((lengths + before).ravel()) - count(before.ravel())


def saved_line(rows: PreferenceRows) -> str:
    """Return a line that says how many tokens of pairs are computed once for both answers, if any are."""
    if rows.shared is None:
        return ""
    once = int(rows.shared.sum())
    all_tokens = int(rows.source.documents.lengths().reshape(-1, 2)[rows.order].sum())
    return f"prompts are computed once for both answers: {once / all_tokens:.1%} of the tokens less\n"
