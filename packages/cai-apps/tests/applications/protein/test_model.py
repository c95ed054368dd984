"""The model beside OpenFold's plain code, whose values are kept in a file, and what has to hold of any such model."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_alphafold import RESIDUES, features, model, random

from cai_apps.applications.protein import names
from cai_apps.applications.protein.chemistry import residues, tables
from cai_apps.applications.protein.model.alphafold import AlphaFold, Sizes
from cai_apps.applications.protein.model.frames import Frames, from_points, rotation_of, turned
from cai_apps.applications.protein.model.points import PointAttention

OPENFOLD = Path(__file__).with_name("openfold.safetensors")


@pytest.fixture(scope="module")
def kept() -> dict[str, torch.Tensor]:
    return load_file(OPENFOLD)


def values(found, mask):
    said = {
        name: getattr(found.scores, name) for name in ("plddt", "distances", "residues", "resolved", "errors")
    }
    said["residues"] = said["residues"] * mask
    return {"m": found.m * mask, "z": found.z, "s": found.s, "atoms": found.folded.atoms, **said}


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).abs().max() / want.abs().max().clamp_min(1e-12)).detach())


def test_values_and_gradients_are_those_of_openfold(kept):
    """Two rounds with templates, masked residues in all masks; every parameter's gradient by its norm and its ends."""
    ours, rounds = model(), [features(1), features(2)]
    found = values(ours(rounds), rounds[-1].alignment_mask[..., None])
    for name, value in found.items():
        assert relative(value, kept[name]) < 2e-6, name
    sum(value.square().mean() for value in found.values()).backward()
    largest = max(float(kept[f"gradient.{name}"][0]) for name, _ in ours.named_parameters())
    for name, param in ours.named_parameters():
        norm, first, last = kept[f"gradient.{name}"]
        assert param.grad is not None, name
        assert abs(float(param.grad.norm() - norm)) < 1e-4 * float(norm) + 1e-7 * largest, name
        for got, want in ((param.grad.flatten()[0], first), (param.grad.flatten()[-1], last)):
            assert abs(float(got - want)) < 1e-4 * float(norm) + 1e-7 * largest, name


def test_it_has_the_parameters_of_alphafold():
    with torch.device("meta"):
        whole = AlphaFold(Sizes())
    assert sum(param.numel() for param in whole.parameters()) == 93_237_338
    table = names.alphafold(48, 4, 2)
    theirs = {names.parameter(name, table) for name, _ in whole.named_parameters()}
    assert len(theirs) == len(list(whole.parameters()))
    with torch.device("meta"):
        without = AlphaFold(Sizes(template=None, errors=False))
    assert without.template is None and without.heads.errors is None


def test_residues_that_are_not_there_change_nothing():
    ours, given = model(), features(3)
    other = copy.deepcopy(given)
    for name in ("target", "alignment", "extra"):
        getattr(other, name)[..., -2:, :] += 5.0
    for tensor in (other.templates.angles, other.templates.pair):
        tensor[..., -2:, :] += 5.0
    other.templates.pair[..., -2:, :, :] += 5.0
    masked = [
        replace(each, **{n: getattr(each, n).clone() for n in ("alignment_mask", "extra_mask")})
        for each in (given, other)
    ]
    for each in masked:
        each.alignment_mask[..., -2:] = 0
        each.extra_mask[..., -2:] = 0
        each.templates.known[..., -2:] = 0
    with torch.no_grad():
        one, two = (ours([each, each]).folded.atoms[:, : RESIDUES - 2] for each in masked)
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-4)


def motion(seed: int) -> Frames:
    draw = random(seed)
    quaternion = torch.randn(4, generator=draw, dtype=torch.float64)
    return Frames(
        rotation_of(quaternion / quaternion.norm()), torch.randn(3, generator=draw, dtype=torch.float64) * 10
    )


def test_point_attention_does_not_see_how_the_whole_lies():
    torch.manual_seed(0)
    attention = PointAttention(16, 12, head=4, heads=3, qk_point_count=2, v_point_count=3).double()
    for param in attention.parameters():
        torch.nn.init.normal_(param, std=0.3)
    s, z = torch.randn(2, 6, 16, dtype=torch.float64), torch.randn(2, 6, 6, 12, dtype=torch.float64)
    points = torch.randn(3, 2, 6, 3, dtype=torch.float64)
    frames, mask = from_points(*points), torch.ones(2, 6, dtype=torch.float64)
    expected = attention(s, z, frames, mask)
    torch.testing.assert_close(attention(s, z, motion(1).then(frames), mask), expected)
    mirrored = from_points(*(points * torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)))
    assert (attention(s, z, mirrored, mask) - expected).abs().max() > 1e-3


def test_frames():
    one, two = motion(1), motion(2)
    x = torch.randn(3, generator=random(3), dtype=torch.float64)
    torch.testing.assert_close(one.then(two).apply(x), one.apply(two.apply(x)))
    torch.testing.assert_close(one.inverted(one.apply(x)), x)
    torch.testing.assert_close(one.rotation @ one.rotation.T, torch.eye(3, dtype=torch.float64))
    made = from_points(*(one.apply(p) for p in torch.eye(3, dtype=torch.float64)))
    torch.testing.assert_close(torch.linalg.det(made.rotation), torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(made.inverted(made.origin), torch.zeros(3, dtype=torch.float64))


def test_a_turn_is_a_product_of_quaternions():
    start = torch.tensor([0.5, 0.5, 0.5, 0.5], dtype=torch.float64)
    vector = torch.tensor([0.2, -0.1, 0.3], dtype=torch.float64)
    turn = torch.cat([torch.ones(1, dtype=torch.float64), vector])
    expected = rotation_of(start) @ rotation_of(turn / turn.norm())
    torch.testing.assert_close(rotation_of(turned(start, vector)), expected)


def test_ideal_residues_have_the_bonds_of_proteins():
    """Torsions of 0 put side chains together: neighbours on a chain of torsions lie a bond apart."""
    known = tables()
    assert known.there.sum() == sum(len(residue.atoms) for residue in residues()) == 167
    for number, residue in enumerate(residues()):
        places = dict(zip(residue.atoms, known.place[number], strict=False))
        assert 1.4 < float((places["N"] - places["CA"]).norm()) < 1.52, residue.name
        assert 1.5 < float((places["C"] - places["CA"]).norm()) < 1.55, residue.name
        for group in range(2, 4 + len(residue.chi)):
            turn = known.rotation[number, group]
            torch.testing.assert_close(turn @ turn.T, torch.eye(3, dtype=torch.float64))
