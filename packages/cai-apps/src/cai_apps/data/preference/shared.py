"""Pairs in a row whose documents begin alike: what they begin with is written once, and each goes on from it.

[prompt but its last token][that token and the chosen answer][that token and the rejected answer]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cai_apps.data.document_rows import Piece, write_row
from cai_apps.data.documents import Documents


def shared_sizes(documents: Documents, units: np.ndarray) -> np.ndarray:
    """Return the tokens that both documents of pairs begin with and that may be computed once, int64 [units].

    The last token before an answer is not among them: what comes after it differs, and is asked of it twice.

    Args:
        documents: two of each unit, one after the other, with marks of what is scored.
        units: the numbers of the units, int64 [units].
    """
    stream, starts, trained = documents.stream(), np.asarray(documents.starts()), documents.marks()
    sizes = np.zeros(len(units), dtype=np.int64)
    for place, unit in enumerate(units.tolist()):
        first, middle, end = starts[2 * unit : 2 * unit + 3].tolist()
        least = min(middle - first, end - middle)
        if trained is None or not least:
            continue
        differs = stream[first : first + least] != stream[middle : middle + least]
        ends = differs | trained[first : first + least] | trained[middle : middle + least]
        sizes[place] = max(0, (int(ends.argmax()) if ends.any() else least) - 1)
    return sizes


def prefixes_of(units: int) -> np.ndarray:
    """Return the document that each of a row goes on from, int32 [3 units + 1]: of what fills a row, its own number."""
    numbers = np.arange(3 * units + 1, dtype=np.int32)
    return np.where(numbers < 3 * units, numbers // 3 * 3, numbers)


def write_shared(
    batch: dict[str, np.ndarray], row: int, pairs: Sequence[tuple[Piece, ...]], sizes: np.ndarray
) -> None:
    """Write pairs into a row, three documents each, and what fills it.

    Args:
        batch: the arrays of `empty_rows`, for three documents a pair and one more.
        row: the number of the row.
        pairs: ids and labels of the chosen and of the rejected document of each, whole.
        sizes: the tokens of each that are written once, int64 [pairs].
    """
    pieces = []
    for documents, size in zip(pairs, sizes.tolist(), strict=True):
        (ids, labels), _ = documents
        pieces.append((ids[:size], labels[:size]))
        pieces += [(ids[size:], labels[size:]) for ids, labels in documents]
    write_row(batch, row, pieces)
    starts = batch["cu_seqlens"][row]
    for number, size in enumerate(sizes.tolist()):
        batch["position_ids"][row, starts[3 * number + 1] : starts[3 * number + 3]] += size
