"""Ways in which state of one rank, or flat parts, could pass for something else."""

from __future__ import annotations

import copy
import tempfile
import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from examples.ways_out import LENGTH, ROWS, adamw, build, formed, rank, train, world
from torch.distributed.device_mesh import init_device_mesh

from cai_mesh.errors import CaiError
from cai_tensor_parallel import parallelize


def made(form: str) -> tuple[Any, Any]:
    if form != "tensor":
        return formed(form)
    model = parallelize(build(), init_device_mesh("cpu", (world(),), mesh_dim_names=("tp",)))
    return model, adamw(model.parameters())


WRITERS = {
    "safetensors save_file": lambda model, to: safetensors.torch.save_file(dict(model.state_dict()), to),
    "safetensors save_model": lambda model, to: safetensors.torch.save_model(model, to),
    "safetensors of copies": lambda model, to: safetensors.torch.save_file(
        {name: value.detach().cpu().clone().contiguous() for name, value in model.state_dict().items()}, to
    ),
    "numpy": lambda model, to: [value.float().numpy() for value in model.state_dict().values()],
    "dcp": lambda model, to: dcp.save(model.state_dict(), checkpoint_id=to, no_dist=True),
    "save_pretrained": lambda model, to: model.save_pretrained(to),
    "save_pretrained of parts": lambda model, to: model.save_pretrained(to, state_dict=model.state_dict()),
    "a module alone": lambda model, to: safetensors.torch.save_file(model.lm_head.state_dict(), to),
}


def refused_writers(form: str) -> dict[str, str]:
    """What each says; "wrote" where it raised nothing."""
    model, _ = made(form)
    said = {}
    for name, write in WRITERS.items():
        try:
            write(model, str(Path(tempfile.mkdtemp()) / "file"))
            said[name] = "wrote"
        except (CaiError, dcp.api.CheckpointException) as error:
            said[name] = str(error)
    return said


def exchanged(state: Any) -> Any:
    """What rank 0 has saved, as every rank that reads its file gets it."""
    box = [state if rank() == 0 else None]
    dist.broadcast_object_list(box, 0)
    return box[0]


def loaded_from_rank_0(form: str, what: str) -> None:
    """A loop where rank 0 has saved and all ranks load."""
    warnings.simplefilter("ignore")
    model, optimizer = made(form)
    train(model, optimizer, range(2))
    saved = model if what == "weights" else optimizer
    state = exchanged(saved.state_dict())
    model, optimizer = made(form)
    (model if what == "weights" else optimizer).load_state_dict(state)
    train(model, optimizer, range(2, 3))


def loaded_from_itself(form: str) -> tuple[list[float], list[float]]:
    """Losses of a run, and of one that each rank resumes from what it has saved."""
    warnings.simplefilter("ignore")
    model, optimizer = made(form)
    train(model, optimizer, range(2))
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, range(2, 4))
    model, optimizer = made(form)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    return train(model, optimizer, range(2, 4)), expected


def other_weights() -> Any:
    """A plain model with weights of its own."""
    model = build()
    with torch.no_grad():
        for i, param in enumerate(model.parameters()):
            param.mul_(1 + i / 10)
    return model


def whole_state_loaded(form: str) -> list[float]:
    """Losses of a form into which a plain model's whole state dict is loaded."""
    model, optimizer = made(form)
    model.load_state_dict(other_weights().state_dict())
    if form != "tensor":
        return train(model, optimizer, range(2, 4))
    rows = torch.randint(0, 32, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))
    return [float(model(input_ids=rows, labels=rows).loss)]
