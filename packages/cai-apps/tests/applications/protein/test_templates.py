"""Features of templates are OpenFold's; they are cut with the piece, and what is padded changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_alphafold import PAIR, SMALL, drawn_frames, fill
from small_templates import RESIDUES, SHIPPED, given

from cai_apps.applications.protein.chemistry import GAP
from cai_apps.applications.protein.data.examples import Piece, example, stacked
from cai_apps.applications.protein.data.sequences import read_a3m
from cai_apps.applications.protein.data.structures import read_chain
from cai_apps.applications.protein.data.templates import NOWHERE, Template, features
from cai_apps.applications.protein.loss.whole import losses
from cai_apps.applications.protein.model.alphafold import AlphaFold
from cai_apps.applications.protein.model.template import TemplateSizes
from cai_mesh.errors import DataError

OPENFOLD = load_file(Path(__file__).with_name("openfold_templates.safetensors"))
WITH = replace(SMALL, template=TemplateSizes(blocks=1, sizes=PAIR, heads=2, head=8))


def test_features_are_openfolds():
    plain, vectors = (features(given(), RESIDUES, 2, vectors=each) for each in (False, True))
    expected = OPENFOLD["pair"].float()
    torch.testing.assert_close(plain.pair[0], expected, rtol=0, atol=0)
    expected[..., 84:87] = OPENFOLD["vectors"]
    torch.testing.assert_close(vectors.pair[0], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(plain.angles[0], OPENFOLD["angles"], rtol=0, atol=1e-5)
    torch.testing.assert_close(plain.known[0], OPENFOLD["known"].float())
    differ = (plain.angles[..., 22:36] - plain.angles[..., 36:50]).abs().amax((0, 1, 3))
    assert differ.max() > 0.1  # among the residues are some that look the same after half a turn


def test_templates_that_are_not_there():
    found, more = features(given(), RESIDUES, 1), features(given(), RESIDUES + 3, 4)
    assert found.there.tolist() == [[1]]
    assert more.there.tolist() == [[1, 1, 0, 0]]
    torch.testing.assert_close(more.pair[:, :1, :RESIDUES, :RESIDUES], found.pair)
    assert not more.pair[:, 2:].any()
    assert not more.pair[:, :, RESIDUES:].any()
    assert not more.known[:, 2:].any()
    assert more.angles[0, 2, 0, :22].argmax() == GAP
    away = np.array(given()[0].place) == NOWHERE
    assert away.any()
    assert not found.pair[0, 0, away].any()
    assert (found.angles[0, 0, away, GAP] == 1).all()


def test_where_a_structure_lies_says_nothing():
    """Torsions whose atoms are known, and all of the pair."""
    turn = drawn_frames(1, 3)
    rotation, shift = turn.rotation[0, 0].double().numpy(), turn.origin[0, 0].double().numpy()
    moved = [
        replace(
            each,
            chain=replace(
                each.chain, atoms=(each.chain.atoms @ rotation.T + shift) * each.chain.known[..., None]
            ),
        )
        for each in given()
    ]
    here, there = (features(each, RESIDUES, 2, vectors=True) for each in (given(), moved))
    torch.testing.assert_close(here.pair, there.pair, rtol=0, atol=1e-5)
    known = here.angles[..., 50:]
    assert 0.3 < known.mean() < 0.9
    torch.testing.assert_close(known, there.angles[..., 50:])
    for part in (slice(22, 36), slice(36, 50)):
        both = [each.angles[..., part].unflatten(-1, (7, 2)) * known[..., None] for each in (here, there)]
        torch.testing.assert_close(*both, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def chain():
    return read_chain(SHIPPED / "1A8O.cif")


def itself(chain) -> Template:
    return Template(chain, np.arange(len(chain.residue)))


def sample(chain, piece, templates=(), seed=1, rounds=1):
    alignment = read_a3m(SHIPPED / "1A8O.a3m")
    return example(alignment, chain, piece, rounds, torch.Generator().manual_seed(seed), templates)


def test_templates_are_cut_with_the_piece(chain):
    piece = Piece(residues=16, sequences=4, extra=4, templates=3)
    gaps = itself(chain)
    gaps.place[::3] = NOWHERE
    (first, second), truth = sample(chain, piece, [itself(chain), gaps], seed=2, rounds=2)
    start = int(first.index[0, 0])
    assert start > 0
    assert first.templates is second.templates
    found = first.templates
    assert found.pair.shape == (1, 3, 16, 16, 88)
    assert found.there.tolist() == [[1, 1, 0]]
    # a template of the truth itself has its residues, torsions and distances
    assert torch.equal(found.angles[0, 0, :, :21].argmax(-1), truth.residue[0])
    turns = truth.torsions[0] * truth.torsions_known[0, ..., None]
    known = found.angles[0, 0, :, 50:]
    torch.testing.assert_close(known, truth.torsions_known[0].float())
    torch.testing.assert_close(found.angles[0, 0, :, 22:36].unflatten(-1, (7, 2)) * known[..., None], turns)
    alpha = truth.groups.frames.origin[0, :, 0]
    beta = torch.where((truth.residue[0] == 7)[:, None], alpha, truth.atoms[0, :, 4])
    seen = 3.25 + 1.25 * found.pair[0, 0, :, :, :39].argmax(-1)
    apart = torch.cdist(beta, beta)
    near = apart > 3.25
    assert ((apart - seen)[near] > 0).all() and ((apart - seen)[near] < 1.25).all()
    away = gaps.place[start : start + 16] == NOWHERE
    assert torch.equal(found.angles[0, 1, :, GAP] == 1, torch.from_numpy(away))
    assert torch.equal(found.pair[0, 1][~away][:, ~away], found.pair[0, 0][~away][:, ~away])


def test_what_is_padded_changes_no_loss(chain):
    model = AlphaFold(WITH).eval()
    fill(model)
    length, of = len(chain.residue), [itself(chain)]

    def told(piece, templates):
        features, truth = sample(chain, piece, templates)
        with torch.no_grad():
            found = model(features)
            return losses(found, truth) | {"z": found.z[:, :length, :length], "m": found.m[:, :, :length]}

    plain = told(Piece(length, 8, 1, templates=1), of)
    for piece in (Piece(length, 8, 1, templates=3), Piece(length + 5, 8, 1, templates=1)):
        for name, value in told(piece, of).items():
            torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-5, msg=name)
    none = told(Piece(length, 8, 1), of)
    empty = told(Piece(length, 8, 1, templates=2), ())
    for name, value in empty.items():
        torch.testing.assert_close(value, none[name], rtol=1e-4, atol=1e-5, msg=name)
    assert (plain["z"] - none["z"]).abs().mean() > 1e-2
    assert (plain["m"] - none["m"]).abs().mean() > 1e-3


def test_samples_with_templates_stack(chain):
    piece = Piece(12, 4, 2, templates=2)
    samples = [
        sample(chain, piece, [itself(chain)] * count, seed)[0][0] for seed, count in enumerate((0, 1, 4))
    ]
    together = stacked(samples)
    assert together.templates.there.tolist() == [[0, 0], [1, 0], [1, 1]]
    assert together.templates.pair.shape == (3, 2, 12, 12, 88)
    assert stacked([sample(chain, replace(piece, templates=0))[0][0]] * 2).templates is None


def test_a_template_of_another_query(chain):
    with pytest.raises(DataError, match=r"template 1A8O_A is not of 1A8O_A\n.*places of 69 residues"):
        sample(chain, Piece(templates=1), [itself(chain).cut(slice(1, None))])
