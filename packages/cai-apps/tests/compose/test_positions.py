"""Positions are looked at once per length, and in every forward where they may differ."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from cai_apps.compose.positions import PositionsKnown


@pytest.fixture
def looks():
    """Counts how often transformers looks at values."""
    real = masking_utils.find_packed_sequence_indices
    with mock.patch.object(masking_utils, "find_packed_sequence_indices", side_effect=real) as counted:
        yield counted


def model():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, vocab_size=96)).eval()


@pytest.mark.parametrize("batch", [1, 2])
def test_a_length_is_looked_at_once(looks, batch):
    llama, running = model(), PositionsKnown()
    ids = torch.randint(0, 96, (batch, 8), generator=torch.Generator().manual_seed(0))
    plain = llama(input_ids=ids, use_cache=False).logits
    looks.reset_mock()
    for _ in range(3):
        with running():
            assert torch.equal(llama(input_ids=ids, use_cache=False).logits, plain)
    assert looks.call_count == 1
    with running():
        llama(input_ids=ids[:, :6], use_cache=False)
    assert looks.call_count == 2
    assert masking_utils.find_packed_sequence_indices is looks  # outside nothing is changed


@pytest.mark.parametrize("batch", [1, 2])
def test_positions_of_a_packed_batch_are_seen_every_time(looks, batch):
    llama, running = model(), PositionsKnown()
    ids = torch.randint(0, 96, (batch, 8), generator=torch.Generator().manual_seed(0))
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2, 3, 4]])[:batch]
    plain = llama(input_ids=ids, position_ids=packed, use_cache=False).logits
    with running():
        llama(input_ids=ids, use_cache=False)
        for _ in range(2):
            assert torch.equal(llama(input_ids=ids, position_ids=packed, use_cache=False).logits, plain)


def test_without_values_no_batch_is_packed(looks):
    with FakeTensorMode(), PositionsKnown()():
        found = masking_utils.find_packed_sequence_indices(torch.arange(8)[None].expand(2, -1))
    assert found is None
    assert looks.call_count == 0
