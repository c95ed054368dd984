"""Tensors made of others: what is read and written by region equals torch's own stacks, joins and cuts."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cai_mesh import checkpoint
from cai_mesh.checkpoint import Assembly, concatenate, stack
from cai_mesh.checkpoint.assembly import reversed_parts
from cai_mesh.errors import CheckpointError
from cai_mesh.layout import BoxedTensor, Layout, Shard, attach
from cai_mesh.testing import run_ranks

EXPERTS = 4


def values() -> dict[str, Tensor]:
    """The tensors of a file: three matrices of each expert, and one of three that a model has apart."""
    draw = torch.Generator().manual_seed(3)
    shapes = {f"e.{number}.{name}": (5, 3) for number in range(EXPERTS) for name in ("gate", "up")}
    shapes |= {f"e.{number}.down": (3, 5) for number in range(EXPERTS)} | {
        "qkv": (6, 2),
        "norm": (3,),
        "scale": (),
    }
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def made(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Assembly]:
    """What a model's tensors are made of."""
    of = {name: Assembly.of(name, shape) for name, shape in shapes.items()}
    gate, up, down = (
        stack([of[f"e.{number}.{name}"] for number in range(EXPERTS)], 0) for name in ("gate", "up", "down")
    )
    return {
        "gate_up": concatenate([gate, up], 1),
        "down": down.transpose(1, 2),
        "q": of["qkv"].slice(0, 0, 2),
        "k": of["qkv"].slice(-2, 2, 4),
        "v": of["qkv"].slice(0, 4, 6),
        "norm": of["norm"],
        "scale": of["scale"],
    }


def expected(of: Mapping[str, Tensor]) -> dict[str, Tensor]:
    gate, up, down = (
        torch.stack([of[f"e.{number}.{name}"] for number in range(EXPERTS)])
        for name in ("gate", "up", "down")
    )
    query, key, value = of["qkv"].chunk(3)
    return {
        "gate_up": torch.cat([gate, up], 1), "down": down.transpose(1, 2), "q": query, "k": key, "v": value,
        "norm": of["norm"], "scale": of["scale"],
    }  # fmt: skip


def cut_again(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Assembly]:
    """What the file's tensors are made of."""
    of = {name: Assembly.of(name, shape) for name, shape in shapes.items()}
    files = {"qkv": concatenate([of["q"], of["k"], of["v"]], 0), "norm": of["norm"], "scale": of["scale"]}
    for number in range(EXPERTS):
        expert = of["gate_up"].slice(0, number, number + 1).squeeze(0)
        files[f"e.{number}.gate"], files[f"e.{number}.up"] = expert.slice(0, 0, 5), expert.slice(0, 5, 10)
        files[f"e.{number}.down"] = of["down"].transpose(1, 2).slice(0, number, number + 1).squeeze(0)
    return files


def model(axis: int | None = None, degree: int = 1, index: int = 0) -> nn.Module:
    """Of zeros, every parameter cut along an axis as far as it has so many."""
    module = nn.Module()
    for name, value in expected(values()).items():
        layout = Layout(tuple(value.shape))
        if axis is not None and value.dim():
            layout = layout.then("r", degree, index, Shard(min(axis, value.dim() - 1)))
        parameter = nn.Parameter(torch.zeros(layout.local_shape))
        attach(parameter, layout)
        module.register_parameter(name, parameter)
    return module


def there_and_back(directory: str, axis: int) -> None:
    module = model(axis, dist.get_world_size(), dist.get_rank())
    checkpoint.load_hf(module, directory, tensors=made)
    right = expected(values())
    for name, parameter in module.named_parameters():
        assert torch.equal(BoxedTensor.from_param(parameter).to_full(dist.group.WORLD), right[name]), name
    checkpoint.save_hf(module, f"{directory}/out{axis}", tensors=cut_again, max_file_bytes=200)


@pytest.mark.parametrize("world", [1, 3])
def test_boxes_are_read_and_written_where_they_lie(world, tmp_path):
    save_file(values(), tmp_path / "model.safetensors")
    for axis in (0, 1, 2):
        run_ranks(world, there_and_back, str(tmp_path), axis)
        again: dict[str, Tensor] = {}
        for file in (tmp_path / f"out{axis}").glob("*.safetensors"):
            again |= load_file(file)
        assert again.keys() == values().keys()
        assert all(torch.equal(again[name], value) for name, value in values().items())


def test_parts_of_one_are_parts_of_the_other():
    """Reversed twice, every part is what it was."""
    tensors = made({name: tuple(value.shape) for name, value in values().items()})
    parts = reversed_parts(tensors)
    assert parts.keys() == values().keys()
    again = {part.reversed(source) for source, of in parts.items() for part in of}
    assert again == {part for tensor in tensors.values() for part in tensor.parts}


def test_what_does_not_fit_is_named(tmp_path):
    save_file(values() | {"e.2.up": torch.zeros(4, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"do not fit together[\s\S]*e\.0\.up[\s\S]*e\.2\.up"):
        checkpoint.load_hf(model(), tmp_path, tensors=made)


def test_a_tensor_of_another_number_is_refused(tmp_path):
    save_file(values(), tmp_path / "model.safetensors")
    module = model()
    module.down = nn.Parameter(torch.zeros(EXPERTS + 1, 5, 3))
    message = r"down: this model \(5, 5, 3\), directory \(4, 5, 3\), of 4 tensors up to e\.3\.down"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load_hf(module, tmp_path, tensors=made)
    assert float(module.gate_up.detach().abs().sum()) == 0


def test_one_of_several_in_integers_is_refused(tmp_path):
    eighths = torch.ones(5, 3, dtype=torch.int8)
    save_file(values() | {"e.2.up": eighths}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="gate_up: I8 in the directory, which needs a scale"):
        checkpoint.load_hf(model(), tmp_path, tensors=made)
