"""Keeps models of transformers from making the host wait in every forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class PositionsKnown:
    """A context in which models of transformers look at the values of positions once, not in every forward.

    For batches that bring no positions of their own. Models look for several sequences packed into one, and the host
    waits for the device each time. Positions that are the same for the whole batch are made of its length alone: what
    was found once for a length holds. Where there are no values (`FakeTensorMode`), they are taken for those of a
    sequence, as they are in a run.
    """

    NAME = "find_packed_sequence_indices"

    def __init__(self) -> None:
        self._plain: set[tuple[int, torch.device]] = set()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        from transformers import masking_utils

        look = getattr(masking_utils, self.NAME, None)
        if look is None:
            yield
            return

        def find(position_ids: Tensor) -> Tensor | None:
            if isinstance(position_ids, FakeTensor):
                return None
            same = position_ids.shape[0] > 1 and position_ids.stride(0) == 0
            key = (position_ids.shape[1], position_ids.device)
            if same and key in self._plain:
                return None
            found = look(position_ids)
            if same and found is None:
                self._plain.add(key)
            return found

        with mock.patch.object(masking_utils, self.NAME, find):
            yield
