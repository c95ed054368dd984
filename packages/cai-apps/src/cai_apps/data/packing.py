"""Documents put into rows of one length, so that few are cut and little is filled.

Best fit, longest first (Ding et al., "Fewer Truncations Improve Language Modeling", arXiv:2404.10830): each document
goes into the row with the least room that still holds it.
"""

from __future__ import annotations

import numpy as np


def cut(starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where the pieces of documents begin, and their sizes, int64 [pieces] each.

    Args:
        starts: the documents' first places in their stream, and the end of the last, int64 [documents + 1].
        length: the largest size of a piece. A longer document is cut; only its last piece is shorter.
    """
    sizes = np.diff(starts)
    counts = -(-sizes // length)
    owner = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = starts[:-1][owner] + number * length
    return first, np.minimum(length, starts[1:][owner] - first)


def best_fit(sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which pieces lie in which row: the pieces' numbers row by row, and where each row's begin.

    Args:
        sizes: tokens of each piece, at least 1 and at most `length`, int64 [pieces].
        length: the size of a row.

    Returns int64 [pieces] and [rows + 1]. In a row the pieces keep their order. The same sizes give the same rows.
    """
    row_of = np.empty(len(sizes), dtype=np.int64)
    rows_by_room: list[list[int]] = [[] for _ in range(length + 1)]
    rooms = 0  # bit r: some row has room for r
    rows = 0
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row, rows = length, rows, rows + 1
        row_of[piece] = row
        rows_by_room[room - size].append(row)
        rooms |= 1 << (room - size)
    order = np.argsort(row_of, kind="stable")
    return order, np.searchsorted(row_of[order], np.arange(rows + 1))
