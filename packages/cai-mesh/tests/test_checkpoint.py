"""Checkpoints: exact on any layout, whole or absent, damage named, nothing run."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from cai_mesh import checkpoint
from cai_mesh.checkpoint.manifest import MANIFEST, METADATA, Manifest, seal
from cai_mesh.comm import coordinate
from cai_mesh.errors import CheckpointError
from cai_mesh.layout import BoxedTensor, FlatChunk, Layout, Shard, attach
from cai_mesh.testing import run_ranks

SHAPES = {"a": (7, 5), "b": (12,), "c": (4, 3, 2), "step": ()}
LAYOUTS = ["full", "rows2", "columns2", "packed2", "flat3", "2x2"]


def value(name):
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def state_on(kind, fill):
    """State of this rank on one of several layouts, holding the values or NaN."""
    state = {"note": {"kind": kind, "rank": dist.get_rank()}}
    if kind == "flat3":
        params = [(n, torch.empty(s)) for n, s in SHAPES.items() if s]
        chunk = FlatChunk(params, world=3)
        full = chunk.allocate(torch.float64, "cpu")
        chunk.fill(full, [value(n) if fill else torch.full(s, float("nan")) for n, s in SHAPES.items() if s])
        low, high = chunk.shard_range(dist.get_rank())
        state |= chunk.boxed(full[low:high].clone(), low)
        state["step"] = value("step") if fill else torch.tensor(float("nan"), dtype=torch.float64)
        return state
    world = dist.get_world_size()
    mesh = dist.init_device_mesh(
        "cpu", (2, 2) if kind == "2x2" else (1, world), mesh_dim_names=("dp_shard", "tp")
    )
    where = coordinate(mesh)
    for name, shape in SHAPES.items():
        layout = Layout(shape)
        if shape and kind == "rows2":
            layout = layout.then("tp", 2, where["tp"], Shard(0))
        elif shape and kind == "columns2":
            layout = layout.then("tp", 2, where["tp"], Shard(len(shape) - 1))
        elif shape and kind == "packed2":
            layout = layout.then("tp", 2, where["tp"], Shard(0, (3, shape[0] - 3)))
        elif shape and kind == "2x2":
            layout = layout.then("tp", 2, where["tp"], Shard(0)).then(
                "dp_shard", 2, where["dp_shard"], Shard(0)
            )
        local = torch.full(layout.local_shape, float("nan"), dtype=torch.float64)
        if fill:
            for index, box in layout.slices():
                local[index] = value(name)[box.slices()]
        attach(local, layout)
        state[name] = local
    return state


def world_of(kind):
    return {"full": 1, "flat3": 3, "2x2": 4}.get(kind, 2)


def save_on(kind, directory, step):
    checkpoint.save(directory, state_on(kind, True), step=step)


def load_on(kind, directory):
    state = state_on(kind, False)
    values = checkpoint.load(directory, state)
    for name, held in state.items():
        if name != "note":
            boxed = held if isinstance(held, BoxedTensor) else BoxedTensor.from_param(held)
            for box, view in boxed.pieces:
                assert torch.equal(view, value(name)[box.slices()]), (name, box)
    return values


@pytest.mark.parametrize("saved", LAYOUTS)
def test_loads_bitwise_on_every_layout(saved, tmp_path):
    run_ranks(world_of(saved), save_on, saved, str(tmp_path), 3)
    for other in LAYOUTS:
        for values in run_ranks(world_of(other), load_on, other, str(tmp_path)):
            assert values == {"note": {"kind": saved, "rank": 0}}


def simple(n=3.0):
    return {"w": torch.arange(6.0).view(2, 3) + n, "b": torch.ones(4) * n, "data": {"position": int(n)}}


def test_steps_are_kept_and_never_overwritten(tmp_path):
    for step in (1, 2, 10, 11):
        checkpoint.save(tmp_path, simple(step), step=step, keep_last=3)
    assert [p.name for p in checkpoint.steps(tmp_path)] == ["step-2", "step-10", "step-11"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-11"
    with pytest.raises(CheckpointError, match="exists"):
        checkpoint.save(tmp_path, simple(), step=11)
    with pytest.raises(CheckpointError, match="keep_last"):
        checkpoint.save(tmp_path, simple(), step=12, keep_last=0)
    with pytest.raises(CheckpointError, match="'bad' cannot be saved"):
        checkpoint.save(tmp_path, {"bad": object()}, step=12)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "values.json", "manifest.json"])
def test_damage_is_named_and_the_older_one_is_found(file, damage, tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, simple(step), step=step)
    path = tmp_path / "step-2" / file
    raw = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(raw[:-3])
    else:
        raw[len(raw) // 2] ^= 4
        path.write_bytes(raw)
    named = "manifest.json|not a complete" if file == "manifest.json" else file
    with pytest.raises(CheckpointError, match=named):
        checkpoint.verify(tmp_path / "step-2")
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path / "step-2", simple())
    good, skipped = checkpoint.newest_good(tmp_path)
    assert good == tmp_path / "step-1"
    assert skipped
    checkpoint.save(tmp_path, simple(2), step=2)
    checkpoint.verify(tmp_path / "step-2")
    assert (tmp_path / "step-2.damaged-0").is_dir()


def forge(path, metadata):
    """Replace the metadata of a checkpoint, and its manifest so that it vouches for it."""
    manifest = Manifest.read(path)
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    files = {**manifest.files, METADATA: seal(path / METADATA, manifest.save)}
    (path / MANIFEST).write_text(replace(manifest, files=files).dump())


class Bomb:
    def __reduce__(self):
        return os.system, ("touch " + str(Path.cwd() / "exploded"),)


def test_a_pickle_in_metadata_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint.save(tmp_path, simple(), step=1)
    forge(tmp_path / "step-1", Bomb())
    for read in (checkpoint.contents, lambda path: checkpoint.load(path, simple(), verify=False)):
        with pytest.raises(CheckpointError, match="was not run"):
            read(tmp_path / "step-1")
    assert not (tmp_path / "exploded").exists()
    pickle.loads((tmp_path / "step-1" / ".metadata").read_bytes())
    assert (tmp_path / "exploded").exists(), "the bomb of this test does not work"


class Attribute:
    def __init__(self, *of):
        self.of = of

    def __reduce__(self):
        return getattr, self.of


def test_metadata_of_an_older_python_is_read(tmp_path, monkeypatch):
    """Before 3.11.4 a member of an enumeration was pickled as `getattr(class, name)`."""
    older = lambda self, protocol: (getattr, (type(self), self._name_))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", older)
    checkpoint.save(tmp_path, simple(5.0), step=1)
    assert b"getattr" in (tmp_path / "step-1" / ".metadata").read_bytes()
    monkeypatch.undo()
    state = simple()
    checkpoint.load(tmp_path / "step-1", state)
    assert all(torch.equal(state[name], simple(5.0)[name]) for name in ("w", "b"))


@pytest.mark.parametrize(
    "of", [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__"), (_MEM_FORMAT_ENCODING, 3)]
)
def test_no_other_attribute_is_read(tmp_path, of):
    checkpoint.save(tmp_path, simple(), step=1)
    forge(tmp_path / "step-1", Attribute(*of))
    with pytest.raises(CheckpointError, match="was not read"):
        checkpoint.contents(tmp_path / "step-1")


def test_another_model_is_refused_with_a_table(tmp_path):
    checkpoint.save(tmp_path, simple(), step=1)
    other = {"w": torch.zeros(3, 3), "b": torch.zeros(4), "extra": torch.zeros(1)}
    with pytest.raises(CheckpointError, match="2 of 3 tensors differ") as caught:
        checkpoint.load(tmp_path, other)
    assert "w: this model (3, 3), checkpoint (2, 3)" in str(caught.value)
    assert "extra: this model (1,), checkpoint nothing" in str(caught.value)
    assert torch.equal(other["b"], torch.zeros(4)), "something was loaded all the same"
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoint.load(tmp_path / "nowhere", simple())


def test_async_save_writes_the_values_of_the_call(tmp_path):
    state = simple(5.0)
    saving = checkpoint.save(tmp_path, state, step=1, async_=True)
    state["w"].fill_(-1)
    state["data"]["position"] = -1
    assert saving.wait() == tmp_path / "step-1"
    again = simple(0.0)
    assert checkpoint.load(tmp_path, again) == {"data": {"position": 5}}
    assert torch.equal(again["w"], simple(5.0)["w"])


def async_ranks(directory):
    state = {"w": torch.full((3,), float(dist.get_rank()))}
    attach(state["w"], Layout((6,)).then("r", 2, dist.get_rank(), Shard(0)))
    saving = checkpoint.save(directory, state, step=1, async_=True)
    state["w"].fill_(9)
    dist.barrier()
    saving.wait()
    checkpoint.load(directory, state)
    assert (state["w"] == dist.get_rank()).all()


def test_async_save_of_several_ranks(tmp_path):
    run_ranks(2, async_ranks, str(tmp_path))


def test_other_dtypes_are_converted(tmp_path):
    checkpoint.save(tmp_path, simple(), step=1)
    half = {"w": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4)}
    checkpoint.load(tmp_path, half)
    assert torch.equal(half["w"].float(), simple()["w"])


SAVER = """
import sys, torch
from cai_mesh import checkpoint
big = torch.ones(200_000)
print("ready", flush=True)
for step in range(2, 10_000):
    checkpoint.save(sys.argv[1], {"w": big * step}, step=step, keep_last=2)
