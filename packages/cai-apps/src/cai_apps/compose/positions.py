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
    waits for the device each time. Positions that have no batch dimension of their own, or are the same for the whole
    batch, are made of its length alone: what was found once for a length holds. Where there are no values
    (`FakeTensorMode`), they are taken for those of a sequence, as they are in a run.
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
            of_length = _is_of_length_alone(position_ids)
            key = (position_ids.shape[1], position_ids.device)
            if of_length and key in self._plain:
                return None
            sequence_indices = look(position_ids)
            if of_length and sequence_indices is None:
                self._plain.add(key)
            return sequence_indices

        with mock.patch.object(masking_utils, self.NAME, find):
            yield


def _is_of_length_alone(position_ids: Tensor) -> bool:
    """Whether positions, (batch, sequence), cannot depend on what is in a batch that brings none."""
    if position_ids.shape[0] > 1:
        return position_ids.stride(0) == 0
    base = position_ids._base  # of one sample: a view of what a model made without a batch dimension
    return base is not None and base.dim() == 1
