"""Hugging Face directories: written by any layout, opened by transformers; read box by box."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from processes import ended, start
from safetensors.torch import save_file
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


def replaced(directory):
    """Rank r holds what replaces the r-th parameter; no rank has all of them."""
    model = llama()
    names = [name for name, _ in model.named_parameters()]
    mine = {
        n: BoxedTensor.from_param(torch.full_like(p, 7.0))
        for n, p in model.named_parameters()
        if n in names[:4]
    }
    rank, world = dist.get_rank(), dist.get_world_size()
    own = {n: mine[n] for i, n in enumerate(names[:4]) if i % world == rank}
    checkpoint.save_hf(model, directory, weights=own)


def test_weights_that_only_other_ranks_hold_replace_those_of_the_model(tmp_path):
    from safetensors.torch import load_file

    run_ranks(3, replaced, str(tmp_path / "out"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    for number, (name, p) in enumerate(llama().named_parameters()):
        assert torch.equal(found[name], torch.full_like(p, 7.0) if number < 4 else p)


class Counting(nn.Module):
    """With a buffer that a state dict holds, one that it does not, and a part of its own."""

    def __init__(self, value: float):
        super().__init__()
        self.part = nn.Linear(2, 2)
        self.part.register_buffer("running", torch.full((3,), value))
        self.part.register_buffer("seen", torch.tensor(int(value)))
        self.part.register_buffer("table", torch.full((3,), value), persistent=False)


@pytest.mark.parametrize("within", ["", "part."])
def test_buffers_of_the_state_dict_go_along(within, tmp_path):
    from safetensors.torch import load_file

    checkpoint.save_hf(Counting(5.0), tmp_path / "out", within=within, dtype=torch.bfloat16)
    found = load_file(tmp_path / "out" / "model.safetensors")
    names = ("weight", "bias", "running", "seen")
    assert set(found) == {f"{'' if within else 'part.'}{name}" for name in names}
    again = Counting(1.0)
    checkpoint.load_hf(again, tmp_path / "out", within=within)
    assert again.part.running.tolist() == [5.0] * 3
    assert int(again.part.seen) == 5
    assert again.part.table.tolist() == [1.0] * 3


def test_weights_in_integers_are_refused(tmp_path):
    model = nn.Linear(3, 2, bias=False)
    save_file({"weight": torch.ones(2, 3, dtype=torch.int8)}, tmp_path / "model.safetensors")
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"weight: I8 in the directory, which needs a scale"):
        checkpoint.load_hf(model, tmp_path)
    assert torch.equal(model.weight, before)
