"""Samples of a chain: pieces, padding, draws. What is padded changes no loss; an alignment of another is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_alphafold import SMALL, helix

from cai_apps.applications.protein.chemistry import UNKNOWN, tables
from cai_apps.applications.protein.data.clusters import MASK
from cai_apps.applications.protein.data.examples import Piece, example, stacked
from cai_apps.applications.protein.data.sequences import Alignment
from cai_apps.applications.protein.data.structures import Chain
from cai_apps.applications.protein.loss.whole import losses
from cai_apps.applications.protein.model.alphafold import AlphaFold
from cai_apps.applications.protein.model.atoms import atoms_of, groups_of
from cai_mesh.errors import DataError

LENGTH, ROWS = 30, 9


def chain(resolution: float = 2.0) -> Chain:
    residue, frames, angles = helix(LENGTH)
    atoms = atoms_of(groups_of(frames, angles, residue), residue)[0].numpy()
    return Chain("helix_A", residue[0].numpy(), atoms, tables().there[residue[0]].numpy(), resolution)


def alignment(residue: np.ndarray) -> Alignment:
    random = np.random.default_rng(0)
    rows = np.where(random.random((ROWS, LENGTH)) < 0.3, random.integers(0, 22, (ROWS, LENGTH)), residue)
    rows[0] = residue
    lost = random.integers(0, 3, (ROWS, LENGTH))
    return Alignment(tuple(f"s{i}" for i in range(ROWS)), rows.astype(np.uint8), lost.astype(np.uint16))


def drawn(piece: Piece, rounds: int = 2, seed: int = 1, **changes):
    of = replace(chain(), **changes)
    return example(alignment(of.residue), of, piece, rounds, torch.Generator().manual_seed(seed))


def test_a_piece_is_the_same_in_all_rounds_and_in_the_truth():
    piece = Piece(residues=12, sequences=4, extra=3)
    (first, second), truth = drawn(piece)
    start = int(first.index[0, 0])
    assert 0 < start <= LENGTH - 12
    assert torch.equal(first.index, second.index)
    assert torch.equal(first.residue, truth.residue)
    assert truth.residue[0].tolist() == chain().residue[start : start + 12].tolist()
    np.testing.assert_allclose(truth.atoms[0].numpy(), chain().atoms[start : start + 12], atol=1e-5)
    assert not torch.equal(first.alignment, second.alignment)
    seen = second.alignment[..., : MASK + 1].argmax(-1)
    kept = truth.masked == 0
    assert torch.equal(seen[kept], truth.rows[kept])
    again = drawn(piece)
    assert torch.equal(again[0][1].alignment, second.alignment)
    assert {int(drawn(piece, seed=seed)[0][0].index[0, 0]) for seed in range(20)} > {start}


def test_what_is_padded_is_masked_and_changes_no_loss():
    torch.manual_seed(0)
    model = AlphaFold(SMALL).eval()
    small, large = Piece(LENGTH, ROWS, 1), Piece(LENGTH + 7, ROWS + 3, 5)
    found = []
    for piece in (small, large):
        given, truth = drawn(piece)
        with torch.no_grad():
            found.append(losses(model(given), truth))
        assert given[0].mask.sum() == LENGTH
        assert given[0].alignment_mask.sum() == LENGTH * ROWS
    assert int(truth.residue[0, -1]) == UNKNOWN
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_samples_stack():
    piece = Piece(16, 4, 3)
    samples = [drawn(piece, seed=seed) for seed in (1, 2)]
    truth = stacked([each[1] for each in samples])
    rounds = [stacked([each[0][at] for each in samples]) for at in range(2)]
    assert truth.atoms.shape == (2, 16, 14, 3)
    assert truth.groups.frames.rotation.shape == (2, 16, 8, 3, 3)
    assert rounds[0].alignment.shape == (2, 4, 16, 49)
    torch.manual_seed(0)
    model = AlphaFold(SMALL).eval()
    with torch.no_grad():
        together = losses(model(rounds), truth)
        alone = [losses(model(given), own) for given, own in samples]
    for name, value in together.items():
        torch.testing.assert_close(
            value, torch.cat([each[name] for each in alone]), rtol=1e-4, atol=1e-5, msg=name
        )


def test_confidence_is_learned_from_fine_structures_alone():
    assert [float(drawn(Piece(8, 2, 1), resolution=each)[1].fine) for each in (0.0, 2.0, 3.5)] == [0, 1, 0]
    clamped = [float(drawn(Piece(8, 2, 1), rounds=1, seed=seed)[1].clamped) for seed in range(60)]
    assert 0.7 < sum(clamped) / len(clamped) < 1


def test_an_alignment_of_another_chain():
    of = chain()
    other = of.residue.copy()
    other[4] = (other[4] + 1) % 20
    with pytest.raises(DataError, match="another residue at place 5, and 0 more"):
        example(alignment(other), of, Piece(), 1, torch.Generator())
    longer = replace(of, residue=np.append(of.residue, 0))
    with pytest.raises(DataError, match="30 residues in its first sequence"):
        example(alignment(of.residue), longer, Piece(), 1, torch.Generator())