"""


@pytest.mark.parametrize("delay", [0.001, 0.013, 0.037, 0.071])
def test_a_killed_save_leaves_a_good_checkpoint(delay, tmp_path):
    checkpoint.save(tmp_path, {"w": torch.ones(200_000)}, step=1)
    saver = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path)], stdout=subprocess.PIPE)
    assert saver.stdout is not None
    saver.stdout.readline()
    time.sleep(delay)
    saver.send_signal(signal.SIGKILL)
    saver.wait()
    good, skipped = checkpoint.newest_good(tmp_path)
    assert good is not None
    assert not skipped
    state = {"w": torch.zeros(200_000)}
    checkpoint.load(good, state)
    assert (state["w"] == int(good.name.removeprefix("step-"))).all()


def failing(directory):
    from cai_mesh.checkpoint import saving as module

    def full(*_):
        raise OSError(28, "No space left on device")

    write = module._write
    if dist.get_rank() == 1:
        module._write = full
    try:
        with pytest.raises(CheckpointError, match="rank 1 could not write") as caught:
            checkpoint.save(directory, {"w": torch.ones(2)}, step=2)
    finally:
        module._write = write  # the process goes on to other tests
    return str(caught.value)


def test_a_full_disk_on_one_rank_fails_all_and_keeps_the_old_one(tmp_path):
    checkpoint.save(tmp_path, {"w": torch.ones(2)}, step=1)
    for message in run_ranks(2, failing, str(tmp_path)):
        assert "No space left" in message
    assert checkpoint.newest_good(tmp_path)[0] == tmp_path / "step-1"


def test_manifest_lists_every_file(tmp_path):
    checkpoint.save(tmp_path, simple(), step=4)
    files = {p.name for p in (tmp_path / "step-4").iterdir()}
    manifest = json.loads((tmp_path / "step-4" / "manifest.json").read_text())
    assert set(manifest["files"]) | {"manifest.json"} == files
    assert checkpoint.verify(tmp_path / "step-4").step == 4
