"""What people do to a model after it was cut or sharded, and what comes of it."""

from __future__ import annotations

import copy
from typing import Any

import peft
import torch
from examples.ways_out import LENGTH, ROWS, build, rank, world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cai_mesh.errors import CaiError
from cai_tensor_parallel import parallelize
from cai_zero import shard_module

LORA = {"r": 2, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}


class After(nn.Module):
    """A layer with a bottleneck behind it (Houlsby et al., 2019)."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Linear(16, 3), nn.Linear(3, 16)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.layer(*args, **kwargs)
        return out + self.up(torch.tanh(self.down(out)))


def resized_by_hand(model: Any) -> None:
    model.model.embed_tokens.weight.data = torch.ones(40, 16)


def new_embedding(model: Any) -> None:
    model.set_input_embeddings(nn.Embedding(32, 16))


def new_head(model: Any) -> None:
    model.lm_head = nn.Linear(16, 32, bias=False)


def low_rank(model: Any) -> None:
    peft.inject_adapter_in_model(peft.LoraConfig(**LORA), model)


def another_layer(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(build().model.layers[0]))


def layer_in_a_row(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.down_proj = nn.Sequential(mlp.down_proj, nn.Linear(16, 16))


def between_two_cuts(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.act_fn = nn.PReLU()


def bottleneck(model: Any) -> None:
    model.model.layers[1].input_layernorm = After(model.model.layers[1].input_layernorm)


def value_head(model: Any) -> None:
    model.value = nn.Linear(16, 1)
    model.model.norm.register_forward_hook(lambda _, args, out: out + model.value(out).tanh())


def frozen_probe(model: Any) -> None:
    model.probe = nn.Linear(16, 16).requires_grad_(False)
    model.model.norm.register_forward_hook(lambda _, args, out: out + model.probe(out))


CHANGES = {
    "resized": lambda model: model.resize_token_embeddings(40),
    "resized by hand": resized_by_hand,
    "another embedding": new_embedding,
    "another head": new_head,
    "LoRA": low_rank,
    "another layer": another_layer,
    "a layer in a row": layer_in_a_row,
    "between two cuts": between_two_cuts,
    "a bottleneck": bottleneck,
    "a value head": value_head,
    "a frozen probe": frozen_probe,
}
FORMS = ("tensor", "sequence", "zero3")


def losses(model: Any, form: str, change: Any) -> list[float]:
    """Two losses, with a step between them, of the whole batch."""
    torch.manual_seed(5)
    change(model)
    optimizer: Any = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    said = []
    rows = torch.randint(0, 32, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    mine = rows[rank() * ROWS // world() :][: ROWS // world()] if form == "zero3" else rows
    for _ in range(2):
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        if form == "zero3":
            torch.distributed.all_reduce(mean)
        said.append(float(mean) / (world() if form == "zero3" else 1))
    return said


def outcomes(form: str) -> dict[str, Any]:
    """Losses by change, or what the error says."""
    found: dict[str, Any] = {}
    for name, change in CHANGES.items():
        model = build()
        try:
            if form in ("tensor", "sequence"):
                mesh = init_device_mesh("cpu", (world(),), mesh_dim_names=("tp",))
                parallelize(model, mesh, sequence=form == "sequence")
            elif form == "zero3":
                shard_module(model, init_device_mesh("cpu", (world(),), mesh_dim_names=("dp_shard",)))
            found[name] = losses(model, form, change)
        except CaiError as error:
            found[name] = str(error)
    return found
