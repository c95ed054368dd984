"""Checkpoints go from every mode and degree to every other, and to transformers, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from small_models import build
from transformers import AutoModelForCausalLM

from cai_mesh import BoxedTensor, checkpoint
from cai_mesh.testing import assert_same_as_one_device, run_ranks
from cai_tensor_parallel import parallelize, sub_axes

LAYOUTS = [("1d", 2), ("1d", 4), ("2d", 4), ("2.5d", 8), ("3d", 8)]


def mesh_of(mode: str, ranks: int):
    axes = sub_axes(mode, ranks, 2)
    return dist.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def save(mode: str, ranks: int, directory: str) -> None:
    model = parallelize(build("gpt2"), mesh_of(mode, ranks), mode=mode)
    checkpoint.save(directory, BoxedTensor.of_model(model), step=1)
    checkpoint.save_hf(model, directory + "-hf")


def load(mode: str, ranks: int, directories: list[str]):
    found = []
    for directory in directories:
        model = build("gpt2")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
        parallelize(model, mesh_of(mode, ranks), mode=mode)
        boxes = BoxedTensor.of_model(model)
        checkpoint.load(directory, boxes)
        found.append({name: box.to_full(dist.group.WORLD) for name, box in boxes.items()})
    return found


def test_checkpoints_go_from_one_mode_to_another(tmp_path):
    assert_layouts_read_each_other(LAYOUTS[1:3], tmp_path)


@pytest.mark.matrix
def test_checkpoints_go_from_every_mode_to_every_other(tmp_path):
    assert_layouts_read_each_other(LAYOUTS, tmp_path)


def assert_layouts_read_each_other(layouts, tmp_path):
    whole = dict(build("gpt2").named_parameters())
    directories = []
    for mode, ranks in layouts:
        directories.append(str(tmp_path / f"{mode}-{ranks}"))
        run_ranks(ranks, save, mode, ranks, directories[-1], timeout=300)
        opened = AutoModelForCausalLM.from_pretrained(directories[-1] + "-hf", dtype=torch.float64)
        assert_same_as_one_device(dict(opened.named_parameters()), whole, tolerance=0)
    for mode, ranks in layouts:
        for found in run_ranks(ranks, load, mode, ranks, directories, timeout=300)[0]:
            assert_same_as_one_device(found, whole, tolerance=0)
