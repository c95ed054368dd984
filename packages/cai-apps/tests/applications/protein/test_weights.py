"""Weights go to OpenFold's files and come back; a file with other parameters is refused, and nothing is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_alphafold import SIZES, model

from cai_apps.applications.protein.arrays import places
from cai_apps.applications.protein.model.alphafold import AlphaFold
from cai_apps.applications.protein.weights import (
    openfold_names,
    read_alphafold,
    read_openfold,
    write_openfold,
)
from cai_mesh.errors import DataError


@pytest.fixture(scope="module")
def filled() -> AlphaFold:
    return model()


@pytest.fixture
def path(filled, tmp_path):
    write_openfold(filled, tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


def same(one: AlphaFold, other: AlphaFold) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda held: held,
        lambda held: {f"module.model.{name}": value for name, value in held.items()},
        lambda held: {"ema": {"params": held, "decay": 0.999}},
        lambda held: {"state_dict": {f"model.{name}": value for name, value in held.items()}, "epoch": 3},
    ],
)
def test_weights_come_back(wrap, filled, path):
    torch.save(wrap(torch.load(path, weights_only=True)), path)
    other = AlphaFold(SIZES)
    assert not same(filled, other)
    read_openfold(other, path)
    assert same(filled, other)


def change(path, edit):
    held = torch.load(path, weights_only=True)
    edit(held)
    torch.save(held, path)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda held: held.pop("evoformer.linear.weight"),
            "missing: evoformer.linear.weight; not known: none",
        ),
        (lambda held: held.update(more=torch.ones(1)), "missing: none; not known: more"),
        (
            lambda held: held.update({"evoformer.linear.bias": torch.ones(2)}),
            r"evoformer.linear.bias: \(2,\)",
        ),
    ],
)
def test_other_parameters_are_refused(edit, said, path):
    change(path, edit)
    other, before = AlphaFold(SIZES), AlphaFold(SIZES)
    before.load_state_dict(other.state_dict())
    with pytest.raises(DataError, match=said):
        read_openfold(other, path)
    assert same(other, before)


def test_what_is_no_file_of_weights(tmp_path):
    with pytest.raises(DataError, match="cannot be read as weights"):
        read_openfold(AlphaFold(SIZES), tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("no weights")
    with pytest.raises(DataError, match="cannot be read as weights"):
        read_openfold(AlphaFold(SIZES), tmp_path / "text.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(DataError, match="is no state dict"):
        read_openfold(AlphaFold(SIZES), tmp_path / "list.pt")


def arrays_of(filled: AlphaFold) -> dict[str, np.ndarray]:
    """What AlphaFold's file would hold: the opposite of reading it, written by hand."""
    found: dict = {}
    for name, place in places([name for name, _ in filled.named_parameters()]).items():
        ours = filled.get_parameter(name).detach()
        holder = filled.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
        heads = getattr(holder, "heads", 1)
        if name.endswith("outer.out.weight"):
            heads = 32
        array = {
            "same": lambda x: x,
            "turned": lambda x: x.T,
            "heads": lambda x, n=heads: x.T.reshape(x.shape[1], n, -1),
            "joined": lambda x, n=heads: x.T.reshape(n, -1, x.shape[0]),
            "flat": lambda x, n=heads: x.reshape(n, -1),
        }[place.form](ours).numpy()
        if place.at is None:
            found[place.key] = array
        else:
            found.setdefault(place.key, []).append(array)
    return {key: np.stack(array) if isinstance(array, list) else array for key, array in found.items()}


def test_arrays_of_alphafold(filled, tmp_path):
    arrays = arrays_of(filled)
    path = tmp_path / "params.npz"
    np.savez(path, **arrays)
    other = AlphaFold(SIZES)
    read_alphafold(other, path)
    assert same(filled, other)
    incoming = "alphafold/alphafold_iteration/evoformer/evoformer_iteration/triangle_multiplication_incoming"
    left = torch.from_numpy(arrays[f"{incoming}/left_projection//weights"][0]).T
    assert torch.equal(filled.evoformer.blocks[0].pair.incoming.right.weight, left), "theirs is our right"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda held, key: held.pop(key), "missing: .*single_activations//bias"),
        (lambda held, key: held.update({key: held[key][1:]}), r"single_activations//bias: \(383,\)"),
        (lambda held, key: held.update(more=np.ones(1)), "not known: more"),
        (
            lambda held, key: held.update(
                {k: np.concatenate([v, v]) for k, v in held.items() if "extra_msa_stack" in k}
            ),
            "another number of blocks",
        ),
    ],
)
def test_other_arrays_are_refused(edit, said, filled, tmp_path):
    arrays = arrays_of(filled)
    edit(arrays, "alphafold/alphafold_iteration/evoformer/single_activations//bias")
    np.savez(tmp_path / "params.npz", **arrays)
    with pytest.raises(DataError, match=said):
        read_alphafold(AlphaFold(SIZES), tmp_path / "params.npz")


def test_what_is_no_file_of_arrays(tmp_path):
    path = tmp_path / "params.npz"
    for text in (b"", b"no arrays"):
        path.write_bytes(text)
        with pytest.raises(DataError, match="cannot be read as arrays"):
            read_alphafold(AlphaFold(SIZES), path)
    np.savez(path, x=np.array([{}], dtype=object))
    with pytest.raises(DataError, match="cannot be read as arrays"):
        read_alphafold(AlphaFold(SIZES), path)


def test_every_parameter_has_a_name_of_its_own(filled):
    table = openfold_names(filled)
    assert len(set(table.values())) == len(table) == len(list(filled.parameters()))
