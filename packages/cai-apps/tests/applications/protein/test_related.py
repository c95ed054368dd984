"""Which hits are templates, and why others are none; structures that are given are aligned with the query."""

from __future__ import annotations

import datetime
from dataclasses import replace

import gemmi
import numpy as np
import pytest
import torch
from small_hhr import hhr
from small_templates import SHIPPED

from cai_apps.applications.protein.chemistry import LETTERS
from cai_apps.applications.protein.data.hhr import read_hhr
from cai_apps.applications.protein.data.related import choose, drawn, given, placed, released
from cai_apps.applications.protein.data.sequences import numbers_of
from cai_apps.applications.protein.data.structures import read_chain
from cai_apps.applications.protein.data.templates import NOWHERE, features
from cai_mesh.errors import CaiError, DataError

FOUR = read_chain(SHIPPED / "4CUP.cif").sequence
ONE = read_chain(SHIPPED / "1A8O.cif").sequence


def other(sequence: str, share: float = 0.5, seed: int = 0) -> str:
    """A sequence with some residues exchanged."""
    random = np.random.default_rng(seed)
    return "".join(random.choice(list(LETTERS)) if random.random() < share else each for each in sequence)


QUERY = "GG" + other(FOUR[10:100]) + "PP"
"""Residue 2 of it lies beside residue 10 of the structure."""


def row(name="4CUP_A", start=2, end=92, leap=8, total=50.0):
    """A hit whose residues lie beside those of the structure `leap` further on."""
    own = FOUR[start + leap : end + leap]
    return name, QUERY[start:end], own, start + 1, start + leap + 1, total


def hits(tmp_path, *rows):
    (tmp_path / "hits.hhr").write_text(hhr(rows))
    return read_hhr(tmp_path / "hits.hhr")


def chosen(tmp_path, *rows, query=QUERY, folder=SHIPPED, **options):
    return choose(numbers_of(query, "query"), hits(tmp_path, *rows), folder, **options)


def test_a_hit_is_a_template(tmp_path):
    found = chosen(tmp_path, row())
    assert not found.dropped
    (template,) = found.templates
    assert template.chain.name == "4CUP_A"
    assert template.place.tolist() == [NOWHERE] * 2 + list(range(10, 100)) + [NOWHERE] * 2
    told = features(found.templates, len(QUERY), 4)
    assert told.there.tolist() == [[1, 0, 0, 0]]
    residues = told.angles[0, 0, :, :22].argmax(-1)[2:92]
    assert "".join(LETTERS[number] for number in residues) == FOUR[10:100]


def test_gaps_of_both_rows(tmp_path):
    one = QUERY[2:22] + "--" + QUERY[22:92]
    two = FOUR[10:60] + "--" + FOUR[60:100]
    place = chosen(tmp_path, ("4CUP_A", one, two, 3, 11, 50.0)).templates[0].place
    expected = np.full(len(QUERY), NOWHERE)
    expected[2:22] = np.arange(10, 30)
    expected[22:50] = np.arange(32, 60)
    expected[52:92] = np.arange(60, 100)
    assert place.tolist() == expected.tolist()


def test_another_numbering_is_aligned_anew(tmp_path):
    name, one, two, first, start, total = row()
    plain = chosen(tmp_path, row()).templates[0].place
    far = chosen(tmp_path, (name, one, two, first, start + 300, total)).templates[0].place
    assert far.tolist() == plain.tolist()
    changed = two[:7] + "W" + two[8:30] + "X" + two[31:]
    near = chosen(tmp_path, (name, one, changed, first, start, total)).templates[0].place
    assert near.tolist() == plain.tolist()
    moved = chosen(tmp_path, (name, one, two, first, 1, total)).templates[0].place
    assert moved.tolist() == plain.tolist()


def test_a_structure_of_another_sequence_is_refused(tmp_path):
    name, one, two, first, start, total = row()
    wrong = name, one, other(two, 0.2), first, start, total
    found = chosen(tmp_path, wrong, row())
    assert len(found.templates) == 1
    assert found.dropped[0][0].number == 1
    assert found.dropped[0][1].startswith("template mismatch: hit 1 (4CUP_A) is not of 4CUP_A")
    with pytest.raises(DataError, match=r"template mismatch: .*\n.*of 90 residues alike\n.*90%"):
        chosen(tmp_path, wrong, strict=True)
    nearly = name, one, other(two, 0.08), first, start, total
    assert len(chosen(tmp_path, nearly).templates) == 1


@pytest.mark.parametrize(
    ("hit", "options", "reason"),
    [
        (row(end=11), {}, "too short: 9 residues"),
        (
            ("4CUP_A", QUERY[2:7] + "-" * 20, FOUR[10:35], 3, 11, 1.0),
            {},
            "too short: 5 of 94 residues of the query",
        ),
        (row("PF00001"), {}, "PF00001 names no entry and chain"),
        (row("9ZZZ_A"), {}, "no structure of 9ZZZ in"),
        (row("4CUP_Z"), {}, "4CUP.cif has no chain Z of a protein"),
        (row("1A8O_A"), {}, "template mismatch"),
        (
            row(),
            {"newest": datetime.date(2014, 4, 1)},
            "4CUP.cif is too new got: 2014-04-02 expected: up to 2014-04-01",
        ),
    ],
)
def test_why_a_hit_is_none(hit, options, reason, tmp_path):
    found = chosen(tmp_path, hit, **options)
    assert not found.templates
    assert reason in found.dropped[0][1]


