"""Files of sequences are read or refused by place; clusters of an alignment beside loops over it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cai_apps.applications.protein.chemistry import GAP, LETTERS, UNKNOWN
from cai_apps.applications.protein.data import clusters
from cai_apps.applications.protein.data.clusters import MASK, Masking
from cai_apps.applications.protein.data.sequences import read_a3m, read_fasta, read_stockholm
from cai_mesh.errors import DataError


def letters(rows: np.ndarray) -> list[str]:
    return ["".join((LETTERS + "X-")[n] for n in row) for row in rows]


def test_an_a3m_file(tmp_path):
    path = tmp_path / "x.a3m"
    path.write_text(
        "#7\n>asked for\nACD\nEF\n>other\nA-DaaEx\n\n>again\nACDEF\n>rare\nBUZOX\n".replace("Ex", "EX")
    )
    found = read_a3m(path)
    assert found.names == ("asked for", "other", "rare")
    assert letters(found.residues) == ["ACDEF", "A-DEX", "DCEXX"]
    assert found.deletions.tolist() == [[0] * 5, [0, 0, 0, 2, 0], [0] * 5]
    assert (found.residues.dtype, found.residues[1, 4], found.residues[1, 1]) == (np.uint8, UNKNOWN, GAP)


def test_a_stockholm_file(tmp_path):
    path = tmp_path / "x.sto"
    path.write_text("# STOCKHOLM 1.0\n#=GF AU me\nq AC-DEF\na A.kDEF\n\nq GG\na G-\n//\n")
    found = read_stockholm(path)
    assert letters(found.residues) == ["ACDEFGG", "A-DEFG-"]
    assert found.deletions.tolist() == [[0] * 7, [0, 0, 1, 0, 0, 0, 0]]


def test_tabs_and_marks_of_missing_ends_in_stockholm(tmp_path):
    path = tmp_path / "x.sto"
    path.write_text("# STOCKHOLM 1.0\nq\tAC-DEF\na \t~C.DE~\n//\n")
    assert letters(read_stockholm(path).residues) == ["ACDEF", "-CDE-"]


@pytest.mark.parametrize(
    "text",
    [
        ">q\nACD\n>r\nA-D\n\0",  # ColabFold's and MMseqs2's
        "#3\t1\n>q\nACD\n>r\nA-D\n\0\n",
        "\ufeff>q\nACD\n>r\nA-D\n",
        "#3\t1\r\n>q\r\nACD\r\n>r\r\nA-D\r\n",
        "#3\n>q\nACD\n>r\nA-D\n",
    ],
)
def test_ordinary_a3m_files_of_other_tools(text, tmp_path):
    path = tmp_path / "x.a3m"
    path.write_bytes(text.encode())
    assert letters(read_a3m(path).residues) == ["ACD", "A-D"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#5,4\t1,1\n>101\t102\nACDEFGHIK\n", "several chains"),
        ("#5,4\n>101\t102\nACDEFGHIK\n", "several chains"),
        ("#3\t2\n>101\nACD\n", "several chains"),
        ("#3,3\t2,1\r\n>101\t102\r\nACDACD\r\n", "several chains"),
        (">q\nACD\n\0>r\nEFG\n\0", "several alignments"),
    ],
)
def test_alignments_of_several_chains_are_refused(text, said, tmp_path):
    path = tmp_path / "x.a3m"
    path.write_bytes(text.encode())
    with pytest.raises(DataError, match=said):
        read_a3m(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no sequence"),
        ("ACD\n", "does not begin with a name"),
        (">q\n\n", "the first sequence of .* is empty"),
        (">q\nAC1D\n", "got: +'1' at residue 3"),
        (">q\nA-CD\n", "got: +'-' at residue 2"),
        (">q\nACD\n>r\nACDE\n", r"got: +4 columns in sequence 2 \(r\)"),
        (">q\nACD\n>r\nA*D\n", r"got: +\* in r"),
    ],
)
def test_what_is_refused(text, said, tmp_path):
    path = tmp_path / "x.a3m"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        read_a3m(path)


def test_fasta(tmp_path):
    path = tmp_path / "x.fasta"
    path.write_text(">one and more\nAC\nDE\n>two\nF\n")
    assert read_fasta(path) == [("one and more", "ACDE"), ("two", "F")]


def drawn(sequences: int = 12, residues: int = 9):
    random = torch.Generator().manual_seed(0)
    rows = torch.randint(GAP + 1, (sequences, residues), generator=random)
    lost = torch.randint(4, (sequences, residues), generator=random).float()
    return rows, lost


def test_clusters_beside_loops():
    rows, lost = drawn()
    leading, others = rows[:4].clone(), rows[4:]
    leading[1, 2] = MASK
    nearest = clusters.nearest_of(leading, others)
    for other, found in zip(others, nearest, strict=True):
        agree = [
            sum(int(a == b != GAP) for a, b in zip(lead, other, strict=True)) for lead in leading.tolist()
        ]
        assert agree[int(found)] == max(agree)
    likeness, mean = clusters.summaries(leading, lost[:4], others, lost[4:], nearest)
    for number in range(4):
        own = [leading[number], *(other for other, n in zip(others, nearest, strict=True) if n == number)]
        own_lost = [lost[number], *(each for each, n in zip(lost[4:], nearest, strict=True) if n == number)]
        for place in range(rows.shape[1]):
            for kind in range(MASK + 1):
                share = sum(int(row[place]) == kind for row in own) / len(own)
                assert float(likeness[number, place, kind]) == pytest.approx(share, abs=1e-5)
            assert float(mean[number, place]) == pytest.approx(
                sum(float(e[place]) for e in own_lost) / len(own), abs=1e-5
            )


def test_a_draw(tmp_path):
    rows, lost = drawn()
    rows[0] = rows[0].clamp(max=19)
    alignment = clusters.Alignment(
        tuple("abcdefghijkl"), rows.numpy().astype(np.uint8), lost.numpy().astype(np.uint16)
    )
    one, same, other = (
        clusters.draw(alignment, 5, 4, Masking(), torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(one.features, same.features) and torch.equal(one.extra, same.extra)
    assert not torch.equal(one.true, other.true)
    for each in (one, other):
        assert each.features.shape == (5, 9, 49) and each.extra.shape == (4, 9, 25)
        assert torch.equal(each.true[0], rows[0])
        seen = each.features[..., : MASK + 1].argmax(-1)
        assert torch.equal(seen[~each.masked], each.true[~each.masked])
    first = one.extra[0]
    whose = next(i for i, row in enumerate(rows) if torch.equal(first[:, : MASK + 1].argmax(-1), row))
    torch.testing.assert_close(first[:, 23], lost[whose].clamp(max=1))
    torch.testing.assert_close(first[:, 24], torch.atan(lost[whose] / 3) * 2 / math.pi)


def test_how_much_is_masked():
    rows = torch.randint(20, (200, 50), generator=torch.Generator().manual_seed(3))
    profile = torch.zeros(50, GAP + 1)
    profile[:, 7] = 1
    seen, masked = clusters.mask(rows, profile, Masking(), torch.Generator().manual_seed(4))
    assert float(masked.float().mean()) == pytest.approx(0.15, abs=0.01)
    of_these = seen[masked]
    assert float((of_these == MASK).float().mean()) == pytest.approx(0.7, abs=0.04)
    assert float((of_these == rows[masked]).float().mean()) == pytest.approx(
        0.1 + 0.1 / 20 + 0.1 / 20, abs=0.03
    )
    assert float((of_these == 7).float().mean()) == pytest.approx(0.1 + 0.2 / 20, abs=0.03)
    assert torch.equal(seen[~masked], rows[~masked])
