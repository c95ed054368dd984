"""Files of weights that were made to reach elsewhere or to mislead are refused, by name and cause."""

from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from cai_mesh import checkpoint
from cai_mesh.checkpoint.manifest import Manifest
from cai_mesh.errors import CheckpointError, DataError
from cai_mesh.files import check_header, check_weights
from cai_mesh.files.headers import BITS

OTHER = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def file(path, header, data=8, length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + bytes(data))
    return path


@pytest.mark.parametrize(
    "header, options, cause",
    [
        (b"", {"length": 2**63}, "its header has 9223372036854775808 bytes, and the file 16"),
        (b"{}", {"length": 11}, "its header has 11 bytes, and the file"),
        (b"{", {"data": 0}, "its header is not JSON"),
        (b"\xff\xff", {"data": 0}, "its header is not JSON"),
        (b"[" * 20_000, {"data": 0}, "its header is not JSON"),
        (b"[]", {"data": 0}, "not a table"),
        ({"a": {**OTHER, "data_offsets": [0, 16]}}, {}, "'a' has 16 bytes, which its shape and dtype do not"),
        ({"a": OTHER}, {"data": 4}, "end outside the file: at byte 8 of 4"),
        ({"a": OTHER}, {"data": 9}, "end before the file does"),
        ({"a": OTHER, "b": OTHER}, {}, "'b' overlaps the one before it"),
        ({"a": {**OTHER, "data_offsets": [8, 16]}}, {"data": 16}, "'a' leaves a gap before it"),
        ({"a": {**OTHER, "data_offsets": [-8, 0]}}, {}, "'a' has a shape or byte range that is none"),
        ({"a": {**OTHER, "data_offsets": [8, 0]}}, {}, "'a' has -8 bytes"),
        ({"a": {**OTHER, "shape": [2**62, 4]}}, {}, "which its shape and dtype do not"),
        ({"a": {**OTHER, "shape": [True, 2]}}, {}, "shape or byte range that is none"),
        ({"a": {**OTHER, "dtype": "Q7"}}, {}, "no known dtype"),
        ({"a": {**OTHER, "dtype": ["F32"]}}, {}, "no known dtype"),
        ({"a": 3}, {}, "no known dtype"),
        (b'{"a": 1, "a": 2}', {}, "its header has 'a' twice"),
    ],
)
def test_headers_that_lie_are_refused(header, options, cause, tmp_path):
    path = file(tmp_path / "model.safetensors", header, **options)
    with pytest.raises(DataError, match=r"model\.safetensors is not a sound file") as caught:
        check_header(path, error=DataError)
    assert cause in str(caught.value)
    with pytest.raises(CheckpointError, match="not a sound file"):
        checkpoint.load_hf(nn.Linear(2, 1), tmp_path)
    with pytest.raises(CheckpointError, match="not a sound file"):
        check_weights(tmp_path)


def test_a_file_that_is_no_file_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"1234567")
    for name in ("a", "missing"):
        with pytest.raises(CheckpointError, match="not a sound file"):
            check_header(tmp_path / name)


def test_what_safetensors_writes_is_sound(tmp_path):
    from safetensors.torch import save_file

    dtypes = (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float64)
    held = {str(dtype): torch.zeros(3, 2).to(dtype) for dtype in dtypes}
    save_file(held | {"none": torch.zeros(0, 4), "one": torch.tensor(1)}, tmp_path / "a", {"format": "pt"})
    table = check_header(tmp_path / "a")
    assert set(table) == {*held, "none", "one"}
    assert {entry["dtype"] for entry in table.values()} <= BITS.keys()


def index(directory, *names):
    where = {f"{number}": name for number, name in enumerate(names)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a\\b", "a\0", 7])
def test_an_index_names_no_file_elsewhere(name, tmp_path):
    home = tmp_path / "model"
    home.mkdir()
    file(tmp_path / "secret.safetensors", {"1": OTHER})
    index(home, "model-1.safetensors", name)
    for read in (check_weights, lambda home: checkpoint.load_hf(nn.Linear(2, 1), home)):
        with pytest.raises(CheckpointError, match=r"index\.json names a file outside its directory"):
            read(home)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": {}}}'])
def test_a_damaged_index_is_told(content, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        check_weights(tmp_path)


def test_an_index_that_misplaces_a_tensor_is_told(tmp_path):
    file(tmp_path / "m.safetensors", {"other": OTHER})
    where = {"weight": "m.safetensors", "bias": "m.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(CheckpointError, match="lacks tensors that its index says are there"):
        checkpoint.load_hf(nn.Linear(2, 1), tmp_path)


def test_links_to_blobs_are_read_as_ever(tmp_path):
    """The hub's cache is laid out so, and people link large files."""
    from safetensors.torch import save_file

    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"weight": torch.ones(1, 2), "bias": torch.ones(1)}, blobs / "abc")
    (snapshot / "model-1.safetensors").symlink_to("../../blobs/abc")
    where = dict.fromkeys(("weight", "bias"), "model-1.safetensors")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    model = nn.Linear(2, 1)
    checkpoint.load_hf(model, snapshot)
    assert model.weight.sum() == 2


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "sub/x", "a\\b", ""])
def test_a_manifest_names_no_file_elsewhere(name, tmp_path):
    step = checkpoint.save(tmp_path, {"a": torch.ones(2)}, step=1).wait()
    told = Manifest.read(step)
    entry = next(iter(told.files.values()))
    forged = Manifest(told.step, told.save, told.job, {**told.files, name: entry})
    (step / "manifest.json").write_text(forged.dump())
    with pytest.raises(CheckpointError, match=r"manifest\.json names a file"):
        checkpoint.load(step, {"a": torch.zeros(2)})
    found, skipped = checkpoint.newest_good(tmp_path)
    assert found is None and "names a file" in skipped[0]


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "unknown.distcp"])
def test_metadata_name_no_file_elsewhere(name, tmp_path):
    step = checkpoint.save(tmp_path, {"a": torch.ones(2)}, step=1).wait()
    told = Manifest.read(step)
    raw = (step / ".metadata").read_bytes()
    metadata = pickle.loads(raw)
    seal = raw[raw.rindex(b'{"save"') :]
    places = {key: replace(info, relative_path=name) for key, info in metadata.storage_data.items()}
    raw = pickle.dumps(replace(metadata, storage_data=places)) + seal
    (step / ".metadata").write_bytes(raw)
    files = {**told.files, ".metadata": (len(raw), hashlib.sha256(raw).hexdigest())}
    (step / "manifest.json").write_text(Manifest(told.step, told.save, told.job, files).dump())
    with pytest.raises(CheckpointError, match=r"\.metadata names a file"):
        checkpoint.load(step, {"a": torch.zeros(2)})
