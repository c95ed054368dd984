"""Hits of HHsearch come out of its output as they are in it; a damaged file is refused by line."""

from __future__ import annotations

import pytest
from small_hhr import hhr

from cai_apps.applications.protein.data.hhr import read_hhr
from cai_mesh.errors import DataError

LONG = "ACDEFGHIKLMNPQRSTVWY" * 5
HITS = [
    ("1ABC_A", "ACDE--FGHIKL", "ACDEWWF--IKL", 3, 7, 8.5),
    ("2xyz_AB", LONG[:40] + "-" + LONG[40:], LONG[:90] + "---" + LONG[92:], 1, 11, 60.25),
    ("PF00001.2", "MNPQ", "MNPQ", 2, 1, 2.0),
]


@pytest.fixture
def path(tmp_path):
    (tmp_path / "hits.hhr").write_text(hhr(HITS))
    return tmp_path / "hits.hhr"


def test_hits(path):
    first, second, third = read_hhr(path)
    assert (first.number, first.name, first.entry) == (1, "1ABC_A", ("1ABC", "A"))
    assert (first.probability, first.e_value, first.aligned, first.sum_probs) == (99.9, 1.2e-30, 8, 8.5)
    assert (first.query, first.template, first.sequence) == ("ACDE--FGHIKL", "ACDEWWF--IKL", "ACDEWWFIKL")
    pairs = [[2, 0], [3, 1], [4, 2], [5, 3], [6, 6], [9, 7], [10, 8], [11, 9]]
    assert first.pairs().tolist() == pairs
    assert first.template_start == 6
    assert second.entry == ("2XYZ", "AB")  # of two blocks
    assert (second.query, second.template) == HITS[1][1:3]
    assert (len(second.query), second.aligned, second.sum_probs) == (101, 97, 60.25)
    assert second.pairs()[-1].tolist() == [99, 97]
    assert third.entry is None


def test_no_hits(tmp_path):
    (tmp_path / "none.hhr").write_text(hhr([]))
    assert read_hhr(tmp_path / "none.hhr") == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("Query  ", "Wuery  ", "is no output of HHsearch, line 1\n"),
        (" No Hit", " No What", "is cut off, line 62\n.*no table of hits"),
        ("No 3\n", "Nothing\n", "is cut off, line 62\n.*alignments of 2 hits\n.*3, as its table has"),
        (">1ABC_A A", "1ABC_A A", "is damaged, line 12\n.*1ABC_A A protein"),
        ("Sum_probs=8.5", "Sum_probs=", "is damaged, line 13\n"),
        (
            "Probab=99.90  E-value=1.2e-30  Score=150.00  Aligned_cols=8",
            "Probab=high",
            "is damaged, line 13\n",
        ),
        ("   3 ACDE--FGHIKL", "   4 ACDE--FGHIKL", "is damaged, line 16\n.*10 letters from 4 to 12"),
        ("ACDEWWF--IKL   16", "ACDEWWF--IK   16", "is damaged, line 20\n.*9 letters from 7 to 16"),
        ("ACDEWWF--IKL   16", "ACDEWWF-IKL   16", "is damaged, line 20\n.*11 columns"),
        ("ACDEWWF--IKL   16", "ACDEWWF-9IKL   16", "is damaged, line 20\n.*\n.*NAME FIRST LETTERS LAST"),
        (
            "  91 ACDEFGHIKL---PQRSTVWY  108",
            "  93 ACDEFGHIKL---PQRSTVWY  110",
            "is damaged, line 44\n.*\n.*rows go on at 91",
        ),
        ("Aligned_cols=8 ", "Aligned_cols=9 ", "is damaged, line 20\n.*8 aligned columns"),
    ],
)
def test_damaged_files(path, old, new, said):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    with pytest.raises(DataError, match=said):
        read_hhr(path)


def test_files_cut_off(path):
    lines = path.read_text().splitlines(keepends=True)
    said = {
        0: "an empty file",
        1: "line 1\n",
        7: "line 7\n",
        12: "of 1 hits",
        17: "of 1 hits",
        52: "line 51\n",
    }
    for count, words in (said | {50: "line 50\n.*the end of the file", 54: "no row of the template"}).items():
        path.write_text("".join(lines[:count]))
        with pytest.raises(DataError, match=words):
            read_hhr(path)
    path.write_text("".join(lines[:36] + lines[48:]))
    with pytest.raises(DataError, match=r"line 34\n.*79 aligned columns\n.*97 of hit 2"):
        read_hhr(path)
    path.write_text(hhr(HITS[:1]).split("T Consensus")[0])
    with pytest.raises(DataError, match=r"line 14\n.*no row of the template"):
        read_hhr(path)
