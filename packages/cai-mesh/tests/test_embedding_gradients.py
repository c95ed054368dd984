"""Gradients of embeddings go into their chunk row by row, and are torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from buffers import taken
from torch import nn

from cai_mesh.gradients import GradBuffer, direct_linears
from cai_mesh.gradients.linear.embedding import Rows
from cai_mesh.layout import FlatChunk

IDS = torch.tensor([[3, 0, 3, 5], [7, 3, 0, 2]])
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu])


def buffered(layer, dtype=torch.float64):
    params = list(layer.named_parameters())
    device = params[0][1].device
    buffer = GradBuffer(FlatChunk(params), [p for _, p in params], dtype, device)
    direct_linears(layer, layer.parameters())
    return buffer


def both(**options):
    torch.manual_seed(0)
    plain = nn.Embedding(9, 4, **options).double()
    layer = copy.deepcopy(plain)
    return plain, layer, buffered(layer)


@pytest.mark.parametrize("padding", [None, 3, 0])
@pytest.mark.parametrize("backwards", [1, 3])
def test_the_gradient_is_torchs(padding, backwards):
    plain, layer, buffer = both(padding_idx=padding)
    for turn in range(backwards):
        for each in (plain, layer):
            (each((IDS + turn) % 9) * torch.arange(4.0)).pow(2).sum().backward()
    assert layer.weight.grad is None
    assert torch.allclose(taken(buffer)["weight"], plain.weight.grad)


def test_a_table_that_is_the_head_too():
    plain, layer, buffer = both()
    for each in (plain, layer):
        (each(IDS) @ each.weight.t()).pow(2).sum().backward()
    assert torch.allclose(taken(buffer)["weight"], plain.weight.grad)


def test_who_asks_for_the_gradient_gets_it():
    plain, layer, buffer = both()
    found = [torch.autograd.grad(each(IDS).pow(2).sum(), each.weight)[0] for each in (plain, layer)]
    assert torch.allclose(*found)
    assert not buffer.has_gradients


def test_differentiated_twice():
    plain, layer, buffer = both()
    for each in (plain, layer):
        (grad,) = torch.autograd.grad(each(IDS).pow(3).sum(), each.weight, create_graph=True)
        grad.pow(2).sum().backward()
    assert torch.allclose(taken(buffer)["weight"], plain.weight.grad)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_options_that_change_rows_take_the_path_of_torch(options):
    plain, layer, buffer = both(**options)
    for each in (plain, layer):
        each(IDS).pow(2).sum().backward()
    wanted = plain.weight.grad.to_dense() if options.get("sparse") else plain.weight.grad
    assert torch.allclose(taken(buffer)["weight"], wanted)


def test_hooks_see_the_gradient():
    plain, layer, buffer = both()
    for each in (plain, layer):
        each.weight.register_hook(lambda grad: grad * 2)
        each(IDS).pow(2).sum().backward()
    assert torch.allclose(taken(buffer)["weight"], plain.weight.grad)


def test_no_ids_and_ids_that_are_not_there():
    _, layer, buffer = both()
    layer(IDS[:0]).sum().backward()
    assert not taken(buffer)["weight"].any()
    with pytest.raises(IndexError):
        layer(IDS + 9)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("tokens", [1, 5, 4096])
@pytest.mark.parametrize("padding", [-1, 2])
def test_rows_are_summed_alike_each_time(device, tokens, padding):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, 50, (2, tokens), generator=generator).to(device)
    dy = torch.randn(2, tokens, 16, generator=generator).to(device, torch.bfloat16)
    found = []
    for _ in range(2):
        out = torch.full((64, 16), torch.nan, device=device)
        Rows(padding).write_weight_grad((ids, dy), out, fresh=True)
        Rows(padding).write_weight_grad((ids, dy), out, fresh=False)
        found.append(out)
    assert torch.equal(*found)
    wanted = torch.zeros(64, 16, dtype=torch.float64)
    keep = (ids.cpu().flatten() != padding).unsqueeze(-1)
    wanted.index_add_(0, ids.cpu().flatten(), 2 * dy.cpu().double().flatten(0, 1) * keep)
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-5, atol=1e-3)
