"""What nobody means: each must be told before it trains nothing, or ranks apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from loops.kit import Net, adamw, net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from cai_gemini import offload
from cai_zero import shard_module, shard_optimizer

IDS = torch.arange(8).reshape(2, 4)


def loss_of(model: nn.Module) -> torch.Tensor:
    return F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())


def mesh():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))


def moved(model: Net, optimizer: torch.optim.Optimizer):
    return offload(model, optimizer, residency="host", device_memory="80KB")


def optimizer_before_shard_module():
    model = net()
    optimizer = adamw(model.parameters())
    shard_module(model, mesh())
    loss_of(model).backward()
    optimizer.step()


def step_of_the_optimizer_that_was_sharded():
    model = net()
    optimizer = adamw(model.parameters())
    shard_optimizer(optimizer, mesh(), model=model)
    loss_of(model).backward()
    optimizer.step()


def another_optimizer_beside_a_sharded_one():
    model = net()
    shard_optimizer(adamw(model.parameters()), mesh(), model=model)
    other = torch.optim.SGD(model.head.parameters(), lr=0.1)
    loss_of(model).backward()
    other.step()


def sharded_net(stage: int) -> Net:
    model = net()
    if stage == 3:
        shard_module(model, mesh())
    else:
        shard_optimizer(adamw(model.parameters()), mesh(), model=model, stage=stage)
    return model


def averaged_again(stage: int) -> Callable[[], None]:
    """As a data-parallel loop does with gradients of its own."""

    def misuse() -> None:
        model = sharded_net(stage)
        loss_of(model).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)

    return misuse


def wrapped(stage: int) -> Callable[[], None]:
    """As accelerate, Trainer and Fabric do with the model they are given."""

    def misuse() -> None:
        model = sharded_net(stage)
        nn.parallel.DistributedDataParallel(model)

    return misuse


class Saves(Net):
    def save_pretrained(self, directory: str, state_dict: dict | None = None) -> None:
        torch.save(state_dict or self.state_dict(), directory)


def flat_tensors_saved() -> None:
    model = Saves().double()
    shard_module(model, mesh())
    model.save_pretrained("nowhere")


def ranks_without_a_mesh():
    model = net()
    shard_optimizer(adamw(model.parameters()), None, model=model)


def ranks_without_a_mesh_in_stage_3():
    shard_module(net(), None)


def ranks_that_offload_each_for_itself():
    model = net()
    moved(model, adamw(model.parameters()))


def optimizer_and_model_swapped():
    model = net()
    shard_optimizer(model, None, model=adamw(model.parameters()))  # type: ignore[arg-type]


def optimizer_given_to_shard_module():
    shard_module(adamw(net().parameters()), None)  # type: ignore[arg-type]


def offload_with_arguments_swapped():
    model = net()
    moved(adamw(model.parameters()), model)  # type: ignore[arg-type]


def sharded_twice():
    model = net()
    optimizer = shard_optimizer(adamw(model.parameters()), None, model=model)
    shard_optimizer(optimizer, None, model=model)


def both_stages_at_once():
    model = net()
    shard_optimizer(adamw(model.parameters()), None, model=model)
    shard_module(model, None)


def offloaded_twice():
    model, optimizer = moved(model := net(), adamw(model.parameters()))
    moved(model, optimizer)


def offload_of_a_sharded_model():
    model = shard_module(net(), None)
    moved(model, adamw(model.parameters()))


def a_device_that_is_not_there():
    shard_module(net(), None, device="cuda")


def offload_to_a_device_that_is_not_there():
    model = net()
    offload(model, adamw(model.parameters()), device="cuda", device_memory="1GB")


def stepped_as_a_whole(kind: str) -> Callable[[], None]:
    def misuse() -> None:
        model = net()
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
        shard_optimizer(optimizer, None, model=model)

    return misuse


def offloaded_as_a_whole():
    model = net()
    moved(model, torch.optim.Adafactor(model.parameters()))


def stage_3_stepped_as_a_whole():
    model = shard_module(net(), None)
    optimizer = torch.optim.Adafactor(model.parameters())
    loss_of(model).backward()
    optimizer.step()


MISUSES: dict[str, tuple[Callable[[], None], int, str]] = {
    "optimizer before shard_module": (optimizer_before_shard_module, 2, "sharded since it was built"),
    "the inner optimizer steps": (step_of_the_optimizer_that_was_sharded, 2, "that a sharded optimizer has"),
    "another optimizer": (another_optimizer_beside_a_sharded_one, 2, "that a sharded optimizer has"),
    "averaged again": (averaged_again(1), 2, "reduced over the data ranks already"),
    "averaged again, stage 3": (averaged_again(3), 2, "reduced over the data ranks already"),
    "DDP around it": (wrapped(1), 2, "reduced already"),
    "DDP around it, stage 3": (wrapped(3), 2, "reduced already"),
    "save_pretrained, stage 3": (flat_tensors_saved, 2, "parts of parameters"),
    "no mesh": (ranks_without_a_mesh, 2, "has no mesh"),
    "no mesh, stage 3": (ranks_without_a_mesh_in_stage_3, 2, "has no mesh"),
    "no mesh, offload": (ranks_that_offload_each_for_itself, 2, "has no mesh"),
    "swapped": (optimizer_and_model_swapped, 1, "something else as its model"),
    "swapped, stage 3": (optimizer_given_to_shard_module, 1, "something else as its model"),
    "swapped, offload": (offload_with_arguments_swapped, 1, "something else as its model"),
    "twice": (sharded_twice, 1, "already"),
    "two stages": (both_stages_at_once, 1, "already"),
    "offloaded twice": (offloaded_twice, 1, "already"),
    "offload of shards": (offload_of_a_sharded_model, 1, "already"),
    "no device": (a_device_that_is_not_there, 1, "no CUDA device"),
    "no device, offload": (offload_to_a_device_that_is_not_there, 1, "no CUDA device"),
    "LBFGS": (stepped_as_a_whole("LBFGS"), 1, "several times a step"),
    "Adafactor": (stepped_as_a_whole("Adafactor"), 1, "does not treat elements independently"),
    "Adafactor, offload": (offloaded_as_a_whole, 1, "does not treat elements independently"),
    "Adafactor, stage 3": (stage_3_stepped_as_a_whole, 1, "does not treat elements independently"),
}
"""What is done, on how many ranks, and what the error says."""
