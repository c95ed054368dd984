"""Products with their communication beside them are the products, on a CPU and between GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from cai_mesh.gradients import share_in_graphs
from cai_mesh.layout import BoxedTensor
from cai_mesh.testing import run_ranks
from cai_tensor_parallel import parallelize
from cai_tensor_parallel.modes import overlap
from cai_tensor_parallel.modes.overlap import gather_matmul, matmul_scatter, start_scatter

SIZES = [(8, 6, 4), (5, 3, 7), (1, 1, 1), (160, 48, 96), (8, 6, 4)]
"""Rows of a rank, features in, features out; some larger than those before."""


def operators(device: str) -> None:
    ranks = dist.group.WORLD
    assert ranks is not None
    p, own, name = ranks.size(), ranks.rank(), ranks.group_name
    random = torch.Generator().manual_seed(0)
    for n, k, m in SIZES * 3:
        parts, x = (
            torch.randn(p, *shape, generator=random, dtype=torch.float64) for shape in ((n, k), (p * n, k))
        )
        weights = torch.randn(p, k, m, generator=random, dtype=torch.float64)
        held = [t.to(device) for t in (parts[own], x[own], weights[0], weights[own])]
        product, whole = gather_matmul(held[0], held[2], name)
        torch.testing.assert_close(whole.cpu(), parts.flatten(0, 1), rtol=0, atol=0)
        torch.testing.assert_close(product.cpu(), parts.flatten(0, 1) @ weights[0])
        summed = torch.bmm(x, weights).sum(0).chunk(p)[own]
        torch.testing.assert_close(matmul_scatter(held[1], held[3], name).cpu(), summed)
        finish = start_scatter(held[1], ranks)
        again, _ = gather_matmul(held[0], held[2].t().contiguous().t(), name)  # meanwhile
        torch.testing.assert_close(finish().cpu(), x.sum(0).chunk(p)[own])
        torch.testing.assert_close(again, product)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_operators(ranks):
    run_ranks(ranks, operators, "cpu")


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, vocab_size=128,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).double()


def train(model: nn.Module, device: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, found = [], {}
    for step in range(3):
        ids = torch.randint(128, (2, 32), generator=torch.Generator().manual_seed(step)).to(device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    for name, param in model.named_parameters():
        found[name] = BoxedTensor.from_param(param).to_full(
            dist.group.WORLD if dist.is_initialized() else None
        )
    return losses, {name: value.cpu() for name, value in found.items()}


def work(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    operators(f"cuda:{rank}")
    mesh = dist.init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))
    found = []
    for compiled in (False, True):
        model = parallelize(llama(), mesh, sequence=True, overlap=True).cuda()
        share_in_graphs(model)
        if compiled:
            for block in model.model.layers:  # type: ignore[union-attr]
                block.forward = torch.compile(block.forward, fullgraph=True)
        found.append(train(model, "cuda"))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_copy_engines_train_as_one_process(tmp_path: Path):
    mp.spawn(work, (str(tmp_path),), nprocs=2)
    losses, weights = train(llama().cuda(), "cuda")
    for rank in range(2):
        for got, values in torch.load(tmp_path / f"{rank}.pt"):  # its norms, sines and loss are float32
            assert got == pytest.approx(losses, rel=1e-6)
            torch.testing.assert_close(values, weights, rtol=1e-6, atol=1e-8)


def test_a_transport_is_made_anew_when_parts_grow(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(dist, "barrier", lambda group, device_ids: None)

    monkeypatch.setattr(overlap, "PeerGather", lambda group, nbytes, device: made.append(nbytes) or object())
    monkeypatch.setattr(overlap, "PeerReduce", lambda group, nbytes, device, whole: ("reduce", nbytes, whole))
    partners = overlap.Partners(None, torch.device("cpu"))  # type: ignore[arg-type]
    found = [partners.gather(nbytes) for nbytes in (8, 4, 16, 8)]
    assert made == [8, 16]
    assert found[0] is found[1] and found[2] is found[3]
    assert partners.reduce(12) == partners.reduce(3) == ("reduce", 12, True)
