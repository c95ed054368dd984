"""Values that are not in memory are lent to a checkpoint one after the other, and take what is loaded."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from cai_mesh import checkpoint
from cai_mesh.errors import CheckpointError
from cai_mesh.layout import BoxedTensor, Layout

SHAPE = (3, 5)


class Memory(bytearray):
    """Bytes that can be watched."""


class Away:
    """Tensors of which one at a time is in memory; the others are kept as bytes."""

    def __init__(self, values: dict[str, torch.Tensor]):
        self.kept = {name: value.numpy().tobytes() for name, value in values.items()}
        self.name, self.here, self.lent = "", torch.empty(0), []
        self.range = (2, 13)
        self.made: list[weakref.ref] = []
        self.most = 0

    def lend(self, name: str) -> BoxedTensor:
        if name != self.name:
            self.give_back()
            memory = Memory(self.kept[name])
            self.name, self.here = name, torch.frombuffer(memory, dtype=torch.float32)
            self.made.append(weakref.ref(memory))
            self.most = max(self.most, sum(ref() is not None for ref in self.made))
            self.lent.append(name)
        return BoxedTensor.from_flat(Layout(SHAPE), self.range, self.here)

    def give_back(self) -> None:
        if self.name:
            self.kept[self.name] = self.here.numpy().tobytes()
            self.here.fill_(float("nan"))  # nobody may read it any more
        self.name = ""

    def boxed(self, name: str) -> BoxedTensor:
        shapes = BoxedTensor.from_flat(
            Layout(SHAPE), self.range, torch.empty(self.range[1] - self.range[0], device="meta")
        )
        return replace(shapes, lend=lambda: self.lend(name))

    def state(self) -> dict[str, BoxedTensor]:
        return {name: self.boxed(name) for name in self.kept}

    def values(self) -> dict[str, torch.Tensor]:
        self.give_back()
        return {n: torch.frombuffer(bytearray(b), dtype=torch.float32) for n, b in self.kept.items()}


def away(factor: float = 1.0) -> Away:
    return Away({name: torch.arange(11.0) * factor + i for i, name in enumerate("abc")})


@pytest.mark.parametrize("later", [False, True])
def test_lent_values_are_saved_and_loaded(tmp_path, later):
    first = away()
    expected = first.values()
    saving = checkpoint.save(tmp_path, {**first.state(), "here": torch.ones(2)}, step=1, async_=later)
    path = saving.wait()
    assert first.lent == ["a", "b", "c"], "each once"
    other = away(factor=7.0)
    here = torch.zeros(2)
    checkpoint.load(path, {**other.state(), "here": here})
    assert here.tolist() == [1.0, 1.0]
    for values in (first.values(), other.values()):
        assert all(torch.equal(values[name], expected[name]) for name in "abc")
    flat = torch.full((15,), float("nan"))
    flat[2:13] = expected["b"]
    assert torch.equal(other.boxed("b").to_full().nan_to_num(-1), flat.view(SHAPE).nan_to_num(-1))


def test_nothing_is_lent_before_names_and_shapes_agree(tmp_path):
    path = checkpoint.save(tmp_path, away().state(), step=1).wait()
    other = away()
    with pytest.raises(CheckpointError, match="another model"):
        checkpoint.load(path, {**other.state(), "d": torch.zeros(2)})
    assert not other.lent


def test_contents_are_names_shapes_dtypes_and_values(tmp_path):
    state = {**away().state(), "half": torch.zeros(2, 3, dtype=torch.bfloat16), "step": 7}
    checkpoint.save(tmp_path, state, step=1)
    found = checkpoint.contents(tmp_path)
    full = (SHAPE, torch.float32)
    assert found.tensors == {"a": full, "b": full, "c": full, "half": ((2, 3), torch.bfloat16)}
    assert found.values == {"step": 7}
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoint.contents(tmp_path / "none")


def test_what_was_lent_is_let_go(tmp_path):
    """torch holds what it was given to write until the file is closed."""
    full = {name: torch.arange(15.0) + i for i, name in enumerate("abcdef")}
    source = Away(full)
    source.range = (0, 15)
    checkpoint.save(tmp_path, source.state(), step=1)
    assert len(source.made) == 6
    assert source.most <= 2