def test_a_hit_without_atoms(tmp_path):
    query = "G" * 9 + FOUR[105:117]
    (hit,) = hits(tmp_path, ("4CUP_A", query[9:21], FOUR[105:117], 10, 106, 9.0))
    chain = read_chain(SHIPPED / "4CUP.cif")
    assert placed(numbers_of(query, "query"), hit, chain).place[-1] == 116
    without = replace(chain, known=chain.known & (np.arange(117) < 100)[:, None])
    with pytest.raises(DataError, match=r"4CUP_A has no atoms beside the query\n.*12 residues"):
        placed(numbers_of(query, "query"), hit, without)


def test_the_query_itself_is_none(tmp_path):
    own = "1A8O_A", ONE, ONE, 1, 1, 60.0
    part = "1A8O_A", ONE[:66], ONE[:66], 1, 1, 50.0
    found = chosen(tmp_path, own, part, query=ONE)
    assert found.dropped == [(found.dropped[0][0], "the query itself")]
    assert found.dropped[0][0].number == 1
    assert (found.templates[0].place != NOWHERE).sum() == 66


def test_order_and_number(tmp_path):
    rows = [row(end=40 + at, total=float(total)) for at, total in enumerate((5, 9, 7, 9))]
    found = chosen(tmp_path, *rows)
    count = [int((each.place != NOWHERE).sum()) for each in found.templates]
    assert count == [38, 39, 40, 41]
    best = chosen(tmp_path, *rows, by_sum=True, most=3)
    assert [int((each.place != NOWHERE).sum()) for each in best.templates] == [39, 41, 40]
    assert not best.dropped
    assert len(chosen(tmp_path, *rows * 6).templates) == 20


def test_dates(tmp_path):
    assert released(SHIPPED / "4CUP.cif") == datetime.date(2014, 4, 2)
    assert len(chosen(tmp_path, row(), newest=datetime.date(2014, 4, 2)).templates) == 1
    text = (SHIPPED / "4CUP.cif").read_text()
    (tmp_path / "4cup.cif").write_text(text.replace("2014-04-02", "2014-April"))
    with pytest.raises(DataError, match="damaged date of release"):
        chosen(tmp_path, row(), folder=tmp_path, newest=datetime.date(2020, 1, 1), strict=True)
    (tmp_path / "4cup.cif").write_text(text.replace("2014-04-02", "?"))
    found = chosen(tmp_path, row(), folder=tmp_path, newest=datetime.date(2020, 1, 1))
    assert "no date of release" in found.dropped[0][1]
    assert len(chosen(tmp_path, row(), folder=tmp_path).templates) == 1
    (tmp_path / "4cup.cif").unlink()
    gemmi.read_structure(str(SHIPPED / "4CUP.cif")).write_pdb(str(tmp_path / "4CUP.pdb"))
    assert len(chosen(tmp_path, row(), folder=tmp_path).templates) == 1
    assert released(tmp_path / "4CUP.pdb") is None


def test_an_entry_of_dna_alone(tmp_path):
    structure = gemmi.read_structure(str(SHIPPED / "4CUP.cif"))
    structure.setup_entities()
    for residue in structure[0][0]:
        residue.name = "DA"
    structure.entities[0].full_sequence = ["DA"] * 117
    structure.entities[0].polymer_type = gemmi.PolymerType.Dna
    structure.make_mmcif_document().write_file(str(tmp_path / "4CUP.cif"))
    found = chosen(tmp_path, row(), folder=tmp_path)
    assert "4CUP.cif has no protein got: Dna" in found.dropped[0][1]
    for name, said in (("4CUP_A", "has no protein"), ("1ABC_A", "no structure of 1ABC")):
        with pytest.raises(CaiError, match=said):
            chosen(tmp_path, row(name), folder=tmp_path, strict=True)
    with pytest.raises(CaiError, match="no chain Z"):
        chosen(tmp_path, row("4CUP_Z"), strict=True)


def test_hits_of_another_query(tmp_path):
    changed = QUERY[:30] + ("W" if QUERY[30] != "W" else "A") + QUERY[31:]
    with pytest.raises(DataError, match=r"hit 1 \(4CUP_A\) is of another query\n.*at place 31\n"):
        chosen(tmp_path, row(), query=changed)
    with pytest.raises(DataError, match=r"is of another query\n.*at place 61\n"):
        chosen(tmp_path, row(), query=QUERY[:60])


def test_some_are_drawn():
    generator = torch.Generator().manual_seed(0)
    draws = [drawn(list("abcdef"), generator) for _ in range(2000)]
    count = np.bincount([len(each) for each in draws], minlength=5)
    np.testing.assert_allclose(count / 2000, [1 / 7, 1 / 7, 1 / 7, 1 / 7, 3 / 7], atol=0.03)
    assert all(len(set(each)) == len(each) for each in draws)
    firsts = [each[0] for each in draws if each]
    np.testing.assert_allclose(np.unique(firsts, return_counts=True)[1] / len(firsts), 1 / 6, atol=0.03)
    few = {len(drawn(list("ab"), generator)) for _ in range(50)}
    assert few == {0, 1, 2}
    assert drawn([], generator) == []


def test_given_structures():
    chains = [read_chain(SHIPPED / f"{name}.cif") for name in ("4CUP", "1A8O")]
    query = numbers_of(QUERY, "query")
    templates = given(query, chains[:1])
    expected = np.r_[[NOWHERE] * 2, np.arange(10, 100), [NOWHERE] * 2]
    assert (templates[0].place == expected).mean() > 0.95
    assert templates[0].chain is chains[0]
    gap = numbers_of(FOUR[:40] + FOUR[52:], "query")
    assert given(gap, chains)[0].place.tolist() == [*range(40), *range(52, 117)]
    assert len(given(gap, chains)) == 2
    bare = replace(chains[0], known=np.zeros_like(chains[0].known))
    with pytest.raises(DataError, match="4CUP_A has no atoms beside the query"):
        given(query, [bare])
