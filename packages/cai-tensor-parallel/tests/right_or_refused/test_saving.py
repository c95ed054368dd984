"""A file of a cut model holds whole tensors, or is not written."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from cai_mesh.checkpoint import save_hf
from cai_mesh.errors import CheckpointError
from cai_mesh.testing import run_ranks
from cai_tensor_parallel import parallelize


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=96
    )
    return AutoModelForCausalLM.from_config(config)


def save(folder):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize(llama(), mesh)
    with pytest.raises(CheckpointError, match="save_hf"):
        model.save_pretrained(f"{folder}/parts")
    for state in (model.state_dict(), copy.deepcopy(model.state_dict())):
        with pytest.raises(CheckpointError, match="save_hf"):
            torch.save(state, f"{folder}/state-{dist.get_rank()}.pt")
    with pytest.raises(CheckpointError, match="whole model"):
        pickle.dumps(model.model.layers[0].mlp.state_dict()["up_proj.weight"])
    torch.save(model.model.norm.state_dict(), f"{folder}/norm-{dist.get_rank()}.pt")  # whole on every rank
    model.load_state_dict(model.state_dict())
    save_hf(model, f"{folder}/whole")


def test_no_file_holds_parts(tmp_path):
    run_ranks(2, save, str(tmp_path))
    assert not (tmp_path / "parts").exists()
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    for name, parameter in llama().named_parameters():
        assert torch.equal(read.get_parameter(name), parameter)
