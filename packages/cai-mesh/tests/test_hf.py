"""Hugging Face directories: written by any layout, opened by transformers; read box by box."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from processes import ended, start
from torch import nn

from cai_mesh import checkpoint
from cai_mesh.checkpoint import hf
from cai_mesh.checkpoint.lock import Lock
from cai_mesh.errors import CheckpointError
from cai_mesh.layout import BoxedTensor, Layout, Shard, attach
from cai_mesh.testing import run_ranks


def llama(seed=0, **options):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", **shape, vocab_size=31, **options)
    return AutoModelForCausalLM.from_config(config).eval()


def cut(model, degree, index):
    """Keep this rank's rows of every parameter."""
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is None:
                continue
            layout = Layout(tuple(p.shape)).then("r", degree, index, Shard(0))
            local = torch.empty(layout.local_shape)
            for where, box in layout.slices():
                local[where] = p.detach()[box.slices()]
            part = nn.Parameter(local)
            attach(part, layout)
            module._parameters[name] = part
    return model


def export(directory, limit):
    model = cut(llama(), dist.get_world_size(), dist.get_rank())
    checkpoint.save_hf(model, directory, max_file_bytes=limit)


@pytest.mark.parametrize(("world", "limit", "files"), [(1, 10**9, 1), (2, 4000, 8), (3, 10**9, 1)])
def test_transformers_opens_what_was_written(world, limit, files, tmp_path):
    from transformers import AutoModelForCausalLM

    out = tmp_path / "export"
    run_ranks(world, export, str(out), limit)
    assert (len(list(out.glob("*.safetensors"))) == 1) == (files == 1)
    again = AutoModelForCausalLM.from_pretrained(out).eval()
    ids = torch.arange(9)[None]
    assert torch.equal(again(ids).logits, llama()(ids).logits)


def read_back(directory):
    model = cut(llama(seed=1), dist.get_world_size(), dist.get_rank())
    checkpoint.load_hf(model, directory)
    expected = dict(llama().named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(BoxedTensor.from_param(p).to_full(dist.group.WORLD), expected[name])


@pytest.mark.parametrize("size", ["5GB", "4KB"])
def test_ranks_read_their_rows(size, tmp_path):
    llama().save_pretrained(tmp_path, max_shard_size=size)
    run_ranks(2, read_back, str(tmp_path))


def test_tied_weights_are_written_once(tmp_path):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    model = llama(tie_word_embeddings=True)
    checkpoint.save_hf(model, tmp_path / "out", dtype=torch.bfloat16)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in list(file.keys())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_errors(tmp_path):
    llama().save_pretrained(tmp_path / "in")
    with pytest.raises(CheckpointError, match="parameters differ"):
        checkpoint.load_hf(llama(attention_bias=True), tmp_path / "in")
    with pytest.raises(CheckpointError, match="no safetensors"):
        checkpoint.load_hf(llama(), tmp_path)
    with pytest.raises(CheckpointError, match="not empty"):
        checkpoint.save_hf(llama(), tmp_path / "in")


def test_an_export_keeps_others_out_and_removes_what_killed_ones_left(tmp_path):
    """One process is killed while it exports; another may not export at once with a third."""
    left = tmp_path / f"out.{'0' * 32}.tmp"
    left.mkdir()
    alive = Lock(tmp_path / "out.lock", "1" * 32)
    assert ended(start(lambda: checkpoint.save_hf(llama(), tmp_path / "out"))) == 1, "another job was let in"
    alive.release()
    checkpoint.save_hf(llama(), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def failing(directory):
    write = hf._write_boxes

    def full(*_):
        raise OSError(28, "No space left on device")

    hf._write_boxes = full if dist.get_rank() == 1 else write
    try:
        with pytest.raises(CheckpointError, match="rank 1 could not write"):
            checkpoint.save_hf(llama(), directory)
    finally:
        hf._write_boxes = write


def test_an_export_that_fails_leaves_nothing(tmp_path):
    run_ranks(2, failing, str(tmp_path / "out"))
    assert not list(tmp_path.iterdir())
