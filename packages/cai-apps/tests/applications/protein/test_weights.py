"""Weights go to OpenFold's files and come back; a file with other parameters is refused, and nothing is written."""

from __future__ import annotations

import pytest
import torch
from small_alphafold import SIZES, model

from cai_apps.applications.protein.model.alphafold import AlphaFold
from cai_apps.applications.protein.weights import openfold_names, read_openfold, write_openfold
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


def test_every_parameter_has_a_name_of_its_own(filled):
    table = openfold_names(filled)
    assert len(set(table.values())) == len(table) == len(list(filled.parameters()))
